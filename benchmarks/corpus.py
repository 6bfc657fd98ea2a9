"""A synthetic Sprint corpus of any size, written by numpy at the speed of the disk."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

DIM = 40
NUM_PHONES = 201
START, END = b"\x55\xaa\x55\xaa", b"\xaa\x55\xaa\x55"
FRAME = np.dtype([("n", "<u4"), ("v", "<f4", (DIM,)), ("t", "<f8", (2,))])


@dataclass(frozen=True)
class SprintCorpus:
    """Files of a synthetic corpus.

    Attributes:
        folder: where everything is.
        config: the TOML file for a build.
        archives: all archives.
        num_seqs, num_bytes: in total.
    """

    folder: Path
    config: Path
    archives: tuple[Path, ...]
    num_seqs: int
    num_bytes: int


def make_corpus(
    folder: Path,
    num_bytes: int,
    num_archives: int = 8,
    seed: int = 1,
    mean_frames: int = 600,
    first_share: float | None = None,
) -> SprintCorpus:
    """Writes feature archives of about `num_bytes` in all, and alignments for the same sequences.

    Sequences have frames of 10 ms; values are normal random numbers.

    Args:
        folder: created.
        num_bytes: in all.
        num_archives: of features, and as many of alignments.
        seed: of all random numbers.
        mean_frames: average length of a sequence.
        first_share: of the sequences that the first archive gets; None for equal shares.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    num_seqs = max(num_archives, num_bytes // (mean_frames * FRAME.itemsize))
    lengths = np.clip(rng.gamma(4, mean_frames / 4, num_seqs), 20, 4000).astype(int)
    pool = np.zeros(int(lengths.max()) * 8, FRAME)
    pool["n"] = DIM
    pool["v"] = rng.standard_normal((len(pool), DIM), np.float32)
    pool["t"] = np.arange(len(pool))[:, None] * 0.01 + [0.0, 0.025]
    bounds = [part * num_seqs // num_archives for part in range(num_archives + 1)]
    if first_share is not None:
        bounds[1:] = np.linspace(num_seqs * first_share, num_seqs, num_archives).astype(int)
    archives = []
    for part in range(num_archives):
        numbers = range(bounds[part], bounds[part + 1])
        features = {}
        alignments = {}
        for i in numbers:
            first = int(rng.integers(0, len(pool) - lengths[i]))
            features[f"corpus/rec-{i:07d}/1"] = _feature_payload(pool[first : first + lengths[i]])
            alignments[f"corpus/rec-{i:07d}/1"] = _alignment_payload(rng, int(lengths[i]))
        for kind, payloads in (("features", features), ("alignment", alignments)):
            archives.append(folder / f"{kind}.{part}.cache")
            _write_archive(archives[-1], payloads)
    config = _write_config(folder)
    total = sum(path.stat().st_size for path in archives)
    return SprintCorpus(folder, config, tuple(archives), num_seqs, total)


def _feature_payload(frames: np.ndarray) -> list[bytes | memoryview]:
    head = struct.pack("<I10sI", 10, b"vector-f32", len(frames))
    return [head, memoryview(frames).cast("B")]


def _alignment_payload(rng: np.random.Generator, num_frames: int) -> list[bytes]:
    """Runs of one state each, about 9 frames long, as RASR's writer would code them."""
    counts = rng.integers(3, 16, num_frames // 3 + 1)
    counts = counts[: int(np.searchsorted(np.cumsum(counts), num_frames)) + 1]
    counts[-1] -= counts.sum() - num_frames
    counts = counts[counts > 0]
    runs = np.zeros(len(counts), np.dtype([("c", "i1"), ("label", "<u4")]))
    runs["c"] = -counts
    phones = rng.integers(0, NUM_PHONES, len(counts)).astype(np.uint32)
    runs["label"] = phones + (rng.integers(0, 3, len(counts)).astype(np.uint32) << np.uint32(26))
    head = struct.pack("<I14sI8sI", 14, b"flow-alignment", 1, b"ALIGNRLE", num_frames)
    return [head, runs.tobytes(), struct.pack("<dd", 0.0, num_frames * 0.01)]


def _write_archive(path: Path, payloads: dict[str, list[bytes | memoryview]]) -> None:
    table = []
    with open(path, "wb", buffering=1 << 20) as file:
        file.write(b"SP_ARC1\0\x01")
        for name, parts in payloads.items():
            raw = name.encode()
            size = sum(map(len, parts))
            file.write(START + struct.pack("<I", len(raw)) + raw)
            table.append((raw, file.tell(), size))
            file.write(struct.pack("<III", size, 0, 0))
            file.writelines(parts)
            file.write(END)
        begin = file.tell()
        file.write(struct.pack("<I", len(table)))
        for raw, position, size in table:
            file.write(struct.pack("<I", len(raw)) + raw + struct.pack("<QII", position, size, 0))
        holes = file.tell()
        file.write(struct.pack("<IQQ", 0, holes, begin))


def _write_config(folder: Path) -> Path:
    phones = [f"p{i}{{#+#}}" for i in range(NUM_PHONES - 1)] + ["[SILENCE]{#+#}@i@f"]
    (folder / "allophones.txt").write_text("".join(f"{phone}\n" for phone in phones))
    states = [f"{phone}.{state}" for phone in phones for state in range(3)]
    tying = "".join(f"{state} {i}\n" for i, state in enumerate(states))
    (folder / "state-tying.txt").write_text(tying)
    config = folder / "corpus.toml"
    config.write_text(
        '[streams.data]\nsource = "sprint-features"\nfiles = ["features.*.cache"]\n'
        '[streams.classes]\nsource = "sprint-alignment"\nfiles = ["alignment.*.cache"]\n'
        'allophones = "allophones.txt"\nstate_tying = "state-tying.txt"\n'
    )
    return config
