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
from .mapping import Buffer, gather
from .payload import TIMES_BYTES, check_room, read_block_header

DATATYPE = "flow-alignment"
STATES_MAGIC = b"ALIGNRLE"
ALPHABET_MAGIC = b"AALPHRLE"
EMISSIONS_MAGIC = b"ALIGNEMI"
MAGICS = (STATES_MAGIC, ALPHABET_MAGIC, EMISSIONS_MAGIC)
WEIGHTED = 1 << 31

_HEAD = struct.Struct("<8sI")
_U32 = struct.Struct("<I")
_MAX_RUN = 128
_MAX_PACKED = 5
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
        alphabet: label -> symbol, for example "a{#+b}@i.0", where the source has one.
    """

    time: np.ndarray
    label: np.ndarray
    weight: np.ndarray
    emission: np.ndarray
    packet_offset: np.ndarray
    packet_times: np.ndarray
    alphabet: dict[int, str]

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
    columns, emission, times = [], [], []
    alphabet: dict[int, str] = {}
    offset = 0
    while offset < len(data):
        count, offset = read_alignment_header(data, offset)
        for _ in range(count):
            magic, items, offset = _read_items(data, offset)
            if magic == ALPHABET_MAGIC:
                offset = _read_alphabet(data, offset, alphabet, encoding)
            columns.append(items)
            emission.append(magic == EMISSIONS_MAGIC)
            _need(data, offset, TIMES_BYTES, "the times of a packet")
            times.append(np.ndarray(2, "<f8", data, offset))
            offset += TIMES_BYTES
    time, label, weight = zip(*columns, strict=True) if columns else ([], [], [])
    return Alignment(
        time=np.concatenate([np.zeros(0, np.uint32), *time]),
        label=np.concatenate([np.zeros(0, np.int32), *label]),
        weight=np.concatenate([np.zeros(0), *weight]),
        emission=np.array(emission, bool),
        packet_offset=np.cumsum([0, *map(len, label)], dtype=np.int64),
        packet_times=np.array(times, np.float64).reshape(len(times), 2),
        alphabet=alphabet,
    )


def read_alignment_header(data: Buffer, offset: int) -> tuple[int, int]:
    """The number of packets of the block at a byte offset, and where they start."""
    datatype, count, packets = read_block_header(data, offset)
    if datatype != DATATYPE:
        raise UnsupportedPayloadError(
            "the entry is no alignment", position=offset, expected=DATATYPE, found=datatype
        )
    check_room(data, packets, count, _SMALLEST_PACKET)
    return count, packets


def walk_codes(
    codes: memoryview, offset: int, end: int, num_items: int, positions: array
) -> tuple[int, int]:
    """Finds the run-length codes of one packet: the only step per run.

    Args:
        codes: the bytes as signed integers (format "b").
        offset: of the first code.
        end: no code reaches behind it.
        num_items: how many items there are.
        positions: array("q") to which the position of every code is appended.

    Returns:
        where the codes end, and items that are missing: not 0 if the packet is damaged.
    """
    add = positions.append
    try:
        while num_items > 0:
            code = codes[offset]
            add(offset)
            if code > 0:
                num_items -= code
                offset += 4 * code + 1
            else:
                num_items += code
                offset += 5
    except IndexError:
        return len(codes) + 1, num_items
    return (offset, num_items) if offset <= end else (offset, max(num_items, 1))


def expand_codes(data: Buffer, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What `walk_codes` found, for one packet or for many at once.

    Args:
        positions: int64, of the codes in `data`.

    Returns:
        labels int32 [runs], counts int64 [runs], and int64 [codes + 1]: the first run of every
        code.
    """
    code = np.frombuffer(data, np.int8)[positions].astype(np.int64)
    num_labels = np.where(code > 0, code, (code < 0).astype(np.int64))
    first_run = np.zeros(len(code) + 1, np.int64)
    np.cumsum(num_labels, out=first_run[1:])
    inside = np.arange(first_run[-1]) - np.repeat(first_run[:-1], num_labels)
    labels = _unaligned_u32(data)[np.repeat(positions + 1, num_labels) + 4 * inside]
    counts = np.repeat(np.where(code < 0, -code, 1), num_labels)
    return labels.view(np.int32), counts, first_run


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
    new_time = _unaligned_u32(data)[places[moved] + 1].astype(np.int64)
    items_at = np.append(before, num_items)[first_run[moved]]
    last = np.searchsorted(moved, np.repeat(np.arange(len(places)), np.diff(first_run)))
    shift = np.concatenate([[0], new_time - items_at])[last]
    return Runs(label, count, (before + shift).astype(np.uint32)), stop


def check_num_items(num_items: int, offset: int, end: int) -> None:
    """Refuses a number of items that the bytes cannot hold: no run of 5 bytes exceeds 128."""
    most = (end - offset) // 5 * _MAX_RUN
    if num_items > most:
        raise SourceFormatError(
            "the alignment is too short for its number of items",
            position=offset - 4,
            expected=f"up to {most} items",
            found=str(num_items),
        )


def damaged_codes(offset: int, num_items: int, missing: int) -> SourceFormatError:
    """The error for what `walk_codes` returned."""
    what = "ends before its items do" if missing > 0 else "has a run that is longer than the rest"
    return SourceFormatError(
        f"the alignment {what}",
        position=offset,
        expected=f"{num_items} items",
        found=str(num_items - missing),
    )


def _read_items(
    data: Buffer, offset: int
) -> tuple[bytes, tuple[np.ndarray, np.ndarray, np.ndarray], int]:
    _need(data, offset, _SMALLEST_PACKET, "an alignment")
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
        time, label, weight, stop = _decode_weighted(data, start, end, word ^ WEIGHTED)
        return magic, (time, label, weight), stop
    runs, stop = decode_runs(data, start, end, word)
    before = np.cumsum(runs.count) - runs.count
    time = np.repeat(runs.time - before.astype(np.uint32), runs.count)
    time += np.arange(word, dtype=np.uint32)
    return magic, (time, np.repeat(runs.label, runs.count), np.ones(word)), stop


def _decode_weighted(
    data: Buffer, offset: int, end: int, version: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    if version not in (1, 2):
        raise UnsupportedPayloadError(
            "unknown version of weighted alignment",
            position=offset - 4,
            expected="1 or 2",
            found=str(version),
        )
    weight_bytes = 2 if version == 1 else 4
    num_items, position = read_packed(data, offset)
    if num_items * (1 + weight_bytes) > end - position:
        raise SourceFormatError(
            "the alignment is too short for its number of items",
            position=offset,
            expected=f"{num_items} items of at least {1 + weight_bytes} bytes",
            found=f"{end - position} bytes",
        )
    times, label_at, stop = _walk_weighted(data, position, end, num_items, weight_bytes)
    label, weight_at = _packed_at(np.frombuffer(data, np.uint8), label_at)
    wide = np.flatnonzero(label >> np.uint64(32))
    if len(wide):
        read_packed(data, int(label_at[wide[0]]))  # raises
    raw = gather(data, weight_at, weight_bytes)
    weight = raw.view("<u2") / 65535 if version == 1 else raw.view("<f4").astype(np.float64)
    return times, label.astype(np.uint32).view(np.int32), weight[:, 0], stop


def _walk_weighted(
    data: Buffer, position: int, end: int, num_items: int, weight_bytes: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """uint32 times, int64 positions of the labels, and where the items end.

    Args:
        position: of the first frame, before `end`, which is before the end of the data.
    """
    times, places = array("q"), array("q")
    width = _packed_widths(data).tolist()
    time, left = -1, num_items
    while left > 0:
        start = position
        head = data[position]
        if head < 0x80:
            position += 1
        else:
            head, position = read_packed(data, position)
        if head & 1:
            time, position = read_packed(data, position)
        else:
            time += 1
        count = head >> 1
        if count > left:
            raise SourceFormatError(
                "a frame has more items than there are",
                position=start,
                expected=f"up to {left}",
                found=str(count),
            )
        for _ in range(count):
            times.append(time)
            places.append(position)
            position += width[position] + weight_bytes if position < end else 1
        left -= count
        if position > end:
            raise SourceFormatError(
                "the alignment ends before its items do",
                position=start,
                expected=f"{num_items} items",
                found=f"fewer than {num_items - left}",
            )
    return (
        np.frombuffer(times, np.int64).astype(np.uint32),
        np.frombuffer(places, np.int64),
        position,
    )


def read_packed(data: Buffer, offset: int) -> tuple[int, int]:
    """A number of 7 bits per byte, low bits first, and where it ends.

    Raises:
        SourceFormatError: if it has more than 32 bits, or the data ends in it.
    """
    value = shift = 0
    for position in range(offset, min(offset + _MAX_PACKED, len(data))):
        byte = data[position]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value >> 32:
                break
            return value, position + 1
        shift += 7
    raise SourceFormatError(
        "a packed number has more than 32 bits or is incomplete", position=offset
    )


def _packed_widths(data: Buffer) -> np.ndarray:
    """uint8: how many bytes a packed number takes that starts at each byte position."""
    more = np.frombuffer(data, np.uint8) >= 0x80
    width = np.ones(len(more), np.uint8)
    follows = more
    for later in range(1, _MAX_PACKED + 1):
        width[: len(follows)] += follows
        follows = follows[:-1] & more[later:]
    return width


def _packed_at(data: np.ndarray, position: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Packed numbers at byte positions (uint64, without a check of their size), and their ends."""
    value = np.zeros(len(position), np.uint64)
    end = position.copy()
    more = np.arange(len(position))
    for shift in range(0, 7 * _MAX_PACKED, 7):
        byte = data[end[more]]
        value[more] |= (byte & 0x7F).astype(np.uint64) << np.uint64(shift)
        end[more] += 1
        more = more[byte >= 0x80]
    return value, end


def _read_alphabet(data: Buffer, offset: int, alphabet: dict[int, str], encoding: str) -> int:
    count, offset = read_packed(data, offset)
    for _ in range(count):
        label, start = read_packed(data, offset)
        _need(data, start, 4, "the alphabet")
        begin = start + 4
        end = begin + _U32.unpack_from(data, start)[0]
        _need(data, begin, end - begin, "the alphabet")
        label -= (label & 0x80000000) << 1
        try:
            symbol = bytes(data[begin:end]).decode(encoding)
        except UnicodeDecodeError as error:
            raise SourceFormatError(
                f"a symbol of the alphabet is not {encoding}", position=begin + error.start
            ) from None
        if alphabet.setdefault(label, symbol) != symbol:
            raise SourceFormatError(
                f"label {label} has two symbols", position=start, expected=alphabet[label],
                found=symbol,
            )  # fmt: skip
        offset = end
    return offset


def _need(data: Buffer, offset: int, count: int, what: str) -> None:
    if offset + count > len(data):
        raise SourceFormatError(
            f"the data ends inside {what}",
            position=offset,
            expected=f"{count} bytes",
            found=f"{max(len(data) - offset, 0)} bytes",
        )


def _unaligned_u32(data: Buffer) -> np.ndarray:
    """The u32 at every byte position, as a view."""
    return np.ndarray(max(len(data) - 3, 0), "<u4", data, 0, strides=(1,))
