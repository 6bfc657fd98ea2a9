"""What a trainer sends, written to a file that the stages of a build read as an ordinary source.

The sequences of a partition go to an HDF file in RETURNN's layout. Neither their number nor their
lengths are known before the last one came, so every stream is collected in a file without a name
first, which cannot outlive the process.
"""

from __future__ import annotations

import contextlib
import copy
import os
import shutil
import tempfile
import threading
from array import array
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import BinaryIO, Self

import numpy as np

from .. import storage
from ..errors import (
    ConfigError,
    MissingSequenceError,
    SeqshardError,
    ShapeMismatchError,
    SourceFormatError,
)
from ..hdf.file import check_storable
from ..hdf.layout import create_skeleton
from ..records import StreamFormat, StreamSpec
from ..trainers import Trainer
from .messages import Init, Segment
from .targets import BYTE_LABELS, TargetConverter
from .trainer import TrainerProcess

FEATURES = "data"
_COPY_BYTES = 1 << 20


def spool_partition(
    trainer: Trainer, partition: int, streams: Sequence[StreamSpec], path: str
) -> int:
    """Runs a trainer over one partition of its corpus, unless its spool is there already.

    Args:
        trainer: what to run.
        partition: number of the partition.
        streams: what to keep of every sequence.
        path: of the spool, which appears when it is complete.

    Returns:
        How many sequences were written.

    Raises:
        TrainerError: if the trainer fails, or sends what cannot be used; with the end of its log.
        SourceNotFoundError: if there is no such executable.
        OutputError: if the spool cannot be written.
    """
    if storage.exists(path):
        return 0
    storage.make_folder(os.path.dirname(path))
    with storage.local_target(path) as target:
        with (
            Spool(streams, trainer, os.path.dirname(target)) as spool,
            TrainerProcess(trainer.process(partition)) as process,
            _running.together(os.path.dirname(path), process),
        ):
            for message in process.messages():
                try:
                    if isinstance(message, Init):
                        spool.set_dimensions(message)
                    elif isinstance(message, Segment):
                        spool.add(message)
                except SeqshardError as error:
                    raise process.failure(str(error)) from error
            if not spool.tags:
                raise process.failure("the trainer ended and sent no sequence")
            spool.write(target)
        storage.publish(target, path)
    return len(spool.tags)


class _Running:
    """The trainers that run in this process, of which one failure ends all others of its build.

    A runner with threads would only tell of the failure when the others have ended by themselves.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._processes: dict[str, list[TrainerProcess]] = {}
        self._failures: dict[str, Exception] = {}

    @contextlib.contextmanager
    def together(self, folder: str, process: TrainerProcess) -> Iterator[None]:
        """Ends the block with the first failure among all blocks of one folder."""
        with self._lock:
            self._processes.setdefault(folder, []).append(process)
            if folder in self._failures:
                process.kill()
        try:
            yield
        except Exception as error:
            first = self._fail(folder, error)
            if first is error:
                raise
            # Not the same object: other threads raise it as well.
            raise copy.copy(first) from error
        finally:
            with self._lock:
                self._processes[folder].remove(process)
                if not self._processes[folder]:
                    del self._processes[folder]
                    self._failures.pop(folder, None)

    def _fail(self, folder: str, error: Exception) -> Exception:
        with self._lock:
            first = self._failures.setdefault(folder, error)
            for process in self._processes[folder]:
                process.kill()
        return first


_running = _Running()


class Spool:
    """The sequences of a partition, of which some streams are kept.

    Args:
        streams: what to keep.
        trainer: where they come from.
        folder: local; has room for all of it.

    Attributes:
        tags: UTF-8.
    """

    def __init__(self, streams: Sequence[StreamSpec], trainer: Trainer, folder: str) -> None:
        self.tags: list[bytes] = []
        self._converter = trainer.converter()
        self._stddev = trainer.options.input_stddev
        with contextlib.ExitStack() as stack:
            self._columns = [
                _Column(spec, stack.enter_context(tempfile.TemporaryFile(dir=folder)))
                for spec in streams
            ]
            self._files = stack.pop_all()
        self._dims: dict[str, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._files.close()

    def set_dimensions(self, init: Init) -> None:
        """Takes over what the trainer says of all sequences.

        Raises:
            ShapeMismatchError: if there are no features.
        """
        if init.input_dim <= 0:
            raise ShapeMismatchError("there are no features", found=f"dimension {init.input_dim}")
        dims = self._converter.dims(init.output_dim)
        self._dims = {key: dim for key, (dim, _) in dims.items()}

    def add(self, segment: Segment) -> None:
        """Adds a sequence.

        Raises:
            SourceFormatError: if its name cannot be a tag, or an array not be stored.
            ShapeMismatchError: if it is not like the sequences before it.
            MissingSequenceError: if a stream is not in it.
        """
        tag = _encode_name(segment.name)
        features = segment.features.T
        if self._stddev != 1:
            features = features / features.dtype.type(self._stddev)
        targets = self._converter.convert(segment.targets, len(features), segment.name)
        arrays = {FEATURES: features, **targets}
        for column in self._columns:
            column.add(arrays, segment.name, self._dims, self._converter)
        self.tags.append(tag)

    def write(self, path: str) -> None:
        """Writes a new HDF file with all sequences, and syncs it."""
        formats = {c.spec.name: c.format for c in self._columns if c.format is not None}
        lengths = {c.spec.name: np.frombuffer(c.lengths, np.int64) for c in self._columns}
        places = create_skeleton(path, formats, lengths, self.tags)
        with open(path, "r+b") as target:
            for column in self._columns:
                target.seek(places[column.spec.name].offset)
                column.copy_to(target)
        storage.sync(path)


class _Column:
    """One stream: its frames so far, in a file without a name, their lengths and format."""

    def __init__(self, spec: StreamSpec, file: BinaryIO) -> None:
        self.spec = spec
        self.format: StreamFormat | None = None
        self.lengths = array("q")
        self._file = file

    def add(
        self,
        arrays: Mapping[str, np.ndarray],
        name: str | None,
        dims: Mapping[str, int],
        converter: TargetConverter,
    ) -> None:
        key = self.spec.key
        if key not in arrays:
            raise MissingSequenceError(
                f"the trainer did not send what stream {self.spec.name!r} is made of",
                entry=name,
                expected=repr(key),
                found=", ".join(sorted(arrays)),
            )
        frames = np.atleast_1d(arrays[key])
        if self.format is None:
            labels = converter.vocabularies[key].labels if key in converter.vocabularies else None
            self.format = _find_format(self.spec, frames, dims, labels)
        dtype = np.dtype(self.format.dtype)
        if frames.dtype.newbyteorder("=") != dtype or frames.shape[1:] != self.format.shape:
            raise ShapeMismatchError(
                f"stream {self.spec.name!r} has another format than in the sequences before",
                entry=name,
                expected=f"{dtype} of shape {('time', *self.format.shape)}",
                found=f"{frames.dtype} of shape {frames.shape}",
            )
        self._file.write(np.ascontiguousarray(frames, dtype.newbyteorder("<")).data)
        self.lengths.append(len(frames))

    def copy_to(self, target: BinaryIO) -> None:
        self._file.seek(0)
        shutil.copyfileobj(self._file, target, _COPY_BYTES)


def _find_format(
    spec: StreamSpec,
    frames: np.ndarray,
    dims: Mapping[str, int],
    labels: Sequence[str] | None,
) -> StreamFormat:
    """The format of a stream whose first sequence this is.

    Raises:
        UnsupportedPayloadError: if shards cannot hold such elements.
        ConfigError: if nothing tells the number of classes.
    """
    dtype, shape = frames.dtype.newbyteorder("="), frames.shape[1:]
    check_storable(dtype, f"target {spec.key!r}", spec.name)
    sparse = dtype.kind in "iu" and not shape
    dim: int | None = shape[-1] if shape else 1
    if sparse:
        dim = spec.num_labels or dims.get(spec.key)
        # Texts are the bytes of their UTF-8.
        dim = dim or (len(BYTE_LABELS) if dtype == np.uint8 else None)
    if dim is None:
        raise ConfigError(
            f"nothing tells the number of classes of stream {spec.name!r}",
            hint="Set num_labels in its table.",
        )
    return StreamFormat(
        dtype=dtype.str if dtype.kind == "S" else dtype.name,
        dim=dim,
        ndim=1 + len(shape),
        sparse=sparse,
        labels=None if labels is None else tuple(labels),
        shape=shape,
    )


def _encode_name(name: str | None) -> bytes:
    """The tag of a segment.

    Raises:
        SourceFormatError: if there is no name, or none that an HDF file can hold.
    """
    if name is None:
        raise SourceFormatError(
            "a sequence without a name cannot be joined with anything",
            hint="Let RASR send whole segments (no buffer of fixed size).",
        )
    if "\0" in name:
        raise SourceFormatError(
            "a tag with a NUL cannot be stored, as readers end it there", None, name
        )
    try:
        return name.encode("utf-8")
    except UnicodeEncodeError as error:
        raise SourceFormatError("the name of a sequence is no text", entry=repr(name)) from error
