"""Progress of a build, seen from its output folder.

Runners differ in what they tell while they run, and the local one tells nothing; but the plan and
the receipts of finished shards stand in the output folder on every runner.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TextIO

import msgspec

from ..io import storage
from ..io.receipts import STAGING

POLL_SECONDS = 0.5
REMOTE_POLL_SECONDS = 10.0
LOG_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class BuildState:
    """How far a build is: shards and payload bytes planned, shards finished."""

    num_shards: int
    num_bytes: int
    finished: int

    @property
    def bytes_done(self) -> int:
        """Payload bytes of the finished shards; shards are balanced."""
        return self.num_bytes * self.finished // max(1, self.num_shards)


def read_state(output: str) -> BuildState | None:
    """The state of the build in a folder, or None before there is a plan."""
    staging = storage.join(output, STAGING)
    for name in storage.list_names(staging):
        folder = storage.join(staging, name)
        names = storage.list_names(folder)
        if "plan.json" in names:
            plan = msgspec.json.decode(
                storage.read_bytes(storage.join(folder, "plan.json")), type=dict[str, int]
            )
            finished = sum(name.endswith(".receipt") for name in names)
            return BuildState(plan["num_shards"], plan["num_bytes"], finished)
    return None


@contextlib.contextmanager
def watch_build(output: str, stream: TextIO) -> Iterator[None]:
    """Shows progress while the block runs: a bar on a terminal, else a line now and then."""
    stop = threading.Event()
    show = _show_bar if stream.isatty() else _show_lines
    thread = threading.Thread(
        target=show, args=(output, stream, stop), name="progress", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _poll(output: str, stop: threading.Event) -> Iterator[BuildState | None]:
    """The state again and again; None while there is no plan yet."""
    interval = REMOTE_POLL_SECONDS if storage.is_url(output) else POLL_SECONDS
    while not stop.wait(interval):
        # The folder changes under our feet; a look that fails is repeated at the next turn.
        with contextlib.suppress(Exception):
            yield read_state(output)


def _show_bar(output: str, stream: TextIO, stop: threading.Event) -> None:
    from tqdm import tqdm

    with contextlib.ExitStack() as stack:
        bar = tqdm(file=stream, desc="indexing", bar_format="{desc} {elapsed}", leave=False)
        stack.callback(lambda: bar.close())
        for state in _poll(output, stop):
            if state is None:
                bar.refresh()
                continue
            if bar.total is None:
                # What an earlier run finished is no measure of the speed of this one.
                bar.close()
                bar = tqdm(
                    file=stream,
                    total=state.num_bytes,
                    initial=state.bytes_done,
                    unit="B",
                    unit_scale=True,
                    leave=False,
                )
            bar.set_description(f"shard {state.finished}/{state.num_shards}", refresh=False)
            bar.update(state.bytes_done - bar.n)


def _show_lines(output: str, stream: TextIO, stop: threading.Event) -> None:
    start = last = time.monotonic()
    first: BuildState | None = None
    for state in _poll(output, stop):
        now = time.monotonic()
        if first is None and state is not None:
            first, start = state, now
        if now - last < LOG_SECONDS:
            continue
        last = now
        if first is None:
            print(f"indexing, {now - start:.0f} s", file=stream)
        elif state is not None:  # the plan goes away shortly before the end
            print(progress_line(first, state, now - start), file=stream)


def progress_line(first: BuildState, state: BuildState, seconds: float) -> str:
    """How far a build is, how fast, and how long it will take.

    Args:
        first: its state when it was first looked at, of which an earlier run may have the merit.
        state: its state `seconds` later.
    """
    rate = (state.bytes_done - first.bytes_done) / seconds if seconds else 0.0
    left = (state.num_bytes - state.bytes_done) / rate if rate else None
    return (
        f"{state.finished}/{state.num_shards} shards, {rate / 1e6:.0f} MB/s"
        f"{'' if left is None else f', about {left:.0f} s left'}"
    )
