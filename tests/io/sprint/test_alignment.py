from __future__ import annotations

import contextlib
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqshard.io.errors import SeqshardError, SourceFormatError, UnsupportedPayloadError
from seqshard.io.sprint.alignment import decode_alignment
from seqshard.io.sprint.archive import Archive
from seqshard.io.sprint.weighted import read_packed

NAMES = ["aalph", "emission-ids", "rle-gaps", "rle-gz", "rle", "weighted-v2"]


@pytest.mark.parametrize("name", NAMES)
def test_alignments_equal_truth(rasr, name):
    truth = np.load(rasr / "truth" / "align" / f"{name}.cache.npz")
    with Archive(rasr / "align" / f"{name}.cache") as archive:
        decoded = [decode_alignment(archive.payload(int(i))) for i in archive.sequences]
    assert [len(item) for item in decoded] == truth["num_items"].tolist()
    assert [len(item.emission) for item in decoded] == truth["num_packets"].tolist()
    for column in ("time", "weight", "packet_times"):
        found = np.concatenate([getattr(item, column) for item in decoded])
        assert found.astype(truth[column].dtype).tobytes() == truth[column].tobytes()
    assert np.concatenate([item.label for item in decoded]).tobytes() == truth["emission"].tobytes()
    assert {bool(e) for item in decoded for e in item.emission} == {name == "emission-ids"}


def test_embedded_alphabet(rasr):
    names = (rasr / "align" / "allophones.txt").read_text().splitlines()[1:]
    with Archive(rasr / "align" / "aalph.cache") as archive:
        for entry in archive.sequences:
            item = decode_alignment(archive.payload(int(entry)))
            assert sorted(item.alphabet) == np.unique(item.label).tolist()
            for label, symbol in item.alphabet.items():
                assert symbol == f"{names[label & 0x3FFFFFF]}.{label >> 26}"


# The details of section 3, from bytes made here.


def items(alignment):
    return list(
        zip(alignment.time.tolist(), alignment.label.tolist(), alignment.weight, strict=True)
    )


def codes(*parts):
    return b"".join(struct.pack(f"<b{len(labels)}I", code, *labels) for code, labels in parts)


def decode_codes(writer, count, *parts):
    data = writer.rle([0] * count, codes=codes(*parts))
    return [item[:2] for item in items(decode_alignment(writer.alignment(data)))]


def test_codes(writer):
    assert decode_codes(writer, 0) == []
    assert decode_codes(writer, 1, (-1, [5])) == [(0, 5)]
    assert decode_codes(writer, 3, (-2, [5]), (1, [6])) == [(0, 5), (1, 5), (2, 6)]
    assert decode_codes(writer, 128, (-128, [7])) == [(t, 7) for t in range(128)]
    assert decode_codes(writer, 127, (127, range(127))) == [(t, t) for t in range(127)]
    assert decode_codes(writer, 3, (0, [9]), (2, [1, 2]), (0, [4]), (0, [2]), (-1, [3])) == [
        (9, 1),
        (10, 2),
        (2, 3),
    ]


def test_time_is_unsigned_and_wraps_and_labels_are_signed(writer):
    found = decode_codes(writer, 3, (0, [2**32 - 2]), (-2, [2**32 - 1]), (1, [2**31]))
    assert found == [(2**32 - 2, -1), (2**32 - 1, -1), (0, -(2**31))]


def test_states_above_five(writer):
    labels = [3 + (state << 26) for state in range(16)]
    found = decode_codes(writer, 16, (16, labels))
    assert [label >> 26 for _, label in found] == list(range(16))


def test_several_packets_and_blocks(writer):
    first = writer.rle([(4, 1), (5, 1)])
    second = writer.rle([(0, 2)], b"ALIGNEMI")
    third = writer.weighted([(None, [(3, 0.5), (4, 0.25)])], b"AALPHRLE")
    third = third[:-16] + writer.packed(1) + writer.packed(3) + writer.string("ü.0") + third[-16:]
    data = writer.alignment(first, second) + writer.alignment(third)
    alignment = decode_alignment(data)
    assert items(alignment) == [(4, 1, 1), (5, 1, 1), (0, 2, 1), (0, 3, 0.5), (0, 4, 0.25)]
    assert alignment.packet_offset.tolist() == [0, 2, 3, 5]
    assert alignment.emission.tolist() == [False, True, False]
    assert alignment.packet_times.tolist() == [[0, 1]] * 3
    assert alignment.alphabet == {3: "ü.0"}
    assert decode_alignment(writer.alignment(first)).alphabet is None


@pytest.mark.parametrize("version", [1, 2])
def test_weighted_with_gaps_and_empty_frames(writer, version):
    frames = [
        (7, [(1, 1.0), (-1, 0.0)]),
        (None, [(2**26 * 9 + 300, 0.2)]),
        (None, []),
        (None, [(2, 0.6)]),
        (2**32 - 1, [(3, 0.4)]),
        (None, [(4, 1.0)]),
    ]
    found = items(decode_alignment(writer.alignment(writer.weighted(frames, version=version))))
    assert [item[:2] for item in found] == [
        (7, 1),
        (7, -1),
        (8, 2**26 * 9 + 300),
        (10, 2),
        (2**32 - 1, 3),
        (0, 4),
    ]
    rounded = [round(w * 65535) / 65535 if version == 1 else float(np.float32(w))
               for w in (1.0, 0.0, 0.2, 0.6, 0.4, 1.0)]  # fmt: skip
    assert [item[2] for item in found] == rounded


def test_empty_payload():
    assert len(decode_alignment(b"")) == 0
    assert decode_alignment(b"").packet_offset.tolist() == [0]


def test_packed_numbers(writer):
    for value in (0, 127, 128, 2**14, 2**28 - 1, 2**32 - 1):
        assert read_packed(b"x" + writer.packed(value), 1) == (value, 1 + len(writer.packed(value)))
    for data in (b"", b"\x80", b"\xff\xff\xff\xff\x1f", b"\x80\x80\x80\x80\x80\x01"):
        with pytest.raises(SourceFormatError, match="more than 32 bits or is incomplete"):
            read_packed(data, 0)


def test_damage(writer):
    good = writer.alignment(writer.rle([(0, 5), (1, 6), (2, 7)]))
    big = struct.pack("<I", 0x7FFFFFFF)
    soft = writer.alignment(writer.weighted([(None, [(1, 0.5), (300, 0.5)])]))
    cases = [
        (writer.features(np.ones((1, 1))), UnsupportedPayloadError, "byte 0: .* is no alignment"),
        (good[:22] + b"X" + good[23:], UnsupportedPayloadError, "byte 22: unknown kind"),
        (good[:18] + big + good[22:], SourceFormatError, "byte 22: the data ends before its items"),
        (good[:30] + big + good[34:], SourceFormatError, "byte 30: .*too short for its number"),
        (good[:30] + b"\4" + good[31:], SourceFormatError, "the alignment ends before its items"),
        (good[:30] + b"\2" + good[31:], SourceFormatError, "no name of a Flow data type"),
        (good[:34] + b"\x80" + good[35:], SourceFormatError, "longer than the rest"),
        (good[:-1], SourceFormatError, "the alignment ends before|the data ends before"),
        (good[:40], SourceFormatError, "ends before its items do"),
        (soft[:30] + b"\3" + soft[31:], UnsupportedPayloadError, "byte 30: unknown version .*3"),
        (soft[:34] + b"\x7f" + soft[35:], SourceFormatError, "byte 34: .*too short for its number"),
        (soft[:34] + b"\1" + soft[35:], SourceFormatError, "byte 35: a frame has more items"),
        (soft[:41] + b"\xff" * 5 + soft[46:], SourceFormatError, "more than 32 bits|ends before"),
    ]
    for data, kind, message in cases:
        with pytest.raises(kind, match=message):
            decode_alignment(data)


def test_packed_numbers_that_are_too_long(writer):
    good = writer.weighted([(None, [(0x7FFFFFF, 0.5), (3, 0.25)])])
    label = writer.packed(0x7FFFFFF)
    for longer in (b"\x80" * 5 + b"\1", b"\xff" * 4 + b"\x1f"):
        payload = writer.alignment(good.replace(label, longer))
        with pytest.raises(SourceFormatError, match=r"byte 36: .* more than 32 bits"):
            decode_alignment(payload)


def test_frames_without_items_do_not_confuse(writer):
    frames = [(None, [])] * 5000 + [(None, [(3, 0.5)])]
    payload = writer.alignment(*[writer.weighted(frames), writer.weighted(frames[-1:])] * 2)
    found = decode_alignment(payload)
    assert found.time.tolist() == [5000, 0, 5000, 0]
    assert found.label.tolist() == [3] * 4


def test_many_packets_take_time_in_proportion(writer):
    """Work per packet that grew with the payload would take minutes here."""
    packet = writer.weighted([(None, [(3, 0.5)])])
    found = decode_alignment(writer.alignment(*[packet] * 4_000))
    assert len(found) == 4_000


def test_damaged_alphabet(writer):
    def payload(tail):
        return writer.alignment(writer.rle([(0, 5)])[:-16] + tail + bytes(16)).replace(
            b"ALIGNRLE", b"AALPHRLE"
        )

    one = writer.packed(5) + writer.string("a.0")
    assert decode_alignment(payload(b"\1" + one)).alphabet == {5: "a.0"}
    with pytest.raises(SourceFormatError, match="the data ends before its items do"):
        decode_alignment(payload(b"\1" + writer.packed(5) + struct.pack("<I", 2**32 - 1)))
    with pytest.raises(SourceFormatError, match="label 5 has two symbols"):
        decode_alignment(payload(b"\2" + one + writer.packed(5) + writer.string("b.0")))
    with pytest.raises(SourceFormatError, match="a symbol of the alphabet is not utf-8"):
        decode_alignment(payload(b"\1" + writer.packed(5) + writer.string(b"\xff")))
    latin = payload(b"\1" + writer.packed(5) + writer.string(b"\xff"))
    assert decode_alignment(latin, "latin-1").alphabet == {5: "ÿ"}


@st.composite
def hard_items(draw):
    time, out = 0, []
    for _ in range(draw(st.integers(0, 12))):
        if draw(st.booleans()):
            time = draw(st.integers(0, 2**32 - 500))
        label = draw(st.integers(-(2**31), 2**31 - 1))
        for _ in range(draw(st.sampled_from([1, 1, 2, 3, 130]))):
            out.append((time, label))
            time += 1
    return out


@settings(deadline=None, max_examples=80)
@given(st.lists(hard_items(), max_size=3), st.data())
def test_round_trip_and_mutation(writer, packets, data):
    payload = writer.alignment(*(writer.rle(packet) for packet in packets))
    found = [item[:2] for item in items(decode_alignment(payload))]
    assert found == [item for packet in packets for item in packet]
    position = data.draw(st.integers(0, len(payload) - 1))
    damaged = bytearray(payload)
    damaged[position] ^= 1 << data.draw(st.integers(0, 7))
    with contextlib.suppress(SeqshardError):
        decode_alignment(bytes(damaged))


WEIGHTED = st.lists(
    st.tuples(
        st.none() | st.integers(0, 2**32 - 1),
        st.lists(
            st.tuples(
                st.integers(-(2**31), 2**31 - 1),
                st.floats(0, 1, width=32),
            ),
            max_size=3,
        ),
    ),
    max_size=6,
)


@settings(deadline=None, max_examples=80)
@given(WEIGHTED, st.data())
def test_weighted_round_trip_and_mutation(writer, frames, data):
    while frames and not frames[-1][1]:  # nobody can tell whether such a frame follows
        frames = frames[:-1]
    payload = writer.alignment(writer.weighted(frames))
    expected, time = [], -1
    for explicit, labels in frames:
        time = time + 1 if explicit is None else explicit
        expected += [(time % 2**32, label, weight) for label, weight in labels]
    assert items(decode_alignment(payload)) == expected
    damaged = bytearray(payload)
    damaged[data.draw(st.integers(0, len(payload) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with contextlib.suppress(SeqshardError):
        decode_alignment(bytes(damaged))
