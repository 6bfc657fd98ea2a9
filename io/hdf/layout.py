"""The skeleton of a shard: a RETURNN HDF file whose payload is still to be written.

All arrays are contiguous, aligned and allocated without fill, so that the payload can be written
and read at plain byte offsets. No times are stored: equal content gives equal bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import h5py
import numpy as np

from ..errors import PlanError
from ..records import StreamFormat

ALIGNMENT = 64
INPUT_STREAM = "data"


@dataclass(frozen=True, slots=True)
class ArrayPlace:
    """Where one stream's array lies in a shard: byte offset, and shape [frames, *frame shape]."""

    offset: int
    shape: tuple[int, ...]


def dataset_name(stream: str) -> str:
    """HDF name of a stream: "data" is `inputs`, all others are targets."""
    return "inputs" if stream == INPUT_STREAM else f"targets/data/{stream}"


def column_order(streams: Iterable[str]) -> list[str]:
    """Streams in the order of the columns of seqLengths: inputs first, then targets sorted."""
    return sorted(streams, key=lambda name: (name != INPUT_STREAM, name))


def length_table(lengths: Mapping[str, np.ndarray]) -> np.ndarray:
    """What `seqLengths` holds, int64 [sequences, columns], from the lengths of all streams.

    Where `data` is the only stream, a column of zeros follows: RETURNN expects one for the targets
    of files that have none, and its writers leave it so.
    """
    columns = [lengths[name] for name in column_order(lengths)]
    if list(lengths) == [INPUT_STREAM]:
        columns.append(np.zeros_like(columns[0]))
    return np.stack(columns, axis=1).astype(np.int64, copy=False)


def check_lengths(lengths: Mapping[str, np.ndarray]) -> None:
    """Raises `PlanError` if a sequence is too long to be counted in a shard and its index."""
    longest = max((int(values.max(initial=0)) for values in lengths.values()), default=0)
    if longest > np.iinfo(np.int32).max:
        raise PlanError(
            "a sequence is too long for the HDF layout",
            found=f"{longest} frames",
            hint="Set max_length in [sequences].",
        )


def create_skeleton(
    path: str,
    streams: Mapping[str, StreamFormat],
    lengths: Mapping[str, np.ndarray],
    tags: Sequence[bytes],
) -> dict[str, ArrayPlace]:
    """Creates a shard with everything but the payload.

    Args:
        path: local file; must not exist.
        streams: format of every stream.
        lengths: for every stream, int array [sequences] of frames.
        tags: UTF-8 tags, one per sequence.

    Returns:
        The place of every stream's array, in the order in which they lie in the file.

    Raises:
        PlanError: if a sequence is too long for the layout.
    """
    order = column_order(streams)
    check_lengths(lengths)
    table = length_table(lengths)
    options = {"alignment_threshold": 1, "alignment_interval": ALIGNMENT}
    with h5py.File(path, "x", **options) as file:
        _write_attributes(file, streams, table, order)
        file.create_dataset("seqLengths", data=table.astype("<i4"))
        file.create_dataset("seqTags", data=fixed_length(tags))
        _write_labels(file, streams)
        datasets = {
            name: _create_payload(file, name, streams[name], int(lengths[name].sum()))
            for name in order
        }
        places = {
            name: ArrayPlace(int(dataset.id.get_offset() or 0), tuple(map(int, dataset.shape)))
            for name, dataset in datasets.items()
        }
    return dict(sorted(places.items(), key=lambda item: item[1].offset))


def _write_attributes(
    file: h5py.File, streams: Mapping[str, StreamFormat], table: np.ndarray, order: list[str]
) -> None:
    inputs = streams.get(INPUT_STREAM)
    first_dim = streams[order[0]].dim
    file.attrs["inputPattSize"] = first_dim
    file.attrs["numDims"] = 1
    file.attrs["numLabels"] = next((s.dim for s in streams.values() if s.sparse), first_dim)
    file.attrs["numSeqs"] = len(table)
    file.attrs["numTimesteps"] = int(table[:, 0].sum()) if inputs is not None else 0


def _write_labels(file: h5py.File, streams: Mapping[str, StreamFormat]) -> None:
    targets = [name for name in streams if name != INPUT_STREAM]
    if targets:
        for group in ("targets/data", "targets/size", "targets/labels"):
            file.create_group(group)
    for name in sorted(streams):
        stream = streams[name]
        if name != INPUT_STREAM:
            file["targets/size"].attrs[name] = [stream.dim, stream.ndim]
        if stream.labels is not None:
            where = "labels" if name == INPUT_STREAM else f"targets/labels/{name}"
            labels = [label.encode("utf-8") for label in stream.labels]
            file.create_dataset(where, data=fixed_length(labels))


def fixed_length(values: Sequence[bytes]) -> np.ndarray:
    """Strings as HDF files of RETURNN's hold them: padded with NUL by at least one."""
    return np.array(values, dtype=f"S{max(map(len, values), default=0) + 1}")


def _create_payload(
    file: h5py.File, name: str, stream: StreamFormat, num_frames: int
) -> h5py.Dataset:
    creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    creation.set_layout(h5py.h5d.CONTIGUOUS)
    creation.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    creation.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    creation.set_obj_track_times(False)
    return file.create_dataset(
        dataset_name(name), (num_frames, *stream.shape), np.dtype(stream.dtype), dcpl=creation
    )
