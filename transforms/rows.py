"""Batches of index rows as elements of a pipeline.

Beam would pickle an Arrow batch, and a pickled slice carries the whole buffers of its parent.
`Rows` has a coder of its own: an Arrow IPC stream of exactly the rows.
"""

from __future__ import annotations

import apache_beam as beam
import pyarrow as pa


class Rows:
    """One record batch of index rows."""

    __slots__ = ("batch",)

    def __init__(self, batch: pa.RecordBatch) -> None:
        self.batch = batch


class RowsCoder(beam.coders.Coder):
    """Encodes `Rows` as an Arrow IPC stream."""

    def encode(self, value: Rows) -> bytes:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, value.batch.schema) as writer:
            writer.write_batch(value.batch)
        return sink.getvalue().to_pybytes()

    def decode(self, encoded: bytes) -> Rows:
        return Rows(pa.ipc.open_stream(encoded).read_next_batch())

    def is_deterministic(self) -> bool:
        return True

    def to_type_hint(self) -> type[Rows]:
        return Rows


beam.coders.registry.register_coder(Rows, RowsCoder)

# The builtin tuple[int, Rows] would fall back to pickling.
KeyedRows = beam.typehints.Tuple[int, Rows]
