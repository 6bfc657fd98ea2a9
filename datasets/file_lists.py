"""Lists of files, and trees of files, with their sizes; and their even distribution.

A file tree is a path, or a dict, list or tuple of file trees: files that belong together.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ..io import storage
from ..io.errors import ConfigError, SourceFormatError
from ..io.storage import read_bytes

FileTree = Any


@dataclass(frozen=True)
class FileList:
    """Files (or trees of files) in their original order.

    Attributes:
        files: the trees.
        sizes: bytes of all files of each tree; None as long as nobody asked.
    """

    files: list[FileTree]
    sizes: tuple[int, ...] | None = None

    def with_sizes(self) -> FileList:
        """The same list with sizes; looks at every file unless they are known.

        Raises:
            SourceNotFoundError: if a file does not exist.
        """
        if self.sizes is not None:
            return self
        return FileList(self.files, tuple(sum(map(_size, leaves(tree))) for tree in self.files))


def read_file_list(files: Any) -> FileList:
    """Reads a list of files.

    Args:
        files: the list itself; a function that gives it; or the path of a text file (one file a
            line; empty lines and those with "#" at the beginning do not count), of a JSON file, of
            a Python file with one literal, or of the manifest.json of a built dataset.

    Raises:
        ConfigError: if it is none of these.
        SourceFormatError, SourceNotFoundError: if the file that holds the list is damaged or
            missing.
        ManifestError: if a manifest is damaged.
    """
    if callable(files):
        files = files()
    if isinstance(files, str | os.PathLike):
        return _read(os.fspath(files))
    if not isinstance(files, list):
        raise ConfigError("files must be a list", found=type(files).__name__)
    return FileList(files)


def leaves(tree: FileTree) -> list[str]:
    """The paths in a file tree; of dicts in the order of their keys."""
    if isinstance(tree, dict):
        return [leaf for key in sorted(tree) for leaf in leaves(tree[key])]
    if isinstance(tree, list | tuple):
        return [leaf for item in tree for leaf in leaves(item)]
    return [os.fspath(getattr(tree, "filename", tree))]


def distribute_evenly(sizes: Sequence[int], num_bins: int) -> list[int]:
    """Cuts a sequence of files into bins of about the same size, none of them empty.

    The bins are those of RETURNN's `DistributeFilesDataset`: filled one after the other up to the
    average of what was left when the bin was begun, and the file that crosses it goes where the
    bin comes closer to that average.

    Args:
        sizes: sizes of the files in their order.
        num_bins: number of bins.

    Returns:
        Where each bin begins, and the number of files: num_bins + 1 numbers.

    Raises:
        ConfigError: if there are fewer files than bins.
    """
    if len(sizes) < num_bins:
        raise ConfigError(
            "there are fewer files than parts (partition_epoch times shards)",
            expected=f"at least {num_bins} files",
            found=f"{len(sizes)}",
        )
    starts = [0]
    filled = 0
    left = sum(sizes)
    target = left / num_bins
    for index, size in enumerate(sizes):
        left -= size
        bins_left = num_bins - len(starts)
        if bins_left == 0:
            break
        if len(sizes) - index <= bins_left:
            starts.append(index)
            filled = size
        elif filled + size <= target:
            filled += size
            continue
        elif starts[-1] == index or abs(filled + size - target) <= abs(filled - target):
            starts.append(index + 1)
            filled = 0
        else:
            starts.append(index)
            filled = size
        target = left / (num_bins - len(starts) + 1)
    return [*starts, len(sizes)]


def _size(path: str) -> int:
    return storage.stamp(path).num_bytes


def _read(path: str) -> FileList:
    readers: dict[str, Callable[[str], Iterator[str] | list]] = {
        ".txt": _read_lines,
        ".py": _read_literal,
        ".json": _read_json,
    }
    extension = os.path.splitext(path)[1]
    if extension not in readers:
        raise ConfigError(
            "unknown kind of a list of files", path, expected=", ".join(readers), found=extension
        )
    found = readers[extension](path)
    if isinstance(found, dict) and found.get("format") == "seqshard":
        return _read_manifest(path)
    if not isinstance(found, list):
        raise SourceFormatError(
            "this is no list of files", path, expected="list", found=type(found).__name__
        )
    return FileList(found)


def _read_lines(path: str) -> list[str]:
    try:
        lines = map(str.strip, read_bytes(path).decode("utf-8").splitlines())
    except UnicodeDecodeError as error:
        raise SourceFormatError("the text is not UTF-8", path, position=error.start) from error
    return [line for line in lines if line and not line.startswith("#")]


def _read_literal(path: str) -> Any:
    try:
        return ast.literal_eval(read_bytes(path).decode("utf-8").strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise SourceFormatError(f"this is no Python literal: {error}", path) from error


def _read_json(path: str) -> Any:
    try:
        return msgspec.json.decode(read_bytes(path))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SourceFormatError(f"this is no JSON: {error}", path) from error


def _read_manifest(path: str) -> FileList:
    from ..io.manifest import folder_of, load_manifest

    manifest = load_manifest(path)
    folder = folder_of(path)
    return FileList(
        [storage.join(folder, shard.path) for shard in manifest.shards],
        tuple(shard.file_bytes for shard in manifest.shards),
    )
