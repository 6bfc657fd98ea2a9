"""The files that shards can be: how the payload gets into them, block by block.

Both writers are used alike: for every stream in `order`, blocks of consecutive rows from front to
back, each first filled in memory that `buffer` gives.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Protocol, Self

import h5py
import numpy as np

from . import storage
from .errors import OutputError
from .hdf.file import damage_errors, open_file
from .hdf.layout import ArrayPlace, check_lengths, create_skeleton, dataset_name
from .hdf.nextgen_layout import SequenceWriter, check_streams, create_streams, link_names
from .receipts import hash_file
from .records import Layout, StreamFormat
from .shard_file import ShardFile


class ShardWriter(Protocol):
    """A shard while it is written.

    Attributes:
        order: streams in the order in which they must be written.
        offsets: first byte of every stream's array; None where it has none.
    """

    order: Sequence[str]
    offsets: Mapping[str, int | None]

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def buffer(self, stream: str, rows: slice) -> np.ndarray:
        """Memory for a block, uint8. It may be filled when the previous `write` has returned."""
        ...

    def write(self, stream: str, rows: slice, data: np.ndarray) -> None:
        """Writes a block; `data` must stay as it is until the next call has returned."""
        ...

    def finish(self) -> tuple[int, str]:
        """Completes, syncs and checks the file: its size, and xxh3_128 as hexadecimal."""
        ...


def open_shard(
    layout: Layout,
    path: str,
    streams: Mapping[str, StreamFormat],
    lengths: Mapping[str, np.ndarray],
    tags: Sequence[bytes],
) -> ShardWriter:
    """Creates a shard.

    Args:
        layout: what shards are like.
        path: local file; must not exist.
        streams: format of every stream.
        lengths: for every stream, int array [sequences] of frames.
        tags: UTF-8 tags, one per sequence.

    Raises:
        PlanError: if the layout cannot hold a stream, a tag or a length.
    """
    if layout.kind == "nextgen":
        return NextGenShard(path, streams, lengths, tags, layout.runs)
    return ContiguousShard(path, streams, lengths, tags)


def _frame_bounds(lengths: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """For every stream int64 [sequences + 1]: the first frame of each sequence, and the end."""
    return {
        name: np.concatenate([[0], np.cumsum(values, dtype=np.int64)])
        for name, values in lengths.items()
    }


class ContiguousShard:
    """A shard in RETURNN's layout: one array per stream, at a plain byte offset."""

    def __init__(
        self,
        path: str,
        streams: Mapping[str, StreamFormat],
        lengths: Mapping[str, np.ndarray],
        tags: Sequence[bytes],
    ) -> None:
        self._path = path
        self._places = create_skeleton(path, streams, lengths, tags)
        self._bounds = _frame_bounds(lengths)
        self._frame_bytes = {name: stream.frame_bytes for name, stream in streams.items()}
        self._file = ShardFile(path)
        self.order = list(self._places)
        self.offsets = {name: place.offset for name, place in self._places.items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.__exit__(kind, error, trace)

    def buffer(self, stream: str, rows: slice) -> np.ndarray:
        """See `ShardWriter.buffer`."""
        begin, end = (self._place(stream, row) for row in (rows.start, rows.stop))
        return self._file.buffer(begin, end - begin)

    def write(self, stream: str, rows: slice, data: np.ndarray) -> None:
        """See `ShardWriter.write`."""
        self._file.write(self._place(stream, rows.start), data)

    def _place(self, stream: str, row: int) -> int:
        """The first byte of a sequence in the file."""
        frame = int(self._bounds[stream][row])
        return self.offsets[stream] + frame * self._frame_bytes[stream]

    def finish(self) -> tuple[int, str]:
        """See `ShardWriter.finish`.

        Raises:
            OutputError: if an array does not lie where its payload was written.
        """
        result = self._file.finish()
        with open_file(self._path) as file:
            for stream, place in self._places.items():
                dataset = file[dataset_name(stream)]
                found = ArrayPlace(int(dataset.id.get_offset() or 0), dataset.shape)
                if found != place:
                    raise OutputError(
                        "the file changed while it was written",
                        self._path,
                        entry=stream,
                        expected=str(place),
                        found=str(found),
                    )
        return result


class NextGenShard:
    """A shard in the NextGen layout: one HDF dataset per sequence and stream."""

    def __init__(
        self,
        path: str,
        streams: Mapping[str, StreamFormat],
        lengths: Mapping[str, np.ndarray],
        tags: Sequence[bytes],
        runs: Sequence[str] = (),
    ) -> None:
        check_streams(streams, runs)
        check_lengths(lengths)
        self._path = path
        self._names = link_names(tags)
        self._streams = streams
        self._bounds = _frame_bounds(lengths)
        self._memory = np.zeros(0, np.uint8)
        self.order = sorted(streams)
        self.offsets = dict.fromkeys(streams)
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(h5py.File(path, "x"))
            create_streams(file, streams, tags, runs)
            self._writers = {s: SequenceWriter(file, s, streams[s], s in runs) for s in streams}
            self._close = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close.close()

    def buffer(self, stream: str, rows: slice) -> np.ndarray:
        """See `ShardWriter.buffer`."""
        begin, end = self._bounds[stream][[rows.start, rows.stop]].tolist()
        size = (end - begin) * self._streams[stream].frame_bytes
        if len(self._memory) < size:
            self._memory = np.empty(size, np.uint8)
        return self._memory[:size]

    def write(self, stream: str, rows: slice, data: np.ndarray) -> None:
        """See `ShardWriter.write`."""
        kind = self._streams[stream]
        bounds = self._bounds[stream][rows.start : rows.stop + 1]
        cuts = (bounds - bounds[0]).tolist()
        frames = data.view(kind.dtype).reshape(cuts[-1], *kind.shape)
        write = self._writers[stream].write
        for name, begin, end in zip(self._names[rows], cuts[:-1], cuts[1:], strict=True):
            write(name, frames[begin:end])

    def finish(self) -> tuple[int, str]:
        """See `ShardWriter.finish`.

        Raises:
            OutputError: if a sequence is missing.
        """
        self._writers.clear()
        self._close.close()
        with open_file(self._path) as file, damage_errors(self._path):
            for stream in self._streams:
                found = len(file[f"streams/{stream}/data"])
                if found != len(self._names):
                    raise OutputError(
                        "the file changed while it was written",
                        self._path,
                        entry=stream,
                        expected=f"{len(self._names)} sequences",
                        found=str(found),
                    )
        storage.sync(self._path)
        return storage.stamp(self._path).num_bytes, hash_file(self._path)
