"""Hands sequences from the thread that gets them to the thread that reads them."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Condition, get_ident

import numpy as np

from ..io.errors import SourceFormatError
from .seq import DatasetSeq


class SeqBuffer:
    """The sequences of one epoch between their arrival and their use, in order.

    The source adds sequences and waits when it is too far ahead; the reader asks for them and
    waits until they are there. Errors of the source are raised where the reader would miss
    something, so that what it gets does not depend on timing.

    Args:
        cond: guards everything; may be shared.
        max_ahead: how many sequences the source may be ahead of what the reader asked for.
        min_ahead: how many it is ahead when it goes on after it had to wait.
        tags: the tags that must come, in this order; None for any.

    Attributes:
        start: the first sequence that is kept.
        num_seqs, num_frames: what arrived so far.
        complete: whether no more will arrive.
        complete_seen_all: whether that was everything.
        keys: the data keys; None before the first sequence.
    """

    def __init__(
        self,
        cond: Condition,
        max_ahead: int,
        min_ahead: int,
        tags: Sequence[str] | None = None,
    ) -> None:
        self._cond = cond
        self._max_ahead = max_ahead
        self._min_ahead = min_ahead
        self.tags = tags
        self._seqs: dict[int, DatasetSeq] = {}
        self._requested_end = 0
        self._discarding = False
        self._error: BaseException | None = None
        self._source_thread: int | None = None
        self.start = 0
        self.num_seqs = 0
        self.num_frames = 0
        self.complete = False
        self.complete_seen_all = False
        self.keys: list[str] | None = None

    # The source.

    def add(self, data: dict[str, np.ndarray], tag: str | None) -> int | None:
        """Adds a sequence, and waits first if the reader is far behind.

        Args:
            data: array per data key; "data" is one of them.
            tag: of the sequence; "seq-<index>" if there is none.

        Returns:
            The index; None if nobody wants more sequences.

        Raises:
            RuntimeError: if the epoch is over.
            SourceFormatError: if the tag is not the one that must come.
        """
        with self._cond:
            if self.complete:
                raise RuntimeError("data arrive behind the end of the epoch")
            self._source_thread = get_ident()
            index = self.num_seqs
            self._check_tag(index, tag)
            if index >= self._requested_end + self._max_ahead:
                self._cond.wait_for(
                    lambda: self._discarding or index < self._requested_end + self._min_ahead
                )
            if self._discarding:
                return None
            self.num_seqs += 1
            self.num_frames += data["data"].shape[0]
            self.keys = self.keys or sorted(data)
            if index >= self.start:
                self._seqs[index] = DatasetSeq(index, data, seq_tag=tag)
            self._cond.notify_all()
            return index

    def _check_tag(self, index: int, tag: str | None) -> None:
        if self.tags is None or (index < len(self.tags) and self.tags[index] == tag):
            return
        expected = repr(self.tags[index]) if index < len(self.tags) else "no more sequences"
        raise SourceFormatError(
            f"sequence {index} is another one than the given order says",
            expected=expected,
            found=repr(tag),
        )

    def finish(self, seen_all: bool = True, error: BaseException | None = None) -> None:
        """No more sequences will come."""
        with self._cond:
            self._error = error
            self.complete = True
            self.complete_seen_all = seen_all and error is None
            self._cond.notify_all()

    # The reader.

    @property
    def failed(self) -> bool:
        """Whether the source ended with an error."""
        return self._error is not None

    def discard(self) -> None:
        """Nobody wants the sequences any more. A waiting source goes on."""
        with self._cond:
            self._discarding = True
            self.forget_before(self.num_seqs)
            self._cond.notify_all()

    def wait_for(self, end: int) -> bool:
        """Waits until all sequences before `end` arrived, or no more will; whether they did.

        Raises:
            SeqshardError: if the source failed before that.
            RuntimeError: if it would have to wait for its own thread, or the epoch was given up.
        """
        with self._cond:
            if end > self._requested_end:
                self._requested_end = end
                self._cond.notify_all()
            if not self._is_decided(end):
                if get_ident() == self._source_thread:
                    raise RuntimeError("the thread that adds sequences cannot wait for them")
                self._cond.wait_for(lambda: self._is_decided(end))
            if self.num_seqs >= end:
                return True
            if self._discarding and not self.complete_seen_all:
                raise RuntimeError("the epoch was ended before all its sequences came")
            if self._error is not None:
                raise self._error
            return False

    def _is_decided(self, end: int) -> bool:
        return self.num_seqs >= end or self.complete or self._discarding

    def get(self, index: int) -> DatasetSeq:
        """A sequence; waits for it.

        Raises:
            IndexError: if it is not there any more, or not in this epoch.
            SeqshardError: if the source failed before it came.
        """
        with self._cond:
            if index < self.start:
                raise IndexError(f"sequence {index} is gone, as {self.start} was loaded already")
            if not self.wait_for(index + 1):
                raise IndexError(f"there is no sequence {index}, only {self.num_seqs}")
            return self._seqs[index]

    def forget_before(self, start: int) -> None:
        """Lets go of sequences that are not needed any more."""
        with self._cond:
            for index in range(self.start, min(start, self.num_seqs)):
                self._seqs.pop(index, None)
            self.start = max(self.start, start)
