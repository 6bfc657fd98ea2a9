"""Rows of sequences as Arrow record batches, and their columns as numpy arrays without copies.

`pa.Array.to_numpy` and `pa.array` of numpy data import pandas where it is installed, which costs
seconds; buffers do not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

_NUMPY_TYPES = {
    pa.int32(): np.dtype("<i4"),
    pa.int64(): np.dtype("<i8"),
    pa.uint64(): np.dtype("<u8"),
}
_ARROW_TYPES = {dtype: kind for kind, dtype in _NUMPY_TYPES.items()}


def column(batch: pa.RecordBatch, name: str) -> np.ndarray:
    """A column of integers as a read-only view."""
    return view(batch.column(name))


def view(array: pa.Array) -> np.ndarray:
    """An Arrow array of int32, int64 or uint64 without nulls as a read-only view."""
    dtype = _NUMPY_TYPES[array.type]
    if len(array) == 0:
        return np.zeros(0, dtype)
    return np.frombuffer(array.buffers()[1], dtype, len(array), array.offset * dtype.itemsize)


def to_arrow(values: np.ndarray) -> pa.Array:
    """An Arrow array over the memory of a numpy array of int32, int64 or uint64."""
    values = np.ascontiguousarray(values)
    kind = _ARROW_TYPES[values.dtype]
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])


def batch(columns: Mapping[str, np.ndarray | pa.Array]) -> pa.RecordBatch:
    """A record batch of numpy or Arrow columns, in the order given."""
    arrays = [c if isinstance(c, pa.Array) else to_arrow(c) for c in columns.values()]
    return pa.RecordBatch.from_arrays(arrays, names=list(columns))


def concat(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """All rows of batches that have one schema, in the order given."""
    if len(batches) == 1:
        return batches[0]
    table = pa.Table.from_batches(batches).combine_chunks()
    chunks = table.to_batches()
    # Arrow would split strings of more than 2 GiB, which no bucket of tags comes near.
    assert len(chunks) <= 1
    return chunks[0] if chunks else batches[0].slice(0, 0)


def take(rows: pa.RecordBatch, indices: np.ndarray) -> pa.RecordBatch:
    """The rows at int64 positions, in that order."""
    return rows.take(to_arrow(indices.astype(np.int64, copy=False)))


def encode_tags(tags: pa.StringArray) -> list[bytes]:
    """The tags as UTF-8."""
    return tags.cast(pa.binary()).to_pylist()
