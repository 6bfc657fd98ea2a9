"""Feature and alignment archives as sources of a build. See `Source` in io/sources.py."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Collection, Iterator
from functools import cached_property
from types import TracebackType
from typing import Self

import numpy as np
import xxhash

from ..errors import ConfigError, SeqshardError, ShapeMismatchError, SourceFormatError
from ..records import SourceIndex, StreamFormat, StreamSpec
from . import features, labels
from .alignment import decode_alignment
from .allophones import load_label_map
from .archive import Archive, Recover
from .mapping import HEADER_BYTES, Buffer, close_map, gather_file, inflate, located, open_map
from .packets import FEATURE_ELEMENTS
from .table import PAYLOAD_OFFSET, fetch_table

_HEAD_INPUT = 512
_GROUP = 2048
# Longer entries are read through the map.
_READ_BYTES = 4 << 20


class ArchiveSource:
    """What features and alignments have in common: the map, entries, errors, compression.

    The file table is read only by `index`, so that opening an archive to read some of its
    sequences costs nothing.

    Attributes:
        fetch: None, or what is called with byte ranges (begin, end) before they are read, as the
            file may have holes there.
    """

    fetch: Callable[[np.ndarray, np.ndarray], None] | None = None

    def __init__(self, path: str, recover: Recover, encoding: str) -> None:
        self.path = str(path)
        self._recover: Recover = recover
        self._encoding = encoding
        self._data = open_map(self.path)
        self._handle = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        close_map(self._data)
        os.close(self._handle)
        if "_archive" in self.__dict__:
            self._archive.close()

    @cached_property
    def _archive(self) -> Archive:
        if self.fetch is not None:
            fetch_table(self._data, self.fetch, scan=bool(self._recover))
        return Archive(self.path, encoding=self._encoding, recover=self._recover)

    def _read_heads(
        self, entries: np.ndarray, width: int
    ) -> tuple[np.ndarray, dict[int, SeqshardError]]:
        """uint8 [entries, width], the first bytes of each payload, and the errors so far."""
        table = self._archive.table
        begin = table.payload[entries]
        inside = (begin >= HEADER_BYTES + PAYLOAD_OFFSET) & (begin < len(self._data))
        if self.fetch is not None:
            self.fetch(begin[inside] - 4, begin[inside] + width)
        raw = gather_file(self._handle, self._data, np.where(inside, begin - 4, 0), 4 + width)
        checksum = np.ascontiguousarray(raw[:, :4]).view("<u4")[:, 0]
        errors: dict[int, SeqshardError] = dict(self._archive.damage(entries, checksum))
        heads = raw[:, 4:]
        for row in np.flatnonzero(table.compressed[entries]).tolist():
            if row not in errors:
                stop = int(begin[row] + table.compressed[entries[row]])
                try:
                    head = self._inflate_head(int(begin[row]), stop, width)
                except zlib.error as error:
                    what = f"the compressed data is damaged: {error}"
                    errors[row] = self._error(entries[row], SourceFormatError(what))
                else:
                    heads[row] = np.frombuffer(head.ljust(width, b"\0"), np.uint8)
        return heads, errors

    def _measure_rest(
        self,
        entries: np.ndarray,
        rows: np.ndarray,
        errors: dict[int, SeqshardError],
        measure: Callable[[int, Buffer], None],
    ) -> None:
        """Calls `measure` with the payload of entries whose headers do not tell enough."""
        if self.fetch is not None:
            begin = self._archive.table.payload[entries[rows]]
            self.fetch(begin - 4, begin + self._archive.table.stored[entries[rows]])
        for row in rows.tolist():
            if row not in errors:
                try:
                    measure(row, self._archive.payload(int(entries[row])))
                except SourceFormatError as error:
                    errors[row] = self._error(entries[row], error)

    def _build_index(
        self,
        entries: np.ndarray,
        length: np.ndarray,
        stream_format: StreamFormat | None,
        fingerprint: str,
        errors: dict[int, SeqshardError],
    ) -> SourceIndex:
        archive = self._archive
        damaged = tuple((archive.label(int(entries[row])), errors[row]) for row in sorted(errors))
        keep = np.ones(len(entries), bool)
        keep[list(errors)] = False
        selected = np.zeros(len(archive), bool)
        selected[entries[keep]] = True
        table = archive.table.select(selected)
        return SourceIndex(
            format=stream_format,
            tag=table.decode(self._encoding, self.path),
            position=table.payload,
            length=length[keep].astype(np.int64),
            num_bytes=table.stored,
            raw_bytes=np.where(table.compressed != 0, table.size, -1),
            fingerprint=fingerprint,
            damaged=damaged + archive.lost,
        )

    def _error(self, entry: int, error: SourceFormatError) -> SourceFormatError:
        """The error with the file, the entry, and the position in the file."""
        table, entry = self._archive.table, int(entry)
        if error.path is not None:
            return error
        raw = table.compressed[entry] == 0
        begin = int(table.payload[entry])
        return located(error, self.path, self._archive.label(entry), begin, raw)

    def _error_at(self, position: int, error: SourceFormatError) -> SourceFormatError:
        """The error with the file, the entry, and the position of the sequence."""
        name = None
        try:
            found = np.flatnonzero(self._archive.table.payload == position)
            name = self._archive.label(int(found[0])) if len(found) else None
        except SourceFormatError:
            pass  # a table that was damaged since it was indexed must not hide the first error
        return located(error, self.path, name, position, raw=False)

    def _check_inside(self, position: np.ndarray, num_bytes: np.ndarray) -> None:
        outside = np.flatnonzero((position < 0) | (position + num_bytes > len(self._data)))
        if len(outside):
            raise self._ends_before(int(position[outside[0]]), int(num_bytes[outside[0]]))
        if self.fetch is not None:
            self.fetch(position, position + num_bytes)

    def _ends_before(self, position: int, num_bytes: int) -> SourceFormatError:
        error = SourceFormatError(
            "the file ends before this sequence",
            expected=f"{num_bytes} bytes",
            found=f"{os.fstat(self._handle).st_size} bytes in the file",
            hint="Was it changed after it was indexed?",
        )
        return self._error_at(position, error)

    def _read(self, position: int, num_bytes: int, scratch: np.ndarray) -> tuple[Buffer, int]:
        """A buffer with stored bytes, and where in it they start.

        Reading takes half the time of page faults in the map.
        """
        if num_bytes > len(scratch):
            return self._data, position
        room = memoryview(scratch)
        if os.preadv(self._handle, [room[:num_bytes]], position) != num_bytes:
            raise self._ends_before(position, num_bytes)
        return room, 0

    def _inflate_head(self, begin: int, end: int, width: int) -> bytes:
        """The first bytes of compressed data, from as few bytes of input as possible."""
        for stop in (min(begin + _HEAD_INPUT, end), end):
            if self.fetch is not None:
                self.fetch(np.array([begin]), np.array([stop]))
            head = zlib.decompressobj(wbits=31).decompress(self._data[begin:stop], width)
            if len(head) == width:
                break
        return head

    def _inflate(self, position: int, num_bytes: int, raw_bytes: int) -> bytes:
        try:
            return inflate(self._data[position : position + num_bytes], raw_bytes)
        except SourceFormatError as error:
            raise self._error_at(position, error) from error


class FeatureSource(ArchiveSource):
    """An archive of feature matrices: one array [frames, dim] per sequence.

    Args:
        path: local archive.
        recover: as for `Archive`; by default an archive that was never closed is refused.
        encoding: of the names.
    """

    def __init__(self, path: str, *, recover: Recover = False, encoding: str = "utf-8") -> None:
        super().__init__(path, recover, encoding)

    def index(self) -> SourceIndex:
        """See `Source.index`."""
        archive = self._archive
        entries = archive.sequences
        heads, errors = self._read_heads(entries, features.HEAD_BYTES)
        shapes = features.measure_heads(heads, archive.table.size[entries])

        def measure(row: int, data: Buffer) -> None:
            shape = features.measure_payload(data)
            shapes.length[row], shapes.dim[row], shapes.datatype[row] = shape

        self._measure_rest(entries, np.flatnonzero(shapes.length < 0), errors, measure)
        stream_format, strange = find_format(
            shapes, errors, lambda row: archive.label(int(entries[row]))
        )
        errors |= {row: self._error(entries[row], error) for row, error in strange.items()}
        return self._build_index(entries, shapes.length, stream_format, archive.fingerprint, errors)

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
        self._check_inside(position, num_bytes)
        copy = features.make_copier(out)
        scratch = np.empty(min(_READ_BYTES, int(num_bytes.max(initial=0))), np.uint8)
        columns = (position, length, num_bytes, raw_bytes, start)
        for at, frames, stored, raw, first in zip(*(c.tolist() for c in columns), strict=True):
            try:
                if raw < 0:
                    copy(*self._read(at, stored, scratch), stored, frames, first)
                else:
                    copy(self._inflate(at, stored, raw), 0, raw, frames, first)
            except SourceFormatError as error:
                raise error if error.path else self._error_at(at, error) from error


class AlignmentSource(ArchiveSource):
    """An archive of alignments: one class per item and sequence.

    Args:
        path: local archive.
        spec: the stream, with its label files.
        recover: as for `Archive`; by default an archive that was never closed is refused.
        encoding: of the names.

    Raises:
        ConfigError: if neither label files nor `spec.num_labels` tell the number of classes.
    """

    def __init__(
        self,
        path: str,
        spec: StreamSpec,
        *,
        recover: Recover = False,
        encoding: str = "utf-8",
    ) -> None:
        self._classes = load_classes(spec)
        super().__init__(path, recover, encoding)

    def index(self) -> SourceIndex:
        """See `Source.index`."""
        archive = self._archive
        entries = archive.sequences
        heads, errors = self._read_heads(entries, labels.HEAD_BYTES)
        length = labels.measure_heads(heads, archive.table.size[entries])
        if self._classes.soft == "best":
            self._measure_weighted(entries, heads, length, errors)

        def measure(row: int, data: Buffer) -> None:
            length[row] = len(labels.hard_labels(decode_alignment(data), self._classes.soft)[0])

        self._measure_rest(entries, np.flatnonzero(length < 0), errors, measure)
        fingerprint = label_fingerprint(archive.fingerprint, self._classes)
        return self._build_index(entries, length, label_format(self._classes), fingerprint, errors)

    def _measure_weighted(
        self,
        entries: np.ndarray,
        heads: np.ndarray,
        length: np.ndarray,
        errors: dict[int, SeqshardError],
    ) -> None:
        """Sets the lengths of intact weighted entries that are stored as they are."""
        table = self._archive.table
        rest = (length < 0) & (table.compressed[entries] == 0)
        rest[list(errors)] = False
        rows = np.flatnonzero(rest)
        own = entries[rows]
        length[rows] = labels.measure_weighted(
            self._data, heads[rows], table.payload[own], table.size[own]
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
        """See `Source.read_many`. Labels without a class are errors that name them."""
        self._check_inside(position, num_bytes)
        for group in _groups(len(position)):
            at, stored, raw = position[group], num_bytes[group], raw_bytes[group]
            data, begin, size = self._data, at, stored
            if (raw >= 0).any():
                data, begin, size = self._join(at, stored, raw)

            def fail(row: int, error: SourceFormatError, at: np.ndarray = at) -> SourceFormatError:
                return self._error_at(int(at[row]), error)

            reader = labels.LabelReader(data, self._classes, fail)
            reader.read(begin, size, length[group], out, start[group])

    def _join(
        self, position: np.ndarray, num_bytes: np.ndarray, raw_bytes: np.ndarray
    ) -> tuple[bytes, np.ndarray, np.ndarray]:
        """Uncompressed payloads behind one another: the bytes, where each starts, its size."""
        size = np.where(raw_bytes >= 0, raw_bytes, num_bytes)
        columns = (position.tolist(), num_bytes.tolist(), raw_bytes.tolist())
        payloads = (
            self._inflate(at, stored, raw) if raw >= 0 else self._data[at : at + stored]
            for at, stored, raw in zip(*columns, strict=True)
        )
        return b"".join(payloads), np.cumsum(size) - size, size


def find_format(
    shapes: features.Shapes, damaged: Collection[int], label: Callable[[int], str]
) -> tuple[StreamFormat | None, dict[int, ShapeMismatchError]]:
    """The format of the first feature entry that has frames, and the entries that have another.

    Args:
        shapes: of all entries.
        damaged: rows that do not count.
        label: the name of a row, for errors.
    """
    intact = np.ones(len(shapes.length), bool)
    intact[list(damaged)] = False
    rows = np.flatnonzero(intact & (shapes.length > 0))
    if len(rows) == 0:
        return None, {}
    dims, datatypes = shapes.dim[rows], shapes.datatype[rows]
    strange = {
        row: ShapeMismatchError(
            f"the entry has another shape than {label(int(rows[0]))!r}",
            expected=_shape_text(shapes, rows[0]),
            found=_shape_text(shapes, row),
        )
        for row in rows[(dims != dims[0]) | (datatypes != datatypes[0])].tolist()
    }
    dim = int(dims[0])
    element = FEATURE_ELEMENTS[features.DATATYPES[datatypes[0]]]
    return StreamFormat(element.name, dim, ndim=2, sparse=False, shape=(dim,)), strange


def label_format(classes: labels.Classes) -> StreamFormat:
    """The format of the labels of an alignment."""
    return StreamFormat(
        dtype=_label_dtype(classes.num_labels),
        dim=classes.num_labels,
        ndim=1,
        sparse=True,
        labels=classes.label_map.labels if classes.label_map is not None else None,
    )


def label_fingerprint(fingerprint: str, classes: labels.Classes) -> str:
    """The fingerprint of an archive, extended by what makes classes of its labels."""
    digest = classes.label_map.digest if classes.label_map is not None else ""
    text = f"{fingerprint} {digest} {classes.num_labels} {classes.soft}"
    return xxhash.xxh3_128_hexdigest(text.encode())


def load_classes(spec: StreamSpec) -> labels.Classes:
    """The classes of an alignment stream.

    Raises:
        ConfigError: if neither label files nor `spec.num_labels` tell their number.
    """
    label_map = None
    if spec.allophones is not None:
        label_map = load_label_map(
            spec.allophones,
            state_tying=spec.state_tying,
            phonemes=spec.phonemes,
            silence=spec.silence,
        )
    num_labels = spec.num_labels if label_map is None else label_map.num_labels
    if num_labels is None:
        raise ConfigError(
            f"nothing tells the number of classes of stream {spec.name!r}",
            hint="Give allophones and state_tying (or phonemes), or num_labels.",
        )
    if spec.soft not in ("error", "best"):
        raise ConfigError(
            f"unknown choice for weighted alignments in stream {spec.name!r}",
            expected='"error" or "best"',
            found=repr(spec.soft),
        )
    return labels.Classes(label_map, num_labels, spec.soft)


def _label_dtype(num_labels: int) -> str:
    """The element type that RETURNN's SprintCacheDataset gives to labels."""
    if num_labels < 2**7:
        return "int8"
    return "int16" if num_labels < 2**15 else "int32"


def _shape_text(shapes: features.Shapes, row: int) -> str:
    return f"{features.DATATYPES[shapes.datatype[row]]} of dimension {shapes.dim[row]}"


def _groups(count: int) -> Iterator[slice]:
    """Groups of sequences: large enough to share numpy's overhead, small enough for the cache."""
    return (slice(first, first + _GROUP) for first in range(0, count, _GROUP))
