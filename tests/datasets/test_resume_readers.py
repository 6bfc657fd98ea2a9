"""Resuming, equal steps and coverage of HDFDataset and MetaDataset on real files."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqshard.datasets import init_dataset
from seqshard.datasets.resume import Coverage, merge_states
from seqshard.datasets.writers import SimpleHDFWriter
from seqshard.io.errors import StaleStateError

orders = st.sampled_from(["default", "random", "laplace:.10", "sort_bin_shuffle:3", "sorted"])


def write(folder, seed):
    rng = np.random.default_rng(seed)
    paths = []
    for number in range(3):
        paths.append(str(folder / f"{seed}-{number}.hdf"))
        with SimpleHDFWriter(paths[-1], dim=2) as writer:
            for index in range(17):
                length = int(rng.integers(1, 30))
                inputs = rng.standard_normal((1, length, 2)).astype("float32")
                writer.insert_batch(inputs, [length], [f"{number}/{index}"])
    return paths


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write(tmp_path_factory.mktemp("readers"), seed=1)


def hdf(files, **options):
    return {"class": "HDFDataset", "files": files, **options}


def controlled(files, **options):
    return {
        "class": "MetaDataset",
        "datasets": {"leader": hdf(files, **options), "other": hdf(files[::-1])},
        "data_map": {"data": ("leader", "data"), "again": ("other", "data")},
        "seq_order_control_dataset": "leader",
    }


def by_itself(files, **options):
    return {
        "class": "MetaDataset",
        "datasets": {"a": hdf(files), "b": hdf(files[::-1])},
        "data_map": {"data": ("a", "data"), "again": ("b", "data")},
        "seq_order_seq_lens_file": f"{files[0]}.lens",
        **options,
    }


@pytest.fixture(scope="module", autouse=True)
def lengths(files):
    dataset = init_dataset(hdf(files))
    dataset.init_seq_order(epoch=1)
    lens = {dataset.get_tag(i): dataset.get_seq_length(i)["data"] for i in range(dataset.num_seqs)}
    with open(f"{files[0]}.lens", "w") as file:
        file.write(repr(lens))


def read(dataset, count):
    first, seen = dataset._num_loaded, []
    for i in range(first, first + count):
        dataset.load_seqs(i, i + 1)
        row = [dataset.get_data(i, key).tobytes() for key in dataset.get_data_keys()]
        assert len(set(row)) == 1
        seen.append((dataset.get_tag(i), row[0]))
    return seen


@pytest.mark.parametrize("kind", [hdf, controlled, by_itself])
@settings(max_examples=20, deadline=None)
@given(
    seq_ordering=orders,
    partition_epoch=st.integers(1, 3),
    epoch=st.integers(1, 6),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    data=st.data(),
)
def test_what_is_left_is_read_once(files, kind, seq_ordering, partition_epoch, epoch, sizes, data):
    options = {"seq_ordering": seq_ordering, "partition_epoch": partition_epoch}
    seen, left, states, total = [], [], [], Coverage()
    for rank in range(sizes[0]):
        shard = {"_num_shards": sizes[0], "_shard_index": rank}
        dataset = init_dataset(kind(files, **options, **shard))
        dataset.init_seq_order(epoch=epoch)
        total += dataset.coverage()
        assert dataset.state_dict() == dataset.state_dict(0)
        seen += read(dataset, data.draw(st.integers(0, dataset.num_seqs)))
        states.append(json.loads(json.dumps(dataset.state_dict())))
        left += read(dataset, dataset.num_seqs - dataset._num_loaded)
    assert total == dataset.coverage(all_ranks=True)
    again = []
    for rank in range(sizes[1]):
        shard = {"_num_shards": sizes[1], "_shard_index": rank}
        dataset = init_dataset(kind(files, **options, **shard))
        dataset.load_state_dict(merge_states(states))
        again += read(dataset, dataset.num_seqs)
    assert again == left
    assert len(set(seen + left)) == len(seen + left) == total.num_seqs


@pytest.mark.parametrize("kind", [hdf, controlled, by_itself])
def test_equal_steps(files, kind):
    sizes, tags = set(), set()
    for rank in range(4):
        options = {"seq_ordering": "laplace:.10", "_num_shards": 4, "_shard_index": rank}
        dataset = init_dataset(kind(files, **options, equal_steps=True))
        dataset.init_seq_order(epoch=2)
        sizes.add(dataset.num_seqs)
        tags.update(tag for tag, _ in read(dataset, dataset.num_seqs))
    assert sizes == {13}
    assert len(tags) == 51


@pytest.mark.parametrize("kind", [hdf, controlled])
def test_a_state_of_other_files_or_another_order_is_refused(files, kind, tmp_path):
    dataset = init_dataset(kind(files, seq_ordering="random"))
    dataset.init_seq_order(epoch=2)
    state = dataset.state_dict(5)
    for other in (kind(write(tmp_path, 2), seq_ordering="random"), kind(files)):
        with pytest.raises(StaleStateError, match="belongs to another dataset, or to other"):
            init_dataset(other).load_state_dict(state)
