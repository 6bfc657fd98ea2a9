"""The speed of a build, next to copying the same bytes and to RETURNN's hdf_dump.

    python benchmarks/build.py [--megabytes=1000] [--runs=5]

Everything runs in turn on the same machine, so that the ratios hold when its speed drifts. A build
is a whole process, from the start of Python to the exit code. Copying is `cp` of all archives and
`sync` of the copies. Both start with the sources in the page cache and after the same pause.
Modules are compiled before, as an installation does it.
hdf_dump is what that tool runs, `HDFDatasetWriter.dump_from_dataset` over `SprintCacheDataset`,
on a small part of the corpus, without the start of its process.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import io
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from corpus import SprintCorpus, make_corpus
from environment import ROOT, environment

RESULT = Path(__file__).with_name("build.json")
SETTLE_SECONDS = 2.0
DUMP_BYTES = 4_000_000


def main() -> None:
    """Runs everything and prints one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=1000, help="size of the corpus")
    parser.add_argument("--runs", type=int, default=5, help="runs of each, in turn")
    parser.add_argument("--folder", help="where to work (default: a temporary folder)")
    parser.add_argument("--save", action="store_true", help=f"write {RESULT.name}")
    args = parser.parse_args()
    compile_modules()
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="seqshard-bench-") as folder:
        corpus = make_corpus(Path(folder) / "corpus", args.megabytes * 10**6)
        small = make_corpus(Path(folder) / "small", DUMP_BYTES, num_archives=1)
        os.sync()
        figures = measure(corpus, small, Path(folder), args.runs)
    report = summarise(figures, corpus, small)
    print_table(report)
    if args.save:
        RESULT.write_text(json.dumps(report, indent=1) + "\n")


def compile_modules() -> None:
    """Compiles the package, also where the environment keeps Python from storing the result."""
    for folder in ("pipelines", "transforms", "io", "runners"):
        compileall.compile_dir(ROOT / folder, quiet=1)
    compileall.compile_file(ROOT / "__init__.py", quiet=1)


def measure(
    corpus: SprintCorpus, small: SprintCorpus, folder: Path, runs: int
) -> dict[str, list[float]]:
    """Seconds of every run, and the largest private memory of a build in bytes."""
    figures: dict[str, list[float]] = {"copy": [], "build": [], "memory": [], "hdf_dump": []}
    for _ in range(runs):
        figures["copy"].append(timed(lambda: copy(corpus, fresh(folder / "copy"))))
        output = fresh(folder / "out")
        figures["build"].append(timed(lambda: finish(build(corpus, output))))  # noqa: B023
        figures["hdf_dump"].append(hdf_dump(small, fresh(folder / "dump")))
    # Looking at a process's memory slows it down, so this is a run of its own.
    figures["memory"].append(peak_private_bytes(build(corpus, fresh(folder / "out"))))
    return figures


def fresh(folder: Path) -> Path:
    """An empty folder, after a pause in which the machine settles."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    os.sync()
    time.sleep(SETTLE_SECONDS)
    return folder


def timed(action: Callable[[], object]) -> float:
    """Wall-clock seconds of an action."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def copy(corpus: SprintCorpus, target: Path) -> None:
    """Copies all archives and syncs the copies."""
    subprocess.run(["cp", *map(str, corpus.archives), str(target)], check=True)
    subprocess.run(["sync", *map(str, target.iterdir())], check=True)


def build(corpus: SprintCorpus, output: Path) -> subprocess.Popen[bytes]:
    """Starts a build in a process of its own."""
    command = [sys.executable, "-m", "pipelines.build", "--runner=DirectRunner"]
    command += [f"--config={corpus.config}", f"--output={output}", "--num_shards=8"]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)


def finish(process: subprocess.Popen[bytes]) -> None:
    """Waits for a build, which must succeed."""
    if process.wait():
        raise SystemExit(f"the build failed with exit code {process.returncode}")


def peak_private_bytes(process: subprocess.Popen[bytes]) -> float:
    """The largest private memory of a process until it ends."""
    peak = 0
    while process.poll() is None:
        peak = max(peak, private_bytes(process.pid))
        time.sleep(0.02)
    finish(process)
    return float(peak)


def private_bytes(pid: int) -> int:
    """Memory of a process that no file backs; pages of mapped sources are not its own."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return sum(int(x.split()[1]) * 1024 for x in lines if x.startswith("Anonymous:"))
    return 0


def hdf_dump(corpus: SprintCorpus, folder: Path) -> float:
    """Seconds that RETURNN's writer takes for a corpus."""
    from returnn.datasets.hdf import HDFDatasetWriter
    from returnn.datasets.sprint import SprintCacheDataset

    labeling = {
        "silence_phone": "[SILENCE]",
        "allophone_file": str(corpus.folder / "allophones.txt"),
        "state_tying_file": str(corpus.folder / "state-tying.txt"),
    }
    alignment = {"filename": str(corpus.folder / "alignment.0.cache")}
    data = {
        "data": {"filename": str(corpus.folder / "features.0.cache")},
        "classes": alignment | {"allophone_labeling": labeling},
    }
    with quiet():
        start = time.perf_counter()
        dataset = SprintCacheDataset(data=data)
        dataset.initialize()
        writer = HDFDatasetWriter(str(folder / "dump.hdf"))
        writer.dump_from_dataset(dataset, use_progress_bar=False)
        writer.close()
        return time.perf_counter() - start


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Swallows what RETURNN prints."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def summarise(
    figures: dict[str, list[float]], corpus: SprintCorpus, small: SprintCorpus
) -> dict[str, object]:
    """Medians, ratios run by run, and what they were measured on."""
    median = {name: statistics.median(values) for name, values in figures.items()}
    pairs = zip(figures["copy"], figures["build"], strict=True)
    of_copy = [copied / built for copied, built in pairs]
    dump_rate = small.num_bytes / median["hdf_dump"]
    build_rate = corpus.num_bytes / median["build"]
    return {
        "corpus_bytes": corpus.num_bytes,
        "num_seqs": corpus.num_seqs,
        "copy_seconds": median["copy"],
        "build_seconds": median["build"],
        "build_seconds_min_max": [min(figures["build"]), max(figures["build"])],
        "copy_seconds_min_max": [min(figures["copy"]), max(figures["copy"])],
        "copy_bytes_per_second": corpus.num_bytes / median["copy"],
        "build_bytes_per_second": build_rate,
        "hdf_dump_bytes_per_second": dump_rate,
        "build_over_hdf_dump": build_rate / dump_rate,
        "build_over_copy": statistics.median(of_copy),
        "peak_private_bytes": max(figures["memory"]),
        **environment(("apache-beam", "numpy", "h5py", "pyarrow", "returnn")),
    }


def print_table(report: dict[str, object]) -> None:
    """One table for people."""
    rate = "{:>10.1f} MB/s"
    print(f"{report['num_seqs']} sequences, {report['corpus_bytes'] / 1e6:.0f} MB of archives")
    for name in ("copy", "build"):
        low, high = report[f"{name}_seconds_min_max"]
        print(
            f"{name:<10}"
            + rate.format(report[f"{name}_bytes_per_second"] / 1e6)
            + f"   median {report[f'{name}_seconds']:.2f} s ({low:.2f} to {high:.2f})"
        )
    print(f"{'hdf_dump':<10}" + rate.format(report["hdf_dump_bytes_per_second"] / 1e6))
    print(f"build is {report['build_over_hdf_dump']:.0f} times hdf_dump")
    print(
        f"build runs at {report['build_over_copy']:.2f} of the speed of copying (median of pairs)"
    )
    print(f"peak private memory of the build {report['peak_private_bytes'] / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
