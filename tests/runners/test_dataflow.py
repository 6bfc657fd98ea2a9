"""Presets of a run on Dataflow, what is refused, and the image of its workers."""

from __future__ import annotations

import re
import runpy
from importlib.metadata import version
from pathlib import Path

import pytest
import setuptools
from apache_beam.options.pipeline_options import (
    DebugOptions,
    PipelineOptions,
    SetupOptions,
    WorkerOptions,
)
from packaging.requirements import Requirement

from seqshard.io.config import Corpus, SourceFile
from seqshard.io.errors import ConfigError
from seqshard.io.records import StreamSpec
from seqshard.pipelines.build import main
from seqshard.pipelines.options import parse_build_options
from seqshard.runners import dataflow, names, places
from seqshard.runners.select import check_flags, make_options

ROOT = Path(__file__).parents[2]
CLOUD = ["--project=my-project", "--region=europe-west4", "--temp_location=gs://bucket/temp"]


def options_of(*flags):
    return PipelineOptions(list(flags), runner="DataflowRunner")


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_flags_that_dataflow_needs(missing):
    flags = [flag for i, flag in enumerate(CLOUD) if i != missing]
    name = CLOUD[missing].partition("=")[0]
    with pytest.raises(ConfigError, match=f"{name}.*Dataflow needs this flag.*expected"):
        dataflow.check_cloud(options_of(*flags))


@pytest.mark.parametrize("flag", ["--temp_location=/tmp", "--staging_location=s3://bucket/x"])
def test_beams_own_files_are_in_google_cloud_storage(flag):
    name = flag.partition("=")[0]
    with pytest.raises(ConfigError, match=f"{name}.*not a place in Google Cloud Storage"):
        dataflow.check_cloud(options_of(*CLOUD, flag))


def test_presets():
    options = options_of(*CLOUD)
    dataflow.preset_workers(options)
    worker = options.view_as(WorkerOptions)
    assert worker.machine_type == dataflow.MACHINE_TYPE
    assert worker.disk_size_gb == dataflow.DISK_SIZE_GB
    assert worker.autoscaling_algorithm == "THROUGHPUT_BASED"
    assert options.view_as(DebugOptions).number_of_worker_harness_threads == dataflow.NUM_THREADS


def test_flags_win_over_presets():
    flags = ("--machine_type=e2-highmem-2", "--disk_size_gb=500", "--autoscaling_algorithm=NONE")
    options = options_of(*CLOUD, *flags, "--number_of_worker_harness_threads=1")
    dataflow.preset_workers(options)
    worker = options.view_as(WorkerOptions)
    assert (worker.machine_type, worker.disk_size_gb) == ("e2-highmem-2", 500)
    assert worker.autoscaling_algorithm == "NONE"
    assert options.view_as(DebugOptions).number_of_worker_harness_threads == 1


def software_of(setup_file, *flags):
    options = options_of(*CLOUD, *flags)
    dataflow.preset_software(options, setup_file)
    setup = options.view_as(SetupOptions)
    assert setup.save_main_session is False
    return setup.setup_file, setup.requirements_file


def test_a_checkout_sends_itself_and_its_pins():
    setup_file = ROOT / "setup.py"
    assert software_of(setup_file) == (str(setup_file), str(dataflow.REQUIREMENTS))
    assert software_of(setup_file, "--requirements_file=own") == (str(setup_file), "own")


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        ("--sdk_container_image=registry/image:1", (None, None)),
        ("--setup_file=/some/setup.py", ("/some/setup.py", None)),
        ("--extra_package=/some/seqshard.tar.gz", (None, None)),
    ],
)
def test_software_that_is_given_is_taken(flag, expected):
    assert software_of(ROOT / "setup.py", flag) == expected


def test_an_installed_package_needs_an_image(tmp_path):
    with pytest.raises(ConfigError, match=r"--sdk_container_image.*workers need this package"):
        software_of(tmp_path / "setup.py")


def test_the_main_session_is_never_sent():
    with pytest.raises(ConfigError, match=r"--save_main_session.*Leave it out"):
        software_of(ROOT / "setup.py", "--save_main_session")


def test_the_runner_is_chosen_by_its_name():
    for name in ("DataflowRunner", "dataflow"):
        with pytest.raises(ConfigError, match="entry '--project': Dataflow needs this flag"):
            make_options(name, [], 0)


def test_a_build_from_local_files_is_refused_before_anything_is_written(tmp_path, capsys):
    output = tmp_path / "out"
    config = ROOT / "examples" / "demo.toml"
    flags = [f"--config={config}", f"--output={output}", "--runner=DataflowRunner", *CLOUD]
    assert main(flags) == 2
    assert "'--output': workers on Dataflow cannot reach a local path" in capsys.readouterr().err
    assert not output.exists()


def corpus(path="gs://b/a.cache", state_tying="gs://b/t", segments=None):
    spec = StreamSpec("classes", "sprint-alignment", allophones="gs://b/a", state_tying=state_tying)
    source = SourceFile(0, spec, path, "a.cache")
    return Corpus((spec,), (source,), "error", segments, 0, None, "")


def test_shared_places():
    places.check_shared(corpus(segments="s3://b/keep.txt"), "gs://b/out")
    assert not places.is_shared("file:///data/a.cache")
    assert not places.is_shared("memory://a.cache")


@pytest.mark.parametrize(
    ("changed", "output", "entry", "path"),
    [
        ({}, "/data/out", "--output", "/data/out"),
        ({"path": "/data/a.cache"}, "gs://b/o", "streams.classes.files", "/data/a.cache"),
        ({"state_tying": "t"}, "gs://b/o", "streams.classes.state_tying", "t"),
        ({"segments": "/s.txt"}, "gs://b/o", "sequences.segments", "/s.txt"),
    ],
)
def test_local_paths_are_refused(changed, output, entry, path):
    with pytest.raises(ConfigError, match=f"^{path}, entry '{entry}': workers .* cannot reach"):
        places.check_shared(corpus(**changed), output)


def documented_commands():
    text = (ROOT / "docs" / "running-on-dataflow.md").read_text().replace("\\\n", " ")
    return re.findall(r"^python -m pipelines\.build (.+)$", text, re.M)


@pytest.mark.parametrize("command", documented_commands())
def test_documented_commands_have_all_that_is_needed(command):
    options = parse_build_options(command.split(), "build")
    check_flags(options.beam_args)
    beam_options = options_of(*options.beam_args)
    dataflow.check_cloud(beam_options)
    dataflow.preset_software(beam_options, ROOT / "setup.py")
    assert names.is_dataflow(options.runner)
    assert places.is_shared(options.config)
    assert places.is_shared(options.output)


def test_documented_presets():
    text = (ROOT / "docs" / "running-on-dataflow.md").read_text()
    assert f"| `--machine_type` | `{dataflow.MACHINE_TYPE}` |" in text
    assert f"| `--disk_size_gb` | {dataflow.DISK_SIZE_GB} |" in text
    assert f"| `--number_of_worker_harness_threads` | {dataflow.NUM_THREADS} per" in text


@pytest.fixture(scope="module")
def admitted():
    """What setup.py requires for a build on Dataflow, by name."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setuptools, "setup", found.update)
        runpy.run_path(str(ROOT / "setup.py"))
    lines = [*found["install_requires"], *found["extras_require"]["dataflow"]]
    return {required.name: required.specifier for required in map(Requirement, lines)}


@pytest.fixture(scope="module")
def pins():
    lines = dataflow.REQUIREMENTS.read_text().splitlines()
    return {
        pin.name: re.fullmatch(r"==([0-9.]+)", str(pin.specifier))[1]
        for pin in (Requirement(line) for line in lines if not line.startswith("#"))
    }


def test_pins_are_complete_and_admitted_by_setup(admitted, pins):
    assert admitted.keys() <= pins.keys()
    for name, specifier in admitted.items():
        assert specifier.contains(pins[name]), f"{name} {pins[name]} is not {specifier}"


def test_the_image_is_of_the_pinned_beam(pins):
    lines = (ROOT / "Dockerfile").read_text()
    image = re.search(r"^FROM apache/beam_python\$\{PYTHON_VERSION\}_sdk:(\S+)$", lines, re.M)
    assert image[1] == pins["apache-beam"]


def test_the_image_has_a_python_that_setup_admits():
    python = re.search(r"^ARG PYTHON_VERSION=3\.(\d+)$", (ROOT / "Dockerfile").read_text(), re.M)
    assert int(python[1]) >= 11


def test_what_the_image_copies_is_not_ignored():
    kept = {
        line.removeprefix("!")
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    assert kept >= {"__init__.py", "setup.py", "pyproject.toml", "README.md"}
    assert kept >= {"datasets", "io", "pipelines", "runners", "transforms"}
    assert all((ROOT / name).exists() for name in kept)


def test_versions_tested_here_are_those_of_the_workers(pins):
    if version("apache-beam") != pins["apache-beam"]:
        pytest.skip("another Beam than that of the workers is installed")
    assert version("pyarrow").partition(".")[0] == pins["pyarrow"].partition(".")[0]
    assert version("h5py").rpartition(".")[0] == pins["h5py"].rpartition(".")[0]
