"""The folder of a dataset: taken over only when it is ours, complete only when all is there."""

import json
import os

import numpy as np
import pyarrow as pa
import pytest

from seqshard.io import storage
from seqshard.io.dataset_folder import DatasetPlan, complete_dataset, prepare_output
from seqshard.io.errors import OutputError, OutputExistsError, ShardIntegrityError
from seqshard.io.index import IndexFile, index_batch
from seqshard.io.manifest import ArrayInfo, ShardInfo, load_manifest, shard_name
from seqshard.io.receipts import Receipt, Rejection, Staging
from seqshard.io.records import StreamFormat
from seqshard.io.statistics import measure

STREAM = StreamFormat("int32", 3, 1, True)
PLAN = DatasetPlan({"x": STREAM}, (), "default", (2, 1), 24)


def write(staging, shard, num_seqs, rejected=()):
    """A shard of sequences of two frames; only its receipt is looked at here."""
    name = shard_name(shard, len(PLAN.seqs_per_shard))
    frames = np.ones(2 * num_seqs, np.int32)
    storage.commit_bytes(storage.join(staging.output, name), frames.tobytes())
    info = ShardInfo(
        name, num_seqs, {"x": len(frames)}, frames.nbytes, frames.nbytes, "0",
        {"x": ArrayInfo(0, frames.shape)},
    )  # fmt: skip
    tags = pa.array([f"{shard}-{i}" for i in range(num_seqs)], pa.string())
    rows = index_batch(tags, {"x": np.full(num_seqs, 2)}, {"x": np.zeros(num_seqs, np.uint64)})
    staging.save(shard, Receipt(info, {"x": measure(STREAM, frames)}, tuple(rejected)), rows)


@pytest.fixture
def staging(tmp_path):
    return Staging(str(tmp_path / "out"), "plan", "stamp")


def build(staging, rejected=(), overwrite=False):
    prepare_output(staging, PLAN, overwrite)
    write(staging, 0, 2)
    write(staging, 1, 1)
    return complete_dataset(staging, PLAN, [1, 0], rejected, {"host": "here"})


def names(staging):
    return storage.list_names(staging.output)


SHARDS = ["data-00000-of-00002.hdf", "data-00001-of-00002.hdf"]
COMPLETE = [*SHARDS, "index.arrow", "manifest.json", "provenance.json"]


def test_a_complete_dataset(staging):
    manifest = build(staging)
    assert names(staging) == COMPLETE
    assert load_manifest(staging.output) == manifest
    assert (manifest.num_seqs, manifest.num_frames, manifest.num_bytes) == (3, {"x": 6}, 24)
    assert manifest.statistics["x"] == {"counts": [0, 6, 0]}
    assert manifest.statistics["length"]["mean"] == 2
    index = IndexFile(os.path.join(staging.output, "index.arrow"), ["x"], 2)
    assert [index.find(tag) for tag in ("0-0", "0-1", "1-0")] == [(0, 0), (0, 1), (1, 0)]
    provenance = json.loads(storage.read_bytes(storage.join(staging.output, "provenance.json")))
    assert provenance["host"] == "here"
    assert provenance["stamp"] == "stamp"


def test_the_same_at_a_url(staging):
    remote = Staging("memory://folder-test/out", staging.plan, staging.stamp)
    local = build(staging)
    assert build(remote) == local
    assert names(remote) == COMPLETE
    for name in (*SHARDS, "index.arrow", "manifest.json"):
        a, b = (storage.read_bytes(storage.join(s.output, name)) for s in (staging, remote))
        assert a == b
    storage.remove_folder("memory://folder-test")


def test_nothing_is_a_dataset_before_it_is_complete(staging):
    prepare_output(staging, PLAN, False)
    write(staging, 0, 2)
    write(staging, 1, 1)
    assert "manifest.json" not in names(staging)


@pytest.mark.parametrize("shards", [[0], [0, 1, 1], [0, 2], []])
def test_every_shard_must_come_back_once(shards, staging):
    prepare_output(staging, PLAN, False)
    write(staging, 0, 2)
    write(staging, 1, 1)
    with pytest.raises(OutputError, match=r"exactly once.*expected 2 shards.*finished shards are"):
        complete_dataset(staging, PLAN, shards, [], {})
    assert "manifest.json" not in names(staging)


def test_every_planned_sequence_must_come_back(staging):
    prepare_output(staging, PLAN, False)
    write(staging, 0, 1)
    write(staging, 1, 1)
    with pytest.raises(OutputError, match=r"data-00000.*planned sequences.*2 sequences, found 1"):
        complete_dataset(staging, PLAN, [0, 1], [], {})
    assert not {"manifest.json", "index.arrow"} & set(names(staging))


def test_sequences_that_did_not_decode_are_listed_and_counted(staging):
    prepare_output(staging, PLAN, False)
    lost = [Rejection("z", "x", "a.hdf", "damaged"), Rejection("z", "y", "a.hdf", "damaged")]
    write(staging, 0, 1, lost)
    write(staging, 1, 1)
    filtered = [Rejection("b", "x", "a.hdf", "too short"), Rejection("ä", "x", "", "why")]
    manifest = complete_dataset(staging, PLAN, [0, 1], filtered, {})
    assert manifest.num_rejected == 4
    data = storage.read_bytes(storage.join(staging.output, "rejected.jsonl"))
    lines = [json.loads(line) for line in data.splitlines()]
    assert [(line["tag"], line["stream"]) for line in lines] == [
        ("b", "x"), ("z", "x"), ("z", "y"), ("ä", "x")
    ]  # fmt: skip


def test_another_dataset_is_not_touched(staging):
    build(staging)
    before = {name: storage.read_bytes(storage.join(staging.output, name)) for name in COMPLETE}
    other = Staging(staging.output, "other", "stamp")
    with pytest.raises(OutputExistsError, match=r"holds another dataset.*--overwrite"):
        prepare_output(other, PLAN, False)
    assert names(staging) == COMPLETE
    for name, data in before.items():
        assert storage.read_bytes(storage.join(staging.output, name)) == data
    build(other, overwrite=True)
    assert load_manifest(staging.output).plan == "other"


def test_shards_of_unknown_origin_are_not_touched(staging):
    storage.make_folder(staging.output)
    storage.commit_bytes(storage.join(staging.output, SHARDS[0]), b"precious")
    for _ in range(2):  # refusing leaves no traces that would be taken for a build
        with pytest.raises(OutputExistsError, match="neither a manifest nor traces"):
            prepare_output(staging, PLAN, False)
    prepare_output(staging, PLAN, True)


def test_a_build_that_was_killed_before_its_first_receipt_continues(staging):
    prepare_output(staging, PLAN, False)
    storage.commit_bytes(storage.join(staging.output, SHARDS[0]), b"half a dataset")
    prepare_output(staging, PLAN, False)


def test_foreign_files_stay_and_rests_of_builds_go(staging):
    storage.make_folder(staging.output)
    rest = [".data-00000-of-00002.hdf.0123456789ab.tmp", ".index.arrow.0123456789ab.tmp"]
    for name in ("notes.txt", ".hidden", "data.hdf", *rest):
        storage.commit_bytes(storage.join(staging.output, name), b"")
    prepare_output(staging, PLAN, False)
    for name in ("data-00007-of-00009.hdf", "rejected.jsonl"):
        storage.commit_bytes(storage.join(staging.output, name), b"old")
    build(staging)
    assert names(staging) == sorted([".hidden", *COMPLETE, "data.hdf", "notes.txt"])


def test_receipts_of_a_finished_dataset_come_back(staging):
    build(staging)
    prepare_output(staging, PLAN, False)
    for shard, num_seqs in enumerate(PLAN.seqs_per_shard):
        receipt, rows = staging.load(shard)
        assert receipt.info == load_manifest(staging.output).shards[shard]
        assert rows.num_rows == num_seqs
    assert complete_dataset(staging, PLAN, [0, 1], [], {}) == load_manifest(staging.output)
    assert names(staging) == COMPLETE


@pytest.mark.parametrize("place", [0.02, 0.2, 0.4, 0.6, 0.8, 0.99])
def test_a_damaged_index_gives_no_receipts(place, staging):
    build(staging)
    path = os.path.join(staging.output, "index.arrow")
    data = bytearray(storage.read_bytes(path))
    data[int(place * len(data))] ^= 0x40
    storage.commit_bytes(path, data)
    prepare_output(staging, PLAN, False)
    assert staging.load(0) is None
    assert "manifest.json" not in names(staging)


def test_touched_sources_are_written_again(staging):
    build(staging)
    touched = Staging(staging.output, "plan", "another stamp")
    prepare_output(touched, PLAN, False)
    assert touched.load(0) is None
    assert "manifest.json" not in names(staging)


def test_a_repeated_last_step_gives_the_manifest_that_stands_there(staging):
    manifest = build(staging)
    assert complete_dataset(staging, PLAN, [0, 1], [], {}) == manifest


def test_an_index_of_other_streams_or_shards_is_refused(staging):
    build(staging)
    path = os.path.join(staging.output, "index.arrow")
    with pytest.raises(ShardIntegrityError, match=r"index\.arrow.*expected 3 shards.*found 2"):
        IndexFile(path, ["x"], 3)
    with pytest.raises(ShardIntegrityError, match=r"streams y.*length\.x"):
        IndexFile(path, ["y"], 2)
    with pytest.raises(ShardIntegrityError, match="cannot be read"):
        IndexFile(os.path.join(staging.output, "none.arrow"), ["x"], 2)
    with pytest.raises(ShardIntegrityError, match="cannot be read"):
        IndexFile(os.path.join(staging.output, "manifest.json"), ["x"], 2)
