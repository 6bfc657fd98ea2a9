"""The folder of a dataset while it is being built: preparing it, completing it, cleaning up."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pyarrow as pa

from . import storage
from .columns import column
from .errors import OutputError, OutputExistsError, SeqshardError, SourceNotFoundError, redact
from .hdf.nextgen_layout import check_streams
from .index import IndexFile, index_schema
from .manifest import (
    FORMAT,
    INDEX_NAME,
    MANIFEST_NAME,
    PROVENANCE_NAME,
    REJECTED_NAME,
    VERSION,
    FileInfo,
    Manifest,
    ShardInfo,
    SourceInfo,
    encode_manifest,
    load_manifest,
    shard_name,
)
from .receipts import (
    STAGING,
    Receipt,
    Rejection,
    Staging,
    decode_receipt,
    encode_receipt,
    hash_file,
)
from .records import Layout, StreamFormat
from .statistics import LengthStatistics, StreamStatistics, measure_lengths

SHARD_PATTERN = re.compile(r"data-\d{5}-of-\d{5}\.hdf")
TEMPORARY_PATTERN = re.compile(
    r"\.(data-\d{5}-of-\d{5}\.hdf|\w+\.(arrow|jsonl|json))\.[0-9a-f]{12}\.tmp"
)


@dataclass(frozen=True)
class DatasetPlan:
    """What the manifest says beyond the shards, known before the first shard is written."""

    streams: dict[str, StreamFormat]
    sources: tuple[SourceInfo, ...]
    seq_ordering: str
    seqs_per_shard: tuple[int, ...]
    num_bytes: int
    layout: Layout = field(default_factory=Layout)


def prepare_output(staging: Staging, plan: DatasetPlan, overwrite: bool) -> None:
    """Makes the output folder ready for the shards of a plan.

    A folder with the same plan is continued: receipts of a finished dataset are restored, so that
    its intact shards are kept. From here on the folder is no dataset until its manifest is written.

    Raises:
        OutputExistsError: if the folder holds another dataset, or shards of unknown origin.
        OutputError: if it cannot be written.
        PlanError: if the layout cannot hold a stream.
    """
    if plan.layout.kind == "nextgen":
        check_streams(plan.streams, plan.layout.runs)
    names = storage.list_names(staging.output)
    finished = MANIFEST_NAME in names
    same = finished and _saved_plan(staging.output) == staging.plan
    if finished and not same and not overwrite:
        raise OutputExistsError(
            "the output folder holds another dataset",
            staging.output,
            hint="Choose another --output, or replace it with --overwrite.",
        )
    if not finished and not overwrite:
        _refuse_unknown_shards(staging.output, names)
    storage.make_folder(staging.folder)
    if finished and not (same and _restore_receipts(staging)):
        storage.remove(storage.join(staging.output, MANIFEST_NAME))
    progress = {"num_shards": len(plan.seqs_per_shard), "num_bytes": plan.num_bytes}
    storage.commit_bytes(
        storage.join(staging.folder, "plan.json"),
        msgspec.json.encode(progress | {"num_seqs": sum(plan.seqs_per_shard)}),
    )


def refuse_rerun(output: str, overwrite: bool) -> None:
    """Refuses, before trainers run, a folder that `prepare_output` may refuse after they ran.

    Raises:
        OutputExistsError: if the folder holds a dataset, or shards of unknown origin.
    """
    names = storage.list_names(output)
    if overwrite:
        return
    if MANIFEST_NAME in names:
        raise OutputExistsError(
            "the output folder holds a dataset already, and whether it is the same could only be "
            "told when all trainers have run again",
            output,
            hint="Choose another --output, or replace it with --overwrite.",
        )
    _refuse_unknown_shards(output, names)


def _refuse_unknown_shards(output: str, names: list[str]) -> None:
    if STAGING not in names and any(map(SHARD_PATTERN.fullmatch, names)):
        raise OutputExistsError(
            "the output folder holds shards but neither a manifest nor traces of an unfinished "
            "build",
            output,
            hint="Choose another --output, or replace them with --overwrite.",
        )


def _saved_plan(output: str) -> str | None:
    """The plan id of a finished dataset; None if its manifest cannot be read."""
    try:
        return load_manifest(output).plan
    except SeqshardError:
        return None


def _restore_receipts(staging: Staging) -> bool:
    """Whether a finished dataset is of these very sources; takes its receipts from its index."""
    if _saved_stamp(staging.output) != staging.stamp:
        return False
    manifest = load_manifest(staging.output)
    path = storage.join(staging.output, manifest.index.path)
    if not storage.exists(path) or hash_file(path) != manifest.index.xxh3_128:
        return False
    try:
        with storage.local_copy(path) as local:
            index = IndexFile(local, list(manifest.streams), len(manifest.shards))
            for shard in range(len(manifest.shards)):
                staging.save(shard, decode_receipt(index.metadata(shard)), index.batch(shard))
    except (SeqshardError, msgspec.MsgspecError):
        return False
    return True


def _saved_stamp(output: str) -> str | None:
    try:
        data = storage.read_bytes(storage.join(output, PROVENANCE_NAME))
        return msgspec.json.decode(data, type=dict[str, Any]).get("stamp")
    except (SourceNotFoundError, msgspec.MsgspecError):
        return None


def complete_dataset(
    staging: Staging,
    plan: DatasetPlan,
    shards: Iterable[int],
    rejected: Iterable[Rejection],
    provenance: dict[str, Any],
) -> Manifest:
    """Checks that everything planned has come back once, and writes the manifest last.

    Raises:
        OutputError: if a shard is missing, came twice, or has not the planned sequences.
    """
    done = _already_complete(staging)
    if done is not None:
        return done
    found = sorted(shards)
    if found != list(range(len(plan.seqs_per_shard))):
        raise OutputError(
            "not every planned shard was written exactly once",
            staging.output,
            expected=f"{len(plan.seqs_per_shard)} shards",
            found=f"{len(found)} receipts, {len(set(found))} different",
            hint="Run the build again; finished shards are kept.",
        )
    rejected = list(rejected)
    infos, index, statistics = _write_index(staging, plan, rejected)
    rejected_info = _write_rejected(staging.output, rejected)
    manifest = Manifest(
        format=FORMAT,
        version=VERSION,
        plan=staging.plan,
        seq_ordering=plan.seq_ordering,
        streams=plan.streams,
        num_seqs=sum(info.num_seqs for info in infos),
        num_frames={name: sum(info.num_frames[name] for info in infos) for name in plan.streams},
        num_bytes=sum(info.num_bytes for info in infos),
        num_rejected=len(rejected),
        sources=plan.sources,
        shards=tuple(infos),
        index=index,
        rejected=rejected_info,
        statistics=statistics,
        layout=plan.layout.kind,
    )
    clean_folder(staging.output, {info.path for info in infos}, keep_rejected=bool(rejected))
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    known = provenance | {"finished": now, "stamp": staging.stamp}
    shown = {key: redact(v) if isinstance(v, str) else v for key, v in known.items()}
    document = msgspec.json.format(msgspec.json.encode(shown), indent=1)
    storage.commit_bytes(storage.join(staging.output, PROVENANCE_NAME), document + b"\n")
    storage.commit_bytes(storage.join(staging.output, MANIFEST_NAME), encode_manifest(manifest))
    storage.remove_folder(storage.join(staging.output, STAGING))
    return manifest


def _already_complete(staging: Staging) -> Manifest | None:
    """The manifest, if an earlier attempt of this very step wrote it and lost its answer."""
    names = storage.list_names(staging.output)
    if MANIFEST_NAME not in names or storage.list_names(staging.folder):
        return None
    manifest = load_manifest(staging.output)
    return manifest if manifest.plan == staging.plan else None


def _receipts(staging: Staging, plan: DatasetPlan) -> Iterator[tuple[Receipt, pa.RecordBatch]]:
    for shard, num_seqs in enumerate(plan.seqs_per_shard):
        found = staging.load(shard)
        if found is None or found[0].info.num_seqs + _num_lost(found[0]) != num_seqs:
            raise OutputError(
                "a shard does not hold the planned sequences",
                storage.join(staging.output, shard_name(shard, len(plan.seqs_per_shard))),
                expected=f"{num_seqs} sequences",
                found="no receipt" if found is None else f"{found[0].info.num_seqs}",
                hint="Run the build again.",
            )
        yield found


def _num_lost(receipt: Receipt) -> int:
    return len({rejection.tag for rejection in receipt.rejected})


def _write_index(
    staging: Staging, plan: DatasetPlan, rejected: list[Rejection]
) -> tuple[list[ShardInfo], FileInfo, dict[str, Any]]:
    """Writes index.arrow from the receipts, one at a time; adds what they rejected."""
    infos = []
    statistics = {name: StreamStatistics() for name in plan.streams}
    lengths = LengthStatistics()
    first = next(iter(plan.streams))
    path = storage.join(staging.output, INDEX_NAME)
    with storage.local_target(path) as target:
        with (
            pa.OSFile(target, "wb") as sink,
            pa.ipc.new_file(sink, index_schema(plan.streams)) as writer,
        ):
            for receipt, rows in _receipts(staging, plan):
                writer.write_batch(rows, custom_metadata={"receipt": encode_receipt(receipt)})
                infos.append(receipt.info)
                rejected.extend(receipt.rejected)
                lengths += measure_lengths(column(rows, f"length.{first}"))
                for name, values in receipt.statistics.items():
                    statistics[name] += values
        index = FileInfo(INDEX_NAME, storage.stamp(target).num_bytes, hash_file(target))
        storage.sync(target)
        storage.publish(target, path)
    summary = {name: values.summary() for name, values in statistics.items()}
    return infos, index, summary | {"length": lengths.summary()}


def _write_rejected(output: str, rejected: list[Rejection]) -> FileInfo | None:
    path = storage.join(output, REJECTED_NAME)
    if not rejected:
        return None
    ordered = sorted(rejected, key=Rejection.sort_key)
    storage.commit_bytes(path, msgspec.json.Encoder().encode_lines(ordered))
    return FileInfo(REJECTED_NAME, storage.stamp(path).num_bytes, hash_file(path))


def clean_folder(output: str, shards: set[str], keep_rejected: bool) -> None:
    """Removes what unfinished or replaced builds left behind."""
    for name in storage.list_names(output):
        stale_shard = SHARD_PATTERN.fullmatch(name) and name not in shards
        stale_list = name == REJECTED_NAME and not keep_rejected
        if stale_shard or stale_list or TEMPORARY_PATTERN.fullmatch(name):
            storage.remove(storage.join(output, name))
    storage.abort_uploads(output)
