"""The base class, sequences and the registry."""

import copy
import pickle
import subprocess
import sys

import numpy as np
import pytest
from returnn.datasets.basic import Dataset as ReturnnDataset
from returnn.datasets.basic import DatasetSeq as ReturnnDatasetSeq
from returnn.datasets.basic import convert_data_dims as returnn_convert_data_dims

import seqshard.datasets
from seqshard.datasets import DatasetSeq, get_dataset_class, init_dataset
from seqshard.datasets.basic import Dataset, OptionalNotImplementedError, convert_data_dims
from seqshard.datasets.registry import parse_dataset_str
from seqshard.io.errors import ConfigError, SourceNotFoundError


class Numbers(Dataset):
    """Sequence i holds the numbers 0 .. i - 1."""

    def __init__(self, count, *, scale=1, **kwargs):
        super().__init__(**kwargs)
        self.count = count
        self.scale = scale
        self.num_inputs = 1
        self.num_outputs = {"data": (1, 2), "classes": (9, 1)}
        self.labels = {"classes": list("abcdefghi")}
        self._order = []

    def supports_sharding(self):
        return True

    def init_seq_order(self, epoch=None, seq_list=None, seq_order=None):
        super().init_seq_order(epoch, seq_list, seq_order)
        self._order = self.get_seq_order_for_epoch(epoch, self.count, lambda i: i)
        return True

    @property
    def num_seqs(self):
        return len(self._order)

    def get_total_num_seqs(self, *, fast=False):
        return self.count

    def get_data(self, seq_idx, key):
        frames = np.arange(self._order[seq_idx]) * self.scale
        return frames[:, None].astype("float32") if key == "data" else frames % 9

    def get_seq_length(self, seq_idx):
        return DatasetSeq(seq_idx, self.get_data(seq_idx, "data")).num_frames


def test_import_is_light():
    code = (
        "import sys, seqshard.datasets as d; d.Dataset, d.NumbersDict; heavy = "
        "{'apache_beam', 'torch', 'returnn', 'pyarrow', 'fsspec', 'h5py', 'pandas'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.stdout.strip(), result.stderr) == ("[]", "")


def test_every_exported_name_has_a_home():
    assert set(seqshard.datasets.__all__) <= set(dir(seqshard.datasets))
    assert seqshard.datasets.Dataset is Dataset
    with pytest.raises(AttributeError, match="has no attribute 'NoSuchDataset'"):
        seqshard.datasets.NoSuchDataset  # noqa: B018


def test_an_epoch():
    dataset = init_dataset({"class": Numbers, "count": 9, "seq_ordering": "reverse", "name": "x"})
    assert (dataset.epoch, dataset.num_seqs, repr(dataset)) == (None, 0, "<Numbers 'x' epoch=None>")
    dataset.init_seq_order(epoch=1)
    lengths = []
    while dataset.is_less_than_num_seqs(len(lengths)):
        seq_idx = len(lengths)
        dataset.load_seqs(seq_idx, seq_idx) if seq_idx % 2 else None
        lengths.append(dataset.get_seq_length(seq_idx)["data"])
        assert dataset.get_tag(seq_idx) == f"seq-{seq_idx}"
        np.testing.assert_array_equal(
            dataset.get_data_slice(seq_idx, "data", 2, 4), dataset.get_data(seq_idx, "data")[2:4]
        )
    assert lengths == [8, 7, 6, 5, 4, 3, 2, 1, 0]
    assert dataset.get_complete_frac(8) == 1
    assert dataset.have_seqs()
    dataset.finish_epoch(free_resources=True)
    assert dataset.epoch is None


def test_load_seqs_with_a_bad_range():
    dataset = Numbers(3)
    for start, end in [(-1, 2), (3, 2)]:
        with pytest.raises(ValueError, match="is no range of sequences"):
            dataset.load_seqs(start, end)


def test_pickle_and_copy_keep_options_and_epoch():
    dataset = Numbers(
        5,
        scale=3,
        name="train",
        seq_ordering="random",
        chunking="5:2",
        context_window=3,
        window=2,
        equal_steps=True,
    )
    dataset.initialize()
    dataset.init_seq_order(epoch=4)
    for twin in (pickle.loads(pickle.dumps(dataset)), copy.deepcopy(dataset)):
        assert (twin.epoch, twin.num_seqs, twin.scale, twin.name) == (4, 0, 3, "train")
        assert twin.equal_steps
        assert (twin.chunk_size, twin.chunk_step, twin.window) == (5, 2, 3)
        twin.init_seq_order(epoch=4)
        np.testing.assert_array_equal(twin._order, dataset._order)


def test_pickle_of_remapped_options():
    class Remapped(Dataset):
        _getnewargs_exclude_attrs = frozenset({"name"})
        _getnewargs_remap = {"path": "where"}  # noqa: RUF012

        def __init__(self, path, **kwargs):
            super().__init__(**kwargs)
            self.where = path

    _, (_, kwargs, _) = Remapped("a", name="b").__reduce__()
    assert kwargs["path"] == "a"
    assert "name" not in kwargs


def test_sharding():
    dataset = Numbers(10)
    dataset.initialize()
    shares = []
    for shard in range(3):
        dataset.set_sharding(num_shards=3, shard_index=shard)
        dataset.init_seq_order(epoch=1)
        shares.append(list(dataset._order))
    assert shares == [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]]
    with pytest.raises(ConfigError, match="out of range"):
        dataset.set_sharding(num_shards=3, shard_index=3)
    with pytest.raises(ConfigError, match="does not support sharding"):
        Dataset(_num_shards=2).init_seq_order(epoch=1)


def test_complete_frac_is_theirs():
    ours, theirs = Dataset(), ReturnnDataset()
    for dataset in (ours, theirs):
        dataset.init_seq_order(epoch=1)
    for seq_idx in (0, 1, 17, 10**6):
        assert ours.get_complete_frac(seq_idx) == theirs.get_complete_frac(seq_idx)
        assert ours.get_complete_frac(seq_idx, allow_only_lr_suitable=True) is None
        assert Dataset.generic_complete_frac(seq_idx, 20) == ReturnnDataset.generic_complete_frac(
            seq_idx, 20
        )
    estimated = Dataset(estimated_num_seqs=4)
    assert estimated.get_complete_frac(1) == 0.5
    with pytest.raises(IndexError, match="there is no sequence 4 of 4"):
        estimated.get_complete_frac(4)


def test_what_the_data_look_like():
    for num_outputs in (
        {"data": (7, 2), "classes": (5, 1)},
        {"data": [7, 3], "text": (9, 1), "other": (4, 2)},
        {"other": (3, 1)},
    ):
        ours, theirs = Dataset(window=3), ReturnnDataset(window=3)
        for dataset in (ours, theirs):
            dataset.num_inputs, dataset.num_outputs = 7, num_outputs
            dataset._base_init()
        for key in ("data", "classes", "text", "other"):
            for method in ("get_data_dim", "get_data_dtype", "is_data_sparse", "get_data_shape"):
                assert getattr(ours, method)(key) == getattr(theirs, method)(key)
        assert ours.get_data_keys() == theirs.get_data_keys()
        np.testing.assert_array_equal(ours.zpad, theirs.zpad)


def test_window_without_data():
    dataset = Dataset(window=3)
    dataset.num_outputs = {"classes": (5, 1)}
    with pytest.raises(ConfigError, match="window needs the data key 'data'"):
        dataset.initialize()


@pytest.mark.parametrize(
    "labels", [list("abc"), ["a", "bc", "d"], [chr(i) for i in range(256)]], ids=len
)
def test_serialize_data(labels):
    ours, theirs = Dataset(), ReturnnDataset()
    ours.labels = theirs.labels = {"classes": labels}
    assert ours.can_serialize_data("classes")
    assert not ours.can_serialize_data("data")
    for data in (np.array([0, 2, 1, 1]), np.array([], "int32")):
        assert ours.serialize_data("classes", data) == theirs.serialize_data("classes", data)
    assert ours.serialize_data("classes", np.array(1)) == labels[1]


def test_old_style_subclass():
    class Old(Dataset):
        def get_input_data(self, sorted_seq_idx):
            return np.full((2, 3), sorted_seq_idx)

        def get_targets(self, target, sorted_seq_idx):
            return np.array([sorted_seq_idx, len(target)])

    assert Old().get_data(5, "data").tolist() == [[5, 5, 5], [5, 5, 5]]
    assert Old().get_data(5, "classes").tolist() == [5, 7]


def test_sparse_slices():
    class Coordinates(Dataset):
        arrays = {  # noqa: RUF012
            "a[sparse:coo:2:0]": np.array([0, 0, 2, 3, 3, 5]),
            "a[sparse:coo:2:1]": np.array([1, 2, 0, 4, 5, 1]),
        }

        def get_data(self, seq_idx, key):
            return self.arrays[key]

    dataset = Coordinates()
    assert dataset.get_data_slice(0, "a[sparse:coo:2:0]", 2, 5).tolist() == [0, 1, 1]
    assert dataset.get_data_slice(0, "a[sparse:coo:2:1]", 2, 5).tolist() == [0, 4, 5]


def test_what_a_dataset_need_not_have():
    dataset = Dataset(name="base")
    for call in (
        dataset.get_all_tags,
        dataset.get_total_num_seqs,
        dataset.get_current_seq_order,
        lambda: dataset.get_corpus_seq(0),
        lambda: dataset.get_estimated_seq_length(0),
        lambda: dataset.get_times(0),
        dataset.get_num_timesteps,
    ):
        with pytest.raises(OptionalNotImplementedError, match="'base'"):
            call()
    assert dataset.len_info() == "Dataset, sequences: unknown, frames: unknown"
    assert dataset.get_corpus_seq_idx(3) == 3


def test_random_seed_offset_from_the_environment(monkeypatch):
    monkeypatch.setenv("RETURNN_RANDOM_SEED_OFFSET", "17")
    assert Dataset().random_seed_offset == ReturnnDataset().random_seed_offset == 17
    assert Dataset(random_seed_offset=3).random_seed_offset == 3


def test_options_from_a_config():
    from returnn.config import Config

    config = Config()
    config.update({"window": 3, "chunking": "20:10", "batching": "random", "context_window": 5})
    for given in ({}, {"window": None, "chunking": "7"}, {"seq_ordering": "sorted"}):
        ours, theirs = dict(given), dict(given)
        Dataset.kwargs_update_from_config(config, ours)
        ReturnnDataset.kwargs_update_from_config(config, theirs)
        assert ours == theirs
    for values in ({}, {"on_size_limit": "chunk", "batch_size": 9}, {"chunking": "1"}):
        config = Config()
        config.update(values)
        assert Dataset.get_default_kwargs_eval(config) == ReturnnDataset.get_default_kwargs_eval(
            config
        )
        assert Dataset.get_default_kwargs_train(config) == {}
    assert Dataset.from_config(config, name="x").chunk_size == 1


def test_dataset_seq_is_theirs():
    array, scalar = np.zeros((3, 2)), np.array(5)
    for args, kwargs in (
        ((1, array), {}),
        ((np.int64(1), array), {"targets": np.zeros(4), "seq_tag": ""}),
        ((2, {"data": array, "x": scalar}), {"seq_tag": "tag", "complete_frac": 0.5}),
    ):
        ours, theirs = DatasetSeq(*args, **kwargs), ReturnnDatasetSeq(*args, **kwargs)
        assert (ours.seq_idx, ours.seq_tag) == (theirs.seq_idx, theirs.seq_tag)
        assert ours.complete_frac == theirs.complete_frac
        assert ours.num_frames == theirs.num_frames
        assert list(ours.get_data_keys()) == list(theirs.get_data_keys())
        assert ours.get_data("data") is array
    for args, kwargs, message in (
        (("1", array), {}, "seq_idx is a str"),
        ((1, {"data": [1]}), {}, "'data' of 'seq-1' is a list"),
        ((1, {"data": array}), {"targets": array}, "put them into it"),
    ):
        with pytest.raises(TypeError, match=message):
            DatasetSeq(*args, **kwargs)


def test_init_dataset_forms():
    options = {"class": "Dataset", "name": "a"}
    parent = Dataset(random_seed_offset=7, _num_shards=3, _shard_index=1)

    class Ready(Dataset):
        num_outputs = property(lambda self: {"data": (1, 2)}, lambda self, value: None)

        def supports_sharding(self):
            return True

    made = init_dataset(
        lambda: {"class": Ready, "name": "a"},
        extra_kwargs={"name": "b"},
        default_kwargs={"window": 5, "random_seed_offset": 1},
        parent_dataset=parent,
    )
    assert (made.name, made.window, made.random_seed_offset) == ("b", 5, 1)
    assert (made._num_shards, made._shard_index) == (3, 1)
    assert init_dataset(made) is made
    assert options == {"class": "Dataset", "name": "a"}
    assert get_dataset_class("Dataset") is Dataset
    assert get_dataset_class("NoSuchDataset") is None
    with pytest.raises(ConfigError, match="Dataset class 'NoSuchDataset' not found"):
        init_dataset({"class": "NoSuchDataset"})
    with pytest.raises(ConfigError, match="have no 'class'"):
        init_dataset({"files": []})
    with pytest.raises(TypeError, match="is no Dataset"):
        init_dataset({"class": dict})


def test_dataset_strings(tmp_path):
    first, second = tmp_path / "a.hdf", tmp_path / "b.hdf"
    first.touch()
    second.touch()
    text = f"{first},{second},"
    assert parse_dataset_str(text) == {"class": "HDFDataset", "files": [str(first), str(second)]}
    assert parse_dataset_str("{'class': 'X', 'files': ['a']}") == {"class": "X", "files": ["a"]}
    assert parse_dataset_str("X:files=['a'], partition_epoch=-2") == {
        "class": "X",
        "files": ["a"],
        "partition_epoch": -2,
    }
    with pytest.raises(SourceNotFoundError, match=r"no-such\.hdf: the HDF file"):
        parse_dataset_str("no-such.hdf")
    for text, message in (
        ("X:files=open('x')", "expected literal values only"),
        ("X:**{}", "malformed"),
        ("X:1", "malformed"),
        ("X:a=", "malformed"),
        ("X:a=1) or dict(", "malformed"),
        ("{__import__('os')}", "literal values only"),
        ("config:train", "no 'train' in an active RETURNN config"),
        ("sprint:--x", "needs a RETURNN config"),
        (",", "no dataset in"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_dataset_str(text)


def test_config_string_inside_of_returnn():
    from returnn.config import Config, global_config_ctx

    config = Config()
    config.typed_dict["train"] = {"class": "X"}
    with global_config_ctx(config):
        assert parse_dataset_str("config:train") == {"class": "X"}


@pytest.mark.parametrize("dims", [5, {"data": 3, "classes": (4, 1)}, {"x": [2, 3]}])
def test_convert_data_dims(dims):
    assert convert_data_dims(dims) == returnn_convert_data_dims(dims)


def test_convert_data_dims_errors():
    with pytest.raises(ConfigError, match="dimension of 'x' is malformed"):
        convert_data_dims({"x": (1, 0)})
    assert convert_data_dims({"x": {"dim": 1}}, leave_dict_as_is=True) == {"x": {"dim": 1}}
