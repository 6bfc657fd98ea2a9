"""RETURNN's own datasets inside of MetaDataset and DistributeFilesDataset."""

import numpy as np
import pytest
from returnn.datasets.basic import init_dataset as init_dataset_of_returnn

from seqshard.datasets import HDFDataset, get_dataset_class, init_dataset
from seqshard.datasets.writers import SimpleHDFWriter


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("members")
    rng = np.random.default_rng(3)
    paths = []
    for number in range(4):
        paths.append(str(folder / f"part-{number}.hdf"))
        with SimpleHDFWriter(paths[-1], dim=3) as writer:
            for index in range(5):
                inputs = rng.standard_normal((1, 4 + index, 3)).astype("float32")
                tag = f"seq-{5 * number + index}"
                writer.insert_batch(inputs, [4 + index], [tag])
    return paths


def read_epoch(dataset, epoch):
    dataset.init_seq_order(epoch=epoch)
    seen, index = [], 0
    while dataset.is_less_than_num_seqs(index):
        dataset.load_seqs(index, index + 1)
        arrays = {key: dataset.get_data(index, key).tolist() for key in dataset.get_data_keys()}
        seen.append((dataset.get_tag(index), dataset.get_complete_frac(index), arrays))
        index += 1
    dataset.finish_epoch(free_resources=True)
    return seen


def joined(files):
    """Ours leads, one of RETURNN's follows."""
    labels = [{"classes": np.arange(n % 7, dtype="int32")} for n in range(20)]
    return {
        "class": "MetaDataset",
        "datasets": {
            "hdf": {"class": "HDFDataset", "files": files, "seq_ordering": "random"},
            "static": {"class": "StaticDataset", "data": labels, "output_dim": {"classes": (7, 1)}},
        },
        "data_map": {"data": ("hdf", "data"), "classes": ("static", "classes")},
        "seq_order_control_dataset": "hdf",
    }


def streamed(files):
    """With an unknown number of sequences."""
    return {
        "class": "PostprocessingDataset",
        "dataset": {"class": "HDFDataset", "files": files, "seq_ordering": "laplace:2"},
        "map_seq_stream": every_second,
    }


def every_second(sequences, **_):
    for position, sequence in enumerate(sequences):
        if position % 2:
            yield sequence


def distributed(files):
    return {
        "class": "DistributeFilesDataset",
        "files": files,
        "get_sub_epoch_dataset": streamed,
        "partition_epoch": 2,
        "seq_ordering": "random",
        "use_worker_proc": False,
    }


@pytest.mark.parametrize("options", [joined, streamed, distributed])
def test_same_as_inside_of_returnn(files, options):
    ours, theirs = init_dataset(options(files)), init_dataset_of_returnn(options(files))
    for epoch in (1, 2, 5):
        assert read_epoch(ours, epoch) == read_epoch(theirs, epoch)


def test_own_classes_come_first():
    assert get_dataset_class("HDFDataset") is HDFDataset
    assert get_dataset_class("NoSuchDataset") is None
    theirs = get_dataset_class("MapDatasetWrapper")
    assert theirs.__module__ == "returnn.datasets.map"
    assert get_dataset_class(theirs) is theirs
    with pytest.raises(TypeError, match="int is no Dataset"):
        get_dataset_class(int)


def test_a_dataset_of_returnn_is_only_initialized(files):
    theirs = init_dataset_of_returnn({"class": "HDFDataset", "files": files})
    assert init_dataset(theirs) is theirs
