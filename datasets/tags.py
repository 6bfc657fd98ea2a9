"""Sequence tags as arrays of bytes, and a lookup of sequences by tag."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from ..io.errors import MissingSequenceError

# An array of fixed-length tags may be so many times larger than the tags themselves.
_MAX_PADDING = 16
# So many tags at a time stay in the processor's cache while they are decoded.
_BLOCK = 4096
# An index costs as much as so many scans.
_MAX_SCANS = 6
_SEED = 0x9E3779B97F4A7C15
_FACTOR = 0xBF58476D1CE4E5B9
_MASK = 2**64 - 1


def tag_array(tags: Sequence[bytes]) -> np.ndarray:
    """Tags as a fixed-length array [num_seqs], or of objects where few are far longer than most.

    A tag ends at its first NUL.
    """
    tags = [tag.partition(b"\0")[0] for tag in tags]
    width = max(map(len, tags), default=1)
    if width * len(tags) <= _MAX_PADDING * (sum(map(len, tags)) + 64 * len(tags)):
        return np.array(tags, f"S{max(width, 1)}")
    out = np.empty(len(tags), object)
    out[:] = tags
    return out


def decode_tag(tag: bytes) -> str:
    """A tag as text."""
    return tag.partition(b"\0")[0].decode("utf-8")


def decode_tags(tags: np.ndarray) -> list[str]:
    """All tags of an array as text."""
    texts: list[str] = []
    for first in range(0, len(tags), _BLOCK):
        items = tags[first : first + _BLOCK].tolist()
        texts.extend(map(decode_tag if b"\0" in b"".join(items) else bytes.decode, items))
    return texts


class TagIndex:
    """Finds the corpus index of a tag; of several sequences with one tag the last one.

    The first lookups compare with all tags. Then an index is built: a sorted array of 64 bit
    hashes, which takes 16 bytes per sequence, and no Python objects.

    Args:
        arrays: tags per file, as `tag_array` gives them or fixed-length arrays of a file.
    """

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self._tags = [_cut_at_nul(array) for array in arrays]
        self._start = np.cumsum([0, *map(len, arrays)]).tolist()
        self._num_scans = 0
        self._hashes: memoryview | None = None

    def find(self, tag: str) -> int:
        """The corpus index of a tag.

        Raises:
            MissingSequenceError: if there is none.
        """
        wanted = tag.encode("utf-8", "surrogatepass")
        if self._hashes is None and self._num_scans < _MAX_SCANS:
            self._num_scans += 1
            found = self._scan(wanted)
        else:
            self._build()
            found = self._look_up(wanted, self._hash_one(wanted))
        if found < 0:
            raise MissingSequenceError("there is no sequence with this tag", entry=tag)
        return found

    def find_many(self, tags: Sequence[str]) -> np.ndarray:
        """The corpus indices of tags, int64.

        Raises:
            MissingSequenceError: if there is none for one of the tags.
        """
        self._build()
        wanted = [tag.encode("utf-8", "surrogatepass") for tag in tags]
        fitting = np.array([tag if len(tag) <= self._width else b"" for tag in wanted], "S")
        query = self._hash(fitting)
        found = np.full(len(wanted), -1, np.int64)
        if len(self._order):
            position = np.searchsorted(self._hashes, query, side="right") - 1
            found = np.where(position >= 0, self._order[position], -1)
        for i in np.flatnonzero(~self._is_at(fitting, found)).tolist():
            found[i] = self._look_up(wanted[i], int(query[i]))
            if found[i] < 0:
                raise MissingSequenceError("there is no sequence with this tag", entry=tags[i])
        return found

    def _scan(self, wanted: bytes) -> int:
        for file in range(len(self._tags) - 1, -1, -1):
            here = np.flatnonzero(self._tags[file] == wanted)
            if len(here):
                return self._start[file] + int(here[-1])
        return -1

    def _build(self) -> None:
        if self._hashes is not None:
            return
        widths = [array.itemsize for array in self._tags if array.dtype.kind == "S"]
        self._width = -(-max(widths, default=1) // 8) * 8
        self._long: dict[bytes, int] = {}
        hashed = np.zeros(self._start[-1], np.uint64)
        for array, start in zip(self._tags, self._start, strict=False):
            end = start + len(array)
            if array.dtype.kind == "S":
                hashed[start:end] = self._hash(array)
            else:
                self._long.update(zip(array.tolist(), range(start, end), strict=True))
        order = np.argsort(hashed)
        hashes = hashed[order]
        if (hashes[1:] == hashes[:-1]).any():
            order = np.argsort(hashed, kind="stable")
        self._order = order
        self._hashes = memoryview(hashes)

    def _is_at(self, wanted: np.ndarray, found: np.ndarray) -> np.ndarray:
        """Whether the tags at corpus indices `found` are the wanted ones."""
        same = np.zeros(len(found), bool)
        file_of = np.searchsorted(self._start, found, side="right") - 1
        for file in np.unique(file_of[found >= 0]).tolist():
            here = np.flatnonzero(file_of == file)
            if self._tags[file].dtype.kind == "S":
                tags = self._tags[file][found[here] - self._start[file]]
                same[here] = (tags == wanted[here]) & (tags != b"")
        return same

    def _look_up(self, tag: bytes, query: int) -> int:
        """The last sequence with a tag, past others with the same hash; -1 if there is none."""
        best = self._long.get(tag, -1)
        end = bisect_right(self._hashes, query)
        first = end - 1
        while first >= 0 and self._hashes[first] == query:
            index = int(self._order[first])
            file = bisect_right(self._start, index) - 1
            if self._tags[file][index - self._start[file]] == tag:
                best = max(best, index)
            first -= 1
        return best

    def _hash(self, tags: np.ndarray) -> np.ndarray:
        """A 64 bit hash per tag, the same whatever the length of the array's items."""
        words = np.ascontiguousarray(tags, f"S{self._width}").view("<u8")
        hashes = np.full(len(tags), _SEED, np.uint64)
        for column in words.reshape(len(tags), self._width // 8).T:
            hashes = (hashes ^ column) * np.uint64(_FACTOR)
            hashes ^= hashes >> np.uint64(31)
        return hashes

    def _hash_one(self, tag: bytes) -> int:
        """The same for one tag."""
        padded = tag[: self._width].ljust(self._width, b"\0")
        hashed = _SEED
        for first in range(0, self._width, 8):
            word = int.from_bytes(padded[first : first + 8], "little")
            hashed = ((hashed ^ word) * _FACTOR) & _MASK
            hashed ^= hashed >> 31
        return hashed


def _cut_at_nul(tags: np.ndarray) -> np.ndarray:
    """The array itself, or one whose tags end at the first NUL if any go on behind it."""
    if tags.dtype.kind != "S" or not tags.nbytes:
        return tags
    zero = np.ascontiguousarray(tags).view(np.uint8).reshape(len(tags), tags.itemsize) == 0
    return tag_array(tags.tolist()) if (zero[:, :-1] > zero[:, 1:]).any() else tags
