"""One HDF file in RETURNN's layout: its tables, and its frames as memory-mapped arrays.

`inputs` is the data key "data", `targets/data/KEY` are the others, `seqLengths` has a column for
each (inputs first, then the target keys sorted), `seqTags` the tags. h5py is imported when a file
is opened. The HDF file is closed when its tables are read; frames are mapped straight from the
file where they are stored in one piece, and read through h5py where not.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..io.errors import ShapeMismatchError, SourceFormatError, SourceNotFoundError
from .tags import decode_tag, tag_array

if TYPE_CHECKING:
    import h5py

_CHUNK_CACHE_BYTES = 4 << 20
# Tables may be compressed, but not so well that their size is made up.
_MAX_TABLE_RATIO = 2048
_SMALL_TABLE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class StoredArray:
    """A dataset of a file.

    Attributes:
        name: path inside the file.
        dtype, shape: of the whole array.
        offset: byte position of a contiguous array, or None where only h5py can read it.
    """

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int | None


@dataclass(frozen=True)
class HdfTables:
    """What a file says about its data.

    Attributes:
        path: the file.
        target_keys: keys of the columns of `lengths` behind that of the inputs.
        lengths: signed integers [num_seqs, columns], frames of each sequence.
        num_outputs: (dim, number of axes) per data key; a list for "data".
        labels: class names per data key.
        arrays: stored array per data key.
        tags: the array of tags.
        times: the stored array of time stamps of all frames, or None.
    """

    path: str
    has_inputs: bool
    target_keys: list[str]
    lengths: np.ndarray
    num_outputs: dict[str, Any]
    labels: dict[str, list[str]]
    arrays: dict[str, StoredArray]
    tags: StoredArray
    times: StoredArray | None

    @property
    def num_seqs(self) -> int:
        """Number of sequences."""
        return len(self.lengths)

    @property
    def column_keys(self) -> list[str]:
        """The data keys of the columns of `lengths`."""
        return [*(["data"] if self.has_inputs else []), *self.target_keys]

    def column(self, key: str) -> np.ndarray:
        """The lengths of one data key, [num_seqs]."""
        return self.lengths[:, self.column_keys.index(key)]


def seq_starts(lengths: np.ndarray) -> np.ndarray:
    """First frame of each sequence and the end, int64 [num_seqs + 1, ...]."""
    start = np.zeros((len(lengths) + 1, *lengths.shape[1:]), np.int64)
    np.cumsum(lengths, axis=0, out=start[1:])
    return start


def read_tables(path: str) -> HdfTables:
    """Opens a file and reads its tables.

    Raises:
        SourceNotFoundError: if there is no such file.
        SourceFormatError: if it is damaged, or not in RETURNN's layout, or refers to other files.
    """
    with open_hdf(path) as file:
        return _TableReader(path, file).read()


def open_hdf(path: str) -> h5py.File:
    """Opens a file for reading.

    With locks if possible, as the HDF library refuses a file that another part of the process, for
    example RETURNN, has open with other locks; without them where the file system has none. A file
    that another process still writes must be made to be followed (SWMR).

    Raises:
        SourceNotFoundError, SourceFormatError: see `read_tables`.
    """
    import h5py

    try:
        return h5py.File(path, "r", rdcc_nbytes=_CHUNK_CACHE_BYTES)
    except FileNotFoundError as error:
        raise SourceNotFoundError("there is no such file", path) from error
    except OSError as error:
        for options in ({}, {"swmr": True}):
            with contextlib.suppress(OSError):
                return h5py.File(
                    path, "r", rdcc_nbytes=_CHUNK_CACHE_BYTES, locking=False, **options
                )
        raise SourceFormatError(
            f"this is not a complete HDF file: {error}", path, hint="Write or copy it again."
        ) from error


class _TableReader:
    def __init__(self, path: str, file: h5py.File) -> None:
        self.path = path
        self.file = file
        self.size = os.path.getsize(path)

    def read(self) -> HdfTables:
        # Where the file grows, the tags are written last: everything else is there at least so far.
        tags = self._require("seqTags")
        arrays = {}
        inputs = self._find("inputs")
        if inputs is not None:
            arrays["data"] = inputs
        target_keys, have_targets = self._read_target_keys()
        if inputs is not None and "data" in target_keys:
            raise SourceFormatError(
                "the key 'data' is used for both inputs and a target", self.path
            )
        if have_targets:
            for key in target_keys:
                arrays[key] = self._require(f"targets/data/{key}")
        lengths = self._read_lengths(int(inputs is not None) + len(target_keys))
        if self.file.swmr_mode:
            lengths = lengths[: tags.shape[0]]
        if len(lengths) != tags.shape[0]:
            raise SourceFormatError(
                "seqLengths and seqTags do not fit together",
                self.path,
                expected=f"{tags.shape[0]} sequences",
                found=str(len(lengths)),
            )
        tables = HdfTables(
            path=self.path,
            has_inputs=inputs is not None,
            target_keys=target_keys,
            lengths=lengths,
            num_outputs=self._read_num_outputs(arrays),
            labels=self._read_labels(inputs is not None),
            arrays=arrays,
            tags=tags,
            times=self._find("times"),
        )
        self._check_frames(tables)
        return tables

    def _find(self, name: str) -> StoredArray | None:
        from ..io.hdf.file import get_dataset

        dataset = get_dataset(self.file, name)
        if dataset is None:
            return None
        if dataset.ndim == 0:
            raise SourceFormatError("this is a scalar, not an array", self.path, entry=name)
        offset = _offset_of(dataset)
        num_bytes = dataset.dtype.itemsize * math.prod(map(int, dataset.shape))
        if offset is not None and offset + num_bytes > self.size:
            raise SourceFormatError(
                "the file is truncated",
                self.path,
                entry=name,
                position=offset,
                expected=f"{num_bytes} bytes",
                found=f"{max(self.size - offset, 0)}",
            )
        return StoredArray(name, dataset.dtype, tuple(map(int, dataset.shape)), offset)

    def _require(self, name: str) -> StoredArray:
        found = self._find(name)
        if found is None:
            raise SourceFormatError(
                "this is not an HDF file in RETURNN's layout", self.path, expected=f"dataset {name}"
            )
        return found

    def _read_table(self, name: str) -> np.ndarray:
        dataset = self.file[self._require(name).name]
        plausible = _MAX_TABLE_RATIO * dataset.id.get_storage_size() + _SMALL_TABLE_BYTES
        if dataset.dtype.itemsize * dataset.size > plausible:
            raise SourceFormatError(
                "the table is larger than the file could hold",
                self.path,
                entry=name,
                found=f"shape {dataset.shape}",
            )
        return dataset[...]

    def _group(self, name: str) -> h5py.Group | None:
        """A group that is in this file, or None."""
        import h5py

        parts = name.split("/")
        for depth in range(len(parts)):
            link = self.file.get("/".join(parts[: depth + 1]), getlink=True)
            if link is None:
                return None
            if not isinstance(link, h5py.HardLink):
                raise SourceFormatError(
                    "links that may leave the file are refused", self.path, entry=name
                )
        return self.file[name]

    def _read_target_keys(self) -> tuple[list[str], bool]:
        if self._group("targets") is None:
            # Files without targets still have a column for them, which says nothing.
            return ["classes"], False
        data, size = self._group("targets/data"), self._group("targets/size")
        return sorted({*(data or ()), *(size.attrs if size is not None else ())}), True

    def _read_lengths(self, num_columns: int) -> np.ndarray:
        lengths = self._read_table("seqLengths")
        if lengths.ndim == 1:
            lengths = np.repeat(lengths[:, None], num_columns, axis=1)
        if len(lengths) == 0:
            lengths = np.zeros((0, num_columns), np.int32)
        if lengths.ndim != 2 or lengths.shape[1] != num_columns or lengths.dtype.kind not in "iu":
            raise SourceFormatError(
                "the table of lengths does not fit the data keys",
                self.path,
                entry="seqLengths",
                expected=f"integers [sequences, {num_columns}]",
                found=f"{lengths.dtype} {list(lengths.shape)}",
            )
        if len(lengths) and lengths.min() < 0:
            row = int(np.flatnonzero((lengths < 0).any(axis=1))[0])
            raise SourceFormatError(
                "a length is negative", self.path, f"seqLengths, row {row}", found=str(lengths[row])
            )
        return lengths if lengths.dtype.kind == "i" else lengths.astype(np.int64)

    def _check_frames(self, tables: HdfTables) -> None:
        for key, array in tables.arrays.items():
            num_frames = int(tables.column(key).sum(dtype=np.int64))
            if num_frames > array.shape[0]:
                raise SourceFormatError(
                    "there are fewer frames than seqLengths says",
                    self.path,
                    entry=array.name,
                    expected=str(num_frames),
                    found=str(array.shape[0]),
                )

    def _read_num_outputs(self, arrays: dict[str, StoredArray]) -> dict[str, Any]:
        group = self._group("targets/size")
        sizes = group.attrs if group is not None else {}
        num_outputs: dict[str, Any] = {}
        for key, array in arrays.items():
            ndim = len(array.shape)
            if array.name == "inputs":
                dim = array.shape[1] if ndim > 1 else self._read_sparse_input_dim()
                num_outputs[key] = [int(dim), ndim]
            elif key not in sizes:
                num_outputs[key] = (int(array.shape[-1]) if ndim > 1 else 1, ndim)
            elif np.ndim(sizes[key]) == 0:
                num_outputs[key] = (int(sizes[key]), ndim)
            else:
                num_outputs[key] = tuple(int(number) for number in np.ravel(sizes[key]))
            if len(num_outputs[key]) != 2:
                raise SourceFormatError(
                    "the size of a target is not one or two numbers",
                    self.path,
                    entry=f"targets/size, {key}",
                    found=str(num_outputs[key]),
                )
        return num_outputs

    def _read_sparse_input_dim(self) -> int:
        if "inputPattSize" not in self.file.attrs:
            raise SourceFormatError(
                "sparse inputs without a number of classes",
                self.path,
                expected="the attribute inputPattSize",
            )
        return int(self.file.attrs["inputPattSize"])

    def _read_labels(self, have_inputs: bool) -> dict[str, list[str]]:
        group = self._group("targets/labels")
        names = {key: f"targets/labels/{key}" for key in (group if group is not None else ())}
        if have_inputs and "labels" in self.file:
            names.setdefault("data", "labels")
        return {key: self._read_strings(name) for key, name in names.items()}

    def _read_strings(self, name: str) -> list[str]:
        try:
            return [decode_tag(item) for item in self._read_table(name).tolist()]
        except UnicodeDecodeError as error:
            raise SourceFormatError("a label is not UTF-8", self.path, entry=name) from error


def _offset_of(dataset: h5py.Dataset) -> int | None:
    """Where the array lies in the file, if its bytes are what numpy would read."""
    import h5py

    if dataset.chunks is not None or dataset.dtype.kind not in "iufS" or dataset.size == 0:
        return None
    if not dataset.id.get_type().equal(h5py.h5t.py_create(dataset.dtype)):
        return None
    return dataset.id.get_offset()


class MappedFile:
    """The contiguous arrays of a file as read-only views of one memory map."""

    def __init__(self, path: str) -> None:
        with open(path, "rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def view(self, array: StoredArray) -> np.ndarray:
        """The whole array, without a copy."""
        count = math.prod(array.shape)
        dtype = np.dtype(array.dtype.str)
        return np.frombuffer(self._map, dtype, count, array.offset).reshape(array.shape)


class H5Frames:
    """A chunked, compressed or text array, read through h5py slice by slice.

    The HDF file is opened at the first access, and again in a process that was forked later.
    """

    def __init__(self, path: str, array: StoredArray) -> None:
        self._path = path
        self._name = array.name
        self._pid = -1
        self._dataset: h5py.Dataset | None = None

    def __getitem__(self, frames: slice) -> np.ndarray:
        if self._pid != os.getpid():
            self._dataset = open_hdf(self._path)[self._name]
            self._pid = os.getpid()
        try:
            return self._dataset[frames]
        except OSError as error:
            raise SourceFormatError(
                f"the data cannot be read: {error}", self._path, self._name
            ) from error


def read_tags(tables: HdfTables, mapped: MappedFile | None) -> np.ndarray:
    """The tags of a file as an array of bytes; see `tags.tag_array`."""
    if tables.tags.offset is not None and mapped is not None:
        return mapped.view(tables.tags)
    with open_hdf(tables.path) as file:
        values = file["seqTags"][: tables.tags.shape[0]]
    if values.dtype.kind == "S":
        return values
    if values.dtype.kind != "O":
        raise SourceFormatError(
            "the tags are no text", tables.path, entry="seqTags", found=str(values.dtype)
        )
    return tag_array(values.tolist())


def check_same_format(first: HdfTables, other: HdfTables, keys: list[str]) -> None:
    """Checks that a further file of a dataset has the data keys of the first, in its dimensions.

    Raises:
        ShapeMismatchError: if not.
    """
    for key in keys:
        if other.num_outputs.get(key) != first.num_outputs.get(key):
            raise ShapeMismatchError(
                f"the data key {key!r} does not fit the other files of the dataset",
                other.path,
                expected=f"{_describe(first.num_outputs.get(key))} as in {first.path}",
                found=_describe(other.num_outputs.get(key)),
            )


def _describe(size: Any) -> str:
    return "no data" if size is None else f"dimension {size[0]}, {size[1]} axes"
