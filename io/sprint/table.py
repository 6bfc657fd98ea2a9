"""The file table of an archive as columns: docs/sprint-format.md, section 1.4."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..errors import SourceFormatError
from .mapping import HEADER_BYTES

if TYPE_CHECKING:
    import pyarrow as pa

PAYLOAD_OFFSET = 12

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_ENTRY_BYTES = 20
_TRAILER_BYTES = 16
# Most tables are smaller, and are there with the first request.
_TABLE_GUESS_BYTES = 1 << 20
_FIELDS = np.dtype([("position", "<u8"), ("size", "<u4"), ("compressed", "<u4")])


@dataclass(frozen=True)
class EntryTable:
    """The entries of an archive as columns, in the order of the file table.

    Attributes:
        names: uint8, the bytes of all names back to back.
        name_offset: int64 [n + 1], where each name starts in `names`.
        name_position: int64 [n], where the file table (or a scanned entry) has the name.
        payload: int64 [n], first byte of the stored data: 12 behind the position in the table.
        size: int64 [n], bytes of the uncompressed data.
        compressed: int64 [n], bytes of the compressed data; 0 if it is not compressed.
    """

    names: np.ndarray
    name_offset: np.ndarray
    name_position: np.ndarray
    payload: np.ndarray
    size: np.ndarray
    compressed: np.ndarray

    def __len__(self) -> int:
        return len(self.payload)

    @property
    def stored(self) -> np.ndarray:
        """int64 [n], bytes of the data in the file."""
        return np.where(self.compressed != 0, self.compressed, self.size)

    def name(self, entry: int) -> bytes:
        """The name of one entry, undecoded."""
        return self.names[self.name_offset[entry] : self.name_offset[entry + 1]].tobytes()

    def select(self, keep: np.ndarray) -> EntryTable:
        """The entries where the boolean array is true."""
        if keep.all():
            return self
        lengths = np.diff(self.name_offset)
        return EntryTable(
            names=self.names[np.repeat(keep, lengths)],
            name_offset=offsets_of(lengths[keep]),
            name_position=self.name_position[keep],
            payload=self.payload[keep],
            size=self.size[keep],
            compressed=self.compressed[keep],
        )

    def ends_with(self, suffix: bytes) -> np.ndarray:
        """bool [n], whether each name ends in the suffix."""
        result = np.diff(self.name_offset) >= len(suffix)
        end = self.name_offset[1:][result]
        for back, byte in enumerate(reversed(suffix), 1):
            matches = self.names[end - back] == byte
            result[result] = matches
            end = end[matches]
        return result

    def decode(self, encoding: str, path: str) -> pa.StringArray:
        """All names as Arrow strings.

        Raises:
            SourceFormatError: naming the first byte that the encoding does not have.
        """
        import pyarrow as pa

        if not _is_utf8(encoding):
            texts = [self._decode_one(i, encoding, path).encode() for i in range(len(self))]
            return _binary(*concatenate_names(texts)).cast(pa.string())
        try:
            return _binary(self.names, self.name_offset).cast(pa.string())
        except pa.ArrowInvalid:
            for entry in range(len(self)):
                self._decode_one(entry, encoding, path)
            raise

    def first_of_each_name(self) -> np.ndarray:
        """bool [n], false where an earlier entry has the same name."""
        codes = _binary(self.names, self.name_offset).dictionary_encode().indices
        codes = np.frombuffer(codes.buffers()[1], np.int32, len(codes))
        highest = np.maximum.accumulate(codes)
        return np.diff(highest, prepend=np.int32(-1)) > 0

    def _decode_one(self, entry: int, encoding: str, path: str) -> str:
        name = self.name(entry)
        try:
            return name.decode(encoding)
        except UnicodeDecodeError as error:
            raise SourceFormatError(
                f"the name of entry {entry} is not {encoding}",
                path,
                repr(name),
                int(self.name_position[entry]) + error.start,
                hint="Give the encoding that the archive was written with.",
            ) from None


def read_table(data: mmap.mmap, path: str) -> EntryTable:
    """Parses the file table.

    Raises:
        SourceFormatError: if it is damaged or incomplete, naming the byte.
    """
    # Only the lengths of names must be followed one by one; all else is masks of bytes.
    starts, end = _walk_table(data, path)
    begin = int(starts[0]) if len(starts) else end
    lengths = np.diff(starts, append=end) - _ENTRY_BYTES
    if len(lengths) and lengths.min() == 0:
        raise SourceFormatError(
            "an entry in the file table has no name",
            path,
            position=int(starts[np.argmin(lengths)]),
        )
    pieces = np.empty((len(starts), 3), np.int64)
    pieces[:] = (_U32.size, 0, _FIELDS.itemsize)
    pieces[:, 1] = lengths
    kind = np.repeat(np.tile(np.arange(3, dtype=np.int8), len(starts)), pieces.ravel())
    raw = np.frombuffer(data, np.uint8, end - begin, begin)
    fields = raw[kind == 2].view(_FIELDS)
    # A position near 2**64 must not turn into a small negative number.
    position = np.minimum(fields["position"], np.uint64(2**62)).astype(np.int64)
    return EntryTable(
        names=raw[kind == 1],
        name_offset=offsets_of(lengths),
        name_position=starts + _U32.size,
        payload=position + PAYLOAD_OFFSET,
        size=fields["size"].astype(np.int64),
        compressed=fields["compressed"].astype(np.int64),
    )


def fetch_table(data: mmap.mmap, fetch: Callable[..., None], scan: bool) -> None:
    """Has the file table fetched into a file with holes, whose header is there already.

    Args:
        data: the map of the file.
        fetch: called with the first byte and the end of what is needed.
        scan: whether all is needed of an archive without a table.
    """
    total = len(data)
    if not data[HEADER_BYTES - 1]:
        fetch(0, total if scan else 0)
        return
    fetch(max(0, total - _TABLE_GUESS_BYTES), total)
    if total >= _TRAILER_BYTES:
        fetch(min(_U64.unpack_from(data, total - 8)[0], total), total)


def _walk_table(data: mmap.mmap, path: str) -> tuple[np.ndarray, int]:
    """int64 positions of the table's entries, and where the last one ends."""
    total = len(data)
    table_end = total - _TRAILER_BYTES
    if table_end < HEADER_BYTES + 4:
        raise SourceFormatError("the archive is too short for a file table", path, None, total)
    (table,) = _U64.unpack_from(data, total - 8)
    if not HEADER_BYTES <= table <= table_end - 4:
        raise _bad_table(
            path,
            "the last 8 bytes do not point to a file table",
            total - 8,
            f"{HEADER_BYTES} to {table_end - 4}",
            str(table),
        )
    (count,) = _U32.unpack_from(data, table)
    room = (table_end - table - 4) // (_ENTRY_BYTES + 1)
    if count > room:
        raise _bad_table(
            path, "the file table has no room for its entries", table, f"up to {room}", str(count)
        )
    starts, position = [], table + 4
    unpack = _U32.unpack_from
    last = table_end - _ENTRY_BYTES
    for _ in range(count):
        if position > last:
            raise _bad_table(
                path, f"the file table ends before entry {len(starts)} of {count}", position
            )
        starts.append(position)
        position += _ENTRY_BYTES + unpack(data, position)[0]
    _check_holes(data, path, position, table_end)
    return np.array(starts, np.int64), position


def _check_holes(data: mmap.mmap, path: str, position: int, table_end: int) -> None:
    """The table of holes must fit. RETURNN's writer has none: its 0 is part of the trailer."""
    end = len(data)
    if position > table_end:
        raise _bad_table(path, "an entry reaches behind the file table", position)
    (holes,) = _U32.unpack_from(data, position)
    room = (end - position - 4) // 12
    if holes > room:
        raise _bad_table(
            path, "the table of holes has no room for them", position, f"up to {room}", str(holes)
        )


def _bad_table(
    path: str, what: str, position: int, expected: str | None = None, found: str | None = None
) -> SourceFormatError:
    hint = "The archive is damaged or incomplete; recover='force' reads its intact entries."
    return SourceFormatError(what, path, None, position, expected, found, hint)


def offsets_of(lengths: np.ndarray) -> np.ndarray:
    """int64 [n + 1], where pieces of the given lengths start and end."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def concatenate_names(names: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """The columns `names` and `name_offset` of an `EntryTable`."""
    lengths = np.array([len(name) for name in names], np.int64)
    return np.frombuffer(b"".join(names), np.uint8), offsets_of(lengths)


def _binary(names: np.ndarray, name_offset: np.ndarray) -> pa.LargeBinaryArray:
    import pyarrow as pa

    buffers = [None, pa.py_buffer(name_offset), pa.py_buffer(names)]
    return pa.Array.from_buffers(pa.large_binary(), len(name_offset) - 1, buffers)


def _is_utf8(encoding: str) -> bool:
    return encoding.lower().replace("_", "-") in ("utf-8", "utf8")
