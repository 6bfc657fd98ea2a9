"""Continuing in the middle of an epoch, and proofs that ranks share an epoch out properly.

Within an epoch, each rank reads its share from the front. What has been read is therefore told by
one number per rank. When the number of ranks changes, what the old ranks have left, one after the
other, is shared out among the new ones; so the state of an epoch is a short list of splits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..io.errors import StaleStateError
from .ordering import part_bounds

STATE_VERSION = 1

Shares = list[np.ndarray]


@dataclass(frozen=True, slots=True)
class Split:
    """A stretch of an epoch with one number of ranks.

    Attributes:
        num_shards: number of ranks.
        consumed: sequences that each rank has read of its share; None where it is not known.
    """

    num_shards: int
    consumed: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class EpochState:
    """Where an epoch stands.

    Attributes:
        dataset: identity of the corpus and of the options that decide the order.
        epoch: (sub-)epoch, from 1.
        splits: neighbours have different numbers of ranks.
    """

    dataset: str
    epoch: int
    splits: tuple[Split, ...]

    def advanced(self, num_shards: int, shard_index: int, count: int, in_step: bool) -> EpochState:
        """The state after a rank has read `count` more sequences.

        Args:
            num_shards, shard_index: the rank.
            count: sequences read since this state.
            in_step: whether the other ranks have read as many.
        """
        splits = list(self.splits)
        if splits and splits[-1].num_shards == num_shards:
            before = splits.pop().consumed
        else:
            before = (0,) * num_shards
        consumed = [
            None if old is None or (rank != shard_index and not in_step) else old + count
            for rank, old in enumerate(before)
        ]
        return EpochState(self.dataset, self.epoch, (*splits, Split(num_shards, tuple(consumed))))

    def from_start(self, epoch: int) -> EpochState:
        """The state at the beginning of a sub-epoch of the same full epoch.

        It is shared out as for the ranks that began the full epoch. Otherwise sequences would come
        twice or never, since where a sub-epoch begins depends on the number of ranks.
        """
        count = self.splits[0].num_shards
        return EpochState(self.dataset, epoch, (Split(count, (0,) * count),))

    def to_dict(self) -> dict[str, Any]:
        """The state for JSON."""
        splits = [{"num_shards": s.num_shards, "consumed": list(s.consumed)} for s in self.splits]
        return {
            "version": STATE_VERSION,
            "dataset": self.dataset,
            "epoch": self.epoch,
            "splits": splits,
        }


def parse_state(state: Mapping[str, Any]) -> EpochState:
    """Checks a state that came from somewhere else.

    Raises:
        StaleStateError: if it is of an unknown version, or malformed.
    """
    version = state.get("version") if isinstance(state, Mapping) else None
    if version != STATE_VERSION:
        raise StaleStateError(
            "this is no reader state of a known version",
            expected=f"version {STATE_VERSION}",
            found=repr(version),
        )
    try:
        splits = tuple(
            Split(int(split["num_shards"]), tuple(split["consumed"])) for split in state["splits"]
        )
        parsed = EpochState(str(state["dataset"]), int(state["epoch"]), splits)
    except (KeyError, TypeError, ValueError) as error:
        raise StaleStateError(f"the reader state is malformed: {error!r}") from error
    for split in splits:
        counts = [count for count in split.consumed if count is not None]
        well_formed = all(isinstance(count, int) and count >= 0 for count in counts)
        if not well_formed or len(split.consumed) != split.num_shards or split.num_shards < 1:
            raise StaleStateError("the reader state is malformed", found=repr(split))
    return parsed


def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Joins the states that all ranks saved at the same time, so that any number can go on.

    Raises:
        StaleStateError: if they do not belong together, or one rank's is missing.
    """
    parsed = [parse_state(state) for state in states]
    if not parsed:
        raise StaleStateError("there are no reader states to merge")
    first = parsed[0]
    for other in parsed[1:]:
        same = (other.dataset, other.epoch, other.splits[:-1]) == (
            first.dataset,
            first.epoch,
            first.splits[:-1],
        )
        if not same or other.splits[-1].num_shards != first.splits[-1].num_shards:
            raise StaleStateError(
                "the reader states are not of one dataset, epoch and number of ranks"
            )
    consumed = []
    for rank, counts in enumerate(zip(*(p.splits[-1].consumed for p in parsed), strict=True)):
        known = {count for count in counts if count is not None}
        if len(known) != 1:
            raise StaleStateError(
                f"the states do not tell how far rank {rank} is", found=str(sorted(known))
            )
        consumed.append(known.pop())
    last = Split(first.splits[-1].num_shards, tuple(consumed))
    return EpochState(first.dataset, first.epoch, (*first.splits[:-1], last)).to_dict()


def shares_after(
    splits: Sequence[Split], num_shards: int, base: Callable[[int], Shares]
) -> tuple[Shares, tuple[int | None, ...]]:
    """The share of every rank, and how much of it is read already.

    Args:
        splits: see `EpochState`.
        num_shards: number of ranks now.
        base: the shares of the whole epoch for a number of ranks.

    Raises:
        StaleStateError: if the number of ranks changes and it is not known how far all were.
    """
    if not splits:
        return base(num_shards), (0,) * num_shards
    shares = base(splits[0].num_shards)
    for split, following in zip(splits, [*splits[1:], None], strict=True):
        if following is None and split.num_shards == num_shards:
            return shares, split.consumed
        if None in split.consumed:
            raise StaleStateError(
                "the state of one rank does not tell how far the others are",
                expected=f"{split.num_shards} ranks, or the merged states of all ranks",
                found=f"{num_shards} ranks",
                hint="Join the states of all ranks by merge_states.",
            )
        left = [share[count:] for share, count in zip(shares, split.consumed, strict=True)]
        rest = np.concatenate(left)
        count = num_shards if following is None else following.num_shards
        shares = [rest[slice(*part_bounds(len(rest), count, rank))] for rank in range(count)]
    return shares, (0,) * num_shards


def consumed_by(consumed: Sequence[int | None], rank: int) -> int:
    """How much a rank has read of its share.

    Raises:
        StaleStateError: if that is not known.
    """
    count = consumed[rank]
    if count is None:
        raise StaleStateError(
            f"the reader state does not tell how far rank {rank} is",
            hint="Load the state that this rank saved, or the merged states of all ranks.",
        )
    return count


def fill_up(shares: Shares, shard_index: int) -> np.ndarray:
    """The share of a rank, with sequences of its own repeated up to the size of the largest one.

    As repeats are of the own share, the shares stay disjoint as sets. Only a rank without any
    sequence repeats those of others.
    """
    size = max(map(len, shares))
    own = shares[shard_index]
    return np.resize(own if len(own) else np.concatenate(shares), size)


@dataclass(frozen=True, slots=True)
class Coverage:
    """A digest of a multiset of sequences that adds up over disjoint parts, in any order.

    The shares of all ranks are disjoint and complete if their sum equals the coverage of the whole.

    >>> parts = [coverage_of(np.array([4, 0])), coverage_of(np.array([1, 3, 2]))]
    >>> sum(parts, Coverage()) == coverage_of(np.arange(5))
    True

    Attributes:
        num_seqs: number of sequences, with repetitions.
        digest: sum of two independent 64 bit hashes of each corpus index.
    """

    num_seqs: int = 0
    digest: tuple[int, int] = (0, 0)

    def __add__(self, other: Coverage) -> Coverage:
        low, high = ((a + b) % 2**64 for a, b in zip(self.digest, other.digest, strict=True))
        return Coverage(self.num_seqs + other.num_seqs, (low, high))


def coverage_of(corpus_seq_idx: np.ndarray) -> Coverage:
    """The coverage of corpus indices, int64 [sequences]."""
    index = np.asarray(corpus_seq_idx, np.int64).astype(np.uint64)
    digest = tuple(int(_mix(index + np.uint64(seed)).sum()) for seed in (1 << 62, 1 << 63))
    return Coverage(len(index), digest)


def _mix(values: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64: a bijection of 64 bit numbers that looks random."""
    values = (values + np.uint64(0x9E3779B97F4A7C15)).astype(np.uint64)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
