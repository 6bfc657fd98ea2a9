from __future__ import annotations

import dataclasses
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from returnn.sprint.cache import FileArchive

from seqshard.io.errors import (
    DuplicateSequenceError,
    OutputError,
    OutputExistsError,
    ShapeMismatchError,
    UnsupportedPayloadError,
)
from seqshard.io.sprint.alignment import Alignment, decode_alignment
from seqshard.io.sprint.archive import Archive
from seqshard.io.sprint.encode import compress, encode_alignment, encode_attributes, encode_features
from seqshard.io.sprint.payload import decode_blocks, decode_frames, decode_matrix
from seqshard.io.sprint.writer import ArchiveWriter, hard_alignment, is_valid_name

ALIGNMENTS = ["aalph", "emission-ids", "rle-gaps", "rle-gz", "rle", "weighted-v2"]


# The bytes are those that RASR wrote.


@pytest.mark.parametrize("name", ALIGNMENTS)
def test_alignments_are_encoded_as_rasr_does(rasr, name):
    with Archive(rasr / "align" / f"{name}.cache") as archive:
        for entry in archive.sequences:
            payload = bytes(archive.payload(int(entry)))
            assert encode_alignment(decode_alignment(payload)) == payload


@pytest.mark.parametrize("name", ["f32-dim16", "zero-frames", "types/vector-s16", "ragged-f32"])
def test_features_are_encoded_as_rasr_does(rasr, name):
    with Archive(rasr / "features" / f"{name}.cache") as archive:
        for entry in archive.sequences:
            payload = bytes(archive.payload(int(entry)))
            frames, times = decode_frames(payload)
            assert encode_features(frames, times)[1] == payload
            if name != "ragged-f32":
                features = decode_matrix(payload)
                assert encode_features(features.values, features.times)[1] == payload


@pytest.mark.parametrize("compressed", [False, True])
def test_archive_is_what_rasr_wrote(rasr, tmp_path, compressed):
    source = rasr / "align" / ("rle-gz.cache" if compressed else "rle.cache")
    path = str(tmp_path / "x.cache")
    with Archive(source) as archive, ArchiveWriter(path, compressed=compressed) as writer:
        names = archive.names.to_pylist()
        for entry in archive.sequences:
            writer.add_alignment(names[entry], decode_alignment(archive.payload(int(entry))))
    assert (tmp_path / "x.cache").read_bytes() == source.read_bytes()


def test_no_entries(rasr, tmp_path):
    with ArchiveWriter(tmp_path / "x.cache"):
        pass
    expected = (rasr / "robust" / "zero-entries.cache").read_bytes()
    assert (tmp_path / "x.cache").read_bytes() == expected


def test_attributes_are_escaped_as_rasr_does(rasr):
    with Archive(rasr / "features" / "types" / "structured.cache") as archive:
        found = archive.attributes(archive.find("structured/attribs-escaping"))
    attributes = {
        "datatype": "string",
        "sample-rate": "16000",
        "note": "a<b & \"c\" 'd' ü\ttab",
        "frame-shift": "0.01",
        "dimension": "7",
    }
    assert encode_attributes(attributes) == found


# Others read it.


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_returnn_reads_it(tmp_path, compressed, demo):
    path = str(tmp_path / "x.cache")
    matrix = np.random.RandomState(1).randn(20, 7).astype("f4")
    labels = np.repeat([0, 3, 2 + (1 << 26), 4], [5, 1, 1, 300])
    with ArchiveWriter(path, compressed=compressed) as writer:
        writer.add_features("a/1", matrix, attributes={"sample-rate": "16000"})
        writer.add_alignment("a/2", hard_alignment(labels, alphabet={0: "x.0", 3: "y.0"}))
        writer.add("text", b"plain")
    theirs = FileArchive(path)
    assert list(theirs.file_list()) == ["a/1.attribs", "a/1", "a/2.attribs", "a/2", "text"]
    times, frames = theirs.read("a/1", "feat")
    assert np.array_equal(frames, matrix)
    assert times[3].tolist() == [0.03, 0.04]
    theirs.set_allophones(str(demo / "allophones.txt"))
    found = theirs.read("a/2", "align_raw")
    assert found == [(t, label, None, 1) for t, label in enumerate(labels.tolist())]
    assert theirs.read("text", "str") == "plain"
    assert 'name="sample-rate" value="16000"' in theirs.read("a/1.attribs", "str")
    theirs.f.close()


# Nothing is published that is not complete.


def test_an_exception_publishes_nothing(tmp_path):
    path = tmp_path / "x.cache"

    def fail():
        with ArchiveWriter(path) as writer:
            writer.add("a", b"1")
            assert not path.exists()
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert os.listdir(tmp_path) == []


def test_a_crash_leaves_what_can_be_recovered(tmp_path):
    writer = ArchiveWriter(tmp_path / "x.cache")
    writer.add("a", b"1")
    writer._file.flush()
    (left,) = tmp_path.iterdir()
    with Archive(left) as archive:
        assert (archive.complete, archive.names.to_pylist()) == (False, ["a"])
    writer.abort()
    assert os.listdir(tmp_path) == []


def test_existing_archives(tmp_path):
    path = tmp_path / "x.cache"
    with ArchiveWriter(path) as writer:
        writer.add("a", b"1")
    with pytest.raises(OutputExistsError, match="exists already"):
        ArchiveWriter(path)
    with ArchiveWriter(path, overwrite=True) as writer:
        writer.add("b", b"1")
        writer.close()
    with Archive(path) as archive:
        assert archive.names.to_pylist() == ["b"]
    with pytest.raises(OutputError, match="cannot write the output"):
        ArchiveWriter(tmp_path / "no" / "folder")


def test_bad_entries(tmp_path):
    with ArchiveWriter(tmp_path / "x.cache", encoding="ascii") as writer:
        writer.add("a", b"1")
        with pytest.raises(DuplicateSequenceError, match="entry 'a': there is such an entry"):
            writer.add("a", b"2")
        with pytest.raises(OutputError, match="the name is not ascii"):
            writer.add("ü", b"2")
        with pytest.raises(OutputError, match="RASR does not read an entry of this name"):
            writer.add_features("a//b", np.zeros((1, 1), "f4"))
        with pytest.raises(UnsupportedPayloadError, match=r"element type .*found float16"):
            writer.add_features("b", np.zeros((1, 1), "f2"))
        with pytest.raises(ShapeMismatchError, match=r"expected times of shape \(2, 2\)"):
            writer.add_features("b", np.zeros((2, 1), "f4"), np.zeros((1, 2)))
        with pytest.raises(ShapeMismatchError, match="expected 2, found 3"):
            writer.add_features("b", np.zeros((2, 1, 1), "f4"))
        with pytest.raises(ShapeMismatchError, match="several element types"):
            writer.add_features("b", [np.zeros(1, "f4"), np.zeros(1, "f8")])
        with pytest.raises(ShapeMismatchError, match="labels must be a vector of integers"):
            hard_alignment(np.zeros(3))
        with pytest.raises(ShapeMismatchError, match="labels must have 32 bits"):
            hard_alignment(np.array([2**32]))
    with Archive(tmp_path / "x.cache") as archive:
        assert archive.names.to_pylist() == ["a"]


def test_valid_names():
    for name in ("a", "a/b", "/a/b", "../a", "a.b/..c", "a b\n\0", "..."):
        assert is_valid_name(name), name
    for name in ("", ".", "./a", "a/", "a//b", "//a", "a/./b", "a/../b", "a/..", "/"[:0]):
        assert not is_valid_name(name), name


# Properties.


ITEMS = st.lists(
    st.tuples(
        st.sampled_from([0, 1, 1, 1, 2, 700, 2**32 - 1]),
        st.sampled_from([5, 6, -1, 2**31 - 1]),
        st.sampled_from([1, 1, 2, 127, 128, 129, 300]),
    ),
    max_size=8,
)


def make_alignment(items, weight):
    """Runs of labels whose first times are as given relative to the end of the last run."""
    time, times, labels = 0, [], []
    for step, label, count in items:
        start = time + step - 1
        times += range(start, start + count)
        labels += [label] * count
        time = start + count
    count = len(times)
    return Alignment(
        time=np.array(times, np.int64).astype(np.uint32),
        label=np.array(labels, np.int32),
        weight=np.full(count, weight),
        emission=np.array([False]),
        packet_offset=np.array([0, count]),
        packet_times=np.array([[0.5, 1.5]]),
        alphabet={-1: "x.0", 5: "ü.1"},
    )


@settings(deadline=None, max_examples=100)
@given(ITEMS, st.sampled_from([1.0, 0.5]))
def test_alignments_round_trip(items, weight):
    alignment = make_alignment(items, weight)
    # RASR's codes lose a step back by one behind verbatim labels: what it writes is kept here.
    # Times count modulo 2**32.
    steps = np.diff(alignment.time).astype(np.int32)
    if weight == 1.0 and (steps <= 0).any():
        alignment = dataclasses.replace(
            alignment, time=np.arange(3, len(alignment) + 3, dtype=np.uint32)
        )
    found = decode_alignment(encode_alignment(alignment))
    for field in dataclasses.fields(Alignment):
        ours, theirs = getattr(alignment, field.name), getattr(found, field.name)
        if field.name == "alphabet":
            assert ours == theirs
        else:
            assert np.array_equal(ours, theirs)
            assert ours.dtype == theirs.dtype


def test_codes_of_runs_as_the_format_describes():
    def codes(time, label):
        alignment = dataclasses.replace(
            hard_alignment(np.array(label)), time=np.array(time, np.uint32)
        )
        return encode_alignment(alignment)[34:-16]

    assert codes([0], [7]) == b"\1\7\0\0\0"
    assert codes([0, 1], [7, 7]) == b"\xfe\7\0\0\0"
    assert codes([0, 2], [7, 7]) == b"\xff\7\0\0\0\0\2\0\0\0\1\7\0\0\0"
    assert codes([0, 1, 2], [7, 8, 8]) == b"\2\7\0\0\0\x08\0\0\0\0\2\0\0\0\1\x08\0\0\0"
    assert codes(range(129), [7] * 129) == b"\x80\7\0\0\0\1\7\0\0\0"
    verbatim = codes(range(128), range(128))
    assert (verbatim[0], verbatim[-5]) == (127, 1)
    assert verbatim[1 + 4 * 127 :][:5] == b"\0\x7f\0\0\0"
    # The loop variable that RASR adds to the time behind verbatim labels is -1.
    assert codes([5, 4], [7, 8]) == b"\0\5\0\0\0\1\7\0\0\0\1\x08\0\0\0"


def test_compressed_members_are_those_of_rasr(rasr):
    with Archive(rasr / "robust" / "reference.cache") as archive:
        table = archive.table
        for entry in np.flatnonzero(table.compressed).tolist():
            start = int(table.payload[entry])
            stored = archive.data[start : start + int(table.compressed[entry])]
            assert stored[:10] == compress(b"")[:10]
            assert compress(bytes(archive.payload(entry)))[-8:] == stored[-8:]


def test_vectors_of_every_type_round_trip(tmp_path):
    path = tmp_path / "x.cache"
    arrays = {
        f"{dtype}": np.arange(6).reshape(2, 3).astype(dtype)
        for dtype in ("f4", "f8", "u1", "i1", ">u2", "i2", "u4", "i4", "u8", "i8")
    }
    with ArchiveWriter(path) as writer:
        for name, array in arrays.items():
            writer.add_features(name, array)
    with Archive(path) as archive:
        for name, array in arrays.items():
            (block,) = decode_blocks(archive.payload(archive.find(name)))
            assert block.values.tolist() == array.tolist()
            assert block.values.dtype == array.dtype.newbyteorder("<")
