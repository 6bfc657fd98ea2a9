"""One sequence with all its data."""

from __future__ import annotations

from collections.abc import KeysView

import numpy as np

from .numbers_dict import NumbersDict

Features = np.ndarray | dict[str, np.ndarray]


class DatasetSeq:
    """The arrays of one sequence.

    Args:
        seq_idx: index in the order of the epoch (or in the corpus, where that is said).
        features: array per data key; or the array of "data", usually float [time, dim].
        targets: further arrays where `features` is an array; a single array is "classes".
        seq_tag: name of the sequence; "seq-<index>" if not given.
        complete_frac: how much of the epoch is done with this sequence, in (0, 1].

    Raises:
        TypeError: if an index or an array is none.
    """

    def __init__(
        self,
        seq_idx: int,
        features: Features,
        *,
        targets: Features | None = None,
        seq_tag: str | None = None,
        complete_frac: float | None = None,
    ) -> None:
        if not isinstance(seq_idx, int | np.integer):
            raise TypeError(f"seq_idx is a {type(seq_idx).__name__}, not an int")
        self.seq_idx = int(seq_idx)
        self.seq_tag = seq_tag or f"seq-{seq_idx}"
        self.complete_frac = complete_frac
        if isinstance(features, dict):
            if targets is not None:
                raise TypeError("targets are given beside a dict of features: put them into it")
        else:
            if isinstance(targets, np.ndarray):
                targets = {"classes": targets}
            features = {"data": features, **(targets or {})}
        for key, array in features.items():
            if not isinstance(array, np.ndarray):
                raise TypeError(
                    f"{key!r} of {self.seq_tag!r} is a {type(array).__name__}, not an array"
                )
        self.features = features

    @property
    def num_frames(self) -> NumbersDict:
        """Length of the first axis per data key; 1 for scalars."""
        return NumbersDict({k: v.shape[0] if v.ndim else 1 for k, v in self.features.items()})

    def get_data(self, key: str) -> np.ndarray:
        """The array of a data key."""
        return self.features[key]

    def get_data_keys(self) -> KeysView[str]:
        """The data keys."""
        return self.features.keys()

    def __repr__(self) -> str:
        return f"<DatasetSeq seq_idx={self.seq_idx} seq_tag={self.seq_tag!r}>"
