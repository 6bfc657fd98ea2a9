"""Opening HDF files that are not trusted."""

from __future__ import annotations

import h5py

from ..errors import SourceFormatError, SourceNotFoundError

CHUNK_CACHE_BYTES = 32 << 20


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


def get_dataset(file: h5py.File, name: str) -> h5py.Dataset | None:
    """The dataset of that name, or None if it is absent.

    Raises:
        SourceFormatError: if a link on the way leaves the file, or the data are stored outside.
    """
    parts = name.split("/")
    for depth in range(len(parts)):
        prefix = "/".join(parts[: depth + 1])
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
    found = file[name]
    if not isinstance(found, h5py.Dataset):
        raise SourceFormatError(
            "this is not a dataset", file.filename, entry=name, found=type(found).__name__
        )
    if found.external or found.is_virtual:
        raise SourceFormatError(
            "data stored outside the file are refused",
            file.filename,
            entry=name,
            hint="Store the data in the file itself.",
        )
    return found
