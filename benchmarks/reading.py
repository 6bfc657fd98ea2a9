"""Opening, ordering and reading HDF datasets next to RETURNN's `HDFDataset`.

    python benchmarks/reading.py [--sizes=100000,1000000] [--num_seqs=2000] [--repeats=5]

Opening is measured in a fresh process each time: CPU seconds after the imports, and how much the
process grew. Tags are looked up once. Epochs are read in random order from the page cache, both
sides in turn; "views" looks at the arrays that `get_data` returns, "copies" copies each of them,
and "memcpy" copies the same frames out of one array in memory. All figures are medians.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable

import h5py
import numpy as np

_DIM = 40
_ORDER = "laplace:.1000"
_MAX_RETURNN_TAGS = 100_000  # it reads tag by tag: minutes for more


def main() -> None:
    """Makes the files, measures, prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="100000,1000000")
    parser.add_argument("--num_seqs", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(f"open, and draw an epoch of {_ORDER}: CPU s, growth of the process in MiB")
        print(f"{'sequences':>12}{'':22}{'seqshard':>12}{'returnn':>12}{'ratio':>8}")
        for num_seqs in map(int, args.sizes.split(",")):
            path = os.path.join(folder, f"{num_seqs}.hdf")
            _write_index(path, num_seqs)
            _compare_opening(path, num_seqs, args.repeats)
        _compare_reading(folder, args.num_seqs, args.repeats)


def _write_index(path: str, num_seqs: int) -> None:
    """A file of many short sequences."""
    rng = np.random.RandomState(1)
    lens = rng.randint(1, 2000, size=num_seqs).astype("int32")
    tags = np.array([b"corpus/recording-%07d/%04d" % divmod(i, 50) for i in range(num_seqs)])
    with h5py.File(path, "w") as file:
        file.create_dataset(
            "inputs", (int(lens.sum()), 1), "int8", fillvalue=0, chunks=(1 << 20, 1)
        )
        file["seqLengths"] = np.stack([lens, np.zeros_like(lens)], axis=1)
        file["seqTags"] = tags


def _compare_opening(path: str, num_seqs: int, repeats: int) -> None:
    rounds = [{side: _in_fresh_process(side, path) for side in _SIDES} for _ in range(repeats)]
    for row, column in (("open + order, s", 0), ("growth, MiB", 1), ("first read by tag, s", 2)):
        values = [statistics.median(r[side][column] for r in rounds) for side in _SIDES]
        ratio = values[1] / max(values[0], 1e-9)
        print(f"{num_seqs:12d}  {row:20}{values[0]:12.4f}{values[1]:12.3f}{ratio:8.0f}")


def _in_fresh_process(side: str, path: str) -> tuple[float, float, float]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_open_and_order, (side, path))


def _open_and_order(side: str, path: str) -> tuple[float, float, float]:
    make = _SIDES[side]()
    before = _resident_bytes()
    with contextlib.redirect_stdout(io.StringIO()):
        start = time.process_time()
        dataset = make(files=[path], seq_ordering=_ORDER)
        dataset.initialize()
        dataset.init_seq_order(epoch=1)
        opened = time.process_time() - start
        growth = (_resident_bytes() - before) / 2**20
        if side == "returnn" and dataset.get_total_num_seqs() > _MAX_RETURNN_TAGS:
            return opened, growth, float("nan")
        start = time.process_time()
        dataset.get_data_by_seq_tag("corpus/recording-0000007/0007", "data")
        return opened, growth, time.process_time() - start


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _ours() -> type:
    from seqshard.datasets import HDFDataset

    return HDFDataset


def _theirs() -> type:
    import returnn.datasets.hdf

    return returnn.datasets.hdf.HDFDataset


_SIDES: dict[str, Callable[[], type]] = {"seqshard": _ours, "returnn": _theirs}


def _compare_reading(folder: str, num_seqs: int, repeats: int) -> None:
    simple, contiguous = os.path.join(folder, "simple.hdf"), os.path.join(folder, "contiguous.hdf")
    frames, lens = _write_corpus(simple, contiguous, num_seqs)
    print(f"\nrandom epoch, {num_seqs} sequences, {frames.nbytes >> 20} MiB: µs per sequence")
    cases = {
        "returnn, SimpleHDFWriter file": _reader(_theirs(), simple, copy=False),
        "returnn, contiguous": _reader(_theirs(), contiguous, copy=False),
        "seqshard, SimpleHDFWriter file": _reader(_ours(), simple, copy=False),
        "seqshard, contiguous, views": _reader(_ours(), contiguous, copy=False),
        "seqshard, contiguous, copies": _reader(_ours(), contiguous, copy=True),
        "memcpy of the same frames": _memcpy(frames, lens),
        "seqshard, tags": _tag_reader(contiguous),
    }
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(repeats):
        for name, run in cases.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(values) for name, values in times.items()}
    first = next(iter(medians.values()))
    print(f"{'':34}{'µs':>10}{'times the first':>18}")
    for name, median in medians.items():
        print(f"{name:34}{1e6 * median / num_seqs:10.2f}{first / median:18.1f}")


def _write_corpus(simple: str, contiguous: str, num_seqs: int) -> tuple[np.ndarray, np.ndarray]:
    from returnn.datasets.hdf import SimpleHDFWriter

    rng = np.random.RandomState(2)
    lens = rng.randint(100, 1000, size=num_seqs).astype("int32")
    frames = rng.standard_normal((int(lens.sum()), _DIM)).astype("float32")
    start = np.concatenate([[0], np.cumsum(lens)])
    writer = SimpleHDFWriter(simple, dim=_DIM, ndim=2)
    for i, length in enumerate(lens.tolist()):
        writer.insert_batch(frames[None, start[i] : start[i + 1]], [length], [f"seq-{i}"])
    writer.close()
    with h5py.File(contiguous, "w") as file:
        file["inputs"] = frames
        file["seqLengths"] = np.stack([lens, np.zeros_like(lens)], axis=1)
        file["seqTags"] = np.array([f"seq-{i}".encode() for i in range(num_seqs)])
    return frames, lens


def _open(dataset_class: type, path: str) -> object:
    with contextlib.redirect_stdout(io.StringIO()):
        dataset = dataset_class(files=[path], seq_ordering="random")
        dataset.initialize()
        dataset.init_seq_order(epoch=1)
    return dataset


def _reader(dataset_class: type, path: str, copy: bool) -> Callable[[], None]:
    dataset = _open(dataset_class, path)

    def run() -> None:
        for seq_idx in range(dataset.num_seqs):
            data = dataset.get_data(seq_idx, "data")
            if copy:
                data.copy()

    return run


def _tag_reader(path: str) -> Callable[[], None]:
    dataset = _open(_ours(), path)

    def run() -> None:
        for seq_idx in range(dataset.num_seqs):
            dataset.get_data_by_seq_tag(dataset.get_tag(seq_idx), "data")

    return run


def _memcpy(frames: np.ndarray, lens: np.ndarray) -> Callable[[], None]:
    end = np.cumsum(lens)
    order = np.random.RandomState(1).permutation(len(lens))
    bounds = list(zip((end - lens)[order].tolist(), end[order].tolist(), strict=True))

    def run() -> None:
        for first, last in bounds:
            frames[first:last].copy()

    return run


if __name__ == "__main__":
    main()
