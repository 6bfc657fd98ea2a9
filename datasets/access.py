"""What a dataset is asked for: its sequences, their data, chunks and batches.

The defaults suit a subclass that knows nothing in advance; subclasses override what they know.
Names and behaviour are those of RETURNN's `Dataset`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from . import batching, chunking
from .batching import Batch, BatchSetGenerator
from .numbers_dict import NumbersDict
from .seq import DatasetSeq


class OptionalNotImplementedError(NotImplementedError):
    """This dataset does not have the method, and need not have it."""


class SeqAccess:
    """The reading half of `basic.Dataset`.

    Attributes:
        num_inputs: number of features (or of classes, if sparse) of "data"; 0 if there is none.
        num_outputs: (dim, number of axes with time) per data key.
        labels: class names per data key.
        window: frames beside each other in "data".
        weights: by sequence index, weight and threshold; see `sample`.
    """

    num_inputs: int
    num_outputs: dict[str, tuple[int, int]] | None
    labels: dict[str, list[str]]
    window: int
    epoch: int | None
    seq_ordering: Any
    partition_epoch: int
    weights: dict[int, list[float]]
    zpad: np.ndarray | None
    shuffle_frames_of_nseqs: int
    ctx_left: NumbersDict
    ctx_right: NumbersDict
    _num_timesteps: Any
    _estimated_num_seqs: int | None
    _num_loaded: int = 0
    _num_read_before: int = 0

    def have_corpus_seq_idx(self) -> bool:
        """Whether `get_corpus_seq_idx` works for every order."""
        return False

    def get_corpus_seq_idx(self, seq_idx: int) -> int:
        """The corpus index of a sequence of the epoch."""
        if self.seq_ordering == "default" and self.partition_epoch == 1:
            return seq_idx
        raise OptionalNotImplementedError(f"{self} does not know corpus indices")

    def have_get_corpus_seq(self) -> bool:
        """Whether `get_corpus_seq` works."""
        return False

    def get_corpus_seq(self, corpus_seq_idx: int) -> DatasetSeq:
        """A sequence by its corpus index, whatever the epoch."""
        raise OptionalNotImplementedError(f"{self} has no random access to its corpus")

    # The number of sequences.

    @property
    def num_seqs(self) -> int:
        """Sequences in the current epoch; raises NotImplementedError while unknown."""
        raise NotImplementedError(f"{self} does not know its number of sequences")

    @property
    def estimated_num_seqs(self) -> int | None:
        """Sequences in the current epoch, perhaps only about, or None."""
        with contextlib.suppress(Exception):
            return self.num_seqs
        return self._estimated_num_seqs

    def is_less_than_num_seqs(self, n: int) -> bool:
        """Whether the epoch has a sequence n. May block until that is known."""
        return n < self.num_seqs

    def get_all_tags(self) -> list[str]:
        """The tags of the whole corpus in its own order."""
        raise OptionalNotImplementedError(f"{self} does not know all tags")

    def get_total_num_seqs(self, *, fast: bool = False) -> int:
        """Sequences in the corpus; with `fast`, raises where finding out takes long."""
        raise OptionalNotImplementedError(f"{self} does not know its number of sequences")

    def have_seqs(self) -> bool:
        """Whether there is any sequence."""
        with contextlib.suppress(NotImplementedError):
            return self.get_total_num_seqs() > 0
        if self.epoch is not None:
            return self.is_less_than_num_seqs(0)
        raise NotImplementedError(f"{self} does not know yet whether it has sequences")

    def get_num_timesteps(self) -> int | NumbersDict:
        """Frames in the corpus."""
        if not self._num_timesteps:
            raise OptionalNotImplementedError(f"{self} does not know its number of frames")
        return self._num_timesteps

    def len_info(self, *, fast: bool = False) -> str:
        """The size of the corpus, for logs."""
        num_seqs: Any = "unknown"
        num_frames: Any = "unknown"
        with contextlib.suppress(Exception):
            num_seqs = self.get_total_num_seqs(fast=fast)
        with contextlib.suppress(Exception):
            num_frames = self.get_num_timesteps()
        return f"{type(self).__name__}, sequences: {num_seqs}, frames: {num_frames}"

    @classmethod
    def generic_complete_frac(cls, seq_idx: int, num_seqs: int | None) -> float:
        """The part of an epoch that is done with a sequence, in (0, 1]; else a guess."""
        if num_seqs:
            return min(float(seq_idx + 1) / num_seqs, 1.0)
        return max(1.0e-10, (1 - 1 / ((seq_idx**0.5) / 100 + 1)) * 0.99)

    def get_complete_frac(
        self, sorted_seq_idx: int, *, allow_only_lr_suitable: bool = False
    ) -> float | None:
        """The part of the epoch that is done with a sequence, in (0, 1], never falling.

        Args:
            sorted_seq_idx: index in the epoch.
            allow_only_lr_suitable: whether to give None instead of a guess.

        Raises:
            IndexError: if the epoch has no such sequence.
        """
        num_seqs = None
        with contextlib.suppress(Exception):
            num_seqs = self.num_seqs
        if num_seqs is None:
            if allow_only_lr_suitable:
                return None
            num_seqs = self.estimated_num_seqs
        if num_seqs is not None and math.isinf(num_seqs):
            if allow_only_lr_suitable:
                return None
            num_seqs = None
        if sorted_seq_idx < 0 or (num_seqs is not None and sorted_seq_idx >= num_seqs):
            raise IndexError(f"{self}: there is no sequence {sorted_seq_idx} of {num_seqs}")
        before = self._num_read_before
        total = None if num_seqs is None else num_seqs + before
        return self.generic_complete_frac(sorted_seq_idx + before, total)

    # Reading sequences of the epoch.

    def get_tag(self, sorted_seq_idx: int) -> str:
        """The tag of a sequence."""
        return f"seq-{sorted_seq_idx}"

    def get_seq_length(self, seq_idx: int) -> NumbersDict:
        """Frames of a sequence per data key."""
        raise NotImplementedError(f"{type(self).__name__} must implement get_seq_length")

    def get_estimated_seq_length(self, seq_idx: int) -> int:
        """A length to sort by, without loading the sequence."""
        raise OptionalNotImplementedError(f"{self} does not know lengths without loading")

    def get_data(self, seq_idx: int, key: str) -> np.ndarray:
        """The array of one data key of a sequence, usually float [time, dim] or int [time]."""
        return self.get_input_data(seq_idx) if key == "data" else self.get_targets(key, seq_idx)

    def get_input_data(self, sorted_seq_idx: int) -> np.ndarray:
        """`get_data` for "data". A subclass may implement this and `get_targets` instead of it."""
        return self.get_data(sorted_seq_idx, "data")

    def get_targets(self, target: str, sorted_seq_idx: int) -> np.ndarray:
        """`get_data` for another key."""
        return self.get_data(sorted_seq_idx, target)

    def get_data_slice(
        self, seq_idx: int, key: str, start_frame: int, end_frame: int
    ) -> np.ndarray:
        """`get_data(seq_idx, key)[start_frame:end_frame]`.

        Keys such as "alignment[sparse:coo:2:0]" are the parts of a matrix in coordinate form;
        part 0 holds the frames, and is shifted to begin at `start_frame`.
        """
        if "[sparse:" not in key:
            return self.get_data(seq_idx, key)[start_frame:end_frame]
        name, _, info = key.partition("[")
        frames = self.get_data(seq_idx, f"{name}[sparse:coo:2:0]")
        first, last = (frames < start_frame).sum(), (frames < end_frame).sum()
        part = self.get_data(seq_idx, key)[first:last]
        return part - start_frame if info.endswith(":0]") else part

    def get_times(self, sorted_seq_idx: int) -> np.ndarray:
        """The time stamps of the frames."""
        raise OptionalNotImplementedError(f"{self} has no time stamps")

    # What the data look like.

    def get_data_keys(self) -> list[str]:
        """The keys for `get_data`."""
        return ["data", *self.get_target_list()]

    def get_target_list(self) -> list[str]:
        """The keys that are usually not there when a model is applied."""
        return ["classes"]

    def get_data_dim(self, key: str) -> int:
        """Number of features (dense) or of classes (sparse); 1 if unknown."""
        if key in self.num_outputs:
            return self.num_outputs[key][0]
        return self.num_inputs * self.window if self.window > 1 and key == "data" else 1

    def get_data_dtype(self, key: str) -> str:
        """Element type, for example "float32"."""
        return "int32" if self.is_data_sparse(key) else "float32"

    def is_data_sparse(self, key: str) -> bool:
        """Whether the elements are class indices."""
        if key in self.num_outputs:
            return self.num_outputs[key][1] <= 1
        return key != "data"

    def get_data_shape(self, key: str) -> list[int | None]:
        """The axes of `get_data` behind time; None for those that vary."""
        if key in self.num_outputs:
            ndim = self.num_outputs[key][1]
            if ndim <= 1:
                return []
            last = None if self.is_data_sparse(key) else self.get_data_dim(key)
            return [None] * (ndim - 2) + [last]
        return [] if self.is_data_sparse(key) else [self.get_data_dim(key)]

    def can_serialize_data(self, key: str) -> bool:
        """Whether `serialize_data` works for this key."""
        return len(self.labels.get(key) or ()) > 1

    def serialize_data(self, key: str, data: np.ndarray) -> str:
        """Class indices as text: labels with spaces between them, or single characters.

        Args:
            key: a key with labels.
            data: int, a scalar or [time].
        """
        labels = self.labels[key]
        if data.ndim == 0:
            return labels[int(data)]
        if labels == [chr(byte) for byte in range(256)]:
            return data.astype(np.uint8).tobytes().decode("utf-8")
        characters = len(labels) < 1000 and all(len(label) == 1 for label in labels)
        return ("" if characters else " ").join([labels[index] for index in data.tolist()])

    # Loading, chunks and batches.

    def is_cached(self, start: int, end: int) -> bool:
        """Whether `load_seqs` has nothing to do for this range."""
        return start == end

    def load_seqs(self, start: int, end: int) -> None:
        """Makes the sequences from `start` to before `end` available. `start` must not fall.

        Raises:
            ValueError: if the range is malformed.
        """
        if not 0 <= start <= end:
            raise ValueError(f"{self}: load_seqs({start}, {end}) is no range of sequences")
        self._num_loaded = max(self._num_loaded, end)
        if self.is_cached(start, end):
            return
        step = self.shuffle_frames_of_nseqs
        if step <= 0:
            self._load_seqs(start, end)
            return
        start, end = self._get_load_seqs_superset(start, end)
        self._load_seqs(start, end)
        for first in range(start, end, step):
            self._shuffle_frames_in_seqs(first, first + step)

    def _get_load_seqs_superset(self, start: int, end: int) -> tuple[int, int]:
        step = self.shuffle_frames_of_nseqs
        return (start - start % step, end + -end % step) if step > 0 else (start, end)

    def _load_seqs(self, start: int, end: int) -> None:
        raise NotImplementedError(f"{type(self).__name__} must implement _load_seqs")

    def _shuffle_frames_in_seqs(self, start: int, end: int) -> None:
        raise OptionalNotImplementedError(f"{self} does not support shuffle_frames_of_nseqs")

    def _sliding_window(self, xr: np.ndarray) -> np.ndarray:
        return chunking.sliding_window(xr, self.zpad)

    def iterate_seqs(
        self, recurrent_net: bool = True, used_data_keys: Iterable[str] | None = None
    ) -> Iterator[chunking.Chunk]:
        """Yields the chunks of the epoch: sequence index, first frames and end frames.

        Args:
            recurrent_net: whether the order of frames matters; otherwise nothing is chunked.
            used_data_keys: the keys that must fit together; by default all.

        Raises:
            ConfigError: if the lengths of the keys do not give the same number of chunks.
        """
        return chunking.iterate_seqs(self, recurrent_net, used_data_keys)

    def get_start_end_frames_full_seq(self, seq_idx: int) -> tuple[NumbersDict, NumbersDict]:
        """First and end frame of a whole sequence with its context window."""
        length = self.get_seq_length(seq_idx)
        start = NumbersDict.constant_like(0, numbers_dict=length)
        return start - self.ctx_left, length + self.ctx_right

    def sample(self, seq_idx: int) -> bool:
        """Whether a sequence is used, if it has a weight."""
        weight, threshold = self.weights.get(seq_idx, (0, 0))
        return weight >= threshold

    def _generate_batches(self, **kwargs: Any) -> Iterator[Batch]:
        return batching.generate_batches(self, **kwargs)

    def batch_set_generator_cache_whole_epoch(self) -> bool:
        """Whether batches may be kept and repeated in the next epoch."""
        return False

    def generate_batches(self, shuffle_batches: bool = False, **kwargs: Any) -> BatchSetGenerator:
        """Batches of the epoch; for the options see `batching.generate_batches`."""
        return BatchSetGenerator(
            dataset=self,
            generator=self._generate_batches(**kwargs),
            shuffle_batches=shuffle_batches,
            cache_whole_epoch=self.batch_set_generator_cache_whole_epoch(),
        )

    @classmethod
    def index_shape_for_batches(
        cls, batches: Iterable[Batch], data_key: str = "data"
    ) -> tuple[int, int]:
        """(frames, slices) of one array that holds all these batches side by side."""
        batches = list(batches)
        frames = max((batch.max_num_frames_per_slice[data_key] for batch in batches), default=0)
        return frames, sum(batch.num_slices for batch in batches)
