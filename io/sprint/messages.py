"""The messages that a RASR process sends over its pipe, decoded without running anything.

A message is a pickle of ("init", (input_dim, output_dim, num_segments)), then many of ("data",
(segment_name, features, targets)), then ("exit", None). That is the protocol of RETURNN's
`returnn.sprint.extern_interface`. A pickle is a program, and unpickling runs it. Here it is only
interpreted: plain values and numpy arrays come out, everything else is refused. Nothing is
imported or called on behalf of the sender, no memory is reserved because of a number in the
message, and arrays share the memory of the message.
"""

from __future__ import annotations

import math
import pickletools
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import ShapeMismatchError, SourceFormatError

# A message with a dozen targets takes about 300 operations.
MAX_OPERATIONS = 5_000

_PLAIN_DTYPE = re.compile(r"[<>=|]?[?biufcSU]\d{0,4}|(bool|u?int|float|complex)\d{0,3}")
_VALUES = frozenset(
    [
        *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
        *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
        *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
    ]
)
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
}


@dataclass(frozen=True, slots=True)
class Init:
    """The first message: number of features and of classes, and of segments if it is known."""

    input_dim: int
    output_dim: int
    num_segments: int | None


@dataclass(frozen=True, slots=True)
class Segment:
    """A sequence.

    Attributes:
        name: of the segment; None where RASR cuts its input into blocks of frames.
        features: [feature, time], read-only.
        targets: arrays and strings, for example "classes" [time] and "orth".
    """

    name: str | None
    features: np.ndarray
    targets: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Exit:
    """The last message."""


Message = Init | Segment | Exit

# Warnings, where they are errors: strings of Python 2 with strange escapes give one.
_FAULTS = (ValueError, TypeError, LookupError, OverflowError, struct.error, Warning)


class _Refused(ValueError):
    """The pickle does something that data do not need."""


def parse_message(payload: bytes) -> Message:
    """Decodes a message without its length.

    Raises:
        SourceFormatError: if it is not one of the messages, with the position in `payload` where
            decoding stopped if it is no pickle of data.
        ShapeMismatchError: if the features are not a matrix of numbers.
    """
    match decode_pickle(payload):
        case (str("init"), (int(input_dim), int(output_dim), None | int() as num_segments)):
            return Init(input_dim, output_dim, num_segments)
        case (str("data"), (None | str() as name, np.ndarray() as features, dict() as targets)):
            if features.ndim != 2 or features.dtype.kind not in "fiu":
                raise ShapeMismatchError(
                    "the features are not a matrix of numbers",
                    entry=name,
                    expected="float [feature, time]",
                    found=f"{features.dtype} {list(features.shape)}",
                )
            for key in targets:
                if not isinstance(key, str):
                    raise SourceFormatError(
                        "the name of a target is no text", entry=name, found=type(key).__name__
                    )
            return Segment(name, features, targets)
        case (str("exit"), _):
            return Exit()
        case other:
            raise SourceFormatError(
                "this is no message of the protocol",
                expected="'init', 'data' or 'exit' with their arguments",
                found=_describe(other),
            )


def decode_pickle(payload: bytes) -> Any:
    """The value of a pickle of plain data and numpy arrays.

    Raises:
        SourceFormatError: if it is damaged, or of anything else. The position is that of the
            operation at fault.
    """
    position = 0
    machine = _Machine()
    try:
        for count, (operation, arg, start) in enumerate(pickletools.genops(payload)):
            # genops reads an operation before it yields it: a damaged one is behind `start`.
            position = start or 0
            if count >= MAX_OPERATIONS:
                raise _Refused(f"more than {MAX_OPERATIONS} operations")
            machine.run(operation.name, arg)
        return machine.pop()
    except _FAULTS as error:
        raise SourceFormatError(
            f"the message is damaged or not plain data: {_first_line(error)}", position=position
        ) from error


class _Machine:
    """The stack and the memo of a pickle."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def pop(self) -> Any:
        if not self._stack or (self._marks and self._marks[-1] >= len(self._stack)):
            raise _Refused("a value is missing")
        return self._stack.pop()

    def _pop_mark(self) -> list[Any]:
        start = self._marks.pop()
        items = self._stack[start:]
        del self._stack[start:]
        return items

    def run(self, name: str, arg: Any) -> None:
        """Executes an operation as `pickletools` names and parses it."""
        if name == "MEMOIZE":  # by far the most frequent one
            self._memo[len(self._memo)] = self._stack[-1]
        elif name in _VALUES:
            self._stack.append(arg)
        elif name in _CONSTANTS:
            self._stack.append(_CONSTANTS[name]())
        elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
            self._memo[arg] = self._stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            self._stack.append(self._memo[arg])
        elif name not in ("PROTO", "FRAME", "STOP"):
            self._build(name, arg)

    def _build(self, name: str, arg: Any) -> None:
        match name:
            case "MARK":
                self._marks.append(len(self._stack))
                return
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                items = [self.pop() for _ in range(int(name[-1]))]
                value: Any = tuple(reversed(items))
            case "TUPLE":
                value = tuple(self._pop_mark())
            case "LIST":
                value = self._pop_mark()
            case "DICT":
                value = _pairs(self._pop_mark())
            case "APPEND" | "APPENDS":
                items = [self.pop()] if name == "APPEND" else self._pop_mark()
                value = _expect(self.pop(), list)
                value.extend(items)
            case "SETITEM" | "SETITEMS":
                items = [self.pop(), self.pop()][::-1] if name == "SETITEM" else self._pop_mark()
                value = _expect(self.pop(), dict)
                value.update(_pairs(items))
            case "GLOBAL":
                value = _constructor(*arg.split(" ", 1))
            case "STACK_GLOBAL":
                attribute, module = self.pop(), self.pop()
                value = _constructor(module, attribute)
            case "REDUCE":
                args, constructor = _expect(self.pop(), tuple), self.pop()
                value = _expect(constructor, _Constructor).function(*args)
            case "BUILD":
                state, unfinished = self.pop(), self.pop()
                value = _finish(unfinished, state)
                for index, known in self._memo.items():
                    if known is unfinished:
                        self._memo[index] = value
            case _:
                raise _Refused(f"operation {name}")
        self._stack.append(value)


class _UnfinishedArray:
    """Pickles of older protocols make an empty array first and then set its content."""


@dataclass(frozen=True, slots=True)
class _Constructor:
    function: Callable[..., Any]


def _array(data: Any, dtype: Any, shape: Any, order: str = "C") -> np.ndarray:
    """An array that shares the memory of `data`, if there is exactly enough of it."""
    if not isinstance(data, bytes | bytearray):
        raise _Refused(f"an array of {type(data).__name__}")
    dtype = _dtype(dtype)
    axes = shape if isinstance(shape, tuple) else (shape,)
    if not all(type(size) is int and size >= 0 for size in axes):
        raise _Refused(f"an array of shape {_describe(axes)}")
    if math.prod(axes) * dtype.itemsize != len(data):
        raise _Refused(f"an array of {dtype} {list(axes)} in {len(data)} bytes")
    array = np.ndarray(axes, dtype, buffer=data, order=order)
    array.flags.writeable = False
    return array


def _dtype(spec: Any, align: Any = False, copy: Any = False) -> np.dtype:
    if isinstance(spec, np.dtype):
        return spec
    if not (isinstance(spec, str) and _PLAIN_DTYPE.fullmatch(spec)):
        raise _Refused(f"element type {_describe(spec)}")
    return np.dtype(spec)


def _scalar(dtype: Any, data: Any) -> np.generic:
    return _array(data, dtype, ())[()]


def _finish(unfinished: Any, state: Any) -> Any:
    if isinstance(unfinished, np.dtype):
        _, order, *rest = state
        if rest[:3] != [None, None, None] or order not in ("<", ">", "|", "="):
            raise _Refused("a structured element type")
        return unfinished if order == "|" else unfinished.newbyteorder(order)
    if not isinstance(unfinished, _UnfinishedArray):
        raise _Refused(f"a {type(unfinished).__name__} with a state")
    _, shape, dtype, fortran, data = state
    return _array(data, dtype, shape, "F" if fortran else "C")


_CONSTRUCTORS = {
    ("numpy", "dtype"): _Constructor(_dtype),
    ("numpy", "ndarray"): None,  # only an argument of `_reconstruct`
    ("numpy.core.multiarray", "_reconstruct"): _Constructor(lambda *_: _UnfinishedArray()),
    ("numpy.core.multiarray", "scalar"): _Constructor(_scalar),
    ("numpy.core.numeric", "_frombuffer"): _Constructor(_array),
    # How RETURNN's module sends arrays, under the module's new and old name.
    ("returnn.util.task_system", "make_numpy_ndarray_fromstring"): _Constructor(_array),
    ("TaskSystem", "make_numpy_ndarray_fromstring"): _Constructor(_array),
}


def _constructor(module: Any, name: Any) -> _Constructor | None:
    module, name = _expect(module, str), _expect(name, str)
    key = (module.replace("numpy._core", "numpy.core"), name)
    if key not in _CONSTRUCTORS:
        raise _Refused(f"{_describe(f'{module}.{name}')} is not allowed")
    return _CONSTRUCTORS[key]


def _expect(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise _Refused(f"a {type(value).__name__} where a {kind.__name__} is due")
    return value


def _pairs(items: list[Any]) -> dict[Any, Any]:
    return dict(zip(items[::2], items[1::2], strict=True))


def _describe(value: Any) -> str:
    """A short text, however large or deep the value is."""
    if isinstance(value, tuple) and len(value) <= 8:
        return f"({', '.join(_name(item) for item in value)})"
    return _name(value)


def _name(value: Any) -> str:
    if isinstance(value, str):
        return repr(value[:100])
    small = isinstance(value, int) and value.bit_length() < 64
    return repr(value) if small else type(value).__name__


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
