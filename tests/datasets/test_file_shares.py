"""Resuming, equal steps and coverage of DistributeFilesDataset, over any number of ranks."""

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqshard.datasets.distrib_files import DistributeFilesDataset
from seqshard.datasets.resume import Coverage, merge_states
from seqshard.datasets.writers import SimpleHDFWriter
from seqshard.io.errors import ConfigError, StaleStateError

NUM_FILES = 13


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shares")
    rng = np.random.default_rng(2)
    paths = []
    for number in range(NUM_FILES):
        paths.append(str(folder / f"part-{number}.hdf"))
        with SimpleHDFWriter(paths[-1], dim=1) as writer:
            for index in range(int(rng.integers(1, 7))):
                length = int(rng.integers(1, 30))
                inputs = np.full((1, length, 1), 100 * number + index, "float32")
                writer.insert_batch(inputs, [length], [f"{number}/{index}"])
    return paths


def laplace(files):
    return {"class": "HDFDataset", "files": list(files), "seq_ordering": "laplace:.3"}


def streamed(files):
    """Through a dataset that cannot go back."""
    return {
        "class": "MetaDataset",
        "datasets": {"hdf": laplace(files)},
        "data_map": {"data": ("hdf", "data")},
        "seq_order_control_dataset": "hdf",
    }


def sorted_by_control(files):
    options = streamed(files)
    options["datasets"]["hdf"]["seq_ordering"] = "sorted"
    return options


def ranks_of(files, num_ranks, epoch=None, sub=laplace, **options):
    ranks = []
    for rank in range(num_ranks):
        dataset = DistributeFilesDataset(
            files=files,
            get_sub_epoch_dataset=sub,
            seq_ordering="random",
            _num_shards=num_ranks,
            _shard_index=rank,
            **options,
        )
        dataset.initialize()
        if epoch is not None:
            dataset.init_seq_order(epoch=epoch)
        ranks.append(dataset)
    return ranks


def read(dataset, count):
    """Reads sequences, one after the other, and gives their tags."""
    first, tags = dataset._num_loaded, []
    for i in range(first, first + count):
        assert dataset.is_less_than_num_seqs(i)
        dataset.load_seqs(i, i + 1)
        tags.append(dataset.get_tag(i))
        number, index = map(int, tags[-1].split("/"))
        assert (dataset.get_data(i, "data") == 100 * number + index).all()
        assert dataset.get_seq_length(i)["data"] == len(dataset.get_data(i, "data"))
    return tags


@pytest.mark.parametrize("sub", [laplace, streamed])
@settings(max_examples=8, deadline=None)
@given(
    num_ranks=st.integers(1, 3),
    partition_epoch=st.integers(1, 3),
    epoch=st.integers(1, 5),
    data=st.data(),
)
def test_the_same_rank_goes_on_exactly(files, sub, num_ranks, partition_epoch, epoch, data):
    options = {"partition_epoch": partition_epoch, "sub": sub}
    for dataset in ranks_of(files, num_ranks, epoch, **options):
        (whole,) = (
            read(other, other.num_seqs)
            for other in ranks_of(files, num_ranks, epoch, **options)
            if other._shard_index == dataset._shard_index
        )
        position = data.draw(st.integers(0, len(whole)))
        assert read(dataset, position) == whole[:position]
        state = json.loads(json.dumps(dataset.state_dict()))
        resumed = ranks_of(files, num_ranks, **options)[dataset._shard_index]
        resumed.load_state_dict(state)
        assert resumed.num_seqs == len(whole) - position
        if position < len(whole):
            assert resumed.get_complete_frac(0) == dataset.get_complete_frac(position)
        assert read(resumed, resumed.num_seqs) == whole[position:]
        assert not resumed.is_less_than_num_seqs(resumed.num_seqs)
        resumed.init_seq_order(epoch=epoch + 1)
        following = ranks_of(files, num_ranks, epoch + 1, **options)[dataset._shard_index]
        assert read(resumed, resumed.num_seqs) == read(following, following.num_seqs)


@pytest.mark.parametrize("sub", [laplace, streamed])
@settings(max_examples=8, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    equal_steps=st.booleans(),
    data=st.data(),
)
def test_any_number_of_ranks_goes_on(files, sub, sizes, equal_steps, data):
    options = {"equal_steps": equal_steps, "sub": sub}
    (whole,) = ranks_of(files, 1, 3)
    expected = Counter(read(whole, whole.num_seqs))
    state, seen = None, Counter()
    for position, num_ranks in enumerate(sizes):
        ranks = ranks_of(files, num_ranks, epoch=3, **options)
        for rank in ranks:
            if state is not None:
                rank.load_state_dict(state)
        if equal_steps:
            assert len({rank.num_seqs for rank in ranks}) == 1
        last = position == len(sizes) - 1
        in_step = data.draw(st.integers(0, min(rank.num_seqs for rank in ranks)))
        states = []
        for rank in ranks:
            steps = in_step if equal_steps else data.draw(st.integers(0, rank.num_seqs))
            seen.update(read(rank, rank.num_seqs if last else steps))
            states.append(rank.state_dict())
        state = states[0] if equal_steps else merge_states(states)
        state = json.loads(json.dumps(state))
    if equal_steps:
        assert set(seen) == set(expected)
    else:
        assert seen == expected


@settings(max_examples=8, deadline=None)
@given(
    partition_epoch=st.integers(2, 3),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    data=st.data(),
)
def test_a_full_epoch_stays_complete(files, partition_epoch, sizes, data):
    """The files that a rank reads in a sub-epoch depend on the number of ranks."""
    options = {"partition_epoch": partition_epoch}
    change = data.draw(st.integers(1, partition_epoch))
    ranks, seen = ranks_of(files, sizes[0], **options), []
    for epoch in range(1, partition_epoch + 1):
        for rank in ranks:
            rank.init_seq_order(epoch=epoch)
        if epoch == change:
            for rank in ranks:
                seen += read(rank, data.draw(st.integers(0, rank.num_seqs)))
            state = merge_states([rank.state_dict() for rank in ranks])
            ranks = ranks_of(files, sizes[1], **options)
            for rank in ranks:
                rank.load_state_dict(state)
        for rank in ranks:
            seen += read(rank, rank.num_seqs)
            rank.finish_epoch()
    (whole,) = ranks_of(files, 1, 1)
    assert sorted(seen) == sorted(read(whole, whole.num_seqs))


@settings(max_examples=8, deadline=None)
@given(num_ranks=st.integers(1, 4), partition_epoch=st.integers(1, 3), equal_steps=st.booleans())
def test_coverage(files, num_ranks, partition_epoch, equal_steps):
    options = {"partition_epoch": partition_epoch, "equal_steps": equal_steps}
    total = Coverage()
    for epoch in range(1, partition_epoch + 1):
        ranks = ranks_of(files, num_ranks, epoch, **options)
        parts = sum((rank.coverage() for rank in ranks), Coverage())
        assert {rank.coverage(all_ranks=True) for rank in ranks} == {parts}
        total += parts
    (whole,) = ranks_of(files, 1, 1)
    assert total == whole.coverage()
    assert total.num_seqs == whole.num_seqs


def test_a_state_of_other_files_or_another_order_is_refused(files):
    (dataset,) = ranks_of(files, 1, 1)
    state = dataset.state_dict(3)
    for (other,) in (ranks_of(files[1:], 1), ranks_of(files, 1, partition_epoch=2)):
        with pytest.raises(StaleStateError, match="belongs to another dataset"):
            other.load_state_dict(state)
    (other,) = ranks_of(files, 1, sub=lambda f: laplace(f) | {"seq_ordering": "random"})
    with pytest.raises(StaleStateError, match="belongs to another dataset"):
        other.load_state_dict(state)


def test_the_order_of_a_control_dataset_counts(files):
    (dataset,) = ranks_of(files, 1, 1, sub=streamed)
    (other,) = ranks_of(files, 1, sub=sorted_by_control)
    with pytest.raises(StaleStateError, match="belongs to another dataset"):
        other.load_state_dict(dataset.state_dict(3))


def test_one_rank_cannot_speak_for_all(files):
    state = ranks_of(files, 2, 1)[0].state_dict(1)
    with pytest.raises(StaleStateError, match="how far rank 1 is"):
        ranks_of(files, 2)[1].load_state_dict(state)
    with pytest.raises(StaleStateError, match="merge_states"):
        ranks_of(files, 3)[0].load_state_dict(state)


def test_doubled_shares_cannot_be_equal(files):
    with pytest.raises(ConfigError, match="sharding_fix=False"):
        ranks_of(files, 2, 1, equal_steps=True, sharding_fix=False)
