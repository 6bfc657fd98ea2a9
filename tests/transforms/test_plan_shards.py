"""The plan is a balanced partition, and independent of how the rows arrived."""

import bisect

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqshard.io.columns import batch
from seqshard.io.errors import DuplicateSequenceError, MissingSequenceError, PlanError
from seqshard.io.receipts import Rejection
from seqshard.transforms.order import ORDERS, parse_ordering, sort_keys
from seqshard.transforms.plan_shards import (
    MAX_SHARDS,
    assign_shards,
    check_problems,
    count_bins,
    merge_histograms,
    plan_bins,
    plan_shards,
    select_cut_rows,
    sort_rows,
)

FRAME_BYTES = 40


def make_rows(ordering, lengths, rows_per_source=5, frame_bytes=FRAME_BYTES):
    """Joined rows of sequences that stand in sources one behind the other."""
    number = np.arange(len(lengths))
    source, row = number // rows_per_source, number % rows_per_source
    length = np.array(lengths, np.int64)
    tags = [f"seq-{i}" for i in number]
    num_sources = len(lengths) // rows_per_source + 1
    primary, tie = sort_keys(
        ordering, num_sources, [tag.encode() for tag in tags], source, row, length
    )
    return batch(
        {
            "tag": pa.array(tags, pa.string()),
            "primary": primary,
            "tie": tie,
            "payload": length * frame_bytes,
        }
    )


def make_plan(batches, ordering, num_shards=None, shard_bytes=10**9):
    """As the pipeline makes it: from partial results of every batch."""
    bins = plan_bins(
        merge_histograms([count_bins(b, ordering) for b in batches]), num_shards, shard_bytes
    )
    return plan_shards(bins, [select_cut_rows(b, bins, ordering) for b in batches], ordering)


def reference_shards(rows, num_shards):
    """The shard of every row, from all rows at once and in plain Python."""
    keys = list(
        zip(rows.column("primary").to_pylist(), rows.column("tie").to_pylist(), strict=True)
    )
    payload = rows.column("payload").to_pylist()
    order = sorted(range(len(keys)), key=keys.__getitem__)
    total, before = sum(payload), 0
    cuts = [2 * total * i // num_shards for i in range(1, num_shards)]
    raw = {}
    for i in order:
        # A cut stands before the first row whose middle is at or behind it.
        raw[i] = bisect.bisect_right(cuts, 2 * before + payload[i])
        before += payload[i]
    number = {value: shard for shard, value in enumerate(sorted(set(raw.values())))}
    return [number[raw[i]] for i in range(len(keys))]


lengths = st.lists(
    st.one_of(st.integers(0, 30), st.integers(0, 3), st.integers(0, 5000)), min_size=1, max_size=80
)
orders = st.sampled_from([*ORDERS, "random:7"]).map(parse_ordering)


@given(lengths, orders, st.integers(1, 90), st.integers(1, 9))
@settings(max_examples=300)
def test_plan_equals_a_reference_that_sees_all_rows(values, ordering, num_shards, per_source):
    rows = make_rows(ordering, values, per_source)
    plan = make_plan([rows], ordering, num_shards)
    shard = assign_shards(rows, plan)
    assert shard.tolist() == reference_shards(rows, min(num_shards, len(values)))
    # A partition: every shard is used, and holds as many sequences as the plan says.
    counts = np.bincount(shard, minlength=plan.num_shards)
    assert (counts > 0).all()
    np.testing.assert_array_equal(counts, plan.num_seqs)
    assert plan.num_shards <= min(num_shards, len(values))
    assert plan.num_bytes == sum(values) * FRAME_BYTES
    # Contiguous: in the order of the keys, shard numbers never fall.
    number = pa.RecordBatch.from_arrays(
        [*rows.columns, pa.array(shard.tolist(), pa.int64())], [*rows.schema.names, "shard"]
    )
    assert (np.diff(sort_rows(number).column("shard").to_pylist()) >= 0).all()


@given(lengths, orders, st.integers(1, 20))
def test_every_boundary_is_within_half_a_sequence_of_the_ideal(values, ordering, num_shards):
    rows = make_rows(ordering, values)
    plan = make_plan([rows], ordering, num_shards)
    payload = np.array(values) * FRAME_BYTES
    ends = np.cumsum(np.bincount(assign_shards(rows, plan), payload))[:-1]
    ideals = np.arange(1, num_shards) * payload.sum() / min(num_shards, len(values))
    for end in ends:
        assert np.abs(ideals - end).min() <= payload.max() / 2 + 1


@given(lengths, orders, st.integers(1, 20), st.randoms(use_true_random=False))
def test_order_and_grouping_of_the_batches_do_not_matter(values, ordering, num_shards, random):
    rows = make_rows(ordering, values)
    plan = make_plan([rows], ordering, num_shards)
    cuts = sorted(random.randrange(len(values) + 1) for _ in range(3))
    shuffled = rows.take(pa.array(random.sample(range(len(values)), len(values))))
    parts = [
        shuffled.slice(a, b - a) for a, b in zip([0, *cuts], [*cuts, len(values)], strict=True)
    ]
    other = make_plan(parts, ordering, num_shards)
    for name in ("primary", "tie", "num_seqs"):
        np.testing.assert_array_equal(getattr(plan, name), getattr(other, name))
    tags = {
        tag: shard
        for part in parts
        for tag, shard in zip(
            part.column("tag").to_pylist(), assign_shards(part, other).tolist(), strict=True
        )
    }
    assert [tags[tag] for tag in rows.column("tag").to_pylist()] == assign_shards(
        rows, plan
    ).tolist()


def make_keyed(primary, tie, payload):
    return batch(
        {
            "tag": pa.array([str(i) for i in range(len(primary))], pa.string()),
            "primary": np.array(primary, np.uint64),
            "tie": np.array(tie, np.uint64),
            "payload": np.array(payload, np.int64),
        }
    )


def test_equal_primaries_are_cut_by_their_ties():
    rows = make_keyed([5] * 8, [7, 3, 1, 0, 2, 4, 6, 5], [10] * 8)
    plan = make_plan([rows], parse_ordering("sorted"), 4)
    assert plan.primary.tolist() == [5, 5, 5]
    assert plan.tie.tolist() == [2, 4, 6]
    assert assign_shards(rows, plan).tolist() == [3, 1, 0, 0, 1, 2, 3, 2]


def test_hash_collisions_do_not_lose_sequences():
    top = 2**64 - 1
    rows = make_keyed([top, top, top, 0], [0, 1, 2, 3], [1, 1, 1, 1])
    plan = make_plan([rows], parse_ordering("random"), 4)
    assert assign_shards(rows, plan).tolist() == [1, 2, 3, 0]


def test_a_giant_sequence_swallows_the_shards_that_it_covers():
    rows = make_rows(parse_ordering("default"), [1, 1, 10_000, 1, 1])
    plan = make_plan([rows], parse_ordering("default"), 4)
    assert assign_shards(rows, plan).tolist() == [0, 0, 1, 2, 2]
    assert plan.num_seqs.tolist() == [2, 1, 2]


@pytest.mark.parametrize("order", ORDERS)
def test_more_shards_than_sequences(order):
    rows = make_rows(parse_ordering(order), [3, 3, 3])
    plan = make_plan([rows], parse_ordering(order), 100)
    assert plan.num_seqs.tolist() == [1, 1, 1]


def test_sequences_without_payload_are_kept():
    rows = make_rows(parse_ordering("default"), [0, 0, 0, 0])
    plan = make_plan([rows], parse_ordering("default"), 3)
    assert plan.num_seqs.sum() == 4
    np.testing.assert_array_equal(
        np.bincount(assign_shards(rows, plan), minlength=plan.num_shards), plan.num_seqs
    )


@pytest.mark.parametrize("rows_per_source", [1, 3])
def test_an_empty_sequence_on_a_cut_goes_right_whatever_the_bins(rows_per_source):
    rows = make_rows(parse_ordering("default"), [1, 0, 1], rows_per_source)
    plan = make_plan([rows], parse_ordering("default"), 2)
    assert assign_shards(rows, plan).tolist() == [0, 1, 1]


def test_huge_totals_do_not_overflow():
    # 4 EB in a thousand shards: bytes times shards is far beyond 64 bits.
    rows = make_rows(parse_ordering("default"), [10**5] * 4000, 1000, frame_bytes=10**10)
    plan = make_plan([rows], parse_ordering("default"), 1000)
    assert plan.num_bytes == 4 * 10**18
    assert plan.num_seqs.tolist() == [4] * 1000


def test_shard_bytes_decide_the_number_of_shards():
    rows = make_rows(parse_ordering("default"), [10] * 100, frame_bytes=10)
    for shard_bytes, num_shards in [(10_000, 1), (9_999, 2), (1_000, 10), (999, 11), (1, 100)]:
        plan = make_plan([rows], parse_ordering("default"), None, shard_bytes)
        assert plan.num_shards == num_shards


def test_nothing_left_is_an_error():
    rows = make_rows(parse_ordering("default"), [1]).slice(0, 0)
    with pytest.raises(PlanError, match=r"no sequence is left to write.*\[sequences\]"):
        make_plan([rows], parse_ordering("default"))


def test_too_many_shards_is_an_error():
    rows = make_rows(parse_ordering("default"), [100_000])
    with pytest.raises(PlanError, match=rf"at most {MAX_SHARDS}, found 2000000.*--shard_size"):
        make_plan([rows], parse_ordering("default"), None, 2)
    with pytest.raises(PlanError, match="too many shards"):
        make_plan([rows], parse_ordering("default"), MAX_SHARDS + 1)


def rejection(tag, reason="missing in this stream"):
    return Rejection(tag, "classes", "a.cache", reason)


def test_the_first_problem_by_name_is_reported():
    parts = [[rejection("b"), rejection("a")], [], [rejection("c")]]
    with pytest.raises(MissingSequenceError, match=r"'a' of stream 'classes'.*and 2 more"):
        check_problems(parts, "error")
    with pytest.raises(DuplicateSequenceError, match=r"'a'.*2 times in this stream") as caught:
        check_problems([[rejection("a", "2 times in this stream: a, b")]], "error")
    assert "more such" not in str(caught.value)
    assert 'on_missing = "drop"' in str(caught.value)
    check_problems(parts, "drop")
    check_problems([[], []], "error")
