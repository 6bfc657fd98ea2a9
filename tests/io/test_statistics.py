"""Statistics next to numpy in double precision, in any number of pieces."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqshard.io.records import StreamFormat
from seqshard.io.statistics import (
    MAX_CLASSES,
    LengthStatistics,
    StreamStatistics,
    measure,
    measure_lengths,
)


def dense(shape, dtype="float32"):
    return StreamFormat(dtype, shape[-1] if shape else 1, 1 + len(shape), False, None, shape)


def sparse(dim, dtype="int32"):
    return StreamFormat(dtype, dim, 1, True)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int16", "uint8", "bool"])
@pytest.mark.parametrize("shape", [(1,), (7,), (40,), (3, 5), (5000,)])
@pytest.mark.parametrize("num_frames", [1, 5, 700])
def test_mean_and_deviation(dtype, shape, num_frames):
    rng = np.random.RandomState(0)
    frames = (rng.randn(num_frames, *shape) * 30 + 50).astype(dtype)
    found = measure(dense(shape, dtype), frames).summary()
    flat = frames.reshape(num_frames, -1).astype("float64")
    np.testing.assert_allclose(found["mean"], flat.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(found["std"], flat.std(axis=0), rtol=1e-7, atol=1e-6)


@given(st.lists(st.integers(0, 100), max_size=6), st.sampled_from([(4,), (1,), (2, 3), (0,)]))
def test_pieces_add_up(sizes, shape):
    rng = np.random.RandomState(1)
    blocks = [rng.randint(-50, 50, (size, *shape)).astype("float32") for size in sizes]
    total = StreamStatistics()
    for block in blocks:
        total += measure(dense(shape), block)
    frames = np.concatenate([np.zeros((0, *shape), "float32"), *blocks])
    assert total.num_frames == len(frames)
    if blocks:
        # Sums of whole numbers are exact, whatever the order.
        flat = frames.reshape(len(frames), int(np.prod(shape))).astype("float64")
        np.testing.assert_array_equal(total.total, flat.sum(axis=0))
        np.testing.assert_array_equal(total.squares, (flat * flat).sum(axis=0))


def test_without_frames_there_is_no_mean():
    assert StreamStatistics().summary() == {}
    assert measure(dense((4,)), np.zeros((0, 4), "float32")).summary() == {}


@pytest.mark.parametrize(("dtype", "shape"), [("S3", ()), ("complex64", (2,)), ("float32", ())])
def test_elements_without_a_mean_per_dimension_are_only_counted(dtype, shape):
    found = measure(dense(shape, dtype), np.zeros((5, *shape), dtype))
    assert (found.num_frames, found.summary()) == (5, {})


def test_not_a_number_stays_in_its_dimension():
    frames = np.ones((20, 3), "float32")
    frames[3, 1] = np.nan
    frames[4, 2] = np.inf
    mean = measure(dense((3,)), frames).summary()["mean"]
    assert mean[0] == 1
    assert np.isnan(mean[1])
    assert mean[2] == np.inf


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint32", "int64", "uint64"])
def test_classes_are_counted(dtype):
    frames = np.array([0, 3, 3, 4, 0, 3], dtype)
    assert measure(sparse(5, dtype), frames).summary() == {"counts": [2, 0, 0, 3, 1]}


def test_classes_out_of_range_are_told():
    frames = np.array([0, -1, 5, 4, 2**31 - 1], "int32")
    found = measure(sparse(5), frames).summary()
    assert found == {"counts": [1, 0, 0, 0, 1], "out_of_range": 3}
    huge = np.array([2**64 - 1, 1], "uint64")
    assert measure(sparse(2, "uint64"), huge).summary() == {"counts": [0, 1], "out_of_range": 1}


def test_a_claimed_number_of_classes_takes_no_memory():
    frames = np.array([1, 2], "int32")
    assert len(measure(sparse(MAX_CLASSES), frames).counts) == MAX_CLASSES
    assert measure(sparse(2**60), frames).summary() == {}


@given(st.lists(st.integers(0, 2**31 - 1), max_size=50), st.integers(0, 50))
def test_lengths(values, cut):
    parts = [np.array(values[:cut], np.int32), np.array(values[cut:], np.int32)]
    found = (LengthStatistics() + measure_lengths(parts[0]) + measure_lengths(parts[1])).summary()
    assert found["min"] == min(values, default=0)
    assert found["max"] == max(values, default=0)
    assert found["mean"] == sum(values) / max(1, len(values))
    histogram = {}
    for value in values:
        smallest = str((1 << value.bit_length()) >> 1)
        histogram[smallest] = histogram.get(smallest, 0) + 1
    assert found["histogram"] == histogram
