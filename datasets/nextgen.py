"""`NextGenHDFDataset`: HDF files with one HDF dataset per sequence and stream."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ..io.errors import MissingSequenceError, ShapeMismatchError, SourceFormatError
from .cached2 import CachedDataset2
from .ordering import SeqLens
from .seq import DatasetSeq
from .stream_parsers import (
    PARSERS,
    StreamParser,
    decode_name,
    normalize_seq_name,
    required_member,
)

if TYPE_CHECKING:
    import h5py


class NextGenFiles:
    """The sequences of several NextGen files, one after the other.

    Attributes:
        files: paths.
        h5_files: the open files.
        names: names of all sequences.
        index_by_name: corpus index of a name; of the last one if it comes again.
        file_indices: file of every sequence.
        parsers: for every stream one parser per file. The first file decides the streams.
    """

    def __init__(self) -> None:
        self.files: list[str] = []
        self.h5_files: list[h5py.File] = []
        self.names: list[str] = []
        self.index_by_name: dict[str, int] = {}
        self.file_indices: list[int] = []
        self.parsers: dict[str, list[StreamParser]] = {}
        self._lengths: dict[str, np.ndarray] = {}

    def add(self, path: str | os.PathLike[str], required: Iterable[str]) -> None:
        """Opens one more file.

        Args:
            path: local file.
            required: streams that it must have.

        Raises:
            SourceNotFoundError, SourceFormatError: if the file is missing, damaged, or lacks a
                stream.
            MissingSequenceError: if a stream lacks a sequence.
            ShapeMismatchError: if the number of features differs between files.
        """
        from ..io.hdf.file import open_file

        path = os.fspath(path)
        file = open_file(path)
        try:
            names = [decode_name(name) for name in required_member(file, "seq_names")[...].tolist()]
            parsers = self._open_streams(file, [normalize_seq_name(name) for name in names])
            self._check_streams(path, parsers, required)
        except BaseException:
            file.close()
            raise
        for stream in self.parsers or parsers:
            self.parsers.setdefault(stream, []).append(parsers[stream])
        self.file_indices += [len(self.files)] * len(names)
        self.files.append(path)
        self.h5_files.append(file)
        self.index_by_name.update((name, at) for at, name in enumerate(names, len(self.names)))
        self.names += names
        self._lengths.clear()

    def index_of(self, name: str) -> int:
        """The corpus index of a name.

        Raises:
            MissingSequenceError: if no file has it.
        """
        try:
            return self.index_by_name[name]
        except KeyError:
            raise MissingSequenceError(
                "no file has this sequence", ", ".join(self.files), name
            ) from None

    def read(self, index: int) -> dict[str, np.ndarray]:
        """The arrays of all streams of a sequence; raises `SourceFormatError` if one is damaged."""
        name = normalize_seq_name(self.names[index])
        file_index = self.file_indices[index]
        return {stream: each[file_index].get_data(name) for stream, each in self.parsers.items()}

    def lengths(self, stream: str) -> np.ndarray:
        """Frames [num_seqs] of a stream, int64. Looks into every sequence once."""
        if stream not in self._lengths:
            parsers = self.parsers[stream]
            rows = zip(self.names, self.file_indices, strict=True)
            lengths = (parsers[at].get_seq_length(normalize_seq_name(name)) for name, at in rows)
            self._lengths[stream] = np.fromiter(lengths, np.int64, len(self.names))
        return self._lengths[stream]

    def num_outputs(self) -> dict[str, list[int | None]]:
        """[features or classes, 1 for sparse or 2 for dense] of every stream."""
        firsts = {stream: each[0] for stream, each in self.parsers.items()}
        return {
            stream: [first.num_features, first.feature_type] for stream, first in firsts.items()
        }

    def close(self) -> None:
        """Closes all files."""
        for file in self.h5_files:
            file.close()

    def _open_streams(self, file: h5py.File, names: list[str]) -> dict[str, StreamParser]:
        streams = required_member(file, "streams")
        parsers = {}
        for stream in self.parsers or streams:
            group = required_member(streams, stream)
            kind = group.attrs.get("parser")
            parser_class = PARSERS.get(decode_name(kind) if kind is not None else "")
            if parser_class is None:
                raise SourceFormatError(
                    "unknown kind of stream",
                    file.filename,
                    group.name,
                    expected=", ".join(PARSERS),
                    found=repr(kind),
                )
            parsers[stream] = parser_class(names, group)
        return parsers

    def _check_streams(
        self, path: str, parsers: dict[str, StreamParser], required: Iterable[str]
    ) -> None:
        for stream in required:
            if stream not in parsers:
                raise SourceFormatError(
                    "a stream is missing", path, stream, expected=f"one of {sorted(parsers)}"
                )
        for stream, earlier in self.parsers.items():
            first, parser = earlier[0], parsers[stream]
            if (first.num_features, first.dtype) != (parser.num_features, parser.dtype):
                raise ShapeMismatchError(
                    "files with different data in one stream",
                    path,
                    stream,
                    expected=f"{first.num_features} features, {first.dtype}",
                    found=f"{parser.num_features} features, {parser.dtype}",
                )


class NextGenHDFDataset(CachedDataset2):
    """Reads HDF files that have one HDF dataset per sequence and stream.

    The data keys are the streams, and "data" for the input stream. Names of sequences may be bytes
    or str in the file. The lengths for sorting are those of the input stream.

    Attributes:
        input_stream_name: the stream that is also "data".
        files: paths.
        all_seq_names, seq_name_to_idx, file_indices, all_parsers: see `NextGenFiles`.
        seq_order: corpus indices of the epoch.
    """

    parsers: ClassVar[dict[str, type[StreamParser]]] = PARSERS

    def __init__(
        self,
        input_stream_name: str,
        files: Iterable[str | os.PathLike[str]] | None = None,
        **kwargs: Any,
    ) -> None:
        """Opens the files.

        Args:
            input_stream_name: the stream that is also "data"; all files must have it.
            files: paths.
            kwargs: see `Dataset`.

        Raises:
            SeqshardError: as `NextGenFiles.add`.
        """
        super().__init__(**kwargs)
        self.input_stream_name = input_stream_name
        self._corpus = NextGenFiles()
        self.files = self._corpus.files
        self.h5_files = self._corpus.h5_files
        self.all_seq_names = self._corpus.names
        self.seq_name_to_idx = self._corpus.index_by_name
        self.file_indices = self._corpus.file_indices
        self.all_parsers = self._corpus.parsers
        self.seq_order: Sequence[int] = []
        for path in files or ():
            self.add_file(path)

    def __del__(self) -> None:
        corpus = getattr(self, "_corpus", None)
        if corpus is not None:
            corpus.close()

    def add_file(self, path: str | os.PathLike[str]) -> None:
        """Appends the sequences of one more file; errors as `NextGenFiles.add`."""
        self._corpus.add(path, [self.input_stream_name])
        self.num_outputs = self._corpus.num_outputs()
        self.num_inputs = self.num_outputs[self.input_stream_name][0]

    def init_seq_order(
        self,
        epoch: int | None = None,
        seq_list: Sequence[str] | None = None,
        seq_order: Sequence[int] | None = None,
    ) -> bool:
        """Starts an epoch; see `Dataset.init_seq_order`.

        Raises:
            MissingSequenceError: if a tag of `seq_list` is in no file.
        """
        super().init_seq_order(epoch=epoch, seq_list=seq_list, seq_order=seq_order)
        self.seq_order = corpus_order(self, self._corpus, epoch, seq_list, seq_order)
        self._num_seqs = len(self.seq_order)
        return True

    def supports_seq_order_sorting(self) -> bool:
        """True: lengths are known."""
        return True

    def supports_sharding(self) -> bool:
        """True."""
        return True

    def get_current_seq_order(self) -> Sequence[int]:
        """Corpus indices of the epoch."""
        return self.seq_order

    def have_corpus_seq_idx(self) -> bool:
        """True."""
        return True

    def get_corpus_seq_idx(self, seq_idx: int) -> int:
        """Corpus index of a sequence of the epoch."""
        return int(self.seq_order[seq_idx])

    def get_all_tags(self) -> list[str]:
        """Names of all sequences in the order of the files."""
        return list(self.all_seq_names)

    def get_total_num_seqs(self, *, fast: bool = False) -> int:
        """Number of sequences in all files."""
        return len(self.all_seq_names)

    def get_data_dtype(self, key: str) -> str:
        """Element type of a stream; known without loading."""
        stream = self.input_stream_name if key == "data" else key
        return self.all_parsers[stream][0].get_dtype()

    def _collect_single_seq(self, seq_idx: int) -> DatasetSeq | None:
        if seq_idx >= len(self.seq_order):
            return None
        index = int(self.seq_order[seq_idx])
        streams = self._corpus.read(index)
        return DatasetSeq(
            seq_idx=seq_idx,
            seq_tag=self.all_seq_names[index],
            features=streams[self.input_stream_name],
            targets=streams,
        )


def corpus_order(
    dataset: Any,
    corpus: NextGenFiles,
    epoch: int | None,
    seq_list: Sequence[str] | None,
    seq_order: Sequence[int] | None,
) -> Sequence[int]:
    """The corpus indices of an epoch: as given, by tag, or in the dataset's own order."""
    if seq_order is not None:
        return seq_order
    if seq_list is not None:
        return [corpus.index_of(name) for name in seq_list]
    lens = SeqLens(lambda: corpus.lengths(dataset.input_stream_name))
    return dataset.get_seq_order_for_epoch(epoch, len(corpus.names), lens)
