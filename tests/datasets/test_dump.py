"""HDFDatasetWriter gives files that mean the same to RETURNN as those of its own writer."""

import os
import sys

import h5py
import numpy as np
import pytest
import returnn.datasets.hdf as returnn_hdf
from returnn.datasets.generating import DummyDataset, StaticDataset, Task12AXDataset

from seqshard.datasets import dump, hdf_columns
from seqshard.datasets.dump import HDFDatasetWriter
from seqshard.datasets.hdf import HDFDataset
from seqshard.io.errors import ConfigError, PlanError, ShapeMismatchError


def read_with_returnn(path):
    """All that RETURNN's reader sees of a file."""
    dataset = returnn_hdf.HDFDataset(files=[str(path)])
    dataset.initialize()
    dataset.init_seq_order(epoch=1)
    keys = dataset.get_data_keys()
    dataset.load_seqs(0, dataset.num_seqs)
    seen = {
        "keys": keys,
        "num_outputs": {key: tuple(value) for key, value in dataset.num_outputs.items()},
        "num_inputs": dataset.num_inputs,
        "labels": dataset.labels,
        "dtypes": {key: dataset.get_data_dtype(key) for key in keys},
        "dims": {key: dataset.get_data_dim(key) for key in keys},
        "tags": dataset.get_all_tags(),
        "lengths": [dict(dataset.get_seq_length(i).dict) for i in range(dataset.num_seqs)],
        "data": [
            {key: dataset.get_data(i, key).tolist() for key in keys}
            for i in range(dataset.num_seqs)
        ],
    }
    dataset.__del__()
    return seen


def dump_to(path, writer_class, dataset, **options):
    writer = writer_class(str(path))
    writer.dump_from_dataset(dataset, use_progress_bar=False, **options)
    writer.close()
    return read_with_returnn(path)


def static(num_seqs=5, seed=1, target_list=None, output_dim=None, **streams):
    rng = np.random.default_rng(seed)
    data = []
    for index in range(num_seqs):
        row = {}
        for key, (shape, dtype) in streams.items():
            values = rng.integers(0, 5, (index + 2, *shape))
            row[key] = values.astype(dtype)
        data.append(row)
    return StaticDataset(data, target_list=target_list, output_dim=output_dim)


DATASETS = {
    "dummy": lambda: DummyDataset(input_dim=13, output_dim=7, num_seqs=23, seq_len=17),
    "12ax": lambda: Task12AXDataset(num_seqs=23),
    "dense": lambda: static(
        data=((3,), "float32"),
        classes=((), "int16"),
        states=((2,), "float64"),
        output_dim={"data": (3, 2), "classes": (5, 1), "states": (2, 2)},
    ),
    "sparse": lambda: static(
        data=((), "uint8"),
        classes=((), "int32"),
        output_dim={"data": (255, 1), "classes": (10, 1)},
    ),
    "no targets": lambda: static(data=((3,), "float32")),
    "only targets": lambda: static(
        classes=((), "int32"), other=((), "int8"), output_dim={"classes": (9, 1), "other": (5, 1)}
    ),
    "second input": lambda: static(
        data=((3,), "float32"),
        more=((2,), "float32"),
        zero=((), "int8"),
        target_list=["zero"],
        output_dim={"zero": (5, 1)},
    ),
    "skipped": lambda: static(
        data=((3,), "float32"),
        orth=((), "uint8"),
        raw=((), "float32"),
        z=((), "int8"),
        output_dim={"z": (5, 1)},
    ),
}


@pytest.mark.parametrize("name", DATASETS)
def test_same_as_returnn(tmp_path, name):
    ours = dump_to(tmp_path / "ours.hdf", HDFDatasetWriter, DATASETS[name]())
    theirs = dump_to(tmp_path / "theirs.hdf", returnn_hdf.HDFDatasetWriter, DATASETS[name]())
    assert ours == theirs
    with h5py.File(tmp_path / "ours.hdf") as a, h5py.File(tmp_path / "theirs.hdf") as b:
        assert a.attrs["inputPattSize"] == b.attrs["inputPattSize"]
        assert a["seqLengths"].dtype == b["seqLengths"].dtype
        assert set(a) == set(b)


@pytest.mark.parametrize(
    "options", [{"start_seq": 2}, {"end_seq": 3}, {"start_seq": 1, "end_seq": 2}]
)
def test_same_range_as_returnn(tmp_path, options):
    ours = dump_to(tmp_path / "a.hdf", HDFDatasetWriter, DATASETS["dummy"](), **options)
    theirs = dump_to(
        tmp_path / "b.hdf", returnn_hdf.HDFDatasetWriter, DATASETS["dummy"](), **options
    )
    assert ours == theirs


def test_labels_are_kept(tmp_path):
    def dataset():
        made = DATASETS["dense"]()
        made.labels = {"classes": ["a", "b", "ß", "d", "e"], "data": ["x", "y", "z"]}
        return made

    ours = dump_to(tmp_path / "a.hdf", HDFDatasetWriter, dataset())
    assert ours == dump_to(tmp_path / "b.hdf", returnn_hdf.HDFDatasetWriter, dataset())
    assert ours["labels"]["classes"] == ["a", "b", "ß", "d", "e"]


def test_an_order_of_one_epoch(tmp_path):
    source = tmp_path / "source.hdf"
    dump_to(source, HDFDatasetWriter, DATASETS["dense"]())
    seen = []
    for writer_class in (HDFDatasetWriter, returnn_hdf.HDFDatasetWriter):
        dataset = returnn_hdf.HDFDataset(files=[str(source)], seq_ordering="random")
        dataset.initialize()
        seen.append(dump_to(tmp_path / "out.hdf", writer_class, dataset, epoch=3))
    assert seen[0] == seen[1]
    assert seen[0]["tags"] != sorted(seen[0]["tags"])


@pytest.mark.parametrize("ordering", ["default", "laplace:.3"])
def test_from_our_own_dataset(tmp_path, ordering):
    source = tmp_path / "source.hdf"
    dump_to(source, HDFDatasetWriter, DATASETS["dense"]())
    seen = []
    for dataset_class in (HDFDataset, returnn_hdf.HDFDataset):
        dataset = dataset_class(files=[str(source)], seq_ordering=ordering)
        dataset.initialize()
        seen.append(dump_to(tmp_path / "out.hdf", HDFDatasetWriter, dataset, epoch=2))
    assert seen[0] == seen[1]


def test_missing_labels_are_no_obstacle(tmp_path):
    """RETURNN's writer refuses the files of its own SimpleHDFWriter."""
    source = tmp_path / "source.hdf"
    with returnn_hdf.SimpleHDFWriter(str(source), dim=3) as writer:
        classes = np.ones((1, 2), "int32")
        writer.insert_batch(np.ones((1, 2, 3), "float32"), [2], ["a"], {"classes": classes})
    dataset = returnn_hdf.HDFDataset(files=[str(source)])
    dataset.initialize()
    seen = dump_to(tmp_path / "out.hdf", HDFDatasetWriter, dataset)
    assert seen["data"] == [{"data": [[1, 1, 1], [1, 1, 1]], "classes": [1, 1]}]
    assert seen["labels"] == {"classes": ["dummy-label"]}


def test_strings_are_copied(tmp_path):
    source = tmp_path / "source.hdf"
    with returnn_hdf.SimpleHDFWriter(str(source), dim=3) as writer:
        text = np.array([["wörd one"]], dtype=object)
        writer.insert_batch(np.ones((1, 2, 3), "float32"), [2], ["a"], {"text": text})
    dataset = returnn_hdf.HDFDataset(files=[str(source)])
    dataset.initialize()
    seen = dump_to(tmp_path / "out.hdf", HDFDatasetWriter, dataset)
    assert seen["data"][0]["text"] == ["wörd one".encode()]


@pytest.mark.parametrize("known", [True, False])
def test_large_streams(tmp_path, monkeypatch, known):
    monkeypatch.setattr(hdf_columns, "BUFFER_BYTES", 64)
    monkeypatch.setattr(dump, "TABLE_ROWS", 2)
    path = tmp_path / "a.hdf"
    expected = dump_to(path, HDFDatasetWriter, DATASETS["dense"]())
    with h5py.File(path) as file:
        assert file["inputs"].chunks is not None
    if known:
        dataset = returnn_hdf.HDFDataset(files=[str(path)])
        dataset.initialize()
        assert dump_to(tmp_path / "b.hdf", HDFDatasetWriter, dataset) == expected
        with h5py.File(tmp_path / "b.hdf") as file:
            assert file["inputs"].chunks is None
            assert file["inputs"].id.get_offset() % 64 == 0


def test_an_existing_file_is_replaced_on_close_only(tmp_path):
    path = tmp_path / "a.hdf"
    path.write_text("old")
    writer = HDFDatasetWriter(path)
    writer.dump_from_dataset(DATASETS["dense"]())
    assert path.read_text() == "old"
    writer.close()
    assert read_with_returnn(path)["tags"] == [f"seq-{i}" for i in range(5)]
    assert os.listdir(tmp_path) == ["a.hdf"]
    with pytest.raises(ConfigError, match="writer is closed"):
        writer.dump_from_dataset(DATASETS["dense"]())


def test_a_failed_dump_is_not_published(tmp_path):
    class Broken(StaticDataset):
        def _collect_single_seq(self, seq_idx):
            if seq_idx == 3:
                raise RuntimeError("no more data")
            return super()._collect_single_seq(seq_idx)

    writer = HDFDatasetWriter(tmp_path / "a.hdf")
    with pytest.raises(RuntimeError, match="no more data"):
        writer.dump_from_dataset(Broken(DATASETS["dense"]().data))
    writer.close()
    with pytest.raises(ConfigError, match="has failed before"):
        writer.file.attrs["x"] = 1
    with pytest.raises(KeyError), HDFDatasetWriter(tmp_path / "a.hdf") as writer:
        raise KeyError
    assert os.listdir(tmp_path) == []


def test_what_cannot_be_dumped(tmp_path):
    two = static(a=((3,), "float32"), b=((3,), "float32"), target_list=[])
    with (
        pytest.raises(ConfigError, match=r"could be the input \(found \['a', 'b'\]\)"),
        HDFDatasetWriter(tmp_path / "a.hdf") as writer,
    ):
        writer.dump_from_dataset(two)
    with (
        pytest.raises(PlanError, match=r"no sequence to copy .*start_seq 5"),
        HDFDatasetWriter(tmp_path / "a.hdf") as writer,
    ):
        writer.dump_from_dataset(DATASETS["dense"](), start_seq=5)
    with HDFDatasetWriter(tmp_path / "a.hdf") as writer:
        writer.dump_from_dataset(DATASETS["dense"]())
        with pytest.raises(ConfigError, match="has a dataset already"):
            writer.dump_from_dataset(DATASETS["dense"]())


def test_a_dataset_that_lies_about_lengths(tmp_path):
    path = tmp_path / "a.hdf"
    dump_to(path, HDFDatasetWriter, DATASETS["dense"]())
    dataset = returnn_hdf.HDFDataset(files=[str(path)])
    dataset.initialize()
    original = dataset.get_data
    dataset.get_data = lambda index, key: original(index, key)[: 2 if index == 3 else None]
    with (
        pytest.raises(ShapeMismatchError, match=r"entry 'seq-3': .*expected 5, found 2"),
        HDFDatasetWriter(tmp_path / "b.hdf") as writer,
    ):
        writer.dump_from_dataset(dataset)
    assert os.listdir(tmp_path) == ["a.hdf"]


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_for_terminals(tmp_path, capsys, monkeypatch, terminal):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    with HDFDatasetWriter(tmp_path / "a.hdf") as writer:
        writer.dump_from_dataset(DATASETS["dense"]())
    assert ("seq" in capsys.readouterr().err) is terminal


def test_order_of_length_columns_follows_the_names_in_the_file(tmp_path):
    """A target "data" is renamed, and readers sort by the new name."""
    dataset = static(
        data=((), "int8"),
        d=((), "int8"),
        target_list=["data", "d"],
        output_dim={"data": (5, 1), "d": (5, 1)},
    )
    for row in dataset.data:
        row["d"] = row["d"][:1]
    seen = dump_to(tmp_path / "a.hdf", HDFDatasetWriter, dataset)
    assert seen["lengths"][2] == {"classes": 4, "d": 1}


def test_the_name_is_held_by_an_empty_file_until_close(tmp_path):
    path = tmp_path / "a.hdf"
    writer = HDFDatasetWriter(path)
    assert path.read_bytes() == b""
    writer._discard()
    assert not path.exists()
    path.write_bytes(b"old")
    HDFDatasetWriter(path)._discard()
    assert path.read_bytes() == b"old"
