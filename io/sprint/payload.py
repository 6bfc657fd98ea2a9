"""Decodes what RASR's Flow caches store in an entry: blocks of packets of one data type.

See docs/sprint-format.md, section 2.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..errors import ShapeMismatchError, UnsupportedPayloadError
from . import alignment, structured
from .mapping import Buffer
from .packets import (
    FEATURE_ELEMENTS,
    VECTOR_ELEMENTS,
    Block,
    Decoder,
    read_block_header,
    vector_decoder,
)

DECODERS: dict[str, Decoder] = {
    **{name: vector_decoder(element) for name, element in VECTOR_ELEMENTS.items()},
    **structured.DECODERS,
    alignment.DATATYPE: alignment.decode_packets,
}


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

    Scalars (f32, f64) become vectors of dimension 1.

    Raises:
        ShapeMismatchError: if dimension or element type change within the entry.
        SourceFormatError, UnsupportedPayloadError: as `decode_blocks`; the latter also for data
            types that are no vectors.
    """
    blocks = [_as_vectors(block) for block in decode_blocks(data) if len(block)]
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


def _as_vectors(block: Block) -> Block:
    if block.datatype in ("f32", "f64"):
        return Block(f"vector-{block.datatype}", block.values[:, None], block.times)
    return block


def _check_uniform(block: Block, first: Block) -> None:
    if block.datatype not in FEATURE_ELEMENTS:
        raise UnsupportedPayloadError(
            "the entry has no feature vectors",
            expected=f"f32, f64, {', '.join(FEATURE_ELEMENTS)}",
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
