"""Sequences from RASR: `SprintDatasetBase` inside it, `ExternSprintDataset` next to it.

Names, options and behaviour are those of `returnn.datasets.sprint`.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Condition, RLock, Thread, current_thread
from typing import Any, ClassVar

from ..io.errors import ConfigError, SeqshardError, ShapeMismatchError
from ..io.sprint.messages import Init, Message
from ..io.sprint.trainer import TrainerProcess, TrainerSpec, expand_arguments
from .sprint_base import SprintDatasetBase, refuse_indices
from .sprint_buffer import SeqBuffer

__all__ = ["ExternSprintDataset", "SprintDatasetBase"]


class ExternSprintDataset(SprintDatasetBase):
    """Sequences that a RASR process computes, one process per epoch.

    RASR determines the order: it gets a seed that changes as RETURNN's would, the number of the
    partition, and the list of segments if `init_seq_order` or `seq_list_filter_file` name some.
    The process of an epoch begins with `init_seq_order`, that of epoch 1 already with the
    constructor, which waits for the dimensions. It ends with the epoch, with the dataset, and with
    this process, however that ends.

    Whatever is wrong with the process is raised as `TrainerError` with the end of its log, when a
    sequence is asked for that did not come.

    Args:
        sprintTrainerExecPath: executable, RASR's nn-trainer; or a list with further arguments.
        sprintConfigStr: arguments for it; see `expand_arguments`.
        partitionEpoch: old name of partition_epoch.
        start_timeout: seconds that the process may take before it sends something, without a
            message or a line of its log; None for any. Not an option of RETURNN's.
        timeout: the same between sequences and for ending. Not an option of RETURNN's.
        kwargs: see `SprintDatasetBase`.

    Raises:
        ConfigError: if an option is malformed.
        SourceNotFoundError: if the executable does not exist.
        TrainerError: if it does not come to the point of sending data.
    """

    _getnewargs_exclude_attrs: ClassVar[set[str]] = {"partitionEpoch"}

    def __init__(
        self,
        sprintTrainerExecPath: str | Sequence[str],
        sprintConfigStr: str | Callable[[], Any] | Sequence[str | Callable[[], str]],
        partitionEpoch: int | None = None,
        start_timeout: float | None = TrainerSpec.start_timeout,
        timeout: float | None = TrainerSpec.timeout,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if partitionEpoch:
            if self.partition_epoch > 1:
                raise ConfigError("both partitionEpoch and partition_epoch are given")
            self.partition_epoch = partitionEpoch
        self._sprintTrainerExecPath = sprintTrainerExecPath
        self._sprintConfigStr = sprintConfigStr
        self.start_timeout = start_timeout
        self.timeout = timeout
        self._epoch_process: _EpochProcess | None = None
        self.use_multiple_epochs()
        self._begin(1, None)
        with self.cond:
            self.cond.wait_for(lambda: self.num_outputs is not None or self._buffer.complete)
        if self.num_outputs is None:
            self._buffer.wait_for(1)  # raises what went wrong

    def init_seq_order(
        self,
        epoch: int | None = None,
        seq_list: Sequence[str] | None = None,
        seq_order: Sequence[int] | None = None,
    ) -> bool:
        """Starts the process of an epoch, unless it runs and nothing was loaded from it.

        Args:
            epoch: from 1, the default.
            seq_list: tags of the sequences to read, in this order; a missing one is an error.
            seq_order: not possible.

        Raises:
            ConfigError: if options exclude each other.
        """
        refuse_indices(seq_order)
        epoch = 1 if epoch is None else epoch
        seq_list = None if seq_list is None else list(seq_list)
        if seq_list is not None and (self.partition_epoch > 1 or self.seq_tags_filter is not None):
            raise ConfigError("a given order excludes partition_epoch and seq_list_filter_file")
        if self._is_at_start_of(epoch, seq_list):
            super(SprintDatasetBase, self).init_seq_order(epoch=epoch, seq_list=seq_list)
            return False
        self._begin(epoch, seq_list)
        return True

    def _is_at_start_of(self, epoch: int, seq_list: Sequence[str] | None) -> bool:
        process = self._epoch_process
        if process is None or process.owner != os.getpid() or process.buffer.failed:
            return False
        same = (self.returnn_epoch, self.predefined_seq_list_order) == (epoch, seq_list)
        return same and process.buffer.start == 0

    def _begin(self, epoch: int, seq_list: Sequence[str] | None) -> None:
        self.close()
        super().init_seq_order(epoch=epoch, seq_list=seq_list)
        if self._buffer.complete_seen_all:
            self._estimated_num_seqs = self._buffer.num_seqs
        self.init_sprint_epoch(epoch)
        try:
            process = TrainerProcess(self._spec(epoch))
        except Exception as error:
            self._buffer.finish(error=error)
            raise
        self._epoch_process = _EpochProcess.start(self, process, self._buffer)

    def _spec(self, epoch: int) -> TrainerSpec:
        path, segments = self._sprintTrainerExecPath, self.predefined_seq_list_order
        keep_order = segments is not None
        if segments is None and self.seq_tags_filter is not None:
            segments = sorted(self.seq_tags_filter)
        return TrainerSpec(
            executable=(path,) if isinstance(path, str | os.PathLike) else tuple(path),
            config=tuple(expand_arguments(self._sprintConfigStr)),
            seed=self._get_random_seed_for_epoch(epoch=epoch) - 1,
            num_partitions=self.partition_epoch,
            partition=(epoch - 1) % self.partition_epoch,
            segments=segments,
            keep_order=keep_order,
            start_timeout=self.start_timeout,
            timeout=self.timeout,
        )

    def _take_dimensions(self, init: Init) -> None:
        if self.num_outputs is None:
            self.set_dimensions(init.input_dim, init.output_dim)
        classes = self._targets.dims(init.output_dim).get("classes")
        if (init.input_dim, classes) != (self.num_inputs, self.num_outputs.get("classes")):
            raise ShapeMismatchError(
                "the dimensions changed between epochs",
                expected=f"{self.num_inputs} features, classes {self.num_outputs.get('classes')}",
                found=f"{init.input_dim} features, classes {classes}",
            )

    def finish_epoch(self, *, free_resources: bool = False) -> None:
        """Ends the epoch and its process."""
        self.close()
        with self.cond:
            self.returnn_epoch = None
        super().finish_epoch(free_resources=free_resources)

    def close(self) -> None:
        """Ends the process and forgets its sequences; `init_seq_order` starts a new one."""
        process, self._epoch_process = self._epoch_process, None
        if process is None:
            return
        if process.owner == os.getpid():
            process.stop()
        else:  # forked: the thread is not here, and may have had the lock
            self.lock = RLock()
            self.cond = Condition(self.lock)

    # RETURNN's name of it.
    _exit_handler = close


@dataclass(frozen=True)
class _EpochProcess:
    """The process of an epoch and the thread that reads from it."""

    process: TrainerProcess
    buffer: SeqBuffer
    thread: Thread
    stop: Callable[[], Any]
    owner: int

    @classmethod
    def start(
        cls, dataset: ExternSprintDataset, process: TrainerProcess, buffer: SeqBuffer
    ) -> _EpochProcess:
        # The thread must not keep the dataset alive: its end is that of the process.
        args = (weakref.ref(dataset), process, buffer)
        thread = Thread(target=_read_epoch, args=args, name=f"{dataset.name} reader", daemon=True)
        thread.start()
        stop = weakref.finalize(dataset, _stop, process, buffer, thread, os.getpid())
        return cls(process, buffer, thread, stop, os.getpid())


def _stop(process: TrainerProcess, buffer: SeqBuffer, thread: Thread, owner: int) -> None:
    if os.getpid() != owner:
        return
    buffer.discard()
    process.kill()
    if thread is not current_thread():
        thread.join()


def _read_epoch(
    dataset_ref: Callable[[], ExternSprintDataset | None],
    process: TrainerProcess,
    buffer: SeqBuffer,
) -> None:
    """The thread: brings all sequences from the process to the buffer."""
    error: BaseException | None = None
    seen_all = False
    try:
        with process:
            for message in process.messages():
                if not _take_message(dataset_ref, message, process, buffer):
                    break
            else:
                _check_complete(process, buffer)
                seen_all = True
    except BaseException as caught:
        error = caught
    buffer.finish(seen_all, error)


def _take_message(
    dataset_ref: Callable[[], ExternSprintDataset | None],
    message: Message,
    process: TrainerProcess,
    buffer: SeqBuffer,
) -> bool:
    """Whether more is wanted."""
    dataset = dataset_ref()
    if dataset is None:
        return False
    try:
        if isinstance(message, Init):
            dataset._take_dimensions(message)
            return True
        data = dataset._convert(message.features, message.targets, message.name)
        del dataset  # while it waits
        return buffer.add(data, message.name) is not None
    except SeqshardError as error:
        raise process.failure(str(error)) from error


def _check_complete(process: TrainerProcess, buffer: SeqBuffer) -> None:
    if buffer.num_seqs == 0:
        raise process.failure("the trainer ended and sent no sequence")
    if buffer.tags is not None and buffer.num_seqs < len(buffer.tags):
        raise process.failure(
            f"the trainer sent {buffer.num_seqs} of the {len(buffer.tags)} sequences of the given "
            f"order; {buffer.tags[buffer.num_seqs]!r} is missing"
        )
