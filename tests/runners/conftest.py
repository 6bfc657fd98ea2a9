"""Worker pools and clusters of real processes on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Long enough for the slowest machine; what waits so long has failed.
WAIT_SECONDS = 180


def wait_for(happened, what):
    """Waits until a function returns something true, and returns it."""
    end = time.monotonic() + WAIT_SECONDS
    while not (result := happened()):
        assert time.monotonic() < end, f"waited {WAIT_SECONDS} s for {what}"
        time.sleep(0.01)
    return result


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def listens(port):
    with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
        return True
    return False


def children(pid):
    """Process ids of the children of a process."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(status.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(status.parent.name))
    return found


@contextlib.contextmanager
def running(command, log, cwd, **environment):
    """A process in a group of its own, all of which is killed at the end."""
    with open(log, "w") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=output,
            env={**os.environ, **environment},
            cwd=cwd,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(WAIT_SECONDS)


class WorkerPool:
    """Beam's pool of Python workers, as another process with another working folder."""

    def __init__(self, folder):
        self.port = free_port()
        self.address = f"localhost:{self.port}"
        self.log = folder / "pool.log"
        self.command = [sys.executable, "-m", "apache_beam.runners.worker.worker_pool_main"]
        self.command.append(f"--service_port={self.port}")

    @contextlib.contextmanager
    def run(self):
        # A pool starts its workers as plain `python`.
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        with running(self.command, self.log, self.log.parent, PATH=path) as self.process:
            wait_for(lambda: listens(self.port), f"the pool at {self.address}")
            yield self

    def kill_workers(self):
        pids = children(self.process.pid)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        return len(pids)


@pytest.fixture(scope="session")
def worker_pool(tmp_path_factory):
    with WorkerPool(tmp_path_factory.mktemp("pool")).run() as pool:
        yield pool


@pytest.fixture
def start_build(tmp_path):
    """Starts a build in a process that dies with the test; its output goes to build.log."""
    with contextlib.ExitStack() as stack:

        def start(*args):
            command = [sys.executable, "-m", "pipelines.build", *map(str, args)]
            return stack.enter_context(running(command, tmp_path / "build.log", ROOT))

        yield start


@pytest.fixture(scope="session")
def child_processes():
    return children


@pytest.fixture(scope="session")
def in_the_middle():
    """Waits until a build has finished some of its shards but not all."""

    def wait(process, output):
        def receipts():
            return process.poll() is not None or len(list(output.glob(".build/*/*.receipt"))) >= 3

        wait_for(receipts, "the first shards")
        assert process.poll() is None, "the build ended too early"
        assert not (output / "manifest.json").exists()

    return wait


@pytest.fixture(scope="session")
def clusters():
    """The folder into which `make flink-test` installs Flink, Prism and what they need."""
    folder = os.environ.get("SEQSHARD_FLINK_HOME")
    if not folder:
        pytest.skip("SEQSHARD_FLINK_HOME is not set; `make flink-test` sets it")
    return Path(folder)


@pytest.fixture(scope="session")
def prism(clusters):
    """Flags of a run on Prism."""
    binary = clusters / "bin" / "prism"
    if not binary.is_file():
        pytest.skip(f"no {binary}: Go could not build it")
    return ("--runner=PrismRunner", f"--prism_location={binary}")


@pytest.fixture(scope="session")
def boot(clusters, tmp_path_factory):
    """A command that starts one worker: Beam's own boot program, as PROCESS needs it."""
    binary = clusters / "bin" / "container"
    if not binary.is_file():
        pytest.skip(f"no {binary}: Go could not build it")
    folder = tmp_path_factory.mktemp("boot")
    script = folder / "boot"
    # Prism puts the worker's id into quotes, which boot would take for a part of it.
    script.write_text(
        "#!/bin/sh\n"
        "export RUN_PYTHON_SDK_IN_DEFAULT_ENVIRONMENT=1\n"
        f"export PATH='{Path(sys.executable).parent}':$PATH\n"
        'id=$(echo "$1" | tr -d "\'"); shift\n'
        f"exec '{binary}' --semi_persist_dir='{folder}' \"$id\" \"$@\"\n"
    )
    script.chmod(0o755)
    return script


# Small enough for a laptop: together the three processes take 1 GB.
MEMORY = {
    "cpu.cores": "2.0",
    "memory.framework.heap.size": "64m",
    "memory.framework.off-heap.size": "64m",
    "memory.task.heap.size": "128m",
    "memory.task.off-heap.size": "0",
    "memory.managed.size": "64m",
    "memory.network.min": "64m",
    "memory.network.max": "64m",
    "memory.jvm-metaspace.size": "256m",
    "memory.jvm-overhead.min": "192m",
    "memory.jvm-overhead.max": "192m",
}


class FlinkCluster:
    """A JobManager and TaskManagers of two slots each, as processes on the loopback interface."""

    def __init__(self, libraries, folder, stack):
        self._java = ["java", "-XX:+UseSerialGC", "-Dlog4j2.level=INFO"]
        for package in ("java.lang", "java.net", "java.io", "java.nio", "java.util"):
            self._java.append(f"--add-opens=java.base/{package}=ALL-UNNAMED")
        self._classpath = ["-cp", f"{libraries}/*"]
        self._folder = folder
        self._stack = stack
        self.port = free_port()
        self.master = f"localhost:{self.port}"
        self.task_managers = []
        config = {
            "jobmanager.rpc.address": "127.0.0.1",
            "jobmanager.rpc.port": free_port(),
            "jobmanager.bind-host": "127.0.0.1",
            "jobmanager.memory.process.size": "800m",
            "rest.address": "127.0.0.1",
            "rest.bind-address": "127.0.0.1",
            "rest.port": self.port,
            "taskmanager.host": "127.0.0.1",
            "taskmanager.bind-host": "127.0.0.1",
            "taskmanager.numberOfTaskSlots": 2,
            # A lost TaskManager is noticed within seconds, and the job then starts again.
            "heartbeat.interval": 1000,
            "heartbeat.timeout": 10000,
            "restart-strategy.type": "fixed-delay",
            "restart-strategy.fixed-delay.attempts": 10,
            "restart-strategy.fixed-delay.delay": "2 s",
        }
        lines = [f"{key}: {value}\n" for key, value in config.items()]
        (folder / "config.yaml").write_text("".join(lines))
        self._start("entrypoint.StandaloneSessionClusterEntrypoint", "-Xmx300m")

    def _start(self, name, *flags):
        arguments = [f"org.apache.flink.runtime.{name}", "--configDir", str(self._folder)]
        if name.endswith("TaskManagerRunner"):
            for key, value in MEMORY.items():
                arguments += ["-D", f"taskmanager.{key}={value}"]
        log = self._folder / f"{name}-{len(self.task_managers)}.log"
        command = [*self._java, *flags, *self._classpath, *arguments]
        return self._stack.enter_context(running(command, log, self._folder))

    def add_task_manager(self):
        name = "taskexecutor.TaskManagerRunner"
        self.task_managers.append(self._start(name, "-Xmx320m", "-XX:MaxDirectMemorySize=256m"))

    def overview(self):
        with urllib.request.urlopen(f"http://{self.master}/v1/overview", timeout=10) as answer:
            return json.load(answer)

    def wait_for_task_managers(self, count):
        def are_there():
            with contextlib.suppress(OSError):
                overview = self.overview()
                return (overview["taskmanagers"], overview["slots-total"]) == (count, 2 * count)
            return False

        wait_for(are_there, f"{count} TaskManagers")


@pytest.fixture(scope="session")
def flink_cluster(clusters, tmp_path_factory):
    libraries = next(iter(sorted(clusters.glob("apache-flink-libraries-*/deps/lib"))), None)
    if shutil.which("java") is None or libraries is None:
        pytest.skip(f"no Java, or no apache-flink-libraries in {clusters}")
    with contextlib.ExitStack() as stack:
        cluster = FlinkCluster(libraries, tmp_path_factory.mktemp("flink"), stack)
        cluster.add_task_manager()
        cluster.add_task_manager()
        cluster.wait_for_task_managers(2)
        yield cluster


@pytest.fixture(scope="session")
def flink(clusters, flink_cluster):
    """Flags of a run on the Flink cluster."""
    jar = next(iter(sorted(clusters.glob("beam-runners-flink-*-job-server-*.jar"))), None)
    if jar is None:
        pytest.skip(f"no job server of Beam in {clusters}: Maven did not find it")
    return (
        "--runner=FlinkRunner",
        f"--flink_master={flink_cluster.master}",
        f"--flink_job_server_jar={jar}",
    )
