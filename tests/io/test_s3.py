"""Storage on a real S3 server: requests, failures, uploads, secrets."""

import contextlib
import os
import pickle
import re

import fsspec
import pytest

from seqshard.io import remote, storage
from seqshard.io.errors import (
    OutputError,
    OutputFolderError,
    SeqshardError,
    SourceNotFoundError,
    StorageError,
    redact,
)
from seqshard.io.receipts import hash_file


@pytest.fixture(params=["s3", "gcs"])
def store(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(remote, "FIRST_WAIT_SECONDS", 0.01)


def fault(object_stores, store, kind, **options):
    store.faults.append(object_stores.Fault(kind, **options))


def test_round_trip(store):
    path = storage.join(store.url, "a.bin")
    assert not storage.exists(path)
    for data in (b"old", b"longer than before"):
        storage.commit_bytes(path, data)
        assert storage.read_bytes(path) == data
        assert storage.stamp(path).num_bytes == len(data)
        assert storage.list_names(store.url) == ["a.bin"]
        with storage.local_copy(path) as local, open(local, "rb") as file:
            assert file.read() == data
    storage.remove(path)
    storage.remove(path)
    assert not storage.exists(path)
    assert storage.list_names(store.url) == []


def test_empty_files(s3):
    path = storage.join(s3.url, "empty")
    storage.commit_bytes(path, b"")
    assert storage.read_bytes(path) == b""
    assert hash_file(path) == hash_file(os.devnull)
    with storage.local_copy(path) as local:
        assert os.path.getsize(local) == 0


def test_versions_differ(store):
    path = storage.join(store.url, "a")
    storage.commit_bytes(path, b"one")
    first = storage.stamp(path)
    assert storage.stamp(path) == first
    storage.commit_bytes(path, b"two")
    assert storage.stamp(path) != first


def test_small_files_take_one_request(store):
    path = storage.join(store.url, "a")
    storage.commit_bytes(path, b"data")
    assert len(store.requests) == 1
    store.clear()
    storage.read_bytes(path)
    assert [r.method for r in store.requests] == ["GET"]
    store.clear()
    with pytest.raises(SourceNotFoundError):
        storage.read_bytes(path + ".none")
    assert len(store.requests) == 1


@pytest.mark.parametrize("pattern", ["*.a", "x/*.a", "**/*.a", "?.[ab]"])
def test_a_glob_lists_once(store, pattern, tmp_path):
    for name in ("1.a", "2.a", "3.b", "x/4.a", "x/y/5.a"):
        storage.commit_bytes(storage.join(store.url, name), b"")
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).touch()
    store.clear()
    found = storage.glob(storage.join(store.url, pattern))
    local = storage.glob(str(tmp_path / pattern))
    assert found == [path.replace(str(tmp_path), store.url) for path in local]
    assert found
    assert len(store.requests) == 1
    assert store.num_lists == 1


def test_folders_need_not_be_made(store):
    storage.make_folder(storage.join(store.url, "x/y"))
    assert store.requests == []
    storage.commit_bytes(storage.join(store.url, "x/y/a"), b"1")
    assert storage.is_folder(storage.join(store.url, "x"))
    storage.remove_folder(storage.join(store.url, "x"))
    storage.remove_folder(storage.join(store.url, "x"))
    assert not storage.exists(storage.join(store.url, "x"))
    storage.check_writable(store.url)
    assert storage.list_names(store.url) == []


# Failures.


@pytest.mark.parametrize("kind", [500, 503, 429, "reset"])
def test_failures_that_pass_are_not_seen(s3, object_stores, kind):
    path = storage.join(s3.url, "a")
    fault(object_stores, s3, kind, times=3)
    storage.commit_bytes(path, b"data")
    assert s3.count("PUT") >= 4
    fault(object_stores, s3, kind, times=3)
    assert storage.read_bytes(path) == b"data"
    fault(object_stores, s3, kind, times=3)
    assert storage.stamp(path).num_bytes == 4
    fault(object_stores, s3, kind, times=3)
    assert storage.list_names(s3.url) == ["a"]


@pytest.mark.parametrize("kind", [500, 503])
def test_failures_that_pass_are_not_seen_on_gcs(gcs, object_stores, kind):
    path = storage.join(gcs.url, "a")
    fault(object_stores, gcs, kind)
    storage.commit_bytes(path, b"data")
    fault(object_stores, gcs, kind)
    assert storage.read_bytes(path) == b"data"


def test_a_silent_server_is_asked_again(s3, object_stores, monkeypatch):
    path = storage.join(s3.url, "a")
    storage.commit_bytes(path, b"data")
    options = {"config_kwargs": {"read_timeout": 0.5}}
    monkeypatch.setitem(fsspec.config.conf, "s3", options)
    s3.clear()
    fault(object_stores, s3, "hang")
    assert storage.read_bytes(path) == b"data"
    assert s3.count("GET") == 2


def test_only_failed_ranges_are_read_again(s3, object_stores):
    path = storage.join(s3.url, "a")
    data = bytes(range(256))
    storage.commit_bytes(path, data)
    ranges = [remote.ByteRange(path, at, at + 10) for at in range(0, 250, 20)]
    s3.clear()
    fault(object_stores, s3, 503, when=lambda r: r.range == "bytes=40-49", times=2)
    found = remote.read_ranges(ranges)
    assert found == [data[r.begin : r.end] for r in ranges]
    assert s3.count("GET") == len(ranges) + 2


def test_a_store_that_keeps_failing_is_one_sentence(s3, object_stores):
    fault(object_stores, s3, 503, times=1000)
    path = storage.join(s3.url, "a")
    sentence = rf"{path}: the store fails \(found .*, after {remote.ATTEMPTS} attempts\)\. Check"
    with pytest.raises(StorageError, match=sentence):
        storage.read_bytes(path)
    assert s3.count("GET") == remote.ATTEMPTS
    with pytest.raises(OutputError, match=rf"{path}: cannot write .*{remote.ATTEMPTS} attempts"):
        storage.commit_bytes(path, b"")
    with pytest.raises(StorageError):
        storage.list_names(s3.url)
    with pytest.raises(StorageError):
        storage.exists(path)


@pytest.mark.parametrize(("status", "hint"), [(403, "your credentials"), (404, "Check the path")])
def test_refusals_come_at_once(store, object_stores, status, hint):
    path = storage.join(store.url, "a")
    storage.commit_bytes(path, b"")
    for read in (storage.stamp, storage.read_bytes):
        store.clear()
        fault(object_stores, store, status, times=1000)
        with pytest.raises(SourceNotFoundError, match=rf"^{path}: cannot read.*{hint}"):
            read(path)
        assert len(store.requests) <= 3  # as it might be a folder
    store.clear()
    fault(object_stores, store, status, times=1000)
    with pytest.raises(OutputError, match=rf"^{path}: cannot write the output"):
        storage.commit_bytes(path, b"1")
    assert len(store.requests) == 1


def test_a_bucket_that_is_not_there_is_not_made(store):
    url = store.url.replace("corpora", "no-such-bucket")
    with pytest.raises(OutputFolderError, match=r"no-such-bucket.*cannot write.*bucket"):
        storage.check_writable(url)
    with pytest.raises(SourceNotFoundError, match=r"no-such-bucket.*cannot read.*bucket"):
        storage.read_bytes(f"{url}/a")
    assert len(store.requests) == 2


def test_nobody_listens(s3, object_stores, monkeypatch):
    endpoint = f"http://127.0.0.1:{object_stores.free_port()}"
    monkeypatch.setitem(fsspec.config.conf, "s3", {"endpoint_url": endpoint})
    monkeypatch.setattr(remote, "ATTEMPTS", 2)
    with pytest.raises(StorageError, match=r"/a: the store fails .*Could not connect.*2 attempts"):
        storage.read_bytes(f"{s3.url}/a")


# Uploads.


@pytest.fixture
def small_parts(monkeypatch):
    """Files are uploaded in parts of 5 MiB, the least that S3 takes."""
    import s3fs

    monkeypatch.setattr(s3fs.core, "calculate_chunksize", lambda *_, **__: 5 << 20)


def upload(path, size, tmp_path):
    local = tmp_path / "local"
    local.write_bytes(os.urandom(size))
    content = local.read_bytes()
    storage.publish(str(local), path)
    assert not local.exists()
    return content


def unfinished(s3):
    fs, _ = remote.filesystem(s3.url)
    prefix = s3.url.partition("corpora/")[2]
    return fs.call_s3("list_multipart_uploads", Bucket="corpora", Prefix=prefix).get("Uploads", [])


def test_large_files_appear_complete(s3, small_parts, tmp_path, object_stores):
    path = storage.join(s3.url, "large")
    fault(object_stores, s3, 500, when=lambda r: "partNumber" in r.query, times=2)
    content = upload(path, 12 << 20, tmp_path)
    assert storage.read_bytes(path) == content
    assert any("uploadId" in r.query for r in s3.requests)
    assert unfinished(s3) == []


@pytest.mark.parametrize("step", ["partNumber", "complete"])
def test_a_failed_upload_leaves_nothing(s3, small_parts, tmp_path, object_stores, step):
    path = storage.join(s3.url, "large")

    def broken(request):
        last = request.method == "POST" and "uploadId" in request.query
        return last if step == "complete" else "partNumber" in request.query

    fault(object_stores, s3, 403, when=broken, times=1000)
    with pytest.raises(OutputError, match="large: cannot write the output"):
        upload(path, 12 << 20, tmp_path)
    assert storage.list_names(s3.url) == []
    assert unfinished(s3) == []


def test_leftovers_of_killed_writers_are_given_up(s3):
    fs, _ = remote.filesystem(s3.url)
    key = s3.url.partition("corpora/")[2]
    for name in (f"{key}/data-1", f"{key}-other/data-1"):
        fs.call_s3("create_multipart_upload", Bucket="corpora", Key=name)
    storage.abort_uploads(s3.url)
    assert [u["Key"] for u in unfinished(s3)] == [f"{key}-other/data-1"]
    storage.abort_uploads(f"{s3.url}-other")
    assert unfinished(s3) == []


@pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning")
def test_large_files_appear_complete_on_gcs(gcs, tmp_path):
    path = storage.join(gcs.url, "large")
    content = upload(path, 6 << 20, tmp_path)
    assert storage.read_bytes(path) == content
    assert storage.list_names(gcs.url) == ["large"]


def test_large_files_are_read_in_parallel_ranges(s3, small_parts, tmp_path):
    path = storage.join(s3.url, "large")
    content = upload(path, 20 << 20, tmp_path)
    s3.clear()
    with storage.local_copy(path) as local, open(local, "rb") as file:
        assert file.read() == content
    assert [r.method for r in s3.requests].count("HEAD") == 1
    assert s3.count("GET") == 3


# Secrets.


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("s3://bucket/a b", "s3://bucket/a b"),
        ("no://host:80/a@b and more@c", "no://host:80/a@b and more@c"),
        ("ftp://me:pa/ss:w@host/a", "ftp://***@host/a"),
        ("'sftp://me@host/a'", "'sftp://***@host/a'"),
        ("s3://KEY:se/cret@b/x, s3://b/y", "s3://***@b/x, s3://b/y"),
        (
            "https://h/a?X-Amz-Credential=AK%2F1&x=1&X-Amz-Signature=0f) found",
            "https://h/a?X-Amz-Credential=***&x=1&X-Amz-Signature=*** found",
        ),
        ("https://h/a?sig=b%2B&sv=1", "https://h/a?sig=***&sv=1"),
        ("gs://b/a?GoogleAccessId=me&Signature=x", "gs://b/a?GoogleAccessId=***&Signature=***"),
        ("me:secret@host without a URL", "me:secret@host without a URL"),
    ],
)
def test_redaction(text, shown):
    assert redact(text) == shown
    assert redact(shown) == shown


def test_no_error_has_a_secret():
    url = "https://me:pass@host/a?Signature=sesame"
    error = SeqshardError(f"bad {url}", url, url, 3, url, url, f"Try {url}")
    for text in (str(error), repr(error), error.reason, str(pickle.loads(pickle.dumps(error)))):
        assert not re.search("pass|sesame|me:", text)
        assert "host/a?Signature=***" in text


def test_credentials_are_not_in_messages_or_logs(s3, object_stores, caplog):
    caplog.set_level("WARNING")
    for kind in (403, 503):
        s3.clear()
        fault(object_stores, s3, kind, times=1000)
        with pytest.raises(SeqshardError) as caught:
            storage.read_bytes(f"{s3.url}/a?X-Amz-Signature=sesame")
        with pytest.raises(SeqshardError) as caught_too, contextlib.nullcontext():
            storage.commit_bytes(f"{s3.url}/a", b"")
        for text in (str(caught.value), str(caught_too.value), caplog.text):
            assert not re.search("AKIAUNITTEST|top/secret|sesame", text)


def test_names_that_are_written_down_have_no_secrets():
    url = "https://me:pass@host/a.cache?Signature=sesame"
    assert storage.relative(url, "/folder") == "https://***@host/a.cache?Signature=***"
