"""Padded batches [batch, time, ...] as plain rows of frames, without a step per sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..io.errors import ShapeMismatchError


def axis_sizes(
    inputs: np.ndarray,
    seq_len: Sequence[int] | np.ndarray | Mapping[int, Sequence[int] | np.ndarray],
    path: str,
) -> np.ndarray:
    """Lengths of every sequence along every dynamic axis.

    Args:
        inputs: padded array [batch, time, ...].
        seq_len: lengths [batch] of the first axis behind the batch, or axis -> lengths.
        path: the file that they are for, named in errors.

    Returns:
        int64 [dynamic axes, batch].

    Raises:
        ShapeMismatchError: if the axes are not the first ones, or the longest sequence of an axis
            is not as long as the axis.
    """
    by_axis = dict(seq_len) if isinstance(seq_len, Mapping) else {0: seq_len}
    num_seqs = len(inputs)
    if sorted(by_axis) != list(range(len(by_axis))) or len(by_axis) >= inputs.ndim:
        raise ShapeMismatchError(
            "lengths must be given for the first axes behind the batch",
            path,
            expected=f"axes 0, 1, ... of {inputs.ndim - 1}",
            found=f"axes {sorted(by_axis)}",
        )
    sizes = np.zeros((len(by_axis), num_seqs), np.int64)
    for axis, lengths in by_axis.items():
        lengths = np.asarray(lengths)
        padded = inputs.shape[axis + 1]
        if lengths.shape != (num_seqs,) or (num_seqs and lengths.dtype.kind not in "iu"):
            raise ShapeMismatchError(
                f"lengths of axis {axis} must be one integer per sequence",
                path,
                expected=f"{num_seqs} integers",
                found=f"shape {lengths.shape}, {lengths.dtype}",
            )
        if num_seqs and (lengths.min() < 0 or lengths.max() != padded):
            raise ShapeMismatchError(
                f"the longest sequence must be as long as axis {axis} of the batch",
                path,
                expected=f"0 to {padded}",
                found=f"{lengths.min()} to {lengths.max()}",
            )
        sizes[axis] = lengths
    return sizes


def valid_frames(
    inputs: np.ndarray, sizes: np.ndarray, row_shape: tuple[int, ...], path: str
) -> tuple[np.ndarray, np.ndarray | None]:
    """All frames of a batch as rows, and which of them are no padding.

    Args:
        inputs: padded array [batch, *dynamic axes, ...].
        sizes: lengths [dynamic axes, batch].
        row_shape: shape of one row.
        path: named in errors.

    Returns:
        Rows [batch * dynamic axes, *row_shape], and the int64 positions of those inside the
        sequences, in order; None instead if all are.

    Raises:
        ShapeMismatchError: if the axes behind the dynamic ones do not hold one row.
    """
    dynamic = inputs.shape[1 : 1 + len(sizes)]
    fixed = inputs.shape[1 + len(sizes) :]
    if np.prod(fixed, dtype=np.int64) != np.prod(row_shape, dtype=np.int64):
        raise ShapeMismatchError(
            "frames of another shape than the writer was made for",
            path,
            expected=str(row_shape),
            found=str(fixed),
        )
    num_rows = int(np.prod((len(inputs), *dynamic), dtype=np.int64))
    rows = inputs.reshape(num_rows, *row_shape)
    if all((lengths == padded).all() for lengths, padded in zip(sizes, dynamic, strict=True)):
        return rows, None
    mask = np.ones((len(inputs), *dynamic), np.bool_)
    for axis, (lengths, padded) in enumerate(zip(sizes, dynamic, strict=True), start=1):
        inside = np.arange(padded) < lengths[:, None]
        others = tuple(other for other in range(1, mask.ndim) if other != axis)
        mask &= np.expand_dims(inside, others)
    return rows, np.flatnonzero(mask)


def extra_rows(value: Any, num_seqs: int, key: str, path: str) -> tuple[np.ndarray, int]:
    """A batch of a further stream as rows.

    Args:
        value: numbers or strings, [batch], [batch, time] or [batch, time, dim].
        num_seqs: sequences in the batch.
        key, path: named in errors.

    Returns:
        Rows [batch * time] or [batch * time, dim], and the time; [batch] has one frame each.

    Raises:
        ShapeMismatchError: if it is of another shape.
    """
    array = np.asarray(value)
    if array.ndim == 0 or len(array) != num_seqs or array.ndim > 3:
        raise ShapeMismatchError(
            "a further stream must be [batch], [batch, time] or [batch, time, dim]",
            path,
            entry=key,
            expected=f"batch {num_seqs}",
            found=f"shape {array.shape}",
        )
    time = array.shape[1] if array.ndim > 1 else 1
    return array.reshape(num_seqs * time, *array.shape[2:]), time
