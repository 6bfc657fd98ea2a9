"""Batches as lists of sequence parts, as RETURNN's older engines use them.

The semantics are those of RETURNN's `Dataset.generate_batches` and `returnn.engine.batch`.
"""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..io.errors import ConfigError
from .numbers_dict import NumbersDict

if TYPE_CHECKING:
    from .basic import Dataset

Limit = int | dict[str, int] | NumbersDict | None
Part = tuple[int, NumbersDict, NumbersDict]

_log = logging.getLogger(__name__)


class BatchSeqCopyPart:
    """Frames of one sequence and where they go in a batch.

    Args:
        seq_idx: index in the order of the epoch.
        seq_start_frame, seq_end_frame: half-open range of frames per data key.
        batch_slice: row of the batch.
        batch_frame_offset: first frame in that row, per data key.
    """

    def __init__(
        self,
        seq_idx: int,
        seq_start_frame: NumbersDict | int,
        seq_end_frame: NumbersDict | int,
        batch_slice: int,
        batch_frame_offset: NumbersDict | int,
    ) -> None:
        self.seq_idx = seq_idx
        self.seq_start_frame = NumbersDict(seq_start_frame)
        self.seq_end_frame = NumbersDict(seq_end_frame)
        self.batch_slice = batch_slice
        self.batch_frame_offset = NumbersDict(batch_frame_offset)

    @property
    def frame_length(self) -> NumbersDict:
        """Number of frames per data key."""
        return self.seq_end_frame - self.seq_start_frame

    def __repr__(self) -> str:
        return (
            f"<BatchSeqCopyPart seq {self.seq_idx} [{self.seq_start_frame}:{self.seq_end_frame}]"
            f" -> slice {self.batch_slice} at {self.batch_frame_offset}>"
        )


class Batch:
    """Sequence parts that are processed together: `num_slices` rows of frames."""

    def __init__(self) -> None:
        self.max_num_frames_per_slice = NumbersDict(0)
        self.num_slices = 0
        self.seqs: list[BatchSeqCopyPart] = []

    def __repr__(self) -> str:
        return f"<Batch start_seq:{self.start_seq} len(seqs):{len(self.seqs)}>"

    def try_sequence_as_slice(self, length: NumbersDict) -> tuple[NumbersDict, int]:
        """The shape (frames, slices) that the batch would have with one more sequence."""
        return NumbersDict.max([self.max_num_frames_per_slice, length]), self.num_slices + 1

    def add_sequence_as_slice(
        self, seq_idx: int, seq_start_frame: NumbersDict | int, length: NumbersDict
    ) -> None:
        """Adds a sequence part as a row of its own."""
        self.max_num_frames_per_slice, self.num_slices = self.try_sequence_as_slice(length)
        end = seq_start_frame + length
        self.seqs.append(BatchSeqCopyPart(seq_idx, seq_start_frame, end, self.num_slices - 1, 0))

    def add_frames(
        self,
        seq_idx: int,
        seq_start_frame: NumbersDict | int,
        length: NumbersDict,
        frame_dim_corresponds: bool = True,
    ) -> None:
        """Appends a sequence part to the first row.

        Args:
            seq_idx: index in the order of the epoch.
            seq_start_frame: first frame per data key.
            length: number of frames per data key.
            frame_dim_corresponds: whether the part starts at the same frame for all data keys.
        """
        offset = self.max_num_frames_per_slice
        if frame_dim_corresponds:
            offset = NumbersDict(offset.max_value())
        self.max_num_frames_per_slice = offset + length
        self.num_slices = max(self.num_slices, 1)
        self.seqs.append(
            BatchSeqCopyPart(seq_idx, seq_start_frame, seq_start_frame + length, 0, offset)
        )

    def init_with_one_full_sequence(self, seq_idx: int, dataset: Dataset) -> None:
        """Fills an empty batch with one sequence and its context window."""
        assert not self.seqs
        start, end = dataset.get_start_end_frames_full_seq(seq_idx)
        self.add_frames(seq_idx, start, end - start)

    def get_all_slices_num_frames(self) -> NumbersDict:
        """Number of frames with padding, per data key."""
        return self.max_num_frames_per_slice * self.num_slices

    def get_total_num_frames(self) -> NumbersDict | int:
        """Number of frames without padding, per data key."""
        return sum(part.frame_length for part in self.seqs)

    @property
    def start_seq(self) -> int | None:
        """The smallest sequence index, or None if the batch is empty."""
        return min((part.seq_idx for part in self.seqs), default=None)

    @property
    def end_seq(self) -> int | None:
        """The largest sequence index plus one, or None if the batch is empty."""
        return max(part.seq_idx for part in self.seqs) + 1 if self.seqs else None

    def get_num_seqs(self) -> int:
        """The number of sequence indices from `start_seq` to `end_seq`."""
        return self.end_seq - self.start_seq if self.seqs else 0


class BatchSetGenerator:
    """Buffers batches of a generator, so that a caller can look ahead before it advances.

    Args:
        dataset: for `completed_frac`.
        generator: the batches of an epoch.
        shuffle_batches: whether an epoch that is repeated from the cache is shuffled.
        cache_whole_epoch: whether to keep all batches for `reset`.
    """

    def __init__(
        self,
        dataset: Dataset,
        generator: Iterator[Batch],
        shuffle_batches: bool = False,
        cache_whole_epoch: bool = True,
    ) -> None:
        self.dataset = dataset
        self.generator = generator
        self.shuffle_batches = shuffle_batches
        self.cache_whole_epoch = cache_whole_epoch
        self.cache: list[Batch] = []
        self.reached_end = False
        self._rng = random.Random(1234)
        self._reset()

    def _reset(self) -> None:
        self.buffer = self.cache[:]
        if self.shuffle_batches:
            self._rng.shuffle(self.buffer)
        # Batches that were never generated are not in the cache: they still come behind it.
        self.cache_active = self.reached_end
        self.reached_end = False
        self.last_batch: Batch | None = None
        self.current_batch_idx = 0

    def reset(self) -> None:
        """Starts again, from the cached batches."""
        assert self.cache_whole_epoch
        self._reset()

    def _read_next(self) -> bool:
        batch = None if self.reached_end else next(self.generator, None)
        if batch is None:
            self.reached_end = True
            return False
        self.buffer.append(batch)
        if self.cache_whole_epoch and not self.cache_active:
            self.cache.append(batch)
        return True

    def peek_next_n(self, n: int) -> list[Batch]:
        """The next `n` batches, or fewer at the end."""
        while len(self.buffer) < n and self._read_next():
            pass
        return self.buffer[:n]

    def advance(self, n: int) -> None:
        """Drops the next `n` batches.

        Raises:
            ValueError: if there are not that many.
        """
        if n < 1 or len(self.peek_next_n(n)) < n:
            raise ValueError(f"cannot advance by {n} batches: {len(self.buffer)} are left")
        self.last_batch = self.buffer[n - 1]
        self.buffer = self.buffer[n:]
        self.current_batch_idx += n

    def completed_frac(self) -> float:
        """How much of the epoch is done, in (0, 1]."""
        if self.cache_active:
            return self.dataset.generic_complete_frac(self.current_batch_idx, len(self.cache))
        if self.last_batch is None:
            return self.dataset.generic_complete_frac(0, None)
        return self.dataset.get_complete_frac(self.last_batch.start_seq)

    def has_more(self) -> bool:
        """Whether there is another batch. May block until the dataset knows."""
        return bool(self.buffer) or self._read_next()

    def get_current_batch_idx(self) -> int:
        """How many batches `advance` has dropped since the start or `reset`."""
        return self.current_batch_idx


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """The checked limits of `generate_batches`, per data key where they count frames."""

    batch_size: NumbersDict
    max_seqs: float
    max_seq_length: NumbersDict
    max_pad_size: NumbersDict
    min_seq_length: NumbersDict
    packed_batch_size: NumbersDict | None

    def admit(self, length: NumbersDict) -> bool:
        """Whether a sequence part has an allowed length."""
        too_long = length.any_compare(self.max_seq_length, lambda a, b: a > b)
        return not too_long and not length.any_compare(self.min_seq_length, lambda a, b: a < b)

    def would_overflow(self, batch: Batch, length: NumbersDict) -> bool:
        """Whether a non-empty batch must end before a part of this length."""
        frames, slices = batch.try_sequence_as_slice(length)
        if slices > self.max_seqs or _exceeds(frames * slices, self.batch_size):
            return True
        total = batch.get_total_num_frames() + length
        if self.packed_batch_size is not None and _exceeds(total, self.packed_batch_size):
            return True
        return _exceeds(frames * slices - total, self.max_pad_size)


def _exceeds(frames: NumbersDict, limit: NumbersDict) -> bool:
    return frames.any_compare(limit, lambda a, b: a > b)


def make_limits(
    batch_size: Limit,
    max_seqs: float = -1,
    max_seq_length: Limit = sys.maxsize,
    max_pad_size: Limit = None,
    min_seq_length: Limit = 0,
    packed_batch_size: Limit = None,
) -> BatchLimits:
    """Checks the limits; see `generate_batches`.

    Raises:
        ConfigError: if a limit is missing or not positive.
    """
    if packed_batch_size is not None:
        packed_batch_size = NumbersDict(packed_batch_size)
        batch_size = batch_size or sys.maxsize
        if packed_batch_size.min_value() <= 0:
            raise ConfigError("packed_batch_size must be positive", found=repr(packed_batch_size))
    if not batch_size or NumbersDict(batch_size).min_value() <= 0:
        raise ConfigError("batch_size must be positive", found=repr(batch_size))
    if max_seqs == -1:
        max_seqs = float("inf")
    if max_seqs <= 0:
        raise ConfigError("max_seqs must be positive, or -1 for no limit", found=repr(max_seqs))
    max_seq_length = max_seq_length or sys.maxsize
    if isinstance(max_seq_length, int) and max_seq_length < 0:
        max_seq_length = {"classes": -max_seq_length}
    return BatchLimits(
        batch_size=NumbersDict(batch_size),
        max_seqs=max_seqs,
        max_seq_length=NumbersDict(max_seq_length),
        max_pad_size=NumbersDict(max_pad_size),
        min_seq_length=NumbersDict(min_seq_length),
        packed_batch_size=packed_batch_size,
    )


def generate_batches(
    dataset: Dataset,
    recurrent_net: bool,
    batch_size: Limit,
    max_seqs: float = -1,
    max_seq_length: Limit = sys.maxsize,
    max_pad_size: Limit = None,
    min_seq_length: Limit = 0,
    pruning: float = 0.0,
    seq_drop: float = 0.0,
    max_total_num_seqs: float = -1,
    used_data_keys: Iterable[str] | None = None,
    packed_batch_size: Limit = None,
) -> Iterator[Batch]:
    """Groups the chunks of an epoch into batches, in order.

    Args:
        dataset: a dataset after `init_seq_order`.
        recurrent_net: one row per sequence part; otherwise all frames follow each other in one
            row, cut where a batch is full.
        batch_size: largest number of frames with padding.
        max_seqs: largest number of sequences in a batch; -1 for no limit.
        max_seq_length, min_seq_length: chunks outside of these are left out; a negative maximum
            is one for "classes".
        max_pad_size: largest number of padding frames.
        pruning: strength of the loss of sequences by `dataset.weights`.
        seq_drop: probability to leave a chunk out.
        max_total_num_seqs: end after more than that many sequences; -1 for no limit.
        used_data_keys: see `Dataset.iterate_seqs`.
        packed_batch_size: largest number of frames without padding.

    Raises:
        ConfigError: if a limit is missing or not positive.
    """
    if packed_batch_size is not None and not recurrent_net:
        raise ConfigError("packed_batch_size needs recurrent_net=True")
    limits = make_limits(
        batch_size, max_seqs, max_seq_length, max_pad_size, min_seq_length, packed_batch_size
    )
    if not max_total_num_seqs or max_total_num_seqs < 0:
        max_total_num_seqs = float("inf")
    _prune(dataset.weights, pruning)
    parts = _chunks_with_context(dataset, recurrent_net, used_data_keys)
    if recurrent_net:
        parts = _select(dataset, parts, limits, seq_drop)
        yield from _batches_of_slices(_until(parts, max_total_num_seqs), limits)
    else:
        yield from _batches_of_frames(_until(parts, max_total_num_seqs), limits)


def _prune(weights: dict[int, list[float]], pruning: float) -> None:
    average = sum(weight for weight, _ in weights.values()) / (len(weights) or 1)
    rng = random.Random(0)
    for entry in weights.values():
        entry[1] = rng.random() * average * pruning
        entry[0] *= 1.0 + pruning


def _chunks_with_context(
    dataset: Dataset, recurrent_net: bool, used_data_keys: Iterable[str] | None
) -> Iterator[Part]:
    for seq_idx, start, end in dataset.iterate_seqs(
        recurrent_net=recurrent_net, used_data_keys=used_data_keys
    ):
        if dataset.sample(seq_idx):
            yield seq_idx, start - dataset.ctx_left, end + dataset.ctx_right


def _select(
    dataset: Dataset, parts: Iterable[Part], limits: BatchLimits, seq_drop: float
) -> Iterator[Part]:
    for seq_idx, start, end in parts:
        length = end - start
        if not limits.admit(length):
            continue
        if _exceeds(length, limits.batch_size):
            _log.info(
                "sequence %d has %r frames, batch_size is %r", seq_idx, length, limits.batch_size
            )
        if dataset.rnd_seq_drop.random() >= seq_drop:
            yield seq_idx, start, end


def _until(parts: Iterable[Part], max_total_num_seqs: float) -> Iterator[Part]:
    total, last_seq_idx = 0, -1
    for part in parts:
        if total > max_total_num_seqs:
            return
        yield part
        if part[0] != last_seq_idx:
            last_seq_idx = part[0]
            total += 1


def _batches_of_slices(parts: Iterable[Part], limits: BatchLimits) -> Iterator[Batch]:
    batch = Batch()
    for seq_idx, start, end in parts:
        length = end - start
        if batch.num_slices and limits.would_overflow(batch, length):
            yield batch
            batch = Batch()
        batch.add_sequence_as_slice(seq_idx, start, length)
    if batch.get_all_slices_num_frames().max_value() > 0:
        yield batch


def _batches_of_frames(parts: Iterable[Part], limits: BatchLimits) -> Iterator[Batch]:
    batch = Batch()
    for seq_idx, start, end in parts:
        while start.max_value() < end.max_value():
            length = end - start
            used = batch.get_all_slices_num_frames().copy_like(length)
            length = NumbersDict.min([length, limits.batch_size.copy_like(length) - used])
            if length.max_value() <= 0:
                raise ConfigError("a batch has no room for a frame", found=f"{limits.batch_size}")
            batch.add_frames(seq_idx, start, length)
            frames = batch.get_all_slices_num_frames()
            full = frames.any_compare(limits.batch_size, lambda a, b: a >= b)
            if full or batch.get_num_seqs() > limits.max_seqs:
                yield batch
                batch = Batch()
            start = start + length
    if batch.get_all_slices_num_frames().max_value() > 0:
        yield batch
