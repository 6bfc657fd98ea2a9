"""Encodes payloads of archives, byte by byte as RASR does: docs/sprint-format.md, 2 and 3."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

import numpy as np

from ..errors import ShapeMismatchError, UnsupportedPayloadError
from .alignment import ALPHABET_MAGIC, DATATYPE, EMISSIONS_MAGIC, STATES_MAGIC, WEIGHTED, Alignment
from .packets import VECTOR_ELEMENTS, frame_dtype

_GZIP_HEADER = bytes([0x1F, 0x8B, 8, 0, 0, 0, 0, 0, 0, 3])
_QUOTES = {'"': "&quot;", "'": "&apos;"}
_NAMES = {element: name for name, element in VECTOR_ELEMENTS.items()}
_MAX_REPEAT, _MAX_VERBATIM = 128, 127


def encode_string(data: bytes) -> bytes:
    """Bytes behind their length."""
    return struct.pack("<I", len(data)) + data


def encode_packed(value: int) -> bytes:
    """A u32 in 7 bits per byte, low bits first."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def compress(data: bytes) -> bytes:
    """One gzip member with the header that RASR writes."""
    deflate = zlib.compressobj(6, wbits=-15)
    body = deflate.compress(data) + deflate.flush()
    return _GZIP_HEADER + body + struct.pack("<II", zlib.crc32(data), len(data) & 0xFFFFFFFF)


def encode_attributes(attributes: Mapping[str, str]) -> bytes:
    """The XML of an `.attribs` entry, attributes sorted by name."""
    items = (
        f'<flow-attribute name="{escape(name, _QUOTES)}" value="{escape(value, _QUOTES)}"/>'
        for name, value in sorted(attributes.items())
    )
    return f"<flow-attributes>{''.join(items)}</flow-attributes>".encode()


def vector_datatype(dtype: np.dtype) -> str:
    """Flow's name of vectors with that element type.

    Raises:
        UnsupportedPayloadError: if there is none.
    """
    name = _NAMES.get(dtype.newbyteorder("<"))
    if name is None:
        raise UnsupportedPayloadError(
            "features of this element type cannot be stored",
            expected=", ".join(element.name for element in _NAMES),
            found=str(dtype),
        )
    return name


def encode_features(
    frames: np.ndarray | Sequence[np.ndarray], times: np.ndarray | None = None
) -> tuple[str, bytes]:
    """Vectors as one block, and the name of their data type.

    Args:
        frames: [frames, dim], or a list of arrays [dim] of one element type and any dimensions.
        times: float64 [frames, 2], start and end in seconds; by default of 10 ms each.

    Raises:
        ShapeMismatchError: if the shapes do not fit, or element types differ.
        UnsupportedPayloadError: if there is no such vector type.
    """
    if times is None:
        start = np.arange(len(frames)) * 0.01
        times = np.stack([start, start + 0.01], axis=1)
    if np.shape(times) != (len(frames), 2):
        raise ShapeMismatchError(
            "every frame needs its start and its end",
            expected=f"times of shape ({len(frames)}, 2)",
            found=f"{np.shape(times)}",
        )
    if isinstance(frames, np.ndarray):
        _check_axes(frames, 2)
        datatype = vector_datatype(frames.dtype)
        body = _encode_matrix(frames, VECTOR_ELEMENTS[datatype], times)
    else:
        dtypes = {frame.dtype for frame in frames} or {np.dtype("<f4")}
        if len(dtypes) > 1:
            raise ShapeMismatchError(
                "the frames have several element types", found=", ".join(sorted(map(str, dtypes)))
            )
        datatype = vector_datatype(dtypes.pop())
        body = _encode_ragged(frames, VECTOR_ELEMENTS[datatype], times)
    # RASR's cache writer stores nothing at all for a segment without frames.
    head = encode_string(datatype.encode()) + struct.pack("<I", len(frames))
    return datatype, head + body if len(frames) else b""


def _encode_matrix(frames: np.ndarray, element: np.dtype, times: np.ndarray) -> bytes:
    packets = np.empty(len(frames), frame_dtype(element, frames.shape[1]))
    packets["n"] = frames.shape[1]
    packets["v"] = frames
    packets["t"] = times
    return packets.tobytes()


def _encode_ragged(frames: Sequence[np.ndarray], element: np.dtype, times: np.ndarray) -> bytes:
    parts = []
    for frame, (start, end) in zip(frames, times, strict=True):
        _check_axes(frame, 1)
        parts += (struct.pack("<I", len(frame)), frame.astype(element, copy=False).tobytes())
        parts.append(struct.pack("<dd", start, end))
    return b"".join(parts)


def _check_axes(frames: np.ndarray, expected: int) -> None:
    if frames.ndim != expected:
        raise ShapeMismatchError(
            "wrong number of axes", expected=f"{expected}", found=f"{frames.ndim}"
        )


def encode_alignment(alignment: Alignment) -> bytes:
    """An alignment as one block.

    As in RASR, a packet whose weights are all 1 is run-length coded, any other is weighted
    (version 2, float32). An alphabet is stored with packets of allophone states.
    """
    out = [encode_string(DATATYPE.encode()), struct.pack("<I", len(alignment.emission))]
    alphabet = b"" if alignment.alphabet is None else _encode_alphabet(alignment.alphabet)
    bounds = alignment.packet_offset.tolist()
    for packet, emission in enumerate(alignment.emission.tolist()):
        items = slice(bounds[packet], bounds[packet + 1])
        time, label = alignment.time[items], alignment.label[items]
        weight = alignment.weight[items]
        states = ALPHABET_MAGIC if alphabet else STATES_MAGIC
        out.append(EMISSIONS_MAGIC if emission else states)
        is_hard = bool((weight == 1).all())
        out.append(_encode_runs(time, label) if is_hard else _encode_weighted(time, label, weight))
        if not emission:
            out.append(alphabet)
        out.append(struct.pack("<dd", *alignment.packet_times[packet]))
    return b"".join(out)


def _encode_runs(time: np.ndarray, label: np.ndarray) -> bytes:
    """Chooses codes as RASR does, in one step per code.

    An item whose successor has another label starts verbatim labels, up to and including the
    first item of the next run; any other item starts a repetition, even of one item if the next
    one is later. Behind verbatim labels RASR forgets the time, so that a time code follows.
    """
    count = len(time)
    out = [struct.pack("<I", count)]
    follows = time[1:] == time[:-1] + np.uint32(1)
    same = label[1:] == label[:-1]
    repeat_end = _next_break(follows & same).tolist()
    verbatim_end = _next_break(follows & ~same).tolist()
    is_repeat = [*same.tolist(), False]
    times = time.tolist()
    labels = label.astype("<i4", copy=False)
    item, clock = 0, 0
    while item < count:
        if times[item] != clock:
            clock = times[item]
            out.append(struct.pack("<bI", 0, clock))
        if is_repeat[item]:
            end = min(repeat_end[item], item + _MAX_REPEAT)
            out.append(struct.pack("<bi", item - end, labels[item]))
            clock = (clock + end - item) & 0xFFFFFFFF
        else:
            end = min(verbatim_end[item], item + _MAX_VERBATIM)
            out += (struct.pack("<b", end - item), labels[item:end].tobytes())
            clock = (clock - 1) & 0xFFFFFFFF
        item = end
    return b"".join(out)


def _next_break(joined: np.ndarray) -> np.ndarray:
    """For every item the first later one that is not joined to its predecessor."""
    breaks = np.append(np.flatnonzero(~joined), len(joined)) + 1
    return breaks[np.searchsorted(breaks, np.arange(1, len(joined) + 2))]


def _encode_weighted(time: np.ndarray, label: np.ndarray, weight: np.ndarray) -> bytes:
    out = bytearray(struct.pack("<I", WEIGHTED | 2) + encode_packed(len(time)))
    first = np.flatnonzero(np.diff(time, prepend=~time[:1]) != 0)
    ends = [*first[1:].tolist(), len(time)]
    labels = (label.astype(np.int64) & 0xFFFFFFFF).tolist()
    weights = weight.astype("<f4")
    due = 0
    for begin, end in zip(first.tolist(), ends, strict=True):
        now = int(time[begin])
        out += encode_packed((end - begin) << 1 | (now != due))
        if now != due:
            out += encode_packed(now)
        due = (now + 1) & 0xFFFFFFFF
        for item in range(begin, end):
            out += encode_packed(labels[item]) + weights[item].tobytes()
    return bytes(out)


def _encode_alphabet(alphabet: Mapping[int, str]) -> bytes:
    symbols = sorted((label & 0xFFFFFFFF, symbol) for label, symbol in alphabet.items())
    parts = (encode_packed(label) + encode_string(symbol.encode()) for label, symbol in symbols)
    return encode_packed(len(symbols)) + b"".join(parts)
