"""Local copies of files from slow storage, in the options of datasets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..io.file_cache import FileCache, Lease

__all__ = ["CachedFile", "FileCache", "Lease", "resolve_cached_files"]


@dataclass(frozen=True, slots=True)
class CachedFile:
    """Stands for a file in the options of a dataset: `init_dataset` puts a local copy there.

    Attributes:
        filename: path or URL of the original.
    """

    filename: str


def resolve_cached_files(options: Any, cache: FileCache | None = None) -> tuple[Any, list[Lease]]:
    """Puts local copies in the place of every `CachedFile`.

    Args:
        options: options of a dataset: any nesting of dicts, lists and tuples. RETURNN's
            `CachedFile` is recognized too.
        cache: default: `FileCache()`.

    Returns:
        The options with paths, and what keeps the copies in place.
    """
    leases: list[Lease] = []
    return _resolve(options, cache or FileCache(), leases), leases


def _resolve(value: Any, cache: FileCache, leases: list[Lease]) -> Any:
    if type(value).__name__ == "CachedFile":
        leases.append(cache.get(value.filename))
        return leases[-1].paths[0]
    if type(value) is dict:
        return {key: _resolve(item, cache, leases) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_resolve(item, cache, leases) for item in value)
    return value
