from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from seqshard.io.errors import ShardIntegrityError
from seqshard.io.index import IndexFile, index_batch


@pytest.fixture
def intact():
    """The bytes of an index of two shards."""
    sink = pa.BufferOutputStream()
    batches = [rows(["a", "bc"]), rows(["def"])]
    with pa.ipc.new_file(sink, batches[0].schema) as writer:
        writer.write_batch(batches[0], custom_metadata={"receipt": b"{}"})
        writer.write_batch(batches[1])
    return sink.getvalue().to_pybytes()


def rows(tags):
    count = np.arange(1, len(tags) + 1)
    return index_batch(pa.array(tags), {"x": count}, {"x": count.astype(np.uint64)})


def open_index(tmp_path, data):
    path = tmp_path / "index.arrow"
    path.write_bytes(data)
    return IndexFile(str(path), ["x"], 2)


def read_all(index):
    for shard in range(2):
        index.starts(shard, "x")
        index.tag_array(shard)
        index.metadata(shard)


def test_metadata(tmp_path, intact):
    index = open_index(tmp_path, intact)
    assert (index.metadata(0), index.metadata(1)) == (b"{}", b"")
    assert index.tag_array(0).tolist() == [b"a", b"bc"]


@pytest.mark.parametrize("offset", [7, -1, 2**30])
def test_offsets_of_tags_outside_their_text(tmp_path, intact, offset):
    offsets = np.array([0, 1, 3], "<i4").tobytes()
    assert intact.count(offsets) == 1
    wrong = np.array([0, offset, 3], "<i4").tobytes()
    index = open_index(tmp_path, intact.replace(offsets, wrong))
    assert index.lengths(0, "x").tolist() == [1, 2]
    with pytest.raises(ShardIntegrityError, match=r"index.arrow: the index of shard 0 is dam"):
        index.tag_array(0)
    assert index.tag_array(1).tolist() == [b"def"]


def test_every_damaged_byte_gives_values_or_a_typed_error(tmp_path, intact):
    errors = set()
    for position in range(len(intact)):
        data = bytearray(intact)
        data[position] ^= (0xFF, 0x80, 1)[position % 3]
        try:
            read_all(open_index(tmp_path, bytes(data)))
        except ShardIntegrityError as error:
            errors.add(error.what.partition(":")[0])
    assert errors == {
        "the index cannot be read",
        "the index does not belong to this manifest",
        "the index of shard 0 is damaged",
        "the index of shard 1 is damaged",
    }


def test_columns_with_nulls_are_damaged(tmp_path):
    good = rows(["a", "b"])
    length = pa.array([1, None], pa.int32())
    columns = {name: good.column(name) for name in good.schema.names} | {"length.x": length}
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, good.schema) as writer:
        for _ in range(2):
            writer.write_batch(pa.record_batch(list(columns.values()), schema=good.schema))
    index = open_index(tmp_path, sink.getvalue().to_pybytes())
    with pytest.raises(ShardIntegrityError, match="shard 0 is damaged: values are missing"):
        index.lengths(0, "x")
