"""Stage 4: one task per shard, which reads its own byte ranges and writes one file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import apache_beam as beam

from ..io.columns import concat
from ..io.config import Corpus
from ..io.records import Layout
from ..io.shards import ShardJob, write_shard
from .index_sources import split_by
from .plan_shards import assign_shards, sort_rows
from .prepare_output import BuildPlan
from .rows import KeyedRows, Rows
from .stage import Stage


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
            )
            receipt = write_shard(job, shard, sort_rows(concat([part.batch for part in parts])))
            counter = beam.metrics.Metrics.counter
            counter("seqshard", "bytes-written").inc(receipt.info.num_bytes)
            counter("seqshard", "shards-written").inc()
            yield shard

        return (
            rows
            | "AssignShards" >> beam.ParDo(Stage(assign), self._plan).with_output_types(KeyedRows)
            | "ByShard" >> beam.GroupByKey()
            | "Write" >> beam.ParDo(Stage(write), self._plan).with_output_types(int)
        )
