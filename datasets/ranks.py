"""Which rank of a distributed training this process is."""

from __future__ import annotations

import os

from ..io.errors import ConfigError
from .returnn_config import active_config


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
