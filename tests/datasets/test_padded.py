import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqshard.datasets.padded import axis_sizes, extra_rows, valid_frames
from seqshard.io.errors import ShapeMismatchError


@st.composite
def padded_batches(draw):
    axes = draw(st.integers(1, 3))
    num_seqs = draw(st.integers(1, 4))
    sizes = np.array(
        [
            draw(st.lists(st.integers(0, 4), min_size=num_seqs, max_size=num_seqs))
            for _ in range(axes)
        ]
    )
    row_shape = draw(st.sampled_from([(), (1,), (3,)]))
    shape = (num_seqs, *sizes.max(axis=1), *row_shape)
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape), sizes, row_shape


@given(padded_batches())
def test_valid_frames_are_the_cut_sequences_one_after_the_other(batch):
    inputs, sizes, row_shape = batch
    rows, index = valid_frames(inputs, sizes, row_shape, "x.hdf")
    got = rows if index is None else rows[index]
    expected = [
        sequence[tuple(slice(length) for length in sizes[:, i])].reshape(-1, *row_shape)
        for i, sequence in enumerate(inputs)
    ]
    np.testing.assert_array_equal(got, np.concatenate(expected))


@given(padded_batches())
def test_axis_sizes_of_what_it_is_given(batch):
    inputs, sizes, _ = batch
    got = axis_sizes(inputs, {axis: list(map(int, row)) for axis, row in enumerate(sizes)}, "x.hdf")
    np.testing.assert_array_equal(got, sizes)


def test_no_index_where_nothing_is_padded():
    rows, index = valid_frames(np.zeros((2, 3, 4)), np.full((1, 2), 3), (4,), "x.hdf")
    assert index is None
    assert rows.shape == (6, 4)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([3, 2], r"longest sequence .* axis 0 .*expected 0 to 4, found 2 to 3"),
        ([4, -1], r"expected 0 to 4, found -1 to 4"),
        ([4], r"expected 2 integers, found shape \(1,\)"),
        ([4.0, 2.0], r"float64"),
        ({1: [5, 5]}, r"axes 0, 1, \.\.\. of 2, found axes \[1\]"),
        ({0: [4, 4], 1: [5, 5], 2: [1, 1]}, r"found axes \[0, 1, 2\]"),
    ],
)
def test_lengths_that_do_not_fit(lengths, message):
    with pytest.raises(ShapeMismatchError, match=message):
        axis_sizes(np.zeros((2, 4, 5)), lengths, "x.hdf")


def test_fixed_axes_must_hold_one_row():
    with pytest.raises(ShapeMismatchError, match=r"x\.hdf: .*expected \(3,\), found \(5,\)"):
        valid_frames(np.zeros((2, 4, 5)), np.full((1, 2), 4), (3,), "x.hdf")


def test_extra_rows():
    rows, time = extra_rows(np.arange(6).reshape(2, 3), 2, "classes", "x.hdf")
    assert rows.tolist() == [0, 1, 2, 3, 4, 5]
    assert time == 3
    rows, time = extra_rows([7, 8], 2, "speaker", "x.hdf")
    assert rows.tolist() == [7, 8]
    assert time == 1
    rows, time = extra_rows(np.zeros((2, 0, 5)), 2, "states", "x.hdf")
    assert rows.shape == (0, 5)
    assert time == 0
    with pytest.raises(ShapeMismatchError, match=r"'x'.*expected batch 3, found shape \(2,\)"):
        extra_rows([7, 8], 3, "x", "x.hdf")
