"""Functions that change an orthography, by the names that RETURNN gives them."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import ConfigError

PostProcessor = Callable[[str], str]

_BARE_WORD = re.compile(r"(?<!\S)(?!\[\S*\]|<\S*>)\S+")


def lowercase(text: str) -> str:
    """All letters small."""
    return text.lower()


def lowercase_keep_special(text: str) -> str:
    """All letters small, but for words such as [NOISE] and <UNK>."""
    return _BARE_WORD.sub(lambda word: word[0].lower(), text)


def collapse_whitespace(text: str) -> str:
    """Single spaces between words, and none around them."""
    return " ".join(text.split())


def basic_cleaners(text: str) -> str:
    """`lowercase` and `collapse_whitespace`."""
    return collapse_whitespace(lowercase(text))


def get_remove_chars(chars: str | Sequence[str]) -> PostProcessor:
    """Puts a space for each of these, and collapses spaces."""

    def remove_chars(text: str) -> str:
        for char in chars:
            text = text.replace(char, " ")
        return collapse_whitespace(text)

    return remove_chars


def get_replace(old: str, new: str) -> PostProcessor:
    """Puts `new` for `old`."""
    return lambda text: text.replace(old, new)


_FUNCTIONS: dict[str, PostProcessor] = {
    function.__name__: function
    for function in (lowercase, lowercase_keep_special, collapse_whitespace, basic_cleaners)
}
_FACTORIES: dict[str, Callable[..., PostProcessor]] = {
    function.__name__: function for function in (get_remove_chars, get_replace)
}


def get_post_processor(spec: Any) -> PostProcessor:
    """The function of a specification.

    Args:
        spec: a function of text; or a text such as "lowercase", "get_remove_chars('.,')" or
            several of these with commas between them; or a list of specifications, which are
            applied one after the other; None for no change.

    Raises:
        ConfigError: for anything else.
    """
    if not spec:
        return lambda text: text
    if callable(spec):
        return spec
    if isinstance(spec, str):
        return _chain([_from_expression(part, spec) for part in _parse(spec)])
    if isinstance(spec, list | tuple):
        return _chain([get_post_processor(part) for part in spec])
    raise ConfigError("no post-processor", expected="a function or its name", found=repr(spec))


def _chain(functions: Sequence[PostProcessor]) -> PostProcessor:
    def apply(text: str) -> str:
        for function in functions:
            text = function(text)
        return text

    return functions[0] if len(functions) == 1 else apply


def _parse(spec: str) -> list[ast.expr]:
    try:
        expression = ast.parse(spec.strip(), mode="eval").body
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"the post-processor {spec!r} is malformed: {error}") from error
    return expression.elts if isinstance(expression, ast.Tuple | ast.List) else [expression]


def _from_expression(expression: ast.expr, spec: str) -> PostProcessor:
    if isinstance(expression, ast.Name) and expression.id in _FUNCTIONS:
        return _FUNCTIONS[expression.id]
    if (
        isinstance(expression, ast.Call)
        and isinstance(expression.func, ast.Name)
        and expression.func.id in _FACTORIES
    ):
        try:
            args = [ast.literal_eval(arg) for arg in expression.args]
            kwargs = {arg.arg: ast.literal_eval(arg.value) for arg in expression.keywords}
            return _FACTORIES[expression.func.id](*args, **kwargs)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"the post-processor {spec!r} is malformed: {error}") from error
    raise ConfigError(
        f"unknown post-processor {ast.unparse(expression)!r}",
        expected=", ".join([*_FUNCTIONS, *(f"{name}(...)" for name in _FACTORIES)]),
        hint="Any function from text to text can be given instead of a name.",
    )
