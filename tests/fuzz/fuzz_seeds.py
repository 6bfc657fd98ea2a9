"""Inputs to start from: what RASR wrote, and what the package itself writes."""

from __future__ import annotations

import io
import os
import pickle
import tempfile

import numpy as np
import pyarrow as pa
from fuzz_targets import DATA, STREAMS, intact_archives

from seqshard.io.errors import SeqshardError
from seqshard.io.index import index_batch
from seqshard.io.manifest import (
    ArrayInfo,
    FileInfo,
    Manifest,
    ShardInfo,
    SourceInfo,
    encode_manifest,
)
from seqshard.io.receipts import Receipt, Rejection, Staging
from seqshard.io.records import StreamFormat
from seqshard.io.sprint.archive import Archive

_LARGEST = 1 << 14


def seeds(target: str) -> list[bytes]:
    """Inputs for the target of that name."""
    return _SEEDS[target]()


def _archives() -> list[bytes]:
    files = [path.read_bytes() for path in sorted(DATA.rglob("*.cache"))]
    small = [data for data in files if len(data) <= _LARGEST]
    return [bytes([options]) + data for data in small for options in (0, 3, 6, 12, 24, 27)]


def _mutations() -> list[bytes]:
    edit = bytes([7, 40, 0, 255])
    count = len(intact_archives())
    return [bytes([options, i]) + edit for i in range(count) for options in (0, 2, 7, 12, 24)]


def _payloads() -> list[bytes]:
    found = set()
    for path in sorted(DATA.rglob("*.cache")):
        try:
            with Archive(str(path)) as archive:
                for entry in archive.sequences.tolist()[:8]:
                    found.add(bytes(archive.payload(entry)))
        except SeqshardError:
            continue
    return sorted(data for data in found if len(data) <= _LARGEST)


def _alignments() -> list[bytes]:
    return [data for data in _payloads() if data.startswith(b"\x0e\0\0\0flow-alignment")]


def _bundles() -> list[bytes]:
    texts = [path.read_bytes() for path in sorted(DATA.rglob("*.bundle"))]
    return [*texts, b"a\r\n a\n", b"a\na b.cache\n", b"x.bundle\n", b"/tmp ../ . //a\n"]


def _label_files() -> list[bytes]:
    return [
        b"# 3\nsi{#+#}@i@f\na{#+b}@i\n\nb{a+#}@f\n\0si{#+#}@i@f.0 0\na{#+b}@i.0 1\na{#+b}@i.2 2\n",
        b"a{#+#}\na{#+#}\nsi{#+#}@i@f\r\n\0a\nsi\n",
    ]


def _messages() -> list[bytes]:
    features = np.arange(6, dtype="f4").reshape(2, 3)
    targets = {"classes": np.arange(3, dtype="i4"), "orth": b"abc", "text": "\u00fc"}
    values = [
        ("init", (2, 3, None)),
        ("init", (2, 3, 17)),
        ("data", ("corpus/1", features, targets)),
        ("data", (None, features.T, {"classes": np.asfortranarray(features), "n": features[0, 0]})),
        ("exit", {}),
    ]
    return [pickle.dumps(value, protocol) for value in values for protocol in (2, 3, 4, 5)]


def _formats() -> dict[str, StreamFormat]:
    return {
        "data": StreamFormat("float32", 2, 2, False, shape=(2,)),
        "classes": StreamFormat("int8", 3, 1, True, ("a", "b", "c")),
    }


def _shard(number: int) -> ShardInfo:
    return ShardInfo(
        path=f"data-0000{number}-of-00002.hdf",
        num_seqs=2,
        num_frames={"data": 5, "classes": 5},
        num_bytes=45,
        file_bytes=9000,
        xxh3_128="0" * 32,
        arrays={"data": ArrayInfo(4096, (5, 2)), "classes": ArrayInfo(8192, (5,))},
    )


def _manifests() -> list[bytes]:
    manifest = Manifest(
        format="seqshard",
        version=1,
        plan="9f0c",
        seq_ordering="random:1",
        streams=_formats(),
        num_seqs=4,
        num_frames={"data": 10, "classes": 10},
        num_bytes=90,
        num_rejected=1,
        sources=(SourceInfo("data", "a.cache", 100, 4), SourceInfo("classes", "b.cache", 90, 4)),
        shards=(_shard(0), _shard(1)),
        index=FileInfo("index.arrow", 10, "0" * 32),
        rejected=FileInfo("rejected.jsonl", 10, "0" * 32),
        statistics={"length": {"min": 2, "max": 3}},
    )
    return [encode_manifest(manifest), b"{}", b'{"format": "seqshard", "version": 2}']


def _rows(number: int) -> pa.RecordBatch:
    lengths = {name: np.array([2, 3]) for name in STREAMS}
    digests = {name: np.array([1, 2], np.uint64) for name in STREAMS}
    return index_batch(pa.array([f"demo/{number}", "\u00fc"]), lengths, digests)


def _indexes() -> list[bytes]:
    sink = io.BytesIO()
    batches = [_rows(0), _rows(1)]
    with pa.ipc.new_file(sink, batches[0].schema) as writer:
        for rows in batches:
            writer.write_batch(rows, custom_metadata={"receipt": b"{}"})
    return [sink.getvalue()]


def _receipts() -> list[bytes]:
    receipt = Receipt(_shard(0), {}, (Rejection("a", "data", "x", "damaged"),))
    with tempfile.TemporaryDirectory() as folder:
        staging = Staging(folder, "p", "s")
        os.makedirs(staging.folder)
        staging.save(0, receipt, _rows(0))
        with open(staging.receipt_path(0), "rb") as file:
            data = file.read()
    return [b"\0" + data, b"\1" + data[16:]]


_SEEDS = {
    "archive": _archives,
    "mutated": _mutations,
    "payload": _payloads,
    "labels": _alignments,
    "bundle": _bundles,
    "label_files": _label_files,
    "message": _messages,
    "manifest": _manifests,
    "index": _indexes,
    "receipt": _receipts,
}
