"""Opening HDF files that are not trusted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import h5py
import numpy as np

from ..errors import (
    SeqshardError,
    SourceFormatError,
    SourceNotFoundError,
    UnsupportedPayloadError,
)

CHUNK_CACHE_BYTES = 32 << 20
# Numbers of at most 8 bytes (16 for complex ones) and fixed-length bytes: wider floats differ from
# machine to machine.
_STORABLE_KINDS = {"i": 8, "u": 8, "f": 8, "b": 1, "c": 16}
# No filter shrinks real data further; a header that claims more would only exhaust the memory.
_MAX_EXPANSION = 1 << 16


def open_file(path: str) -> h5py.File:
    """Opens a local HDF file for reading, without locks (network file systems refuse them).

    Raises:
        SourceNotFoundError: if there is no such file.
        SourceFormatError: if it is not HDF, or truncated.
    """
    try:
        return _open(path, locking=False)
    except FileNotFoundError as error:
        raise SourceNotFoundError("there is no such file", path) from error
    except OSError as error:
        raise SourceFormatError(
            f"this is not a complete HDF file: {error}", path, hint="Write or copy it again."
        ) from error


def _open(path: str, locking: bool | None) -> h5py.File:
    try:
        return h5py.File(path, "r", locking=locking, rdcc_nbytes=CHUNK_CACHE_BYTES)
    except OSError as error:
        # Somebody in this process, for example RETURNN, has the file open with locks.
        if locking is False and "locking flag" in str(error):
            return _open(path, locking=None)
        raise


@contextlib.contextmanager
def damage_errors(path: str, entry: str | None = None) -> Iterator[None]:
    """Turns what h5py raises over a damaged file, which is nearly anything, into a typed error.

    Raises:
        SourceFormatError: naming the file and the entry.
    """
    try:
        yield
    except SeqshardError:
        raise
    except (OSError, RuntimeError, KeyError, IndexError, TypeError, ValueError) as error:
        text = error.args[0] if error.args else type(error).__name__
        raise SourceFormatError(f"this HDF file is damaged: {text}", path, entry) from error


def get_dataset(file: h5py.File, name: str) -> h5py.Dataset | None:
    """The dataset of that name, or None if it is absent.

    Raises:
        SourceFormatError: if a link on the way leaves the file, if the data are stored outside, or
            if it is no dataset.
    """
    found = _get(file, name)
    if found is None:
        return None
    if not isinstance(found, h5py.Dataset):
        raise SourceFormatError(
            "this is not a dataset", file.filename, entry=name, found=type(found).__name__
        )
    refuse_outside(found, file.filename, name)
    return found


def refuse_outside(dataset: h5py.Dataset, path: str, entry: str) -> None:
    """Raises `SourceFormatError` if the data of a dataset are not in its file."""
    if dataset.external or dataset.is_virtual:
        raise SourceFormatError(
            "data stored outside the file are refused",
            path,
            entry=entry,
            hint="Store the data in the file itself.",
        )


def check_storable(dtype: np.dtype, path: str, entry: str) -> None:
    """Raises `UnsupportedPayloadError` if a shard cannot hold elements of this type."""
    if dtype.kind != "S" and dtype.itemsize > _STORABLE_KINDS.get(dtype.kind, 0):
        raise UnsupportedPayloadError(
            "elements of this type cannot be stored in shards",
            path,
            entry=entry,
            expected="numbers of up to 64 bits, or fixed-length bytes",
            found=str(dtype),
        )


def check_stored_size(dataset: h5py.Dataset, path: str, entry: str) -> None:
    """Raises `SourceFormatError` if a dataset claims far more data than the file stores of it."""
    claimed, stored = dataset.size * dataset.dtype.itemsize, dataset.id.get_storage_size()
    if claimed and claimed // _MAX_EXPANSION >= stored:
        raise SourceFormatError(
            "the file holds less data than it claims",
            path,
            entry=entry,
            expected=f"{claimed} bytes",
            found=f"{stored} bytes stored",
        )


def get_group(file: h5py.File, name: str) -> h5py.Group | None:
    """The group of that name, or None if it is absent.

    Raises:
        SourceFormatError: if a link on the way leaves the file, or if it is no group.
    """
    found = _get(file, name)
    if found is not None and not isinstance(found, h5py.Group):
        raise SourceFormatError(
            "this is not a group", file.filename, entry=name, found=type(found).__name__
        )
    return found


def _get(file: h5py.File, name: str) -> h5py.Dataset | h5py.Group | h5py.Datatype | None:
    parts = name.split("/")
    for depth in range(len(parts)):
        prefix = "/".join(parts[: depth + 1])
        if depth and not isinstance(file["/".join(parts[:depth])], h5py.Group):
            return None
        link = file.get(prefix, getlink=True)
        if link is None:
            return None
        if not isinstance(link, h5py.HardLink):
            raise SourceFormatError(
                "links that may leave the file are refused",
                file.filename,
                entry=prefix,
                found=type(link).__name__,
                hint="Store the data in the file itself.",
            )
    return file[name]
