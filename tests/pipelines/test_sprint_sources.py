"""Archives in folders, bundles as RASR reads them, and names in other encodings, in builds."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from seqshard.datasets import ManifestDataset
from seqshard.io import storage
from seqshard.io.sprint.archive import Archive
from seqshard.io.sprint.bundle import read_bundle
from seqshard.io.sprint.writer import ArchiveWriter
from seqshard.pipelines.build import main as build
from seqshard.pipelines.verify import main as verify

DEMO = Path(__file__).parents[2] / "examples" / "demo"
FLAGS = ("--num_shards=3", "--seq_ordering=random:4")


def unpack(path, folder):
    """Every entry of an archive as a file."""
    with Archive(str(path)) as archive:
        for entry, name in enumerate(archive.names.to_pylist()):
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(bytes(archive.payload(entry)))


@pytest.fixture
def folders(tmp_path):
    """The demo corpus with a folder in place of every archive."""
    shutil.copytree(DEMO, tmp_path / "demo")
    shutil.copy(DEMO.parent / "demo.toml", tmp_path)
    for bundle in ("features", "alignment"):
        for path in read_bundle(str(tmp_path / "demo" / f"{bundle}.bundle")):
            os.rename(path, f"{path}.file")
            unpack(f"{path}.file", Path(path))
            os.unlink(f"{path}.file")
    return tmp_path


@pytest.mark.parametrize("files", ["demo/features.bundle", "demo/features.*.cache"])
def test_folders_give_the_same_shards(build_demo, folders, files):
    config = folders / "demo.toml"
    config.write_text(config.read_text().replace("demo/features.bundle", files))
    assert build([f"--config={config}", f"--output={folders / 'out'}", *FLAGS]) == 0
    for shard in build_demo(*FLAGS).glob("data-*"):
        assert shard.read_bytes() == (folders / "out" / shard.name).read_bytes()
    assert verify([str(folders / "out")]) == 0
    manifest = json.loads((folders / "out" / "manifest.json").read_text())
    source = next(s for s in manifest["sources"] if s["path"] == "demo/features.0.cache")
    files = (folders / "demo" / "features.0.cache").rglob("*")
    assert source["num_bytes"] == sum(path.stat().st_size for path in files if path.is_file())


def test_a_changed_file_in_a_folder_is_noticed(folders):
    args = [f"--config={folders / 'demo.toml'}", f"--output={folders / 'out'}", *FLAGS]
    assert build(args) == 0
    before = ManifestDataset(folders / "out").get_data_by_seq_tag
    path = next(p for p in (folders / "demo" / "features.1.cache").rglob("*") if p.is_file())
    tag = str(path.relative_to(folders / "demo" / "features.1.cache")).removesuffix(".attribs")
    path = folders / "demo" / "features.1.cache" / tag
    old = np.array(before(tag, "data"))
    data = bytearray(path.read_bytes())
    data[24] ^= 1  # in the first frame
    path.write_bytes(data)
    assert build(args) == 0
    new = ManifestDataset(folders / "out").get_data_by_seq_tag(tag, "data")
    assert (new[0] != old[0]).sum() == 1


def test_stamps_of_folders(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "x").write_bytes(b"123")
    (tmp_path / "a" / "y").write_bytes(b"4567")
    first = storage.stamp(str(tmp_path / "a"))
    assert first.num_bytes == 7
    assert storage.stamp(str(tmp_path / "a")) == first
    os.utime(tmp_path / "a" / "b" / "x", (1, 1))
    second = storage.stamp(str(tmp_path / "a"))
    assert second != first
    os.rename(tmp_path / "a" / "y", tmp_path / "a" / "z")
    assert storage.stamp(str(tmp_path / "a")) not in (first, second)


def test_names_in_latin_1(tmp_path, capsys):
    with ArchiveWriter(tmp_path / "x.cache", encoding="latin-1") as writer:
        writer.add_features("korpus/größe", np.ones((3, 2), np.float32))
    config = tmp_path / "corpus.toml"
    text = '[streams.data]\nsource = "sprint-features"\nfiles = "x.cache"\n'
    config.write_text(text)
    args = [f"--config={config}", f"--output={tmp_path / 'out'}"]
    assert build(args) == 1
    assert "is not utf-8" in capsys.readouterr().err
    config.write_text(f'{text}encoding = "latin-1"\n')
    assert build(args) == 0
    assert ManifestDataset(tmp_path / "out").get_all_tags() == ["korpus/größe"]


def test_bundles_as_rasr_reads_them(build_demo, tmp_path, monkeypatch):
    """Relative to the working directory."""
    names = [os.path.relpath(p, DEMO.parent) for p in read_bundle(str(DEMO / "features.bundle"))]
    (tmp_path / "features.bundle").write_text("\n".join(names))
    config = tmp_path / "demo.toml"
    text = (DEMO.parent / "demo.toml").read_text().replace('"demo/', f'"{DEMO}/')
    bundle = f'"{tmp_path}/features.bundle"]\nbundle_paths = "cwd"'
    config.write_text(text.replace(f'"{DEMO}/features.bundle"]', bundle))
    monkeypatch.chdir(DEMO.parent)
    assert build([f"--config={config}", f"--output={tmp_path / 'out'}", *FLAGS]) == 0
    for shard in build_demo(*FLAGS).glob("data-*"):
        assert shard.read_bytes() == (tmp_path / "out" / shard.name).read_bytes()
