"""`MetaDataset`: the same sequences from several datasets at once."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec
import numpy as np

from ..io.errors import (
    ConfigError,
    MissingSequenceError,
    SourceFormatError,
    SourceNotFoundError,
)
from . import ordering
from .basic import Dataset, convert_data_dims, init_dataset
from .cached import CachedDataset
from .cached2 import CachedDataset2
from .epoch_order import order_identity
from .numbers_dict import NumbersDict
from .resume import Coverage
from .seq import DatasetSeq
from .seq_files import load_seq_list

SeqListFile = str | os.PathLike[str]


class MetaDataset(CachedDataset2):
    """Joins streams of several datasets by sequence tag.

    With a control dataset, that one draws the order of every epoch, with its own options. Without,
    the order follows the options of this dataset, over the corpus of the dataset of "data". All
    other datasets follow; they may have more sequences, but not fewer. Arrays are handed on as the
    datasets give them.

    Attributes:
        datasets: the datasets by name, as far as `data_map` needs them.
        data_map: data key -> (name of the dataset, its data key).
        default_dataset_key: the dataset that knows tags and lengths.
        seq_order_control_dataset: the one that draws the orders, or None.
    """

    _getnewargs_exclude_attrs: ClassVar[set[str]] = {"data_dtypes"}

    def __init__(
        self,
        datasets: Mapping[str, Any],
        data_map: Mapping[str, tuple[str, str]],
        seq_list_file: SeqListFile | Mapping[str, SeqListFile] | None = None,
        seq_order_control_dataset: str | None = None,
        seq_lens_file: str | os.PathLike[str] | None = None,
        data_dims: Mapping[str, Any] | None = None,
        data_dtypes: Mapping[str, str] | None = None,
        window: int = 1,
        **kwargs: Any,
    ) -> None:
        """Creates the datasets.

        Args:
            datasets: options of each dataset by name.
            data_map: data key -> (name of a dataset, data key of that dataset).
            seq_list_file: file with the tags of the corpus, one a line, or one file per dataset
                where the datasets have different tags for the same sequence.
            seq_order_control_dataset: name of the dataset that draws the orders.
            seq_lens_file: JSON file, tag -> data key -> length.
            data_dims: (dim, number of axes) per data key; default: those of the datasets.
            data_dtypes: accepted for RETURNN's sake.
            window: must be 1.
            kwargs: see `Dataset`.

        Raises:
            ConfigError: if options contradict each other, or a name is unknown.
            SeqshardError: if a dataset cannot be created.
        """
        super().__init__(**kwargs)
        self.window = window
        if window != 1 or self.shuffle_frames_of_nseqs:
            raise ConfigError("MetaDataset has neither window nor shuffle_frames_of_nseqs")
        if not seq_order_control_dataset and "data" not in data_map:
            raise ConfigError(
                'MetaDataset needs a seq_order_control_dataset, or the key "data" in data_map',
                found=f"{sorted(data_map)}",
            )
        self.data_map = {key: (name, inner) for key, (name, inner) in data_map.items()}
        self.data_keys = set(self.data_map)
        self.seq_order_control_dataset = seq_order_control_dataset
        self.default_dataset_key = seq_order_control_dataset or self.data_map["data"][0]
        self.dataset_keys = {name for name, _ in self.data_map.values()} | {
            self.default_dataset_key
        }
        unknown = self.dataset_keys.difference(datasets)
        if unknown:
            raise ConfigError(
                f"there is no dataset {min(unknown)!r}", expected=f"one of {sorted(datasets)}"
            )
        self.datasets: dict[str, Dataset] = {
            name: init_dataset(
                datasets[name], extra_kwargs={"name": f"{self.name}_{name}"}, parent_dataset=self
            )
            for name in sorted(self.dataset_keys)
        }
        self.data_dims = self._collect_dims(data_dims)
        for key, (name, inner) in self.data_map.items():
            if inner in self.datasets[name].labels:
                self.labels[key] = self.datasets[name].labels[inner]
        self.num_inputs = 0
        self.num_outputs = self.data_dims
        self._seq_list_file = seq_list_file
        self._seq_lens_file = seq_lens_file
        self._tags: dict[str, Sequence[str]] | None = None
        self._index_by_tag: dict[str, int] | None = None
        self._corpus_index: dict[str, np.ndarray] = {}
        self._lens_by_tag: dict[str, dict[str, int]] | None = None
        self._current_seq_order: Sequence[int] = []

    # The corpus.

    def get_all_tags(self) -> list[str]:
        """The tags of the corpus as the default dataset has them."""
        return list(self._get_tags(self.default_dataset_key))

    def get_total_num_seqs(self, *, fast: bool = False) -> int:
        """Number of sequences in the corpus."""
        if self._seq_list_file is None:
            return self._default.get_total_num_seqs(fast=fast)
        return len(self._get_tags(self.default_dataset_key))

    def get_num_timesteps(self) -> Any:
        """Frames in the corpus; per data key where the list and the lengths come from files."""
        if self._seq_lens_file and self._seq_list_file is not None:
            return sum(map(self._lens_of, self.get_all_tags()), start=NumbersDict())
        return self._default.get_num_timesteps()

    def supports_seq_order_sorting(self) -> bool:
        """Whether lengths are known."""
        if self.seq_order_control_dataset:
            return self._default.supports_seq_order_sorting()
        return bool(self._seq_lens_file or self._seq_order_seq_lens_file)

    def supports_sharding(self) -> bool:
        """Whether the order can be shared out; the control dataset decides."""
        return not self.seq_order_control_dataset or self._default.supports_sharding()

    def set_sharding(self, *, num_shards: int, shard_index: int) -> None:
        """See `Dataset.set_sharding`; holds for the control dataset as well."""
        super().set_sharding(num_shards=num_shards, shard_index=shard_index)
        if self.seq_order_control_dataset:
            self._default.set_sharding(num_shards=num_shards, shard_index=shard_index)

    # The order.

    def init_seq_order(
        self,
        epoch: int | None = None,
        seq_list: Sequence[str] | None = None,
        seq_order: Sequence[int] | None = None,
    ) -> bool:
        """Starts an epoch in all datasets; see `Dataset.init_seq_order`.

        Returns:
            False if the epoch is the current one, and nothing of it was read yet.

        Raises:
            MissingSequenceError: if a dataset lacks a sequence.
        """
        unchanged = (
            epoch is not None
            and self.epoch == epoch
            and seq_list is None
            and seq_order is None
            and len(self._current_seq_order) > 0
            and self.expected_load_seq_start == 0
            and self._resume_state is None
        )
        super().init_seq_order(epoch=epoch, seq_list=seq_list, seq_order=seq_order)
        if epoch is None:
            self._current_seq_order = []
        elif not unchanged:
            self._current_seq_order = self._draw_order(epoch, seq_list, seq_order)
        self._num_seqs = len(self._current_seq_order)
        return not unchanged

    def _draw_order(
        self, epoch: int, seq_list: Sequence[str] | None, seq_order: Sequence[int] | None
    ) -> Sequence[int]:
        leader = None
        if seq_order is not None:
            order = seq_order
        elif seq_list is not None:
            order = self._find(seq_list)
        elif self.seq_order_control_dataset:
            leader = self._default
            leader.init_seq_order(epoch=epoch)
            order = leader.get_current_seq_order()
        else:
            lens = ordering.SeqLens(lambda: self._get_seq_lens(epoch))
            order = self.get_seq_order_for_epoch(epoch, self.get_total_num_seqs(), lens)
        if leader is not None and self._seq_list_file is not None:
            self._check_leader(order)
        for name, dataset in self.datasets.items():
            if dataset is not leader:
                self._follow(name, dataset, epoch, order)
        return order

    def _follow(self, name: str, dataset: Dataset, epoch: int, order: Sequence[int]) -> None:
        """Starts an epoch of one dataset in the order that was drawn."""
        if not isinstance(dataset, CachedDataset):
            tags = self._get_tags(name)
            dataset.init_seq_order(epoch=epoch, seq_list=[tags[index] for index in order])
            return
        if name == self.default_dataset_key and self._seq_list_file is None:
            dataset.init_seq_order(epoch=epoch, seq_order=order)
            return
        if name not in self._corpus_index:
            try:
                self._corpus_index[name] = dataset._get_tag_index().find_many(self._get_tags(name))
            except MissingSequenceError as error:
                raise MissingSequenceError(
                    f"dataset {name!r} of the MetaDataset lacks a sequence", entry=error.entry
                ) from None
        index = self._corpus_index[name][ordering.as_array(order)]
        dataset.init_seq_order(epoch=epoch, seq_order=index)

    def _check_leader(self, order: Sequence[int]) -> None:
        """The list of tags must be that of the control dataset's corpus."""
        tags = self._get_tags(self.default_dataset_key)
        own = self._default.get_all_tags()
        for index in order:
            if index >= len(tags) or tags[index] != own[index]:
                raise ConfigError(
                    "the list of sequences is not in the order of the control dataset",
                    str(self._seq_list_file),
                    expected=f"{own[index]!r} in line {index + 1}",
                    found=repr(tags[index]) if index < len(tags) else f"{len(tags)} lines",
                )

    def _find(self, tags: Sequence[str]) -> Sequence[int]:
        default = self._default
        if self._seq_list_file is None and isinstance(default, CachedDataset):
            return default._get_tag_index().find_many(tags)
        if self._index_by_tag is None:
            known = self._get_tags(self.default_dataset_key)
            self._index_by_tag = {tag: index for index, tag in enumerate(known)}
        try:
            return [self._index_by_tag[tag] for tag in tags]
        except KeyError as error:
            raise MissingSequenceError(
                f"{self}: there is no sequence with this tag", entry=error.args[0]
            ) from None

    def get_current_seq_order(self) -> list[int]:
        """Corpus indices of the epoch."""
        return ordering.as_array(self._current_seq_order).tolist()

    def _get_seq_lens(self, epoch: int) -> np.ndarray:
        """Lengths of "data" in the default dataset, [num_seqs]."""
        num_seqs = self.get_total_num_seqs()
        if self._seq_lens_file:
            return np.array([self._lens_of(tag)["data"] for tag in self.get_all_tags()])
        self._follow(self.default_dataset_key, self._default, epoch, range(num_seqs))
        if isinstance(self._default, CachedDataset):
            return self._default._get_seq_lens()[self._default._seq_index]
        return np.array([self._default.get_seq_length(i)["data"] for i in range(num_seqs)])

    # Continuing in the middle of an epoch; see `Dataset`. Who draws the orders does it.

    def _get_corpus_digest(self) -> str:
        if not self.seq_order_control_dataset:
            return super()._get_corpus_digest()
        return order_identity(self._default, self.epoch or 1)

    def state_dict(self, num_consumed: int | None = None) -> dict[str, Any]:
        """See `Dataset.state_dict`."""
        if not self.seq_order_control_dataset:
            return super().state_dict(num_consumed)
        return self._default.state_dict(self._num_loaded if num_consumed is None else num_consumed)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Dataset.load_state_dict`."""
        if not self.seq_order_control_dataset:
            super().load_state_dict(state)
            return
        self._default.load_state_dict(state)
        self._current_seq_order = []
        self.init_seq_order(epoch=self._default.epoch)

    def coverage(self, all_ranks: bool = False) -> Coverage:
        """See `Dataset.coverage`."""
        if not self.seq_order_control_dataset:
            return super().coverage(all_ranks)
        return self._default.coverage(all_ranks)

    # Files about sequences.

    @property
    def _default(self) -> Dataset:
        return self.datasets[self.default_dataset_key]

    def _get_tags(self, name: str) -> Sequence[str]:
        """The tags of the corpus in the words of one dataset."""
        if self._tags is None:
            files = self._seq_list_file
            if files is None:
                tags = self._default.get_all_tags()
                self._tags = dict.fromkeys(self.dataset_keys, tags)
            elif isinstance(files, Mapping):
                self._tags = self._read_tags(files)
            else:
                self._tags = dict.fromkeys(self.dataset_keys, load_seq_list(files))
        return self._tags[name]

    def _read_tags(self, files: Mapping[str, SeqListFile]) -> dict[str, Sequence[str]]:
        missing = self.dataset_keys.difference(files)
        if missing:
            raise ConfigError(f"seq_list_file has no file for the dataset {min(missing)!r}")
        tags = {name: load_seq_list(files[name]) for name in sorted(self.dataset_keys)}
        counts = {name: len(each) for name, each in tags.items()}
        if len(set(counts.values())) > 1:
            raise ConfigError("the lists of sequences differ in length", found=f"{counts}")
        return tags

    def _lens_of(self, tag: str) -> NumbersDict:
        """The lengths of a sequence, from the file of lengths."""
        if self._lens_by_tag is None:
            self._lens_by_tag = _load_lens(os.fspath(self._seq_lens_file))
        try:
            return NumbersDict(self._lens_by_tag[tag])
        except KeyError:
            raise MissingSequenceError(
                "the file of lengths lacks a sequence", str(self._seq_lens_file), tag
            ) from None

    # Data.

    def _load_seqs(self, start: int, end: int) -> None:
        end = min(end, self.num_seqs)
        first = max(self.added_data[-1].seq_idx + 1, start) if self.added_data else start
        if first < end:
            for name, dataset in self.datasets.items():
                dataset.load_seqs(first, end)
                if not isinstance(dataset, CachedDataset):
                    self._check_tags(name, dataset, first, end)
        super()._load_seqs(start, end)

    def _check_tags(self, name: str, dataset: Dataset, start: int, end: int) -> None:
        tags = self._get_tags(name)
        for seq_idx in range(start, end):
            expected, found = tags[self._current_seq_order[seq_idx]], dataset.get_tag(seq_idx)
            if expected != found:
                raise MissingSequenceError(
                    f"dataset {name!r} of the MetaDataset gave another sequence than asked for",
                    expected=repr(expected),
                    found=repr(found),
                )

    def _collect_single_seq(self, seq_idx: int) -> DatasetSeq | None:
        if seq_idx >= self.num_seqs:
            return None
        features = {
            key: self.datasets[name].get_data(seq_idx, inner)
            for key, (name, inner) in self.data_map.items()
        }
        return DatasetSeq(seq_idx=seq_idx, seq_tag=self.get_tag(seq_idx), features=features)

    def get_tag(self, sorted_seq_idx: int) -> str:
        """The tag as the default dataset has it."""
        if isinstance(self._default, CachedDataset):
            return self._default.get_tag(sorted_seq_idx)
        return self._get_tags(self.default_dataset_key)[self._current_seq_order[sorted_seq_idx]]

    def get_seq_length(self, sorted_seq_idx: int) -> NumbersDict:
        """See `Dataset.get_seq_length`; from `seq_lens_file` if there is one."""
        if self._seq_lens_file:
            return self._lens_of(self.get_tag(sorted_seq_idx))
        return super().get_seq_length(sorted_seq_idx)

    def get_complete_frac(self, sorted_seq_idx: int, **kwargs: Any) -> float | None:
        """See `Dataset.get_complete_frac`; the default dataset tells it."""
        return self._default.get_complete_frac(sorted_seq_idx, **kwargs)

    def finish_epoch(self, *, free_resources: bool = False) -> None:
        """Ends the epoch in all datasets."""
        super().finish_epoch(free_resources=free_resources)
        for dataset in self.datasets.values():
            dataset.finish_epoch(free_resources=free_resources)

    # What the data look like.

    def _collect_dims(self, data_dims: Mapping[str, Any] | None) -> dict[str, Any]:
        if data_dims:
            dims = convert_data_dims(dict(data_dims))
            missing = self.data_keys.difference(dims)
            if missing:
                raise ConfigError(f"data_dims does not have {min(missing)!r}")
            return dims
        dims = {}
        for key, (name, inner) in self.data_map.items():
            if inner not in self.datasets[name].num_outputs:
                raise ConfigError(
                    f"dataset {name!r} has no data key {inner!r}",
                    expected=f"one of {sorted(self.datasets[name].num_outputs)}",
                )
            dims[key] = self.datasets[name].num_outputs[inner]
        return dims

    def get_data_keys(self) -> list[str]:
        """The keys of `data_map`, sorted."""
        return sorted(self.data_keys)

    def get_target_list(self) -> list[str]:
        """All keys but "data"."""
        return sorted(self.data_keys - {"data"})

    def get_data_shape(self, key: str) -> list[int | None]:
        """See `Dataset.get_data_shape`."""
        name, inner = self.data_map[key]
        return self.datasets[name].get_data_shape(inner)

    def get_data_dtype(self, key: str) -> str:
        """See `Dataset.get_data_dtype`."""
        name, inner = self.data_map[key]
        return self.datasets[name].get_data_dtype(inner)

    def is_data_sparse(self, key: str) -> bool:
        """See `Dataset.is_data_sparse`."""
        name, inner = self.data_map[key]
        return self.datasets[name].is_data_sparse(inner)


def _load_lens(path: str) -> dict[str, dict[str, int]]:
    """Reads a JSON file tag -> data key -> length."""
    try:
        with open(path, "rb") as file:
            return msgspec.json.decode(file.read(), type=dict[str, dict[str, int]])
    except FileNotFoundError as error:
        raise SourceNotFoundError("the file does not exist", path) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SourceFormatError(
            f"this is no file of sequence lengths: {error}",
            path,
            expected='{"tag": {"data key": length}}',
        ) from error
