from __future__ import annotations

import gzip
import os

import numpy as np
import pytest

from seqshard.io.errors import SourceFormatError, SourceNotFoundError
from seqshard.io.sprint.archive import Archive
from seqshard.io.sprint.directory import DirectoryArchive, open_archive
from seqshard.io.sprint.payload import decode_matrix
from seqshard.io.sprint.writer import ArchiveWriter


@pytest.fixture
def folder(tmp_path, writer):
    root = tmp_path / "folder.cache"
    (root / "rec").mkdir(parents=True)
    payload = writer.features(np.arange(6, dtype="f4").reshape(2, 3))
    (root / "rec" / "2").write_bytes(gzip.compress(payload))
    (root / "rec" / "1").write_bytes(payload)
    (root / "rec" / "1.attribs").write_bytes(b"<flow-attributes/>")
    (root / "empty").write_bytes(b"")
    return root


def test_files_are_entries(folder):
    archive = open_archive(str(folder))
    assert isinstance(archive, DirectoryArchive)
    assert archive.names.to_pylist() == ["empty", "rec/1", "rec/1.attribs", "rec/2"]
    assert archive.sequences.tolist() == [0, 1, 3]
    for name in ("rec/1", "rec/2"):
        values = decode_matrix(archive.payload(archive.find(name))).values
        assert values.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert archive.payload(0) == b""
    assert archive.attributes(1) == b"<flow-attributes/>"
    assert archive.attributes(3) is None
    assert archive.table.size[1] == archive.table.size[3]


def test_a_final_slash_means_a_folder(folder, tmp_path):
    assert len(open_archive(f"{folder}/")) == 4
    with pytest.raises(SourceNotFoundError, match="there is no such folder"):
        open_archive(str(tmp_path / "nothing") + "/")
    with ArchiveWriter(tmp_path / "x.cache") as writer:
        writer.add("a", b"1")
    with open_archive(str(tmp_path / "x.cache")) as archive:
        assert isinstance(archive, Archive)


def test_a_folder_packed_into_a_file(folder, tmp_path):
    source = DirectoryArchive(str(folder))
    with ArchiveWriter(tmp_path / "x.cache") as writer:
        for entry, name in enumerate(source.names.to_pylist()):
            writer.add(name, source.payload(entry))
    with Archive(tmp_path / "x.cache") as archive:
        assert archive.names.equals(source.names)
        assert all(bytes(archive.payload(i)) == source.payload(i) for i in range(len(archive)))


def test_damage(folder):
    (folder / "rec" / "2").write_bytes(gzip.compress(b"x" * 50)[:-9])
    (folder / "short").write_bytes(b"\x1f\x8b")
    (folder / "link").symlink_to("nowhere")
    os.mkfifo(folder / "pipe")
    archive = DirectoryArchive(str(folder))
    assert archive.names.to_pylist() == ["empty", "rec/1", "rec/1.attribs", "rec/2", "short"]
    for name in ("rec/2", "short"):
        with pytest.raises(SourceFormatError, match=f"entry '{name}'.*the compressed data"):
            archive.payload(archive.find(name))
    (folder / "empty").unlink()
    with pytest.raises(SourceFormatError, match=r"entry 'empty'.* cannot be read: No such file"):
        archive.payload(0)
    (folder / os.fsdecode(b"\xff")).write_bytes(b"")
    with pytest.raises(SourceFormatError, match="the name of entry 4 is not utf-8"):
        _ = DirectoryArchive(str(folder)).names
    assert "ÿ" in DirectoryArchive(str(folder), encoding="latin-1").names.to_pylist()
