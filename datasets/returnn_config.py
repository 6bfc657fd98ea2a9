"""What the datasets take from RETURNN: options of its config, and its own datasets.

Its active config is looked up only where RETURNN is loaded already.
"""

from __future__ import annotations

import os
import sys
from typing import Any

RANDOM_SEED_OFFSET_ENV_VAR = "RETURNN_RANDOM_SEED_OFFSET"
_RANDOM_SEED_OFFSET_PER_RANK = 16127


def active_config() -> Any | None:
    """RETURNN's global config, or None outside of RETURNN."""
    module = sys.modules.get("returnn.config")
    return module.get_global_config(raise_exception=False) if module else None


def update_kwargs(config: Any, kwargs: dict[str, Any]) -> None:
    """Fills dataset options that are missing or None from a config, in place."""
    from_config = {
        "window": config.int("window", 0) or None,
        "context_window": config.typed_value("context_window"),
        "chunking": config.opt_typed_value("chunking", None),
        "seq_ordering": config.value("batching", None),
        "shuffle_frames_of_nseqs": config.int("shuffle_frames_of_nseqs", 0) or None,
        "min_chunk_size": config.opt_typed_value("min_chunk_size", 0) or None,
        "chunking_variance": config.float("chunking_variance", 0),
    }
    for key, value in from_config.items():
        if kwargs.get(key) is None:
            kwargs.pop(key, None)
            if value is not None:
                kwargs[key] = value


def eval_kwargs(config: Any) -> dict[str, Any]:
    """Default options of a dataset for evaluation: sorted, and usually not chunked."""
    chunking = "0"
    if config.value("on_size_limit", "ignore") == "chunk":
        chunking = config.value("batch_size", "0")
    elif config.value("chunking", "0") == "1":
        chunking = "1"
    elif config.bool("chunk_eval", False):
        chunking = config.value("chunking", "0")
    return {"chunking": chunking, "seq_ordering": "sorted", "shuffle_frames_of_nseqs": 0}


def train_kwargs(config: Any) -> dict[str, Any]:
    """Default options of a dataset for training: one shard per rank, if the config says so."""
    if config.typed_value("torch_distributed") is None or not _shards_over_ranks(config):
        return {}
    rank, size = _torch_rank_and_size(config)
    return {"_num_shards": size, "_shard_index": rank}


def default_random_seed_offset(same_on_all_ranks: bool) -> int:
    """The offset where the dataset has none of its own: from the environment, or the config.

    Args:
        same_on_all_ranks: whether the dataset itself shares its data out over the ranks.
    """
    from_env = os.environ.get(RANDOM_SEED_OFFSET_ENV_VAR)
    if from_env is not None:
        return int(from_env)
    config = active_config()
    if not config:
        return 0
    base = config.int("dataset_random_seed_offset", 0)
    if same_on_all_ranks:
        return base
    if config.typed_value("torch_distributed") is not None:
        if _shards_over_ranks(config):
            return base
        return _torch_rank_and_size(config)[0] * _RANDOM_SEED_OFFSET_PER_RANK + base
    if config.is_true("use_horovod"):
        import returnn.tf.horovod

        context = returnn.tf.horovod.get_ctx(config=config)
        if context.is_dataset_distribution_random_seed_offset():
            return context.rank() * _RANDOM_SEED_OFFSET_PER_RANK + base
    return base


def _shards_over_ranks(config: Any) -> bool:
    import returnn.torch.distributed

    options = config.typed_value("torch_distributed")
    return returnn.torch.distributed.get_dataset_distribution(options) != "random_seed_offset"


def _torch_rank_and_size(config: Any) -> tuple[int, int]:
    dummy = config.typed_value("__debug_dummy_distributed_rank_and_size")
    if dummy is not None:
        return dummy
    import returnn.torch.distributed

    context = returnn.torch.distributed.get_ctx(config=config)
    return context.rank(), context.size()


def class_of_returnn(name: str) -> type | None:
    """RETURNN's dataset class of a name; None without RETURNN, or if it has none."""
    try:
        from returnn.datasets.basic import get_dataset_class
    except ImportError:
        return None
    return get_dataset_class(name)
