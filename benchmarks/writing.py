"""Writing HDF files next to RETURNN's `SimpleHDFWriter` and `HDFDatasetWriter`.

    python benchmarks/writing.py [--repeats=3]

Both sides get the same batches, in turn; ours syncs the file to the disk, RETURNN does not. The
dump copies a contiguous file through each side's own `HDFDataset`. All figures are medians of wall
seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import statistics
import tempfile
import time
from collections.abc import Callable

import numpy as np
import returnn.datasets.hdf as returnn_hdf

from seqshard.datasets import HDFDataset, HDFDatasetWriter, SimpleHDFWriter

_DIM = 40
_BATCH = 20
_CASES = {"long": (1000, 300, 900), "short": (4000, 20, 80)}

Batch = tuple[np.ndarray, np.ndarray, list[str], dict[str, np.ndarray]]


def main() -> None:
    """Makes the batches, measures, prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    print(f"{'sequences':22}{'':20}{'seqshard s':>12}{'MB/s':>8}{'returnn s':>12}{'ratio':>8}")
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for name, (num_seqs, shortest, longest) in _CASES.items():
            case = f"{num_seqs} of {shortest}-{longest}"
            batches = _make_batches(num_seqs, shortest, longest)
            num_bytes = 4 * (_DIM + 1) * sum(int(lens.sum()) for _, lens, _, _ in batches)
            _compare(
                f"{case:22}{'SimpleHDFWriter':20}",
                num_bytes,
                lambda batches=batches: _write(SimpleHDFWriter, batches, "ours.hdf"),
                lambda batches=batches: _write(returnn_hdf.SimpleHDFWriter, batches, "theirs.hdf"),
                args.repeats,
            )
            source = f"{name}.hdf"
            _dump(HDFDatasetWriter, HDFDataset, "ours.hdf", source)
            _compare(
                f"{case:22}{'HDFDatasetWriter':20}",
                num_bytes,
                lambda source=source: _dump(HDFDatasetWriter, HDFDataset, source, "out.hdf"),
                lambda source=source: _dump(
                    returnn_hdf.HDFDatasetWriter, returnn_hdf.HDFDataset, source, "out.hdf"
                ),
                args.repeats,
            )


def _make_batches(num_seqs: int, shortest: int, longest: int) -> list[Batch]:
    rng = np.random.default_rng(1)
    batches = []
    for first in range(0, num_seqs, _BATCH):
        lens = rng.integers(shortest, longest, _BATCH)
        inputs = rng.standard_normal((_BATCH, lens.max(), _DIM), np.float32)
        classes = rng.integers(0, 600, (_BATCH, lens.max()), np.int32)
        tags = [f"corpus/recording/{first + i}" for i in range(_BATCH)]
        batches.append((inputs, lens, tags, {"classes": classes}))
    return batches


def _write(writer_class: type, batches: list[Batch], path: str) -> None:
    if os.path.exists(path):
        os.remove(path)
    with writer_class(path, dim=_DIM) as writer:
        for batch in batches:
            writer.insert_batch(*batch)


def _dump(writer_class: type, dataset_class: type, source: str, path: str) -> None:
    dataset = dataset_class(files=[source])
    dataset.initialize()
    dataset.labels = {}
    writer = writer_class(path)
    writer.dump_from_dataset(dataset, use_progress_bar=False)
    writer.close()


def _compare(
    title: str, num_bytes: int, ours: Callable[[], None], theirs: Callable[[], None], repeats: int
) -> None:
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for run, into in zip((ours, theirs), seconds, strict=True):
            with contextlib.redirect_stdout(io.StringIO()):
                start = time.perf_counter()
                run()
                into.append(time.perf_counter() - start)
    mine, other = map(statistics.median, seconds)
    print(f"{title}{mine:12.3f}{num_bytes / mine / 1e6:8.0f}{other:12.3f}{other / mine:8.1f}")


if __name__ == "__main__":
    main()
