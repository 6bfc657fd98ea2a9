"""The base class of all datasets: options, the order of sequences, and access to their data.

Names, options and behaviour are those of RETURNN's `returnn.datasets.basic`, so that its engines,
its tools and subclasses written for it work with these classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from random import Random
from threading import RLock
from typing import Any, ClassVar

import numpy as np

from ..io.errors import ConfigError
from . import batching, ordering, returnn_config, seq_files
from . import chunking as chunking_
from .access import OptionalNotImplementedError, SeqAccess
from .batching import Batch, BatchSetGenerator
from .epoch_order import CorpusColumns, order_for_epoch
from .numbers_dict import NumbersDict
from .registry import (
    convert_data_dims,
    extend_dataset_dict_from_parent_dataset,
    get_dataset_class,
    init_dataset,
)
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
                if arg in self._getnewargs_exclude_attrs:
                    continue
                attr = self._getnewargs_remap.get(
                    arg, f"_{arg}" if hasattr(self, f"_{arg}") else arg
                )
                kwargs[arg] = getattr(self, attr)
        state = {"epoch": self.epoch, "zpad": self.zpad}
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
        self.epoch = epoch
        self.rnd_seq_drop = Random(self._get_random_seed_for_epoch(epoch=epoch))
        self._check_sharding(self._num_shards)
        return False

    def finish_epoch(self, *, free_resources: bool = False) -> None:
        """Ends an epoch; the next call is `init_seq_order`."""
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

    # Loading, chunks and batches.

    def is_cached(self, start: int, end: int) -> bool:
        """Whether `load_seqs` has nothing to do for this range."""
        return start == end

    def load_seqs(self, start: int, end: int) -> None:
        """Makes the sequences from `start` to before `end` available. `start` must not fall.

        Raises:
            ValueError: if the range is malformed.
        """
        if not 0 <= start <= end:
            raise ValueError(f"{self}: load_seqs({start}, {end}) is no range of sequences")
        if self.is_cached(start, end):
            return
        step = self.shuffle_frames_of_nseqs
        if step <= 0:
            self._load_seqs(start, end)
            return
        start, end = self._get_load_seqs_superset(start, end)
        self._load_seqs(start, end)
        for first in range(start, end, step):
            self._shuffle_frames_in_seqs(first, first + step)

    def _get_load_seqs_superset(self, start: int, end: int) -> tuple[int, int]:
        step = self.shuffle_frames_of_nseqs
        return (start - start % step, end + -end % step) if step > 0 else (start, end)

    def _load_seqs(self, start: int, end: int) -> None:
        raise NotImplementedError(f"{type(self).__name__} must implement _load_seqs")

    def _shuffle_frames_in_seqs(self, start: int, end: int) -> None:
        raise OptionalNotImplementedError(f"{self} does not support shuffle_frames_of_nseqs")

    def _sliding_window(self, xr: np.ndarray) -> np.ndarray:
        return chunking_.sliding_window(xr, self.zpad)

    def iterate_seqs(
        self, recurrent_net: bool = True, used_data_keys: Iterable[str] | None = None
    ) -> Iterator[chunking_.Chunk]:
        """Yields the chunks of the epoch: sequence index, first frames and end frames.

        Args:
            recurrent_net: whether the order of frames matters; otherwise nothing is chunked.
            used_data_keys: the keys that must fit together; by default all.

        Raises:
            ConfigError: if the lengths of the keys do not give the same number of chunks.
        """
        return chunking_.iterate_seqs(self, recurrent_net, used_data_keys)

    def get_start_end_frames_full_seq(self, seq_idx: int) -> tuple[NumbersDict, NumbersDict]:
        """First and end frame of a whole sequence with its context window."""
        length = self.get_seq_length(seq_idx)
        start = NumbersDict.constant_like(0, numbers_dict=length)
        return start - self.ctx_left, length + self.ctx_right

    def sample(self, seq_idx: int) -> bool:
        """Whether a sequence is used, if it has a weight."""
        weight, threshold = self.weights.get(seq_idx, (0, 0))
        return weight >= threshold

    def _generate_batches(self, **kwargs: Any) -> Iterator[Batch]:
        return batching.generate_batches(self, **kwargs)

    def batch_set_generator_cache_whole_epoch(self) -> bool:
        """Whether batches may be kept and repeated in the next epoch."""
        return False

    def generate_batches(self, shuffle_batches: bool = False, **kwargs: Any) -> BatchSetGenerator:
        """Batches of the epoch; for the options see `batching.generate_batches`."""
        return BatchSetGenerator(
            dataset=self,
            generator=self._generate_batches(**kwargs),
            shuffle_batches=shuffle_batches,
            cache_whole_epoch=self.batch_set_generator_cache_whole_epoch(),
        )

    @classmethod
    def index_shape_for_batches(
        cls, batches: Iterable[Batch], data_key: str = "data"
    ) -> tuple[int, int]:
        """(frames, slices) of one array that holds all these batches side by side."""
        batches = list(batches)
        frames = max((batch.max_num_frames_per_slice[data_key] for batch in batches), default=0)
        return frames, sum(batch.num_slices for batch in batches)


def _check_shard(num_shards: int, shard_index: int) -> None:
    if not 0 <= shard_index < num_shards:
        raise ConfigError(
            "the shard index is out of range",
            expected=f"0 to {num_shards - 1}",
            found=str(shard_index),
        )
