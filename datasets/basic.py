"""The base class of all datasets: options, the order of sequences, and access to their data.

Names, options and behaviour are those of RETURNN's `returnn.datasets.basic`, so that its engines,
its tools and subclasses written for it work with these classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from threading import RLock
from typing import Any, ClassVar

import numpy as np

from ..io.errors import ConfigError, StaleStateError
from . import chunking as chunking_
from . import ordering, returnn_config, seq_files
from .access import OptionalNotImplementedError, SeqAccess
from .batching import Batch, BatchSetGenerator
from .epoch_order import (
    CorpusColumns,
    EpochParts,
    hash_of,
    order_for_epoch,
    order_identity,
    seq_lens_from_file,
)
from .numbers_dict import NumbersDict
from .registry import (
    convert_data_dims,
    extend_dataset_dict_from_parent_dataset,
    get_dataset_class,
    init_dataset,
)
from .resume import Coverage, EpochState, coverage_of, parse_state
from .seq import DatasetSeq

__all__ = [
    "Batch",
    "BatchSetGenerator",
    "Dataset",
    "DatasetSeq",
    "NumbersDict",
    "OptionalNotImplementedError",
    "convert_data_dims",
    "extend_dataset_dict_from_parent_dataset",
    "get_dataset_class",
    "init_dataset",
]


# RETURNN's name of it.
_get_seq_len_as_array = ordering.lens_array


class Dataset(SeqAccess):
    """Sequences with tags, each with one array per data key, in an order that changes per epoch.

    A reader calls `initialize`, then per epoch `init_seq_order`, and while
    `is_less_than_num_seqs(i)`: `load_seqs(i, i + 1)` and `get_data(i, key)`. The index i counts in
    the order of the epoch; a corpus index counts in the files.

    Args:
        name: for logs, for example "train".
        window: number of frames beside each other in the features of "data"; odd.
        context_window: frames around each chunk; see `chunking.parse_context_window`.
        chunking: size and step of chunks; see `chunking.parse_chunking`.
        seq_ordering: see `ordering.parse_seq_ordering`; or a function of the epoch that gives it.
        fixed_random_seed: the seed of every epoch, for evaluation.
        random_seed_offset: added to the seed, which otherwise is the number of the full epoch.
        partition_epoch: number of sub-epochs that a full epoch is split into.
        repeat_epoch: how often the sequences come within an epoch; not with partition_epoch.
        seq_list_filter_file: text file (may be .gz) with the tags of the sequences to keep.
        unique_seq_tags: whether to keep only the first sequence of each tag in the order.
        seq_order_seq_lens_file: text file (may be .gz) with a dict tag -> length to sort by.
        shuffle_frames_of_nseqs: shuffles the frames of so many sequences; see `CachedDataset`.
        min_chunk_size: a rest of a sequence of so many frames or fewer makes no chunk.
        chunking_variance: largest fraction by which the chunk size is lowered at random.
        estimated_num_seqs: for progress reports where the number of sequences is not known.
        _num_shards, _shard_index: number of ranks or workers that share an epoch, and which one
            this is.
        equal_steps: whether all ranks get the same number of sequences: those with a smaller
            share repeat some of their own. Not an option of RETURNN's.

    Raises:
        ConfigError: if an option is malformed or options exclude each other.
    """

    _getnewargs_exclude_attrs: ClassVar[set[str]] = set()
    _getnewargs_remap: ClassVar[dict[str, str]] = {}

    def __init__(
        self,
        name: str | None = None,
        window: int = 1,
        context_window: Any = None,
        chunking: Any = None,
        seq_ordering: str | Callable[..., str] = "default",
        fixed_random_seed: int | None = None,
        random_seed_offset: int | None = None,
        partition_epoch: int | None = None,
        repeat_epoch: int | None = None,
        seq_list_filter_file: str | None = None,
        unique_seq_tags: bool = False,
        seq_order_seq_lens_file: str | None = None,
        shuffle_frames_of_nseqs: int = 0,
        min_chunk_size: Any = 0,
        chunking_variance: float = 0,
        estimated_num_seqs: int | None = None,
        _num_shards: int = 1,
        _shard_index: int = 0,
        equal_steps: bool = False,
    ) -> None:
        self.name = name or f"dataset_id{id(self)}"
        self.lock: RLock | None = None
        self.rnd_seq_drop: Random | None = None
        self.num_inputs = 0
        self.num_outputs = None
        self.labels: dict[str, list[str]] = {}
        self.weights: dict[int, list[float]] = {}
        self.epoch: int | None = None
        self.zpad: np.ndarray | None = None
        self._num_timesteps: int | None = 0
        self._num_seqs: int | None = 0
        self._estimated_num_seqs = estimated_num_seqs
        self._file_cache: Any = None
        self._corpus_columns = CorpusColumns()
        self._epoch_parts = EpochParts()
        self._resume_state: EpochState | None = None
        self._is_resumed = False

        self.window = window
        self.seq_ordering = seq_ordering
        self.fixed_random_seed = fixed_random_seed
        self._random_seed_offset = random_seed_offset
        self.partition_epoch = partition_epoch or 1
        self.repeat_epoch = repeat_epoch or 1
        if self.partition_epoch > 1 and self.repeat_epoch > 1:
            raise ConfigError("partition_epoch and repeat_epoch cannot be combined")
        self._seq_list_filter_file = seq_list_filter_file
        self.seq_tags_filter = (
            set(self._load_seq_list_file(seq_list_filter_file)) if seq_list_filter_file else None
        )
        self.unique_seq_tags = unique_seq_tags
        self._seq_order_seq_lens_file = seq_order_seq_lens_file
        self.shuffle_frames_of_nseqs = shuffle_frames_of_nseqs
        self.min_chunk_size = NumbersDict(min_chunk_size)
        self.chunking_variance = chunking_variance
        self._chunking = chunking
        self.chunk_size, self.chunk_step, self.custom_chunking_func = self._parse_chunking(chunking)
        self._context_window = context_window
        self.ctx_left, self.ctx_right = chunking_.parse_context_window(context_window)
        _check_shard(_num_shards, _shard_index)
        self._num_shards = _num_shards
        self._shard_index = _shard_index
        self.equal_steps = equal_steps

    def __repr__(self) -> str:
        name, epoch = getattr(self, "name", "<unknown>"), getattr(self, "epoch", "<unknown>")
        return f"<{type(self).__name__} {name!r} epoch={epoch}>"

    def __reduce__(self) -> tuple[Any, ...]:
        """Options and epoch: what a data-loader worker needs. The order is drawn anew there."""
        kwargs = {}
        for cls in type(self).__mro__:
            if not issubclass(cls, Dataset):
                continue
            code = cls.__init__.__code__
            for arg in code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]:
                if arg in self._getnewargs_exclude_attrs or arg == "equal_steps":
                    continue
                attr = self._getnewargs_remap.get(
                    arg, f"_{arg}" if hasattr(self, f"_{arg}") else arg
                )
                kwargs[arg] = getattr(self, attr)
        # `equal_steps` is no argument of the classes of RETURNN that hand on their options.
        state = {"epoch": self.epoch, "zpad": self.zpad, "equal_steps": self.equal_steps}
        if self._resume_state is not None:
            state["_resume_state"] = self._resume_state
        return Dataset._create_from_reduce, (type(self), kwargs, state)

    @staticmethod
    def _create_from_reduce(cls: type[Dataset], kwargs: dict, state: dict) -> Dataset:
        dataset = cls(**kwargs)
        for attr, value in state.items():
            setattr(dataset, attr, value)
        return dataset

    # Options from a RETURNN config.

    @staticmethod
    def kwargs_update_from_config(config: Any, kwargs: dict[str, Any]) -> None:
        """Fills options that are missing or None from a RETURNN config, in place."""
        returnn_config.update_kwargs(config, kwargs)

    @staticmethod
    def get_default_kwargs_eval(config: Any) -> dict[str, Any]:
        """Default options for evaluation from a RETURNN config."""
        return returnn_config.eval_kwargs(config)

    @staticmethod
    def get_default_kwargs_train(config: Any) -> dict[str, Any]:
        """Default options for training from a RETURNN config."""
        return returnn_config.train_kwargs(config)

    @classmethod
    def from_config(cls, config: Any, **kwargs: Any) -> Dataset:
        """A dataset with the options `kwargs`, and those of the config for what they leave open."""
        cls.kwargs_update_from_config(config, kwargs)
        return cls(**kwargs)

    @property
    def random_seed_offset(self) -> int:
        """What is added to the random seed of an epoch."""
        if self._random_seed_offset is None:
            self._random_seed_offset = self._get_default_random_seed_offset()
        return self._random_seed_offset

    def _get_default_random_seed_offset(self) -> int:
        return returnn_config.default_random_seed_offset(self._uses_custom_distributed_sharding())

    def _uses_custom_distributed_sharding(self) -> bool:
        """Whether the dataset itself shares its data out, so that all ranks need the same order."""
        return False

    def set_file_cache(self, cache: Any) -> None:
        """Keeps a cache of local files alive as long as this dataset."""
        self._file_cache = cache

    _parse_chunking = staticmethod(chunking_.parse_chunking)

    @staticmethod
    def _load_seq_list_file(
        filename: str, *, use_cache_manager: bool = False, expect_list: bool = True
    ) -> list[str]:
        """Reads a list of tags; the options are RETURNN's and have no effect."""
        return seq_files.load_seq_list(filename)

    # Life cycle of an epoch.

    def initialize(self) -> None:
        """Must be called once before the first epoch."""
        self._base_init()
        self.init_seq_order()

    def _base_init(self) -> None:
        self.zpad = None
        assert self.num_outputs is not None, "a subclass must set num_outputs"
        if not self.num_inputs:
            if (self.window or 1) > 1 and "data" not in self.num_outputs:
                raise ConfigError("window needs the data key 'data'", found=f"window {self.window}")
            return
        if self.window <= 0:
            raise ConfigError("window must be positive", found=str(self.window))
        self.window += int(self.window) % 2 == 0
        if self.window > 1:
            self.zpad = np.zeros((int(self.window) // 2, self.num_inputs), np.float32)

    def init_seq_order(
        self,
        epoch: int | None = None,
        seq_list: Sequence[str] | None = None,
        seq_order: Sequence[int] | None = None,
    ) -> bool:
        """Starts an epoch.

        Args:
            epoch: (sub-)epoch, from 1; None for none yet.
            seq_list: tags of the sequences to read, in this order, instead of the own order.
            seq_order: corpus indices, likewise.

        Returns:
            Whether the order may have changed.
        """
        if self._resume_state is not None and epoch not in (None, self._resume_state.epoch):
            self._begin_epoch_again(epoch)
        self.epoch = epoch
        self._num_loaded = self._num_read_before = 0
        self.rnd_seq_drop = Random(self._get_random_seed_for_epoch(epoch=epoch))
        self._check_sharding(self._num_shards)
        return False

    def finish_epoch(self, *, free_resources: bool = False) -> None:
        """Ends an epoch; the next call is `init_seq_order`."""
        if self._resume_state is not None:
            self._begin_epoch_again(self._resume_state.epoch)
        self.epoch = None

    def supports_sharding(self) -> bool:
        """Whether the order can be shared out over ranks or workers."""
        return False

    def set_sharding(self, *, num_shards: int, shard_index: int) -> None:
        """Sets which share of the next epochs this instance reads.

        Raises:
            ConfigError: if the index is out of range or the dataset does not support shards.
        """
        _check_shard(num_shards, shard_index)
        self._check_sharding(num_shards)
        self._num_shards, self._shard_index = num_shards, shard_index

    def _check_sharding(self, num_shards: int) -> None:
        if num_shards > 1 and not self.supports_sharding():
            raise ConfigError(f"{self} does not support sharding", found=f"{num_shards} shards")

    # The order of an epoch.

    def supports_seq_order_sorting(self) -> bool:
        """Whether orders by length are possible."""
        return False

    def _get_random_seed_for_epoch(self, epoch: int | None, num_epochs_fixed: int = 1) -> int:
        if self.fixed_random_seed is not None:
            return self.fixed_random_seed
        offset = self.random_seed_offset
        return ordering.epoch_seed(epoch, self.partition_epoch or 1, num_epochs_fixed, None, offset)

    def get_seq_order_for_epoch(
        self,
        epoch: int | None,
        num_seqs: int,
        get_seq_len: Callable[[int], float] | None = None,
    ) -> Sequence[int]:
        """The corpus indices of an epoch in their order.

        The steps are: order, unique tags, partition and shard, repeat, filter.

        Args:
            epoch: (sub-)epoch, from 1; no sequences for None.
            num_seqs: sequences in the corpus.
            get_seq_len: length by corpus index. `ordering.SeqLens`, or the `__getitem__` of an
                array, is not called once per sequence.

        Returns:
            A range, or an int64 array.

        Raises:
            ConfigError: if the order is unknown or not possible, or the filter leaves nothing.
        """
        return order_for_epoch(self, epoch, num_seqs, get_seq_len)

    @property
    def _seq_order_seq_lens_by_idx(self) -> np.ndarray:
        return seq_lens_from_file(self)

    @property
    def _get_seq_order_seq_lens_by_idx(self) -> Callable[[int], float]:
        return self._seq_order_seq_lens_by_idx.__getitem__

    @classmethod
    def _apply_partition_epoch_and_sharding(
        cls,
        seq_index: Sequence[int],
        partition_epoch: int,
        epoch: int | None,
        num_shards: int,
        shard_index: int,
    ) -> Sequence[int]:
        return ordering.take_part(seq_index, epoch, partition_epoch, num_shards, shard_index)

    def get_current_seq_order(self) -> Sequence[int]:
        """The corpus indices of the current epoch in their order."""
        raise OptionalNotImplementedError(f"{self} does not know its sequence order")

    # Continuing in the middle of an epoch.

    def _get_corpus_digest(self) -> str:
        """Identifies the corpus; `state_dict` relies on it."""
        return hash_of(*self.get_all_tags())

    def state_dict(self, num_consumed: int | None = None) -> dict[str, Any]:
        """Where the epoch stands, as a small dict for JSON.

        Args:
            num_consumed: sequences of the current order that were used, from its start; by
                default all that were loaded, which is too many for a reader that loads ahead.

        Raises:
            StaleStateError: if there is no current epoch, or no so many sequences in it.
        """
        if self.epoch is None:
            raise StaleStateError(f"{self} is in no epoch whose state could be saved")
        count = self._num_loaded if num_consumed is None else num_consumed
        if not 0 <= count <= self.num_seqs:
            raise StaleStateError(
                "there are not so many sequences",
                expected=f"0 to {self.num_seqs}",
                found=str(count),
            )
        splits = self._resume_state.splits if self._resume_state is not None else ()
        start = EpochState(order_identity(self, self.epoch), self.epoch, splits)
        after = start.advanced(self._num_shards, self._shard_index, count, self.equal_steps)
        return after.to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Starts the epoch of a saved state with the sequences that are left, numbered from 0.

        Any `init_seq_order` of the same epoch starts there again, until another epoch begins. The
        state must be this rank's own, or `resume.merge_states` of those of all ranks; then the
        number of ranks may be another one.

        Raises:
            StaleStateError: if it is malformed, or belongs to other data or options.
        """
        parsed = parse_state(state)
        identity = order_identity(self, parsed.epoch)
        if parsed.dataset != identity:
            raise StaleStateError(
                f"{self}: the state belongs to another dataset, or to other options",
                expected=identity,
                found=parsed.dataset,
            )
        self._resume_state, self._is_resumed = parsed, False
        self.init_seq_order(epoch=parsed.epoch)
        if not self._is_resumed:
            self._resume_state = None
            raise StaleStateError(f"{self} cannot continue in the middle of an epoch")

    def _begin_epoch_again(self, epoch: int) -> None:
        """Forgets how far the epoch of a loaded state was read, but not who had begun it."""
        state, length = self._resume_state, self.partition_epoch or 1
        same_full_epoch = (epoch - 1) // length == (state.epoch - 1) // length
        moved = state.splits and state.splits[0].num_shards != self._num_shards
        self._resume_state = state.from_start(epoch) if same_full_epoch and moved else None

    def coverage(self, all_ranks: bool = False) -> Coverage:
        """A digest of the sequences that this rank reads in the current epoch.

        Without the repetitions of `equal_steps`. That the shares of all ranks are disjoint and
        complete is proven where `sum` over them equals the coverage with `all_ranks`.
        """
        parts = self._epoch_parts
        return coverage_of(ordering.as_array(parts.whole if all_ranks else parts.own))


def _check_shard(num_shards: int, shard_index: int) -> None:
    if not 0 <= shard_index < num_shards:
        raise ConfigError(
            "the shard index is out of range",
            expected=f"0 to {num_shards - 1}",
            found=str(shard_index),
        )
