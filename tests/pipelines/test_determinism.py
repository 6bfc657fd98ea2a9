"""The same inputs give the same bytes, however the pipeline is executed."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEMO_CONFIG = ROOT / "examples" / "demo.toml"
FLAGS = ("--num_shards=5", "--seq_ordering=random:3")
PORTABLE = (
    "--runner=PortableRunner",
    "--job_endpoint=embed",
    "--environment_type=LOOPBACK",
)
WORKERS = {
    "threads": ("--direct_num_workers=3", "--direct_running_mode=multi_threading"),
    "processes": ("--direct_num_workers=2", "--direct_running_mode=multi_processing"),
    "portable": PORTABLE,
}


@pytest.mark.parametrize("workers", sorted(WORKERS))
def test_execution_does_not_matter(build_demo, run_module, same_bytes, tmp_path, workers):
    output = tmp_path / "out"
    done = run_module(
        "pipelines.build",
        f"--config={DEMO_CONFIG}",
        f"--output={output}",
        *FLAGS,
        *WORKERS[workers],
    )
    assert done.returncode == 0, done.stderr
    # A slow machine has progress to report.
    lines = done.stderr.splitlines()
    assert not [line for line in lines if not re.match(r"indexing, |\d+/\d+ shards, ", line)]
    same_bytes(build_demo(*FLAGS), output)


@pytest.mark.parametrize("workers", sorted(WORKERS))
def test_an_error_is_one_sentence(run_module, tmp_path, workers):
    archive = ROOT / "tests" / "data" / "rasr" / "features" / "ragged-f32.cache"
    config = tmp_path / "corpus.toml"
    config.write_text(f'[streams.data]\nsource = "sprint-features"\nfiles = ["{archive}"]\n')
    output = tmp_path / "out"
    flags = (f"--config={config}", f"--output={output}", *WORKERS[workers])
    done = run_module("pipelines.build", *flags)
    assert done.returncode == 1
    assert done.stderr.startswith(f"python -m pipelines.build: error: {archive}, entry 'typed/seg")
    assert len(done.stderr.splitlines()) == 1
    assert not (output / "manifest.json").exists()


def test_place_and_age_of_the_sources_do_not_matter(build_demo, run_module, same_bytes, tmp_path):
    shutil.copytree(DEMO_CONFIG.parent, tmp_path / "examples")
    output = tmp_path / "out"
    config = tmp_path / "examples" / "demo.toml"
    done = run_module("pipelines.build", f"--config={config}", f"--output={output}", *FLAGS)
    assert done.returncode == 0, done.stderr
    same_bytes(build_demo(*FLAGS), output)


def test_an_installed_package_builds_the_same(build_demo, same_bytes, tmp_path):
    output = tmp_path / "out"
    command = [sys.executable, "-m", "seqshard.pipelines.build", f"--config={DEMO_CONFIG}"]
    done = subprocess.run(
        [*command, f"--output={output}", *FLAGS], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    same_bytes(build_demo(*FLAGS), output)
