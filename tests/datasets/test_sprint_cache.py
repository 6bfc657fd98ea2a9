"""SprintCacheDataset next to RETURNN's, on the demo corpus."""

import pickle
from pathlib import Path

import numpy as np
import pytest
from returnn.datasets.sprint import SprintCacheDataset as Oracle

from seqshard.datasets import init_dataset
from seqshard.datasets.sprint_cache import SprintCacheDataset, SprintCacheReader
from seqshard.io.errors import (
    ConfigError,
    DuplicateSequenceError,
    MissingSequenceError,
    SourceFormatError,
    SourceNotFoundError,
)

# RETURNN leaves the archives and label files that it reads to the garbage collector.
pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)

DEMO = Path(__file__).parents[2] / "examples" / "demo"
LABELING = {
    "allophone_file": str(DEMO / "allophones.txt"),
    "state_tying_file": str(DEMO / "state-tying.txt"),
    "silence_phone": "[SILENCE]",
}
BOTH = {
    "data": {"filename": str(DEMO / "features.bundle")},
    "classes": {"filename": str(DEMO / "alignment.bundle"), "allophone_labeling": LABELING},
}
FIRST = {"data": {"filename": str(DEMO / "features.0.cache")}}


def make(cls, data, **options):
    dataset = cls(data=data, **options)
    dataset.initialize()
    return dataset


def read_epoch(dataset, epoch):
    dataset.init_seq_order(epoch=epoch)
    seen, index = [], 0
    while dataset.is_less_than_num_seqs(index):
        dataset.load_seqs(index, index + 1)
        row = {"tag": dataset.get_tag(index), "frac": dataset.get_complete_frac(index)}
        row["lengths"] = dict(dataset.get_seq_length(index).dict)
        for key in dataset.get_data_keys():
            array = dataset.get_data(index, key)
            row[key] = (array.dtype.name, array.shape, array.tobytes())
        seen.append(row)
        index += 1
    assert dataset.num_seqs == index
    return seen


def assert_same(data, epochs=(1, 2, 5), **options):
    ours, theirs = (make(cls, data, **options) for cls in (SprintCacheDataset, Oracle))
    for epoch in epochs:
        assert read_epoch(ours, epoch) == read_epoch(theirs, epoch)
    assert list(ours.get_data_keys()) == list(theirs.get_data_keys())
    assert ours.get_target_list() == theirs.get_target_list()
    assert ours.num_outputs == theirs.num_outputs
    assert ours.num_inputs == theirs.num_inputs
    assert ours.get_all_tags() == theirs.get_all_tags()
    assert ours.get_total_num_seqs() == theirs.get_total_num_seqs()
    for key in ours.get_data_keys():
        assert ours.get_data_dtype(key) == theirs.get_data_dtype(key)
        assert ours.get_data_dim(key) == theirs.get_data_dim(key)
        assert ours.get_data_shape(key) == theirs.get_data_shape(key)
        assert ours.is_data_sparse(key) == theirs.is_data_sparse(key)
        for attribute in ("type", "num_labels", "num_dims", "dtype", "data_key"):
            assert getattr(ours.data[key], attribute) == getattr(theirs.data[key], attribute)
        assert ours.data[key].content_keys == list(theirs.data[key].content_keys)
    return ours


def test_bundles_same_as_returnn():
    ours = assert_same(BOTH, epochs=(1,))
    assert ours.get_total_num_seqs() == 120
    assert ours.data["classes"].dtype == "int8"


@pytest.mark.parametrize(
    "options",
    [
        {"seq_ordering": "random", "partition_epoch": 2},
        {"seq_ordering": "sorted"},
        {"seq_ordering": "laplace:.7", "_num_shards": 2, "_shard_index": 1},
    ],
)
def test_orders_same_as_returnn(options):
    assert_same(FIRST, **options)


def test_compressed_archive():
    assert_same({"data": {"filename": str(DEMO / "features.2.cache")}}, epochs=(1,))


def test_truth():
    truth = np.load(DEMO / "truth.npz")
    dataset = init_dataset({"class": "SprintCacheDataset", "data": BOTH})
    assert dataset.num_seqs == 0
    tags = [tag if isinstance(tag, str) else tag.decode() for tag in truth["tags"].tolist()]
    assert sorted(tags) == sorted(dataset.get_all_tags())
    dataset.init_seq_order(epoch=1, seq_list=tags)
    features = [dataset.get_data(i, "data") for i in range(len(tags))]
    np.testing.assert_array_equal(np.concatenate(features), truth["features"])


def test_by_name_and_by_index():
    dataset = make(SprintCacheDataset, BOTH)
    tag = dataset.get_all_tags()[7]
    seq = dataset.get_dataset_seq_for_name(tag)
    assert seq.seq_tag == tag
    assert seq.seq_idx == -1
    dataset.init_seq_order(epoch=1, seq_order=[7, 3])
    for key in ("data", "classes"):
        np.testing.assert_array_equal(dataset.get_data(0, key), seq.get_data(key))
        np.testing.assert_array_equal(dataset.get_data_by_seq_tag(tag, key), seq.get_data(key))
        np.testing.assert_array_equal(dataset.get_corpus_seq(7).get_data(key), seq.get_data(key))
    with pytest.raises(MissingSequenceError, match="entry 'nobody'"):
        dataset.get_dataset_seq_for_name("nobody")


def test_lengths_come_from_headers(monkeypatch):
    dataset = make(SprintCacheDataset, BOTH)
    dataset.init_seq_order(epoch=1)
    expected = {key: len(dataset.get_data(3, key)) for key in ("data", "classes")}
    monkeypatch.setattr(SprintCacheReader, "read_row", None)
    assert dict(dataset.get_seq_length(3).dict) == expected


def test_in_a_meta_dataset():
    options = {
        "class": "MetaDataset",
        "datasets": {
            "f": {"class": "SprintCacheDataset", "data": BOTH},
            "s": {"class": "HDFDataset", "files": [str(DEMO / "speaker.hdf")]},
        },
        "data_map": {
            "data": ("f", "data"),
            "classes": ("f", "classes"),
            "speaker": ("s", "data"),
        },
        "seq_order_control_dataset": "s",
    }
    dataset = init_dataset(options)
    dataset.init_seq_order(epoch=1)
    dataset.load_seqs(0, 5)
    for index in range(5):
        assert dataset.datasets["f"].get_tag(index) == dataset.get_tag(index)
        assert len(dataset.get_data(index, "data")) == len(dataset.get_data(index, "classes"))


def test_pickle():
    dataset = make(SprintCacheDataset, FIRST, seq_ordering="random")
    copy = pickle.loads(pickle.dumps(dataset))
    copy.initialize()
    assert read_epoch(copy, 4) == read_epoch(dataset, 4)


@pytest.mark.parametrize(
    ("key", "data_type", "labeling", "expected"),
    [
        ("data", None, None, "feat"),
        ("other", None, None, "feat"),
        ("classes", None, LABELING, "align_raw"),
        ("other", None, LABELING, "align_raw"),
        ("data", "align", LABELING, "align_raw"),
    ],
)
def test_types(key, data_type, labeling, expected):
    name = "features.0.cache" if expected == "feat" else "alignment.0.cache"
    reader = SprintCacheReader(key, DEMO / name, data_type, labeling)
    theirs = Oracle.SprintCacheReader(key, str(DEMO / name), data_type, labeling)
    assert reader.type == theirs.type == expected
    name = reader.content_keys[0]
    np.testing.assert_array_equal(reader.read(name), theirs.read(name))


@pytest.mark.parametrize(("num_labels", "dtype"), [(100, "int8"), (128, "int16"), (40000, "int32")])
def test_dtype_follows_the_number_of_classes(tmp_path, num_labels, dtype):
    tying = tmp_path / "tying.txt"
    text = (DEMO / "state-tying.txt").read_text().splitlines()
    lines = [f"{line.split()[0]} {min(int(line.split()[1]), num_labels - 2)}" for line in text]
    tying.write_text("\n".join([*lines, f"unused.0 {num_labels - 1}"]))
    labeling = {**LABELING, "state_tying_file": str(tying)}
    path = DEMO / "alignment.0.cache"
    ours = SprintCacheReader("classes", path, None, labeling)
    theirs = Oracle.SprintCacheReader("classes", str(path), None, labeling)
    assert ours.dtype == theirs.dtype == dtype
    assert ours.num_labels == theirs.num_labels == num_labels
    name = ours.content_keys[3]
    assert ours.read(name).dtype == theirs.read(name).dtype
    np.testing.assert_array_equal(ours.read(name), theirs.read(name))


def test_classes_from_phonemes(tmp_path):
    lines = (DEMO / "allophones.txt").read_text().splitlines()
    phonemes = dict.fromkeys(line.split("{")[0] for line in lines if not line.startswith("#"))
    path = tmp_path / "phonemes.txt"
    path.write_text("\n".join(phonemes))
    labeling = {**LABELING, "phoneme_file": str(path), "state_tying_file": None}
    alignment = {"filename": str(DEMO / "alignment.1.cache"), "allophone_labeling": labeling}
    ours = SprintCacheReader("classes", **alignment)
    theirs = Oracle.SprintCacheReader("classes", **alignment)
    assert ours.type == theirs.type == "align"
    assert ours.num_labels == theirs.num_labels == len(phonemes)
    for name in ours.content_keys[:9]:
        np.testing.assert_array_equal(ours.read(name), theirs.read(name))


def test_streams_must_fit(tmp_path):
    one = {"data": FIRST["data"], "more": {"filename": str(DEMO / "features.1.cache")}}
    with pytest.raises(MissingSequenceError, match="stream 'more' lacks a sequence"):
        SprintCacheDataset(one)
    one["more"]["filename"] = str(DEMO / "features.bundle")
    with pytest.raises(MissingSequenceError, match="stream 'data' lacks a sequence"):
        SprintCacheDataset(one)
    copy = tmp_path / "copy.cache"
    copy.write_bytes((DEMO / "features.0.cache").read_bytes())
    (tmp_path / "a.bundle").write_text(f"{DEMO}/features.0.cache\n{copy}\n")
    with pytest.raises(DuplicateSequenceError, match="two archives have the same sequence"):
        SprintCacheReader("data", tmp_path / "a.bundle")


def test_wrong_options(tmp_path):
    with pytest.raises(ConfigError, match='needs the key "data"'):
        SprintCacheDataset({"classes": BOTH["classes"]})
    alignment = str(DEMO / "alignment.0.cache")
    for labeling in (None, {"allophone_file": "x"}, {**LABELING, "nonsense": 1}):
        with pytest.raises(ConfigError, match="needs allophone_labeling"):
            SprintCacheReader("classes", alignment, None, labeling)
    with pytest.raises(ConfigError, match="expected feat or align, found audio"):
        SprintCacheReader("classes", alignment, "audio")
    with pytest.raises(SourceNotFoundError):
        SprintCacheReader("data", tmp_path / "a.cache")
    (tmp_path / "a.bundle").write_text("")
    with pytest.raises(SourceFormatError, match="names no archive"):
        SprintCacheReader("data", tmp_path / "a.bundle")
    (tmp_path / "a.cache").write_bytes((DEMO / "features.0.cache").read_bytes()[:-100])
    with pytest.raises(SourceFormatError):
        SprintCacheReader("data", tmp_path / "a.cache")
    with pytest.raises(SourceFormatError):
        SprintCacheReader("data", alignment)
