"""The weighted scheme of alignments, and packed numbers: docs/sprint-format.md, sections 0 and 3.

Items have no fixed size, so that frames are found one by one; labels and weights are then
gathered at once.
"""

from __future__ import annotations

import numpy as np

from ..errors import SourceFormatError, UnsupportedPayloadError
from .mapping import Buffer
from .packets import TIMES_BYTES

_MAX_PACKED = 5
_WINDOW = 1024
_ONE_ITEM = 2  # head of a frame with one item and no explicit time


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
    times, label_at, stop = _find_items(data, position, end, num_items, weight_bytes)
    label, weight_at = packed_at(data, label_at)
    return times, label.view(np.int32), weights_at(data, weight_at, version), stop


def _find_items(
    data: Buffer, position: int, end: int, num_items: int, weight_bytes: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """uint32 times, int64 positions of the labels, and where the items end.

    Args:
        position: of the first frame. At least 16 bytes follow `end`.
    """
    # Frames without items have no bound: a packet that is longer than expected is walked again,
    # so that the work for one of many packets does not grow with all of them.
    window = _WINDOW + 4 * (num_items + 1) * (1 + weight_bytes)
    while True:
        limit = min(position + window, end)
        piece = bytes(data[position : limit + TIMES_BYTES])
        marks, places, stop = _walk_frames(
            piece, limit - position, num_items, weight_bytes, position
        )
        if len(places) == num_items and stop <= limit - position:
            break
        if limit == end:
            raise SourceFormatError(
                "the alignment ends before its items do",
                position=end,
                expected=f"{num_items} items",
                found=f"{len(places)}",
            )
        window *= 4
    return _times(marks, num_items), np.array(places, np.int64) + position, position + stop


def _times(marks: list[tuple[int, int, int]], num_items: int) -> np.ndarray:
    """uint32 [items]: every frame that is not marked has one item, one frame later."""
    first, end, time = np.array(marks, np.int64).T
    item = np.arange(num_items)
    mark = np.searchsorted(first, item, side="right") - 1
    return (time[mark] + np.maximum(item - end[mark] + 1, 0)).astype(np.uint32)


def _walk_frames(
    piece: bytes, limit: int, num_items: int, weight_bytes: int, base: int
) -> tuple[list[tuple[int, int, int]], list[int], int]:
    """Frames that are marked, positions of all labels, and where the last item ends.

    A mark is a frame's first item, the end of its items, and its time. Frames with one item and
    no explicit time, which nearly all are, need none.

    Args:
        piece: the frames, from the first one on; 16 bytes follow `limit`.
        limit: no frame and no label starts here or later.
        base: position of the piece, for errors.
    """
    width = packed_widths(piece) + np.uint8(weight_bytes)
    is_plain = np.frombuffer(piece, np.uint8) == _ONE_ITEM
    plain = (is_plain[:-1] * (width[1:] + np.uint8(1))).tolist()
    skip = width.tolist()
    places: list[int] = []
    marks = [(0, 0, -1)]
    position, left = 0, num_items
    while left > 0 and position < limit:
        if step := plain[position]:
            places.append(position + 1)
            position += step
            left -= 1
            continue
        start = position
        head, position = read_packed(piece, position, base)
        first, (_, previous, time) = len(places), marks[-1]
        time += first - previous + 1
        if head & 1:
            time, position = read_packed(piece, position, base)
        count = head >> 1
        if count > left:
            raise SourceFormatError(
                "a frame has more items than there are",
                position=base + start,
                expected=f"up to {left}",
                found=str(count),
            )
        marks.append((first, first + count, time))
        left -= count
        while count and position < limit:
            places.append(position)
            position += skip[position]
            count -= 1
    return marks, places, position


def read_packed(data: Buffer, offset: int, base: int = 0) -> tuple[int, int]:
    """A number of 7 bits per byte, low bits first, and where it ends.

    Args:
        base: what to add to the position in an error.

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
        "a packed number has more than 32 bits or is incomplete", position=base + offset
    )


def weights_at(data: Buffer, position: np.ndarray, version: int) -> np.ndarray:
    """float64: the weights at byte positions."""
    stored = np.dtype("<u2" if version == 1 else "<f4")
    # A view for use here: one weight at every byte position.
    shape = max(len(data) - stored.itemsize + 1, 0)
    raw = np.ndarray(shape, stored, data, 0, strides=(1,))[position]
    with np.errstate(invalid="ignore"):  # a signalling NaN is damage, but no reason to warn
        return raw / 65535 if version == 1 else raw.astype(np.float64)


def packed_widths(data: Buffer) -> np.ndarray:
    """uint8: how many bytes a packed number takes that starts at each byte position."""
    more = np.frombuffer(data, np.uint8) >= 0x80
    width = np.ones(len(more), np.uint8)
    follows = more
    for later in range(1, _MAX_PACKED + 1):
        width[: len(follows)] += follows
        follows = follows[:-1] & more[later:]
    return width


def packed_at(data: Buffer, position: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Packed numbers at byte positions (uint32), and where they end."""
    octets = np.frombuffer(data, np.uint8)
    value = np.zeros(len(position), np.uint64)
    end = position.copy()
    more = np.arange(len(position))
    for shift in range(0, 7 * _MAX_PACKED, 7):
        byte = octets[end[more]]
        value[more] |= (byte & 0x7F).astype(np.uint64) << np.uint64(shift)
        end[more] += 1
        more = more[byte >= 0x80]
    too_long = np.append(more, np.flatnonzero(value >> np.uint64(32)))
    if len(too_long):
        read_packed(data, int(position[too_long.min()]))  # raises
    return value.astype(np.uint32), end
