"""The weighted scheme of alignments, of many packets at once: docs/sprint-format.md, section 3.

Where a frame starts depends on all before it. For every byte it is therefore computed where a frame
would end that starts there; following these links in large strides finds the frames that there are.
Packets with anything unusual are left to `weighted.py`, which reads them one by one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .weighted import packed_widths, weights_at

# A frame with more items is unusual, and one whose number of items takes two bytes.
_MAX_ITEMS = 15
_MAX_PACKED = 5
# Behind the data: no item that starts in the data reaches farther.
PADDING = 16

# Per width of a packed number: its bits in the four bytes from its start.
_BITS = np.array([0, 0x7F, 0x3FFF, 0x1FFFFF, 0xFFFFFFF, 0xFFFFFFF, 0xFFFFFFF], np.uint32)


@dataclass(frozen=True)
class WeightedPackets:
    """The items of many packets as columns, those of one packet behind one another.

    Attributes:
        time: uint32 [items], frame number.
        label: int32 [items], as stored.
        weight: float64 [items].
        offset: int64 [packets + 1], the first item of each packet.
        stop: int64 [packets], where the items end.
        is_read: bool [packets], false for those that are damaged or unusual, without items here.
    """

    time: np.ndarray
    label: np.ndarray
    weight: np.ndarray
    offset: np.ndarray
    stop: np.ndarray
    is_read: np.ndarray


def decode_weighted_many(
    data: bytes, begin: np.ndarray, end: np.ndarray, version: int
) -> WeightedPackets:
    """Decodes packets that lie in one buffer.

    Args:
        data: the packets, and `PADDING` zero bytes.
        begin: int64 [packets], where the number of items is.
        end: int64 [packets], where the items have to end at the latest.
        version: of the scheme, 1 or 2.
    """
    octets = np.frombuffer(data, np.uint8)
    width = packed_widths(octets)
    # Numbers of more than 32 bits count as too long.
    width[:-4] += (width[:-4] == _MAX_PACKED) & (octets[4:] >= 0x10)
    behind = _item_ends(width, 2 if version == 1 else 4)
    after = _frame_ends(octets, width, behind)
    first = begin + width.take(begin)
    num_items = _packed_at(data, width, begin).astype(np.int64)
    frame, packet = _follow(after, first, end)
    count = octets.take(frame) >> 1
    is_frame = (after.take(frame) < len(data) - 1) & (frame < end.take(packet))
    # Frames count until the packet has its items: what follows is something else.
    total = np.append(0, np.cumsum(count * is_frame, dtype=np.int64))
    begins = np.cumsum(np.bincount(packet, minlength=len(begin)))[:-1]
    limit = total.take(np.append(0, begins)) + num_items
    due = np.flatnonzero(is_frame & (total[:-1] < limit.take(packet)))
    frame, packet, count = frame.take(due), packet.take(due), count.take(due)
    stop = first.copy()
    stop[packet] = after.take(frame)  # of several frames the last one counts
    is_read = (np.bincount(packet, count, len(begin)) == num_items) & (stop <= end)
    is_read &= width.take(begin) <= _MAX_PACKED
    due = np.flatnonzero(is_read.take(packet))
    frame, packet, count = frame.take(due), packet.take(due), count.take(due)
    time, place = _times(data, width, frame, packet)
    label_at = _label_places(behind, place, count)
    return WeightedPackets(
        time=np.repeat(time, count),
        label=_packed_at(data, width, label_at).view(np.int32),
        weight=weights_at(data, label_at + width.take(label_at), version),
        offset=np.append(0, np.cumsum(np.where(is_read, num_items, 0))),
        stop=stop,
        is_read=is_read,
    )


def _item_ends(width: np.ndarray, weight_bytes: int) -> np.ndarray:
    """int64: for every byte the end of an item that starts there; the last byte if none can."""
    nowhere = len(width) - 1
    behind = np.arange(weight_bytes, weight_bytes + len(width))
    behind += width
    np.minimum(behind, nowhere, out=behind)
    behind[np.flatnonzero(width > _MAX_PACKED)] = nowhere
    return behind


def _frame_ends(octets: np.ndarray, width: np.ndarray, behind: np.ndarray) -> np.ndarray:
    """int64: for every byte the end of a frame that starts there; the last byte if it is unusual.

    Args:
        behind: as of `_item_ends`.
    """
    nowhere = len(octets) - 1
    after = np.full(len(octets), nowhere)
    head = np.flatnonzero(octets[:-1] - np.uint8(2) < 2 * _MAX_ITEMS)
    kind = octets.take(head)
    place = head + 1
    timed = np.flatnonzero(kind & 1)
    time_at = place.take(timed)
    time_width = width.take(time_at)
    place[timed] = np.where(time_width > _MAX_PACKED, nowhere, time_at + time_width)
    # Powers of two of items make any number of them.
    for bit in (2, 4, 8, 16):
        more = np.flatnonzero(kind & bit)
        place[more] = behind.take(place.take(more), mode="clip")
        behind = behind.take(behind)
    after[head] = place
    return after


def _follow(after: np.ndarray, first: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where the frames of all packets start, in order, and the packet of each.

    Positions that are no frame of the packet follow its last one.
    """
    longest = int((end - first).max(initial=0))
    strides = [after]
    for _ in range(min(max(longest >> 9, 4).bit_length(), 10)):
        strides.append(strides[-1].take(strides[-1]))
    far = strides.pop()
    packet = np.flatnonzero(first < end)
    at, limit = first[packet], end[packet]
    positions, packets = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    while len(at):
        positions.append(at)
        packets.append(packet)
        at = far.take(at)
        go_on = np.flatnonzero(at < limit)
        if len(go_on) < len(at):
            at, packet, limit = at.take(go_on), packet.take(go_on), limit.take(go_on)
    owner = np.concatenate(packets)
    order = np.argsort(owner, kind="stable")
    frame = np.concatenate(positions)[order]
    for stride in reversed(strides):
        pairs = np.empty((len(frame), 2), np.int64)
        pairs[:, 0] = frame
        pairs[:, 1] = stride.take(frame)
        frame = pairs.reshape(-1)
    return frame, np.repeat(owner[order], 1 << len(strides))


def _times(
    data: bytes, width: np.ndarray, frame: np.ndarray, packet: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """uint32 time of each frame, and where its first label is.

    Without a time of its own a frame is one later than the last, and the first one is at 0.
    """
    place = frame + 1
    timed = np.flatnonzero(np.frombuffer(data, np.uint8).take(frame) & 1)
    time_at = place.take(timed)
    place[timed] += width.take(time_at)
    new = np.flatnonzero(np.diff(packet, prepend=-1))
    mark = np.concatenate([new, timed])
    value = np.concatenate([np.zeros(len(new), np.int64), _packed_at(data, width, time_at)])
    # The time of a first frame comes behind the 0 that it replaces.
    order = np.argsort(mark, kind="stable")
    mark, value = mark[order], value[order]
    length = np.diff(mark, append=len(frame))
    time = np.arange(len(frame)) + np.repeat(value - mark, length)
    return time.astype(np.uint32), place


def _label_places(behind: np.ndarray, place: np.ndarray, count: np.ndarray) -> np.ndarray:
    """int64 [items]: where each label is, from the places of the first ones of frames."""
    item = np.cumsum(count, dtype=np.int64) - count
    out = np.empty(int(count.sum()), np.int64)
    for number in range(1, _MAX_ITEMS + 1):
        out[item] = place
        more = np.flatnonzero(count > number)
        if len(more) == 0:
            break
        place, item, count = behind.take(place.take(more)), item.take(more) + 1, count.take(more)
    return out


def _packed_at(data: bytes, width: np.ndarray, position: np.ndarray) -> np.ndarray:
    """uint32: packed numbers at byte positions; of their width, where it is not too long."""
    size = width.take(position)
    raw = np.ndarray(len(data) - 3, "<u4", data, 0, strides=(1,)).take(position, mode="clip")
    value = raw & 0x7F
    for shift in (1, 2, 3):
        value |= (raw >> shift) & (0x7F << 7 * shift)
    value &= _BITS.take(size, mode="clip")
    long = np.flatnonzero(size == _MAX_PACKED)
    value[long] |= np.frombuffer(data, np.uint8).take(position[long] + 4).astype(np.uint32) << 28
    return value
