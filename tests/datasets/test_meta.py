"""MetaDataset next to RETURNN's, on the same files."""

import json
import pickle

import numpy as np
import pytest
from returnn.datasets.basic import init_dataset as returnn_init_dataset

from seqshard.datasets import init_dataset
from seqshard.datasets.writers import SimpleHDFWriter
from seqshard.io.errors import (
    ConfigError,
    MissingSequenceError,
    SourceFormatError,
    SourceNotFoundError,
)

NUM_SEQS = 23

# RETURNN leaves the text files that it reads to the garbage collector.
returnn_leaves_files_open = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)


def write(path, tags, seed, dim, dtype="float32", **extra):
    """One sequence per tag; lengths depend on the seed."""
    rng = np.random.default_rng(seed)
    with SimpleHDFWriter(path, dim=dim, ndim=2 if dtype == "float32" else 1) as writer:
        for tag in tags:
            length = int(rng.integers(1, 30))
            shape = (1, length, dim) if dtype == "float32" else (1, length)
            inputs = rng.integers(0, dim, shape).astype(dtype)
            more = {key: value[None] for key, value in extra.items()}
            writer.insert_batch(inputs, [length], [tag], more or None)
    return str(path)


@pytest.fixture
def files(tmp_path):
    rng = np.random.default_rng(0)
    tags = [f"corpus/{i}/ü" for i in range(NUM_SEQS)]
    shuffled = [tags[i] for i in rng.permutation(NUM_SEQS)]
    renamed = [f"line-{i}" for i in range(NUM_SEQS)]
    numbers = np.arange(3, dtype="int32")
    return {
        "tags": tags,
        "features": write(tmp_path / "features.hdf", tags, 1, 5),
        "classes": write(tmp_path / "classes.hdf", [*shuffled, "more"], 2, 9, "int32"),
        "lines": write(tmp_path / "lines.hdf", renamed, 3, 7, "int32", more=numbers),
        "few": write(tmp_path / "few.hdf", tags[:-2], 4, 9, "int32"),
    }


def options_of(files, control=None, sub=None, **options):
    """A MetaDataset of features and classes."""
    first = {"class": "HDFDataset", "files": [files["features"]]}
    second = {"class": "HDFDataset", "files": [files["classes"]]}
    if sub:
        (first if control in (None, "f") else second).update(sub)
    return {
        "class": "MetaDataset",
        "datasets": {"f": first, "c": second},
        "data_map": {"data": ("f", "data"), "classes": ("c", "data")},
        **({"seq_order_control_dataset": control} if control else {}),
        **options,
    }


def read_epoch(dataset):
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
    return seen


def describe(dataset):
    keys = dataset.get_data_keys()
    return {
        "keys": keys,
        "targets": dataset.get_target_list(),
        "num_inputs": dataset.num_inputs,
        "num_outputs": {key: tuple(value) for key, value in dataset.num_outputs.items()},
        "labels": dataset.labels,
        "dims": [dataset.get_data_dim(key) for key in keys],
        "dtypes": [dataset.get_data_dtype(key) for key in keys],
        "shapes": [dataset.get_data_shape(key) for key in keys],
        "sparse": [dataset.is_data_sparse(key) for key in keys],
        "sorting": dataset.supports_seq_order_sorting(),
        "sharding": dataset.supports_sharding(),
        "tags": dataset.get_all_tags(),
        "total": dataset.get_total_num_seqs(),
    }


def assert_same(options, epochs=(1, 2, 4), **order):
    ours, theirs = init_dataset(options), returnn_init_dataset(options)
    for epoch in epochs:
        for dataset in (ours, theirs):
            dataset.init_seq_order(epoch=epoch, **order)
        assert list(ours.get_current_seq_order()) == list(theirs.get_current_seq_order())
        assert ours.num_seqs == theirs.num_seqs
        assert read_epoch(ours) == read_epoch(theirs)
    assert describe(ours) == describe(theirs)
    return ours


ORDERS = [
    {},
    {"seq_ordering": "reverse"},
    {"seq_ordering": "random"},
    {"seq_ordering": "random", "partition_epoch": 3},
    {"seq_ordering": "sorted_reverse"},
    {"seq_ordering": "laplace:.4", "partition_epoch": 2},
    {"seq_ordering": "random:2", "random_seed_offset": 7},
    {"seq_ordering": "random", "fixed_random_seed": 3},
]


@pytest.mark.parametrize("order", ORDERS)
def test_own_order(files, order):
    assert_same(options_of(files, **order))


@pytest.mark.parametrize("order", ORDERS)
def test_order_of_the_control_dataset(files, order):
    assert_same(options_of(files, "f", order, seq_ordering="random", partition_epoch=5))


def test_control_dataset_with_other_keys_only(files):
    options = options_of(files, "few", seq_ordering="random")
    options["datasets"]["few"] = {
        "class": "HDFDataset",
        "files": [files["few"]],
        "seq_ordering": "random",
    }
    options["data_map"] = {"x": ("few", "data"), "classes": ("c", "data")}
    ours = assert_same(options)
    assert ours.get_total_num_seqs() == NUM_SEQS - 2
    assert sorted(ours.datasets) == ["c", "few"]


@pytest.mark.parametrize("shard", range(3))
def test_shards(files, shard):
    order = {"seq_ordering": "random"}
    assert_same(options_of(files, "f", order, _num_shards=3, _shard_index=shard))
    assert_same(options_of(files, None, None, _num_shards=3, _shard_index=shard, **order))


def test_order_by_tags_and_indices(files):
    tags = [files["tags"][i] for i in (4, 1, 20)]
    assert_same(options_of(files), seq_list=tags)
    assert_same(options_of(files, "f"), seq_order=[7, 7, 0])
    with pytest.raises(MissingSequenceError, match="entry 'nobody'"):
        init_dataset(options_of(files)).init_seq_order(epoch=1, seq_list=["nobody"])


@returnn_leaves_files_open
@pytest.mark.parametrize("control", [None, "f"])
def test_lists_of_tags(files, tmp_path, control):
    for name, tags in (("f", files["tags"]), ("l", [f"line-{i}" for i in range(NUM_SEQS)])):
        (tmp_path / f"{name}.txt").write_text("".join(f"{tag}\n" for tag in tags))
    options = options_of(files, control, {"seq_ordering": "random"}, seq_ordering="random")
    options["datasets"]["l"] = {"class": "HDFDataset", "files": [files["lines"]]}
    options["data_map"] = {"data": ("f", "data"), "l": ("l", "data"), "more": ("l", "more")}
    paths = {"f": str(tmp_path / "f.txt"), "l": str(tmp_path / "l.txt")}
    ours = assert_same({**options, "seq_list_file": paths})
    assert ours.get_all_tags() == files["tags"]


@returnn_leaves_files_open
def test_one_list_of_tags_is_the_corpus(files, tmp_path):
    path = tmp_path / "some.txt"
    path.write_text("\n".join(files["tags"][3:9]))
    ours = assert_same(options_of(files, seq_list_file=str(path), seq_ordering="random"))
    assert ours.get_total_num_seqs() == 6
    control = init_dataset(options_of(files, "f", seq_list_file=str(path)))
    with pytest.raises(ConfigError, match="not in the order of the control dataset"):
        control.init_seq_order(epoch=1)


@returnn_leaves_files_open
def test_file_of_lengths(files, tmp_path):
    lens = {tag: {"data": 50 - i, "classes": i} for i, tag in enumerate(files["tags"])}
    path = tmp_path / "lens.json"
    path.write_text(json.dumps(lens))
    ours = assert_same(options_of(files, seq_lens_file=str(path), seq_ordering="sorted"))
    assert ours.get_current_seq_order()[0] == NUM_SEQS - 1
    everything = tmp_path / "all.txt"
    everything.write_text("\n".join(files["tags"]))
    both = {"seq_list_file": str(everything), "seq_lens_file": path}
    listed = init_dataset(options_of(files, **both))
    assert listed.get_num_timesteps()["classes"] == sum(range(NUM_SEQS))
    for content in ("[1]", "{", '{"a": "b"}', '{"a": 1'):
        path.write_text(content)
        with pytest.raises(SourceFormatError, match="no file of sequence lengths"):
            init_dataset(options_of(files, **both)).get_num_timesteps()
    path.write_text("{}")
    with pytest.raises(MissingSequenceError, match="entry 'corpus/0/ü': the file of lengths lacks"):
        init_dataset(options_of(files, **both)).get_num_timesteps()
    path.unlink()
    with pytest.raises(SourceNotFoundError, match="does not exist"):
        init_dataset(options_of(files, **both)).get_num_timesteps()


@returnn_leaves_files_open
def test_file_of_lengths_for_the_order_only(files, tmp_path):
    path = tmp_path / "lens.txt"
    path.write_text(repr({tag: 50 - i for i, tag in enumerate(files["tags"])}))
    options = options_of(files, seq_order_seq_lens_file=str(path), seq_ordering="sorted")
    assert_same(options, epochs=(1,))


def test_data_dims(files):
    assert_same(options_of(files, data_dims={"data": [5, 2], "classes": [9, 1]}))
    with pytest.raises(ConfigError, match="data_dims does not have 'classes'"):
        init_dataset(options_of(files, data_dims={"data": [5, 2]}))


def test_nested(files):
    inner = options_of(files, seq_ordering="random")
    options = {
        "class": "MetaDataset",
        "datasets": {"inner": inner, "f": {"class": "HDFDataset", "files": [files["features"]]}},
        "data_map": {"data": ("inner", "data"), "c": ("inner", "classes"), "f": ("f", "data")},
        "seq_order_control_dataset": "inner",
    }
    assert_same(options)


def test_arrays_are_handed_on_without_a_copy(files):
    dataset = init_dataset(options_of(files))
    dataset.init_seq_order(epoch=1)
    dataset.load_seqs(0, 1)
    array = dataset.get_data(0, "data")
    assert not array.flags.owndata
    assert not array.flags.writeable


def test_the_same_epoch_again(files):
    dataset = init_dataset(options_of(files, seq_ordering="random"))
    assert dataset.num_seqs == 0
    assert dataset.init_seq_order(epoch=2) is True
    assert dataset.init_seq_order(epoch=2) is False
    assert dataset.num_seqs == NUM_SEQS
    first = read_epoch(dataset)
    assert dataset.init_seq_order(epoch=2) is True
    assert read_epoch(dataset) == first


def test_construction_does_not_list_tags(files, monkeypatch):
    from seqshard.datasets.hdf import HDFDataset

    for name in ("get_all_tags", "_get_tag_arrays", "_get_tags_of_file"):
        monkeypatch.setattr(HDFDataset, name, None)
    init_dataset(options_of(files))


def test_pickle(files):
    dataset = init_dataset(options_of(files, "f", {"seq_ordering": "random"}))
    copy = pickle.loads(pickle.dumps(dataset))
    for each in (dataset, copy):
        each.init_seq_order(epoch=3)
    assert read_epoch(copy) == read_epoch(dataset)


def test_finish_epoch(files):
    dataset = init_dataset(options_of(files))
    dataset.init_seq_order(epoch=1)
    dataset.finish_epoch(free_resources=True)
    assert dataset.epoch is None
    assert all(each.epoch is None for each in dataset.datasets.values())


def test_set_sharding(files):
    dataset = init_dataset(options_of(files, "f", {"seq_ordering": "random"}))
    seen = []
    for index in range(4):
        dataset.set_sharding(num_shards=4, shard_index=index)
        dataset.init_seq_order(epoch=1)
        seen += [row["tag"] for row in read_epoch(dataset)]
    assert sorted(seen) == sorted(files["tags"])


def test_missing_sequences(files):
    options = options_of(files)
    options["datasets"]["c"]["files"] = [files["few"]]
    message = r"entry 'corpus/2\d/ü': dataset 'c' of the MetaDataset lacks a sequence"
    with pytest.raises(MissingSequenceError, match=message):
        init_dataset(options).init_seq_order(epoch=1)


def test_wrong_options(files, tmp_path):
    for change, message in (
        ({"window": 3}, "neither window nor"),
        ({"shuffle_frames_of_nseqs": 3}, "neither window nor"),
        ({"data_map": {"x": ("f", "data")}}, 'or the key "data"'),
        ({"data_map": {"data": ("nobody", "data")}}, "there is no dataset 'nobody'"),
        ({"data_map": {"data": ("f", "nothing")}}, "dataset 'f' has no data key 'nothing'"),
        ({"seq_order_control_dataset": "nobody"}, "there is no dataset 'nobody'"),
    ):
        with pytest.raises(ConfigError, match=message):
            init_dataset({**options_of(files), **change})
    (tmp_path / "a.txt").write_text("a\n")
    (tmp_path / "b.txt").write_text("a\nb\n")
    for paths, message in (
        ({"f": tmp_path / "a.txt"}, "no file for the dataset 'c'"),
        ({"f": tmp_path / "a.txt", "c": tmp_path / "b.txt"}, "differ in length"),
    ):
        with pytest.raises(ConfigError, match=message):
            init_dataset(options_of(files, seq_list_file=paths)).init_seq_order(epoch=1)
