"""`SprintDatasetBase`: sequences that RASR's own thread brings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from threading import Condition, RLock
from typing import Any, ClassVar

import numpy as np

from ..io.errors import ConfigError, ShapeMismatchError
from ..io.sprint.targets import TargetConverter
from .access import OptionalNotImplementedError
from .basic import Dataset
from .numbers_dict import NumbersDict
from .sprint_buffer import SeqBuffer


class SprintDatasetBase(Dataset):
    """Sequences that another thread adds one after the other, as RASR has them.

    RASR's thread calls `set_dimensions`, then per epoch `init_sprint_epoch`, `add_new_data` for
    each sequence and `finish_sprint_epoch`, in the end `finalize_sprint`. It waits in
    `add_new_data` when it is `SprintCachedSeqsMax` sequences ahead of the reader, until it is only
    `SprintCachedSeqsMin` ahead. The number of sequences is known when an epoch is over.

    Args:
        target_maps: target -> map of its values to classes or arrays, as a dict or as a file with
            one value a line. A single class stands for all frames of "data".
        str_add_final_zero: whether each text comes a second time with a zero byte at its end, as
            "orth0" for "orth".
        input_stddev: what to divide "data" by.
        orth_post_process: change of "orth"; see `post_process.get_post_processor`.
        bpe: makes "bpe" from "orth"; a vocabulary, or options of `vocabulary.BytePairEncoding`.
        orth_vocab: makes "orth_classes" from "orth"; see `vocabulary.create_vocabulary`.
        suppress_load_seqs_print: has no effect, as nothing is printed.
        reduce_target_factor: number of frames for each class of an alignment.
        kwargs: see `Dataset`.

    Raises:
        ConfigError: if an option is malformed.
    """

    SprintCachedSeqsMax: ClassVar[int] = 200
    SprintCachedSeqsMin: ClassVar[int] = 100

    def __init__(
        self,
        target_maps: Mapping[str, Any] | None = None,
        str_add_final_zero: bool = False,
        input_stddev: float = 1.0,
        orth_post_process: Any = None,
        bpe: Any = None,
        orth_vocab: Any = None,
        suppress_load_seqs_print: bool = False,
        reduce_target_factor: int = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if self.shuffle_frames_of_nseqs:
            raise ConfigError(
                "shuffle_frames_of_nseqs is not possible here", hint="RASR can do it."
            )
        # As they were given, for `__reduce__`.
        self._target_maps, self._orth_post_process = target_maps, orth_post_process
        self._bpe, self._orth_vocab = bpe, orth_vocab
        self.str_add_final_zero = str_add_final_zero
        self.input_stddev = input_stddev
        self.suppress_load_seqs_print = suppress_load_seqs_print
        self.reduce_target_factor = reduce_target_factor
        self._targets = TargetConverter.from_options(
            target_maps,
            str_add_final_zero,
            orth_post_process,
            bpe,
            orth_vocab,
            reduce_target_factor,
        )
        self.labels.update(self._targets.labels())
        self.lock = RLock()
        self.cond = Condition(self.lock)
        self.multiple_epochs = False
        self.sprint_epoch: int | None = None
        self.sprint_finalized = False
        self.returnn_epoch: int | None = None
        self.predefined_seq_list_order: Sequence[str] | None = None
        self._complete_frac: float | None = None
        self._sprint_began = False
        self._buffer = self._new_buffer()

    def _new_buffer(self) -> SeqBuffer:
        limits = (self.SprintCachedSeqsMax, self.SprintCachedSeqsMin)
        return SeqBuffer(self.cond, *limits, self.predefined_seq_list_order)

    # What RASR's thread calls.

    def use_multiple_epochs(self) -> None:
        """RASR itself goes through the epochs, and calls `init_sprint_epoch` for each."""
        self.multiple_epochs = True

    def set_dimensions(self, input_dim: int, output_dim: int) -> None:
        """Sets the number of features and, if it is positive, of classes.

        Raises:
            ShapeMismatchError: if there are no features.
        """
        if input_dim <= 0:
            raise ShapeMismatchError("there are no features", found=f"dimension {input_dim}")
        with self.cond:
            self.num_inputs = input_dim
            self.num_outputs = {"data": (input_dim, 2), **self._targets.dims(output_dim)}
            self._base_init()  # makes the window odd
            self.num_outputs["data"] = (input_dim * self.window, 2)
            self.cond.notify_all()
        if not self.multiple_epochs:
            self.init_sprint_epoch(None)

    def init_sprint_epoch(self, epoch: int | None) -> None:
        """The sequences of this epoch follow."""
        with self.cond:
            self._sprint_began = True
            self.sprint_epoch = epoch
            self.sprint_finalized = False
            self._buffer = self._new_buffer()
            self.cond.notify_all()

    def wait_for_returnn_epoch(self, epoch: int) -> None:
        """Waits until the reader begins this epoch.

        Raises:
            RuntimeError: if the reader is behind it already.
        """
        with self.cond:
            self.cond.wait_for(
                lambda: self.returnn_epoch is not None and self.returnn_epoch >= epoch
            )
            if self.returnn_epoch != epoch:
                raise RuntimeError(f"epoch {self.returnn_epoch} began already, not {epoch}")

    def add_new_data(
        self,
        features: np.ndarray,
        targets: Mapping[str, Any] | np.ndarray | None = None,
        segment_name: str | None = None,
    ) -> int | None:
        """Adds a sequence, and waits if the reader is far behind.

        Args:
            features: [feature, time], as RASR has them.
            targets: arrays and strings by key; or the classes [time].
            segment_name: its tag; "seq-<index>" if there is none.

        Returns:
            The index of the sequence; None if the epoch was given up.

        Raises:
            ShapeMismatchError: if number of features or lengths are wrong.
            MissingSequenceError: if a target or a mapped value is missing.
            SourceFormatError: if the reader gave an order and the sequence is not the next one.
        """
        if self.sprint_finalized:
            raise RuntimeError("data arrive although finalize_sprint was called")
        arrays = self._convert(features, targets, segment_name)
        return self._buffer.add(arrays, segment_name)

    def finish_sprint_epoch(self, seen_all: bool = True) -> None:
        """All sequences of the epoch were added."""
        self._buffer.finish(seen_all)

    def finalize_sprint(self) -> None:
        """There will be no further epoch."""
        with self.cond:
            self.sprint_finalized = True
            self.cond.notify_all()

    def set_complete_frac(self, frac: float) -> None:
        """Tells how much of the epoch is done with the sequence that was added last."""
        self._complete_frac = frac

    def _convert(
        self, features: np.ndarray, targets: Any, name: str | None
    ) -> dict[str, np.ndarray]:
        if features.ndim != 2 or features.shape[0] != self.num_inputs:
            raise ShapeMismatchError(
                "wrong shape of features",
                entry=name,
                expected=f"[{self.num_inputs}, time]",
                found=str(list(features.shape)),
            )
        data = features.T
        if self.input_stddev != 1:
            data = data / data.dtype.type(self.input_stddev)
        if self.window > 1:
            data = self._sliding_window(data)
        if targets is not None and not isinstance(targets, Mapping):
            targets = {"classes": targets}
        arrays = self._targets.convert(targets or {}, len(data), name)
        return {"data": data, **arrays}

    # What the reader calls.

    def init_seq_order(
        self,
        epoch: int | None = None,
        seq_list: Sequence[str] | None = None,
        seq_order: Sequence[int] | None = None,
    ) -> bool:
        """See `Dataset.init_seq_order`. The order is RASR's; `seq_list` is only checked.

        Raises:
            ConfigError: for `seq_order`, as RASR knows no indices.
        """
        refuse_indices(seq_order)
        super().init_seq_order(epoch=epoch, seq_list=seq_list)
        self._targets.set_random_seed(self._get_random_seed_for_epoch(epoch=epoch))
        with self.cond:
            self.returnn_epoch = epoch
            self.predefined_seq_list_order = seq_list
            self._buffer.tags = seq_list
            self.cond.notify_all()
        return True

    def _current(self) -> SeqBuffer:
        """The buffer of the reader's epoch; waits until RASR begins it."""
        with self.cond:
            self.cond.wait_for(lambda: self._is_current() or self.sprint_finalized)
            if not self._is_current():
                raise RuntimeError(f"RASR ended before epoch {self.returnn_epoch}")
            return self._buffer

    def _is_current(self) -> bool:
        if not self.multiple_epochs:
            return True
        epochs = (self.returnn_epoch, self.sprint_epoch)
        return self._sprint_began and (None in epochs or epochs[0] == epochs[1])

    def is_cached(self, start: int, end: int) -> bool:
        """Never, so that `load_seqs` gets to know what is needed."""
        return start == end

    def _load_seqs(self, start: int, end: int) -> None:
        buffer = self._current()
        buffer.forget_before(start)
        buffer.wait_for(end)

    @property
    def num_seqs(self) -> int:
        """See `Dataset.num_seqs`."""
        if self.predefined_seq_list_order is not None:
            return len(self.predefined_seq_list_order)
        if not self._buffer.complete:
            raise NotImplementedError(f"{self} does not know its number of sequences yet")
        return self._buffer.num_seqs

    def have_seqs(self) -> bool:
        """See `Dataset.have_seqs`."""
        return self._buffer.num_seqs > 0 or self.is_less_than_num_seqs(0)

    def is_less_than_num_seqs(self, n: int) -> bool:
        """See `Dataset.is_less_than_num_seqs`; waits for the sequence."""
        return self._current().wait_for(n + 1)

    def get_num_timesteps(self) -> int:
        """Frames of the epoch, when it is over."""
        if not self._buffer.complete:
            raise OptionalNotImplementedError(f"{self} does not know its number of frames yet")
        return self._buffer.num_frames

    def get_data_keys(self) -> list[str]:
        """See `Dataset.get_data_keys`; waits for the first sequence if there was none yet."""
        buffer = self._current()
        if buffer.keys is None:
            buffer.get(0)
        return list(buffer.keys)

    def get_target_list(self) -> list[str]:
        """See `Dataset.get_target_list`."""
        return [key for key in self.get_data_keys() if key != "data"]

    def get_complete_frac(
        self, sorted_seq_idx: int, *, allow_only_lr_suitable: bool = False
    ) -> float | None:
        """See `Dataset.get_complete_frac`."""
        if self.predefined_seq_list_order is None and self._complete_frac is not None:
            # RASR's number is about the sequence that was added last.
            num_added = max(self._buffer.num_seqs, sorted_seq_idx + 1)
            return self._complete_frac * (sorted_seq_idx + 1) / num_added
        return super().get_complete_frac(
            sorted_seq_idx, allow_only_lr_suitable=allow_only_lr_suitable
        )

    def get_seq_length(self, seq_idx: int) -> NumbersDict:
        """See `Dataset.get_seq_length`."""
        return self._current().get(seq_idx).num_frames

    def get_data(self, seq_idx: int, key: str) -> np.ndarray:
        """See `Dataset.get_data`. The arrays are read-only."""
        return self._current().get(seq_idx).features[key]

    def get_tag(self, sorted_seq_idx: int) -> str:
        """See `Dataset.get_tag`."""
        return self._current().get(sorted_seq_idx).seq_tag


def refuse_indices(seq_order: Sequence[int] | None) -> None:
    """Raises ConfigError if there is an order by indices."""
    if seq_order is not None:
        raise ConfigError("an order by indices is not possible: RASR only knows segment names")
