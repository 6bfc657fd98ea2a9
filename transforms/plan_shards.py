"""Stage 3: which sequence goes to which shard.

No worker sees all sequences. Byte histograms over bins of sort keys are summed; the bins in which
a shard must begin are looked at sequence by sequence; the result is one small list of first keys,
by which every sequence finds its shard on its own. All sums are of integers, so nothing depends on
the order of arrival.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa

from ..io.columns import column, take
from ..io.errors import DuplicateSequenceError, MissingSequenceError, PlanError
from ..io.receipts import Rejection
from .order import SeqOrdering
from .stage import Stage

MAX_SHARDS = 99_999
KeyedCutRows = beam.typehints.Tuple[int, np.ndarray]


@dataclass(frozen=True)
class Histogram:
    """Payload bytes and sequences per bin.

    Attributes:
        bins: uint64, ascending, without repeats.
        num_bytes, num_seqs: int64, per bin.
    """

    bins: np.ndarray
    num_bytes: np.ndarray
    num_seqs: np.ndarray


@dataclass(frozen=True)
class BinPlan:
    """Where the shards begin, known to the bin.

    Attributes:
        cuts: int64 [num_shards - 1], twice the number of payload bytes before each cut.
        cut_bins: uint64 [num_shards - 1], the bin that each cut falls into.
        bytes_before, seqs_before: int64, sums over all earlier bins, for each cut.
        next_bin: uint64, for each cut the first bin behind `cut_bins`; equal to it at the end.
        num_seqs, num_bytes: totals.
    """

    cuts: np.ndarray
    cut_bins: np.ndarray
    bytes_before: np.ndarray
    seqs_before: np.ndarray
    next_bin: np.ndarray
    num_seqs: int
    num_bytes: int


@dataclass(frozen=True)
class ShardPlan:
    """The first sort key of every shard but the first, and how many sequences each will hold.

    Attributes:
        primary, tie: uint64 [num_shards - 1], ascending.
        num_seqs: int64 [num_shards].
        num_bytes: payload of the whole dataset.
    """

    primary: np.ndarray
    tie: np.ndarray
    num_seqs: np.ndarray
    num_bytes: int

    @property
    def num_shards(self) -> int:
        """How many shards there will be."""
        return len(self.num_seqs)


def count_bins(rows: pa.RecordBatch, ordering: SeqOrdering) -> Histogram:
    """The histogram of some joined rows."""
    bins = column(rows, "primary") >> np.uint64(ordering.bin_shift)
    ones = np.ones(len(bins), np.int64)
    return _sum_by_bin(bins, column(rows, "payload"), ones)


def merge_histograms(histograms: Iterable[Histogram]) -> Histogram:
    """The sum of histograms."""
    parts = list(histograms)
    return _sum_by_bin(
        np.concatenate([part.bins for part in parts]),
        np.concatenate([part.num_bytes for part in parts]),
        np.concatenate([part.num_seqs for part in parts]),
    )


def _sum_by_bin(bins: np.ndarray, num_bytes: np.ndarray, num_seqs: np.ndarray) -> Histogram:
    unique, inverse = np.unique(bins, return_inverse=True)
    sums = np.zeros((2, len(unique)), np.int64)
    np.add.at(sums[0], inverse, num_bytes)
    np.add.at(sums[1], inverse, num_seqs)
    return Histogram(unique, sums[0], sums[1])


def plan_bins(histogram: Histogram, num_shards: int | None, shard_bytes: int) -> BinPlan:
    """Finds the bins in which shards begin.

    Args:
        histogram: of all sequences.
        num_shards: how many shards to make at most; None derives it from `shard_bytes`.
        shard_bytes: payload bytes that a shard should have.

    Raises:
        PlanError: if there is no sequence, or there would be too many shards.
    """
    total, num_seqs = int(histogram.num_bytes.sum()), int(histogram.num_seqs.sum())
    if not num_seqs:
        raise PlanError(
            "no sequence is left to write", hint="Check the filters in [sequences] and the files."
        )
    wanted = num_shards if num_shards is not None else max(1, -(-total // shard_bytes))
    if wanted > MAX_SHARDS:
        raise PlanError(
            "too many shards", expected=f"at most {MAX_SHARDS}", found=str(wanted),
            hint="Set a larger --shard_size.",
        )  # fmt: skip
    wanted = min(wanted, num_seqs)
    bytes_before = np.cumsum(histogram.num_bytes) - histogram.num_bytes
    seqs_before = np.cumsum(histogram.num_seqs) - histogram.num_seqs
    cuts = np.array([2 * total * i // wanted for i in range(1, wanted)], np.int64)
    # Sequences of later bins have their middle at or behind the cut, those of earlier ones before.
    where = np.maximum(np.searchsorted(2 * bytes_before, cuts, side="left") - 1, 0)
    behind = np.minimum(where + 1, len(histogram.bins) - 1)
    return BinPlan(
        cuts,
        histogram.bins[where],
        bytes_before[where],
        seqs_before[where],
        histogram.bins[behind],
        num_seqs,
        total,
    )


def select_cut_rows(rows: pa.RecordBatch, bins: BinPlan, ordering: SeqOrdering) -> np.ndarray:
    """Keys and bytes of the rows that lie in bins with a cut: uint64 [3, rows]."""
    primary = column(rows, "primary")
    chosen = np.isin(primary >> np.uint64(ordering.bin_shift), bins.cut_bins)
    payload = column(rows, "payload").astype(np.uint64)
    return np.stack([primary[chosen], column(rows, "tie")[chosen], payload[chosen]])


def plan_shards(bins: BinPlan, cut_rows: Iterable[np.ndarray], ordering: SeqOrdering) -> ShardPlan:
    """Cuts exactly: a shard begins at the first sequence whose middle is behind the ideal cut.

    Shards that would stay empty, because one sequence is larger than a shard or because there are
    fewer sequences than shards, are left out.
    """
    primary, tie, payload = np.concatenate(list(cut_rows), axis=1)
    order = np.lexsort((tie, primary))
    primary, tie, payload = primary[order], tie[order], payload[order].astype(np.int64)
    row_bin = primary >> np.uint64(ordering.bin_shift)
    rank, first_primary, first_tie = [], [], []
    for i, cut in enumerate(bins.cuts.tolist()):
        begin, end = (
            np.searchsorted(row_bin, bins.cut_bins[i], "left"),
            np.searchsorted(row_bin, bins.cut_bins[i], "right"),
        )
        inside = payload[begin:end]
        middle = 2 * (int(bins.bytes_before[i]) + np.cumsum(inside)) - inside
        offset = int(np.searchsorted(middle, cut, "left"))
        rank.append(int(bins.seqs_before[i]) + offset)
        if offset < len(inside):
            first_primary.append(primary[begin + offset])
            first_tie.append(tie[begin + offset])
        else:
            first_primary.append(bins.next_bin[i] << np.uint64(ordering.bin_shift))
            first_tie.append(np.uint64(0))
    ranks, first = np.unique(np.array(rank, np.int64), return_index=True)
    used = first[(ranks > 0) & (ranks < bins.num_seqs)]
    starts = np.array([0, *(rank[i] for i in used), bins.num_seqs], np.int64)
    return ShardPlan(
        np.array([first_primary[i] for i in used], np.uint64),
        np.array([first_tie[i] for i in used], np.uint64),
        np.diff(starts),
        bins.num_bytes,
    )


def assign_shards(rows: pa.RecordBatch, plan: ShardPlan) -> np.ndarray:
    """The shard of every row, int64."""
    primary, tie = column(rows, "primary"), column(rows, "tie")
    low = np.searchsorted(plan.primary, primary, "left")
    shard = np.searchsorted(plan.primary, primary, "right").astype(np.int64)
    for first in np.unique(low[low < shard]):
        same = np.flatnonzero((low == first) & (low < shard))
        last = int(shard[same[0]])
        shard[same] = first + np.searchsorted(plan.tie[first:last], tie[same], "right")
    return shard


def sort_rows(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Rows in the order of their keys."""
    return take(rows, np.lexsort((column(rows, "tie"), column(rows, "primary"))))


def check_problems(problems: Iterable[Iterable[Rejection]], on_missing: str) -> None:
    """Raises if a tag is missing or doubled and that is not to be tolerated.

    Raises:
        MissingSequenceError, DuplicateSequenceError: naming the first such tag.
    """
    found = sorted((r for part in problems for r in part), key=Rejection.sort_key)
    if not found or on_missing == "drop":
        return
    first = found[0]
    missing = first.reason.startswith("missing")
    kind = MissingSequenceError if missing else DuplicateSequenceError
    raise kind(
        f"sequence {first.tag!r} of stream {first.stream!r}: {first.reason}"
        + (f"; and {len(found) - 1} more such sequences" if len(found) > 1 else ""),
        hint='Mend the sources, or set on_missing = "drop" in [sequences] to leave such '
        "sequences out; they are then listed in rejected.jsonl.",
    )


class PlanShards(beam.PTransform):
    """Joined `Rows` to one `ShardPlan`.

    Args:
        ordering: the order.
        num_shards, shard_bytes: see `plan_bins`.
        on_missing: see `check_problems`.
        problems: tuples of `Rejection`, or None.
    """

    def __init__(
        self,
        ordering: SeqOrdering,
        num_shards: int | None,
        shard_bytes: int,
        on_missing: str,
        problems: beam.PCollection,
    ) -> None:
        super().__init__()
        self._ordering = ordering
        self._num_shards = num_shards
        self._shard_bytes = shard_bytes
        self._on_missing = on_missing
        self._problems = problems

    def expand(self, rows: beam.PCollection) -> beam.PCollection:
        ordering, num_shards, shard_bytes = self._ordering, self._num_shards, self._shard_bytes
        on_missing = self._on_missing

        def cut_bins(element: tuple[int, Iterable[Histogram]], problems: Any) -> Iterator[BinPlan]:
            check_problems(problems, on_missing)
            yield plan_bins(merge_histograms(element[1]), num_shards, shard_bytes)

        def cut_rows(
            element: tuple[int, Iterable[np.ndarray]], bins: BinPlan
        ) -> Iterator[ShardPlan]:
            yield plan_shards(bins, element[1], ordering)

        bins = (
            rows
            | "CountBins" >> beam.Map(lambda rows: (0, count_bins(rows.batch, ordering)))
            | "GatherBins" >> beam.GroupByKey()
            | "PlanBins" >> beam.ParDo(Stage(cut_bins), beam.pvalue.AsIter(self._problems))
        )
        return (
            rows
            | "SelectCutRows"
            >> beam.Map(
                lambda rows, bins: (0, select_cut_rows(rows.batch, bins, ordering)),
                beam.pvalue.AsSingleton(bins),
            ).with_output_types(KeyedCutRows)
            | "GatherCutRows" >> beam.GroupByKey()
            | "CutShards" >> beam.ParDo(Stage(cut_rows), beam.pvalue.AsSingleton(bins))
        )
