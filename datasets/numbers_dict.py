"""Numbers per data key, for example the number of frames of a sequence in each stream."""

from __future__ import annotations

import builtins
import operator
import sys
from collections.abc import Callable, ItemsView, Iterable, KeysView
from typing import Any

Number = Any


def _is_numbers_dict(obj: object) -> bool:
    """Whether `obj` is a `NumbersDict`, ours or RETURNN's, which has the same two attributes."""
    return type(obj) is NumbersDict or type(obj).__name__ == "NumbersDict"


class NumbersDict:
    """A dict of numbers with an optional default for all other keys, and arithmetic over both.

    Operations combine two of them key by key. A key that only one side has takes the other
    side's default, or else the neutral element of the operation. Plain numbers stand for all
    keys. The semantics are those of RETURNN's class of this name.

    Args:
        auto_convert: a dict, a `NumbersDict` (copied) or a number (the default for all keys).
        numbers_dict: numbers per key.
        broadcast_value: the default for keys that are not in the dict, or None for no default.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(
        self,
        auto_convert: Any = None,
        numbers_dict: dict[str, Number] | None = None,
        broadcast_value: Number | None = None,
    ) -> None:
        if auto_convert is not None:
            if numbers_dict is not None or broadcast_value is not None:
                raise TypeError("NumbersDict takes one value to convert, or a dict and a default")
            if isinstance(auto_convert, dict):
                numbers_dict = auto_convert
            elif _is_numbers_dict(auto_convert):
                numbers_dict, broadcast_value = auto_convert.dict, auto_convert.value
            else:
                broadcast_value = auto_convert
        self.dict: dict[str, Number] = dict(numbers_dict or {})
        self.value = broadcast_value

    @property
    def __class__(self) -> type:
        """RETURNN's class where it is loaded, so that its operations accept ours as operands."""
        returnn = sys.modules.get("returnn.util.basic")
        return getattr(returnn, "NumbersDict", type(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return NumbersDict, (None, self.dict, self.value)

    @classmethod
    def constant_like(cls, const_number: Number, numbers_dict: NumbersDict) -> NumbersDict:
        """`const_number` for every key of `numbers_dict`, and as default if that has one."""
        value = None if numbers_dict.value is None else const_number
        return cls(
            numbers_dict=dict.fromkeys(numbers_dict.dict, const_number), broadcast_value=value
        )

    def copy(self) -> NumbersDict:
        """An independent copy."""
        return NumbersDict(self)

    def copy_like(self, numbers_dict: NumbersDict) -> NumbersDict:
        """A copy with the keys of `numbers_dict`, as far as there is a number for them."""
        keep = {k: self[k] for k in numbers_dict.dict if self.has_value_for(k)}
        value = None if numbers_dict.value is None else self.value
        return NumbersDict(numbers_dict=keep, broadcast_value=value)

    @property
    def keys_set(self) -> set[str]:
        """The keys as a set."""
        return set(self.dict)

    def keys_union(*number_dicts: NumbersDict) -> list[str]:
        """The keys of all of them, each once, in order of first appearance."""
        return list(dict.fromkeys(key for numbers in number_dicts for key in numbers.dict))

    def __getitem__(self, key: str) -> Number:
        if self.value is not None:
            return self.dict.get(key, self.value)
        return self.dict[key]

    def __setitem__(self, key: str, value: Number) -> None:
        self.dict[key] = value

    def __delitem__(self, key: str) -> None:
        del self.dict[key]

    def __contains__(self, key: str) -> bool:
        return key in self.dict

    def __iter__(self) -> None:  # type: ignore[override]
        raise TypeError("NumbersDict cannot be iterated: use keys(), values() or items()")

    def get(self, key: str, default: Number | None = None) -> Number | None:
        """The number of `key`, else the own default, else `default`."""
        return self.dict.get(key, default if self.value is None else self.value)

    def pop(self, key: str, *args: Number) -> Number:
        """Removes a key; like `dict.pop`, the own default plays no role."""
        return self.dict.pop(key, *args)

    def keys(self) -> KeysView[str]:
        """The keys that have a number of their own."""
        return self.dict.keys()

    def values(self) -> list[Number]:
        """The numbers of all keys, and the default if there is one."""
        return [*self.dict.values(), *([] if self.value is None else [self.value])]

    def items(self) -> ItemsView[str, Number]:
        """Key and number, without the default."""
        return self.dict.items()

    def has_value_for(self, key: str) -> bool:
        """Whether `self[key]` works."""
        return self.value is not None or key in self.dict

    def has_values(self) -> bool:
        """Whether there is any number at all."""
        return bool(self.dict) or self.value is not None

    def unary_op(self, op: Callable[[Number], Any]) -> NumbersDict:
        """`op` applied to every number."""
        value = None if self.value is None else op(self.value)
        return NumbersDict(
            numbers_dict={k: op(v) for k, v in self.dict.items()}, broadcast_value=value
        )

    @staticmethod
    def bin_op_scalar_optional(
        self: Number | None, other: Number | None, zero: Number, op: Callable[[Number, Number], Any]
    ) -> Any:
        """`op` of two numbers; a missing one is `zero`, and None if both are missing."""
        if self is None and other is None:
            return None
        return op(zero if self is None else self, zero if other is None else other)

    @classmethod
    def bin_op(
        cls,
        self: NumbersDict | Number,
        other: NumbersDict | Number,
        op: Callable[[Number, Number], Any],
        zero: Number,
        result: NumbersDict | None = None,
    ) -> NumbersDict:
        """`op` key by key, into `result` if given."""
        if not _is_numbers_dict(self):
            self = cls.constant_like(self, other) if _is_numbers_dict(other) else cls(self)
        if not _is_numbers_dict(other):
            other = cls.constant_like(other, self)
        result = cls() if result is None else result
        scalar = cls.bin_op_scalar_optional
        for key in cls.keys_union(self, other):
            result.dict[key] = scalar(self.get(key), other.get(key), zero, op)
        result.value = scalar(self.value, other.value, zero, op)
        return result

    def __add__(self, other: NumbersDict | Number) -> NumbersDict:
        return self.bin_op(self, other, operator.add, 0)

    __radd__ = __add__

    def __iadd__(self, other: NumbersDict | Number) -> NumbersDict:
        return self.bin_op(self, other, operator.add, 0, result=self)

    def __sub__(self, other: NumbersDict | Number) -> NumbersDict:
        return self.bin_op(self, other, operator.sub, 0)

    def __rsub__(self, other: NumbersDict | Number) -> NumbersDict:
        return self.bin_op(self, other, lambda a, b: b - a, 0)

    def __isub__(self, other: NumbersDict | Number) -> NumbersDict:
        return self.bin_op(self, other, operator.sub, 0, result=self)

    def __mul__(self, other: NumbersDict | Number) -> NumbersDict:
        return self.bin_op(self, other, operator.mul, 1)

    __rmul__ = __mul__

    def __imul__(self, other: NumbersDict | Number) -> NumbersDict:
        return self.bin_op(self, other, operator.mul, 1, result=self)

    def __truediv__(self, other: NumbersDict | Number) -> NumbersDict:
        return self.bin_op(self, other, operator.truediv, 1)

    def __itruediv__(self, other: NumbersDict | Number) -> NumbersDict:
        return self.bin_op(self, other, operator.truediv, 1, result=self)

    def __floordiv__(self, other: NumbersDict | Number) -> NumbersDict:
        return self.bin_op(self, other, operator.floordiv, 1)

    def __ifloordiv__(self, other: NumbersDict | Number) -> NumbersDict:
        return self.bin_op(self, other, operator.floordiv, 1, result=self)

    def __neg__(self) -> NumbersDict:
        return self.unary_op(operator.neg)

    def __bool__(self) -> bool:
        return any(self.values())

    def elem_eq(self, other: NumbersDict | Number, result_with_default: bool = True) -> NumbersDict:
        """Equality key by key; None where one side has no number. See `__eq__`.

        Args:
            other: what to compare with.
            result_with_default: whether the result's default tells if both defaults are equal.
        """
        result = self.bin_op(
            self, other, lambda a, b: None if a is None or b is None else a == b, zero=None
        )
        if not result_with_default:
            result.value = None
        return result

    def __eq__(self, other: object) -> bool:
        return all(self.elem_eq(other).values())

    def __ne__(self, other: object) -> bool:
        return not self == other

    def any_compare(self, other: NumbersDict, cmp: Callable[[Number, Number], bool]) -> bool:
        """Whether `cmp` holds for a key (or the defaults) that both sides have a number for."""
        for key, number in self.dict.items():
            if other.has_value_for(key) and cmp(number, other[key]):
                return True
        both = self.value is not None and other.value is not None
        return both and cmp(self.value, other.value)

    @classmethod
    def max(cls, items: Iterable[NumbersDict | Number]) -> NumbersDict:
        """Maximum key by key over one or more items; a missing number counts for nothing."""
        return cls._fold(items, builtins.max)

    @classmethod
    def min(cls, items: Iterable[NumbersDict | Number]) -> NumbersDict:
        """Minimum key by key over one or more items; a missing number counts for nothing."""
        return cls._fold(items, builtins.min)

    @classmethod
    def _fold(
        cls, items: Iterable[NumbersDict | Number], choose: Callable[..., Number]
    ) -> NumbersDict:
        def op(a: Number | None, b: Number | None) -> Number:
            return choose([x for x in (a, b) if x is not None])

        *rest, result = items
        if not rest:
            return cls(result)
        for item in reversed(rest):
            result = cls.bin_op(item, result, op, zero=None)
        return result

    def max_value(self) -> Number:
        """The largest number, the default included."""
        return builtins.max(self.values())

    def min_value(self) -> Number:
        """The smallest number, the default included."""
        return builtins.min(self.values())

    def __repr__(self) -> str:
        if self.value is None:
            return f"NumbersDict({self.dict or ''})"
        if not self.dict:
            return f"NumbersDict({self.value!r})"
        return f"NumbersDict(numbers_dict={self.dict!r}, broadcast_value={self.value!r})"
