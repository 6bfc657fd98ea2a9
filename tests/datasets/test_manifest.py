"""ManifestDataset: what RETURNN's HDFDataset gives for the same shards, from the manifest alone."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqshard.datasets import ManifestDataset, init_dataset
from seqshard.datasets.resume import Coverage, merge_states
from seqshard.io.errors import (
    ManifestError,
    ManifestVersionError,
    MissingSequenceError,
    ShardIntegrityError,
    StaleStateError,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
OPTIONS = [
    {},
    {"seq_ordering": "reverse", "partition_epoch": 4},
    {"seq_ordering": "random", "partition_epoch": 3},
    {"seq_ordering": "random:2", "fixed_random_seed": 5},
    {"seq_ordering": "laplace:.10", "_num_shards": 3, "_shard_index": 1},
    {"seq_ordering": "laplace:4:2", "random_seed_offset": 7},
    {"seq_ordering": "sorted"},
    {"seq_ordering": "sorted_reverse", "repeat_epoch": 2},
    {"seq_ordering": "sort_bin_shuffle:5"},
    {"seq_ordering": "default_every_n:3", "unique_seq_tags": True},
    {"window": 3},
]


@pytest.fixture(scope="session")
def folder(build_demo):
    return build_demo("--num_shards=7", "--seq_ordering=random")


def open_dataset(folder, **options):
    dataset = ManifestDataset(folder, **options)
    dataset.initialize()
    return dataset


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_it_is_returnns_hdf_dataset(folder, options):
    from returnn.datasets.hdf import HDFDataset

    theirs = HDFDataset(files=sorted(map(str, folder.glob("*.hdf"))), **options)
    theirs.initialize()
    ours = open_dataset(folder, **options)
    assert ours.num_outputs == theirs.num_outputs
    assert ours.labels == theirs.labels
    assert ours.get_data_keys() == theirs.get_data_keys()
    assert ours.get_target_list() == theirs.get_target_list()
    assert ours.get_all_tags() == theirs.get_all_tags()
    assert ours.get_total_num_seqs() == theirs.get_total_num_seqs()
    for key in theirs.get_data_keys():
        assert ours.get_data_dim(key) == theirs.get_data_dim(key)
        assert ours.get_data_dtype(key) == theirs.get_data_dtype(key)
        assert ours.is_data_sparse(key) == theirs.is_data_sparse(key)
    for epoch in (1, 2, 5):
        ours.init_seq_order(epoch=epoch)
        theirs.init_seq_order(epoch=epoch)
        assert ours.num_seqs == theirs.num_seqs
        for i in range(theirs.num_seqs):
            for dataset in (ours, theirs):
                dataset.load_seqs(i, i + 1)
            assert ours.get_tag(i) == theirs.get_tag(i)
            assert ours.get_complete_frac(i) == theirs.get_complete_frac(i)
            for key in theirs.get_data_keys():
                expected = theirs.get_data(i, key)
                found = ours.get_data(i, key)
                assert found.dtype == expected.dtype
                np.testing.assert_array_equal(found, expected)
                assert ours.get_seq_length(i)[key] == theirs.get_seq_length(i)[key]


def test_lists_of_tags_and_indices_decide_the_order(folder):
    dataset = open_dataset(folder)
    tags = dataset.get_all_tags()
    chosen = [tags[i] for i in (100, 3, 57)]
    dataset.init_seq_order(epoch=1, seq_list=chosen)
    assert [dataset.get_tag(i) for i in range(dataset.num_seqs)] == chosen
    dataset.init_seq_order(epoch=1, seq_order=[5, 4])
    assert [dataset.get_tag(i) for i in range(2)] == [tags[5], tags[4]]
    with pytest.raises(MissingSequenceError, match="nowhere"):
        dataset.init_seq_order(epoch=1, seq_list=["nowhere"])


def test_every_tag_is_found_by_scan_and_by_index(folder):
    dataset = open_dataset(folder)
    tags = dataset.get_all_tags()
    for i, tag in enumerate(tags):
        np.testing.assert_array_equal(
            dataset.get_data_by_seq_tag(tag, "classes"),
            dataset.get_corpus_seq(i).get_data("classes"),
        )
    with pytest.raises(MissingSequenceError):
        dataset.get_data_by_seq_tag(tags[0][:-1], "data")


def test_opening_touches_neither_index_nor_shards(folder, tmp_path):
    shutil.copy(folder / "manifest.json", tmp_path)
    dataset = open_dataset(tmp_path / "manifest.json")
    assert dataset.get_total_num_seqs() == 120
    assert dataset.num_outputs["data"] == [16, 2]
    assert dataset.extern_data()["classes"] == {
        "dim": 124,
        "dtype": "int8",
        "shape": (None,),
        "sparse": True,
    }
    dataset.init_seq_order(epoch=1)
    with pytest.raises(ShardIntegrityError, match=r"index\.arrow.*found no file"):
        dataset.get_tag(0)


def test_arrays_are_read_only_views(folder):
    dataset = open_dataset(folder)
    dataset.init_seq_order(epoch=1)
    data = dataset.get_data(0, "data")
    assert not data.flags.owndata
    assert not data.flags.writeable


def test_reading_loads_no_heavy_modules(folder):
    code = (
        "import sys; from seqshard.datasets import init_dataset\n"
        f"d = init_dataset({{'class': 'ManifestDataset', 'manifest': {str(folder)!r}}})\n"
        "d.init_seq_order(epoch=1); d.get_data(0, 'data'); d.get_tag(0)\n"
        "bad = {'apache_beam', 'torch', 'returnn', 'fsspec', 'pandas', 'pyarrow.dataset'}\n"
        "assert not bad & set(sys.modules), bad & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_pickled_dataset_keeps_options_and_epoch(folder):
    dataset = init_dataset(
        {"class": "ManifestDataset", "manifest": str(folder), "seq_ordering": "laplace:.10"}
    )
    dataset.init_seq_order(epoch=3)
    other = pickle.loads(pickle.dumps(dataset))
    assert other.epoch == 3
    other.init_seq_order(epoch=3)
    assert list(other.get_current_seq_order()) == list(dataset.get_current_seq_order())


def damaged_copy(folder, tmp_path, change):
    shutil.copytree(folder, tmp_path / "copy")
    change(tmp_path / "copy")
    return tmp_path / "copy"


def edit_manifest(**members):
    def change(folder):
        path = folder / "manifest.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | members))

    return change


def truncate(name):
    def change(folder):
        path = folder / name
        path.write_bytes(path.read_bytes()[:-1])

    return change


def read_everything(folder):
    dataset = open_dataset(folder)
    dataset.init_seq_order(epoch=1)
    for i in range(dataset.num_seqs):
        dataset.get_data(i, "data")


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda f: (f / "manifest.json").unlink(), ManifestError, "there is no manifest"),
        (lambda f: (f / "manifest.json").write_text("{"), ManifestError, "malformed"),
        (edit_manifest(version=2), ManifestVersionError, "expected 1, found 2"),
        (edit_manifest(format="other"), ManifestError, "not a manifest"),
        (edit_manifest(num_seqs=121), ManifestError, "num_seqs is not the sum"),
        (truncate("data-00003-of-00007.hdf"), ShardIntegrityError, "data-00003-of-00007.hdf"),
        (lambda f: (f / "data-00003-of-00007.hdf").unlink(), ShardIntegrityError, "no file"),
        (truncate("index.arrow"), ShardIntegrityError, r"index\.arrow"),
    ],
)
def test_damage_is_a_typed_error(folder, tmp_path, change, error, words):
    copy = damaged_copy(folder, tmp_path, change)
    with pytest.raises(error, match=words):
        read_everything(copy)


def test_a_manifest_cannot_point_outside_its_folder(folder, tmp_path):
    index = json.loads((folder / "manifest.json").read_text())["index"]
    change = edit_manifest(index=index | {"path": "../index.arrow"})
    with pytest.raises(ManifestError, match="outside its folder"):
        ManifestDataset(damaged_copy(folder, tmp_path, change))


def test_the_index_of_another_dataset_is_refused(folder, build_demo, tmp_path):
    other = build_demo("--num_shards=4", "--seq_ordering=random")

    def change(copy):
        shutil.copy(other / "index.arrow", copy)
        info = {"num_bytes": (copy / "index.arrow").stat().st_size}
        manifest = json.loads((copy / "manifest.json").read_text())
        edit_manifest(index=manifest["index"] | info)(copy)

    dataset = open_dataset(damaged_copy(folder, tmp_path, change))
    dataset.init_seq_order(epoch=1)
    with pytest.raises(ShardIntegrityError, match="does not belong to this manifest"):
        dataset.get_data(0, "data")


def test_more_shards_than_maps(build_demo, monkeypatch):
    from seqshard.datasets import manifest as module

    monkeypatch.setattr(module, "_MAX_MAPPED_SHARDS", 3)
    many, few = build_demo("--num_shards=60"), build_demo("--num_shards=4")
    ours, other = (open_dataset(f, seq_ordering="random") for f in (many, few))
    for dataset in (ours, other):
        dataset.init_seq_order(epoch=1)
    for i in range(120):
        np.testing.assert_array_equal(ours.get_data(i, "data"), other.get_data(i, "data"))
    assert len(ours._mapped) <= 3


@settings(deadline=None, max_examples=25)
@given(
    order=st.sampled_from(["default", "random", "laplace:.10", "sorted"]),
    epoch=st.integers(1, 6),
    world=st.integers(1, 6),
    equal=st.booleans(),
)
def test_ranks_share_an_epoch_out(folder, order, epoch, world, equal):
    options = {"seq_ordering": order}
    whole = open_dataset(folder, **options)
    whole.init_seq_order(epoch=epoch)
    total, sizes, parts = Coverage(), set(), []
    for rank in range(world):
        dataset = open_dataset(
            folder, **options, equal_steps=equal, _num_shards=world, _shard_index=rank
        )
        dataset.init_seq_order(epoch=epoch)
        sizes.add(dataset.num_seqs)
        parts.append(set(dataset.get_current_seq_order()))
        total += dataset.coverage()
    assert len(sizes) == 1 or not equal
    assert set().union(*parts) == set(whole.get_current_seq_order())
    if not equal:
        assert total == whole.coverage()


@settings(deadline=None, max_examples=20)
@given(
    order=st.sampled_from(["random", "laplace:.10"]),
    world=st.integers(1, 4),
    new_world=st.integers(1, 4),
    steps=st.integers(0, 12),
)
def test_resuming_misses_nothing_and_repeats_nothing(folder, order, world, new_world, steps):
    def read(dataset, first, count):
        stop = min(dataset.num_seqs, first + count)
        for i in range(first, stop):
            dataset.load_seqs(i, i + 1)
        return [dataset.get_corpus_seq_idx(i) for i in range(first, stop)]

    options = {"seq_ordering": order}
    seen, states = [], []
    for rank in range(world):
        dataset = open_dataset(folder, **options, _num_shards=world, _shard_index=rank)
        dataset.init_seq_order(epoch=2)
        seen += read(dataset, 0, steps + rank)
        count = min(dataset.num_seqs, steps + rank)
        states.append(json.loads(json.dumps(dataset.state_dict(count))))
    assert len(json.dumps(states[0])) < 500
    for rank in range(new_world):
        dataset = open_dataset(folder, **options, _num_shards=new_world, _shard_index=rank)
        dataset.load_state_dict(merge_states(states))
        dataset.init_seq_order(epoch=2)
        seen += read(dataset, 0, dataset.num_seqs)
    whole = open_dataset(folder, **options)
    whole.init_seq_order(epoch=2)
    assert sorted(seen) == sorted(whole.get_current_seq_order())


def test_a_state_of_another_dataset_is_refused(folder, build_demo):
    dataset = open_dataset(folder, seq_ordering="random")
    dataset.init_seq_order(epoch=1)
    state = dataset.state_dict(3)
    other = open_dataset(build_demo("--num_shards=4"), seq_ordering="random")
    with pytest.raises(StaleStateError):
        other.load_state_dict(state)
