"""Runs a RASR trainer that sends its sequences over a pipe.

    with TrainerProcess(TrainerSpec(("nn-trainer",), ("--config=rasr.config",))) as trainer:
        for message in trainer.messages():
            ...

The trainer is any executable that understands RASR's options. It loads our `extern_interface` and
calls it. The process ends with the context, also if this process is killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import pickle
import select
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from ..errors import ConfigError, SeqshardError, SourceNotFoundError, TrainerError
from .messages import Exit, Init, Message, Segment, parse_message

PACKAGE_FOLDER = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PACKAGE_NAME = __name__.split(".")[0]
MODULE_NAME = f"{PACKAGE_NAME}.io.sprint.extern_interface"
SUPERVISOR = os.path.join(os.path.dirname(os.path.abspath(__file__)), "supervise.py")

PIPE_BYTES = 1 << 20
LOG_BYTES = 8192
LOG_LINES = 20

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainerSpec:
    """What to run.

    Attributes:
        executable: the trainer, and arguments that come first.
        config: the user's options for RASR. Ours come behind them and override them.
        seed: of RASR's random numbers.
        num_partitions, partition: reads one part of the corpus, as RASR's corpus.partition cuts it.
        segments: names of the segments to read, or None for those of the configuration.
        keep_order: whether the segments come in the order of `segments`.
        start_timeout: seconds without a sign of life, neither message nor log, that the trainer
            may take before its first message; None for any.
        timeout: the same between messages, and for ending.
        folder: where to run it, or None for here.
    """

    executable: tuple[str, ...]
    config: tuple[str, ...] = ()
    seed: int = 0
    num_partitions: int = 1
    partition: int = 0
    segments: Sequence[str] | None = None
    keep_order: bool = False
    start_timeout: float | None = 3600.0
    timeout: float | None = 900.0
    folder: str | None = None


def expand_arguments(config: Any) -> list[str]:
    """Arguments as RETURNN's `sprintConfigStr` gives them.

    Args:
        config: a text that is split as a shell does; or a list of arguments; or a function that
            gives either. An argument may be a function that gives a text, and if it is "$NAME", it
            stands for the arguments in the environment variable NAME, or for none.

    Raises:
        ConfigError: for anything else.
    """
    if callable(config):
        config = config()
    try:
        parts = shlex.split(config) if isinstance(config, str) else list(config)
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"malformed arguments of the trainer: {error}", found=repr(config)
        ) from None
    arguments: list[str] = []
    for part in parts:
        part = part() if callable(part) else part
        if not isinstance(part, str):
            raise ConfigError("an argument of the trainer is no text", found=repr(part))
        if part.startswith("$"):
            arguments += expand_arguments(os.environ.get(part[1:], ""))
        else:
            arguments.append(part)
    return arguments


def trainer_options(spec: TrainerSpec, folder: str, c2p_fd: int, p2c_fd: int) -> list[str]:
    """The command line behind the executable. RASR's names; "*" is any component.

    Args:
        spec: what to run.
        folder: where to find our package, and the file "segments" if segments are given.
        c2p_fd, p2c_fd: descriptors of the trainer's ends of the pipes.
    """
    options = [*spec.config, f"--*.seed={spec.seed}"]
    if spec.num_partitions > 1:
        options.append(f"--*.corpus.partition={spec.num_partitions}")
        options.append(f"--*.corpus.select-partition={spec.partition}")
    if spec.segments is not None:
        file = os.path.join(folder, "segments")
        options.append(f"--*.corpus.segments.file={file}")
        if spec.keep_order:
            options.append("--*.corpus.segment-order-shuffle=false")
            options.append(f"--*.corpus.segment-order={file}")
    return [
        *options,
        "--*.python-segment-order=true",
        f"--*.python-segment-order-pymod-path={folder}",
        f"--*.python-segment-order-pymod-name={MODULE_NAME}",
        "--*.use-data-source=false",
        "--*.trainer=python-trainer",
        f"--*.pymod-path={folder}",
        f"--*.pymod-name={MODULE_NAME}",
        f"--*.pymod-config=action:ExternSprintDataset,c2p_fd:{c2p_fd},p2c_fd:{p2c_fd}",
    ]


class TrainerProcess:
    """A running trainer. Used by one thread, but `kill` may be called by any.

    Raises:
        SourceNotFoundError: if the executable does not exist.
    """

    def __init__(self, spec: TrainerSpec) -> None:
        self.spec = spec
        if shutil.which(spec.executable[0]) is None:
            raise SourceNotFoundError(
                "the trainer does not exist or is not executable", spec.executable[0]
            )
        self._owner = os.getpid()
        self._position = 0
        self._log_end = bytearray()
        self._resources = contextlib.ExitStack()
        with contextlib.ExitStack() as undo:
            undo.callback(self._resources.close)
            self._start()
            undo.pop_all()

    def _start(self) -> None:
        folder = tempfile.mkdtemp(prefix="seqshard-trainer-")
        self._resources.callback(self._remove, folder)
        # RASR's Python need not have our package installed, and not everything that lies beside it.
        os.symlink(PACKAGE_FOLDER, os.path.join(folder, PACKAGE_NAME))
        if self.spec.segments is not None:
            with open(os.path.join(folder, "segments"), "w", encoding="utf-8") as file:
                file.writelines(f"{name}\n" for name in self.spec.segments)
        with contextlib.ExitStack() as childs_ends:
            self._messages_fd, c2p_fd = self._pipe(childs_ends)
            self._log_fd, output_fd = self._pipe(childs_ends)
            p2c_fd, own_end = os.pipe()
            childs_ends.callback(os.close, p2c_fd)
            self._resources.callback(os.close, own_end)
            options = trainer_options(self.spec, folder, c2p_fd, p2c_fd)
            # -I: nothing that is meant for the trainer's Python concerns the supervisor.
            supervisor = [sys.executable, "-I", "-S", SUPERVISOR]
            self._process = subprocess.Popen(
                [
                    *supervisor,
                    f"{self._owner},{c2p_fd},{p2c_fd}",
                    *self.spec.executable,
                    *options,
                ],
                cwd=self.spec.folder,
                stdin=subprocess.DEVNULL,
                stdout=output_fd,
                stderr=output_fd,
                pass_fds=(c2p_fd, p2c_fd),
                start_new_session=True,
            )
        self._resources.callback(self._reap)
        self.pid = self._process.pid
        self._end_fd = os.pidfd_open(self.pid)
        self._resources.callback(os.close, self._end_fd)
        self._poll = select.poll()
        for descriptor in (self._messages_fd, self._log_fd, self._end_fd):
            self._poll.register(descriptor, select.POLLIN)

    def _pipe(self, childs_ends: contextlib.ExitStack) -> tuple[int, int]:
        reader, writer = os.pipe()
        self._resources.callback(os.close, reader)
        childs_ends.callback(os.close, writer)
        with contextlib.suppress(OSError):  # the user's pipes may be too large already
            fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        return reader, writer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def kill(self) -> None:
        """Ends the trainer and all that it started; a reader of its messages gets an error."""
        # A process that was forked from this one must leave the trainer alone.
        if os.getpid() == self._owner and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kills what still runs, and gives back all descriptors and files."""
        self._resources.close()

    def _reap(self) -> None:
        self.kill()
        if os.getpid() == self._owner:
            self._process.wait()

    def _remove(self, folder: str) -> None:
        if os.getpid() == self._owner:
            shutil.rmtree(folder, ignore_errors=True)

    def messages(self) -> Iterator[Message]:
        """Yields `Init`, and every `Segment`.

        Raises:
            TrainerError: if the trainer dies or ends early, hangs, or sends something else.
        """
        init = self._read_message(self.spec.start_timeout)
        if not isinstance(init, Init):
            raise self.failure("the first message of the trainer is not 'init'")
        yield init
        while True:
            message = self._read_message(self.spec.timeout)
            if isinstance(message, Exit):
                break
            if not isinstance(message, Segment):
                raise self.failure("the trainer sends a second 'init'")
            if len(message.features) != init.input_dim:
                raise self.failure(
                    f"segment {message.name!r} has {len(message.features)} features where the "
                    f"trainer announced {init.input_dim}"
                )
            yield message
        self._expect_end()

    def failure(self, what: str) -> TrainerError:
        """An error with the end of the trainer's log in it."""
        self._read_log()
        lines = self._log_end.decode("utf-8", "replace").splitlines()[-LOG_LINES:]
        hint = "\n".join(["The end of its log:", *lines]) if lines else "It logged nothing."
        command = " ".join([*self.spec.executable, *self.spec.config])
        return TrainerError(what, command, position=self._position, hint=hint)

    def _read_message(self, timeout: float | None) -> Message:
        start = self._position + 4
        header = self._read(5, timeout)
        size, first = struct.unpack("<ic", header)
        # Text that went to the wrong descriptor would announce a message that never ends.
        if size <= 1 or first != pickle.PROTO:
            raise self.failure(f"the trainer sends garbage: {header!r} begins no message")
        payload = self._read(size, timeout, first)
        try:
            return parse_message(payload)
        except SeqshardError as error:
            self._position = start + (error.position or 0)
            error.position = None
            raise self.failure(f"the trainer sends garbage: {error}") from error

    def _read(self, size: int, timeout: float | None, begin: bytes = b"") -> bytes:
        """Reads what is missing to `size`. Memory grows with what comes, not with `size`."""
        parts = [begin]
        missing = size - len(begin)
        while missing:
            part = self._read_some(min(missing, PIPE_BYTES), timeout)
            if not part:
                raise self._early_end(begin != b"" or missing < size)
            parts.append(part)
            missing -= len(part)
            self._position += len(part)
        return b"".join(parts)

    def _read_some(self, size: int, timeout: float | None) -> bytes:
        """Waits for data; nothing if there is no more."""
        while True:
            ready = self._wait(timeout)
            if self._log_fd in ready:
                self._read_log_once()
            if self._messages_fd in ready:
                return os.read(self._messages_fd, size)
            if ready == {self._end_fd}:  # something else still holds the pipe, but says nothing
                return b""

    def _wait(self, timeout: float | None) -> set[int]:
        """The descriptors that have something; at least one."""
        events = self._poll.poll(None if timeout is None else timeout * 1000)
        if not events:
            raise self.failure(f"the trainer hangs: no sign of life for {timeout:g} seconds")
        return {descriptor for descriptor, _ in events}

    def _expect_end(self) -> None:
        """Waits for the process, as one that crashed may have said "exit" as well."""
        self._poll.unregister(self._messages_fd)
        while self._end_fd not in (ready := self._wait(self.spec.timeout)):
            if self._log_fd in ready:
                self._read_log_once()
        code = self._exit_code()
        if code != 0:
            raise self.failure(f"the trainer sent everything, but {_explain(code)}")

    def _early_end(self, in_message: bool) -> TrainerError:
        # It closed the pipe: a trainer that dies does so a moment before its end can be seen.
        deadline = time.monotonic() + 5.0
        end = select.poll()
        end.register(self._end_fd, select.POLLIN)
        while not end.poll(50) and time.monotonic() < deadline:
            self._read_log()
        when = "in the middle of a message" if in_message else "before it sent 'exit'"
        if self._position == 0:
            when = "before it sent anything"
        return self.failure(f"the trainer {_explain(self._exit_code())} {when}")

    def _exit_code(self) -> int | None:
        """Of the trainer as the supervisor tells it; None if it still runs."""
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        status = os.waitid(os.P_PID, self.pid, options)
        return None if status is None else status.si_status

    def _read_log(self) -> None:
        """Reads what is there of the log."""
        log = select.poll()
        log.register(self._log_fd, select.POLLIN)
        while log.poll(0) and self._read_log_once():
            pass

    def _read_log_once(self) -> bool:
        text = os.read(self._log_fd, PIPE_BYTES)
        if not text:
            with contextlib.suppress(KeyError):
                self._poll.unregister(self._log_fd)
            return False
        self._log_end = (self._log_end + text)[-LOG_BYTES:]
        _log.debug("trainer %d: %s", self.pid, text.decode("utf-8", "replace").rstrip())
        return True


def _explain(code: int | None) -> str:
    if code is None:
        return "closed its pipe"
    if code <= 128:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(code - 128).name}"
    except ValueError:
        return f"ended with exit code {code}"
