"""Finds the entries of an archive without its file table.

A writer that crashed leaves no table (docs/sprint-format.md, 1.5). Two scans exist: one that
accepts and refuses exactly what RASR's C++ does, and one that loses nothing intact.
"""

from __future__ import annotations

import mmap
import struct
from typing import NamedTuple

from ..errors import SourceFormatError
from .mapping import HEADER_BYTES

START_TAG = b"\x55\xaa\x55\xaa"
END_TAG = b"\xaa\x55\xaa\x55"

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_SIZES = struct.Struct("<III")


class Header(NamedTuple):
    """Where the parts of an entry are due; all numbers are bytes.

    The name is not read with it: what is no entry may claim the whole file as its name.
    """

    name_position: int
    payload: int
    size: int
    compressed: int

    @property
    def end(self) -> int:
        """First byte behind the stored data: where the end tag is due."""
        return self.payload + (self.compressed or self.size)

    @property
    def name_end(self) -> int:
        """First byte behind the name."""
        return self.payload - _SIZES.size

    def name(self, data: mmap.mmap) -> bytes:
        """The name, undecoded."""
        return data[self.name_position : self.name_end]


Lost = list[tuple[bytes, SourceFormatError]]


def scan_like_rasr(data: mmap.mmap, path: str) -> tuple[list[Header], Lost]:
    """The entries that RASR's C++ recovers.

    An entry counts even if its end tag is wrong. Between entries the scan looks for a start tag
    at every fourth byte only.

    Raises:
        SourceFormatError: where RASR refuses the archive: it ends inside an entry's header.
    """
    found: list[Header] = []
    position, total = HEADER_BYTES, len(data)
    while True:
        position = _next_aligned_tag(data, position)
        if position < 0:
            return found, []
        entry = _read_header(data, position)
        if entry is None:
            raise SourceFormatError(
                "the archive ends inside an entry's header, which RASR refuses",
                path,
                None,
                position,
                hint="recover=True reads its intact entries.",
            )
        if entry.end + 4 > total:
            return found, [_incomplete(data, entry, path, total)]
        if entry.name_end > entry.name_position:
            found.append(entry)
        position = entry.end + 4


def scan_intact(data: mmap.mmap, path: str) -> tuple[list[Header], Lost]:
    """All intact entries, and what else there was.

    The chain of entries is followed as long as it holds together. Where it breaks, the next
    start tag counts whose entry has its end tag in the right place.
    """
    found: list[Header] = []
    lost: Lost = []
    position, total = HEADER_BYTES, len(data)
    while position < total:
        entry = _read_header(data, position)
        if entry is None or not _holds_together(data, position, entry):
            resume = _next_intact(data, position + 1)
            _report(lost, data, path, position, resume, entry)
            position = resume
            continue
        if entry.name_end > entry.name_position:
            found.append(entry)
        position = entry.end + 4
    return found, lost


def _read_header(data: mmap.mmap, position: int) -> Header | None:
    """The entry whose start tag is due at the position; None if the file ends in its header."""
    total = len(data)
    if position + 8 > total:
        return None
    (length,) = _U32.unpack_from(data, position + 4)
    sizes = position + 8 + length
    if sizes + _SIZES.size > total:
        return None
    size, compressed, _ = _SIZES.unpack_from(data, sizes)
    return Header(position + 8, sizes + _SIZES.size, size, compressed)


def _next_aligned_tag(data: mmap.mmap, start: int) -> int:
    position = data.find(START_TAG, start)
    while position >= 0 and (position - start) % 4:
        position = data.find(START_TAG, position + 1)
    return position


def _holds_together(data: mmap.mmap, position: int, entry: Header) -> bool:
    """Whether two of the three marks of an entry are right: its tags, and what follows it."""
    if entry.end + 4 > len(data):
        return False
    starts = data[position : position + 4] == START_TAG
    ends = data[entry.end : entry.end + 4] == END_TAG
    behind = data[entry.end + 4 : entry.end + 8]
    return starts + ends + (behind in (START_TAG, b"")) >= 2 and (
        starts or entry.name_end > entry.name_position
    )


def _next_intact(data: mmap.mmap, start: int) -> int:
    position = data.find(START_TAG, start)
    while position >= 0:
        entry = _read_header(data, position)
        if entry is not None and data[entry.end : entry.end + 4] == END_TAG:
            return position
        position = data.find(START_TAG, position + 1)
    return len(data)


def _report(
    lost: Lost, data: mmap.mmap, path: str, start: int, end: int, entry: Header | None
) -> None:
    is_entry = entry is not None and data[start : start + 4] == START_TAG
    # A name that reaches into the next entry is none; there could be any number of them.
    if is_entry and entry.payload <= end:
        lost.append(_incomplete(data, entry, path, end))
    elif not _is_old_table(data, start, end):
        error = SourceFormatError(
            "bytes that belong to no entry", path, None, start, found=f"{end - start} bytes"
        )
        lost.append((b"", error))


def _is_old_table(data: mmap.mmap, start: int, end: int) -> bool:
    """Whether these are the remains of a file table that appended entries overwrote in part."""
    if end != len(data) or end - start < 16:
        return False
    holes, table = _U64.unpack_from(data, end - 16)[0], _U64.unpack_from(data, end - 8)[0]
    return HEADER_BYTES <= table <= start and (holes == 0 or table < holes < end)


def _incomplete(
    data: mmap.mmap, entry: Header, path: str, end: int
) -> tuple[bytes, SourceFormatError]:
    name = entry.name(data)
    error = SourceFormatError(
        "the entry is incomplete or damaged",
        path,
        name.decode("utf-8", "backslashreplace"),
        entry.payload,
        f"{entry.end - entry.payload} bytes and an end tag",
        f"{max(end - entry.payload, 0)} bytes",
    )
    return name, error
