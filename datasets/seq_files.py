"""Small text files about sequences: lists of tags, and lengths by tag."""

from __future__ import annotations

import ast
import gzip
import json
import os
import zlib
from numbers import Real

from ..io.errors import ConfigError, SourceFormatError, SourceNotFoundError


def load_seq_list(path: str | os.PathLike[str]) -> list[str]:
    """Reads a list of sequence tags, one a line; gzip if the name ends in ".gz".

    Raises:
        ConfigError: for pickled lists, which could run any code.
        SourceNotFoundError, SourceFormatError: if the file is missing or damaged.
    """
    path = os.fspath(path)
    if path.removesuffix(".gz").endswith(".pkl"):
        raise ConfigError(
            "pickled lists of sequences are not read, as they can run any code",
            path,
            hint="Write one tag a line into a .txt or .txt.gz file.",
        )
    return _read_text(path).splitlines()


def load_seq_lens(path: str | os.PathLike[str]) -> dict[str, float]:
    """Reads sequence lengths by tag, written as a Python or JSON dict; gzip if so named.

    Raises:
        SourceNotFoundError, SourceFormatError: if the file is missing, damaged or something else.
    """
    path = os.fspath(path)
    text = _read_text(path)
    try:
        lens = json.loads(text)
    except ValueError:
        try:
            lens = ast.literal_eval(text.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
            raise SourceFormatError(
                f"this is not a dict of sequence lengths: {error}", path
            ) from error
    if not isinstance(lens, dict) or not all(isinstance(number, Real) for number in lens.values()):
        raise SourceFormatError(
            "this is not a dict of sequence lengths", path, expected="{tag: length}"
        )
    return lens


def _read_text(path: str) -> str:
    try:
        with gzip.open(path) if path.endswith(".gz") else open(path, "rb") as file:
            return file.read().decode("utf-8")
    except FileNotFoundError as error:
        raise SourceNotFoundError("the file does not exist", path) from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise SourceFormatError(f"damaged gzip data: {error}", path) from error
    except UnicodeDecodeError as error:
        raise SourceFormatError("the text is not UTF-8", path, position=error.start) from error
