import contextlib
import fcntl
import gc
import json
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from returnn.util.file_cache import CachedFile as ReturnnCachedFile

from seqshard.datasets import init_dataset
from seqshard.datasets.file_cache import CachedFile, FileCache, resolve_cached_files
from seqshard.datasets.writers import SimpleHDFWriter
from seqshard.io import file_cache, storage
from seqshard.io.errors import ConfigError, OutputError, SourceFormatError, SourceNotFoundError


@pytest.fixture
def cache(tmp_path):
    return FileCache(str(tmp_path / "cache"), max_bytes=1000)


def make(tmp_path, name, content):
    path = tmp_path / "originals" / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    return path


def read(lease):
    with open(lease.paths[0], "rb") as file:
        return file.read()


def copies(cache):
    return sorted(
        name
        for _, _, names in os.walk(cache.directory)
        for name in names
        if not name.endswith((".lock", ".json"))
    )


def test_a_copy_has_the_name_and_content_of_the_original(tmp_path, cache):
    path = make(tmp_path, "a.hdf", b"x" * 300)
    lease = cache.get(path)
    assert os.path.basename(lease.paths[0]) == "a.hdf"
    assert lease.paths[0] != str(path)
    assert read(lease) == b"x" * 300
    with open(os.path.join(os.path.dirname(lease.paths[0]), "entry.json"), "rb") as file:
        entry = json.load(file)
    assert entry["source"] == str(path)
    assert entry["num_bytes"] == 300


def test_a_copy_is_used_again(tmp_path, cache, monkeypatch):
    path = make(tmp_path, "a.hdf", b"x")
    first = cache.get(path)
    monkeypatch.setattr(FileCache, "_make", None)
    assert cache.get(path).paths == first.paths
    link = tmp_path / "link.hdf"
    link.symlink_to(path)
    assert cache.get(link).paths == first.paths
    assert cache.get(first.paths[0]).paths == first.paths


def test_a_changed_original_is_copied_again(tmp_path, cache):
    path = make(tmp_path, "a.hdf", b"old")
    assert read(cache.get(path)) == b"old"
    path.write_bytes(b"new")
    os.utime(path, ns=(1, 1))
    assert read(cache.get(path)) == b"new"
    path.write_bytes(b"longer")
    assert read(cache.get(path)) == b"longer"


def test_empty_file_and_same_names(tmp_path, cache):
    assert read(cache.get(make(tmp_path, "empty", b""))) == b""
    (tmp_path / "originals" / "b").mkdir()
    one, two = make(tmp_path, "a", b"1"), make(tmp_path, "b/a", b"2")
    assert [read(cache.get(one)), read(cache.get(two))] == [b"1", b"2"]


def test_the_longest_unused_copy_makes_room(tmp_path, cache):
    paths = [make(tmp_path, name, name.encode() * 300) for name in "abc"]
    for age, path in enumerate(paths):
        lock = os.path.dirname(cache.get(path).paths[0]) + ".lock"
        os.utime(lock, (age + 1, age + 1))
    cache.get(paths[0])
    cache.get(make(tmp_path, "d", b"d" * 300))
    assert copies(cache) == ["a", "c", "d"]
    assert all(path.exists() for path in paths)


def test_what_is_in_use_stays(tmp_path, cache):
    paths = [make(tmp_path, name, name.encode() * 300) for name in "abc"]
    leases = [cache.get(path) for path in paths]
    with pytest.raises(OutputError, match=r"in use leave no room .*300 bytes, found \d+ of 1000"):
        cache.get(make(tmp_path, "d", b"d" * 300))
    assert copies(cache) == ["a", "b", "c"]
    leases[1].close()
    leases[1].close()
    cache.get(tmp_path / "originals" / "d")
    assert copies(cache) == ["a", "c", "d"]
    assert read(leases[0]) == b"a" * 300


def test_a_file_that_can_never_fit_fails_at_once(tmp_path, cache):
    cache.get(make(tmp_path, "a", b"a" * 500))
    path = make(tmp_path, "b", b"b" * 1001)
    with pytest.raises(OutputError, match=r"larger than the whole cache .*1000 bytes, found 1001"):
        cache.get(path)
    assert copies(cache) == ["a"]


def test_a_missing_original(tmp_path, cache):
    with pytest.raises(SourceNotFoundError, match=r"nothing: cannot read this file"):
        cache.get(tmp_path / "nothing")
    path = cache.get(make(tmp_path, "a", b"a")).paths[0]
    os.unlink(path)
    with pytest.raises(SourceNotFoundError, match="no longer in the cache"):
        cache.get(path)
    assert read(cache.get(tmp_path / "originals" / "a")) == b"a"


def test_a_copy_that_differs_is_refused(tmp_path, cache, monkeypatch):
    path = make(tmp_path, "a", b"abc")
    with monkeypatch.context() as patch:
        patch.setattr(file_cache, "_hash_file", lambda path: "0")
        with pytest.raises(SourceFormatError, match="the copy differs from the original"):
            cache.get(path)
    assert copies(cache) == []
    assert read(cache.get(path)) == b"abc"


def test_an_original_that_changes_meanwhile_is_refused(tmp_path, cache, monkeypatch):
    path = make(tmp_path, "a", b"abc")
    original = file_cache._copy

    def slow(*args):
        digest = original(*args)
        path.write_bytes(b"abd")
        os.utime(path, ns=(1, 1))
        return digest

    with monkeypatch.context() as patch:
        patch.setattr(file_cache, "_copy", slow)
        with pytest.raises(SourceFormatError, match="changed while it was copied"):
            cache.get(path)
    assert copies(cache) == []


def test_a_crash_leaves_nothing_that_counts(tmp_path, cache):
    path = make(tmp_path, "a", b"a" * 600)
    place = cache._place(str(path), storage.stamp(str(path)))
    os.makedirs(place.folder)
    for name in ("a", "a.partial"):
        with open(os.path.join(place.folder, name), "wb") as file:
            file.write(b"?" * 600)
    open(place.lock, "w").close()
    assert read(cache.get(make(tmp_path, "b", b"b" * 900))) == b"b" * 900
    assert copies(cache) == ["b"]
    assert read(cache.get(path)) == b"a" * 600


def test_foreign_files_in_the_folder_are_left_alone(tmp_path, cache):
    foreign = tmp_path / "cache" / "mine"
    foreign.mkdir(parents=True)
    (foreign / "original.hdf").write_bytes(b"x" * 900)
    with pytest.raises(OutputError, match="no room"):
        cache.get(make(tmp_path, "a", b"a" * 600))
    assert (foreign / "original.hdf").exists()


def test_memory_urls(cache):
    fsspec = pytest.importorskip("fsspec")
    fsspec.filesystem("memory").pipe_file("/corpus/a.hdf", b"remote")
    lease = cache.get("memory://corpus/a.hdf")
    assert os.path.basename(lease.paths[0]) == "a.hdf"
    assert read(lease) == b"remote"


def test_default_limit_leaves_a_part_of_the_disk(tmp_path, monkeypatch):
    monkeypatch.setenv("SEQSHARD_FILE_CACHE", str(tmp_path / "from-env"))
    cache = FileCache()
    assert cache.directory == str(tmp_path / "from-env")
    assert read(cache.get(make(tmp_path, "a", b"a"))) == b"a"
    usage = type("Usage", (), {"total": 1000, "free": 150})
    monkeypatch.setattr(file_cache.shutil, "disk_usage", lambda path: usage)
    assert cache._limit(100) == 50
    monkeypatch.setenv("SEQSHARD_FILE_CACHE_BYTES", "77")
    assert FileCache()._limit(0) == 77
    monkeypatch.setenv("SEQSHARD_FILE_CACHE_BYTES", "10 GB")
    with pytest.raises(ConfigError, match=r"must be a number of bytes .found '10 GB'"):
        FileCache()


def test_options_with_cached_files(tmp_path, cache):
    path = make(tmp_path, "a", b"a")
    options = {
        "files": [CachedFile(str(path)), "other"],
        "datasets": {"x": ({"f": ReturnnCachedFile(str(path))}, 3)},
    }
    resolved, leases = resolve_cached_files(options, cache)
    copy = leases[0].paths[0]
    assert resolved == {"files": [copy, "other"], "datasets": {"x": ({"f": copy}, 3)}}
    assert len(leases) == 2
    assert isinstance(options["files"][0], CachedFile)
    assert resolve_cached_files({"a": [1]}, cache) == ({"a": [1]}, [])


GET_AND_HOLD = """
import sys, time
from seqshard.io import file_cache

made = []
original = file_cache._copy

def counted(*args):
    made.append(1)
    time.sleep(0.1)
    return original(*args)

file_cache._copy = counted
print("ready", flush=True)
sys.stdin.readline()
lease = file_cache.FileCache(sys.argv[1], max_bytes=1000).get(sys.argv[2])
with open(lease.paths[0], "rb") as file:
    print(len(made), file.read() == b"a" * 700, flush=True)
sys.stdin.readline()
"""


def test_one_copy_per_machine(tmp_path, cache):
    """Whoever comes first makes the copy; nobody waits for those who already use it."""
    path = make(tmp_path, "a", b"a" * 700)
    command = [sys.executable, "-c", GET_AND_HOLD, cache.directory, str(path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(subprocess.Popen(command, **pipes)) for _ in range(3)]
        assert [process.stdout.readline() for process in processes] == ["ready\n"] * 3
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        answers = sorted(process.stdout.readline() for process in processes)
        assert answers == ["0 True\n", "0 True\n", "1 True\n"]
        with pytest.raises(OutputError, match="in use"):
            cache.get(make(tmp_path, "b", b"b" * 700))
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert read(cache.get(tmp_path / "originals" / "b")) == b"b" * 700


def test_nobody_waits_for_a_copy_in_use(tmp_path, cache, monkeypatch):
    """The one who makes a copy may take its lease before those who waited for it wake up."""
    path = make(tmp_path, "a", b"a")
    waiting = threading.Event()
    lock, others = file_cache._lock, []

    def watched(path, how):
        if (
            path.endswith(".making.lock")
            and threading.current_thread() is not threading.main_thread()
        ):
            waiting.set()
        return lock(path, how)

    original = file_cache._copy

    def slow(*args):
        thread = threading.Thread(target=lambda: others.append(cache.get(path)), daemon=True)
        thread.start()
        others.append(thread)
        waiting.wait()
        return original(*args)

    monkeypatch.setattr(file_cache, "_lock", watched)
    monkeypatch.setattr(file_cache, "_copy", slow)
    lease = cache.get(path)
    thread, *_ = others
    thread.join()
    assert others[1].paths == lease.paths


def test_a_new_version_is_copied_while_the_old_one_is_read(tmp_path, cache):
    path = make(tmp_path, "a", b"old")
    old = cache.get(path)
    path.write_bytes(b"newer")
    new = cache.get(path)
    assert [read(old), read(new)] == [b"old", b"newer"]


def test_a_lease_ends_with_its_last_reference(tmp_path, cache):
    lease = cache.get(make(tmp_path, "a", b"a"))
    handle = os.open(os.path.dirname(lease.paths[0]) + ".lock", os.O_RDWR)
    with pytest.raises(BlockingIOError):
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    del lease
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(handle)


def test_a_dataset_keeps_its_copies(tmp_path, monkeypatch):
    monkeypatch.setenv("SEQSHARD_FILE_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "a.hdf"
    with SimpleHDFWriter(path, dim=2) as writer:
        writer.insert_batch(np.ones((1, 3, 2), "float32"), [3], ["seq"])
    options = {"class": "HDFDataset", "files": [CachedFile(str(path))]}
    dataset = init_dataset(options)
    copy = dataset.files[0]
    assert copy.startswith(str(tmp_path / "cache"))
    assert isinstance(options["files"][0], CachedFile)
    cache = FileCache(max_bytes=path.stat().st_size + 100)
    other = make(tmp_path, "b", b"b" * 200)
    with pytest.raises(OutputError, match="in use"):
        cache.get(other)
    dataset.init_seq_order(epoch=1)
    array = dataset.get_data(0, "data")
    del dataset
    gc.collect()
    cache.get(other)
    assert not os.path.exists(copy)
    assert array.tolist() == [[1, 1]] * 3
