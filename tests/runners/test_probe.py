"""The first small job: it passes unnoticed, or tells what is wrong with the workers."""

from __future__ import annotations

import json
import os

import pytest

from seqshard.io.errors import ConfigError, OutputFolderError
from seqshard.runners import probe
from seqshard.runners.probe import check_mark, check_workers, leave_mark, software
from seqshard.runners.select import make_options, prepare_runner


@pytest.fixture
def options():
    """Workers in this process do what remote ones would."""
    return make_options("DirectRunner", ["--worker_start_timeout=60"], 0)


def test_workers_that_share_the_folder(options, tmp_path):
    before = options.get_all_options()
    check_workers(options, str(tmp_path))
    assert list(tmp_path.iterdir()) == []
    assert options.get_all_options() == before


def test_workers_that_write_elsewhere(options, tmp_path, monkeypatch):
    monkeypatch.setattr(probe.storage, "list_names", lambda folder: [])
    with pytest.raises(OutputFolderError, match=r"workers cannot write here.*must share") as error:
        check_workers(options, str(tmp_path))
    assert error.value.path == str(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_workers_without_the_folder(options, tmp_path):
    with pytest.raises(OutputFolderError, match="workers cannot write here"):
        check_workers(options, str(tmp_path / "only" / "here"))


def test_a_worker_tells_of_itself(tmp_path):
    leave_mark(str(tmp_path / "mark"))
    mark = json.loads((tmp_path / "mark").read_bytes())
    assert mark == {"host": os.uname().nodename, **software()}
    check_mark(mark)


@pytest.mark.parametrize("name", ["python", "apache-beam", "seqshard"])
def test_other_software(name):
    mark = {"host": "node7", **software(), name: "0.1"}
    message = rf"node7: the workers have another version of {name} .*found 0\.1"
    with pytest.raises(ConfigError, match=message):
        check_mark(mark)


class Job:
    """A job that stays in a state, or fails."""

    def __init__(self, state, error=None):
        self.state = state
        self.error = error
        self.cancelled = False

    def run(self):
        return self

    def wait_until_finish(self, duration):
        assert duration == 60_000
        if self.error is not None:
            raise self.error
        return self.state

    def cancel(self):
        self.cancelled = True


def test_workers_that_never_start(options, tmp_path, monkeypatch):
    job = Job("RUNNING")
    monkeypatch.setattr(probe.beam.Pipeline, "run", job.run)
    with pytest.raises(ConfigError, match=r"no worker did anything for 60 s\. Look into the logs"):
        check_workers(options, str(tmp_path))
    assert job.cancelled


def test_workers_without_this_package(options, tmp_path, monkeypatch):
    job = Job("FAILED", RuntimeError("...\nModuleNotFoundError: No module named 'seqshard'\n..."))
    monkeypatch.setattr(probe.beam.Pipeline, "run", job.run)
    with pytest.raises(ConfigError, match="seqshard is not installed where the workers run"):
        check_workers(options, str(tmp_path))
    job.error = RuntimeError("something else")
    with pytest.raises(RuntimeError, match="something else"):
        check_workers(options, str(tmp_path))


def test_workers_in_this_process_need_no_probe(tmp_path, monkeypatch):
    monkeypatch.setattr(probe.beam.Pipeline, "run", None)
    options = make_options("PrismRunner", [], 0)
    prepare_runner("PrismRunner", options, str(tmp_path))
    options = make_options("DirectRunner", [], 0)
    prepare_runner("DirectRunner", options, str(tmp_path))
