"""Base class for datasets with random access to a corpus whose tags and lengths are known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..io.errors import ConfigError, MissingSequenceError
from . import ordering
from .basic import Dataset
from .numbers_dict import NumbersDict
from .tags import TagIndex, tag_array


class CachedDataset(Dataset):
    """Draws the order of an epoch over a known corpus and looks sequences up by tag.

    A subclass implements `_get_data_by_real_seq_idx`, `_get_seq_length_by_real_idx` and
    `_get_tag_by_real_idx`, sets `_num_seqs`, `num_inputs`, `num_outputs`, `target_keys` and
    `targets`, and may override `_get_seq_lens` and `_get_tag_arrays` to give all at once.

    An older kind of subclass, written for RETURNN, overrides `_load_seqs` instead and puts what it
    loads into a store: `insert_alloc_interval` tells what is missing there,
    `_set_alloc_intervals_data` stores the frames of "data", `preload_set` holds the indices that
    are complete, and `targets` the frames of each other key, those of sequence i of the epoch from
    `get_seq_start(i)` on.

    Args:
        cache_byte_size: accepted for RETURNN's sake. There is no cache to fill: data are read when
            they are asked for, and the memory that the operating system spends on files is the
            cache, which all processes share.

    Attributes:
        cache_byte_size_total_limit, cache_byte_size_limit_at_start: always 0.
        target_keys: keys of the columns of lengths behind that of "data".
        targets: the same keys, as far as there are data for them.
    """

    def __init__(self, cache_byte_size: int = 0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._cache_byte_size = cache_byte_size
        self.definite_cache_leftover = 0
        self.cache_byte_size_total_limit = self.cache_byte_size_limit_at_start = 0
        self.target_keys: list[str] = []
        self.targets: dict[str, np.ndarray | None] = {}
        self._seq_index: np.ndarray = np.zeros(0, np.int64)
        self._seq_index_view = memoryview(self._seq_index)
        self._have_order = False
        self._tag_index: TagIndex | None = None
        self._shuffled: tuple[int, dict[str, np.ndarray]] = (-1, {})
        self._stored: dict[int, np.ndarray] = {}
        self._seq_start: Sequence[np.ndarray] = []
        self.preload_set: set[int] = set()

    # What a subclass gives, by corpus index.

    def _get_data_by_real_seq_idx(self, real_seq_idx: int, key: str) -> np.ndarray:
        raise NotImplementedError(f"{type(self).__name__} must implement _get_data_by_real_seq_idx")

    def _get_seq_length_by_real_idx(self, real_seq_idx: int) -> np.ndarray:
        """Lengths of "data", if there are any, and of the target keys."""
        raise NotImplementedError(
            f"{type(self).__name__} must implement _get_seq_length_by_real_idx"
        )

    def _get_tag_by_real_idx(self, real_seq_idx: int) -> str:
        raise NotImplementedError(f"{type(self).__name__} must implement _get_tag_by_real_idx")

    def _get_seq_lens(self) -> np.ndarray:
        """The first length of every sequence, [num_seqs]."""
        lens = (self._get_seq_length_by_real_idx(index)[0] for index in range(self._num_seqs))
        return np.fromiter(lens, np.int64, self._num_seqs)

    def _get_tag_arrays(self) -> list[np.ndarray]:
        """The tags of the corpus in one or several arrays; see `tags.tag_array`."""
        tags = map(self._get_tag_by_real_idx, range(self._num_seqs))
        return [tag_array([tag.encode("utf-8") for tag in tags])]

    # The order.

    def init_seq_order(
        self,
        epoch: int | None = None,
        seq_list: Sequence[str] | None = None,
        seq_order: Sequence[int] | None = None,
    ) -> bool:
        """See `Dataset.init_seq_order`.

        Raises:
            MissingSequenceError: if the corpus has no sequence of a tag or index.
        """
        super().init_seq_order(epoch=epoch, seq_list=seq_list, seq_order=seq_order)
        if seq_order is not None:
            order = self._checked_order(ordering.as_array(seq_order))
        elif seq_list is not None:
            order = self._get_tag_index().find_many(seq_list)
        else:
            lens = ordering.SeqLens(self._get_seq_lens)
            order = ordering.as_array(self.get_seq_order_for_epoch(epoch, self._num_seqs, lens))
        self._shuffled = (-1, {})
        self._stored, self._seq_start, self.preload_set = {}, [], set()
        changed = not self._have_order or not np.array_equal(order, self._seq_index)
        self._seq_index = order
        self._seq_index_view = memoryview(order)
        self._have_order = True
        return changed

    def _checked_order(self, order: np.ndarray) -> np.ndarray:
        bad = order[(order < 0) | (order >= self._num_seqs)]
        if len(bad):
            raise MissingSequenceError(
                f"{self}: there is no sequence with this index",
                expected=f"0 to {self._num_seqs - 1}",
                found=str(bad[0]),
            )
        return order

    def _get_tag_index(self) -> TagIndex:
        if self._tag_index is None:
            self._tag_index = TagIndex(self._get_tag_arrays())
        return self._tag_index

    def _find_tag(self, tag: str) -> int:
        return self._get_tag_index().find(tag)

    def supports_seq_order_sorting(self) -> bool:
        """Orders by length are possible."""
        return True

    def supports_sharding(self) -> bool:
        """The order can be shared out."""
        return True

    def get_current_seq_order(self) -> list[int]:
        """See `Dataset.get_current_seq_order`."""
        return self._seq_index.tolist()

    def have_corpus_seq_idx(self) -> bool:
        """Corpus indices are known."""
        return True

    def get_corpus_seq_idx(self, seq_idx: int) -> int:
        """See `Dataset.get_corpus_seq_idx`."""
        return self._seq_index_view[seq_idx]

    @property
    def num_seqs(self) -> int:
        """Sequences in the current epoch."""
        return len(self._seq_index)

    def get_total_num_seqs(self, *, fast: bool = False) -> int:
        """Sequences in the corpus."""
        return self._num_seqs

    @property
    def _index_map(self) -> range:
        return range(self.num_seqs)

    def batch_set_generator_cache_whole_epoch(self) -> bool:
        """Batches may be kept, as sequences can be read in any order."""
        return True

    # The store of older subclasses.

    def insert_alloc_interval(self, start: int, end: int | None = None) -> list[int]:
        """The sequences of the epoch in this range that are not stored yet."""
        end = start + 1 if end is None else end
        return [seq_idx for seq_idx in range(start, end) if seq_idx not in self._stored]

    def _set_alloc_intervals_data(self, idc: int, data: np.ndarray) -> None:
        """Stores the frames of "data" of a sequence of the epoch."""
        self._stored[idc] = self._sliding_window(data) if self.window > 1 else data

    def _preload_seqs(self, start: int, end: int) -> None:
        """Fills the store ahead of time. Nothing here calls it behind the reader's back."""
        self.load_seqs(start, end)

    def get_seq_start(self, sorted_seq_idx: int) -> np.ndarray:
        """The summed lengths of the sequences of the epoch before this one."""
        if len(self._seq_start) != self.num_seqs + 1:
            lens = [self.get_seq_length_nd(seq_idx) for seq_idx in range(self.num_seqs)]
            self._seq_start = np.cumsum([np.zeros_like(lens[0]), *lens], axis=0, dtype=np.int64)
        return self._seq_start[sorted_seq_idx]

    def is_cached(self, start: int, end: int) -> bool:
        """Whether all sequences of this range are stored."""
        return start == end or (
            bool(self.preload_set) and self.preload_set.issuperset(range(start, end))
        )

    def _get_stored(self, seq_idx: int, key: str) -> np.ndarray:
        if key == "data" and self.num_inputs > 0:
            return self._stored[seq_idx]
        column = self._column_keys().index(key)
        start = int(self.get_seq_start(seq_idx)[column])
        return self.targets[key][start : start + int(self.get_seq_length_nd(seq_idx)[column])]

    # Reading.

    def _load_seqs(self, start: int, end: int) -> None:
        if end > self.num_seqs:
            raise IndexError(f"{self}: there is no sequence {end - 1} of {self.num_seqs}")

    def _get_load_seqs_superset(self, start: int, end: int) -> tuple[int, int]:
        start, superset_end = super()._get_load_seqs_superset(start, end)
        return start, max(end, min(superset_end, self.num_seqs))

    def _shuffle_frames_in_seqs(self, start: int, end: int) -> None:
        """Nothing to do yet: `get_data` shuffles the frames of a group when it first needs them."""

    def get_data(self, seq_idx: int, key: str) -> np.ndarray:
        """See `Dataset.get_data`. Arrays may be read-only views of a file."""
        if self.shuffle_frames_of_nseqs > 0:
            return self._get_shuffled(seq_idx, key)
        if self._stored:
            return self._get_stored(seq_idx, key)
        return self._get_data_by_real_seq_idx(self._seq_index_view[seq_idx], key)

    def _get_shuffled(self, seq_idx: int, key: str) -> np.ndarray:
        """The frames that a sequence gets when those of its group are shuffled together."""
        first = seq_idx - seq_idx % self.shuffle_frames_of_nseqs
        group = self._seq_index[first : first + self.shuffle_frames_of_nseqs].tolist()
        if self._shuffled[0] != first:
            self._shuffled = (first, {})
        lens = [self._get_lens_by_key(index)[key] for index in group]
        arrays = self._shuffled[1]
        if key not in arrays:
            if lens != [self._get_seq_length_by_real_idx(index)[0] for index in group]:
                raise ConfigError(
                    f"{self}: shuffle_frames_of_nseqs needs data keys of the same length",
                    found=f"{key!r} has other lengths",
                )
            frames = np.concatenate([self._get_data_by_real_seq_idx(i, key) for i in group])
            # Each group has its own fixed permutation, the same one for all data keys.
            arrays[key] = frames[np.random.RandomState(first).permutation(len(frames))]
        start = sum(lens[: seq_idx - first])
        return arrays[key][start : start + lens[seq_idx - first]]

    def get_data_by_seq_tag(self, seq_tag: str, key: str) -> np.ndarray:
        """The array of one data key of a sequence of the corpus, whatever the epoch.

        Raises:
            MissingSequenceError: if there is no sequence with this tag.
        """
        return self._get_data_by_real_seq_idx(self._find_tag(seq_tag), key)

    def get_tag(self, sorted_seq_idx: int) -> str:
        """See `Dataset.get_tag`."""
        return self._get_tag_by_real_idx(self._seq_index_view[sorted_seq_idx])

    def _get_lens_by_key(self, real_seq_idx: int) -> dict[str, int]:
        lens = self._get_seq_length_by_real_idx(real_seq_idx).tolist()
        return dict(zip(self._column_keys(), lens, strict=True))

    def _column_keys(self) -> list[str]:
        return [*(["data"] if self.num_inputs > 0 else []), *self.target_keys]

    def get_seq_length(self, seq_idx: int) -> NumbersDict:
        """See `Dataset.get_seq_length`."""
        lens = self._get_lens_by_key(self._seq_index_view[seq_idx])
        return NumbersDict(numbers_dict=lens)

    def get_seq_length_nd(self, sorted_seq_idx: int) -> np.ndarray:
        """The same as an array: "data", if there are any, and the target keys."""
        return self._get_seq_length_by_real_idx(self._seq_index_view[sorted_seq_idx])

    def get_estimated_seq_length(self, seq_idx: int) -> int:
        """The length that orders sort by: that of "data", or of the first target key."""
        return int(self.get_seq_length_nd(seq_idx)[0])

    def get_data_keys(self) -> list[str]:
        """See `Dataset.get_data_keys`."""
        return [*(["data"] if self.num_inputs > 0 else []), *self.get_target_list()]

    def get_target_list(self) -> list[str]:
        """See `Dataset.get_target_list`."""
        return list(self.targets)

    def get_data_dim(self, key: str) -> int:
        """See `Dataset.get_data_dim`."""
        if key == "data" and self.num_inputs > 0:
            return self.num_inputs * self.window
        return self.num_outputs[key][0]
