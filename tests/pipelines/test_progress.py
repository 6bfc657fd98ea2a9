"""Progress as it is shown while a build runs, seen from the output folder."""

from __future__ import annotations

import io
import json
import threading

import pytest

from seqshard.io.receipts import STAGING
from seqshard.pipelines import progress
from seqshard.pipelines.progress import BuildState, progress_line, read_state, watch_build

WAIT_SECONDS = 180


class Screen(io.StringIO):
    """Standard error, which tells when a text has appeared."""

    def __init__(self, terminal):
        super().__init__()
        self._terminal = terminal
        self._changed = threading.Condition()

    def isatty(self):
        return self._terminal

    def write(self, text):
        with self._changed:
            self._changed.notify_all()
            return super().write(text)

    def wait_for(self, text):
        with self._changed:
            assert self._changed.wait_for(lambda: text in self.getvalue(), WAIT_SECONDS), (
                f"{text!r} does not appear in {self.getvalue()!r}"
            )


@pytest.fixture(autouse=True)
def hurry(monkeypatch):
    monkeypatch.setattr(progress, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(progress, "LOG_SECONDS", 0.0)


class Folder:
    """An output folder as a build leaves it in the middle."""

    def __init__(self, output):
        self.output = str(output)
        self.staging = output / STAGING / "plan-stamp"

    def plan(self, num_shards, num_bytes):
        self.staging.mkdir(parents=True)
        plan = {"num_shards": num_shards, "num_bytes": num_bytes, "num_seqs": 10}
        (self.staging / "plan.json").write_text(json.dumps(plan))

    def finish(self, *shards):
        for shard in shards:
            (self.staging / f"{shard:05d}.receipt").write_bytes(b"")


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


def test_state_of_a_folder(folder):
    assert read_state(folder.output) is None
    folder.plan(4, 4_000)
    folder.finish(0, 2, 3)
    assert read_state(folder.output) == BuildState(4, 4_000, 3)
    assert read_state(folder.output).bytes_done == 3_000


def test_a_build_without_bytes_has_a_state(folder):
    folder.plan(0, 0)
    assert read_state(folder.output).bytes_done == 0


def test_lines_while_a_build_runs(folder):
    screen = Screen(terminal=False)
    with watch_build(folder.output, screen):
        screen.wait_for("indexing, 0 s\n")
        folder.plan(4, 4_000_000)
        screen.wait_for("0/4 shards, 0 MB/s\n")
        folder.finish(0, 1)
        screen.wait_for("2/4 shards, ")
        screen.wait_for("s left\n")
    assert not [t for t in threading.enumerate() if t.name == "progress"]


def test_nothing_is_said_when_the_plan_is_gone(folder, monkeypatch):
    states = [None, BuildState(2, 2_000_000, 0), None]
    monkeypatch.setattr(progress, "_poll", lambda *_: iter(states))
    screen = Screen(terminal=False)
    with watch_build(folder.output, screen):
        pass
    assert screen.getvalue() == "indexing, 0 s\n0/2 shards, 0 MB/s\n"


def test_a_bar_on_a_terminal(folder):
    screen = Screen(terminal=True)
    with watch_build(folder.output, screen):
        screen.wait_for("indexing 00:0")
        folder.plan(4, 4_000_000)
        folder.finish(1)
        screen.wait_for("shard 1/4:  25%")
        folder.finish(0, 2)
        screen.wait_for("shard 3/4:  75%")


def test_a_damaged_plan_does_not_end_the_watch(folder):
    folder.plan(4, 4_000_000)
    path = folder.staging / "plan.json"
    good = path.read_bytes()
    path.write_bytes(b"{")
    screen = Screen(terminal=False)
    with watch_build(folder.output, screen):
        path.write_bytes(good)
        screen.wait_for("0/4 shards")


def test_what_was_finished_before_counts_for_no_speed():
    first, state = BuildState(10, 100_000_000, 4), BuildState(10, 100_000_000, 6)
    assert progress_line(first, state, 2.0) == "6/10 shards, 10 MB/s, about 4 s left"
    assert progress_line(first, first, 2.0) == "4/10 shards, 0 MB/s"
