"""Remote archives give what local ones do, from as few bytes as possible."""

import gzip
import struct
import uuid
from pathlib import Path

import fsspec
import numpy as np
import pytest

from seqshard.io import remote
from seqshard.io.errors import SeqshardError, SourceFormatError
from seqshard.io.records import StreamSpec
from seqshard.io.sources import open_source
from seqshard.io.sprint.archive import Archive

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "examples" / "demo"
ARCHIVES = sorted(
    path
    for folder in (ROOT / "tests" / "data" / "rasr", DEMO)
    for path in folder.rglob("*")
    if path.is_file() and path.read_bytes()[:8] == b"SP_ARC1\0"
)
FEATURES = StreamSpec("data", "sprint-features")
ALIGNMENT = StreamSpec("classes", "sprint-alignment", num_labels=1000, soft="best")


@pytest.fixture
def put():
    """Puts a file into a remote folder."""
    memory, folder = fsspec.filesystem("memory"), f"memory://{uuid.uuid4().hex}"

    def put_file(name, data):
        memory.pipe_file(f"{folder}/{name}", bytes(data))
        return f"{folder}/{name}"

    yield put_file
    if memory.exists(folder):
        memory.rm(folder, recursive=True)


@pytest.fixture
def requests(monkeypatch):
    found = []
    original = remote.read_ranges
    monkeypatch.setattr(remote, "read_ranges", lambda batch: found.extend(batch) or original(batch))
    return found


def read_all(spec, path, recover):
    """Index and all payload of a source; or the error, with the path replaced."""
    try:
        with open_source(spec, path, recover) as source:
            index = source.index()
            frames = int(index.length.sum())
            kind = index.format
            out = None
            if kind is not None:
                out = np.zeros((frames, *kind.shape), np.dtype(kind.dtype))
                start = np.cumsum(index.length) - index.length
                columns = (index.position, index.length, index.num_bytes, index.raw_bytes)
                try:
                    source.read_many(*columns, out, start)
                except SeqshardError as error:
                    out = str(error).replace(path, "PATH")
    except SeqshardError as error:
        return str(error).replace(path, "PATH")
    damaged = [(tag, str(error).replace(path, "PATH")) for tag, error in index.damaged]
    columns = [index.position, index.length, index.num_bytes, index.raw_bytes]
    return index.format, index.tag, index.fingerprint, damaged, columns, out


def assert_same(found, expected):
    if isinstance(expected, str):
        assert found == expected
        return
    assert found[:4] == expected[:4]
    np.testing.assert_array_equal(found[4], expected[4])
    np.testing.assert_array_equal(found[5], expected[5])


@pytest.mark.parametrize("recover", [False, True])
@pytest.mark.parametrize("spec", [FEATURES, ALIGNMENT], ids=lambda spec: spec.name)
@pytest.mark.parametrize("path", ARCHIVES, ids=lambda path: path.name)
def test_archives(path, spec, recover, put):
    url = put(path.name, path.read_bytes())
    assert_same(read_all(spec, url, recover), read_all(spec, str(path), recover))


def test_there_are_archives():
    assert len(ARCHIVES) >= 3


@pytest.mark.parametrize("cut", [0, 5, 9, 20, 5000, -1, -20])
def test_damaged_files(cut, put, tmp_path):
    data = (DEMO / "features.0.cache").read_bytes()[: cut or None]
    data = data if cut else b""
    (tmp_path / "a.cache").write_bytes(data)
    for recover in (False, True):
        expected = read_all(FEATURES, str(tmp_path / "a.cache"), recover)
        assert_same(read_all(FEATURES, put("a.cache", data), recover), expected)


def test_compressed_heads_that_need_more_than_their_first_bytes(put, tmp_path):
    """A gzip member may have a long name in front of its data."""
    with Archive(str(DEMO / "features.0.cache")) as archive:
        entry = int(archive.sequences[0])
        payload, name = bytes(archive.payload(entry)), archive.table.name(entry)
    packed = gzip.compress(payload, mtime=0)
    packed = packed[:3] + b"\x08" + packed[4:10] + b"n" * 9000 + b"\0" + packed[10:]
    content = b"SP_ARC1\0\x01" + bytes(12) + packed + bytes(20_000)
    table = struct.pack("<II", 1, len(name)) + name
    table += struct.pack("<QII", 9, len(payload), len(packed))
    content += table + struct.pack("<IIQ", 0, 0, len(content))
    path = tmp_path / "a.cache"
    path.write_bytes(content)
    expected = read_all(FEATURES, str(path), False)
    assert expected[1].to_pylist() == [name.decode()]
    assert_same(read_all(FEATURES, put("a.cache", content), False), expected)


def test_indexing_and_reading_ask_for_little(put, requests):
    path = DEMO / "features.0.cache"
    url = put("a.cache", path.read_bytes())
    with open_source(FEATURES, url) as source:
        index = source.index()
        assert len(requests) <= 3
        assert len(index.tag) >= 30
        count = len(requests)
        order = np.arange(0, len(index.tag), 2)
        out = np.zeros((int(index.length.sum()), *index.format.shape), np.float32)
        columns = (index.position, index.length, index.num_bytes, index.raw_bytes)
        source.read_many(*(c[order] for c in columns), out, np.zeros(len(order), np.int64))
        assert len(requests) <= count + 1


def test_errors_name_the_url(put):
    url = put("a.cache", b"no archive at all")
    with pytest.raises(SourceFormatError, match=f"^{url}, byte 0: not a Sprint archive"):
        open_source(FEATURES, url)
    url = put("a.hdf", b"no HDF at all")
    with pytest.raises(SourceFormatError, match=f"^{url}: this is not a complete HDF"):
        open_source(StreamSpec("speaker", "hdf"), url)


def test_hdf_files_are_read_from_the_cache(put, monkeypatch, tmp_path):
    monkeypatch.setenv("SEQSHARD_FILE_CACHE", str(tmp_path))
    monkeypatch.setenv("SEQSHARD_FILE_CACHE_BYTES", str(1 << 30))
    path = DEMO / "speaker.hdf"
    spec = StreamSpec("speaker", "hdf")
    expected = read_all(spec, str(path), False)
    assert_same(read_all(spec, put("speaker.hdf", path.read_bytes()), False), expected)
    assert len(list(tmp_path.glob("*/speaker.hdf"))) == 1
