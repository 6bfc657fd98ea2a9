"""From the name of a runner and Beam's flags to checked pipeline options."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from apache_beam.options.pipeline_options import PipelineOptions, StandardOptions

from ..io.errors import ConfigError
from .dataflow import dataflow_options
from .flink import flink_options, prepare_flink
from .local import local_options
from .names import FLINK_RUNNERS, is_dataflow, is_local, is_portable
from .portable import check_servers, has_remote_workers, hide_lost_calls, portable_options
from .probe import check_workers


def make_options(runner: str, beam_args: Sequence[str], num_bytes: int) -> PipelineOptions:
    """Pipeline options of a runner.

    Args:
        runner: name as in `--runner`.
        beam_args: flags that are not our own.
        num_bytes: size of all sources, by which a local run chooses its workers.

    Raises:
        ConfigError: if Beam does not know a flag or the runner, or the runner needs another flag.
    """
    check_flags(beam_args)
    if is_local(runner):
        return local_options(beam_args, num_bytes)
    if is_dataflow(runner):
        return dataflow_options(beam_args)
    if runner.lower() in FLINK_RUNNERS:
        return flink_options(runner, beam_args)
    if is_portable(runner):
        return portable_options(runner, beam_args)
    known = StandardOptions.KNOWN_RUNNER_NAMES
    names = {name.lower() for name in known}
    if "." not in runner and not names & {runner.lower(), f"{runner.lower()}runner"}:
        raise ConfigError(
            "unknown runner", entry="--runner", expected=", ".join(known), found=runner
        )
    return PipelineOptions(list(beam_args), runner=runner)


def prepare_runner(runner: str, options: PipelineOptions, output: str) -> None:
    """Checks, before a pipeline is submitted, that all that it needs is there and answers.

    Args:
        runner: name as in `--runner`.
        options: from `make_options`; completed by what the cluster tells of itself.
        output: folder of the dataset; it exists.

    Raises:
        ConfigError: naming the piece that is missing.
        OutputFolderError: if workers do not share the output folder.
    """
    if not is_portable(runner):
        return
    hide_lost_calls()
    if runner.lower() in FLINK_RUNNERS:
        prepare_flink(options)
    else:
        check_servers(options)
    if has_remote_workers(options):
        check_workers(options, output)


def check_flags(beam_args: Sequence[str]) -> None:
    """Refuses flags that nobody knows; Beam alone would drop them in silence.

    Raises:
        ConfigError: naming the flag.
    """
    # Some of Beam's option classes share flags.
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, conflict_handler="resolve")
    for kind in sorted(_all_subclasses(PipelineOptions), key=lambda kind: kind.__qualname__):
        add = kind.__dict__.get("_add_argparse_args")
        if add is not None:
            add.__get__(None, kind)(parser)
    unknown = [arg for arg in parser.parse_known_args(list(beam_args))[1] if arg.startswith("-")]
    if unknown:
        raise ConfigError(
            "neither a flag of this command nor of Apache Beam",
            entry=unknown[0].partition("=")[0],
            hint="See --help.",
        )


def _all_subclasses(kind: type) -> set[type]:
    found = set(kind.__subclasses__())
    return found.union(*map(_all_subclasses, found))
