"""ExternSprintDataset with a process that behaves as RASR does, and with RETURNN as the peer."""

from __future__ import annotations

import gc
import importlib.util
import itertools
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time

import numpy as np
import pytest
from returnn.datasets.sprint import ExternSprintDataset as Oracle

from seqshard.datasets import ExternSprintDataset, init_dataset
from seqshard.io.errors import ConfigError, SourceNotFoundError, TrainerError

DUMMY = pathlib.Path(__file__).parents[1] / "data" / "dummy_trainer.py"
OUR_MODULE = "use-module=seqshard.io.sprint.extern_interface"
EXECUTABLE = [sys.executable, str(DUMMY)]


def load_dummy():
    spec = importlib.util.spec_from_file_location("dummy_trainer", DUMMY)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


dummy = load_dummy()


def config(*options):
    return [f"--*.{option}" for option in ("input-dim=3", "output-dim=4", *options)]


def make(*options, cls=ExternSprintDataset, **kwargs):
    dataset = cls(EXECUTABLE, config(*options), **kwargs)
    dataset.initialize()
    return dataset


def read_epoch(dataset, epoch=1, **order):
    dataset.init_seq_order(epoch=epoch, **order)
    seqs = []
    while dataset.is_less_than_num_seqs(len(seqs)):
        index = len(seqs)
        dataset.load_seqs(index, index + 1)
        data = {key: dataset.get_data(index, key) for key in dataset.get_data_keys()}
        seqs.append((dataset.get_tag(index), data))
    return seqs


def tags(seqs):
    return [tag for tag, _ in seqs]


def assert_same_seqs(found, expected):
    assert tags(found) == tags(expected)
    for (_, ours), (_, theirs) in zip(found, expected, strict=True):
        assert list(ours) == list(theirs)
        for key in ours:
            assert ours[key].dtype == theirs[key].dtype
            np.testing.assert_array_equal(ours[key], theirs[key])


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch, tmp_path, child_pids):
    """No descriptor, thread, child or file outlives the datasets of a test."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    gc.collect()
    children = child_pids()  # servers that other tests share
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    yield
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before[0]
    assert threading.active_count() <= before[1]
    assert list(folder.iterdir()) == []
    assert child_pids() <= children


OPTIONS = {
    "plain": ([], {}),
    "window": ([], {"window": 3}),
    "stddev": ([], {"input_stddev": 2.0}),
    "partition": ([], {"partition_epoch": 3}),
    "old partition": ([], {"partitionEpoch": 2}),
    "shuffled by RASR": (["shuffle=true"], {"random_seed_offset": 5}),
    "fixed seed": (["shuffle=true"], {"fixed_random_seed": 3}),
    "control": (
        ["feed=control"],
        {"target_maps": {"speaker_name": {"speaker-0": 0, "speaker-1": 1}}},
    ),
    "soft alignment": (["feed=control-soft"], {}),
    "unsupervised": (["feed=feedInputUnsupervised"], {}),
    "many": (["num-seqs=500"], {}),
}


SLOW = ("stddev", "window", "old partition", "fixed seed", "unsupervised", "control")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in OPTIONS]
)
def test_same_as_returnn(name):
    """RETURNN's class reads from our module, and ours gives the same."""
    options, kwargs = OPTIONS[name]
    ours = make(*options, **kwargs)
    theirs = make(*options, OUR_MODULE, cls=Oracle, **kwargs)
    try:
        assert ours.num_outputs == theirs.num_outputs
        assert ours.num_inputs == theirs.num_inputs
        for epoch in (1, 4):
            found, expected = read_epoch(ours, epoch), read_epoch(theirs, epoch)
            assert len(found) > 0
            assert_same_seqs(found, expected)
            assert ours.num_seqs == theirs.num_seqs
            assert ours.get_num_timesteps() == theirs.get_num_timesteps()
    finally:
        theirs.finish_epoch()
        theirs._exit_handler()


def test_what_the_trainer_has_comes():
    seqs = read_epoch(make("num-seqs=4"))
    for index, (tag, data) in enumerate(seqs):
        name, features, alignment, orth = dummy.corpus_seq(index, 3, 4)
        assert tag == name
        np.testing.assert_array_equal(data["data"], features.T)
        assert data["data"].flags.c_contiguous
        np.testing.assert_array_equal(data["classes"], alignment)
        assert data["orth"].tobytes().decode() == orth.strip()
    assert len(seqs) == 4


def test_returnns_module_as_the_peer():
    """A trainer that loads RETURNN's module all the same."""
    theirs = read_epoch(make("use-module=returnn.sprint.extern_interface"))
    assert_same_seqs(theirs, read_epoch(make()))


def test_given_orders_and_filters(tmp_path):
    everything = tags(read_epoch(make()))
    chosen = [everything[i] for i in (7, 2, 3)]
    dataset = make()
    assert tags(read_epoch(dataset, seq_list=chosen)) == chosen
    assert dataset.num_seqs == 3
    (tmp_path / "keep.txt").write_text("\n".join(chosen))
    filtered = make(seq_list_filter_file=str(tmp_path / "keep.txt"))
    assert tags(read_epoch(filtered)) == [everything[i] for i in (2, 3, 7)]
    with pytest.raises(ConfigError, match="a given order excludes"):
        filtered.init_seq_order(epoch=2, seq_list=chosen)
    with pytest.raises(ConfigError, match="RASR only knows segment names"):
        dataset.init_seq_order(epoch=1, seq_order=[0])


def test_missing_sequences_of_a_given_order():
    dataset = make()
    known = tags(read_epoch(dataset))[:2]
    with pytest.raises(TrainerError, match=r"sent 2 of the 3 sequences.*'other' is missing"):
        read_epoch(dataset, seq_list=[*known, "other"])
    assert tags(read_epoch(dataset, epoch=2)) == tags(read_epoch(make(), epoch=2))


def test_partitions_cover_the_corpus():
    dataset = make(partition_epoch=3)
    parts = [tags(read_epoch(dataset, epoch)) for epoch in (1, 2, 3)]
    assert sorted(itertools.chain(*parts)) == sorted(tags(read_epoch(make())))
    assert tags(read_epoch(dataset, 4)) == parts[0]


def count_processes(monkeypatch):
    import seqshard.datasets.sprint as module

    started = []

    class Counting(module.TrainerProcess):
        def __init__(self, spec):
            started.append(spec)
            super().__init__(spec)

    monkeypatch.setattr(module, "TrainerProcess", Counting)
    return started


def test_one_process_per_epoch(monkeypatch):
    started = count_processes(monkeypatch)
    dataset = make()
    assert not dataset.init_seq_order(epoch=1)
    assert dataset.epoch == 1
    assert dataset.get_data_keys() == ["classes", "data", "orth"]
    assert len(started) == 1
    dataset.load_seqs(2, 3)
    assert dataset.init_seq_order(epoch=1)
    assert dataset.init_seq_order(epoch=2)
    assert len(started) == 3
    dataset.finish_epoch()
    assert dataset.epoch is None
    assert dataset.init_seq_order(epoch=2)
    assert len(started) == 4


def test_estimated_number_of_sequences():
    dataset = make("num-seqs=700")
    read_epoch(dataset)
    dataset.init_seq_order(epoch=2)
    assert dataset.estimated_num_seqs == 700
    assert dataset.get_complete_frac(0) == 1 / 700


def test_from_a_config():
    words = {"class": "Utf8ByteTargets"}
    dataset = init_dataset(
        {
            "class": "ExternSprintDataset",
            "sprintTrainerExecPath": EXECUTABLE,
            "sprintConfigStr": lambda: " ".join(config("num-seqs=3")),
            "orth_vocab": words,
            "name": "train",
        }
    )
    ((_, first), *_) = read_epoch(dataset)
    np.testing.assert_array_equal(first["orth_classes"], first["orth"])
    batches = dataset.generate_batches(recurrent_net=False, batch_size=5)
    dataset.init_seq_order(epoch=2)
    assert batches.has_more()


def test_executable_and_arguments(tmp_path, monkeypatch):
    script = tmp_path / "trainer"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{DUMMY}" "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("TRAINER_OPTIONS", "--*.output-dim=4 --*.num-seqs='2'")
    arguments = ["--*.input-dim=3", "$TRAINER_OPTIONS", lambda: "--*.a=b c", "$UNSET_VARIABLE"]
    dataset = ExternSprintDataset(str(script), arguments)
    assert len(read_epoch(dataset)) == 2
    with pytest.raises(ConfigError, match=r"an argument of the trainer is no text \(found 3"):
        ExternSprintDataset(str(script), [3])
    with pytest.raises(ConfigError, match="malformed arguments of the trainer: No closing quot"):
        ExternSprintDataset(str(script), "'a")
    with pytest.raises(SourceNotFoundError, match="/nowhere: the trainer does not exist"):
        ExternSprintDataset("/nowhere", "")
    with pytest.raises(ConfigError, match="both partitionEpoch and partition_epoch"):
        ExternSprintDataset(str(script), arguments, partitionEpoch=2, partition_epoch=2)


def test_pickle():
    dataset = make("num-seqs=3", name="train", partition_epoch=2, input_stddev=2.0, timeout=77.0)
    dataset.init_seq_order(epoch=2)
    copy = pickle.loads(pickle.dumps(dataset))
    assert (copy.name, copy.epoch, copy.timeout) == ("train", 2, 77.0)
    assert_same_seqs(read_epoch(copy, 2), read_epoch(dataset, 2))


def test_failures_at_the_start():
    with pytest.raises(TrainerError, match=r"(?s)exit code 3 before it sent.*no such corpus"):
        make("behave=exit", "at-seq=start")
    with pytest.raises(TrainerError, match=r"(?s)no sign of life for 2 seconds.*license server"):
        make("behave=hang", "at-seq=start", start_timeout=2.0)
    with pytest.raises(TrainerError, match=r"there are no features \(found dimension 0"):
        make("input-dim=0")


@pytest.mark.parametrize(
    ("behaviour", "num_before", "match"),
    [
        ("crash", 4, "was killed by SIGSEGV before it sent 'exit'"),
        ("garbage", 4, "sends garbage"),
        ("hang", 4, "no sign of life for 2 seconds"),
        ("wrong-dim", 4, "segment 'bad' has 1 features"),
        ("short-alignment", 4, r"'short': the alignment does not fit to 4 frames"),
    ],
)
def test_failures_later(behaviour, num_before, match):
    """All sequences before the fault come, then the error, as often as one asks."""
    limits = {"timeout": 2.0} if behaviour == "hang" else {}
    dataset = make(f"behave={behaviour}", f"at-seq={num_before}", **limits)
    for index in range(num_before):
        assert dataset.is_less_than_num_seqs(index)
        assert dataset.get_tag(index) == dummy.corpus_name(index)
    for _ in range(2):
        with pytest.raises(TrainerError, match=match) as caught:
            dataset.is_less_than_num_seqs(num_before)
        assert "The end of its log:\ndummy trainer starts" in str(caught.value)
    with pytest.raises(TrainerError, match=match):
        dataset.load_seqs(0, 10)
    assert dataset.init_seq_order(epoch=1)


def test_a_closed_epoch_is_no_short_epoch():
    dataset = make("num-seqs=1000")
    assert dataset.is_less_than_num_seqs(3)
    dataset.close()
    with pytest.raises(RuntimeError, match="ended before all its sequences came"):
        dataset.is_less_than_num_seqs(999)
    with pytest.raises(IndexError, match="sequence 3 is gone"):
        dataset.get_tag(3)
    assert len(read_epoch(dataset)) == 1000


def test_no_sequences():
    dataset = make("num-seqs=0")
    with pytest.raises(TrainerError, match="the trainer ended and sent no sequence"):
        dataset.is_less_than_num_seqs(0)


def test_a_trainer_that_fails_in_the_end():
    with pytest.raises(TrainerError, match="sent everything, but ended with exit code 3"):
        read_epoch(make("behave=exit", "at-seq=end"))


def test_dimensions_that_change(tmp_path):
    path = tmp_path / "dim"
    path.write_text("3")
    dataset = ExternSprintDataset(
        EXECUTABLE, lambda: f"--*.input-dim={path.read_text()} --*.output-dim=4"
    )
    path.write_text("5")
    with pytest.raises(TrainerError, match=r"dimensions changed between epochs \(expected 3 feat"):
        read_epoch(dataset, 2)


def test_errors_of_the_users_functions():
    def fail(text):
        raise ZeroDivisionError(text)

    with pytest.raises(ZeroDivisionError, match="word0"):
        read_epoch(make(orth_post_process=fail))


def test_a_missing_executable_later(tmp_path):
    script = tmp_path / "trainer"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{DUMMY}" "$@"\n')
    script.chmod(0o755)
    dataset = ExternSprintDataset(str(script), config())
    script.unlink()
    for _ in range(2):
        with pytest.raises(SourceNotFoundError):
            read_epoch(dataset, 2)
    with pytest.raises(SourceNotFoundError):
        dataset.is_less_than_num_seqs(0)


def trainer_pids():
    """Trainers that this process started, through their supervisors."""
    pids = []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if str(DUMMY) in (folder / "cmdline").read_text():
                pids.append(int(folder.name))
        except OSError:
            continue
    return pids


def test_a_dataset_that_is_dropped_ends_its_trainer():
    before = set(trainer_pids())
    dataset = make("num-seqs=5000")
    assert dataset.is_less_than_num_seqs(0)
    own = set(trainer_pids()) - before
    assert own
    del dataset
    gc.collect()
    deadline = time.monotonic() + 60
    while own & set(trainer_pids()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_process_that_ends_leaves_nothing(tmp_path):
    """Without closing anything: at exit, the trainer and its files go away."""
    code = f"""if True:
        from seqshard.datasets import ExternSprintDataset
        dataset = ExternSprintDataset({EXECUTABLE!r}, {config("num-seqs=5000")!r})
        assert dataset.is_less_than_num_seqs(3)
        print(dataset._epoch_process.process.pid)
    """
    folder = tmp_path / "own"
    folder.mkdir()
    environment = {**os.environ, "TMPDIR": str(folder), "PYTHONWARNINGS": "error"}
    output = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
    assert not pathlib.Path(f"/proc/{int(output)}").exists()
    assert list(folder.iterdir()) == []


def test_a_forked_process_starts_its_own():
    dataset = make("num-seqs=1000")
    assert dataset.is_less_than_num_seqs(5)
    pid = os.fork()
    if pid == 0:
        signal.alarm(300)
        code = 1
        try:
            code = 0 if len(read_epoch(dataset, 2)) == 1000 else 2
            dataset.finish_epoch()
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert len(read_epoch(dataset)) == 1000


def test_imports_stay_light():
    code = """if True:
        import sys
        from seqshard.datasets import ExternSprintDataset
        heavy = {"apache_beam", "torch", "returnn", "pyarrow", "h5py", "fsspec"}
        print(sorted(heavy & set(sys.modules)))
    """
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"
