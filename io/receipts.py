"""What a finished shard leaves behind: its row of the manifest and its part of the index.

A receipt is written after its shard stands under its final name. Whoever finds a receipt of the
same plan, and a shard whose bytes still have the receipt's hash, need not write that shard again:
that is how a build resumes. The receipts of a finished dataset live on as metadata of its index.
"""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import xxhash

from . import storage
from .errors import SourceNotFoundError
from .manifest import ShardInfo
from .statistics import StreamStatistics

STAGING = ".build"
_DIGEST_BYTES = 16
NOT_LISTED = "not in the segment list"
# Reasons other than damage begin like this, whatever details follow.
_REASON_KINDS = {
    "missing": re.compile("missing in this stream"),
    "doubled": re.compile(r"\d+ times in this stream"),
    "not-listed": re.compile(NOT_LISTED),
    "length": re.compile(r"\d+ frames are outside"),
}


@dataclass(frozen=True)
class Rejection:
    """A sequence, or with an empty tag a whole file, that did not get into the dataset."""

    tag: str
    stream: str
    source: str
    reason: str

    def sort_key(self) -> tuple[str, str, str, str]:
        """Order of the lines of rejected.jsonl."""
        return (self.tag, self.stream, self.source, self.reason)


def rejection_kind(rejection: Rejection) -> str:
    """Why a sequence is rejected, in one word.

    "missing" in a stream, "doubled" in one, "not-listed" among the segments, of a "length" outside
    the limits, or "damaged".
    """
    kinds = (kind for kind, reason in _REASON_KINDS.items() if reason.match(rejection.reason))
    return next(kinds, "damaged")


@dataclass(frozen=True)
class Receipt:
    """Proof of one finished shard.

    Attributes:
        info: the shard's row of the manifest.
        statistics: per stream.
        rejected: planned sequences whose payload could not be decoded.
    """

    info: ShardInfo
    statistics: dict[str, StreamStatistics]
    rejected: tuple[Rejection, ...] = field(default=())


def encode_receipt(receipt: Receipt) -> bytes:
    """The receipt as JSON; arrays as base64, so that no digit and no NaN is lost."""
    return msgspec.json.encode(receipt, enc_hook=_encode_array)


def decode_receipt(data: bytes) -> Receipt:
    """Inverse of `encode_receipt`."""
    return msgspec.json.decode(data, type=Receipt, dec_hook=_decode_array)


def _encode_array(value: Any) -> str:
    if not isinstance(value, np.ndarray):
        raise NotImplementedError(type(value))
    return f"{value.dtype.str}:{base64.b64encode(value.tobytes()).decode('ascii')}"


def _decode_array(kind: type, value: str) -> np.ndarray:
    dtype, _, data = value.partition(":")
    return np.frombuffer(base64.b64decode(data), np.dtype(dtype))


@dataclass(frozen=True, slots=True)
class Staging:
    """The folder `<output>/.build/<plan>-<stamp>` in which one build keeps its receipts.

    Attributes:
        output: the dataset's folder.
        plan: plan id.
        stamp: hash over sizes and modification times of the sources.
    """

    output: str
    plan: str
    stamp: str

    @property
    def folder(self) -> str:
        """Where the receipts are."""
        return storage.join(storage.join(self.output, STAGING), f"{self.plan}-{self.stamp}")

    def receipt_path(self, shard: int) -> str:
        """Where the receipt of a shard is."""
        return storage.join(self.folder, f"{shard:05d}.receipt")

    def save(self, shard: int, receipt: Receipt, rows: pa.RecordBatch) -> None:
        """Commits a receipt with its index rows, behind a hash of both."""
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, rows.schema) as writer:
            writer.write_batch(rows, custom_metadata={"receipt": encode_receipt(receipt)})
        data = sink.getvalue()
        storage.commit_bytes(self.receipt_path(shard), xxhash.xxh3_128_digest(data) + bytes(data))

    def load(self, shard: int) -> tuple[Receipt, pa.RecordBatch] | None:
        """A saved receipt with its index rows, or None if there is no (readable) one."""
        try:
            content = storage.read_bytes(self.receipt_path(shard))
        except SourceNotFoundError:
            return None
        digest, data = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        if digest != xxhash.xxh3_128_digest(data):
            return None
        try:
            found = pa.ipc.open_file(pa.py_buffer(data)).get_batch_with_custom_metadata(0)
            return decode_receipt(found.custom_metadata[b"receipt"]), found.batch
        except (msgspec.MsgspecError, pa.ArrowException, OSError, ValueError, KeyError, TypeError):
            return None  # of another version of this program


def hash_file(path: str) -> str:
    """xxh3_128 of a file, local or remote, as hexadecimal digits."""
    hasher = xxhash.xxh3_128()
    for block in storage.read_blocks(path, storage.stamp(path).num_bytes):
        hasher.update(block)
    return hasher.hexdigest()
