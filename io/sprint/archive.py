"""The container of Sprint/RASR caches: header, file table, names and stored bytes.

Follows docs/sprint-format.md, section 1, and with it RASR's C++ reader: sizes come from the file
table, the first of several entries with one name counts, an entry with a checksum is unreadable.
"""

from __future__ import annotations

from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

import numpy as np
import xxhash

from ..errors import MissingSequenceError, SourceFormatError
from . import recovery
from .mapping import HEADER_BYTES, close_map, gather, inflate, located, open_map
from .table import PAYLOAD_OFFSET, EntryTable, concatenate_names, read_table

if TYPE_CHECKING:
    import pyarrow as pa

ATTRIBUTES_SUFFIX = b".attribs"
# Deflate makes at most 258 bytes of 2 bits.
_MAX_EXPANSION = 1032
Recover = bool | Literal["rasr", "force"]


class EntryReader:
    """What archives in a file and archives in a folder have in common: named entries.

    Attributes:
        path: the file or folder.
        table: all entries.
    """

    path: str
    encoding: str
    table: EntryTable

    def __len__(self) -> int:
        return len(self.table)

    @cached_property
    def sequences(self) -> np.ndarray:
        """int64, the entries that are no `.attribs`, in table order."""
        return np.flatnonzero(~self.table.ends_with(ATTRIBUTES_SUFFIX))

    @cached_property
    def names(self) -> pa.StringArray:
        """The decoded names of all entries."""
        return self.table.decode(self.encoding, self.path)

    def find(self, name: str) -> int:
        """The entry of that name.

        Raises:
            MissingSequenceError: if there is none.
        """
        try:
            return self._by_name[name]
        except KeyError:
            raise MissingSequenceError("there is no such entry", self.path, name) from None

    def payload(self, entry: int) -> memoryview | bytes:
        """The uncompressed data of one entry.

        Raises:
            SourceFormatError: if the entry is damaged, naming it.
        """
        raise NotImplementedError

    def attributes(self, entry: int) -> bytes | None:
        """The flow attributes (XML) that were stored for an entry, or None."""
        name = self.table.name(entry) + ATTRIBUTES_SUFFIX
        found = self._by_raw_name.get(name)
        return None if found is None else bytes(self.payload(found))

    def label(self, entry: int) -> str:
        """The name of an entry for messages: bytes that do not decode are escaped."""
        return _text(self.table.name(entry), self.encoding)

    @cached_property
    def _by_name(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.names.to_pylist())}

    @cached_property
    def _by_raw_name(self) -> dict[bytes, int]:
        return {self.table.name(i): i for i in range(len(self.table))}


class Archive(EntryReader):
    """A single archive file, mapped read-only.

    Args:
        path: local file.
        encoding: of the names.
        recover: what to do with an archive that was never closed, so that it has no file table.
            False refuses it. True scans the file and keeps every intact entry. "rasr" scans as
            RASR does, with its quirks. "force" scans even if there is a table, for archives
            whose table is damaged.
        ignore_checksum: read entries whose checksum field is not 0, which RASR refuses.
        ignore_gzip_trailer: do not verify CRC and length of compressed entries; RASR never does.

    Attributes:
        table: all entries.
        complete: whether the archive was closed, so that `table` is what was written.
        lost: what a scan could not recover, each with its name ("" if unknown) and the reason.

    Raises:
        SourceNotFoundError: if there is no such file.
        SourceFormatError: if the file is no archive, or its table is damaged.
    """

    def __init__(
        self,
        path: str,
        *,
        encoding: str = "utf-8",
        recover: Recover = True,
        ignore_checksum: bool = False,
        ignore_gzip_trailer: bool = False,
    ) -> None:
        self.path = str(path)
        self.encoding = encoding
        self._ignore_checksum = ignore_checksum
        self._check_trailer = not ignore_gzip_trailer
        self.data = open_map(self.path)
        self.lost: tuple[tuple[str, SourceFormatError], ...] = ()
        try:
            self.complete = self.data[HEADER_BYTES - 1] != 0
            table = (
                self._recover(recover)
                if self._must_scan(recover)
                else read_table(self.data, self.path)
            )
            self.table = table.select(table.first_of_each_name())
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Unmaps the file; views that are still in use keep it mapped until they are gone."""
        close_map(self.data)

    @cached_property
    def fingerprint(self) -> str:
        """Hexadecimal xxh3_128 over what tells where every entry is, not over the payload."""
        hasher = xxhash.xxh3_128(self.data[:HEADER_BYTES])
        columns = ("names", "name_offset", "name_position", "payload", "size", "compressed")
        for column in columns:
            hasher.update(np.ascontiguousarray(getattr(self.table, column)))
        return hasher.hexdigest()

    def payload(self, entry: int) -> memoryview | bytes:
        """The uncompressed data of one entry; a view of the map if it is not compressed.

        Raises:
            SourceFormatError: if the entry is damaged, naming it.
        """
        start = int(self.table.payload[entry])
        size, compressed = int(self.table.size[entry]), int(self.table.compressed[entry])
        for error in self.damage(np.array([entry])).values():
            raise error
        if not compressed:
            return memoryview(self.data)[start : start + size]
        stored = memoryview(self.data)[start : start + compressed]
        try:
            return inflate(stored, size, check_trailer=self._check_trailer)
        except SourceFormatError as error:
            raise located(error, self.path, self.label(entry), start, raw=False) from error

    def damage(
        self, entries: np.ndarray, checksum: np.ndarray | None = None
    ) -> dict[int, SourceFormatError]:
        """The damaged ones of some entries, as far as their headers tell: row -> error.

        Args:
            entries: int64.
            checksum: uint32, the four bytes in front of each payload, if they were read already.
        """
        table, total = self.table, len(self.data)
        begin, stored = table.payload[entries], table.stored[entries]
        outside = (begin < HEADER_BYTES + PAYLOAD_OFFSET) | (begin + stored > total)
        if checksum is None:
            checksum = gather(self.data, np.where(outside, 0, begin - 4), 4).view("<u4")[:, 0]
        marked = (checksum != 0) & ~outside & (not self._ignore_checksum)
        most = _MAX_EXPANSION * table.compressed[entries]
        too_large = (table.compressed[entries] != 0) & (table.size[entries] > most) & ~outside
        errors = {}
        for row in np.flatnonzero(too_large).tolist():
            errors[row] = SourceFormatError(
                "the compressed data cannot hold what the entry claims",
                self.path,
                self.label(int(entries[row])),
                int(begin[row]),
                f"up to {int(most[row])} bytes",
                str(int(table.size[entries[row]])),
            )
        for row in np.flatnonzero(outside).tolist():
            errors[row] = SourceFormatError(
                "the entry is not inside the file",
                self.path,
                self.label(int(entries[row])),
                int(begin[row]),
                f"{int(stored[row])} bytes",
                f"{total} bytes in the file",
            )
        for row in np.flatnonzero(marked).tolist():
            errors[row] = SourceFormatError(
                "the entry has a checksum, which marks it as unreadable",
                self.path,
                self.label(int(entries[row])),
                int(begin[row]) - 4,
                "0",
                str(int(checksum[row])),
            )
        return errors

    def _must_scan(self, recover: Recover) -> bool:
        if recover == "force":
            return True
        if self.complete:
            return False
        if recover is False:
            raise SourceFormatError(
                "the archive has no file table: its writer crashed or is still running",
                self.path,
                position=HEADER_BYTES - 1,
                hint="Write it again, or take what is intact: --on_error=skip (recover=True).",
            )
        return True

    def _recover(self, recover: Recover) -> EntryTable:
        self.complete = False
        if recover == "rasr":
            found, lost = recovery.scan_like_rasr(self.data, self.path)
        else:
            found, lost = recovery.scan_intact(self.data, self.path)
        self.lost = tuple((_text(name, self.encoding), error) for name, error in lost)
        rows = np.array(found, np.int64).reshape(len(found), 4)
        names, name_offset = concatenate_names([entry.name(self.data) for entry in found])
        return EntryTable(
            names=names,
            name_offset=name_offset,
            name_position=rows[:, 0],
            payload=rows[:, 1],
            size=rows[:, 2],
            compressed=rows[:, 3],
        )


def _text(name: bytes, encoding: str) -> str:
    return name.decode(encoding, "backslashreplace")
