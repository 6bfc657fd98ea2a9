"""Names of runners, told apart without importing Beam."""

from __future__ import annotations

LOCAL_RUNNERS = ("direct", "directrunner", "fnapi", "fnapirunner")
DATAFLOW_RUNNERS = ("dataflow", "dataflowrunner")
FLINK_RUNNERS = ("flink", "flinkrunner")
PRISM_RUNNERS = ("prism", "prismrunner")
SPARK_RUNNERS = ("spark", "sparkrunner")
PORTABLE_RUNNERS = (*FLINK_RUNNERS, *PRISM_RUNNERS, *SPARK_RUNNERS, "portable", "portablerunner")


def is_local(runner: str) -> bool:
    """Whether `--runner=RUNNER` runs on this machine by Beam's FnApiRunner."""
    return runner.lower() in LOCAL_RUNNERS


def is_portable(runner: str) -> bool:
    """Whether a job server executes the pipeline: on Flink, Prism, Spark or what it stands for."""
    return runner.lower() in PORTABLE_RUNNERS


def is_dataflow(runner: str) -> bool:
    """Whether Google Cloud executes the pipeline, on workers without a common file system."""
    return runner.lower() in DATAFLOW_RUNNERS
