"""NextGen files; RETURNN's own class is the oracle, with its names of sequences repaired."""

import os
import pickle
import shutil
import string

import h5py
import numpy as np
import pytest
import returnn.datasets.hdf as returnn_hdf
from hypothesis import given, settings
from hypothesis import strategies as st

from seqshard.datasets import init_dataset
from seqshard.datasets.nextgen import NextGenHDFDataset
from seqshard.datasets.siamese import SiameseHDFDataset, draw_triplets
from seqshard.datasets.stream_parsers import PARSERS, SegmentAlignmentStreamParser
from seqshard.io.errors import (
    ConfigError,
    MissingSequenceError,
    ShapeMismatchError,
    SourceFormatError,
    SourceNotFoundError,
)


def write_nextgen(
    path, names, seed=1, dim=5, streams=("features", "classes", "align"), fixed=False
):
    """A file with streams of all kinds; lengths 1 to 8."""
    rng = np.random.default_rng(seed)
    letters = list(string.ascii_lowercase)
    with h5py.File(path, "w") as file:
        kinds = {"features": "feature_sequence", "classes": "sparse", "align": "segment_alignment"}
        for stream in kinds:
            group = file.create_group(f"streams/{stream}")
            group.attrs["parser"] = kinds[stream]
            data = group.create_group("data")
            if stream != "features":
                group.create_dataset("feature_names", data=letters, dtype=h5py.string_dtype())
            for name in names:
                inner = name.replace("/", "\\")
                if stream == "features":
                    data[inner] = rng.standard_normal((rng.integers(1, 9), dim)).astype("float32")
                elif stream == "classes":
                    data[inner] = rng.integers(0, 3, 1).astype("int32")
                else:
                    data[inner] = rng.integers(1, 4, (rng.integers(1, 5), 2)).astype("int32")
        dtype = None if fixed else h5py.string_dtype()
        values = np.array([name.encode() for name in names]) if fixed else names
        file.create_dataset("seq_names", data=values, dtype=dtype)
    return str(path)


def copies(files):
    """For RETURNN: HDF5 refuses a file that is open already with another way of locking."""
    return [shutil.copy(path, f"{path}.copy") for path in files]


@pytest.fixture
def files(tmp_path):
    return [
        write_nextgen(tmp_path / "a.hdf", [f"corpus/rec-{i}/ü" for i in range(7)]),
        write_nextgen(
            tmp_path / "b.hdf", [f"corpus/more-{i}" for i in range(5)], seed=2, fixed=True
        ),
    ]


@pytest.fixture
def oracle(monkeypatch):
    """RETURNN's class, which forgets to decode names."""

    def normalize(name):
        return (name.decode() if isinstance(name, bytes) else name).replace("/", "\\")

    cls = returnn_hdf.NextGenHDFDataset
    monkeypatch.setattr(cls, "_normalize_seq_name", staticmethod(normalize))
    return cls


def read_epoch(dataset, epoch, **order):
    dataset.init_seq_order(epoch=epoch, **order)
    seen = []
    index = 0
    while dataset.is_less_than_num_seqs(index):
        dataset.load_seqs(index, index + 1)
        tag = dataset.get_tag(index)
        row = {"tag": tag.decode() if isinstance(tag, bytes) else tag}
        for key in dataset.get_data_keys():
            array = dataset.get_data(index, key)
            row[key] = (array.dtype.name, array.tolist())
        row["lengths"] = dict(dataset.get_seq_length(index).dict)
        seen.append(row)
        index += 1
    return seen


@pytest.mark.parametrize("stream", ["features", "classes", "align"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"seq_ordering": "random"},
        {"seq_ordering": "laplace:.3", "partition_epoch": 2},
        {"seq_ordering": "sorted_reverse", "_num_shards": 3, "_shard_index": 1},
    ],
)
def test_same_as_returnn(files, oracle, stream, options):
    ours = NextGenHDFDataset(input_stream_name=stream, files=files, **options)
    theirs = oracle(input_stream_name=stream, files=copies(files), **options)
    for dataset in (ours, theirs):
        dataset.initialize()
    for epoch in (1, 2, 5):
        assert read_epoch(ours, epoch) == read_epoch(theirs, epoch)
    assert ours.num_outputs == theirs.num_outputs
    assert ours.num_inputs == theirs.num_inputs
    for key in ours.get_data_keys():
        assert ours.get_data_dtype(key) == theirs.get_data_dtype(key)
        assert ours.is_data_sparse(key) == theirs.is_data_sparse(key)
    assert ours.get_data_dim(stream) == theirs.get_data_dim(stream)


def test_order_by_tags_and_indices(files, oracle):
    ours = NextGenHDFDataset("features", files)
    theirs = oracle("features", copies(files))
    ours.initialize()
    theirs.initialize()
    assert read_epoch(ours, 1, seq_order=[8, 2, 2]) == read_epoch(theirs, 1, seq_order=[8, 2, 2])
    assert ours.get_corpus_seq_idx(0) == 8
    tags = ["corpus/more-1", "corpus/rec-2/ü"]
    assert [row["tag"] for row in read_epoch(ours, 1, seq_list=tags)] == tags
    with pytest.raises(MissingSequenceError, match="entry 'nobody': no file has this sequence"):
        ours.init_seq_order(epoch=1, seq_list=["nobody"])
    assert ours.get_all_tags()[:1] == ["corpus/rec-0/ü"]
    assert ours.get_total_num_seqs() == 12


def test_before_the_first_epoch(files):
    dataset = init_dataset(
        {"class": "NextGenHDFDataset", "input_stream_name": "features", "files": files}
    )
    assert dataset.num_seqs == 0
    assert dataset.num_outputs == {"features": [5, 2], "classes": [26, 1], "align": [26, 1]}


def test_a_pickled_dataset_reads_the_same(files):
    dataset = NextGenHDFDataset("features", files, seq_ordering="random")
    dataset.initialize()
    copy = pickle.loads(pickle.dumps(dataset))
    copy.initialize()
    assert read_epoch(copy, 3) == read_epoch(dataset, 3)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 6)), max_size=8))
@settings(deadline=None)
def test_runs_become_frames_as_in_returnn(runs):
    runs = np.array(runs, "int32").reshape(-1, 2)
    with h5py.File("runs.hdf", "w", driver="core", backing_store=False) as file:
        file["data/x"] = runs
        file["feature_names"] = [b"a"]
        ours = SegmentAlignmentStreamParser(["x"], file)
        theirs = returnn_hdf.SegmentAlignmentStreamParser(["x"], file)
        np.testing.assert_array_equal(ours.get_data("x"), theirs.get_data("x"))
        assert ours.get_data("x").dtype == theirs.get_data("x").dtype
        assert ours.get_seq_length("x") == theirs.get_seq_length("x")


@pytest.mark.parametrize("kind", PARSERS)
def test_parser_attributes(files, kind):
    with h5py.File(files[0]) as file:
        stream = {"feature_sequence": "features", "sparse": "classes"}.get(kind, "align")
        names = list(file[f"streams/{stream}/data"])
        ours = PARSERS[kind](names, file[f"streams/{stream}"])
        theirs = returnn_hdf.NextGenHDFDataset.parsers[kind](names, file[f"streams/{stream}"])
        for attribute in ("num_features", "feature_type", "dtype", "seq_names"):
            assert getattr(ours, attribute) == getattr(theirs, attribute)
        assert ours.get_dtype() == theirs.get_dtype()


def damage(path, change):
    with h5py.File(path, "a") as file:
        change(file)


def replace(name, value):
    def change(file):
        del file[name]
        if value is not None:
            file[name] = value

    return change


ROW = "streams/features/data/corpus\\more-0"
DAMAGES = {
    "no names": (replace("seq_names", None), "'seq_names' is missing"),
    "no streams": (replace("streams", None), "'streams' is missing"),
    "no input": (replace("streams/features", None), "'features' is missing"),
    "sequence": (replace(ROW, None), "has no sequence .corpus.+more-0"),
    "dim": (replace(ROW, np.zeros((3, 4), "float32")), "4 features, float32"),
    "ndim": (replace(ROW, np.zeros(3, "float32")), r"float32 of shape \(3,\)"),
    "class names": (replace("streams/classes/feature_names", None), "'feature_names' is missing"),
    "parser": (lambda file: file["streams/align"].attrs.modify("parser", "?"), "unknown kind"),
    "link": (replace("streams/align", h5py.ExternalLink("x.hdf", "/y")), "links .* are refused"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_files(files, name):
    change, message = DAMAGES[name]
    damage(files[1], change)
    with pytest.raises((SourceFormatError, MissingSequenceError), match=message):
        NextGenHDFDataset("features", files)


def test_damage_that_shows_when_it_is_read(files):
    damage(files[1], replace(ROW.replace("more-0", "more-3"), np.zeros((3, 4), "float32")))
    damage(files[0], replace("streams/align/data/corpus\\rec-1\\ü", np.array([[1, -1]], "int32")))
    damage(files[0], replace("streams/align/data/corpus\\rec-2\\ü", np.array([[1, 2**31 - 1]])))
    dataset = NextGenHDFDataset("features", files)
    dataset.initialize()
    for tag, error, message in (
        ("corpus/more-3", ShapeMismatchError, r"must be alike .*\('time', 5\).* shape \(3, 4\)"),
        ("corpus/rec-1/ü", SourceFormatError, "impossible lengths .*shortest run -1"),
        ("corpus/rec-2/ü", SourceFormatError, "must be alike"),
    ):
        dataset.init_seq_order(epoch=1, seq_list=[tag])
        with pytest.raises(error, match=message):
            dataset.load_seqs(0, 1)


def test_what_is_no_file(tmp_path):
    with pytest.raises(SourceNotFoundError, match="no such file"):
        NextGenHDFDataset("features", [tmp_path / "a.hdf"])
    (tmp_path / "a.hdf").write_bytes(b"abc")
    with pytest.raises(SourceFormatError, match="not a complete HDF file"):
        NextGenHDFDataset("features", [tmp_path / "a.hdf"])


# Triplets.


def siamese(files, **options):
    dataset = SiameseHDFDataset("features", "classes", files=files, **options)
    dataset.initialize()
    return dataset


def test_triplets_have_the_right_classes(files):
    dataset = siamese(files, seq_ordering="random")
    drawn = []
    for epoch in range(1, 21):
        dataset.init_seq_order(epoch=epoch)
        for anchor, same, other in dataset.curr_epoch_triplets:
            names = [dataset.all_seq_names[index] for index in (anchor, same, other)]
            classes = [dataset.seq_to_target[name] for name in names]
            assert classes[0] == classes[1] != classes[2]
            if len(dataset.target_to_seqs[classes[0]]) > 1:
                assert anchor != same
        drawn.append(dataset.curr_epoch_triplets)
    assert len({tuple(triplets) for triplets in drawn}) == 20


def test_sequences_of_triplets(files):
    dataset = siamese(files)
    dataset.init_seq_order(epoch=1)
    dataset.load_seqs(0, 3)
    theirs = returnn_hdf.SiameseHDFDataset("features", "classes", files=copies(files))
    theirs.seq_order = dataset.seq_order
    theirs.curr_epoch_triplets = dataset.curr_epoch_triplets
    for index in range(3):
        seq = theirs._collect_single_seq(index)
        assert dataset.get_tag(index) == seq.seq_tag
        assert dataset.get_data_keys() == sorted(seq.get_data_keys())
        for key in seq.get_data_keys():
            np.testing.assert_array_equal(dataset.get_data(index, key), seq.get_data(key))
    for key in (*dataset.get_data_keys(), "unknown"):
        assert dataset.get_data_dim(key) == theirs.get_data_dim(key)
        assert dataset.is_data_sparse(key) == theirs.is_data_sparse(key)
    assert dataset.num_outputs == theirs.num_outputs


def test_triplets_can_be_repeated(files):
    np.random.seed(1)
    first, second = siamese(files), siamese(files)
    second.init_seq_order(epoch=7)
    first.init_seq_order(epoch=4)
    np.random.seed(2)
    second.init_seq_order(epoch=4)
    assert first.curr_epoch_triplets == second.curr_epoch_triplets
    other = siamese(files, random_seed_offset=5)
    other.init_seq_order(epoch=4)
    assert first.curr_epoch_triplets != other.curr_epoch_triplets
    copy = pickle.loads(pickle.dumps(first))
    copy.initialize()
    copy.init_seq_order(epoch=4)
    assert first.curr_epoch_triplets == copy.curr_epoch_triplets


def test_class_distribution(files, tmp_path):
    probs = np.zeros((26, 26))
    probs[0, :2] = [9, 1]
    probs[1, 2] = 0.5
    probs[2, 0] = 3
    np.savez(tmp_path / "probs.npz", probs)
    dataset = siamese(files, class_distribution=tmp_path / "probs.npz")
    dataset.init_seq_order(epoch=1)
    for anchor, _, other in dataset.curr_epoch_triplets:
        classes = [dataset.seq_to_target[dataset.all_seq_names[index]] for index in (anchor, other)]
        assert classes[1] == (classes[0] + 1) % 3


@given(st.data())
@settings(deadline=None)
def test_draws_follow_the_distribution(data):
    num_classes = data.draw(st.integers(2, 5))
    class_of = np.array([0, 1, *data.draw(st.lists(st.integers(0, num_classes - 1)))])
    probs = np.array(data.draw(st.lists(st.integers(1, 9), min_size=25, max_size=25)), float)
    probs = data.draw(st.sampled_from([None, probs.reshape(5, 5)]))
    anchors = np.arange(len(class_of))
    seed = data.draw(st.integers(0, 100))
    drawn = draw_triplets(anchors, class_of, probs, np.random.RandomState(seed))
    assert drawn[:, 0].tolist() == anchors.tolist()
    assert (class_of[drawn[:, 1]] == class_of).all()
    assert (class_of[drawn[:, 2]] != class_of).all()
    alone = np.bincount(class_of)[class_of] == 1
    assert ((drawn[:, 1] == anchors) == alone).all()


def test_every_partner_comes_equally_often():
    class_of = np.repeat([3, 5, 9], [4, 10, 2])
    anchors = np.zeros(60_000, np.int64)
    drawn = draw_triplets(anchors, class_of, None, np.random.RandomState(1))
    same = np.bincount(drawn[:, 1], minlength=16) / 60_000
    np.testing.assert_allclose(same[:4], [0, 1 / 3, 1 / 3, 1 / 3], atol=0.01)
    classes = np.bincount(class_of[drawn[:, 2]], minlength=10) / 60_000
    np.testing.assert_allclose(classes[[3, 5, 9]], [0, 0.5, 0.5], atol=0.01)
    probs = np.zeros((10, 10))
    probs[3, [3, 5, 9]] = [5, 1, 3]
    drawn = draw_triplets(anchors, class_of, probs, np.random.RandomState(1))
    classes = np.bincount(class_of[drawn[:, 2]], minlength=10) / 60_000
    np.testing.assert_allclose(classes[[3, 5, 9]], [0, 0.25, 0.75], atol=0.01)


def test_triplets_that_cannot_be_drawn(files, tmp_path):
    path = tmp_path / "probs.npz"
    np.savez(path, np.ones((2, 2)))
    with pytest.raises(ConfigError, match="expected classes 0 to 2, found 2 rows"):
        siamese(files, class_distribution=path)
    np.savez(path, np.eye(26))
    with pytest.raises(ConfigError, match=r"no other class to draw .found class"):
        siamese(files, class_distribution=path).init_seq_order(epoch=1)
    np.savez(path, -np.eye(26))
    with pytest.raises(SourceFormatError, match="numbers >= 0"):
        siamese(files, class_distribution=path)
    np.savez(path, np.array([{}]))
    with pytest.raises(SourceFormatError, match=r"no \.npz file with arr_0"):
        siamese(files, class_distribution=path)
    path.write_bytes(b"PK\x03\x04")
    with pytest.raises(SourceFormatError, match=r"no \.npz file"):
        siamese(files, class_distribution=path)
    os.unlink(path)
    with pytest.raises(SourceNotFoundError, match="no such file"):
        siamese(files, class_distribution=path)
    damage(files[0], replace("streams/classes/data/corpus\\rec-1\\ü", np.zeros(0, "int32")))
    with pytest.raises(SourceFormatError, match="entry 'corpus/rec-1/ü': a sequence without class"):
        siamese(files)
    with pytest.raises(SourceFormatError, match="entry 'words': a stream is missing"):
        SiameseHDFDataset("features", files=files)
