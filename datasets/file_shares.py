"""The sequences of a sub-epoch whose files are shared out over ranks.

The sequences have numbers: those in the files of the first rank come first, each in the order of
the sub dataset that reads them. So what is left of a sub-epoch can be shared out anew, over any
number of ranks, without a list of all sequences of the corpus.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate, pairwise

import numpy as np
import xxhash

from .basic import Dataset
from .resume import Coverage, Shares, coverage_of


class SubEpoch:
    """The sub datasets of all ranks in one sub-epoch, opened when they are first needed.

    Args:
        num_ranks: over which the files are shared out.
        open_part: opens the files of a rank and starts an epoch.
    """

    def __init__(self, num_ranks: int, open_part: Callable[[int], Dataset]) -> None:
        self._num_ranks = num_ranks
        self._open_part = open_part
        self._opened: dict[tuple[int, int], Dataset] = {}
        self._bounds: np.ndarray | None = None

    def dataset(self, rank: int, repetition: int = 0) -> Dataset:
        """The sub dataset of a rank; each repetition of its sequences has one of its own."""
        found = self._opened.get((rank, repetition))
        if found is None:
            found = self._opened[rank, repetition] = self._open_part(rank)
        return found

    def shares(self) -> Shares:
        """The numbers of the sequences in the files of every rank. Opens all of them."""
        bounds = self._get_bounds().tolist()
        return [np.arange(a, b) for a, b in pairwise(bounds)]

    def locate(self, number: int, repetition: int = 0) -> tuple[Dataset, int]:
        """The sub dataset of a sequence, and its index in the order of that."""
        bounds = self._get_bounds()
        rank = int(np.searchsorted(bounds, number, side="right")) - 1
        return self.dataset(rank, repetition), int(number - bounds[rank])

    def coverage(self, numbers: Iterable[int]) -> Coverage:
        """The coverage of the tags of sequences."""
        return coverage_of_tags(dataset.get_tag(i) for dataset, i in map(self.locate, numbers))

    def close(self) -> None:
        """Closes all sub datasets."""
        for dataset in self._opened.values():
            dataset.finish_epoch(free_resources=True)
        self._opened.clear()

    def _get_bounds(self) -> np.ndarray:
        if self._bounds is None:
            counts = (self.dataset(rank).num_seqs for rank in range(self._num_ranks))
            self._bounds = np.array([0, *accumulate(counts)], np.int64)
        return self._bounds


def coverage_of_tags(tags: Iterable[str]) -> Coverage:
    """The coverage of sequences that are known by their tags alone."""
    hashes = [xxhash.xxh3_64_intdigest(tag.encode("utf-8", "surrogatepass")) for tag in tags]
    return coverage_of(np.array(hashes, np.uint64).view(np.int64))
