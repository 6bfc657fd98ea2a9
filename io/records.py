"""The values that travel between the stages of a build.

Plain frozen dataclasses; nothing in here reads, writes or knows Beam. Columns of many sequences
are numpy or Arrow arrays, never lists of objects.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from .errors import SeqshardError

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class StreamSpec:
    """One `[streams.NAME]` table of the configuration, checked and with its files resolved.

    Attributes:
        name: key of the stream in the dataset, for example "data" or "classes".
        source: kind of source: "sprint-features", "sprint-alignment", "hdf", "nextgen-hdf" or
            "extern-sprint".
        key: data key inside HDF sources ("data" means `inputs`), stream inside NextGen sources,
            target that a trainer sends ("data" means the features).
        allophones, state_tying, phonemes: paths of the label files of an alignment, or None.
        silence: the silence phoneme of an alignment.
        num_labels: number of classes where nothing else tells it (emission alignments, targets of
            a trainer), or None.
        soft: what to do with weighted alignments: "error", or "best" for the label of largest
            weight in each frame.
        trainer: name of the trainer that sends the stream, or None.
        encoding: of the names in Sprint archives.
    """

    name: str
    source: str
    key: str = "data"
    allophones: str | None = None
    state_tying: str | None = None
    phonemes: str | None = None
    silence: str = "[SILENCE]"
    num_labels: int | None = None
    soft: str = "error"
    trainer: str | None = None
    encoding: str = "utf-8"


@dataclass(frozen=True, slots=True)
class StreamFormat:
    """What one stream's arrays look like; must be the same in all files of the stream.

    Attributes:
        dtype: numpy name of the element type, for example "float32".
        dim: number of features (dense) or of classes (sparse).
        ndim: number of axes of one sequence's array including time; 1 for sparse.
        sparse: whether elements are class indices.
        labels: class names, or None.
        shape: the axes behind time, for example (40,); () for one value per frame.
    """

    dtype: str
    dim: int
    ndim: int
    sparse: bool
    labels: tuple[str, ...] | None = None
    shape: tuple[int, ...] = ()

    @property
    def frame_bytes(self) -> int:
        """Bytes of one frame in a shard."""
        return np.dtype(self.dtype).itemsize * int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class Layout:
    """What shards are like.

    Attributes:
        kind: "returnn" or "nextgen".
        runs: streams of classes that are stored as runs (segment alignments); only for "nextgen".
    """

    kind: str = "returnn"
    runs: tuple[str, ...] = ()


@dataclass(frozen=True)
class SourceIndex:
    """What a source file holds, read from its table and headers alone. Row i is sequence i.

    Attributes:
        format: format of the stream in this file; None if no sequence has a frame.
        tag: pa.StringArray.
        position: int64, first byte of the payload (archives) or first frame (HDF).
        length: int64, frames (labels, for an alignment).
        num_bytes: int64, bytes that the payload takes in the source.
        raw_bytes: int64, bytes of the payload after decompression; -1 where it is not compressed.
        fingerprint: hexadecimal hash of the tables that this index came from.
        damaged: entries that cannot be read, each with the error that says why. They are
            not among the rows.
    """

    format: StreamFormat | None
    tag: pa.StringArray
    position: np.ndarray
    length: np.ndarray
    num_bytes: np.ndarray
    raw_bytes: np.ndarray
    fingerprint: str
    damaged: tuple[tuple[str, SeqshardError], ...] = field(default=())
