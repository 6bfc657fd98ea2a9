"""Cutting sequences into chunks, and context around frames.

The semantics are those of RETURNN's `Dataset.iterate_seqs`, `_parse_chunking` and
`_sliding_window`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from ..io.errors import ConfigError
from .numbers_dict import NumbersDict

if TYPE_CHECKING:
    from .basic import Dataset

Chunk = tuple[int, NumbersDict, NumbersDict]

# User functions must accept further keyword arguments, so that later versions can pass more.
FORWARD_COMPATIBLE_KWARGS = {"__fwd_compat_arg": None}


def parse_chunking(
    chunking: Any,
) -> tuple[NumbersDict | None, NumbersDict | None, Callable[..., Iterable[Chunk]] | None]:
    """Parses the `chunking` option.

    Args:
        chunking: "size:step", a size, (size, step) with numbers or dicts per data key, None or 0
            for no chunking, or a function.

    Returns:
        Size, step (the size if not given) and None; or None, None and the function.

    Raises:
        ConfigError: if sizes or steps are not positive, or have different keys.
    """
    if callable(chunking):
        return None, None, chunking
    if isinstance(chunking, str):
        try:
            numbers = tuple(int(part) for part in chunking.split(":"))
        except ValueError as error:
            raise ConfigError(
                f"invalid chunking {chunking!r}", expected="SIZE or SIZE:STEP"
            ) from error
        chunking = numbers if len(numbers) > 1 else numbers[0]
    pair = chunking if isinstance(chunking, tuple | list) else (chunking, None)
    if len(pair) != 2:
        raise ConfigError(f"invalid chunking {chunking!r}", expected="a size and a step")
    size = NumbersDict(pair[0] or 0)
    step = NumbersDict(size if pair[1] in (None, 0) else pair[1])
    if size == 0:
        return size, step, None
    if size.min_value() <= 0:
        raise ConfigError(f"invalid chunking {chunking!r}", expected="positive chunk sizes")
    if sorted(step.keys()) != sorted(size.keys()):
        raise ConfigError(
            f"invalid chunking {chunking!r}", expected="the same keys in size and step"
        )
    if step.max_value() <= 0:
        raise ConfigError(f"invalid chunking {chunking!r}", expected="a positive step for some key")
    return size, step, None


def parse_context_window(context_window: Any) -> tuple[NumbersDict, NumbersDict]:
    """Frames to add on the left and on the right of a chunk, per data key.

    Args:
        context_window: total window per key (1 adds nothing, an even one adds more on the
            right), as a number for "data", a dict or a `NumbersDict`; or (left, right) dicts.

    Raises:
        ConfigError: for anything else.
    """
    if isinstance(context_window, tuple | list):
        if len(context_window) != 2 or not all(isinstance(side, dict) for side in context_window):
            raise ConfigError(
                f"invalid context_window {context_window!r}", expected="two dicts: left and right"
            )
        left, right = context_window
        return NumbersDict(numbers_dict=left), NumbersDict(numbers_dict=right)
    if context_window is None:
        context_window = {}
    elif isinstance(context_window, int):
        context_window = {"data": context_window}
    if not isinstance(context_window, dict | NumbersDict):
        context_window = NumbersDict(context_window)
    total = NumbersDict.max([NumbersDict(context_window), 1]) - 1
    left = total // 2
    return left, total - left


def sliding_window(frames: np.ndarray, padding: np.ndarray) -> np.ndarray:
    """Puts the neighbours of each frame beside it.

    Args:
        frames: [time, dim].
        padding: zeros [context, dim], the frames before the first and after the last one.

    Returns:
        Array [time, (2 * context + 1) * dim].
    """
    window = 2 * len(padding) + 1
    if not len(frames):
        return np.empty((0, window * frames.shape[1]), np.result_type(padding, frames))
    padded = np.concatenate([padding, frames, padding])
    view = np.lib.stride_tricks.sliding_window_view(padded, window, axis=0)
    return view.swapaxes(1, 2).reshape(len(frames), window * frames.shape[1])


def iterate_seqs(
    dataset: Dataset, recurrent_net: bool = True, used_data_keys: Iterable[str] | None = None
) -> Iterator[Chunk]:
    """Yields (seq_idx, start, end) for each chunk of each sequence; see `Dataset.iterate_seqs`."""
    if dataset.custom_chunking_func:
        yield from dataset.custom_chunking_func(
            dataset=dataset,
            seq_idx_start=0,
            recurrent_net=recurrent_net,
            used_data_keys=used_data_keys,
            **FORWARD_COMPATIBLE_KWARGS,
        )
        return
    size = NumbersDict(dataset.chunk_size if recurrent_net else 0)
    step = NumbersDict(dataset.chunk_step)
    keys = None if used_data_keys is None else sorted(used_data_keys)
    seq_idx = 0
    while dataset.is_less_than_num_seqs(seq_idx):
        length = dataset.get_seq_length(seq_idx)
        if size == 0:
            yield seq_idx, NumbersDict.constant_like(0, numbers_dict=length), length
        else:
            default_key = "data"
            seq_size, seq_step = size, step
            if keys is not None:
                length = NumbersDict({key: length[key] for key in keys})
                default_key = _default_key(keys, step)
                if dataset.chunking_variance > 0:
                    factor = 1.0 - dataset.rnd_seq_drop.random() * dataset.chunking_variance
                    seq_size, seq_step = _vary(size, step, keys, factor)
            for start, end in _chunks(
                length, seq_size, seq_step, dataset.min_chunk_size, default_key
            ):
                yield seq_idx, start, end
        seq_idx += 1


def _default_key(keys: list[str], step: NumbersDict) -> str:
    """The key that decides the number of chunks: "data" if possible, else the first one."""
    default_key = "data" if "data" in keys else keys[0]
    if step[default_key] > 0:
        return default_key
    moving = [key for key in keys if step[key] > 0]
    if not moving:
        raise ConfigError("the chunk step of all used data keys is zero", found=repr(step))
    return moving[0]


def _vary(
    size: NumbersDict, step: NumbersDict, keys: list[str], factor: float
) -> tuple[NumbersDict, NumbersDict]:
    """Scales chunk sizes and steps; keys with larger chunks keep their ratio to the smallest."""
    new_size, new_step = size.copy(), step.copy()
    for key in keys:
        new_size[key] = max(int(size[key] * factor), 1)
        new_step[key] = max(int(step[key] * factor), 1)
    smallest = min((key for key in keys if step[key] > 0), key=lambda key: (step[key], key))
    for key in keys:
        ratio, rest = divmod(size[key], size[smallest])
        if size[key] > size[smallest] and rest == 0:
            new_size[key] = new_size[smallest] * ratio
            new_step[key] = new_step[smallest] * ratio
    return new_size, new_step


def _chunks(
    length: NumbersDict,
    size: NumbersDict,
    step: NumbersDict,
    min_size: NumbersDict,
    default_key: str,
) -> Iterator[tuple[NumbersDict, NumbersDict]]:
    whole = _keys_taken_whole(length, size, step, min_size, default_key)
    start = NumbersDict.constant_like(0, numbers_dict=length)
    while length[default_key] > start[default_key]:
        chunk_start, chunk_end = start.copy(), NumbersDict.min([start + size, length])
        for key in whole:
            chunk_start[key], chunk_end[key] = 0, length[key]
        if length.value is None:
            chunk_start.value = chunk_end.value = None
        yield chunk_start, chunk_end
        start = start + step
        if any(length[key] - start[key] <= min_size[key] for key, _ in length.items()):
            break


def _keys_taken_whole(
    length: NumbersDict,
    size: NumbersDict,
    step: NumbersDict,
    min_size: NumbersDict,
    default_key: str,
) -> list[str]:
    """Keys of length 0 or 1, which every chunk gets whole; checks that the others fit together."""
    whole = []
    for key, _ in length.items():
        same_step = step[key] == step[default_key]
        if same_step and length[key] == length[default_key]:
            continue
        if length[key] <= 1:
            whole.append(key)
            continue
        counts = [
            (length[k] - (min_size[k] or 1)) // step[k] + 1 if step[k] else None
            for k in (key, default_key)
        ]
        if same_step or counts[0] != counts[1]:
            raise ConfigError(
                f"the data keys {key!r} and {default_key!r} do not give the same number of chunks",
                found=f"length {length}, chunk size {size}, step {step}, min_chunk_size {min_size}",
                hint="Chunk sizes can be given per key, and used_data_keys leaves keys out.",
            )
    return whole
