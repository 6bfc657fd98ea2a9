"""Writes what a dataset gives in one epoch to one HDF file."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from ..io.errors import ConfigError, PlanError, ShapeMismatchError, UnsupportedPayloadError
from .hdf_output import INPUTS, StreamFile

if TYPE_CHECKING:
    import h5py

# RETURNN's layout has no place for them, and its writer leaves them out as well.
SKIPPED_KEYS = ("orth", "raw")
TABLE_ROWS = 4096


class HDFDatasetWriter:
    """Copies a dataset to a file that `HDFDataset` reads.

    The file appears with `close`, complete, and replaces one of that name. After an exception,
    also one inside `with`, it does not appear. Until then an empty file holds the name if it was
    free: callers of RETURNN's writer expect one, and no reader takes it for a dataset.

    Attributes:
        filename: the final name.
    """

    def __init__(self, filename: str | os.PathLike[str]) -> None:
        """Creates the file under a temporary name beside `filename`.

        Raises:
            OutputError: if the folder does not exist or refuses the file.
        """
        self.filename = os.fspath(filename)
        self._file: StreamFile | None = None
        self._holds_name = False
        self._file = StreamFile(self.filename)
        self._holds_name = _hold_name(self.filename)

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
        # A writer that nobody closed leaves the empty file as a trace.
        file = getattr(self, "_file", None)
        if file is not None:
            file.discard()

    @property
    def file(self) -> h5py.File:
        """The open HDF file, for further attributes.

        Raises:
            ConfigError: if the writer is closed, or failed.
        """
        return self._open().hdf

    def dump_from_dataset(
        self,
        dataset: Any,
        epoch: int = 1,
        start_seq: int = 0,
        end_seq: float = math.inf,
        use_progress_bar: bool = True,
    ) -> None:
        """Copies sequences of one epoch, in one pass.

        Where the dataset knows all lengths in advance the arrays are contiguous, also when they
        are large.

        Args:
            dataset: any dataset with RETURNN's interface.
            epoch: 1-based.
            start_seq: the first sequence.
            end_seq: the last sequence (inclusive, as in RETURNN).
            use_progress_bar: show the progress if standard error is a terminal.

        Raises:
            PlanError: if there is no sequence.
            ConfigError: if it is not clear which stream is the input, or the file has data.
            ShapeMismatchError: if an array is not what the dataset announced.
        """
        file = self._open()
        if file.columns:
            raise ConfigError("this file has a dataset already", self.filename)
        try:
            _Dump(dataset, file, start_seq, end_seq).run(epoch, use_progress_bar)
        except BaseException:
            self._discard()
            raise

    def close(self) -> None:
        """Completes the file and gives it its final name. Does nothing if that is done.

        Raises:
            OutputError: if the file cannot be written.
        """
        if self._file is None:
            return
        try:
            self._file.publish(replace=True)
        except BaseException:
            self._discard()
            raise
        self._file = None

    def _open(self) -> StreamFile:
        if self._file is None:
            raise ConfigError("the writer is closed, or has failed before", self.filename)
        return self._file

    def _discard(self) -> None:
        file, self._file = getattr(self, "_file", None), None
        if file is not None:
            file.discard()
            if self._holds_name:
                _release_name(self.filename)


def _hold_name(path: str) -> bool:
    """Creates an empty file if there is none; whether it did."""
    try:
        with open(path, "xb"):
            return True
    except FileExistsError:
        return False


def _release_name(path: str) -> None:
    """Removes a file that is still empty."""
    with contextlib.suppress(FileNotFoundError):
        if os.path.getsize(path) == 0:
            os.unlink(path)


def stream_names(dataset: Any) -> dict[str, str]:
    """Which dataset key becomes which stream of the file: "inputs", or the name of a target.

    Raises:
        ConfigError: if several streams could be the input.
    """
    keys = sorted(key for key in dataset.get_data_keys() if key not in SKIPPED_KEYS)
    if not keys:
        raise ConfigError("the dataset has no stream that can be stored", found=repr(dataset))
    targets = [key for key in dataset.get_target_list() if key in keys]
    inputs = [key for key in keys if key not in targets]
    if len(inputs) > 1 and "data" not in inputs:
        raise ConfigError(
            "more than one stream could be the input",
            found=f"{inputs}",
            hint='Name one of them "data".',
        )
    main = "data" if "data" in inputs else inputs[0] if inputs else None
    names = {key: INPUTS if key == main else key for key in keys}
    # A file has "data" for its inputs only.
    if names.get("data") == "data":
        if "classes" in names:
            raise ConfigError('a target "data" is stored as "classes", which is there too')
        names["data"] = "classes"
    return names


def stream_labels(dataset: Any, key: str) -> list[str]:
    """Class names of a stream; generated ones if the dataset has none, or not one per class."""
    labels = dataset.labels.get(key, ())
    dim = dataset.get_data_dim(key)
    return list(labels) if len(labels) == dim else [f"{key}-class-{i}" for i in range(dim)]


@dataclass
class _Dump:
    """One run over a dataset.

    Attributes:
        lengths: frames of the sequences that are not in the table yet, by stream.
        tags: their tags.
    """

    dataset: Any
    file: StreamFile
    start_seq: int
    end_seq: float
    lengths: dict[str, list[int]] = field(default_factory=dict)
    tags: list[bytes] = field(default_factory=list)

    def run(self, epoch: int, use_progress_bar: bool) -> None:
        from tqdm import tqdm

        self.dataset.init_seq_order(epoch)
        if not self.dataset.is_less_than_num_seqs(self.start_seq):
            raise PlanError(
                "the dataset has no sequence to copy", found=f"start_seq {self.start_seq}"
            )
        self.dataset.load_seqs(self.start_seq, self.start_seq + 1)
        names = stream_names(self.dataset)
        known = self._known_lengths(names)
        for key, name in names.items():
            self._add_stream(key, name, None if known is None else int(known[name].sum()))
        self.lengths = {name: [] for name in names.values()}
        quiet = not (use_progress_bar and sys.stderr.isatty())
        total = self._num_seqs() if known is None else len(known[next(iter(names.values()))])
        for row, index in enumerate(tqdm(self._indices(), total=total, unit="seq", disable=quiet)):
            self._copy(index, names)
            if known is not None:
                self._check(row, known)
            if len(self.tags) == TABLE_ROWS:
                self._append_table()
        self._append_table()
        self.file.hdf.attrs["inputPattSize"] = int(self.dataset.num_inputs)

    def _indices(self) -> Iterator[int]:
        index = self.start_seq
        while index <= self.end_seq and self.dataset.is_less_than_num_seqs(index):
            yield index
            index += 1

    def _num_seqs(self) -> int | None:
        try:
            return int(min(self.dataset.num_seqs, self.end_seq + 1)) - self.start_seq
        except NotImplementedError:
            return None

    def _known_lengths(self, names: dict[str, str]) -> dict[str, np.ndarray] | None:
        """Frames of every stream, or None if the dataset had to load the data to tell them."""
        if hasattr(self.dataset, "_collect_single_seq"):
            return None
        rows = [self.dataset.get_seq_length(index) for index in self._indices()]
        return {
            name: np.fromiter((row[key] for row in rows), np.int64, len(rows))
            for key, name in names.items()
        }

    def _add_stream(self, key: str, name: str, total: int | None) -> None:
        dataset = self.dataset
        sample = np.atleast_1d(dataset.get_data(self.start_seq, key))
        dtype = None if sample.dtype.kind in "OSU" else np.dtype(dataset.get_data_dtype(key))
        if name == INPUTS:
            for group in ("targets/data", "targets/size", "targets/labels"):
                self.file.hdf.require_group(group)
            if dtype is None:
                raise UnsupportedPayloadError("inputs must be numbers", self.file.path, key)
            self.file.add_inputs(dtype, sample.shape[1:], total)
            return
        size = dataset.num_outputs.get(key, (dataset.get_data_dim(key), sample.ndim))
        self.file.add_target(
            name, size, dtype, sample.shape[1:], stream_labels(dataset, key), total
        )

    def _copy(self, index: int, names: dict[str, str]) -> None:
        self.dataset.load_seqs(index, index + 1)
        self.tags += self.file.encode_tags([self.dataset.get_tag(index)])
        for key, name in names.items():
            rows = np.atleast_1d(self.dataset.get_data(index, key))
            self.file.columns[name].append(rows)
            self.lengths[name].append(len(rows))

    def _check(self, row: int, known: dict[str, np.ndarray]) -> None:
        for name, lengths in self.lengths.items():
            if lengths[-1] != known[name][row]:
                raise ShapeMismatchError(
                    "the dataset gave another length than it had announced",
                    entry=self.tags[-1].decode(),
                    expected=f"{known[name][row]}",
                    found=f"{lengths[-1]}",
                )

    def _append_table(self) -> None:
        if self.tags:
            self.file.append_table(
                {name: np.array(lengths) for name, lengths in self.lengths.items()}, self.tags
            )
        self.tags = []
        self.lengths = {name: [] for name in self.lengths}
