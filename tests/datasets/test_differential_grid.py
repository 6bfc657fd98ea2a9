"""Options, files and epochs drawn at random: everything that engines ask for, next to RETURNN."""

import contextlib
import importlib.util
import pathlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from returnn.datasets.basic import init_dataset as init_dataset_of_returnn
from returnn.util.basic import NumbersDict as NumbersDictOfReturnn

from seqshard.datasets import NumbersDict, init_dataset

_spec = importlib.util.spec_from_file_location(
    "hdf_variants", pathlib.Path(__file__).with_name("hdf_variants.py")
)
hdf_variants = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(hdf_variants)

ORDERS = [
    *("default", "default_every_n:3", "reverse", "sorted", "sorted_reverse", "random", "random:3"),
    *("random_sample:2", "laplace", "laplace:4", "laplace:.5:2", "laplace:100"),
    *("sort_bin_shuffle:3", "sort_bin_shuffle:.4:2", "sort_bin_shuffle_x2:3"),
]
CHUNKINGS = [
    *("10", "10:5", "3:7", 8, (6, 4)),
    ({"data": 6, "classes": 6}, {"data": 3, "classes": 3}),
    ({"classes": 5, "text": 2, "data": 5}, {"classes": 4, "text": 1, "data": 4}),
]
WINDOWS = [1, 3, 4, {"data": 3, "classes": 1}]
ATTRIBUTES = (
    *("num_seqs", "estimated_num_seqs", "epoch", "num_inputs", "num_outputs", "labels", "window"),
    *("partition_epoch", "repeat_epoch", "random_seed_offset", "fixed_random_seed"),
    *("chunk_size", "chunk_step", "ctx_left", "ctx_right", "min_chunk_size", "chunking_variance"),
)
METHODS = (
    *("get_all_tags", "get_total_num_seqs", "get_data_keys", "get_target_list", "have_seqs"),
    *("have_corpus_seq_idx", "have_get_corpus_seq", "supports_sharding"),
    *("supports_seq_order_sorting", "batch_set_generator_cache_whole_epoch"),
)
PER_SEQUENCE = (
    *("get_tag", "get_seq_length", "get_complete_frac", "get_corpus_seq_idx"),
    *("get_estimated_seq_length", "get_start_end_frames_full_seq", "is_less_than_num_seqs"),
)
PER_KEY = ("get_data_dim", "get_data_dtype", "get_data_shape", "is_data_sparse")
CONTROLLED = ("seq_ordering", "partition_epoch", "repeat_epoch", "seq_list_filter_file")

ranks = st.integers(1, 3).flatmap(
    lambda count: st.fixed_dictionaries(
        {"_num_shards": st.just(count), "_shard_index": st.integers(0, count - 1)}
    )
)
epoch_length = st.one_of(
    st.fixed_dictionaries({"partition_epoch": st.integers(1, 4)}),
    st.fixed_dictionaries({"repeat_epoch": st.integers(1, 3)}),
)
own_options = st.fixed_dictionaries(
    {"seq_ordering": st.sampled_from(ORDERS)},
    optional={
        "fixed_random_seed": st.integers(0, 5),
        "random_seed_offset": st.integers(0, 5),
        "unique_seq_tags": st.booleans(),
        "chunking": st.sampled_from(CHUNKINGS),
        "chunking_variance": st.sampled_from([0, 0.3]),
        "context_window": st.sampled_from(WINDOWS),
        "min_chunk_size": st.sampled_from([1, {"data": 2, "classes": 4}]),
        "estimated_num_seqs": st.just(7),
    },
)
options_of_a_dataset = st.tuples(own_options, ranks | st.just({}), epoch_length | st.just({})).map(
    lambda parts: parts[0] | parts[1] | parts[2]
)
batch_options = st.fixed_dictionaries(
    {
        "recurrent_net": st.booleans(),
        "batch_size": st.sampled_from([1, 20, 1000, {"data": 30, "classes": 20}]),
        "max_seqs": st.sampled_from([-1, 1, 3, 100]),
    },
    optional={
        "max_seq_length": st.sampled_from([25, {"data": 12}]),
        "min_seq_length": st.just({"data": 6}),
        "max_pad_size": st.just({"data": 4}),
        "max_total_num_seqs": st.just(3),
        "seq_drop": st.just(0.3),
        "used_data_keys": st.sampled_from([{"data"}, {"classes"}, {"data", "classes"}]),
        "shuffle_batches": st.just(True),
    },
)
epochs = st.lists(st.integers(1, 9), min_size=2, max_size=2, unique=True).map(sorted)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Files with the same data keys, of very different sizes."""
    folder = tmp_path_factory.mktemp("grid")
    paths = []
    for number, count in enumerate([11, 2, 7, 3, 5]):
        paths.append(str(folder / f"{number}.hdf"))
        sequences = hdf_variants.make_sequences(count, prefix=f"file-{number}", seed=number)
        storage = {"chunks": True} if number % 2 else {}
        hdf_variants.write_raw(paths[-1], sequences, ("classes", "text"), storage=storage)
    keep = [f"file-{number}-{index}" for number in range(5) for index in range(1, 11, 2)]
    (folder / "keep.txt").write_text("\n".join(keep))
    return paths


def plain(value):
    """The value without the types that differ."""
    if isinstance(value, NumbersDict | NumbersDictOfReturnn):
        return {"": value.value, **value.dict}
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tolist()
    if isinstance(value, list | tuple | range):
        return [plain(item) for item in value]
    return value


def ask(function):
    """What a function gives, or that it fails."""
    try:
        return plain(function())
    except Exception:
        return "an error"


def describe(dataset, epoch, batches):
    """Everything about an epoch.

    The first entry is what `init_seq_order` gives; nothing else if it fails.
    """
    seen = {"init_seq_order": ask(lambda: dataset.init_seq_order(epoch=epoch))}
    if seen["init_seq_order"] == "an error":
        return seen
    seen |= {name: ask(lambda name=name: getattr(dataset, name)) for name in ATTRIBUTES}
    seen |= {name: ask(getattr(dataset, name)) for name in METHODS}
    seen["fast"] = ask(lambda: dataset.get_total_num_seqs(fast=True))
    seen["order"] = ask(lambda: list(dataset.get_current_seq_order()))
    keys = dataset.get_data_keys()
    seen |= {(m, k): ask(lambda m=m, k=k: getattr(dataset, m)(k)) for m in PER_KEY for k in keys}
    if batches is not None:
        return seen | {"batches": ask(lambda: list_batches(dataset, batches))}
    for i in range(dataset.num_seqs):
        seen["load_seqs", i] = ask(lambda i=i: dataset.load_seqs(i, i + 1))
        seen |= {(m, i): ask(lambda m=m, i=i: getattr(dataset, m)(i)) for m in PER_SEQUENCE}
        for k in keys:
            seen[k, i] = ask(lambda i=i, k=k: dataset.get_data(i, k))
            seen["slice", k, i] = ask(lambda i=i, k=k: dataset.get_data_slice(i, k, 1, 4))
    return seen


def list_batches(dataset, options):
    generator = dataset.generate_batches(**options)
    seen = []
    while generator.has_more() and len(seen) < 300:
        (batch,) = generator.peek_next_n(1)
        parts = [
            plain((p.seq_idx, p.seq_start_frame, p.seq_end_frame, p.batch_slice))
            for p in batch.seqs
        ]
        sizes = plain((batch.max_num_frames_per_slice, batch.get_total_num_frames()))
        seen.append((parts, sizes, batch.num_slices, generator.completed_frac()))
        generator.advance(1)
    return seen


def assert_same(options, epochs, batches):
    """Where RETURNN fails, as for fewer sequences than bins, ours may do better."""
    try:
        theirs = init_dataset_of_returnn(options)
    except Exception:
        return
    ours = init_dataset(options)
    for epoch in epochs:
        expected, found = (describe(dataset, epoch, batches) for dataset in (theirs, ours))
        for name, value in expected.items():
            if value != "an error":
                assert found[name] == value, name
            elif name == "init_seq_order":
                break
    with contextlib.suppress(AttributeError):
        theirs.finish_epoch(free_resources=True)


grid = settings(max_examples=40, deadline=None, derandomize=True)


@grid
@given(
    options=options_of_a_dataset,
    first=st.integers(0, 4),
    window=st.sampled_from([1, 1, 2, 3]),
    keep=st.booleans(),
    epochs=epochs,
    batches=batch_options | st.none(),
)
def test_hdf(files, options, first, window, keep, epochs, batches):
    if keep:
        options["seq_list_filter_file"] = files[0].replace("0.hdf", "keep.txt")
    own = {"class": "HDFDataset", "files": files[first:], "window": window}
    assert_same(own | options, epochs, batches)


@grid
@given(
    options=options_of_a_dataset,
    control=st.sampled_from([None, "a", "b"]),
    classes=st.sampled_from("ab"),
    epochs=epochs,
    batches=batch_options | st.none(),
)
def test_meta(files, options, control, classes, epochs, batches):
    leading = {key: options.pop(key) for key in CONTROLLED if control and key in options}
    members = {
        name: {"class": "HDFDataset", "files": order, **(leading if name == control else {})}
        for name, order in (("a", files[:4]), ("b", files[3::-1]))
    }
    data_map = {"data": ("a", "data"), "text": ("b", "text"), "classes": (classes, "classes")}
    own = {"class": "MetaDataset", "datasets": members, "data_map": data_map}
    assert_same(own | options | {"seq_order_control_dataset": control}, epochs, batches)


@grid
@given(
    options=options_of_a_dataset,
    share=ranks | st.just({}),
    ordering=st.sampled_from(["default", "random"]),
    partition_epoch=st.integers(1, 4),
    epochs=epochs,
    batches=batch_options | st.none(),
)
def test_distributed_files(files, options, share, ordering, partition_epoch, epochs, batches):
    for key in ("partition_epoch", "_num_shards", "_shard_index"):
        options.pop(key, None)
    own = {
        "class": "DistributeFilesDataset",
        "files": files,
        "get_sub_epoch_dataset": lambda part: {"class": "HDFDataset", "files": part, **options},
        "seq_ordering": ordering,
        "partition_epoch": partition_epoch,
        "use_worker_proc": False,
        "sharding_fix": True,
    }
    assert_same(own | share, epochs, batches)
