"""Between indexing and joining: what all sources together say about the streams."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import apache_beam as beam
import msgspec
import xxhash

from ..io.config import Corpus
from ..io.errors import ShapeMismatchError, SourceFormatError
from ..io.manifest import VERSION, SourceInfo
from ..io.receipts import Rejection
from ..io.records import StreamFormat
from .index_sources import SourceSurvey
from .stage import Stage


@dataclass(frozen=True)
class Survey:
    """All sources at a glance; small enough to be a side input everywhere.

    Attributes:
        streams: format of every stream, in the order of the configuration.
        sources: for the manifest.
        plan: plan id, a hash of configuration, output options, format version and the sources'
            sizes and tables. Modification times are not in it: a copied corpus is the same plan.
        stamp: hash of the sources' sizes and modification times; receipts are trusted only if
            it is unchanged.
        rejected: damaged entries.
    """

    streams: dict[str, StreamFormat]
    sources: tuple[SourceInfo, ...]
    plan: str
    stamp: str
    rejected: tuple[Rejection, ...]

    @property
    def frame_bytes(self) -> dict[str, int]:
        """Bytes of one frame of every stream."""
        return {name: stream.frame_bytes for name, stream in self.streams.items()}


def survey_sources(
    surveys: Iterable[SourceSurvey], corpus: Corpus, options: dict[str, Any]
) -> Survey:
    """Combines the surveys of all source files.

    Args:
        surveys: one per source, in any order.
        corpus: the configuration.
        options: what else decides the content of the dataset, for the plan id.

    Raises:
        ShapeMismatchError: if two files of one stream differ in type or dimension.
        SourceFormatError: if no file of a stream tells its format.
    """
    ordered = sorted(surveys, key=lambda survey: survey.ordinal)
    contents = [(s.ordinal, s.num_bytes, s.fingerprint) for s in ordered]
    identity = [VERSION, corpus.digest, options, contents]
    versions = [(corpus.sources[s.ordinal].path, s.num_bytes, s.version) for s in ordered]
    sources = tuple(
        SourceInfo(
            corpus.sources[s.ordinal].spec.name,
            corpus.sources[s.ordinal].name,
            s.num_bytes,
            s.num_seqs,
        )
        for s in ordered
    )
    return Survey(
        streams=merge_formats(ordered, corpus),
        sources=sources,
        plan=xxhash.xxh3_128_hexdigest(msgspec.json.encode(identity)),
        stamp=xxhash.xxh3_64_hexdigest(msgspec.json.encode(versions)),
        rejected=tuple(rejection for survey in ordered for rejection in survey.rejected),
    )


def merge_formats(surveys: Iterable[SourceSurvey], corpus: Corpus) -> dict[str, StreamFormat]:
    """The one format of every stream.

    Raises:
        ShapeMismatchError, SourceFormatError: see `survey_sources`.
    """
    streams: dict[str, StreamFormat] = {}
    first: dict[str, str] = {}
    for survey in surveys:
        file = corpus.sources[survey.ordinal]
        name = file.spec.name
        if survey.format is None:
            continue
        if name not in streams:
            streams[name], first[name] = survey.format, file.name
        elif streams[name] != survey.format:
            raise ShapeMismatchError(
                f"two files of stream {name!r} differ in their format",
                file.path,
                expected=f"{_describe(streams[name])} as in {first[name]}",
                found=_describe(survey.format),
                hint="Give streams of different formats different names.",
            )
    for spec in corpus.streams:
        if spec.name not in streams:
            paths = [file.path for file in corpus.sources if file.spec.name == spec.name]
            raise SourceFormatError(
                f"no file of stream {spec.name!r} has a single frame", paths[0] if paths else None
            )
    return {spec.name: streams[spec.name] for spec in corpus.streams}


def _describe(stream: StreamFormat) -> str:
    kind = "classes" if stream.sparse else "features"
    labels = "" if stream.labels is None else f", {len(stream.labels)} labels"
    return f"{stream.dtype}, {stream.dim} {kind}, {stream.ndim} axes{labels}"


class SurveySources(beam.PTransform):
    """Tuples of `SourceSurvey` to one `Survey`."""

    def __init__(self, corpus: Corpus, options: dict[str, Any]) -> None:
        super().__init__()
        self._corpus = corpus
        self._options = options

    def expand(self, surveys: beam.PCollection) -> beam.PCollection:
        corpus, options = self._corpus, self._options

        def survey(element: tuple[int, Iterable[tuple[SourceSurvey, ...]]]) -> Iterator[Survey]:
            yield survey_sources(itertools.chain.from_iterable(element[1]), corpus, options)

        return (
            surveys
            | "ToOne" >> beam.Map(lambda surveys: (0, surveys))
            | "Gather" >> beam.GroupByKey()
            | "Survey" >> beam.ParDo(Stage(survey))
        )
