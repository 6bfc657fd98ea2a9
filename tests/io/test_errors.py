"""Errors cross process borders, and say what is wrong in one sentence."""

import copy
import pathlib
import pickle

import numpy as np
import pytest

from seqshard.io import errors
from seqshard.io.errors import SeqshardError

CLASSES = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, SeqshardError)
]
FIELDS = ("what", "path", "entry", "position", "expected", "found", "hint")
VALUES = ("it is damaged", "/a/ä.hdf", "seq\n1", 12, "40 bytes", "3", "Copy it again.")


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("transport", [copy.copy, lambda e: pickle.loads(pickle.dumps(e))])
def test_all_fields_survive_the_way_between_processes(kind, transport):
    error = transport(kind(*VALUES))
    assert type(error) is kind
    assert tuple(getattr(error, name) for name in FIELDS) == VALUES
    assert error.args == VALUES


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_the_message_is_one_sentence_with_all_fields(kind):
    # KeyError alone would print the repr of its argument.
    assert str(kind(*VALUES)) == (
        "/a/ä.hdf, entry 'seq\\n1', byte 12: it is damaged (expected 40 bytes, found 3). "
        "Copy it again."
    )
    assert str(kind("it is damaged")) == "it is damaged"


def test_fields_that_are_left_out_leave_no_trace():
    assert str(SeqshardError("bad", expected="1")) == "bad (expected 1)"
    assert str(SeqshardError("bad", found="2")) == "bad (found 2)"
    assert str(SeqshardError("bad", entry="x", hint="Do that.")) == "entry 'x': bad. Do that."
    assert str(SeqshardError("bad", position=0)) == "byte 0: bad"


def test_fields_are_plain_values_whatever_was_given():
    error = SeqshardError("bad", pathlib.Path("/a/b"), position=np.int64(7))
    assert error.args[1] == "/a/b"
    assert type(error.args[3]) is int


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_only_wrong_use_exits_with_2(kind):
    usage = {"ConfigError", "SourceNotFoundError", "OutputFolderError", "OutputExistsError"}
    assert kind.exit_code == (2 if kind.__name__ in usage else 1)
