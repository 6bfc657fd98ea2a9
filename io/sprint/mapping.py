"""Read-only memory maps of archives, and the little arithmetic on bytes that all modules need."""

from __future__ import annotations

import contextlib
import mmap
import os
import zlib
from typing import TypeVar

import numpy as np

from ..errors import SeqshardError, SourceFormatError, SourceNotFoundError

MAGIC = b"SP_ARC1\0"
HEADER_BYTES = 9
Buffer = bytes | bytearray | memoryview | mmap.mmap
_FAULT_AROUND_BYTES = 64 << 10

_HDF_MAGIC = b"\x89HDF\r\n\x1a\n"
_Error = TypeVar("_Error", bound=SeqshardError)


def open_map(path: str) -> mmap.mmap:
    """Maps an archive and checks its first bytes.

    Raises:
        SourceNotFoundError: if there is no such file.
        SourceFormatError: if it is no archive: too short, another format, a folder.
    """
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise SourceFormatError(
                    "the file is empty", path, expected="a Sprint archive", hint=_COPY_HINT
                )
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise SourceNotFoundError("there is no such archive", path) from None
    except IsADirectoryError:
        raise SourceFormatError(
            "a folder where a single file is due",
            path,
            hint="open_archive reads folders as archives; ArchiveWriter packs them into a file.",
        ) from None
    except OSError as error:
        raise SourceFormatError(f"the archive cannot be opened: {error.strerror}", path) from error
    head = data[:HEADER_BYTES]
    if len(head) < HEADER_BYTES or head[:8] != MAGIC:
        data.close()
        raise SourceFormatError(
            "not a Sprint archive", path, None, 0, repr(MAGIC), _describe(head), _kind_hint(head)
        )
    return data


def close_map(data: mmap.mmap) -> None:
    """Unmaps now, or when the last array that views the map is gone."""
    with contextlib.suppress(BufferError):
        data.close()


def byte_array(data: Buffer) -> np.ndarray:
    """The bytes as a uint8 array without a copy."""
    return np.frombuffer(data, np.uint8)


def gather(data: Buffer, position: np.ndarray, width: int) -> np.ndarray:
    """`width` bytes from each position as a uint8 matrix; zeros stand for bytes behind the end.

    Args:
        position: int64, not negative.
    """
    total = len(data)
    rows = np.zeros((len(position), width), np.uint8)
    inside = position <= total - width
    if total >= width:
        windows = np.lib.stride_tricks.sliding_window_view(byte_array(data), width)
        if inside.all():
            return windows[position]
        rows[inside] = windows[position[inside]]
    for row in np.flatnonzero(~inside & (position < total)).tolist():
        tail = data[int(position[row]) : total]
        rows[row, : len(tail)] = np.frombuffer(tail, np.uint8)
    return rows


def gather_file(handle: int, data: Buffer, position: np.ndarray, width: int) -> np.ndarray:
    """As `gather` from the map of a file; by small reads where the positions are far apart.

    A page fault maps the surrounding pages too, which takes several times as long as a read.

    Args:
        handle: of the file that `data` maps.
    """
    if len(position) and np.ptp(position) < len(position) * _FAULT_AROUND_BYTES:
        return gather(data, position, width)
    heads = [os.pread(handle, width, at).ljust(width, b"\0") for at in position.tolist()]
    return np.frombuffer(b"".join(heads), np.uint8).reshape(len(heads), width).copy()


def inflate(stored: Buffer, size: int, *, check_trailer: bool = True) -> bytes:
    """Decompresses one gzip member, never to more than `size` + 1 bytes.

    Args:
        stored: the complete member.
        size: uncompressed bytes that must come out.
        check_trailer: verify the CRC and length behind the data. RASR does not.

    Raises:
        SourceFormatError: without path or entry, if the data is damaged.
    """
    decoder = zlib.decompressobj(wbits=31)
    try:
        data = decoder.decompress(stored if check_trailer else stored[:-8], size + 1)
    except zlib.error as error:
        raise SourceFormatError(f"the compressed data is damaged: {error}") from error
    if len(data) != size:
        found = f"{len(data)}" if len(data) < size else "more"
        raise SourceFormatError(
            "the compressed data has another length", expected=f"{size} bytes", found=found
        )
    if check_trailer and (not decoder.eof or decoder.unused_data):
        what = "ends too early" if not decoder.eof else "is followed by other bytes"
        raise SourceFormatError(f"the compressed data {what}")
    return data


def located(error: _Error, path: str, entry: str | None, base: int, raw: bool = True) -> _Error:
    """The error with path and entry; its position, relative to a payload, made absolute.

    Args:
        base: where the payload starts in the file.
        raw: whether the payload is stored as it is; else `base` is the best position there is.
    """
    position = base + (error.position or 0) if raw else base
    return type(error)(error.what, path, entry, position, error.expected, error.found, error.hint)


_COPY_HINT = "Was it copied or written completely?"


def _describe(head: bytes) -> str:
    if head.startswith(_HDF_MAGIC):
        return "an HDF file"
    if head.startswith(b"\x1f\x8b"):
        return "a gzip file"
    if head.isascii() and all(byte >= 32 or byte in b"\t\r\n" for byte in head):
        return f"text: {head.decode('ascii')!r}"
    return repr(head)


def _kind_hint(head: bytes) -> str | None:
    if head.startswith(_HDF_MAGIC):
        return 'HDF files are sources of the kind "hdf".'
    if head.startswith(b"\x1f\x8b"):
        return "Decompress it first."
    if head.isascii() and b"\0" not in head:
        return "A list of archives must be named *.bundle."
    return None
