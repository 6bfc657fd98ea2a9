"""Before stage 1, where a corpus comes from RASR processes: their sequences, written to files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import apache_beam as beam

from ..io.config import SourceFile
from ..io.sprint.spool import spool_partition
from ..io.trainers import Trainer
from .metrics import count
from .stage import Stage

PathAndFile = beam.typehints.Tuple[str, SourceFile]


class SpoolTrainers(beam.PTransform):
    """`SourceFile` elements to the same elements, when their files are there.

    Each partition of a trainer is one element with one process, so as many of them run at a time
    as there are workers.

    Args:
        trainers: by name.
    """

    def __init__(self, trainers: Mapping[str, Trainer]) -> None:
        super().__init__()
        self._trainers = trainers

    def expand(self, sources: beam.PCollection) -> beam.PCollection:
        trainers = self._trainers

        def spool(element: tuple[str, Iterable[SourceFile]]) -> Iterator[SourceFile]:
            path, found = element
            files = sorted(found, key=lambda file: file.ordinal)
            spec, partition = files[0].spec, files[0].partition
            if partition is not None and spec.trainer is not None:
                streams = [file.spec for file in files]
                num_seqs = spool_partition(trainers[spec.trainer], partition, streams, path)
                count("sequences-spooled", num_seqs)
            yield from files

        return (
            sources
            | "KeyByPath" >> beam.Map(lambda file: (file.path, file)).with_output_types(PathAndFile)
            | "GroupByPath" >> beam.GroupByKey()
            | "Spool" >> beam.ParDo(Stage(spool)).with_output_types(SourceFile)
        )
