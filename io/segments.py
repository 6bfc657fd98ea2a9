"""Lists of sequence tags: one per line, plain or gzip."""

from __future__ import annotations

import functools
import gzip
import zlib

import pyarrow as pa

from . import storage
from .errors import SourceFormatError


def load_segments(path: str) -> pa.StringArray:
    """The tags of a list file, in file order; blank lines and lines that start with # are skipped.

    Raises:
        SourceFormatError: if it is not UTF-8 text or not valid gzip.
    """
    stamp = storage.stamp(path)
    return _load(path, stamp.num_bytes, stamp.version)


@functools.lru_cache(maxsize=4)
def _load(path: str, _num_bytes: int, _version: str) -> pa.StringArray:
    data = storage.read_bytes(path)
    try:
        if path.endswith(".gz"):
            data = gzip.decompress(data)
        lines = (line.strip() for line in data.decode("utf-8").splitlines())
    except (UnicodeDecodeError, OSError, EOFError, zlib.error) as error:
        raise SourceFormatError(f"this is not a list of tags: {error}", path) from error
    return pa.array([line for line in lines if line and not line.startswith("#")], pa.string())
