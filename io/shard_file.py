"""A file that is written at plain byte offsets, from front to back, and hashed on the way.

The payload bypasses the page cache where the system allows it: a shard is written once and read
much later, and finding free pages for it took more time than everything else in a build.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import xxhash

PAGE = 4096
DIRECT_FROM_BYTES = 256 << 10
# Large buffered writes make the kernel look for large runs of free pages: 128 KiB were twice as
# fast as 4 MiB.
WRITE_BYTES = 128 << 10


class ShardFile:
    """An existing file whose payload is still to be written.

    Hashing and writing happen in a thread of their own, at most one block behind the caller.

    Args:
        path: local file, with its final size.
    """

    def __init__(self, path: str) -> None:
        self._handle = os.open(path, os.O_RDWR)
        self._direct = _open_direct(path)
        self._hasher = xxhash.xxh3_128()
        self._position = 0
        self._buffers = [np.zeros(0, np.uint8)] * 2
        self._thread = ThreadPoolExecutor(1, "write-shard")
        self._pending: Future[None] | None = None

    def __enter__(self) -> ShardFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()
        os.close(self._handle)
        self._close_direct()

    def buffer(self, offset: int, num_bytes: int) -> np.ndarray:
        """Memory for the next block, uint8 [num_bytes], placed as the device wants it.

        It may be filled as soon as the previous `write` has returned.

        Args:
            offset: where in the file the block will be written.
            num_bytes: its size.
        """
        self._buffers.reverse()
        room = -(-num_bytes // PAGE) * PAGE + PAGE
        if len(self._buffers[0]) < room:
            self._buffers[0] = np.frombuffer(mmap.mmap(-1, room), np.uint8)
        shift = offset % PAGE
        return self._buffers[0][shift : shift + num_bytes]

    def write(self, offset: int, data: np.ndarray) -> None:
        """Writes a block at or behind the position that has been reached.

        Args:
            offset: byte position.
            data: uint8, usually from `buffer`; must stay as it is until the next call of `write`
                or `finish` has returned.
        """
        self._wait()
        self._pending = self._thread.submit(self._write_now, offset, memoryview(data))

    def finish(self) -> tuple[int, str]:
        """Hashes the rest and syncs; returns the size in bytes and xxh3_128 as hexadecimal."""
        self._wait()
        size = os.fstat(self._handle).st_size
        self._hash_existing(size)
        os.fsync(self._handle)
        return size, self._hasher.hexdigest()

    def _wait(self) -> None:
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def _write_now(self, offset: int, view: memoryview) -> None:
        self._hash_existing(offset)
        self._hasher.update(view)
        self._position += len(view)
        first = min(-offset % PAGE, len(view))
        last = max(first, len(view) - (offset + len(view)) % PAGE)
        if self._direct is not None and last - first >= DIRECT_FROM_BYTES:
            self._write_buffered(offset, view[:first])
            first += self._write_direct(offset + first, view[first:last])
            offset, view = offset + first, view[first:]
        self._write_buffered(offset, view)

    def _write_direct(self, offset: int, view: memoryview) -> int:
        """Writes whole pages past the page cache; returns how many bytes that was possible for."""
        try:
            return os.pwrite(self._direct, view, offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._close_direct()
            return 0

    def _write_buffered(self, offset: int, view: memoryview) -> None:
        while len(view):
            written = os.pwrite(self._handle, view[:WRITE_BYTES], offset)
            view, offset = view[written:], offset + written

    def _hash_existing(self, end: int) -> None:
        while self._position < end:
            data = os.pread(self._handle, min(WRITE_BYTES, end - self._position), self._position)
            self._hasher.update(data)
            self._position += len(data)

    def _close_direct(self) -> None:
        if self._direct is not None:
            os.close(self._direct)
            self._direct = None


def _open_direct(path: str) -> int | None:
    """A handle that bypasses the page cache, where system and file system have that."""
    with contextlib.suppress(OSError, AttributeError):
        return os.open(path, os.O_RDWR | os.O_DIRECT)
    return None
