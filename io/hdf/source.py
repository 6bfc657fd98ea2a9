"""HDF files in the layout of RETURNN's HDFDataset as sources of one stream.

Semantics (which key is where, what is sparse, where the dimension comes from) are those of
RETURNN's `HDFDataset`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import h5py
import numpy as np
import pyarrow as pa
import xxhash

from ..errors import MissingSequenceError, SourceFormatError
from ..records import SourceIndex, StreamFormat
from .file import (
    check_storable,
    check_stored_size,
    damage_errors,
    get_dataset,
    get_group,
    open_file,
)
from .strings import read_strings


class HdfSource:
    """One key of one HDF file.

    Args:
        path: local file.
        key: "data" for `inputs`, else a name in `targets/data`.
    """

    def __init__(self, path: str, key: str) -> None:
        self.path = path
        self.key = key
        self._file = open_file(path)
        try:
            with damage_errors(path):
                self._name = self._find_dataset()
                self._dataset = self._require(self._name)
                self._check_payload()
                self._frames = _map_contiguous(path, self._dataset)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._frames = None
        self._file.close()

    def index(self) -> SourceIndex:
        """See `Source.index`. Sequences follow one another in the file without gaps."""
        with damage_errors(self.path):
            tag = self._read_strings("seqTags", "sequence tag")
            length = self._read_lengths(len(tag))
            frame_format = self._read_format()
        position = np.zeros(len(length), np.int64)
        np.cumsum(length[:-1], out=position[1:])
        if int(length.sum()) != self._dataset.shape[0]:
            raise SourceFormatError(
                "seqLengths and the data do not fit together",
                self.path,
                entry=self._name,
                expected=f"{int(length.sum())} frames",
                found=f"{self._dataset.shape[0]}",
            )
        hasher = xxhash.xxh3_128(length.tobytes())
        for buffer in filter(None, tag.buffers()[1:]):
            hasher.update(buffer)
        hasher.update(repr(frame_format).encode())
        num_bytes = length * frame_format.frame_bytes
        return SourceIndex(
            format=frame_format,
            tag=tag,
            position=position,
            length=length,
            num_bytes=num_bytes,
            raw_bytes=np.full(len(length), -1, np.int64),
            fingerprint=hasher.hexdigest(),
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
        """See `Source.read_many`. Neighbours in the file and in `out` are one copy."""
        begin, end, to = _merge_neighbours(position, length, start)
        total = self._dataset.shape[0]
        for first, last, target in zip(begin.tolist(), end.tolist(), to.tolist(), strict=True):
            if last > total:
                raise SourceFormatError(
                    "the data end before this sequence", self.path, f"{self._name}, frame {first}"
                )
            if self._frames is not None:
                out[target : target + last - first] = self._frames[first:last]
            else:
                self._read_chunked(first, last, out[target : target + last - first])

    def _read_chunked(self, first: int, last: int, out: np.ndarray) -> None:
        if out.size:  # h5py before 3.13 cannot read nothing
            with damage_errors(self.path, f"{self._name}, frame {first}"):
                self._dataset.read_direct(out, np.s_[first:last])

    def _find_dataset(self) -> str:
        if self.key == "data" and get_dataset(self._file, "inputs") is not None:
            return "inputs"
        name = f"targets/data/{self.key}"
        if get_dataset(self._file, name) is not None:
            return name
        keys = ["data"] if "inputs" in self._file else []
        keys += sorted(get_group(self._file, "targets/data") or {})
        raise MissingSequenceError(
            f"there is no data key {self.key!r} in this HDF file",
            self.path,
            expected=" or ".join(keys) or "a file in RETURNN's layout",
            found=", ".join(sorted(self._file)) or "an empty file",
            hint="Set key = ... of the stream.",
        )

    def _require(self, name: str) -> h5py.Dataset:
        found = get_dataset(self._file, name)
        if found is None:
            raise SourceFormatError(
                "this is not an HDF file in RETURNN's layout", self.path, expected=f"dataset {name}"
            )
        return found

    def _check_payload(self) -> None:
        """The data must be frames of a type that shards can hold, and really be in the file."""
        dataset = self._dataset
        check_storable(dataset.dtype, self.path, self._name)
        if not dataset.shape:
            raise SourceFormatError(
                "the data have no time axis", self.path, self._name, found=f"shape {dataset.shape}"
            )
        check_stored_size(dataset, self.path, self._name)

    def _read_strings(self, name: str, what: str) -> pa.StringArray:
        return read_strings(self._require(name), self.path, name, what)

    def _read_lengths(self, num_tags: int) -> np.ndarray:
        table = self._require("seqLengths")
        if table.dtype.kind not in "iuf" or len(table.shape) not in (1, 2):
            raise SourceFormatError(
                "seqLengths must be a table of numbers",
                self.path,
                entry="seqLengths",
                found=f"{table.dtype}, shape {table.shape}",
            )
        if len(table) != num_tags:
            raise SourceFormatError(
                "seqLengths and seqTags do not fit together",
                self.path,
                entry="seqLengths",
                expected=f"{num_tags} rows",
                found=f"shape {table.shape}",
            )
        values = table[...]
        column = values if values.ndim == 1 else values[:, self._length_column(values.shape[1])]
        with np.errstate(invalid="ignore"):
            length = column.astype(np.int64)
        bad = np.flatnonzero((length != column) | (length < 0) | (length > len(self._dataset)))
        if len(bad):
            raise SourceFormatError(
                "a sequence length is not a count of frames",
                self.path,
                entry=f"seqLengths, row {bad[0]}",
                expected=f"a whole number from 0 to the {len(self._dataset)} frames of the data",
                found=str(column[bad[0]]),
            )
        return length

    def _length_column(self, num_columns: int) -> int:
        first_target = int("inputs" in self._file)
        if self._name == "inputs":
            return 0
        keys = set(get_group(self._file, "targets/data") or {}) | set(self._target_sizes())
        column = first_target + sorted(keys).index(self.key)
        if column >= num_columns:
            raise SourceFormatError(
                "seqLengths has no column for this key",
                self.path,
                entry=self._name,
                expected=f"{first_target + len(keys)} columns",
                found=str(num_columns),
            )
        return column

    def _target_sizes(self) -> Mapping[str, Any]:
        group = get_group(self._file, "targets/size")
        return {} if group is None else group.attrs

    def _read_format(self) -> StreamFormat:
        dtype, shape = self._dataset.dtype, self._dataset.shape[1:]
        native = dtype.newbyteorder("=")
        sparse = "int" in native.name and not shape
        dim, ndim = (int(shape[-1]) if shape else 1), 1 + len(shape)
        if self._name == "inputs":
            if shape:
                dim = int(shape[0])
            elif "inputPattSize" in self._file.attrs:
                dim = self._whole_numbers(self._file.attrs["inputPattSize"], "inputPattSize")[0]
        elif self.key in self._target_sizes():
            entry = f"targets/size, attribute {self.key}"
            numbers = self._whole_numbers(self._target_sizes()[self.key], entry)
            dim, ndim = numbers if len(numbers) == 2 else (numbers[0], ndim)
        return StreamFormat(
            dtype=native.str if native.kind == "S" else native.name,
            dim=dim,
            ndim=ndim,
            sparse=sparse,
            labels=self._read_labels(),
            shape=tuple(map(int, shape)),
        )

    def _whole_numbers(self, value: Any, entry: str) -> list[int]:
        """One or two numbers of an attribute."""
        numbers = np.atleast_1d(value)
        if numbers.dtype.kind not in "iu" or numbers.shape not in ((1,), (2,)) or numbers.min() < 0:
            raise SourceFormatError(
                "this attribute must be one or two whole numbers",
                self.path,
                entry=entry,
                found=repr(value),
            )
        return numbers.tolist()

    def _read_labels(self) -> tuple[str, ...] | None:
        name = "labels" if self._name == "inputs" else f"targets/labels/{self.key}"
        dataset = get_dataset(self._file, name)
        if dataset is None or not dataset.size:
            return None
        return tuple(self._read_strings(name, "label").to_pylist())


def _map_contiguous(path: str, dataset: h5py.Dataset) -> np.ndarray | None:
    """A read-only view of the whole dataset, or None where only the HDF library can decode it."""
    offset = dataset.id.get_offset()
    if dataset.chunks is not None or offset is None or not dataset.dtype.isnative:
        return None
    if dataset.dtype.kind == "b" or dataset.size == 0:
        return None
    return np.memmap(path, dataset.dtype, "r", offset, dataset.shape)


def _merge_neighbours(
    position: np.ndarray, length: np.ndarray, start: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Joins sequences that are adjacent in source and target: (begin, end, target) per run."""
    used = length > 0
    position, length, start = position[used], length[used], start[used]
    end, stop = position + length, start + length
    cut = (position[1:] != end[:-1]) | (start[1:] != stop[:-1])
    first = np.concatenate(([True], cut)) if len(position) else np.zeros(0, bool)
    last = np.concatenate((cut, [True])) if len(position) else np.zeros(0, bool)
    return position[first], end[last], start[first]
