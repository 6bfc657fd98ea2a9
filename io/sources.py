"""One interface for all kinds of sources, and the table of the kinds."""

from __future__ import annotations

import os
from types import TracebackType
from typing import Protocol, Self

import numpy as np

from .errors import ConfigError
from .records import SourceIndex, StreamSpec
from .storage import is_url


class Source(Protocol):
    """An opened source file of one stream. Read-only, and used by one thread at a time."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def index(self) -> SourceIndex:
        """Lists the sequences without decoding their payload.

        Raises:
            SourceFormatError: if the file as a whole is damaged. A damaged entry is no exception:
                it goes to `SourceIndex.damaged`.
        """
        ...

    def read_many(
        self,
        position: np.ndarray,
        length: np.ndarray,
        num_bytes: np.ndarray,
        raw_bytes: np.ndarray,
        out: np.ndarray,
        start: np.ndarray,
    ) -> None:
        """Copies or decodes sequences into one array.

        Sequence i, as `index` described it, goes to `out[start[i] : start[i] + length[i]]`.

        Args:
            position, length, num_bytes, raw_bytes: int64 columns of `SourceIndex`, any order.
            out: array [frames, *shape] of the stream's format, C-contiguous.
            start: int64, the first frame of each sequence in `out`.

        Raises:
            SourceFormatError: with `position` set to that of the sequence, if a payload does not
                decode to what its headers promise.
        """
        ...


def open_source(
    spec: StreamSpec, path: str, recover: bool = False, num_bytes: int | None = None
) -> Source:
    """Opens a source file as its stream's kind demands.

    Args:
        spec: the stream.
        path: file, URL, or local folder that is a Sprint archive.
        recover: whether to take what is intact of an archive that was never closed.
        num_bytes: the size of a remote file, if it is known.
    """
    if is_url(path):
        from .remote_source import open_remote

        return open_remote(spec, path, num_bytes, recover)
    match spec.source:
        case "sprint-features" | "sprint-alignment" if os.path.isdir(path):
            from .sprint.directory_source import DirectoryAlignmentSource, DirectoryFeatureSource

            if spec.source == "sprint-features":
                return DirectoryFeatureSource(path, spec.encoding)
            return DirectoryAlignmentSource(path, spec, spec.encoding)
        case "sprint-features":
            from .sprint.source import FeatureSource

            return FeatureSource(path, recover=recover, encoding=spec.encoding)
        case "sprint-alignment":
            from .sprint.source import AlignmentSource

            return AlignmentSource(path, spec, recover=recover, encoding=spec.encoding)
        case "hdf":
            from .hdf.source import HdfSource

            return HdfSource(path, spec.key)
        case "nextgen-hdf":
            from .hdf.nextgen_source import NextGenSource

            return NextGenSource(path, spec.key)
        case "extern-sprint":
            from .hdf.source import HdfSource

            return HdfSource(path, spec.name)  # a spool: see io/sprint/spool.py
        case kind:
            raise ConfigError(
                f"unknown source kind {kind!r} of stream {spec.name!r}",
                expected="sprint-features, sprint-alignment, hdf, nextgen-hdf or extern-sprint",
            )
