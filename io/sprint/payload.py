"""Decodes what RASR's Flow caches store in an entry: blocks of packets of one data type.

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

from ..errors import ShapeMismatchError, SourceFormatError, UnsupportedPayloadError
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

_U32 = struct.Struct("<I")
_MAX_NAME = 64


@dataclass(frozen=True)
class Block:
    """Consecutive packets of one data type.

    Attributes:
        datatype: Flow's name of the type, for example "vector-f32".
        values: one item per packet. For vectors an array [packets, dim] if all have one
            dimension, else a list of arrays [dim].
        times: float64 [packets, 2], start and end in seconds.
    """

    datatype: str
    values: np.ndarray | list
    times: np.ndarray

    def __len__(self) -> int:
        return len(self.times)


@dataclass(frozen=True)
class Features:
    """The frames of an entry as one matrix.

    Attributes:
        values: [frames, dim], of the stored element type, little-endian; may be a view of the
            payload with arbitrary strides and alignment. [0, 0] float32 if there is no frame.
        times: float64 [frames, 2], start and end in seconds.
    """

    values: np.ndarray
    times: np.ndarray


@lru_cache(maxsize=256)
def frame_dtype(element: np.dtype, dim: int) -> np.dtype:
    """One packet of a vector type: its dimension, its elements, start and end time."""
    return np.dtype([("n", "<u4"), ("v", element, (dim,)), ("t", "<f8", (2,))])


def read_block_header(data: Buffer, offset: int) -> tuple[str, int, int]:
    """The data type of the block at a byte offset, its number of packets, and where they start.

    Raises:
        SourceFormatError: if there is no block header.
    """
    total = len(data)
    length = _U32.unpack_from(data, offset)[0] if offset + 4 <= total else 0
    packets = offset + 8 + length
    if not 0 < length <= _MAX_NAME or packets > total:
        raise SourceFormatError(
            "no name of a Flow data type where a block starts",
            position=offset,
            expected=f"1 to {_MAX_NAME} bytes",
            found=f"{length} of {total - offset}",
        )
    name = bytes(data[offset + 4 : offset + 4 + length])
    if not name.isascii():
        raise SourceFormatError(
            "the name of a Flow data type is not ASCII", position=offset + 4, found=repr(name)
        )
    return name.decode("ascii"), _U32.unpack_from(data, packets - 4)[0], packets


def decode_blocks(data: Buffer) -> list[Block]:
    """All blocks of a payload.

    Raises:
        SourceFormatError: without path and entry, its position relative to the payload, if the
            bytes are not what the headers promise.
        UnsupportedPayloadError: if there is no decoder for a data type.
    """
    blocks, offset = [], 0
    while offset < len(data):
        datatype, count, packets = read_block_header(data, offset)
        decode = DECODERS.get(datatype)
        if decode is None:
            raise UnsupportedPayloadError(
                f"Flow data type {datatype!r} is not supported",
                position=offset,
                expected=f"one of {', '.join(sorted(DECODERS))}",
            )
        values, times, offset = decode(data, packets, count)
        blocks.append(Block(datatype, values, times))
    return blocks


def decode_uniform_blocks(data: Buffer) -> list[Block]:
    """The blocks of a payload that have frames, each an array [frames, dim] of one type and dim.

    Raises:
        ShapeMismatchError: if dimension or element type change within the entry.
        SourceFormatError, UnsupportedPayloadError: as `decode_blocks`; the latter also for data
            types that are no vectors.
    """
    blocks = [block for block in decode_blocks(data) if len(block)]
    for block in blocks:
        _check_uniform(block, blocks[0])
    return blocks


def decode_matrix(data: Buffer) -> Features:
    """The frames of a payload as one matrix, a view if they are in one block.

    Raises:
        ShapeMismatchError, SourceFormatError, UnsupportedPayloadError: as
            `decode_uniform_blocks`.
    """
    blocks = decode_uniform_blocks(data)
    if not blocks:
        return Features(np.zeros((0, 0), np.float32), np.zeros((0, 2)))
    if len(blocks) == 1:
        return Features(blocks[0].values, blocks[0].times)
    return Features(
        np.concatenate([block.values for block in blocks]),
        np.concatenate([block.times for block in blocks]),
    )


def decode_frames(data: Buffer) -> tuple[list[np.ndarray], np.ndarray]:
    """The frames of a payload whose dimension may change: arrays [dim], and float64 [frames, 2].

    Raises:
        SourceFormatError, UnsupportedPayloadError: as `decode_blocks`.
    """
    blocks = decode_blocks(data)
    frames = [frame for block in blocks for frame in block.values]
    return frames, np.concatenate([block.times for block in blocks] or [np.zeros((0, 2))])


def _check_uniform(block: Block, first: Block) -> None:
    if block.datatype not in VECTOR_ELEMENTS:
        raise UnsupportedPayloadError(
            "the entry has no feature vectors",
            expected=f"one of {', '.join(VECTOR_ELEMENTS)}",
            found=block.datatype,
        )
    if isinstance(block.values, list):
        dims = sorted({len(frame) for frame in block.values})
        raise ShapeMismatchError(
            "the dimension changes within the entry",
            expected="one dimension",
            found=", ".join(map(str, dims[:5])),
        )
    if block.datatype != first.datatype or block.values.shape[1] != first.values.shape[1]:
        raise ShapeMismatchError(
            "data type or dimension change within the entry",
            expected=f"{first.datatype} of dimension {first.values.shape[1]}",
            found=f"{block.datatype} of dimension {block.values.shape[1]}",
        )


Decoder = Callable[[Buffer, int, int], tuple[np.ndarray | list, np.ndarray, int]]


def _vector_decoder(element: np.dtype) -> Decoder:
    def decode(data: Buffer, offset: int, count: int) -> tuple[np.ndarray | list, np.ndarray, int]:
        check_room(data, offset, count, 4 + TIMES_BYTES)
        if count == 0:
            return np.zeros((0, 0), element), np.zeros((0, 2)), offset
        dtype = frame_dtype(element, _dim(data, offset, element))
        end = offset + count * dtype.itemsize
        if end <= len(data):
            frames = np.frombuffer(data, dtype, count, offset)
            # By induction: a frame of the right dimension ends where the next one is looked for.
            if (frames["n"] == dtype["v"].shape[0]).all():
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
    """Checks that `count` packets of at least `smallest` bytes can be behind a byte offset."""
    if count * smallest > len(data) - offset:
        raise SourceFormatError(
            "the data ends before its packets do",
            position=offset - 4,
            expected=f"{count} packets of at least {smallest} bytes",
            found=f"{len(data) - offset} bytes",
        )


DECODERS: dict[str, Decoder] = {
    name: _vector_decoder(element) for name, element in VECTOR_ELEMENTS.items()
}
