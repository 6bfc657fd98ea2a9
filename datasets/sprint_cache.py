"""`SprintCacheDataset`: features and alignments straight from Sprint/RASR caches."""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ..io.errors import (
    ConfigError,
    DuplicateSequenceError,
    MissingSequenceError,
    ShapeMismatchError,
    SourceFormatError,
)
from .cached import CachedDataset
from .numbers_dict import NumbersDict
from .seq import DatasetSeq
from .tags import tag_array

if TYPE_CHECKING:
    from ..io.records import SourceIndex
    from ..io.sprint.source import AlignmentSource, FeatureSource

# The names of RETURNN's `AllophoneLabeling`, and ours.
LABELING_OPTIONS = {
    "allophone_file": "allophones",
    "state_tying_file": "state_tying",
    "phoneme_file": "phonemes",
    "silence_phone": "silence",
}
INDEX_COLUMNS = ("position", "length", "num_bytes", "raw_bytes")


class SprintCacheReader:
    """Reads one stream from an archive, or from all archives of a bundle.

    Attributes:
        data_key: key of the stream.
        type: "feat" for features; "align" for an alignment whose classes come from phonemes, and
            "align_raw" for one with a state tying.
        num_labels: number of features, or of classes.
        num_dims: axes of an array: 2 for features, 1 for alignments.
        dtype: "float32" for features; the smallest of "int8", "int16" and "int32" that holds the
            number of classes.
        content_keys: names of the sequences in the order of the archives.
        lengths: int64 [num_seqs], frames.
        sizes: int64 [num_seqs], bytes of the uncompressed entries.
    """

    def __init__(
        self,
        data_key: str,
        filename: str | os.PathLike[str],
        data_type: str | None = None,
        allophone_labeling: Mapping[str, Any] | None = None,
    ) -> None:
        """Opens the archives and reads their tables; archives without a table are recovered.

        Args:
            data_key: key of the stream.
            filename: an archive, or a bundle (*.bundle) of archives.
            data_type: "feat" or "align"; default: "align" for the key "classes", and for all
                others but "data" if there is `allophone_labeling`.
            allophone_labeling: allophone_file, silence_phone, and state_tying_file or phoneme_file.

        Raises:
            ConfigError: if options are unknown or missing.
            SourceNotFoundError: if a file is missing.
            SourceFormatError: if an archive or an entry is damaged, or archives differ.
            DuplicateSequenceError: if two archives have a sequence of the same name.
        """
        self.data_key = data_key
        self.allophone_labeling = allophone_labeling
        self.type = data_type or _default_type(data_key, allophone_labeling)
        self._path = os.fspath(filename)
        self._sources = self._open_sources()
        indexes = [source.index() for source in self._sources]
        for index in indexes:
            for _, error in index.damaged:
                raise error
        self.content_keys: list[str] = list(chain(*(index.tag.to_pylist() for index in indexes)))
        self._source_of = np.repeat(np.arange(len(indexes)), [len(index.tag) for index in indexes])
        self._columns = {
            name: np.concatenate([getattr(index, name) for index in indexes])
            for name in INDEX_COLUMNS
        }
        self.lengths = self._columns["length"]
        raw, stored = self._columns["raw_bytes"], self._columns["num_bytes"]
        self.sizes = np.where(raw >= 0, raw, stored)
        self._row_of = self._rows_by_name()
        self._take_format(indexes)

    def read(self, name: str) -> np.ndarray:
        """The array of a sequence: float32 [time, num_labels], or classes [time].

        Raises:
            MissingSequenceError: if there is no such sequence.
            SourceFormatError: if its data are damaged, or not of this stream's kind.
        """
        row = self._row_of.get(name)
        if row is None:
            raise MissingSequenceError("there is no such sequence", self._path, name)
        return self.read_row(row)

    def read_row(self, row: int) -> np.ndarray:
        """The array of the sequence `content_keys[row]`; errors as `read`."""
        columns = {name: values[row : row + 1] for name, values in self._columns.items()}
        length = int(columns["length"][0])
        out = np.empty((length, *self._row_shape), self._stored_dtype)
        start = np.zeros(1, np.int64)
        self._sources[self._source_of[row]].read_many(**columns, out=out, start=start)
        return out.astype(self.dtype, copy=False)

    def close(self) -> None:
        """Closes the archives; arrays that were read stay valid."""
        while self._sources:
            self._sources.pop().__exit__(None, None, None)

    def __del__(self) -> None:
        if getattr(self, "_sources", None):
            self.close()

    def _open_sources(self) -> list[FeatureSource] | list[AlignmentSource]:
        from ..io.sprint.bundle import BUNDLE_SUFFIX, read_bundle
        from ..io.sprint.source import AlignmentSource, FeatureSource

        bundle = self._path.endswith(BUNDLE_SUFFIX)
        paths = read_bundle(self._path) if bundle else [self._path]
        if not paths:
            raise SourceFormatError("the bundle names no archive", self._path)
        if self.type == "feat":
            return [FeatureSource(path, recover=True) for path in paths]
        spec = self._alignment_spec()
        self.type = "align_raw" if spec.state_tying else "align"
        return [AlignmentSource(path, spec, recover=True) for path in paths]

    def _alignment_spec(self) -> Any:
        from ..io.records import StreamSpec

        if self.type != "align":
            raise ConfigError(
                f"unknown data_type of {self.data_key!r}", expected="feat or align", found=self.type
            )
        options = dict(self.allophone_labeling or {})
        unknown = options.keys() - LABELING_OPTIONS.keys() - {"verbose_out"}
        if unknown or not {"allophone_file", "silence_phone"} <= options.keys():
            raise ConfigError(
                f"the alignment {self.data_key!r} needs allophone_labeling",
                expected="allophone_file, silence_phone, and state_tying_file or phoneme_file",
                found=f"{sorted(options)}",
            )
        chosen = {
            ours: options[theirs]
            for theirs, ours in LABELING_OPTIONS.items()
            if options.get(theirs) is not None
        }
        return StreamSpec(self.data_key, "sprint-alignment", **chosen)

    def _rows_by_name(self) -> dict[str, int]:
        rows = {name: row for row, name in enumerate(self.content_keys)}
        if len(rows) < len(self.content_keys):
            last = next(n for row, n in enumerate(self.content_keys) if rows[n] != row)
            raise DuplicateSequenceError("two archives have the same sequence", self._path, last)
        return rows

    def _take_format(self, indexes: list[SourceIndex]) -> None:
        formats = [index.format for index in indexes if index.format is not None]
        if not formats:
            raise SourceFormatError("no sequence has a frame", self._path)
        first = formats[0]
        for source, other in zip(self._sources, (index.format for index in indexes), strict=True):
            if other is not None and (other.dim, other.dtype) != (first.dim, first.dtype):
                raise ShapeMismatchError(
                    "archives of one bundle with different data",
                    source.path,
                    expected=f"{first.dtype} of dimension {first.dim}",
                    found=f"{other.dtype} of dimension {other.dim}",
                )
        self.num_labels = first.dim
        self.num_dims = first.ndim
        self.dtype = "float32" if self.type == "feat" else first.dtype
        self._stored_dtype = np.dtype(first.dtype)
        self._row_shape = first.shape


class SprintCacheDataset(CachedDataset):
    """Reads Sprint caches: one stream, for example features or an alignment, per data key.

    All streams must have the same sequences; the order of the corpus is that of "data". Orders by
    length go by the bytes of the uncompressed entries of "data", as RETURNN's do.

    Attributes:
        data: reader per data key.
        seq_list_original: names of the sequences of the corpus.
    """

    SprintCacheReader = SprintCacheReader
    _getnewargs_remap: ClassVar[dict[str, str]] = {"data": "_data_options"}

    def __init__(self, data: Mapping[str, Mapping[str, Any]], **kwargs: Any) -> None:
        """Opens the caches.

        Args:
            data: options of `SprintCacheReader` per data key; there must be "data".
            kwargs: see `Dataset`.

        Raises:
            ConfigError: if there is no "data".
            MissingSequenceError: if the streams do not have the same sequences.
            SeqshardError: as `SprintCacheReader`.
        """
        super().__init__(**kwargs)
        if "data" not in data:
            raise ConfigError('SprintCacheDataset needs the key "data"', found=f"{sorted(data)}")
        self._data_options = {key: dict(options) for key, options in data.items()}
        self.data = {
            key: SprintCacheReader(data_key=key, **options)
            for key, options in self._data_options.items()
        }
        self.seq_list_original = self.data["data"].content_keys
        self._num_seqs = len(self.seq_list_original)
        self._rows = {key: self._match(reader) for key, reader in self.data.items()}
        self.num_outputs = {
            key: (reader.num_labels, reader.num_dims) for key, reader in self.data.items()
        }
        self.num_inputs = self.num_outputs["data"][0]
        self.target_keys = [key for key in self.data if key != "data"]
        self._num_timesteps = int(self.data["data"].lengths.sum())

    def _match(self, reader: SprintCacheReader) -> np.ndarray:
        """The row of a reader for every sequence of the corpus."""
        names = self.seq_list_original
        try:
            rows = np.fromiter(map(reader._row_of.__getitem__, names), np.int64, len(names))
        except KeyError as error:
            raise MissingSequenceError(
                f"stream {reader.data_key!r} lacks a sequence", reader._path, error.args[0]
            ) from None
        if len(reader.content_keys) > len(names):
            extra = next(n for n in reader.content_keys if n not in self.data["data"]._row_of)
            raise MissingSequenceError(
                "stream 'data' lacks a sequence", self.data["data"]._path, extra
            )
        return rows

    def get_dataset_seq_for_name(self, name: str, seq_idx: int = -1) -> DatasetSeq:
        """A sequence of the corpus by name; errors as `SprintCacheReader.read`."""
        arrays = {key: reader.read(name) for key, reader in self.data.items()}
        return DatasetSeq(seq_idx=seq_idx, seq_tag=name, features=arrays)

    def have_get_corpus_seq(self) -> bool:
        """Sequences can be read in any order."""
        return True

    def get_corpus_seq(self, corpus_seq_idx: int) -> DatasetSeq:
        """See `Dataset.get_corpus_seq`."""
        name = self.seq_list_original[corpus_seq_idx]
        return self.get_dataset_seq_for_name(name, corpus_seq_idx)

    def get_all_tags(self) -> list[str]:
        """Names of all sequences."""
        return list(self.seq_list_original)

    def get_data_keys(self) -> list[str]:
        """The keys of the streams as they were given."""
        return list(self.data)

    def get_target_list(self) -> list[str]:
        """The alignments without state tying, as in RETURNN."""
        return [key for key, reader in self.data.items() if reader.type == "align"]

    def get_data_dtype(self, key: str) -> str:
        """See `Dataset.get_data_dtype`."""
        return self.data[key].dtype

    def _get_data_by_real_seq_idx(self, real_seq_idx: int, key: str) -> np.ndarray:
        return self.data[key].read_row(int(self._rows[key][real_seq_idx]))

    def _get_seq_length_by_real_idx(self, real_seq_idx: int) -> np.ndarray:
        keys = ["data", *self.target_keys]
        return np.array([self.data[key].lengths[self._rows[key][real_seq_idx]] for key in keys])

    def _get_tag_by_real_idx(self, real_seq_idx: int) -> str:
        return self.seq_list_original[real_seq_idx]

    def _get_tag_arrays(self) -> list[np.ndarray]:
        return [tag_array([name.encode("utf-8") for name in self.seq_list_original])]

    def _get_seq_lens(self) -> np.ndarray:
        return self.data["data"].sizes

    def get_estimated_seq_length(self, seq_idx: int) -> int:
        """The bytes that orders sort by."""
        return int(self._get_seq_lens()[self._seq_index_view[seq_idx]])

    def get_seq_length(self, seq_idx: int) -> NumbersDict:
        """Frames per data key, from the headers alone."""
        return NumbersDict(self._get_lens_by_key(self._seq_index_view[seq_idx]))


def _default_type(data_key: str, allophone_labeling: Mapping[str, Any] | None) -> str:
    if data_key == "data":
        return "feat"
    return "align" if data_key == "classes" or allophone_labeling else "feat"
