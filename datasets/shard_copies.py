"""Local copies of the shards of a remote dataset, made ahead of use."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence

import numpy as np

from ..io import storage
from ..io.errors import CacheBusyError, SeqshardError
from ..io.file_cache import FileCache, Lease
from ..io.manifest import FileInfo, ShardInfo

# So many shards are copied before they are used.
AHEAD = 4
# How long to wait for room that copies of other processes take, and how often to look.
PATIENCE_SECONDS = 60.0
POLL_SECONDS = 0.2


class ShardCopies:
    """Keeps the shards in the cache that are in use, and has a thread copy the next ones.

    A shard is in use from `get` until the reader opens one whose first sequence in the epoch comes
    behind its last one, or until the cache has no room for another one. What was copied ahead is
    not in use: it goes when others need the room, after what was used before.

    Args:
        folder: URL of the dataset.
        shards: of the manifest.
        cache: where the copies go.
        drop: method that is called with a shard that is no longer in use, whose copy may vanish.
    """

    def __init__(
        self,
        folder: str,
        shards: Sequence[ShardInfo],
        cache: FileCache,
        drop: Callable[[int], object],
    ) -> None:
        self._folder = folder
        self._files = [FileInfo(info.path, info.file_bytes, info.xxh3_128) for info in shards]
        self._cache = cache
        self._drop = weakref.WeakMethod(drop)
        self._kept: list[Lease] = []
        self._kept_bytes = 0
        self._used: dict[int, Lease] = {}
        self._order: list[int] = []
        self._first: dict[int, int] = {}
        self._last: dict[int, int] = {}
        self._next = 0
        self._begin()

    def _begin(self) -> None:
        """Locks and thread belong to one process; they do not survive a fork."""
        self._pid = os.getpid()
        self._copying = threading.Lock()
        self._pause = False
        self._wanted: threading.Event | None = None

    def follow(self, shard_of_seq: np.ndarray) -> None:
        """Copies ahead in the order of an epoch.

        Args:
            shard_of_seq: int64, the shard of every sequence of the epoch.
        """
        self._check_process()
        shards, first = np.unique(shard_of_seq, return_index=True)
        last = len(shard_of_seq) - 1 - np.unique(shard_of_seq[::-1], return_index=True)[1]
        self._first = dict(zip(shards.tolist(), first.tolist(), strict=True))
        self._last = dict(zip(shards.tolist(), last.tolist(), strict=True))
        self._order, self._next = shards[np.argsort(first)].tolist(), 0
        self._wake()

    def get(self, shard: int) -> str:
        """The local path of a shard, which stays until `drop` is called for it.

        Raises:
            CacheFullError: if the cache is too small for this shard alone.
            CacheBusyError: if other readers leave no room for it.
            ShardIntegrityError: if it is not the shard of the manifest.
            SourceNotFoundError, StorageError: if it cannot be read.
        """
        self._check_process()
        now = self._first.get(shard, -1)
        for other in [other for other in self._used if self._last.get(other, -1) < now]:
            self.release(other)
        lease = self._used[shard] = self._lease(self._files[shard])
        if shard in self._first:
            self._next = max(self._next, self._order.index(shard) + 1)
            self._wake()
        return lease.paths[0]

    def get_file(self, info: FileInfo) -> str:
        """The local path of another file of the dataset, which stays as long as this object."""
        self._kept.append(self._lease(info))
        self._kept_bytes += info.num_bytes
        return self._kept[-1].paths[0]

    def release(self, shard: int) -> None:
        """Lets go of a shard that is in use."""
        drop = self._drop()
        if drop is not None:
            drop(shard)
        self._used.pop(shard).close()

    def _lease(self, info: FileInfo) -> Lease:
        with contextlib.suppress(CacheBusyError):
            return self._copy(info)
        # First the thread's work has to go, then what was not opened for the longest time.
        self._pause = True
        try:
            with self._copying:
                return self._make_room(info)
        finally:
            self._pause = False

    def _make_room(self, info: FileInfo) -> Lease:
        limit = self._cache.max_bytes
        hopeless = limit is not None and self._kept_bytes + info.num_bytes > limit
        deadline = time.monotonic() + (0 if hopeless else PATIENCE_SECONDS)
        while True:
            try:
                return self._copy(info)
            except CacheBusyError:
                if self._used:
                    self.release(next(iter(self._used)))
                elif time.monotonic() > deadline:
                    raise
                else:
                    time.sleep(POLL_SECONDS)

    def _copy(self, info: FileInfo) -> Lease:
        url = storage.join(self._folder, info.path)
        return self._cache.get(url, info.num_bytes, info.xxh3_128)

    # The thread.

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            self._begin()

    def _wake(self) -> None:
        if self._wanted is None:
            self._wanted = threading.Event()
            weakref.finalize(self, self._wanted.set)
            arguments = (weakref.ref(self), self._wanted)
            threading.Thread(
                target=_copy_when_wanted, args=arguments, name="copy-shards", daemon=True
            ).start()
        self._wanted.set()

    def _copy_ahead(self) -> None:
        """Copies the next shards, as far as there is room for all of them at the same time."""
        with self._copying, contextlib.ExitStack() as leases:
            done: set[int] = set()
            while not self._pause:
                following = self._order[self._next : self._next + AHEAD]
                shard = next((shard for shard in following if shard not in done), None)
                if shard is None:
                    return
                try:
                    leases.enter_context(contextlib.closing(self._copy(self._files[shard])))
                except SeqshardError:
                    return  # the reader will see when it needs the shard
                done.add(shard)


def _copy_when_wanted(copies: weakref.ReferenceType[ShardCopies], wanted: threading.Event) -> None:
    """What the thread does; it does not keep a dataset alive that nobody else needs."""
    while True:
        wanted.wait()
        wanted.clear()
        found = copies()
        if found is None:
            return
        found._copy_ahead()
        del found
