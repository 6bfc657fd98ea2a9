"""The demo corpus, built and compared with its ground truth and with RETURNN's own readers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from seqshard.datasets import ManifestDataset

DEMO = Path(__file__).parents[2] / "examples" / "demo"
STREAMS = {"data", "classes", "orth", "speaker"}
# RETURNN leaves files for the garbage collector to close.
RETURNN_LEAKS = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
ORDERS = ["default", "reverse", "random", "random:7", "sorted", "sorted_reverse"]


def truth() -> dict[str, dict[str, np.ndarray]]:
    """What the C++ side printed, by tag."""
    values = np.load(DEMO / "truth.npz")
    tags = values["tags"].tolist()
    frames = np.split(values["features"], np.cumsum(values["num_frames"])[:-1])
    labels = np.split(values["labels"], np.cumsum(values["num_frames"])[:-1])
    texts = np.split(values["orth"], np.cumsum(values["orth_len"])[:-1])
    speakers = values["speaker"][:, None]
    columns = zip(tags, frames, labels, texts, speakers, strict=True)
    return {
        tag: {"data": data, "classes": classes, "orth": orth, "speaker": speaker}
        for tag, data, classes, orth, speaker in columns
    }


@pytest.mark.parametrize("order", ORDERS)
def test_every_sequence_equals_the_ground_truth(build_demo, order):
    dataset = ManifestDataset(build_demo("--num_shards=4", f"--seq_ordering={order}"))
    dataset.initialize()
    dataset.init_seq_order(epoch=1)
    expected = truth()
    assert sorted(dataset.get_all_tags()) == sorted(expected)
    for i in range(dataset.num_seqs):
        for key in STREAMS:
            np.testing.assert_array_equal(
                dataset.get_data(i, key), expected[dataset.get_tag(i)][key]
            )


@RETURNN_LEAKS
@pytest.mark.parametrize("order", ORDERS)
def test_the_order_is_the_one_that_was_asked_for(build_demo, order):
    from returnn.sprint.cache import open_file_archive

    def read(name: str) -> tuple[list[str], list[int]]:
        dataset = ManifestDataset(build_demo("--num_shards=4", f"--seq_ordering={name}"))
        dataset.initialize()
        return dataset.get_all_tags(), dataset._get_seq_lens().tolist()

    default_tags, default_lengths = read("default")
    tags, _ = read(order)
    archive = open_file_archive(str(DEMO / "features.bundle"))
    files = [name for name in archive.file_list() if not name.endswith(".attribs")]
    assert default_tags == files
    ranks = range(len(default_tags))
    if order == "default":
        expected = list(ranks)
    elif order == "reverse":
        expected = list(reversed(ranks))
    elif order == "sorted":
        expected = sorted(ranks, key=lambda i: default_lengths[i])
    elif order == "sorted_reverse":
        expected = sorted(ranks, key=lambda i: -default_lengths[i])
    else:
        assert tags != default_tags
        assert sorted(tags) == sorted(default_tags)
        assert (tags == read("random:1")[0]) == (order == "random")
        return
    assert tags == [default_tags[i] for i in expected]


@RETURNN_LEAKS
def test_returnn_reads_the_shards_as_it_reads_the_sources(build_demo):
    from returnn.datasets.hdf import HDFDataset
    from returnn.datasets.sprint import SprintCacheDataset

    files = sorted(map(str, build_demo("--num_shards=4").glob("*.hdf")))
    shards = HDFDataset(files=files)
    shards.initialize()
    shards.init_seq_order(epoch=1)
    labeling = {
        "silence_phone": "[SILENCE]",
        "allophone_file": str(DEMO / "allophones.txt"),
        "state_tying_file": str(DEMO / "state-tying.txt"),
    }
    alignment = {"filename": str(DEMO / "alignment.bundle"), "allophone_labeling": labeling}
    caches = SprintCacheDataset(
        data={"data": {"filename": str(DEMO / "features.bundle")}, "classes": alignment}
    )
    for key in ("data", "classes"):
        assert tuple(shards.num_outputs[key]) == tuple(caches.num_outputs[key])
    hdfs = {key: HDFDataset(files=[str(DEMO / f"{key}.hdf")]) for key in ("orth", "speaker")}
    for key, dataset in hdfs.items():
        dataset.initialize()
        dataset.init_seq_order(epoch=1)
        assert tuple(shards.num_outputs[key]) == tuple(dataset.num_outputs["data"])
        assert shards.labels.get(key, []) == dataset.labels["data"]
        assert shards.is_data_sparse(key) == dataset.is_data_sparse("data")
    assert shards.num_seqs == caches.num_seqs == 120
    for i in range(shards.num_seqs):
        shards.load_seqs(i, i + 1)
        tag = shards.get_tag(i)
        source = caches.get_dataset_seq_for_name(tag)
        expected = {key: source.get_data(key) for key in ("data", "classes")}
        expected |= {key: d.get_data_by_seq_tag(tag, "data") for key, d in hdfs.items()}
        for key, array in expected.items():
            found = shards.get_data(i, key)
            assert found.dtype == array.dtype
            np.testing.assert_array_equal(found, array)
            assert shards.get_seq_length(i)[key] == len(array)


@pytest.mark.parametrize("order", ["default", "random", "sorted"])
@pytest.mark.parametrize("num_shards", [1, 3, 7])
def test_shards_are_balanced(build_demo, order, num_shards):
    output = build_demo(f"--num_shards={num_shards}", f"--seq_ordering={order}")
    manifest = json.loads((output / "manifest.json").read_text())
    sizes = [shard["num_bytes"] for shard in manifest["shards"]]
    longest = max(len(values["data"]) for values in truth().values()) * (16 * 4 + 1)
    assert len(sizes) == num_shards
    assert max(sizes) - sum(sizes) / num_shards <= longest


def test_shard_size_decides_the_number_of_shards(build_demo):
    manifest = json.loads((build_demo("--shard_size=200kB") / "manifest.json").read_text())
    assert len(manifest["shards"]) == -(-manifest["num_bytes"] // 200_000) == 9


def test_more_shards_than_sequences_are_not_made(build_demo):
    manifest = json.loads((build_demo("--num_shards=500") / "manifest.json").read_text())
    assert [shard["num_seqs"] for shard in manifest["shards"]] == [1] * 120


def test_statistics_are_those_of_the_data(build_demo):
    output = build_demo("--num_shards=4")
    statistics = json.loads((output / "manifest.json").read_text())["statistics"]
    values = np.load(DEMO / "truth.npz")
    features = values["features"].astype(np.float64)
    np.testing.assert_allclose(statistics["data"]["mean"], features.mean(axis=0), atol=1e-12)
    np.testing.assert_allclose(statistics["data"]["std"], features.std(axis=0), rtol=1e-12)
    counts = np.bincount(values["labels"], minlength=124)
    assert statistics["classes"]["counts"] == counts.tolist()
    lengths = values["num_frames"]
    assert statistics["length"]["min"] == lengths.min()
    assert statistics["length"]["max"] == lengths.max()
    assert statistics["length"]["mean"] == pytest.approx(lengths.mean())
    assert sum(statistics["length"]["histogram"].values()) == len(lengths)


def test_nothing_but_the_dataset_is_left_in_the_folder(build_demo):
    names = {path.name for path in build_demo("--num_shards=4").iterdir()}
    shards = {f"data-{i:05d}-of-00004.hdf" for i in range(4)}
    assert names == shards | {"index.arrow", "manifest.json", "provenance.json"}


def test_provenance_names_versions_and_runner(build_demo):
    provenance = json.loads((build_demo("--num_shards=4") / "provenance.json").read_text())
    assert provenance["runner"] == "DirectRunner"
    assert {"seqshard", "python", "apache-beam", "h5py", "numpy"} <= set(provenance["versions"])
    assert provenance["started"] <= provenance["finished"]
