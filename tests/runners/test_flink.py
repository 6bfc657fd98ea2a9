"""Options of a run on Flink, and the sentences for what is missing; no Java is needed."""

from __future__ import annotations

import contextlib
import http.server
import json
import socket
import threading

import pytest
from apache_beam.options.pipeline_options import FlinkRunnerOptions, PortableOptions
from apache_beam.version import __version__ as beam_version

from seqshard.io.errors import ConfigError
from seqshard.runners import flink
from seqshard.runners.flink import (
    adopt_cluster,
    ask_master,
    find_job_server,
    flink_options,
    job_server_name,
    master_host,
    master_url,
    prepare_flink,
)
from seqshard.runners.select import make_options

CONFIG = {"flink-version": "1.20.3"}
OVERVIEW = {"flink-version": "1.20.3", "taskmanagers": 2, "slots-total": 4}


@contextlib.contextmanager
def job_manager(answers):
    """The REST interface of a JobManager with the given answers by path."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            answer = answers.get(self.path)
            self.send_response(404 if answer is None else 200)
            self.end_headers()
            self.wfile.write((answer or "").encode())

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"localhost:{server.server_port}"
        server.shutdown()
        thread.join()


def rest(config=CONFIG, overview=OVERVIEW):
    return {"/v1/config": json.dumps(config), "/v1/overview": json.dumps(overview)}


@pytest.fixture
def jar(tmp_path):
    path = tmp_path / "server.jar"
    path.touch()
    return path


@pytest.fixture
def java(tmp_path, monkeypatch):
    """A folder in PATH, and nothing else, with something that is called java."""
    (tmp_path / "bin").mkdir()
    path = tmp_path / "bin" / "java"
    path.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(path.parent))
    return path


def view(*args):
    return flink_options("FlinkRunner", args).view_as(FlinkRunnerOptions)


@pytest.mark.parametrize("name", ["FlinkRunner", "flink"])
def test_a_local_flink_has_its_workers_here(name):
    options = make_options(name, [], 0)
    assert options.view_as(PortableOptions).environment_type == "LOOPBACK"


def test_a_local_flink_may_have_a_pool():
    options = flink_options("flink", ["--flink_master=[local]", "--worker_pool=localhost:1"])
    portable = options.view_as(PortableOptions)
    assert (portable.environment_type, portable.environment_config) == ("EXTERNAL", "localhost:1")


def test_workers_of_a_cluster_must_be_named():
    with pytest.raises(ConfigError, match=r"not said where the Python workers run"):
        flink_options("FlinkRunner", ["--flink_master=a:8081"])


def test_loopback_is_for_this_machine():
    flags = ["--environment_type=LOOPBACK"]
    flink_options("FlinkRunner", [*flags, "--flink_master=localhost:8081"])
    with pytest.raises(ConfigError, match=r"a cluster elsewhere cannot reach .*EXTERNAL"):
        flink_options("FlinkRunner", [*flags, "--flink_master=node7:8081"])


@pytest.mark.parametrize("master", ["node7", "node7:port", "ftp://node7:1", "http://:1", ""])
def test_masters_that_are_no_address(master):
    with pytest.raises(ConfigError, match=r"'--flink_master': not an address .*HOST:PORT"):
        master_host(master)


@pytest.mark.parametrize(
    ("master", "url", "host"),
    [
        ("node7:8081", "http://node7:8081", "node7"),
        (" http://10.0.0.1:8081 ", "http://10.0.0.1:8081", "10.0.0.1"),
        ("https://flink.example:443/prefix", "https://flink.example:443/prefix", "flink.example"),
        ("[::1]:8081", "http://[::1]:8081", "::1"),
    ],
)
def test_masters(master, url, host):
    assert (master_url(master), master_host(master)) == (url, host)


def test_version_and_parallelism_are_those_of_the_cluster():
    options = view("--flink_master=a:1", "--worker_pool=b:1")
    adopt_cluster(options, CONFIG, OVERVIEW)
    assert (options.flink_version, options.parallelism) == ("1.20", 4)


def test_given_values_are_kept():
    flags = ("--flink_master=a:1", "--worker_pool=b:1", "--flink_version=1.20", "--parallelism=3")
    options = view(*flags)
    adopt_cluster(options, CONFIG, OVERVIEW)
    assert (options.flink_version, options.parallelism) == ("1.20", 3)


@pytest.mark.parametrize(
    ("flags", "config", "overview", "message"),
    [
        ((), {"flink-version": "1.13.6"}, OVERVIEW, r"no runner for .*expected 1\.19.*1\.13\.6"),
        (("--flink_version=2.2",), CONFIG, OVERVIEW, r"another version .*1\.20, found 2\.2"),
        ((), CONFIG, {**OVERVIEW, "slots-total": 0}, r"no TaskManager.*Start one"),
        (("--parallelism=5",), CONFIG, OVERVIEW, r"too few slots \(expected at most 4, found 5\)"),
    ],
)
def test_clusters_that_do_not_fit(flags, config, overview, message):
    options = view("--flink_master=a:1", "--worker_pool=b:1", *flags)
    with pytest.raises(ConfigError, match=message):
        adopt_cluster(options, config, overview)


def test_a_master_that_answers():
    with job_manager(rest()) as master:
        assert ask_master(master) == (CONFIG, OVERVIEW)
        assert ask_master(f"http://{master}/") == (CONFIG, OVERVIEW)


def test_a_proxy_to_the_outside_is_not_asked(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://localhost:1")
    monkeypatch.delenv("no_proxy", raising=False)
    with job_manager(rest()) as master:
        assert ask_master(master)[0] == CONFIG


@pytest.mark.parametrize("answer", ["<html>", "[]", "{}", "1"])
def test_what_is_not_flink(answer):
    with (
        job_manager({"/v1/config": answer}) as master,
        pytest.raises(ConfigError, match=r"what answers at .* is not a JobManager"),
    ):
        ask_master(master)


def test_no_master():
    with (
        job_manager({}) as master,
        pytest.raises(ConfigError, match=r"no JobManager answers .*404"),
    ):
        ask_master(master)
    with pytest.raises(ConfigError, match=r"no JobManager answers .*refused"):
        ask_master(master)


def test_a_silent_master_does_not_hang(monkeypatch):
    monkeypatch.setattr(flink, "CONNECT_SECONDS", 0.1)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(ConfigError, match=r"no JobManager answers .*timed out"),
    ):
        ask_master(f"localhost:{silent.getsockname()[1]}")


def test_everything_is_there(java, jar):
    with job_manager(rest()) as master:
        flags = [f"--flink_master={master}", f"--worker_pool={master}"]
        options = flink_options("FlinkRunner", [*flags, f"--flink_job_server_jar={jar}"])
        prepare_flink(options)
    assert options.view_as(FlinkRunnerOptions).flink_version == "1.20"


def test_no_java(tmp_path, jar, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    options = view(f"--flink_job_server_jar={jar}")
    with pytest.raises(ConfigError, match=r"Java is needed .*found java\)\. Install Java"):
        prepare_flink(options)
    # The uber jar goes to the JobManager without a job server.
    options.flink_submit_uber_jar = True
    prepare_flink(options)


def test_no_jar(java, tmp_path, monkeypatch):
    monkeypatch.setattr(flink.JavaJarServer, "JAR_CACHE", str(tmp_path))
    options = view("--flink_version=1.20")
    name = f"beam-runners-flink-1.20-job-server:{beam_version}"
    with pytest.raises(ConfigError, match=f"job server for Flink is not here.*mvn .*{name}") as e:
        prepare_flink(options)
    assert e.value.path == str(tmp_path / job_server_name("1.20"))
    (tmp_path / job_server_name("1.20")).touch()
    prepare_flink(options)
    options.flink_job_server_jar = "missing.jar"
    with pytest.raises(ConfigError, match=r"^missing\.jar, .*-DoutputDirectory=\. "):
        find_job_server(options)


def test_without_a_version_the_newest_runs_here(java, jar):
    options = view(f"--flink_job_server_jar={jar}")
    prepare_flink(options)
    assert options.flink_version == FlinkRunnerOptions.PUBLISHED_FLINK_VERSIONS[-1]


def test_a_running_job_server_needs_neither(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with job_manager({}) as address:
        prepare_flink(view(f"--job_endpoint={address}"))
