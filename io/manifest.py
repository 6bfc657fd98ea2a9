"""manifest.json: what a dataset is. See docs/format.md."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from . import storage
from .errors import ManifestError, ManifestVersionError, SourceNotFoundError
from .records import StreamFormat

FORMAT = "seqshard"
VERSION = 1
LAYOUTS = ("returnn", "nextgen")
MANIFEST_NAME = "manifest.json"
INDEX_NAME = "index.arrow"
REJECTED_NAME = "rejected.jsonl"
PROVENANCE_NAME = "provenance.json"


def shard_name(shard: int, num_shards: int) -> str:
    """File name of a shard, for example data-00007-of-00064.hdf."""
    return f"data-{shard:05d}-of-{num_shards:05d}.hdf"


@dataclass(frozen=True)
class SourceInfo:
    """A source file: where it was relative to the configuration, and how much came from it."""

    stream: str
    path: str
    num_bytes: int
    num_seqs: int


@dataclass(frozen=True)
class ArrayInfo:
    """A stream in a shard: first byte of its array, and shape [frames, *frame shape].

    In the NextGen layout there is no such array, but one per sequence, and `offset` is None.
    """

    offset: int | None
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ShardInfo:
    """One shard. `num_bytes` is the payload; `file_bytes` the whole file, which the hash covers."""

    path: str
    num_seqs: int
    num_frames: dict[str, int]
    num_bytes: int
    file_bytes: int
    xxh3_128: str
    arrays: dict[str, ArrayInfo]


@dataclass(frozen=True)
class FileInfo:
    """A file beside the manifest, with its hash."""

    path: str
    num_bytes: int
    xxh3_128: str


@dataclass(frozen=True)
class Manifest:
    """The whole manifest. `plan` identifies configuration and sources; equal plans, equal bytes.

    `layout` is one of LAYOUTS, and says what the shards are like.
    """

    format: str
    version: int
    plan: str
    seq_ordering: str
    streams: dict[str, StreamFormat]
    num_seqs: int
    num_frames: dict[str, int]
    num_bytes: int
    num_rejected: int
    sources: tuple[SourceInfo, ...]
    shards: tuple[ShardInfo, ...]
    index: FileInfo
    rejected: FileInfo | None = None
    statistics: dict[str, Any] = field(default_factory=dict)
    layout: str = "returnn"


def encode_manifest(manifest: Manifest) -> bytes:
    """The manifest as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n"


def load_manifest(path: str) -> Manifest:
    """Reads and checks a manifest.

    Args:
        path: manifest.json, or the folder that holds it.

    Raises:
        ManifestError: if it is absent or malformed, or names a path outside its folder.
        ManifestVersionError: if its version is unknown.
    """
    path = manifest_path(path)
    try:
        data = storage.read_bytes(path)
    except SourceNotFoundError as error:
        if not isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
            raise
        raise ManifestError(
            "there is no manifest, so this is not a (complete) dataset",
            path,
            hint="Run the build again; it continues where it stopped.",
        ) from None
    try:
        head = msgspec.json.decode(data, type=dict[str, Any])
        if head.get("format") != FORMAT:
            raise ManifestError(
                "this is not a manifest of a dataset",
                path,
                expected=f'"format": "{FORMAT}"',
                found=repr(head.get("format")),
            )
        if head.get("version") != VERSION:
            raise ManifestVersionError(
                "this format version is unknown",
                path,
                expected=str(VERSION),
                found=repr(head.get("version")),
                hint="Update seqshard.",
            )
        manifest = msgspec.convert(head, Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ManifestError(f"the manifest is malformed: {error}", path) from error
    _check(manifest, path)
    return manifest


def manifest_path(path: str) -> str:
    """The manifest's own path, given itself or its folder."""
    return path if path.endswith(".json") else storage.join(path, MANIFEST_NAME)


def folder_of(path: str) -> str:
    """The folder in which a manifest stands."""
    return posixpath.dirname(manifest_path(path)) or "."


def _check(manifest: Manifest, path: str) -> None:
    if manifest.layout not in LAYOUTS:
        raise ManifestVersionError(
            "this layout of shards is unknown",
            path,
            expected=" or ".join(LAYOUTS),
            found=repr(manifest.layout),
            hint="Update seqshard.",
        )
    files = [shard.path for shard in manifest.shards]
    files += [info.path for info in (manifest.index, manifest.rejected) if info is not None]
    for name in files:
        if not name or "/" in name or "\\" in name or "://" in name or name.startswith("."):
            raise ManifestError(
                "the manifest names a file outside its folder",
                path,
                found=repr(name),
                hint="Do not use this dataset unless you know where it comes from.",
            )
    for name, stream in manifest.streams.items():
        _check_stream(name, stream, path)
    for shard in manifest.shards:
        _check_shard(manifest, shard, path)
    totals = {
        "num_seqs": (manifest.num_seqs, sum(s.num_seqs for s in manifest.shards)),
        "num_bytes": (manifest.num_bytes, sum(s.num_bytes for s in manifest.shards)),
    }
    for what, (stated, found) in totals.items():
        if stated != found:
            raise ManifestError(
                f"{what} is not the sum over the shards",
                path,
                expected=str(stated),
                found=str(found),
            )


def _check_stream(name: str, stream: StreamFormat, path: str) -> None:
    try:
        kind = np.dtype(stream.dtype).kind
    except (TypeError, ValueError):
        kind = "none"
    if kind not in "iufbcS" or min(stream.shape, default=0) < 0:
        raise ManifestError(
            f"the format of stream {name!r} is none that can be read",
            path,
            found=f"dtype {stream.dtype!r}, shape {stream.shape}",
        )


def _check_shard(manifest: Manifest, shard: ShardInfo, path: str) -> None:
    if set(shard.arrays) != set(manifest.streams) or set(shard.num_frames) != set(shard.arrays):
        raise ManifestError("a shard does not have the streams of the dataset", path, shard.path)
    for name, array in shard.arrays.items():
        stream = manifest.streams[name]
        shape = (shard.num_frames[name], *stream.shape)
        placed = array.offset is not None and array.offset >= 0
        consistent = placed == (manifest.layout == "returnn") and array.shape == shape
        if not consistent or min(shape) < 0:
            raise ManifestError(
                f"the array of stream {name!r} is described inconsistently",
                path,
                shard.path,
                expected=f"shape {shape}",
                found=f"shape {array.shape} at byte {array.offset}",
            )
