"""Reading HDF files in RETURNN's layout."""

from __future__ import annotations

import os
from bisect import bisect
from collections.abc import Iterable
from importlib import import_module
from typing import Any

import numpy as np
import xxhash

from ..io.errors import ConfigError, ShapeMismatchError
from . import hdf_file
from .cached import CachedDataset
from .hdf_file import H5Frames, HdfTables, MappedFile
from .seq import DatasetSeq
from .tags import decode_tag, decode_tags

# Files that are kept open: a map costs one file descriptor, an HDF handle memory as well.
_MAX_MAPPED_FILES = 256
_MAX_HDF_HANDLES = 64

Frames = np.ndarray | H5Frames

# RETURNN has these in its module of this name.
_ELSEWHERE = {
    "HDFDatasetWriter": "dump",
    "NextGenHDFDataset": "nextgen",
    "SiameseHDFDataset": "siamese",
    "SimpleHDFWriter": "writers",
}


class HDFDataset(CachedDataset):
    """Sequences in one or several HDF files in RETURNN's layout.

    The first file decides the data keys. Arrays that are stored in one piece are given as read-only
    views of the file, without a copy.

    Args:
        files: paths of the files.
        use_cache_manager: accepted for RETURNN's sake; files are read where they are.

    Attributes:
        files: paths of the files.
        file_start: corpus index of the first sequence of each file, and the end.
        data_dtype: element type per data key.
    """

    def __init__(
        self,
        files: Iterable[str | os.PathLike[str]] | None = None,
        use_cache_manager: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._use_cache_manager = use_cache_manager
        if isinstance(files, str | os.PathLike):
            raise ConfigError("files must be a list of paths", found=repr(files))
        self.files: list[str] = []
        self.file_start = [0]
        self._file_seq_start: list[np.ndarray] = []
        self._lengths: list[np.ndarray] = []
        self.data_dtype: dict[str, str] = {}
        self._tables: list[HdfTables] = []
        # Per file and data key: the frames, and where each sequence starts in them.
        self._readers: list[dict[str, tuple[Frames, memoryview]]] = []
        self._mapped: dict[int, MappedFile] = {}
        self._hdf_handles: dict[tuple[int, str], None] = {}
        self._tags: dict[int, np.ndarray] = {}
        self._timestamps: np.ndarray | None = None
        self._corpus_digest: str | None = None
        for file in files or ():
            self.add_file(file)

    def add_file(self, filename: str | os.PathLike[str]) -> None:
        """Adds a file behind the others.

        Raises:
            SourceNotFoundError, SourceFormatError: see `hdf_file.read_tables`.
            ShapeMismatchError: if it lacks a data key of the first file, or differs in a dimension.
        """
        tables = hdf_file.read_tables(os.fspath(filename))
        if self._tables:
            self._check_fits(tables)
        else:
            self._take_format_of(tables)
        lengths = tables.lengths
        if tables.column_keys != self._column_keys():
            columns = [tables.column(key) for key in self._column_keys()]
            lengths = np.stack(columns, axis=1)
        for key in self.get_data_keys():
            self.data_dtype[key] = str(tables.arrays[key].dtype)
        for key, labels in tables.labels.items():
            self.labels.setdefault(key, labels)
        self.files.append(os.fspath(filename))
        self._lengths.append(lengths)
        self.file_start.append(self.file_start[-1] + tables.num_seqs)
        self._tables.append(tables)
        self._readers.append({})
        self._num_seqs += tables.num_seqs
        self._num_timesteps += int(lengths[:, 0].sum(dtype=np.int64))
        self._tag_index = self._timestamps = self._corpus_digest = None

    def _take_format_of(self, tables: HdfTables) -> None:
        self.target_keys = tables.target_keys
        self.num_inputs = tables.num_outputs["data"][0] if tables.has_inputs else 0
        self.num_outputs = dict(tables.num_outputs)
        self.targets = {key: None for key in tables.target_keys if key in tables.arrays}

    def _check_fits(self, tables: HdfTables) -> None:
        first = self._tables[0]
        if tables.has_inputs != first.has_inputs:
            raise ShapeMismatchError(
                "only some of the files have inputs",
                tables.path,
                expected=f"{'inputs' if first.has_inputs else 'no inputs'} as in {first.path}",
            )
        missing = [key for key in self.target_keys if key not in tables.target_keys]
        if missing:
            raise ShapeMismatchError(
                "the file lacks data keys of the first file",
                tables.path,
                expected=", ".join(self.target_keys),
                found=", ".join(tables.target_keys),
            )
        hdf_file.check_same_format(first, tables, self.get_data_keys())

    @property
    def file_seq_start(self) -> list[np.ndarray]:
        """Per file, int64 [sequences + 1, columns], the first frames of the sequences."""
        for lengths in self._lengths[len(self._file_seq_start) :]:
            self._file_seq_start.append(hdf_file.seq_starts(lengths))
        return self._file_seq_start

    @file_seq_start.setter
    def file_seq_start(self, value: list[np.ndarray]) -> None:
        self._file_seq_start = value

    def initialize(self) -> None:
        """See `Dataset.initialize`.

        Raises:
            ConfigError: if there are no files.
        """
        if not self.files:
            raise ConfigError(f"{self} has no files")
        super().initialize()

    # Frames.

    def _get_data_by_real_seq_idx(self, real_seq_idx: int, key: str) -> np.ndarray:
        file = bisect(self.file_start, real_seq_idx) - 1
        seq = real_seq_idx - self.file_start[file]
        reader = self._readers[file].get(key)
        frames, start = reader if reader is not None else self._open(file, key)
        data = frames[start[seq] : start[seq + 1]]
        return self._sliding_window(data) if self.window > 1 and self._has_window(key) else data

    def _has_window(self, key: str) -> bool:
        return key == "data" and self.num_inputs > 0

    def _open(self, file: int, key: str) -> tuple[Frames, memoryview]:
        tables = self._tables[file]
        if key not in self.get_data_keys():
            raise KeyError(f"{self} has no data key {key!r}, but {self.get_data_keys()}")
        array = tables.arrays[key]
        if array.offset is None:
            self._drop_oldest_handles()
            frames: Frames = H5Frames(tables.path, array)
            self._hdf_handles[file, key] = None
        else:
            frames = self._map(file).view(array)
        reader = (frames, memoryview(hdf_file.seq_starts(tables.column(key))))
        self._readers[file][key] = reader
        return reader

    def _map(self, file: int) -> MappedFile:
        if file not in self._mapped:
            if len(self._mapped) >= _MAX_MAPPED_FILES:
                oldest = next(iter(self._mapped))
                del self._mapped[oldest]
                self._readers[oldest].clear()
                self._tags.pop(oldest, None)
            self._mapped[file] = MappedFile(self._tables[file].path)
        return self._mapped[file]

    def _drop_oldest_handles(self) -> None:
        if len(self._hdf_handles) >= _MAX_HDF_HANDLES:
            file, key = next(iter(self._hdf_handles))
            del self._hdf_handles[file, key]
            self._readers[file].pop(key, None)

    # Tags and lengths.

    def _get_tags_of_file(self, file: int) -> np.ndarray:
        if file not in self._tags:
            tables = self._tables[file]
            # A view keeps its file open.
            few_files = len(self.files) <= _MAX_MAPPED_FILES
            mapped = self._map(file) if few_files and tables.tags.offset is not None else None
            self._tags[file] = hdf_file.read_tags(tables, mapped)
        return self._tags[file]

    def _get_tag_arrays(self) -> list[np.ndarray]:
        return [self._get_tags_of_file(file) for file in range(len(self.files))]

    def _get_tag_by_real_idx(self, real_seq_idx: int) -> str:
        file = bisect(self.file_start, real_seq_idx) - 1
        return decode_tag(self._get_tags_of_file(file)[real_seq_idx - self.file_start[file]])

    def get_all_tags(self) -> list[str]:
        """The tags of all files."""
        return [tag for array in self._get_tag_arrays() for tag in decode_tags(array)]

    def _get_seq_lens(self) -> np.ndarray:
        columns = [lengths[:, 0] for lengths in self._lengths]
        return columns[0] if len(columns) == 1 else np.concatenate(columns)

    def _get_seq_length_by_real_idx(self, real_seq_idx: int) -> np.ndarray:
        file = bisect(self.file_start, real_seq_idx) - 1
        return self._lengths[file][real_seq_idx - self.file_start[file]].astype(np.int64)

    @property
    def timestamps(self) -> np.ndarray | None:
        """The time stamps of all frames of the corpus, or None if a file has none."""
        if self._timestamps is None and all(tables.times for tables in self._tables):
            arrays = [H5Frames(tables.path, tables.times)[:] for tables in self._tables]
            self._timestamps = np.concatenate(arrays)
        return self._timestamps

    def get_times(self, sorted_seq_idx: int) -> np.ndarray:
        """See `Dataset.get_times`."""
        if self.timestamps is None:
            return super().get_times(sorted_seq_idx)
        real_seq_idx = self._seq_index_view[sorted_seq_idx]
        file = bisect(self.file_start, real_seq_idx) - 1
        seq = real_seq_idx - self.file_start[file]
        before = sum(int(start[-1, 0]) for start in self.file_seq_start[:file])
        first, end = self.file_seq_start[file][seq : seq + 2, 0] + before
        return self.timestamps[first:end]

    def have_get_corpus_seq(self) -> bool:
        """Sequences can be read in any order."""
        return True

    def get_corpus_seq(self, corpus_seq_idx: int) -> DatasetSeq:
        """See `Dataset.get_corpus_seq`."""
        keys = self.get_data_keys()
        features = {key: self._get_data_by_real_seq_idx(corpus_seq_idx, key) for key in keys}
        tag = self._get_tag_by_real_idx(corpus_seq_idx)
        return DatasetSeq(seq_idx=corpus_seq_idx, features=features, seq_tag=tag)

    def is_data_sparse(self, key: str) -> bool:
        """See `Dataset.is_data_sparse`: integers with one axis."""
        one_axis = key in self.num_outputs and self.num_outputs[key][1] <= 1
        return one_axis and "int" in self.get_data_dtype(key)

    def get_data_dtype(self, key: str) -> str:
        """See `Dataset.get_data_dtype`; "object" for text."""
        return self.data_dtype[key]

    def _get_corpus_digest(self) -> str:
        if self._corpus_digest is None:
            hasher = xxhash.xxh3_128()
            for tags, lengths in zip(self._get_tag_arrays(), self._lengths, strict=True):
                hasher.update(b"\0".join(tags.tolist()))
                hasher.update(lengths.astype("<i8").tobytes())
            self._corpus_digest = hasher.hexdigest()
        return self._corpus_digest


def __getattr__(name: str) -> Any:
    if name not in _ELSEWHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_ELSEWHERE[name]}", __package__), name)
