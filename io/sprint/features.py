"""Lengths of many feature entries from their headers, and their frames into one array."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ..errors import ShapeMismatchError, SourceFormatError
from .mapping import Buffer
from .packets import FEATURE_ELEMENTS, TIMES_BYTES
from .payload import decode_matrix, decode_uniform_blocks

DATATYPES = tuple(FEATURE_ELEMENTS)
NO_DATATYPE = -1
HEAD_BYTES = 4 + max(map(len, DATATYPES)) + 8

_NAMES = {element: name for name, element in FEATURE_ELEMENTS.items()}


@dataclass(frozen=True)
class Shapes:
    """Shapes of feature entries, as columns.

    Attributes:
        length: int64, frames; -1 where the header alone does not tell.
        dim: int64; 0 if there is no frame.
        datatype: int64, place in `DATATYPES`; -1 if there is no frame.
    """

    length: np.ndarray
    dim: np.ndarray
    datatype: np.ndarray


def measure_heads(heads: np.ndarray, size: np.ndarray) -> Shapes:
    """Shapes of entries that are a single block of vectors of one dimension.

    Args:
        heads: uint8 [entries, HEAD_BYTES], the first bytes of the payloads.
        size: int64 [entries], bytes of the payloads.
    """
    length = np.where(size == 0, 0, -1)
    dim = np.zeros(len(size), np.int64)
    datatype = np.full(len(size), NO_DATATYPE)
    for number, name in enumerate(DATATYPES):
        prefix = np.frombuffer(struct.pack("<I", len(name)) + name.encode(), np.uint8)
        begin = len(prefix) + 4
        rows = np.flatnonzero((length < 0) & (size >= begin))
        if len(rows) == 0:
            break
        rows = rows[(heads[rows, : len(prefix)] == prefix).all(axis=1)]
        fields = np.ascontiguousarray(heads[rows, len(prefix) : begin + 4]).view("<u4")
        count, first_dim = fields[:, 0].astype(np.int64), fields[:, 1].astype(np.int64)
        # In floating point a product that is too large for 64 bits stays large.
        frame_bytes = first_dim * FEATURE_ELEMENTS[name].itemsize + 4.0 + TIMES_BYTES
        exact = begin + count * frame_bytes == size[rows]
        rows, count, first_dim = rows[exact], count[exact], first_dim[exact]
        length[rows] = count
        dim[rows] = np.where(count > 0, first_dim, 0)
        datatype[rows] = np.where(count > 0, number, NO_DATATYPE)
    return Shapes(length, dim, datatype)


def measure_payload(data: Buffer) -> tuple[int, int, int]:
    """Length, dimension and data type of one entry, whatever its blocks are.

    Raises:
        SourceFormatError: if the entry is no matrix; as `payload.decode_matrix`.
    """
    blocks = decode_uniform_blocks(data)
    if not blocks:
        return 0, 0, NO_DATATYPE
    datatype = DATATYPES.index(blocks[0].datatype)
    return sum(map(len, blocks)), blocks[0].values.shape[1], datatype


@lru_cache(maxsize=64)
def _packet_dtype(row_bytes: int) -> np.dtype:
    """A packet whose elements are one opaque item: copied as a whole, whatever its alignment."""
    return np.dtype([("n", "<u4"), ("v", f"V{row_bytes}"), ("t", f"V{TIMES_BYTES}")])


def make_copier(out: np.ndarray) -> Callable[[Buffer, int, int, int, int], None]:
    """A function that copies the frames of a payload into rows of one array.

    It takes a buffer, the byte offset and size of a payload in it, the number of frames that are
    due, and the first row; it raises SourceFormatError if the payload is anything else.

    Args:
        out: [frames, dim], C-contiguous, of an element type of `FEATURE_ELEMENTS`.
    """
    element, dim = out.dtype, out.shape[1]
    name = _NAMES[element.newbyteorder("<")].encode()
    head = struct.Struct(f"<I{len(name)}sI")
    packet = _packet_dtype(dim * element.itemsize)
    # RASR writes true as 255; and rows of no bytes cannot be viewed as items.
    is_plain = element.kind != "b" and element == element.newbyteorder("<") and out.size > 0
    rows = out.view(packet["v"])[:, 0] if is_plain else None

    def copy(data: Buffer, offset: int, size: int, length: int, start: int) -> None:
        due = (len(name), name, length)
        if (
            rows is not None
            and size == head.size + length * packet.itemsize
            and head.unpack_from(data, offset) == due
        ):
            frames = np.ndarray(length, packet, data, offset + head.size)
            if (frames["n"] == dim).all():
                rows[start : start + length] = frames["v"]
                return
        _copy_blocks(memoryview(data)[offset : offset + size], length, out, start)

    return copy


def _copy_blocks(data: memoryview, length: int, out: np.ndarray, start: int) -> None:
    values = decode_matrix(data).values
    if len(values) != length:
        raise SourceFormatError(
            "the entry has another length than its header said",
            expected=f"{length} frames",
            found=str(len(values)),
        )
    if length == 0:
        return
    if values.shape[1] != out.shape[1] or values.dtype != out.dtype:
        raise ShapeMismatchError(
            "the entry has another shape than its stream",
            expected=f"{out.dtype} of dimension {out.shape[1]}",
            found=f"{values.dtype} of dimension {values.shape[1]}",
        )
    out[start : start + length] = values
