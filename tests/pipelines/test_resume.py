"""What was finished is kept, what was not is never taken for finished."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from seqshard.pipelines.build import main as build
from seqshard.pipelines.verify import main as verify

ROOT = Path(__file__).parents[2]
DEMO_CONFIG = ROOT / "examples" / "demo.toml"


def demo_args(output: Path, *args: str) -> list[str]:
    return [f"--config={DEMO_CONFIG}", f"--output={output}", "--num_shards=4", *args]


@pytest.fixture(scope="module")
def corpus(synthetic, tmp_path_factory):
    return synthetic.make_corpus(tmp_path_factory.mktemp("corpus"), 60_000_000, num_archives=3)


def test_a_killed_build_continues_and_ends_with_the_same_bytes(corpus, same_bytes, tmp_path):
    args = [f"--config={corpus.config}", "--num_shards=60", "--seq_ordering=random"]
    assert build([*args, f"--output={tmp_path / 'whole'}"]) == 0

    output = tmp_path / "killed"
    process = subprocess.Popen(
        [sys.executable, "-m", "pipelines.build", *args, f"--output={output}"], cwd=ROOT
    )
    while process.poll() is None and len(list(output.glob(".build/*/*.receipt"))) < 3:
        time.sleep(0.001)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (output / "manifest.json").exists()
    receipts = {path.name[:5] for path in output.glob(".build/*/*.receipt")}
    assert 3 <= len(receipts) < 60
    written = {path: path.stat().st_ino for path in output.glob("data-*.hdf")}
    assert verify([str(output)]) == 1

    assert build([*args, f"--output={output}"]) == 0
    same_bytes(tmp_path / "whole", output)
    kept = {path.name[5:10] for path, inode in written.items() if path.stat().st_ino == inode}
    assert kept == receipts


def test_building_twice_keeps_every_shard(build_demo, tmp_path, same_bytes):
    output = tmp_path / "out"
    shutil.copytree(build_demo("--num_shards=4"), output)
    before = {path.name: path.stat().st_ino for path in output.glob("data-*")}
    assert build(demo_args(output)) == 0
    assert {path.name: path.stat().st_ino for path in output.glob("data-*")} == before
    same_bytes(build_demo("--num_shards=4"), output)


def test_a_damaged_shard_is_repaired_by_building_again(build_demo, tmp_path, same_bytes, capsys):
    output = tmp_path / "out"
    shutil.copytree(build_demo("--num_shards=4"), output)
    shard = output / "data-00002-of-00004.hdf"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert verify([str(output)]) == 1
    assert "data-00002-of-00004.hdf: the hash is wrong" in capsys.readouterr().out
    assert build(demo_args(output)) == 0
    assert verify([str(output)]) == 0
    same_bytes(build_demo("--num_shards=4"), output)


def test_another_dataset_is_not_touched(build_demo, tmp_path, same_bytes, capsys):
    output = tmp_path / "out"
    shutil.copytree(build_demo("--num_shards=4"), output)
    assert build(demo_args(output, "--seq_ordering=random")) == 2
    error = capsys.readouterr().err
    assert f"{output}: the output folder holds another dataset" in error
    assert "--overwrite" in error
    same_bytes(build_demo("--num_shards=4"), output)


def test_overwrite_replaces_another_dataset_completely(build_demo, tmp_path, same_bytes):
    output = tmp_path / "out"
    shutil.copytree(build_demo("--num_shards=7"), output)
    assert build(demo_args(output, "--overwrite")) == 0
    same_bytes(build_demo("--num_shards=4"), output)


def test_shards_of_unknown_origin_are_not_overwritten(tmp_path, capsys):
    output = tmp_path / "out"
    output.mkdir()
    (output / "data-00000-of-00004.hdf").write_bytes(b"precious")
    assert build(demo_args(output)) == 2
    assert "holds shards but neither a manifest" in capsys.readouterr().err
    assert (output / "data-00000-of-00004.hdf").read_bytes() == b"precious"


def test_a_changed_source_is_not_taken_for_the_old_one(tmp_path, capsys):
    shutil.copytree(DEMO_CONFIG.parent, tmp_path / "examples")
    config, output = tmp_path / "examples" / "demo.toml", tmp_path / "out"
    args = [f"--config={config}", f"--output={output}", "--num_shards=2"]
    assert build(args) == 0
    first = (output / "data-00000-of-00002.hdf").read_bytes()
    archive = tmp_path / "examples" / "demo" / "features.0.cache"
    data = bytearray(archive.read_bytes())
    data[data.index(b"\n\0\0\0vector-f32") + 22] ^= 1
    archive.write_bytes(data)
    assert build(args) == 0
    assert (output / "data-00000-of-00002.hdf").read_bytes() != first
    assert verify([str(output)]) == 0
