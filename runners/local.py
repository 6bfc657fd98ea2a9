"""Execution on this machine, by Beam's FnApiRunner.

Beam's own `DirectRunner` is a switch that first tries to download another runner's binary on every
start, and hangs where there is no way out to the internet; so the name means FnApiRunner here.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from apache_beam.options.pipeline_options import DirectOptions, PipelineOptions
from apache_beam.runners.portability.fn_api_runner import worker_handlers

FN_API_RUNNER = "apache_beam.runners.portability.fn_api_runner.FnApiRunner"

# One worker decodes and writes at once already; from these sizes of the sources on, more workers
# repay their start, which takes about half a second for threads and 15 seconds for processes.
THREADS_FROM_BYTES = 2 << 30
PROCESSES_FROM_BYTES = 64 << 30
# So many threads do not yet wait for Python's lock.
MAX_THREADS = 8


def local_options(beam_args: Sequence[str], num_bytes: int) -> PipelineOptions:
    """Options of a local run.

    Small inputs run in one worker without any start-up; large ones on all processors, in threads
    (copying, hashing, inflating and writing release Python's lock), or in processes where there
    are many processors and much to do. Beam's flags `--direct_num_workers` and
    `--direct_running_mode` decide where they are given.

    Args:
        beam_args: Beam's flags.
        num_bytes: size of all sources.
    """
    send_whole_elements()
    options = PipelineOptions(list(beam_args), runner=FN_API_RUNNER)
    direct = options.view_as(DirectOptions)
    given = {arg.partition("=")[0] for arg in beam_args}
    if "--direct_num_workers" not in given:
        wants_workers = "--direct_running_mode" in given or num_bytes >= THREADS_FROM_BYTES
        direct.direct_num_workers = num_processors() if wants_workers else 1
    if direct.direct_num_workers == 0:
        direct.direct_num_workers = num_processors()
    if "--direct_running_mode" not in given:
        direct.direct_running_mode = _running_mode(direct.direct_num_workers, num_bytes)
    elif direct.direct_running_mode == "in_memory":
        direct.direct_num_workers = 1
    return options


def send_whole_elements() -> None:
    """Keeps FnApiRunner from sending what is encoded so far every second.

    Its timer takes no notice of an element that is half encoded, which then arrives in two pieces:
    "Invalid PaneInfoEncoding". Buffers are still sent when they are full, between elements, as
    Beam's other runners do it.
    """
    worker_handlers.DATA_BUFFER_TIME_LIMIT_MS = 0


def _running_mode(num_workers: int, num_bytes: int) -> str:
    if num_workers == 1:
        return "in_memory"
    many = num_workers > MAX_THREADS and num_bytes >= PROCESSES_FROM_BYTES
    return "multi_processing" if many else "multi_threading"


def num_processors() -> int:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
