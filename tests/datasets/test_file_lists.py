import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from returnn.datasets.distrib_files import DistributeFilesDataset as Oracle

from seqshard.datasets.distrib_files import DistributeFilesDataset
from seqshard.datasets.file_lists import FileList, distribute_evenly, leaves, read_file_list
from seqshard.io.errors import (
    ConfigError,
    ManifestError,
    SourceFormatError,
    SourceNotFoundError,
)
from seqshard.io.manifest import FileInfo, Manifest, ShardInfo, encode_manifest

TREES = ["a.hdf", ["b", {"z": "c", "y": ["d"]}]]


@given(st.lists(st.integers(0, 200), min_size=1, max_size=40), st.data())
def test_bins_are_those_of_returnn(sizes, data):
    num_bins = data.draw(st.integers(1, len(sizes)))
    starts = distribute_evenly(sizes, num_bins)
    files = [f"file-{index}" for index in range(len(sizes))]
    options = {
        "num_bins": num_bins,
        "file_sizes": dict(zip(files, sizes, strict=True)),
        "files_order": files,
    }
    expected = Oracle._distribute_evenly_by_size(**options)
    assert [files[a:b] for a, b in pairwise(starts)] == expected
    assert DistributeFilesDataset._distribute_evenly_by_size(**options) == expected


def test_too_few_files():
    with pytest.raises(ConfigError, match="at least 3 files, found 2"):
        distribute_evenly([1, 2], 3)


def test_leaves():
    assert leaves(TREES) == ["a.hdf", "b", "d", "c"]
    assert leaves(("x",)) == ["x"]


def test_lists_in_files(tmp_path):
    text = tmp_path / "files.txt"
    text.write_text("# comment\n\n  a.hdf \nü.hdf\n")
    assert read_file_list(str(text)).files == ["a.hdf", "ü.hdf"]
    (tmp_path / "files.json").write_text(json.dumps(TREES))
    assert read_file_list(tmp_path / "files.json").files == TREES
    (tmp_path / "files.py").write_text(repr([*TREES, ("t",)]) + "\n")
    assert read_file_list(tmp_path / "files.py").files == [*TREES, ("t",)]
    assert read_file_list(lambda: TREES) == FileList(TREES)
    assert read_file_list(lambda: text).files == ["a.hdf", "ü.hdf"]


def test_sizes(tmp_path):
    for name, size in (("a", 3), ("b", 5)):
        (tmp_path / name).write_bytes(b"x" * size)
    paths = [str(tmp_path / name) for name in "ab"]
    known = read_file_list([paths[0], {"x": paths[1], "y": [paths[0]]}]).with_sizes()
    assert known.sizes == (3, 8)
    assert known.with_sizes() is known
    with pytest.raises(SourceNotFoundError, match="cannot read this file"):
        read_file_list([str(tmp_path / "c")]).with_sizes()


def test_a_manifest_tells_sizes(tmp_path):
    shards = tuple(
        ShardInfo(f"data-0000{i}-of-00002.hdf", 1, {}, 10, 100 + i, "", {}) for i in range(2)
    )
    index = FileInfo("index.arrow", 1, "")
    manifest = Manifest("seqshard", 1, "", "default", {}, 2, {}, 20, 0, (), shards, index)
    path = tmp_path / "manifest.json"
    path.write_bytes(encode_manifest(manifest))
    known = read_file_list(path)
    assert known.files == [str(tmp_path / shard.path) for shard in shards]
    assert known.with_sizes().sizes == (100, 101)
    path.write_text('{"format": "seqshard", "version": 1}')
    with pytest.raises(ManifestError, match="the manifest is malformed"):
        read_file_list(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"\xff", "not UTF-8"),
        ("a.json", b"[", "no JSON"),
        ("a.json", b'{"a": 1}', "expected list, found dict"),
        ("a.py", b"open('x')", "no Python literal"),
        ("a.py", b"[", "no Python literal"),
        ("a.py", b"\xff", "no Python literal"),
        ("a.py", b"3", "found int"),
    ],
)
def test_damaged_lists(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SourceFormatError, match=message):
        read_file_list(tmp_path / name)


def test_what_is_no_list(tmp_path):
    with pytest.raises(SourceNotFoundError):
        read_file_list(tmp_path / "a.txt")
    with pytest.raises(ConfigError, match=r"expected \.txt, \.py, \.json, found \.a"):
        read_file_list("a.a")
    with pytest.raises(ConfigError, match=r"must be a list .found dict"):
        read_file_list({"a": "b"})
