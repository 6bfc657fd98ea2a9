"""`DistributeFilesDataset`: every sub-epoch reads some of very many files."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from ..io.errors import ConfigError
from .access import OptionalNotImplementedError
from .basic import Dataset, extend_dataset_dict_from_parent_dataset, init_dataset
from .cached2 import CachedDataset2
from .file_lists import FileList, FileTree, distribute_evenly, leaves, read_file_list
from .numbers_dict import NumbersDict
from .prefetch import Prefetcher, options_by_name
from .returnn_config import active_config

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
            preload_next_n_sub_epochs: for how many sub-epochs ahead files are copied; default 1.
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
            1 if preload_next_n_sub_epochs is None else preload_next_n_sub_epochs
        )
        self.buffer_size = buffer_size
        self.distrib_shard_files = distrib_shard_files
        self.sharding_fix = sharding_fix
        if distrib_shard_files and not _distrib_info:
            self._take_rank()
        self._file_list: FileList | None = None
        self._data_keys: list[str] | None = None
        self._parts: dict[int, list[list[FileTree]]] = {}
        self._current: Dataset | None = None
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
                "distrib_shard_files and _num_shards contradict each other",
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

    def _get_parts(self, full_epoch: int) -> list[list[FileTree]]:
        """The files of each sub-epoch of a full epoch (from 0), of this shard."""
        if full_epoch not in self._parts:
            self._file_list = file_list = self._get_file_list().with_sizes()
            order = list(range(len(file_list.files)))
            if self.seq_ordering == "random":
                first_epoch = full_epoch * self.partition_epoch + 1
                seed = self._get_random_seed_for_epoch(first_epoch)
                np.random.RandomState(seed).shuffle(order)
            elif self.seq_ordering != "default":
                raise ConfigError(
                    f"{self}: unknown order of files",
                    expected='"default" or "random"',
                    found=repr(self.seq_ordering),
                )
            num_parts = self.partition_epoch * self._num_shards
            starts = distribute_evenly([file_list.sizes[i] for i in order], num_parts)
            first = self.partition_epoch * self._shard_index
            self._parts[full_epoch] = [
                [file_list.files[i] for i in order[starts[part] : starts[part + 1]]]
                for part in range(first, first + self.partition_epoch)
            ]
        return self._parts[full_epoch]

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
        self._current = None
        if epoch is None:
            self._num_seqs = 0
            return True
        last = epoch + self.preload_next_n_sub_epochs
        for full_epoch in [known for known in self._parts if known < self._full_epoch(epoch)]:
            del self._parts[full_epoch]
        self._copies.forget_before(epoch)
        for each in range(epoch, last + 1):
            if each not in self._copies:
                part = self._get_parts(self._full_epoch(each))[(each - 1) % self.partition_epoch]
                self._copies.start(each, self._get_sub_dataset_dict(part))
        self._current = init_dataset(self._copies.get(epoch))
        # The files of a sub-epoch come again in the next full epoch.
        self._current.init_seq_order(epoch=self._full_epoch(epoch) + 1)
        return True

    def _full_epoch(self, epoch: int) -> int:
        return (epoch - 1) // self.partition_epoch

    def finish_epoch(self, *, free_resources: bool = False) -> None:
        """Closes the sub dataset; with `free_resources` also forgets what was prepared."""
        epoch = self.epoch
        super().finish_epoch(free_resources=free_resources)
        if self._current is not None:
            self._current.finish_epoch(free_resources=True)
        self._current = None
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

    @property
    def num_seqs(self) -> int:
        """Sequences in the sub-epoch."""
        return 0 if self._current is None else self._current.num_seqs

    def is_less_than_num_seqs(self, n: int) -> bool:
        """See `Dataset.is_less_than_num_seqs`."""
        return self._current is not None and self._current.is_less_than_num_seqs(n)

    def _load_seqs(self, start: int, end: int) -> None:
        current = self._get_current()
        while end > start and not current.is_less_than_num_seqs(end - 1):
            end -= 1
        current.load_seqs(start, end)
        self.expected_load_seq_start = start

    def get_data(self, seq_idx: int, key: str) -> np.ndarray:
        """See `Dataset.get_data`."""
        return self._get_current().get_data(seq_idx, key)

    def get_tag(self, sorted_seq_idx: int) -> str:
        """See `Dataset.get_tag`."""
        return self._get_current().get_tag(sorted_seq_idx)

    def get_seq_length(self, sorted_seq_idx: int) -> NumbersDict:
        """See `Dataset.get_seq_length`; of the data keys alone."""
        lengths = self._get_current().get_seq_length(sorted_seq_idx)
        return NumbersDict({key: lengths[key] for key in self.get_data_keys()})

    def get_complete_frac(
        self, sorted_seq_idx: int, *, allow_only_lr_suitable: bool = False
    ) -> float | None:
        """See `Dataset.get_complete_frac`; the sub dataset tells it."""
        return self._get_current().get_complete_frac(
            sorted_seq_idx, allow_only_lr_suitable=allow_only_lr_suitable
        )

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


def distributed_rank_and_size() -> tuple[int, int]:
    """Rank and number of ranks: from RETURNN's config where there is one, else the environment.

    Raises:
        ConfigError: if $RANK and $WORLD_SIZE are no numbers.
    """
    config = active_config()
    if config is None:
        try:
            return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        except ValueError as error:
            raise ConfigError(f"$RANK and $WORLD_SIZE must be numbers: {error}") from error
    dummy = config.typed_value("__debug_dummy_distributed_rank_and_size")
    if dummy is not None:
        return dummy
    if config.typed_value("torch_distributed") is not None:
        from returnn.torch.distributed import get_ctx
    elif config.is_true("use_horovod"):
        from returnn.tf.horovod import get_ctx
    else:
        return 0, 1
    context = get_ctx(config=config)
    return context.rank(), context.size()
