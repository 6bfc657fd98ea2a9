"""The order of one epoch of a dataset: `ordering` applied to a dataset's options and corpus."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import numpy as np
import xxhash

from ..io.errors import ConfigError, MissingSequenceError
from . import ordering
from .chunking import FORWARD_COMPATIBLE_KWARGS
from .resume import consumed_by, fill_up, shares_after
from .seq_files import load_seq_lens

if TYPE_CHECKING:
    from .basic import Dataset


@dataclass
class EpochParts:
    """The current epoch without repetitions by `equal_steps`.

    Attributes:
        own: corpus indices of this rank's share, those that are read already included.
        whole: corpus indices of the shares of all ranks, in any order.
    """

    own: Sequence[int] = ()
    whole: Sequence[int] = ()


GetSeqLen = Callable[[int], float]


@dataclass
class CorpusColumns:
    """Arrays [num_seqs] over the corpus, each computed when an order first needs it.

    Attributes:
        in_filter: bool, whether the tag is in the dataset's filter.
        same_tag: int64, index of the first sequence with the same tag.
        seq_lens: lengths from `seq_order_seq_lens_file`.
    """

    in_filter: np.ndarray | None = None
    same_tag: np.ndarray | None = None
    seq_lens: np.ndarray | None = None


def order_for_epoch(
    dataset: Dataset, epoch: int | None, num_seqs: int, get_seq_len: GetSeqLen | None
) -> Sequence[int]:
    """See `Dataset.get_seq_order_for_epoch`."""
    if epoch is None:
        return []
    num_seqs = int(num_seqs)
    parsed = ordering.parse_seq_ordering(_seq_ordering(dataset, epoch))
    seed = dataset._get_random_seed_for_epoch(epoch=epoch, num_epochs_fixed=parsed.num_epochs_fixed)
    order = ordering.full_order(
        parsed, num_seqs, seed, lambda: _seq_lens(dataset, num_seqs, get_seq_len)
    )
    if dataset.unique_seq_tags:
        order = ordering.keep_first(order, _same_tag(dataset, num_seqs))
    share = _share_of_rank(dataset, order, epoch, num_seqs)
    if dataset.seq_tags_filter is not None and len(order) and not len(share):
        _refuse_empty(dataset, order)
    return share


def _share_of_rank(
    dataset: Dataset, order: Sequence[int], epoch: int, num_seqs: int
) -> Sequence[int]:
    """What this rank has left to read of the full order."""
    num_shards, rank = dataset._num_shards, dataset._shard_index
    partition_epoch = dataset.partition_epoch or 1
    parts, state = dataset._epoch_parts, dataset._resume_state
    if state is None and not dataset.equal_steps:
        first, end = ordering.sub_epoch_bounds(len(order), epoch, partition_epoch, num_shards)
        parts.whole = _repeat_and_filter(dataset, order[first:end], num_seqs)
        if num_shards == partition_epoch == 1:
            parts.own = parts.whole
        else:
            parts.own = _share(dataset, order, epoch, num_seqs, num_shards, rank)
        return parts.own

    def base(count: int) -> list[np.ndarray]:
        shares = (_share(dataset, order, epoch, num_seqs, count, k) for k in range(count))
        return [ordering.as_array(share) for share in shares]

    shares, consumed = shares_after(state.splits if state else (), num_shards, base)
    dataset._num_read_before = consumed_by(consumed, rank)
    dataset._is_resumed = True
    parts.own, parts.whole = shares[rank], np.concatenate(shares)
    share = fill_up(shares, rank) if dataset.equal_steps else shares[rank]
    return share[dataset._num_read_before :]


def _share(
    dataset: Dataset, order: Sequence[int], epoch: int, num_seqs: int, num_shards: int, shard: int
) -> Sequence[int]:
    """What one of `num_shards` ranks reads of the full order in this sub-epoch."""
    order = dataset._apply_partition_epoch_and_sharding(
        order, dataset.partition_epoch or 1, epoch, num_shards, shard
    )
    return _repeat_and_filter(dataset, order, num_seqs)


def _repeat_and_filter(dataset: Dataset, order: Sequence[int], num_seqs: int) -> Sequence[int]:
    if (dataset.repeat_epoch or 1) > 1:
        order = np.tile(ordering.as_array(order), dataset.repeat_epoch)
    if dataset.seq_tags_filter is not None:
        order = ordering.as_array(order)
        order = order[_in_filter(dataset, num_seqs)[order]]
    return order


def order_identity(dataset: Dataset, epoch: int) -> str:
    """Identifies the corpus and all that decides the order of an epoch, but for the ranks."""
    wanted = dataset.seq_tags_filter
    options = (
        _seq_ordering(dataset, epoch),
        dataset.partition_epoch or 1,
        dataset.repeat_epoch or 1,
        dataset.unique_seq_tags,
        dataset.fixed_random_seed,
        dataset.random_seed_offset,
        dataset.equal_steps,
    )
    files = [] if wanted is None else [hash_of(*sorted(wanted))]
    if dataset._seq_order_seq_lens_file:
        content = Path(dataset._seq_order_seq_lens_file).read_bytes()
        files.append(xxhash.xxh3_128_hexdigest(content))
    return hash_of(dataset._get_corpus_digest(), *map(repr, options), *files)


def hash_of(*texts: str) -> str:
    """A hexadecimal hash of a list of texts."""
    hasher = xxhash.xxh3_128()
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        hasher.update(len(data).to_bytes(8, "little") + data)
    return hasher.hexdigest()


def _seq_ordering(dataset: Dataset, epoch: int) -> str:
    text = dataset.seq_ordering
    if callable(text):
        text = text(epoch=epoch, **FORWARD_COMPATIBLE_KWARGS)
    if not isinstance(text, str):
        raise TypeError(f"seq_ordering {dataset.seq_ordering!r} gives {text!r}, not a str")
    return text


def _seq_lens(dataset: Dataset, num_seqs: int, get_seq_len: GetSeqLen | None) -> np.ndarray:
    if dataset._seq_order_seq_lens_file:
        return seq_lens_from_file(dataset, num_seqs)
    if get_seq_len is None:
        raise ConfigError(
            f"seq_ordering {dataset.seq_ordering!r} needs lengths, which {dataset} lacks"
        )
    return ordering.lens_array(get_seq_len, num_seqs)


def seq_lens_from_file(dataset: Dataset, num_seqs: int | None = None) -> np.ndarray:
    """The lengths in `seq_order_seq_lens_file` by corpus index, [num_seqs].

    Raises:
        MissingSequenceError: if a sequence of the corpus has none.
    """
    columns = dataset._corpus_columns
    if columns.seq_lens is None or num_seqs not in (None, len(columns.seq_lens)):
        lens = load_seq_lens(dataset._seq_order_seq_lens_file)
        tags = dataset.get_all_tags() if num_seqs is None else _tags(dataset, num_seqs)
        try:
            columns.seq_lens = np.array(list(map(lens.__getitem__, tags)))
        except KeyError as error:
            raise MissingSequenceError(
                "a sequence of the corpus has no length in this file",
                dataset._seq_order_seq_lens_file,
                error.args[0],
            ) from None
    return columns.seq_lens


def _same_tag(dataset: Dataset, num_seqs: int) -> np.ndarray:
    columns = dataset._corpus_columns
    if columns.same_tag is None or len(columns.same_tag) != num_seqs:
        columns.same_tag = ordering.tag_groups(_tags(dataset, num_seqs))
    return columns.same_tag


def _in_filter(dataset: Dataset, num_seqs: int) -> np.ndarray:
    columns = dataset._corpus_columns
    if columns.in_filter is None or len(columns.in_filter) != num_seqs:
        columns.in_filter = ordering.tags_in(_tags(dataset, num_seqs), dataset.seq_tags_filter)
    return columns.in_filter


def _refuse_empty(dataset: Dataset, order: Sequence[int]) -> NoReturn:
    tags = dataset.get_all_tags()
    raise ConfigError(
        f"{dataset}: no sequence of the epoch is in the list of sequences to keep",
        dataset._seq_list_filter_file,
        expected=f"tags like {[tags[index] for index in list(order[:3])]}",
        found=str(sorted(dataset.seq_tags_filter)[:3]),
    )


def _tags(dataset: Dataset, num_seqs: int) -> Sequence[str]:
    tags = dataset.get_all_tags()
    if len(tags) != num_seqs:
        raise ConfigError(
            f"{dataset}: the tags do not fit the corpus",
            expected=f"{num_seqs} tags",
            found=str(len(tags)),
        )
    return tags
