"""SprintDatasetBase, fed as RASR's thread feeds it, next to RETURNN's."""

from __future__ import annotations

import pickle
import time
from threading import Thread

import numpy as np
import pytest
from returnn.datasets.sprint import SprintDatasetBase as Oracle
from returnn.datasets.util.vocabulary import Vocabulary

from seqshard.datasets.sprint import SprintDatasetBase
from seqshard.io.errors import (
    ConfigError,
    MissingSequenceError,
    SeqshardError,
    ShapeMismatchError,
    SourceFormatError,
)

WORDS = ["UNK", "hello", "world"]


def make(cls=SprintDatasetBase, output_dim=5, **options):
    dataset = cls(**options)
    dataset.set_dimensions(3, output_dim)
    dataset.initialize()
    dataset.init_seq_order(epoch=1)
    return dataset


def features(index, num_frames=None):
    rng = np.random.RandomState(index)
    return rng.normal(size=(3, num_frames or 4 + index)).astype("float32")


def corpus(num_seqs=3, reduce_factor=1):
    for index in range(num_seqs):
        data = features(index)
        alignment = np.arange(-(-data.shape[1] // reduce_factor), dtype="int32") % 5
        targets = {
            "classes": alignment,
            "orth": f" Hello World größe {index} ",
            "speaker_name": f" spk{index % 2} ",
        }
        yield data, targets, f"seg/{index}"


def fill(dataset, seqs):
    for data, targets, name in seqs:
        dataset.add_new_data(data.copy(), dict(targets), segment_name=name)
    dataset.finish_sprint_epoch()


@pytest.fixture
def speaker_file(tmp_path):
    path = tmp_path / "speakers.txt"
    path.write_text("spk0\nspk1\n")
    return str(path)


OPTIONS = {
    "plain": {},
    "zero": {"str_add_final_zero": True},
    "stddev": {"input_stddev": 3.0},
    "window": {"window": 3},
    "window and stddev": {"window": 5, "input_stddev": 2},
    "reduced": {"reduce_target_factor": 3},
    "post-processed": {"orth_post_process": "lowercase, get_remove_chars('0')"},
    "dict map": {"target_maps": {"speaker_name": {"spk0": 0, "spk1": 1}}},
    "vector map": {"target_maps": {"speaker_name": {"spk0": [0.5, 1], "spk1": [2.0, 3]}}},
    "file map": {"target_maps": {"speaker_name": "FILE"}},
    "vocabulary": {"orth_vocab": {"vocab_file": None, "labels": WORDS}},
    "bpe object": {"bpe": Vocabulary(vocab_file=None, labels=WORDS)},
}


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("name", OPTIONS)
def test_same_as_returnn(name, speaker_file):
    options = OPTIONS[name]
    if name == "file map":
        options = {"target_maps": {"speaker_name": speaker_file}}
    ours, theirs = make(**options), make(Oracle, **options)
    factor = options.get("reduce_target_factor", 1)
    for dataset in (ours, theirs):
        fill(dataset, corpus(reduce_factor=factor))
    assert ours.num_outputs == theirs.num_outputs
    assert ours.num_seqs == theirs.num_seqs == 3
    assert ours.get_num_timesteps() == theirs.get_num_timesteps()
    assert ours.get_data_keys() == theirs.get_data_keys()
    assert ours.get_target_list() == theirs.get_target_list()
    for index in range(3):
        assert ours.is_less_than_num_seqs(index)
        ours.load_seqs(index, index + 1)
        theirs.load_seqs(index, index + 1)
        assert ours.get_tag(index) == theirs.get_tag(index)
        assert ours.get_seq_length(index).dict == theirs.get_seq_length(index).dict
        assert ours.get_complete_frac(index) == theirs.get_complete_frac(index)
        for key in ours.get_data_keys():
            found, expected = ours.get_data(index, key), theirs.get_data(index, key)
            assert found.dtype == expected.dtype
            np.testing.assert_array_equal(found, expected)
            assert ours.get_data_dim(key) == theirs.get_data_dim(key)
            assert ours.get_data_dtype(key) == theirs.get_data_dtype(key)
    assert not ours.is_less_than_num_seqs(3)


def test_orthography_as_text():
    dataset = make(str_add_final_zero=True)
    fill(dataset, corpus(1))
    assert dataset.serialize_data("orth", dataset.get_data(0, "orth")) == "Hello World größe 0"
    assert dataset.get_data(0, "orth0").tobytes() == "Hello World größe 0\0".encode()


def test_frames_are_not_copied():
    dataset = make()
    data = np.asfortranarray(features(0))
    dataset.add_new_data(data)
    assert np.shares_memory(dataset.get_data(0, "data"), data)
    assert dataset.get_data(0, "data").flags.c_contiguous


def test_targets_may_be_an_array_and_names_missing():
    dataset = make()
    dataset.add_new_data(features(0), np.zeros(4, "int32"))
    dataset.add_new_data(features(1))
    assert dataset.get_data_keys() == ["classes", "data"]
    assert [dataset.get_tag(i) for i in range(2)] == ["seq-0", "seq-1"]


def test_soft_alignments_are_sliced_by_time():
    dataset = make(output_dim=0)
    assert "classes" not in dataset.num_outputs
    parts = [np.array([0, 0, 1, 3], "int32"), np.array([4, 2, 1, 0], "int32"), np.ones(4, "f4")]
    dataset.add_new_data(
        features(0), {f"classes[sparse:coo:2:{i}]": part for i, part in enumerate(parts)}
    )
    sliced = [dataset.get_data_slice(0, f"classes[sparse:coo:2:{i}]", 1, 4) for i in range(3)]
    assert [part.tolist() for part in sliced] == [[0, 2], [1, 0], [1.0, 1.0]]


def test_targets_that_are_no_arrays_are_ignored(caplog):
    dataset = make()
    for index in range(2):
        dataset.add_new_data(features(index), {"weight": 0.5, "classes": np.zeros(4 + index, "i4")})
    assert dataset.get_data_keys() == ["classes", "data"]
    assert caplog.text.count("target 'weight' is a float and is ignored") == 1


def test_the_source_waits_for_the_reader():
    class Small(SprintDatasetBase):
        SprintCachedSeqsMax = 20
        SprintCachedSeqsMin = 10

    dataset = make(Small)
    added = []

    def source():
        for index in range(60):
            added.append(dataset.add_new_data(features(index, 2)))
        dataset.finish_sprint_epoch()

    thread = Thread(target=source)
    thread.start()
    assert dataset.is_less_than_num_seqs(0)
    while len(added) < 20:
        time.sleep(0.001)
    time.sleep(0.01)
    assert len(added) <= 21  # one was asked for, and 20 more may come
    for index in range(60):
        assert dataset.is_less_than_num_seqs(index)
        dataset.load_seqs(index, index + 1)
        np.testing.assert_array_equal(dataset.get_data(index, "data").T, features(index, 2))
        assert len(added) - index <= 22
    thread.join()
    assert added == list(range(60))
    assert not dataset.is_less_than_num_seqs(60)


def test_epochs():
    dataset = SprintDatasetBase()
    dataset.use_multiple_epochs()
    dataset.set_dimensions(3, 5)
    dataset.initialize()
    order = []

    def rasr():
        for epoch in (1, 2, 4):
            dataset.wait_for_returnn_epoch(epoch)
            dataset.init_sprint_epoch(epoch)
            for index in dataset.get_seq_order_for_epoch(epoch, 3):
                order.append((epoch, index))
                dataset.set_complete_frac((index + 1) / 3)
                dataset.add_new_data(features(index, epoch), segment_name=f"{epoch}/{index}")
            dataset.finish_sprint_epoch()
        dataset.finalize_sprint()

    thread = Thread(target=rasr)
    thread.start()
    for epoch in (1, 2, 4):
        dataset.init_seq_order(epoch=epoch)
        assert dataset.have_seqs()
        tags = []
        while dataset.is_less_than_num_seqs(len(tags)):
            tags.append(dataset.get_tag(len(tags)))
            assert dataset.get_seq_length(len(tags) - 1)["data"] == epoch
            assert 0 < dataset.get_complete_frac(len(tags) - 1) <= 1
        assert tags == [f"{epoch}/{index}" for index in range(3)]
    thread.join()
    dataset.init_seq_order(epoch=5)
    with pytest.raises(RuntimeError, match="RASR ended before epoch 5"):
        dataset.is_less_than_num_seqs(0)
    with pytest.raises(RuntimeError, match="finalize_sprint was called"):
        dataset.add_new_data(features(0))
    with pytest.raises(RuntimeError, match="epoch 5 began already, not 4"):
        dataset.wait_for_returnn_epoch(4)


def test_unknown_number_of_sequences():
    dataset = make(estimated_num_seqs=10)
    dataset.add_new_data(features(0))
    with pytest.raises(NotImplementedError, match="does not know its number of sequences"):
        _ = dataset.num_seqs
    with pytest.raises(NotImplementedError, match="does not know its number of frames"):
        dataset.get_num_timesteps()
    assert dataset.estimated_num_seqs == 10
    assert dataset.get_complete_frac(0) == 0.1
    assert dataset.get_complete_frac(0, allow_only_lr_suitable=True) is None
    with pytest.raises(RuntimeError, match="thread that adds sequences cannot wait"):
        dataset.is_less_than_num_seqs(1)


def test_sequences_that_are_gone_or_not_there():
    dataset = make()
    fill(dataset, corpus(3))
    dataset.load_seqs(2, 3)
    with pytest.raises(IndexError, match="sequence 1 is gone, as 2 was loaded"):
        dataset.get_data(1, "data")
    with pytest.raises(IndexError, match="there is no sequence 3, only 3"):
        dataset.get_tag(3)
    with pytest.raises(RuntimeError, match="behind the end of the epoch"):
        dataset.add_new_data(features(0))
    assert dataset.get_data_keys() == ["classes", "data", "orth", "speaker_name"]


def test_given_order():
    dataset = make()
    dataset.init_seq_order(epoch=1, seq_list=["seg/0", "seg/2"])
    assert dataset.num_seqs == 2
    dataset.add_new_data(features(0), segment_name="seg/0")
    assert dataset.get_complete_frac(0) == 0.5
    with pytest.raises(SourceFormatError, match=r"sequence 1 is another.*expected 'seg/2', found"):
        dataset.add_new_data(features(1), segment_name="seg/1")
    dataset.add_new_data(features(1), segment_name="seg/2")
    with pytest.raises(SourceFormatError, match="expected no more sequences, found 'seg/3'"):
        dataset.add_new_data(features(1), segment_name="seg/3")
    with pytest.raises(ConfigError, match="RASR only knows segment names"):
        dataset.init_seq_order(epoch=1, seq_order=[0])


@pytest.mark.parametrize(
    ("options", "data", "targets", "error", "match"),
    [
        ({}, np.zeros((4, 3), "f4"), {}, ShapeMismatchError, r"'a': wrong shape.*\[3, time\]"),
        ({}, np.zeros(3, "f4"), {}, ShapeMismatchError, r"found \[3\]"),
        ({}, features(0), np.zeros(3), ShapeMismatchError, r"does not fit to 4 frames.*4 classes"),
        ({"reduce_target_factor": 3}, features(0), np.zeros(4), ShapeMismatchError, "2 classes"),
        (
            {"orth_vocab": {"labels": WORDS}},
            features(0),
            {"classes": np.zeros(4)},
            MissingSequenceError,
            "'a': the trainer did not send target 'orth', but 'orth_classes' is made from it",
        ),
        (
            {"target_maps": {"speaker_name": {}}},
            features(0),
            {},
            MissingSequenceError,
            "target 'speaker_name', but target_maps maps it .found no targets",
        ),
        (
            {"target_maps": {"speaker_name": {"x": 1}}},
            features(0),
            {"speaker_name": "y"},
            MissingSequenceError,
            "map of target 'speaker_name' has no 'y'",
        ),
    ],
)
def test_wrong_data(options, data, targets, error, match):
    dataset = make(**options)
    with pytest.raises(error, match=match):
        dataset.add_new_data(data, targets, segment_name="a")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"reduce_target_factor": 0}, "no positive integer"),
        ({"target_maps": {"orth": 3}}, "map of target 'orth' is malformed"),
        ({"target_maps": {"orth": "/nowhere"}}, "/nowhere: the file does not exist"),
        ({"shuffle_frames_of_nseqs": 2}, "shuffle_frames_of_nseqs is not possible"),
        ({"orth_post_process": "unknown"}, "unknown post-processor"),
    ],
)
def test_wrong_options(options, match):
    with pytest.raises(SeqshardError, match=match):
        SprintDatasetBase(**options)


def test_no_features():
    with pytest.raises(ShapeMismatchError, match="there are no features"):
        SprintDatasetBase().set_dimensions(0, 5)


def test_pickle_keeps_options():
    options = {"orth_vocab": {"labels": WORDS}, "str_add_final_zero": True, "input_stddev": 2.0}
    copy = pickle.loads(pickle.dumps(SprintDatasetBase(name="x", **options)))
    assert copy.name == "x"
    assert copy.str_add_final_zero
    copy.set_dimensions(3, 5)
    copy.add_new_data(features(0), {"orth": "hello you"})
    assert copy.get_data(0, "orth_classes").tolist() == [1, 0]
    np.testing.assert_array_equal(copy.get_data(0, "data").T, features(0) / 2)
