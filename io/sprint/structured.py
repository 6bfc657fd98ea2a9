"""Decoders of Flow's data types other than real vectors and alignments.

What `Block.values` holds, one item per packet (docs/sprint-format.md, section 2):

- vector-bool: as for vectors, bool; vector-complex-f32, -f64: as for vectors, complex.
- f32, f64: array [packets].
- string: list of bytes; no character set is defined.
- timestamp: the times again, since they are all there is.
- matrix-f32, matrix-f64: list of arrays [rows, columns].
- vector-vector-f32, aggregate-vector-f32: list of `Block` of vector-f32.
- aggregate: list of tuples of `Block`: a single one if all its parts have one type, else one per
  part.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import SourceFormatError, UnsupportedPayloadError
from .mapping import Buffer
from .packets import (
    TIMES_BYTES,
    VECTOR_ELEMENTS,
    Block,
    Decoder,
    check_room,
    read_block_header,
    read_datatype,
    vector_decoder,
)

_U32 = struct.Struct("<I")
_MAX_DEPTH = 8
_VECTOR_F32 = "vector-f32"
_decode_vector_f32 = vector_decoder(VECTOR_ELEMENTS[_VECTOR_F32])
_decode_vector_u8 = vector_decoder(np.dtype("u1"))

# From the data and the byte offset of a value without its times to the value and its end.
_ReadValue = Callable[[Buffer, int], tuple[Any, int]]


def _decode_vector_bool(
    data: Buffer, offset: int, count: int
) -> tuple[np.ndarray | list, np.ndarray, int]:
    """Every byte that is not 0 is true."""
    values, times, end = _decode_vector_u8(data, offset, count)
    if isinstance(values, list):
        return [value != 0 for value in values], times, end
    return values != 0, times, end


def _scalar_decoder(element: np.dtype) -> Decoder:
    packet = np.dtype([("v", element), ("t", "<f8", (2,))])

    def decode(data: Buffer, offset: int, count: int) -> tuple[np.ndarray, np.ndarray, int]:
        check_room(data, offset, count, packet.itemsize)
        packets = np.frombuffer(data, packet, count, offset)
        return packets["v"], packets["t"], offset + count * packet.itemsize

    return decode


def _decode_timestamps(data: Buffer, offset: int, count: int) -> tuple[np.ndarray, np.ndarray, int]:
    check_room(data, offset, count, TIMES_BYTES)
    times = np.frombuffer(data, "<f8", 2 * count, offset).reshape(count, 2)
    return times, times, offset + count * TIMES_BYTES


def _decoder(read: _ReadValue, smallest: int, *, times_first: bool = False) -> Decoder:
    """The decoder of a type whose packets must be read one by one.

    Args:
        read: reads a value.
        smallest: bytes that a value takes at least.
        times_first: whether the times stand before the value.
    """

    def decode(data: Buffer, offset: int, count: int) -> tuple[list, np.ndarray, int]:
        check_room(data, offset, count, smallest + TIMES_BYTES)
        values, times = [], np.empty((count, 2))
        for packet in range(count):
            if times_first:
                times[packet], offset = _read_times(data, offset)
            value, offset = read(data, offset)
            values.append(value)
            if not times_first:
                times[packet], offset = _read_times(data, offset)
        return values, times, offset

    return decode


def _read_times(data: Buffer, offset: int) -> tuple[np.ndarray, int]:
    check_room(data, offset, 1, TIMES_BYTES)
    return np.frombuffer(data, "<f8", 2, offset), offset + TIMES_BYTES


def _read_u32(data: Buffer, offset: int) -> tuple[int, int]:
    check_room(data, offset, 1, 4)
    return _U32.unpack_from(data, offset)[0], offset + 4


def _read_string(data: Buffer, offset: int) -> tuple[bytes, int]:
    length, offset = _read_u32(data, offset)
    check_room(data, offset, length, 1)
    return bytes(data[offset : offset + length]), offset + length


def _matrix_reader(element: np.dtype) -> _ReadValue:
    def read(data: Buffer, offset: int) -> tuple[np.ndarray, int]:
        check_room(data, offset, 1, 12)
        rows, columns, repeated = struct.unpack_from("<3I", data, offset)
        row = 4 + columns * element.itemsize
        begin = offset + 12
        if rows != repeated:
            raise _bad_matrix(offset, f"{rows} rows", f"{repeated}")
        check_room(data, begin, rows, row)
        if rows == 0:
            return np.zeros((0, columns), element), begin
        dtype = np.dtype([("n", "<u4"), ("v", element, (columns,))])
        table = np.frombuffer(data, dtype, rows, begin)
        wrong = np.flatnonzero(table["n"] != columns)
        if len(wrong):
            found = f"{table['n'][wrong[0]]} in row {wrong[0]}"
            raise _bad_matrix(begin + int(wrong[0]) * row, f"{columns} columns", found)
        return table["v"], begin + rows * row

    return read


def _bad_matrix(position: int, expected: str, found: str) -> SourceFormatError:
    return SourceFormatError(
        "the sizes of a matrix contradict each other",
        position=position,
        expected=expected,
        found=found,
    )


def _read_vectors(data: Buffer, offset: int) -> tuple[Block, int]:
    count, offset = _read_u32(data, offset)
    values, times, offset = _decode_vector_f32(data, offset, count)
    return Block(_VECTOR_F32, values, times), offset


def _decode_aggregates(
    data: Buffer, offset: int, count: int, depth: int = 0
) -> tuple[list[tuple[Block, ...]], np.ndarray, int]:
    check_room(data, offset, count, 1 + TIMES_BYTES + 4)
    values, times = [], np.empty((count, 2))
    for packet in range(count):
        check_room(data, offset, 1, 1)
        same = data[offset] != 0
        times[packet], offset = _read_times(data, offset + 1)
        parts, offset = _read_parts(data, offset, same, depth + 1)
        values.append(parts)
    return values, times, offset


def _read_parts(data: Buffer, offset: int, same: bool, depth: int) -> tuple[tuple[Block, ...], int]:
    if same:
        datatype, count, offset = read_block_header(data, offset)
        block, offset = _decode_part(data, datatype, offset, count, depth)
        return (block,), offset
    number, offset = _read_u32(data, offset)
    check_room(data, offset, number, 4 + 1 + TIMES_BYTES)
    blocks = []
    for _ in range(number):
        datatype, offset = read_datatype(data, offset)
        block, offset = _decode_part(data, datatype, offset, 1, depth)
        blocks.append(block)
    return tuple(blocks), offset


def _decode_part(
    data: Buffer, datatype: str, offset: int, count: int, depth: int
) -> tuple[Block, int]:
    if datatype == "aggregate" and depth < _MAX_DEPTH:
        values, times, end = _decode_aggregates(data, offset, count, depth)
    elif datatype in _PART_DECODERS:
        values, times, end = _PART_DECODERS[datatype](data, offset, count)
    else:
        raise UnsupportedPayloadError(
            f"an aggregate with parts of type {datatype!r} at depth {depth} is not supported",
            position=offset,
        )
    return Block(datatype, values, times), end


_SIMPLE_DECODERS: dict[str, Decoder] = {
    "vector-bool": _decode_vector_bool,
    "vector-complex-f32": vector_decoder(np.dtype("<c8")),
    "vector-complex-f64": vector_decoder(np.dtype("<c16")),
    "f32": _scalar_decoder(np.dtype("<f4")),
    "f64": _scalar_decoder(np.dtype("<f8")),
    "string": _decoder(_read_string, 4),
    "timestamp": _decode_timestamps,
    "matrix-f32": _decoder(_matrix_reader(np.dtype("<f4")), 12),
    "matrix-f64": _decoder(_matrix_reader(np.dtype("<f8")), 12),
    "vector-vector-f32": _decoder(_read_vectors, 4),
    "aggregate-vector-f32": _decoder(_read_vectors, 4, times_first=True),
}
_PART_DECODERS: dict[str, Decoder] = {
    **{name: vector_decoder(element) for name, element in VECTOR_ELEMENTS.items()},
    **_SIMPLE_DECODERS,
}
DECODERS: dict[str, Decoder] = {**_SIMPLE_DECODERS, "aggregate": _decode_aggregates}
