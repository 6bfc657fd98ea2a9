"""Stage 5: when every shard has come back, the index and last of all the manifest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import apache_beam as beam

from ..io.dataset_folder import complete_dataset
from ..io.manifest import Manifest
from ..io.receipts import Rejection
from ..io.records import Layout
from .order import SeqOrdering
from .prepare_output import BuildPlan
from .stage import Stage


class WriteManifest(beam.PTransform):
    """Numbers of finished shards to one `Manifest`, which then stands in the output folder."""

    def __init__(
        self,
        output: str,
        ordering: SeqOrdering,
        layout: Layout,
        provenance: dict[str, Any],
        plan: beam.PCollection,
        rejected: beam.PCollection,
    ) -> None:
        super().__init__()
        self._output = output
        self._ordering = ordering
        self._layout = layout
        self._provenance = provenance
        self._plan = plan
        self._rejected = rejected

    def expand(self, shards: beam.PCollection) -> beam.PCollection:
        output, ordering, provenance = self._output, self._ordering, self._provenance
        layout = self._layout

        def write(
            element: tuple[int, Iterable[int]],
            plan: BuildPlan,
            rejected: Iterable[tuple[Rejection, ...]],
        ) -> Iterator[Manifest]:
            lists = [plan.survey.rejected, *rejected]
            yield complete_dataset(
                plan.staging(output),
                plan.dataset(ordering, layout),
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
                beam.pvalue.AsSingleton(self._plan),
                beam.pvalue.AsIter(self._rejected),
            )
        )
