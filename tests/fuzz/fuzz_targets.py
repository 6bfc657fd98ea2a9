"""What is fuzzed, and what must hold for any bytes. See fuzz.py and test_fuzz.py.

A target reads its input as the program does. It may raise `SeqshardError` and nothing else, and
what it allocates is bounded by its input and its results, never by a number in a header.
"""

from __future__ import annotations

import contextlib
import os
import tracemalloc
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy as np
import xxhash

from seqshard.io.errors import SeqshardError, SourceFormatError
from seqshard.io.index import IndexFile
from seqshard.io.manifest import load_manifest
from seqshard.io.receipts import Staging
from seqshard.io.records import StreamSpec
from seqshard.io.sources import Source
from seqshard.io.sprint import allophones, labels
from seqshard.io.sprint.alignment import decode_alignment
from seqshard.io.sprint.archive import Archive
from seqshard.io.sprint.bundle import read_bundle
from seqshard.io.sprint.labels import LabelReader
from seqshard.io.sprint.messages import parse_message
from seqshard.io.sprint.packets import Block
from seqshard.io.sprint.payload import decode_blocks, decode_matrix
from seqshard.io.sprint.source import AlignmentSource, FeatureSource, load_classes

DATA = Path(__file__).parents[1] / "data" / "rasr"
RECOVER = (False, True, "rasr", "force")
STREAMS = ("data", "classes")

# Deflate expands 1032-fold; a run of 128 items in 5 bytes takes several columns of 8 bytes.
_ALLOWED_PER_INPUT = 1100
_ALLOWED_PER_RESULT = 64
_ALLOWED_ALWAYS = 1 << 20

Target = Callable[[bytes, Path], int]
# Where its stored bytes begin and end, and its payload.
Entry = tuple[int, int, bytes]


class Violation(AssertionError):
    """An input for which something does not hold."""


def check(target: Target, data: bytes, folder: Path, measured: bool = True) -> None:
    """Runs a target on one input.

    Args:
        folder: where it may write files.
        measured: whether to measure what it allocates, which takes several times as long.

    Raises:
        Violation: if it allocates too much, or finds that results are wrong.
        Exception: any that is no SeqshardError, as it came.
    """
    if not measured:
        _run(target, data, folder)
        return
    tracemalloc.start(1)
    try:
        result = _run(target, data, folder)
        allowed = _ALLOWED_ALWAYS + _ALLOWED_PER_INPUT * len(data) + _ALLOWED_PER_RESULT * result
        if tracemalloc.get_traced_memory()[1] <= allowed:
            return
        # Once more, without modules that are imported and tables that are made at first use.
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        _run(target, data, folder)
        used = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    if used > allowed:
        raise Violation(f"{used} bytes allocated for {len(data)} bytes, {result} of results")


def _run(target: Target, data: bytes, folder: Path) -> int:
    try:
        return target(data, folder)
    except SeqshardError as error:
        str(error)
        return 0


def read_archive(data: bytes, folder: Path) -> int:
    """The first byte chooses the options, all others are an archive."""
    options, path = data[0] if data else 0, _write(folder, data[1:])
    recover = RECOVER[options % 4]
    if options & 8:
        return _read_source(_open_source(path, options))
    result = 0
    lenient = bool(options & 4)
    with Archive(
        path, recover=recover, ignore_checksum=lenient, ignore_gzip_trailer=lenient
    ) as archive:
        for entry in range(len(archive)):
            with contextlib.suppress(SeqshardError):
                payload = archive.payload(entry)
                result += len(payload) + _size_of(decode_blocks(payload))
            with contextlib.suppress(SeqshardError):
                archive.attributes(entry)
        for name in archive.names.to_pylist():
            archive.find(name)
        for _, error in archive.lost:
            str(error)
    return result


def read_mutated_archive(data: bytes, folder: Path) -> int:
    """Damages an intact archive as the input says; entries that are not touched stay as they are.

    The input is a choice of options, one of an archive, and edits of four bytes: how, where (two
    bytes), and a value.
    """
    if len(data) < 2:
        return 0
    archives = intact_archives()
    original, entries = archives[data[1] % len(archives)]
    edits = [data[i : i + 4] for i in range(2, len(data) - 3, 4)][:8]
    damaged, touched = _edit(original, edits)
    result = read_archive(data[:1] + damaged, folder) + len(damaged)
    if touched is not None:
        _check_intact(_write(folder, damaged), original, entries, touched)
    return result


def _edit(original: bytes, edits: list[bytes]) -> tuple[bytes, list[int] | None]:
    """The damaged archive, and the positions that differ; None if positions moved."""
    damaged, moved = bytearray(original), False
    for how, low, high, value in edits:
        at = (low | high << 8) % max(len(damaged), 1)
        match how % 8:
            case 0:
                del damaged[at:]
                moved = True
            case 1:
                del damaged[at : at + value]
                moved = True
            case 2:
                damaged[at:at] = bytes([value]) * (1 + how // 8)
                moved = True
            case 3:
                damaged[at : at + 4] = (value * 0x01010101).to_bytes(4, "little")[: len(damaged)]
            case _ if damaged:
                damaged[at] = value
    if moved or len(damaged) != len(original):
        return bytes(damaged), None
    pair = np.frombuffer(damaged, np.uint8) != np.frombuffer(original, np.uint8)
    return bytes(damaged), np.flatnonzero(pair).tolist()


def _check_intact(path: str, original: bytes, entries: list[Entry], touched: list[int]) -> None:
    """Payload damage, and nothing else, must leave all other entries as they are."""
    if not all(any(begin <= at < end for begin, end, _ in entries) for at in touched):
        return
    for recover in (True, "force") if original[8] else (True,):
        with Archive(path, recover=recover) as archive:
            found = dict(zip(archive.table.payload.tolist(), range(len(archive)), strict=True))
            for begin, end, payload in entries:
                is_touched = any(begin <= at < end for at in touched)
                if not is_touched and archive.payload(found[begin]) != payload:
                    raise Violation(f"the entry at {begin} has changed")


@lru_cache
def intact_archives() -> list[tuple[bytes, list[Entry]]]:
    """Small archives of RASR, and their entries."""
    found = []
    for path in sorted(DATA.rglob("*.cache")):
        is_damaged = "robust" in path.parts and path.stem not in ("reference", "removed")
        if is_damaged or path.stat().st_size > 1 << 13:
            continue
        with Archive(str(path)) as archive:
            begin, stored = archive.table.payload.tolist(), archive.table.stored.tolist()
            places = enumerate(zip(begin, stored, strict=True))
            entries = [(at, at + n, bytes(archive.payload(entry))) for entry, (at, n) in places]
        found.append((path.read_bytes(), entries))
    return found


def _open_source(path: str, options: int) -> Source:
    recover = RECOVER[options % 4]
    if options & 4:
        return FeatureSource(path, recover=recover)
    return AlignmentSource(path, _stream("best" if options & 16 else "error"), recover=recover)


def _stream(soft: str) -> StreamSpec:
    folder = DATA / "align"
    files = {"allophones": "allophones.txt", "state_tying": "state-tying.txt"}
    paths = {key: str(folder / name) for key, name in files.items()}
    return StreamSpec("classes", "sprint-alignment", **paths, silence="si", soft=soft)


def _read_source(source: Source) -> int:
    with source:
        index = source.index()
        for _, error in index.damaged:
            str(error)
        if index.format is None:
            return 0
        shape = (int(index.length.sum()), *index.format.shape)
        out = np.empty(shape, index.format.dtype)
        start = np.cumsum(index.length) - index.length
        columns = (index.position, index.length, index.num_bytes, index.raw_bytes)
        try:
            source.read_many(*columns, out, start)
        except SourceFormatError as error:
            if error.position not in index.position.tolist():
                raise Violation(f"the error tells no sequence: {error}") from error
    return out.nbytes


def decode_payload(data: bytes, folder: Path) -> int:
    """Blocks of any data type."""
    with contextlib.suppress(SeqshardError):
        decode_matrix(data)
    return _size_of(decode_blocks(data))


def decode_labels(data: bytes, folder: Path) -> int:
    """An alignment among others, all at once and one by one."""
    classes = load_classes(_stream("best"))
    good = _good_alignment()
    expected = _labels_alone(good, classes)
    alone = _labels_alone(data, classes)
    length = _claimed_length(data) if alone is None else len(alone)
    pieces = [good, data, good]
    size = np.array([len(piece) for piece in pieces])
    lengths = np.array([len(expected), length, len(expected)])
    start = np.cumsum(lengths) - lengths
    out = np.full(int(lengths.sum()), -1, np.int8)

    def fail(row: int, error: SourceFormatError) -> SourceFormatError:
        if row != 1:
            raise Violation(f"the wrong entry is at fault: {row}") from error
        return error

    reader = LabelReader(b"".join(pieces), classes, fail)
    try:
        reader.read(np.cumsum(size) - size, size, lengths, out, start)
    except SeqshardError as error:
        if alone is not None:
            raise Violation(f"only alone it is readable: {error}") from error
        raise
    # Labels are read without the alphabet behind them.
    if alone is None and b"AALPHRLE" not in data:
        raise Violation("only together with others it is readable")
    if alone is not None and not np.array_equal(out, np.concatenate([expected, alone, expected])):
        raise Violation("together the labels are others than alone")
    return out.nbytes


def _labels_alone(data: bytes, classes: labels.Classes) -> np.ndarray | None:
    """The classes of a payload; None if it is damaged."""
    with contextlib.suppress(SeqshardError):
        values, bad = classes.of(*labels.hard_labels(decode_alignment(data), "best"))
        return values if bad < 0 else None
    return None


def _claimed_length(data: bytes) -> int:
    """What the index would say of a payload from its headers; 7 if they do not tell."""
    size, begin = np.array([len(data)]), np.zeros(1, np.int64)
    head = np.frombuffer(data[: labels.HEAD_BYTES].ljust(labels.HEAD_BYTES, b"\0"), np.uint8)
    found = int(labels.measure_heads(head[None], size)[0])
    if found < 0:
        found = int(labels.measure_weighted(data, head[None], begin, size)[0])
    return found if found >= 0 else 7


@lru_cache
def _good_alignment() -> bytes:
    with Archive(str(DATA / "align" / "rle.cache")) as archive:
        return bytes(archive.payload(int(archive.sequences[0])))


def read_bundle_file(data: bytes, folder: Path) -> int:
    """A bundle, relative to itself and to the working directory."""
    path = _write(folder, data, "x.bundle")
    (folder / "a").touch()
    found = []
    for relative_to in ("bundle", "cwd"):
        with contextlib.suppress(SeqshardError):
            found += read_bundle(path, relative_to)
    return sum(map(len, found))


def read_label_files(data: bytes, folder: Path) -> int:
    """Allophones and state tying or phonemes: two texts with a NUL in between."""
    first, _, second = data.partition(b"\0")
    allophones._load.cache_clear()
    names = _write(folder, first, "allophones")
    other = _write(folder, second, "other")
    for option in ("state_tying", "phonemes"):
        with contextlib.suppress(SeqshardError):
            label_map = allophones.load_label_map(names, **{option: other}, silence="si")
            ids = np.arange(-4, 40, dtype=np.int32) * (1 << 24)
            label_map.lookup(ids)
            for label in ids.tolist():
                label_map.describe(label)
    return len(data)


def read_message(data: bytes, folder: Path) -> int:
    """A message of a trainer."""
    parse_message(data)
    return len(data)


def read_manifest(data: bytes, folder: Path) -> int:
    """manifest.json."""
    load_manifest(_write(folder, data, "manifest.json"))
    return len(data)


def read_index(data: bytes, folder: Path) -> int:
    """index.arrow, with all that is read of it."""
    path = _write(folder, data, "index.arrow")
    index = IndexFile(path, STREAMS, 2)
    for shard in range(2):
        for stream in STREAMS:
            index.lengths(shard, stream)
            index.starts(shard, stream)
        index.tag_array(shard)
        index.metadata(shard)
    index.find("demo/1")
    return len(data)


def read_receipt(data: bytes, folder: Path) -> int:
    """A receipt of the shard writer; if the first byte is odd, behind the right hash."""
    staging = Staging(str(folder), "p", "s")
    path = Path(staging.receipt_path(0))
    path.parent.mkdir(parents=True, exist_ok=True)
    digest = xxhash.xxh3_128_digest(data[1:]) if data and data[0] & 1 else b""
    path.write_bytes(digest + data[1:])
    staging.load(0)
    return len(data)


TARGETS: dict[str, Target] = {
    "archive": read_archive,
    "mutated": read_mutated_archive,
    "payload": decode_payload,
    "labels": decode_labels,
    "bundle": read_bundle_file,
    "label_files": read_label_files,
    "message": read_message,
    "manifest": read_manifest,
    "index": read_index,
    "receipt": read_receipt,
}


def _write(folder: Path, data: bytes, name: str = "x.cache") -> str:
    path = folder / name
    # A new file: the last one may still be mapped.
    path.unlink(missing_ok=True)
    path.write_bytes(data)
    return os.fspath(path)


def _size_of(blocks: list[Block]) -> int:
    sizes = (getattr(block.values, "nbytes", 0) for block in blocks)
    return sum(sizes) + sum(block.times.nbytes for block in blocks)
