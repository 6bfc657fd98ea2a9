"""Stage 5: when every shard has come back, the index and last of all the manifest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import apache_beam as beam

from ..io.dataset_folder import DatasetPlan, complete_dataset, prepare_output
from ..io.manifest import Manifest
from ..io.receipts import Rejection, Staging
from .order import SeqOrdering
from .plan_shards import ShardPlan
from .stage import Stage
from .survey_sources import Survey


def dataset_plan(survey: Survey, plan: ShardPlan, ordering: SeqOrdering) -> DatasetPlan:
    """What the output folder must know of survey and plan."""
    return DatasetPlan(
        survey.streams,
        survey.sources,
        str(ordering),
        tuple(plan.num_seqs.tolist()),
        plan.num_bytes,
    )


class PrepareOutput(beam.PTransform):
    """Lets the `ShardPlan` through once the output folder is ready for it."""

    def __init__(
        self, output: str, ordering: SeqOrdering, overwrite: bool, survey: beam.PCollection
    ) -> None:
        super().__init__()
        self._output = output
        self._ordering = ordering
        self._overwrite = overwrite
        self._survey = survey

    def expand(self, plans: beam.PCollection) -> beam.PCollection:
        output, ordering, overwrite = self._output, self._ordering, self._overwrite

        def prepare(plan: ShardPlan, survey: Survey) -> Iterator[ShardPlan]:
            staging = Staging(output, survey.plan, survey.stamp)
            prepare_output(staging, dataset_plan(survey, plan, ordering), overwrite)
            yield plan

        return (
            plans
            | "Prepare" >> beam.ParDo(Stage(prepare), beam.pvalue.AsSingleton(self._survey))
            # A retry must not prepare again once a shard was written.
            | "Checkpoint" >> beam.Reshuffle()
        )


class WriteManifest(beam.PTransform):
    """Numbers of finished shards to one `Manifest`, which then stands in the output folder."""

    def __init__(
        self,
        output: str,
        ordering: SeqOrdering,
        provenance: dict[str, Any],
        survey: beam.PCollection,
        plan: beam.PCollection,
        rejected: beam.PCollection,
    ) -> None:
        super().__init__()
        self._output = output
        self._ordering = ordering
        self._provenance = provenance
        self._survey = survey
        self._plan = plan
        self._rejected = rejected

    def expand(self, shards: beam.PCollection) -> beam.PCollection:
        output, ordering, provenance = self._output, self._ordering, self._provenance

        def write(
            element: tuple[int, Iterable[int]],
            survey: Survey,
            plan: ShardPlan,
            rejected: Iterable[tuple[Rejection, ...]],
        ) -> Iterator[Manifest]:
            lists = [survey.rejected, *rejected]
            yield complete_dataset(
                Staging(output, survey.plan, survey.stamp),
                dataset_plan(survey, plan, ordering),
                element[1],
                [rejection for part in lists for rejection in part],
                provenance,
            )

        return (
            shards
            | "ToOne" >> beam.Map(lambda shard: (0, shard))
            | "Gather" >> beam.GroupByKey()
            | "Commit"
            >> beam.ParDo(
                Stage(write),
                beam.pvalue.AsSingleton(self._survey),
                beam.pvalue.AsSingleton(self._plan),
                beam.pvalue.AsIter(self._rejected),
            )
        )
