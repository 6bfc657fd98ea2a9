"""Execution on Google Cloud Dataflow: https://cloud.google.com/dataflow/docs.

Runner v2, the service's own shuffle and its autoscaling are what Beam and the service take for
Python pipelines in batch by themselves. What is preset here fits tasks that copy files.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from apache_beam.options.pipeline_options import (
    DebugOptions,
    GoogleCloudOptions,
    PipelineOptions,
    SetupOptions,
    WorkerOptions,
)

from ..io.errors import ConfigError

ROOT = Path(__file__).parent.parent
REQUIREMENTS = Path(__file__).with_name("worker-requirements.txt")

# A worker holds 100 to 400 MB per thread, little of it for long.
MACHINE_TYPE = "n2-standard-4"
# Every thread keeps one shard and the sources that it reads on the disk.
DISK_SIZE_GB = 100
# Per processor: while one thread waits for the object store, others decode. The service would
# start 12, whose shards and sources could together fill the disk.
NUM_THREADS = 4
REQUIRED = {
    "project": "my-project",
    "region": "europe-west4",
    "temp_location": "gs://my-bucket/temp",
}


def dataflow_options(beam_args: Sequence[str]) -> PipelineOptions:
    """Options of a run on Dataflow. Flags that are given win over the presets.

    Raises:
        ConfigError: naming the flag that is missing or wrong, or what has to be installed.
    """
    options = PipelineOptions(list(beam_args), runner="DataflowRunner")
    check_cloud(options)
    check_installed()
    preset_workers(options)
    preset_software(options, ROOT / "setup.py")
    return options


def check_cloud(options: PipelineOptions) -> None:
    """Checks that it is clear where and on whose account a job runs.

    Raises:
        ConfigError: see `dataflow_options`.
    """
    cloud = options.view_as(GoogleCloudOptions)
    for name, example in REQUIRED.items():
        if not getattr(cloud, name):
            raise ConfigError("Dataflow needs this flag", entry=f"--{name}", expected=example)
    for name in ("temp_location", "staging_location"):
        place = getattr(cloud, name)
        if place and not place.startswith("gs://"):
            raise ConfigError(
                "not a place in Google Cloud Storage",
                entry=f"--{name}",
                expected=REQUIRED["temp_location"],
                found=place,
            )


def check_installed() -> None:
    """Checks that Beam's part for Google Cloud is there.

    Raises:
        ConfigError: see `dataflow_options`.
    """
    try:
        from apache_beam.runners.dataflow.internal import apiclient  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"Beam's part for Google Cloud cannot be imported: {error}",
            entry="--runner",
            hint="pip install 'seqshard[dataflow]'",
        ) from error


def preset_workers(options: PipelineOptions) -> None:
    """Chooses machines, disks, threads and autoscaling where no flag does."""
    worker, debug = options.view_as(WorkerOptions), options.view_as(DebugOptions)
    worker.machine_type = worker.machine_type or MACHINE_TYPE
    worker.disk_size_gb = worker.disk_size_gb or DISK_SIZE_GB
    worker.autoscaling_algorithm = worker.autoscaling_algorithm or "THROUGHPUT_BASED"
    debug.number_of_worker_harness_threads = debug.number_of_worker_harness_threads or NUM_THREADS


def preset_software(options: PipelineOptions, setup_file: Path) -> None:
    """Sees to it that workers have this package: in their container, or sent along.

    Args:
        options: changed in place.
        setup_file: that of this checkout; not there if the package was installed.

    Raises:
        ConfigError: if workers would not have it.
    """
    setup = options.view_as(SetupOptions)
    if setup.save_main_session:
        raise ConfigError(
            "nothing of this pipeline is defined in its script, and an uploaded main session "
            "would be that of another program",
            entry="--save_main_session",
            hint="Leave it out.",
        )
    # Unset, Beam decides by the pickler that it uses.
    setup.save_main_session = False
    worker = options.view_as(WorkerOptions)
    if worker.sdk_container_image or setup.setup_file or setup.extra_packages:
        return
    if not setup_file.is_file():
        raise ConfigError(
            "the workers need this package, and there is no setup.py here to send them",
            entry="--sdk_container_image",
            expected="an image with seqshard in it",
            hint="Build one with the Dockerfile of the sources, or start from a checkout.",
        )
    setup.setup_file = str(setup_file)
    setup.requirements_file = setup.requirements_file or str(REQUIREMENTS)
