"""Archives in folders as sources of a build. See `Source` in io/sources.py.

Every entry is a file of its own, so there is no table to read lengths from: indexing reads every
file. The position of a sequence is the number of its entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from types import TracebackType
from typing import Self

import numpy as np
import xxhash

from ..errors import SeqshardError, SourceFormatError
from ..records import SourceIndex, StreamFormat, StreamSpec
from . import features, labels
from .alignment import decode_alignment
from .directory import DirectoryArchive
from .mapping import located
from .source import find_format, label_fingerprint, label_format, load_classes

_GROUP_BYTES = 8 << 20

Fail = Callable[[int, SourceFormatError], SourceFormatError]


class _DirectorySource:
    """What features and alignments have in common.

    Args:
        path: local folder.
        encoding: of the names.
    """

    def __init__(self, path: str, encoding: str = "utf-8") -> None:
        self.path = str(path)
        self._encoding = encoding

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.__dict__.pop("_archive", None)

    @cached_property
    def _archive(self) -> DirectoryArchive:
        return DirectoryArchive(self.path, encoding=self._encoding)

    def index(self) -> SourceIndex:
        """See `Source.index`."""
        archive = self._archive
        entries = archive.sequences
        shapes = np.zeros((len(entries), 3), np.int64)
        errors: dict[int, SeqshardError] = {}
        for row, entry in enumerate(entries.tolist()):
            try:
                shapes[row] = self._measure(archive.payload(entry))
            except SourceFormatError as error:
                errors[row] = self._error(entry, error)
        found, strange = self._find_format(shapes, errors, lambda row: archive.label(entries[row]))
        errors |= {row: self._error(int(entries[row]), error) for row, error in strange.items()}
        keep = np.ones(len(entries), bool)
        keep[list(errors)] = False
        selected = np.zeros(len(archive), bool)
        selected[entries[keep]] = True
        table = archive.table.select(selected)
        return SourceIndex(
            format=found,
            tag=table.decode(self._encoding, self.path),
            position=np.flatnonzero(selected),
            length=shapes[keep, 0],
            num_bytes=table.stored,
            raw_bytes=np.where(table.compressed != 0, table.size, -1),
            fingerprint=self._fingerprint(),
            damaged=tuple(
                (archive.label(int(entries[row])), errors[row]) for row in sorted(errors)
            ),
        )

    def read_many(
        self,
        position: np.ndarray,
        length: np.ndarray,
        num_bytes: np.ndarray,
        raw_bytes: np.ndarray,
        out: np.ndarray,
        start: np.ndarray,
    ) -> None:
        """See `Source.read_many`."""
        for group, payloads in self._read_groups(position, num_bytes):
            size = np.array([len(payload) for payload in payloads], np.int64)
            at = position[group]

            def fail(row: int, error: SourceFormatError, at: np.ndarray = at) -> SourceFormatError:
                return self._error(int(at[row]), error)

            begin = np.cumsum(size) - size
            self._decode(b"".join(payloads), begin, size, length[group], out, start[group], fail)

    def _read_groups(
        self, position: np.ndarray, num_bytes: np.ndarray
    ) -> Iterator[tuple[slice, list[bytes]]]:
        """Consecutive rows with their payloads, in groups of bounded size."""
        first, total, payloads = 0, 0, list[bytes]()
        stored = self._archive.table.stored
        for row, (entry, due) in enumerate(zip(position.tolist(), num_bytes.tolist(), strict=True)):
            if entry >= len(stored) or stored[entry] != due:
                raise SourceFormatError(
                    "the folder is not as it was when it was indexed",
                    self.path,
                    self._archive.label(entry) if entry < len(stored) else None,
                    expected=f"{due} bytes",
                    found=f"{stored[entry]} bytes" if entry < len(stored) else "no such entry",
                )
            payloads.append(self._archive.payload(entry))
            total += len(payloads[-1])
            if total >= _GROUP_BYTES or row + 1 == len(position):
                yield slice(first, row + 1), payloads
                first, total, payloads = row + 1, 0, []

    def _error(self, entry: int, error: SourceFormatError) -> SourceFormatError:
        """The error with folder, entry, and position in the entry."""
        if error.path is not None:
            return error
        raw = self._archive.table.compressed[entry] == 0
        return located(error, self.path, self._archive.label(entry), 0, raw)

    def _fingerprint(self) -> str:
        table = self._archive.table
        hasher = xxhash.xxh3_128(np.ascontiguousarray(table.names))
        for values in (table.name_offset, table.size, table.compressed):
            hasher.update(np.ascontiguousarray(values))
        return hasher.hexdigest()

    def _measure(self, payload: bytes) -> tuple[int, int, int]:
        """Length, and what else `_find_format` needs, of one entry."""
        raise NotImplementedError

    def _find_format(
        self, shapes: np.ndarray, errors: dict[int, SeqshardError], label: Callable[[int], str]
    ) -> tuple[StreamFormat | None, dict[int, SourceFormatError]]:
        """The format of the stream, and the entries that do not have it."""
        raise NotImplementedError

    def _decode(
        self,
        data: bytes,
        begin: np.ndarray,
        size: np.ndarray,
        length: np.ndarray,
        out: np.ndarray,
        start: np.ndarray,
        fail: Fail,
    ) -> None:
        """Decodes payloads that lie in one buffer; arguments as of `LabelReader.read`."""
        raise NotImplementedError


class DirectoryFeatureSource(_DirectorySource):
    """A folder of feature matrices: one array [frames, dim] per sequence."""

    def _measure(self, payload: bytes) -> tuple[int, int, int]:
        return features.measure_payload(payload)

    def _find_format(
        self, shapes: np.ndarray, errors: dict[int, SeqshardError], label: Callable[[int], str]
    ) -> tuple[StreamFormat | None, dict[int, SourceFormatError]]:
        found, strange = find_format(features.Shapes(*shapes.T), errors, label)
        return found, dict(strange)

    def _decode(
        self,
        data: bytes,
        begin: np.ndarray,
        size: np.ndarray,
        length: np.ndarray,
        out: np.ndarray,
        start: np.ndarray,
        fail: Fail,
    ) -> None:
        copy = features.make_copier(out)
        columns = (begin.tolist(), size.tolist(), length.tolist(), start.tolist())
        for row, (at, stored, frames, first) in enumerate(zip(*columns, strict=True)):
            try:
                copy(data, at, stored, frames, first)
            except SourceFormatError as error:
                raise fail(row, error) from error


class DirectoryAlignmentSource(_DirectorySource):
    """A folder of alignments: one class per item and sequence.

    Args:
        path: local folder.
        spec: the stream, with its label files.
        encoding: of the names.

    Raises:
        ConfigError: if neither label files nor `spec.num_labels` tell the number of classes.
    """

    def __init__(self, path: str, spec: StreamSpec, encoding: str = "utf-8") -> None:
        super().__init__(path, encoding)
        self._classes = load_classes(spec)

    def _fingerprint(self) -> str:
        return label_fingerprint(super()._fingerprint(), self._classes)

    def _measure(self, payload: bytes) -> tuple[int, int, int]:
        return len(labels.hard_labels(decode_alignment(payload), self._classes.soft)[0]), 0, 0

    def _find_format(
        self, shapes: np.ndarray, errors: dict[int, SeqshardError], label: Callable[[int], str]
    ) -> tuple[StreamFormat | None, dict[int, SourceFormatError]]:
        return label_format(self._classes), {}

    def _decode(
        self,
        data: bytes,
        begin: np.ndarray,
        size: np.ndarray,
        length: np.ndarray,
        out: np.ndarray,
        start: np.ndarray,
        fail: Fail,
    ) -> None:
        labels.LabelReader(data, self._classes, fail).read(begin, size, length, out, start)
