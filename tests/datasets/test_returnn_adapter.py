"""A built dataset inside stock RETURNN: its own tools and composite datasets read it."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

pytest.importorskip("returnn")

from returnn.config import Config
from returnn.datasets.basic import init_dataset
from returnn.datasets.hdf import HDFDataset, HDFDatasetWriter

from seqshard.datasets.returnn import ManifestDataset
from seqshard.pipelines.cli import main as cli
from seqshard.pipelines.export_returnn import returnn_config

pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)


@pytest.fixture(scope="module")
def dataset_folder(build_demo):
    return build_demo("--num_shards=4", "--seq_ordering=random")


def shards(folder):
    return sorted(map(str, folder.glob("data-*.hdf")))


def contents(dataset, epoch: int) -> list[tuple[str, dict[str, np.ndarray]]]:
    """What RETURNN's engines read of an epoch."""
    dataset.init_seq_order(epoch=epoch)
    found = []
    seq_idx = 0
    while dataset.is_less_than_num_seqs(seq_idx):
        dataset.load_seqs(seq_idx, seq_idx + 1)
        data = {key: dataset.get_data(seq_idx, key) for key in dataset.get_data_keys()}
        found.append((dataset.get_tag(seq_idx), data))
        seq_idx += 1
    return found


def assert_same(a, b):
    assert [tag for tag, _ in a] == [tag for tag, _ in b]
    for (_, x), (_, y) in zip(a, b, strict=True):
        assert x.keys() == y.keys()
        for key in x:
            assert x[key].dtype == y[key].dtype
            np.testing.assert_array_equal(x[key], y[key])


@pytest.mark.parametrize("order", ["default", "random", "laplace:.10", "sorted_reverse"])
def test_returnn_reads_it_like_its_own_hdf_dataset(dataset_folder, order):
    options = {"seq_ordering": order, "partition_epoch": 3}
    ours = init_dataset({"class": ManifestDataset, "manifest": str(dataset_folder), **options})
    theirs = init_dataset({"class": "HDFDataset", "files": shards(dataset_folder), **options})
    for epoch in (1, 2, 4):
        assert_same(contents(ours, epoch), contents(theirs, epoch))
    assert ours.num_outputs == theirs.num_outputs
    assert ours.get_all_tags() == theirs.get_all_tags()
    for key in theirs.get_data_keys():
        assert ours.get_data_shape(key) == theirs.get_data_shape(key)
        assert ours.get_seq_length(0)[key] == theirs.get_seq_length(0)[key]


def test_batches_of_returnn_are_the_same(dataset_folder):
    def batches(dataset):
        dataset.init_seq_order(epoch=1)
        generator = dataset.generate_batches(
            recurrent_net=True, batch_size=900, max_seqs=4, used_data_keys=["data", "classes"]
        )
        found = []
        while generator.has_more():
            (batch,) = generator.peek_next_n(1)
            found.append(
                [(s.seq_idx, s.seq_start_frame.dict, s.seq_end_frame.dict) for s in batch.seqs]
            )
            generator.advance(1)
        return found

    options = {"seq_ordering": "laplace:.10", "chunking": "100:50"}
    ours = init_dataset({"class": ManifestDataset, "manifest": str(dataset_folder), **options})
    theirs = init_dataset({"class": "HDFDataset", "files": shards(dataset_folder), **options})
    assert batches(ours) == batches(theirs)


def test_returnns_meta_dataset_combines_it(dataset_folder):
    def meta(sub):
        return init_dataset(
            {
                "class": "MetaDataset",
                "datasets": {"main": {**sub, "seq_ordering": "random"}},
                "data_map": {"data": ("main", "data"), "text": ("main", "orth")},
                "seq_order_control_dataset": "main",
            }
        )

    ours = meta({"class": ManifestDataset, "manifest": str(dataset_folder)})
    theirs = meta({"class": "HDFDataset", "files": shards(dataset_folder)})
    assert_same(contents(ours, 2), contents(theirs, 2))


def test_returnns_dump_tool_copies_it(dataset_folder, tmp_path):
    dataset = init_dataset({"class": ManifestDataset, "manifest": str(dataset_folder)})
    dataset.labels = {}
    writer = HDFDatasetWriter(str(tmp_path / "dump.hdf"))
    writer.dump_from_dataset(dataset, use_progress_bar=False)
    writer.close()
    copy = HDFDataset(files=[str(tmp_path / "dump.hdf")])
    copy.initialize()
    # The tool leaves the key "orth" out.
    expected = [
        (tag, {k: v for k, v in data.items() if k != "orth"}) for tag, data in contents(dataset, 1)
    ]
    assert_same(contents(copy, 1), expected)


def test_it_travels_to_a_worker(dataset_folder):
    dataset = init_dataset(
        {"class": ManifestDataset, "manifest": str(dataset_folder), "seq_ordering": "random"}
    )
    dataset.init_seq_order(epoch=3)
    other = pickle.loads(pickle.dumps(dataset))
    assert other.epoch == 3
    assert_same(contents(other, 3), contents(dataset, 3))


def test_the_exported_section_is_a_working_config(dataset_folder, tmp_path, capsys):
    manifest = dataset_folder / "manifest.json"
    assert cli(["export-returnn", str(manifest), "--partition_epoch=2"]) == 0
    text = capsys.readouterr().out
    config = Config()
    (tmp_path / "returnn.config").write_text(text)
    config.load_file(str(tmp_path / "returnn.config"))
    train = config.typed_value("train")
    assert train["partition_epoch"] == 2
    assert config.typed_value("extern_data")["data"]["dim"] == 16
    sub = train["get_sub_epoch_dataset"](train["files"])
    dataset = init_dataset(sub)
    assert len(contents(dataset, 1)) == 120


def test_more_sub_epochs_than_shards_are_refused(dataset_folder):
    with pytest.raises(ValueError, match=r"--partition_epoch.*expected 1 to 4, found 5"):
        returnn_config(str(dataset_folder), 5, "random")
