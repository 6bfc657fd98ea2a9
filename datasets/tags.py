"""Sequence tags as arrays of bytes, and a lookup of sequences by tag."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..io.errors import MissingSequenceError

# An array of fixed-length tags may be so many times larger than the tags themselves.
_MAX_PADDING = 16


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
    items = tags.tolist()
    texts = b"\0".join(items).decode("utf-8").split("\0") if items else []
    return texts if len(texts) == len(items) else [decode_tag(item) for item in items]


class TagIndex:
    """Finds the corpus index of a tag; of several sequences with one tag the last one.

    Holds a sorted array of 64 bit hashes: 16 bytes per sequence, and no Python objects.

    Args:
        arrays: tags per file, as `tag_array` gives them or fixed-length arrays of a file.
    """

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self._tags = [_without_nul(array) for array in arrays]
        self._start = np.cumsum([0, *map(len, self._tags)])
        widths = [array.itemsize for array in self._tags if array.dtype.kind == "S"]
        self._width = -(-max(widths, default=1) // 8) * 8
        self._long: dict[bytes, int] = {}
        hashes = [np.zeros(0, np.uint64)]
        for array, start in zip(self._tags, self._start.tolist(), strict=False):
            if array.dtype.kind == "S":
                hashes.append(self._hash(array))
            else:
                hashes.append(np.zeros(len(array), np.uint64))
                self._long.update(
                    zip(array.tolist(), range(start, start + len(array)), strict=True)
                )
        hashed = np.concatenate(hashes)
        self._order = np.argsort(hashed)
        self._hashes = hashed[self._order]
        if (self._hashes[1:] == self._hashes[:-1]).any():
            self._order = np.argsort(hashed, kind="stable")

    def find(self, tag: str) -> int:
        """The corpus index of a tag.

        Raises:
            MissingSequenceError: if there is none.
        """
        return int(self.find_many([tag])[0])

    def find_many(self, tags: Sequence[str]) -> np.ndarray:
        """The corpus indices of tags, int64.

        Raises:
            MissingSequenceError: if there is none for one of the tags.
        """
        wanted = [tag.encode("utf-8", "surrogatepass") for tag in tags]
        fitting = np.array([tag if len(tag) <= self._width else b"" for tag in wanted], "S")
        query = self._hash(fitting)
        position = np.searchsorted(self._hashes, query, side="right") - 1
        found = np.full(len(wanted), -1, np.int64)
        if len(self._hashes):
            found = np.where(position >= 0, self._order[position], -1).astype(np.int64)
        for i in np.flatnonzero(~self._is_at(fitting, found)).tolist():
            found[i] = self._find_slowly(wanted[i], query[i])
        for i in np.flatnonzero(found < 0)[:1].tolist():
            raise MissingSequenceError("there is no sequence with this tag", entry=tags[i])
        return found

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

    def _find_slowly(self, tag: bytes, query: np.uint64) -> int:
        """The last sequence with a tag, past others with the same hash; -1 if there is none."""
        best = self._long.get(tag, -1)
        first, end = (np.searchsorted(self._hashes, query, side=side) for side in ("left", "right"))
        for index in self._order[first:end].tolist():
            file = int(np.searchsorted(self._start, index, side="right")) - 1
            if self._tags[file][index - self._start[file]] == tag:
                best = max(best, index)
        return best

    def _hash(self, tags: np.ndarray) -> np.ndarray:
        """A 64 bit hash per tag, the same whatever the length of the array's items."""
        words = np.ascontiguousarray(tags, f"S{self._width}").view("<u8")
        words = words.reshape(len(tags), self._width // 8)
        hashes = np.full(len(tags), 0x9E3779B97F4A7C15, np.uint64)
        for column in words.T:
            hashes = (hashes ^ column) * np.uint64(0xBF58476D1CE4E5B9)
            hashes ^= hashes >> np.uint64(31)
        return hashes


def _without_nul(tags: np.ndarray) -> np.ndarray:
    """The array itself, or one whose tags are cut at the first NUL if any goes on behind it."""
    if tags.dtype.kind != "S" or tags.itemsize == 0 or not len(tags):
        return tags
    zero = np.ascontiguousarray(tags).view(np.uint8).reshape(len(tags), tags.itemsize) == 0
    if (zero[:, :-1] > zero[:, 1:]).any():
        return tag_array(tags.tolist())
    return tags
