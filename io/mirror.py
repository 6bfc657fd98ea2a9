"""Parts of remote files, in sparse local files of the same size.

What reads local archives, by map and by position, can read a mirror, once the ranges that it needs
were fetched. Ranges that lie close together become one request; requests of many files go out at
the same time. The disk holds only what was asked for.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np

from . import remote, storage

# To read through a gap of this size takes no longer than to ask once more.
MAX_GAP_BYTES = 1 << 20
PAGE_BYTES = 1 << 12


class Mirror:
    """A local file that stands for a remote one.

    Attributes:
        url: the remote file.
        num_bytes: its size.
        path: the local file, in which only fetched bytes are valid.
        covered: int64 [ranges, 2], which bytes those are: disjoint and ascending.
    """

    def __init__(self, url: str, num_bytes: int) -> None:
        self.url = url
        self.num_bytes = num_bytes
        self.covered = np.zeros((0, 2), np.int64)
        self._folder = tempfile.TemporaryDirectory(prefix="seqshard-")
        self.path = os.path.join(self._folder.name, os.path.basename(url))
        with open(self.path, "wb") as file:
            file.truncate(num_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Removes the local file."""
        self._folder.cleanup()

    def fetch(self, begin: np.ndarray | int, end: np.ndarray | int) -> None:
        """Makes sure that the bytes of these half-open ranges are there; see `fetch`."""
        fetch([Wanted(self, np.atleast_1d(begin), np.atleast_1d(end))])


class Wanted(NamedTuple):
    """Bytes [begin[i], end[i]) of a mirrored file, int64; what is outside of it does not count."""

    mirror: Mirror
    begin: np.ndarray
    end: np.ndarray


def fetch(wanted: Sequence[Wanted]) -> None:
    """Fetches what is still missing of ranges of files, each of which is named once.

    Raises:
        SourceNotFoundError: if a file is gone, or may not be read.
        StorageError: if the store fails, or a file is shorter than it was.
    """
    missing = {item.mirror: find_missing(*item) for item in wanted}
    origin: dict[remote.ByteRange, Mirror] = {}
    stores: dict[str, list[remote.ByteRange]] = {}
    for mirror, pieces in missing.items():
        for begin, end in plan_requests(pieces).tolist():
            request = remote.ByteRange(mirror.url, begin, end)
            origin[request] = mirror
            stores.setdefault(remote.store_of(mirror.url), []).append(request)
    for batch in (batch for requests in stores.values() for batch in remote.batches(requests)):
        with storage.source_errors(batch[0].url):
            contents = remote.read_ranges(batch)
        for request, content in zip(batch, contents, strict=True):
            _store(origin[request], missing[origin[request]], request.begin, content)
    for mirror, pieces in missing.items():
        mirror.covered = unite(np.concatenate([mirror.covered, pieces]))


def find_missing(mirror: Mirror, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """The pages of wanted ranges that a mirror does not have: int64 [pieces, 2], ascending."""
    limits = np.array([begin // PAGE_BYTES, -(-end // PAGE_BYTES)]).T * PAGE_BYTES
    limits = np.clip(limits, 0, mirror.num_bytes)
    wanted = unite(limits[begin < end])
    points = np.unique(np.concatenate([wanted.ravel(), mirror.covered.ravel()]))
    first, last = points[:-1], points[1:]
    new = _inside(first, wanted) & ~_inside(first, mirror.covered)
    return unite(np.array([first[new], last[new]]).T)


def unite(ranges: np.ndarray) -> np.ndarray:
    """The same bytes as disjoint, ascending ranges that do not touch: int64 [ranges, 2]."""
    ranges = ranges[ranges[:, 0] < ranges[:, 1]]
    return _merge(ranges[np.argsort(ranges[:, 0], kind="stable")], gap=0)


def plan_requests(pieces: np.ndarray) -> np.ndarray:
    """What to request for the sake of disjoint, ascending pieces: int64 [requests, 2].

    Gaps up to `MAX_GAP_BYTES` are read too; nothing is longer than `remote.REQUEST_BYTES`.
    """
    merged = _merge(pieces, MAX_GAP_BYTES)
    count = -(-(merged[:, 1] - merged[:, 0]) // remote.REQUEST_BYTES)
    part = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    begin = np.repeat(merged[:, 0], count) + part * remote.REQUEST_BYTES
    end = np.minimum(begin + remote.REQUEST_BYTES, np.repeat(merged[:, 1], count))
    return np.array([begin, end]).T


def _merge(ranges: np.ndarray, gap: int) -> np.ndarray:
    """Joins ranges, ascending by their begin, that are no farther apart than the gap."""
    if not len(ranges):
        return np.zeros((0, 2), np.int64)
    reach = np.maximum.accumulate(ranges[:, 1])
    cut = np.flatnonzero(ranges[1:, 0] > reach[:-1] + gap)
    first, last = np.append(0, cut + 1), np.append(cut, len(ranges) - 1)
    return np.array([ranges[first, 0], reach[last]]).T


def _inside(position: np.ndarray, ranges: np.ndarray) -> np.ndarray:
    """Whether each position lies in one of disjoint, ascending ranges."""
    begun = np.searchsorted(ranges[:, 0], position, "right")
    return begun > np.searchsorted(ranges[:, 1], position, "right")


def _store(mirror: Mirror, pieces: np.ndarray, position: int, content: bytes) -> None:
    """Writes those parts of an answer that were asked for."""
    view, stop = memoryview(content), position + len(content)
    first = int(np.searchsorted(pieces[:, 1], position, "right"))
    last = int(np.searchsorted(pieces[:, 0], stop, "left"))
    with storage.output_errors(mirror.path), open(mirror.path, "r+b", buffering=0) as file:
        for begin, end in np.clip(pieces[first:last], position, stop).tolist():
            os.pwrite(file.fileno(), view[begin - position : end - position], begin)
