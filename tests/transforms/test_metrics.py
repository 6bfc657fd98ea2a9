"""Counters and distributions of whole builds, as runners report them."""

from __future__ import annotations

import h5py
import numpy as np
import pytest

from seqshard.io.config import load_corpus
from seqshard.io.manifest import load_manifest
from seqshard.io.receipts import Rejection, rejection_kind
from seqshard.io.sprint.source import FeatureSource
from seqshard.io.sprint.writer import ArchiveWriter
from seqshard.pipelines.build import build, summary
from seqshard.pipelines.command import import_beam
from seqshard.pipelines.options import parse_build_options
from seqshard.runners.select import make_options
from seqshard.transforms.metrics import NAMESPACE

RUNNERS = {
    "one thread": ["--runner=DirectRunner"],
    "threads": ["--runner=DirectRunner", "--direct_num_workers=2"],
    "portable": ["--runner=PortableRunner", "--job_endpoint=embed"],
}
REJECTED = {"missing": 1, "doubled": 1, "not-listed": 1, "length": 1, "damaged": 1}
DIM = 2
FRAME_BYTES = 4 + 4 * DIM + 16


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """Three good sequences, and one for every kind of rejection."""
    folder = tmp_path_factory.mktemp("corpus")
    lengths = {"a": 3, "b": 4, "c": 5, "missing": 3, "unlisted": 3, "long": 50, "twice": 3}
    features = {tag: np.ones((n, DIM), "float32") for tag, n in lengths.items()}
    with ArchiveWriter(folder / "features.0.cache") as archive:
        for tag, frames in [*features.items(), ("damaged", features["a"])]:
            archive.add_features(tag, frames)
    with ArchiveWriter(folder / "features.1.cache") as archive:
        archive.add_features("twice", features["twice"])
    spoil_last_sequence(folder / "features.0.cache")
    tags = ["a", "b", "c", "unlisted", "long", "twice", "damaged"]
    with h5py.File(folder / "other.hdf", "w") as file:
        file["inputs"] = np.ones((len(tags), 3), "float32")
        file["seqLengths"] = np.ones((len(tags), 1), "int32")
        file["seqTags"] = np.array(tags, "S")
        file.attrs["inputPattSize"] = 3
    keep = [tag for tag in [*lengths, "damaged"] if tag != "unlisted"]
    (folder / "keep.txt").write_text("\n".join(keep))
    path = folder / "corpus.toml"
    path.write_text(
        '[streams.data]\nsource = "sprint-features"\nfiles = ["features.*.cache"]\n'
        '[streams.other]\nsource = "hdf"\nfiles = ["other.hdf"]\nkey = "data"\n'
        '[sequences]\non_missing = "drop"\nsegments = "keep.txt"\nmax_length = 10\n'
    )
    return path


def spoil_last_sequence(path):
    """Changes the dimension of its second frame: only a reader of the payload notices."""
    with FeatureSource(str(path)) as source:
        position = int(source.index().position.max())
    with open(path, "r+b") as file:
        file.seek(position)
        payload = file.read(200)
        first = payload.index(DIM.to_bytes(4, "little") + np.float32(1).tobytes())
        file.seek(position + first + FRAME_BYTES)
        file.write(b"\x07")


def run(config, output, *flags):
    """Runs a build; returns its counters and its distributions."""
    import_beam(False)
    import apache_beam as beam

    args = [f"--config={config}", f"--output={output}", "--num_shards=2", "--on_error=skip"]
    options = parse_build_options([*args, *flags], "build")
    pipeline = beam.Pipeline(options=make_options(options.runner, options.beam_args, 0))
    output.mkdir(exist_ok=True)
    build(pipeline, load_corpus(options.config), options, {})
    result = pipeline.run()
    result.wait_until_finish()
    found = result.metrics().query(beam.metrics.MetricsFilter().with_namespace(NAMESPACE))
    counters, distributions = {}, {}
    for metric in found["counters"]:
        name = metric.key.metric.name
        counters[name] = counters.get(name, 0) + metric.committed
    for metric in found["distributions"]:
        distributions[metric.key.metric.name] = metric.committed
    return counters, distributions


@pytest.mark.parametrize("flags", RUNNERS.values(), ids=RUNNERS)
def test_counters_and_distributions_of_a_build(flags, config, tmp_path):
    output = tmp_path / "out"
    counters, distributions = run(config, output, *flags)
    manifest = load_manifest(str(output))
    files = [shard.file_bytes for shard in manifest.shards]
    assert counters == {
        "sources-indexed": 3,
        "sequences-indexed": 16,
        "sequences-joined": 4,
        "sequences-rejected": sum(REJECTED.values()),
        **{f"sequences-rejected-{kind}": number for kind, number in REJECTED.items()},
        "shards-written": 2,
        "bytes-read": counters["bytes-read"],
        "bytes-written": sum(files),
    }
    # Payload of archives has more than the values, and that of the damaged sequence is read too.
    assert counters["bytes-read"] > manifest.num_bytes
    assert distributions["source-milliseconds"].count == 3
    assert distributions["shard-milliseconds"].count == 2
    sizes = distributions["shard-bytes"]
    assert (sizes.min, sizes.max, sizes.sum) == (min(files), max(files), sum(files))


def test_shards_that_are_kept_are_not_counted_as_written(config, tmp_path):
    output = tmp_path / "out"
    run(config, output)
    counters, distributions = run(config, output)
    assert counters["shards-kept"] == 2
    assert not {"shards-written", "bytes-written", "bytes-read"} & counters.keys()
    assert "shard-milliseconds" not in distributions


def test_the_summary_tells_speed_and_reasons(config, tmp_path):
    run(config, tmp_path / "out")
    manifest = load_manifest(str(tmp_path / "out"))
    text = summary(manifest, str(tmp_path / "out"), 2.0)
    kinds = "1 damaged, 1 doubled, 1 length, 1 missing, 1 not-listed"
    assert f"3 sequences in {len(manifest.shards)} shards" in text
    assert text.endswith(f"5 rejected ({kinds}); 2.0 s, 0.0 MB/s")


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("missing in this stream, but in stream 'data': a.cache", "missing"),
        ("12 times in this stream: a.cache", "doubled"),
        ("not in the segment list", "not-listed"),
        ("7 frames are outside min_length 1 and max_length 5", "length"),
        ("entry 'x', byte 7: 7 frames are outside the archive", "damaged"),
    ],
)
def test_kinds_of_reasons(reason, kind):
    assert rejection_kind(Rejection("tag", "data", "a.cache", reason)) == kind
