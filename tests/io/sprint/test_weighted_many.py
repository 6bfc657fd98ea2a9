from __future__ import annotations

import contextlib
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqshard.io.errors import SourceFormatError
from seqshard.io.records import StreamSpec
from seqshard.io.sprint.alignment import decode_alignment
from seqshard.io.sprint.archive import Archive
from seqshard.io.sprint.source import AlignmentSource
from seqshard.io.sprint.weighted import decode_weighted
from seqshard.io.sprint.weighted_many import PADDING, decode_weighted_many

LABEL = st.one_of(st.integers(0, 300), st.integers(0, 2**32 - 1))
ITEMS = st.lists(st.tuples(LABEL, st.sampled_from([0.0, 0.25, 0.5, 1.0])), max_size=20)
TIME = st.one_of(st.none(), st.integers(0, 300), st.integers(2**32 - 3, 2**32 - 1))
PACKET = st.lists(st.tuples(TIME, ITEMS), max_size=40)


def bodies_of(packets, writer, version):
    """What follows the version, without the times of the packet."""
    return [writer.weighted(frames, version=version)[12:-16] for frames in packets]


def decode_one(data, begin, end, version):
    """One packet by the other decoder; None if it is damaged."""
    with contextlib.suppress(SourceFormatError):
        return decode_weighted(data, int(begin), int(end), version)
    return None


def check_equal(bodies, version):
    """Both decoders agree on every packet that is read at once; returns which are."""
    data = b"".join(body + b"\7" * 16 for body in bodies) + bytes(PADDING)
    last = np.cumsum([len(body) + 16 for body in bodies])
    begin, end = last - [len(body) + 16 for body in bodies], last - 16
    found = decode_weighted_many(data, begin, end, version)
    assert found.offset[-1] == len(found.time) == len(found.label) == len(found.weight)
    for packet, is_read in enumerate(found.is_read.tolist()):
        items = slice(found.offset[packet], found.offset[packet + 1])
        if is_read:
            expected = decode_one(data, begin[packet], end[packet], version)
            columns = found.time[items], found.label[items], found.weight[items]
            for column, other in zip(columns, expected, strict=False):
                assert column.dtype == other.dtype
                assert column.tobytes() == other.tobytes()
            assert found.stop[packet] == expected[3]
        else:
            assert items.start == items.stop
    return found.is_read.tolist()


@settings(deadline=None, max_examples=70)
@given(packets=st.lists(PACKET, min_size=1, max_size=6), version=st.sampled_from([1, 2]))
def test_same_as_one_by_one(writer, packets, version):
    check_equal(bodies_of(packets, writer, version), version)
    usual = [[frame for frame in packet if 0 < len(frame[1]) < 16] for packet in packets]
    assert all(check_equal(bodies_of(usual, writer, version), version))


@settings(deadline=None, max_examples=100)
@given(
    packets=st.lists(PACKET, min_size=1, max_size=4),
    version=st.sampled_from([1, 2]),
    damage=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=4),
)
def test_damaged_packets_are_read_alike_or_not_at_once(writer, packets, version, damage):
    bodies = [bytearray(body) for body in bodies_of(packets, writer, version)]
    for place, value in damage:
        body = bodies[place % len(bodies)]
        body[place % len(body)] = value
    check_equal([bytes(body) for body in bodies], version)


@pytest.mark.parametrize("count", [1, 7, 15_000])
def test_long_and_short_packets(writer, count):
    rng = np.random.RandomState(count)
    packets = []
    for length in (count, 3, 0, 200):
        labels = rng.randint(0, 2**28, (length, 2)).tolist()
        packets.append([(None, [(a, 0.5), (b, 0.25)][: 1 + a % 2]) for a, b in labels])
    assert check_equal(bodies_of(packets, writer, 2), 2) == [True] * 4


def test_what_is_left_to_the_other_decoder(writer):
    def body(count, *frames):
        return writer.packed(count) + b"".join(frames)

    item = writer.packed(300) + struct.pack("<f", 0.5)
    wrong = {
        "more items than frames have": body(2, b"\2", item),
        "fewer": body(1, b"\4", item, item),
        "a label without an end": body(1, b"\2", b"\xff" * 9),
        "a label of 33 bits": body(1, b"\2", b"\xff\xff\xff\xff\x1f" + item[2:]),
        "a time of 33 bits": body(1, b"\3", b"\xff\xff\xff\xff\x1f", item),
        "16 items": body(16, b"\x20", item * 16),
        "a long head": body(1, b"\x82\0", item),
        "no frames at all": body(9),
        "no length": b"\xff" * 9,
        "33 bits of items": b"\x81\x80\x80\x80\x10" + b"\0\2" + item,
    }
    good = body(1, b"\3", b"\xff\xff\xff\xff\x0f", b"\xff\xff\xff\xff\x0f" + item[2:])
    for name, data in wrong.items():
        assert check_equal([good, data, good], 2) == [True, False, True], name


def test_entries_of_an_archive(rasr, writer, make):
    """Usual, unusual, hard and compressed entries, of both versions, in one archive."""
    with Archive(rasr / "align" / "weighted-v2.cache") as archive:
        payloads = [bytes(archive.payload(int(entry))) for entry in archive.sequences]
    emissions = [
        writer.weighted([(3, [(1, 0.25), (2, 0.5), (3, 0.5)]), (None, [(4, 0.5)])], b"ALIGNEMI", 1),
        writer.weighted([(None, [(n % 5, n / 40) for n in range(20)])], b"ALIGNEMI"),
        writer.weighted([(None, [(1, 1.0), (2, 1.0)])], b"ALIGNEMI"),
        writer.weighted([(None, [(6, float("nan")), (7, float("nan"))])], b"ALIGNEMI"),
        writer.weighted([(None, [(6, float("nan")), (7, -1.0)])], b"ALIGNEMI"),
    ]
    payloads += [writer.alignment(packet) for packet in emissions]
    entries = [(f"s{i}", payload) for i, payload in enumerate(payloads)]
    folder = rasr / "align"
    spec = StreamSpec("classes", "sprint-alignment", allophones=str(folder / "allophones.txt"),
                      state_tying=str(folder / "state-tying.txt"), silence="si",
                      soft="best")  # fmt: skip
    for compressed in ((), True):
        with AlignmentSource(make(writer.archive(entries, compressed=compressed)), spec) as source:
            index = source.index()
            columns = index.position, index.length, index.num_bytes, index.raw_bytes
            start = np.cumsum(index.length) - index.length
            out = np.full(int(index.length.sum()), -1, np.int8)
            source.read_many(*columns, out, start)
        pieces = np.split(out, start[1:])
        assert [piece.tolist() for piece in pieces[-5:]] == [[2, 4], [4], [1, 2], [6], [7]]
        for payload, piece in zip(payloads[:-5], pieces, strict=False):
            alignment = decode_alignment(payload)
            assert len(piece) == len(np.unique(alignment.time))


def test_labels_without_a_class_are_named(writer, make):
    spec = StreamSpec("classes", "sprint-alignment", num_labels=5, soft="best")
    good = writer.alignment(writer.weighted([(None, [(1, 0.5)])], b"ALIGNEMI"))
    bad = writer.alignment(writer.weighted([(None, [(5, 0.5), (1, 0.25)])], b"ALIGNEMI"))
    path = make(writer.archive([("a", good), ("b", bad), ("c", good)]))
    with AlignmentSource(path, spec) as source:
        index = source.index()
        columns = index.position, index.length, index.num_bytes, index.raw_bytes
        with pytest.raises(SourceFormatError, match=r"'b', .*no class .expected 0 to 4, found 5"):
            source.read_many(*columns, np.zeros(3, np.int8), np.arange(3))


def test_lengths_need_no_decoding_one_by_one(writer, make, monkeypatch):
    """Damaged and outlying entries among usual ones are listed as ever."""
    spec = StreamSpec("classes", "sprint-alignment", num_labels=9, soft="best")
    packet = writer.weighted([(None, [(1, 0.25), (2, 0.5)]), (None, [(3, 0.5)])], b"ALIGNEMI")
    good = writer.alignment(packet)
    entries = [("a", good), ("b", good[:-20]), ("c", good), ("d", b""), ("e", good)]
    data = bytearray(writer.archive(entries, compressed=(4,), checksum={2: 1}))
    path = make(bytes(data))
    with AlignmentSource(path, spec) as source:
        index = source.index()
    assert dict(zip(index.tag.to_pylist(), index.length.tolist(), strict=True)) == {
        "a": 2,
        "d": 0,
        "e": 2,
    }
    assert [tag for tag, _ in index.damaged] == ["b", "c"]
    monkeypatch.setattr("seqshard.io.sprint.source.decode_alignment", None)
    with AlignmentSource(make(writer.archive([("a", good), ("b", good)])), spec) as source:
        assert source.index().length.tolist() == [2, 2]
