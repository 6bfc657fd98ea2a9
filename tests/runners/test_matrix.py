"""The same corpus gives the same bytes on every runner."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLAGS = ("--num_shards=5", "--seq_ordering=random:3")
EMBEDDED = ("--runner=PortableRunner", "--job_endpoint=embed")
LOCAL = {
    "in-process": ("--direct_running_mode=in_memory",),
    "threads": ("--direct_num_workers=3", "--direct_running_mode=multi_threading"),
    "loopback": (*EMBEDDED, "--environment_type=LOOPBACK"),
}


@pytest.fixture
def builds_the_same(build_demo, same_bytes, tmp_path):
    """Asserts that flags lead to the dataset that plain flags lead to.

    Paths are relative, as a user may give them; workers may have another working folder.
    """

    def check(*flags):
        shutil.copytree(ROOT / "examples", tmp_path / "examples")
        command = [sys.executable, "-m", "seqshard.pipelines.build"]
        paths = ["--config=examples/demo.toml", "--output=out"]
        done = subprocess.run(
            [*command, *paths, *FLAGS, *flags], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        same_bytes(build_demo(*FLAGS), tmp_path / "out")

    return check


@pytest.mark.parametrize("runner", sorted(LOCAL))
def test_workers_in_one_process(builds_the_same, runner):
    builds_the_same(*LOCAL[runner])


@pytest.mark.slow
def test_two_processes(builds_the_same):
    builds_the_same("--direct_num_workers=2", "--direct_running_mode=multi_processing")


@pytest.mark.slow
def test_pool_of_workers(builds_the_same, worker_pool):
    builds_the_same(*EMBEDDED, f"--worker_pool={worker_pool.address}")


@pytest.mark.prism
def test_prism(builds_the_same, prism):
    builds_the_same(*prism)


@pytest.mark.prism
def test_prism_with_a_pool_of_workers(builds_the_same, prism, worker_pool):
    builds_the_same(*prism, f"--worker_pool={worker_pool.address}")


@pytest.mark.prism
def test_prism_with_processes(builds_the_same, prism, boot):
    command = f"--environment_option=process_command={boot}"
    builds_the_same(*prism, "--environment_type=PROCESS", command)


@pytest.mark.flink
def test_flink_with_a_pool_of_workers(builds_the_same, flink, worker_pool):
    builds_the_same(*flink, f"--worker_pool={worker_pool.address}")


@pytest.mark.flink
def test_flink_with_processes(builds_the_same, flink, boot):
    command = f"--environment_option=process_command={boot}"
    builds_the_same(*flink, "--environment_type=PROCESS", command)
