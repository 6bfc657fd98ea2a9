"""`SiameseHDFDataset`: triplets of an anchor, a sequence of its class, and one of another class."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar
from zipfile import BadZipFile

import numpy as np

from ..io.errors import ConfigError, SourceFormatError, SourceNotFoundError
from .cached2 import CachedDataset2
from .nextgen import NextGenFiles, corpus_order
from .seq import DatasetSeq
from .stream_parsers import PARSERS, StreamParser, normalize_seq_name

TRIPLET = 3


class SiameseHDFDataset(CachedDataset2):
    """Reads NextGen files (see `NextGenHDFDataset`) as triplets for metric learning.

    Every sequence has one class, the first value of its label stream. For each anchor of the
    epoch, another sequence of its class is drawn (the anchor itself if it is the only one), then a
    class that is not its own, and a sequence of that class. The draws depend on the seed of the
    epoch alone, so that they can be repeated.

    The data keys of a stream "x" are "x_0" (anchor), "x_1" (same class) and "x_2" (other class);
    the label stream has all three together as well ("words_all"), and "data" is the input stream
    of the anchor.

    Attributes:
        curr_epoch_triplets: corpus indices (anchor, same class, other class) of the epoch.
        seq_to_target: class of every name.
        target_to_seqs: names of every class.
        class_probs: probabilities [classes, classes] of the other class, or None for uniform.
        targets_stream: the label stream.
        all_seq_names, seq_name_to_idx, file_indices, all_parsers: see `NextGenFiles`.
    """

    parsers: ClassVar[dict[str, type[StreamParser]]] = PARSERS
    _getnewargs_remap: ClassVar[dict[str, str]] = {"seq_label_stream": "targets_stream"}

    def __init__(
        self,
        input_stream_name: str,
        seq_label_stream: str = "words",
        class_distribution: str | os.PathLike[str] | None = None,
        files: Iterable[str | os.PathLike[str]] | None = None,
        **kwargs: Any,
    ) -> None:
        """Opens the files.

        Args:
            input_stream_name: the feature stream.
            seq_label_stream: the stream with the class of each sequence.
            class_distribution: .npz file whose `arr_0` [classes, classes] has in row i the
                probabilities of the other class for anchors of class i; default: uniform.
            files: paths.
            kwargs: see `Dataset`.

        Raises:
            SeqshardError: as `NextGenFiles.add`, or if `class_distribution` cannot be read.
        """
        super().__init__(**kwargs)
        self.input_stream_name = input_stream_name
        self.targets_stream = seq_label_stream
        self.class_distribution = class_distribution
        self.class_probs = None if class_distribution is None else _load_probs(class_distribution)
        self._corpus = NextGenFiles()
        self.files = self._corpus.files
        self.h5_files = self._corpus.h5_files
        self.all_seq_names = self._corpus.names
        self.seq_name_to_idx = self._corpus.index_by_name
        self.file_indices = self._corpus.file_indices
        self.all_parsers = self._corpus.parsers
        self.seq_order: Sequence[int] = []
        self.seq_to_target: dict[str, int] = {}
        self.target_to_seqs: dict[int, list[str]] = {}
        self.curr_epoch_triplets: list[tuple[int, int, int]] = []
        self._class_of: np.ndarray = np.zeros(0, np.int64)
        for path in files or ():
            self.add_file(path)

    def __del__(self) -> None:
        corpus = getattr(self, "_corpus", None)
        if corpus is not None:
            corpus.close()

    def add_file(self, path: str | os.PathLike[str]) -> None:
        """Appends the sequences of one more file; errors as `NextGenFiles.add`."""
        self._corpus.add(path, [self.input_stream_name, self.targets_stream])
        self.num_outputs = self._corpus.num_outputs()
        self.num_inputs = self.num_outputs[self.input_stream_name][0]

    def initialize(self) -> None:
        """Reads the classes of all sequences.

        Raises:
            SourceFormatError: if a sequence has no class.
            ConfigError: if there are fewer than two classes, or too few probabilities.
        """
        self._class_of = self._read_classes()
        self.seq_to_target = dict(zip(self.all_seq_names, self._class_of.tolist(), strict=True))
        self.target_to_seqs = {}
        for name, target in self.seq_to_target.items():
            self.target_to_seqs.setdefault(target, []).append(name)
        classes = sorted(self.target_to_seqs)
        if len(classes) < 2:
            raise ConfigError("triplets need sequences of two classes", found=f"{classes}")
        if self.class_probs is not None and not 0 <= classes[0] <= classes[-1] < len(
            self.class_probs
        ):
            raise ConfigError(
                "the class distribution does not have all classes",
                os.fspath(self.class_distribution),
                expected=f"classes {classes[0]} to {classes[-1]}",
                found=f"{len(self.class_probs)} rows",
            )
        super().initialize()

    def init_seq_order(
        self,
        epoch: int | None = None,
        seq_list: Sequence[str] | None = None,
        seq_order: Sequence[int] | None = None,
    ) -> bool:
        """Starts an epoch and draws its triplets; see `Dataset.init_seq_order`."""
        super().init_seq_order(epoch=epoch, seq_list=seq_list, seq_order=seq_order)
        self.seq_order = corpus_order(self, self._corpus, epoch or 1, seq_list, seq_order)
        self._num_seqs = None if epoch is None else len(self.seq_order)
        seed = self._get_random_seed_for_epoch(epoch=epoch or 1)
        part = ((epoch or 1) - 1) % self.partition_epoch
        rng = np.random.RandomState([seed, part, self._shard_index])
        anchors = np.asarray(self.seq_order, np.int64)
        drawn = draw_triplets(anchors, self._class_of, self.class_probs, rng)
        self.curr_epoch_triplets = [tuple(row) for row in drawn.tolist()]
        return True

    def supports_seq_order_sorting(self) -> bool:
        """True: lengths are known."""
        return True

    def get_all_tags(self) -> list[str]:
        """Names of all sequences in the order of the files."""
        return list(self.all_seq_names)

    def get_total_num_seqs(self, *, fast: bool = False) -> int:
        """Number of sequences in all files."""
        return len(self.all_seq_names)

    def get_current_seq_order(self) -> Sequence[int]:
        """Corpus indices of the anchors of the epoch."""
        return self.seq_order

    def is_data_sparse(self, key: str) -> bool:
        """Whether a key is no feature stream; feature streams have "features" in their name."""
        return "features" not in key

    def get_data_dim(self, key: str) -> int:
        """Number of features or classes of "x" or "x_0", "x_1", ...; 1 if unknown."""
        stream = key.rpartition("_")[0] if "_" in key else key
        return self.num_outputs[stream][0] if stream in self.num_outputs else 1

    def _read_classes(self) -> np.ndarray:
        parsers = self.all_parsers.get(self.targets_stream, ())
        classes = np.zeros(len(self.all_seq_names), np.int64)
        rows = zip(self.all_seq_names, self.file_indices, strict=True)
        for index, (name, at) in enumerate(rows):
            values = parsers[at].get_data(normalize_seq_name(name))
            if not len(values):
                raise SourceFormatError(
                    "a sequence without class", self.files[at], name, expected="one label"
                )
            classes[index] = int(values[0])
        return classes

    def _collect_single_seq(self, seq_idx: int) -> DatasetSeq | None:
        if seq_idx >= len(self.seq_order):
            return None
        triplet = self.curr_epoch_triplets[seq_idx]
        targets = {
            f"{stream}_{position}": array
            for position, index in enumerate(triplet)
            for stream, array in self._corpus.read(index).items()
        }
        labels = [targets[f"{self.targets_stream}_{position}"] for position in range(TRIPLET)]
        targets[f"{self.targets_stream}_all"] = np.concatenate(labels, axis=0)
        return DatasetSeq(
            seq_idx=seq_idx,
            seq_tag=self.all_seq_names[triplet[0]],
            features=targets[f"{self.input_stream_name}_0"],
            targets=targets,
        )


def draw_triplets(
    anchors: np.ndarray,
    class_of: np.ndarray,
    probs: np.ndarray | None,
    rng: np.random.RandomState,
) -> np.ndarray:
    """Draws for every anchor a sequence of its class and one of another class.

    Args:
        anchors: int64 [n], indices of sequences.
        class_of: int64 [num_seqs], class of every sequence; at least two classes.
        probs: float [classes, classes], row i has the probabilities of the other class for class
            i; None for uniform. Own class and classes without sequences do not count.
        rng: the source of chance.

    Returns:
        int64 [n, 3]: anchor, same class (the anchor itself if it is alone), other class.

    Raises:
        ConfigError: if a class has no other class with a positive probability.
    """
    classes, members, counts = np.unique(class_of, return_inverse=True, return_counts=True)
    by_class = np.argsort(members, kind="stable")
    first = np.cumsum(counts) - counts
    place = np.empty(len(class_of), np.int64)
    place[by_class] = np.arange(len(class_of)) - np.repeat(first, counts)

    own = members[anchors]
    # A step of 1 to count - 1 around the class never ends at the anchor.
    step = 1 + (rng.random_sample(len(anchors)) * (counts[own] - 1)).astype(np.int64)
    same = by_class[first[own] + (place[anchors] + step) % counts[own]]
    other = _draw_other(own, classes, probs, rng)
    pick = (rng.random_sample(len(anchors)) * counts[other]).astype(np.int64)
    return np.stack([anchors, same, by_class[first[other] + pick]], axis=1)


def _draw_other(
    own: np.ndarray, classes: np.ndarray, probs: np.ndarray | None, rng: np.random.RandomState
) -> np.ndarray:
    """Positions in `classes`, int64 [n], never the own one."""
    chance = rng.random_sample(len(own))
    if probs is None:
        step = 1 + (chance * (len(classes) - 1)).astype(np.int64)
        return (own + step) % len(classes)
    table = probs[np.ix_(classes, classes)].astype(np.float64)
    np.fill_diagonal(table, 0)
    edges = np.cumsum(table, axis=1)
    total = edges[own, -1]
    if len(own) and not (total > 0).all():
        lonely = classes[own[~(total > 0)][0]]
        raise ConfigError(
            "the class distribution leaves no other class to draw", found=f"class {lonely}"
        )
    other = np.empty(len(own), np.int64)
    for position in np.unique(own):
        rows = own == position
        at = np.searchsorted(edges[position], chance[rows] * total[rows], side="right")
        # Rounding must not lead behind the last class that can be drawn.
        other[rows] = np.minimum(at, np.flatnonzero(table[position])[-1])
    return other


def _load_probs(path: str | os.PathLike[str]) -> np.ndarray:
    path = os.fspath(path)
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
            probs = arrays["arr_0"]
    except FileNotFoundError as error:
        raise SourceNotFoundError("there is no such file", path) from error
    except (OSError, ValueError, KeyError, EOFError, BadZipFile, TypeError, MemoryError) as error:
        raise SourceFormatError(f"this is no .npz file with arr_0: {error}", path) from error
    square = probs.ndim == 2 and probs.shape[0] == probs.shape[1]
    if not square or probs.dtype.kind not in "fiu" or not ((probs >= 0) & (probs < np.inf)).all():
        raise SourceFormatError(
            "a class distribution has one row of probabilities per class",
            path,
            "arr_0",
            expected="numbers >= 0 of shape (n, n)",
            found=f"{probs.dtype} of shape {probs.shape}",
        )
    return probs
