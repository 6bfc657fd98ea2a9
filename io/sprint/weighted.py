"""The weighted scheme of alignments, and packed numbers: docs/sprint-format.md, sections 0 and 3.

Items have no fixed size, so that frames are found one by one; labels and weights are then
gathered at once.
"""

from __future__ import annotations

import numpy as np

from ..errors import SourceFormatError, UnsupportedPayloadError
from .mapping import Buffer, gather

_MAX_PACKED = 5


def decode_weighted(
    data: Buffer, offset: int, end: int, version: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Weighted items from a byte offset, none of which reaches behind `end`.

    Returns:
        times uint32, labels int32, weights float64, and where the items end.

    Raises:
        UnsupportedPayloadError: if the version is unknown.
        SourceFormatError: if the items are damaged.
    """
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
    times, label_at, stop = _walk_frames(data, position, end, num_items, weight_bytes)
    label, weight_at = _packed_at(np.frombuffer(data, np.uint8), label_at)
    wide = np.flatnonzero(label >> np.uint64(32))
    if len(wide):
        read_packed(data, int(label_at[wide[0]]))  # raises
    raw = gather(data, weight_at, weight_bytes)
    with np.errstate(invalid="ignore"):  # a signalling NaN is damage, but no reason to warn
        weight = raw.view("<u2") / 65535 if version == 1 else raw.view("<f4").astype(np.float64)
    return times, label.astype(np.uint32).view(np.int32), weight[:, 0], stop


def _walk_frames(
    data: Buffer, position: int, end: int, num_items: int, weight_bytes: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """uint32 times, int64 positions of the labels, and where the items end.

    Args:
        position: of the first frame. At least 16 bytes follow `end`.
    """
    octets = bytes(data)
    skip = (_packed_widths(data) + np.uint8(weight_bytes)).tolist()
    times, counts, places = [], [], []
    time, left = -1, num_items
    while left > 0 and position < end:
        start = position
        head = octets[position]
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
        left -= count
        times.append(time)
        counts.append(count)
        while count and position < end:
            places.append(position)
            position += skip[position]
            count -= 1
    if left or position > end or len(places) < num_items:
        raise SourceFormatError(
            "the alignment ends before its items do",
            position=end,
            expected=f"{num_items} items",
            found=f"{len(places)}",
        )
    time_of_frame = np.array(times, np.int64).astype(np.uint32)
    return np.repeat(time_of_frame, counts), np.array(places, np.int64), position


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
