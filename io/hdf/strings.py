"""Lists of strings in HDF files as Arrow arrays."""

from __future__ import annotations

import h5py
import pyarrow as pa

from ..errors import SourceFormatError


def read_strings(dataset: h5py.Dataset, path: str, entry: str, what: str) -> pa.StringArray:
    """A list of strings, each up to its first NUL byte as in RETURNN.

    Args:
        dataset: strings of fixed or variable length, one axis.
        path, entry: for the message of an error.
        what: what one of the strings is.

    Raises:
        SourceFormatError: if it is no list of strings, or one is not UTF-8.
    """
    if h5py.check_string_dtype(dataset.dtype) is None or len(dataset.shape or ()) != 1:
        raise SourceFormatError(
            f"{entry} must be a list of strings",
            path,
            entry=entry,
            found=f"{dataset.dtype}, shape {dataset.shape}",
        )
    values = dataset[...]
    if values.dtype.kind == "O":
        values = [value.partition(b"\0")[0] for value in values.tolist()]
    array = pa.array(values, pa.binary())
    if isinstance(array, pa.ChunkedArray):  # as Arrow makes it of more than 16 MiB
        array = array.combine_chunks()
    try:
        return array.cast(pa.string())
    except pa.ArrowInvalid as error:
        raise SourceFormatError(
            f"a {what} is not UTF-8", path, entry=entry, found=str(error)
        ) from error
