"""Checks a built dataset against its manifest, file by file and sequence by sequence."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import msgspec
import numpy as np
import pyarrow as pa

from . import storage
from .columns import column, encode_tags
from .errors import ManifestError, SeqshardError, ShardIntegrityError
from .hdf.file import get_dataset, open_file
from .hdf.layout import INPUT_STREAM, dataset_name, length_table
from .hdf.nextgen_layout import RUN_DTYPE
from .hdf.nextgen_source import RUNS, NextGenSource
from .hdf.source import HdfSource
from .index import IndexFile
from .manifest import FileInfo, Manifest, ShardInfo, folder_of, load_manifest
from .receipts import Rejection, decode_receipt, hash_file
from .records import StreamFormat
from .shards import BLOCK_BYTES, digest_rows, split_blocks
from .statistics import LengthStatistics, StreamStatistics, measure, measure_lengths


def verify_dataset(path: str, num_workers: int = 2) -> tuple[Manifest, list[SeqshardError]]:
    """Checks everything; returns the manifest and the list of damage.

    Args:
        path: folder of the dataset, or its manifest.
        num_workers: threads.

    Raises:
        ManifestError: if there is no manifest that could be checked against.
    """
    manifest = load_manifest(path)
    folder = folder_of(path)
    problems: list[SeqshardError] = []
    problems += _check_totals(folder, manifest)
    problems += _check_rejected(folder, manifest)
    damaged_index = list(_check_file(folder, manifest.index))
    if damaged_index:
        # What a damaged index says of the shards is worth nothing.
        for shard in manifest.shards:
            path = storage.join(folder, shard.path)
            problems += _check_bytes(path, shard.file_bytes, shard.xxh3_128)
        return manifest, damaged_index + problems
    index_path = storage.join(folder, manifest.index.path)
    try:
        with storage.local_copy(index_path) as local:
            index = IndexFile(local, list(manifest.streams), len(manifest.shards))
            problems += _check_shards(folder, manifest, index, num_workers)
    except SeqshardError as error:
        problems.append(error)
    return manifest, problems


def _check_shards(
    folder: str, manifest: Manifest, index: IndexFile, num_workers: int
) -> Iterator[SeqshardError]:
    def check(shard: int) -> tuple[list[SeqshardError], dict[str, StreamStatistics]]:
        try:
            return _check_shard(folder, manifest, index, shard)
        except SeqshardError as error:
            return [error], {}

    totals = {name: StreamStatistics() for name in manifest.streams}
    lengths = LengthStatistics()
    tags = []
    first = next(iter(manifest.streams))
    with ThreadPoolExecutor(num_workers) as pool:
        for shard, (problems, statistics) in enumerate(
            pool.map(check, range(len(manifest.shards)))
        ):
            yield from problems
            for name, values in statistics.items():
                totals[name] += values
            lengths += measure_lengths(index.lengths(shard, first))
            tags.append(index.batch(shard).column("tag"))
    unique = len(pa.chunked_array(tags, pa.string()).unique())
    if unique != manifest.num_seqs:
        yield ShardIntegrityError(
            "tags are not unique", index.path, expected=str(manifest.num_seqs), found=str(unique)
        )
    summary = {name: values.summary() for name, values in totals.items()}
    found = msgspec.to_builtins(summary | {"length": lengths.summary()})
    if msgspec.json.encode(found) != msgspec.json.encode(manifest.statistics):
        yield ManifestError("the statistics are not those of the data", folder)


def _check_totals(folder: str, manifest: Manifest) -> Iterator[SeqshardError]:
    for name in manifest.streams:
        expected = sum(shard.num_frames[name] for shard in manifest.shards)
        if manifest.num_frames.get(name) != expected:
            yield ManifestError(
                f"num_frames of stream {name!r} is not the sum over the shards",
                folder,
                expected=str(expected),
                found=str(manifest.num_frames.get(name)),
            )


def _check_file(folder: str, info: FileInfo) -> Iterator[SeqshardError]:
    path = storage.join(folder, info.path)
    yield from _check_bytes(path, info.num_bytes, info.xxh3_128)


def _check_bytes(path: str, num_bytes: int, digest: str) -> Iterator[SeqshardError]:
    if not storage.exists(path):
        yield ShardIntegrityError("the file is missing", path, hint="Run the build again.")
        return
    found = storage.stamp(path).num_bytes
    if found != num_bytes:
        yield ShardIntegrityError(
            "the size is wrong", path, expected=f"{num_bytes} bytes", found=f"{found}"
        )
        return
    actual = hash_file(path)
    if actual != digest:
        yield ShardIntegrityError("the hash is wrong", path, expected=digest, found=actual)


def _check_rejected(folder: str, manifest: Manifest) -> Iterator[SeqshardError]:
    if manifest.rejected is None:
        if manifest.num_rejected:
            yield ManifestError("rejected sequences, but no list of them", folder)
        return
    yield from _check_file(folder, manifest.rejected)
    path = storage.join(folder, manifest.rejected.path)
    if not storage.exists(path):
        return
    try:
        lines = msgspec.json.Decoder(Rejection).decode_lines(storage.read_bytes(path))
    except msgspec.MsgspecError as error:
        yield ShardIntegrityError(f"this is not a list of rejected sequences: {error}", path)
        return
    if len(lines) != manifest.num_rejected:
        yield ShardIntegrityError(
            "the list of rejected sequences is not complete",
            path,
            expected=f"{manifest.num_rejected} lines",
            found=str(len(lines)),
        )


def _check_shard(
    folder: str, manifest: Manifest, index: IndexFile, shard: int
) -> tuple[list[SeqshardError], dict[str, StreamStatistics]]:
    info = manifest.shards[shard]
    path = storage.join(folder, info.path)
    damage = list(_check_bytes(path, info.file_bytes, info.xxh3_128))
    if damage and not storage.exists(path):
        return damage, {}
    problems = list(damage)
    rows = index.batch(shard)
    problems += _check_index_rows(index, manifest, shard, rows)
    if decode_receipt(index.metadata(shard)).info != info:
        problems.append(ManifestError("index and manifest differ", index.path, info.path))
    with storage.local_copy(path) as local:
        if not damage:
            check = _check_nextgen if manifest.layout == "nextgen" else _check_structure
            problems += check(local, manifest, info, rows)
        statistics = {}
        for name in manifest.streams:
            try:
                spoilt, statistics[name] = _check_payload(local, manifest, info, rows, name)
            except SeqshardError as error:
                spoilt = [error]
            problems += spoilt
    return problems, statistics


def _check_index_rows(
    index: IndexFile, manifest: Manifest, shard: int, rows: pa.RecordBatch
) -> Iterator[SeqshardError]:
    info = manifest.shards[shard]
    if rows.num_rows != info.num_seqs:
        yield ShardIntegrityError(
            "the index has another number of sequences",
            index.path,
            info.path,
            expected=str(info.num_seqs),
            found=str(rows.num_rows),
        )
    for name in manifest.streams:
        length = column(rows, f"length.{name}").astype(np.int64)
        start = column(rows, f"start.{name}")
        if not np.array_equal(start, np.cumsum(length) - length):
            yield ShardIntegrityError(f"gaps in stream {name!r}", index.path, info.path)
        if length.sum() != info.num_frames[name]:
            yield ShardIntegrityError(
                f"the index has another number of frames of stream {name!r}",
                index.path,
                info.path,
                expected=str(info.num_frames[name]),
                found=str(length.sum()),
            )


def _check_structure(
    path: str, manifest: Manifest, info: ShardInfo, rows: pa.RecordBatch
) -> Iterator[SeqshardError]:
    """What the HDF library sees must be what the manifest and the index say."""

    def problem(what: str) -> ShardIntegrityError:
        return ShardIntegrityError(what, info.path)

    with open_file(path) as file:
        for name, array in info.arrays.items():
            dataset = get_dataset(file, dataset_name(name))
            if dataset is None:
                yield problem(f"stream {name!r} is missing")
                continue
            place = (dataset.shape, int(dataset.id.get_offset() or 0))
            if place != (array.shape, array.offset):
                yield problem(f"the array of stream {name!r} is not where the manifest says")
        tags = get_dataset(file, "seqTags")
        if tags is None or tags[...].tolist() != encode_tags(rows.column("tag")):
            yield problem("tags of shard and index differ")
        lengths = get_dataset(file, "seqLengths")
        expected = length_table({s: column(rows, f"length.{s}") for s in manifest.streams})
        if lengths is None or not np.array_equal(lengths[...], expected):
            yield problem("lengths of shard and index differ")
        if INPUT_STREAM not in manifest.streams and "inputs" in file:
            yield problem("the shard has inputs that the manifest does not know")
    for name, stream in manifest.streams.items():
        with HdfSource(path, name) as source:
            if source.index().format != stream:
                yield problem(f"stream {name!r} has another format than the manifest says")


def _check_nextgen(
    path: str, manifest: Manifest, info: ShardInfo, rows: pa.RecordBatch
) -> Iterator[SeqshardError]:
    """`_check_structure` for the NextGen layout."""
    for name, stream in manifest.streams.items():
        with NextGenSource(path, name) as source:
            found, as_runs = source.index(), source.parser == RUNS
        yield from (error for _, error in found.damaged)
        if not found.tag.equals(rows.column("tag")):
            yield ShardIntegrityError("tags of shard and index differ", info.path)
        expected = replace(stream, dtype=RUN_DTYPE.name) if as_runs else stream
        if found.format not in (expected, None):
            what = f"stream {name!r} has another format than the manifest says"
            yield ShardIntegrityError(what, info.path)


def _check_payload(
    path: str, manifest: Manifest, info: ShardInfo, rows: pa.RecordBatch, name: str
) -> tuple[list[SeqshardError], StreamStatistics]:
    kind = manifest.streams[name]
    length, start = column(rows, f"length.{name}").astype(np.int64), column(rows, f"start.{name}")
    expected = column(rows, f"digest.{name}")
    statistics, damaged = StreamStatistics(), []
    opened = _open_sequences if manifest.layout == "nextgen" else _open_array
    with opened(path, kind, name, info, start) as (position, read):
        for first, last in split_blocks(start, max(1, BLOCK_BYTES // max(1, kind.frame_bytes))):
            begin, end = int(start[first]), int(start[last - 1] + length[last - 1])
            block = read(slice(first, last), begin, end)
            if len(block) != end - begin:
                what = f"the payload of stream {name!r} ends too early"
                return [ShardIntegrityError(what, info.path)], statistics
            raw = block.reshape(-1).view(np.uint8)
            bounds = (start[first:last] - begin) * kind.frame_bytes
            digests = digest_rows(raw, bounds, length[first:last] * kind.frame_bytes)
            damaged += (first + np.flatnonzero(digests != expected[first:last])).tolist()
            statistics += measure(kind, block)
    tags = rows.column("tag")
    return [
        ShardIntegrityError(
            f"the payload of stream {name!r} does not have its digest",
            info.path,
            tags[row].as_py(),
            int(position[row]),
        )
        for row in damaged
    ], statistics


# Reads a block: its rows, and its first and last frame among all frames of the stream in the shard.
_ReadBlock = Callable[[slice, int, int], np.ndarray]


@contextlib.contextmanager
def _open_array(
    path: str, kind: StreamFormat, name: str, info: ShardInfo, start: np.ndarray
) -> Iterator[tuple[np.ndarray, _ReadBlock]]:
    """Where the sequences of a stream are in a file of RETURNN's layout, and how to read them."""
    dtype, offset = np.dtype(kind.dtype), info.arrays[name].offset or 0
    with open(path, "rb") as file:

        def read(_: slice, begin: int, end: int) -> np.ndarray:
            size = (end - begin) * kind.frame_bytes
            data = os.pread(file.fileno(), size, offset + begin * kind.frame_bytes)
            if not kind.frame_bytes:
                return np.empty((end - begin, *kind.shape), dtype)
            whole = len(data) // kind.frame_bytes
            frames = np.frombuffer(data, dtype, whole * kind.frame_bytes // dtype.itemsize)
            return frames.reshape(whole, *kind.shape)

        yield offset + start * kind.frame_bytes, read


@contextlib.contextmanager
def _open_sequences(
    path: str, kind: StreamFormat, name: str, info: ShardInfo, start: np.ndarray
) -> Iterator[tuple[np.ndarray, _ReadBlock]]:
    """The same for a file of the NextGen layout."""
    with NextGenSource(path, name) as source:
        index = source.index()
        for _, error in index.damaged:
            raise error
        # Of runs come class and end mark of every frame.
        step = 2 if source.parser == RUNS else 1
        frames = index.length // step
        if not np.array_equal(np.cumsum(frames) - frames, start):
            raise ShardIntegrityError(f"lengths of shard and index differ in {name!r}", info.path)

        def read(rows: slice, begin: int, end: int) -> np.ndarray:
            dtype = np.dtype(kind.dtype) if step == 1 else RUN_DTYPE
            out = np.empty((step * (end - begin), *kind.shape), dtype)
            columns = (index.position, index.length, index.num_bytes, index.raw_bytes)
            where = step * (start[rows] - begin)
            source.read_many(*(values[rows] for values in columns), out, where)
            return out if step == 1 else out[::2].astype(kind.dtype)

        yield index.position, read
