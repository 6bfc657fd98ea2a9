"""Base class for datasets that get their sequences one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..io.errors import ConfigError
from .basic import Dataset, DatasetSeq
from .numbers_dict import NumbersDict


class CachedDataset2(Dataset):
    """Keeps the sequences that were loaded, until later ones are asked for.

    The interface for subclasses is that of RETURNN's class of this name. A subclass implements
    `_collect_single_seq` and sets `num_inputs` and `num_outputs`, and `labels` if it has any.
    Its `init_seq_order` calls this one and draws an order. It may set `_num_seqs`,
    `_estimated_num_seqs` and `_num_timesteps` if it knows them in advance.

    Attributes:
        added_data: the loaded sequences, without gaps.
        expected_load_seq_start: sequences before this index are gone.
        reached_final_seq: whether the end of the epoch was found.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._num_timesteps = None
        self._reset()

    def _reset(self) -> None:
        self.expected_load_seq_start = 0
        self.reached_final_seq = False
        self.added_data: list[DatasetSeq] = []
        self._num_timesteps_accumulated = NumbersDict(0)

    def init_seq_order(
        self,
        epoch: int | None = None,
        seq_list: Sequence[str] | None = None,
        seq_order: Sequence[int] | None = None,
    ) -> bool:
        """See `Dataset.init_seq_order`. The order may always have changed."""
        super().init_seq_order(epoch=epoch, seq_list=seq_list, seq_order=seq_order)
        self._reset()
        self._num_seqs = None
        return True

    def _collect_single_seq(self, seq_idx: int) -> DatasetSeq | None:
        """Gives a sequence of the epoch, or None behind the end. Called for rising indices."""
        raise NotImplementedError(f"{type(self).__name__} must implement _collect_single_seq")

    @property
    def num_seqs(self) -> int:
        """See `Dataset.num_seqs`."""
        if self._num_seqs is not None:
            return self._num_seqs
        if self.epoch is None:
            return 0
        raise NotImplementedError(f"{self} does not know its number of sequences yet")

    def is_cached(self, start: int, end: int) -> bool:
        """False, so that every `load_seqs` can drop what is behind."""
        return False

    def _load_seqs(self, start: int, end: int) -> None:
        if start < self.expected_load_seq_start:
            raise IndexError(
                f"{self}: cannot go back to sequence {start}, as {self.expected_load_seq_start} "
                "was loaded already"
            )
        if start > self.expected_load_seq_start:
            self._cleanup_old_seqs(start)
            self.expected_load_seq_start = start
        if self.added_data:
            start = max(self.added_data[-1].seq_idx + 1, start)
        for seq_idx in range(start, end):
            seq = self._collect_single_seq(seq_idx=seq_idx)
            if seq is not None:
                self.added_data.append(seq)
                self._num_timesteps_accumulated += seq.num_frames

    def _cleanup_old_seqs(self, seq_idx_end: int) -> None:
        keep = (i for i, seq in enumerate(self.added_data) if seq.seq_idx >= seq_idx_end)
        del self.added_data[: next(keep, len(self.added_data))]

    def _get_seq(self, seq_idx: int) -> DatasetSeq | None:
        position = seq_idx - self.added_data[0].seq_idx if self.added_data else -1
        if 0 <= position < len(self.added_data) and self.added_data[position].seq_idx == seq_idx:
            return self.added_data[position]
        return next((seq for seq in self.added_data if seq.seq_idx == seq_idx), None)

    def _require_seq(self, seq_idx: int) -> DatasetSeq:
        seq = self._get_seq(seq_idx)
        if seq is None:
            raise IndexError(f"{self}: sequence {seq_idx} is not loaded; call load_seqs before")
        return seq

    def _load_up_to(self, seq_idx: int) -> DatasetSeq:
        self.load_seqs(min(self.expected_load_seq_start, seq_idx), seq_idx + 1)
        return self._require_seq(seq_idx)

    def _load_something(self) -> DatasetSeq:
        if not self.added_data:
            self.load_seqs(self.expected_load_seq_start, self.expected_load_seq_start + 1)
        if not self.added_data:
            raise ConfigError(f"{self} has no sequence that would tell what its data look like")
        return self.added_data[0]

    def is_less_than_num_seqs(self, n: int) -> bool:
        """See `Dataset.is_less_than_num_seqs`. Loads sequences where their number is not known."""
        if n < self.expected_load_seq_start:
            return True
        if self.epoch is None:
            return False
        try:
            return n < self.num_seqs
        except NotImplementedError:
            pass
        self._load_seqs(self.expected_load_seq_start, n + 1)
        if self._get_seq(n) is not None:
            return True
        last = self.added_data[-1].seq_idx if self.added_data else self.expected_load_seq_start - 1
        self._num_seqs = last + 1
        self.reached_final_seq = True
        return False

    def get_num_timesteps(self) -> int | NumbersDict:
        """See `Dataset.get_num_timesteps`; without `_num_timesteps` only after a whole epoch."""
        if self._num_timesteps is not None:
            return self._num_timesteps
        if not self.reached_final_seq:
            raise NotImplementedError(f"{self} does not know its number of frames yet")
        return self._num_timesteps_accumulated

    def get_seq_length(self, sorted_seq_idx: int) -> NumbersDict:
        """See `Dataset.get_seq_length`. Loads the sequence."""
        return self._load_up_to(sorted_seq_idx).num_frames

    def get_tag(self, sorted_seq_idx: int) -> str:
        """See `Dataset.get_tag`. Loads the sequence."""
        return self._load_up_to(sorted_seq_idx).seq_tag

    def get_data(self, seq_idx: int, key: str) -> np.ndarray:
        """See `Dataset.get_data`.

        Raises:
            IndexError: if the sequence is not loaded.
        """
        return self._require_seq(seq_idx).features[key]

    def get_complete_frac(self, sorted_seq_idx: int, **kwargs: Any) -> float | None:
        """See `Dataset.get_complete_frac`; the sequence itself may tell it."""
        seq = self._get_seq(sorted_seq_idx)
        if seq is not None and seq.complete_frac is not None:
            return seq.complete_frac
        return super().get_complete_frac(sorted_seq_idx, **kwargs)

    def get_data_keys(self) -> list[str]:
        """See `Dataset.get_data_keys`. Loads a sequence."""
        return sorted(self._load_something().get_data_keys())

    def get_target_list(self) -> list[str]:
        """All data keys but "data"."""
        return [key for key in self.get_data_keys() if key != "data"]

    def is_data_sparse(self, key: str) -> bool:
        """See `Dataset.is_data_sparse`."""
        if key in self.num_outputs:
            return self.num_outputs[key][1] == 1
        return self._load_something().get_data(key).ndim == 1

    def get_data_dim(self, key: str) -> int:
        """See `Dataset.get_data_dim`."""
        if key in self.num_outputs:
            return self.num_outputs[key][0]
        array = self._load_something().get_data(key)
        return super().get_data_dim(key) if array.ndim <= 1 else array.shape[-1]

    def get_data_dtype(self, key: str) -> str:
        """See `Dataset.get_data_dtype`. Loads a sequence."""
        return str(self._load_something().get_data(key).dtype)
