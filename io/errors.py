"""Typed errors. Every message says what is wrong, where, found versus expected, and what to do.

All fields are positional arguments of the exception, so that an error survives pickling (Beam
workers and data-loader processes send exceptions to their parents) and can be relayed as text.
"""

from __future__ import annotations

import re
from typing import ClassVar

EXIT_FAILED = 1
EXIT_USAGE = 2

# A port is no password, and the "@" of a name behind it no end of one.
_USER_INFO = re.compile(r"(://)(?:[^\s@/:?]*:(?!\d+(?:/|$))[^\s@?]*|[^\s@/?]+)@")
_SECRET_NAMES = "sig|token|credential|secret|passw|pwd|key|auth|access"
_SECRET_VALUE = re.compile(rf"([?&][\w.%-]*(?:{_SECRET_NAMES})[\w.%-]*=)[^&\s\"'<>]+", re.I)


def redact(text: str) -> str:
    """The text without the secrets of the URLs in it: user names, passwords, signatures.

    >>> redact("sftp://me:secret@host/a and https://host/b?X-Amz-Signature=0f&part=1")
    'sftp://***@host/a and https://host/b?X-Amz-Signature=***&part=1'
    """
    if "://" not in text:
        return text
    return _SECRET_VALUE.sub(r"\1***", _USER_INFO.sub(r"\1***@", text))


class SeqshardError(Exception):
    """Base of all errors that the user can do something about. No text in it has a URL's secrets.

    Args:
        what: one clause that says what is wrong.
        path: file or URL.
        entry: the item inside the file: an archive entry, an HDF dataset, a sequence tag, a line.
        position: byte position inside the file.
        expected: what should have been there.
        found: what was there instead.
        hint: what to do about it.
    """

    exit_code: ClassVar[int] = EXIT_FAILED

    def __init__(
        self,
        what: str,
        path: str | None = None,
        entry: str | None = None,
        position: int | None = None,
        expected: str | None = None,
        found: str | None = None,
        hint: str | None = None,
    ) -> None:
        # Plain values: a relayed error travels as JSON, which knows neither paths nor numpy.
        what, path, entry, expected, found, hint = (
            None if text is None else redact(str(text))
            for text in (what, path, entry, expected, found, hint)
        )
        position = None if position is None else int(position)
        super().__init__(what, path, entry, position, expected, found, hint)
        self.what = what
        self.path = path
        self.entry = entry
        self.position = position
        self.expected = expected
        self.found = found
        self.hint = hint

    def __str__(self) -> str:
        return self._text(self.path)

    @property
    def reason(self) -> str:
        """The text without the file, for where that is named already."""
        return self._text(None)

    def _text(self, path: str | None) -> str:
        where = [path] if path is not None else []
        if self.entry is not None:
            where.append(f"entry {self.entry!r}")
        if self.position is not None:
            where.append(f"byte {self.position}")
        text = f"{', '.join(where)}: {self.what}" if where else self.what
        if self.expected is not None and self.found is not None:
            text += f" (expected {self.expected}, found {self.found})"
        elif self.expected is not None:
            text += f" (expected {self.expected})"
        elif self.found is not None:
            text += f" (found {self.found})"
        return f"{text}. {self.hint}" if self.hint else text


class ConfigError(SeqshardError, ValueError):
    """The command line or the configuration file is wrong."""

    exit_code = EXIT_USAGE


class SourceNotFoundError(SeqshardError, ValueError):
    """A file that the configuration or a bundle names does not exist, or a glob matches nothing."""

    exit_code = EXIT_USAGE


class SourceFormatError(SeqshardError, ValueError):
    """A source file is damaged, or not what it claims to be."""


class UnsupportedPayloadError(SourceFormatError):
    """The data is well-formed but of a type that this reader does not decode."""


class ShapeMismatchError(SourceFormatError):
    """Dimension or element type differ between entries or files of one stream."""


class DuplicateSequenceError(SeqshardError, ValueError):
    """A tag occurs more than once in one stream."""


class MissingSequenceError(SeqshardError, KeyError):
    """A tag is not in every stream, or not in a dataset."""


class PlanError(SeqshardError, ValueError):
    """No shards can be planned: for example when no sequence is left."""


class OutputError(SeqshardError):
    """The output cannot be written: no permission, no space, or an incomplete set of shards."""


class OutputFolderError(OutputError):
    """The folder that --output names cannot be created or written to."""

    exit_code = EXIT_USAGE


class OutputExistsError(SeqshardError):
    """The output folder holds another dataset."""

    exit_code = EXIT_USAGE


class ShardIntegrityError(SeqshardError):
    """A file of a built dataset does not have the content that its manifest promises."""


class ManifestError(SeqshardError, ValueError):
    """manifest.json is missing, malformed, or names a path outside its folder."""


class ManifestVersionError(ManifestError):
    """The dataset was written by a format version that this reader does not know."""


class StaleStateError(SeqshardError, ValueError):
    """A saved reader state belongs to another dataset or to other options."""


class TrainerError(SeqshardError):
    """A RASR process that sends sequences died, hangs, or does not keep to the protocol."""


class JobError(SeqshardError):
    """A cluster gave a job up: it lost a worker, a server, or itself, or somebody cancelled it."""


class StorageError(SeqshardError):
    """A remote store cannot be reached, or keeps failing."""


class CacheFullError(OutputError):
    """A file does not fit into the cache of local copies."""


class CacheBusyError(CacheFullError):
    """A file does not fit into the cache beside those that are in use now."""
