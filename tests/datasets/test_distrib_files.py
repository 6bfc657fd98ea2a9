"""DistributeFilesDataset next to RETURNN's, on the same files."""

import os
import pickle

import numpy as np
import pytest
from returnn.datasets.distrib_files import DistributeFilesDataset as Oracle

from seqshard.datasets import CachedFile, init_dataset
from seqshard.datasets.distrib_files import DistributeFilesDataset
from seqshard.datasets.ranks import distributed_rank_and_size
from seqshard.datasets.writers import SimpleHDFWriter
from seqshard.io.errors import ConfigError, OutputError

NUM_FILES = 11


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Files of very different sizes."""
    folder = tmp_path_factory.mktemp("files")
    rng = np.random.default_rng(1)
    paths = []
    for number in range(NUM_FILES):
        path = str(folder / f"part-{number}.hdf")
        with SimpleHDFWriter(path, dim=4) as writer:
            for index in range(int(rng.integers(1, 9))):
                length = int(rng.integers(1, 40))
                inputs = rng.standard_normal((1, length, 4)).astype("float32")
                classes = rng.integers(0, 9, (1, length)).astype("int32")
                writer.insert_batch(inputs, [length], [f"{number}/{index}"], {"classes": classes})
        paths.append(path)
    return paths


def random_hdf(files):
    return {"class": "HDFDataset", "files": list(files), "seq_ordering": "random"}


def meta(files):
    return {
        "class": "MetaDataset",
        "datasets": {
            "a": {"class": "HDFDataset", "files": [a for a, _ in files], "seq_ordering": "random"},
            "b": {"class": "HDFDataset", "files": [b["x"][0] for _, b in files]},
        },
        "data_map": {"data": ("a", "data"), "classes": ("b", "classes")},
        "seq_order_control_dataset": "a",
    }


def cached_hdf(files):
    return {**random_hdf(files), "files": [CachedFile(path) for path in files]}


def make(cls, files, get_sub=random_hdf, **options):
    if cls is Oracle:
        options = {"use_worker_proc": False, "sharding_fix": True, **options}
    dataset = cls(files=files, get_sub_epoch_dataset=get_sub, **options)
    dataset.initialize()
    return dataset


def read_epoch(dataset, epoch):
    dataset.init_seq_order(epoch=epoch)
    seen, index = [], 0
    while dataset.is_less_than_num_seqs(index):
        dataset.load_seqs(index, index + 1)
        keys = dataset.get_data_keys()
        seen.append(
            {
                "tag": dataset.get_tag(index),
                "lengths": dict(dataset.get_seq_length(index).dict),
                "frac": dataset.get_complete_frac(index),
                **{key: dataset.get_data(index, key).tolist() for key in keys},
            }
        )
        index += 1
    assert dataset.num_seqs == index
    return seen


def assert_same(files, get_sub=random_hdf, epochs=(1, 2, 3, 6, 7), **options):
    ours, theirs = (
        make(cls, files, get_sub, **options) for cls in (DistributeFilesDataset, Oracle)
    )
    for epoch in epochs:
        assert read_epoch(ours, epoch) == read_epoch(theirs, epoch)
        for key in ours.get_data_keys():
            assert ours.get_data_dtype(key) == theirs.get_data_dtype(key)
            assert ours.is_data_sparse(key) == theirs.is_data_sparse(key)
            assert ours.get_data_dim(key) == theirs.get_data_dim(key)
            assert ours.get_data_shape(key) == theirs.get_data_shape(key)
    assert ours.get_data_keys() == theirs.get_data_keys()
    assert ours.get_target_list() == theirs.get_target_list()
    assert ours.num_outputs == theirs.num_outputs
    assert ours.num_inputs == theirs.num_inputs
    assert ours.labels == theirs.labels
    theirs.finish_epoch(free_resources=True)
    return ours


@pytest.mark.parametrize("ordering", ["default", "random"])
@pytest.mark.parametrize("partition_epoch", [1, 3, NUM_FILES])
def test_same_as_returnn(files, ordering, partition_epoch):
    assert_same(files, seq_ordering=ordering, partition_epoch=partition_epoch)


@pytest.mark.parametrize("options", [{"random_seed_offset": 5}, {"fixed_random_seed": 3}])
def test_seeds(files, options):
    assert_same(files, seq_ordering="random", partition_epoch=4, **options)


@pytest.mark.parametrize("shard", range(3))
def test_shards(files, shard):
    options = {"seq_ordering": "random", "partition_epoch": 2, "_num_shards": 3}
    assert_same(files, _shard_index=shard, **options)
    assert_same(files, _shard_index=shard, sharding_fix=False, **options)


def test_trees_of_files(files):
    trees = [(path, {"x": [path]}) for path in files]
    assert_same(trees, meta, seq_ordering="random", partition_epoch=3)


def test_every_sequence_once_per_full_epoch(files):
    tags = []
    for shard in range(2):
        options = {"partition_epoch": 3, "seq_ordering": "random", "_num_shards": 2}
        dataset = make(DistributeFilesDataset, files, _shard_index=shard, **options)
        tags += [row["tag"] for epoch in (4, 5, 6) for row in read_epoch(dataset, epoch)]
    everything = make(DistributeFilesDataset, files)
    assert sorted(tags) == sorted(everything.get_all_tags())
    assert everything.get_total_num_seqs() == len(tags)


def test_arrays_are_handed_on_without_a_copy(files):
    dataset = make(DistributeFilesDataset, files)
    dataset.init_seq_order(epoch=1)
    dataset.load_seqs(0, 1)
    array = dataset.get_data(0, "data")
    assert not array.flags.owndata
    assert not array.flags.writeable


def test_life_cycle(files):
    dataset = init_dataset(
        {
            "class": "DistributeFilesDataset",
            "files": files,
            "get_sub_epoch_dataset": random_hdf,
            "partition_epoch": 3,
        }
    )
    assert dataset.have_seqs()
    assert dataset.num_seqs == 0
    assert not dataset.is_less_than_num_seqs(0)
    first = read_epoch(dataset, 1)
    dataset.finish_epoch()
    assert dataset.num_seqs == 0
    with pytest.raises(ConfigError, match="no epoch was started"):
        dataset.get_tag(0)
    dataset.finish_epoch(free_resources=True)
    assert read_epoch(dataset, 1) == first
    for method in (dataset.get_all_tags, dataset.get_total_num_seqs):
        with pytest.raises(NotImplementedError, match="with partition_epoch > 1"):
            method()


def test_pickle(files):
    dataset = make(DistributeFilesDataset, files, seq_ordering="random", partition_epoch=2)
    expected = read_epoch(dataset, 3)
    for path in files:
        os.utime(path)
    copy = pickle.loads(pickle.dumps(dataset))
    assert copy.num_outputs == dataset.num_outputs
    assert read_epoch(copy, 3) == expected


def test_the_file_list_is_asked_for_once(files):
    calls = []

    def listed():
        calls.append(1)
        return files

    dataset = make(DistributeFilesDataset, listed, partition_epoch=2)
    for epoch in range(1, 6):
        dataset.init_seq_order(epoch=epoch)
    assert len(calls) == 1


def test_ranks(files, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert distributed_rank_and_size() == (1, 2)
    options = {"seq_ordering": "random", "partition_epoch": 2}
    ranked = make(DistributeFilesDataset, files, distrib_shard_files=True, **options)
    sharded = make(DistributeFilesDataset, files, _num_shards=2, _shard_index=1, **options)
    assert read_epoch(ranked, 3) == read_epoch(sharded, 3)
    copy = pickle.dumps(ranked)
    monkeypatch.setenv("WORLD_SIZE", "5")
    assert read_epoch(pickle.loads(copy), 3) == read_epoch(sharded, 3)
    with pytest.raises(ConfigError, match="shard 1 of 5, which is the rank, found shard 0"):
        make(DistributeFilesDataset, files, distrib_shard_files=True, _num_shards=3)
    monkeypatch.setenv("RANK", "x")
    with pytest.raises(ConfigError, match="must be numbers"):
        distributed_rank_and_size()


def test_rank_of_a_returnn_config(monkeypatch):
    import returnn.config
    from returnn.config import Config, set_global_config

    monkeypatch.setattr(returnn.config, "_global_config", None)
    set_global_config(Config({"__debug_dummy_distributed_rank_and_size": (2, 7)}))
    assert distributed_rank_and_size() == (2, 7)
    monkeypatch.setenv("RANK", "1")
    set_global_config(Config({}))
    assert distributed_rank_and_size() == (0, 1)


def test_copies_are_made_ahead(files, tmp_path, monkeypatch):
    monkeypatch.setenv("SEQSHARD_FILE_CACHE", str(tmp_path / "cache"))
    options = {"partition_epoch": 4, "seq_ordering": "random"}
    expected = make(DistributeFilesDataset, files, **options)
    dataset = make(DistributeFilesDataset, files, cached_hdf, **options)
    for epoch in range(1, 6):
        assert read_epoch(dataset, epoch) == read_epoch(expected, epoch)
        used = dataset._current.files
        assert all(path.startswith(str(tmp_path / "cache")) for path in used)
        ahead = dataset._copies.get(epoch + 1)
        assert all(path.startswith(str(tmp_path / "cache")) for path in ahead["files"])
    dataset.finish_epoch(free_resources=True)


def test_a_cache_for_two_sub_epochs_serves_many(files, tmp_path, monkeypatch):
    monkeypatch.setenv("SEQSHARD_FILE_CACHE", str(tmp_path / "cache"))
    total = sum(map(os.path.getsize, files))
    monkeypatch.setenv("SEQSHARD_FILE_CACHE_BYTES", str(total // 2))
    dataset = make(DistributeFilesDataset, files, cached_hdf, partition_epoch=NUM_FILES)
    for epoch in range(1, 2 * NUM_FILES):
        assert read_epoch(dataset, epoch)
    monkeypatch.setenv("SEQSHARD_FILE_CACHE_BYTES", "100")
    with pytest.raises(OutputError, match="larger than the whole cache"):
        make(DistributeFilesDataset, files[:1], cached_hdf)


def with_partition(files):
    return {**random_hdf(files), "partition_epoch": 2}


def without_order(files):
    return {"class": "HDFDataset", "files": files}


def test_wrong_options(files):
    for get_sub, options, message in (
        (with_partition, {}, "must not have a partition_epoch .found 2"),
        (without_order, {}, "must say how its sequences are ordered"),
        (random_hdf, {"partition_epoch": 12}, "at least 12 files, found 11"),
        (random_hdf, {"preload_next_n_sub_epochs": -1}, "is negative"),
    ):
        with pytest.raises(ConfigError, match=message):
            make(DistributeFilesDataset, files, get_sub, **options)
    dataset = make(DistributeFilesDataset, files, seq_ordering="sorted")
    with pytest.raises(ConfigError, match=r"unknown order of files .*found 'sorted'"):
        dataset.init_seq_order(epoch=1)
    dataset = make(DistributeFilesDataset, files, _num_shards=6, _shard_index=0, partition_epoch=2)
    with pytest.raises(ConfigError, match="at least 12 files"):
        dataset.init_seq_order(epoch=1)
    for order in ({"seq_list": ["a"]}, {"seq_order": [0]}):
        with pytest.raises(ConfigError, match="no list of its sequences"):
            dataset.init_seq_order(epoch=1, **order)
