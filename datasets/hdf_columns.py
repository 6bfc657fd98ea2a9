"""Datasets of an HDF file that grow by blocks of rows.

Nothing in here writes row by row: rows are gathered in a bounded buffer and go to the file in
large blocks. h5py is imported at first use.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..io.errors import ShapeMismatchError, UnsupportedPayloadError

if TYPE_CHECKING:
    import h5py

BUFFER_BYTES = 32 << 20
# Unfiltered chunks that are larger than HDF5's chunk cache (1 MiB, 8 MiB since HDF5 2.0) are read
# and written in place, as fast as contiguous storage; smaller ones are copied whole, every time.
CHUNK_BYTES = 16 << 20
TEXT_ROWS = 1 << 15


class Column:
    """A dataset of numbers that grows by appending rows.

    As long as all rows fit into the buffer, nothing is written, and `finish` stores them
    contiguously; so it does where the number of rows was known. Otherwise the dataset has chunks
    of CHUNK_BYTES.

    Attributes:
        num_rows: rows appended so far.
    """

    def __init__(
        self,
        group: h5py.Group,
        name: str,
        dtype: np.dtype,
        row_shape: tuple[int, ...] = (),
        total: int | None = None,
    ) -> None:
        """Prepares a dataset; the file is not touched yet.

        Args:
            group: where the dataset will be.
            name: its name in the group.
            dtype: of the elements; stored little-endian.
            row_shape: shape of one row.
            total: the final number of rows, if it is known.
        """
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.row_shape = row_shape
        self.num_rows = 0
        self._group = group
        self._name = name
        self._total = total
        row_bytes = max(1, self.dtype.itemsize * int(np.prod(row_shape, dtype=np.int64)))
        self._chunk_rows = max(1, CHUNK_BYTES // row_bytes)
        capacity = max(1, BUFFER_BYTES // row_bytes)
        # The pages of the buffer come into being only as they are filled.
        self._buffer = np.empty((capacity, *row_shape), self.dtype)
        self._used = 0
        self._dataset: h5py.Dataset | None = None

    def convert(self, rows: np.ndarray) -> np.ndarray:
        """Rows in the type of the dataset; themselves if they have it.

        Raises:
            ShapeMismatchError: if rows have another shape, or values do not fit the type.
        """
        rows = np.asarray(rows)
        if rows.shape[1:] != self.row_shape:
            raise ShapeMismatchError(
                "frames of different shape in one stream",
                self._group.file.filename,
                entry=self._name,
                expected=str(self.row_shape),
                found=str(rows.shape[1:]),
            )
        if rows.dtype == self.dtype:
            return rows
        if np.can_cast(rows.dtype, self.dtype, casting="same_kind"):
            converted = rows.astype(self.dtype)
            if self.dtype.kind not in "iu" or np.array_equal(converted, rows):
                return converted
        raise ShapeMismatchError(
            "values that the type of the stream cannot hold",
            self._group.file.filename,
            entry=self._name,
            expected=self.dtype.name,
            found=rows.dtype.name,
            hint="Use one element type for all sequences.",
        )

    def append(self, rows: np.ndarray) -> None:
        """Adds rows, array [n, *row_shape].

        Raises:
            ShapeMismatchError: if rows have another shape, or values do not fit the type.
        """
        rows = self.convert(rows)
        for start, stop, room in self._rooms(len(rows)):
            room[:] = rows[start:stop]

    def take(self, rows: np.ndarray, index: np.ndarray) -> None:
        """Adds `rows[index]` without a temporary copy.

        Args:
            rows: array [n, *row_shape].
            index: int64 [m], all within rows.

        Raises:
            ShapeMismatchError: as `append`.
        """
        rows = self.convert(rows)
        for start, stop, room in self._rooms(len(index)):
            np.take(rows, index[start:stop], axis=0, out=room, mode="clip")

    def spill(self) -> None:
        """Writes the buffer to the file, where readers that follow it will see it."""
        if self._dataset is None:
            self._create()
        dataset = self._dataset
        written = self.num_rows - self._used
        if dataset.shape[0] < self.num_rows:
            dataset.resize(self.num_rows, axis=0)
        if self._used:
            dataset[written : self.num_rows] = self._buffer[: self._used]
            self._used = 0
        dataset.flush()

    def finish(self) -> None:
        """Writes what is left; the dataset exists afterwards, even if it has no row."""
        if self._dataset is None and self._total is None:
            self._total = self.num_rows
        self.spill()

    def _create(self) -> None:
        growing = self._total is None
        self._dataset = self._group.create_dataset(
            self._name,
            (0 if growing else self._total, *self.row_shape),
            self.dtype,
            maxshape=(None, *self.row_shape) if growing else None,
            chunks=(self._chunk_rows, *self.row_shape) if growing else None,
            fill_time="never",
            track_times=False,
        )

    def _rooms(self, count: int) -> Iterator[tuple[int, int, np.ndarray]]:
        """Yields (start, stop, buffer space for these rows) until `count` rows have a place."""
        start = 0
        while start < count:
            if self._used == len(self._buffer):
                self.spill()
            stop = min(count, start + len(self._buffer) - self._used)
            end = self._used + stop - start
            yield start, stop, self._buffer[self._used : end]
            self._used = end
            self.num_rows += stop - start
            start = stop


class TextColumn:
    """A dataset of UTF-8 strings of any length that grows by appending.

    Attributes:
        num_rows: strings appended so far.
    """

    def __init__(self, group: h5py.Group, name: str) -> None:
        self.num_rows = 0
        self._group = group
        self._name = name
        self._pending: list[bytes] = []
        self._dataset: h5py.Dataset | None = None

    def convert(self, rows: Iterable[Any]) -> list[bytes]:
        """Strings as UTF-8.

        Raises:
            UnsupportedPayloadError: if one is no string, not UTF-8, or has a NUL.
        """
        return encode_texts(rows, self._group.file.filename, self._name)

    def append(self, rows: Iterable[Any]) -> None:
        """Adds strings.

        Raises:
            UnsupportedPayloadError: as `convert`.
        """
        texts = self.convert(rows)
        self._pending += texts
        self.num_rows += len(texts)
        if len(self._pending) >= TEXT_ROWS:
            self._spill()

    def finish(self) -> None:
        """Writes what is left; the dataset exists afterwards."""
        self._spill()

    def _spill(self) -> None:
        import h5py

        if self._dataset is None:
            self._dataset = self._group.create_dataset(
                self._name, (0,), h5py.string_dtype(), maxshape=(None,), chunks=(TEXT_ROWS // 8,)
            )
        if self._pending:
            self._dataset.resize(self.num_rows, axis=0)
            self._dataset[self.num_rows - len(self._pending) :] = self._pending
            self._pending = []


def encode_texts(texts: Iterable[Any], path: str, entry: str) -> list[bytes]:
    """Strings as UTF-8 bytes.

    Args:
        texts: sequence of str or of UTF-8 bytes.
        path, entry: where they are going to be, for the message of an error.

    Raises:
        UnsupportedPayloadError: if one is no string, not UTF-8, or has a NUL: readers of the
            layout would cut it there.
    """
    encoded = []
    for text in texts:
        try:
            data = text.encode("utf-8") if isinstance(text, str) else text
            data.decode("utf-8")
        except (UnicodeError, AttributeError) as error:
            raise UnsupportedPayloadError(
                "only UTF-8 strings can be stored", path, entry=entry, found=repr(text)
            ) from error
        if b"\0" in data:
            raise UnsupportedPayloadError(
                "strings with NUL cannot be stored", path, entry=entry, found=repr(text)
            )
        encoded.append(data)
    return encoded


def fixed_length(values: Sequence[bytes]) -> np.ndarray:
    """Strings as a fixed-length array [n], one byte wider than the longest, as RETURNN has them."""
    return np.array(values, dtype=f"S{max(map(len, values), default=0) + 1}")
