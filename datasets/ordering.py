"""The order of sequences in an epoch: pure functions of the options, lengths, seed and epoch.

The orders are those of RETURNN's `Dataset.get_seq_order_for_epoch`, index for index. They rest on
`numpy.random.RandomState`, whose streams numpy guarantees not to change. An order is a `range` or
an int64 array of corpus indices. Nothing here does Python work per sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Any

import numpy as np
from numpy.random import RandomState

from ..io.errors import ConfigError

Order = range | np.ndarray

_PLAIN = ("default", "reverse", "sorted", "sorted_reverse")
_RANDOM = ("random", "random_sample")
_BINNED = ("laplace", "sort_bin_shuffle", "sort_bin_shuffle_x2")

# A Python step per bin costs about as much as sorting this many sequences in one go.
_MIN_SEQS_PER_BIN_STEP = 32


@dataclass(frozen=True, slots=True)
class SeqOrdering:
    """A parsed `seq_ordering` option.

    Attributes:
        method: the name before the first colon, for example "laplace".
        num_epochs_fixed: full epochs in a row that share one random order.
        num_bins: number of length bins (laplace, sort_bin_shuffle).
        seqs_per_bin: about how many sequences a bin has; if set, it decides the number of bins.
        every_n: the stride of default_every_n.
    """

    method: str
    num_epochs_fixed: int = 1
    num_bins: int = 2
    seqs_per_bin: int | None = None
    every_n: int | None = None

    @property
    def needs_seq_lens(self) -> bool:
        """Whether the order depends on the lengths."""
        return self.method.startswith("sort") or self.method == "laplace"


def parse_seq_ordering(text: str) -> SeqOrdering:
    """Parses a `seq_ordering` option such as "random:3" or "laplace:.1000:2".

    Raises:
        ConfigError: if it is none of RETURNN's orders.
    """
    method, *args = text.split(":")
    try:
        if method in _PLAIN and not args:
            return SeqOrdering(method)
        if method == "default_every_n" and len(args) == 1:
            return SeqOrdering(method, every_n=_positive(args[0]))
        if method in _RANDOM and len(args) <= 1:
            return SeqOrdering(method, num_epochs_fixed=int(args[0]) if args else 1)
        if method in _BINNED:
            fixed = int(args[1]) if len(args) > 1 else 1
            if args and args[0].startswith("."):
                return SeqOrdering(method, fixed, seqs_per_bin=_positive(args[0][1:]))
            return SeqOrdering(method, fixed, num_bins=_positive(args[0]) if args else 2)
    except ValueError as error:
        raise ConfigError(f"invalid seq_ordering {text!r}: {error}") from error
    raise ConfigError(
        f"invalid seq_ordering {text!r}",
        expected="default, default_every_n:N, reverse, sorted, sorted_reverse, random[:N], "
        "random_sample[:N], laplace[:BINS|:.SEQS][:N], sort_bin_shuffle[_x2][:BINS|:.SEQS][:N]",
    )


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(f"{number} is not positive")
    return number


def epoch_seed(
    epoch: int | None,
    partition_epoch: int = 1,
    num_epochs_fixed: int = 1,
    fixed_random_seed: int | None = None,
    random_seed_offset: int = 0,
) -> int:
    """The random seed of an epoch: constant over the sub-epochs of one full epoch.

    Args:
        epoch: (sub-)epoch, from 1; None counts as 1.
        partition_epoch: sub-epochs in a full epoch.
        num_epochs_fixed: full epochs in a row that share a seed.
        fixed_random_seed: if set, the seed, whatever the epoch and offset.
        random_seed_offset: added to the seed.
    """
    if fixed_random_seed is not None:
        return fixed_random_seed
    full_epoch = ((epoch or 1) - 1) // max(partition_epoch, 1)
    return full_epoch // max(num_epochs_fixed, 1) + 1 + random_seed_offset


def full_order(
    ordering: SeqOrdering, num_seqs: int, seed: int, seq_lens: Callable[[], np.ndarray]
) -> Order:
    """All sequences of a corpus in the order of one full epoch.

    Args:
        ordering: see `parse_seq_ordering`.
        num_seqs: sequences in the corpus.
        seed: see `epoch_seed`; used by the random orders.
        seq_lens: gives the array [num_seqs] of lengths; called only if the order needs them.

    Raises:
        ConfigError: if `seq_lens` gives another number of lengths.
    """
    if num_seqs == 0:
        return range(0)
    lens = _checked_lens(seq_lens(), num_seqs) if ordering.needs_seq_lens else None
    match ordering.method:
        case "default":
            return range(num_seqs)
        case "reverse":
            return range(num_seqs - 1, -1, -1)
        case "default_every_n":
            stride = num_seqs // ordering.every_n
            grid = np.arange(stride * ordering.every_n, dtype=np.int64)
            return grid.reshape(ordering.every_n, stride).T.ravel()
        case "sorted":
            return _stable_argsort(_sort_keys(lens))
        case "sorted_reverse":
            return _stable_argsort(_reversed_keys(_sort_keys(lens)))
        case "random":
            return _rng(seed).permutation(num_seqs)
        case "random_sample":
            return _rng(seed).randint(0, num_seqs, size=num_seqs)
        case "laplace":
            order = _rng(seed).permutation(num_seqs)
            return _laplace(order, _sort_keys(lens), _num_bins(ordering, num_seqs))
        case method:
            rng = _rng(seed)
            order = rng.permutation(num_seqs)
            order = order[_stable_argsort(_sort_keys(lens)[order])]
            within = method == "sort_bin_shuffle_x2"
            return _shuffle_bins(order, _num_bins(ordering, num_seqs), rng, within)


def _rng(seed: int) -> RandomState:
    if not 0 <= seed < 2**32:
        raise ConfigError(
            "the random seed is out of range", expected="0 to 2**32 - 1", found=str(seed)
        )
    return RandomState(seed)


def _checked_lens(lens: np.ndarray, num_seqs: int) -> np.ndarray:
    lens = np.asarray(lens)
    if lens.shape != (num_seqs,) or lens.dtype.kind not in "iuf":
        raise ConfigError(
            "the lengths for the sequence order do not fit the corpus",
            expected=f"{num_seqs} numbers",
            found=f"shape {lens.shape} of {lens.dtype}",
        )
    return lens


def _num_bins(ordering: SeqOrdering, num_seqs: int) -> int:
    if ordering.seqs_per_bin is None:
        return ordering.num_bins
    return max(num_seqs // ordering.seqs_per_bin, 2)


def _sort_keys(lens: np.ndarray) -> np.ndarray:
    """Keys that sort like the lengths; 16 bit where they fit, as numpy then sorts by radix."""
    if lens.dtype.kind == "f":
        return lens
    low, high = int(lens.min()), int(lens.max())
    if high - low < 2**16:
        # Modulo 2**16 all along, which the difference does not notice.
        return lens.astype(np.uint16) - np.uint16(low % 2**16)
    return lens.astype(np.int64)


def _reversed_keys(keys: np.ndarray) -> np.ndarray:
    """Keys that sort the other way round, with ties still in the original order."""
    return np.uint16(2**16 - 1) - keys if keys.dtype == np.uint16 else -keys


def _stable_argsort(keys: np.ndarray) -> np.ndarray:
    return np.argsort(keys, kind="stable")


def _bin_edges(num_seqs: int, num_bins: int) -> np.ndarray:
    return np.arange(num_bins + 1) * num_seqs // num_bins


def _laplace(order: np.ndarray, keys: np.ndarray, num_bins: int) -> np.ndarray:
    """Sorts each bin of an order by length, in place: even bins ascending, odd ones descending."""
    edges = _bin_edges(len(order), num_bins)
    if len(order) < num_bins * _MIN_SEQS_PER_BIN_STEP:
        bin_of = np.repeat(np.arange(num_bins), np.diff(edges))
        keys = keys[order]
        keys = np.where(bin_of % 2 == 1, _reversed_keys(keys), keys)
        return order[np.lexsort((keys, bin_of))]
    for i, (start, end) in enumerate(pairwise(edges.tolist())):
        part = order[start:end]
        part_keys = keys[part] if i % 2 == 0 else _reversed_keys(keys[part])
        order[start:end] = part[_stable_argsort(part_keys)]
    return order


def _shuffle_bins(order: np.ndarray, num_bins: int, rng: RandomState, within: bool) -> np.ndarray:
    """Shuffles the bins of an order, and with `within` also the sequences inside each bin."""
    edges = _bin_edges(len(order), num_bins).tolist()
    parts = [order[edges[i] : edges[i + 1]] for i in rng.permutation(num_bins).tolist()]
    if within:
        for part in parts:
            rng.shuffle(part)
    return np.concatenate(parts)


def part_bounds(num_seqs: int, num_parts: int, part: int) -> tuple[int, int]:
    """First and end position of one of `num_parts` contiguous parts; the first ones are larger.

    >>> [part_bounds(8, 3, part) for part in range(3)]
    [(0, 3), (3, 6), (6, 8)]
    """
    size, rest = divmod(num_seqs, num_parts)
    return part * size + min(part, rest), (part + 1) * size + min(part + 1, rest)


def sub_epoch_bounds(
    num_seqs: int, epoch: int | None, partition_epoch: int, num_shards: int
) -> tuple[int, int]:
    """First and end position of what all ranks together read in a sub-epoch; see `take_part`."""
    first = ((epoch or 1) - 1) % partition_epoch * num_shards
    num_parts = partition_epoch * num_shards
    last = first + num_shards - 1
    return part_bounds(num_seqs, num_parts, first)[0], part_bounds(num_seqs, num_parts, last)[1]


def take_part(
    order: Order, epoch: int | None, partition_epoch: int, num_shards: int, shard_index: int
) -> Order:
    """The share of one rank in one sub-epoch: shards are parts of the sub-epoch's part.

    Args:
        order: the full order, or any sequence that can be sliced.
        epoch: sub-epoch, from 1; None counts as 1.
        partition_epoch: sub-epochs in a full epoch.
        num_shards, shard_index: number of ranks, and which one this is.
    """
    part = ((epoch or 1) - 1) % partition_epoch * num_shards + shard_index
    start, end = part_bounds(len(order), partition_epoch * num_shards, part)
    return order[start:end]


def keep_first(order: Order, group: np.ndarray) -> np.ndarray:
    """Drops every sequence whose group came before in the order.

    Args:
        order: corpus indices.
        group: int64 [num_seqs], the same number for sequences that count as the same.
    """
    order = np.asarray(order, np.int64)
    _, first = np.unique(group[order], return_index=True)
    return order[np.sort(first)]


def as_array(order: Any) -> np.ndarray:
    """An order, or any sequence of corpus indices, as an int64 array (a copy only if needed)."""
    if isinstance(order, range):
        return np.arange(order.start, order.stop, order.step, dtype=np.int64)
    return np.asarray(order, dtype=np.int64).reshape(-1)


class SeqLens:
    """The `get_seq_len` function of `Dataset.get_seq_order_for_epoch`, with all lengths at once.

    Args:
        load: gives the array [num_seqs] of lengths; called when an order needs it.
    """

    def __init__(self, load: Callable[[], np.ndarray]) -> None:
        self.load = load

    def __call__(self, corpus_seq_idx: int) -> float:
        return self.load()[corpus_seq_idx]


def lens_array(get_seq_len: Callable[[int], float], num_seqs: int) -> np.ndarray:
    """All lengths [num_seqs] of a function of the corpus index."""
    if isinstance(get_seq_len, SeqLens):
        return get_seq_len.load()
    owner = getattr(get_seq_len, "__self__", None)
    if isinstance(owner, np.ndarray) and get_seq_len.__name__ == "__getitem__":
        return owner
    return np.array([get_seq_len(index) for index in range(num_seqs)])


def tag_groups(tags: Sequence[str]) -> np.ndarray:
    """For each sequence the index of the first one with the same tag, int64 [num_seqs]."""
    first_with: dict[str, int] = {}
    return np.fromiter(map(first_with.setdefault, tags, count()), np.int64, len(tags))


def tags_in(tags: Sequence[str], wanted: Container[str]) -> np.ndarray:
    """Whether each tag is one of `wanted`, bool [num_seqs]."""
    return np.fromiter(map(wanted.__contains__, tags), bool, len(tags))
