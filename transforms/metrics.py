"""Counters and distributions of a build, the same on every runner.

Counters: sources-indexed, sequences-indexed, sequences-spooled, sequences-joined,
sequences-rejected and sequences-rejected-KIND (see `rejection_kind`), shards-written, shards-kept,
bytes-read (payload in the sources), bytes-written (files of shards).
Distributions: source-milliseconds (indexing one file), shard-milliseconds (writing one shard),
shard-bytes (its file).
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterable, Iterator

from apache_beam.metrics import Metrics

from ..io.receipts import Rejection, rejection_kind

NAMESPACE = "seqshard"


def count(name: str, number: int = 1) -> None:
    """Adds to a counter."""
    Metrics.counter(NAMESPACE, name).inc(number)


def record(name: str, value: int) -> None:
    """Adds a value to a distribution."""
    Metrics.distribution(NAMESPACE, name).update(value)


def count_rejected(rejections: Iterable[Rejection]) -> None:
    """Counts rejected sequences, in all and by kind."""
    for kind, number in Counter(rejection_kind(r) for r in rejections).items():
        count("sequences-rejected", number)
        count(f"sequences-rejected-{kind}", number)


@contextlib.contextmanager
def timed(name: str) -> Iterator[None]:
    """Adds the duration of the block, in milliseconds, to a distribution; not if it fails."""
    start = time.monotonic()
    yield
    record(name, int((time.monotonic() - start) * 1000))
