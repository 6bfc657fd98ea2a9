"""NextGen HDF files as sources of one stream: one HDF dataset per sequence and stream.

A file has `seq_names` and `streams/<key>`; a stream has the attribute `parser`, the group `data`
with a dataset for every sequence ("/" in its name is "\\" there), and `feature_names`, which tells
the number of classes where elements are classes. The semantics are those of RETURNN's stream
parsers.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import h5py
import numpy as np
import pyarrow as pa
import xxhash

from ..columns import encode_tags
from ..errors import (
    MissingSequenceError,
    SeqshardError,
    ShapeMismatchError,
    SourceFormatError,
    UnsupportedPayloadError,
)
from ..records import SourceIndex, StreamFormat
from .file import (
    check_storable,
    check_stored_size,
    damage_errors,
    get_dataset,
    get_group,
    open_file,
    refuse_outside,
)
from .strings import read_strings

FEATURES = "feature_sequence"
SPARSE = "sparse"
RUNS = "segment_alignment"
# Axes of one sequence's dataset.
_NUM_AXES = {FEATURES: 2, SPARSE: 1, RUNS: 2}
# A run may claim any number of frames in a few bytes; no utterance has more than this.
MAX_ALIGNMENT_FRAMES = 1 << 27


def link_name(tag: bytes) -> bytes:
    """The name of a sequence's dataset in the group `data` of a stream."""
    return tag.replace(b"/", b"\\")


@dataclass(frozen=True)
class _StreamKind:
    """What all sequences of a stream have in common.

    Attributes:
        hdf_type: element type in the file.
        dtype: the same for numpy, in the file's byte order.
        row_shape: axes behind the first one.
        direct: whether the bytes in the file are what numpy takes for this type.
    """

    hdf_type: h5py.h5t.TypeID
    dtype: np.dtype
    row_shape: tuple[int, ...]
    direct: bool


class NextGenSource:
    """One stream of one NextGen file.

    The position of a sequence is the first byte of its data in the file; or -1 - i for sequence i
    of `seq_names`, where only the HDF library can decode the data.

    Args:
        path: local file.
        key: a name in `streams`.

    Attributes:
        parser: the kind of the stream: FEATURES, SPARSE or RUNS.

    Raises:
        MissingSequenceError: if there is no such stream.
        SourceFormatError: if the file is damaged, or the stream of an unknown kind.
    """

    def __init__(self, path: str, key: str) -> None:
        self.path = path
        self.key = key
        self._file = open_file(path)
        try:
            with damage_errors(path):
                self.parser = self._find_parser()
                self._data = self._find_data()
                self._tag = self._read_list("seq_names", "sequence name")
                self._names = [link_name(tag) for tag in encode_tags(self._tag)]
                self._kind = self._find_kind()
        except BaseException:
            self._file.close()
            raise
        self._bytes = np.asarray(np.memmap(path, np.uint8, "r"))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        del self._bytes
        self._file.close()

    def index(self) -> SourceIndex:
        """See `Source.index`. Lengths come from shapes; only those of alignments from the data."""
        tags = self._tag.to_pylist()
        rows = np.zeros((len(tags), 3), np.int64)
        damaged: dict[int, SeqshardError] = {}
        with damage_errors(self.path):
            links = self._link_types()
            frame_format = None if self._kind is None else self._read_format(self._kind)
        for i, name in enumerate(self._names):
            try:
                with damage_errors(self.path, tags[i]):
                    rows[i] = self._measure(i, self._open(name, links.get(name)))
            except SeqshardError as error:
                damaged[i] = error
        good = np.ones(len(tags), bool)
        good[list(damaged)] = False
        position, length, num_bytes = np.ascontiguousarray(rows[good].T)
        return SourceIndex(
            format=frame_format,
            tag=self._tag.filter(pa.array(good.tolist(), pa.bool_())) if damaged else self._tag,
            position=position,
            length=length,
            num_bytes=num_bytes,
            raw_bytes=np.full(len(length), -1, np.int64),
            fingerprint=_fingerprint(self._names, rows, frame_format),
            damaged=tuple((tags[i], error) for i, error in damaged.items()),
        )

    def read_many(
        self,
        position: np.ndarray,
        length: np.ndarray,
        num_bytes: np.ndarray,
        raw_bytes: np.ndarray,
        out: np.ndarray,
        start: np.ndarray,
    ) -> None:
        """See `Source.read_many`."""
        columns = (position, length, num_bytes, start)
        for at, frames, stored, first in zip(*(c.tolist() for c in columns), strict=True):
            if not frames:
                continue
            values = self._read(at, stored)
            if self.parser == RUNS:
                values = _expand_runs(values, frames)
            if len(values) != frames:
                raise SourceFormatError(
                    "the sequence is not as long as when it was indexed",
                    self.path,
                    position=max(0, at),
                    expected=f"{frames} frames",
                    found=str(len(values)),
                )
            out[first : first + frames] = values

    def _read(self, position: int, num_bytes: int) -> np.ndarray:
        """The data of a sequence as stored: [frames or runs, *row shape]."""
        kind = self._kind
        if position < 0 or kind is None:
            name = self._names[-1 - position]
            with damage_errors(self.path, name.decode()):
                return h5py.Dataset(self._open(name, self._link_type(name)))[...]
        if position + num_bytes > len(self._bytes):
            raise SourceFormatError("the file ends before this sequence", self.path, None, position)
        values = np.frombuffer(self._bytes, kind.dtype, num_bytes // kind.dtype.itemsize, position)
        return values.reshape(-1, *kind.row_shape)

    # The stream.

    def _find_parser(self) -> str:
        streams = get_group(self._file, "streams")
        group = None if streams is None else get_group(self._file, f"streams/{self.key}")
        if group is None:
            raise MissingSequenceError(
                f"there is no stream {self.key!r} in this HDF file",
                self.path,
                expected=" or ".join(sorted(streams or ())) or "a file in the NextGen layout",
                found=", ".join(sorted(self._file)) or "an empty file",
                hint="Set key = ... of the stream.",
            )
        parser = group.attrs.get("parser")
        parser = parser.decode() if isinstance(parser, bytes) else parser
        if parser not in _NUM_AXES:
            raise SourceFormatError(
                "unknown kind of stream",
                self.path,
                entry=f"streams/{self.key}, attribute parser",
                expected=" or ".join(_NUM_AXES),
                found=repr(parser),
            )
        return parser

    def _find_data(self) -> h5py.Group:
        name = f"streams/{self.key}/data"
        found = get_group(self._file, name)
        if found is None:
            raise SourceFormatError(
                "the stream has no data", self.path, entry=name, expected="a group"
            )
        return found

    def _find_kind(self) -> _StreamKind | None:
        """What the first sequence is like that can be opened; None if there is none."""
        for name in self._names:
            try:
                with damage_errors(self.path, name.decode()):
                    dataset = self._open(name, self._link_type(name))
                    return self._learn(dataset, name.decode())
            except UnsupportedPayloadError:
                raise
            except SeqshardError:
                continue
        return None

    def _learn(self, dataset: h5py.h5d.DatasetID, name: str) -> _StreamKind:
        hdf_type, dtype, shape = dataset.get_type(), dataset.dtype, dataset.shape
        check_storable(dtype, self.path, name)
        if self.parser != FEATURES and dtype.kind not in "iu":
            raise UnsupportedPayloadError(
                f"elements of a stream of kind {self.parser} must be integers",
                self.path,
                name,
                found=str(dtype),
            )
        if len(shape) != _NUM_AXES[self.parser] or (self.parser == RUNS and shape[1] != 2):
            raise ShapeMismatchError(
                f"this cannot be a sequence of a stream of kind {self.parser}",
                self.path,
                name,
                found=f"shape {shape}",
            )
        direct = dtype.kind != "b" and h5py.h5t.py_create(dtype, logical=True).equal(hdf_type)
        return _StreamKind(hdf_type, dtype, shape[1:], direct)

    def _read_format(self, kind: _StreamKind) -> StreamFormat:
        dtype = kind.dtype.newbyteorder("=")
        name = f"streams/{self.key}/feature_names"
        labels = get_dataset(self._file, name)
        shape = kind.row_shape if self.parser == FEATURES else ()
        if labels is None and not shape:
            raise SourceFormatError(
                "nothing tells the number of classes", self.path, entry=name, expected="a dataset"
            )
        return StreamFormat(
            dtype=dtype.str if dtype.kind == "S" else dtype.name,
            dim=shape[0] if shape else int(labels.shape[0]) if labels.shape else 0,
            ndim=1 + len(shape),
            sparse=not shape,
            labels=self._read_labels(labels),
            shape=shape,
        )

    def _read_labels(self, dataset: h5py.Dataset | None) -> tuple[str, ...] | None:
        """Names of features or classes; None where room was made for them but none are stored."""
        if dataset is None or not dataset.size or not dataset.id.get_storage_size():
            return None
        return tuple(self._read_list(f"streams/{self.key}/feature_names", "label").to_pylist())

    def _read_list(self, name: str, what: str) -> pa.StringArray:
        dataset = get_dataset(self._file, name)
        if dataset is None:
            raise SourceFormatError(
                "this is not an HDF file in the NextGen layout",
                self.path,
                expected=f"dataset {name}",
            )
        check_stored_size(dataset, self.path, name)
        return read_strings(dataset, self.path, name, what)

    # One sequence.

    def _link_types(self) -> dict[bytes, int]:
        """How every member of the stream is linked."""
        found: dict[bytes, int] = {}

        def note(name: bytes, info: Any) -> None:
            found[name] = info.type

        self._data.id.links.iterate(note, info=True)
        return found

    def _link_type(self, name: bytes) -> int | None:
        links = self._data.id.links
        return links.get_info(name).type if name and links.exists(name) else None

    def _open(self, name: bytes, link: int | None) -> h5py.h5d.DatasetID:
        if link is None:
            raise MissingSequenceError(
                f"stream {self.key!r} does not have this sequence", self.path, name.decode()
            )
        if link != h5py.h5l.TYPE_HARD:
            raise SourceFormatError(
                "links that may leave the file are refused",
                self.path,
                name.decode(),
                hint="Store the data in the file itself.",
            )
        return h5py.h5d.open(self._data.id, name)

    def _measure(self, row: int, dataset: h5py.h5d.DatasetID) -> tuple[int, int, int]:
        """Position, frames and bytes of a sequence."""
        shape, name = dataset.shape, self._names[row]
        # Without a kind no sequence could be learnt from: this one says again why.
        kind = self._kind or self._learn(dataset, name.decode())
        same = len(shape) == 1 + len(kind.row_shape) and shape[1:] == kind.row_shape
        if not same or not dataset.get_type().equal(kind.hdf_type):
            raise ShapeMismatchError(
                "sequences of one stream must be alike",
                self.path,
                name.decode(),
                expected=f"{kind.dtype}, shape {('time', *kind.row_shape)}",
                found=f"{dataset.dtype}, shape {shape}",
            )
        num_bytes = kind.dtype.itemsize * shape[0] * (kind.row_shape[0] if kind.row_shape else 1)
        position = self._find_bytes(row, dataset, num_bytes, kind.direct) if num_bytes else 0
        length = shape[0]
        if self.parser == RUNS:
            length = 2 * _count_frames(self._read(position, num_bytes), self.path, name)
        return position, length, num_bytes

    def _find_bytes(
        self, row: int, dataset: h5py.h5d.DatasetID, num_bytes: int, direct: bool
    ) -> int:
        """Where the data of a sequence are: see the class."""
        offset = dataset.get_offset()
        if offset is None or not direct:
            found, name = h5py.Dataset(dataset), self._names[row].decode()
            refuse_outside(found, self.path, name)
            check_stored_size(found, self.path, name)
            return -1 - row
        if offset + num_bytes > len(self._bytes):
            raise SourceFormatError(
                "the file ends before this sequence",
                self.path,
                self._names[row].decode(),
                offset,
                expected=f"{num_bytes} bytes",
                found=f"{max(0, len(self._bytes) - offset)}",
            )
        return offset


def _count_frames(runs: np.ndarray, path: str, name: bytes) -> int:
    """The frames of an alignment, from its runs [runs, 2] of class and length.

    Raises:
        SourceFormatError: if the lengths are impossible.
    """
    length = runs[:, 1].astype(np.int64)
    total = int(length.sum(dtype=np.float64)) if len(length) else 0
    if len(length) and (length.min() < 0 or total > MAX_ALIGNMENT_FRAMES):
        raise SourceFormatError(
            "impossible lengths of runs",
            path,
            name.decode(),
            expected=f"0 to {MAX_ALIGNMENT_FRAMES} frames in all",
            found=f"{total}, the shortest run {length.min()}",
        )
    return total


def _expand_runs(runs: np.ndarray, length: int) -> np.ndarray:
    """Class and end mark of every frame, one after the other; `length` is twice the frames."""
    count = runs[:, 1].astype(np.int64)
    if count.min(initial=0) < 0 or 2 * int(count.sum()) != length:
        return np.zeros(0, runs.dtype)
    pairs = np.zeros((length // 2, 2), runs.dtype)
    pairs[:, 0] = np.repeat(runs[:, 0], count)
    pairs[np.cumsum(count) - 1, 1] = 1
    return pairs.reshape(-1)


def _fingerprint(names: list[bytes], rows: np.ndarray, frame_format: StreamFormat | None) -> str:
    hasher = xxhash.xxh3_128(b"\0".join(names))
    hasher.update(rows.tobytes())
    hasher.update(repr(frame_format).encode())
    return hasher.hexdigest()
