"""Stage 4: one task per shard, which reads its own byte ranges and writes one file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import apache_beam as beam
import pyarrow as pa

from ..io.columns import column, concat
from ..io.config import Corpus
from ..io.records import Layout
from ..io.shards import ShardJob, finished_shard, write_shard
from .index_sources import split_by
from .metrics import count, count_rejected, record, timed
from .plan_shards import assign_shards, sort_rows
from .prepare_output import BuildPlan
from .rows import KeyedRows, Rows
from .stage import Stage


def write_and_count(job: ShardJob, shard: int, rows: pa.RecordBatch) -> None:
    """Writes one shard, and counts what it took."""
    with timed("shard-milliseconds"):
        receipt = write_shard(job, shard, rows)
    count("shards-written")
    count("bytes-read", sum(int(column(rows, f"num_bytes.{s}").sum()) for s in job.streams))
    count("bytes-written", receipt.info.file_bytes)
    record("shard-bytes", receipt.info.file_bytes)
    count_rejected(receipt.rejected)


class WriteShards(beam.PTransform):
    """Joined `Rows` to the numbers of the finished shards.

    Args:
        corpus: the configuration.
        output: folder of the dataset.
        layout: what shards are like.
        skip_damaged: whether sequences that do not decode are rejected instead of fatal.
        plan: singleton of `BuildPlan`.
    """

    def __init__(
        self,
        corpus: Corpus,
        output: str,
        layout: Layout,
        skip_damaged: bool,
        plan: beam.PCollection,
    ) -> None:
        super().__init__()
        self._corpus = corpus
        self._output = output
        self._layout = layout
        self._skip_damaged = skip_damaged
        self._plan = beam.pvalue.AsSingleton(plan)

    def expand(self, rows: beam.PCollection) -> beam.PCollection:
        corpus, output, skip_damaged = self._corpus, self._output, self._skip_damaged
        layout = self._layout

        def assign(rows: Rows, plan: BuildPlan) -> Iterator[tuple[int, Rows]]:
            for shard, part in split_by(rows.batch, assign_shards(rows.batch, plan.shards)):
                yield shard, Rows(part)

        def write(element: tuple[int, Iterable[Rows]], plan: BuildPlan) -> Iterator[int]:
            shard, parts = element
            job = ShardJob(
                corpus.sources,
                plan.survey.streams,
                plan.staging(output),
                plan.shards.num_shards,
                skip_damaged,
                layout,
                {i: source.num_bytes for i, source in enumerate(plan.survey.sources)},
            )
            if finished_shard(job, shard) is not None:
                count("shards-kept")
            else:
                write_and_count(job, shard, sort_rows(concat([part.batch for part in parts])))
            yield shard

        return (
            rows
            | "AssignShards" >> beam.ParDo(Stage(assign), self._plan).with_output_types(KeyedRows)
            | "ByShard" >> beam.GroupByKey()
            | "Write" >> beam.ParDo(Stage(write), self._plan).with_output_types(int)
        )
