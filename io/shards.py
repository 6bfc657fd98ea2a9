"""Writing one shard: every byte of payload is read once and written once.

Stream by stream, blocks of consecutive rows are decoded into one buffer; while a block is still
in the cache it is digested per sequence, measured, hashed and written at its place in the file.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import xxhash

from . import storage
from .columns import column, encode_tags, take
from .config import SourceFile
from .errors import (
    OutputError,
    SeqshardError,
    SourceFormatError,
    SourceNotFoundError,
    StorageError,
)
from .index import index_batch
from .manifest import ArrayInfo, ShardInfo, shard_name
from .receipts import Receipt, Rejection, Staging, hash_file
from .records import Layout, StreamFormat
from .shard_layouts import ShardWriter, open_shard
from .source_pool import SourcePool
from .statistics import StreamStatistics, measure

BLOCK_BYTES = 2 << 20
SOURCE_COLUMNS = ("source", "position", "length", "num_bytes", "raw_bytes")


@dataclass(frozen=True)
class ShardJob:
    """What the writers of all shards of a build share.

    Attributes:
        sources: all source files, by ordinal.
        streams: the format of every stream.
        staging: where the receipts go.
        num_shards: how many shards there will be.
        source_bytes: sizes of the source files, as far as they are known, by ordinal.
        skip_damaged: whether a sequence that cannot be decoded is rejected instead of fatal.
        layout: what shards are like.
    """

    sources: tuple[SourceFile, ...]
    streams: Mapping[str, StreamFormat]
    staging: Staging
    num_shards: int
    skip_damaged: bool = False
    layout: Layout = field(default_factory=Layout)
    source_bytes: Mapping[int, int] = field(default_factory=dict)


def write_shard(job: ShardJob, shard: int, rows: pa.RecordBatch) -> Receipt:
    """Writes one shard and its receipt, unless both already stand there.

    Args:
        job: what all shards share.
        shard: number of the shard.
        rows: its sequences in order: `tag`, and `source`, `position`, `length`, `num_bytes`,
            `raw_bytes` of every stream.

    Raises:
        SourceFormatError: if a sequence cannot be decoded.
        OutputError: if the shard cannot be written.
    """
    path = storage.join(job.staging.output, shard_name(shard, job.num_shards))
    kept = finished_shard(job, shard)
    if kept is not None:
        return kept
    rejected: tuple[Rejection, ...] = ()
    with SourcePool(job.sources, job.source_bytes) as pool, storage.local_target(path) as target:
        try:
            info, statistics, index = _write_file(job, pool, rows, target, os.path.basename(path))
        except SourceFormatError:
            if not job.skip_damaged:
                raise
            rows, rejected = _drop_damaged(job, pool, rows)
            storage.remove(target)
            info, statistics, index = _write_file(job, pool, rows, target, os.path.basename(path))
        storage.publish(target, path)
    receipt = Receipt(info, statistics, rejected)
    job.staging.save(shard, receipt, index)
    return receipt


def finished_shard(job: ShardJob, shard: int) -> Receipt | None:
    """The receipt of a shard that stands there already as this job would write it, or None."""
    found = job.staging.load(shard)
    path = storage.join(job.staging.output, shard_name(shard, job.num_shards))
    return found[0] if found is not None and is_intact(path, found[0].info) else None


def is_intact(path: str, info: ShardInfo) -> bool:
    """Whether a shard stands there with exactly the bytes that its receipt promises."""
    try:
        if storage.stamp(path).num_bytes != info.file_bytes:
            return False
        return hash_file(path) == info.xxh3_128
    except SourceNotFoundError:
        return False


def _write_file(
    job: ShardJob, pool: SourcePool, rows: pa.RecordBatch, target: str, name: str
) -> tuple[ShardInfo, dict[str, StreamStatistics], pa.RecordBatch]:
    tags = rows.column("tag")
    lengths = {stream: column(rows, f"length.{stream}") for stream in job.streams}
    digests, statistics = {}, {}
    with open_shard(job.layout, target, job.streams, lengths, encode_tags(tags)) as file:
        for stream in file.order:
            digests[stream], statistics[stream] = _write_stream(
                stream, job.streams[stream], pool, _stream_columns(rows, stream), file
            )
        file_bytes, digest = file.finish()
    info = ShardInfo(
        path=name,
        num_seqs=rows.num_rows,
        num_frames={stream: int(lengths[stream].sum()) for stream in job.streams},
        num_bytes=sum(
            int(lengths[stream].sum()) * kind.frame_bytes for stream, kind in job.streams.items()
        ),
        file_bytes=file_bytes,
        xxh3_128=digest,
        arrays={
            stream: ArrayInfo(file.offsets[stream], (int(lengths[stream].sum()), *kind.shape))
            for stream, kind in job.streams.items()
        },
    )
    ordered = {stream: statistics[stream] for stream in job.streams}
    return info, ordered, index_batch(tags, lengths, digests)


def _stream_columns(rows: pa.RecordBatch, stream: str) -> dict[str, np.ndarray]:
    return {name: column(rows, f"{name}.{stream}") for name in SOURCE_COLUMNS}


def _write_stream(
    stream: str,
    kind: StreamFormat,
    pool: SourcePool,
    rows: dict[str, np.ndarray],
    file: ShardWriter,
) -> tuple[np.ndarray, StreamStatistics]:
    """Copies one stream of a shard; returns the digests of its sequences and its statistics."""
    stop = np.cumsum(rows["length"])
    start = stop - rows["length"]
    digests = np.empty(len(start), np.uint64)
    statistics = StreamStatistics()
    fetched = 0
    for first, last in split_blocks(start, max(1, BLOCK_BYTES // max(1, kind.frame_bytes))):
        if last > fetched:
            fetched = pool.fetch_ahead(rows, first)
        base, num_frames = int(start[first]), int(stop[last - 1] - start[first])
        raw = file.buffer(stream, slice(first, last))
        block = raw.view(kind.dtype).reshape(num_frames, *kind.shape)
        part = {name: values[first:last] for name, values in rows.items()}
        read_rows(pool, part, block, start[first:last] - base)
        file.write(stream, slice(first, last), raw)
        bounds = (start[first:last] - base) * kind.frame_bytes
        sizes = rows["length"][first:last] * kind.frame_bytes
        digests[first:last] = digest_rows(raw, bounds, sizes)
        statistics += measure(kind, block)
    return digests, statistics


def split_blocks(start: np.ndarray, block_frames: int) -> Iterator[tuple[int, int]]:
    """Cuts rows into runs of about `block_frames` frames: half-open (first, last) row numbers.

    Args:
        start: int64 [rows], the first frame of each row, ascending.
        block_frames: a row belongs to the block in which it starts.
    """
    if not len(start):
        return
    cuts = np.flatnonzero(np.diff(start // block_frames)) + 1
    bounds = [0, *cuts.tolist(), len(start)]
    yield from itertools.pairwise(bounds)


def read_rows(
    pool: SourcePool, rows: Mapping[str, np.ndarray], out: np.ndarray, start: np.ndarray
) -> None:
    """Reads rows of one stream into `out`, source by source and forwards in every source."""
    order = np.lexsort((rows["position"], rows["source"]))
    source = rows["source"][order]
    cuts = (np.flatnonzero(np.diff(source)) + 1).tolist()
    for first, last in zip([0, *cuts], [*cuts, len(order)], strict=True):
        chosen = order[first:last]
        ordinal = int(source[first])
        try:
            pool.get(ordinal).read_many(
                rows["position"][chosen],
                rows["length"][chosen],
                rows["num_bytes"][chosen],
                rows["raw_bytes"][chosen],
                out,
                start[chosen],
            )
        except OSError as error:
            raise storage.source_error(pool.path(ordinal), error) from error


def digest_rows(data: np.ndarray, start: np.ndarray, size: np.ndarray) -> np.ndarray:
    """xxh3_64 of every row's bytes.

    Args:
        data: uint8 array.
        start, size: int64 [rows], byte ranges in `data`.

    Returns:
        uint64 [rows].
    """
    view, digest = memoryview(data), xxhash.xxh3_64_intdigest
    ranges = zip(start.tolist(), (start + size).tolist(), strict=True)
    return np.fromiter((digest(view[a:b]) for a, b in ranges), np.uint64, len(start))


def _drop_damaged(
    job: ShardJob, pool: SourcePool, rows: pa.RecordBatch
) -> tuple[pa.RecordBatch, tuple[Rejection, ...]]:
    """Decodes every sequence by itself, and separates those that fail."""
    good = np.ones(rows.num_rows, bool)
    rejected = []
    for stream, kind in job.streams.items():
        columns = _stream_columns(rows, stream)
        longest = int(columns["length"].max(initial=0))
        out = np.empty((longest, *kind.shape), np.dtype(kind.dtype))
        fetched = 0
        for row in range(rows.num_rows):
            if row >= fetched:
                fetched = pool.fetch_ahead(columns, row)
            part = {name: values[row : row + 1] for name, values in columns.items()}
            try:
                read_rows(pool, part, out, np.zeros(1, np.int64))
            except (StorageError, OutputError):
                raise  # which says nothing about the sequence
            except SeqshardError as error:
                good[row] = False
                tag = rows.column("tag")[row].as_py()
                source = job.sources[int(columns["source"][row])].name
                rejected.append(Rejection(tag, stream, source, error.reason))
    return take(rows, np.flatnonzero(good)), tuple(rejected)
