"""Archives in a folder, one file per entry: docs/sprint-format.md, section 1.6."""

from __future__ import annotations

import os
import struct
from typing import BinaryIO

import numpy as np

from ..errors import SourceFormatError, SourceNotFoundError
from .archive import Archive, EntryReader
from .mapping import inflate, located
from .table import EntryTable, concatenate_names

_GZIP_MAGIC = b"\x1f\x8b"


class DirectoryArchive(EntryReader):
    """A folder as an archive: names are paths in it, sorted by their bytes.

    A file that starts with 1f 8b counts as compressed, and its last 4 bytes as its size.

    Args:
        path: the folder.
        encoding: of the names.

    Attributes:
        table: all entries; `payload` is 0, since every file has its own positions.

    Raises:
        SourceNotFoundError: if there is no such folder.
        SourceFormatError: if a file cannot be read.
    """

    def __init__(self, path: str, *, encoding: str = "utf-8") -> None:
        self.path = str(path)
        self.encoding = encoding
        if not os.path.isdir(self.path):
            raise SourceNotFoundError("there is no such folder", self.path)
        names = sorted(_list_files(os.fsencode(self.path)))
        sizes = np.array([self._sizes(name) for name in names], np.int64).reshape(len(names), 2)
        joined, name_offset = concatenate_names(names)
        self.table = EntryTable(
            names=joined,
            name_offset=name_offset,
            name_position=np.zeros(len(names), np.int64),
            payload=np.zeros(len(names), np.int64),
            size=sizes[:, 0],
            compressed=sizes[:, 1],
        )

    def payload(self, entry: int) -> bytes:
        """The uncompressed data of one entry.

        Raises:
            SourceFormatError: if the file cannot be read, or its compressed data is damaged.
        """
        data = self._read(self.table.name(entry))
        if not self.table.compressed[entry]:
            return data
        try:
            return inflate(data, int(self.table.size[entry]))
        except SourceFormatError as error:
            raise located(error, self.path, self.label(entry), 0, raw=False) from error

    def _sizes(self, name: bytes) -> tuple[int, int]:
        """Bytes of the uncompressed data, and of the compressed data or 0."""
        with self._open(name) as file:
            size = os.fstat(file.fileno()).st_size
            if file.read(2) != _GZIP_MAGIC:
                return size, 0
            file.seek(-min(size, 4), os.SEEK_END)
            return struct.unpack("<I", file.read(4).rjust(4, b"\0"))[0], size

    def _read(self, name: bytes) -> bytes:
        with self._open(name) as file:
            return file.read()

    def _open(self, name: bytes) -> BinaryIO:
        try:
            return open(os.path.join(os.fsencode(self.path), name), "rb")
        except OSError as error:
            raise SourceFormatError(
                f"the entry cannot be read: {error.strerror}", self.path, os.fsdecode(name)
            ) from error


def open_archive(path: str, *, encoding: str = "utf-8") -> Archive | DirectoryArchive:
    """Opens an archive, whether it is a file or, like in RASR, a folder."""
    if os.path.isdir(path) or str(path).endswith("/"):
        return DirectoryArchive(path, encoding=encoding)
    return Archive(path, encoding=encoding)


def _list_files(folder: bytes) -> list[bytes]:
    def fail(error: OSError) -> None:
        raise SourceFormatError(
            f"a folder cannot be listed: {error.strerror}", os.fsdecode(error.filename)
        ) from error

    return [
        os.path.relpath(path, folder)
        for parent, _, names in os.walk(folder, onerror=fail)
        for name in names
        if os.path.isfile(path := os.path.join(parent, name))
    ]
