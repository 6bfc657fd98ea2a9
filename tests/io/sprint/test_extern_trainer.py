"""Trainer processes: what they send, and that no failure goes unseen or leaves anything behind."""

from __future__ import annotations

import gc
import importlib.util
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

import numpy as np
import pytest

from seqshard.io.errors import SourceNotFoundError, TrainerError
from seqshard.io.sprint.messages import Init
from seqshard.io.sprint.trainer import TrainerProcess, TrainerSpec, trainer_options

DUMMY = pathlib.Path(__file__).parents[2] / "data" / "dummy_trainer.py"


def load_dummy():
    spec = importlib.util.spec_from_file_location("dummy_trainer", DUMMY)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


corpus_seq = load_dummy().corpus_seq


def make_spec(*options, executable=(sys.executable, str(DUMMY)), **kwargs):
    config = ("--*.input-dim=3", "--*.output-dim=4", *(f"--*.{option}" for option in options))
    return TrainerSpec(tuple(executable), config, **{"start_timeout": 60.0, **kwargs})


def read_all(spec):
    with TrainerProcess(spec) as trainer:
        return list(trainer.messages())


def names(messages):
    return [message.name for message in messages[1:]]


def is_alive(pid):
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch, tmp_path, child_pids):
    """No descriptor, no child and no file outlives a test."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    gc.collect()  # what earlier tests left behind may go at any time
    children = child_pids()  # servers that other tests share
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) <= before
    assert list(folder.iterdir()) == []
    assert child_pids() <= children


@pytest.mark.parametrize("module", [None, "returnn.sprint.extern_interface"])
def test_all_sequences(module):
    """With our module, and with RETURNN's as the peer."""
    messages = read_all(make_spec(*([f"use-module={module}"] if module else [])))
    assert messages[0] == Init(3, 4, 10)
    assert len(messages) == 11
    for index, segment in enumerate(messages[1:]):
        name, features, alignment, orth = corpus_seq(index, 3, 4)
        assert segment.name == name
        assert segment.features.dtype == np.float32
        np.testing.assert_array_equal(segment.features, features)
        np.testing.assert_array_equal(segment.targets["classes"], alignment)
        assert segment.targets["orth"] == orth
        assert list(segment.targets) == ["classes", "orth"]


def test_partitions_and_segments():
    everything = names(read_all(make_spec()))
    parts = [names(read_all(make_spec(num_partitions=2, partition=part))) for part in range(2)]
    assert sorted(parts[0] + parts[1]) == sorted(everything)
    chosen = [everything[i] for i in (5, 2, 7)]
    assert names(read_all(make_spec(segments=chosen))) == [everything[i] for i in (2, 5, 7)]
    assert names(read_all(make_spec(segments=chosen, keep_order=True))) == chosen
    shuffled = [names(read_all(make_spec("shuffle=true", seed=seed))) for seed in (1, 1, 2)]
    assert shuffled[0] == shuffled[1] != shuffled[2]
    assert sorted(shuffled[2]) == sorted(everything)


def test_options_override_those_of_the_user():
    options = trainer_options(make_spec("pymod-name=other", seed=7), "/folder", 5, 6)
    assert options.index("--*.pymod-name=other") < options.index(
        "--*.pymod-name=seqshard.io.sprint.extern_interface"
    )
    assert "--*.pymod-config=action:ExternSprintDataset,c2p_fd:5,p2c_fd:6" in options
    assert "--*.seed=7" in options
    assert not any("partition" in option or "segments.file" in option for option in options)


@pytest.mark.parametrize(
    ("behaviour", "at", "match"),
    [
        ("exit", "start", r"ended with exit code 3 before it sent anything.*no such corpus"),
        ("leave", "start", "ended with exit code 0 before it sent anything"),
        ("crash", "3", "was killed by SIGSEGV before it sent 'exit'"),
        ("raise", "3", r"exit code 1 before it sent 'exit'.*RuntimeError: the corpus is broken"),
        ("half", "2", "ended with exit code 0 in the middle of a message"),
        ("garbage", "2", r"sends garbage: b'Hello' begins no message"),
        ("evil", "2", r"byte \d+: the trainer sends garbage: .*'os.system' is not allowed"),
        ("wrong-dim", "1", r"segment 'bad' has 1 features where the trainer announced 3"),
        ("crash", "end", "sent everything, but was killed by SIGSEGV"),
        ("exit", "end", r"sent everything, but ended with exit code 3.*no such corpus"),
    ],
)
def test_failures(behaviour, at, match):
    with pytest.raises(TrainerError, match=f"(?s){match}") as caught:
        read_all(make_spec(f"behave={behaviour}", f"at-seq={at}"))
    assert "The end of its log:\ndummy trainer starts" in str(caught.value)
    assert not pathlib.Path("evil").exists()


@pytest.mark.parametrize("at", ["start", "2", "end"])
def test_hanging(at):
    timeouts = {"start_timeout": 2.0 if at == "start" else 60.0, "timeout": 2.0}
    match = r"(?s)hangs: no sign of life for 2 seconds.*waiting for the license server"
    with pytest.raises(TrainerError, match=match):
        read_all(make_spec("behave=hang", f"at-seq={at}", **timeouts))


def test_a_log_is_a_sign_of_life():
    messages = read_all(make_spec("behave=chatter", "at-seq=2", timeout=2.0))
    assert len(messages) == 11


def test_a_large_log_does_not_block():
    assert len(read_all(make_spec("behave=flood", "at-seq=2"))) == 11
    with pytest.raises(TrainerError) as caught:
        read_all(make_spec("behave=flood", "at-seq=start", "use-module=missing"))
    assert len(str(caught.value)) < 10_000
    assert "ModuleNotFoundError" in str(caught.value)


def test_missing_executable():
    with pytest.raises(SourceNotFoundError, match=r"/nowhere: the trainer does not exist"):
        read_all(make_spec(executable=["/nowhere"]))


def test_executable_of_another_format(tmp_path):
    script = tmp_path / "trainer"
    script.write_bytes(b"\x7fELF")
    script.chmod(0o755)
    with pytest.raises(TrainerError, match=r"(?s)exit code 127 before it sent.*cannot start"):
        read_all(make_spec(executable=[str(script)]))


def test_log_goes_to_logging(caplog):
    with caplog.at_level("DEBUG", logger="seqshard.io.sprint.trainer"):
        read_all(make_spec())
    assert "dummy trainer starts" in caplog.text


def wrapped(tmp_path):
    """A trainer behind a shell script, which has a process of its own."""
    script = tmp_path / "trainer.sh"
    script.write_text(f'#!/bin/sh\n"{sys.executable}" "{DUMMY}" "$@"\nexit $?\n')
    script.chmod(0o755)
    return [str(script)]


def test_stopping_early_kills_what_the_trainer_started(tmp_path):
    pid_file = tmp_path / "pids"
    options = ("behave=grandchild", "at-seq=1", f"pid-file={pid_file}", "num-seqs=2000")
    with TrainerProcess(make_spec(*options, executable=wrapped(tmp_path))) as trainer:
        messages = trainer.messages()
        assert len([next(messages) for _ in range(5)]) == 5
        pids = [int(pid) for pid in pid_file.read_text().split()]
        assert all(is_alive(pid) for pid in pids)
    wait_until(lambda: not any(is_alive(pid) for pid in pids))


def test_killing_the_parent_kills_the_trainer(tmp_path):
    pid_file = tmp_path / "pids"
    code = f"""if True:
        from seqshard.io.sprint.trainer import TrainerProcess, TrainerSpec
        options = ["input-dim=3", "output-dim=4", "num-seqs=2000", "at-seq=1",
                   "behave=grandchild", "pid-file={pid_file}"]
        config = tuple("--*." + option for option in options)
        with TrainerProcess(TrainerSpec({tuple(wrapped(tmp_path))!r}, config)) as trainer:
            messages = trainer.messages()
            [next(messages) for _ in range(5)]
            print("ready", flush=True)
            input()
    """
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    with parent:
        assert parent.stdout.readline() == "ready\n"
        pids = [int(pid) for pid in pid_file.read_text().split()]
        assert all(is_alive(pid) for pid in pids)
        parent.send_signal(signal.SIGKILL)
    wait_until(lambda: not any(is_alive(pid) for pid in pids))


def test_a_forked_process_leaves_the_trainer_alone():
    with TrainerProcess(make_spec("num-seqs=2000")) as trainer:
        messages = trainer.messages()
        next(messages)
        pid = os.fork()
        if pid == 0:
            signal.alarm(300)
            trainer.close()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        assert len(names([next(messages) for _ in range(100)])) == 99
