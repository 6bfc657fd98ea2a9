"""Typed errors that survive the way from a worker to the command line.

Runners hand an exception on as the original type, as a RuntimeError with a traceback for text, or
as a job message. A relayed error carries its fields inside its text, so that the one sentence that
the user should see can be found again in all of these.
"""

from __future__ import annotations

import base64
import json
import re

from ..io import errors
from ..io.errors import SeqshardError

_PATTERN = re.compile(r"\[seqshard-error ([A-Za-z0-9+/=]+)\]")


class RelayedError(Exception):
    """A typed error on its way; its text is the sentence followed by the encoded fields."""

    @classmethod
    def of(cls, error: SeqshardError) -> RelayedError:
        fields = json.dumps([type(error).__name__, *error.args]).encode("utf-8")
        return cls(f"{error} [seqshard-error {base64.b64encode(fields).decode('ascii')}]")


def find_error(error: BaseException) -> SeqshardError | None:
    """The typed error behind what a runner raised, or None if there is none."""
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        if isinstance(cause, SeqshardError):
            return cause
        chain.append(cause)
        cause = cause.__cause__
    return next(filter(None, (find_in_text(str(cause)) for cause in chain)), None)


def find_in_text(text: str) -> SeqshardError | None:
    """The first typed error relayed in a text, for example in a job's message."""
    match = _PATTERN.search(text)
    if match is None:
        return None
    try:
        name, *fields = json.loads(base64.b64decode(match[1]))
    except ValueError:
        return None  # the runner cut the text
    kind = getattr(errors, name, SeqshardError)
    return kind(*fields)
