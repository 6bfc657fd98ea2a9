"""Local copies of the files of datasets that are not opened yet, made in the background."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from .file_cache import FileCache, Lease, resolve_cached_files


class Prefetcher:
    """The options of sub datasets, with local copies of files, made in the background."""

    def __init__(self) -> None:
        self._pending: dict[int, Future[tuple[dict[str, Any], list[Lease]]]] = {}
        self._executor: ThreadPoolExecutor | None = None

    def __contains__(self, epoch: int) -> bool:
        return epoch in self._pending

    def start(self, epoch: int, options: dict[str, Any]) -> None:
        """Begins to copy the files of a sub-epoch; without `CachedFile`s there is nothing to do."""
        future: Future[tuple[dict[str, Any], list[Lease]]] = Future()
        if any(type(value).__name__ == "CachedFile" for _, value in options_by_name(options)):
            self._executor = self._executor or ThreadPoolExecutor(1, "copy-files")
            future = self._executor.submit(resolve_cached_files, options, FileCache())
        else:
            future.set_result((options, []))
        self._pending[epoch] = future

    def get(self, epoch: int) -> dict[str, Any]:
        """Waits for the copies of a sub-epoch; raises what went wrong with them."""
        return self._pending[epoch].result()[0]

    def forget_before(self, epoch: int) -> None:
        """Lets go of the copies of earlier sub-epochs."""
        for old in [known for known in self._pending if known < epoch]:
            self._forget(old)

    def close(self) -> None:
        """Lets go of all copies; one that is being made is waited for."""
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)
            self._executor = None
        for epoch in list(self._pending):
            self._forget(epoch)

    def _forget(self, epoch: int) -> None:
        future = self._pending.pop(epoch)
        future.cancel()
        if future.done() and not future.cancelled() and future.exception() is None:
            for lease in future.result()[1]:
                lease.close()


def options_by_name(options: Any, name: Any = None) -> Iterator[tuple[Any, Any]]:
    """All values in nested options with the innermost name; those of lists have an index."""
    if isinstance(options, dict):
        items: Any = options.items()
    elif isinstance(options, list | tuple):
        items = enumerate(options)
    else:
        yield name, options
        return
    for key, value in items:
        yield from options_by_name(value, key)
