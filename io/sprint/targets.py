"""What becomes of the features and targets that RASR sends, before a dataset has them."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import ConfigError, MissingSequenceError, ShapeMismatchError
from .post_process import PostProcessor, get_post_processor
from .vocabulary import create_vocabulary, read_text

_log = logging.getLogger(__name__)

# "orth" and unmapped strings are the bytes of their UTF-8.
BYTE_LABELS = [chr(byte) for byte in range(256)]


@dataclass
class TargetConverter:
    """Options of `SprintDatasetBase` for targets, checked and with their files loaded.

    Attributes:
        maps: key -> (value -> class, or array).
        add_final_zero: whether strings come a second time with a zero behind them.
        post_process: applied to "orth".
        vocabularies: key of a new target -> vocabulary that makes it from "orth".
        reduce_factor: the alignment has one class for so many frames.
    """

    maps: dict[str, Mapping[Any, Any]]
    add_final_zero: bool
    post_process: PostProcessor
    vocabularies: dict[str, Any]
    reduce_factor: int
    _ignored: set[str] = field(default_factory=set)

    @classmethod
    def from_options(
        cls,
        target_maps: Mapping[str, Any] | None,
        str_add_final_zero: bool,
        orth_post_process: Any,
        bpe: Any,
        orth_vocab: Any,
        reduce_target_factor: int,
    ) -> TargetConverter:
        """See `SprintDatasetBase`.

        Raises:
            ConfigError: if an option is malformed.
            SourceNotFoundError, SourceFormatError: if a file of one is missing or damaged.
        """
        if not isinstance(reduce_target_factor, int) or reduce_target_factor < 1:
            raise ConfigError(
                "reduce_target_factor is no positive integer", found=repr(reduce_target_factor)
            )
        vocabularies = {}
        if bpe:
            vocabularies["bpe"] = create_vocabulary(bpe, "BytePairEncoding")
        if orth_vocab:
            vocabularies["orth_classes"] = create_vocabulary(orth_vocab)
        maps = {key: _load_map(key, value) for key, value in (target_maps or {}).items()}
        post_process = get_post_processor(orth_post_process)
        return cls(maps, str_add_final_zero, post_process, vocabularies, reduce_target_factor)

    def set_random_seed(self, seed: int) -> None:
        """Begins an epoch, for vocabularies that draw at random."""
        vocabulary = self.vocabularies.get("orth_classes")
        if hasattr(vocabulary, "set_random_seed"):
            vocabulary.set_random_seed(seed)

    def dims(self, output_dim: int) -> dict[str, tuple[int, int]]:
        """Number of classes and of axes per target.

        Args:
            output_dim: number of classes of the alignment; none if not positive.
        """
        dims = {"classes": (output_dim, 1)} if output_dim > 0 else {}
        for key, vocabulary in self.vocabularies.items():
            dims[key] = (vocabulary.num_labels, 1)
        speakers = self.maps.get("speaker_name")
        num_speakers = len(BYTE_LABELS) if speakers is None else len(speakers)
        return {**dims, "orth": (len(BYTE_LABELS), 1), "speaker_name": (num_speakers, 1)}

    def labels(self) -> dict[str, list[str]]:
        """Class names per target."""
        named = {key: list(vocabulary.labels) for key, vocabulary in self.vocabularies.items()}
        return {**named, "orth": BYTE_LABELS}

    def convert(
        self, targets: Mapping[str, Any], num_frames: int, name: str | None
    ) -> dict[str, np.ndarray]:
        """The arrays of a sequence's targets.

        Args:
            targets: arrays and strings.
            num_frames: of the features.
            name: of the sequence, for errors.

        Raises:
            ShapeMismatchError: if the alignment does not fit to the features.
            MissingSequenceError: if there is no target, or no value in a map, where there must be.
        """
        values = dict(targets)
        self._check_alignment(values.get("classes"), num_frames, name)
        for key in ("speaker_name", "orth"):
            if key in values:
                values[key] = _text(values[key]).strip()
        if "orth" in values:
            values["orth"] = self.post_process(values["orth"])
        for key, vocabulary in self.vocabularies.items():
            orth = _get(values, "orth", name, f"{key!r} is made from it")
            values[key] = np.array(vocabulary.get_seq(orth), np.int32)
        for key, mapping in self.maps.items():
            value = _get(values, key, name, "target_maps maps it")
            values[key] = _mapped(mapping, key, value, num_frames, name)
        return self._arrays(values)

    def _check_alignment(self, classes: Any, num_frames: int, name: str | None) -> None:
        expected = (-(-num_frames // self.reduce_factor),)
        if classes is not None and np.shape(classes) != expected:
            raise ShapeMismatchError(
                f"the alignment does not fit to {num_frames} frames",
                entry=name,
                expected=f"{expected[0]} classes with reduce_target_factor={self.reduce_factor}",
                found=f"shape {np.shape(classes)}",
            )

    def _arrays(self, values: dict[str, Any]) -> dict[str, np.ndarray]:
        arrays: dict[str, np.ndarray] = {}
        for key, value in values.items():
            if isinstance(value, str | bytes):
                data = value.encode("utf-8") if isinstance(value, str) else value
                arrays[key] = np.frombuffer(data, np.uint8)
                if self.add_final_zero:
                    arrays[f"{key}0"] = np.frombuffer(data + b"\0", np.uint8)
            elif isinstance(value, np.ndarray):
                arrays[key] = value
            elif key not in self._ignored:
                self._ignored.add(key)
                _log.warning("target %r is a %s and is ignored", key, type(value).__name__)
        return arrays


def _load_map(key: str, value: Any) -> Mapping[Any, Any]:
    if isinstance(value, str | os.PathLike):
        return {
            label: index for index, label in enumerate(read_text(os.fspath(value)).splitlines())
        }
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"the map of target {key!r} is malformed",
            expected="a dict, or a file with one value a line",
            found=type(value).__name__,
        )
    return value


def _mapped(
    mapping: Mapping[Any, Any], key: str, value: Any, num_frames: int, name: str | None
) -> np.ndarray:
    try:
        array = np.asarray(mapping[value])
    except (KeyError, TypeError) as error:
        raise MissingSequenceError(
            f"the map of target {key!r} has no {value!r}", entry=name
        ) from error
    return np.full(num_frames, array) if array.ndim == 0 else array


def _get(values: dict[str, Any], key: str, name: str | None, why: str) -> Any:
    if key not in values:
        raise MissingSequenceError(
            f"the trainer did not send target {key!r}, but {why}",
            entry=name,
            found=", ".join(sorted(values)) or "no targets",
        )
    return values[key]


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("utf-8")
