"""Bundles: text files that list archives."""

from __future__ import annotations

import os
from typing import Literal

from .. import storage
from ..errors import SourceFormatError, SourceNotFoundError

BUNDLE_SUFFIX = ".bundle"
RelativeTo = Literal["bundle", "cwd"]


def read_bundle(path: str, relative_to: RelativeTo = "bundle") -> list[str]:
    """The archives of a bundle and of the bundles in it, each once, in the order of the text.

    Names are separated by white space, as in RASR; there are no comments.

    Args:
        path: a file or URL whose name ends in ".bundle".
        relative_to: what relative names are relative to: the folder of the bundle (RETURNN), or
            the working directory (RASR).

    Raises:
        SourceNotFoundError: if the bundle or a file that it names does not exist.
        SourceFormatError: if a bundle contains itself, or is no text.
    """
    archives: dict[str, None] = {}
    _collect(str(path), relative_to, archives, set(), open_bundles=())
    return list(archives)


def _collect(
    path: str,
    relative_to: RelativeTo,
    archives: dict[str, None],
    done: set[str],
    open_bundles: tuple[str, ...],
) -> None:
    """Adds what a bundle lists that is not in `archives` yet, unless the bundle is in `done`."""
    real = path if storage.is_url(path) else os.path.realpath(path)
    if real in open_bundles:
        chain = " -> ".join((*open_bundles[open_bundles.index(real) :], real))
        raise SourceFormatError("a bundle contains itself", path, found=chain)
    if path in done:
        return  # without this, bundles that list each other's members take exponential time
    folder = os.path.dirname(path) if relative_to == "bundle" else ""
    for number, line in enumerate(_read_text(path).split("\n"), 1):
        for name in line.split():
            member = storage.join(folder, name)
            # To ask for remote ones would be a request each; reading tells as well.
            if not storage.is_url(member) and not os.path.exists(member):
                raise _missing_member(path, number, name, member, relative_to)
            if member.endswith(BUNDLE_SUFFIX):
                _collect(member, relative_to, archives, done, (*open_bundles, real))
            else:
                archives[member] = None
    done.add(path)


def _read_text(path: str) -> str:
    try:
        if storage.is_url(path):
            return storage.read_bytes(path).decode("utf-8")
        with open(path, "rb") as file:
            return file.read().decode("utf-8")
    except FileNotFoundError:
        raise SourceNotFoundError("there is no such bundle", path) from None
    except UnicodeDecodeError as error:
        raise SourceFormatError("a bundle must be UTF-8 text", path, position=error.start) from None


def _missing_member(
    path: str, number: int, name: str, member: str, relative_to: RelativeTo
) -> SourceNotFoundError:
    base = "the folder of the bundle" if relative_to == "bundle" else "the working directory"
    return SourceNotFoundError(
        f"line {number} names an archive that does not exist",
        path,
        name,
        found=f"nothing at {os.path.abspath(member)}",
        hint=f"Relative names are relative to {base}.",
    )
