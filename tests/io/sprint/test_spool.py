"""What a trainer sends, as a file: every array of every sequence, or an error that tells why."""

from __future__ import annotations

import gc
import importlib.util
import itertools
import os
import pathlib
import sys
import tempfile

import numpy as np
import pytest

from seqshard.io.errors import ConfigError, OutputError, SeqshardError, TrainerError
from seqshard.io.hdf.source import HdfSource
from seqshard.io.records import StreamFormat, StreamSpec
from seqshard.io.sources import open_source
from seqshard.io.sprint.messages import Init, Segment
from seqshard.io.sprint.spool import Spool, spool_partition
from seqshard.io.trainers import TrainerTable, make_trainer

DUMMY = pathlib.Path(__file__).parents[2] / "data" / "dummy_trainer.py"


def load_dummy():
    spec = importlib.util.spec_from_file_location("dummy_trainer", DUMMY)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


corpus_seq = load_dummy().corpus_seq


def make(folder, *config, **options):
    config = [f"--*.{option}" for option in ("input-dim=3", "output-dim=4", *config)]
    table = TrainerTable([sys.executable, str(DUMMY)], config, **options)
    return make_trainer("rasr", table, "corpus.toml", str(folder))


def specs(*names, **options):
    return [StreamSpec(name, "extern-sprint", name, trainer="rasr", **options) for name in names]


def read(path, spec):
    """Format, and array per tag, as a stage of a build reads them."""
    with open_source(spec, str(path)) as source:
        index = source.index()
        out = np.empty((int(index.length.sum()), *index.format.shape), index.format.dtype)
        start = np.cumsum(index.length) - index.length
        columns = (index.position, index.length, index.num_bytes, index.raw_bytes)
        source.read_many(*columns, out, start)
    return index.format, dict(zip(index.tag.to_pylist(), np.split(out, start[1:]), strict=True))


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch, tmp_path, child_pids):
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    gc.collect()  # what earlier tests left behind may go at any time
    children = child_pids()  # servers that other tests share
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) <= before
    assert list(folder.iterdir()) == []
    assert child_pids() <= children


def test_what_the_trainer_sends_is_in_the_spool(tmp_path):
    path = tmp_path / "new" / "spool.hdf"
    streams = specs("data", "classes", "orth")
    assert spool_partition(make(tmp_path), 0, streams, str(path)) == 10
    assert [file.name for file in path.parent.iterdir()] == ["spool.hdf"]
    formats, arrays = zip(*(read(path, spec) for spec in streams), strict=True)
    assert formats == (
        StreamFormat("float32", 3, 2, False, shape=(3,)),
        StreamFormat("int32", 4, 1, True),
        StreamFormat("uint8", 256, 1, True),
    )
    for index in range(10):
        name, features, alignment, orth = corpus_seq(index, 3, 4)
        np.testing.assert_array_equal(arrays[0][name], features.T)
        np.testing.assert_array_equal(arrays[1][name], alignment)
        assert arrays[2][name].tobytes().decode() == orth.strip()
    assert list(arrays[0]) == [corpus_seq(index, 3, 4)[0] for index in range(10)]


def test_partitions_share_the_corpus(tmp_path):
    trainer = make(tmp_path, partitions=3)
    tags = []
    for partition in range(3):
        path = tmp_path / trainer.spool_name(partition)
        spool_partition(trainer, partition, specs("data"), str(path))
        tags.append(list(read(path, specs("data")[0])[1]))
    assert [len(part) for part in tags] == [4, 3, 3]
    everything = [corpus_seq(index, 3, 4)[0] for index in range(10)]
    assert sorted(itertools.chain(*tags)) == sorted(everything)


def test_a_complete_spool_is_not_written_again(tmp_path):
    path = tmp_path / "spool.hdf"
    path.write_bytes(b"complete")
    assert spool_partition(make(tmp_path), 0, specs("data"), str(path)) == 0
    assert path.read_bytes() == b"complete"


def test_the_same_sequences_give_the_same_bytes(tmp_path):
    for name in ("a.hdf", "b.hdf"):
        spool_partition(make(tmp_path), 0, specs("data", "orth"), str(tmp_path / name))
    assert (tmp_path / "a.hdf").read_bytes() == (tmp_path / "b.hdf").read_bytes()


def test_returnns_module_as_the_peer(tmp_path):
    modules = ("seqshard.io.sprint.extern_interface", "returnn.sprint.extern_interface")
    for module in modules:
        trainer = make(tmp_path, f"use-module={module}")
        spool_partition(trainer, 0, specs("data", "classes", "orth"), str(tmp_path / module))
    ours, theirs = ((tmp_path / module).read_bytes() for module in modules)
    assert ours == theirs


def test_options_for_targets(tmp_path):
    (tmp_path / "speakers.txt").write_text("speaker-1\nspeaker-0\n")
    trainer = make(
        tmp_path,
        "feed=control",
        target_maps={"speaker_name": "speakers.txt"},
        input_stddev=2.0,
        orth_post_process="get_remove_chars('0123456789')",
        orth_vocab={"class": "Utf8ByteTargets"},
        str_add_final_zero=True,
    )
    path = tmp_path / "spool.hdf"
    streams = specs("data", "speaker_name", "orth", "orth0", "orth_classes")
    spool_partition(trainer, 0, streams, str(path))
    data, speaker, orth, orth0, classes = (read(path, spec) for spec in streams)
    name, features, alignment, _ = corpus_seq(6, 3, 4)
    np.testing.assert_array_equal(data[1][name], features.T / np.float32(2))
    assert (speaker[0].dim, speaker[0].sparse) == (2, True)
    assert speaker[1][name].tolist() == [0 if len(alignment) % 2 else 1] * len(alignment)
    assert orth[1][name].tobytes().decode() == "word größe"
    assert orth0[1][name].tobytes() == orth[1][name].tobytes() + b"\0"
    assert (classes[0].dim, classes[0].dtype) == (256, "int32")
    assert classes[0].labels[97] == "a"
    np.testing.assert_array_equal(classes[1][name], orth[1][name])


def test_soft_alignments(tmp_path):
    keys = [f"classes[sparse:coo:2:{i}]" for i in range(3)]
    streams = [
        StreamSpec(name, "extern-sprint", key, num_labels=labels)
        for name, key, labels in zip("fcw", keys, (1, 4, None), strict=True)
    ]
    path = tmp_path / "spool.hdf"
    spool_partition(make(tmp_path, "feed=control-soft"), 0, streams, str(path))
    name, _, alignment, _ = corpus_seq(2, 3, 4)
    frames, classes, weights = (read(path, spec) for spec in streams)
    np.testing.assert_array_equal(frames[1][name], np.arange(len(alignment)))
    np.testing.assert_array_equal(classes[1][name], alignment)
    assert (weights[0].dtype, weights[0].sparse) == ("float32", False)
    assert set(weights[1][name]) == {0.5}


FAILURES = {
    "dies": (("behave=crash", "at-seq=4"), {}, "was killed by SIGSEGV before it sent 'exit'"),
    "exits": (
        ("behave=exit", "at-seq=start"),
        {},
        "ended with exit code 3 before it sent anything",
    ),
    "fails late": (("behave=exit", "at-seq=end"), {}, "sent everything, but .*exit code 3"),
    "hangs": (
        ("behave=hang", "at-seq=2"),
        {"timeout": 1.0},
        "hangs: no sign of life for 1 seconds",
    ),
    "garbage": (("behave=garbage", "at-seq=2"), {}, "sends garbage: b'Hello' begins no message"),
    "wrong dim": (("behave=wrong-dim", "at-seq=2"), {}, "segment 'bad' has 1 features"),
    "nothing": (("num-seqs=0",), {}, "the trainer ended and sent no sequence"),
    "no features": (("input-dim=0",), {}, "there are no features"),
    "alignment": (("behave=short-alignment", "at-seq=2"), {}, "does not fit to 4 frames"),
    "no target": (("feed=feedInput",), {}, "did not send what stream 'orth' is made of"),
    "no map": (("feed=control",), {"target_maps": {"speaker_name": {}}}, "has no 'speaker-"),
}


@pytest.mark.parametrize("case", FAILURES)
def test_failures_tell_the_end_of_the_log(case, tmp_path):
    config, options, match = FAILURES[case]
    path = tmp_path / "spool.hdf"
    with pytest.raises(TrainerError, match=f"(?s){match}.*The end of its log:\ndummy trainer"):
        spool_partition(make(tmp_path, *config, **options), 0, specs("orth"), str(path))
    assert [file.name for file in tmp_path.iterdir()] == ["tmp"]


def test_a_full_disk(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("seqshard.io.sprint.spool.create_skeleton", fail)
    with pytest.raises(OutputError, match="No space left on device"):
        spool_partition(make(tmp_path), 0, specs("data"), str(tmp_path / "spool.hdf"))
    assert [file.name for file in tmp_path.iterdir()] == ["tmp"]


FRAMES = np.zeros((3, 5), np.float32)
NUMBERS = np.zeros(5, np.int32)
SEGMENTS = {
    "no name": ([(None, {})], "without a name.*whole segments"),
    "NUL": ([("a\0b", {})], "a tag with a NUL cannot be stored"),
    "surrogate": ([("\ud800", {})], "is no text"),
    "type": ([("a", {"x": NUMBERS}), ("b", {"x": NUMBERS * 1.0})], "expected int32.*found float64"),
    "shape": ([("a", {"x": FRAMES}), ("b", {"x": FRAMES.T})], r"expected .*\('time', 5\), found"),
    "strings": ([("a", {"x": np.array(["text"])})], "elements of this type cannot be stored"),
    "missing": ([("a", {"x": NUMBERS}), ("b", {})], r"expected 'x', found data"),
}


@pytest.mark.parametrize("case", SEGMENTS)
def test_sequences_that_cannot_be_stored(case, tmp_path):
    segments, match = SEGMENTS[case]
    streams = specs("x", num_labels=7)
    with Spool(streams, make(tmp_path), str(tmp_path)) as spool:
        spool.set_dimensions(Init(3, 4, None))
        *before, last = [Segment(name, FRAMES, targets) for name, targets in segments]
        for segment in before:
            spool.add(segment)
        with pytest.raises(SeqshardError, match=match):
            spool.add(last)


def test_the_number_of_classes_must_be_known(tmp_path):
    segment = Segment("a", FRAMES, {"x": NUMBERS})
    with Spool(specs("x"), make(tmp_path), str(tmp_path)) as spool:
        spool.set_dimensions(Init(3, 4, None))
        with pytest.raises(ConfigError, match=r"number of classes of stream 'x'\. Set num_labels"):
            spool.add(segment)


def test_scalars_and_byte_orders(tmp_path):
    path = str(tmp_path / "spool.hdf")
    big = np.arange(4, dtype=">i4")
    with Spool(specs("x", "y", num_labels=9), make(tmp_path), str(tmp_path)) as spool:
        spool.set_dimensions(Init(3, 4, None))
        spool.add(Segment("a", FRAMES, {"x": np.array(2.5), "y": big}))
        spool.add(Segment("b", FRAMES, {"x": np.array(3.5), "y": big[:0]}))
        spool.write(path)
    with HdfSource(path, "x") as source:
        assert source.index().length.tolist() == [1, 1]
    found, arrays = read(path, specs("y")[0])
    assert (found.dtype, found.dim) == ("int32", 9)
    assert [values.tolist() for values in arrays.values()] == [[0, 1, 2, 3], []]
