"""Packets of Flow's vector types, and what all data types have in common.

See docs/sprint-format.md, section 2. A block of vectors of one dimension is one structured view
of the stored bytes; nothing is done per frame unless dimensions change within a block.

Arrays that leave this module are made by `np.frombuffer`, which keeps the memory alive; arrays
made by `np.ndarray(buffer=...)` do not hinder a map from being closed under them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ..errors import SourceFormatError
from .mapping import Buffer

TIMES_BYTES = 16
VECTOR_ELEMENTS = {
    "vector-f32": np.dtype("<f4"),
    "vector-f64": np.dtype("<f8"),
    "vector-u8": np.dtype("u1"),
    "vector-s8": np.dtype("i1"),
    "vector-u16": np.dtype("<u2"),
    "vector-s16": np.dtype("<i2"),
    "vector-u32": np.dtype("<u4"),
    "vector-s32": np.dtype("<i4"),
    "vector-u64": np.dtype("<u8"),
    "vector-s64": np.dtype("<i8"),
}
# What can be the frames of a feature matrix.
FEATURE_ELEMENTS = VECTOR_ELEMENTS | {
    "vector-bool": np.dtype(bool),
    "vector-complex-f32": np.dtype("<c8"),
    "vector-complex-f64": np.dtype("<c16"),
}

_U32 = struct.Struct("<I")
_MAX_NAME = 64
_MAX_ROW = 1 << 30  # numpy has no larger items


@dataclass(frozen=True)
class Block:
    """Consecutive packets of one data type.

    Attributes:
        datatype: Flow's name of the type, for example "vector-f32".
        values: one item per packet. For vectors an array [packets, dim] if all have one
            dimension, else a list of arrays [dim]. See `structured.py` for other types.
        times: float64 [packets, 2], start and end in seconds.
    """

    datatype: str
    values: np.ndarray | list
    times: np.ndarray

    def __len__(self) -> int:
        return len(self.times)


@lru_cache(maxsize=256)
def frame_dtype(element: np.dtype, dim: int) -> np.dtype:
    """One packet of a vector type: its dimension, its elements, start and end time."""
    return np.dtype([("n", "<u4"), ("v", element, (dim,)), ("t", "<f8", (2,))])


def read_datatype(data: Buffer, offset: int) -> tuple[str, int]:
    """The name of a Flow data type at a byte offset, and where it ends.

    Raises:
        SourceFormatError: if there is none.
    """
    room = len(data) - offset - 4
    length = _U32.unpack_from(data, offset)[0] if room >= 0 else 0
    if not 0 < length <= min(_MAX_NAME, room):
        raise SourceFormatError(
            "no name of a Flow data type where one is due",
            position=offset,
            expected=f"1 to {_MAX_NAME} bytes",
            found=f"{length} of {max(room, 0)}",
        )
    name = bytes(data[offset + 4 : offset + 4 + length])
    if not name.isascii():
        raise SourceFormatError(
            "the name of a Flow data type is not ASCII", position=offset + 4, found=repr(name)
        )
    return name.decode("ascii"), offset + 4 + length


def read_block_header(data: Buffer, offset: int) -> tuple[str, int, int]:
    """The data type of the block at a byte offset, its number of packets, and where they start.

    Raises:
        SourceFormatError: if there is no block header.
    """
    datatype, end = read_datatype(data, offset)
    check_room(data, end, 1, 4)
    return datatype, _U32.unpack_from(data, end)[0], end + 4


# From the data, the byte offset of packets and their number to values, times, and their end.
Decoder = Callable[[Buffer, int, int], tuple[np.ndarray | list, np.ndarray, int]]


def vector_decoder(element: np.dtype) -> Decoder:
    """The decoder of vectors of an element type."""

    def decode(data: Buffer, offset: int, count: int) -> tuple[np.ndarray | list, np.ndarray, int]:
        check_room(data, offset, count, 4 + TIMES_BYTES)
        if count == 0:
            return np.zeros((0, 0), element), np.zeros((0, 2)), offset
        dim = _dim(data, offset, element)
        end = offset + count * (4 + dim * element.itemsize + TIMES_BYTES)
        if end <= len(data) and dim * element.itemsize <= _MAX_ROW:
            dtype = frame_dtype(element, dim)
            frames = np.frombuffer(data, dtype, count, offset)
            # By induction: a frame of the right dimension ends where the next one is looked for.
            if (frames["n"] == dim).all():
                return frames["v"], frames["t"], end
        return _decode_ragged(data, offset, count, element)

    return decode


def _decode_ragged(
    data: Buffer, offset: int, count: int, element: np.dtype
) -> tuple[list[np.ndarray], np.ndarray, int]:
    vectors, times = [], np.empty((count, 2))
    for packet in range(count):
        dim = _dim(data, offset, element)
        offset += 4
        vectors.append(np.frombuffer(data, element, dim, offset))
        offset += dim * element.itemsize
        times[packet] = np.frombuffer(data, "<f8", 2, offset)
        offset += TIMES_BYTES
    return vectors, times, offset


def _dim(data: Buffer, offset: int, element: np.dtype) -> int:
    """Dimension of the vector at a byte offset, after a check that all of it is there."""
    room = len(data) - offset - 4 - TIMES_BYTES
    dim = _U32.unpack_from(data, offset)[0] if room >= 0 else 0
    if dim * element.itemsize > room:
        raise SourceFormatError(
            "the data ends inside a vector",
            position=offset,
            expected=f"{dim} elements of {element.itemsize} bytes and two times",
            found=f"{max(len(data) - offset - 4, 0)} bytes",
        )
    return dim


def check_room(data: Buffer, offset: int, count: int, smallest: int) -> None:
    """Checks that `count` items of at least `smallest` bytes can be behind a byte offset."""
    if count * smallest > len(data) - offset:
        raise SourceFormatError(
            "the data ends before its items do",
            position=offset,
            expected=f"{count} items of at least {smallest} bytes",
            found=f"{max(len(data) - offset, 0)} bytes",
        )
