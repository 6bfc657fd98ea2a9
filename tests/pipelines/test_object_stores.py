"""Builds from and to object stores: the same bytes, few requests, failures, killed builds."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import fsspec
import pytest

from seqshard.io import remote, storage
from seqshard.io.manifest import load_manifest
from seqshard.io.sprint.archive import Archive
from seqshard.pipelines.build import main as build
from seqshard.pipelines.verify import main as verify

# What gcsfs does with uploads of more than 1 MiB.
pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning")
ROOT = Path(__file__).parents[2]
DEMO = ROOT / "examples" / "demo"
DEMO_CONFIG = ROOT / "examples" / "demo.toml"
ARGS = ["--num_shards=4", "--seq_ordering=random:1"]


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(remote, "FIRST_WAIT_SECONDS", 0.01)


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("SEQSHARD_FILE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SEQSHARD_FILE_CACHE_BYTES", str(1 << 30))


@pytest.fixture(params=["s3", "gcs"])
def store(request):
    return request.getfixturevalue(request.param)


def put(folder: Path, url: str) -> None:
    fs, inner = fsspec.core.url_to_fs(url)
    for path in folder.rglob("*"):
        if path.is_file():
            fs.pipe_file(f"{inner}/{path.relative_to(folder)}", path.read_bytes())


def get(url: str, folder: Path) -> Path:
    folder.mkdir()
    for name in storage.list_names(url):
        (folder / name).write_bytes(storage.read_bytes(f"{url}/{name}"))
    return folder


@pytest.fixture
def remote_demo(store):
    """The demo corpus, with a bundle and globs, in a store."""
    put(DEMO, f"{store.url}/demo")
    config = f"{store.url}/demo.toml"
    storage.commit_bytes(config, DEMO_CONFIG.read_bytes())
    store.clear()
    return config


def test_the_same_bytes_as_a_local_build(
    store, remote_demo, build_demo, tmp_path, same_bytes, capsys
):
    output = f"{store.url}/out"
    assert build([f"--config={remote_demo}", f"--output={output}", *ARGS]) == 0
    same_bytes(build_demo(*ARGS), get(output, tmp_path / "copy"))
    assert verify([output]) == 0
    assert "***" not in capsys.readouterr().out


def test_local_sources_and_remote_output(store, build_demo, tmp_path, same_bytes):
    output = f"{store.url}/out"
    assert build([f"--config={DEMO_CONFIG}", f"--output={output}", *ARGS]) == 0
    same_bytes(build_demo(*ARGS), get(output, tmp_path / "copy"))
    assert build([f"--config={DEMO_CONFIG}", f"--output={output}", *ARGS]) == 0
    same_bytes(build_demo(*ARGS), get(output, tmp_path / "again"))


def test_failures_on_the_way_change_nothing(s3, object_stores, build_demo, tmp_path, same_bytes):
    put(DEMO, f"{s3.url}/demo")
    config, output = f"{s3.url}/demo.toml", f"{s3.url}/out"
    storage.commit_bytes(config, DEMO_CONFIG.read_bytes())
    s3.clear()
    for kind in (500, 503, "reset"):
        count = iter(range(10**6))
        s3.faults.append(
            object_stores.Fault(kind, lambda r, count=count: next(count) % 13 == 5, times=10**6)
        )
    assert build([f"--config={config}", f"--output={output}", *ARGS]) == 0
    assert sum(10**6 - fault.times for fault in s3.faults) > 10
    s3.clear()
    same_bytes(build_demo(*ARGS), get(output, tmp_path / "copy"))


def test_requests_do_not_grow_with_the_sequences(s3, build_demo):
    put(DEMO, f"{s3.url}/demo")
    config, output = f"{s3.url}/demo.toml", f"{s3.url}/out"
    storage.commit_bytes(config, DEMO_CONFIG.read_bytes())
    s3.clear()
    assert build([f"--config={config}", f"--output={output}", *ARGS]) == 0
    archive = "features.0.cache"
    reads = [r for r in s3.requests if r.method == "GET" and archive in r.path]
    # Of an archive with 30 sequences: header, table and heads to index it; then one read a shard.
    assert len(reads) <= 3 + 4
    assert s3.count("HEAD", archive) <= 3
    assert sum("upload" not in r.query for r in s3.requests if r.is_list) < 40


def test_sources_are_checked_as_local_ones_are(s3, capsys, tmp_path):
    data = bytearray((DEMO / "features.0.cache").read_bytes())
    with Archive(str(DEMO / "features.0.cache")) as archive:
        data[archive.table.payload[3] - 4] ^= 0xFF
    storage.commit_bytes(f"{s3.url}/a.cache", bytes(data))
    (tmp_path / "a.cache").write_bytes(data)
    texts = []
    for folder in (str(tmp_path), s3.url):
        config = tmp_path / "config.toml"
        config.write_text(
            f'[streams.data]\nsource = "sprint-features"\nfiles = ["{folder}/*.cache"]\n'
        )
        assert build([f"--config={config}", f"--output={tmp_path / 'out'}"]) == 1
        texts.append(capsys.readouterr().err.replace(folder, "FOLDER"))
    assert texts[0] == texts[1]
    assert "FOLDER/a.cache, entry" in texts[0]


@pytest.mark.parametrize(
    ("status", "code", "text"),
    [(403, 2, "cannot read this file .*credentials"), (503, 1, "the store fails .*attempts")],
)
def test_a_store_that_refuses_is_no_damaged_source(
    s3, object_stores, capsys, tmp_path, status, code, text
):
    put(DEMO, f"{s3.url}/demo")
    config = f"{s3.url}/demo.toml"
    storage.commit_bytes(config, DEMO_CONFIG.read_bytes())
    s3.clear()
    s3.faults.append(object_stores.Fault(status, lambda r: "features.2" in r.path, times=10**6))
    output = tmp_path / "out"
    assert build([f"--config={config}", f"--output={output}", "--on_error=skip"]) == code
    assert re.search(text, capsys.readouterr().err)
    assert not (output / "manifest.json").exists()


def test_no_secret_is_written_down(tmp_path, s3, build_demo):
    """The file system `memory` does not mind a query behind a name."""
    memory = fsspec.filesystem("memory")
    for name in ("features.0.cache", "features.1.cache"):
        query = f"/{s3.url[-6:]}/{name}?X-Amz-Signature=sesame"
        memory.pipe_file(query, (DEMO / name).read_bytes())
    folder = f"memory://{s3.url[-6:]}"
    config = tmp_path / "config.toml"
    config.write_text(
        '[streams.data]\nsource = "sprint-features"\n'
        f'files = ["{folder}/features.0.cache?X-Amz-Signature=sesame"]\n'
    )
    output = tmp_path / "out"
    assert build([f"--config={config}", f"--output={output}"]) == 0
    for path in output.iterdir():
        assert b"sesame" not in path.read_bytes(), path.name
    name = load_manifest(str(output)).sources[0].path
    assert name.endswith("features.0.cache?X-Amz-Signature=***")


@pytest.mark.slow
def test_a_killed_build_continues(s3, synthetic, tmp_path, same_bytes):
    corpus = synthetic.make_corpus(tmp_path / "corpus", 30_000_000, num_archives=3)
    args = [f"--config={corpus.config}", "--num_shards=40", "--seq_ordering=random"]
    assert build([*args, f"--output={tmp_path / 'whole'}"]) == 0

    output = f"{s3.url}/out"
    process = subprocess.Popen(
        [sys.executable, "-m", "pipelines.build", *args, f"--output={output}"],
        cwd=ROOT,
        env={**os.environ, **s3.environment},
    )
    deadline = time.monotonic() + 300
    while process.poll() is None and s3.count("PUT", ".receipt") < 3:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(60)
    assert "manifest.json" not in storage.list_names(output)
    shards = [name for name in storage.list_names(output) if name.startswith("data-")]
    assert 3 <= len(shards) < 40
    whole = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
    for name in shards:
        assert storage.read_bytes(f"{output}/{name}") == whole[name]
    s3.clear()
    assert build([*args, f"--output={output}"]) == 0
    assert s3.count("PUT", "/data-") <= 40 - len(shards) + 1
    same_bytes(tmp_path / "whole", get(output, tmp_path / "copy"))
