"""Vocabularies: text as class indices.

Anything with the interface of `Vocabulary` will do, for example RETURNN's vocabularies, of which
those for words, BPE, characters and bytes are here as well, with their options and their results.
"""

from __future__ import annotations

import ast
import gzip
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar, Protocol, runtime_checkable

from ..errors import ConfigError, SourceFormatError, SourceNotFoundError

BPE_CONTINUES = "@@"
END_OF_WORD = "</w>"

_DEFAULT: Any = object()


@runtime_checkable
class Vocabulary(Protocol):
    """What a dataset needs of a vocabulary.

    Attributes:
        labels: the label of each class.
        num_labels: the number of classes.
    """

    labels: Sequence[str]
    num_labels: int

    def get_seq(self, sentence: str) -> list[int]:
        """The classes of a text."""
        ...


def create_vocabulary(spec: Vocabulary | Mapping[str, Any], default: str = "Vocabulary") -> Any:
    """A vocabulary from RETURNN's options; an object that is one already stays as it is.

    Args:
        spec: "class" ("Vocabulary", "BytePairEncoding", "CharacterTargets" or "Utf8ByteTargets")
            and the options of that class; or a vocabulary.
        default: the class if none is named. With `bpe_file` it is "BytePairEncoding".

    Raises:
        ConfigError: if the class or an option is unknown or malformed.
        SourceNotFoundError, SourceFormatError: if a file is missing or malformed.
    """
    if not isinstance(spec, Mapping):
        if not isinstance(spec, Vocabulary):
            raise ConfigError(
                "this is no vocabulary",
                expected="options, or an object with labels, num_labels and get_seq",
                found=type(spec).__name__,
            )
        return spec
    options = dict(spec)
    name = options.pop("class", "BytePairEncoding" if "bpe_file" in options else default)
    if name not in _CLASSES:
        raise ConfigError(
            f"unknown vocabulary class {name!r}",
            expected=", ".join(_CLASSES),
            hint="An object of RETURNN's class can be given instead of options.",
        )
    try:
        return _CLASSES[name](**options)
    except TypeError as error:
        raise ConfigError(f"wrong options of {name}: {error}") from error


class WordVocabulary:
    """Words between spaces. RETURNN's `Vocabulary`.

    Args:
        vocab_file: one label a line, or a dict from label to class; .gz if so named.
        labels: instead of the file.
        unknown_label: stands for words that are not in the vocabulary; None if that is an error.
        bos_label, eos_label, pad_label: only checked, and known as `bos_label_id` and so on.
        num_labels: only checked.
        seq_postfix: classes to add to each text.

    Raises:
        ConfigError: if options contradict each other or the labels.
        SourceNotFoundError, SourceFormatError: if the file is missing or malformed.
    """

    default_unknown: ClassVar[str | None] = "UNK"

    def __init__(
        self,
        vocab_file: str | os.PathLike[str] | None = None,
        *,
        labels: Sequence[str] | None = None,
        unknown_label: str | int | None = _DEFAULT,
        bos_label: str | int | None = None,
        eos_label: str | int | None = None,
        pad_label: str | int | None = None,
        num_labels: int | None = None,
        seq_postfix: Sequence[int] | None = None,
    ) -> None:
        if (vocab_file is None) == (labels is None):
            raise ConfigError("a vocabulary needs either vocab_file or labels")
        self.labels = _read_labels(os.fspath(vocab_file)) if labels is None else list(labels)
        self.num_labels = len(self.labels)
        self.seq_postfix = list(seq_postfix or ())
        self._class_of = {label: index for index, label in enumerate(self.labels)}
        if num_labels not in (None, self.num_labels):
            raise ConfigError(
                "the vocabulary has another size", expected=str(num_labels), found=str(len(self))
            )
        unknown = self.default_unknown if unknown_label is _DEFAULT else unknown_label
        self.unknown_label_id = self._special(unknown)
        self.bos_label_id = self._special(bos_label)
        self.eos_label_id = self._special(eos_label)
        self.pad_label_id = self._special(pad_label)

    def _special(self, label: str | int | None) -> int | None:
        """The class of a special label; -1 is none."""
        if label is None or label == -1:
            return None
        index = self._class_of.get(label) if isinstance(label, str) else label
        if index is None or not 0 <= index < self.num_labels:
            raise ConfigError(f"the special label {label!r} is not in the vocabulary")
        return index

    def __len__(self) -> int:
        return self.num_labels

    def get_seq(self, sentence: str) -> list[int]:
        """The classes of a text.

        Raises:
            SourceFormatError: for a word that is unknown, if there is no label for such.
        """
        return [self._find(label) for label in self._split(sentence)] + self.seq_postfix

    def _split(self, sentence: str) -> Sequence[str]:
        return sentence.split()

    def _find(self, label: str) -> int:
        found = self._class_of.get(label, self.unknown_label_id)
        if found is None:
            raise SourceFormatError(f"{label!r} is not in the vocabulary, nor is an unknown label")
        return found


class CharacterVocabulary(WordVocabulary):
    """Characters. RETURNN's `CharacterTargets`."""

    default_unknown = "@"

    def _split(self, sentence: str) -> Sequence[str]:
        return sentence


class ByteVocabulary:
    """The bytes of UTF-8. RETURNN's `Utf8ByteTargets`."""

    def __init__(self, seq_postfix: Sequence[int] | None = None) -> None:
        self.labels = [chr(byte) for byte in range(256)]
        self.num_labels = 256
        self.seq_postfix = list(seq_postfix or ())

    def get_seq(self, sentence: str) -> list[int]:
        """The bytes of a text."""
        return [*sentence.encode("utf-8"), *self.seq_postfix]


class BytePairEncoding(WordVocabulary):
    """Parts of words. RETURNN's class of this name, which encodes as subword-nmt does.

    Sennrich, Haddow, Birch: Neural Machine Translation of Rare Words with Subword Units, 2016.

    Args:
        vocab_file: the labels; "@@" ends those that another one follows in the same word.
        bpe_file: the pairs to merge, the first one first.
        options: see `WordVocabulary`.
    """

    def __init__(
        self, vocab_file: str | os.PathLike[str], bpe_file: str | os.PathLike[str], **options: Any
    ) -> None:
        super().__init__(vocab_file, **options)
        version, pairs = _read_pairs(os.fspath(bpe_file))
        self._end_is_symbol = version == "0.1"
        self._rank = {pair: rank for rank, pair in reversed(list(enumerate(pairs)))}
        self._parts_of = {first + second: (first, second) for first, second in self._rank}
        self._known: dict[str, list[str]] = {}

    def _split(self, sentence: str) -> Sequence[str]:
        labels: list[str] = []
        in_name = in_braces = False
        for word in sentence.split():
            # subword-nmt leaves "$name { ... " alone.
            is_name = len(word) > 1 and word[0] == "$"
            in_braces = not is_name and (in_braces or (in_name and word[0] == "{"))
            in_braces = in_braces and word[0] != "}"
            if is_name or in_braces:
                in_name = in_name or is_name
                labels.append(word)
                continue
            in_name = False
            *heads, last = self._encode(word)
            labels += [f"{head}{BPE_CONTINUES}" for head in heads]
            labels.append(last)
        return labels

    def _encode(self, word: str) -> list[str]:
        if word not in self._known:
            self._known[word] = self._encode_anew(word)
        return self._known[word]

    def _encode_anew(self, word: str) -> list[str]:
        if self._end_is_symbol:
            symbols = [*word, END_OF_WORD]
        elif len(word) == 1:
            return [word]
        else:
            symbols = [*word[:-1], word[-1] + END_OF_WORD]
        while len(symbols) > 1:
            pairs = list(pairwise(symbols))
            best = min(pairs, key=lambda pair: self._rank.get(pair, math.inf))
            if best not in self._rank:
                break
            symbols = _merge(symbols, best)
        symbols[-1] = symbols[-1].replace(END_OF_WORD, "")
        if not symbols[-1]:
            symbols.pop()
        parts = [part for symbol in symbols[:-1] for part in self._split_unknown(symbol, False)]
        return parts + list(self._split_unknown(symbols[-1], True))

    def _split_unknown(self, symbol: str, final: bool) -> Iterator[str]:
        """Takes merges back until the parts are in the vocabulary, or nothing is left to undo."""
        label = symbol if final else symbol + BPE_CONTINUES
        merged = symbol + END_OF_WORD if final else symbol
        if label in self._class_of or merged not in self._parts_of:
            yield symbol
            return
        left, right = self._parts_of[merged]
        yield from self._split_unknown(left, False)
        yield from self._split_unknown(right.removesuffix(END_OF_WORD) if final else right, final)


_CLASSES: dict[str, type] = {
    "Vocabulary": WordVocabulary,
    "BytePairEncoding": BytePairEncoding,
    "CharacterTargets": CharacterVocabulary,
    "Utf8ByteTargets": ByteVocabulary,
}


def _merge(symbols: list[str], pair: tuple[str, str]) -> list[str]:
    merged: list[str] = []
    place = 0
    while place < len(symbols):
        size = 2 if tuple(symbols[place : place + 2]) == pair else 1
        merged.append("".join(symbols[place : place + size]))
        place += size
    return merged


def _read_labels(path: str) -> list[str]:
    text = read_text(path)
    if not text.startswith("{"):
        labels = text.splitlines()
    else:
        try:
            class_of = ast.literal_eval(text)
            labels = sorted(class_of, key=class_of.get)
            complete = [class_of[label] for label in labels] == list(range(len(labels)))
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
            raise SourceFormatError("this is no vocabulary", path) from error
        if not complete:
            raise SourceFormatError(
                "the vocabulary does not use each class once", path, expected="0, 1, 2, ..."
            )
    if len(set(labels)) < len(labels):
        twice = next(label for place, label in enumerate(labels) if label in labels[:place])
        raise SourceFormatError("a label is in the vocabulary twice", path, entry=twice)
    return labels


def _read_pairs(path: str) -> tuple[str, list[tuple[str, str]]]:
    """The version of the file's format, and its pairs."""
    lines = read_text(path).splitlines()
    version = "0.1"
    if lines and lines[0].startswith("#version:"):
        version = lines.pop(0).split()[-1]
    if version not in ("0.1", "0.2"):
        raise SourceFormatError(
            "unknown version of BPE codes", path, expected="0.1 or 0.2", found=version
        )
    pairs = [tuple(line.split()) for line in lines if line.strip()]
    for number, pair in enumerate(pairs):
        if len(pair) != 2:
            raise SourceFormatError(
                "a BPE code is no pair", path, entry=f"pair {number}", found=" ".join(pair)
            )
    return version, pairs


def read_text(path: str) -> str:
    """The content of a text file; gzip if its name ends in ".gz".

    Raises:
        SourceNotFoundError, SourceFormatError: if the file is missing, damaged or not UTF-8.
    """
    try:
        with gzip.open(path) if path.endswith(".gz") else open(path, "rb") as file:
            return file.read().decode("utf-8")
    except FileNotFoundError as error:
        raise SourceNotFoundError("the file does not exist", path) from error
    except (OSError, EOFError) as error:
        raise SourceFormatError(f"the file cannot be read: {error}", path) from error
    except UnicodeDecodeError as error:
        raise SourceFormatError("the text is not UTF-8", path, position=error.start) from error
