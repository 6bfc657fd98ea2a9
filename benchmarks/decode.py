"""Decoding of Sprint archives next to `returnn.sprint.cache`, per payload type.

    python benchmarks/decode.py [--num_seqs=100] [--num_frames=500] [--repeats=9] [--save]

Both sides read the same archives from the page cache and leave one array per sequence with its
final element type: features copied out of the file, alignments as classes by state tying. They take
turns; figures are medians of processor time over the repeats, and opening the archive is not part
of them. What zlib needs for compressed entries alone stands beside them.

The other public reader, `i6_core/lib/rasr_cache.py`, is in no package on PyPI: it is not measured.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
from environment import environment
from returnn.sprint.cache import AllophoneLabeling, FileArchive

from seqshard.io.records import StreamSpec
from seqshard.io.sources import Source, open_source
from seqshard.io.sprint.archive import Archive
from seqshard.io.sprint.writer import ArchiveWriter, hard_alignment

RESULT = Path(__file__).with_name("decode.json")
_DIM = 40
_PHONEMES = 40
_STATES = 3
_SOFT = 3


def main() -> None:
    """Makes the archives, measures, prints one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num_seqs", type=int, default=100)
    parser.add_argument("--num_frames", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--save", action="store_true", help=f"write {RESULT.name}")
    args = parser.parse_args()
    warnings.simplefilter("ignore", ResourceWarning)  # RETURNN does not close label files
    rows: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        files = _write_labels(folder)
        print(f"{args.num_seqs} sequences of {args.num_frames} frames, µs per frame, medians")
        print(f"{'payload':42}{'seqshard':>10}{'returnn':>10}{'ratio':>8}{'zlib':>10}")
        for name in _PAYLOADS:
            for compressed in (False, True):
                title = f"{name}{', compressed' if compressed else ''}"
                rows[title] = row = _measure(folder, name, compressed, files, args)
                figures = f"{row['seqshard']:10.4f}{row['returnn']:10.3f}{row['ratio']:8.1f}"
                inflate = f"{row['zlib']:10.4f}" if compressed else ""
                print(f"{title:42}{figures}{inflate}")
    if args.save:
        report = {"unit": "microseconds per frame", "rows": rows}
        report |= environment(["numpy", "returnn"])
        RESULT.write_text(json.dumps(report, indent=1) + "\n")


def _measure(
    folder: str, name: str, compressed: bool, files: dict[str, str], args: argparse.Namespace
) -> dict[str, float]:
    """Microseconds per frame of each reader, and RETURNN's over ours."""
    path = os.path.join(folder, f"{name}.{compressed}.cache")
    with ArchiveWriter(path, compressed=compressed) as writer:
        for number in range(args.num_seqs):
            _PAYLOADS[name](writer, f"corpus/{number}", args.num_frames)
    readers = {
        "seqshard": _our_reader(path, name, files),
        "returnn": _returnn_reader(path, name, files),
    }
    if compressed:
        readers["zlib"] = _zlib_reader(path)
    seconds = _time(readers.values(), args.repeats)
    frames = args.num_seqs * args.num_frames
    row = {key: 1e6 * own / frames for key, own in zip(readers, seconds, strict=True)}
    return row | {"ratio": row["returnn"] / row["seqshard"]}


def _our_reader(path: str, name: str, files: dict[str, str]) -> Callable[[], list[np.ndarray]]:
    kind = "sprint-features" if name.startswith("features") else "sprint-alignment"
    soft = "best" if name.startswith("weighted") else "error"
    labels = {"allophones": files["allophones"], "state_tying": files["state_tying"]}
    source: Source = open_source(StreamSpec("x", kind, **labels, silence="p0", soft=soft), path)
    index = source.index()
    columns = index.position, index.length, index.num_bytes, index.raw_bytes
    start = np.cumsum(index.length) - index.length
    out = np.zeros((int(index.length.sum()), *index.format.shape), index.format.dtype)

    def read() -> list[np.ndarray]:
        source.read_many(*columns, out, start)
        return np.split(out, start[1:])

    return read


def _returnn_reader(path: str, name: str, files: dict[str, str]) -> Callable[[], list[np.ndarray]]:
    archive = FileArchive(path)
    entries = [entry for entry in archive.file_list() if not entry.endswith(".attribs")]
    if name.startswith("features"):
        return lambda: [np.array(archive.read(e, "feat")[1], "float32") for e in entries]
    archive.set_allophones(files["allophones"])
    labeling = AllophoneLabeling("p0", files["allophones"], state_tying_file=files["state_tying"])
    tying = labeling.state_tying_by_allo_state_idx
    if name.startswith("weighted"):

        def read_weighted(entry: str) -> np.ndarray:
            items = archive.read(entry, "align")
            return np.array([tying[a + (s << 26)] for _, a, s, _ in items], "int8")

        return lambda: [read_weighted(entry) for entry in entries]
    return lambda: [
        np.array([tying[a] for _, a, _, _ in archive.read(e, "align_raw")], "int8") for e in entries
    ]


def _zlib_reader(path: str) -> Callable[[], list[bytes]]:
    with Archive(path) as archive:
        entries = archive.sequences
        begin, end = archive.table.payload[entries], (archive.table.payload + archive.table.stored)
        places = zip(begin.tolist(), end[entries].tolist(), strict=True)
        stored = [archive.data[first:last] for first, last in places]
    return lambda: [zlib.decompress(data, wbits=31) for data in stored]


def _time(readers: Iterable[Callable[[], list]], repeats: int) -> list[float]:
    """Median seconds of processor time of a call of each, taking turns."""
    readers = list(readers)
    seconds: list[list[float]] = [[] for _ in readers]
    for turn in range(repeats + 1):
        for read, own in zip(readers, seconds, strict=True):
            start = time.process_time()
            read()
            if turn > 0:  # the first one warms up
                own.append(time.process_time() - start)
    return [statistics.median(own) for own in seconds]


def _write_labels(folder: str) -> dict[str, str]:
    names = [f"p{phoneme}{{#+#}}@i@f" for phoneme in range(_PHONEMES)]
    states = [f"{name}.{state}" for name in names for state in range(_STATES)]
    texts = {
        "allophones": "".join(f"{name}\n" for name in names),
        "state_tying": "".join(f"{state} {label}\n" for label, state in enumerate(states)),
    }
    files = {key: os.path.join(folder, key) for key in texts}
    for key, text in texts.items():
        with open(files[key], "w") as file:
            file.write(text)
    return files


def _make_features(writer: ArchiveWriter, name: str, num_frames: int) -> None:
    rng = np.random.RandomState(len(writer.path))
    writer.add_features(name, rng.randn(num_frames, _DIM).astype("float32"))


def _labels(num_frames: int) -> np.ndarray:
    """Three states per phoneme, each of 1 to 7 frames: what 10 ms frames of speech look like."""
    rng = np.random.RandomState(num_frames)
    state = np.arange(num_frames) % _STATES
    phoneme = np.repeat(rng.randint(_PHONEMES, size=num_frames), _STATES)[:num_frames]
    return np.repeat(phoneme + (state << 26), rng.randint(1, 8, size=num_frames))[:num_frames]


def _make_hard(writer: ArchiveWriter, name: str, num_frames: int) -> None:
    writer.add_alignment(name, hard_alignment(_labels(num_frames)))


def _make_weighted(writer: ArchiveWriter, name: str, num_frames: int) -> None:
    hard = hard_alignment(_labels(num_frames))
    writer.add_alignment(name, replace(hard, weight=np.full(num_frames, 0.5)))


def _make_soft(writer: ArchiveWriter, name: str, num_frames: int) -> None:
    hard = hard_alignment(np.repeat(_labels(num_frames), _SOFT))
    hard.label[1::_SOFT] = 3
    hard.label[2::_SOFT] = 5 + (1 << 26)
    weight = np.tile([0.25, 0.5, 0.125], num_frames)
    writer.add_alignment(name, replace(hard, time=hard.time // _SOFT, weight=weight))


_PAYLOADS: dict[str, Callable[[ArchiveWriter, str, int], None]] = {
    "features f32, 40 dimensions": _make_features,
    "run-length alignment": _make_hard,
    "weighted alignment": _make_weighted,
    "weighted alignment, 3 a frame": _make_soft,
}


if __name__ == "__main__":
    main()
