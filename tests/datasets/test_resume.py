"""Resuming in the middle of an epoch, equal steps, and coverage, over any number of ranks."""

import json
import pickle
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqshard.datasets.cached import CachedDataset
from seqshard.datasets.cached2 import CachedDataset2
from seqshard.datasets.resume import Coverage, coverage_of, merge_states
from seqshard.io.errors import StaleStateError

LENS = np.random.RandomState(0).randint(1, 50, size=200)


class Corpus(CachedDataset):
    """Sequences without data."""

    def __init__(self, count, **options):
        super().__init__(**options)
        self._num_seqs = self.count = count
        self.num_outputs = {"data": (1, 2)}

    def _get_seq_length_by_real_idx(self, real_seq_idx):
        return LENS[real_seq_idx : real_seq_idx + 1]

    def _get_tag_by_real_idx(self, real_seq_idx):
        return f"seq-{real_seq_idx}"

    def get_all_tags(self):
        return [f"seq-{i}" for i in range(self.count)]


def ranks_of(count, num_shards, epoch=None, **options):
    ranks = []
    for shard in range(num_shards):
        dataset = Corpus(count, _num_shards=num_shards, _shard_index=shard, **options)
        dataset.initialize()
        if epoch is not None:
            dataset.init_seq_order(epoch=epoch)
        ranks.append(dataset)
    return ranks


def read(dataset, count):
    """Reads sequences, one after the other, and gives their corpus indices."""
    first = dataset._num_loaded
    for i in range(first, first + count):
        dataset.load_seqs(i, i + 1)
    return dataset.get_current_seq_order()[first : first + count]


orders = st.sampled_from(["default", "random", "laplace:4", "sorted_reverse", "random:3"])
worlds = st.integers(1, 6)


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 120),
    seq_ordering=orders,
    partition_epoch=st.integers(1, 4),
    epoch=st.integers(1, 9),
    num_shards=worlds,
    data=st.data(),
)
def test_the_same_rank_goes_on_exactly(
    count, seq_ordering, partition_epoch, epoch, num_shards, data
):
    options = {"seq_ordering": seq_ordering, "partition_epoch": partition_epoch}
    for dataset in ranks_of(count, num_shards, epoch, **options):
        whole = dataset.get_current_seq_order()
        position = data.draw(st.integers(0, len(whole)))
        read(dataset, position)
        state = json.loads(json.dumps(dataset.state_dict()))
        (resumed,) = [
            rank
            for rank in ranks_of(count, num_shards, **options)
            if rank._shard_index == dataset._shard_index
        ]
        resumed.load_state_dict(state)
        assert resumed.get_current_seq_order() == whole[position:]
        resumed.init_seq_order(epoch=epoch)
        assert resumed.get_current_seq_order() == whole[position:]
        if position < len(whole):
            assert resumed.get_complete_frac(0) == dataset.get_complete_frac(position)
        further = data.draw(st.integers(0, len(whole) - position))
        read(resumed, further)
        assert resumed.state_dict() == dataset.state_dict(num_consumed=position + further)
        following = ranks_of(count, num_shards, epoch + 1, **options)
        resumed.init_seq_order(epoch=epoch + 1)
        expected = following[dataset._shard_index].get_current_seq_order()
        assert resumed.get_current_seq_order() == expected


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 120),
    seq_ordering=orders,
    repeat_epoch=st.integers(1, 2),
    sizes=st.lists(worlds, min_size=1, max_size=4),
    equal_steps=st.booleans(),
    data=st.data(),
)
def test_any_number_of_ranks_goes_on(count, seq_ordering, repeat_epoch, sizes, equal_steps, data):
    options = {
        "seq_ordering": seq_ordering,
        "repeat_epoch": repeat_epoch,
        "equal_steps": equal_steps,
    }
    state, seen = None, Counter()
    for position, num_shards in enumerate(sizes):
        ranks = ranks_of(count, num_shards, epoch=3, **options)
        for rank in ranks:
            if state is not None:
                rank.load_state_dict(state)
        last = position == len(sizes) - 1
        in_step = data.draw(st.integers(0, min(rank.num_seqs for rank in ranks)))
        states = []
        for rank in ranks:
            steps = in_step if equal_steps else data.draw(st.integers(0, rank.num_seqs))
            seen.update(read(rank, rank.num_seqs if last else steps))
            states.append(rank.state_dict())
        state = states[0] if equal_steps else merge_states(states)
        state = json.loads(json.dumps(state))
    expected = dict.fromkeys(range(count), repeat_epoch)
    if equal_steps:
        assert set(seen) == set(expected)
        assert all(seen[i] >= times for i, times in expected.items())
    else:
        assert seen == expected


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 120),
    seq_ordering=orders,
    partition_epoch=st.integers(1, 5),
    sizes=st.lists(worlds, min_size=1, max_size=4),
    data=st.data(),
)
def test_a_full_epoch_stays_complete(count, seq_ordering, partition_epoch, sizes, data):
    """Whenever the number of ranks changes: where sub-epochs begin depends on that number."""
    options = {"seq_ordering": seq_ordering, "partition_epoch": partition_epoch}
    changes = [data.draw(st.integers(1, partition_epoch)) for _ in sizes[1:]]
    ranks, seen = ranks_of(count, sizes[0], **options), Counter()
    for epoch in range(1, partition_epoch + 1):
        for rank in ranks:
            rank.init_seq_order(epoch=partition_epoch + epoch)
        for num_shards in [
            size for size, when in zip(sizes[1:], changes, strict=True) if when == epoch
        ]:
            for rank in ranks:
                seen.update(read(rank, data.draw(st.integers(0, rank.num_seqs))))
            state = merge_states([rank.state_dict() for rank in ranks])
            ranks = ranks_of(count, num_shards, **options)
            for rank in ranks:
                rank.load_state_dict(state)
        for rank in ranks:
            seen.update(read(rank, rank.num_seqs))
            rank.finish_epoch()
    assert seen == dict.fromkeys(range(count), 1)
    for rank, fresh in zip(ranks, ranks_of(count, len(ranks), **options), strict=True):
        for dataset in (rank, fresh):
            dataset.init_seq_order(epoch=2 * partition_epoch + 1)
        assert rank.get_current_seq_order() == fresh.get_current_seq_order()


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 120),
    seq_ordering=orders,
    partition_epoch=st.integers(1, 4),
    epoch=st.integers(1, 9),
    num_shards=worlds,
)
def test_equal_steps(count, seq_ordering, partition_epoch, epoch, num_shards):
    options = {"seq_ordering": seq_ordering, "partition_epoch": partition_epoch}
    plain = ranks_of(count, num_shards, epoch, **options)
    equal = ranks_of(count, num_shards, epoch, equal_steps=True, **options)
    assert len({rank.num_seqs for rank in equal}) == 1
    for rank, reference in zip(equal, plain, strict=True):
        share, own = rank.get_current_seq_order(), reference.get_current_seq_order()
        assert share[: len(own)] == own
        assert len(share) - len(own) <= 1
        if own:
            assert set(share) == set(own), "only sequences of the own share are repeated"
        assert rank.coverage() == reference.coverage()


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 120),
    partition_epoch=st.integers(1, 3),
    repeat_epoch=st.integers(1, 2),
    num_shards=worlds,
    data=st.data(),
)
def test_coverage(count, partition_epoch, repeat_epoch, num_shards, data):
    if partition_epoch > 1:
        repeat_epoch = 1
    options = {"partition_epoch": partition_epoch, "repeat_epoch": repeat_epoch}
    total = Coverage()
    for epoch in range(1, partition_epoch + 1):
        ranks = ranks_of(count, num_shards, epoch, seq_ordering="random", **options)
        shares = [rank.coverage() for rank in ranks]
        assert sum(shares, Coverage()) == ranks[0].coverage(all_ranks=True)
        total = sum(shares, total)
    assert total == coverage_of(np.tile(np.arange(count), repeat_epoch))
    if num_shards > 1:
        wrong = [shares[0], *shares[:-1]]
        if len({share.digest for share in shares}) > 1:
            assert sum(wrong, Coverage()) != ranks[0].coverage(all_ranks=True)


def test_coverage_finds_any_single_change():
    order = np.arange(1000)
    reference = coverage_of(order)
    assert coverage_of(order[::-1]) == reference
    for position in range(0, 1000, 17):
        changed = order.copy()
        changed[position] = (position + 1) % 1000
        assert coverage_of(changed) != reference


def test_filter_and_unique_tags(tmp_path):
    path = tmp_path / "keep.txt"
    path.write_text("".join(f"seq-{i}\n" for i in range(0, 100, 3)))
    options = {"seq_list_filter_file": str(path), "seq_ordering": "random"}
    ranks = ranks_of(100, 3, 2, **options)
    whole = [rank.get_current_seq_order() for rank in ranks]
    assert sorted(i for share in whole for i in share) == list(range(0, 100, 3))
    states = []
    for rank in ranks:
        read(rank, 2)
        states.append(rank.state_dict())
    rest = []
    for rank in ranks_of(100, 5, **options):
        rank.load_state_dict(merge_states(states))
        rest += rank.get_current_seq_order()
    assert rest == [i for share in whole for i in share[2:]]
    equal = ranks_of(100, 3, 2, equal_steps=True, **options)
    assert len({rank.num_seqs for rank in equal}) == 1


def test_refusals():
    (dataset,) = ranks_of(30, 1, 2, seq_ordering="random")
    read(dataset, 7)
    state = dataset.state_dict()
    assert state["splits"] == [{"num_shards": 1, "consumed": [7]}]
    assert len(json.dumps(state)) < 200
    for other in (
        Corpus(31, seq_ordering="random"),
        Corpus(30, seq_ordering="random:2"),
        Corpus(30, seq_ordering="random", random_seed_offset=1),
        Corpus(30, seq_ordering="random", partition_epoch=2),
        Corpus(30, seq_ordering="random", equal_steps=True),
    ):
        other.initialize()
        with pytest.raises(StaleStateError, match="belongs to another dataset, or to other"):
            other.load_state_dict(state)
    for broken, message in (
        ({}, "no reader state of a known version .expected version 1, found None"),
        ({**state, "version": 2}, "found 2"),
        ([], "no reader state"),
        ({"version": 1}, "malformed: KeyError"),
        ({**state, "splits": [{"num_shards": 2, "consumed": [1]}]}, "malformed"),
        ({**state, "splits": [{"num_shards": 1, "consumed": [-1]}]}, "malformed"),
        ({**state, "splits": [{"num_shards": 1, "consumed": ["x"]}]}, "malformed"),
    ):
        with pytest.raises(StaleStateError, match=message):
            dataset.load_state_dict(broken)
    with pytest.raises(StaleStateError, match=r"not so many sequences .expected 0 to 30, found 31"):
        dataset.state_dict(num_consumed=31)
    dataset.finish_epoch()
    with pytest.raises(StaleStateError, match="is in no epoch"):
        dataset.state_dict()


def test_a_state_travels_with_the_dataset():
    (dataset,) = ranks_of(30, 1, 2, seq_ordering="random")
    read(dataset, 7)
    (resumed,) = ranks_of(30, 1, seq_ordering="random")
    resumed.load_state_dict(dataset.state_dict())
    copy = pickle.loads(pickle.dumps(resumed))
    copy.init_seq_order(epoch=2)
    assert copy.get_current_seq_order() == dataset.get_current_seq_order()[7:]
    copy.finish_epoch()
    copy.init_seq_order(epoch=2)
    assert copy.get_current_seq_order() == dataset.get_current_seq_order()


def test_a_dataset_without_an_order_cannot_continue():
    class Endless(CachedDataset2):
        def init_seq_order(self, **options):
            super().init_seq_order(**options)
            self._num_seqs = 5
            return True

        def get_all_tags(self):
            return []

    dataset = Endless()
    dataset.init_seq_order(epoch=1)
    with pytest.raises(StaleStateError, match="cannot continue in the middle of an epoch"):
        dataset.load_state_dict(dataset.state_dict(2))


def test_one_rank_cannot_speak_for_all():
    states = []
    for rank in ranks_of(30, 3, 1):
        read(rank, 2 + rank._shard_index)
        states.append(rank.state_dict())
    (alone,) = ranks_of(30, 1)
    with pytest.raises(StaleStateError, match="does not tell how far the others are"):
        alone.load_state_dict(states[0])
    with pytest.raises(StaleStateError, match="does not tell how far rank 1 is"):
        ranks_of(30, 3)[1].load_state_dict(states[0])
    with pytest.raises(StaleStateError, match="do not tell how far rank 2 is"):
        merge_states(states[:2])
    with pytest.raises(StaleStateError, match="no reader states to merge"):
        merge_states([])
    other = ranks_of(30, 2, 1)[0].state_dict()
    with pytest.raises(StaleStateError, match="are not of one dataset, epoch and number of ranks"):
        merge_states([*states, other])
    merged = merge_states(states)
    assert merged["splits"] == [{"num_shards": 3, "consumed": [2, 3, 4]}]
