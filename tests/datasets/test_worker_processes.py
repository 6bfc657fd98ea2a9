"""Datasets in the worker processes of a training: after fork, by pickle, and from many threads."""

import os
import pickle
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

from seqshard.datasets import HDFDataset, ManifestDataset

READ = """
import pickle, sys
import numpy as np

dataset = pickle.load(open(sys.argv[1], "rb"))
dataset.initialize()
dataset.init_seq_order(epoch=3)
sums = [float(dataset.get_data(i, "data").sum()) for i in range(dataset.num_seqs)]
np.save(sys.argv[2], np.array(sums))
"""


@pytest.fixture(params=["manifest", "hdf"])
def dataset(request, build_demo):
    folder = build_demo("--num_shards=4", "--seq_ordering=random:1")
    if request.param == "manifest":
        made = ManifestDataset(str(folder), seq_ordering="laplace:.10")
    else:
        files = sorted(map(str, folder.glob("*.hdf")))
        made = HDFDataset(files, seq_ordering="laplace:.10")
    made.initialize()
    return made


def sums_of(dataset, epoch=3):
    dataset.init_seq_order(epoch=epoch)
    return [float(dataset.get_data(i, "data").sum()) for i in range(dataset.num_seqs)]


def in_fork(check):
    """Whether a check holds in a forked process, which must not hang."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(300)
        code = 1
        try:
            code = 0 if check() else 2
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1] == 0


@pytest.mark.parametrize("used", [False, True])
def test_fork(dataset, used):
    tag = "demo/rec-001/1"
    if used:
        expected, frames = sums_of(dataset), dataset.get_data_by_seq_tag(tag, "data").copy()
    here = []
    for _ in range(3):
        here.append(in_fork(lambda: len(sums_of(dataset)) == 120))
        if used:
            here.append(in_fork(lambda: sums_of(dataset) == expected))
            here.append(in_fork(lambda: (dataset.get_data_by_seq_tag(tag, "data") == frames).all()))
    assert all(here)
    assert len(sums_of(dataset)) == 120


def test_fork_while_other_threads_read(dataset):
    """As with the data loaders of several trainings in one process."""
    expected = sums_of(dataset)
    twins = [pickle.loads(pickle.dumps(dataset)) for _ in range(2)]
    stop = threading.Event()

    def read_on(twin):
        twin.initialize()
        while not stop.is_set():
            sums_of(twin, epoch=2)

    threads = [threading.Thread(target=read_on, args=(twin,), daemon=True) for twin in twins]
    for thread in threads:
        thread.start()
    try:
        results = [in_fork(lambda: sums_of(dataset) == expected) for _ in range(5)]
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert all(results)


def test_by_pickle_in_a_new_process(dataset, tmp_path):
    dataset.init_seq_order(epoch=1)
    dataset.get_data(0, "data")
    (tmp_path / "dataset").write_bytes(pickle.dumps(dataset))
    command = [sys.executable, "-c", READ, str(tmp_path / "dataset"), str(tmp_path / "sums.npy")]
    subprocess.run(command, check=True, timeout=300)
    assert np.load(tmp_path / "sums.npy").tolist() == sums_of(dataset)


def test_shares_of_workers_make_up_the_epoch(dataset):
    tags = []
    for worker in range(3):
        twin = pickle.loads(pickle.dumps(dataset))
        twin.initialize()
        twin.set_sharding(num_shards=3, shard_index=worker)
        twin.init_seq_order(epoch=2)
        tags += [twin.get_tag(i) for i in range(twin.num_seqs)]
    dataset.init_seq_order(epoch=2)
    assert sorted(tags) == sorted(dataset.get_tag(i) for i in range(dataset.num_seqs))
    assert len(set(tags)) == 120


@pytest.mark.torch
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_torch_data_loader(dataset, method):
    torch_data = pytest.importorskip("torch.utils.data", reason="PyTorch is not installed")
    expected = sums_of(dataset)
    loader = torch_data.DataLoader(
        Indexed(dataset), num_workers=2, batch_size=None, multiprocessing_context=method
    )
    assert [float(frames.sum()) for frames in loader] == pytest.approx(expected)


class Indexed:
    """The sequences of epoch 3 for a DataLoader."""

    def __init__(self, dataset):
        self.dataset = dataset
        self.started = False

    def __len__(self):
        return 120

    def __getitem__(self, index):
        if not self.started:
            self.dataset.init_seq_order(epoch=3)
            self.started = True
        return np.array(self.dataset.get_data(index, "data"))
