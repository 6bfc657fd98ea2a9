"""The source files that the writer of one shard reads."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np

from .config import SourceFile
from .errors import CacheBusyError
from .sources import Source, open_source
from .storage import is_url

if TYPE_CHECKING:
    from .mirror import Mirror

MAX_OPEN_SOURCES = 64
# So much payload of remote archives is fetched ahead, and kept on the disk, at a time.
FETCH_BYTES = 256 << 20


class SourcePool:
    """Source files, opened when first needed; a bounded number stays open.

    Args:
        sources: all source files, by ordinal.
        num_bytes: their sizes, as far as they are known.
    """

    def __init__(
        self, sources: tuple[SourceFile, ...], num_bytes: Mapping[int, int] | None = None
    ) -> None:
        self._sources = sources
        self._num_bytes = num_bytes or {}
        self._open: dict[int, tuple[Source, contextlib.ExitStack]] = {}
        self._mirrors: dict[int, Mirror] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close_mirrors()
        while self._open:
            self._close(next(iter(self._open)))

    def get(self, ordinal: int) -> Source:
        """The opened source; the longest unused one is closed when there are too many."""
        found = self._open.pop(ordinal, None)
        if found is None:
            while len(self._open) >= MAX_OPEN_SOURCES:
                self._close(next(iter(self._open)))
            with contextlib.ExitStack() as stack:
                source = stack.enter_context(self._open_source(ordinal))
                found = source, stack.pop_all()
        self._open[ordinal] = found
        return found[0]

    def path(self, ordinal: int) -> str:
        """Path or URL of a source file."""
        return self._sources[ordinal].path

    def fetch_ahead(self, rows: Mapping[str, np.ndarray], first: int) -> int:
        """Fetches the payload of many rows from remote archives, in few large requests.

        What was fetched before is dropped. Rows can also be read without this, one by one.

        Args:
            rows: `source`, `position` and `num_bytes` of every row of a stream.
            first: the row from which on they are needed.

        Returns:
            The row up to which they are there.
        """
        if not any(self._is_remote_archive(i) for i in np.unique(rows["source"]).tolist()):
            return len(rows["source"])
        from . import remote_source

        self._close_mirrors()
        sizes = np.cumsum(rows["num_bytes"][first:])
        end = first + 1 + int(np.searchsorted(sizes, FETCH_BYTES))
        part = {name: rows[name][first:end] for name in ("source", "position", "num_bytes")}
        ordinals = np.unique(part["source"]).tolist()
        wanted = []
        for ordinal in filter(self._is_remote_archive, ordinals):
            mirror = self._mirrors[ordinal] = remote_source.make_mirror(
                self._sources[ordinal].path, self._num_bytes.get(ordinal)
            )
            mine = part["source"] == ordinal
            begin = part["position"][mine]
            wanted.append((mirror, begin, begin + part["num_bytes"][mine]))
        remote_source.fetch_entries(wanted)
        return min(end, len(rows["source"]))

    def _is_remote_archive(self, ordinal: int) -> bool:
        file = self._sources[ordinal]
        return is_url(file.path) and file.spec.source.startswith("sprint")

    def _open_source(self, ordinal: int) -> Source:
        file = self._sources[ordinal]
        mirror = self._mirrors.get(ordinal)
        if mirror is not None:
            from .remote_source import open_archive

            return open_archive(file.spec, mirror)
        try:
            return open_source(file.spec, file.path, num_bytes=self._num_bytes.get(ordinal))
        except CacheBusyError:
            if not self._open:
                raise
            while self._open:
                self._close(next(iter(self._open)))
            return self._open_source(ordinal)

    def _close_mirrors(self) -> None:
        while self._mirrors:
            ordinal, mirror = self._mirrors.popitem()
            if ordinal in self._open:
                self._close(ordinal)
            mirror.close()

    def _close(self, ordinal: int) -> None:
        self._open.pop(ordinal)[1].close()
