"""Reading a built dataset for training: straight from its manifest, index and shards."""

from __future__ import annotations

import os
from bisect import bisect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..io import storage
from ..io.errors import ConfigError, ShardIntegrityError
from ..io.hdf.layout import INPUT_STREAM, column_order
from ..io.manifest import Manifest, folder_of, load_manifest
from ..io.records import StreamFormat
from .cached import CachedDataset
from .hdf_file import MappedFile, StoredArray
from .seq import DatasetSeq

if TYPE_CHECKING:
    from ..io.index import IndexFile
    from .shard_copies import ShardCopies

# A map costs a file descriptor. Arrays that were handed out keep their map alive.
_MAX_MAPPED_SHARDS = 256
# From so many lookups on, an index over all tags repays the time to build it.
_SCANS_BEFORE_INDEX = 8


class ManifestDataset(CachedDataset):
    """All sequences of a built dataset, in the order in which they were written.

    Opening reads manifest.json alone. The index is mapped when an order or a tag first needs it,
    a shard when a sequence of it is first read. Arrays are read-only views of the mapped shards.
    Keys, types, dimensions and orders are those that `HDFDataset` has for the same shards.

    Of a remote dataset, index and shards are read from copies in a `FileCache`, whose size
    $SEQSHARD_FILE_CACHE_BYTES limits. A thread makes those copies in the order of the epoch, ahead
    of use. The space of a copy that had to go is free when no array of it is in use any more.

    Args:
        manifest: path or URL of the dataset's folder, or of its manifest.json.
        dataset_options: those of `CachedDataset` and `Dataset`.

    Attributes:
        info: the manifest.

    Raises:
        ManifestError: if there is no manifest, or it is malformed.
        ManifestVersionError: if its version is unknown.
        CacheFullError: when reading, if a remote shard is larger than the cache.
        ConfigError: if the shards are in the NextGen layout.
    """

    def __init__(self, manifest: str | os.PathLike[str], **dataset_options: Any) -> None:
        super().__init__(**dataset_options)
        self._manifest = os.fspath(manifest)
        self.info: Manifest = load_manifest(self._manifest)
        if self.info.layout != "returnn":
            raise ConfigError(
                f"this dataset has the layout {self.info.layout!r}, which has no arrays to map",
                self._manifest,
                hint="Read its files with NextGenHDFDataset, or build without --layout.",
            )
        self._folder = folder_of(self._manifest)
        self._take_formats(self.info.streams)
        self._num_seqs = self.info.num_seqs
        self._num_timesteps = self.info.num_frames[self._length_keys[0]]
        sizes = [shard.num_seqs for shard in self.info.shards]
        self._shard_start: list[int] = np.cumsum([0, *sizes]).tolist()
        self._index: IndexFile | None = None
        self._mapped: dict[int, MappedFile] = {}
        # Per shard and data key: the frames, and where each sequence starts in them.
        self._readers: list[dict[str, tuple[np.ndarray, memoryview]]] = [{} for _ in sizes]
        self._tags: dict[int, tuple[memoryview, memoryview]] = {}
        self._lengths: dict[int, list[memoryview]] = {}
        self._num_scans = 0
        self._shard_copies: ShardCopies | None = None
        if storage.is_url(self._folder):
            from ..io.file_cache import FileCache
            from .shard_copies import ShardCopies

            self._shard_copies = ShardCopies(
                self._folder, self.info.shards, FileCache(), self._unmap
            )

    def _take_formats(self, streams: dict[str, StreamFormat]) -> None:
        self._length_keys = column_order(streams)
        self.target_keys = [key for key in self._length_keys if key != INPUT_STREAM]
        self.targets = dict.fromkeys(self.target_keys)
        inputs = streams.get(INPUT_STREAM)
        self.num_inputs = inputs.dim if inputs is not None else 0
        self.num_outputs = {key: (streams[key].dim, streams[key].ndim) for key in self.target_keys}
        if inputs is not None:
            self.num_outputs[INPUT_STREAM] = [inputs.dim, 1 + len(inputs.shape)]
        self.labels = {
            key: list(stream.labels) for key, stream in streams.items() if stream.labels is not None
        }

    def init_seq_order(
        self,
        epoch: int | None = None,
        seq_list: Sequence[str] | None = None,
        seq_order: Sequence[int] | None = None,
    ) -> bool:
        """See `CachedDataset.init_seq_order`."""
        changed = super().init_seq_order(epoch=epoch, seq_list=seq_list, seq_order=seq_order)
        if self._shard_copies is not None:
            shards = np.searchsorted(self._shard_start, self._seq_index, side="right") - 1
            self._shard_copies.follow(shards)
        return changed

    # Frames.

    def _get_data_by_real_seq_idx(self, real_seq_idx: int, key: str) -> np.ndarray:
        shard = bisect(self._shard_start, real_seq_idx) - 1
        seq = real_seq_idx - self._shard_start[shard]
        reader = self._readers[shard].get(key)
        frames, start = reader if reader is not None else self._open(shard, key)
        data = frames[start[seq] : start[seq + 1]]
        return self._sliding_window(data) if self.window > 1 and key == INPUT_STREAM else data

    def _open(self, shard: int, key: str) -> tuple[np.ndarray, memoryview]:
        info = self.info.shards[shard]
        if key not in info.arrays:
            raise KeyError(f"{self} has no data key {key!r}, but {self.get_data_keys()}")
        dtype = np.dtype(self.info.streams[key].dtype)
        array = StoredArray(key, dtype, info.arrays[key].shape, info.arrays[key].offset)
        start = self._get_index().starts(shard, key)
        if int(start[-1]) != info.num_frames[key]:
            raise ShardIntegrityError(
                f"the index does not fit the shard in stream {key!r}",
                self._get_index().path,
                info.path,
                expected=f"{info.num_frames[key]} frames",
                found=str(start[-1]),
            )
        reader = (self._map(shard).view(array), memoryview(start))
        self._readers[shard][key] = reader
        return reader

    def _map(self, shard: int) -> MappedFile:
        if shard not in self._mapped:
            copies = self._shard_copies
            if len(self._mapped) >= _MAX_MAPPED_SHARDS:
                (self._unmap if copies is None else copies.release)(next(iter(self._mapped)))
            info = self.info.shards[shard]
            path = copies.get(shard) if copies else self._check_local(info.path, info.file_bytes)
            self._mapped[shard] = MappedFile(path)
        return self._mapped[shard]

    def _unmap(self, shard: int) -> None:
        self._mapped.pop(shard, None)
        self._readers[shard].clear()

    def _check_local(self, name: str, num_bytes: int) -> str:
        """The path of a local file of the dataset, whose size must be the promised one."""
        path = storage.join(self._folder, name)
        found = storage.stamp(path).num_bytes if storage.exists(path) else None
        if found != num_bytes:
            raise ShardIntegrityError(
                "the file is not the one of the manifest",
                path,
                expected=f"{num_bytes} bytes",
                found="no file" if found is None else f"{found} bytes",
                hint="Run the build again; it repairs what is damaged.",
            )
        return path

    # Tags and lengths.

    def _get_index(self) -> IndexFile:
        if self._index is None:
            from ..io.index import IndexFile

            info = self.info.index
            if self._shard_copies is None:
                path = self._check_local(info.path, info.num_bytes)
            else:
                path = self._shard_copies.get_file(info)
            self._index = IndexFile(path, list(self.info.streams), len(self.info.shards))
        return self._index

    def _get_seq_lens(self) -> np.ndarray:
        return self._get_index().all_lengths(self._length_keys[0])

    def _get_seq_length_by_real_idx(self, real_seq_idx: int) -> np.ndarray:
        shard = bisect(self._shard_start, real_seq_idx) - 1
        columns = self._lengths.get(shard)
        if columns is None:
            index = self._get_index()
            columns = [memoryview(index.lengths(shard, key)) for key in self._length_keys]
            self._lengths[shard] = columns
        seq = real_seq_idx - self._shard_start[shard]
        return np.array([column[seq] for column in columns], np.int64)

    def _get_tag_arrays(self) -> list[np.ndarray]:
        index = self._get_index()
        return [index.tag_array(shard) for shard in range(len(self.info.shards))]

    def get_all_tags(self) -> list[str]:
        """The tags of the whole dataset in the order in which they were written."""
        index = self._get_index()
        shards = range(len(self.info.shards))
        return [tag for shard in shards for tag in index.batch(shard).column("tag").to_pylist()]

    def _get_tag_by_real_idx(self, real_seq_idx: int) -> str:
        shard = bisect(self._shard_start, real_seq_idx) - 1
        found = self._tags.get(shard)
        if found is None:
            found = self._tags[shard] = self._get_index().tag_buffers(shard)
        offsets, data = found
        seq = real_seq_idx - self._shard_start[shard]
        return str(data[offsets[seq] : offsets[seq + 1]], "utf-8")

    def _find_tag(self, tag: str) -> int:
        if self._tag_index is None and self._num_scans < _SCANS_BEFORE_INDEX:
            self._num_scans += 1
            shard, seq = self._get_index().find(tag)
            return int(self._shard_start[shard] + seq)
        return super()._find_tag(tag)

    def have_get_corpus_seq(self) -> bool:
        """Sequences can be read in any order."""
        return True

    def get_corpus_seq(self, corpus_seq_idx: int) -> DatasetSeq:
        """See `Dataset.get_corpus_seq`."""
        keys = self.get_data_keys()
        features = {key: self._get_data_by_real_seq_idx(corpus_seq_idx, key) for key in keys}
        tag = self._get_tag_by_real_idx(corpus_seq_idx)
        return DatasetSeq(seq_idx=corpus_seq_idx, features=features, seq_tag=tag)

    def _get_corpus_digest(self) -> str:
        return f"{self.info.plan} {self.info.index.xxh3_128}"

    # What the data look like.

    def is_data_sparse(self, key: str) -> bool:
        """See `Dataset.is_data_sparse`."""
        return self.info.streams[key].sparse

    def get_data_dtype(self, key: str) -> str:
        """See `Dataset.get_data_dtype`."""
        return self.info.streams[key].dtype

    def extern_data(self) -> dict[str, dict[str, Any]]:
        """What a RETURNN config needs as `extern_data` to use this dataset; print it."""
        found = {}
        for key in self.get_data_keys():
            stream = self.info.streams[key]
            entry: dict[str, Any] = {"dim": self.get_data_dim(key), "dtype": stream.dtype}
            if stream.sparse:
                entry |= {"shape": (None,), "sparse": True}
            elif stream.shape:
                entry["shape"] = (None, *stream.shape[:-1], self.get_data_dim(key))
            else:
                entry |= {"shape": (None,), "dim": None}
            found[key] = entry
        return found
