"""The messages of a RASR process: what is understood, and that nothing else happens."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import pickletools
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from returnn.util.basic import serialize_object

from seqshard.io.errors import ShapeMismatchError, SourceFormatError
from seqshard.io.sprint.messages import (
    MAX_OPERATIONS,
    Exit,
    Init,
    Segment,
    decode_pickle,
    parse_message,
)

FEATURES = np.arange(12, dtype="float32").reshape(3, 4)
SEGMENT = (
    "data",
    ("rec/größe", FEATURES, {"classes": np.arange(4, dtype="int32"), "orth": "ä b", "n": None}),
)
ARRAYS = st.one_of(
    hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
    for dtype in ["<f4", ">f8", "<i4", "|u1", "|b1", "<c8", "|S3", "<U2", "<f2"]
)
PLAIN = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary()
)
VALUES = st.recursive(
    PLAIN,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.tuples(inner, inner, inner, inner),
        st.dictionaries(st.text(), inner, max_size=4),
    ),
    max_leaves=8,
)


def assert_same(found, expected):
    assert type(found) is type(expected)
    if isinstance(expected, np.ndarray):
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        assert found.tobytes() == expected.tobytes()
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, value in expected.items():
            assert_same(found[key], value)
    elif isinstance(expected, tuple | list):
        assert len(found) == len(expected)
        for pair in zip(found, expected, strict=True):
            assert_same(*pair)
    else:
        assert found == expected


@given(VALUES, st.integers(3, 5))
def test_plain_values(value, protocol):
    assert_same(decode_pickle(pickle.dumps(value, protocol)), value)


@given(ARRAYS, st.integers(3, 5), st.booleans())
def test_arrays_of_all_protocols(array, protocol, fortran):
    array = np.array(array, order="F" if fortran else "C")
    value = {"a": array, "again": [array, array.T], "scalar": array.dtype.type()}
    assert_same(decode_pickle(pickle.dumps(value, protocol)), value)


@given(ARRAYS.filter(lambda array: array.dtype.isnative))
def test_arrays_of_returnn(array):
    assert_same(decode_pickle(serialize_object(array)[4:]), array)


def test_messages():
    assert parse_message(pickle.dumps(("init", (40, 12001, None)), 4)) == Init(40, 12001, None)
    assert parse_message(pickle.dumps(("init", (40, 0, 7)), 4)) == Init(40, 0, 7)
    assert parse_message(pickle.dumps(("exit", None), 4)) == Exit()
    for payload in (pickle.dumps(SEGMENT, 5), serialize_object(SEGMENT)[4:]):
        segment = parse_message(payload)
        assert isinstance(segment, Segment)
        assert_same((segment.name, segment.features, segment.targets), SEGMENT[1])


def test_arrays_share_the_memory_of_the_message():
    payload = pickle.dumps(("data", (None, FEATURES, {})), 5)
    features = parse_message(payload).features
    assert not features.flags.writeable
    assert not features.flags.owndata


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (("hello", None), r"no message of the protocol .*found \('hello', NoneType\)"),
        (("init", (40, "x", None)), r"no message of the protocol .*found \('init', tuple\)"),
        (("data", ("a", [1, 2], {})), "no message"),
        ([1] * 50, "found list"),
        ((np.zeros(3), (1, 2, 3)), r"found \(ndarray, tuple\)"),
        (("init", 10**30), r"\('init', int\)"),
        (("data", ("a", np.zeros(3, "f4"), {})), r"entry 'a': the features are not.*float32 \[3\]"),
        (("data", ("a", np.zeros((3, 2), "c8"), {})), "complex64"),
        (("data", ("a", FEATURES, {3: "x"})), "the name of a target is no text"),
    ],
)
def test_wrong_messages(value, match):
    with pytest.raises(SourceFormatError, match=match):
        parse_message(pickle.dumps(value, 4))


def test_features_of_a_wrong_type_are_a_shape_mismatch():
    with pytest.raises(ShapeMismatchError):
        parse_message(pickle.dumps(("data", ("a", np.zeros((3, 2), "S1"), {})), 4))


class Evil:
    """Would run a command when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_nothing_is_run(tmp_path):
    victim = tmp_path / "victim"
    for value in (Evil(victim), ("data", ("a", FEATURES, {"orth": Evil(victim)}))):
        with pytest.raises(SourceFormatError, match=r"'posix.system' is not allowed"):
            parse_message(pickle.dumps(value, 4))
    assert not victim.exists()


def refused(operations):
    with pytest.raises(SourceFormatError) as caught:
        decode_pickle(operations)
    return str(caught.value)


@pytest.mark.parametrize(
    ("payload", "match"),
    [
        (b"\x80\x04cbuiltins\neval\n.", "'builtins.eval' is not allowed"),
        (b"\x80\x04cnumpy\nload\n.", "'numpy.load' is not allowed"),
        (b"\x80\x04cnumpy.core.multiarray\n_reconstruct\n}b.", "_Constructor with a state"),
        (b"\x80\x04cnumpy\ndtype\n\x8c\x01O\x85R.", "element type 'O'"),
        (b"\x80\x04cnumpy\ndtype\n\x8c\x0a(1000000,)\x85R.", "element type"),
        (b"\x80\x04]]R.", "a list where a tuple is due"),
        (b"\x80\x04.", "a value is missing"),
        (b"\x80\x04(.", "a value is missing"),
        (b"\x80\x04h\x07.", "damaged or not plain data: 7"),
        (b"\x80\x04B\xff\xff\xff\x7fabc", "expected 2147483647 bytes"),
        (b"\x80\x04\x82\x01.", "operation EXT1"),
        (b"\x80\x04Pid\n.", "operation PERSID"),
        (b"\x80\x02S'a'\n.", "operation STRING"),
        (b"\x80\x04]" + b"N" * MAX_OPERATIONS + b".", f"more than {MAX_OPERATIONS} operations"),
        (b"\x80\x04K\x01", "pickle exhausted"),
        (b"\xff", "opcode b'\\xff' unknown"),
    ],
)
def test_other_operations_are_refused(payload, match):
    assert match in refused(payload)


@pytest.mark.parametrize("action", ["error", "ignore"])
def test_a_warning_is_no_way_around(action):
    with warnings.catch_warnings():
        warnings.simplefilter(action)
        found = refused(b"\x80\x02S'\\y'\n.")
    assert "invalid escape sequence" in found or "operation STRING" in found


def test_the_position_of_the_fault():
    payload = pickle.dumps(("data", ("a", Evil("x"), {})), 4)
    with pytest.raises(SourceFormatError) as caught:
        decode_pickle(payload)
    names = {position: op.name for op, _, position in pickletools.genops(payload)}
    assert names[caught.value.position] == "STACK_GLOBAL"


def test_arrays_need_as_many_bytes_as_they_claim():
    def array(shape, data=b"1234"):
        stream = io.BytesIO()
        pickler = pickle._Pickler(stream, 4)
        stream.write(b"\x80\x04creturnn.util.task_system\nmake_numpy_ndarray_fromstring\n")
        pickler.save((data, "float32", shape))
        stream.write(b"R.")
        return stream.getvalue()

    assert decode_pickle(array((1,))).shape == (1,)
    assert "float32 [1000000000000] in 4 bytes" in refused(array((10**12,)))
    assert "(-1, -1)" in refused(array((-1, -1)))
    assert "(bool)" in refused(array((True,))) or "(True)" in refused(array((True,)))
    assert "an array of int" in refused(array((1,), data=1234))


@settings(max_examples=300)
@given(st.data())
def test_damaged_messages_give_values_or_typed_errors(data):
    payload = bytearray(
        data.draw(st.sampled_from([pickle.dumps(SEGMENT, p) for p in (2, 3, 4, 5)]))
    )
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    payload = bytes(payload[: data.draw(st.integers(0, len(payload)))])
    with contextlib.suppress(SourceFormatError):
        assert isinstance(parse_message(payload), Init | Segment | Exit)


@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_any_bytes_give_typed_errors(payload):
    with pytest.raises(SourceFormatError):
        parse_message(payload)
