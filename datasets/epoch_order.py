"""The order of one epoch of a dataset: `ordering` applied to a dataset's options and corpus."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..io.errors import ConfigError, MissingSequenceError
from . import ordering
from .chunking import FORWARD_COMPATIBLE_KWARGS
from .seq_files import load_seq_lens

if TYPE_CHECKING:
    from .basic import Dataset

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
    partition_epoch, repeat_epoch = dataset.partition_epoch or 1, dataset.repeat_epoch or 1
    if partition_epoch > 1 or dataset._num_shards > 1:
        order = dataset._apply_partition_epoch_and_sharding(
            order, partition_epoch, epoch, dataset._num_shards, dataset._shard_index
        )
    if repeat_epoch > 1:
        order = np.tile(ordering.as_array(order), repeat_epoch)
    if dataset.seq_tags_filter is not None and num_seqs:
        order = _filter(dataset, ordering.as_array(order), num_seqs)
    return order


def _seq_ordering(dataset: Dataset, epoch: int) -> str:
    text = dataset.seq_ordering
    if callable(text):
        text = text(epoch=epoch, **FORWARD_COMPATIBLE_KWARGS)
    if not isinstance(text, str):
        raise TypeError(f"seq_ordering {dataset.seq_ordering!r} gives {text!r}, not a str")
    return text


def _seq_lens(dataset: Dataset, num_seqs: int, get_seq_len: GetSeqLen | None) -> np.ndarray:
    path = dataset._seq_order_seq_lens_file
    if not path:
        if get_seq_len is None:
            raise ConfigError(
                f"seq_ordering {dataset.seq_ordering!r} needs lengths, which {dataset} lacks"
            )
        return ordering.lens_array(get_seq_len, num_seqs)
    columns = dataset._corpus_columns
    if columns.seq_lens is None or len(columns.seq_lens) != num_seqs:
        lens = load_seq_lens(path)
        tags = _tags(dataset, num_seqs)
        try:
            columns.seq_lens = np.array(list(map(lens.__getitem__, tags)))
        except KeyError as error:
            raise MissingSequenceError(
                "a sequence of the corpus has no length in this file", path, error.args[0]
            ) from None
    return columns.seq_lens


def _same_tag(dataset: Dataset, num_seqs: int) -> np.ndarray:
    columns = dataset._corpus_columns
    if columns.same_tag is None or len(columns.same_tag) != num_seqs:
        columns.same_tag = ordering.tag_groups(_tags(dataset, num_seqs))
    return columns.same_tag


def _filter(dataset: Dataset, order: np.ndarray, num_seqs: int) -> np.ndarray:
    columns = dataset._corpus_columns
    if columns.in_filter is None or len(columns.in_filter) != num_seqs:
        tags = _tags(dataset, num_seqs)
        columns.in_filter = ordering.tags_in(tags, dataset.seq_tags_filter)
    kept = order[columns.in_filter[order]]
    if not len(kept):
        tags = dataset.get_all_tags()
        raise ConfigError(
            f"{dataset}: no sequence of the epoch is in the list of sequences to keep",
            dataset._seq_list_filter_file,
            expected=f"tags like {[tags[index] for index in order[:3].tolist()]}",
            found=str(sorted(dataset.seq_tags_filter)[:3]),
        )
    return kept


def _tags(dataset: Dataset, num_seqs: int) -> Sequence[str]:
    tags = dataset.get_all_tags()
    if len(tags) != num_seqs:
        raise ConfigError(
            f"{dataset}: the tags do not fit the corpus",
            expected=f"{num_seqs} tags",
            found=str(len(tags)),
        )
    return tags
