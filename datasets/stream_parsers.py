"""The streams of NextGen HDF files: one HDF dataset per sequence, and a parser per kind of stream.

A file has `seq_names` and `streams/<stream>`, each stream an attribute `parser`, a group `data`
with a dataset per sequence, and `feature_names` (class names) where the data are class indices.
"/" in a sequence name is "\\" in the file, as "/" would make groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from ..io.errors import (
    MissingSequenceError,
    ShapeMismatchError,
    SourceFormatError,
    UnsupportedPayloadError,
)

if TYPE_CHECKING:
    import h5py

SPARSE = 1
DENSE = 2
MAX_ALIGNMENT_FRAMES = 1 << 27


def normalize_seq_name(name: str) -> str:
    """The name of a sequence's dataset."""
    return name.replace("/", "\\")


def decode_name(name: str | bytes) -> str:
    """A name as h5py gives it, up to the first NUL."""
    text = name if isinstance(name, str) else name.decode("utf-8")
    return text.split("\0", 1)[0]


class StreamParser:
    """Reads the sequences of one stream.

    Args:
        seq_names: normalized names of the sequences.
        stream: the HDF group of the stream.

    Attributes:
        num_features: features per frame (dense) or number of classes (sparse); None if the
            stream has no sequence to tell.
        feature_type: 1 for sparse, 2 for dense.
        dtype: element type; None if there is no sequence.

    Raises:
        SourceFormatError: if the stream is not made as its kind demands.
        MissingSequenceError: if a sequence is not in the stream.
    """

    feature_type: ClassVar[int] = SPARSE
    ndim: ClassVar[int] = 1

    def __init__(self, seq_names: Sequence[str], stream: h5py.Group) -> None:
        self.seq_names = seq_names
        self.stream = stream
        self.num_features: int | None = None
        self.dtype: str | None = None
        self._row_shape: tuple[int, ...] = ()
        self._data = required_member(stream, "data")
        if self.feature_type == SPARSE:
            self.num_features = int(required_member(stream, "feature_names").shape[0])
        missing = set(seq_names).difference(self._data)
        if missing:
            raise self._missing(min(missing))
        if seq_names:
            first = required_member(self._data, seq_names[0])
            self._learn(first)
            self._check(first)

    def get_data(self, seq_name: str) -> np.ndarray:
        """The frames of a sequence, by its normalized name.

        Raises:
            MissingSequenceError: if the stream has no such sequence.
            SourceFormatError: if the sequence is not like the others.
        """
        return self._open(seq_name)[...]

    def get_seq_length(self, seq_name: str) -> int:
        """The number of frames of a sequence; errors as `get_data`."""
        return int(self._open(seq_name).shape[0])

    def get_dtype(self) -> str:
        """The element type, for example "float32".

        Raises:
            SourceFormatError: if the stream has no sequence to tell.
        """
        if self.dtype is None:
            raise SourceFormatError(
                "a stream without sequences has no type", self._path, self.stream.name
            )
        return self.dtype

    @property
    def _path(self) -> str:
        return self.stream.file.filename

    def _learn(self, first: h5py.Dataset) -> None:
        """Takes over what the first sequence is like."""
        self.dtype = first.dtype.name

    def _check(self, dataset: h5py.Dataset) -> None:
        shape = dataset.shape
        if (
            len(shape) != self.ndim
            or shape[1:] != self._row_shape
            or dataset.dtype.name != self.dtype
        ):
            raise ShapeMismatchError(
                "sequences of one stream must be alike",
                self._path,
                dataset.name,
                expected=f"{self.dtype} of shape {('time', *self._row_shape)}",
                found=f"{dataset.dtype.name} of shape {shape}",
            )

    def _open(self, seq_name: str) -> h5py.Dataset:
        dataset = member(self._data, seq_name)
        if dataset is None:
            raise self._missing(seq_name)
        self._check(dataset)
        return dataset

    def _missing(self, seq_name: str) -> MissingSequenceError:
        return MissingSequenceError(
            f"the stream has no sequence {seq_name!r}", self._path, self.stream.name
        )


class FeatureSequenceStreamParser(StreamParser):
    """Dense features [time, dim]."""

    feature_type = DENSE
    ndim = 2

    def _learn(self, first: h5py.Dataset) -> None:
        super()._learn(first)
        self._row_shape = first.shape[1:2]
        self.num_features = int(first.shape[1]) if first.ndim == 2 else None


class SparseStreamParser(StreamParser):
    """Class indices [time]."""


class SegmentAlignmentStreamParser(StreamParser):
    """An alignment as runs (class, number of frames).

    `get_data` gives the frames as [2 * time]: for each the class, and 1 at the end of its run, else
    0. `get_seq_length` is 2 * time.
    """

    ndim = 2

    def get_data(self, seq_name: str) -> np.ndarray:
        """Class and end mark of every frame, one after the other, [2 * time]."""
        runs = self._runs(seq_name)
        frames = np.zeros((int(runs[:, 1].sum(dtype=np.int64)), 2), runs.dtype)
        if len(frames):
            frames[:, 0] = np.repeat(runs[:, 0], runs[:, 1])
            frames[np.cumsum(runs[:, 1], dtype=np.int64) - 1, 1] = 1
        return frames.reshape(-1)

    def get_seq_length(self, seq_name: str) -> int:
        """Twice the number of frames."""
        return 2 * int(self._runs(seq_name)[:, 1].sum(dtype=np.int64))

    def _learn(self, first: h5py.Dataset) -> None:
        super()._learn(first)
        self._row_shape = (2,)

    def _runs(self, seq_name: str) -> np.ndarray:
        runs = self._open(seq_name)[...]
        lengths = runs[:, 1]
        if runs.dtype.kind not in "iu":
            raise UnsupportedPayloadError(
                "runs of an alignment must be integers", self._path, seq_name, found=str(runs.dtype)
            )
        total = int(lengths.sum(dtype=np.int64))
        if len(runs) and (lengths.min() < 0 or total > MAX_ALIGNMENT_FRAMES):
            raise SourceFormatError(
                "impossible lengths of runs",
                self._path,
                seq_name,
                expected=f"0 to {MAX_ALIGNMENT_FRAMES} frames in all",
                found=f"{total}, the shortest run {lengths.min()}",
            )
        return runs


PARSERS: dict[str, type[StreamParser]] = {
    "feature_sequence": FeatureSequenceStreamParser,
    "sparse": SparseStreamParser,
    "segment_alignment": SegmentAlignmentStreamParser,
}


def member(group: h5py.Group, name: str) -> h5py.Dataset | h5py.Group | None:
    """A member of a group, or None.

    Raises:
        SourceFormatError: if it lies outside the file.
    """
    import h5py

    link = group.get(name, getlink=True)
    if link is None:
        return None
    if not isinstance(link, h5py.HardLink):
        raise SourceFormatError(
            "links that may leave the file are refused",
            group.file.filename,
            f"{group.name}/{name}",
            found=type(link).__name__,
        )
    found = group[name]
    if isinstance(found, h5py.Dataset) and (found.external or found.is_virtual):
        raise SourceFormatError(
            "data stored outside the file are refused", group.file.filename, found.name
        )
    return found


def required_member(group: h5py.Group, name: str) -> h5py.Dataset | h5py.Group:
    """A member of a group.

    Raises:
        SourceFormatError: if it is missing or lies outside the file.
    """
    found = member(group, name)
    if found is None:
        raise SourceFormatError(f"{name!r} is missing", group.file.filename, group.name)
    return found
