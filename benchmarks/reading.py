"""Opening, ordering and reading datasets next to RETURNN.

    python benchmarks/reading.py [--sizes=100000,1000000] [--num_seqs=4000] [--runs=5]

A dataset is built from an HDF file, and the same sequences are read from both. Opening is measured
in a fresh process each time: CPU time after the imports, and by how much the private memory of the
process grew. Epochs are read in random order from the page cache, all sides in turn; "views" looks
at the arrays that `get_data` returns, "copies" copies each of them, and "memcpy" copies the same
frames out of one array in memory. All figures are medians. RETURNN's DistributeFilesDataset needs
the package dm-tree.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from environment import environment

RESULT = Path(__file__).with_name("reading.json")
DIM = 40
ORDER = "laplace:.1000"
TAG = "corpus/recording-0000007/0007"
NUM_SHARDS = 8
MAX_RETURNN_TAGS = 1_000_000
SIDES = ("manifest", "hdf", "returnn")


def main() -> None:
    """Makes the data, measures, prints one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="100000,1000000", help="sequences to open")
    parser.add_argument("--num_seqs", type=int, default=4000, help="sequences to read")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--folder", help="where to work (default: a temporary folder)")
    parser.add_argument("--save", action="store_true", help=f"write {RESULT.name}")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print(f"{'':44}{'manifest':>11}{'hdf':>11}{'returnn':>11}{'ratio':>9}")
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="seqshard-bench-") as folder:
        for num_seqs in map(int, args.sizes.split(",")):
            rows += print_rows(measure_opening(Path(folder), num_seqs, args.runs))
        rows += print_rows(measure_reading(Path(folder), args.num_seqs, args.runs))
    if args.save:
        packages = ("numpy", "h5py", "pyarrow", "returnn")
        report = {"runs": args.runs, "rows": rows, **environment(packages)}
        RESULT.write_text(json.dumps(report, indent=1) + "\n")


def print_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line per figure; the ratio is RETURNN's to that of the manifest."""
    for row in rows:
        cells = (f"{row[s]:11.4g}" if row.get(s) is not None else " " * 11 for s in SIDES)
        ours, theirs = row.get("manifest"), row.get("returnn")
        ratio = f"{theirs / ours:9.3g}" if ours and theirs else ""
        print(f"{row['what']:44}{''.join(cells)}{ratio}", flush=True)
    return rows


# Opening.


def measure_opening(folder: Path, num_seqs: int, runs: int) -> list[dict[str, Any]]:
    """Opening a corpus of many short sequences."""
    path, dataset = write_index(folder, num_seqs)
    places = {"manifest": str(dataset), "hdf": str(path), "returnn": str(path)}
    found: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for run in range(runs):
        for side in SIDES:
            # RETURNN's first look for a tag takes most of a minute for a million.
            look_up = side != "returnn" or (run == 0 and num_seqs <= MAX_RETURNN_TAGS)
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                args = (side, places[side], look_up)
                found[side].append(pool.apply(open_and_order, args))
    rows = []
    for what in ("open and order, s", "private memory, MB", "all tags, s", "first read by tag, s"):
        row: dict[str, Any] = {"what": f"{num_seqs:,} sequences: {what}"}
        for side in SIDES:
            values = [run[what] for run in found[side] if what in run]
            row[side] = statistics.median(values) if values else None
        rows.append(row)
    return rows


def write_index(folder: Path, num_seqs: int) -> tuple[Path, Path]:
    """An HDF file of many short sequences, and the dataset that is built from it."""
    rng = np.random.RandomState(1)
    lengths = rng.randint(1, 200, size=num_seqs).astype("int32")
    tags = [b"corpus/recording-%07d/%04d" % divmod(i, 50) for i in range(num_seqs)]
    path = folder / f"{num_seqs}.hdf"
    with h5py.File(path, "w") as file:
        file["inputs"] = np.zeros((int(lengths.sum()), 1), "int8")
        file["seqLengths"] = np.stack([lengths, np.zeros_like(lengths)], axis=1)
        file["seqTags"] = np.array(tags)
    return path, build(path)


def build(path: Path) -> Path:
    """A dataset of one stream from an HDF file."""
    from seqshard.pipelines.build import main as run

    config, output = path.with_suffix(".toml"), path.with_suffix("")
    config.write_text(f'[streams.data]\nsource = "hdf"\nfiles = ["{path.name}"]\n')
    with quiet():
        code = run([f"--config={config}", f"--output={output}", f"--num_shards={NUM_SHARDS}"])
    if code:
        raise SystemExit(code)
    return output


def open_and_order(side: str, path: str, look_up: bool) -> dict[str, float]:
    """What a process of its own measures."""
    make = maker(side)
    before = private_bytes()
    with quiet():
        start = time.process_time()
        dataset = make(path, ORDER)
        found = {"open and order, s": time.process_time() - start}
        found["private memory, MB"] = (private_bytes() - before) / 1e6
        if look_up:
            start = time.process_time()
            dataset.get_data_by_seq_tag(TAG, "data")
            found["first read by tag, s"] = time.process_time() - start
        start = time.process_time()
        dataset.get_all_tags()
        found["all tags, s"] = time.process_time() - start
    return found


def private_bytes() -> int:
    """Memory of this process that it shares with no other one."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(x.split()[1]) * 1024 for x in lines if x.startswith("Private_"))


def maker(side: str) -> Callable[[str, str], Any]:
    """Opens a file or folder and draws the first epoch; everything is imported already."""
    import pyarrow.ipc  # noqa: F401

    if side == "manifest":
        from seqshard.datasets import ManifestDataset as Dataset
    elif side == "hdf":
        from seqshard.datasets import HDFDataset as Dataset
    else:
        from returnn.datasets.hdf import HDFDataset as Dataset

    def make(path: str, order: str) -> Any:
        files = path if side == "manifest" else [path]
        dataset = Dataset(files, seq_ordering=order)
        dataset.initialize()
        dataset.init_seq_order(epoch=1)
        return dataset

    return make


# Reading.


def measure_reading(folder: Path, num_seqs: int, runs: int) -> list[dict[str, Any]]:
    """Microseconds per sequence of a random epoch."""
    simple, contiguous, frames, lengths = write_corpus(folder, num_seqs)
    shards = build(contiguous)
    ours, hdf, theirs = (maker(side) for side in SIDES)
    with quiet():
        made = ours(str(shards), "random")
        cases: dict[tuple[str, str], Callable[[], None]] = {
            ("views (RETURNN: SimpleHDFWriter file)", "manifest"): reader(made),
            ("views (RETURNN: SimpleHDFWriter file)", "hdf"): reader(
                hdf(str(contiguous), "random")
            ),
            ("views (RETURNN: SimpleHDFWriter file)", "returnn"): reader(
                theirs(str(simple), "random")
            ),
            ("copies (RETURNN: contiguous file)", "manifest"): reader(made, copy=True),
            ("copies (RETURNN: contiguous file)", "hdf"): reader(
                hdf(str(contiguous), "random"), copy=True
            ),
            ("copies (RETURNN: contiguous file)", "returnn"): reader(
                theirs(str(contiguous), "random")
            ),
            ("memcpy of the same frames", "manifest"): memcpy(frames, lengths),
            ("get_tag and get_data_by_seq_tag", "manifest"): tag_reader(made),
            ("DistributeFilesDataset", "manifest"): files_reader(shards, "seqshard", False),
            ("DistributeFilesDataset", "returnn"): files_reader(shards, "returnn", True),
            ("DistributeFilesDataset, no process", "returnn"): files_reader(
                shards, "returnn", False
            ),
        }
        seconds = in_turn(cases, runs)
    rows: dict[str, dict[str, Any]] = {}
    for (what, side), values in seconds.items():
        row = rows.setdefault(what, {"what": f"{what}, µs"})
        row[side] = 1e6 * statistics.median(values) / num_seqs
    return list(rows.values())


def in_turn(
    cases: dict[tuple[str, str], Callable[[], None]], runs: int
) -> dict[tuple[str, str], list[float]]:
    """Wall seconds of every run after a first one that warms up."""
    seconds: dict[tuple[str, str], list[float]] = {case: [] for case in cases}
    for _ in range(runs + 1):
        for case, run in cases.items():
            start = time.perf_counter()
            run()
            seconds[case].append(time.perf_counter() - start)
    return {case: values[1:] for case, values in seconds.items()}


def write_corpus(folder: Path, num_seqs: int) -> tuple[Path, Path, np.ndarray, np.ndarray]:
    """The same sequences as RETURNN's writer stores them, and in one piece."""
    from returnn.datasets.hdf import SimpleHDFWriter

    simple, contiguous = folder / "simple.hdf", folder / "contiguous.hdf"
    rng = np.random.RandomState(2)
    lengths = rng.randint(100, 1000, size=num_seqs).astype("int32")
    frames = rng.standard_normal((int(lengths.sum()), DIM)).astype("float32")
    start = np.concatenate([[0], np.cumsum(lengths)])
    writer = SimpleHDFWriter(str(simple), dim=DIM, ndim=2)
    for i, length in enumerate(lengths.tolist()):
        writer.insert_batch(frames[None, start[i] : start[i + 1]], [length], [f"seq-{i}"])
    writer.close()
    with h5py.File(contiguous, "w") as file:
        file["inputs"] = frames
        file["seqLengths"] = np.stack([lengths, np.zeros_like(lengths)], axis=1)
        file["seqTags"] = np.array([f"seq-{i}".encode() for i in range(num_seqs)])
    return simple, contiguous, frames, lengths


def reader(dataset: Any, copy: bool = False) -> Callable[[], None]:
    """Reads an epoch."""

    def run() -> None:
        for seq_idx in range(dataset.num_seqs):
            data = dataset.get_data(seq_idx, "data")
            if copy:
                data.copy()

    return run


def tag_reader(dataset: Any) -> Callable[[], None]:
    """Asks for the tag of every sequence, and reads it by that."""

    def run() -> None:
        for seq_idx in range(dataset.num_seqs):
            dataset.get_data_by_seq_tag(dataset.get_tag(seq_idx), "data")

    return run


def memcpy(frames: np.ndarray, lengths: np.ndarray) -> Callable[[], None]:
    """Copies the sequences in random order."""
    end = np.cumsum(lengths)
    order = np.random.RandomState(1).permutation(len(lengths))
    bounds = list(zip((end - lengths)[order].tolist(), end[order].tolist(), strict=True))

    def run() -> None:
        for first, last in bounds:
            frames[first:last].copy()

    return run


def files_reader(shards: Path, side: str, in_worker: bool) -> Callable[[], None]:
    """Reads all sub-epochs of some files, by a new dataset each time."""
    files = sorted(str(path) for path in shards.glob("*.hdf"))
    if side == "seqshard":
        from seqshard.datasets import DistributeFilesDataset as Dataset
    else:
        from returnn.datasets.distrib_files import DistributeFilesDataset as Dataset
    dataset = Dataset(
        files=files,
        partition_epoch=2,
        get_sub_epoch_dataset=functools.partial(sub_epoch, side),
        seq_ordering="random",
        use_worker_proc=in_worker,
    )
    dataset.initialize()
    epoch = iter(range(1, 1000))

    def run() -> None:
        for _ in range(2):
            dataset.init_seq_order(epoch=next(epoch))
            seq_idx = 0
            while dataset.is_less_than_num_seqs(seq_idx):
                dataset.load_seqs(seq_idx, seq_idx + 1)
                dataset.get_data(seq_idx, "data")
                seq_idx += 1

    return run


def sub_epoch(side: str, files: list[str]) -> dict[str, Any]:
    """Options of the dataset of some files."""
    return {"class": "HDFDataset", "files": files, "seq_ordering": "random"}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Swallows what RETURNN prints, also that of its processes."""
    sys.stdout.flush()
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        real = os.dup(1)
        os.dup2(nowhere.fileno(), 1)
        try:
            yield
        finally:
            os.dup2(real, 1)
            os.close(real)


if __name__ == "__main__":
    main()
