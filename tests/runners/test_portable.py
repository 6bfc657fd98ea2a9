"""Where workers run, what is looked for before a job is submitted, and what failures mean."""

from __future__ import annotations

import socket
import threading

import grpc
import pytest
from apache_beam.options.pipeline_options import PortableOptions

from seqshard.io.errors import ConfigError
from seqshard.runners import portable
from seqshard.runners.portable import (
    check_servers,
    find_job_error,
    has_remote_workers,
    hide_lost_calls,
    is_this_machine,
    parse_endpoint,
    portable_options,
    wait,
)
from seqshard.runners.select import make_options, prepare_runner


def environment(options):
    view = options.view_as(PortableOptions)
    return view.environment_type, view.environment_config


@pytest.fixture
def server():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"localhost:{listening.getsockname()[1]}"


@pytest.fixture
def closed():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    return f"localhost:{port}"


@pytest.mark.parametrize(
    ("runner", "flags", "expected"),
    [
        ("PrismRunner", "", ("LOOPBACK", None)),
        ("prism", "--worker_pool=a:1", ("EXTERNAL", "a:1")),
        ("PortableRunner", "--job_endpoint=embed", ("LOOPBACK", None)),
        ("PortableRunner", "--job_endpoint=h:1 --worker_pool=a:1", ("EXTERNAL", "a:1")),
        ("SparkRunner", "--environment_type=EXTERNAL --worker_pool=a:1", ("EXTERNAL", "a:1")),
        ("SparkRunner", "--environment_type=DOCKER", ("DOCKER", None)),
        ("spark", "--environment_type=beam:env:some:v1", ("beam:env:some:v1", None)),
    ],
)
def test_environment_of_the_workers(runner, flags, expected):
    options = make_options(runner, flags.split(), 0)
    assert environment(options) == expected
    assert has_remote_workers(options) == (expected[0] != "LOOPBACK")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", r"'--environment_type': it is not said where .*--worker_pool=HOST:PORT"),
        ("--environment_type=LOCAL", r"unknown kind .*expected EXTERNAL, PROCESS.*found LOCAL"),
        ("--environment_type=EXTERNAL", r"'--worker_pool': the address .* is missing"),
        ("--environment_type=PROCESS", r"'--environment_option': the command .*process_command="),
        ("--environment_type=PROCESS --environment_config={}", r"the command that starts"),
        ("--environment_type=PROCESS --environment_config=[1]", r"not a JSON object .*found \[1\]"),
        ("--environment_type=PROCESS --environment_config=boot", r"not a JSON.*found boot"),
        ("--worker_pool=a:1 --environment_type=PROCESS", r"--environment_type.*already says"),
        ("--worker_pool=a:1 --environment_config=b:2", r"--environment_config.*already says"),
        ("--worker_pool=a", r"'--worker_pool': not an address \(expected HOST:PORT, found a\)"),
        ("--worker_pool=a:0", r"not an address"),
    ],
)
def test_unclear_environments_are_refused(flags, message):
    with pytest.raises(ConfigError, match=message):
        portable_options("PortableRunner", flags.split())


@pytest.mark.parametrize(
    "flags",
    [
        '--environment_type=PROCESS --environment_config={"command":"/boot"}',
        "--environment_type=PROCESS --environment_option=process_command=/boot",
        "--environment_type=EXTERNAL --environment_option=external_service_address=a:1",
        "--environment_type=EXTERNAL --environment_config=a:1",
    ],
)
def test_beams_own_flags_for_environments_work_too(flags):
    kind = flags.split()[0].partition("=")[2]
    assert environment(portable_options("PortableRunner", flags.split()))[0] == kind


@pytest.mark.parametrize(
    ("text", "expected"),
    [("a:1", ("a", 1)), ("10.0.0.1:65535", ("10.0.0.1", 65535)), ("[::1]:80", ("::1", 80))],
)
def test_addresses(text, expected):
    assert parse_endpoint(text, "--flag") == expected


@pytest.mark.parametrize("text", ["", "a", "a:", ":1", "a:0", "a:65536", "http://a:1", "::1:80"])
def test_what_is_no_address(text):
    with pytest.raises(ConfigError, match="'--flag': not an address"):
        parse_endpoint(text, "--flag")


@pytest.mark.parametrize(
    ("host", "expected"),
    [("localhost", True), ("127.0.0.9", True), ("::1", True), ("10.0.0.1", False), ("n1", False)],
)
def test_this_machine(host, expected):
    assert is_this_machine(host) == expected


def test_servers_that_answer(server):
    flags = [f"--job_endpoint={server}", f"--worker_pool={server}"]
    check_servers(portable_options("PortableRunner", flags))


@pytest.mark.parametrize("flag", ["--job_endpoint", "--worker_pool"])
def test_servers_that_do_not_answer(server, closed, flag):
    addresses = {"--job_endpoint": server, "--worker_pool": server, flag: closed}
    options = portable_options("PortableRunner", [f"{k}={v}" for k, v in addresses.items()])
    with pytest.raises(ConfigError, match=f"'{flag}': nothing answers at {closed} .*refused"):
        prepare_runner("PortableRunner", options, "unused")


def test_names_that_do_not_exist(server):
    flags = [f"--job_endpoint={server}", "--worker_pool=no-such-host.invalid:1"]
    with pytest.raises(ConfigError, match=r"nothing answers at no-such-host\.invalid:1"):
        check_servers(portable_options("PortableRunner", flags))


def test_pools_beside_the_nodes_of_a_cluster_are_out_of_sight(closed):
    options = portable_options("FlinkRunner", [f"--worker_pool={closed}"])
    check_servers(options, cluster_host="node.cluster")
    with pytest.raises(ConfigError, match="nothing answers"):
        check_servers(options, cluster_host="127.0.0.1")


class Call(grpc.RpcError, grpc.Call):
    def code(self):
        return grpc.StatusCode.UNAVAILABLE


Call.__abstractmethods__ = frozenset()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            RuntimeError("Pipeline job-1 failed in state FAILED: Traceback:\n  x\nworker gone\n"),
            r"the job failed on the cluster \(found worker gone\)\. Run the same command again",
        ),
        (RuntimeError("Pipeline job-1 failed in state FAILED: "), r"^the job failed on the"),
        (RuntimeError("Pipeline a failed in state CANCELLED: x"), "the job was cancelled"),
        (Call(), r"the job server does not answer any more \(found UNAVAILABLE\)"),
        (grpc.FutureTimeoutError(), None),
        (ValueError("Pipeline"), None),
    ],
)
def test_what_failures_of_a_runner_mean(error, message):
    found = find_job_error(error)
    if message is None:
        assert found is None
    else:
        assert found.exit_code == 1
        with pytest.raises(type(found), match=message):
            raise found


def test_threads_whose_server_is_gone_die_in_silence(monkeypatch):
    shown = []
    monkeypatch.setattr(threading, "excepthook", shown.append)
    hide_lost_calls()
    for error in (Call(), ValueError("x")):

        def fail(error=error):
            raise error

        thread = threading.Thread(target=fail)
        thread.start()
        thread.join()
    assert [args.exc_type for args in shown] == [ValueError]


class Interrupted:
    """A job that is interrupted, and whose server may not answer when asked to cancel it."""

    def __init__(self, error):
        self.cancelled = False
        self._error = error

    def wait_until_finish(self):
        raise KeyboardInterrupt

    def cancel(self):
        self.cancelled = True
        if self._error is not None:
            raise self._error


@pytest.mark.parametrize("error", [None, Call()])
def test_an_interrupt_cancels_the_job(error):
    job = Interrupted(error)
    with pytest.raises(KeyboardInterrupt):
        wait(job)
    assert job.cancelled


def test_a_silent_server_does_not_delay_the_end(monkeypatch):
    monkeypatch.setattr(portable, "CANCEL_SECONDS", 0.01)
    release = threading.Event()

    class Silent:
        def cancel(self):
            release.wait(60)

    portable.cancel(Silent())
    release.set()
