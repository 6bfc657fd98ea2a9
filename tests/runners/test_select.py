"""How a local run chooses its workers, and which flags and runners are refused."""

import argparse

import pytest
from apache_beam.options.pipeline_options import DirectOptions, PipelineOptions, StandardOptions

from seqshard.io.errors import ConfigError
from seqshard.runners import local
from seqshard.runners.select import check_flags, make_options

SMALL, LARGE = local.THREADS_FROM_BYTES - 1, local.THREADS_FROM_BYTES


@pytest.fixture(autouse=True)
def five_processors(monkeypatch):
    monkeypatch.setattr(local, "num_processors", lambda: 5)


@pytest.mark.parametrize(
    ("flags", "num_bytes", "workers", "mode"),
    [
        ("", SMALL, 1, "in_memory"),
        ("", LARGE, 5, "multi_threading"),
        ("--direct_num_workers=2", SMALL, 2, "multi_threading"),
        ("--direct_num_workers 2", SMALL, 2, "multi_threading"),
        ("--direct_num_workers=1", LARGE, 1, "in_memory"),
        ("--direct_num_workers=0", SMALL, 5, "multi_threading"),
        ("--direct_running_mode=multi_processing", SMALL, 5, "multi_processing"),
        ("--direct_running_mode=multi_processing --direct_num_workers=3", 0, 3, "multi_processing"),
        ("--direct_running_mode=in_memory", LARGE, 1, "in_memory"),
        ("--direct_running_mode=in_memory --direct_num_workers=4", LARGE, 1, "in_memory"),
    ],
)
def test_workers_of_a_local_run(flags, num_bytes, workers, mode):
    options = make_options("DirectRunner", flags.split(), num_bytes)
    direct = options.view_as(DirectOptions)
    assert (direct.direct_num_workers, direct.direct_running_mode) == (workers, mode)
    assert options.view_as(StandardOptions).runner == local.FN_API_RUNNER


@pytest.mark.parametrize("name", ["DirectRunner", "directrunner", "direct", "FnApiRunner"])
def test_names_of_the_local_runner(name):
    options = make_options(name, [], 0)
    assert options.view_as(StandardOptions).runner == local.FN_API_RUNNER


@pytest.mark.parametrize("name", ["FlinkRunner", "flink", "PortableRunner", "my.own.Runner"])
def test_other_runners_are_beams(name):
    options = make_options(name, ["--job_endpoint=embed"], 0)
    assert options.view_as(StandardOptions).runner == name
    assert options.get_all_options()["job_endpoint"] == "embed"


def test_unknown_runners_are_refused():
    with pytest.raises(ConfigError, match=r"--runner.*unknown runner.*FlinkRunner.*found Flunk"):
        make_options("Flunk", [], 0)


@pytest.mark.parametrize("flag", ["--num_shard=3", "--direct_num_worker=2", "-x", "--shards"])
def test_unknown_flags_are_refused(flag):
    name = flag.partition("=")[0]
    with pytest.raises(ConfigError, match=f"{name}.*neither a flag of this command nor of Apache"):
        make_options("DirectRunner", ["--job_name=x", flag], 0)


def all_option_classes(kind=PipelineOptions):
    for child in kind.__subclasses__():
        yield child
        yield from all_option_classes(child)


def test_every_flag_of_beam_is_known():
    flags = set()
    for kind in all_option_classes():
        if kind.__module__.startswith("apache_beam."):
            parser = argparse.ArgumentParser(add_help=False)
            kind._add_argparse_args(parser)
            flags |= {action.option_strings[-1] for action in parser._actions}
    assert len(flags) > 100
    refused = []
    for flag in sorted(flags):
        try:
            check_flags([flag, "1"])
        except ConfigError:
            refused.append(flag)
        except (SystemExit, AttributeError, TypeError):
            pass  # the flag is known, but its value must be another one
    assert refused == []


def test_processors_where_the_system_does_not_tell_which(monkeypatch):
    monkeypatch.undo()
    assert local.num_processors() >= 1
    monkeypatch.delattr("os.sched_getaffinity", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: None)
    assert local.num_processors() == 1
