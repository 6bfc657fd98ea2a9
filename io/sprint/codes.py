"""Run-length codes of alignments: where they are, and what they say.

See docs/sprint-format.md, section 3. Where a code starts depends on all before it in its packet.
Of many packets, one code of each is therefore read at a time, by one step of numpy for all.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np

from ..errors import SourceFormatError
from .mapping import Buffer

_MAX_RUN = 128
# Below this number of packets a step of numpy costs more than Python's steps.
_FEW = 64

# Per value of the byte: labels behind it, items that each of them is, bytes of the code.
_SIGNED = np.arange(256, dtype=np.uint8).view(np.int8).astype(np.int64)
_NUM_LABELS = np.where(_SIGNED > 0, _SIGNED, (_SIGNED < 0).astype(np.int64))
_ITEMS_PER_LABEL = np.where(_SIGNED < 0, -_SIGNED, 1)
_NUM_ITEMS = np.abs(_SIGNED)
_NUM_BYTES = np.where(_SIGNED > 0, 1 + 4 * _SIGNED, 5)


@dataclass(frozen=True)
class Codes:
    """The codes of many packets.

    Attributes:
        position: int64 [codes], those of one packet behind one another.
        first: int64 [packets + 1], the first code of each packet.
        stop: int64 [packets], where the codes end.
        missing: int64 [packets], items that are missing; not 0 if the packet is damaged.
    """

    position: np.ndarray
    first: np.ndarray
    stop: np.ndarray
    missing: np.ndarray


def walk_codes(
    codes: memoryview, offset: int, end: int, num_items: int, positions: array
) -> tuple[int, int]:
    """Finds the codes of one packet.

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
    while num_items > 0 and offset < end:
        code = codes[offset]
        add(offset)
        if code > 0:
            num_items -= code
            offset += 4 * code + 1
        else:
            num_items += code
            offset += 5
    return offset, num_items if offset <= end else max(num_items, 1)


def walk_many(data: Buffer, offset: np.ndarray, end: np.ndarray, num_items: np.ndarray) -> Codes:
    """Finds the codes of many packets in one buffer.

    Args:
        offset, end, num_items: int64 [packets], as for `walk_codes`.
    """
    octets = np.frombuffer(data, np.uint8)
    stop, missing = offset.copy(), num_items.copy()
    packet = np.flatnonzero((missing > 0) & (stop < end))
    at, limit, left = stop[packet], end[packet], missing[packet]
    packets, positions = [], []
    while len(packet) > _FEW:
        packets.append(packet)
        positions.append(at)
        code = octets[at]
        at = at + _NUM_BYTES[code]
        left = left - _NUM_ITEMS[code]
        more = (left > 0) & (at < limit)
        if not more.all():
            stop[packet], missing[packet] = at, left
            packet, at, limit, left = packet[more], at[more], limit[more], left[more]
    codes = memoryview(data).cast("b")
    for rest, begin, last, items in zip(packet, at, limit, left, strict=True):
        found = array("q")
        stop[rest], missing[rest] = walk_codes(codes, int(begin), int(last), int(items), found)
        packets.append(np.full(len(found), rest))
        positions.append(np.frombuffer(found, np.int64))
    missing[(stop > end) & (missing <= 0)] = 1
    owner = np.concatenate([np.zeros(0, np.int64), *packets])
    first = np.zeros(len(offset) + 1, np.int64)
    np.cumsum(np.bincount(owner, minlength=len(offset)), out=first[1:])
    kind = np.uint16 if len(offset) < 1 << 16 else np.int64
    order = np.argsort(owner.astype(kind), kind="stable")
    position = np.concatenate([np.zeros(0, np.int64), *positions])[order]
    return Codes(position, first, stop, missing)


def expand_codes(data: Buffer, position: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The runs of codes, of one packet or of many.

    Args:
        position: int64 [codes], in `data`.

    Returns:
        labels int32 [runs], counts int64 [runs], and int64 [codes + 1]: the first run of every
        code.
    """
    code = np.frombuffer(data, np.uint8)[position]
    num_labels = _NUM_LABELS[code]
    first_run = np.zeros(len(code) + 1, np.int64)
    np.cumsum(num_labels, out=first_run[1:])
    at = np.repeat(position + 1 - 4 * first_run[:-1], num_labels)
    at += np.arange(0, 4 * len(at), 4)
    counts = np.repeat(_ITEMS_PER_LABEL[code], num_labels)
    return unaligned_u32(data)[at].view(np.int32), counts, first_run


def check_num_items(num_items: int, offset: int, end: int) -> None:
    """Refuses a number of items that the bytes cannot hold: no run of 5 bytes exceeds 128.

    Raises:
        SourceFormatError: with the position of the number, which is before `offset`.
    """
    most = int(most_items(np.int64(end - offset)))
    if num_items > most:
        raise SourceFormatError(
            "the alignment is too short for its number of items",
            position=offset - 4,
            expected=f"up to {most} items",
            found=str(num_items),
        )


def most_items(num_bytes: np.ndarray) -> np.ndarray:
    """How many items that many bytes of codes hold at most."""
    return num_bytes // 5 * _MAX_RUN


def damaged_codes(offset: int, num_items: int, missing: int) -> SourceFormatError:
    """The error for a packet with missing items."""
    what = "ends before its items do" if missing > 0 else "has a run that is longer than the rest"
    return SourceFormatError(
        f"the alignment {what}",
        position=offset,
        expected=f"{num_items} items",
        found=str(num_items - missing),
    )


def unaligned_u32(data: Buffer) -> np.ndarray:
    """The u32 at every byte position, as a view for use while `data` lives."""
    return np.ndarray(max(len(data) - 3, 0), "<u4", data, 0, strides=(1,))
