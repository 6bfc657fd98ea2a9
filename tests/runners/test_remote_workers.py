"""Builds on workers that are other processes with another working folder; no cluster is needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from seqshard.pipelines.build import main as build

ROOT = Path(__file__).parents[2]
PORTABLE = ("--runner=PortableRunner", "--job_endpoint=embed")


def test_a_missing_pool_is_a_sentence_and_not_a_wait(tmp_path, capsys):
    output = tmp_path / "out"
    flags = (f"--config={ROOT / 'examples' / 'demo.toml'}", f"--output={output}", *PORTABLE)
    assert build([*flags, "--worker_pool=localhost:1"]) == 2
    error = capsys.readouterr().err
    assert "'--worker_pool': nothing answers at localhost:1" in error
    assert len(error.splitlines()) == 1


@pytest.mark.slow
def test_an_error_of_a_remote_worker_is_one_sentence(run_module, worker_pool, tmp_path):
    archive = ROOT / "tests" / "data" / "rasr" / "features" / "ragged-f32.cache"
    config = tmp_path / "corpus.toml"
    config.write_text(f'[streams.data]\nsource = "sprint-features"\nfiles = ["{archive}"]\n')
    output = tmp_path / "out"
    pool = f"--worker_pool={worker_pool.address}"
    done = run_module(
        "pipelines.build", f"--config={config}", f"--output={output}", *PORTABLE, pool
    )
    assert done.returncode == 1
    assert done.stderr.startswith(f"python -m pipelines.build: error: {archive}, entry 'typed/seg")
    assert len(done.stderr.splitlines()) == 1
    assert not (output / "manifest.json").exists()
    assert not list(output.glob(".probe-*"))
