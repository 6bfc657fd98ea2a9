"""Stage 4: one task per shard, which reads its own byte ranges and writes one file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import apache_beam as beam

from ..io.columns import concat
from ..io.config import Corpus
from ..io.receipts import Staging
from ..io.shards import ShardJob, write_shard
from .plan_shards import ShardPlan, sort_rows
from .rows import Rows
from .stage import Stage
from .survey_sources import Survey


class WriteShards(beam.PTransform):
    """`(shard, Rows)` to the numbers of the finished shards.

    Args:
        corpus: the configuration.
        output: folder of the dataset.
        skip_damaged: whether sequences that do not decode are rejected instead of fatal.
        survey, plan: singletons of `Survey` and `ShardPlan`.
    """

    def __init__(
        self,
        corpus: Corpus,
        output: str,
        skip_damaged: bool,
        survey: beam.PCollection,
        plan: beam.PCollection,
    ) -> None:
        super().__init__()
        self._corpus = corpus
        self._output = output
        self._skip_damaged = skip_damaged
        self._survey = survey
        self._plan = plan

    def expand(self, rows: beam.PCollection) -> beam.PCollection:
        corpus, output, skip_damaged = self._corpus, self._output, self._skip_damaged

        def write(
            element: tuple[int, Iterable[Rows]], survey: Survey, plan: ShardPlan
        ) -> Iterator[int]:
            shard, parts = element
            job = ShardJob(
                corpus.sources,
                survey.streams,
                Staging(output, survey.plan, survey.stamp),
                plan.num_shards,
                skip_damaged,
            )
            receipt = write_shard(job, shard, sort_rows(concat([part.batch for part in parts])))
            counter = beam.metrics.Metrics.counter
            counter("seqshard", "bytes-written").inc(receipt.info.num_bytes)
            counter("seqshard", "shards-written").inc()
            yield shard

        return (
            rows
            | "ByShard" >> beam.GroupByKey()
            | "Write"
            >> beam.ParDo(
                Stage(write),
                beam.pvalue.AsSingleton(self._survey),
                beam.pvalue.AsSingleton(self._plan),
            ).with_output_types(int)
        )
