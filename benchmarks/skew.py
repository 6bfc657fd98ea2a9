"""How well builds of skewed corpora use their workers.

    python benchmarks/skew.py [--archives=50000] [--megabytes=600] [--runs=3] [--save]

Corpora: one archive with 90 % of all sequences; thousands of archives of one short sequence each;
and one sequence of an hour (360,000 frames of 80 features) among sequences of six seconds. Each is
built by 1, 2 and 4 threads. The makespan is that of the whole process; `ideal` is the start of a
build (one of the smallest corpus, by as many threads) and the rest of the makespan of one thread
divided by the threads, or by the processors where these are fewer. The least of all runs counts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from build import compile_modules, fresh, private_bytes
from corpus import make_corpus
from environment import ROOT, environment

from seqshard.io.sprint.writer import ArchiveWriter

RESULT = Path(__file__).with_name("skew.json")
WORKERS = (1, 2, 4)
NUM_SHARDS = 16
HOUR_FRAMES, HOUR_DIM = 360_000, 80
SHORT_FRAMES = 50
START = "smallest corpus"


@dataclass(frozen=True)
class Run:
    """One build: wall-clock and processor seconds, and the largest private memory in bytes."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int


def main() -> None:
    """Runs everything and prints one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--archives", type=int, default=50_000, help="number of tiny archives")
    parser.add_argument("--megabytes", type=int, default=600, help="size of the other corpora")
    parser.add_argument("--runs", type=int, default=3, help="runs of each, in turn")
    parser.add_argument("--folder", help="where to work (default: a temporary folder)")
    parser.add_argument("--save", action="store_true", help=f"write {RESULT.name}")
    args = parser.parse_args()
    compile_modules()
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="seqshard-skew-") as folder:
        configs = make_corpora(Path(folder), args.archives, args.megabytes * 10**6)
        runs = measure(configs, Path(folder) / "out", args.runs)
    report = summarise(runs) | {
        "num_tiny_archives": args.archives,
        "megabytes": args.megabytes,
        "runs": args.runs,
        "processors": num_processors(),
        "load_of_the_machine": [round(load, 1) for load in os.getloadavg()],
        **environment(("apache-beam", "numpy", "h5py", "pyarrow")),
    }
    print_table(report)
    if args.save:
        RESULT.write_text(json.dumps(report, indent=1) + "\n")


def num_processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0))


def make_corpora(folder: Path, num_archives: int, num_bytes: int) -> dict[str, Path]:
    """Writes all corpora; returns their configurations by name."""
    # Half of the archives are alignments.
    tiny = num_archives // 2
    tiny_bytes = tiny * SHORT_FRAMES * 180
    return {
        START: make_corpus(folder / "start", 10**6, 1).config,
        "one archive of 90 %": make_corpus(
            folder / "archive", num_bytes, 10, first_share=0.9
        ).config,
        f"{num_archives} archives": make_corpus(
            folder / "tiny", tiny_bytes, tiny, mean_frames=SHORT_FRAMES
        ).config,
        "a sequence of an hour": make_hour(folder / "hour", num_bytes),
    }


def make_hour(folder: Path, num_bytes: int) -> Path:
    """Features with one very long sequence."""
    folder.mkdir()
    frames = np.random.default_rng(1).standard_normal((HOUR_FRAMES, HOUR_DIM), np.float32)
    rest = max(0, num_bytes - frames.nbytes) // (600 * HOUR_DIM * 4)
    with ArchiveWriter(str(folder / "features.0.cache")) as archive:
        archive.add_features("corpus/hour/1", frames)
        for i in range(rest):
            archive.add_features(f"corpus/rec-{i:07d}/1", frames[i : i + 600])
    config = folder / "corpus.toml"
    config.write_text('[streams.data]\nsource = "sprint-features"\nfiles = ["*.cache"]\n')
    return config


def measure(
    configs: Mapping[str, Path], output: Path, num_runs: int
) -> dict[str, dict[int, list[Run]]]:
    """Runs every build, in turn."""
    runs = {name: {count: [] for count in WORKERS} for name in configs}
    for _ in range(num_runs):
        for name, config in configs.items():
            for count in WORKERS:
                runs[name][count].append(run_build(config, fresh(output), count))
    return runs


def run_build(config: Path, output: Path, num_workers: int) -> Run:
    """One build in a process of its own."""
    command = [sys.executable, "-m", "pipelines.build", "--runner=DirectRunner"]
    command += [f"--config={config}", f"--output={output}", f"--num_shards={NUM_SHARDS}"]
    command += [f"--direct_num_workers={num_workers}"]
    start, peak = time.perf_counter(), 0
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    while True:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            break
        peak = max(peak, private_bytes(process.pid))
        time.sleep(0.1)
    seconds = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"the build failed with exit code {process.returncode}")
    return Run(seconds, usage.ru_utime + usage.ru_stime, peak)


def summarise(runs: Mapping[str, Mapping[int, list[Run]]]) -> dict[str, object]:
    """Makespans next to the ideal, by corpus and number of threads."""
    least = {
        name: {count: min(run.seconds for run in found) for count, found in counts.items()}
        for name, counts in runs.items()
    }
    corpora = {}
    for name, counts in runs.items():
        work = max(0.0, least[name][1] - least[START][1])
        corpora[name] = {}
        for count, found in counts.items():
            ideal = least[START][count] + work / min(count, num_processors())
            corpora[name][str(count)] = {
                "seconds": round(least[name][count], 2),
                "ideal_seconds": round(ideal, 2),
                "over_ideal": round(least[name][count] / ideal, 2),
                "cpu_seconds": round(min(run.cpu_seconds for run in found), 2),
                "peak_private_bytes": max(run.peak_bytes for run in found),
            }
    return {"corpora": corpora}


def print_table(report: Mapping[str, object]) -> None:
    """One table for people."""
    print(f"{'corpus':<24}{'threads':>8}{'s':>8}{'ideal':>8}{'ratio':>7}{'CPU s':>8}{'MB':>7}")
    for name, counts in report["corpora"].items():
        for count, row in counts.items():
            print(
                f"{name:<24}{count:>8}{row['seconds']:>8.1f}{row['ideal_seconds']:>8.1f}"
                f"{row['over_ideal']:>7.2f}{row['cpu_seconds']:>8.1f}"
                f"{row['peak_private_bytes'] / 1e6:>7.0f}"
            )


if __name__ == "__main__":
    main()
