"""What happens when a worker, a server or a node of a cluster dies in the middle of a build."""

from __future__ import annotations

import os
import signal

import pytest
from apache_beam.options.pipeline_options import FlinkRunnerOptions

from seqshard.io.errors import ConfigError
from seqshard.pipelines.build import main as build
from seqshard.runners.flink import adopt_cluster, ask_master, flink_options


@pytest.fixture(scope="module")
def corpus(synthetic, tmp_path_factory):
    """Flags for a corpus of which every shard takes a while, and its dataset built locally."""
    folder = tmp_path_factory.mktemp("corpus")
    files = synthetic.make_corpus(folder, 200_000_000, num_archives=6)
    flags = (f"--config={files.config}", "--num_shards=100", "--seq_ordering=random")
    assert build([*flags, f"--output={folder / 'whole'}"]) == 0
    return flags, folder / "whole"


@pytest.mark.prism
def test_a_build_survives_the_death_of_its_worker_by_a_second_run(
    corpus, prism, worker_pool, start_build, in_the_middle, same_bytes, tmp_path
):
    (flags, whole), output = corpus, tmp_path / "out"
    args = (*flags, f"--output={output}", *prism, f"--worker_pool={worker_pool.address}")
    process = start_build(*args)
    in_the_middle(process, output)
    assert worker_pool.kill_workers() == 1
    assert process.wait(180) == 1
    log = (tmp_path / "build.log").read_text()
    assert "error: the job failed on the cluster (found " in log
    assert "Run the same command again: finished shards are kept." in log
    assert len(log.splitlines()) == 1
    kept = {path.name: path.stat().st_ino for path in output.glob("data-*.hdf")}
    finished = {path.name[:5] for path in output.glob(".build/*/*.receipt")}
    assert 3 <= len(finished) < 100
    assert not (output / "manifest.json").exists()

    assert start_build(*args).wait(180) == 0
    same_bytes(whole, output)
    same = {name[5:10] for name, inode in kept.items() if (output / name).stat().st_ino == inode}
    assert same >= finished


@pytest.mark.prism
def test_the_death_of_the_job_server_is_one_sentence(
    corpus, prism, worker_pool, start_build, in_the_middle, tmp_path, child_processes
):
    (flags, _), output = corpus, tmp_path / "out"
    pool = f"--worker_pool={worker_pool.address}"
    process = start_build(*flags, f"--output={output}", *prism, pool)
    in_the_middle(process, output)
    for pid in child_processes(process.pid):
        os.kill(pid, signal.SIGKILL)
    assert process.wait(180) == 1
    log = (tmp_path / "build.log").read_text()
    assert "error: the job server does not answer any more" in log
    assert len(log.splitlines()) == 1


@pytest.mark.flink
def test_a_real_cluster_tells_its_version_and_slots(flink_cluster):
    flags = [f"--flink_master={flink_cluster.master}", "--worker_pool=localhost:1"]
    options = flink_options("FlinkRunner", flags).view_as(FlinkRunnerOptions)
    adopt_cluster(options, *ask_master(flink_cluster.master))
    assert options.flink_version in FlinkRunnerOptions.PUBLISHED_FLINK_VERSIONS
    assert options.parallelism == 4
    flags.append("--parallelism=5")
    with pytest.raises(ConfigError, match=r"too few slots \(expected at most 4, found 5\)"):
        adopt_cluster(flink_options("FlinkRunner", flags), *ask_master(flink_cluster.master))


@pytest.mark.flink
def test_a_cluster_with_a_dead_task_manager_gets_another(flink_cluster):
    flink_cluster.task_managers.pop().kill()
    flink_cluster.wait_for_task_managers(1)
    flink_cluster.add_task_manager()
    flink_cluster.wait_for_task_managers(2)


@pytest.mark.flink
def test_flink_survives_the_death_of_a_task_manager_and_of_a_worker(
    corpus, flink, flink_cluster, worker_pool, start_build, in_the_middle, same_bytes, tmp_path
):
    (flags, whole), output = corpus, tmp_path / "out"
    args = (*flags, f"--output={output}", *flink, f"--worker_pool={worker_pool.address}")
    process = start_build(*args)
    in_the_middle(process, output)
    assert worker_pool.kill_workers() >= 1
    flink_cluster.task_managers.pop(0).kill()
    flink_cluster.add_task_manager()
    assert process.wait(600) == 0, (tmp_path / "build.log").read_text()
    same_bytes(whole, output)
