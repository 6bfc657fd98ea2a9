"""HDFDataset against RETURNN's, over all kinds of files."""

import copy
import gc
import importlib.util
import os
import pathlib
import pickle
import signal

import h5py
import numpy as np
import pytest
from returnn.datasets.hdf import HDFDataset as ReturnnHDFDataset

from seqshard.datasets import HDFDataset, init_dataset
from seqshard.datasets import hdf as hdf_module
from seqshard.io.errors import (
    ConfigError,
    MissingSequenceError,
    ShapeMismatchError,
    SourceFormatError,
    SourceNotFoundError,
)

_spec = importlib.util.spec_from_file_location(
    "hdf_variants", pathlib.Path(__file__).with_name("hdf_variants.py")
)
hdf_variants = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(hdf_variants)
SEQUENCES, VARIANTS = hdf_variants.SEQUENCES, hdf_variants.VARIANTS


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Path per variant."""
    folder = tmp_path_factory.mktemp("hdf")
    for name, write in VARIANTS.items():
        write(str(folder / f"{name}.hdf"))
    return {name: str(folder / f"{name}.hdf") for name in VARIANTS}


def make_both(paths, epoch=1, **options):
    datasets = []
    for cls in (HDFDataset, ReturnnHDFDataset):
        dataset = cls(files=paths, **options)
        dataset.initialize()
        dataset.init_seq_order(epoch=epoch)
        datasets.append(dataset)
    return datasets


def assert_same_array(ours, theirs):
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    np.testing.assert_array_equal(ours, theirs)


def assert_same_format(ours, theirs):
    assert ours.get_data_keys() == theirs.get_data_keys()
    assert ours.get_target_list() == theirs.get_target_list()
    assert ours.target_keys == theirs.target_keys
    assert ours.num_inputs == theirs.num_inputs
    assert ours.num_outputs == theirs.num_outputs
    for key, size in theirs.num_outputs.items():
        assert type(ours.num_outputs[key]) is type(size)
    assert ours.labels == theirs.labels
    assert ours.file_start == theirs.file_start
    for a, b in zip(ours.file_seq_start, theirs.file_seq_start, strict=True):
        assert_same_array(a, b)
    for key in theirs.get_data_keys():
        for method in ("get_data_dim", "get_data_dtype", "is_data_sparse", "get_data_shape"):
            assert getattr(ours, method)(key) == getattr(theirs, method)(key), (method, key)
        assert ours.can_serialize_data(key) == bool(theirs.can_serialize_data(key))
    assert ours.get_all_tags() == theirs.get_all_tags()
    assert ours.get_total_num_seqs() == theirs.get_total_num_seqs()
    if theirs._num_timesteps:
        assert ours.get_num_timesteps() == theirs.get_num_timesteps()
    assert ours.len_info() == theirs.len_info()


def assert_same_epoch(ours, theirs):
    assert ours.num_seqs == theirs.num_seqs
    assert ours.get_current_seq_order() == [int(i) for i in theirs.get_current_seq_order()]
    for i in range(theirs.num_seqs):
        assert ours.is_less_than_num_seqs(i)
        for dataset in (ours, theirs):
            dataset.load_seqs(i, i + 1)
        assert ours.get_tag(i) == theirs.get_tag(i)
        assert ours.get_corpus_seq_idx(i) == theirs.get_corpus_seq_idx(i)
        assert ours.get_complete_frac(i) == theirs.get_complete_frac(i)
        assert ours.get_seq_length(i) == theirs.get_seq_length(i)
        assert dict(ours.get_seq_length(i).items()) == dict(theirs.get_seq_length(i).items())
        assert ours.get_estimated_seq_length(i) == theirs.get_estimated_seq_length(i)
        for key in theirs.get_data_keys():
            assert_same_array(ours.get_data(i, key), theirs.get_data(i, key))
            assert_same_array(
                ours.get_data_slice(i, key, 1, 4), theirs.get_data_slice(i, key, 1, 4)
            )
    assert not ours.is_less_than_num_seqs(theirs.num_seqs)


@pytest.mark.parametrize("name", VARIANTS)
def test_all_files(files, name):
    ours, theirs = make_both([files[name]])
    assert_same_format(ours, theirs)
    assert_same_epoch(ours, theirs)
    for i in (0, ours.num_seqs - 1):
        mine, reference = ours.get_corpus_seq(i), theirs.get_corpus_seq(i)
        assert (mine.seq_tag, mine.seq_idx) == (reference.seq_tag, reference.seq_idx)
        assert list(mine.features) == list(reference.features)
        for key, array in reference.features.items():
            assert_same_array(mine.features[key], array)
            assert_same_array(ours.get_data_by_seq_tag(mine.seq_tag, key), array)


@pytest.mark.parametrize("name", ["contiguous", "gzip", "simple-extra", "no-inputs"])
@pytest.mark.parametrize(
    "options",
    [
        {"seq_ordering": "random", "partition_epoch": 3},
        {"seq_ordering": "laplace:4", "random_seed_offset": 5},
        {"seq_ordering": "sorted_reverse", "_num_shards": 3, "_shard_index": 2},
        {"seq_ordering": "sort_bin_shuffle_x2:.5", "repeat_epoch": 2},
        {"unique_seq_tags": True, "fixed_random_seed": 3, "seq_ordering": "random_sample"},
    ],
    ids=lambda options: options["seq_ordering"],
)
def test_options(files, name, options):
    for epoch in (1, 2, 4):
        assert_same_epoch(*make_both([files[name]], epoch, **options))


@pytest.mark.parametrize("window", [2, 3, 5])
def test_window(files, window):
    paths = [files["simple-extra"]]
    ours, theirs = make_both(paths, window=window)
    assert_same_format(ours, theirs)
    assert_same_epoch(ours, theirs)


def test_several_files(files, tmp_path):
    more = str(tmp_path / "more.hdf")
    others = hdf_variants.make_sequences(9, "more", seed=7)
    for sequence in others:
        sequence["another"] = sequence["text"]
    hdf_variants.write_raw(more, others, ("another", "classes", "text"), storage={"chunks": True})
    ours, theirs = make_both([files["contiguous"], more], seq_ordering="random")
    assert_same_format(ours, theirs)
    assert_same_epoch(ours, theirs)
    assert ours.get_data_keys() == ["data", "classes", "text"]
    assert_same_array(ours.get_data_by_seq_tag("more-3", "text"), others[3]["text"])


def test_add_file_later(files):
    ours = HDFDataset()
    assert (ours.files, ours.file_start, ours.file_seq_start) == ([], [0], [])
    for _ in range(2):
        ours.add_file(pathlib.Path(files["contiguous"]))
    ours.initialize()
    ours.init_seq_order(epoch=1)
    assert ours.num_seqs == 2 * len(SEQUENCES)
    tag = SEQUENCES[3]["tag"]
    ours.init_seq_order(epoch=1, seq_list=[tag])
    assert ours.get_current_seq_order() == [3 + len(SEQUENCES)], "the last one of a tag"


def test_given_orders(files):
    ours, theirs = make_both([files["contiguous"]])
    tags = [sequence["tag"] for sequence in SEQUENCES]
    for given in (
        {"seq_list": [tags[i] for i in (7, 2, 2, 11)]},
        {"seq_order": [3, 1, 20]},
        {"seq_order": range(5)},
        {"seq_order": np.array([4, 4])},
        {"seq_list": []},
    ):
        for dataset in (ours, theirs):
            dataset.init_seq_order(epoch=1, **given)
        assert_same_epoch(ours, theirs)
    with pytest.raises(MissingSequenceError, match=r"entry 'nobody': there is no sequence"):
        ours.init_seq_order(epoch=1, seq_list=["nobody"])
    with pytest.raises(MissingSequenceError, match="expected 0 to 22, found 23"):
        ours.init_seq_order(epoch=1, seq_order=[0, 23])
    with pytest.raises(MissingSequenceError, match="there is no sequence with this tag"):
        ours.get_data_by_seq_tag("x" * 1000, "data")


def test_whether_the_order_changed(files):
    dataset = HDFDataset([files["contiguous"]], seq_ordering="random:2")
    dataset.initialize()
    assert [dataset.init_seq_order(epoch=epoch) for epoch in (1, 1, 2, 3)] == [
        True,
        False,
        False,
        True,
    ]


def test_filter_file(files, tmp_path):
    path = tmp_path / "keep.txt"
    path.write_text("".join(f"{sequence['tag']}\n" for sequence in SEQUENCES[::4]))
    dataset = init_dataset(
        {"class": "HDFDataset", "files": [files["gzip"]], "seq_list_filter_file": str(path)}
    )
    dataset.init_seq_order(epoch=1)
    assert dataset.get_current_seq_order() == list(range(0, 23, 4))
    assert dataset.get_total_num_seqs() == 23


def test_chunks_and_batches(files):
    options = {"chunking": "10:5", "context_window": 3, "seq_ordering": "laplace:4"}
    outcomes = []
    for dataset in make_both([files["contiguous"]], epoch=2, **options):
        batches = dataset.generate_batches(
            recurrent_net=True, batch_size=60, max_seqs=4, used_data_keys={"data", "classes"}
        )
        outcomes.append([])
        while batches.has_more():
            (batch,) = batches.peek_next_n(1)
            batches.advance(1)
            outcomes[-1].append(
                [
                    (part.seq_idx, dict(part.seq_start_frame.items()), part.batch_slice)
                    for part in batch.seqs
                ]
            )
    assert outcomes[0] == outcomes[1]
    assert len(outcomes[0]) > 5


def test_frames_are_views_of_one_map(files):
    dataset, _ = make_both([files["contiguous"]])
    first, second = dataset.get_data(0, "data"), dataset.get_data(0, "data")
    assert np.shares_memory(first, second)
    assert not first.flags.writeable
    assert not first.flags.owndata
    del dataset
    gc.collect()
    np.testing.assert_array_equal(first, SEQUENCES[0]["data"])


def test_cache_byte_size_changes_nothing(files):
    ours, reference = make_both([files["contiguous"]])
    cached = HDFDataset([files["contiguous"]], cache_byte_size=10**6)
    cached.initialize()
    cached.init_seq_order(epoch=1)
    assert_same_epoch(cached, reference)
    assert cached.definite_cache_leftover == 0
    assert ours.batch_set_generator_cache_whole_epoch()


def test_shuffle_frames(files):
    dataset = HDFDataset([files["contiguous"]], shuffle_frames_of_nseqs=4)
    dataset.initialize()
    dataset.init_seq_order(epoch=1)
    data, classes = [], []
    for i in range(dataset.num_seqs):
        dataset.load_seqs(i, i + 1)
        data.append(dataset.get_data(i, "data"))
        classes.append(dataset.get_data(i, "classes"))
    for first in range(0, 23, 4):
        group = range(first, min(first + 4, 23))
        frames = np.concatenate([SEQUENCES[i]["data"] for i in group])
        labels = np.concatenate([SEQUENCES[i]["classes"] for i in group])
        order = np.random.RandomState(first).permutation(len(frames))
        np.testing.assert_array_equal(np.concatenate([data[i] for i in group]), frames[order])
        np.testing.assert_array_equal(np.concatenate([classes[i] for i in group]), labels[order])
        assert [len(data[i]) for i in group] == [len(SEQUENCES[i]["data"]) for i in group]
    with pytest.raises(ConfigError, match="'text' has other lengths"):
        dataset.get_data(0, "text")


def test_shuffle_frames_is_theirs_where_theirs_works(files, tmp_path):
    # RETURNN fails with targets, and with a last group that is not full.
    path = str(tmp_path / "inputs.hdf")
    hdf_variants.write_raw(path, hdf_variants.NOT_EMPTY[:20], ())
    ours = HDFDataset([path], shuffle_frames_of_nseqs=5)
    theirs = ReturnnHDFDataset([path], shuffle_frames_of_nseqs=5, cache_byte_size=10**9)
    theirs.cache_byte_size_limit_at_start = 1  # no preloading thread
    for dataset in (ours, theirs):
        dataset.initialize()
        dataset.init_seq_order(epoch=1)
    theirs._preload_seqs(0, 20)
    for i in range(20):
        np.testing.assert_array_equal(ours.get_data(i, "data"), theirs.get_data(i, "data"))


def test_pickle_copy_and_fork(files):
    for name in ("contiguous", "gzip"):
        dataset, reference = make_both([files[name]], seq_ordering="random")
        dataset.get_data(0, "data")
        for twin in (pickle.loads(pickle.dumps(dataset)), copy.deepcopy(dataset)):
            assert (twin.epoch, twin.num_seqs) == (1, 0)
            twin.init_seq_order(epoch=1)
            assert_same_epoch(twin, reference)
        expected = reference.get_data(5, "data")
        pid = os.fork()
        if pid == 0:
            signal.alarm(300)
            same = np.array_equal(dataset.get_data(5, "data"), expected)
            os._exit(0 if same else 1)
        assert os.waitpid(pid, 0)[1] == 0


def test_open_handles_are_bounded(files, tmp_path, monkeypatch):
    monkeypatch.setattr(hdf_module, "_MAX_MAPPED_FILES", 3)
    monkeypatch.setattr(hdf_module, "_MAX_HDF_HANDLES", 2)
    paths = []
    for i in range(10):
        paths.append(str(tmp_path / f"{i}.hdf"))
        sequences = hdf_variants.make_sequences(4, f"file{i}", seed=i)
        storage = hdf_variants.GZIP if i % 2 else None
        hdf_variants.write_raw(paths[-1], sequences, storage=storage)
    before = len(os.listdir("/proc/self/fd"))
    dataset, reference = make_both(paths, seq_ordering="random")
    theirs = len(reference.h5_files)
    for epoch in (1, 2):
        dataset.init_seq_order(epoch=epoch)
        reference.init_seq_order(epoch=epoch)
        assert_same_epoch(dataset, reference)
    assert len(os.listdir("/proc/self/fd")) - theirs <= before + 3 + 2


def test_empty_file(tmp_path):
    path = str(tmp_path / "empty.hdf")
    with h5py.File(path, "w") as file:
        file.create_dataset("seqLengths", (0, 2), "int32", maxshape=(None, None))
        file.create_dataset("seqTags", (0,), h5py.string_dtype())
        file.create_dataset("inputs", (0, 4), "float32")
    for ordering in ("default", "random", "laplace:.10"):
        dataset = init_dataset({"class": "HDFDataset", "files": [path], "seq_ordering": ordering})
        dataset.init_seq_order(epoch=1)
        assert (dataset.num_seqs, dataset.get_all_tags()) == (0, [])
        assert not dataset.is_less_than_num_seqs(0)
        assert not dataset.have_seqs()


def test_lengths_in_one_column(tmp_path):
    path = str(tmp_path / "old.hdf")
    sequences = hdf_variants.make_sequences(5)
    hdf_variants.write_raw(path, sequences)
    with h5py.File(path, "a") as file:
        lens = file["seqLengths"][:, 0]
        del file["seqLengths"]
        file["seqLengths"] = lens
    dataset = init_dataset(path)
    dataset.init_seq_order(epoch=1)
    for i, sequence in enumerate(sequences):
        np.testing.assert_array_equal(dataset.get_data(i, "classes"), sequence["classes"])


def test_times(tmp_path):
    paths = [str(tmp_path / f"{i}.hdf") for i in range(2)]
    for i, path in enumerate(paths):
        sequences = hdf_variants.make_sequences(5, seed=i)
        hdf_variants.write_raw(path, sequences)
        with h5py.File(path, "a") as file:
            file["times"] = np.arange(len(file["inputs"])) + 1000 * i
    dataset = HDFDataset(paths, seq_ordering="reverse")
    dataset.initialize()
    dataset.init_seq_order(epoch=1)
    assert dataset.get_times(9).tolist() == list(range(dataset.get_seq_length(9)["data"]))
    assert dataset.get_times(4)[0] == 1000
    assert len(dataset.timestamps) == dataset.get_num_timesteps()
    assert HDFDataset(paths[:1]).get_times is not None


def test_damaged_files(files, tmp_path):
    def broken(name, change):
        path = tmp_path / f"{name}.hdf"
        path.write_bytes(pathlib.Path(files["contiguous"]).read_bytes())
        if change is not None:
            with h5py.File(path, "a") as file:
                change(file)
        return str(path)

    def replace(name, data):
        def change(file):
            del file[name]
            file[name] = data

        return change

    def longer(file):
        file["seqLengths"][3, 0] = 10**6

    def negative(file):
        file["seqLengths"][3, 1] = -1

    def outside(file):
        del file["inputs"]
        file["inputs"] = h5py.ExternalLink(files["gzip"], "inputs")

    def outside_group(file):
        del file["targets"]
        file["targets"] = h5py.ExternalLink(files["gzip"], "targets")

    def external(file):
        del file["inputs"]
        file.create_dataset("inputs", (9, 5), "f4", external=[("x.raw", 0, 180)])

    def huge(file):
        del file["seqLengths"]
        file.create_dataset("seqLengths", (10**11, 3), "i4", chunks=(1024, 3))

    for name, change, message in (
        ("short", replace("seqTags", [b"a"]), "seqLengths and seqTags do not fit together"),
        ("columns", replace("seqLengths", np.ones((23, 7), "i4")), r"integers \[sequences, 3\]"),
        ("floats", replace("seqLengths", np.ones((23, 3))), "found float64"),
        ("longer", longer, r"fewer frames than seqLengths says \(expected 1000"),
        ("negative", negative, "row 3.* a length is negative"),
        ("no-tags", lambda file: file.pop("seqTags"), "expected dataset seqTags"),
        ("outside", outside, "'inputs': links that may leave the file are refused"),
        ("group", outside_group, "'targets'.*: links that may leave the file are refused"),
        ("external", external, "data stored outside the file are refused"),
        ("huge", huge, "the table is larger than the file could hold"),
        ("scalar", replace("seqTags", 5), "this is a scalar"),
    ):
        path = broken(name, change)
        with pytest.raises(SourceFormatError, match=message) as info:
            HDFDataset([path])
        assert str(info.value).startswith(path)
        assert str(pickle.loads(pickle.dumps(info.value))) == str(info.value)
    truncated = broken("truncated", None)
    os.truncate(truncated, os.path.getsize(truncated) - 100)
    with pytest.raises(SourceFormatError, match="not a complete HDF file"):
        HDFDataset([truncated])
    with pytest.raises(SourceNotFoundError, match="there is no such file"):
        HDFDataset([str(tmp_path / "nothing.hdf")])
    with pytest.raises(ConfigError, match="has no files"):
        HDFDataset([]).initialize()
    with pytest.raises(ConfigError, match="must be a list"):
        HDFDataset(truncated)


def test_files_that_do_not_fit(files, tmp_path):
    for first, second, message in (
        ("contiguous", "no-inputs", "only some of the files have inputs"),
        ("contiguous", "chunked", r"lacks data keys of the first file \(expected classes, text"),
        ("contiguous", "images", "lacks data keys"),
    ):
        with pytest.raises(ShapeMismatchError, match=message):
            HDFDataset([files[first], files[second]])
    narrow = str(tmp_path / "narrow.hdf")
    sequences = [{**sequence, "data": sequence["data"][:, :3]} for sequence in SEQUENCES]
    hdf_variants.write_raw(narrow, sequences, ("classes", "text"))
    message = (
        r"narrow\.hdf: the data key 'data' does not fit .*dimension 5, 2 axes as in .*found dim"
    )
    with pytest.raises(ShapeMismatchError, match=message):
        HDFDataset([files["contiguous"], narrow])


def test_targets_without_sizes(tmp_path):
    path = str(tmp_path / "no-sizes.hdf")
    hdf_variants.write_raw(path, SEQUENCES, sizes=False)
    dataset = HDFDataset([path])
    assert dataset.num_outputs == {"data": [5, 2], "classes": (1, 1)}


def test_misuse(files):
    dataset, _ = make_both([files["contiguous"]])
    with pytest.raises(KeyError, match="no data key 'nothing'"):
        dataset.get_data(0, "nothing")
    with pytest.raises(IndexError):
        dataset.get_data(99, "data")
    with pytest.raises(IndexError, match="there is no sequence 23 of 23"):
        dataset.load_seqs(22, 24)


def test_names_that_returnn_has_here():
    assert hdf_module.SimpleHDFWriter.__name__ == "SimpleHDFWriter"
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        hdf_module.Nothing  # noqa: B018
