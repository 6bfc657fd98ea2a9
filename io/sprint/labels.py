"""One class per frame from many alignment entries: lengths from headers, labels in bulk.

A hard alignment has one label per item, in the order of the file, as RETURNN's
SprintCacheDataset reads it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from ..errors import ConfigError, SourceFormatError, UnsupportedPayloadError
from .alignment import (
    ALPHABET_MAGIC,
    DATATYPE,
    EMISSIONS_MAGIC,
    MAGICS,
    WEIGHTED,
    Alignment,
    decode_alignment,
)
from .allophones import LabelMap
from .codes import damaged_codes, expand_codes, most_items, walk_many
from .mapping import Buffer, gather
from .packets import TIMES_BYTES
from .weighted_many import PADDING, decode_weighted_many

# Data type, one packet; then what is read here: the magic and the number of items.
_PREFIX = struct.pack("<I14sI", len(DATATYPE), DATATYPE.encode(), 1)
_MAGIC_AT = len(_PREFIX)
_ITEMS_AT = _MAGIC_AT + 8
HEAD_BYTES = _ITEMS_AT + 4

# Weighted entries that are read together, in bytes; what is larger is read alone, in less memory.
_GROUP_BYTES = 1 << 17
_MAX_WEIGHTED = 1 << 20


@dataclass(frozen=True)
class Classes:
    """What the classes of a stream are.

    Attributes:
        label_map: classes of allophone states, or None if only emission labels can be read.
        num_labels: number of classes.
        soft: what to do with weights: "error", or "best" for the label of largest weight.
    """

    label_map: LabelMap | None
    num_labels: int
    soft: str

    def of(self, labels: np.ndarray, emission: np.ndarray) -> tuple[np.ndarray, int]:
        """Classes of labels, and the place of the first label that has none, or -1.

        Args:
            labels: int32, as stored.
            emission: bool, whether each is a class already.
        """
        classes = labels
        if not emission.all():
            if self.label_map is None:
                raise ConfigError(
                    "the alignment has allophone states, but the stream has no allophones",
                    hint="Give allophones and state_tying (or phonemes).",
                )
            classes = np.where(emission, labels, self.label_map.lookup(labels))
        bad = (classes < 0) | (classes >= self.num_labels)
        return classes, int(np.argmax(bad)) if bad.any() else -1

    def error(self, label: int, emission: bool) -> SourceFormatError:
        """Why a label has no class."""
        if emission or self.label_map is None:
            return SourceFormatError(
                "a label is no class", expected=f"0 to {self.num_labels - 1}", found=str(label)
            )
        return SourceFormatError(
            "a label is no allophone state that has a class",
            found=self.label_map.describe(label),
            hint="Do the allophones and the state tying belong to this alignment?",
        )


def measure_heads(heads: np.ndarray, size: np.ndarray) -> np.ndarray:
    """int64: items of entries that are one run-length coded packet; -1 for all others.

    Args:
        heads: uint8 [entries, HEAD_BYTES], the first bytes of the payloads.
        size: int64 [entries], bytes of the payloads.
    """
    items = np.ascontiguousarray(heads[:, _ITEMS_AT:]).view("<u4")[:, 0].astype(np.int64)
    simple = (
        (heads[:, :_MAGIC_AT] == np.frombuffer(_PREFIX, np.uint8)).all(axis=1)
        & np.isin(_magics(heads), MAGICS)
        & (items < WEIGHTED)
        & (items <= most_items(size - HEAD_BYTES - TIMES_BYTES))
    )
    return np.where(size == 0, 0, np.where(simple, items, -1))


def _magics(heads: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(heads[:, _MAGIC_AT:_ITEMS_AT]).view("S8")[:, 0]


def hard_labels(alignment: Alignment, soft: str) -> tuple[np.ndarray, np.ndarray]:
    """One label per frame, int32, and whether each is a class already.

    Raises:
        UnsupportedPayloadError: if there are weights and `soft` is "error".
    """
    emission = np.repeat(alignment.emission, np.diff(alignment.packet_offset))
    if (alignment.weight == 1).all():
        return alignment.label, emission
    if soft != "best":
        raise UnsupportedPayloadError(
            "the alignment has several weighted labels per frame",
            hint='Choose soft = "best" to take the label of largest weight.',
        )
    best = _best_items(alignment.time, alignment.weight, alignment.packet_offset)
    return alignment.label[best], emission[best]


def _best_items(time: np.ndarray, weight: np.ndarray, packet_offset: np.ndarray) -> np.ndarray:
    """int64 [frames], the first item of largest weight of each frame.

    A frame is what has one time within one packet.
    """
    new_frame = np.ones(len(time), bool)
    new_frame[1:] = time[1:] != time[:-1]
    starts = packet_offset[:-1]
    new_frame[starts[starts < len(time)]] = True
    if new_frame.all():
        return np.arange(len(time))
    first = np.flatnonzero(new_frame)
    count = np.diff(first, append=len(time))
    largest = np.fmax.reduceat(weight, first)
    is_best = weight == np.repeat(largest, count)
    is_best[first[np.isnan(largest)]] = True  # no weight of the frame is a number
    best = np.flatnonzero(is_best)
    frame = np.cumsum(new_frame)[best]
    return best[np.diff(frame, prepend=0) != 0]


@dataclass(frozen=True)
class _SoftLabels:
    """The labels of largest weight of weighted entries, those of one entry behind one another.

    Attributes:
        label: int32 [frames], as stored.
        length: int64 [entries], frames; 0 for entries that are not as usual.
        emission: bool [entries], whether the labels are classes already.
    """

    label: np.ndarray
    length: np.ndarray
    emission: np.ndarray


def _decode_soft(data: Buffer, begin: np.ndarray, size: np.ndarray, version: int) -> _SoftLabels:
    """Decodes entries that begin like one weighted packet.

    Args:
        begin, size: int64 [entries], bytes.
        version: of the weighted scheme.
    """
    view = memoryview(data)
    places = zip(begin.tolist(), (begin + size).tolist(), strict=True)
    joined = b"".join([*(view[first:last] for first, last in places), bytes(PADDING)])
    last = np.cumsum(size)
    first, end = last - size, last - TIMES_BYTES
    magics = _magics(gather(joined, first, HEAD_BYTES))
    found = decode_weighted_many(joined, first + HEAD_BYTES, end, version)
    best = _best_items(found.time, found.weight, found.offset)
    length = np.diff(np.searchsorted(best, found.offset))
    # Entries whose weights are all 1 are hard: all their items count.
    num_soft = np.diff(np.append(0, np.cumsum(found.weight != 1))[found.offset])
    # Only an alphabet may follow the items.
    is_usual = (num_soft > 0) & ((found.stop < end) == (magics == ALPHABET_MAGIC))
    best = best[np.repeat(is_usual, length)]
    return _SoftLabels(found.label[best], np.where(is_usual, length, 0), magics == EMISSIONS_MAGIC)


def measure_weighted(
    data: Buffer, heads: np.ndarray, begin: np.ndarray, size: np.ndarray
) -> np.ndarray:
    """int64: frames of weighted entries that are as usual; -1 for all others.

    Args:
        data: holds the payloads.
        heads: uint8 [entries, HEAD_BYTES], the first bytes of the payloads.
        begin, size: int64 [entries], bytes.
    """
    length = np.full(len(size), -1)
    for rows, version in _weighted_groups(heads, size):
        found = _decode_soft(data, begin[rows], size[rows], version).length
        length[rows] = np.where(found > 0, found, -1)
    return length


def _weighted_groups(heads: np.ndarray, size: np.ndarray) -> Iterator[tuple[np.ndarray, int]]:
    """Entries that begin like one weighted packet, in groups that fit the cache; the version."""
    word = np.ascontiguousarray(heads[:, _ITEMS_AT:]).view("<u4")[:, 0]
    prefix = (heads[:, :_MAGIC_AT] == np.frombuffer(_PREFIX, np.uint8)).all(axis=1)
    is_packet = prefix & np.isin(_magics(heads), MAGICS) & (size <= _MAX_WEIGHTED)
    is_packet &= size >= HEAD_BYTES + TIMES_BYTES
    for version in (1, 2):
        rows = np.flatnonzero(is_packet & (word == WEIGHTED | version))
        number = np.cumsum(size[rows]) // _GROUP_BYTES
        for group in np.split(rows, np.flatnonzero(np.diff(number)) + 1):
            if len(group):
                yield group, version


Fail = Callable[[int, SourceFormatError], SourceFormatError]


class LabelReader:
    """Reads the classes of payloads that lie in one buffer.

    Args:
        data: the buffer.
        classes: the stream's classes.
        fail: makes the error to raise of a row and what is wrong with it.
    """

    def __init__(self, data: Buffer, classes: Classes, fail: Fail) -> None:
        self._data = data
        self._classes = classes
        self._fail = fail

    def read(
        self,
        begin: np.ndarray,
        size: np.ndarray,
        length: np.ndarray,
        out: np.ndarray,
        start: np.ndarray,
    ) -> None:
        """Writes the classes of payload i to `out[start[i] : start[i] + length[i]]`.

        Args:
            begin, size: int64, bytes.
            length, start: int64, items.
        """
        heads = gather(self._data, begin, HEAD_BYTES)
        simple = (measure_heads(heads, size) == length) & (length > 0)
        rows = np.flatnonzero(simple)
        if len(rows):
            self._read_simple(rows, begin, size, length, _magics(heads), out, start)
        rest = ~simple & (size > 0)
        if self._classes.soft == "best":
            for rows, version in _weighted_groups(heads, size):
                done = self._read_weighted(rows, begin, size, length, version, out, start)
                rest[done] = False
        for row in np.flatnonzero(rest).tolist():
            first = int(start[row])
            self._read_any(row, begin, size, out[first : first + int(length[row])])

    def _read_simple(
        self,
        rows: np.ndarray,
        begin: np.ndarray,
        size: np.ndarray,
        length: np.ndarray,
        magics: np.ndarray,
        out: np.ndarray,
        start: np.ndarray,
    ) -> None:
        end = begin[rows] + size[rows] - TIMES_BYTES
        codes = walk_many(self._data, begin[rows] + HEAD_BYTES, end, length[rows])
        # Only an alphabet may follow the codes.
        has_more = codes.stop < end
        wrong_end = has_more != (magics[rows] == ALPHABET_MAGIC)
        for i in np.flatnonzero((codes.missing != 0) | wrong_end).tolist():
            row, missing = int(rows[i]), int(codes.missing[i])
            if missing:
                error = damaged_codes(HEAD_BYTES, int(length[row]), missing)
            else:
                error = _wrong_end(int(codes.stop[i] - begin[row]), int(end[i] - codes.stop[i]))
            raise self._fail(row, error)
        labels, counts, first_run = expand_codes(self._data, codes.position)
        run_row = np.repeat(rows, np.diff(first_run[codes.first]))
        emission = (magics == EMISSIONS_MAGIC)[run_row]
        classes, bad = self._classes.of(labels, emission)
        if bad >= 0:
            error = self._classes.error(int(labels[bad]), bool(emission[bad]))
            raise self._fail(int(run_row[bad]), error)
        _scatter(np.repeat(classes.astype(out.dtype), counts), length[rows], out, start[rows])

    def _read_weighted(
        self,
        rows: np.ndarray,
        begin: np.ndarray,
        size: np.ndarray,
        length: np.ndarray,
        version: int,
        out: np.ndarray,
        start: np.ndarray,
    ) -> np.ndarray:
        """Reads the rows that are as usual, and returns them."""
        found = _decode_soft(self._data, begin[rows], size[rows], version)
        done = (found.length == length[rows]) & (found.length > 0)
        row = np.repeat(np.arange(len(rows)), found.length)
        due = np.flatnonzero(done[row])
        row, labels = row[due], found.label[due]
        emission = found.emission[row]
        classes, bad = self._classes.of(labels, emission)
        if bad >= 0:
            error = self._classes.error(int(labels[bad]), bool(emission[bad]))
            raise self._fail(int(rows[row[bad]]), error)
        rows = rows[done]
        if len(rows):
            _scatter(classes.astype(out.dtype), length[rows], out, start[rows])
        return rows

    def _read_any(self, row: int, begin: np.ndarray, size: np.ndarray, out: np.ndarray) -> None:
        first = int(begin[row])
        try:
            alignment = decode_alignment(memoryview(self._data)[first : first + int(size[row])])
            labels, emission = hard_labels(alignment, self._classes.soft)
        except SourceFormatError as error:
            raise self._fail(row, error) from error
        if len(labels) != len(out):
            error = SourceFormatError(
                "the alignment has another length than its header said",
                expected=f"{len(out)} labels",
                found=str(len(labels)),
            )
            raise self._fail(row, error)
        classes, bad = self._classes.of(labels, emission)
        if bad >= 0:
            raise self._fail(row, self._classes.error(int(labels[bad]), bool(emission[bad])))
        out[:] = classes


def _scatter(values: np.ndarray, length: np.ndarray, out: np.ndarray, start: np.ndarray) -> None:
    """Copies consecutive pieces of `values` to where they start in `out`."""
    end = np.cumsum(length)
    if (start - (end - length) == start[0]).all():
        out[start[0] : start[0] + len(values)] = values
        return
    for to, stop, count in zip(start.tolist(), end.tolist(), length.tolist(), strict=True):
        out[to : to + count] = values[stop - count : stop]


def _wrong_end(position: int, left: int) -> SourceFormatError:
    return SourceFormatError(
        "the alignment does not end where its entry does",
        position=position,
        expected="the times of the packet behind the last item",
        found=f"{left} more bytes",
    )
