from __future__ import annotations

import os

import pyarrow as pa
import pytest
import xxhash

from seqshard.io.receipts import Staging


def save(staging, data):
    """Puts content behind its right hash."""
    os.makedirs(staging.folder, exist_ok=True)
    with open(staging.receipt_path(0), "wb") as file:
        file.write(xxhash.xxh3_128_digest(data) + data)


def arrow_file(metadata):
    sink = pa.BufferOutputStream()
    rows = pa.record_batch({"tag": ["a"]})
    with pa.ipc.new_file(sink, rows.schema) as writer:
        writer.write_batch(rows, custom_metadata=metadata)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not an Arrow file",
        arrow_file({}),
        arrow_file({"other": b"{}"}),
        arrow_file({"receipt": b"{}"}),
        arrow_file({"receipt": b"\xff"}),
        arrow_file({"receipt": b"{}"})[:-20],
    ],
)
def test_what_another_version_wrote_is_no_receipt(data, tmp_path):
    staging = Staging(str(tmp_path), "plan", "stamp")
    assert staging.load(0) is None
    save(staging, data)
    assert staging.load(0) is None
