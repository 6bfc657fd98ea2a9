"""Datasets of any choice of streams: stock RETURNN and our readers see the same in the shards."""

import pathlib
import tomllib

import numpy as np
import pytest
from returnn.datasets.hdf import HDFDataset as ReturnnHDFDataset

from seqshard.datasets import HDFDataset, ManifestDataset
from seqshard.pipelines.build import main as build
from seqshard.pipelines.verify import main as verify

DEMO_CONFIG = pathlib.Path(__file__).parents[2] / "examples" / "demo.toml"
SUBSETS = [["data"], ["classes"], ["orth"], ["data", "orth"], ["classes", "speaker"]]


def write_config(path, streams):
    """The demo's configuration with some of its streams."""
    tables = tomllib.loads(DEMO_CONFIG.read_text())["streams"]
    lines = []
    for name in streams:
        lines.append(f"[streams.{name}]")
        for option, value in tables[name].items():
            if option == "files":
                value = [str(DEMO_CONFIG.parent / file) for file in value]
            elif option in ("allophones", "state_tying"):
                value = str(DEMO_CONFIG.parent / value)
            lines.append(f"{option} = {value!r}")
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("streams", SUBSETS, ids="-".join)
def test_returnn_reads_the_shards_of_any_streams(streams, tmp_path):
    config = write_config(tmp_path / "some.toml", streams)
    output = tmp_path / "out"
    assert build([f"--config={config}", f"--output={output}", "--num_shards=2"]) == 0
    assert verify([str(output)]) == 0
    files = sorted(map(str, output.glob("*.hdf")))
    theirs, ours, manifest = ReturnnHDFDataset(files), HDFDataset(files), ManifestDataset(output)
    for dataset in (theirs, ours, manifest):
        dataset.initialize()
        dataset.init_seq_order(epoch=1)
    assert theirs.num_seqs == ours.num_seqs == manifest.num_seqs == 120
    assert ours.num_outputs == theirs.num_outputs
    assert ours.get_data_keys() == theirs.get_data_keys()
    for seq_idx in range(0, 120, 7):
        theirs.load_seqs(seq_idx, seq_idx + 1)
        assert theirs.get_tag(seq_idx) == ours.get_tag(seq_idx) == manifest.get_tag(seq_idx)
        for key in streams:
            expected = theirs.get_data(seq_idx, key)
            for dataset in (ours, manifest):
                found = dataset.get_data(seq_idx, key)
                assert found.dtype == expected.dtype
                np.testing.assert_array_equal(found, expected)
        assert ours.get_seq_length(seq_idx) == theirs.get_seq_length(seq_idx)


def test_shards_of_one_stream_are_sources_again(tmp_path):
    config = write_config(tmp_path / "data.toml", ["data"])
    assert build([f"--config={config}", f"--output={tmp_path / 'a'}", "--num_shards=3"]) == 0
    again = tmp_path / "again.toml"
    again.write_text('[streams.data]\nsource = "hdf"\nfiles = ["a/data-*.hdf"]\n')
    assert build([f"--config={again}", f"--output={tmp_path / 'b'}", "--num_shards=3"]) == 0
    shards = sorted((tmp_path / "a").glob("*.hdf"))
    assert len(shards) == 3
    for shard in shards:
        assert (tmp_path / "b" / shard.name).read_bytes() == shard.read_bytes()
