"""Reading remote datasets: shards are copied ahead of use, never more than fit."""

from __future__ import annotations

import fcntl
import gc
import json
import os
import threading
import time

import numpy as np
import pytest

from seqshard.datasets import ManifestDataset, shard_copies
from seqshard.io import remote, storage
from seqshard.io.errors import CacheBusyError, CacheFullError, ShardIntegrityError, StorageError
from seqshard.io.file_cache import FileCache
from seqshard.io.manifest import load_manifest

NUM_SHARDS = 12


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(remote, "FIRST_WAIT_SECONDS", 0.01)


@pytest.fixture(scope="session")
def local(build_demo):
    return str(build_demo(f"--num_shards={NUM_SHARDS}", "--seq_ordering=random"))


@pytest.fixture
def url(s3, local):
    for name in os.listdir(local):
        with open(os.path.join(local, name), "rb") as file:
            storage.commit_bytes(f"{s3.url}/{name}", file.read())
    s3.clear()
    return s3.url


@pytest.fixture
def sizes(local):
    info = load_manifest(local)
    return info.index.num_bytes, max(shard.file_bytes for shard in info.shards)


@pytest.fixture
def limit(monkeypatch, tmp_path, sizes):
    """Sets room for the index and some shards."""
    monkeypatch.setenv("SEQSHARD_FILE_CACHE", str(tmp_path / "cache"))

    def set_room(num_shards):
        monkeypatch.setenv("SEQSHARD_FILE_CACHE_BYTES", str(int(sizes[0] + num_shards * sizes[1])))
        return tmp_path / "cache"

    set_room(NUM_SHARDS)
    return set_room


def used(folder):
    """Bytes of all copies, at a moment at which no copy comes or goes."""
    with open(folder / "cache.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        names = [path for path in folder.glob("*/*") if path.name != "entry.json"]
        return sum(path.stat().st_size for path in names if path.exists())


def sequences(dataset):
    for i in range(dataset.num_seqs):
        dataset.load_seqs(i, i + 1)
        yield dataset.get_tag(i), {key: dataset.get_data(i, key) for key in dataset.get_data_keys()}


def assert_same(found, expected):
    count = 0
    for (tag, data), (other_tag, other) in zip(found, expected, strict=True):
        assert tag == other_tag
        for key, values in other.items():
            np.testing.assert_array_equal(data[key], values)
        count += 1
    return count


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def open_both(url, local, **options):
    pair = [ManifestDataset(folder, **options) for folder in (url, local)]
    for dataset in pair:
        dataset.initialize()
    return pair


def test_opening_takes_one_request(s3, url, limit):
    dataset = ManifestDataset(url)
    dataset.initialize()
    assert [(r.method, r.path.rpartition("/")[2]) for r in s3.requests] == [
        ("GET", "manifest.json")
    ]
    assert dataset.get_total_num_seqs() == 120


def test_an_epoch_reads_every_file_once(s3, url, local, limit):
    ours, theirs = open_both(url, local)
    for epoch in (1, 2):
        ours.init_seq_order(epoch=epoch)
        theirs.init_seq_order(epoch=epoch)
        assert assert_same(sequences(ours), sequences(theirs)) == 120
    names = [r.path.rpartition("/")[2] for r in s3.requests]
    assert all(r.method == "GET" and not r.is_list for r in s3.requests)
    assert sorted(names) == sorted(
        ["manifest.json", "index.arrow", *(shard.path for shard in ours.info.shards)]
    )


@pytest.mark.parametrize("room", [1, 2.5, 5])
@pytest.mark.parametrize("ordering", ["default", "reverse"])
def test_never_more_than_fits(url, local, limit, sizes, room, ordering):
    folder = limit(room)
    ours, theirs = open_both(url, local, seq_ordering=ordering)
    ours.init_seq_order(epoch=1)
    theirs.init_seq_order(epoch=1)
    for (tag, data), (other_tag, other) in zip(sequences(ours), sequences(theirs), strict=True):
        assert tag == other_tag
        np.testing.assert_array_equal(data["data"], other["data"])
        assert used(folder) <= sizes[0] + room * sizes[1]


def test_random_orders_work_with_any_room(url, local, limit):
    limit(3)
    ours, theirs = open_both(url, local, seq_ordering="random", partition_epoch=4)
    for epoch in (1, 6):
        ours.init_seq_order(epoch=epoch)
        theirs.init_seq_order(epoch=epoch)
        assert assert_same(sequences(ours), sequences(theirs)) == 30


def test_shards_come_ahead_in_the_order_of_the_epoch(s3, url, limit):
    limit(NUM_SHARDS)
    dataset = ManifestDataset(url, seq_ordering="reverse")
    dataset.init_seq_order(epoch=1)

    def fetched():
        return [r.path.rpartition("/")[2] for r in s3.requests if "data-" in r.path]

    names = [shard.path for shard in reversed(dataset.info.shards)]
    wait_until(lambda: len(fetched()) >= 4)
    assert fetched() == names[:4]
    dataset.load_seqs(0, 1)
    dataset.get_data(0, "data")
    wait_until(lambda: len(fetched()) >= 5)
    assert fetched() == names[:5]


def test_what_was_copied_ahead_gives_way(s3, url, local, limit):
    limit(2)
    ours, theirs = open_both(url, local)
    ours.init_seq_order(epoch=1)
    wait_until(lambda: s3.count("GET", "/data-") >= 1)
    for index in (119, 0, 60):
        for key in ("data", "classes"):
            np.testing.assert_array_equal(
                ours.get_corpus_seq(index).get_data(key),
                theirs.get_corpus_seq(index).get_data(key),
            )


@pytest.mark.parametrize("stop", [1, 37, 119])
def test_resuming_in_the_middle(url, local, limit, stop):
    limit(3)
    options = {"seq_ordering": "laplace:.20"}
    ours, theirs = open_both(url, local, **options)
    for dataset in (ours, theirs):
        dataset.init_seq_order(epoch=3)
        dataset.load_seqs(0, stop)
    state = json.loads(json.dumps(ours.state_dict()))
    assert state == theirs.state_dict()
    continued = ManifestDataset(url, **options)
    continued.load_state_dict(state)
    rest = [item for i, item in enumerate(sequences(theirs)) if i >= stop]
    assert assert_same(sequences(continued), rest) == 120 - stop


def test_ranks_copy_only_what_they_read(s3, url, local, limit):
    limit(NUM_SHARDS)
    ours, theirs = open_both(url, local, _num_shards=4, _shard_index=2)
    for dataset in (ours, theirs):
        dataset.init_seq_order(epoch=1)
    assert assert_same(sequences(ours), sequences(theirs)) == 30
    assert s3.count("GET", "/data-") <= NUM_SHARDS // 4 + 2


def test_a_cache_that_is_too_small_says_so(url, limit, monkeypatch, tmp_path):
    limit(0.5)
    dataset = ManifestDataset(url)
    dataset.init_seq_order(epoch=1)
    with pytest.raises(CacheFullError, match=r"data-0.*SEQSHARD_FILE_CACHE_BYTES"):
        dataset.get_data(0, "data")
    monkeypatch.setenv("SEQSHARD_FILE_CACHE", str(tmp_path / "other"))
    monkeypatch.setenv("SEQSHARD_FILE_CACHE_BYTES", "1000")
    dataset = ManifestDataset(url)
    dataset.init_seq_order(epoch=1)
    with pytest.raises(CacheFullError, match=r"index\.arrow: the file is larger than the whole"):
        dataset.get_tag(0)


def test_what_others_use_is_waited_for(url, limit, sizes, monkeypatch):
    """Room for one shard, which another reader has in use, for a while."""
    limit(1)
    monkeypatch.setattr(shard_copies, "PATIENCE_SECONDS", 0.5)
    other, ours = ManifestDataset(url), ManifestDataset(url)
    for dataset in (other, ours):
        dataset.init_seq_order(epoch=1)
    expected = other.get_data(0, "data").copy()
    with pytest.raises(CacheBusyError, match="files in use leave no room"):
        ours.get_data(119, "data")
    monkeypatch.setattr(shard_copies, "PATIENCE_SECONDS", 60)
    timer = threading.Timer(0.3, other._shard_copies.release, [0])
    timer.start()
    assert len(ours.get_data(119, "data")) > 0
    timer.join()
    np.testing.assert_array_equal(ours.get_data(0, "data"), expected)


def test_another_shard_is_refused(url, limit):
    name = load_manifest(url).shards[0].path
    data = bytearray(storage.read_bytes(f"{url}/{name}"))
    data[-1] ^= 1
    storage.commit_bytes(f"{url}/{name}", bytes(data))
    dataset = ManifestDataset(url)
    dataset.init_seq_order(epoch=1)
    with pytest.raises(ShardIntegrityError, match=rf"{name}: the file is not the one of the man"):
        dataset.get_data(0, "data")


def test_failures_reach_the_reader(s3, url, limit, object_stores):
    s3.faults.append(object_stores.Fault(503, lambda r: "/data-" in r.path, times=10**6))
    dataset = ManifestDataset(url)
    dataset.init_seq_order(epoch=1)
    with pytest.raises(StorageError, match=r"data-00000.*the store fails"):
        dataset.get_data(0, "data")
    s3.clear()
    dataset.get_data(0, "data")


def test_the_thread_ends_with_the_dataset(url, limit):
    def threads():
        return {thread for thread in threading.enumerate() if thread.name == "copy-shards"}

    before = threads()
    dataset = ManifestDataset(url)
    dataset.init_seq_order(epoch=1)
    dataset.get_data(0, "data")
    assert len(threads() - before) == 1
    del dataset
    wait_until(lambda: gc.collect() >= 0 and not threads() - before)


def test_copies_are_shared_and_survive(s3, url, limit):
    folder = limit(NUM_SHARDS)
    for _ in range(2):
        dataset = ManifestDataset(url)
        dataset.init_seq_order(epoch=1)
        for _ in sequences(dataset):
            pass
    assert s3.count("GET", "/data-") == NUM_SHARDS
    assert FileCache().directory == str(folder)
