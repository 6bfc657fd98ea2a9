"""Between planning and writing: the output folder is made ready, once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import apache_beam as beam

from ..io.dataset_folder import DatasetPlan, prepare_output
from ..io.receipts import Staging
from ..io.records import Layout
from .order import SeqOrdering
from .plan_shards import ShardPlan
from .stage import Stage
from .survey_sources import Survey


@dataclass(frozen=True)
class BuildPlan:
    """Everything that is decided before the first shard is written."""

    survey: Survey
    shards: ShardPlan

    def staging(self, output: str) -> Staging:
        """Where the receipts of this build are."""
        return Staging(output, self.survey.plan, self.survey.stamp)

    def dataset(self, ordering: SeqOrdering, layout: Layout) -> DatasetPlan:
        """What the output folder must know."""
        return DatasetPlan(
            self.survey.streams,
            self.survey.sources,
            str(ordering),
            tuple(self.shards.num_seqs.tolist()),
            self.shards.num_bytes,
            layout,
        )


class PrepareOutput(beam.PTransform):
    """One `ShardPlan` to one `BuildPlan`, once the output folder is ready for it."""

    def __init__(
        self,
        output: str,
        ordering: SeqOrdering,
        layout: Layout,
        overwrite: bool,
        survey: beam.PCollection,
    ) -> None:
        super().__init__()
        self._output = output
        self._ordering = ordering
        self._layout = layout
        self._overwrite = overwrite
        self._survey = survey

    def expand(self, plans: beam.PCollection) -> beam.PCollection:
        output, ordering, overwrite = self._output, self._ordering, self._overwrite
        layout = self._layout

        def prepare(shards: ShardPlan, survey: Survey) -> Iterator[BuildPlan]:
            plan = BuildPlan(survey, shards)
            prepare_output(plan.staging(output), plan.dataset(ordering, layout), overwrite)
            yield plan

        return plans | "Prepare" >> beam.ParDo(
            Stage(prepare), beam.pvalue.AsSingleton(self._survey)
        )
