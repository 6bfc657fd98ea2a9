"""The join, next to one of Python dictionaries."""

from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqshard.io.columns import batch
from seqshard.io.config import Corpus, SourceFile
from seqshard.io.records import StreamSpec
from seqshard.transforms.index_sources import DAMAGED_LENGTH, split_buckets
from seqshard.transforms.join_streams import STREAM_COLUMNS, join_streams
from seqshard.transforms.order import parse_ordering

FRAME_BYTES = {"data": 16, "classes": 4, "words": 1}
DEFAULT = parse_ordering("default")


def make_corpus(files_per_stream, segments=None, min_length=0, max_length=None):
    """A corpus of streams with so many files each; nothing of it is on disk."""
    specs = [StreamSpec(name, "hdf") for name in list(FRAME_BYTES)[: len(files_per_stream)]]
    owners = [s for s, n in zip(specs, files_per_stream, strict=True) for _ in range(n)]
    sources = tuple(
        SourceFile(i, spec, f"/corpus/{i}.hdf", f"{i}.hdf") for i, spec in enumerate(owners)
    )
    return Corpus(tuple(specs), sources, "drop", segments, min_length, max_length, "")


def index_rows(ordinal, entries):
    """Index rows of one source, from (tag, length) pairs."""
    number = np.arange(len(entries), dtype=np.int64)
    return batch(
        {
            "tag": pa.array([tag for tag, _ in entries], pa.string()),
            "source": np.full(len(entries), ordinal, np.int32),
            "row": number,
            "position": number * 100 + ordinal,
            "length": np.array([length for _, length in entries], np.int64),
            "num_bytes": number + 1,
            "raw_bytes": -number - 1,
        }
    )


def reference(sources, corpus, keep):
    """What must come out, by dictionaries: {tag: {stream: (source, row, length)}}, and reasons."""
    found = {}
    for ordinal, entries in enumerate(sources):
        name = corpus.sources[ordinal].spec.name
        for row, (tag, length) in enumerate(entries):
            found.setdefault(tag, {}).setdefault(name, []).append((ordinal, row, length))
    rows, reasons = {}, {}
    names = [spec.name for spec in corpus.streams]
    longest = float("inf") if corpus.max_length is None else corpus.max_length
    for tag, streams in found.items():
        if keep is not None and tag not in keep:
            reasons[tag] = "segments"
        elif any(places[0][2] == DAMAGED_LENGTH for places in streams.values()):
            reasons[tag] = "damaged"
        elif any(len(streams.get(name, [])) != 1 for name in names):
            wrong = next(name for name in names if len(streams.get(name, [])) != 1)
            reasons[tag] = "doubled" if wrong in streams else "missing"
        elif not corpus.min_length <= streams[names[0]][0][2] <= longest:
            reasons[tag] = "length"
        else:
            rows[tag] = {name: streams[name][0] for name in names}
    return rows, reasons


def kind_of(reason):
    for words, kind in [
        ("not in the segment list", "segments"),
        ("missing in this stream", "missing"),
        ("times in this stream", "doubled"),
        ("frames are outside", "length"),
    ]:
        if words in reason:
            return kind
    raise AssertionError(reason)


tags = st.sampled_from([f"corpus/ä-{i}" for i in range(12)])
lengths = st.one_of(st.integers(0, 9), st.just(DAMAGED_LENGTH))
entries = st.lists(st.tuples(tags, lengths), max_size=14)


@st.composite
def corpora(draw):
    files = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    sources = [draw(entries) for _ in range(sum(files))]
    keep = draw(st.none() | st.sets(tags))
    low = draw(st.integers(0, 3))
    high = draw(st.none() | st.integers(low, 9))
    return files, sources, keep, low, high


@given(case=corpora(), random=st.randoms(use_true_random=False))
@settings(max_examples=200)
def test_join_equals_one_of_dictionaries(case, random, tmp_path_factory):
    files, sources, keep, low, high = case
    segments = None
    if keep is not None:
        path = tmp_path_factory.mktemp("segments") / "keep.txt"
        path.write_text("".join(f"{tag}\n" for tag in sorted(keep)))
        segments = str(path)
    corpus = make_corpus(files, segments, low, high)
    batches = [index_rows(i, entries) for i, entries in enumerate(sources)]
    # Batches arrive in any order, and a source may come in several.
    pieces = [p for b in batches for p in (b.slice(0, 3), b.slice(3))]
    random.shuffle(pieces)
    result = join_streams(pieces, corpus, FRAME_BYTES, DEFAULT)

    rows, reasons = reference(sources, corpus, keep)
    assert Counter(result.rows.column("tag").to_pylist()) == Counter(list(rows))
    for row in result.rows.to_pylist():
        payload = 0
        for name, (ordinal, place, length) in rows[row["tag"]].items():
            expected = (ordinal, place * 100 + ordinal, length, place + 1, -place - 1)
            assert tuple(row[f"{column}.{name}"] for column in STREAM_COLUMNS) == expected
            payload += length * FRAME_BYTES[name]
        assert row["payload"] == payload
    listed = {r.tag: kind_of(r.reason) for r in (*result.rejected, *result.problems)}
    assert len(listed) == len(result.rejected) + len(result.problems)
    # Damaged sequences are listed by the survey, not again by the join.
    assert listed == {tag: kind for tag, kind in reasons.items() if kind != "damaged"}
    assert {kind_of(r.reason) for r in result.problems} <= {"missing", "doubled"}
    assert {kind_of(r.reason) for r in result.rejected} <= {"segments", "length"}


def test_rows_and_keys_do_not_depend_on_the_order_of_arrival():
    corpus = make_corpus([2, 1])
    sources = [[("a", 1), ("b", 2)], [("c", 3)], [("c", 3), ("b", 2), ("a", 1)]]
    batches = [index_rows(i, entries) for i, entries in enumerate(sources)]
    first = join_streams(batches, corpus, FRAME_BYTES, DEFAULT).rows
    second = join_streams(batches[::-1], corpus, FRAME_BYTES, DEFAULT).rows
    assert first.equals(second)
    assert first.schema.names[:1] == ["tag"]
    assert first.column("tie").to_pylist() == [0, 1, 1 << 40]


def test_messages_name_streams_and_files():
    corpus = make_corpus([2, 1])
    sources = [[("a", 1), ("b", 2)], [("b", 3)], [("b", 2)]]
    batches = [index_rows(i, entries) for i, entries in enumerate(sources)]
    missing, doubled = sorted(
        join_streams(batches, corpus, FRAME_BYTES, DEFAULT).problems, key=lambda r: r.tag
    )
    assert (missing.tag, missing.stream, missing.source) == ("a", "classes", "0.hdf")
    assert missing.reason == "missing in this stream, but in stream 'data': 0.hdf"
    assert (doubled.tag, doubled.stream, doubled.source) == ("b", "data", "0.hdf")
    assert doubled.reason == "2 times in this stream: 0.hdf, 1.hdf"


def test_filtered_sequences_say_why():
    corpus = make_corpus([1], min_length=2, max_length=4)
    rows = index_rows(0, [("short", 1), ("good", 2), ("long", 5)])
    result = join_streams([rows], corpus, FRAME_BYTES, DEFAULT)
    assert {r.tag: r.reason for r in result.rejected} == {
        "short": "1 frames are outside min_length 2 and max_length 4",
        "long": "5 frames are outside min_length 2 and max_length 4",
    }
    assert result.rows.column("tag").to_pylist() == ["good"]


@pytest.mark.parametrize("batches", [[], [index_rows(0, [])]])
def test_a_bucket_may_be_empty(batches):
    result = join_streams(batches, make_corpus([1, 1]), FRAME_BYTES, DEFAULT)
    assert result.rows.num_rows == 0
    assert "length.classes" in result.rows.schema.names
    assert result.rejected == result.problems == ()


def test_a_large_file_that_is_named_twice():
    # A search over all rows for each of the tags would take minutes.
    corpus = make_corpus([2])
    many = [(f"seq-{i}", 1) for i in range(20_000)]
    batches = [index_rows(0, many), index_rows(1, many)]
    problems = join_streams(batches, corpus, FRAME_BYTES, DEFAULT).problems
    assert len(problems) == len(many)
    assert problems[0].reason == "2 times in this stream: 0.hdf, 1.hdf"


@given(st.lists(st.text(max_size=5), max_size=30), st.integers(1, 9))
def test_buckets_are_a_partition_in_which_equal_tags_meet(names, num_buckets):
    rows = index_rows(0, [(name, 1) for name in names])
    parts = list(split_buckets(rows, num_buckets))
    seen = {}
    for bucket, part in parts:
        assert 0 <= bucket < num_buckets
        assert part.column("row").to_pylist() == sorted(part.column("row").to_pylist())
        for tag in part.column("tag").to_pylist():
            assert seen.setdefault(tag, bucket) == bucket
    assert sorted(row for _, part in parts for row in part.column("row").to_pylist()) == list(
        range(len(names))
    )
    assert parts
