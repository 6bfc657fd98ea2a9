"""Statistics of a stream, gathered while its payload passes through memory anyway.

Sums are exact to double precision and do not depend on processor or thread count: rows are added
in order, never by a BLAS whose kernels differ. Results of shards are merged in shard order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np

from .records import StreamFormat

_WIDE_ROW = 2048
_TILE_ROWS = 16
# More classes than this are hashes or offsets, and a list of their counts helps nobody.
MAX_CLASSES = 1 << 20


@dataclass(frozen=True)
class StreamStatistics:
    """Statistics of some sequences of one stream.

    Attributes:
        num_frames: how many frames were counted.
        total, squares: float64 [dim], sums of the values and of their squares; None for class
            indices and for element types without a mean.
        counts: int64 [dim], occurrences of each class; None for dense streams, and for more than
            MAX_CLASSES classes.
        out_of_range: class indices outside 0 .. dim - 1.
    """

    num_frames: int = 0
    total: np.ndarray | None = None
    squares: np.ndarray | None = None
    counts: np.ndarray | None = None
    out_of_range: int = 0

    def __add__(self, other: StreamStatistics) -> StreamStatistics:
        return StreamStatistics(
            self.num_frames + other.num_frames,
            _add(self.total, other.total),
            _add(self.squares, other.squares),
            _add(self.counts, other.counts),
            self.out_of_range + other.out_of_range,
        )

    def summary(self) -> dict[str, list[float] | list[int] | int]:
        """What the manifest shows: mean and standard deviation per dimension, or counts."""
        if self.counts is not None:
            found: dict = {"counts": self.counts.tolist()}
            return found | ({"out_of_range": self.out_of_range} if self.out_of_range else {})
        if self.total is None or self.squares is None or not self.num_frames:
            return {}
        mean = self.total / self.num_frames
        with np.errstate(over="ignore", invalid="ignore"):
            variance = np.maximum(self.squares / self.num_frames - mean * mean, 0)
        return {"mean": mean.tolist(), "std": np.sqrt(variance).tolist()}


@dataclass(frozen=True)
class LengthStatistics:
    """Statistics of sequence lengths in frames.

    Attributes:
        num_seqs, total: count and sum.
        shortest, longest: extremes; 0 and 0 without sequences.
        histogram: int64 [64], sequences per power of two: bin b has lengths of b binary digits.
    """

    num_seqs: int = 0
    total: int = 0
    shortest: int = 0
    longest: int = 0
    histogram: np.ndarray = field(default_factory=lambda: np.zeros(64, np.int64))

    def __add__(self, other: LengthStatistics) -> LengthStatistics:
        if not self.num_seqs or not other.num_seqs:
            return other if not self.num_seqs else self
        return LengthStatistics(
            self.num_seqs + other.num_seqs,
            self.total + other.total,
            min(self.shortest, other.shortest),
            max(self.longest, other.longest),
            self.histogram + other.histogram,
        )

    def summary(self) -> dict[str, float | int | dict[str, int]]:
        """What the manifest shows; a histogram key is the smallest length of its bin."""
        used = np.flatnonzero(self.histogram).tolist()
        return {
            "min": self.shortest,
            "max": self.longest,
            "mean": self.total / max(1, self.num_seqs),
            "histogram": {str((1 << b) >> 1): int(self.histogram[b]) for b in used},
        }


def measure_lengths(length: np.ndarray) -> LengthStatistics:
    """Statistics of an integer array of lengths in frames."""
    if not len(length):
        return LengthStatistics()
    digits = np.frexp(length.astype(np.float64))[1]
    return LengthStatistics(
        len(length),
        int(length.sum(dtype=np.int64)),
        int(length.min()),
        int(length.max()),
        np.bincount(digits, minlength=64),
    )


def _add(a: np.ndarray | None, b: np.ndarray | None) -> np.ndarray | None:
    if a is None or b is None:
        return b if a is None else a
    return a + b


def measure(stream: StreamFormat, frames: np.ndarray) -> StreamStatistics:
    """Statistics of a block of frames.

    Args:
        stream: the format of the frames.
        frames: array [num_frames, *stream.shape], C-contiguous.
    """
    empty = StreamStatistics(num_frames=len(frames))
    if stream.sparse:
        return _count(stream, frames) if stream.dim <= MAX_CLASSES else empty
    if frames.dtype.kind not in "fiub" or not stream.shape:
        return empty
    total, squares = _column_sums(frames.reshape(len(frames), math.prod(stream.shape)))
    return replace(empty, total=total, squares=squares)


def _count(stream: StreamFormat, frames: np.ndarray) -> StreamStatistics:
    inside = frames
    if len(frames) and (int(frames.min()) < 0 or int(frames.max()) >= stream.dim):
        inside = frames[(frames >= 0) & (frames < stream.dim)]
    counts = np.bincount(inside.astype(np.int64, copy=False), minlength=stream.dim)
    return StreamStatistics(len(frames), counts=counts, out_of_range=len(frames) - len(inside))


def _column_sums(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sums of the columns of x and of x * x in float64.

    Several rows are seen as one wide row, so that the inner loops are long, and a tile of such
    rows is converted at a time, so that it stays in the first-level cache.
    """
    num_rows, dim = x.shape
    if not dim:
        return np.zeros(0), np.zeros(0)
    fold = max(1, _WIDE_ROW // dim)
    whole = num_rows - num_rows % fold
    with np.errstate(over="ignore", invalid="ignore"):
        total, squares = _tiled_sums(x[:whole].reshape(whole // fold, fold * dim))
        rest_total, rest_squares = _tiled_sums(x[whole:])
        return (
            total.reshape(fold, dim).sum(axis=0) + rest_total,
            squares.reshape(fold, dim).sum(axis=0) + rest_squares,
        )


def _tiled_sums(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    total, squares = np.zeros(x.shape[1]), np.zeros(x.shape[1])
    tile = np.empty((_TILE_ROWS, x.shape[1]))
    for first in range(0, len(x), _TILE_ROWS):
        rows = tile[: min(_TILE_ROWS, len(x) - first)]
        np.copyto(rows, x[first : first + len(rows)])
        total += np.add.reduce(rows, axis=0)
        np.multiply(rows, rows, out=rows)
        squares += np.add.reduce(rows, axis=0)
    return total, squares
