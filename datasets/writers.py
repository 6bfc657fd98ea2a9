"""Writers of HDF files in RETURNN's layout: batch by batch, or from any dataset.

What the files mean to a reader is what RETURNN's `SimpleHDFWriter` and `HDFDatasetWriter` define;
how they are written is not: whole blocks instead of a resize per sequence, and nothing appears
under the final name before it is complete.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

import numpy as np

from ..io.errors import (
    ConfigError,
    ShapeMismatchError,
    SourceNotFoundError,
    UnsupportedPayloadError,
)
from .hdf_columns import encode_texts, fixed_length
from .hdf_output import INPUTS, StreamFile, copy_streams, refuse_existing
from .padded import axis_sizes, extra_rows, valid_frames


class SimpleHDFWriter:
    """Writes batches of sequences to a file that `HDFDataset` reads.

    The file appears with `close`, complete. As a context manager, an exception inside `with`
    leaves nothing behind. With `swmr`, the file appears with the first batch, so that other
    processes can follow it (`h5py.File(filename, "r", swmr=True)`, `dataset.refresh()`): `seqTags`
    grows last, so that whatever belongs to a visible tag is there.

    Attributes:
        filename, dim, ndim, labels: as given.
        tmp_filename: where the data are until `close`; None afterwards.
    """

    def __init__(
        self,
        filename: str | os.PathLike[str],
        dim: int | None,
        labels: Sequence[str] | None = None,
        ndim: int | None = None,
        extra_type: Mapping[str, tuple[int, int, str]] | None = None,
        swmr: bool = False,
        extend_existing_file: bool = False,
        extra_labels: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """Prepares the file. Arguments are those of RETURNN's class.

        Args:
            filename: final name; must not exist.
            dim: number of features (dense) or classes (sparse), or None.
            labels: `dim` names of classes.
            ndim: axes of one sequence; default: 1 if `dim` is None, else 2.
            extra_type: further streams as key -> (dim, ndim, dtype); otherwise the first batch
                declares them. dtype may be "string".
            swmr: let readers follow the file while it grows.
            extend_existing_file: start with the sequences of `filename`, which must exist then;
                it is replaced on `close`.
            extra_labels: class names of streams in `extra_type`.

        Raises:
            OutputExistsError: if the file exists and shall not be extended.
            SourceNotFoundError, SourceFormatError: if the file to extend is missing or damaged.
            ConfigError: if arguments contradict each other.
            OutputError: if the folder refuses the file.
        """
        self.filename = os.fspath(filename)
        self.dim = dim
        self.ndim = ndim if ndim is not None else 1 if dim is None else 2
        self.labels = labels
        self.extend_existing_file = extend_existing_file
        self._file: StreamFile | None = None
        self._check_arguments(swmr, extra_type or {}, extra_labels or {})
        self._file = StreamFile(self.filename, followed=swmr)
        try:
            if extend_existing_file:
                copy_streams(self.filename, self._file)
            else:
                self._write_header()
            for key, (extra_dim, extra_ndim, dtype) in (extra_type or {}).items():
                if key not in self._file.columns:
                    self._declare(key, extra_dim, extra_ndim, dtype, (extra_labels or {}).get(key))
        except BaseException:
            self._discard()
            raise

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.filename!r} dim={self.dim} ndim={self.ndim}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._discard()

    def __del__(self) -> None:
        self._discard()

    @property
    def tmp_filename(self) -> str | None:
        """Where the data are until `close`."""
        return None if self._file is None else self._file.pending.temporary

    def insert_batch(
        self,
        inputs: np.ndarray,
        seq_len: Sequence[int] | np.ndarray | Mapping[int, Sequence[int] | np.ndarray],
        seq_tag: Sequence[str | bytes],
        extra: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Appends a batch, or nothing at all if it is refused.

        Several axes of dynamic length are flattened into one, and their lengths go to the stream
        "sizes" (int32).

        Args:
            inputs: shape [batch, time, dim], [batch, time], or [batch, time1, time2, ...].
            seq_len: lengths [batch] of the time axis, or of every dynamic axis by its number
                (without the batch). The longest must be the size of the axis.
            seq_tag: tags [batch], str or UTF-8 bytes.
            extra: further streams, key -> [batch, ...]; numbers or strings. They are not cut: each
                sequence gets the whole row, and [batch] gives one frame per sequence.

        Raises:
            ShapeMismatchError: if arrays, lengths and earlier batches do not fit together.
            UnsupportedPayloadError: if a tag or text cannot be stored.
            ConfigError: if the writer is closed or a key is not possible.
        """
        if self._file is None:
            raise ConfigError("the writer is closed", self.filename)
        inputs = np.asarray(inputs)
        self._check_inputs(inputs, len(seq_tag))
        if not len(seq_tag):
            return
        sizes = axis_sizes(inputs, seq_len, self.filename)
        tags = self._file.encode_tags(seq_tag)
        row_shape = (self.dim,) if self.dim and len(sizes) < self.ndim else ()
        frames, index = valid_frames(inputs, sizes, row_shape, self.filename)
        extras = self._extra_rows(extra or {}, sizes)
        # Everything that may refuse the batch comes before the first append.
        columns = self._file.columns
        for key, (rows, length) in extras.items():
            if key in columns:
                extras[key] = columns[key].convert(rows), length
        if INPUTS in columns:
            frames = columns[INPUTS].convert(frames)
        self._declare_missing(frames, extras)

        if index is None:
            columns[INPUTS].append(frames)
        else:
            columns[INPUTS].take(frames, index)
        for key, (rows, _) in extras.items():
            columns[key].append(rows)
        lengths = {key: length for key, (_, length) in extras.items()}
        self._file.append_table({INPUTS: sizes.prod(axis=0), **lengths}, tags)
        self._file.show()

    def close(self) -> None:
        """Completes the file and gives it its final name. Does nothing if that is done.

        Raises:
            OutputExistsError: if another file has appeared there since.
            OutputError: if the file cannot be written.
        """
        if self._file is None:
            return
        try:
            self._file.publish(replace=self.extend_existing_file)
        except BaseException:
            self._discard()
            raise
        self._file = None

    def _check_arguments(
        self,
        swmr: bool,
        extra_type: Mapping[str, tuple[int, int, str]],
        extra_labels: Mapping[str, Sequence[str]],
    ) -> None:
        if self.labels and len(self.labels) != self.dim:
            raise ConfigError(
                "one label per class is needed",
                self.filename,
                expected=f"{self.dim} labels",
                found=f"{len(self.labels)}",
            )
        if swmr and self.extend_existing_file:
            raise ConfigError(
                "an existing file cannot be extended while others follow it",
                self.filename,
                hint="Use either swmr or extend_existing_file.",
            )
        for key in extra_labels:
            if key not in extra_type:
                raise ConfigError(
                    "labels of a stream that extra_type does not declare", self.filename, entry=key
                )
        if not self.extend_existing_file:
            refuse_existing(self.filename)
        elif not os.path.exists(self.filename):
            raise SourceNotFoundError("there is no file to extend", self.filename)

    def _check_inputs(self, inputs: np.ndarray, num_seqs: int) -> None:
        if inputs.ndim != self.ndim + 1 or len(inputs) != num_seqs:
            raise ShapeMismatchError(
                "a batch of another shape than the writer was made for",
                self.filename,
                expected=f"{num_seqs} sequences of {self.ndim} axes",
                found=f"shape {inputs.shape}",
            )
        if inputs.dtype.kind in "OSU":
            raise UnsupportedPayloadError(
                "inputs must be numbers", self.filename, found=str(inputs.dtype)
            )

    def _extra_rows(
        self, extra: Mapping[str, np.ndarray], sizes: np.ndarray
    ) -> dict[str, tuple[np.ndarray | list[bytes], int]]:
        """Rows of every further stream (bytes for strings), and how many each sequence has."""
        rows: dict[str, tuple[np.ndarray | list[bytes], int]] = {}
        for key, value in extra.items():
            frames, length = extra_rows(value, sizes.shape[1], key, self.filename)
            is_text = frames.dtype.kind in "OSU"
            if is_text and frames.ndim > 1:
                raise ShapeMismatchError("strings have no feature axis", self.filename, key)
            rows[key] = (encode_texts(frames, self.filename, key) if is_text else frames), length
        if len(sizes) > 1:
            if "sizes" in rows:
                raise ConfigError(
                    "this stream holds the lengths of the dynamic axes", self.filename, "sizes"
                )
            rows["sizes"] = sizes.T.astype(np.int32).reshape(-1), len(sizes)
        return rows

    def _declare_missing(
        self, frames: np.ndarray, extras: Mapping[str, tuple[np.ndarray | list[bytes], int]]
    ) -> None:
        """Adds the streams that the first batch brings."""
        for key in [key for key in extras if key not in self._file.columns]:
            rows = extras[key][0]
            if isinstance(rows, list):
                self._declare(key, 1, 1, "string", None)
            else:
                dim = rows.shape[-1] if rows.ndim > 1 else 1
                self._declare(key, dim, rows.ndim, rows.dtype.name, None)
        if INPUTS not in self._file.columns:
            self._file.add_inputs(frames.dtype, frames.shape[1:])

    def _declare(
        self, key: str, dim: int | None, ndim: int, dtype: str, labels: Sequence[str] | None
    ) -> None:
        """Adds a further stream."""
        if ndim > 2 or (ndim == 2 and (not dim or dtype == "string")):
            raise ConfigError("only time can be dynamic in a further stream", self.filename, key)
        if labels is not None and len(labels) != dim:
            raise ConfigError(
                "one label per class is needed",
                self.filename,
                key,
                expected=f"{dim} labels",
                found=f"{len(labels)}",
            )
        self._file.add_target(
            key,
            [dim or 1, max(ndim, 1)],
            None if dtype == "string" else np.dtype(dtype),
            (dim,) if ndim == 2 else (),
            ["dummy-label"] if labels is None else labels,
        )

    def _write_header(self) -> None:
        attributes = self._file.hdf.attrs
        attributes["numTimesteps"] = 0
        attributes["inputPattSize"] = self.dim or 1
        attributes["numDims"] = 1
        attributes["numLabels"] = self.dim or 1
        attributes["numSeqs"] = 0
        labels = encode_texts(self.labels or (), self.filename, "labels")
        self._file.hdf.create_dataset("labels", data=fixed_length(labels))

    def _discard(self) -> None:
        file, self._file = getattr(self, "_file", None), None
        if file is not None:
            file.discard()
