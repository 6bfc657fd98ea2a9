"""`DistributeFilesDataset`: every sub-epoch reads some of very many files."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from ..io.errors import ConfigError
from .access import OptionalNotImplementedError
from .basic import Dataset, extend_dataset_dict_from_parent_dataset, init_dataset
from .cached2 import CachedDataset2
from .epoch_order import hash_of, order_identity
from .file_lists import FileList, FileTree, distribute_evenly, leaves, read_file_list
from .file_shares import SubEpoch, coverage_of_tags
from .numbers_dict import NumbersDict
from .prefetch import Prefetcher, options_by_name
from .ranks import distributed_rank_and_size
from .resume import Coverage, Shares, consumed_by, fill_up, shares_after

ORDER_OPTIONS = ("seq_ordering", "seq_order_control_dataset", "map_seq_stream")


class DistributeFilesDataset(CachedDataset2):
    """Distributes files over sub-epochs, and over ranks, and reads each part through a sub dataset.

    The files are shuffled once per full epoch (`seq_ordering="random"`) and cut into parts of
    about the same size in bytes. The sub dataset of a part runs in this process: its arrays are
    handed on as they are. While a part is read, the files of the next parts that are `CachedFile`s
    are copied in the background.

    Attributes:
        files, get_sub_epoch_dataset, preload_next_n_sub_epochs, distrib_shard_files, sharding_fix:
            as given.
    """

    def __init__(
        self,
        *,
        files: list[FileTree] | str | os.PathLike[str] | Callable[[], list[FileTree]],
        get_sub_epoch_dataset: Callable[[list[FileTree]], dict[str, Any]],
        use_worker_proc: bool = True,
        preload_next_n_sub_epochs: int | None = None,
        buffer_size: int = 1,
        distrib_shard_files: bool = False,
        sharding_fix: bool | None = None,
        _meta_info_cache: dict[str, Any] | None = None,
        _distrib_info: dict[str, int] | None = None,
        **kwargs: Any,
    ) -> None:
        """Reads nothing yet.

        Args:
            files: see `read_file_list`; with a manifest.json no file has to be looked at.
            get_sub_epoch_dataset: gives the options of the dataset of some files. It must say how
                sequences are ordered, and not have a partition_epoch.
            use_worker_proc, buffer_size: accepted for RETURNN's sake; no process is needed.
            preload_next_n_sub_epochs: for how many sub-epochs ahead files are copied; by default 1,
                or 0 without `use_worker_proc`.
            distrib_shard_files: share the files out over the ranks of a distributed training.
            sharding_fix: False lets the sub dataset of a shard share its sequences out a second
                time, as old versions of RETURNN do, which loses data.
            kwargs: see `Dataset`; of the orders, "default" and "random".

        Raises:
            ConfigError: if options are out of range or contradict each other.
        """
        super().__init__(**kwargs)
        if preload_next_n_sub_epochs is not None and preload_next_n_sub_epochs < 0:
            raise ConfigError(
                "preload_next_n_sub_epochs is negative", found=f"{preload_next_n_sub_epochs}"
            )
        self.files = files
        self.get_sub_epoch_dataset = get_sub_epoch_dataset
        self.use_worker_proc = use_worker_proc
        self.preload_next_n_sub_epochs = (
            int(use_worker_proc) if preload_next_n_sub_epochs is None else preload_next_n_sub_epochs
        )
        self.buffer_size = buffer_size
        self.distrib_shard_files = distrib_shard_files
        self.sharding_fix = sharding_fix
        if distrib_shard_files and not _distrib_info:
            self._take_rank()
        self._file_list: FileList | None = None
        self._data_keys: list[str] | None = None
        self._parts: dict[tuple[int, int], list[list[FileTree]]] = {}
        self._sub_epoch: SubEpoch | None = None
        self._current: Dataset | None = None
        self._shares: Shares = []
        self._share: np.ndarray | None = None
        self._share_size = 0
        self._digest: str | None = None
        self._copies = Prefetcher()
        if _meta_info_cache:
            self.num_inputs = _meta_info_cache["num_inputs"]
            self.num_outputs = _meta_info_cache["num_outputs"]
            self.labels = _meta_info_cache["labels"]
            self._data_keys = _meta_info_cache["data_keys"]
            self._file_list = FileList(_meta_info_cache["files"], _meta_info_cache["file_sizes"])

    def __del__(self) -> None:
        copies = getattr(self, "_copies", None)
        if copies is not None:
            copies.close()

    def initialize(self) -> None:
        """Finds out from the first file what the data look like."""
        self._describe()
        super().initialize()

    # What a copy of this dataset in another process needs; see `Dataset.__reduce__`.

    @property
    def _meta_info_cache(self) -> dict[str, Any] | None:
        if not self.num_outputs:
            return None
        return {
            "num_inputs": self.num_inputs,
            "num_outputs": self.num_outputs,
            "labels": self.labels,
            "data_keys": self._data_keys,
            "files": self._get_file_list().files,
            "file_sizes": self._get_file_list().sizes,
        }

    @property
    def _distrib_info(self) -> dict[str, int]:
        return {"_num_shards": self._num_shards, "_shard_index": self._shard_index}

    def _take_rank(self) -> None:
        rank, size = distributed_rank_and_size()
        if (self._num_shards, self._shard_index) not in ((1, 0), (size, rank)):
            raise ConfigError(
                "_num_shards clashes with distrib_shard_files",
                expected=f"shard {rank} of {size}, which is the rank",
                found=f"shard {self._shard_index} of {self._num_shards}",
            )
        self._shard_index, self._num_shards = rank, size

    def _uses_custom_distributed_sharding(self) -> bool:
        return self.distrib_shard_files

    def supports_sharding(self) -> bool:
        """The files can be shared out."""
        return True

    # Files.

    def _get_file_list(self) -> FileList:
        if self._file_list is None:
            file_list = read_file_list(self.files)
            if len(file_list.files) < self.partition_epoch:
                raise ConfigError(
                    f"{self}: there are fewer files than sub-epochs",
                    expected=f"at least {self.partition_epoch} files",
                    found=f"{len(file_list.files)}",
                )
            self._file_list = file_list
        return self._file_list

    def _get_part(self, epoch: int, rank: int, num_ranks: int) -> list[FileTree]:
        """The files of a rank in a sub-epoch."""
        full_epoch = self._full_epoch(epoch)
        parts = self._parts.get((full_epoch, num_ranks))
        if parts is None:
            parts = self._parts[full_epoch, num_ranks] = self._share_out(full_epoch, num_ranks)
        return parts[self.partition_epoch * rank + (epoch - 1) % self.partition_epoch]

    def _share_out(self, full_epoch: int, num_ranks: int) -> list[list[FileTree]]:
        """The files of all sub-epochs of a full epoch (from 0) of the first rank, and so on."""
        self._file_list = file_list = self._get_file_list().with_sizes()
        order = list(range(len(file_list.files)))
        if self.seq_ordering == "random":
            seed = self._get_random_seed_for_epoch(full_epoch * self.partition_epoch + 1)
            np.random.RandomState(seed).shuffle(order)
        elif self.seq_ordering != "default":
            raise ConfigError(
                f"{self}: unknown order of files",
                expected='"default" or "random"',
                found=repr(self.seq_ordering),
            )
        sizes = [file_list.sizes[i] for i in order]
        starts = distribute_evenly(sizes, self.partition_epoch * num_ranks)
        return [[file_list.files[i] for i in order[a:b]] for a, b in pairwise(starts)]

    @staticmethod
    def _distribute_evenly_by_size(
        *, num_bins: int, file_sizes: dict[str, int], files_order: Sequence[FileTree]
    ) -> list[list[FileTree]]:
        """See `distribute_evenly`; the key of a tree is its paths with ":" between them."""
        sizes = [file_sizes[":".join(leaves(tree))] for tree in files_order]
        starts = distribute_evenly(sizes, num_bins)
        return [list(files_order[start:end]) for start, end in pairwise(starts)]

    # Sub datasets.

    def _get_sub_dataset_dict(self, files: list[FileTree]) -> dict[str, Any]:
        options = self.get_sub_epoch_dataset(files)
        explicit = "_num_shards" in options or "_shard_index" in options
        options = extend_dataset_dict_from_parent_dataset(options, parent_dataset=self)
        if self._num_shards > 1 and not explicit and self.sharding_fix is not False:
            # The files are this shard's own: its sub dataset reads all of them.
            options |= {"_num_shards": 1, "_shard_index": 0}
        values = list(options_by_name(options))
        for name, value in values:
            if name == "partition_epoch" and value not in (None, 1):
                raise ConfigError(
                    f"{self}: the sub dataset must not have a partition_epoch",
                    found=f"{value}",
                    hint="Give it to DistributeFilesDataset.",
                )
        if not any(name in ORDER_OPTIONS for name, _ in values):
            raise ConfigError(
                f"{self}: the sub dataset must say how its sequences are ordered",
                expected=" or ".join(ORDER_OPTIONS),
                found=f"{sorted(options)}",
            )
        return options

    def _describe(self) -> None:
        if self.num_outputs:
            return
        options = self._get_sub_dataset_dict([self._get_file_list().files[0]])
        dataset = init_dataset(
            options, extra_kwargs={"seq_ordering": "default"}, parent_dataset=self
        )
        self.num_inputs = dataset.num_inputs
        self.num_outputs = dataset.num_outputs
        self.labels = dataset.labels
        self._data_keys = dataset.get_data_keys()

    def init_seq_order(
        self,
        epoch: int | None = None,
        seq_list: Sequence[str] | None = None,
        seq_order: Sequence[int] | None = None,
    ) -> bool:
        """Opens the files of a sub-epoch; see `Dataset.init_seq_order`.

        Raises:
            ConfigError: for `seq_list` and `seq_order`, which this dataset cannot follow.
        """
        super().init_seq_order(epoch=epoch, seq_list=seq_list, seq_order=seq_order)
        if seq_list is not None or seq_order is not None:
            raise ConfigError(f"{self} has no list of its sequences that seq_list could refer to")
        self._close_sub_epoch()
        if epoch is None:
            self._num_seqs = 0
            return True
        for key in [known for known in self._parts if known[0] < self._full_epoch(epoch)]:
            del self._parts[key]
        self._copies.forget_before(epoch)
        for each in range(epoch, epoch + self.preload_next_n_sub_epochs + 1):
            if each not in self._copies:
                part = self._get_part(each, self._shard_index, self._num_shards)
                self._copies.start(each, self._get_sub_dataset_dict(part))
        self._start_sub_epoch(epoch)
        return True

    def _start_sub_epoch(self, epoch: int) -> None:
        rank, num_ranks = self._shard_index, self._num_shards
        splits = self._resume_state.splits if self._resume_state is not None else ()
        first_ranks = splits[0].num_shards if splits else num_ranks
        self._is_resumed = True
        self._sub_epoch = SubEpoch(first_ranks, partial(self._open_part, epoch, first_ranks))
        if not self.equal_steps and all(split.num_shards == num_ranks for split in splits):
            self._current = self._sub_epoch.dataset(rank)
            if splits:
                self._num_read_before = consumed_by(splits[0].consumed, rank)
            return
        if self.sharding_fix is False and num_ranks > 1:
            raise ConfigError(f"{self}: with sharding_fix=False the shares of ranks are unknown")
        shares, consumed = shares_after(splits, num_ranks, lambda _: self._sub_epoch.shares())
        share = fill_up(shares, rank) if self.equal_steps else shares[rank]
        self._num_read_before = consumed_by(consumed, rank)
        self._shares, self._share = shares, share[self._num_read_before :]
        # A rank without sequences repeats those of others.
        self._share_size = max(1, len(shares[rank]) or sum(map(len, shares)))
        self._current = self._sub_epoch.dataset(min(rank, first_ranks - 1))

    def _open_part(self, epoch: int, num_ranks: int, rank: int) -> Dataset:
        if (rank, num_ranks) == (self._shard_index, self._num_shards):
            options = self._copies.get(epoch)
        else:
            options = self._get_sub_dataset_dict(self._get_part(epoch, rank, num_ranks))
        dataset = init_dataset(options)
        # The files of a sub-epoch come again in the next full epoch.
        dataset.init_seq_order(epoch=self._full_epoch(epoch) + 1)
        return dataset

    def _close_sub_epoch(self) -> None:
        if self._sub_epoch is not None:
            self._sub_epoch.close()
        self._sub_epoch = self._current = self._share = None
        self._shares = []

    def _full_epoch(self, epoch: int) -> int:
        return (epoch - 1) // self.partition_epoch

    def finish_epoch(self, *, free_resources: bool = False) -> None:
        """Closes the sub dataset; with `free_resources` also forgets what was prepared."""
        epoch = self.epoch
        super().finish_epoch(free_resources=free_resources)
        self._close_sub_epoch()
        if free_resources:
            self._copies.close()
            self._copies = Prefetcher()
            self._parts.clear()
        elif epoch is not None:
            self._copies.forget_before(epoch + 1)

    # Sequences: those of the sub dataset.

    def _get_current(self) -> Dataset:
        if self._current is None:
            raise ConfigError(f"{self}: no epoch was started")
        return self._current

    def _locate(self, seq_idx: int) -> tuple[Dataset, int]:
        """The sub dataset of a sequence, and its index there."""
        current, before = self._get_current(), self._num_read_before
        if self._share is None:
            return current, seq_idx + before
        repetition = (seq_idx + before) // self._share_size
        return self._sub_epoch.locate(self._share[seq_idx], repetition)

    @property
    def num_seqs(self) -> int:
        """Sequences in the sub-epoch."""
        if self._share is not None:
            return len(self._share)
        return 0 if self._current is None else self._current.num_seqs - self._num_read_before

    def is_less_than_num_seqs(self, n: int) -> bool:
        """See `Dataset.is_less_than_num_seqs`."""
        if self._share is not None:
            return n < len(self._share)
        return self._current is not None and self._current.is_less_than_num_seqs(
            n + self._num_read_before
        )

    def _load_seqs(self, start: int, end: int) -> None:
        self._get_current()
        while end > start and not self.is_less_than_num_seqs(end - 1):
            end -= 1
        if self._share is None:
            before = self._num_read_before
            self._current.load_seqs(start + before, end + before)
        else:
            for dataset, index in map(self._locate, range(start, end)):
                dataset.load_seqs(index, index + 1)
        self.expected_load_seq_start = start

    def get_data(self, seq_idx: int, key: str) -> np.ndarray:
        """See `Dataset.get_data`."""
        dataset, index = self._locate(seq_idx)
        return dataset.get_data(index, key)

    def get_tag(self, sorted_seq_idx: int) -> str:
        """See `Dataset.get_tag`."""
        dataset, index = self._locate(sorted_seq_idx)
        return dataset.get_tag(index)

    def get_seq_length(self, sorted_seq_idx: int) -> NumbersDict:
        """See `Dataset.get_seq_length`; of the data keys alone."""
        dataset, index = self._locate(sorted_seq_idx)
        lengths = dataset.get_seq_length(index)
        return NumbersDict({key: lengths[key] for key in self.get_data_keys()})

    def get_complete_frac(
        self, sorted_seq_idx: int, *, allow_only_lr_suitable: bool = False
    ) -> float | None:
        """See `Dataset.get_complete_frac`; the sub dataset tells it."""
        if self._share is not None:
            before = self._num_read_before
            return (sorted_seq_idx + before + 1) / (len(self._share) + before)
        return self._get_current().get_complete_frac(
            sorted_seq_idx + self._num_read_before, allow_only_lr_suitable=allow_only_lr_suitable
        )

    # Continuing in the middle of a sub-epoch; see `Dataset`.

    def _get_corpus_digest(self) -> str:
        """Of names and sizes of the files, and of the order within the first one."""
        if self._digest is None:
            file_list = self._get_file_list().with_sizes()
            names = [os.path.basename(leaf) for tree in file_list.files for leaf in leaves(tree)]
            options = self._get_sub_dataset_dict([file_list.files[0]])
            order = order_identity(init_dataset(options, parent_dataset=self), epoch=1)
            self._digest = hash_of(order, *names, *map(str, file_list.sizes))
        return self._digest

    def coverage(self, all_ranks: bool = False) -> Coverage:
        """See `Dataset.coverage`; of the tags. With `all_ranks` the files of all are opened."""
        current = self._get_current()
        if self._share is not None:
            own = self._shares[self._shard_index]
            return self._sub_epoch.coverage(np.concatenate(self._shares) if all_ranks else own)
        if all_ranks:
            return self._sub_epoch.coverage(np.concatenate(self._sub_epoch.shares()))
        return coverage_of_tags(map(current.get_tag, range(current.num_seqs)))

    def have_seqs(self) -> bool:
        """Whether there is any file."""
        return bool(self._get_file_list().files)

    def get_all_tags(self) -> list[str]:
        """The tags of all files; only where there are no sub-epochs."""
        return self._get_whole("get_all_tags").get_all_tags()

    def get_total_num_seqs(self, *, fast: bool = False) -> int:
        """Sequences in all files; only where there are no sub-epochs."""
        return self._get_whole("get_total_num_seqs").get_total_num_seqs(fast=fast)

    def _get_whole(self, method: str) -> Dataset:
        if self.partition_epoch > 1:
            raise OptionalNotImplementedError(f"{self}: no {method} with partition_epoch > 1")
        if self._current is None:
            self.init_seq_order(epoch=1)
        return self._get_current()

    def get_data_keys(self) -> list[str]:
        """The data keys of the sub datasets."""
        self._describe()
        return self._data_keys

    def get_data_dtype(self, key: str) -> str:
        """See `Dataset.get_data_dtype`; needs a started epoch."""
        return self._get_current().get_data_dtype(key)
