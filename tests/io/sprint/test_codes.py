from __future__ import annotations

import struct
from array import array

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqshard.io.sprint import codes
from seqshard.io.sprint.codes import expand_codes, walk_codes, walk_many

CODE = st.one_of(
    st.integers(-128, -1).map(lambda code: struct.pack("<bI", code, 7)),
    st.integers(0, 2**32 - 1).map(lambda time: struct.pack("<bI", 0, time)),
    st.integers(1, 5).map(lambda code: struct.pack(f"<b{code}I", code, *range(code))),
    st.just(struct.pack("<b127I", 127, *range(127))),
)
PACKET = st.tuples(st.lists(CODE, max_size=6).map(b"".join), st.integers(-3, 3))


def walk_each(data, offset, end, num_items):
    """The same as `walk_many`, one packet after the other."""
    positions, first, results = array("q"), [0], []
    view = memoryview(data).cast("b")
    for packet in zip(offset.tolist(), end.tolist(), num_items.tolist(), strict=True):
        results.append(walk_codes(view, *packet, positions))
        first.append(len(positions))
    stop, missing = zip(*results, strict=True)
    return list(positions), first, list(stop), list(missing)


def count_items(packet):
    position = items = 0
    while position < len(packet):
        (code,) = struct.unpack_from("<b", packet, position)
        items += abs(code)
        position += 1 + 4 * max(code, 1)
    return items


@pytest.mark.parametrize("few", [0, 2, 64])
def test_many_packets_at_once_equal_one_after_the_other(few, monkeypatch):
    monkeypatch.setattr(codes, "_FEW", few)

    @settings(deadline=None, max_examples=80)
    @given(st.lists(PACKET, min_size=1, max_size=8))
    def check(packets):
        data = b"head" + b"".join(packet for packet, _ in packets)
        size = np.array([len(packet) for packet, _ in packets])
        offset = 4 + np.cumsum(size) - size
        items = np.array([max(count_items(p) + wrong, 0) for p, wrong in packets])
        found = walk_many(data, offset, offset + size, items)
        columns = (found.position, found.first, found.stop, found.missing)
        assert [c.tolist() for c in columns] == list(walk_each(data, offset, offset + size, items))
        exact = np.array([wrong == 0 for _, wrong in packets])
        assert not found.missing[exact].any()

    check()


def test_hundreds_of_packets(writer):
    rng = np.random.RandomState(3)
    packets = []
    for _ in range(300):
        labels = np.repeat(rng.randint(50, size=rng.randint(60)), 1 + rng.randint(3))
        packets.append(list(enumerate(labels.tolist())))
    bodies = [writer.rle(packet)[12:-16] for packet in packets]
    size = np.array([len(body) for body in bodies])
    offset = np.cumsum(size) - size
    items = np.array([len(packet) for packet in packets])
    data = b"".join(bodies)
    found = walk_many(data, offset, offset + size, items)
    assert not found.missing.any()
    assert found.stop.tolist() == (offset + size).tolist()
    label, count, first_run = expand_codes(data, found.position)
    assert np.repeat(label, count).tolist() == [item[1] for packet in packets for item in packet]
    assert first_run[-1] == len(label)
