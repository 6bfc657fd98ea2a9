"""Execution on Apache Flink: https://beam.apache.org/documentation/runners/flink/."""

from __future__ import annotations

import json
import os
import shutil
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from apache_beam.options.pipeline_options import (
    FlinkRunnerOptions,
    JobServerOptions,
    PipelineOptions,
    PortableOptions,
)
from apache_beam.runners.portability.flink_runner import MAGIC_HOST_NAMES
from apache_beam.utils.subprocess_server import JavaJarServer
from apache_beam.version import __version__ as beam_version

from ..io.errors import ConfigError
from .portable import (
    CONNECT_SECONDS,
    check_servers,
    has_remote_workers,
    is_this_machine,
    portable_options,
)


def flink_options(runner: str, beam_args: Sequence[str]) -> PipelineOptions:
    """Options of a run on Flink. Nothing is asked over the network yet: see `prepare_flink`.

    Without `--flink_master`, Flink runs inside the job server on this machine.

    Raises:
        ConfigError: if it is not clear where Python workers shall run, or the cluster cannot
            reach them there.
    """
    master = PipelineOptions(list(beam_args)).view_as(FlinkRunnerOptions).flink_master
    given = {arg.partition("=")[0] for arg in beam_args}
    if master in MAGIC_HOST_NAMES and not given & {"--environment_type", "--worker_pool"}:
        beam_args = [*beam_args, "--environment_type=LOOPBACK"]
    options = portable_options(runner, beam_args)
    if "--flink_version" not in given:
        options.view_as(FlinkRunnerOptions).flink_version = None
    elsewhere = master not in MAGIC_HOST_NAMES and not is_this_machine(master_host(master))
    if elsewhere and not has_remote_workers(options):
        raise ConfigError(
            "LOOPBACK runs the workers inside this process, which a cluster elsewhere cannot reach",
            entry="--environment_type",
            expected="EXTERNAL, PROCESS or DOCKER",
        )
    return options


def master_url(master: str) -> str:
    """`--flink_master` as a URL."""
    return master.strip() if "://" in master else f"http://{master.strip()}"


def master_host(master: str) -> str:
    """Host name of `--flink_master`.

    Raises:
        ConfigError: if there is none.
    """
    parts = urlsplit(master_url(master))
    try:
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port is not None
    except ValueError:  # a port that is no number
        valid = False
    if not valid:
        raise ConfigError(
            "not an address", entry="--flink_master", expected="HOST:PORT", found=master
        )
    return parts.hostname


def prepare_flink(options: PipelineOptions) -> None:
    """Checks that everything a run on Flink needs is there, and learns the rest of the cluster.

    Sets `flink_version` and `parallelism` to those of the cluster, and `flink_job_server_jar` to
    where Beam keeps its downloads, unless they are given.

    Raises:
        ConfigError: naming the flag that says, or should say, where the missing piece is.
    """
    flink = options.view_as(FlinkRunnerOptions)
    if flink.flink_master in MAGIC_HOST_NAMES:
        flink.flink_version = flink.flink_version or FlinkRunnerOptions.PUBLISHED_FLINK_VERSIONS[-1]
        check_servers(options)
    else:
        adopt_cluster(options, *ask_master(flink.flink_master))
        check_servers(options, master_host(flink.flink_master))
    if options.view_as(PortableOptions).job_endpoint is None:
        find_job_server(options)


def ask_master(master: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Flink's configuration and overview, from the REST interface of the JobManager.

    Raises:
        ConfigError: if it does not answer as Flink's does.
    """
    # A cluster is inside the own network, where the proxy to the outside is no help.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    answers = []
    for name in ("config", "overview"):
        url = f"{master_url(master).rstrip('/')}/v1/{name}"
        try:
            with opener.open(url, timeout=CONNECT_SECONDS) as response:
                answer = json.load(response)
        except OSError as error:
            raise ConfigError(
                f"no JobManager answers at {master}",
                entry="--flink_master",
                found=str(error),
                hint="Start the cluster, or check the address: it is that of Flink's web page.",
            ) from error
        except ValueError:
            answer = None
        if not isinstance(answer, dict) or "flink-version" not in answer:
            raise ConfigError(
                f"what answers at {master} is not a JobManager of Flink", entry="--flink_master"
            )
        answers.append(answer)
    return answers[0], answers[1]


def adopt_cluster(
    options: PipelineOptions, config: Mapping[str, Any], overview: Mapping[str, Any]
) -> None:
    """Makes options fit a cluster, or says why they cannot.

    Args:
        options: changed in place.
        config, overview: answers of the JobManager.

    Raises:
        ConfigError: if Beam has no runner for this version, another one is asked for, no
            TaskManager is there, or there are too few slots.
    """
    flink = options.view_as(FlinkRunnerOptions)
    version = ".".join(str(config["flink-version"]).split(".")[:2])
    if version not in FlinkRunnerOptions.PUBLISHED_FLINK_VERSIONS:
        raise ConfigError(
            f"Beam {beam_version} has no runner for the Flink of this cluster",
            entry="--flink_master",
            expected=", ".join(FlinkRunnerOptions.PUBLISHED_FLINK_VERSIONS),
            found=str(config["flink-version"]),
        )
    if flink.flink_version not in (None, version):
        raise ConfigError(
            "the cluster has another version",
            entry="--flink_version",
            expected=version,
            found=flink.flink_version,
        )
    flink.flink_version = version
    slots = int(overview.get("slots-total", 0))
    if slots == 0:
        raise ConfigError(
            "the cluster has no TaskManager, hence no slot to run in",
            entry="--flink_master",
            hint="Start one, and look into its log if it does not appear on Flink's web page.",
        )
    if flink.parallelism == -1:
        flink.parallelism = slots
    if flink.parallelism > slots:
        raise ConfigError(
            "the cluster has too few slots",
            entry="--parallelism",
            expected=f"at most {slots}",
            found=str(flink.parallelism),
        )


def find_job_server(options: PipelineOptions) -> None:
    """Checks that Java and the jar of Beam's job server are there.

    Raises:
        ConfigError: naming the one that is missing.
    """
    flink = options.view_as(FlinkRunnerOptions)
    java = options.view_as(JobServerOptions).job_server_java_launcher
    if not flink.flink_submit_uber_jar and shutil.which(java) is None:
        raise ConfigError(
            "Java is needed for Beam's job server, and there is none",
            entry="--job_server_java_launcher",
            found=java,
            hint="Install Java 11 or newer, or give the --job_endpoint of a running job server.",
        )
    name = job_server_name(flink.flink_version)
    if flink.flink_job_server_jar is None:
        # Beam would download it now, and wait long for a server that is out of reach.
        flink.flink_job_server_jar = os.path.join(JavaJarServer.JAR_CACHE, name)
    jar = flink.flink_job_server_jar
    if "://" not in jar and not os.path.isfile(jar):
        raise ConfigError(
            "Beam's job server for Flink is not here",
            jar,
            "--flink_job_server_jar",
            hint="mvn dependency:copy -Dartifact=org.apache.beam:"
            f"{name.removesuffix(f'-{beam_version}.jar')}:{beam_version} "
            f"-DoutputDirectory={os.path.dirname(jar) or '.'} fetches it.",
        )


def job_server_name(flink_version: str) -> str:
    """File name of the job server for a Flink version such as "1.20"."""
    return f"beam-runners-flink-{flink_version}-job-server-{beam_version}.jar"
