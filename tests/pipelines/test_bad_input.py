"""Every bad input gives one clear sentence and the right exit code, and leaves no manifest."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from seqshard.pipelines.build import main as build

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "examples" / "demo"


def write_hdf(path: Path, tags: list[str], dim: int = 2, frames: int = 3, lengths=None) -> None:
    """A file in RETURNN's layout with `frames` frames per tag."""
    with h5py.File(path, "w") as file:
        file["inputs"] = np.ones((frames * len(tags), dim), np.float32)
        default = np.full((len(tags), 1), frames, np.int32)
        file["seqLengths"] = default if lengths is None else lengths
        file["seqTags"] = np.array(tags, "S")
        file.attrs["inputPattSize"] = dim


def config(folder: Path, streams: dict[str, str], sequences: str = "") -> Path:
    """A configuration with one HDF stream per name."""
    path = folder / "corpus.toml"
    tables = [
        f'[streams.{name}]\nsource = "hdf"\nfiles = {files}\nkey = "data"\n'
        for name, files in streams.items()
    ]
    path.write_text("\n".join([*tables, f"[sequences]\n{sequences}\n"]))
    return path


@pytest.fixture
def fails(tmp_path, capsys):
    """Runs a build that must fail; returns its one sentence."""

    def run(path: Path, code: int, *args: str) -> str:
        output = tmp_path / "out"
        assert build([f"--config={path}", f"--output={output}", *args]) == code
        assert not (output / "manifest.json").exists()
        assert not list(output.glob("data-*"))
        lines = capsys.readouterr().err.strip().splitlines()
        assert len(lines) == 1, lines
        assert lines[0].startswith("python -m pipelines.build: error: ")
        return lines[0]

    return run


def test_missing_file(fails, tmp_path):
    error = fails(config(tmp_path, {"data": '["gone.hdf"]'}), 2)
    assert f"{tmp_path}/gone.hdf: no such file" in error
    assert "streams.data" in error


def test_empty_glob(fails, tmp_path):
    error = fails(config(tmp_path, {"data": '["*.hdf"]'}), 2)
    assert f"{tmp_path}/*.hdf: this glob matches no file" in error


def test_bundle_line_that_points_nowhere(fails, tmp_path):
    (tmp_path / "a.bundle").write_text("gone.cache\n")
    path = tmp_path / "c.toml"
    path.write_text('[streams.data]\nsource = "sprint-features"\nfiles = ["a.bundle"]\n')
    error = fails(path, 2)
    assert "a.bundle" in error
    assert "gone.cache" in error
    assert "line 1" in error


@pytest.mark.parametrize("keep", [5, 100, 300_000, 612_000])
def test_truncated_archive(fails, tmp_path, keep):
    archive = tmp_path / "a.cache"
    archive.write_bytes((DEMO / "features.0.cache").read_bytes()[:keep])
    path = tmp_path / "c.toml"
    path.write_text('[streams.data]\nsource = "sprint-features"\nfiles = ["a.cache"]\n')
    assert str(archive) in fails(path, 1)


def test_truncated_hdf(fails, tmp_path):
    write_hdf(tmp_path / "a.hdf", ["x", "y"])
    data = (tmp_path / "a.hdf").read_bytes()
    (tmp_path / "a.hdf").write_bytes(data[:-100])
    error = fails(config(tmp_path, {"data": '["a.hdf"]'}), 1)
    assert f"{tmp_path}/a.hdf: this is not a complete HDF file" in error


def test_tag_in_one_stream_only(fails, tmp_path):
    write_hdf(tmp_path / "a.hdf", ["x", "y", "z"])
    write_hdf(tmp_path / "b.hdf", ["x", "z"])
    error = fails(config(tmp_path, {"data": '["a.hdf"]', "other": '["b.hdf"]'}), 1)
    assert "sequence 'y' of stream 'other': missing" in error
    assert "a.hdf" in error
    assert 'on_missing = "drop"' in error


def test_doubled_tag(fails, tmp_path):
    write_hdf(tmp_path / "a.hdf", ["x", "y"])
    write_hdf(tmp_path / "b.hdf", ["z", "y"])
    error = fails(config(tmp_path, {"data": '["a.hdf", "b.hdf"]'}), 1)
    assert "sequence 'y' of stream 'data': 2 times in this stream: a.hdf, b.hdf" in error


def test_different_dims_between_files(fails, tmp_path):
    write_hdf(tmp_path / "a.hdf", ["x"], dim=2)
    write_hdf(tmp_path / "b.hdf", ["y"], dim=3)
    error = fails(config(tmp_path, {"data": '["a.hdf", "b.hdf"]'}), 1)
    assert f"{tmp_path}/b.hdf: two files of stream 'data' differ" in error
    assert "2 features" in error
    assert "3 features" in error
    assert "a.hdf" in error


def test_nan_lengths(fails, tmp_path):
    write_hdf(tmp_path / "a.hdf", ["x", "y"], lengths=np.array([[3.0], [np.nan]]))
    error = fails(config(tmp_path, {"data": '["a.hdf"]'}), 1)
    assert "seqLengths, row 1" in error
    assert "found nan" in error


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[streams.data]\nsource = "hdf"\nfiles = ["a.hdf"]\nfile = "x"\n', "file"),
        ('[streams.data]\nsource = "hdff"\nfiles = ["a.hdf"]\n', "hdff"),
        ("[streams.data\n", "not valid TOML"),
        ("", "streams"),
        ('[sequences]\nmin_length = "x"\n[streams.a]\nsource="hdf"\nfiles=["a"]\n', "min_length"),
    ],
)
def test_wrong_configuration(fails, tmp_path, text, words):
    path = tmp_path / "c.toml"
    path.write_text(text)
    error = fails(path, 2)
    assert str(path) in error
    assert words in error


def test_missing_configuration(fails, tmp_path):
    assert "no such configuration file" in fails(tmp_path / "gone.toml", 2)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--num_shards=2", "--shard_size=1MB"], "not both"),
        (["--seq_ordering=shuffled"], "unknown order"),
        (["--seq_ordering=random:x"], "unknown order"),
        (["--no_such_flag=1"], "--no_such_flag"),
        (["--runner=NoSuchRunner"], "NoSuchRunner"),
        (["stray"], "stray"),
    ],
)
def test_wrong_command_line(fails, tmp_path, flags, words):
    write_hdf(tmp_path / "a.hdf", ["x"])
    assert words in fails(config(tmp_path, {"data": '["a.hdf"]'}), 2, *flags)


@pytest.mark.parametrize("flag", ["--num_shards=0", "--shard_size=lots", "--on_error=ignore"])
def test_malformed_flags(tmp_path, flag, capsys):
    with pytest.raises(SystemExit) as stop:
        build(["--config=c.toml", "--output=out", flag])
    assert stop.value.code == 2
    assert flag.split("=")[0] in capsys.readouterr().err


def test_nothing_left(fails, tmp_path):
    write_hdf(tmp_path / "a.hdf", ["x"])
    error = fails(config(tmp_path, {"data": '["a.hdf"]'}, "min_length = 100"), 1)
    assert "no sequence is left" in error


def test_output_that_is_a_file(tmp_path, capsys):
    write_hdf(tmp_path / "a.hdf", ["x"])
    (tmp_path / "out").write_text("a file")
    path = config(tmp_path, {"data": '["a.hdf"]'})
    assert build([f"--config={path}", f"--output={tmp_path / 'out'}"]) == 2
    assert f"{tmp_path}/out: cannot write the output" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
def test_output_without_permission(tmp_path):
    (tmp_path / "locked").mkdir(mode=0o555)
    code = (
        "import os, sys; from seqshard.io import storage\n"
        "from seqshard.io.errors import OutputFolderError\n"
        "os.setuid(65534)\n"
        "try: storage.check_writable(sys.argv[1])\n"
        "except OutputFolderError as error: print(error); sys.exit(error.exit_code)\n"
    )
    folder = tmp_path / "locked"
    for parent in [tmp_path, *tmp_path.parents[:2]]:
        parent.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, cwd="/"
    )
    assert done.returncode == 2, done.stderr
    assert f"{folder}: cannot write the output (found Permission denied)" in done.stdout


def test_full_disk(synthetic, tmp_path):
    """A limit on file sizes is the nearest thing to a full disk that needs no privileges."""
    corpus = synthetic.make_corpus(tmp_path / "corpus", 20_000_000, num_archives=1)
    output = tmp_path / "out"
    command = [sys.executable, "-m", "pipelines.build", f"--config={corpus.config}"]

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5_000_000, 5_000_000))

    done = subprocess.run(
        [*command, f"--output={output}", "--num_shards=2"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        preexec_fn=limit,
    )
    assert done.returncode == 1
    assert len(done.stderr.strip().splitlines()) == 1
    assert "data-0000" in done.stderr
    assert "cannot write the output" in done.stderr
    assert not (output / "manifest.json").exists()
    assert not list(output.glob("data-*"))
    assert not list(output.glob(".data-*"))


def test_skipping_damaged_sequences_lists_them(tmp_path):
    shutil.copytree(DEMO, tmp_path / "demo")
    shutil.copy(ROOT / "examples" / "demo.toml", tmp_path)
    archive = tmp_path / "demo" / "features.0.cache"
    data = bytearray(archive.read_bytes())
    second_frame = data.index(b"\n\0\0\0vector-f32") + 18 + 4 + 16 * 4 + 16
    data[second_frame] = 17
    archive.write_bytes(data)
    args = [f"--config={tmp_path / 'demo.toml'}", f"--output={tmp_path / 'out'}"]
    assert build(args) == 1
    assert build([*args, "--on_error=skip", "--num_shards=3"]) == 0
    from seqshard.io.manifest import load_manifest
    from seqshard.pipelines.verify import main as verify

    manifest = load_manifest(str(tmp_path / "out"))
    assert (manifest.num_seqs, manifest.num_rejected) == (119, 1)
    rejected = (tmp_path / "out" / "rejected.jsonl").read_text()
    assert "demo/rec-000/1" in rejected
    assert "demo/features.0.cache" in rejected
    assert verify([str(tmp_path / "out")]) == 0


def test_filters_and_dropped_tags_are_listed(tmp_path):
    write_hdf(tmp_path / "a.hdf", ["x", "y", "z"])
    write_hdf(tmp_path / "b.hdf", ["x", "z"])
    (tmp_path / "keep.txt").write_text("x\ny\n# z\n")
    path = config(
        tmp_path,
        {"data": '["a.hdf"]', "other": '["b.hdf"]'},
        'on_missing = "drop"\nsegments = "keep.txt"',
    )
    assert build([f"--config={path}", f"--output={tmp_path / 'out'}"]) == 0
    lines = (tmp_path / "out" / "rejected.jsonl").read_text().splitlines()
    assert len(lines) == 2
    assert '"tag":"y"' in lines[0]
    assert "missing in this stream" in lines[0]
    assert '"tag":"z"' in lines[1]
    assert "not in the segment list" in lines[1]
