from __future__ import annotations

import contextlib
import os
import struct

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from returnn.datasets.sprint import SprintCacheDataset

from seqshard.io.errors import (
    ConfigError,
    SeqshardError,
    ShapeMismatchError,
    SourceFormatError,
    UnsupportedPayloadError,
)
from seqshard.io.records import StreamFormat, StreamSpec
from seqshard.io.sources import open_source
from seqshard.io.sprint.archive import Archive
from seqshard.io.sprint.bundle import read_bundle
from seqshard.io.sprint.source import AlignmentSource, FeatureSource


def read(source, order=None):
    """The index, and all sequences, read in a permuted order to a permuted place."""
    with source:
        index = source.index()
        order = np.arange(len(index.tag)) if order is None else order(len(index.tag))
        length = index.length[order]
        out = np.zeros((int(length.sum()), *index.format.shape), index.format.dtype)
        start = np.cumsum(length) - length
        columns = (index.position, index.length, index.num_bytes, index.raw_bytes)
        source.read_many(*(column[order] for column in columns), out, start)
    pieces = [out[s : s + n] for s, n in zip(start.tolist(), length.tolist(), strict=True)]
    names = index.tag.to_pylist()
    return index, {names[i]: piece for i, piece in zip(order.tolist(), pieces, strict=True)}


def states(rasr, **options):
    folder = rasr / "align"
    return StreamSpec(
        "classes",
        "sprint-alignment",
        allophones=str(folder / "allophones.txt"),
        state_tying=str(folder / "state-tying.txt"),
        silence="si",
        **options,
    )


EMISSIONS = StreamSpec("classes", "sprint-alignment", num_labels=2000)


# Features.


@pytest.mark.parametrize(
    "name",
    [
        "f32-dim1",
        "f32-dim16",
        "f32-dim40-gz",
        "gather9-f32-dim4",
        "special-values-f32",
        "types/vector-f64",
        "types/vector-s16",
        "types/vector-u8",
    ],
)
@pytest.mark.parametrize("order", [np.arange, lambda n: np.random.RandomState(1).permutation(n)])
def test_features_equal_truth(rasr, name, order):
    truth = np.load(rasr / "truth" / "features" / f"{name}.cache.npz")
    index, arrays = read(FeatureSource(str(rasr / "features" / f"{name}.cache")), order)
    dim = truth["values"].shape[1]
    assert index.format == StreamFormat(truth["values"].dtype.name, dim, 2, False, shape=(dim,))
    assert index.tag.to_pylist() == truth["names"].tolist()
    assert index.length.tolist() == truth["num_frames"].tolist()
    assert index.damaged == ()
    found = b"".join(arrays[name].tobytes() for name in truth["names"].tolist())
    assert found == truth["values"].tobytes()
    assert {str(c.dtype) for c in (index.position, index.num_bytes, index.raw_bytes)} == {"int64"}


def test_demo_equals_truth(demo):
    truth = np.load(demo / "truth.npz")
    features, classes = {}, {}
    for path in read_bundle(str(demo / "features.bundle")):
        features |= read(open_source(StreamSpec("data", "sprint-features"), path))[1]
    spec = StreamSpec(
        "classes",
        "sprint-alignment",
        allophones=str(demo / "allophones.txt"),
        state_tying=str(demo / "state-tying.txt"),
    )
    for path in read_bundle(str(demo / "alignment.bundle")):
        index, arrays = read(open_source(spec, path))
        assert (index.format.dtype, index.format.dim) == ("int8", 124)
        classes |= arrays
    tags = truth["tags"].tolist()
    assert b"".join(features[tag].tobytes() for tag in tags) == truth["features"].tobytes()
    assert np.concatenate([classes[tag] for tag in tags]).tolist() == truth["labels"].tolist()


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_same_as_returnn(demo):
    labeling = {
        "silence_phone": "[SILENCE]",
        "allophone_file": str(demo / "allophones.txt"),
        "state_tying_file": str(demo / "state-tying.txt"),
    }
    reader = SprintCacheDataset.SprintCacheReader
    theirs = reader("classes", str(demo / "alignment.0.cache"), allophone_labeling=labeling)
    spec = StreamSpec(
        "classes",
        "sprint-alignment",
        allophones=labeling["allophone_file"],
        state_tying=labeling["state_tying_file"],
    )
    index, arrays = read(AlignmentSource(str(demo / "alignment.0.cache"), spec))
    assert list(arrays) == theirs.content_keys
    assert (index.format.dtype, index.format.dim) == (theirs.dtype, theirs.num_labels)
    for name, array in arrays.items():
        expected = theirs.read(name)
        assert array.dtype == expected.dtype
        assert np.array_equal(array, expected)


def test_sequences_without_frames(rasr, make, writer):
    index, _ = read_index(FeatureSource(str(rasr / "features" / "zero-frames.cache")))
    assert index.format is None
    assert index.length.tolist() == [0, 0]
    payloads = [("a", b""), ("b", writer.features(np.ones((2, 3), "f4"))),
                ("c", writer.block("vector-f32", []))]  # fmt: skip
    for compressed in (False, True):
        path = make(writer.archive(payloads, compressed=compressed))
        index, arrays = read(FeatureSource(path))
        assert index.length.tolist() == [0, 2, 0]
        assert arrays["b"].tolist() == [[1.0] * 3] * 2
        assert index.format.dim == 3


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        ("f32", "float32", [[-1.0], [-0.75], [-0.5], [-0.25]]),
        ("f64", "float64", [[-1.0], [-0.75], [-0.5], [-0.25]]),
        ("vector-bool", "bool", [[0, 1, 0, 1, 0], [1, 0, 1, 0, 1], [0, 1, 0, 1, 0]]),
        ("vector-complex-f32", "complex64", [[1 + 2j, 0.5 - 3j], [0, 7j], [1, 2]]),
        ("vector-complex-f64", "complex128", [[1 + 2j, 0.5 - 3j], [0, 7j], [1, 2]]),
    ],
)
def test_scalars_bools_and_complex_numbers(rasr, make, writer, name, dtype, expected, compressed):
    """Scalars are frames of dimension 1; all of these types exist in HDF files."""
    if "complex" in name:
        payload = writer.features(np.array(expected, dtype), name)
    else:
        with Archive(rasr / "features" / "types" / "structured.cache") as archive:
            payload = bytes(archive.payload(archive.find(f"structured/{name}")))
    path = make(writer.archive([("a", payload), ("b", payload)], compressed=compressed))
    index, arrays = read(FeatureSource(path))
    dim = len(expected[0])
    assert index.format == StreamFormat(dtype, dim, 2, False, shape=(dim,))
    assert index.damaged == ()
    for array in arrays.values():
        # Bytes as numpy writes them, whatever RASR's were.
        assert array.tobytes() == np.array(expected, dtype).tobytes()


def test_what_is_no_matrix_is_named(rasr):
    path = str(rasr / "features" / "types" / "structured.cache")
    index, damaged = read_index(FeatureSource(path))
    assert "no feature vectors" in damaged["structured/string"]
    assert "no feature vectors" in damaged["structured/matrix-f32"]
    assert "another shape than 'structured/vector-bool'" in damaged["structured/f64"]
    assert index.tag.to_pylist() == ["structured/vector-bool"]


def read_index(source):
    with source:
        index = source.index()
    return index, {tag: str(error) for tag, error in index.damaged}


def test_ragged_entries_and_other_dimensions_are_damaged(rasr):
    path = str(rasr / "features" / "ragged-f32.cache")
    index, damaged = read_index(FeatureSource(path))
    assert index.tag.to_pylist() == ["typed/seg-000"]
    assert list(damaged) == ["typed/seg-001", "typed/seg-002", "typed/seg-003"]
    assert "entry 'typed/seg-001', byte 615: the dimension changes" in damaged["typed/seg-001"]
    assert all(isinstance(error, ShapeMismatchError) for _, error in index.damaged)


def test_another_dimension_or_type_than_the_first_entry(make, writer):
    arrays = [np.ones((2, 3), "f4"), np.ones((2, 4), "f4"), np.ones((1, 3), "f4")]
    payloads = [(f"s{i}", writer.features(array)) for i, array in enumerate(arrays)]
    payloads.append(("double", writer.features(np.ones((2, 3)), "vector-f64")))
    index, damaged = read_index(FeatureSource(make(writer.archive(payloads))))
    assert index.tag.to_pylist() == ["s0", "s2"]
    assert "another shape than 's0' (expected vector-f32 of dimension 3, " in damaged["s1"]
    assert "found vector-f64 of dimension 3" in damaged["double"]


ROBUST = {
    "reference": [],
    "bad-checksum": ["r/seg1", "r/seg3"],
    "size-mismatch-table": ["r/seg1"],
    "removed": [],
    "dup-in-table": [],
}


@pytest.mark.parametrize("name", ROBUST)
def test_damaged_archives(rasr, name):
    _, reference = read(FeatureSource(str(rasr / "robust" / "reference.cache")))
    index, arrays = read(FeatureSource(str(rasr / "robust" / f"{name}.cache")))
    assert [tag for tag, _ in index.damaged] == ROBUST[name]
    for tag, array in arrays.items():
        assert array.tobytes() == reference[tag].tobytes()


def test_damaged_compressed_data_is_found_when_read(rasr):
    path = str(rasr / "robust" / "bad-gzip-data.cache")
    index, damaged = read_index(FeatureSource(path))
    assert damaged == {}
    with pytest.raises(SourceFormatError, match=r"'r/seg3', byte 1019: the compressed data is dam"):
        read(FeatureSource(path))
    assert index.position[3] == 1019


def test_archives_that_were_never_closed(rasr):
    path = str(rasr / "robust" / "truncated-mid-data.cache")
    with (
        pytest.raises(SourceFormatError, match="no file table"),
        FeatureSource(path) as source,
    ):
        source.index()
    index, damaged = read_index(FeatureSource(path, recover=True))
    assert len(index.tag) == 9
    assert "incomplete" in damaged["r/seg9"]


def test_headers_that_lie_are_noticed_when_read(make, writer):
    """Three frames of dimensions 2, 1 and 3 take the bytes of three of dimension 2."""
    packets = [writer.vector(np.ones(dim, "f4")) for dim in (2, 1, 3)]
    path = make(writer.archive([("x", writer.block("vector-f32", packets))]))
    with pytest.raises(ShapeMismatchError, match=r"entry 'x', byte 30: the dimension changes") as e:
        read(FeatureSource(path))
    assert e.value.position == 30


@pytest.mark.parametrize("is_open", [False, True])
def test_a_file_that_shrank(rasr, tmp_path, is_open):
    data = (rasr / "robust" / "reference.cache").read_bytes()
    path = tmp_path / "x.cache"
    path.write_bytes(data)
    with FeatureSource(str(path)) as source:
        index = source.index()
    out = np.zeros((int(index.length.sum()), 5), "f4")
    start = np.cumsum(index.length) - index.length
    columns = (index.position, index.length, index.num_bytes, index.raw_bytes)
    with contextlib.ExitStack() as stack:
        if not is_open:
            os.truncate(path, 3000)
        source = stack.enter_context(FeatureSource(str(path)))
        os.truncate(path, 3000)
        with pytest.raises(SourceFormatError, match=r"ends before this .*found 3000 bytes in the"):
            source.read_many(*columns, out, start)


def test_reading_needs_no_table(rasr, tmp_path, monkeypatch):
    index, arrays = read(FeatureSource(str(rasr / "robust" / "reference.cache")))
    monkeypatch.setattr("seqshard.io.sprint.source.Archive", None)
    with FeatureSource(str(rasr / "robust" / "reference.cache")) as source:
        out = np.zeros((int(index.length[2]), 5), "f4")
        one = slice(2, 3)
        columns = (index.position, index.length, index.num_bytes, index.raw_bytes)
        source.read_many(*(c[one] for c in columns), out, np.zeros(1, np.int64))
    assert out.tobytes() == arrays["r/seg2"].tobytes()


# Alignments.


@pytest.mark.parametrize("name", ["aalph", "rle", "rle-gz", "rle-gaps", "emission-ids"])
def test_labels_equal_truth(rasr, name):
    truth = np.load(rasr / "truth" / "align" / f"{name}.cache.npz")
    spec = EMISSIONS if name == "emission-ids" else states(rasr)
    source = AlignmentSource(str(rasr / "align" / f"{name}.cache"), spec)
    index, arrays = read(source, lambda n: np.random.RandomState(2).permutation(n))
    tied = truth["emission"] if name == "emission-ids" else truth["tied_label"]
    dtype = "int16" if name == "emission-ids" else "int8"
    assert index.format == StreamFormat(dtype, 2000 if dtype == "int16" else 19, 1, True)
    assert index.length.tolist() == truth["num_items"].tolist()
    found = np.concatenate([arrays[tag] for tag in truth["names"].tolist()])
    assert np.array_equal(found, tied)


def test_weighted_alignments(rasr):
    path = str(rasr / "align" / "weighted-v2.cache")
    truth = dict(np.load(rasr / "truth" / "align" / "weighted-v2.cache.npz"))
    index, damaged = read_index(AlignmentSource(path, states(rasr)))
    assert len(damaged) == 29
    assert all(isinstance(error, UnsupportedPayloadError) for _, error in index.damaged)
    assert 'Choose soft = "best"' in damaged["corpus/rec-0001/2"]
    _, arrays = read(AlignmentSource(path, states(rasr, soft="best")))
    stop = 0
    for tag, count in zip(truth["names"].tolist(), truth["num_items"].tolist(), strict=True):
        rows = range(stop, stop + count)
        stop += count
        best = {}
        for row in rows:
            time, weight = truth["time"][row], truth["weight"][row]
            if time not in best or weight > best[time][0]:
                best[time] = weight, truth["tied_label"][row]
        assert arrays[tag].tolist() == [label for _, label in best.values()]


def test_weights_of_one_are_hard_and_ties_go_to_the_first(make, writer):
    hard = writer.weighted([(None, [(3, 1.0), (4, 1.0)])], b"ALIGNEMI")
    soft = writer.weighted([(5, [(1, 0.25), (2, 0.5), (3, 0.5)]), (5, [(7, 0.75)]),
                            (None, [(9, 0.1)])], b"ALIGNEMI")  # fmt: skip
    payloads = [("hard", writer.alignment(hard)), ("soft", writer.alignment(soft, hard))]
    path = make(writer.archive(payloads))
    index, damaged = read_index(AlignmentSource(path, EMISSIONS))
    assert (index.length.tolist(), list(damaged)) == ([2], ["soft"])
    spec = StreamSpec("classes", "sprint-alignment", num_labels=10, soft="best")
    _, arrays = read(AlignmentSource(path, spec))
    assert {tag: array.tolist() for tag, array in arrays.items()} == {
        "hard": [3, 4],
        "soft": [7, 9, 3],
    }


def test_several_packets_and_mixed_kinds(rasr, make, writer):
    payloads = [
        ("two", writer.alignment(writer.rle([(0, 1)]), writer.rle([(0, 12)], b"ALIGNEMI"))),
        ("states", writer.alignment(writer.rle([(0, 1), (1, 1), (2, 1 + (1 << 26))]))),
        ("classes", writer.alignment(writer.rle([(4, 18)], b"ALIGNEMI"))),
        ("none", b""),
    ]
    for compressed in ((), (1,), True):
        path = make(writer.archive(payloads, compressed=compressed))
        _, arrays = read(AlignmentSource(path, states(rasr)))
        assert {tag: array.tolist() for tag, array in arrays.items()} == {
            "two": [1, 12],
            "states": [1, 1, 2],
            "classes": [18],
            "none": [],
        }


def test_labels_without_a_class(rasr, make, writer):
    cases = [
        (
            writer.rle([(0, 0), (1, 1 + (9 << 26))]),
            r"found id 603979777: allophone 1 \('a.*state 9",
        ),
        (writer.rle([(0, 0), (1, 4000)]), r"found id 4000: allophone 4000 \(unknown, there are 63"),
        (writer.rle([(0, 19)], b"ALIGNEMI"), "a label is no class .expected 0 to 18, found 19"),
        (writer.rle([(0, -1)], b"ALIGNEMI"), "a label is no class .expected 0 to 18, found -1"),
    ]
    for packet, message in cases:
        good = ("good", writer.alignment(writer.rle([(0, 0)])))
        for payload in (writer.alignment(packet), writer.alignment(packet, packet)):
            path = make(writer.archive([good, ("bad", payload)]))
            with pytest.raises(SourceFormatError, match=f"entry 'bad', byte .*{message}") as caught:
                read(AlignmentSource(path, states(rasr)))
            assert (
                caught.value.position
                == read_index(AlignmentSource(path, states(rasr)))[0].position[1]
            )


def test_states_need_allophones(rasr):
    path = str(rasr / "align" / "rle.cache")
    with pytest.raises(ConfigError, match="the stream has no allophones"):
        read(AlignmentSource(path, EMISSIONS))
    with pytest.raises(ConfigError, match="nothing tells the number of classes of stream 'x'"):
        AlignmentSource(path, StreamSpec("x", "sprint-alignment"))
    with pytest.raises(ConfigError, match="unknown choice for weighted alignments"):
        AlignmentSource(path, states(rasr, soft="worst"))


def test_damaged_alignments(make, writer):
    good = writer.alignment(writer.rle([(0, 5), (1, 6), (2, 7)]))
    cases = {
        "kind": good[:22] + b"X" + good[23:],
        "type": writer.features(np.ones((1, 1))),
        "count": good[:30] + struct.pack("<I", 0x7FFFFFFF) + good[34:],
        "short": good[:40],
    }
    path = make(writer.archive([("good", good), *cases.items()]))
    index, damaged = read_index(AlignmentSource(path, EMISSIONS))
    assert index.tag.to_pylist() == ["good"]
    assert list(damaged) == list(cases)
    assert "unknown kind of alignment" in damaged["kind"]
    assert all(f"entry {tag!r}, byte" in text for tag, text in damaged.items())
    for payload, message in [
        (good[:30] + b"\4" + good[31:], "ends before its items do"),
        (good[:30] + b"\2" + good[31:], "does not end where its entry does .*found 5 more bytes"),
        (good[:34] + b"\x80" + good[35:], "longer than the rest"),
    ]:
        path = make(writer.archive([("good", good), ("x", payload)]))
        with pytest.raises(SourceFormatError, match=f"entry 'x', byte .*{message}"):
            read(AlignmentSource(path, EMISSIONS))


def test_fingerprint_knows_the_label_files(rasr, tmp_path):
    path = str(rasr / "align" / "rle.cache")
    tying = tmp_path / "tying"
    tying.write_text((rasr / "align" / "state-tying.txt").read_text() + "\n")
    spec = states(rasr)
    other = StreamSpec(
        "classes", "sprint-alignment", allophones=spec.allophones, state_tying=str(tying)
    )
    first, _ = read_index(AlignmentSource(path, spec))
    again, _ = read_index(AlignmentSource(path, spec))
    changed, _ = read_index(AlignmentSource(path, other))
    assert first.fingerprint == again.fingerprint != changed.fingerprint


@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data(), compressed=st.booleans())
def test_mutated_archives_give_typed_errors_only(make, writer, data, compressed):
    matrix = np.arange(12, dtype="f4").reshape(4, 3)
    labels = [(t, t // 3) for t in range(9)]
    payloads = [
        ("a", writer.features(matrix)),
        ("b", writer.alignment(writer.rle(labels, b"ALIGNEMI"))),
        ("c", writer.features(matrix[:1])),
    ]
    good = bytearray(writer.archive(payloads, compressed=compressed))
    for _ in range(data.draw(st.integers(1, 3))):
        good[data.draw(st.integers(8, len(good) - 1))] = data.draw(st.integers(0, 255))
    path = make(bytes(good))
    for kind in (FeatureSource, lambda path: AlignmentSource(path, EMISSIONS)):
        with contextlib.suppress(SeqshardError):
            index, _ = read_index(kind(path))
            if index.format is not None and index.length.sum() < 10_000:
                read(kind(path))
