"""Archives in folders as sources: the same sequences as from the archive in a file."""

from __future__ import annotations

import gzip
import os

import numpy as np
import pytest

from seqshard.io.errors import ShapeMismatchError, SourceFormatError, UnsupportedPayloadError
from seqshard.io.records import StreamSpec
from seqshard.io.sources import open_source
from seqshard.io.sprint.archive import Archive

FEATURES = StreamSpec("data", "sprint-features")
EMISSIONS = StreamSpec("classes", "sprint-alignment", num_labels=2000)


def states(rasr):
    folder = rasr / "align"
    return StreamSpec(
        "classes",
        "sprint-alignment",
        allophones=str(folder / "allophones.txt"),
        state_tying=str(folder / "state-tying.txt"),
        silence="si",
    )


def unpack(path, folder, compress=()):
    """Every entry of an archive as a file, as RASR has it in a folder."""
    with Archive(str(path)) as archive:
        for entry, name in enumerate(archive.names.to_pylist()):
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            data = bytes(archive.payload(entry))
            file.write_bytes(gzip.compress(data) if entry in compress else data)
    return folder


def read(spec, path, rows=None):
    """The index, and the sequences by tag, read in a permuted order to a permuted place."""
    with open_source(spec, str(path)) as source:
        index = source.index()
    rows = np.arange(len(index.tag))[::-1] if rows is None else rows
    length = index.length[rows]
    start = np.cumsum(length) - length
    out = np.zeros((int(length.sum()), *index.format.shape), index.format.dtype)
    columns = (index.position, index.length, index.num_bytes, index.raw_bytes)
    with open_source(spec, str(path)) as source:
        source.read_many(*(column[rows] for column in columns), out, start)
    tags = index.tag.to_pylist()
    pieces = zip(rows.tolist(), start.tolist(), length.tolist(), strict=True)
    return index, {tags[row]: out[at : at + n] for row, at, n in pieces}


@pytest.mark.parametrize("compress", [(), range(0, 100, 2)])
@pytest.mark.parametrize(
    "name",
    ["features/f32-dim16", "features/f32-dim40-gz", "features/gather9-f32-dim4", "align/rle",
     "align/aalph", "align/rle-gz", "align/emission-ids"],
)  # fmt: skip
def test_same_as_the_archive_in_a_file(name, compress, rasr, tmp_path):
    spec = FEATURES
    if name.startswith("align"):
        spec = EMISSIONS if "emission" in name else states(rasr)
    path = rasr / f"{name}.cache"
    folder = unpack(path, tmp_path / "folder", compress)
    expected_index, expected = read(spec, path)
    index, found = read(spec, folder)
    assert index.format == expected_index.format
    assert sorted(found) == sorted(expected)
    assert index.tag.to_pylist() == sorted(found, key=str.encode)
    assert index.damaged == ()
    for tag, values in expected.items():
        np.testing.assert_array_equal(found[tag], values)


def test_small_groups(rasr, tmp_path, monkeypatch):
    folder = unpack(rasr / "align" / "rle.cache", tmp_path / "folder")
    expected = read(states(rasr), folder)[1]
    monkeypatch.setattr("seqshard.io.sprint.directory_source._GROUP_BYTES", 1)
    found = read(states(rasr), folder)[1]
    for tag, values in expected.items():
        np.testing.assert_array_equal(found[tag], values)


@pytest.fixture
def folder(rasr, tmp_path):
    return unpack(rasr / "features" / "f32-dim16.cache", tmp_path / "folder")


def names(folder):
    files = (os.path.join(parent, f) for parent, _, found in os.walk(folder) for f in found)
    return sorted(
        (os.path.relpath(f, folder) for f in files if not f.endswith(".attribs")), key=os.fsencode
    )


def test_damaged_entries_are_listed(folder, writer):
    first, second, third = names(folder)[:3]
    (folder / second).write_bytes((folder / second).read_bytes()[:-3])
    (folder / third).write_bytes(writer.features(np.zeros((2, 5), "f4")))
    with open_source(FEATURES, str(folder)) as source:
        index = source.index()
    (name_a, error_a), (name_b, error_b) = index.damaged
    assert (name_a, name_b) == (second, third)
    assert (error_a.path, error_a.entry) == (str(folder), second)
    assert isinstance(error_b, ShapeMismatchError)
    assert f"another shape than {first!r}" in str(error_b)
    assert set(index.tag.to_pylist()).isdisjoint([second, third])
    good = np.arange(len(index.tag))
    assert len(read(FEATURES, folder, good)[1]) == len(names(folder)) - 2


def test_a_folder_that_changed(folder):
    with open_source(FEATURES, str(folder)) as source:
        index = source.index()
    columns = [c[:1] for c in (index.position, index.length, index.num_bytes, index.raw_bytes)]
    out, start = np.zeros((int(index.length[0]), 16), "f4"), np.zeros(1, np.int64)
    first = folder / names(folder)[0]
    first.write_bytes(first.read_bytes() + b"x")
    with (
        open_source(FEATURES, str(folder)) as source,
        pytest.raises(SourceFormatError, match="not as it was when it was indexed"),
    ):
        source.read_many(*columns, out, start)


def test_payload_that_changed_in_place(folder):
    with open_source(FEATURES, str(folder)) as source:
        index = source.index()
    columns = [c[:1] for c in (index.position, index.length, index.num_bytes, index.raw_bytes)]
    out, start = np.zeros((int(index.length[0]), 16), "f4"), np.zeros(1, np.int64)
    first = folder / names(folder)[0]
    data = bytearray(first.read_bytes())
    data[18] ^= 1  # the dimension of the first frame
    first.write_bytes(data)
    with (
        open_source(FEATURES, str(folder)) as source,
        pytest.raises(SourceFormatError, match=f"entry '{names(folder)[0]}'"),
    ):
        source.read_many(*columns, out, start)


def test_weighted_alignments_need_a_choice(rasr, tmp_path):
    folder = unpack(rasr / "align" / "weighted-v2.cache", tmp_path / "folder")
    with open_source(states(rasr), str(folder)) as source:
        errors = [error for _, error in source.index().damaged]
    assert errors
    assert all(isinstance(error, UnsupportedPayloadError) for error in errors)


def test_names_in_another_encoding(folder):
    (folder / os.fsdecode(b"caf\xe9")).write_bytes(b"")
    with (
        open_source(FEATURES, str(folder)) as source,
        pytest.raises(SourceFormatError, match="is not utf-8"),
    ):
        source.index()
    spec = StreamSpec("data", "sprint-features", encoding="latin-1")
    assert "café" in read(spec, folder)[1]
