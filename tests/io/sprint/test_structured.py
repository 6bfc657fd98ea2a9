from __future__ import annotations

import contextlib
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqshard.io.errors import (
    SeqshardError,
    ShapeMismatchError,
    SourceFormatError,
    UnsupportedPayloadError,
)
from seqshard.io.sprint.archive import Archive
from seqshard.io.sprint.payload import DECODERS, Block, decode_blocks, decode_matrix

TIMES = struct.pack("<dd", 1.0, 2.0)


@pytest.fixture(scope="module")
def payloads(rasr):
    with Archive(rasr / "features" / "types" / "structured.cache") as archive:
        names = archive.names.to_pylist()
        return {names[i]: bytes(archive.payload(int(i))) for i in archive.sequences}


def one(data):
    (block,) = decode_blocks(data)
    return block


# What RASR wrote.


def test_bool_vectors(payloads):
    block = one(payloads["structured/vector-bool"])
    assert block.values.dtype == bool
    assert block.values.astype(int).tolist() == [[0, 1, 0, 1, 0], [1, 0, 1, 0, 1], [0, 1, 0, 1, 0]]
    assert block.times.tolist() == [[0, 1], [1, 2], [2, 3]]


@pytest.mark.parametrize(("name", "dtype"), [("f32", "<f4"), ("f64", "<f8")])
def test_scalars(payloads, name, dtype):
    block = one(payloads[f"structured/{name}"])
    assert block.values.dtype == np.dtype(dtype)
    assert block.values.tolist() == [-1.0, -0.75, -0.5, -0.25]
    assert block.times.tolist() == [[0, 0.5], [1, 1.5], [2, 2.5], [3, 3.5]]


def test_strings(payloads):
    assert one(payloads["structured/string"]).values == [
        b"hello world",
        b"",
        "grüß dich".encode(),
        b"line1\nline2",
    ]


def test_timestamps(payloads):
    block = one(payloads["structured/timestamp"])
    assert block.times.tolist() == [[0, 0.25], [0.5, 0.75], [1, 1.25]]
    assert len(block) == 3


def test_matrices(payloads):
    first, second = one(payloads["structured/matrix-f32"]).values
    assert first.dtype == np.dtype("<f4")
    assert first.tolist() == [[0, 1], [10, 11], [20, 21]]
    assert second.tolist() == [[100, 101, 102], [110, 111, 112], [120, 121, 122]]
    (matrix,) = one(payloads["structured/matrix-f64"]).values
    assert matrix.tolist() == [[0.5, 1.5, 2.5], [10.5, 11.5, 12.5]]
    (matrix,) = one(payloads["structured/archivewriter-matrix-f32"]).values
    assert matrix.tolist() == [[1, 2], [3, 4]]


def test_vectors_of_vectors(payloads):
    first, second = one(payloads["structured/vector-vector-f32"]).values
    assert [v.tolist() for v in first.values] == [[0], [10, 11]]
    assert [v.tolist() for v in second.values] == [[100], [110, 111], [120, 121, 122]]
    assert second.times.tolist() == [[10, 10.5], [11, 11.5], [12, 12.5]]


def test_aggregates(payloads):
    block = one(payloads["structured/aggregate"])
    (same,), (vector, string) = block.values
    assert (same.datatype, same.values.tolist()) == ("vector-f32", [[1, 1], [2, 2]])
    assert (vector.datatype, vector.values.tolist()) == ("vector-f32", [[7, 7]])
    assert (string.datatype, string.values) == ("string", [b"seven"])
    assert block.times.tolist() == [[0, 2], [0, 2]]
    (vectors,) = one(payloads["structured/aggregate-vector-f32"]).values
    assert vectors.values.tolist() == [[1, 1], [2, 2], [3, 3]]


def test_change_of_type_within_an_entry(payloads):
    data = payloads["structured/type-change"]
    assert [(block.datatype, block.values.shape) for block in decode_blocks(data)] == [
        ("vector-f32", (3, 2)),
        ("vector-s16", (2, 4)),
        ("vector-f32", (1, 2)),
    ]
    with pytest.raises(ShapeMismatchError, match="found vector-s16 of dimension 4"):
        decode_matrix(data)
    with pytest.raises(UnsupportedPayloadError, match=r"no feature vectors .*found string"):
        decode_matrix(payloads["structured/string"])


# What RASR did not write for us.


@pytest.mark.parametrize("dtype", ["<f4", "<f8", "u1", "i1", "<u2", "<i2", "<u4", "<i4", "<u8"])
def test_every_element_type(writer, dtype):
    kind = {"f": "f", "u": "u", "i": "s"}[np.dtype(dtype).kind]
    name = f"vector-{kind}{8 * np.dtype(dtype).itemsize}"
    array = np.array([[0, 1], [100, 127]], dtype)
    values = decode_matrix(writer.features(array, name)).values
    assert values.dtype == np.dtype(dtype)
    assert values.tolist() == array.tolist()


@pytest.mark.parametrize("dtype", ["c8", "c16"])
def test_complex_vectors(writer, dtype):
    array = np.array([[1 + 2j, -3j]], dtype)
    name = f"vector-complex-f{8 * np.dtype(dtype).itemsize // 2}"
    assert one(writer.features(array, name)).values.tolist() == array.tolist()


def test_ragged_bool_vectors(writer):
    packets = [writer.vector(np.array(v, "u1")) for v in ([1, 0], [255])]
    found = one(writer.block("vector-bool", packets)).values
    assert [v.tolist() for v in found] == [[True, False], [True]]


def test_alignment_as_a_block(writer):
    (alignment,) = one(writer.alignment(writer.rle([(2, 7), (3, 7)]))).values
    assert (alignment.time.tolist(), alignment.label.tolist()) == ([2, 3], [7, 7])


def aggregate(writer, datatype, *packets):
    parts = writer.string(datatype) + struct.pack("<I", len(packets)) + b"".join(packets)
    return b"\xff" + TIMES + parts


def test_nested_aggregates_are_bounded(writer):
    packet = TIMES
    for depth in range(12):
        name = "aggregate" if depth else "timestamp"
        packet = aggregate(writer, name, packet)
        data = writer.block("aggregate", [packet])
        if depth < 8:
            assert one(data).datatype == "aggregate"
        else:
            with pytest.raises(UnsupportedPayloadError, match="'aggregate' at depth 8"):
                decode_blocks(data)
    with pytest.raises(UnsupportedPayloadError, match="'flow-image' at depth 1"):
        decode_blocks(writer.block("aggregate", [aggregate(writer, "flow-image", TIMES)]))


def test_matrices_of_size_zero(writer):
    for rows, columns in ((0, 0), (0, 5), (2, 0)):
        body = struct.pack("<3I", rows, columns, rows) + struct.pack("<I", columns) * rows
        (matrix,) = one(writer.block("matrix-f32", [body + TIMES])).values
        assert matrix.shape == (rows, columns)


def test_contradictory_matrices(writer):
    good = struct.pack("<3I", 2, 1, 2) + struct.pack("<IfIf", 1, 0.5, 1, 0.25) + TIMES
    for position, message in ((8, "expected 2 rows"), (20, "expected 1 columns, found 3 in row 1")):
        damaged = bytearray(writer.block("matrix-f32", [good]))
        damaged[18 + position] = 3
        with pytest.raises(SourceFormatError, match=f"sizes of a matrix contradict.*{message}"):
            decode_blocks(bytes(damaged))


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_mutations_of_every_type_give_typed_errors_only(payloads, data):
    payload = bytearray(payloads[data.draw(st.sampled_from(sorted(payloads)))])
    for _ in range(data.draw(st.integers(1, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(SeqshardError):
        assert all(isinstance(block, Block) for block in decode_blocks(bytes(payload)))


@settings(deadline=None, max_examples=150)
@given(st.sampled_from(sorted(DECODERS)), st.binary(max_size=80), st.integers(0, 2**32 - 1))
def test_random_packets_give_typed_errors_only(datatype, packets, count):
    name = datatype.encode()
    header = struct.pack(f"<I{len(name)}sI", len(name), name, count % 4 if count % 2 else count)
    with contextlib.suppress(SeqshardError):
        decode_blocks(header + packets)
