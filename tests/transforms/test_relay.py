"""Typed errors are found again in whatever a runner makes of them."""

import itertools

import numpy as np
import pytest

from seqshard.io import errors
from seqshard.io.errors import ConfigError, SeqshardError, SourceFormatError
from seqshard.transforms.relay import RelayedError, find_error, find_in_text

CLASSES = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, SeqshardError)
]
FIELDS = ("it is damaged", '/a/ä "b".hdf', "seq\n\udce4", 12, "40 bytes", None, "Copy it.")


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_error_is_found_in_a_text(kind):
    error = kind(*FIELDS)
    text = (
        f"Traceback (most recent call last):\n  ...\n{RelayedError.of(error)} [while running 'X']"
    )
    for found in (find_in_text(text), find_error(RuntimeError(text))):
        assert type(found) is kind
        assert found.args == error.args
        assert str(found) == str(error)


def test_the_sentence_can_be_read_in_the_text():
    error = SourceFormatError("it is damaged", "/a/b.hdf")
    assert str(RelayedError.of(error)).startswith("/a/b.hdf: it is damaged [seqshard-error ")


def test_numbers_of_numpy_travel_too():
    error = SourceFormatError("it is damaged", "a", position=np.int64(5))
    assert find_in_text(str(RelayedError.of(error))).position == 5


def raised_from(*chain):
    """The first error, raised from the second, and so on."""
    for error, cause in itertools.pairwise(chain):
        error.__cause__ = cause
    return chain[0]


def test_causes_are_searched():
    known = SourceFormatError("it is damaged", "a.hdf")
    assert find_error(known) is known
    assert find_error(raised_from(RuntimeError("x"), ValueError("y"), known)) is known
    found = find_error(raised_from(RuntimeError("failed"), ValueError("y"), RelayedError.of(known)))
    assert str(found) == str(known)


def test_the_first_of_several_is_taken():
    first, second = ConfigError("first"), SourceFormatError("second")
    text = f"{RelayedError.of(first)}\n{RelayedError.of(second)}"
    assert str(find_in_text(text)) == "first"


def test_other_errors_are_not_ours():
    assert find_error(ValueError("something")) is None
    assert find_in_text("[seqshard-error]") is None
    looped = ValueError("a")
    looped.__cause__ = looped
    assert find_error(looped) is None


def test_a_text_that_was_cut_is_not_taken_for_an_error():
    text = str(RelayedError.of(SourceFormatError("it is damaged", "a.hdf")))
    for end in range(0, len(text), 3):
        find_in_text(text[:end] + "]")
