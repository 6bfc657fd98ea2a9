"""The NextGen layout of shards: one HDF dataset per sequence and stream.

What stock RETURNN's `NextGenHDFDataset` and `SiameseHDFDataset` open: `seq_names`, and for every
stream `streams/<name>` with the attribute `parser`, the group `data` with the sequences ("/" in a
tag is "\\" there), and `feature_names`, whose size is the number of classes. Classes can be stored
as runs of equal ones, which readers expand. No times are stored: equal content gives equal bytes.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

import h5py
import numpy as np

from ..errors import PlanError
from ..records import StreamFormat
from .layout import fixed_length
from .nextgen_source import FEATURES, RUNS, SPARSE, link_name

RUN_DTYPE = np.dtype("<i4")


def check_streams(streams: Mapping[str, StreamFormat], runs: Container[str] = ()) -> None:
    """Checks what is to be stored.

    Args:
        streams: their formats.
        runs: those that are to be stored as runs.

    Raises:
        PlanError: if a stream is neither features nor classes as this layout has them.
    """
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
        if name in runs and not (classes and np.can_cast(stream.dtype, RUN_DTYPE)):
            raise PlanError(
                f"stream {name!r} cannot be stored as a segment alignment",
                expected=f"classes that fit into {RUN_DTYPE.name}",
                found=f"{stream.dtype}, {stream.dim} {'classes' if classes else 'features'}",
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
    file: h5py.File,
    streams: Mapping[str, StreamFormat],
    tags: Sequence[bytes],
    runs: Container[str] = (),
) -> None:
    """Writes everything but the sequences into an empty file."""
    file.create_dataset("seq_names", data=fixed_length(tags))
    for name in sorted(streams):
        stream = streams[name]
        group = file.create_group(f"streams/{name}")
        parser = RUNS if name in runs else SPARSE if stream.sparse else FEATURES
        group.attrs["parser"] = parser
        group.create_group("data")
        if stream.labels is not None:
            labels = fixed_length([label.encode("utf-8") for label in stream.labels])
            group.create_dataset("feature_names", data=labels)
        elif stream.sparse:
            # Only its size says something; no room is made for what would be in it.
            group.create_dataset("feature_names", (stream.dim,), "S1")


def encode_runs(classes: np.ndarray) -> np.ndarray:
    """Class and number of frames of every run of equal classes: int32 [runs, 2]."""
    begin = np.flatnonzero(np.diff(classes, prepend=classes[:1]))
    begin = np.concatenate([np.zeros(min(1, len(classes)), np.int64), begin])
    count = np.diff(begin, append=len(classes))
    return np.stack([classes[begin], count], axis=1).astype(RUN_DTYPE)


class SequenceWriter:
    """Writes the sequences of one stream.

    Args:
        file: with the stream's group in it.
        name: of the stream.
        stream: its format.
        as_runs: whether to store runs of equal classes.
    """

    def __init__(
        self, file: h5py.File, name: str, stream: StreamFormat, as_runs: bool = False
    ) -> None:
        self._group = file[f"streams/{name}/data"].id
        self._as_runs = as_runs
        dtype = RUN_DTYPE if as_runs else np.dtype(stream.dtype)
        self._type = h5py.h5t.py_create(dtype, logical=True)
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
        if self._as_runs:
            frames = encode_runs(frames)
        space = h5py.h5s.create_simple(frames.shape)
        dataset = h5py.h5d.create(self._group, name, self._type, space, self._creation)
        if frames.size:
            dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, frames, self._type)
