"""A new HDF file in RETURNN's layout that grows by batches, and appears only when it is complete.

h5py is imported at first use.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..io import storage
from ..io.errors import (
    ConfigError,
    OutputExistsError,
    SourceFormatError,
    UnsupportedPayloadError,
)
from .hdf_columns import Column, TextColumn, encode_texts, fixed_length

if TYPE_CHECKING:
    import h5py

ALIGNMENT = 64
COPY_BYTES = 16 << 20
FOLLOWED_TAG_BYTES = 512
INPUTS = "inputs"


class PendingFile:
    """A new HDF file under a temporary name beside its final one.

    Attributes:
        path: the final name.
        temporary: the name of the file as long as it is not published.
        hdf: the open file.
    """

    def __init__(self, path: str, *, latest: bool = False) -> None:
        """Creates the temporary file.

        Args:
            path: the final name.
            latest: use the newest HDF structures, which following a growing file demands.

        Raises:
            OutputError: if the folder does not exist or refuses the file.
        """
        import h5py

        self.path = path
        self.temporary = storage.temporary_name(path)
        self.hdf: h5py.File | None = None
        with storage.output_errors(path):
            self.hdf = h5py.File(
                self.temporary,
                "x",
                libver="latest" if latest else None,
                locking=None if latest else False,
                alignment_threshold=1,
                alignment_interval=ALIGNMENT,
            )

    def show(self) -> None:
        """Gives the file its final name while it is still being written.

        Raises:
            OutputExistsError: if another file has appeared there.
        """
        refuse_existing(self.path)
        os.replace(self.temporary, self.path)
        self.temporary = self.path

    def publish(self, *, replace: bool) -> None:
        """Closes and syncs the file and gives it its final name.

        Raises:
            OutputExistsError: if another file has appeared there and `replace` is False.
            OutputError: if the system refuses.
        """
        self._close()
        if not replace and self.temporary != self.path:
            refuse_existing(self.path)
        with storage.output_errors(self.path), open(self.temporary, "rb") as file:
            os.fsync(file.fileno())
        storage.publish(self.temporary, self.path)

    def discard(self) -> None:
        """Closes and removes the file."""
        # The buffers of a file that failed may refuse to be flushed; it is removed all the same.
        with contextlib.suppress(OSError, RuntimeError):
            self._close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.temporary)

    def _close(self) -> None:
        if self.hdf is not None:
            file, self.hdf = self.hdf, None
            with storage.output_errors(self.path):
                file.close()


def refuse_existing(path: str) -> None:
    """Raises OutputExistsError if something stands at `path`."""
    if os.path.exists(path):
        raise OutputExistsError(
            "the file exists already", path, hint="Remove it or choose another name."
        )


class StreamFile:
    """The streams, lengths and tags of a file in RETURNN's layout.

    The caller appends rows to `columns` and then their lengths and tags with `append_table`.

    Attributes:
        columns: the datasets by key; "inputs" is the input stream, all others are targets.
        num_seqs: sequences appended so far.
        pending: the file itself.
    """

    def __init__(self, path: str, *, followed: bool = False) -> None:
        """Creates the file under a temporary name.

        Args:
            path: the final name.
            followed: whether readers shall be able to follow the file while it grows.

        Raises:
            OutputError: if the folder does not exist or refuses the file.
        """
        self.pending = PendingFile(path, latest=followed)
        self.columns: dict[str, Column | TextColumn] = {}
        self.num_seqs = 0
        self._followed = followed
        self._showing = False
        self._lengths: Column | None = None
        self._tags: list[np.ndarray] = []
        self._tag_column: Column | None = None

    @property
    def path(self) -> str:
        """The final name."""
        return self.pending.path

    @property
    def hdf(self) -> h5py.File:
        """The open file."""
        assert self.pending.hdf is not None
        return self.pending.hdf

    @property
    def targets(self) -> list[str]:
        """Keys of the targets in the order of their lengths."""
        return sorted(key for key in self.columns if key != INPUTS)

    def add_inputs(
        self, dtype: np.dtype, row_shape: tuple[int, ...], total: int | None = None
    ) -> None:
        """Adds the input stream; `total` is its number of frames if that is known."""
        self.columns[INPUTS] = Column(self.hdf, INPUTS, dtype, row_shape, total)

    def add_target(
        self,
        key: str,
        size: int | Sequence[int],
        dtype: np.dtype | None,
        row_shape: tuple[int, ...],
        labels: Sequence[str],
        total: int | None = None,
    ) -> None:
        """Adds a further stream.

        Args:
            key: its name.
            size: what readers shall see as `num_outputs`: (dim, ndim) or dim.
            dtype: type of the elements; None for strings.
            row_shape: shape of one frame.
            labels: class names.
            total: its number of frames if that is known.

        Raises:
            ConfigError: if the stream cannot be part of this file.
            UnsupportedPayloadError: if a label cannot be stored.
        """
        if key in (INPUTS, "data") or "/" in key:
            raise ConfigError("a further stream cannot have this name", self.path, key)
        if self._lengths is not None:
            raise ConfigError(
                "a stream that earlier sequences do not have",
                self.path,
                key,
                expected=f"{self.targets}",
                hint="Declare it before the first sequence.",
            )
        if dtype is None and self._followed:
            raise ConfigError("strings cannot be followed (swmr)", self.path, key)
        self.hdf.require_group("targets/size").attrs[key] = size
        names = self.hdf.require_group("targets/labels")
        names.create_dataset(key, data=fixed_length(encode_texts(labels, self.path, key)))
        group = self.hdf.require_group("targets/data")
        if dtype is None:
            self.columns[key] = TextColumn(group, key)
        else:
            self.columns[key] = Column(group, key, dtype, row_shape, total)

    def encode_tags(self, tags: Sequence[str | bytes]) -> list[bytes]:
        """Tags as bytes.

        Raises:
            UnsupportedPayloadError: if one is not UTF-8, has a NUL, or is too long.
        """
        encoded = encode_texts(tags, self.path, "seqTags")
        longest = max(map(len, encoded), default=0)
        if self._followed and longest > FOLLOWED_TAG_BYTES:
            raise UnsupportedPayloadError(
                "a tag is too long for a file that others follow (swmr)",
                self.path,
                entry="seqTags",
                expected=f"at most {FOLLOWED_TAG_BYTES} bytes",
                found=f"{longest}",
            )
        return encoded

    def append_table(self, lengths: dict[str, np.ndarray | int], tags: Sequence[bytes]) -> None:
        """Adds sequences whose frames are in the columns already.

        Args:
            lengths: frames [sequences] of every stream; missing streams have none.
            tags: from `encode_tags`.
        """
        if self._lengths is None:
            self._lengths = self._new_lengths()
        order = ([INPUTS] if INPUTS in self.columns else []) + self.targets
        table = np.zeros((len(tags), *self._lengths.row_shape), np.int64)
        for index, key in enumerate(order):
            table[:, index] = lengths.get(key, 0)
        if table.size and table.max() > np.iinfo(np.int32).max:
            raise UnsupportedPayloadError(
                "a sequence is too long for the layout", self.path, found=f"{table.max()} frames"
            )
        self._lengths.append(table.astype(np.int32))
        if self._followed:
            if self._tag_column is None:
                self._tag_column = Column(self.hdf, "seqTags", np.dtype(f"S{FOLLOWED_TAG_BYTES}"))
            self._tag_column.append(np.array(tags, self._tag_column.dtype))
        else:
            self._tags.append(np.array(tags, np.bytes_))
        self.num_seqs += len(tags)

    def show(self) -> None:
        """Makes all sequences visible to readers, the tags last. The first call shows the file."""
        if not self._followed or self._lengths is None:
            return
        for column in (*self.columns.values(), self._lengths):
            column.spill()
        if not self._showing:
            # Nothing can be added to the file from here on: readers may have it open.
            self._tag_column.spill()
            self._write_counts()
            self.hdf.swmr_mode = True
            self.pending.show()
            self._showing = True
            return
        self._write_counts()
        self._tag_column.spill()

    def publish(self, *, replace: bool) -> None:
        """Completes the file and gives it its final name; see `PendingFile.publish`."""
        if self._showing:
            self.show()
        else:
            self._finish()
        self.pending.publish(replace=replace)

    def discard(self) -> None:
        """Removes the file."""
        self.pending.discard()

    def _finish(self) -> None:
        if self._lengths is None:
            self._lengths = self._new_lengths()
        for column in (*self.columns.values(), self._lengths):
            column.finish()
        if self._tag_column is None:
            tags = np.concatenate(self._tags) if self._tags else np.empty(0, "S1")
            self.hdf.create_dataset("seqTags", data=tags)
        else:
            self._tag_column.finish()
        self._write_counts()

    def _write_counts(self) -> None:
        inputs = self.columns.get(INPUTS)
        self.hdf.attrs.modify("numSeqs", self.num_seqs)
        self.hdf.attrs.modify("numTimesteps", 0 if inputs is None else inputs.num_rows)

    def _new_lengths(self) -> Column:
        # Where there is no group of targets, readers expect the column of one that does not exist.
        width = (INPUTS in self.columns) + (len(self.targets) if "targets" in self.hdf else 1)
        return Column(self.hdf, "seqLengths", np.dtype(np.int32), (width,))


def copy_streams(path: str, output: StreamFile) -> None:
    """Starts a file with all that another one in RETURNN's layout holds.

    Args:
        path: the file to copy; it must have inputs.
        output: a new, empty file.

    Raises:
        SourceFormatError: if the file is damaged or not of this layout.
    """
    from ..io.hdf.file import open_file

    with open_file(path) as source:
        for name, value in source.attrs.items():
            output.hdf.attrs[name] = value
        for name in source:
            if name not in (INPUTS, "seqLengths", "seqTags", "targets"):
                source.copy(source[name], output.hdf, name)
        inputs = _required(source, INPUTS)
        lengths = _required(source, "seqLengths")
        tags = _required(source, "seqTags")
        output.add_inputs(inputs.dtype, inputs.shape[1:])
        _copy_rows(inputs, output.columns[INPUTS])
        for key in sorted(source["targets/data"]) if "targets/data" in source else ():
            _copy_target(source, key, output)
        order = [INPUTS, *output.targets]
        table = lengths[...]
        if table.ndim != 2 or len(table) != len(tags) or table.shape[1] < len(order):
            raise SourceFormatError(
                "lengths do not fit the streams",
                path,
                entry="seqLengths",
                expected=f"shape {(len(tags), len(order))}",
                found=f"{table.shape}",
            )
        output.append_table(
            {key: table[:, column] for column, key in enumerate(order)},
            output.encode_tags([tag.split(b"\0")[0] for tag in tags[...].tolist()]),
        )
        for key, column in output.columns.items():
            total = int(table[:, order.index(key)].sum(dtype=np.int64))
            if total != column.num_rows:
                raise SourceFormatError(
                    "lengths do not add up to the frames",
                    path,
                    entry=key,
                    expected=f"{total}",
                    found=f"{column.num_rows}",
                )


def _copy_target(source: h5py.File, key: str, output: StreamFile) -> None:
    from ..io.hdf.file import get_dataset

    dataset = _required(source, f"targets/data/{key}")
    size = source["targets/size"].attrs.get(key) if "targets/size" in source else None
    if size is None:
        size = [dataset.shape[-1] if dataset.ndim > 1 else 1, dataset.ndim]
    labels = get_dataset(source, f"targets/labels/{key}")
    names = [] if labels is None else [name.split(b"\0")[0] for name in labels[...].tolist()]
    dtype = None if dataset.dtype.kind == "O" else dataset.dtype
    output.add_target(key, size, dtype, dataset.shape[1:], names)
    _copy_rows(dataset, output.columns[key])


def _copy_rows(dataset: h5py.Dataset, column: Column | TextColumn) -> None:
    row_bytes = dataset.dtype.itemsize * int(np.prod(dataset.shape[1:], dtype=np.int64))
    block = max(1, COPY_BYTES // max(1, row_bytes))
    for start in range(0, len(dataset), block):
        column.append(dataset[start : start + block])


def _required(source: h5py.File, name: str) -> h5py.Dataset:
    from ..io.hdf.file import get_dataset

    dataset = get_dataset(source, name)
    if dataset is None:
        raise SourceFormatError("this is not in the file", source.filename, entry=name)
    return dataset
