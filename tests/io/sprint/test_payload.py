from __future__ import annotations

import struct

import numpy as np
import pytest

from seqshard.io.errors import ShapeMismatchError, SourceFormatError, UnsupportedPayloadError
from seqshard.io.sprint.archive import Archive
from seqshard.io.sprint.payload import decode_blocks, decode_frames, decode_matrix

UNIFORM = [
    "f32-dim1",
    "f32-dim16",
    "f32-dim40-gz",
    "gather9-f32-dim4",
    "special-values-f32",
    "types/vector-f64",
    "types/vector-s16",
    "types/vector-u8",
    "zero-frames",
]


def sequences(archive):
    return [archive.payload(int(i)) for i in archive.sequences]


@pytest.mark.parametrize("name", UNIFORM)
def test_features_equal_truth(rasr, name):
    truth = np.load(rasr / "truth" / "features" / f"{name}.cache.npz")
    with Archive(rasr / "features" / f"{name}.cache") as archive:
        features = [decode_matrix(data) for data in sequences(archive)]
    assert [len(item.values) for item in features] == truth["num_frames"].tolist()
    assert b"".join(item.values.tobytes() for item in features) == truth["values"].tobytes()
    assert b"".join(item.times.tobytes() for item in features) == truth["times"].tobytes()
    assert {item.values.dtype for item in features if len(item.values)} <= {truth["values"].dtype}


def test_ragged_frames_equal_truth(rasr):
    truth = np.load(rasr / "truth" / "features" / "ragged-f32.cache.npz")
    with Archive(rasr / "features" / "ragged-f32.cache") as archive:
        decoded = [decode_frames(data) for data in sequences(archive)]
        with pytest.raises(ShapeMismatchError, match=r"dimension changes .*found 6, 9"):
            decode_matrix(archive.payload(3))
    frames = [frame for frames, _ in decoded for frame in frames]
    assert [len(frame) for frame in frames] == truth["frame_dims"].tolist()
    assert np.concatenate(frames).tobytes() == truth["values"].tobytes()
    assert np.concatenate([times for _, times in decoded]).tobytes() == truth["times"].tobytes()


def test_one_block_is_a_view(writer):
    data = bytearray(writer.features(np.ones((3, 4), np.float32)))
    values = decode_matrix(data).values
    data[22:26] = struct.pack("<f", 7.0)
    assert values[0, 0] == 7.0


def test_several_blocks_and_a_change_of_type(writer):
    first, second = np.ones((2, 3), np.float32), np.zeros((1, 3), np.float32)
    data = writer.features(first) + writer.block("vector-f32", []) + writer.features(second)
    assert decode_matrix(data).values.tolist() == [[1.0] * 3] * 2 + [[0.0] * 3]
    assert decode_matrix(b"").values.shape == (0, 0)
    assert decode_matrix(writer.block("vector-f32", [])).values.shape == (0, 0)
    for other in (
        writer.features(second[:, :2]),
        writer.features(np.zeros((1, 3)), "vector-f64"),
    ):
        with pytest.raises(ShapeMismatchError, match="data type or dimension change"):
            decode_matrix(data + other)
        assert len(decode_blocks(data + other)) == 4


def test_dimensions_that_only_sum_up(writer):
    """The size of the block is that of three vectors of dimension 2, but they are 2, 1 and 3."""
    packets = [writer.vector(np.ones(dim, np.float32)) for dim in (2, 1, 3)]
    data = writer.block("vector-f32", packets)
    assert [len(frame) for frame in decode_frames(data)[0]] == [2, 1, 3]
    with pytest.raises(ShapeMismatchError, match="found 1, 2, 3"):
        decode_matrix(data)


def test_dimension_zero(writer):
    packets = [writer.vector(np.ones(dim, np.float32)) for dim in (0, 0)]
    assert decode_matrix(writer.block("vector-f32", packets)).values.shape == (2, 0)
    packets.append(writer.vector(np.ones(1, np.float32)))
    assert [len(frame) for frame in decode_frames(writer.block("vector-f32", packets))[0]] == [
        0,
        0,
        1,
    ]


def test_damage_names_the_byte(writer):
    data = writer.features(np.ones((3, 4), np.float32))
    big = struct.pack("<I", 0xFFFFFFFF)
    cases = [
        (big + data[4:], "byte 0: no name of a Flow data type"),
        (data[:2], "byte 0: no name of a Flow data type"),
        (b"\0\0\0\0" + data[4:], "byte 0: no name of a Flow data type"),
        (data[:4] + b"\xff" + data[5:], "byte 4: the name of a Flow data type is not ASCII"),
        (data[:14] + big + data[18:], "byte 18: the data ends before its items do"),
        (data[:18] + big + data[22:], "byte 18: the data ends inside a vector"),
        (data[:54] + struct.pack("<I", 3) + data[58:], "byte .*: the data ends inside a vector"),
        (data[:-1], "byte 90: the data ends inside a vector"),
        (data + b"\0", "byte 126: no name of a Flow data type"),
    ]
    for damaged, message in cases:
        with pytest.raises(SourceFormatError, match=message):
            decode_matrix(damaged)


def test_types_that_are_no_features(writer):
    with pytest.raises(UnsupportedPayloadError, match="'vector-x' is not supported"):
        decode_matrix(writer.block("vector-x", []))
