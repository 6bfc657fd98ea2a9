"""Files of SimpleHDFWriter mean the same to RETURNN as those of its own writer."""

import contextlib
import os
import subprocess
import sys
import textwrap

import h5py
import numpy as np
import pytest
import returnn.datasets.hdf as returnn_hdf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from seqshard.datasets import hdf_columns
from seqshard.datasets.hdf import HDFDataset
from seqshard.datasets.writers import SimpleHDFWriter
from seqshard.io.errors import (
    ConfigError,
    OutputError,
    OutputExistsError,
    ShapeMismatchError,
    SourceFormatError,
    SourceNotFoundError,
    UnsupportedPayloadError,
)


def read_with_returnn(path):
    """All that RETURNN's reader sees of a file."""
    dataset = returnn_hdf.HDFDataset(files=[str(path)])
    dataset.initialize()
    dataset.init_seq_order(epoch=1)
    keys = dataset.get_data_keys()
    seen = {
        "keys": keys,
        "num_outputs": {key: tuple(value) for key, value in dataset.num_outputs.items()},
        "num_inputs": dataset.num_inputs,
        "labels": dataset.labels,
        "dtypes": {key: dataset.get_data_dtype(key) for key in keys},
        "sparse": {key: dataset.is_data_sparse(key) for key in keys},
        "shapes": {key: dataset.get_data_shape(key) for key in keys},
        "tags": dataset.get_all_tags(),
        "lengths": [dict(dataset.get_seq_length(i).dict) for i in range(dataset.num_seqs)],
    }
    if dataset.num_seqs:
        dataset.load_seqs(0, dataset.num_seqs)
    seen["data"] = [
        {key: dataset.get_data(i, key).tolist() for key in keys} for i in range(dataset.num_seqs)
    ]
    dataset.__del__()
    return seen


def root_attributes(path):
    with h5py.File(path, "r") as file:
        return {name: int(value) for name, value in file.attrs.items()}


def assert_same_file(folder, options, batches):
    """Writes the same with both writers and compares what RETURNN reads."""
    seen, attributes = [], []
    for name, writer_class in (("ours", SimpleHDFWriter), ("theirs", returnn_hdf.SimpleHDFWriter)):
        path = folder / f"{name}.hdf"
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        writer = writer_class(filename=str(path), **options)
        for batch in batches:
            writer.insert_batch(**batch)
        writer.close()
        seen.append(read_with_returnn(path))
        attributes.append(root_attributes(path))
    assert seen[0] == seen[1]
    assert attributes[0] == attributes[1]
    return seen[0]


def dense_batch(rng, lengths, dim=5, start=0, **extra):
    return {
        "inputs": rng.standard_normal((len(lengths), max(lengths), dim)).astype("float32"),
        "seq_len": lengths,
        "seq_tag": [f"seq-{start + i}" for i in range(len(lengths))],
        **({"extra": extra} if extra else {}),
    }


@pytest.fixture
def rng():
    return np.random.default_rng(1)


def test_dense_without_extra(tmp_path, rng):
    batches = [dense_batch(rng, [7, 3, 5]), dense_batch(rng, [2, 2], start=3)]
    seen = assert_same_file(tmp_path, {"dim": 5}, batches)
    assert seen["tags"] == [f"seq-{i}" for i in range(5)]
    assert seen["keys"] == ["data"]


def test_sparse_with_labels(tmp_path):
    batch = {
        "inputs": np.array([[1, 2, 0], [2, 0, 0]], "int32"),
        "seq_len": np.array([3, 1]),
        "seq_tag": ["ä/1", b"b/2"],
    }
    options = {"dim": 3, "ndim": 1, "labels": ["a", "ü", "silence"]}
    seen = assert_same_file(tmp_path, options, [batch])
    assert seen["labels"]["data"] == ["a", "ü", "silence"]
    assert seen["sparse"] == {"data": True}
    assert seen["tags"] == ["ä/1", "b/2"]


def test_several_dynamic_axes(tmp_path, rng):
    batches = []
    for start, decoder, encoder in ((0, [11, 7, 5], [13, 6, 8]), (3, [3, 2], [4, 5])):
        inputs = rng.standard_normal((len(decoder), max(decoder), max(encoder)))
        tags = [f"seq-{start + i}" for i in range(len(decoder))]
        batches.append({"inputs": inputs, "seq_len": {0: decoder, 1: encoder}, "seq_tag": tags})
    seen = assert_same_file(tmp_path, {"dim": None, "ndim": 2}, batches)
    assert seen["data"][4]["sizes"] == [2, 5]
    assert seen["lengths"][0]["data"] == 11 * 13


def test_dynamic_axes_with_features(tmp_path, rng):
    batch = {
        "inputs": rng.standard_normal((2, 3, 4, 5)).astype("float32"),
        "seq_len": {0: [3, 1], 1: [2, 4]},
        "seq_tag": ["a", "b"],
        "extra": {"classes": np.ones((2, 3), "int8")},
    }
    assert_same_file(tmp_path, {"dim": 5, "ndim": 3}, [batch])


def test_extras_of_all_kinds(tmp_path, rng):
    def extras(num_seqs):
        return {
            "classes": rng.integers(0, 9, (num_seqs, 4)).astype("int16"),
            "features": rng.standard_normal((num_seqs, 3, 2)),
            "score": rng.standard_normal(num_seqs).astype("float32"),
            "speaker": rng.integers(0, 9, num_seqs).astype("int32"),
            "orth": np.array([[f"wörd {i}"] for i in range(num_seqs)], dtype=object),
        }

    batches = [
        dense_batch(rng, [4, 2], **extras(2)),
        dense_batch(rng, [1, 6, 3], start=2, **extras(3)),
    ]
    seen = assert_same_file(tmp_path, {"dim": 5}, batches)
    assert seen["dtypes"]["orth"] == "object"
    assert seen["data"][4]["orth"] == ["wörd 2".encode()]
    assert seen["num_outputs"]["features"] == (2, 2)


def test_extra_type_and_labels(tmp_path, rng):
    options = {
        "dim": 5,
        "extra_type": {"classes": (3, 1, "int32"), "x": (2, 2, "float32"), "s": (None, 0, "int8")},
        "extra_labels": {"classes": ["a", "b", "ß"]},
    }
    batches = [
        dense_batch(
            rng,
            [2, 1],
            classes=np.ones((2, 2), "int32"),
            x=np.ones((2, 4, 2), "float64"),
            s=np.array([[1], [2]], "int8"),
        ),
        dense_batch(rng, [3], start=2, classes=np.zeros((1, 3), "int32")),
    ]
    seen = assert_same_file(tmp_path, options, batches)
    assert seen["labels"]["classes"] == ["a", "b", "ß"]
    assert seen["dtypes"]["x"] == "float32"
    assert seen["lengths"][2] == {"data": 3, "classes": 3, "s": 0, "x": 0}


def test_one_scalar_per_sequence_as_inputs(tmp_path):
    batch = {"inputs": np.array([0.5, 2.0]), "seq_len": {}, "seq_tag": ["a", "b"]}
    seen = assert_same_file(tmp_path, {"dim": None, "ndim": 0}, [batch])
    assert seen["data"] == [{"data": [0.5]}, {"data": [2.0]}]


@st.composite
def writer_calls(draw):
    dim = draw(st.sampled_from([None, 1, 4]))
    sparse = dim is None or draw(st.booleans())
    dtype = draw(st.sampled_from(["int8", "int32"] if sparse else ["float32", "float64"]))
    with_classes = draw(st.booleans())
    batches, count = [], 0
    for _ in range(draw(st.integers(1, 3))):
        lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=4))
        shape = (len(lengths), max(lengths)) + (() if sparse else (dim,))
        batch = {
            "inputs": np.arange(np.prod(shape)).reshape(shape).astype(dtype),
            "seq_len": lengths,
            "seq_tag": [f"t{count + i}" for i in range(len(lengths))],
        }
        if with_classes:
            time = draw(st.integers(0, 3))
            batch["extra"] = {"classes": np.full((len(lengths), time), 3, "int32")}
        batches.append(batch)
        count += len(lengths)
    return {"dim": dim, "ndim": 1 if sparse else 2}, batches


@settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(writer_calls())
def test_same_calls_give_the_same_data(tmp_path, calls):
    assert_same_file(tmp_path, *calls)


def test_large_streams_are_chunked_and_small_ones_contiguous(tmp_path, rng, monkeypatch):
    monkeypatch.setattr(hdf_columns, "BUFFER_BYTES", 256)
    monkeypatch.setattr(hdf_columns, "CHUNK_BYTES", 128)
    monkeypatch.setattr(hdf_columns, "TEXT_ROWS", 8)
    batches = []
    for start in range(0, 60, 3):
        texts = np.array([["x" * i] for i in range(3)], dtype=object)
        batches.append(
            dense_batch(rng, [30, 1, 7], start=start, orth=texts, one=np.array([1, 2, 3], "int32"))
        )
    seen = assert_same_file(tmp_path, {"dim": 5}, batches)
    dataset = HDFDataset(files=[tmp_path / "ours.hdf"])
    dataset.initialize()
    dataset.init_seq_order(epoch=1)
    for index, row in enumerate(seen["data"]):
        assert {key: dataset.get_data(index, key).tolist() for key in row} == row
    with h5py.File(tmp_path / "ours.hdf", "r") as file:
        assert file["inputs"].chunks == (6, 5)
        assert file["targets/data/one"].chunks is None
        assert file["seqTags"].chunks is None


def test_default_sizes_keep_chunks_out_of_the_cache():
    assert hdf_columns.CHUNK_BYTES > 8 << 20
    assert hdf_columns.BUFFER_BYTES >= hdf_columns.CHUNK_BYTES


def test_equal_calls_give_equal_bytes(tmp_path):
    contents = []
    for name in "ab":
        with SimpleHDFWriter(tmp_path / name, dim=5) as writer:
            rng = np.random.default_rng(3)
            writer.insert_batch(**dense_batch(rng, [3, 9], classes=np.ones((2, 9), "int32")))
        contents.append((tmp_path / name).read_bytes())
    assert contents[0] == contents[1]


def test_the_callers_array_may_be_reused(tmp_path):
    buffer = np.zeros((1, 2, 3), "float32")
    with SimpleHDFWriter(tmp_path / "a.hdf", dim=3) as writer:
        for value in (1, 2):
            buffer[:] = value
            writer.insert_batch(buffer, [2], [f"s{value}"])
    seen = read_with_returnn(tmp_path / "a.hdf")
    assert seen["data"][0]["data"] == [[1, 1, 1], [1, 1, 1]]


@pytest.mark.parametrize("first_writer", [SimpleHDFWriter, returnn_hdf.SimpleHDFWriter])
def test_extend_existing_file(tmp_path, rng, first_writer):
    path = tmp_path / "a.hdf"
    extra_type = {"classes": (3, 1, "int32"), "orth": (None, 1, "string")}
    options = {"dim": 5, "extra_type": extra_type, "extra_labels": {"classes": ["a", "b", "c"]}}

    def batch(start):
        orth = np.array([["x"], ["yz"]], dtype=object)
        classes = np.ones((2, 4), "int32")
        return dense_batch(rng, [3, 4], start=start, classes=classes, orth=orth)

    batches = [batch(0), batch(2), batch(4)]
    writer = first_writer(str(path), **options)
    writer.insert_batch(**batches[0])
    writer.close()
    for later in batches[1:]:
        with SimpleHDFWriter(path, dim=5, extend_existing_file=True) as writer:
            writer.insert_batch(**later)
    with SimpleHDFWriter(tmp_path / "whole.hdf", **options) as writer:
        for each in batches:
            writer.insert_batch(**each)
    assert read_with_returnn(path) == read_with_returnn(tmp_path / "whole.hdf")
    assert root_attributes(path) == root_attributes(tmp_path / "whole.hdf")
    assert sorted(os.listdir(tmp_path)) == ["a.hdf", "whole.hdf"]


def test_extend_keeps_what_it_does_not_know(tmp_path, rng):
    path = tmp_path / "a.hdf"
    with SimpleHDFWriter(path, dim=5, labels=list("abcde")) as writer:
        writer.insert_batch(**dense_batch(rng, [3]))
    with h5py.File(path, "a") as file:
        file["notes/author"] = b"me"
        file.attrs["corpus"] = "x"
    with SimpleHDFWriter(path, dim=5, extend_existing_file=True) as writer:
        writer.insert_batch(**dense_batch(rng, [2], start=1))
    with h5py.File(path, "r") as file:
        assert file["notes/author"][()] == b"me"
        assert file.attrs["corpus"] == "x"
        assert file["labels"][...].tolist() == [b"a", b"b", b"c", b"d", b"e"]
        assert file.attrs["numSeqs"] == 2


def test_extend_refuses_new_streams_and_keeps_the_file(tmp_path, rng):
    path = tmp_path / "a.hdf"
    with SimpleHDFWriter(path, dim=5) as writer:
        writer.insert_batch(**dense_batch(rng, [3]))
    before = path.read_bytes()
    with (
        pytest.raises(ConfigError, match="entry 'classes': a stream that earlier sequences do not"),
        SimpleHDFWriter(path, dim=5, extend_existing_file=True) as writer,
    ):
        writer.insert_batch(**dense_batch(rng, [2], classes=np.ones((1, 2), "int32")))
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["a.hdf"]


def test_extend_refuses_what_is_no_such_file(tmp_path):
    path = tmp_path / "a.hdf"
    with pytest.raises(SourceNotFoundError, match="no file to extend"):
        SimpleHDFWriter(path, dim=5, extend_existing_file=True)
    path.write_bytes(b"something else")
    with pytest.raises(SourceFormatError, match="not a complete HDF file"):
        SimpleHDFWriter(path, dim=5, extend_existing_file=True)
    path.unlink()
    with h5py.File(path, "w") as file:
        file["inputs"] = np.zeros((3, 5))
        file["seqLengths"] = np.array([[4, 0]])
        file["seqTags"] = np.array([b"a"])
    with pytest.raises(SourceFormatError, match=r"do not add up.*expected 4, found 3"):
        SimpleHDFWriter(path, dim=5, extend_existing_file=True)
    with h5py.File(path, "a") as file:
        del file["inputs"]
    with pytest.raises(SourceFormatError, match="entry 'inputs': this is not in the file"):
        SimpleHDFWriter(path, dim=5, extend_existing_file=True)
    assert os.listdir(tmp_path) == ["a.hdf"]


def test_nothing_appears_before_close(tmp_path, rng):
    path = tmp_path / "a.hdf"
    writer = SimpleHDFWriter(path, dim=5)
    writer.insert_batch(**dense_batch(rng, [3]))
    assert not path.exists()
    assert os.path.dirname(writer.tmp_filename) == str(tmp_path)
    writer.close()
    assert os.listdir(tmp_path) == ["a.hdf"]
    assert writer.tmp_filename is None
    writer.close()
    with pytest.raises(ConfigError, match="the writer is closed"):
        writer.insert_batch(**dense_batch(rng, [3]))


def test_an_exception_publishes_nothing(tmp_path, rng):
    with contextlib.suppress(KeyError), SimpleHDFWriter(tmp_path / "a.hdf", dim=5) as writer:
        writer.insert_batch(**dense_batch(rng, [3]))
        raise KeyError
    assert os.listdir(tmp_path) == []


def test_a_writer_that_is_dropped_publishes_nothing(tmp_path, rng):
    writer = SimpleHDFWriter(tmp_path / "a.hdf", dim=5)
    writer.insert_batch(**dense_batch(rng, [3]))
    del writer
    assert os.listdir(tmp_path) == []


def test_an_existing_file_is_not_replaced(tmp_path, rng):
    path = tmp_path / "a.hdf"
    writer = SimpleHDFWriter(path, dim=5)
    path.write_text("somebody was faster")
    with pytest.raises(OutputExistsError, match=r"a\.hdf: the file exists already"):
        writer.close()
    with pytest.raises(OutputExistsError, match="Remove it or choose another name"):
        SimpleHDFWriter(path, dim=5)
    assert path.read_text() == "somebody was faster"
    assert os.listdir(tmp_path) == ["a.hdf"]
    with pytest.raises(OutputError, match=r"missing/a\.hdf: cannot write the output"):
        SimpleHDFWriter(tmp_path / "missing" / "a.hdf", dim=5)


@pytest.mark.parametrize(
    ("options", "change", "error", "message"),
    [
        ({"dim": 4}, {}, ShapeMismatchError, r"expected \(4,\), found \(5,\)"),
        ({"dim": 5, "ndim": 3}, {}, ShapeMismatchError, "2 sequences of 3 axes"),
        ({"dim": 5}, {"seq_tag": ["a"]}, ShapeMismatchError, "1 sequences of 2 axes"),
        ({"dim": 5}, {"seq_len": [2, 2]}, ShapeMismatchError, "expected 0 to 3, found 2 to 2"),
        ({"dim": 5}, {"seq_tag": ["a", "b\0"]}, UnsupportedPayloadError, "NUL"),
        ({"dim": 5}, {"seq_tag": [b"\xff", "b"]}, UnsupportedPayloadError, "only UTF-8"),
        ({"dim": 5}, {"extra": {"x": np.zeros(3)}}, ShapeMismatchError, "expected batch 2"),
        ({"dim": 5}, {"extra": {"data": np.zeros(2)}}, ConfigError, "cannot have this name"),
        ({"dim": 5}, {"extra": {"a/b": np.zeros(2)}}, ConfigError, "cannot have this name"),
        ({"dim": 5}, {"extra": {"x": np.array([None, 1])}}, UnsupportedPayloadError, "found None"),
        (
            {"dim": 5, "extra_type": {"x": (1, 1, "int8")}},
            {"extra": {"x": np.array([1, 300])}},
            ShapeMismatchError,
            "entry 'x': values that the type of the stream cannot hold.*expected int8, found int64",
        ),
        (
            {"dim": 5, "extra_type": {"x": (1, 1, "int8")}},
            {"extra": {"x": np.array([0.5, 1])}},
            ShapeMismatchError,
            "expected int8, found float64",
        ),
        (
            {"dim": 5, "extra_type": {"x": (1, 1, "int8")}},
            {"extra": {"x": np.array(["a", "b"])}},
            ShapeMismatchError,
            "expected int8, found bytes8",
        ),
        (
            {"dim": 5, "extra_type": {"x": (1, 1, "string")}},
            {"extra": {"x": np.array([1, 2])}},
            UnsupportedPayloadError,
            "entry 'x': only UTF-8 strings",
        ),
        ({"dim": 5}, {"extra": {"x": np.array([[["a"]]] * 2)}}, ShapeMismatchError, "no feature"),
        (
            {"dim": 5, "extra_type": {"x": (2, 2, "int8")}},
            {"extra": {"x": np.zeros((2, 3, 4))}},
            ShapeMismatchError,
            r"expected \(2,\), found \(4,\)",
        ),
    ],
)
def test_a_refused_batch_leaves_no_trace(tmp_path, rng, options, change, error, message):
    good = dense_batch(rng, [3, 1], dim=5)
    with SimpleHDFWriter(tmp_path / "a.hdf", **options) as writer:
        with pytest.raises(error, match=message):
            writer.insert_batch(**{**good, **change})
        assert writer._file.num_seqs == 0
        assert all(column.num_rows == 0 for column in writer._file.columns.values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dim": 3, "labels": ["a"]}, "expected 3 labels, found 1"),
        ({"dim": 3, "extra_labels": {"x": ["a"]}}, "extra_type does not declare"),
        ({"dim": 3, "extra_type": {"x": (2, 3, "int8")}}, "only time can be dynamic"),
        (
            {"dim": 3, "extra_type": {"x": (2, 1, "int8")}, "extra_labels": {"x": ["a"]}},
            "entry 'x': one label per class",
        ),
        ({"dim": 3, "swmr": True, "extra_type": {"x": (None, 1, "string")}}, "cannot be followed"),
        ({"dim": 3, "swmr": True, "extend_existing_file": True}, "while others follow it"),
    ],
)
def test_wrong_arguments(tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        SimpleHDFWriter(tmp_path / "a.hdf", **options)
    assert os.listdir(tmp_path) == []


FOLLOWER = """
    import sys, h5py

    path = sys.argv[1]
    file = h5py.File(path, "r", swmr=True)
    for expected in sys.stdin:
        for name in ("seqTags", "seqLengths", "inputs", "targets/data/classes"):
            file[name].refresh()
        tags, lengths = file["seqTags"][...], file["seqLengths"][...]
        inputs = file["inputs"][: lengths[:, 0].sum()]
        print(len(tags), len(lengths), int(inputs[:, 0].sum()), tags[-1].decode(), flush=True)
"""


def test_another_process_follows_the_growing_file(tmp_path):
    path = tmp_path / "a.hdf"
    writer = SimpleHDFWriter(path, dim=2, swmr=True)
    assert not path.exists()

    def insert(index):
        classes = np.ones((1, 2), "int32")
        data = np.ones((1, index + 1, 2), "float32")
        writer.insert_batch(data, [index + 1], [f"seq-{index}"], {"classes": classes})

    insert(0)
    follower = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(FOLLOWER), str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with follower:
        frames = 1
        for index in range(1, 5):
            insert(index)
            frames += index + 1
            follower.stdin.write("\n")
            follower.stdin.flush()
            answer = follower.stdout.readline().split()
            assert answer == [str(index + 1), str(index + 1), str(frames), f"seq-{index}"]
        follower.stdin.close()
    assert follower.returncode == 0
    writer.close()
    assert os.listdir(tmp_path) == ["a.hdf"]
    seen = read_with_returnn(path)
    assert seen["tags"] == [f"seq-{i}" for i in range(5)]
    assert seen["lengths"][3] == {"data": 4, "classes": 2}
    assert root_attributes(path)["numSeqs"] == 5
    assert root_attributes(path)["numTimesteps"] == 15


GROW = """
import sys
import numpy as np
from seqshard.datasets import SimpleHDFWriter

extra_type = {"classes": (9, 1, "int32")}
with SimpleHDFWriter(sys.argv[1], dim=2, swmr=True, extra_type=extra_type) as writer:
    for number in range(1, 40):
        inputs = np.full((1, number, 2), number, "float32")
        extra = {"classes": np.full((1, number), number % 9, "int32")}
        writer.insert_batch(inputs, [number], [f"seq-{number}"], extra=extra)
        print(number, flush=True)
        sys.stdin.readline()
"""


def test_a_dataset_follows_a_file_that_another_process_writes(tmp_path):
    path = str(tmp_path / "growing.hdf")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", GROW, path], **pipes) as process:
        for number in range(1, 40):
            assert process.stdout.readline() == f"{number}\n"
            if number % 13 == 1:
                check_grown(path, number)
            process.stdin.write("\n")
            process.stdin.flush()
    assert process.returncode == 0
    check_grown(path, 39)


def check_grown(path, num_seqs):
    dataset = HDFDataset([path])
    dataset.initialize()
    dataset.init_seq_order(epoch=1)
    assert dataset.get_all_tags() == [f"seq-{number}" for number in range(1, num_seqs + 1)]
    for seq_idx in range(num_seqs):
        number = seq_idx + 1
        assert dataset.get_seq_length(seq_idx)["data"] == number
        assert dataset.get_data(seq_idx, "data").tolist() == [[number, number]] * number
        assert dataset.get_data(seq_idx, "classes").tolist() == [number % 9] * number
        assert dataset.get_data_by_seq_tag(f"seq-{number}", "data")[0, 0] == number


def test_swmr_reads_as_without(tmp_path, rng):
    batches = [dense_batch(rng, [7, 3, 5]), dense_batch(rng, [2, 2], start=3)]
    for name, swmr in (("a", True), ("b", False)):
        with SimpleHDFWriter(tmp_path / name, dim=5, swmr=swmr) as writer:
            for batch in batches:
                writer.insert_batch(**batch)
    assert read_with_returnn(tmp_path / "a") == read_with_returnn(tmp_path / "b")


def test_swmr_replaces_no_file(tmp_path, rng):
    path = tmp_path / "a"
    with contextlib.suppress(KeyError), SimpleHDFWriter(path, dim=5, swmr=True) as writer:
        path.write_text("somebody was faster")
        with pytest.raises(OutputExistsError, match="the file exists already"):
            writer.insert_batch(**dense_batch(rng, [7]))
        raise KeyError
    assert os.listdir(tmp_path) == ["a"]
    assert path.read_text() == "somebody was faster"


def test_swmr_exception_and_limits(tmp_path, rng):
    path = tmp_path / "a"
    with contextlib.suppress(KeyError), SimpleHDFWriter(path, dim=5, swmr=True) as writer:
        writer.insert_batch(**dense_batch(rng, [7]))
        assert path.exists()
        with pytest.raises(ConfigError, match="earlier sequences do not have"):
            writer.insert_batch(**dense_batch(rng, [7], late=np.zeros(1)))
        with pytest.raises(UnsupportedPayloadError, match="at most 512 bytes, found 600"):
            writer.insert_batch(**{**dense_batch(rng, [7]), "seq_tag": ["x" * 600]})
        raise KeyError
    assert os.listdir(tmp_path) == []
