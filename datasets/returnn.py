"""A built dataset inside stock RETURNN: a subclass of RETURNN's own `Dataset`.

In a RETURNN config:

    from seqshard.datasets.returnn import ManifestDataset

    train = {"class": ManifestDataset, "manifest": "out/demo", "seq_ordering": "laplace:.1000"}

Importing this module needs RETURNN; nothing else in the package does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..io.errors import ConfigError
from . import manifest as reader

try:
    from returnn.datasets.basic import Dataset, DatasetSeq
    from returnn.util.basic import NumbersDict
except ImportError as error:
    raise ConfigError(
        f"RETURNN cannot be imported: {error}",
        hint="pip install returnn, or use seqshard.datasets.ManifestDataset, which needs none.",
    ) from error

_ORDER_OPTIONS = ("seq_ordering", "partition_epoch", "repeat_epoch", "_num_shards", "_shard_index")


def _delegate(name: str) -> Callable[..., Any]:
    """A method that calls the one of the same name of the reader."""
    method = getattr(reader.ManifestDataset, name)

    def call(self: ManifestDataset, *args: Any, **kwargs: Any) -> Any:
        return method(self._reader, *args, **kwargs)

    call.__name__, call.__doc__ = name, method.__doc__
    return call


class ManifestDataset(Dataset):
    """`seqshard.datasets.ManifestDataset` for RETURNN's engines, tools and composite datasets.

    Args:
        manifest: path or URL of the dataset's folder, or of its manifest.json.
        dataset_options: options of RETURNN's `Dataset`.
    """

    def __init__(self, manifest: str | os.PathLike[str], **dataset_options: Any) -> None:
        super().__init__(**dataset_options)
        self._manifest = os.fspath(manifest)
        self._reader = reader.ManifestDataset(manifest, **dataset_options)
        self.num_inputs = self._reader.num_inputs
        self.num_outputs = self._reader.num_outputs
        self.labels = self._reader.labels
        self._num_timesteps = self._reader.get_num_timesteps()

    def initialize(self) -> None:
        """Must be called once before the first epoch."""
        self._reader.initialize()
        super().initialize()

    def init_seq_order(
        self,
        epoch: int | None = None,
        seq_list: Sequence[str] | None = None,
        seq_order: Sequence[int] | None = None,
    ) -> bool:
        """Starts an epoch; see RETURNN's `Dataset.init_seq_order`."""
        super().init_seq_order(epoch=epoch, seq_list=seq_list, seq_order=seq_order)
        # Engines change some options after construction.
        for option in _ORDER_OPTIONS:
            setattr(self._reader, option, getattr(self, option))
        self._reader._random_seed_offset = self.random_seed_offset
        return self._reader.init_seq_order(epoch, seq_list, seq_order)

    def finish_epoch(self, *, free_resources: bool = False) -> None:
        """Ends an epoch."""
        super().finish_epoch(free_resources=free_resources)
        self._reader.finish_epoch(free_resources=free_resources)

    @property
    def num_seqs(self) -> int:
        """Sequences in the current epoch."""
        return self._reader.num_seqs

    def get_seq_length(self, seq_idx: int) -> NumbersDict:
        """Frames of a sequence per data key."""
        return NumbersDict(self._reader.get_seq_length(seq_idx).dict)

    def get_corpus_seq(self, corpus_seq_idx: int) -> DatasetSeq:
        """A sequence by its corpus index, whatever the epoch."""
        seq = self._reader.get_corpus_seq(corpus_seq_idx)
        features: dict[str, np.ndarray] = {key: seq.get_data(key) for key in seq.get_data_keys()}
        return DatasetSeq(corpus_seq_idx, features=features, seq_tag=seq.seq_tag)

    supports_sharding = _delegate("supports_sharding")
    supports_seq_order_sorting = _delegate("supports_seq_order_sorting")
    load_seqs = _delegate("load_seqs")
    get_data = _delegate("get_data")
    get_data_by_seq_tag = _delegate("get_data_by_seq_tag")
    get_tag = _delegate("get_tag")
    get_all_tags = _delegate("get_all_tags")
    get_total_num_seqs = _delegate("get_total_num_seqs")
    get_current_seq_order = _delegate("get_current_seq_order")
    have_corpus_seq_idx = _delegate("have_corpus_seq_idx")
    get_corpus_seq_idx = _delegate("get_corpus_seq_idx")
    have_get_corpus_seq = _delegate("have_get_corpus_seq")
    get_estimated_seq_length = _delegate("get_estimated_seq_length")
    get_data_keys = _delegate("get_data_keys")
    get_target_list = _delegate("get_target_list")
    get_data_dim = _delegate("get_data_dim")
    get_data_dtype = _delegate("get_data_dtype")
    is_data_sparse = _delegate("is_data_sparse")
    extern_data = _delegate("extern_data")
    state_dict = _delegate("state_dict")
    load_state_dict = _delegate("load_state_dict")
