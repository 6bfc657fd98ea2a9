"""Verification finds a flipped byte wherever it is."""

import contextlib
import json
import re
import shutil

import h5py
import numpy as np
import pytest

from seqshard.io.errors import ManifestError, ManifestVersionError
from seqshard.io.manifest import encode_manifest, load_manifest
from seqshard.io.verification import verify_dataset

NUM_SEQS = 30
LABELS = [f"label-{i}" for i in range(5)]


def write_sources(folder):
    rng = np.random.RandomState(5)
    lengths = rng.randint(1, 40, NUM_SEQS)
    tags = np.array([f"corpus/sequence-{i}".encode() for i in range(NUM_SEQS)])
    with h5py.File(folder / "data.hdf", "w") as file:
        file["inputs"] = rng.randn(lengths.sum(), 4).astype("f4")
        file["targets/data/classes"] = rng.randint(0, 5, lengths.sum()).astype("i4")
        file.create_group("targets/size").attrs["classes"] = [5, 1]
        file["targets/labels/classes"] = np.array([label.encode() for label in LABELS])
        file["seqLengths"] = np.stack([lengths, lengths], axis=1).astype("i4")
        file["seqTags"] = tags
    (folder / "corpus.toml").write_text(
        '[streams.data]\nsource = "hdf"\nfiles = "data.hdf"\n'
        '[streams.classes]\nsource = "hdf"\nfiles = "data.hdf"\n'
        "[sequences]\nmin_length = 5\n"
    )


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    from seqshard.pipelines.build import main

    folder = tmp_path_factory.mktemp("built")
    write_sources(folder)
    args = [f"--config={folder / 'corpus.toml'}", f"--output={folder / 'out'}", "--num_shards=3"]
    assert main(args) == 0
    assert load_manifest(str(folder / "out")).num_rejected > 0
    return folder / "out"


@pytest.fixture
def dataset(built, tmp_path):
    return shutil.copytree(built, tmp_path / "out")


def problems(dataset):
    return [str(problem) for problem in verify_dataset(str(dataset))[1]]


def flip(path, place, bit=1):
    data = bytearray(path.read_bytes())
    data[place] ^= bit
    path.write_bytes(data)


@pytest.mark.parametrize("num_workers", [1, 4])
def test_an_intact_dataset_has_no_problems(built, num_workers):
    manifest, found = verify_dataset(str(built / "manifest.json"), num_workers)
    assert found == []
    assert manifest.num_seqs + manifest.num_rejected == NUM_SEQS


def shard_places(path):
    """Byte positions inside every kind of content of a shard."""
    with h5py.File(path) as file:
        places = {
            name: file[name].id.get_offset() + file[name].id.get_storage_size() // 2
            for name in ("inputs", "targets/data/classes", "seqTags", "seqLengths")
        }
    return places | {"signature": 1, "superblock": 40, "header": 600, "end": -1}


@pytest.mark.parametrize(
    "place",
    ["inputs", "targets/data/classes", "seqTags", "seqLengths", "signature", "superblock",
     "header", "end"],
)  # fmt: skip
@pytest.mark.parametrize("shard", [0, 2])
def test_a_flipped_byte_of_a_shard(place, shard, dataset):
    path = dataset / f"data-0000{shard}-of-00003.hdf"
    flip(path, shard_places(path)[place])
    found = problems(dataset)
    assert any(f"{path}: the hash is wrong" in line for line in found)
    others = {f"data-0000{i}-of-00003.hdf" for i in range(3)} - {path.name}
    assert not any(name in line for name in others for line in found)


@pytest.mark.parametrize(
    ("stream", "name"), [("data", "inputs"), ("classes", "targets/data/classes")]
)
def test_damaged_payload_names_the_sequence(stream, name, dataset):
    path = dataset / "data-00001-of-00003.hdf"
    with h5py.File(path) as file:
        dataset_bytes = file[name].id.get_offset()
        lengths = file["seqLengths"][:, 0]
        tags = file["seqTags"][...]
    frame_bytes = 16 if stream == "data" else 4
    place = int(dataset_bytes + (lengths[:3].sum() + 1) * frame_bytes)
    flip(path, place)
    tag = tags[3].decode()
    begin = dataset_bytes + lengths[:3].sum() * frame_bytes
    expected = f"entry {tag!r}, byte {begin}: the payload of stream {stream!r}"
    assert sum(expected in line for line in problems(dataset)) == 1


def test_all_damaged_shards_are_listed(dataset):
    (dataset / "data-00000-of-00003.hdf").unlink()
    flip(dataset / "data-00001-of-00003.hdf", 1)
    path = dataset / "data-00002-of-00003.hdf"
    path.write_bytes(path.read_bytes()[:-100])
    text = "\n".join(problems(dataset))
    assert "data-00000-of-00003.hdf: the file is missing" in text
    assert "data-00001-of-00003.hdf: the hash is wrong" in text
    assert "data-00002-of-00003.hdf: the size is wrong" in text


@pytest.mark.parametrize("part", [0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 0.999])
def test_a_flipped_byte_of_the_index(part, dataset):
    path = dataset / "index.arrow"
    flip(path, int(part * path.stat().st_size), 0xFF)
    flip(dataset / "data-00002-of-00003.hdf", 3000)
    found = problems(dataset)
    assert f"{path}: the hash is wrong" in found[0]
    assert any("data-00002-of-00003.hdf: the hash is wrong" in line for line in found)


@pytest.mark.parametrize("part", [0.0, 0.5, 0.99])
def test_a_flipped_byte_of_the_rejected_list(part, dataset):
    path = dataset / "rejected.jsonl"
    flip(path, int(part * path.stat().st_size))
    assert any(f"{path}: the hash is wrong" in line for line in problems(dataset))


@pytest.mark.parametrize("name", ["index.arrow", "rejected.jsonl", "data-00001-of-00003.hdf"])
def test_missing_files(name, dataset):
    (dataset / name).unlink()
    assert any(f"{name}: the file is missing" in line for line in problems(dataset))


def edit(dataset, change):
    path = dataset / "manifest.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def swap_shards(m):
    m["shards"][0], m["shards"][1] = m["shards"][1], m["shards"][0]


FIELDS = {
    "num-rejected": (lambda m: m.update(num_rejected=m["num_rejected"] + 1), "not complete"),
    "no-rejected": (lambda m: m.update(rejected=None), "rejected sequences, but no list"),
    "num-frames": (
        lambda m: m["num_frames"].update(data=1),
        "num_frames of stream 'data'.*found 1",
    ),
    "dtype": (lambda m: m["streams"]["data"].update(dtype="int32"), "'data' has another format"),
    "dim": (lambda m: m["streams"]["classes"].update(dim=6), "'classes' has another format"),
    "sparse": (lambda m: m["streams"]["classes"].update(sparse=False), "has another format"),
    "ndim": (lambda m: m["streams"]["data"].update(ndim=3), "'data' has another format"),
    "labels": (lambda m: m["streams"]["classes"]["labels"].reverse(), "has another format"),
    "offset": (lambda m: m["shards"][1]["arrays"]["data"].update(offset=0), "not where"),
    "file-bytes": (lambda m: m["shards"][2].update(file_bytes=7), "the size is wrong.*expected 7"),
    "hash": (lambda m: m["shards"][2].update(xxh3_128="0" * 32), "the hash is wrong.*expected 000"),
    "index-hash": (lambda m: m["index"].update(xxh3_128="0" * 32), "index.arrow: the hash"),
    "index-size": (lambda m: m["index"].update(num_bytes=3), "index.arrow: the size is wrong"),
    "swapped": (swap_shards, "index and manifest differ"),
    "mean": (lambda m: m["statistics"]["data"]["mean"].__setitem__(0, 3.5), "the statistics"),
    "counts": (lambda m: m["statistics"]["classes"]["counts"].__setitem__(0, 0), "the statistics"),
    "length": (lambda m: m["statistics"]["length"].update(max=1), "the statistics"),
}


@pytest.mark.parametrize("case", FIELDS)
def test_changed_fields_of_the_manifest(case, dataset):
    change, words = FIELDS[case]
    edit(dataset, change)
    found = "\n".join(problems(dataset))
    assert re.search(words, found), found


def test_a_manifest_of_another_build_is_noticed(dataset, built, tmp_path):
    # The same shards, but of other sequences: an older manifest was copied back.
    other = tmp_path / "other"
    other.mkdir()
    write_sources(other)
    from seqshard.pipelines.build import main

    args = [f"--config={other / 'corpus.toml'}", f"--output={other / 'out'}"]
    assert main([*args, "--num_shards=3", "--seq_ordering=reverse"]) == 0
    shutil.copy(other / "out" / "manifest.json", dataset / "manifest.json")
    text = "\n".join(problems(dataset))
    assert "index.arrow: the hash is wrong" in text or "index.arrow: the size" in text
    for shard in range(3):
        assert f"data-0000{shard}-of-00003.hdf: the" in text


REFUSED = {
    "format": (lambda m: m.update(format="other"), "not a manifest of a dataset.*found 'other'"),
    "outside": (lambda m: m["shards"][0].update(path="../x.hdf"), "outside its folder.*'../x.hdf'"),
    "absolute": (lambda m: m["index"].update(path="/etc/passwd"), "outside its folder"),
    "url": (lambda m: m["index"].update(path="s3://x"), "outside its folder"),
    "hidden": (lambda m: m["shards"][0].update(path=".build"), "outside its folder"),
    "no-path": (lambda m: m["shards"][0].update(path=""), "outside its folder"),
    "missing": (lambda m: m.pop("shards"), "malformed.*`shards`"),
    "type": (lambda m: m.update(num_seqs="3"), "malformed.*num_seqs"),
    "num-seqs": (lambda m: m.update(num_seqs=3), "num_seqs is not the sum.*expected 3"),
    "num-bytes": (lambda m: m.update(num_bytes=3), "num_bytes is not the sum"),
    "no-dtype": (lambda m: m["streams"]["data"].update(dtype="float33"), "'data' is none that can"),
    "object": (lambda m: m["streams"]["data"].update(dtype="O"), "dtype 'O'"),
    "shape": (lambda m: m["streams"]["data"].update(shape=[-4]), r"shape \(-4,\)"),
    "frames": (lambda m: m["shards"][0]["num_frames"].update(data=1), "described inconsistently"),
    "stream": (lambda m: m["streams"].pop("data"), "does not have the streams"),
    "negative": (
        lambda m: m["shards"][0]["arrays"]["data"].update(offset=-1),
        "described inconsistently.*byte -1",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_manifests_that_make_no_sense_are_refused(case, dataset):
    change, words = REFUSED[case]
    edit(dataset, change)
    with pytest.raises(ManifestError, match=f"manifest.json.*{words}"):
        load_manifest(str(dataset))


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_other_versions_are_refused(version, dataset):
    edit(dataset, lambda m: m.update(version=version))
    with pytest.raises(ManifestVersionError, match=r"version is unknown.*Update seqshard"):
        load_manifest(str(dataset))


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"format": "\xff"}', b"[" * 100_000,
             b'{"a":' * 100_000]
)  # fmt: skip
def test_files_that_are_no_manifest_are_refused(data, dataset):
    (dataset / "manifest.json").write_bytes(data)
    with pytest.raises(ManifestError, match=r"manifest\.json"):
        verify_dataset(str(dataset))


def test_no_manifest_is_no_dataset(dataset):
    (dataset / "manifest.json").unlink()
    with pytest.raises(ManifestError, match=r"not a \(complete\) dataset.*Run the build again"):
        verify_dataset(str(dataset))


def test_manifests_are_written_as_they_are_read(built):
    manifest = load_manifest(str(built))
    assert encode_manifest(manifest) == (built / "manifest.json").read_bytes()


def test_every_byte_of_the_manifest_counts_or_is_told(dataset):
    """No flipped byte ends in anything but a list of damage or a typed error."""
    path = dataset / "manifest.json"
    data = path.read_bytes()
    rng = np.random.RandomState(0)
    for place in rng.choice(len(data), 60, replace=False).tolist():
        changed = bytearray(data)
        changed[place] ^= int(rng.randint(1, 128))
        path.write_bytes(changed)
        with contextlib.suppress(ManifestError):
            verify_dataset(str(dataset), 1)
