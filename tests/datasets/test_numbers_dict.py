"""NumbersDict against RETURNN's."""

import copy
import operator
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from returnn.util.basic import NumbersDict as ReturnnNumbersDict

from seqshard.datasets import NumbersDict

numbers = st.integers(-5, 5)
operands = st.one_of(
    numbers,
    st.tuples(st.dictionaries(st.sampled_from("abc"), numbers, max_size=3), st.none() | numbers),
)


def build(cls, operand):
    if isinstance(operand, tuple):
        return cls(numbers_dict=operand[0], broadcast_value=operand[1])
    return operand


def outcome(function):
    """The result in a form that is comparable between both classes, or the error."""
    try:
        result = function()
    except ZeroDivisionError as error:
        return str(type(error))
    return (list(result.dict.items()), result.value) if hasattr(result, "dict") else result


BINARY = ["add", "sub", "mul", "truediv", "floordiv", "eq", "ne", "iadd", "isub", "imul"]


@given(name=st.sampled_from(BINARY), a=operands, b=operands)
def test_operators(name, a, b):
    if not isinstance(a, tuple) and (not isinstance(b, tuple) or "div" in name):
        a = ({}, a)
    op = getattr(operator, name)
    ours, theirs = (
        outcome(lambda cls=cls: op(build(cls, a), build(cls, b)))
        for cls in (NumbersDict, ReturnnNumbersDict)
    )
    assert ours == theirs


@given(name=st.sampled_from(["max", "min"]), items=st.lists(operands, min_size=1, max_size=4))
def test_max_and_min(name, items):
    ours, theirs = (
        outcome(lambda cls=cls: getattr(cls, name)([build(cls, item) for item in items]))
        for cls in (NumbersDict, ReturnnNumbersDict)
    )
    assert ours == theirs


@given(a=operands.filter(lambda x: isinstance(x, tuple)), b=operands)
def test_methods(a, b):
    b = b if isinstance(b, tuple) else ({}, b)
    for method in (
        lambda x, y: x.copy_like(y),
        lambda x, y: type(x).constant_like(3, numbers_dict=y),
        lambda x, y: x.any_compare(y, lambda p, q: p > q),
        lambda x, y: x.keys_union(y),
        lambda x, y: x.elem_eq(y, result_with_default=False),
        lambda x, y: -x,
        lambda x, y: bool(x),
        lambda x, y: sorted(x.values()),
        lambda x, y: x.get("a", 7),
        lambda x, y: x.has_value_for("a"),
        lambda x, y: x.has_values(),
        lambda x, y: sum([x, y]),
    ):
        ours, theirs = (
            outcome(lambda cls=cls, m=method: m(build(cls, a), build(cls, b)))
            for cls in (NumbersDict, ReturnnNumbersDict)
        )
        assert ours == theirs


def test_returnn_operands_are_accepted():
    theirs = ReturnnNumbersDict({"data": 3, "classes": 4})
    assert NumbersDict(theirs) == theirs
    ours = NumbersDict({"data": 1})
    assert (ours + theirs).dict == {"data": 4, "classes": 4}
    assert (theirs + ours).dict == {"data": 4, "classes": 4}
    assert ReturnnNumbersDict.min([theirs, ours]).dict == {"data": 1, "classes": 4}
    assert isinstance(ours, NumbersDict)
    assert isinstance(ours, ReturnnNumbersDict)


def test_copies():
    frames = NumbersDict(numbers_dict={"data": 3}, broadcast_value=7)
    for twin in (pickle.loads(pickle.dumps(frames)), copy.deepcopy(frames), copy.copy(frames)):
        assert type(twin) is NumbersDict
        assert (twin.dict, twin.value) == (frames.dict, frames.value)
        assert twin.dict is not frames.dict


def test_access():
    frames = NumbersDict({"data": 3})
    assert frames["data"] == 3
    assert "data" in frames
    assert "classes" not in frames
    with pytest.raises(KeyError):
        frames["classes"]
    assert NumbersDict(5)["anything"] == 5
    with pytest.raises(TypeError, match="cannot be iterated"):
        list(frames)
    with pytest.raises(TypeError, match="one value to convert"):
        NumbersDict({"data": 3}, broadcast_value=1)
    assert repr(frames) == "NumbersDict({'data': 3})"
    assert (frames.max_value(), frames.min_value()) == (3, 3)
