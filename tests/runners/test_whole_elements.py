"""Elements that take long to encode arrive whole, in runs by several threads."""

from __future__ import annotations

import time

import apache_beam as beam
import pytest
from apache_beam.runners.portability.fn_api_runner import worker_handlers
from apache_beam.testing.util import assert_that, equal_to

from seqshard.runners.select import make_options

NUM_ELEMENTS = 20


class Slow:
    """A value whose coder gives other threads a turn, as all that encode without Python do."""

    def __init__(self, number):
        self.number = number


class SlowCoder(beam.coders.Coder):
    """Takes so long for all elements that a timer of a second rings within one."""

    def encode(self, value):
        time.sleep(2 / NUM_ELEMENTS)
        return str(value.number).encode()

    def decode(self, encoded):
        return Slow(int(encoded))

    def is_deterministic(self):
        return True

    def to_type_hint(self):
        return Slow


@pytest.fixture
def coder():
    registry = beam.coders.registry
    registry.register_coder(Slow, SlowCoder)
    yield
    del registry._coders[Slow]


def test_no_element_arrives_in_pieces(coder):
    options = make_options("DirectRunner", ["--direct_num_workers=2"], 0)
    assert worker_handlers.DATA_BUFFER_TIME_LIMIT_MS == 0
    pair = beam.typehints.Tuple[int, Slow]
    with beam.Pipeline(options=options) as pipeline:
        numbers = (
            pipeline
            | beam.Create([0])
            | beam.FlatMap(lambda _: [(0, Slow(n)) for n in range(NUM_ELEMENTS)]).with_output_types(
                pair
            )
            | beam.GroupByKey()
            | beam.FlatMap(lambda pair: sorted(value.number for value in pair[1]))
        )
        assert_that(numbers, equal_to(list(range(NUM_ELEMENTS))))
