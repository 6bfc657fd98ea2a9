"""index.arrow: one record batch per shard, one row per sequence. See docs/format.md.

Columns are `tag`, and for every stream `length.<stream>` (int32, frames), `start.<stream>`
(int64, first frame in the shard's array) and `digest.<stream>` (uint64, xxh3_64 of the payload).
The metadata of batch i holds the receipt of shard i.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa

from .columns import batch, column, encode_tags
from .errors import MissingSequenceError, ShardIntegrityError

# A table of fixed-length tags may be so many times larger than the tags themselves.
_MAX_PADDING = 16


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
        ShardIntegrityError: if it is missing, or not the index that the manifest describes. All
            methods raise it if what they read is damaged.
    """

    def __init__(self, path: str, streams: Sequence[str], num_batches: int) -> None:
        self.path = path
        self._sound_tags: set[int] = set()
        try:
            self._reader = pa.ipc.open_file(pa.memory_map(path))
            is_due = self._reader.schema.equals(index_schema(streams))
            names = ", ".join(self._reader.schema.names)
        except (OSError, pa.ArrowException, ValueError) as error:
            raise ShardIntegrityError(
                f"the index cannot be read: {error}", path, hint="Run the build again."
            ) from error
        if self._reader.num_record_batches != num_batches or not is_due:
            raise ShardIntegrityError(
                "the index does not belong to this manifest",
                path,
                expected=f"{num_batches} shards, streams {', '.join(streams)}",
                found=f"{self._reader.num_record_batches} shards, columns {names}",
                hint="Run the build again.",
            )

    def batch(self, shard: int) -> pa.RecordBatch:
        """The rows of one shard."""
        with self._damage(shard):
            rows = self._reader.get_batch(shard)
            rows.validate()
            for values in rows.columns:
                # Arrow takes a column without rows for valid if it has no buffers.
                if values.null_count or (len(values) and values.buffers()[-1] is None):
                    raise ValueError("values are missing")
        return rows

    def metadata(self, shard: int) -> bytes:
        """The receipt of one shard as JSON; empty if there is none."""
        with self._damage(shard):
            found = self._reader.get_batch_with_custom_metadata(shard).custom_metadata
        return dict(found or {}).get(b"receipt", b"")

    @contextlib.contextmanager
    def _damage(self, shard: int) -> Iterator[None]:
        try:
            yield
        except (OSError, pa.ArrowException, ValueError) as error:
            raise ShardIntegrityError(
                f"the index of shard {shard} is damaged: {error}",
                self.path,
                hint="Run the build again.",
            ) from error

    def lengths(self, shard: int, stream: str) -> np.ndarray:
        """int32 [sequences], frames."""
        return column(self.batch(shard), f"length.{stream}")

    def all_lengths(self, stream: str) -> np.ndarray:
        """int32 [sequences of all shards], frames."""
        parts = [self.lengths(i, stream) for i in range(self._reader.num_record_batches)]
        return np.concatenate([np.zeros(0, np.int32), *parts])

    def starts(self, shard: int, stream: str) -> np.ndarray:
        """int64 [sequences + 1], the first frame of each sequence, and the end."""
        rows = self.batch(shard)
        start, length = column(rows, f"start.{stream}"), column(rows, f"length.{stream}")
        end = start[-1:] + length[-1:] if len(start) else np.zeros(1, np.int64)
        return np.concatenate([start, end])

    def tag_buffers(self, shard: int) -> tuple[memoryview, memoryview]:
        """UTF-8 tags behind one another, as (int32 offsets [sequences + 1], bytes)."""
        tags = self.batch(shard).column("tag")
        if shard not in self._sound_tags:
            with self._damage(shard):
                tags.validate(full=True)
            self._sound_tags.add(shard)
        _, offsets, data = tags.buffers()
        first = tags.offset
        used = memoryview(offsets)[4 * first : 4 * (first + len(tags) + 1)]
        return used.cast("i"), memoryview(data or b"")

    def tag_array(self, shard: int) -> np.ndarray:
        """The tags of a shard as fixed-length bytes [sequences], or objects if one is very long."""
        offsets, data = self.tag_buffers(shard)
        start = np.asarray(offsets)
        length = np.diff(start)
        width = max(1, int(length.max(initial=0)))
        if width * len(length) > _MAX_PADDING * (len(data) + 64 * len(length)):
            out = np.empty(len(length), object)
            out[:] = encode_tags(self.batch(shard).column("tag"))
            return out
        table = np.zeros((len(length), width), np.uint8)
        used = np.arange(width, dtype=np.int32) < length[:, None]
        table[used] = np.frombuffer(data, np.uint8)[start[0] : start[-1]]
        return table.view(f"S{width}").reshape(len(length))

    def find(self, tag: str) -> tuple[int, int]:
        """Shard and row of a tag, by a scan.

        Raises:
            MissingSequenceError: if there is no such tag.
        """
        wanted = tag.encode("utf-8", "surrogatepass")
        for shard in range(self._reader.num_record_batches):
            offsets, data = self.tag_buffers(shard)
            row = _find_in_buffer(np.asarray(offsets), bytes(data), wanted)
            if row >= 0:
                return shard, row
        raise MissingSequenceError("there is no sequence with this tag", self.path, tag)


def _find_in_buffer(start: np.ndarray, data: bytes, wanted: bytes) -> int:
    """The row whose text is `wanted` among texts that lie behind one another; -1 if none."""
    if not wanted:
        empty = np.flatnonzero(start[1:] == start[:-1])
        return int(empty[0]) if len(empty) else -1
    at = data.find(wanted, start[0], start[-1])
    while at >= 0:
        row = int(np.searchsorted(start, at, side="right")) - 1
        if start[row] == at and start[row + 1] - at == len(wanted):
            return row
        at = data.find(wanted, at + 1, start[-1])
    return -1
