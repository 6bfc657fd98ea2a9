"""The sort keys of every order, and how an order is written."""

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from seqshard.io.errors import ConfigError
from seqshard.transforms.order import ORDERS, SeqOrdering, parse_ordering, sort_keys

# (source, row) pairs are unique; lengths repeat.
sequences = st.lists(
    st.tuples(st.integers(0, 6), st.integers(0, 2**33), st.integers(0, 4)),
    unique_by=lambda s: s[:2],
    max_size=40,
)


def sorted_by_keys(ordering, items):
    source = np.array([s[0] for s in items], np.int32)
    row = np.array([s[1] for s in items], np.int64)
    length = np.array([s[2] for s in items], np.int64)
    tags = [f"{s[0]}/{s[1]}".encode() for s in items]
    primary, tie = sort_keys(ordering, 7, tags, source, row, length)
    assert primary.dtype == tie.dtype == np.uint64
    assert len({*zip(primary.tolist(), tie.tolist(), strict=True)}) == len(items)
    return [items[i] for i in np.lexsort((tie, primary))]


@given(sequences)
def test_default_is_the_order_of_the_sources(items):
    assert sorted_by_keys(SeqOrdering("default"), items) == sorted(items)


@given(sequences)
def test_reverse_is_default_from_the_end(items):
    assert sorted_by_keys(SeqOrdering("reverse"), items) == sorted(items, reverse=True)


@given(sequences)
def test_sorted_is_by_length_and_then_default(items):
    expected = sorted(items, key=lambda s: (s[2], s[:2]))
    assert sorted_by_keys(SeqOrdering("sorted"), items) == expected


@given(sequences)
def test_sorted_reverse_keeps_the_default_order_among_equal_lengths(items):
    expected = sorted(items, key=lambda s: (-s[2], s[:2]))
    assert sorted_by_keys(SeqOrdering("sorted_reverse"), items) == expected


@given(sequences, st.integers(0, 2**64 - 1))
def test_random_is_by_a_keyed_hash_of_the_tag(items, seed):
    def rank(s):
        return xxhash.xxh3_64_intdigest(f"{s[0]}/{s[1]}".encode(), seed), s[:2]

    assert sorted_by_keys(SeqOrdering("random", seed), items) == sorted(items, key=rank)


def test_random_does_not_depend_on_where_a_sequence_stands():
    tags = [b"a", b"b", b"c"]
    zeros = np.zeros(3, np.int64)
    here, _ = sort_keys(SeqOrdering("random"), 1, tags, zeros, np.arange(3), zeros)
    there, _ = sort_keys(SeqOrdering("random"), 9, tags, zeros + 3, np.arange(3) + 7, zeros + 5)
    np.testing.assert_array_equal(here, there)


def test_long_sequences_and_many_sources_do_not_overflow():
    length = np.array([2**31 - 1, 0], np.int64)
    source = np.array([2**20 - 1, 2**20 - 1], np.int32)
    row = np.array([2**40 - 1, 0], np.int64)
    primary, tie = sort_keys(SeqOrdering("sorted"), 2**20, [b"a", b"b"], source, row, length)
    assert primary[0] > primary[1]
    assert tie[0] > tie[1]


@pytest.mark.parametrize("kind", ORDERS)
def test_written_and_parsed_orders_agree(kind):
    ordering = parse_ordering(kind)
    assert ordering.kind == kind
    assert parse_ordering(str(ordering)) == ordering


def test_seeds():
    assert parse_ordering("random") == parse_ordering("random:1") == SeqOrdering("random", 1)
    assert parse_ordering("random:0") == SeqOrdering("random", 0)
    assert parse_ordering(f"random:{2**64 - 1}").seed == 2**64 - 1


@pytest.mark.parametrize(
    "text", ["", "shuffle", "Random", "random:", "random:-1", "random:x", "random:1:2", "sorted:1",
             "default:", " random", f"random:{2**64}", "random:²"],
)  # fmt: skip
def test_anything_else_is_refused(text):
    with pytest.raises(ConfigError, match=r"--seq_ordering.*unknown order.*random:SEED") as caught:
        parse_ordering(text)
    assert caught.value.found == text
