"""Writes archives that RASR, RETURNN and this package read: docs/sprint-format.md, section 1."""

from __future__ import annotations

import contextlib
import os
import posixpath
import struct
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

import numpy as np

from ..errors import (
    DuplicateSequenceError,
    OutputError,
    OutputExistsError,
    ShapeMismatchError,
)
from ..storage import output_errors, publish, temporary_name
from .alignment import DATATYPE, Alignment
from .archive import ATTRIBUTES_SUFFIX
from .encode import (
    compress,
    encode_alignment,
    encode_attributes,
    encode_features,
    encode_string,
)
from .mapping import HEADER_BYTES, MAGIC
from .recovery import END_TAG, START_TAG

_MAX_ENTRY = 2**32 - 1


class ArchiveWriter:
    """Writes one archive. It appears under its name when it is complete, or not at all.

    Use it as a context manager: an exception inside discards what was written.

    Args:
        path: local file.
        compressed: store entries as gzip members.
        encoding: of the names.
        overwrite: replace an existing file.

    Raises:
        OutputExistsError: if there is such a file and `overwrite` is false.
        OutputError: if it cannot be written.
    """

    def __init__(
        self,
        path: str,
        *,
        compressed: bool = False,
        encoding: str = "utf-8",
        overwrite: bool = False,
    ) -> None:
        self.path = str(path)
        self._compressed = compressed
        self._encoding = encoding
        if not overwrite and os.path.exists(self.path):
            raise OutputExistsError("the archive exists already", self.path)
        self._temporary = temporary_name(self.path)
        self._rows: dict[bytes, tuple[int, int, int]] = {}
        with output_errors(self.path):
            self._file = open(self._temporary, "wb")  # noqa: SIM115
        # Like RASR: 0 as long as there is no table, so that a crash can be recovered.
        self._write(MAGIC + b"\0")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def add(self, name: str, data: bytes) -> None:
        """Adds an entry with any bytes.

        Raises:
            DuplicateSequenceError: if there is such an entry.
            OutputError: if RASR refuses such a name, or the data has 4 GiB or more.
        """
        raw = self._checked_name(name)
        if len(data) > _MAX_ENTRY:
            raise OutputError(
                "an entry must be smaller than 4 GiB", self.path, name, found=f"{len(data)} bytes"
            )
        stored = compress(data) if self._compressed else data
        stored_size = len(stored) if self._compressed else 0
        head = START_TAG + encode_string(raw)
        with output_errors(self.path):
            position = self._file.tell() + len(head)
        self._write(head + struct.pack("<III", len(data), stored_size, 0))
        self._write(stored)
        self._write(END_TAG)
        self._rows[raw] = position, len(data), stored_size

    def add_features(
        self,
        name: str,
        frames: np.ndarray | Sequence[np.ndarray],
        times: np.ndarray | None = None,
        attributes: Mapping[str, str] | None = None,
    ) -> None:
        """Adds feature vectors, and before them their attributes with the data type.

        Args:
            name: the tag.
            frames, times: as for `encode_features`.
            attributes: more attributes, for example sample-rate.

        Raises:
            ShapeMismatchError, UnsupportedPayloadError: if there is no such payload.
            DuplicateSequenceError, OutputError: as `add`.
        """
        self._add_flow(name, *encode_features(frames, times), attributes)

    def add_alignment(
        self, name: str, alignment: Alignment, attributes: Mapping[str, str] | None = None
    ) -> None:
        """Adds an alignment, and before it its attributes with the data type.

        Raises:
            DuplicateSequenceError, OutputError: as `add`.
        """
        self._add_flow(name, DATATYPE, encode_alignment(alignment), attributes)

    def close(self) -> None:
        """Writes the file table and publishes the archive. Nothing happens a second time."""
        if self._file.closed:
            return
        try:
            with output_errors(self.path):
                self._write_table()
                self._file.seek(HEADER_BYTES - 1)
                self._file.write(b"\1")
                self._file.flush()
                os.fsync(self._file.fileno())
                self._file.close()
            publish(self._temporary, self.path)
        finally:
            self.abort()

    def abort(self) -> None:
        """Discards what was written and not published."""
        with contextlib.suppress(OSError):
            self._file.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._temporary)

    def _add_flow(
        self, name: str, datatype: str, data: bytes, attributes: Mapping[str, str] | None
    ) -> None:
        self._checked_name(name)
        xml = encode_attributes({"datatype": datatype, **(attributes or {})})
        self.add(name + ATTRIBUTES_SUFFIX.decode(), xml)
        self.add(name, data)

    def _checked_name(self, name: str) -> bytes:
        try:
            raw = name.encode(self._encoding)
        except UnicodeEncodeError:
            raise OutputError(f"the name is not {self._encoding}", self.path, name) from None
        if not is_valid_name(name):
            raise OutputError(
                "RASR does not read an entry of this name",
                self.path,
                name,
                hint="It must be a normalised path: no '//', './', 'x/..', and no '/' at the end.",
            )
        if raw in self._rows:
            raise DuplicateSequenceError("there is such an entry already", self.path, name)
        return raw

    def _write_table(self) -> None:
        table = self._file.tell()
        self._file.write(struct.pack("<I", len(self._rows)))
        for name, row in self._rows.items():
            self._file.write(encode_string(name) + struct.pack("<QII", *row))
        holes = self._file.tell()
        self._file.write(struct.pack("<IQQ", 0, holes, table))

    def _write(self, data: bytes) -> None:
        with output_errors(self.path):
            self._file.write(data)


def is_valid_name(name: str) -> bool:
    """Whether RASR accepts the name of an entry: it must be a normalised relative or full path."""
    if not name or name.startswith("//"):
        return False
    return name == posixpath.normpath(name) and name != "."


def hard_alignment(
    labels: np.ndarray, *, emission: bool = False, alphabet: Mapping[int, str] | None = None
) -> Alignment:
    """An alignment with one label per frame, from frame 0 on.

    Args:
        labels: integers [frames]: allophone states, or classes if `emission`.
        alphabet: names of the labels, stored if given.

    Raises:
        ShapeMismatchError: if the labels are anything else.
    """
    count = len(labels)
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise ShapeMismatchError(
            "labels must be a vector of integers", found=f"{labels.dtype} of shape {labels.shape}"
        )
    if count and not -(2**31) <= int(labels.min()) <= int(labels.max()) < 2**32:
        raise ShapeMismatchError("labels must have 32 bits", found=f"up to {labels.max()}")
    return Alignment(
        time=np.arange(count, dtype=np.uint32),
        label=labels.astype(np.int32),
        weight=np.ones(count),
        emission=np.array([emission]),
        packet_offset=np.array([0, count]),
        packet_times=np.array([[0.0, count * 0.01]]),
        alphabet=None if alphabet is None else dict(alphabet),
    )
