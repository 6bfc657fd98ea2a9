"""Stage 2: one row per sequence with all its streams; filters and missing tags."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import apache_beam as beam
import numpy as np
import pyarrow as pa

from ..io.columns import batch, column, concat, encode_tags, take, to_arrow
from ..io.config import Corpus
from ..io.receipts import NOT_LISTED, Rejection
from ..io.segments import load_segments
from .index_sources import DAMAGED_LENGTH
from .metrics import count, count_rejected
from .order import SeqOrdering, sort_keys
from .rows import Rows
from .stage import Stage
from .survey_sources import Survey

REJECTED = "rejected"
PROBLEMS = "problems"
STREAM_COLUMNS = ("source", "position", "length", "num_bytes", "raw_bytes")


@dataclass(frozen=True)
class JoinResult:
    """One bucket after the join.

    Attributes:
        rows: `tag`, `primary`, `tie`, `payload` (bytes in the dataset), and the columns
            STREAM_COLUMNS of every stream as `<column>.<stream>`.
        rejected: sequences that a filter left out.
        problems: sequences that are missing in a stream or doubled in one.
    """

    rows: pa.RecordBatch
    rejected: tuple[Rejection, ...]
    problems: tuple[Rejection, ...]


def join_streams(
    batches: Iterable[pa.RecordBatch],
    corpus: Corpus,
    frame_bytes: Mapping[str, int],
    ordering: SeqOrdering,
) -> JoinResult:
    """Joins the index rows of one bucket by tag.

    Args:
        batches: rows of any sources, in any order; each batch is of one stream.
        corpus: streams, sources and filters.
        frame_bytes: bytes of one frame of every stream.
        ordering: decides the sort keys.
    """
    streams = _by_stream(batches, corpus)
    tags, codes, place, count = _match_tags(streams)
    good = np.ones(len(tags), bool)
    rejected = _filter_segments(tags, place, good, streams, corpus)
    _drop_damaged(place, good, streams)
    problems = _find_problems(tags, codes, place, count, good, streams, corpus)
    rejected += _filter_lengths(tags, place, good, streams, corpus)
    rows = _joined_rows(tags, place, np.flatnonzero(good), streams, corpus, frame_bytes, ordering)
    return JoinResult(rows, tuple(rejected), tuple(problems))


def _by_stream(batches: Iterable[pa.RecordBatch], corpus: Corpus) -> list[pa.RecordBatch | None]:
    """All rows of each stream, in the order of sources and rows; None for a stream without."""
    groups: list[list[pa.RecordBatch]] = [[] for _ in corpus.streams]
    number = {spec.name: i for i, spec in enumerate(corpus.streams)}
    for rows in batches:
        if rows.num_rows:
            file = corpus.sources[column(rows, "source")[0]]
            groups[number[file.spec.name]].append(rows)
    joined = [concat(group) if group else None for group in groups]
    return [
        None
        if rows is None
        else take(rows, np.lexsort((column(rows, "row"), column(rows, "source"))))
        for rows in joined
    ]


def _match_tags(
    streams: Sequence[pa.RecordBatch | None],
) -> tuple[pa.StringArray, list[np.ndarray], np.ndarray, np.ndarray]:
    """All distinct tags; for every stream the tag number of its rows; and for [stream, tag] the
    first row of that tag (or -1) and how many there are.
    """
    arrays = [pa.array([], pa.string()) if s is None else s.column("tag") for s in streams]
    encoded = pa.concat_arrays(arrays).dictionary_encode()
    numbers = np.frombuffer(encoded.indices.buffers()[1] or b"", np.int32)[: len(encoded)]
    codes = np.split(numbers, np.cumsum([len(array) for array in arrays])[:-1])
    tags = encoded.dictionary
    place = np.full((len(streams), len(tags)), -1, np.int64)
    count = np.zeros((len(streams), len(tags)), np.int64)
    for i, code in enumerate(codes):
        place[i, code[::-1]] = np.arange(len(code) - 1, -1, -1)
        count[i] = np.bincount(code, minlength=len(tags))
    return tags, codes, place, count


def _filter_segments(
    tags: pa.StringArray,
    place: np.ndarray,
    good: np.ndarray,
    streams: Sequence[pa.RecordBatch | None],
    corpus: Corpus,
) -> list[Rejection]:
    if corpus.segments is None:
        return []
    import pyarrow.compute as pc

    mask = pc.is_in(tags, load_segments(corpus.segments)).to_pylist()
    outside = np.flatnonzero(~np.array(mask, bool))
    good[outside] = False
    return [_rejection(tags, place, streams, corpus, int(i), NOT_LISTED) for i in outside]


def _drop_damaged(
    place: np.ndarray, good: np.ndarray, streams: Sequence[pa.RecordBatch | None]
) -> None:
    """Leaves out what a damaged stream makes unusable; the survey already lists it."""
    for i, rows in enumerate(streams):
        if rows is not None:
            present = np.flatnonzero(place[i] >= 0)
            length = column(rows, "length")[place[i, present]]
            good[present[length == DAMAGED_LENGTH]] = False


def _find_problems(
    tags: pa.StringArray,
    codes: Sequence[np.ndarray],
    place: np.ndarray,
    count: np.ndarray,
    good: np.ndarray,
    streams: Sequence[pa.RecordBatch | None],
    corpus: Corpus,
) -> list[Rejection]:
    problems = []
    bad = np.flatnonzero(good & (count != 1).any(axis=0))
    files = [
        _files_of(np.intersect1d(bad, np.flatnonzero(count[i] > 1)), codes[i], rows, corpus)
        for i, rows in enumerate(streams)
    ]
    for i in bad.tolist():
        wrong = int(np.flatnonzero(count[:, i] != 1)[0])
        if count[wrong, i]:
            source = files[wrong][i][0]
            reason = f"{count[wrong, i]} times in this stream: {', '.join(files[wrong][i])}"
        else:
            other = int(np.flatnonzero(count[:, i])[0])
            source = _source_name(streams[other], int(place[other, i]), corpus)
            reason = (
                f"missing in this stream, but in stream {corpus.streams[other].name!r}: {source}"
            )
        problems.append(Rejection(tags[i].as_py(), corpus.streams[wrong].name, source, reason))
    good[bad] = False
    return problems


def _files_of(
    wanted: np.ndarray, codes: np.ndarray, rows: pa.RecordBatch | None, corpus: Corpus
) -> dict[int, list[str]]:
    """The source files of all rows of the tags whose numbers are wanted."""
    found: dict[int, list[str]] = {}
    if rows is not None and len(wanted):
        chosen = np.flatnonzero(np.isin(codes, wanted))
        ordinals = column(rows, "source")[chosen].tolist()
        for code, ordinal in zip(codes[chosen].tolist(), ordinals, strict=True):
            found.setdefault(code, []).append(corpus.sources[ordinal].name)
    return found


def _source_name(rows: pa.RecordBatch | None, row: int, corpus: Corpus) -> str:
    assert rows is not None
    return corpus.sources[column(rows, "source")[row]].name


def _rejection(
    tags: pa.StringArray,
    place: np.ndarray,
    streams: Sequence[pa.RecordBatch | None],
    corpus: Corpus,
    tag: int,
    reason: str,
) -> Rejection:
    stream = int(np.flatnonzero(place[:, tag] >= 0)[0])
    source = _source_name(streams[stream], int(place[stream, tag]), corpus)
    return Rejection(tags[tag].as_py(), corpus.streams[stream].name, source, reason)


def _filter_lengths(
    tags: pa.StringArray,
    place: np.ndarray,
    good: np.ndarray,
    streams: Sequence[pa.RecordBatch | None],
    corpus: Corpus,
) -> list[Rejection]:
    left = np.flatnonzero(good)
    if not len(left) or streams[0] is None:
        return []
    length = column(streams[0], "length")[place[0, left]]
    longest = np.iinfo(np.int64).max if corpus.max_length is None else corpus.max_length
    outside = (length < corpus.min_length) | (length > longest)
    good[left[outside]] = False
    limits = f"outside min_length {corpus.min_length} and max_length {corpus.max_length}"
    return [
        _rejection(tags, place, streams, corpus, int(i), f"{frames} frames are {limits}")
        for i, frames in zip(left[outside], length[outside].tolist(), strict=True)
    ]


def _joined_rows(
    tags: pa.StringArray,
    place: np.ndarray,
    chosen: np.ndarray,
    streams: Sequence[pa.RecordBatch | None],
    corpus: Corpus,
    frame_bytes: Mapping[str, int],
    ordering: SeqOrdering,
) -> pa.RecordBatch:
    columns: dict[str, np.ndarray | pa.Array] = {"tag": tags.take(to_arrow(chosen))}
    payload = np.zeros(len(chosen), np.int64)
    for i, spec in enumerate(corpus.streams):
        for name in STREAM_COLUMNS:
            columns[f"{name}.{spec.name}"] = _pick(streams[i], name, place[i, chosen])
        payload += columns[f"length.{spec.name}"] * frame_bytes[spec.name]
    first = corpus.streams[0].name
    columns["primary"], columns["tie"] = sort_keys(
        ordering,
        len(corpus.sources),
        encode_tags(columns["tag"]),
        columns[f"source.{first}"],
        _pick(streams[0], "row", place[0, chosen]),
        columns[f"length.{first}"],
    )
    columns["payload"] = payload
    return batch(columns)


def _pick(rows: pa.RecordBatch | None, name: str, chosen: np.ndarray) -> np.ndarray:
    if rows is None:
        return np.zeros(0, np.int32 if name == "source" else np.int64)
    return column(rows, name)[chosen]


class JoinStreams(beam.PTransform):
    """`(bucket, Rows)` to joined `Rows`; `Rejection` tuples under `rejected` and `problems`."""

    def __init__(self, corpus: Corpus, ordering: SeqOrdering, survey: beam.PCollection) -> None:
        super().__init__()
        self._corpus = corpus
        self._ordering = ordering
        self._survey = survey

    def expand(self, rows: beam.PCollection) -> beam.pvalue.DoOutputsTuple:
        corpus, ordering = self._corpus, self._ordering

        def join(
            element: tuple[int, Iterable[Rows]], survey: Survey
        ) -> Iterator[Rows | beam.pvalue.TaggedOutput]:
            batches = [rows.batch for rows in element[1]]
            result = join_streams(batches, corpus, survey.frame_bytes, ordering)
            count("sequences-joined", result.rows.num_rows)
            count_rejected(result.rejected + result.problems)
            yield Rows(result.rows)
            yield beam.pvalue.TaggedOutput(REJECTED, result.rejected)
            yield beam.pvalue.TaggedOutput(PROBLEMS, result.problems)

        return (
            rows
            | "ByBucket" >> beam.GroupByKey()
            | "Join"
            >> beam.ParDo(Stage(join), beam.pvalue.AsSingleton(self._survey))
            .with_output_types(Rows)
            .with_outputs(REJECTED, PROBLEMS, main="rows")
        )
