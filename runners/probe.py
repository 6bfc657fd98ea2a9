"""A first small job, which shows that workers start and share the output folder.

The errors that it finds would otherwise come late, or as a job that waits for ever: a pool that
cannot start its workers, workers without this package, or an output folder that is another one on
every node. The proof is what the build will need: files that workers write and others read.
"""

from __future__ import annotations

import contextlib
import copy
import json
import platform
import re
import secrets
from importlib.metadata import version
from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import FlinkRunnerOptions, PipelineOptions
from apache_beam.runners.runner import PipelineState

from ..io import storage
from ..io.errors import ConfigError, OutputError, OutputFolderError
from .portable import ClusterOptions, cancel

TERMINAL = (PipelineState.DONE, PipelineState.FAILED, PipelineState.CANCELLED)


def software() -> dict[str, str]:
    """Versions in which the program that submits a job and its workers have to agree."""
    return {
        "python": ".".join(platform.python_version_tuple()[:2]),
        "apache-beam": version("apache-beam"),
        "seqshard": version("seqshard"),
    }


def leave_mark(path: str) -> None:
    """Writes a small file that tells of this worker; where it cannot, its absence tells that."""
    mark = {"host": platform.node(), **software()}
    with contextlib.suppress(OutputError):
        storage.commit_bytes(path, json.dumps(mark).encode("utf-8"))


def check_workers(options: PipelineOptions, output: str) -> None:
    """Lets workers write into the output folder, and reads what they wrote.

    Args:
        options: of the job to come; they are not changed.
        output: folder of the dataset; it exists.

    Raises:
        ConfigError: if no worker comes to work in time, or its software is not the one here.
        OutputFolderError: if what workers write does not appear here.
    """
    token = secrets.token_hex(8)
    count = max(2, options.view_as(FlinkRunnerOptions).parallelism)
    paths = [storage.join(output, f".probe-{token}-{number}") for number in range(count)]
    try:
        _run_probe(copy.deepcopy(options), paths)
        names = set(storage.list_names(output))
        for path in paths:
            if path.rpartition("/")[2] not in names:
                raise OutputFolderError(
                    "workers cannot write here, or what they write does not appear here",
                    output,
                    hint="All nodes must share this folder: by a network file system, or as a URL.",
                )
            check_mark(json.loads(storage.read_bytes(path)))
    finally:
        for path in paths:
            storage.remove(path)


def _run_probe(options: PipelineOptions, paths: list[str]) -> None:
    timeout = options.view_as(ClusterOptions).worker_start_timeout
    pipeline = beam.Pipeline(options=options)
    (
        pipeline
        | "Probes" >> beam.Create(paths)
        | "LeaveMark" >> beam.Map(leave_mark)
    )  # fmt: skip
    result = pipeline.run()
    try:
        state = result.wait_until_finish(duration=int(timeout * 1000))
    except RuntimeError as error:
        if re.search(r"No module named '?seqshard", str(error)) is None:
            raise
        raise ConfigError(
            "seqshard is not installed where the workers run",
            entry="--environment_type",
            hint="pip install 'seqshard[build]' there, in the Python that the workers use.",
        ) from error
    if state not in TERMINAL:
        cancel(result)
        raise ConfigError(
            f"no worker did anything for {timeout:.0f} s",
            entry="--worker_start_timeout",
            hint="Look into the logs of the workers and of the cluster.",
        )


def check_mark(mark: dict[str, Any]) -> None:
    """Checks that the software of a worker is that of this process.

    Raises:
        ConfigError: naming host, package and both versions.
    """
    for name, wanted in software().items():
        if mark.get(name) != wanted:
            raise ConfigError(
                f"the workers have another version of {name}",
                str(mark.get("host")),
                expected=wanted,
                found=str(mark.get(name)),
            )
