"""The NextGen layout of shards: one HDF dataset per sequence and stream.

What stock RETURNN's `NextGenHDFDataset` and `SiameseHDFDataset` open: `seq_names`, and for every
stream `streams/<name>` with the attribute `parser`, the group `data` with the sequences ("/" in a
tag is "\\" there), and `feature_names`, whose size is the number of classes. No times are stored:
equal content gives equal bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import h5py
import numpy as np

from ..errors import PlanError
from ..records import StreamFormat
from .layout import fixed_length
from .nextgen_source import FEATURES, SPARSE, link_name


def check_streams(streams: Mapping[str, StreamFormat]) -> None:
    """Raises `PlanError` if a stream is neither features nor classes as this layout has them."""
    for name, stream in streams.items():
        integers = np.dtype(stream.dtype).kind in "iu"
        features = not stream.sparse and stream.ndim == 2 and stream.shape == (stream.dim,)
        classes = stream.sparse and integers and stream.ndim == 1 and stream.shape == ()
        labelled = stream.labels is None or len(stream.labels) == stream.dim
        if not labelled or not (features or classes):
            raise PlanError(
                f"stream {name!r} cannot be stored in the NextGen layout",
                expected="features [time, dim], or classes [time] with as many labels, if any",
                found=f"{stream.dtype}, dim {stream.dim}, {stream.ndim} axes"
                + ("" if stream.labels is None else f", {len(stream.labels)} labels"),
                hint="Leave --layout=nextgen out.",
            )


def link_names(tags: Sequence[bytes]) -> list[bytes]:
    """The names of the sequences' datasets.

    Raises:
        PlanError: if a tag makes no name, or two tags make the same one.
    """
    names = [link_name(tag) for tag in tags]
    known: dict[bytes, bytes] = {}
    for name, tag in zip(names, tags, strict=True):
        if name in (b"", b"."):
            raise PlanError(
                "this tag cannot be the name of an HDF dataset", entry=tag.decode("utf-8")
            )
        if known.setdefault(name, tag) != tag:
            raise PlanError(
                "two tags have the same name in the NextGen layout, where '/' is '\\'",
                entry=tag.decode("utf-8"),
                found=repr(known[name].decode("utf-8")),
            )
    return names


def create_streams(
    file: h5py.File, streams: Mapping[str, StreamFormat], tags: Sequence[bytes]
) -> None:
    """Writes everything but the sequences into an empty file."""
    file.create_dataset("seq_names", data=fixed_length(tags))
    for name in sorted(streams):
        stream = streams[name]
        group = file.create_group(f"streams/{name}")
        group.attrs["parser"] = SPARSE if stream.sparse else FEATURES
        group.create_group("data")
        if stream.labels is not None:
            labels = fixed_length([label.encode("utf-8") for label in stream.labels])
            group.create_dataset("feature_names", data=labels)
        elif stream.sparse:
            # Only its size says something; no room is made for what would be in it.
            group.create_dataset("feature_names", (stream.dim,), "S1")


class SequenceWriter:
    """Writes the sequences of one stream.

    Args:
        file: with the stream's group in it.
        name: of the stream.
        stream: its format.
    """

    def __init__(self, file: h5py.File, name: str, stream: StreamFormat) -> None:
        self._group = file[f"streams/{name}/data"].id
        self._dtype = np.dtype(stream.dtype)
        self._type = h5py.h5t.py_create(self._dtype, logical=True)
        self._shape = stream.shape
        self._creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        self._creation.set_layout(h5py.h5d.CONTIGUOUS)
        self._creation.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        self._creation.set_obj_track_times(False)

    def write(self, name: bytes, frames: np.ndarray) -> None:
        """Writes a sequence.

        Args:
            name: see `link_names`.
            frames: array [frames, *frame shape], C-contiguous.
        """
        space = h5py.h5s.create_simple(frames.shape)
        dataset = h5py.h5d.create(self._group, name, self._type, space, self._creation)
        if frames.size:
            dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, frames, self._type)
