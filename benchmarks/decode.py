"""Decoding of Sprint archives next to `returnn.sprint.cache`, per payload type.

    python benchmarks/decode.py [--num_seqs=100] [--num_frames=500] [--repeats=5]

Both sides read the same archives from the page cache and leave one array per sequence with its
final element type: features copied out of the file, alignments as classes by state tying. Times
are medians over the repeats; opening the archive is not part of them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable

import numpy as np
from returnn.sprint.cache import AllophoneLabeling, FileArchive

from seqshard.io.records import StreamSpec
from seqshard.io.sources import Source, open_source
from seqshard.io.sprint.alignment import Alignment
from seqshard.io.sprint.writer import ArchiveWriter, hard_alignment

_DIM = 40
_PHONEMES = 40
_STATES = 3


def main() -> None:
    """Makes the archives, measures, prints one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num_seqs", type=int, default=100)
    parser.add_argument("--num_frames", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    warnings.simplefilter("ignore", ResourceWarning)  # RETURNN does not close label files
    with tempfile.TemporaryDirectory() as folder:
        files = _write_labels(folder)
        print(f"{args.num_seqs} sequences of {args.num_frames} frames, µs per frame, medians")
        print(f"{'payload':34}{'seqshard':>10}{'returnn':>10}{'ratio':>8}")
        for name, make in _PAYLOADS.items():
            for compressed in (False, True):
                path = os.path.join(folder, f"{name}.{compressed}.cache")
                with ArchiveWriter(path, compressed=compressed) as writer:
                    for number in range(args.num_seqs):
                        make(writer, f"corpus/{number}", args.num_frames)
                ours = _time(_our_reader(path, name, files), args.repeats)
                theirs = _time(_returnn_reader(path, name, files), args.repeats)
                scale = 1e6 / (args.num_seqs * args.num_frames)
                title = f"{name}{', compressed' if compressed else ''}"
                print(f"{title:34}{ours * scale:10.4f}{theirs * scale:10.3f}{theirs / ours:8.0f}")


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


def _time(read: Callable[[], list[np.ndarray]], repeats: int) -> float:
    """Median seconds of a call."""
    read()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        read()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


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
    writer.add_alignment(name, _weighted(hard))


def _weighted(hard: Alignment) -> Alignment:
    weight = np.full(len(hard), 0.5)
    return Alignment(
        hard.time, hard.label, weight, hard.emission, hard.packet_offset, hard.packet_times, None
    )


_PAYLOADS: dict[str, Callable[[ArchiveWriter, str, int], None]] = {
    "features f32, 40 dimensions": _make_features,
    "run-length alignment": _make_hard,
    "weighted alignment": _make_weighted,
}


if __name__ == "__main__":
    main()
