"""The container of Sprint/RASR caches: header, file table, names and stored bytes.

Follows docs/sprint-format.md, section 1, and with it RASR's C++ reader: sizes come from the file
table, the first of several entries with one name counts, an entry with a checksum is unreadable.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

import numpy as np
import xxhash

from ..errors import MissingSequenceError, SourceFormatError
from . import recovery
from .mapping import HEADER_BYTES, close_map, gather, inflate, located, open_map

if TYPE_CHECKING:
    import pyarrow as pa

ATTRIBUTES_SUFFIX = b".attribs"
Recover = bool | Literal["rasr", "force"]

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_ENTRY_BYTES = 20
_TRAILER_BYTES = 16
_PAYLOAD_OFFSET = 12
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
            name_offset=_offsets(lengths[keep]),
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
            return pa.array(
                [self._decode_one(i, encoding, path) for i in range(len(self))], pa.string()
            )
        try:
            return self._binary().cast(pa.string())
        except pa.ArrowInvalid:
            for entry in range(len(self)):
                self._decode_one(entry, encoding, path)
            raise

    def first_of_each_name(self) -> np.ndarray:
        """bool [n], false where an earlier entry has the same name."""
        codes = self._binary().dictionary_encode().indices
        codes = np.frombuffer(codes.buffers()[1], np.int32, len(codes))
        highest = np.maximum.accumulate(codes)
        return np.diff(highest, prepend=np.int32(-1)) > 0

    def _binary(self) -> pa.LargeBinaryArray:
        import pyarrow as pa

        buffers = [None, pa.py_buffer(self.name_offset), pa.py_buffer(self.names)]
        return pa.Array.from_buffers(pa.large_binary(), len(self), buffers)

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


class Archive:
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
        sequences: int64, the entries that are no `.attribs`, in table order.
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
            table = self._recover(recover) if self._must_scan(recover) else self._read_table()
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

    def __len__(self) -> int:
        return len(self.table)

    def close(self) -> None:
        """Unmaps the file; views that are still in use keep it mapped until they are gone."""
        close_map(self.data)

    @cached_property
    def sequences(self) -> np.ndarray:
        """See the class."""
        return np.flatnonzero(~self.table.ends_with(ATTRIBUTES_SUFFIX))

    @cached_property
    def names(self) -> pa.StringArray:
        """The decoded names of all entries."""
        return self.table.decode(self.encoding, self.path)

    @cached_property
    def fingerprint(self) -> str:
        """Hexadecimal xxh3_128 over what tells where every entry is, not over the payload."""
        hasher = xxhash.xxh3_128(self.data[:HEADER_BYTES])
        columns = ("names", "name_offset", "name_position", "payload", "size", "compressed")
        for column in columns:
            hasher.update(np.ascontiguousarray(getattr(self.table, column)))
        return hasher.hexdigest()

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

    def attributes(self, entry: int) -> bytes | None:
        """The flow attributes (XML) that were stored for an entry, or None."""
        name = self.table.name(entry) + ATTRIBUTES_SUFFIX
        found = self._by_raw_name.get(name)
        return None if found is None else bytes(self.payload(found))

    def damage(self, entries: np.ndarray) -> dict[int, SourceFormatError]:
        """The damaged ones of some entries, as far as their headers tell: row -> error."""
        table, total = self.table, len(self.data)
        begin, stored = table.payload[entries], table.stored[entries]
        outside = (begin < HEADER_BYTES + _PAYLOAD_OFFSET) | (begin + stored > total)
        checksum = gather(self.data, np.where(outside, 0, begin - 4), 4).view("<u4")[:, 0]
        marked = (checksum != 0) & ~outside & (not self._ignore_checksum)
        errors = {}
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

    def label(self, entry: int) -> str:
        """The name of an entry for messages: bytes that do not decode are escaped."""
        return _text(self.table.name(entry), self.encoding)

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
                hint="Recover it explicitly, or write it again.",
            )
        return True

    def _recover(self, recover: Recover) -> EntryTable:
        self.complete = False
        if recover == "rasr":
            found, lost = recovery.scan_like_rasr(self.data, self.path)
        else:
            found, lost = recovery.scan_intact(self.data, self.path)
        self.lost = tuple((_text(name, self.encoding), error) for name, error in lost)
        rows = np.array([item[1:] for item in found], np.int64).reshape(len(found), 4)
        return EntryTable(
            names=np.frombuffer(b"".join(item[0] for item in found), np.uint8),
            name_offset=_offsets(np.array([len(item[0]) for item in found], np.int64)),
            name_position=rows[:, 0],
            payload=rows[:, 1],
            size=rows[:, 2],
            compressed=rows[:, 3],
        )

    def _read_table(self) -> EntryTable:
        """Only the lengths of names must be followed one by one; all else is masks of bytes."""
        starts, end = self._walk_table()
        begin = int(starts[0]) if len(starts) else end
        lengths = np.diff(starts, append=end) - _ENTRY_BYTES
        if len(lengths) and lengths.min() == 0:
            raise SourceFormatError(
                "an entry in the file table has no name",
                self.path,
                position=int(starts[np.argmin(lengths)]),
            )
        pieces = np.empty((len(starts), 3), np.int64)
        pieces[:] = (_U32.size, 0, _FIELDS.itemsize)
        pieces[:, 1] = lengths
        kind = np.repeat(np.tile(np.arange(3, dtype=np.int8), len(starts)), pieces.ravel())
        raw = np.frombuffer(self.data, np.uint8, end - begin, begin)
        fields = raw[kind == 2].view(_FIELDS)
        # A position near 2**64 must not turn into a small negative number.
        position = np.minimum(fields["position"], np.uint64(2**62)).astype(np.int64)
        return EntryTable(
            names=raw[kind == 1],
            name_offset=_offsets(lengths),
            name_position=starts + _U32.size,
            payload=position + _PAYLOAD_OFFSET,
            size=fields["size"].astype(np.int64),
            compressed=fields["compressed"].astype(np.int64),
        )

    def _walk_table(self) -> tuple[np.ndarray, int]:
        """int64 positions of the table's entries, and where the last one ends."""
        data, total = self.data, len(self.data)
        table_end = total - _TRAILER_BYTES
        if table_end < HEADER_BYTES + 4:
            raise SourceFormatError(
                "the archive is too short for a file table", self.path, None, total
            )
        (table,) = _U64.unpack_from(data, total - 8)
        if not HEADER_BYTES <= table <= table_end - 4:
            raise self._bad_table(
                "the last 8 bytes do not point to a file table",
                total - 8,
                f"{HEADER_BYTES} to {table_end - 4}",
                str(table),
            )
        (count,) = _U32.unpack_from(data, table)
        room = (table_end - table - 4) // (_ENTRY_BYTES + 1)
        if count > room:
            raise self._bad_table(
                "the file table has no room for its entries", table, f"up to {room}", str(count)
            )
        starts, position = [], table + 4
        unpack = _U32.unpack_from
        last = table_end - _ENTRY_BYTES
        for _ in range(count):
            if position > last:
                raise self._bad_table(
                    f"the file table ends before entry {len(starts)} of {count}", position
                )
            starts.append(position)
            position += _ENTRY_BYTES + unpack(data, position)[0]
        self._check_holes(position, table_end)
        return np.array(starts, np.int64), position

    def _check_holes(self, position: int, table_end: int) -> None:
        """The table of holes must fit. RETURNN's writer has none: its 0 is part of the trailer."""
        end = len(self.data)
        if position > table_end:
            raise self._bad_table("an entry reaches behind the file table", position)
        (holes,) = _U32.unpack_from(self.data, position)
        room = (end - position - 4) // 12
        if holes > room:
            raise self._bad_table(
                "the table of holes has no room for them", position, f"up to {room}", str(holes)
            )

    def _bad_table(
        self, what: str, position: int, expected: str | None = None, found: str | None = None
    ) -> SourceFormatError:
        hint = "The archive is damaged or incomplete; recover='force' reads its intact entries."
        return SourceFormatError(what, self.path, None, position, expected, found, hint)

    @cached_property
    def _by_name(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.names.to_pylist())}

    @cached_property
    def _by_raw_name(self) -> dict[bytes, int]:
        return {self.table.name(i): i for i in range(len(self.table))}


def _offsets(lengths: np.ndarray) -> np.ndarray:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _text(name: bytes, encoding: str) -> str:
    return name.decode(encoding, "backslashreplace")


def _is_utf8(encoding: str) -> bool:
    return encoding.lower().replace("_", "-") in ("utf-8", "utf8")
