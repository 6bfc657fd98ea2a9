"""index.arrow: one record batch per shard, one row per sequence. See docs/format.md.

Columns are `tag`, and for every stream `length.<stream>` (int32, frames), `start.<stream>`
(int64, first frame in the shard's array) and `digest.<stream>` (uint64, xxh3_64 of the payload).
The metadata of batch i holds the receipt of shard i.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pyarrow as pa

from .columns import batch, column
from .errors import ShardIntegrityError


def index_schema(streams: Iterable[str]) -> pa.Schema:
    """The schema of an index of these streams."""
    fields = [pa.field("tag", pa.string())]
    for name in streams:
        fields.append(pa.field(f"length.{name}", pa.int32()))
        fields.append(pa.field(f"start.{name}", pa.int64()))
        fields.append(pa.field(f"digest.{name}", pa.uint64()))
    return pa.schema(fields)


def index_batch(
    tag: pa.StringArray, lengths: Mapping[str, np.ndarray], digests: Mapping[str, np.ndarray]
) -> pa.RecordBatch:
    """The index rows of one shard, from lengths (frames) and digests per stream."""
    columns: dict[str, np.ndarray | pa.Array] = {"tag": tag}
    for name, length in lengths.items():
        columns[f"length.{name}"] = length.astype(np.int32)
        columns[f"start.{name}"] = np.cumsum(length, dtype=np.int64) - length
        columns[f"digest.{name}"] = digests[name]
    return batch(columns)


class IndexFile:
    """A memory-mapped index; columns are views, batches are decoded when asked for.

    Raises:
        ShardIntegrityError: if it is missing, or not the index that the manifest describes.
    """

    def __init__(self, path: str, streams: Sequence[str], num_batches: int) -> None:
        self.path = path
        try:
            self._reader = pa.ipc.open_file(pa.memory_map(path))
        except (OSError, pa.ArrowInvalid) as error:
            raise ShardIntegrityError(
                f"the index cannot be read: {error}", path, hint="Run the build again."
            ) from error
        schema = index_schema(streams)
        if self._reader.num_record_batches != num_batches or not self._reader.schema.equals(schema):
            raise ShardIntegrityError(
                "the index does not belong to this manifest",
                path,
                expected=f"{num_batches} shards, streams {', '.join(streams)}",
                found=f"{self._reader.num_record_batches} shards, "
                f"columns {', '.join(self._reader.schema.names)}",
                hint="Run the build again.",
            )

    def batch(self, shard: int) -> pa.RecordBatch:
        """The rows of one shard."""
        return self._reader.get_batch(shard)

    def metadata(self, shard: int) -> bytes:
        """The receipt of one shard as JSON."""
        found = self._reader.get_batch_with_custom_metadata(shard).custom_metadata
        return found[b"receipt"] if found is not None else b""

    def lengths(self, shard: int, stream: str) -> np.ndarray:
        """int32 [sequences], frames."""
        return column(self.batch(shard), f"length.{stream}")
