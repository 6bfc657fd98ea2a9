"""The one DoFn of the package: a generator function whose typed errors reach the user."""

from collections.abc import Callable, Iterator
from typing import Any

import apache_beam as beam

from ..io.errors import SeqshardError
from .relay import RelayedError


class Stage(beam.DoFn):
    """Runs `function(element, *side_inputs)`; its typed errors travel as `RelayedError`."""

    def __init__(self, function: Callable[..., Iterator[Any]]) -> None:
        super().__init__()
        self._function = function

    def process(self, element: Any, *side_inputs: Any) -> Iterator[Any]:
        try:
            yield from self._function(element, *side_inputs)
        except SeqshardError as error:
            raise RelayedError.of(error) from error
