"""From allophone states, as alignments store them, to classes.

The id of an allophone state is `allophone + (state << 26)`: docs/sprint-format.md, section 3.1.
Classes come from a state tying or, by the centre phoneme, from a list of phonemes, numbered as in
RETURNN's `AllophoneLabeling`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import xxhash

from .. import storage
from ..errors import ConfigError, SourceFormatError, SourceNotFoundError

STATE_SHIFT = 26
MAX_STATES = 16
INDEX_MASK = (1 << STATE_SHIFT) - 1
SILENCE_CONTEXT = "{#+#}@i@f"

_UNKNOWN = -1


@dataclass(frozen=True)
class LabelMap:
    """A lookup table from allophone-state ids to classes.

    Attributes:
        allophones: name of every allophone.
        classes: int32 [states * allophones], the class of a state of an allophone at
            `state * len(allophones) + allophone`; -1 if it has none.
        num_labels: number of classes.
        silence_label: class of the silence phoneme, or None if the files do not have it.
        labels: names of the classes, where they are phonemes.
        digest: hexadecimal hash of the files that the table comes from.
    """

    allophones: tuple[str, ...] = field(repr=False)
    classes: np.ndarray = field(repr=False)
    num_labels: int
    silence_label: int | None
    labels: tuple[str, ...] | None
    digest: str

    def lookup(self, ids: np.ndarray) -> np.ndarray:
        """Classes of allophone-state ids, int32; -1 for ids that have none.

        Args:
            ids: int32 or uint32.
        """
        ids = ids.astype(np.uint32, copy=False)
        if len(self.classes) == 0:
            return np.full(len(ids), _UNKNOWN, np.int32)
        index = (ids & np.uint32(INDEX_MASK)).astype(np.int64)
        place = (ids >> np.uint32(STATE_SHIFT)).astype(np.int64) * len(self.allophones) + index
        known = (index < len(self.allophones)) & (place < len(self.classes))
        if known.all():
            return self.classes[place]
        return np.where(known, self.classes[np.where(known, place, 0)], np.int32(_UNKNOWN))

    def describe(self, label: int) -> str:
        """An allophone-state id in words, for messages."""
        label &= 0xFFFFFFFF
        index, state = label & INDEX_MASK, label >> STATE_SHIFT
        if index < len(self.allophones):
            name = repr(self.allophones[index])
        else:
            name = f"unknown, there are {len(self.allophones)}"
        return f"id {label}: allophone {index} ({name}), state {state}"


def load_label_map(
    allophones: str,
    *,
    state_tying: str | None = None,
    phonemes: str | None = None,
    silence: str = "[SILENCE]",
) -> LabelMap:
    """Reads label files; a table that was read before is kept until one of its files changes.

    Args:
        allophones: one allophone per line; `#` starts a comment line.
        state_tying: "<allophone>.<state> <class>" per line. If given, it decides.
        phonemes: one phoneme per line, its class is the number of the line.
        silence: the silence phoneme.

    Raises:
        ConfigError: if there is neither a state tying nor a list of phonemes.
        SourceNotFoundError: if a file does not exist.
        SourceFormatError: if a line is not as described, naming it.
    """
    if state_tying is None and phonemes is None:
        raise ConfigError(
            "allophones have no classes without a state tying or a list of phonemes", allophones
        )
    files = (allophones, state_tying, None if state_tying else phonemes)
    return _load(tuple(_identity(path) for path in files), silence)


@lru_cache(maxsize=8)
def _load(files: tuple[tuple[str, int, int | str] | None, ...], silence: str) -> LabelMap:
    allophone_path, tying_path, phoneme_path = (None if f is None else f[0] for f in files)
    hasher = xxhash.xxh3_128()
    # An allophone that is listed twice gets one index, as in RASR.
    names = tuple(dict.fromkeys(text for _, text in _content_lines(allophone_path, hasher)))
    if tying_path is not None:
        tying = _read_state_tying(tying_path, hasher)
        classes, labels = _classes_by_state(names, tying), None
        num_labels = max(tying.values(), default=_UNKNOWN) + 1
        silence_label = tying.get((silence + SILENCE_CONTEXT, 0))
    else:
        phonemes = [line.strip() for line in _lines(phoneme_path, hasher)]
        number = {phoneme: i for i, phoneme in enumerate(phonemes)}
        classes = _classes_by_phoneme(names, number)
        num_labels = len(phonemes)
        labels = tuple(phonemes) if len(number) == num_labels and "" not in number else None
        silence_label = number.get(silence)
    return LabelMap(names, classes, num_labels, silence_label, labels, hasher.hexdigest())


def _classes_by_state(allophones: tuple[str, ...], tying: dict[tuple[str, int], int]) -> np.ndarray:
    index = {name: i for i, name in enumerate(allophones)}
    # Other allophones and states are of no use: an id cannot refer to them.
    used = [
        (state * len(allophones) + index[name], label)
        for (name, state), label in tying.items()
        if name in index and state < MAX_STATES
    ]
    num_states = max((place for place, _ in used), default=-1) // max(len(allophones), 1) + 1
    classes = np.full(num_states * len(allophones), _UNKNOWN, np.int32)
    if used:
        place, label = np.array(used, np.int64).T
        classes[place] = label
    return classes


def _classes_by_phoneme(allophones: tuple[str, ...], number: dict[str, int]) -> np.ndarray:
    centre = [number.get(name.partition("{")[0], _UNKNOWN) for name in allophones]
    return np.tile(np.array(centre, np.int32), MAX_STATES)


def _read_state_tying(path: str, hasher: xxhash.xxh3_128) -> dict[tuple[str, int], int]:
    tying: dict[tuple[str, int], int] = {}
    for number, text in _content_lines(path, hasher):
        key, _, label = text.rpartition(" ")
        name, _, state = key.strip().rpartition(".")
        if not (name and _is_number(state) and _is_number(label)):
            raise SourceFormatError(
                f"line {number} is no line of a state tying",
                path,
                expected="<allophone>.<state> <class>",
                found=repr(text[:80]),
            )
        if tying.setdefault((name, int(state)), int(label)) != int(label):
            raise SourceFormatError(
                f"line {number} gives state {key.strip()!r} another class",
                path,
                expected=str(tying[name, int(state)]),
                found=label,
            )
    return tying


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 10 and int(text) < 2**31 - 1


def _content_lines(path: str, hasher: xxhash.xxh3_128) -> Iterator[tuple[int, str]]:
    """Numbered lines without those that are empty or comments."""
    for number, line in enumerate(_lines(path, hasher), 1):
        text = line.strip()
        if text and not text.startswith("#"):
            yield number, text.replace("\t", " ")


def _lines(path: str, hasher: xxhash.xxh3_128) -> list[str]:
    data = storage.read_bytes(path)
    hasher.update(len(data).to_bytes(8, "little"))
    hasher.update(data)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SourceFormatError(
            "a label file must be UTF-8 text", path, position=error.start
        ) from None
    lines = text.replace("\r\n", "\n").split("\n")
    return lines[:-1] if lines[-1] == "" else lines


def _identity(path: str | None) -> tuple[str, int, int | str] | None:
    if path is None:
        return None
    if storage.is_url(path):
        found = storage.stamp(path)
        return path, found.num_bytes, found.version
    try:
        status = os.stat(path)
    except FileNotFoundError:
        raise SourceNotFoundError("there is no such label file", path) from None
    return str(path), status.st_size, status.st_mtime_ns
