"""Execution through a job server, on workers that are other processes or other machines.

Beam waits without end for a worker that never starts and for a server that is not there. So what
can be missing is looked for before a pipeline is submitted.
"""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import json
import re
import socket
import threading
from collections.abc import Sequence

import grpc
from apache_beam.options.pipeline_options import PipelineOptions, PortableOptions
from apache_beam.runners.runner import PipelineResult

from ..io.errors import ConfigError, JobError
from .names import PRISM_RUNNERS

ENVIRONMENTS = ("EXTERNAL", "PROCESS", "LOOPBACK", "DOCKER")
CONNECT_SECONDS = 10.0
CANCEL_SECONDS = 10.0
_FAILED_JOB = re.compile(r"Pipeline \S+ failed in state (\w+): (.*)", re.DOTALL)


class ClusterOptions(PipelineOptions):
    """The flags for clusters that Beam does not have."""

    @classmethod
    def _add_argparse_args(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--worker_pool",
            metavar="HOST:PORT",
            help="pool of Python workers as the nodes of the cluster see it; stands for "
            "--environment_type=EXTERNAL --environment_config=HOST:PORT",
        )
        parser.add_argument(
            "--worker_start_timeout",
            metavar="SECONDS",
            type=float,
            default=120.0,
            help="how long a first small job may take, which checks that workers start and can "
            "write to --output",
        )


def portable_options(runner: str, beam_args: Sequence[str]) -> PipelineOptions:
    """Options of a run through a job server, with the environment of the workers decided.

    Args:
        runner: name as in `--runner`.
        beam_args: Beam's flags and those of `ClusterOptions`.

    Raises:
        ConfigError: if it is not clear where Python workers shall run.
    """
    options = PipelineOptions(list(beam_args), runner=runner)
    portable = options.view_as(PortableOptions)
    pool = options.view_as(ClusterOptions).worker_pool
    if pool is not None:
        if portable.environment_type not in (None, "EXTERNAL") or portable.environment_config:
            raise ConfigError(
                "--worker_pool already says where the workers are",
                entry="--environment_type" if portable.environment_type else "--environment_config",
                hint="Leave one of the two out.",
            )
        parse_endpoint(pool, "--worker_pool")
        portable.environment_type, portable.environment_config = "EXTERNAL", pool
    if portable.environment_type is None and (
        runner.lower() in PRISM_RUNNERS or portable.job_endpoint == "embed"
    ):
        portable.environment_type = "LOOPBACK"
    check_environment(portable)
    return options


def check_environment(portable: PortableOptions) -> None:
    """Checks that the kind of the workers' environment is known and complete.

    Raises:
        ConfigError: naming the flag that is missing or wrong.
    """
    kind = portable.environment_type
    if kind is not None and kind.startswith("beam:env:"):
        return  # the URN of an environment that only some runners have
    if kind is None:
        raise ConfigError(
            "it is not said where the Python workers run",
            entry="--environment_type",
            expected=", ".join(ENVIRONMENTS),
            hint="Start a pool beside every node of the cluster and give --worker_pool=HOST:PORT.",
        )
    if kind not in ENVIRONMENTS:
        raise ConfigError(
            "unknown kind of environment",
            entry="--environment_type",
            expected=", ".join(ENVIRONMENTS),
            found=kind,
        )
    if kind == "EXTERNAL" and not worker_address(portable):
        raise ConfigError(
            "the address of the pool of workers is missing",
            entry="--worker_pool",
            expected="HOST:PORT",
            hint="python -m apache_beam.runners.worker.worker_pool_main --service_port=PORT "
            "starts a pool.",
        )
    if kind == "PROCESS" and not _worker_command(portable):
        raise ConfigError(
            "the command that starts a worker is missing",
            entry="--environment_option",
            expected="process_command=/path/to/boot",
        )


def worker_address(portable: PortableOptions) -> str | None:
    """HOST:PORT of the pool of workers, or None if there is none."""
    if portable.environment_type != "EXTERNAL":
        return None
    address = portable.lookup_environment_option("external_service_address")
    return portable.environment_config or address


def _worker_command(portable: PortableOptions) -> str | None:
    if portable.environment_config is None:
        return portable.lookup_environment_option("process_command")
    try:
        return json.loads(portable.environment_config).get("command")
    except (ValueError, AttributeError):
        raise ConfigError(
            "not a JSON object",
            entry="--environment_config",
            expected='{"command": "/path/to/boot"}',
            found=portable.environment_config,
        ) from None


def has_remote_workers(options: PipelineOptions) -> bool:
    """Whether workers are other processes than this one."""
    return options.view_as(PortableOptions).environment_type != "LOOPBACK"


def parse_endpoint(text: str, entry: str) -> tuple[str, int]:
    """(host, port) of "HOST:PORT" or "[IPv6]:PORT".

    Raises:
        ConfigError: naming the flag `entry`.
    """
    match = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([^:/\s]+)):(\d{1,5})", text)
    if match is None or not 0 < int(match[3]) < 1 << 16:
        raise ConfigError("not an address", entry=entry, expected="HOST:PORT", found=text)
    return match[1] or match[2], int(match[3])


def is_this_machine(host: str) -> bool:
    """Whether a name or an address means the machine that asks, whichever it is."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_listens(text: str, entry: str, hint: str) -> None:
    """Checks that something accepts connections at an address.

    Raises:
        ConfigError: if nobody does so within some seconds.
    """
    try:
        socket.create_connection(parse_endpoint(text, entry), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        raise ConfigError(
            f"nothing answers at {text}", entry=entry, found=str(error), hint=hint
        ) from error


def check_servers(options: PipelineOptions, cluster_host: str | None = None) -> None:
    """Checks that the job server and the pool of workers answer, where these can be asked.

    Args:
        options: from `portable_options`.
        cluster_host: where the master of the cluster is, if not where the job server is. If that
            is another machine, a pool on "localhost" is out of sight: beside each of its nodes.

    Raises:
        ConfigError: naming the flag whose address does not answer.
    """
    portable = options.view_as(PortableOptions)
    endpoint = portable.job_endpoint
    if endpoint not in (None, "embed"):
        check_listens(endpoint, "--job_endpoint", "Start the job server, or check the address.")
        cluster_host = cluster_host or parse_endpoint(endpoint, "--job_endpoint")[0]
    pool = worker_address(portable)
    if pool is None:
        return
    host, _ = parse_endpoint(pool, "--worker_pool")
    if not is_this_machine(host) or cluster_host is None or is_this_machine(cluster_host):
        check_listens(pool, "--worker_pool", "Start the pool of workers, or check the address.")


def wait(result: PipelineResult) -> None:
    """Waits for the end of a job; an interrupt cancels it on the cluster too."""
    try:
        result.wait_until_finish()
    except KeyboardInterrupt:
        cancel(result)
        raise


def cancel(result: PipelineResult) -> None:
    """Asks for the end of a job, but does not wait long for an answer."""

    def ask() -> None:
        # The server may be gone, or know of no way to cancel a job.
        with contextlib.suppress(Exception):
            result.cancel()

    thread = threading.Thread(target=ask, name="cancel", daemon=True)
    thread.start()
    thread.join(CANCEL_SECONDS)


def hide_lost_calls() -> None:
    """Lets threads die in silence whose server is gone: the main thread tells of it.

    This stays so to the end of the process, as Beam's threads outlive the job.
    """
    show = threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        if not issubclass(args.exc_type, grpc.RpcError):
            show(args)

    threading.excepthook = hook


def find_job_error(error: BaseException) -> JobError | None:
    """What a failure of the runner itself means, or None if it is something else."""
    hint = "Run the same command again: finished shards are kept."
    if isinstance(error, grpc.RpcError):
        code = error.code().name if isinstance(error, grpc.Call) else type(error).__name__
        return JobError("the job server does not answer any more", found=code, hint=hint)
    match = _FAILED_JOB.match(str(error))
    if match is None:
        return None
    lines = [line.strip() for line in match[2].splitlines() if line.strip()]
    if match[1] == "CANCELLED":
        return JobError("the job was cancelled on the cluster", hint=hint)
    return JobError("the job failed on the cluster", found=lines[-1] if lines else None, hint=hint)
