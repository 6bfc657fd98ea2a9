"""--layout=nextgen from end to end: build, verify, read, repair, and back into the other layout."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest

from seqshard.datasets import ManifestDataset, NextGenHDFDataset
from seqshard.io.errors import ConfigError, ManifestVersionError
from seqshard.io.manifest import load_manifest
from seqshard.io.verification import verify_dataset
from seqshard.pipelines.build import main as build

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "examples" / "demo"
FLAGS = ("--num_shards=3", "--seq_ordering=random:2")
NEXTGEN = (*FLAGS, "--layout=nextgen")


@pytest.fixture
def dataset(build_demo, tmp_path):
    return shutil.copytree(build_demo(*NEXTGEN), tmp_path / "out")


def rebuild(output, *flags):
    config = ROOT / "examples" / "demo.toml"
    return build([f"--config={config}", f"--output={output}", *NEXTGEN, *flags])


def test_every_sequence_is_the_one_of_the_other_layout(build_demo):
    output = build_demo(*NEXTGEN)
    ours = NextGenHDFDataset("data", sorted(output.glob("*.hdf")))
    other = ManifestDataset(build_demo(*FLAGS))
    for each in (ours, other):
        each.initialize()
        each.init_seq_order(epoch=1)
    assert ours.get_all_tags() == other.get_all_tags()
    for index in range(other.num_seqs):
        ours.load_seqs(index, index + 1)
        for key in other.get_data_keys():
            found, expected = ours.get_data(index, key), other.get_data(index, key)
            assert found.dtype == expected.dtype
            np.testing.assert_array_equal(found, expected)


def test_manifests_differ_only_in_what_the_files_are(build_demo):
    ours, other = (load_manifest(str(build_demo(*flags))) for flags in (NEXTGEN, FLAGS))
    assert (ours.layout, other.layout) == ("nextgen", "returnn")
    assert ours.plan != other.plan
    assert ours.streams == other.streams
    assert ours.statistics == other.statistics
    for a, b in zip(ours.shards, other.shards, strict=True):
        assert (a.path, a.num_seqs, a.num_bytes) == (b.path, b.num_seqs, b.num_bytes)
        assert {n: x.shape for n, x in a.arrays.items()} == {
            n: x.shape for n, x in b.arrays.items()
        }
        assert {x.offset for x in a.arrays.values()} == {None}


WORKERS = {
    "again": (),
    "threads": ("--direct_num_workers=2", "--direct_running_mode=multi_threading"),
}


@pytest.mark.parametrize("workers", WORKERS)
def test_execution_does_not_matter(build_demo, same_bytes, tmp_path, workers):
    assert rebuild(tmp_path / "out", *WORKERS[workers]) == 0
    same_bytes(build_demo(*NEXTGEN), tmp_path / "out")


def test_back_into_the_other_layout(build_demo, tmp_path):
    files = json.dumps([str(path) for path in sorted(build_demo(*NEXTGEN).glob("*.hdf"))])
    config = tmp_path / "corpus.toml"
    streams = load_manifest(str(build_demo(*FLAGS))).streams
    tables = (f'[streams.{s}]\nsource = "nextgen-hdf"\nfiles = {files}\n' for s in streams)
    config.write_text("\n".join(tables))
    assert build([f"--config={config}", f"--output={tmp_path / 'out'}", *FLAGS]) == 0
    for shard in build_demo(*FLAGS).glob("data-*"):
        assert shard.read_bytes() == (tmp_path / "out" / shard.name).read_bytes()


def test_an_intact_dataset_has_no_problems(build_demo):
    manifest, problems = verify_dataset(str(build_demo(*NEXTGEN)))
    assert problems == []
    assert manifest.num_seqs == 120


def test_damage_names_the_sequence_and_is_repaired(build_demo, same_bytes, dataset):
    path = dataset / "data-00001-of-00003.hdf"
    with h5py.File(path) as file:
        name = file["seq_names"][7]
        place = file["streams/data/data"][name.replace(b"/", b"\\")].id.get_offset()
    data = bytearray(path.read_bytes())
    data[place + 33] ^= 4
    path.write_bytes(data)
    texts = [str(problem) for problem in verify_dataset(str(dataset))[1]]
    assert any(f"{path}: the hash is wrong" in text for text in texts)
    where = f"{path.name}, entry {name.decode()!r}, byte {place}: the payload of stream 'data'"
    assert any(text.startswith(where) for text in texts)
    kept = {p.name: p.stat().st_ino for p in dataset.glob("data-*") if p != path}
    assert rebuild(dataset) == 0
    assert {name: (dataset / name).stat().st_ino for name in kept} == kept
    same_bytes(build_demo(*NEXTGEN), dataset)


@pytest.mark.parametrize("part", range(12))
def test_a_flipped_byte_anywhere(part, dataset):
    path = dataset / "data-00000-of-00003.hdf"
    data = bytearray(path.read_bytes())
    data[len(data) * part // 12 + 5] ^= 16
    path.write_bytes(data)
    texts = [str(problem) for problem in verify_dataset(str(dataset))[1]]
    assert any(f"{path}: the hash is wrong" in text for text in texts)
    assert not any("data-00002" in text for text in texts)


RUNS = (*NEXTGEN, "--segment_alignments=classes")


def test_segment_alignments(build_demo, tmp_path):
    """Classes as runs: readers give class and end mark of every frame, as RETURNN's do."""
    output = build_demo(*RUNS)
    ours = NextGenHDFDataset("data", sorted(output.glob("*.hdf")))
    other = ManifestDataset(build_demo(*FLAGS))
    for each in (ours, other):
        each.initialize()
        each.init_seq_order(epoch=1)
    for index in range(other.num_seqs):
        ours.load_seqs(index, index + 1)
        expected = other.get_data(index, "classes")
        found = ours.get_data(index, "classes").reshape(-1, 2)
        np.testing.assert_array_equal(found[:, 0], expected)
        changes = np.flatnonzero(expected[1:] != expected[:-1])
        assert np.flatnonzero(found[:, 1]).tolist() == [*changes, len(expected) - 1]
    manifest, problems = verify_dataset(str(output))
    assert problems == []
    assert manifest.streams == other.info.streams
    assert manifest.statistics == other.info.statistics
    assert manifest.plan != load_manifest(str(build_demo(*NEXTGEN))).plan


def test_damaged_runs_are_found(build_demo, tmp_path):
    output = shutil.copytree(build_demo(*RUNS), tmp_path / "out")
    path = output / "data-00002-of-00003.hdf"
    with h5py.File(path) as file:
        name = file["seq_names"][0]
        place = file["streams/classes/data"][name.replace(b"/", b"\\")].id.get_offset()
    data = bytearray(path.read_bytes())
    data[place] ^= 1  # a class
    path.write_bytes(data)
    texts = [str(problem) for problem in verify_dataset(str(output))[1]]
    assert any(f"{name.decode()!r}" in text and "stream 'classes'" in text for text in texts)
    data[place + 4] ^= 1  # a length
    path.write_bytes(data)
    texts = [str(problem) for problem in verify_dataset(str(output))[1]]
    assert any("lengths of shard and index differ in 'classes'" in text for text in texts)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--segment_alignments=classes",), "--segment_alignments needs --layout=nextgen"),
        (("--layout=nextgen", "--segment_alignments=x"), "there is no such stream.*found x"),
    ],
)
def test_wrong_flags(flags, words, tmp_path, capsys):
    config = ROOT / "examples" / "demo.toml"
    assert build([f"--config={config}", f"--output={tmp_path / 'out'}", *flags]) == 2
    assert re.search(words, capsys.readouterr().err)


def test_a_truncated_shard(dataset):
    path = dataset / "data-00000-of-00003.hdf"
    path.write_bytes(path.read_bytes()[:-1000])
    assert any("the size is wrong" in str(problem) for problem in verify_dataset(str(dataset))[1])


def test_a_manifest_of_the_other_layout(dataset):
    path = dataset / "manifest.json"
    path.write_text(path.read_text().replace('"layout": "nextgen"', '"layout": "zarr"'))
    with pytest.raises(ManifestVersionError, match=r"layout of shards is unknown.*found 'zarr'"):
        load_manifest(str(dataset))


def test_the_datasets_reader_points_to_the_right_class(dataset):
    with pytest.raises(ConfigError, match=r"layout 'nextgen'.*Read its files with NextGenHDFData"):
        ManifestDataset(dataset)


def test_a_stream_that_the_layout_cannot_hold(tmp_path, capsys):
    with h5py.File(tmp_path / "wave.hdf", "w") as file:
        file["inputs"] = np.zeros(5, "f4")
        file["seqLengths"] = [[5]]
        file["seqTags"] = np.array([b"a"])
        file.attrs["inputPattSize"] = 1
    config = tmp_path / "corpus.toml"
    config.write_text('[streams.data]\nsource = "hdf"\nfiles = "wave.hdf"\n')
    output = tmp_path / "out"
    assert build([f"--config={config}", f"--output={output}", "--layout=nextgen"]) == 1
    assert "stream 'data' cannot be stored in the NextGen layout" in capsys.readouterr().err
    assert not list(output.glob("data-*"))
