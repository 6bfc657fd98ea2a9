"""Files appear complete or not at all, here and on remote storage."""

import os
import resource
import signal
import uuid

import fsspec
import pytest

from seqshard.io import storage
from seqshard.io.errors import ConfigError, OutputError, OutputFolderError, SourceNotFoundError


@pytest.fixture
def remote():
    folder = f"memory://{uuid.uuid4().hex}"
    fsspec.filesystem("memory").makedirs(folder)
    yield folder
    fsspec.filesystem("memory").rm(folder, recursive=True)


@pytest.fixture(params=["local", "remote"])
def folder(request, tmp_path):
    return str(tmp_path) if request.param == "local" else request.getfixturevalue("remote")


@pytest.fixture
def small_disk():
    """Files of this process may not grow beyond 64 KiB, as if the disk were full."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, old[1]))
    yield 1 << 16
    resource.setrlimit(resource.RLIMIT_FSIZE, old)
    signal.signal(signal.SIGXFSZ, handler)


def test_round_trip(folder):
    path = storage.join(folder, "a.bin")
    assert not storage.exists(path)
    for data in (b"old", b"", b"longer than before"):
        storage.commit_bytes(path, data)
        assert storage.read_bytes(path) == data
        assert storage.stamp(path).num_bytes == len(data)
        assert storage.list_names(folder) == ["a.bin"]
        with storage.local_copy(path) as local, open(local, "rb") as file:
            assert file.read() == data
    storage.remove(path)
    assert not storage.exists(path)
    storage.remove(path)


def test_folders(folder):
    inner = storage.join(folder, "x/y")
    assert storage.list_names(inner) == []
    storage.make_folder(inner)
    storage.make_folder(inner)
    assert storage.is_folder(inner)
    storage.commit_bytes(storage.join(inner, "b"), b"1")
    storage.commit_bytes(storage.join(inner, "a"), b"2")
    assert storage.list_names(inner) == ["a", "b"]
    storage.remove_folder(storage.join(folder, "x"))
    storage.remove_folder(storage.join(folder, "x"))
    assert not storage.exists(inner)
    storage.check_writable(inner)
    assert storage.list_names(inner) == []


def test_globs_find_files_only(folder):
    storage.make_folder(storage.join(folder, "a.dir"))
    for name in ("b.1", "a.1", "a.dir/a.2"):
        storage.commit_bytes(storage.join(folder, name), b"")

    def names(pattern):
        found = storage.glob(storage.join(folder, pattern))
        return [path.partition(folder.partition("://")[2] or folder)[2] for path in found]

    assert names("*") == ["/a.1", "/b.1"]
    assert names("a*") == ["/a.1"]
    assert names("**/a.*") == ["/a.1", "/a.dir/a.2"]
    assert names("none*") == []


def test_publish_moves_a_local_file(folder, tmp_path):
    path = storage.join(folder, "out.bin")
    with storage.local_target(path) as target:
        with open(target, "wb") as file:
            file.write(b"content")
        assert not storage.exists(path)
        storage.publish(target, path)
    assert storage.read_bytes(path) == b"content"
    assert not os.path.exists(target)
    assert storage.list_names(folder) == ["out.bin"]


def test_what_is_not_published_is_removed(folder):
    path = storage.join(folder, "out.bin")
    storage.commit_bytes(path, b"old")
    targets = []

    def stop_halfway():
        with storage.local_target(path) as target:
            targets.append(target)
            with open(target, "wb") as file:
                file.write(b"half")
            raise KeyError("stopped")

    with pytest.raises(KeyError):
        stop_halfway()
    assert not os.path.exists(targets[0])
    assert storage.read_bytes(path) == b"old"
    assert storage.list_names(folder) == ["out.bin"]


def test_two_attempts_never_share_a_temporary_file(tmp_path):
    path = str(tmp_path / "out.bin")
    with storage.local_target(path) as first, storage.local_target(path) as second:
        assert first != second
        assert os.path.dirname(first) == os.path.dirname(path)
        assert os.path.basename(first).startswith(".out.bin.")


def test_a_full_disk_leaves_the_old_file(tmp_path, small_disk):
    path = str(tmp_path / "a.bin")
    storage.commit_bytes(path, b"old")
    with pytest.raises(OutputError, match=r"a\.bin: cannot write the output.*Free some space"):
        storage.commit_bytes(path, bytes(2 * small_disk))
    assert storage.read_bytes(path) == b"old"
    assert storage.list_names(str(tmp_path)) == ["a.bin"]


def test_a_full_disk_leaves_nothing_of_a_new_file(tmp_path, small_disk):
    path = str(tmp_path / "a.bin")

    def write():
        with storage.local_target(path) as target:
            with open(target, "wb") as file:
                file.write(bytes(2 * small_disk))
            storage.publish(target, path)

    with pytest.raises(OutputError, match="File too large"):
        write()
    assert storage.list_names(str(tmp_path)) == []


@pytest.mark.parametrize("number", ["ENOSPC", "EDQUOT", "EFBIG"])
def test_errors_for_want_of_space_say_what_to_do(number):
    import errno

    code = getattr(errno, number)
    plain = OSError(code, os.strerror(code))
    from_hdf = OSError(f"Can't write (file write failed: errno = {code}, error message = ...)")
    for error in (plain, from_hdf):
        with (
            pytest.raises(OutputError, match=f"/out/x.*{os.strerror(code)}.*Free some space"),
            storage.output_errors("/out/x"),
        ):
            raise error


def test_other_errors_of_the_system_name_the_path(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OutputFolderError, match=r"file/x: cannot write.*Not a directory"):
        storage.make_folder(str(tmp_path / "file" / "x"))
    with pytest.raises(OutputFolderError, match="cannot write"):
        storage.check_writable(str(tmp_path / "file"))
    with pytest.raises(OutputError, match="No such file"):
        storage.commit_bytes(str(tmp_path / "none" / "x"), b"")


def test_typed_errors_pass_unchanged():
    with pytest.raises(SourceNotFoundError, match=r"^gone$"), storage.output_errors("/out"):
        raise SourceNotFoundError("gone")


def test_missing_files(folder):
    path = storage.join(folder, "none.bin")
    for read in (storage.stamp, storage.read_bytes):
        with pytest.raises(SourceNotFoundError, match=r"none\.bin: cannot read.*Check the path"):
            read(path)
    with pytest.raises(SourceNotFoundError), storage.local_copy(f"{path}") as local:
        storage.stamp(local)
    assert not storage.exists(path)


def test_stamps_tell_versions_apart(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(b"abc")
    os.utime(path, ns=(1, 1))
    first = storage.stamp(str(path))
    assert (first.num_bytes, first.version) == (3, "1")
    os.utime(path, ns=(1, 2))
    assert storage.stamp(str(path)) != first


def test_downloads_do_not_stay(remote):
    path = storage.join(remote, "a.bin")
    storage.commit_bytes(path, b"1")
    with storage.local_copy(path) as local:
        assert local != path
        assert os.path.basename(local) == "a.bin"
    assert not os.path.exists(os.path.dirname(local))


@pytest.mark.parametrize(
    ("folder", "name", "joined"),
    [
        ("/a", "b", "/a/b"),
        ("/a", "/b", "/b"),
        ("/a", "s3://x/b", "s3://x/b"),
        ("s3://x/a/", "b", "s3://x/a/b"),
        ("s3://x", "b/c", "s3://x/b/c"),
    ],
)
def test_join(folder, name, joined):
    assert storage.join(folder, name) == joined


@pytest.mark.parametrize(
    "use", [storage.stamp, storage.exists, storage.glob, storage.list_names, storage.read_bytes]
)
def test_unknown_protocols_are_refused(use):
    with pytest.raises(ConfigError, match=r"nosuch://x: this URL cannot be opened.*nosuch"):
        use("nosuch://x")
