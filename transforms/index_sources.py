"""Stage 1: source files to index rows, from tables and headers alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import apache_beam as beam
import numpy as np
import pyarrow as pa
import xxhash

from ..io import storage
from ..io.columns import batch, concat, encode_tags, take, to_arrow
from ..io.config import Corpus, SourceFile
from ..io.errors import (
    OutputError,
    SeqshardError,
    SourceFormatError,
    SourceNotFoundError,
    StorageError,
)
from ..io.receipts import Rejection
from ..io.records import SourceIndex, StreamFormat
from ..io.sources import open_source
from .metrics import count, count_rejected, timed
from .rows import KeyedRows, Rows
from .stage import Stage

BATCH_ROWS = 1 << 16
SURVEYS = "surveys"
DAMAGED_LENGTH = -1
KeyedFile = beam.typehints.Tuple[int, SourceFile]


@dataclass(frozen=True)
class SourceSurvey:
    """What is known of one source file after indexing.

    Attributes:
        ordinal: of the source file.
        format: of its stream; None if no sequence has a frame.
        num_seqs: sequences, damaged ones included.
        num_bytes: size of the file.
        fingerprint: hash of its tables.
        version: modification time or etag.
        rejected: damaged entries, if these are to be skipped.
    """

    ordinal: int
    format: StreamFormat | None
    num_seqs: int
    num_bytes: int
    fingerprint: str
    version: str
    rejected: tuple[Rejection, ...] = ()


def list_sources(corpus: Corpus) -> Iterator[SourceFile]:
    """All source files of a corpus."""
    yield from corpus.sources


def index_source(file: SourceFile, skip_damaged: bool) -> tuple[SourceSurvey, pa.RecordBatch]:
    """Indexes one file.

    Returns:
        The survey, and rows with the columns `tag`, `source`, `row`, `position`, `length`,
        `num_bytes` and `raw_bytes`. The length of a damaged sequence is -1.

    Raises:
        SourceFormatError: for the first damaged entry, unless damaged ones are to be skipped.
    """
    stamp = storage.stamp(file.path)
    survey = SourceSurvey(file.ordinal, None, 0, stamp.num_bytes, "", stamp.version)
    try:
        with open_source(file.spec, file.path, skip_damaged, stamp.num_bytes) as source:
            index = refuse_nul_tags(source.index(), file.path)
    except (SourceNotFoundError, StorageError, OutputError):
        raise
    except SeqshardError as error:
        if not skip_damaged:
            raise
        rejection = Rejection("", file.spec.name, file.name, error.reason)
        return replace(survey, rejected=(rejection,)), _no_rows()
    if index.damaged and not skip_damaged:
        raise index.damaged[0][1]
    survey = replace(
        survey,
        format=index.format,
        num_seqs=len(index.tag) + len(index.damaged),
        fingerprint=index.fingerprint,
        rejected=tuple(
            Rejection(tag, file.spec.name, file.name, error.reason) for tag, error in index.damaged
        ),
    )
    return survey, _source_rows(file.ordinal, index)


def refuse_nul_tags(index: SourceIndex, path: str) -> SourceIndex:
    """The index with sequences moved to `damaged` whose tags readers would cut at a NUL."""
    text = index.tag.buffers()[2]
    if text is None or b"\0" not in bytes(text):
        return index
    bad = np.array(["\0" in tag for tag in index.tag.to_pylist()], bool)
    good = np.flatnonzero(~bad)
    damaged = tuple(
        (
            tag,
            SourceFormatError(
                "a tag with a NUL cannot be stored, as readers end it there", path, tag
            ),
        )
        for tag in index.tag.take(to_arrow(np.flatnonzero(bad))).to_pylist()
    )
    return replace(
        index,
        tag=index.tag.take(to_arrow(good)),
        position=index.position[good],
        length=index.length[good],
        num_bytes=index.num_bytes[good],
        raw_bytes=index.raw_bytes[good],
        damaged=index.damaged + damaged,
    )


def _no_rows() -> pa.RecordBatch:
    none = np.zeros(0, np.int64)
    empty = SourceIndex(None, pa.array([], pa.string()), none, none, none, none, "")
    return _source_rows(0, empty)


def _source_rows(ordinal: int, index: SourceIndex) -> pa.RecordBatch:
    damaged = [tag for tag, _ in index.damaged if tag]
    tag = pa.concat_arrays([index.tag, pa.array(damaged, pa.string())]) if damaged else index.tag
    num_rows = len(tag)

    def padded(values: np.ndarray, fill: int) -> np.ndarray:
        return np.concatenate([values, np.full(len(damaged), fill, np.int64)])

    return batch(
        {
            "tag": tag,
            "source": np.full(num_rows, ordinal, np.int32),
            "row": np.arange(num_rows, dtype=np.int64),
            "position": padded(index.position, 0),
            "length": padded(index.length, DAMAGED_LENGTH),
            "num_bytes": padded(index.num_bytes, 0),
            "raw_bytes": padded(index.raw_bytes, -1),
        }
    )


def split_buckets(rows: pa.RecordBatch, num_buckets: int) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Splits rows by a hash of their tags, so that equal tags of all streams meet.

    Yields at least one, possibly empty, batch.
    """
    for first in range(0, max(1, rows.num_rows), BATCH_ROWS):
        part = rows.slice(first, BATCH_ROWS)
        tags = encode_tags(part.column("tag"))
        digest = np.fromiter(map(xxhash.xxh3_64_intdigest, tags), np.uint64, len(tags))
        bucket = (digest % np.uint64(num_buckets)).astype(np.int64)
        yield from split_by(part, bucket) if len(tags) else [(0, part)]


def split_by(rows: pa.RecordBatch, group: np.ndarray) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Splits rows by an int64 group number; order within a group is kept."""
    if not rows.num_rows:
        return
    order = np.argsort(group, kind="stable")
    numbers, first = np.unique(group[order], return_index=True)
    sorted_rows = take(rows, order) if len(numbers) > 1 else rows
    ends = [*first[1:].tolist(), len(order)]
    for number, start, end in zip(numbers.tolist(), first.tolist(), ends, strict=True):
        yield number, sorted_rows.slice(start, end - start)


def merge_small(
    batches: Iterable[tuple[str, pa.RecordBatch]],
) -> Iterator[pa.RecordBatch]:
    """Joins consecutive batches of one stream to batches of up to BATCH_ROWS rows.

    Args:
        batches: (name of the stream, rows).
    """
    pending: list[pa.RecordBatch] = []
    stream, num_rows = "", 0
    for name, rows in batches:
        if pending and (name != stream or num_rows + rows.num_rows > BATCH_ROWS):
            yield concat(pending)
            pending, num_rows = [], 0
        pending.append(rows)
        stream, num_rows = name, num_rows + rows.num_rows
    if pending:
        yield concat(pending)


def _index_group(
    element: tuple[int, Iterable[SourceFile]], skip_damaged: bool, num_buckets: int
) -> Iterator[tuple[int, Rows] | beam.pvalue.TaggedOutput]:
    surveys: list[SourceSurvey] = []

    def index_files() -> Iterator[tuple[str, pa.RecordBatch]]:
        for file in sorted(element[1], key=lambda file: file.ordinal):
            with timed("source-milliseconds"):
                survey, rows = index_source(file, skip_damaged)
            count("sources-indexed")
            count("sequences-indexed", survey.num_seqs)
            count_rejected(survey.rejected)
            surveys.append(survey)
            yield file.spec.name, rows

    for rows in merge_small(index_files()):
        for bucket, part in split_buckets(rows, num_buckets):
            yield bucket, Rows(part)
    # One element for all files: pickled together, they share the labels of their stream.
    yield beam.pvalue.TaggedOutput(SURVEYS, tuple(surveys))


class IndexSources(beam.PTransform):
    """`SourceFile` elements to `(bucket, Rows)`; tuples of `SourceSurvey` under `surveys`.

    Args:
        skip_damaged: see `index_source`.
        num_buckets: see `split_buckets`.
        files_per_group: so many consecutive files are indexed by one worker in one go.
    """

    def __init__(self, skip_damaged: bool, num_buckets: int, files_per_group: int = 1) -> None:
        super().__init__()
        self._index = partial(_index_group, skip_damaged=skip_damaged, num_buckets=num_buckets)
        self._files_per_group = files_per_group

    def expand(self, sources: beam.PCollection) -> beam.pvalue.DoOutputsTuple:
        files_per_group = self._files_per_group

        def key_by_group(file: SourceFile) -> tuple[int, SourceFile]:
            return file.ordinal // files_per_group, file

        return (
            sources
            | "KeyByGroup" >> beam.Map(key_by_group).with_output_types(KeyedFile)
            # Grouping spreads the files over the workers; without it one would index them all.
            | "Spread" >> beam.GroupByKey()
            | "IndexGroup"
            >> beam.ParDo(Stage(self._index))
            .with_output_types(KeyedRows)
            .with_outputs(SURVEYS, main="rows")
        )
