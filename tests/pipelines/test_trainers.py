"""Builds whose sequences RASR processes send: they are sources like any other."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

import numpy as np
import pytest

from seqshard.datasets import ManifestDataset, SimpleHDFWriter
from seqshard.pipelines.build import main as build
from seqshard.pipelines.plan import main as plan
from seqshard.pipelines.verify import main as verify

ROOT = pathlib.Path(__file__).parents[2]
DUMMY = ROOT / "tests" / "data" / "dummy_trainer.py"
NUM_SEQS = 40


def load_dummy():
    spec = importlib.util.spec_from_file_location("dummy_trainer", DUMMY)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


dummy = load_dummy()


def truth():
    """Name -> features, alignment, orthography."""
    seqs = (dummy.corpus_seq(index, 3, 4) for index in range(NUM_SEQS))
    return {name: rest for name, *rest in seqs}


def write_config(folder, *options, trainer="", executable=None, more=""):
    """A corpus whose streams data, classes and orth come from three processes."""
    config = ["input-dim=3", "output-dim=4", f"num-seqs={NUM_SEQS}", *options]
    text = f"""
        [trainers.rasr]
        executable = {json.dumps(executable or [sys.executable, str(DUMMY)])}
        config = {json.dumps([f"--*.{option}" for option in config])}
        partitions = 3
        {trainer}

        [streams.data]
        source = "extern-sprint"
        trainer = "rasr"

        [streams.classes]
        source = "extern-sprint"
        trainer = "rasr"

        [streams.words]
        source = "extern-sprint"
        trainer = "rasr"
        key = "orth"
        {more}
    """
    path = folder / "corpus.toml"
    path.write_text("\n".join(line.strip() for line in text.splitlines()))
    return f"--config={path}"


def is_alive(pid):
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def wait_until(condition):
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch, tmp_path, child_pids):
    """No child, and none of the files that a trainer needs, outlives a build."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    children = child_pids()  # servers that other tests share
    yield
    assert not list(folder.glob("seqshard-trainer-*"))
    assert child_pids() <= children


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The flags and the output of an undisturbed build in one thread."""
    folder = tmp_path_factory.mktemp("plain")
    flags = [write_config(folder), "--num_shards=3", "--seq_ordering=random:5"]
    assert build([*flags, f"--output={folder / 'out'}", "--direct_num_workers=1"]) == 0
    return flags, folder / "out"


def test_every_sequence_is_what_the_trainer_sent(plain):
    _, output = plain
    assert verify([str(output)]) == 0
    dataset = ManifestDataset(output)
    dataset.initialize()
    dataset.init_seq_order(epoch=1)
    expected = truth()
    assert sorted(dataset.get_all_tags()) == sorted(expected)
    assert dataset.num_outputs == {"data": [3, 2], "classes": (4, 1), "words": (256, 1)}
    for index in range(dataset.num_seqs):
        features, alignment, orth = expected[dataset.get_tag(index)]
        np.testing.assert_array_equal(dataset.get_data(index, "data"), features.T)
        np.testing.assert_array_equal(dataset.get_data(index, "classes"), alignment)
        assert dataset.get_data(index, "words").tobytes().decode() == orth.strip()


def test_spools_are_sources_in_the_manifest_and_then_gone(plain):
    _, output = plain
    manifest = json.loads((output / "manifest.json").read_text())
    assert [(s["stream"], s["path"], s["num_seqs"]) for s in manifest["sources"]] == [
        (stream, f"rasr-0000{part}-of-00003.hdf", [14, 13, 13][part])
        for stream in ("data", "classes", "words")
        for part in range(3)
    ]
    shards = {f"data-0000{i}-of-00003.hdf" for i in range(3)}
    rest = {"index.arrow", "manifest.json", "provenance.json"}
    assert {path.name for path in output.iterdir()} == shards | rest


WORKERS = {
    "threads": ("--direct_num_workers=3", "--direct_running_mode=multi_threading"),
    "as it chooses": (),
    "processes": ("--direct_num_workers=2", "--direct_running_mode=multi_processing"),
}


@pytest.mark.parametrize(
    "workers", ["threads", "as it chooses", pytest.param("processes", marks=pytest.mark.slow)]
)
def test_execution_does_not_matter(plain, run_module, same_bytes, tmp_path, workers):
    flags, output = plain
    other = f"--output={tmp_path / 'out'}"
    done = run_module("pipelines.build", *flags, other, *WORKERS[workers])
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    same_bytes(output, tmp_path / "out")


def test_joined_with_other_sources(tmp_path):
    tags = sorted(truth())[1:]
    with SimpleHDFWriter(str(tmp_path / "speaker.hdf"), dim=9, ndim=1) as writer:
        speakers = np.arange(len(tags), dtype="int32")[:, None] % 9
        writer.insert_batch(speakers, [1] * len(tags), tags)
    more = '[streams.speaker]\nsource = "hdf"\nfiles = "speaker.hdf"\nkey = "data"\n'
    more += '[sequences]\non_missing = "drop"\nmin_length = 6\n'
    flags = [write_config(tmp_path, more=more), f"--output={tmp_path / 'out'}"]
    assert build([*flags, "--seq_ordering=sorted"]) == 0
    dataset = ManifestDataset(tmp_path / "out")
    dataset.initialize()
    dataset.init_seq_order(epoch=1)
    lengths = {tag: len(alignment) for tag, (_, alignment, _) in truth().items()}
    assert sorted(dataset.get_all_tags()) == sorted(tag for tag in tags if lengths[tag] >= 6)
    found = [lengths[tag] for tag in dataset.get_all_tags()]
    assert found == sorted(found)
    for index in range(dataset.num_seqs):
        speaker = dataset.get_data(index, "speaker")
        assert speaker.tolist() == [tags.index(dataset.get_tag(index)) % 9]


WRAPPER = """
import os, sys, time
folder = os.path.dirname(os.path.abspath(__file__))
partition = [a for a in sys.argv if "select-partition" in a][0][-1]
with open(os.path.join(folder, "starts"), "a") as file:
    file.write(f"{partition} {os.getpid()}\\n")
while partition == "1" and os.path.exists(os.path.join(folder, "block")):
    time.sleep(0.02)
os.execv(sys.executable, [sys.executable, os.environ["DUMMY"], *sys.argv[1:]])
"""


@pytest.mark.parametrize("mode", ["multi_threading", "multi_processing"])
@pytest.mark.slow
def test_a_killed_build_continues(plain, same_bytes, tmp_path, monkeypatch, mode):
    """Also nothing runs on after the build was killed, and no finished partition runs again."""
    monkeypatch.setenv("DUMMY", str(DUMMY))
    wrapper = tmp_path / "trainer.py"
    wrapper.write_text(WRAPPER)
    (tmp_path / "block").touch()
    executable = [sys.executable, str(wrapper)]
    flags = [write_config(tmp_path, executable=executable), *plain[0][1:]]
    output = tmp_path / "out"
    command = [sys.executable, "-m", "pipelines.build", *flags, f"--output={output}"]
    workers = ["--direct_num_workers=2", f"--direct_running_mode={mode}"]

    def starts():
        path = tmp_path / "starts"
        lines = path.read_text().splitlines() if path.exists() else []
        return [tuple(map(int, line.split())) for line in lines]

    def blocked():
        done = len(list(output.glob(".build/spool-*/rasr-*.hdf")))
        return done >= 1 and 1 in dict(starts()) and len(starts()) > done

    process = subprocess.Popen([*command, *workers], cwd=ROOT, stderr=subprocess.DEVNULL)
    wait_until(blocked)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    wait_until(lambda: not any(is_alive(pid) for _, pid in starts()))
    spools = {path: path.stat().st_mtime_ns for path in output.glob(".build/spool-*/rasr-*.hdf")}
    kept = {int(path.name.split("-")[1]) for path in spools}
    assert not (output / "manifest.json").exists()
    first_run = len(starts())

    (tmp_path / "block").unlink()
    assert build([*flags, f"--output={output}"]) == 0
    # A trainer of the first run may have been about to say that it started.
    assert {part for part, _ in starts()[first_run:]} == {0, 1, 2} - kept
    assert verify([str(output)]) == 0
    assert build([*flags, f"--output={tmp_path / 'whole'}"]) == 0
    same_bytes(tmp_path / "whole", output)
    for shard in plain[1].glob("data-*"):
        assert shard.read_bytes() == (output / shard.name).read_bytes()


FAILING = """
import os, sys, time
partition = [a for a in sys.argv if "select-partition" in a][0][-1]
if partition == "1":
    sys.exit(7)
print("waiting", flush=True)
time.sleep(1000)
"""


def test_one_failure_ends_all(tmp_path, capfd):
    """Nobody waits hours for the others to learn what went wrong."""
    (tmp_path / "trainer.py").write_text(FAILING)
    executable = [sys.executable, str(tmp_path / "trainer.py")]
    config = write_config(tmp_path, executable=executable, trainer="start_timeout = 120.0")
    assert build([config, f"--output={tmp_path / 'out'}", *WORKERS["threads"]]) == 1
    assert "ended with exit code 7 before it sent anything" in capfd.readouterr().err


FAILURES = {
    "dies": (("behave=crash", "at-seq=4"), "", "was killed by SIGSEGV before it sent 'exit'"),
    "exits": (("behave=exit", "at-seq=start"), "", "exit code 3 before it sent anything"),
    "hangs": (("behave=hang", "at-seq=2"), "timeout = 1.0", "no sign of life for 1 seconds"),
    "garbage": (("behave=garbage", "at-seq=2"), "", "sends garbage"),
    "wrong dim": (("behave=wrong-dim", "at-seq=2"), "", "segment 'bad' has 1 features"),
    "nothing": (("num-seqs=0",), "", "the trainer ended and sent no sequence"),
    "no orth": (("feed=feedInputAndTargetAlignment",), "", "what stream 'words' is made of"),
}


@pytest.mark.parametrize("case", FAILURES)
def test_failures(case, tmp_path, capfd):
    options, trainer, words = FAILURES[case]
    flags = [write_config(tmp_path, *options, trainer=trainer), f"--output={tmp_path / 'out'}"]
    descriptors = len(os.listdir("/proc/self/fd"))
    assert build([*flags, "--direct_num_workers=1"]) == 1
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    error = capfd.readouterr().err
    assert error.startswith(f"python -m pipelines.build: error: {sys.executable} {DUMMY}")
    assert words in error
    assert "The end of its log:\ndummy trainer starts" in error
    assert not (tmp_path / "out" / "manifest.json").exists()
    assert not list(tmp_path.glob("out/.build/spool-*/*"))


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["threads", "processes"])
def test_failures_on_workers(run_module, tmp_path, workers):
    flags = [write_config(tmp_path, "behave=crash", "at-seq=4"), f"--output={tmp_path / 'out'}"]
    done = run_module("pipelines.build", *flags, *WORKERS[workers])
    assert done.returncode == 1
    assert "was killed by SIGSEGV before it sent 'exit'. The end of its log:" in done.stderr


def test_a_missing_executable(tmp_path, capsys):
    flags = [write_config(tmp_path, executable="bin/nn-trainer"), f"--output={tmp_path / 'out'}"]
    assert build(flags) == 2
    message = f"{tmp_path}/bin/nn-trainer: the trainer does not exist or is not executable"
    assert message in capsys.readouterr().err


def test_a_finished_dataset_is_not_built_again_by_chance(plain, same_bytes, tmp_path, capsys):
    flags, output = plain
    assert build([*flags, f"--output={output}"]) == 2
    assert "holds a dataset already" in capsys.readouterr().err
    assert not (output / ".build").exists()
    assert build([*flags, f"--output={tmp_path / 'out'}"]) == 0
    (tmp_path / "out" / "data-00001-of-00003.hdf").write_bytes(b"damaged")
    assert build([*flags, f"--output={tmp_path / 'out'}", "--overwrite"]) == 0
    same_bytes(output, tmp_path / "out")


def test_shards_of_unknown_origin_are_refused_before_the_trainers_run(tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "data-00000-of-00004.hdf").write_bytes(b"precious")
    flags = [write_config(tmp_path), f"--output={tmp_path / 'out'}"]
    assert build(flags) == 2
    assert "holds shards but neither a manifest" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["data-00000-of-00004.hdf"]


def test_a_dry_run_does_not_run_trainers(tmp_path, capsys):
    assert plan([write_config(tmp_path)]) == 2
    assert "only known when they have run" in capsys.readouterr().err


def test_relative_names_are_relative_to_the_configuration(tmp_path, run_module):
    """The trainer runs where the configuration stands, as RASR's own names are relative too."""
    script = tmp_path / "trainer.sh"
    script.write_text(f'#!/bin/sh\ncat here.txt || exit 9\nexec {sys.executable} {DUMMY} "$@"\n')
    script.chmod(0o755)
    (tmp_path / "here.txt").write_text("here")
    flags = [write_config(tmp_path, executable="./trainer.sh"), f"--output={tmp_path / 'out'}"]
    assert build(flags) == 0
