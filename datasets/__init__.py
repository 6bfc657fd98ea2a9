"""Training-time readers. Light: no Beam, no torch, no RETURNN.

The names of RETURNN's datasets are here, with the same options and the same behaviour. Each is
loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from .registry import DATASET_CLASSES, get_dataset_class, init_dataset

_EXPORTS = {
    **DATASET_CLASSES,
    "Batch": "batching",
    "BatchSetGenerator": "batching",
    "CachedFile": "file_cache",
    "DatasetSeq": "seq",
    "FeatureSequenceStreamParser": "stream_parsers",
    "FileCache": "file_cache",
    "HDFDatasetWriter": "dump",
    "NumbersDict": "numbers_dict",
    "OptionalNotImplementedError": "access",
    "SegmentAlignmentStreamParser": "stream_parsers",
    "SimpleHDFWriter": "writers",
    "SparseStreamParser": "stream_parsers",
    "SprintCacheReader": "sprint_cache",
    "StreamParser": "stream_parsers",
}

__all__ = ["get_dataset_class", "init_dataset", *_EXPORTS]


def __getattr__(name: str) -> Any:
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{module}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
