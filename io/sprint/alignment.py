"""Decodes alignments: which label each frame has.

See docs/sprint-format.md, section 3. Run-length codes are read one by one, since where a code
starts depends on all before it; everything else is done on arrays of runs.
"""

from __future__ import annotations

import struct
from array import array
from dataclasses import dataclass

import numpy as np

from ..errors import SourceFormatError, UnsupportedPayloadError
from .codes import check_num_items, damaged_codes, expand_codes, unaligned_u32, walk_codes
from .mapping import Buffer
from .packets import TIMES_BYTES, check_room, read_block_header
from .weighted import decode_weighted, read_packed

DATATYPE = "flow-alignment"
STATES_MAGIC = b"ALIGNRLE"
ALPHABET_MAGIC = b"AALPHRLE"
EMISSIONS_MAGIC = b"ALIGNEMI"
MAGICS = (STATES_MAGIC, ALPHABET_MAGIC, EMISSIONS_MAGIC)
WEIGHTED = 1 << 31

_HEAD = struct.Struct("<8sI")
_U32 = struct.Struct("<I")
_SMALLEST_PACKET = _HEAD.size + TIMES_BYTES


@dataclass(frozen=True)
class Runs:
    """Run-length coded items: run i is `count[i]` items of one label at consecutive times.

    Attributes:
        label: int32, as stored.
        count: int64, at least 1.
        time: uint32, the first frame of each run.
    """

    label: np.ndarray
    count: np.ndarray
    time: np.ndarray


@dataclass(frozen=True)
class Alignment:
    """All items of an entry as columns, in file order.

    Attributes:
        time: uint32 [items], frame number.
        label: int32 [items]: allophone state (see `allophones.py`), or class if `emission`.
        weight: float64 [items]; 1 where the source has no weights.
        emission: bool [packets], whether the labels of a packet are classes.
        packet_offset: int64 [packets + 1], where the items of each packet start.
        packet_times: float64 [packets, 2], start and end in seconds.
        alphabet: label -> symbol, for example "a{#+b}@i.0"; None if the source has none.
    """

    time: np.ndarray
    label: np.ndarray
    weight: np.ndarray
    emission: np.ndarray
    packet_offset: np.ndarray
    packet_times: np.ndarray
    alphabet: dict[int, str] | None

    def __len__(self) -> int:
        return len(self.time)


def decode_alignment(data: Buffer, encoding: str = "utf-8") -> Alignment:
    """Decodes a payload completely.

    Args:
        data: payload of an entry; empty means no items.
        encoding: of the symbols in the alphabet.

    Raises:
        UnsupportedPayloadError: if the payload is no alignment, or of an unknown version.
        SourceFormatError: if it is damaged. Both name the position relative to the payload.
    """
    parts: list[Alignment] = []
    offset = 0
    while offset < len(data):
        datatype, count, packets = read_block_header(data, offset)
        if datatype != DATATYPE:
            raise UnsupportedPayloadError(
                "the entry is no alignment", position=offset, expected=DATATYPE, found=datatype
            )
        found, _, offset = decode_packets(data, packets, count, encoding)
        parts += found
    return _concatenate(parts)


def decode_packets(
    data: Buffer, offset: int, count: int, encoding: str = "utf-8"
) -> tuple[list[Alignment], np.ndarray, int]:
    """Consecutive packets at a byte offset, their times (float64 [count, 2]), and their end."""
    check_room(data, offset, count, _SMALLEST_PACKET)
    parts, times = [], np.empty((count, 2))
    for packet in range(count):
        magic, (time, label, weight), offset = _read_items(data, offset)
        alphabet = None
        if magic == ALPHABET_MAGIC:
            alphabet, offset = _read_alphabet(data, offset, encoding)
        check_room(data, offset, 1, TIMES_BYTES)
        times[packet] = np.frombuffer(data, "<f8", 2, offset)
        offset += TIMES_BYTES
        emission = np.array([magic == EMISSIONS_MAGIC])
        bounds = np.array([0, len(time)], np.int64)
        own_times = times[packet : packet + 1]
        parts.append(Alignment(time, label, weight, emission, bounds, own_times, alphabet))
    return parts, times, offset


def _concatenate(parts: list[Alignment]) -> Alignment:
    alphabets = [part.alphabet for part in parts if part.alphabet is not None]
    alphabet: dict[int, str] = {}
    for symbols in alphabets:
        for label, symbol in symbols.items():
            _add_symbol(alphabet, label, symbol, None)
    return Alignment(
        time=np.concatenate([np.zeros(0, np.uint32), *(part.time for part in parts)]),
        label=np.concatenate([np.zeros(0, np.int32), *(part.label for part in parts)]),
        weight=np.concatenate([np.zeros(0), *(part.weight for part in parts)]),
        emission=np.concatenate([np.zeros(0, bool), *(part.emission for part in parts)]),
        packet_offset=np.cumsum([0, *map(len, parts)], dtype=np.int64),
        packet_times=np.concatenate([np.zeros((0, 2)), *(part.packet_times for part in parts)]),
        alphabet=alphabet if alphabets else None,
    )


def _add_symbol(alphabet: dict[int, str], label: int, symbol: str, position: int | None) -> None:
    if alphabet.setdefault(label, symbol) != symbol:
        raise SourceFormatError(
            f"label {label} has two symbols",
            position=position,
            expected=alphabet[label],
            found=symbol,
        )


def decode_runs(data: Buffer, offset: int, end: int, num_items: int) -> tuple[Runs, int]:
    """The run-length coded items of one packet, and where they end.

    Raises:
        SourceFormatError: if the codes end before the items do, or the last run is too long.
    """
    check_num_items(num_items, offset, end)
    positions = array("q")
    stop, missing = walk_codes(memoryview(data).cast("b"), offset, end, num_items, positions)
    if missing:
        raise damaged_codes(offset, num_items, missing)
    if not positions:
        none = np.zeros(0, np.int64)
        return Runs(none.astype(np.int32), none, none.astype(np.uint32)), stop
    places = np.frombuffer(positions, np.int64)
    label, count, first_run = expand_codes(data, places)
    before = np.cumsum(count) - count
    # A time code moves all later items: their time is its time plus the items since.
    is_time = np.frombuffer(data, np.int8)[places] == 0
    moved = np.flatnonzero(is_time)
    new_time = unaligned_u32(data)[places[moved] + 1].astype(np.int64)
    items_at = np.append(before, num_items)[first_run[moved]]
    last = np.searchsorted(moved, np.repeat(np.arange(len(places)), np.diff(first_run)))
    shift = np.concatenate([[0], new_time - items_at])[last]
    return Runs(label, count, (before + shift).astype(np.uint32)), stop


def _read_items(
    data: Buffer, offset: int
) -> tuple[bytes, tuple[np.ndarray, np.ndarray, np.ndarray], int]:
    check_room(data, offset, 1, _SMALLEST_PACKET)
    magic, word = _HEAD.unpack_from(data, offset)
    if magic not in MAGICS:
        raise UnsupportedPayloadError(
            "unknown kind of alignment",
            position=offset,
            expected="ALIGNRLE, AALPHRLE or ALIGNEMI",
            found=repr(magic),
        )
    start, end = offset + _HEAD.size, len(data) - TIMES_BYTES
    if word & WEIGHTED:
        time, label, weight, stop = decode_weighted(data, start, end, word ^ WEIGHTED)
        return magic, (time, label, weight), stop
    runs, stop = decode_runs(data, start, end, word)
    before = np.cumsum(runs.count) - runs.count
    time = np.repeat(runs.time - before.astype(np.uint32), runs.count)
    time += np.arange(word, dtype=np.uint32)
    return magic, (time, np.repeat(runs.label, runs.count), np.ones(word)), stop


def _read_alphabet(data: Buffer, offset: int, encoding: str) -> tuple[dict[int, str], int]:
    alphabet: dict[int, str] = {}
    count, offset = read_packed(data, offset)
    for _ in range(count):
        label, start = read_packed(data, offset)
        check_room(data, start, 1, 4)
        begin = start + 4
        end = begin + _U32.unpack_from(data, start)[0]
        check_room(data, begin, end - begin, 1)
        label -= (label & 0x80000000) << 1
        try:
            symbol = bytes(data[begin:end]).decode(encoding)
        except UnicodeDecodeError as error:
            raise SourceFormatError(
                f"a symbol of the alphabet is not {encoding}", position=begin + error.start
            ) from None
        _add_symbol(alphabet, label, symbol, start)
        offset = end
    return alphabet, offset
