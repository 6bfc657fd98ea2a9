"""Shards in the NextGen layout: RETURNN's parsers read them, and equal content is equal bytes."""

from __future__ import annotations

import time

import h5py
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from returnn.datasets.hdf import NextGenHDFDataset as Oracle

from seqshard.datasets import NextGenHDFDataset, SiameseHDFDataset
from seqshard.io import shards, storage
from seqshard.io.columns import batch, column
from seqshard.io.config import SourceFile
from seqshard.io.errors import PlanError
from seqshard.io.hdf.nextgen_layout import check_streams, encode_runs, link_names
from seqshard.io.hdf.nextgen_source import NextGenSource
from seqshard.io.hdf.source import HdfSource
from seqshard.io.manifest import ArrayInfo, shard_name
from seqshard.io.receipts import Staging, hash_file
from seqshard.io.records import Layout, StreamFormat, StreamSpec
from seqshard.io.shard_layouts import open_shard
from seqshard.io.shards import ShardJob, digest_rows, write_shard

LENGTHS = [5, 0, 30, 1, 12, 7, 0, 3]
TAGS = [f"corpus/ä-{i}" if i % 3 else f"seq-{i}" for i in range(len(LENGTHS))]
LABELS = tuple(f"wörd-{i}" for i in range(9))
STREAMS = {
    "data": StreamFormat("float32", 4, 2, False, None, (4,)),
    "classes": StreamFormat("int32", 9, 1, True, LABELS),
    "states": StreamFormat("int16", 12001, 1, True),
    "wide": StreamFormat("int8", 3, 2, False, ("a", "b", "c"), (3,)),
    "nothing": StreamFormat("float64", 0, 2, False, None, (0,)),
}


NEXTGEN = Layout("nextgen")


class Corpus:
    """Sources in RETURNN's layout, what is in them, and the rows of a shard in another order."""

    def __init__(self, folder):
        rng = np.random.default_rng(3)
        order = rng.permutation(len(TAGS))
        columns, sources = {"tag": pa.array([TAGS[i] for i in order], pa.string())}, []
        self.arrays = {}
        for ordinal, (name, stream) in enumerate(STREAMS.items()):
            shapes = [(n, *stream.shape) for n in LENGTHS]
            arrays = [rng.integers(0, 9, shape).astype(stream.dtype) for shape in shapes]
            self.arrays[name] = dict(zip(TAGS, arrays, strict=True))
            path = str(folder / f"{name}.hdf")
            lengths = {name: np.array(LENGTHS)}
            tags = [tag.encode() for tag in TAGS]
            with open_shard(Layout(), path, {name: stream}, lengths, tags) as file:
                block = file.buffer(name, slice(0, len(TAGS)))
                block[:] = np.concatenate(arrays).reshape(-1).view(np.uint8)
                file.write(name, slice(0, len(TAGS)), block)
                file.finish()
            sources.append(SourceFile(ordinal, StreamSpec(name, "hdf", name), path, name))
            with HdfSource(path, name) as source:
                index = source.index()
            columns[f"source.{name}"] = np.full(len(TAGS), ordinal, np.int32)
            for field in ("position", "length", "num_bytes", "raw_bytes"):
                columns[f"{field}.{name}"] = getattr(index, field)[order]
        self.tags = [TAGS[i] for i in order]
        self.rows, self.sources = batch(columns), tuple(sources)

    def write(self, output):
        staging = Staging(str(output), "plan", "stamp")
        storage.make_folder(staging.folder)
        job = ShardJob(self.sources, STREAMS, staging, 3, layout=NEXTGEN)
        receipt = write_shard(job, 1, self.rows)
        return storage.join(str(output), shard_name(1, 3)), receipt, staging


@pytest.fixture
def corpus(tmp_path):
    return Corpus(tmp_path)


@pytest.mark.parametrize("stream", STREAMS)
def test_returnns_parsers_read_what_went_in(stream, corpus, tmp_path):
    path, _, _ = corpus.write(tmp_path / "out")
    kind = STREAMS[stream]
    with h5py.File(path) as file:
        names = [name.decode() for name in file["seq_names"]]
        assert names == corpus.tags
        group = file[f"streams/{stream}"]
        inner = [name.replace("/", "\\") for name in names]
        parser = Oracle.parsers[group.attrs["parser"]](inner, group)
        assert parser.num_features == kind.dim
        assert parser.feature_type == (1 if kind.sparse else 2)
        assert parser.get_dtype() == kind.dtype
        for name, link in zip(names, inner, strict=True):
            np.testing.assert_array_equal(parser.get_data(link), corpus.arrays[stream][name])
            assert parser.get_seq_length(link) == len(corpus.arrays[stream][name])


def test_our_source_reads_the_same_formats(corpus, tmp_path):
    path, _, _ = corpus.write(tmp_path / "out")
    for name, kind in STREAMS.items():
        with NextGenSource(path, name) as source:
            index = source.index()
        assert index.format == kind
        assert index.tag.to_pylist() == corpus.tags
        assert not index.damaged


def test_our_dataset_reads_all_streams(corpus, tmp_path):
    path, _, _ = corpus.write(tmp_path / "out")
    dataset = NextGenHDFDataset("data", [path])
    dataset.initialize()
    dataset.init_seq_order(epoch=1)
    assert dataset.num_outputs["states"] == [12001, 1]
    for index, tag in enumerate(corpus.tags):
        dataset.load_seqs(index, index + 1)
        assert dataset.get_tag(index) == tag
        for stream in STREAMS:
            np.testing.assert_array_equal(
                dataset.get_data(index, stream), corpus.arrays[stream][tag]
            )


def test_siamese_datasets_open_it(corpus, tmp_path):
    from returnn.datasets.hdf import SiameseHDFDataset as SiameseOracle

    path, _, _ = corpus.write(tmp_path / "out")
    theirs = SiameseOracle("data", seq_label_stream="classes", files=[path])
    ours = SiameseHDFDataset("data", seq_label_stream="classes", files=[path])
    assert ours.all_seq_names == theirs.all_seq_names == corpus.tags
    assert ours.num_outputs == theirs.num_outputs


def test_receipt_and_index(corpus, tmp_path):
    path, receipt, staging = corpus.write(tmp_path / "out")
    info = receipt.info
    assert (info.xxh3_128, info.file_bytes) == (hash_file(path), storage.stamp(path).num_bytes)
    assert info.arrays == {n: ArrayInfo(None, (sum(LENGTHS), *s.shape)) for n, s in STREAMS.items()}
    rows = staging.load(1)[1]
    for name, kind in STREAMS.items():
        frames = np.concatenate([corpus.arrays[name][tag] for tag in corpus.tags])
        start, length = column(rows, f"start.{name}"), column(rows, f"length.{name}")
        sizes = length.astype(np.int64) * kind.frame_bytes
        data = frames.reshape(-1).view(np.uint8)
        digests = digest_rows(data, start * kind.frame_bytes, sizes)
        np.testing.assert_array_equal(column(rows, f"digest.{name}"), digests)
    assert receipt.statistics["classes"].counts.sum() == sum(LENGTHS)


def test_a_good_shard_is_kept(corpus, tmp_path):
    path, receipt, _ = corpus.write(tmp_path / "out")
    before = storage.stamp(path)
    assert corpus.write(tmp_path / "out")[1].info == receipt.info
    assert storage.stamp(path) == before


@pytest.mark.parametrize("block_bytes", [1, 100, 1 << 20])
def test_blocks_of_any_size_give_the_same_file(block_bytes, corpus, tmp_path, monkeypatch):
    _, receipt, _ = corpus.write(tmp_path / "out")
    monkeypatch.setattr(shards, "BLOCK_BYTES", block_bytes)
    assert corpus.write(tmp_path / "other")[1].info == receipt.info


def test_time_does_not_matter(corpus, tmp_path):
    _, receipt, _ = corpus.write(tmp_path / "out")
    time.sleep(1.1)  # HDF5 counts in seconds
    assert corpus.write(tmp_path / "other")[1].info == receipt.info


WRONG = {
    "cube": StreamFormat("float32", 3, 3, False, None, (2, 3)),
    "wave": StreamFormat("float32", 1, 1, False),
    "flags": StreamFormat("bool", 1, 1, False),
    "dim": StreamFormat("float32", 5, 2, False, None, (4,)),
    "axes": StreamFormat("int32", 9, 2, True),
    "labels": StreamFormat("int32", 9, 1, True, ("a", "b")),
}


@pytest.mark.parametrize("name", WRONG)
def test_streams_that_the_layout_cannot_hold(name, tmp_path):
    with pytest.raises(PlanError, match=f"stream '{name}' cannot be stored in the NextGen layout"):
        check_streams({"data": STREAMS["data"], name: WRONG[name]})
    path = str(tmp_path / "x.hdf")
    with pytest.raises(PlanError, match="cannot be stored"):
        open_shard(NEXTGEN, path, {name: WRONG[name]}, {name: np.zeros(0, int)}, [])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("tags", "match"),
    [
        ([b"a/b", b"c", b"a\\b"], r"entry 'a\\\\b': two tags have the same name.*found 'a/b'"),
        ([b"a", b""], "entry '': this tag cannot be the name"),
        ([b"."], r"entry '\.': this tag cannot be the name"),
    ],
)
def test_tags_that_the_layout_cannot_hold(tags, match):
    with pytest.raises(PlanError, match=match):
        link_names(tags)


def test_lengths_that_the_layout_cannot_hold(tmp_path):
    lengths = {"data": np.array([2**31])}
    with pytest.raises(PlanError, match="a sequence is too long"):
        open_shard(NEXTGEN, str(tmp_path / "x.hdf"), {"data": STREAMS["data"]}, lengths, [b"a"])


def test_returnns_parser_reads_runs(tmp_path):
    path, kind = str(tmp_path / "x.hdf"), STREAMS["classes"]
    seqs = {"a/b": [3, 3, 3, 0, 8, 8], "empty": [], "c": [5]}
    lengths = np.array([len(values) for values in seqs.values()])
    tags = [tag.encode() for tag in seqs]
    layout = Layout("nextgen", ("x",))
    with open_shard(layout, path, {"x": kind}, {"x": lengths}, tags) as file:
        block = file.buffer("x", slice(0, 3))
        block.view(kind.dtype)[:] = np.concatenate(list(seqs.values()))
        file.write("x", slice(0, 3), block)
        file.finish()
    with h5py.File(path) as file:
        assert file["streams/x/data/a\\b"][...].tolist() == [[3, 3], [0, 1], [8, 2]]
        group = file["streams/x"]
        parser = Oracle.parsers[group.attrs["parser"]](["a\\b", "c"], group)
        assert (parser.num_features, parser.get_dtype()) == (9, "int32")
        assert parser.get_data("a\\b")[::2].tolist() == seqs["a/b"]
        assert parser.get_data("a\\b")[1::2].tolist() == [0, 0, 1, 1, 0, 1]
        assert parser.get_data("c").tolist() == [5, 1]
    with NextGenSource(path, "x") as source:
        assert source.index().length.tolist() == [12, 0, 2]
        assert source.index().format.labels == LABELS


@given(st.lists(st.integers(0, 3), max_size=30))
def test_runs_expand_to_what_they_were(classes):
    runs = encode_runs(np.array(classes, np.int16))
    assert runs.dtype == np.int32
    assert np.repeat(runs[:, 0], runs[:, 1]).tolist() == classes
    assert (runs[:, 1] > 0).all()
    assert (np.diff(runs[:, 0]) != 0).all()


@pytest.mark.parametrize(
    ("name", "stream"),
    [("data", STREAMS["data"]), ("large", StreamFormat("int64", 9, 1, True))],
)
def test_streams_that_cannot_be_runs(name, stream):
    with pytest.raises(PlanError, match=f"stream '{name}' cannot be stored as a segment align"):
        check_streams({name: stream}, [name])


@settings(max_examples=40, deadline=None)
@given(
    st.dictionaries(
        st.text(min_size=1, max_size=8).filter(lambda t: "\0" not in t and t != "."),
        st.integers(0, 6),
        max_size=9,
    ),
    st.integers(1, 4),
)
def test_any_tags_and_lengths_come_back(tmp_path_factory, seqs, block_rows):
    try:
        tags = [tag.encode() for tag in seqs]
        link_names(tags)
    except (UnicodeEncodeError, PlanError):
        return
    path = str(tmp_path_factory.mktemp("any") / "x.hdf")
    lengths = np.array(list(seqs.values()), np.int64)
    kind = STREAMS["states"]
    frames = np.arange(lengths.sum(), dtype=kind.dtype)
    ends = np.cumsum(lengths)
    with open_shard(NEXTGEN, path, {"x": kind}, {"x": lengths}, tags) as file:
        for first in range(0, len(tags), block_rows):
            rows = slice(first, min(first + block_rows, len(tags)))
            block = file.buffer("x", rows)
            begin = int(ends[first] - lengths[first])
            block[:] = frames[begin : int(ends[rows.stop - 1])].view(np.uint8)
            file.write("x", rows, block)
        assert file.finish() == (storage.stamp(path).num_bytes, hash_file(path))
    with NextGenSource(path, "x") as source:
        index = source.index()
        out = np.zeros_like(frames)
        columns = (index.position, index.length, index.num_bytes, index.raw_bytes)
        source.read_many(*columns, out, ends - lengths)
    assert index.tag.to_pylist() == list(seqs)
    assert index.length.tolist() == lengths.tolist()
    np.testing.assert_array_equal(out, frames)
