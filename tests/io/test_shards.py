"""Shards: RETURNN opens them, every byte is accounted for, and damage is dropped exactly."""

import itertools
import os
import resource
import signal
import time

import h5py
import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from returnn.datasets.hdf import HDFDataset

from seqshard.io import shards, storage
from seqshard.io.columns import batch, column
from seqshard.io.config import SourceFile
from seqshard.io.errors import OutputError, PlanError, SourceFormatError
from seqshard.io.hdf.layout import ALIGNMENT, create_skeleton, dataset_name
from seqshard.io.hdf.source import HdfSource
from seqshard.io.index import IndexFile, index_batch, index_schema
from seqshard.io.manifest import shard_name
from seqshard.io.receipts import Staging, decode_receipt, encode_receipt, hash_file
from seqshard.io.records import StreamFormat, StreamSpec
from seqshard.io.shards import ShardJob, digest_rows, split_blocks, write_shard

LENGTHS = [5, 0, 30, 1, 12, 7, 0, 3]
TAGS = [f"corpus/ä-{i}" if i % 3 else f"seq-{i}" for i in range(len(LENGTHS))]
LABELS = tuple(f"wörd-{i}" for i in range(9))
STREAMS = {
    "data": StreamFormat("float32", 4, 2, False, None, (4,)),
    "classes": StreamFormat("int32", 9, 1, True, LABELS, ()),
    "cube": StreamFormat("int16", 3, 3, False, None, (2, 3)),
    "wave": StreamFormat("float64", 1, 1, False, None, ()),
    "nothing": StreamFormat("float32", 0, 2, False, None, (0,)),
}


def make_arrays(name, stream, rng):
    lengths = [max(0, n - (name == "wave")) for n in LENGTHS]
    values = [rng.randint(0, 9, (n, *stream.shape)) for n in lengths]
    if stream.dtype.startswith("float"):
        values = [value + rng.random_sample(value.shape) for value in values]
    return [value.astype(stream.dtype) for value in values]


def write_source(path, key, stream, arrays, **options):
    """One stream in a file of its own."""
    with h5py.File(path, "w") as file:
        name = "inputs" if key == "data" else f"targets/data/{key}"
        file.create_dataset(name, data=np.concatenate(arrays), **options)
        file["seqLengths"] = np.array([[len(a)] for a in arrays], "i4")
        file["seqTags"] = np.array([tag.encode() for tag in TAGS])
        if key != "data":
            file.create_group("targets/size").attrs[key] = [stream.dim, stream.ndim]
        if stream.labels:
            file[f"targets/labels/{key}"] = np.array([s.encode() for s in stream.labels])


class Corpus:
    """Sources of some streams, what is in them, and the rows of a shard in another order."""

    def __init__(self, folder, names=tuple(STREAMS), **options):
        rng = np.random.RandomState(3)
        self.streams = {name: STREAMS[name] for name in names}
        self.arrays = {n: make_arrays(n, s, rng) for n, s in self.streams.items()}
        self.order = rng.permutation(len(TAGS))
        self.tags = [TAGS[i] for i in self.order]
        columns, sources = {"tag": pa.array(self.tags, pa.string())}, []
        for ordinal, (name, stream) in enumerate(self.streams.items()):
            path = os.path.join(folder, f"{name}.hdf")
            write_source(path, name, stream, self.arrays[name], **options)
            spec = StreamSpec(name, "hdf", name)
            sources.append(SourceFile(ordinal, spec, path, f"{name}.hdf"))
            with HdfSource(path, name) as source:
                index = source.index()
                assert index.format == stream
            columns[f"source.{name}"] = np.full(len(TAGS), ordinal, np.int32)
            for field in ("position", "length", "num_bytes", "raw_bytes"):
                columns[f"{field}.{name}"] = getattr(index, field)[self.order]
        self.rows = batch(columns)
        self.sources = tuple(sources)

    def job(self, output, skip_damaged=False):
        storage.make_folder(Staging(str(output), "plan", "stamp").folder)
        staging = Staging(str(output), "plan", "stamp")
        return ShardJob(self.sources, self.streams, staging, 3, skip_damaged)

    def write(self, output, shard=1, **options):
        job = self.job(output, **options)
        receipt = write_shard(job, shard, self.rows)
        return storage.join(str(output), shard_name(shard, 3)), receipt, job.staging

    def damage(self, name, row):
        """Spoils the chunk that holds a sequence; only for sources of one chunk per frame."""
        path = self.sources[list(self.streams).index(name)].path
        first = sum(len(array) for array in self.arrays[name][:row])
        with h5py.File(path) as file:
            place = file[dataset_name(name)].id.get_chunk_info(first).byte_offset
        with open(path, "r+b") as file:
            file.seek(place)
            file.write(b"spoilt")


@pytest.fixture
def corpus(tmp_path):
    return Corpus(tmp_path)


def test_returnn_reads_what_went_in(corpus, tmp_path):
    path, receipt, _ = corpus.write(tmp_path / "out")
    oracle = HDFDataset([path])
    oracle.initialize()
    oracle.init_seq_order(epoch=1)
    oracle.load_seqs(0, oracle.num_seqs)
    assert [oracle.get_tag(i) for i in range(oracle.num_seqs)] == corpus.tags
    assert sorted(oracle.get_data_keys()) == sorted(STREAMS)
    for name, stream in STREAMS.items():
        assert tuple(oracle.num_outputs[name]) == (stream.dim, stream.ndim)
        assert oracle.is_data_sparse(name) == stream.sparse
        for i, row in enumerate(corpus.order):
            expected = corpus.arrays[name][row]
            found = oracle.get_data(i, name)
            assert found.dtype == expected.dtype
            np.testing.assert_array_equal(found, expected)
            assert oracle.get_seq_length(i)[name] == len(expected)
    assert list(oracle.labels["classes"]) == list(LABELS)
    assert receipt.info.num_seqs == len(TAGS)


@pytest.mark.parametrize("names", [("data",), ("classes",), ("wave", "cube"), ("nothing",)])
def test_any_set_of_streams_makes_a_shard(names, tmp_path):
    corpus = Corpus(tmp_path, names)
    path, _, _ = corpus.write(tmp_path / "out")
    for name in names:
        with HdfSource(path, name) as source:
            index = source.index()
            assert index.format == STREAMS[name]
            assert index.tag.to_pylist() == corpus.tags
            assert index.length.tolist() == [len(corpus.arrays[name][i]) for i in corpus.order]


def test_arrays_lie_where_the_receipt_says(corpus, tmp_path):
    path, receipt, _ = corpus.write(tmp_path / "out")
    data = storage.read_bytes(path)
    info = receipt.info
    assert info.file_bytes == len(data)
    assert info.xxh3_128 == xxhash.xxh3_128_hexdigest(data)
    assert info.num_bytes == sum(a.nbytes for arrays in corpus.arrays.values() for a in arrays)
    for name, array in info.arrays.items():
        expected = np.concatenate([corpus.arrays[name][i] for i in corpus.order])
        assert array.shape == expected.shape
        if expected.size:
            assert array.offset % ALIGNMENT == 0
            found = np.frombuffer(data, expected.dtype, expected.size, array.offset)
            np.testing.assert_array_equal(found.reshape(expected.shape), expected)


def test_digests_are_those_of_the_payload(corpus, tmp_path):
    _, _, staging = corpus.write(tmp_path / "out")
    _, index = staging.load(1)
    for name, arrays in corpus.arrays.items():
        expected = [xxhash.xxh3_64_intdigest(arrays[i].tobytes()) for i in corpus.order]
        assert column(index, f"digest.{name}").tolist() == expected
        lengths = np.array([len(arrays[i]) for i in corpus.order])
        np.testing.assert_array_equal(column(index, f"length.{name}"), lengths)
        np.testing.assert_array_equal(column(index, f"start.{name}"), np.cumsum(lengths) - lengths)


@pytest.mark.parametrize("block_bytes", [1, 64, 1 << 20])
def test_blocks_of_any_size_give_the_same_file(block_bytes, corpus, tmp_path, monkeypatch):
    whole, first, _ = corpus.write(tmp_path / "whole")
    monkeypatch.setattr(shards, "BLOCK_BYTES", block_bytes)
    path, second, _ = corpus.write(tmp_path / "blocks")
    assert storage.read_bytes(path) == storage.read_bytes(whole)
    assert second.info == first.info


def test_time_does_not_matter(corpus, tmp_path):
    first, _, _ = corpus.write(tmp_path / "a")
    time.sleep(1.1)  # HDF counts seconds
    second, _, _ = corpus.write(tmp_path / "b")
    assert storage.read_bytes(first) == storage.read_bytes(second)


def test_chunked_and_compressed_sources_give_the_same_shard(corpus, tmp_path):
    names = ("data", "classes", "wave")
    plain = Corpus(tmp_path, names)
    first, _, _ = plain.write(tmp_path / "a")
    (tmp_path / "packed").mkdir()
    packed = Corpus(tmp_path / "packed", names, chunks=True, compression="gzip")
    second, _, _ = packed.write(tmp_path / "b")
    assert storage.read_bytes(first) == storage.read_bytes(second)


def test_a_remote_shard_is_the_same(corpus, tmp_path):
    first, _, _ = corpus.write(tmp_path / "a")
    second, _, _ = corpus.write(f"memory://{tmp_path.name}-out")
    assert storage.read_bytes(first) == storage.read_bytes(second)
    storage.remove_folder(f"memory://{tmp_path.name}-out")


# --------------------------------------------------------------------------- resume and failure


def test_a_good_shard_is_kept(corpus, tmp_path):
    path, first, _ = corpus.write(tmp_path / "out")
    inode = os.stat(path).st_ino
    _, second, _ = corpus.write(tmp_path / "out")
    assert encode_receipt(second) == encode_receipt(first)
    assert os.stat(path).st_ino == inode


@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "receipt", "no-receipt", "other"])
def test_a_bad_shard_or_receipt_is_written_again(damage, corpus, tmp_path):
    path, first, staging = corpus.write(tmp_path / "out")
    good = storage.read_bytes(path)
    inode = os.stat(path).st_ino
    receipt = staging.receipt_path(1)
    if damage == "flip":
        data = bytearray(good)
        data[first.info.arrays["data"].offset + 5] ^= 1
        with open(path, "r+b") as file:
            file.write(data)
    elif damage == "cut":
        os.truncate(path, len(good) - 1)
    elif damage == "gone":
        os.unlink(path)
    elif damage == "receipt":
        os.truncate(receipt, os.path.getsize(receipt) // 2)
    elif damage == "no-receipt":
        os.unlink(receipt)
    else:
        storage.commit_bytes(receipt, b"no receipt")
    _, second, _ = corpus.write(tmp_path / "out")
    assert storage.read_bytes(path) == good
    assert damage == "gone" or os.stat(path).st_ino != inode
    assert encode_receipt(second) == encode_receipt(first)


def test_no_flipped_byte_of_a_receipt_is_believed(corpus, tmp_path):
    _, _, staging = corpus.write(tmp_path / "out")
    data = storage.read_bytes(staging.receipt_path(1))
    assert staging.load(1) is not None
    for place in range(0, len(data), 41):
        changed = bytearray(data)
        changed[place] ^= 0x10
        storage.commit_bytes(staging.receipt_path(1), changed)
        assert staging.load(1) is None
        storage.commit_bytes(staging.receipt_path(1), data[:place])
        assert staging.load(1) is None


def test_receipts_of_another_plan_are_not_trusted(corpus, tmp_path):
    _path, _, staging = corpus.write(tmp_path / "out")
    assert Staging(staging.output, "other", "stamp").load(1) is None
    assert Staging(staging.output, "plan", "other").load(1) is None


def test_receipts_survive_as_they_are(corpus, tmp_path):
    _, receipt, _ = corpus.write(tmp_path / "out")
    again = decode_receipt(encode_receipt(receipt))
    assert again.info == receipt.info
    assert encode_receipt(again) == encode_receipt(receipt)


@pytest.mark.parametrize("limit", [4096, 7000])
def test_a_full_disk_leaves_nothing_under_the_final_name(limit, corpus, tmp_path):
    job = corpus.job(tmp_path / "out")
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, old[1]))
    try:
        with pytest.raises(OutputError, match=r"data-00001-of-00003\.hdf.*File too large"):
            write_shard(job, 1, corpus.rows)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
    assert os.listdir(tmp_path / "out") == [".build"]
    write_shard(job, 1, corpus.rows)
    assert sorted(os.listdir(tmp_path / "out")) == [".build", "data-00001-of-00003.hdf"]


@pytest.fixture
def damaged(tmp_path):
    """Sources with one chunk per frame; two sequences of features and two of classes spoilt."""
    corpus = Corpus(tmp_path, ("data", "classes"))
    for name, stream in corpus.streams.items():
        path = corpus.sources[list(corpus.streams).index(name)].path
        options = {"chunks": (1, *stream.shape), "compression": "gzip"}
        write_source(path, name, stream, corpus.arrays[name], **options)
    for name, row in [("data", 2), ("data", 4), ("classes", 4), ("classes", 7)]:
        corpus.damage(name, row)
    return corpus


def test_damage_is_fatal_by_default(damaged, tmp_path):
    with pytest.raises(SourceFormatError, match=r"\.hdf, entry .*frame \d+.*damaged"):
        damaged.write(tmp_path / "out")
    assert os.listdir(tmp_path / "out") == [".build"]


def test_exactly_the_damaged_sequences_are_dropped(damaged, tmp_path):
    path, receipt, staging = damaged.write(tmp_path / "out", skip_damaged=True)
    lost = {TAGS[row] for row in (2, 4, 7)}
    assert {(r.tag, r.stream, r.source) for r in receipt.rejected} == {
        (TAGS[2], "data", "data.hdf"),
        (TAGS[4], "data", "data.hdf"),
        (TAGS[4], "classes", "classes.hdf"),
        (TAGS[7], "classes", "classes.hdf"),
    }
    assert all("damaged" in r.reason and str(tmp_path) not in r.reason for r in receipt.rejected)
    kept = [i for i in damaged.order if TAGS[i] not in lost]
    for name in damaged.streams:
        with HdfSource(path, name) as source:
            index = source.index()
            assert index.tag.to_pylist() == [TAGS[i] for i in kept]
        array = receipt.info.arrays[name]
        expected = np.concatenate([damaged.arrays[name][i] for i in kept])
        found = np.fromfile(path, expected.dtype, expected.size, offset=array.offset)
        np.testing.assert_array_equal(found.reshape(expected.shape), expected)
    # What was rejected is remembered by a build that continues.
    assert staging.load(1)[0].rejected == receipt.rejected


def test_a_shard_may_lose_all_its_sequences(damaged, tmp_path):
    chosen = [i for i, row in enumerate(damaged.order) if row in (2, 4)]
    damaged.rows = damaged.rows.take(pa.array(chosen))
    path, receipt, staging = damaged.write(tmp_path / "out", skip_damaged=True)
    assert (receipt.info.num_seqs, len(receipt.rejected)) == (0, 3)
    with HdfSource(path, "data") as source:
        assert source.index().length.tolist() == []
    index_path = str(tmp_path / "index.arrow")
    schema = index_schema(damaged.streams)
    with pa.OSFile(index_path, "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(staging.load(1)[1])
    index = IndexFile(index_path, list(damaged.streams), 1)
    assert index.tag_array(0).tolist() == []
    assert index.starts(0, "data").tolist() == [0]
    with pytest.raises(KeyError):
        index.find("x")


# --------------------------------------------------------------------------- the parts


@given(st.lists(st.integers(0, 50), max_size=60), st.integers(1, 40))
def test_blocks_are_a_partition_of_about_the_wanted_size(lengths, block_frames):
    stop = np.cumsum(np.array(lengths, np.int64))
    start = stop - np.array(lengths, np.int64)
    blocks = list(split_blocks(start, block_frames))
    assert [row for first, last in blocks for row in range(first, last)] == list(
        range(len(lengths))
    )
    for first, last in blocks:
        assert first < last
        assert start[last - 1] - start[first] < block_frames


@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=10))
def test_digest_rows(data, cuts):
    bounds = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    start = np.array(bounds[:-1], np.int64)
    size = np.diff(np.array(bounds, np.int64))
    expected = [xxhash.xxh3_64_intdigest(data[a:b]) for a, b in itertools.pairwise(bounds)]
    assert digest_rows(np.frombuffer(data, np.uint8), start, size).tolist() == expected


def test_lengths_beyond_the_layout_are_refused(tmp_path):
    lengths = {"classes": np.array([2**31])}
    with pytest.raises(PlanError, match=r"too long for the HDF layout.*2147483648 frames"):
        create_skeleton(str(tmp_path / "a"), {"classes": STREAMS["classes"]}, lengths, [b"x"])
    assert not (tmp_path / "a").exists()


def test_an_existing_file_is_never_overwritten(tmp_path):
    (tmp_path / "a").write_bytes(b"precious")
    with pytest.raises(FileExistsError):
        create_skeleton(
            str(tmp_path / "a"),
            {"classes": STREAMS["classes"]},
            {"classes": np.zeros(1, np.int64)},
            [b"x"],
        )
    assert (tmp_path / "a").read_bytes() == b"precious"


def test_index_finds_whole_tags_only(tmp_path):
    tags = ["a", "aa", "", "a a", "ä", "bä" * 50]
    schema = index_schema(["x"])
    zeros = {"x": np.zeros(3, np.int64)}
    digests = {"x": np.zeros(3, np.uint64)}
    path = str(tmp_path / "index.arrow")
    with pa.OSFile(path, "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for part in (tags[:3], tags[3:]):
            writer.write_batch(index_batch(pa.array(part, pa.string()), zeros, digests))
    index = IndexFile(path, ["x"], 2)
    assert [index.find(tag) for tag in tags] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert [t.decode() for i in range(2) for t in index.tag_array(i).tolist()] == tags
    for absent in ("b", "aaa", "äb", "ab"):
        with pytest.raises(KeyError, match="no sequence with this tag"):
            index.find(absent)


def test_hash_file(tmp_path):
    data = os.urandom(1 << 16)
    (tmp_path / "a").write_bytes(data)
    assert hash_file(str(tmp_path / "a")) == xxhash.xxh3_128_hexdigest(data)
