"""Remote source files. See `Source` in io/sources.py.

Of Sprint archives, only the table, the heads and the wanted entries are fetched. HDF files have
their tables anywhere: they are read from a copy in the machine's cache of files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

import numpy as np

from . import storage
from .errors import SeqshardError
from .file_cache import FileCache
from .mirror import Mirror, Wanted, fetch
from .records import SourceIndex, StreamSpec
from .sprint.mapping import HEADER_BYTES

if TYPE_CHECKING:
    from .sources import Source

ARCHIVE_KINDS = ("sprint-features", "sprint-alignment")

_Error = TypeVar("_Error", bound=SeqshardError)


class RemoteSource:
    """A local source whose errors name the remote file.

    Args:
        source: reads a local file.
        local: path of that file.
        url: the remote file.
        resources: closed with the source.
    """

    def __init__(
        self, source: Source, local: str, url: str, resources: contextlib.ExitStack
    ) -> None:
        self._source = source
        self._local = local
        self._url = url
        self._resources = resources

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._resources.__exit__(kind, error, trace)

    def index(self) -> SourceIndex:
        """See `Source.index`."""
        with _renamed(self._local, self._url):
            index = self._source.index()
        damaged = tuple((tag, _rename(e, self._local, self._url)) for tag, e in index.damaged)
        return replace(index, damaged=damaged)

    def read_many(
        self,
        position: np.ndarray,
        length: np.ndarray,
        num_bytes: np.ndarray,
        raw_bytes: np.ndarray,
        out: np.ndarray,
        start: np.ndarray,
    ) -> None:
        """See `Source.read_many`."""
        with _renamed(self._local, self._url):
            self._source.read_many(position, length, num_bytes, raw_bytes, out, start)


def make_mirror(url: str, num_bytes: int | None) -> Mirror:
    """A mirror of a file, whose size may be known."""
    return Mirror(url, storage.stamp(url).num_bytes if num_bytes is None else num_bytes)


def fetch_entries(entries: Sequence[tuple[Mirror, np.ndarray, np.ndarray]]) -> None:
    """Fetches byte ranges [begin, end) of archives, and what `open_archive` needs of each."""
    fetch(
        [Wanted(m, np.append(begin, 0), np.append(end, HEADER_BYTES)) for m, begin, end in entries]
    )


def open_archive(spec: StreamSpec, mirror: Mirror, recover: bool = False) -> RemoteSource:
    """Opens a Sprint archive through a mirror, which the caller closes."""
    from .sources import open_source
    from .sprint.source import ArchiveSource

    mirror.fetch(0, HEADER_BYTES)
    with _renamed(mirror.path, mirror.url), contextlib.ExitStack() as stack:
        source = stack.enter_context(open_source(spec, mirror.path, recover))
        assert isinstance(source, ArchiveSource)
        source.fetch = mirror.fetch
        return RemoteSource(source, mirror.path, mirror.url, stack.pop_all())


def open_remote(
    spec: StreamSpec, url: str, num_bytes: int | None = None, recover: bool = False
) -> RemoteSource:
    """Opens a remote source file.

    Args:
        spec: the stream.
        url: the file.
        num_bytes: its size, if it is known.
        recover: as of `open_source`.
    """
    from .sources import open_source

    with contextlib.ExitStack() as stack:
        if spec.source in ARCHIVE_KINDS:
            mirror = stack.enter_context(make_mirror(url, num_bytes))
            found = stack.enter_context(open_archive(spec, mirror, recover))
            return RemoteSource(found, mirror.path, url, stack.pop_all())
        lease = stack.enter_context(contextlib.closing(FileCache().get(url)))
        with _renamed(lease.paths[0], url):
            source = stack.enter_context(open_source(spec, lease.paths[0], recover))
        return RemoteSource(source, lease.paths[0], url, stack.pop_all())


@contextlib.contextmanager
def _renamed(local: str, url: str) -> Iterator[None]:
    try:
        yield
    except SeqshardError as error:
        raise _rename(error, local, url) from error


def _rename(error: _Error, local: str, url: str) -> _Error:
    """The same error about the remote file."""
    if error.path != local:
        return error
    _, _, *others = error.args
    return type(error)(error.what, url, *others)
