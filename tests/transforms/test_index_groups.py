"""Files that are indexed together, as thousands of small ones are."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from seqshard.io.columns import batch
from seqshard.io.config import load_corpus
from seqshard.pipelines import build as module
from seqshard.transforms import index_sources
from seqshard.transforms.index_sources import merge_small

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "examples" / "demo.toml"


def rows(first, count):
    return batch({"row": np.arange(first, first + count, dtype=np.int64)})


def test_small_batches_of_one_stream_come_together(monkeypatch):
    monkeypatch.setattr(index_sources, "BATCH_ROWS", 10)
    batches = [("a", rows(0, 4)), ("a", rows(4, 6)), ("a", rows(10, 1)), ("b", rows(11, 1))]
    merged = [part.column("row").to_pylist() for part in merge_small(iter(batches))]
    assert merged == [list(range(10)), [10], [11]]


def test_a_large_batch_stays_alone(monkeypatch):
    monkeypatch.setattr(index_sources, "BATCH_ROWS", 10)
    batches = [("a", rows(0, 2)), ("a", rows(2, 50)), ("a", rows(52, 3))]
    assert [part.num_rows for part in merge_small(iter(batches))] == [2, 50, 3]


def test_no_batches_are_none():
    assert list(merge_small(iter([]))) == []


def test_groups_do_not_matter(build_demo, same_bytes, tmp_path, monkeypatch):
    """One group, whose files are of all streams, gives the bytes of a group per file."""
    expected = build_demo("--num_shards=5", "--seq_ordering=random:3")
    monkeypatch.setattr(module, "MAX_INDEX_GROUPS", 1)
    output = tmp_path / "out"
    args = [f"--config={CONFIG}", f"--output={output}", "--num_shards=5"]
    assert module.main([*args, "--seq_ordering=random:3"]) == 0
    same_bytes(expected, output)


@pytest.mark.parametrize(("num_files", "expected"), [(1, 1), (1024, 1), (1025, 2), (50_000, 49)])
def test_files_per_group(num_files, expected):
    corpus = load_corpus(str(CONFIG))
    many = replace(corpus, sources=corpus.sources[:1] * num_files)
    assert module.files_per_group(many) == expected


def test_a_corpus_of_thousands_of_files_travels_light():
    corpus = load_corpus(str(CONFIG))
    file = corpus.sources[0]
    names = [f"features/part-{i:05d}.cache" for i in range(10_000)]
    sources = tuple(replace(file, ordinal=i, path=n, name=n) for i, n in enumerate(names))
    many = replace(corpus, sources=sources)
    data = pickle.dumps(many)
    assert pickle.loads(data) == many
    assert len(data) < 300_000
