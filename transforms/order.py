"""The orders in which a dataset can be written, as sort keys.

Every sequence has a pair of uint64: `primary` decides, `tie` (its place in the sources) is unique.
Keys are computed per sequence, so that no worker needs to see all sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from ..io.errors import ConfigError

ORDERS = ("default", "reverse", "random", "sorted", "sorted_reverse")
_ROW_BITS = 40
_FRACTION_BITS = 6
_MAX_SEED = 2**64 - 1


@dataclass(frozen=True, slots=True)
class SeqOrdering:
    """A parsed `--seq_ordering`.

    Attributes:
        kind: one of ORDERS.
        seed: of "random".
    """

    kind: str
    seed: int = 1

    def __str__(self) -> str:
        return f"random:{self.seed}" if self.kind == "random" else self.kind

    @property
    def bin_shift(self) -> int:
        """Sequences whose `primary >> bin_shift` is equal are planned together."""
        return {"default": 8, "reverse": 8, "random": 48}.get(self.kind, 0)


def parse_ordering(text: str) -> SeqOrdering:
    """Parses an order, for example "random:3".

    Raises:
        ConfigError: if it is none.
    """
    kind, colon, seed = text.partition(":")
    valid = kind == "random" and seed.isdecimal() and int(seed) <= _MAX_SEED
    if kind not in ORDERS or (colon and not valid):
        raise ConfigError(
            "unknown order of sequences",
            entry="--seq_ordering",
            expected="default, reverse, random, random:SEED, sorted or sorted_reverse",
            found=text,
        )
    return SeqOrdering(kind, int(seed) if colon else 1)


def sort_keys(
    ordering: SeqOrdering,
    num_sources: int,
    tags: Sequence[bytes],
    source: np.ndarray,
    row: np.ndarray,
    length: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Sort keys of sequences.

    Args:
        ordering: the order.
        num_sources: number of all source files.
        tags: UTF-8 tags.
        source, row: ordinal of the source and row in it, of the first stream.
        length: frames of the first stream.

    Returns:
        (primary, tie), both uint64. "sorted" and "sorted_reverse" keep the default order among
        sequences of equal length.
    """
    tie = (source.astype(np.uint64) << np.uint64(_ROW_BITS)) | row.astype(np.uint64)
    if ordering.kind == "default":
        return tie, tie
    if ordering.kind == "reverse":
        return ~tie, ~tie
    if ordering.kind == "random":
        digest, seed = xxhash.xxh3_64_intdigest, ordering.seed
        return np.fromiter((digest(tag, seed) for tag in tags), np.uint64, len(tags)), tie
    # Sequences of one length may be many: the source's place splits them into finer bins.
    longest = np.uint64((1 << 40) - 1)
    frames = length.astype(np.uint64)
    rank = longest - frames if ordering.kind == "sorted_reverse" else frames
    place = (source.astype(np.uint64) << np.uint64(_FRACTION_BITS)) // np.uint64(num_sources)
    return (rank << np.uint64(_FRACTION_BITS)) | place, tie
