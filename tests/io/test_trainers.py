"""`[trainers.NAME]`: every mistake, and what makes a spool another one."""

from __future__ import annotations

import os
import sys
import textwrap

import pytest

from seqshard.io.config import load_corpus
from seqshard.io.errors import ConfigError, SourceNotFoundError

PLAIN = f"""
    [trainers.rasr]
    executable = "{sys.executable}"
    config = "--config=rasr.config --*.x='a b'"
    partitions = 2

    [streams.data]
    source = "extern-sprint"
    trainer = "rasr"

    [streams.words]
    source = "extern-sprint"
    trainer = "rasr"
    key = "orth"
    num_labels = 99
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "rasr.config").write_text("[*]\n")
    (tmp_path / "speakers.txt").write_text("a\nb\n")
    (tmp_path / "x.hdf").touch()
    return tmp_path


def load(folder, text=PLAIN):
    (folder / "corpus.toml").write_text(textwrap.dedent(text))
    return load_corpus(str(folder / "corpus.toml"))


def key(corpus):
    (found,) = {file.path.split("/")[-2] for file in corpus.sources}
    return found


def test_streams_and_partitions(folder):
    corpus = load(folder)
    assert [(s.name, s.key, s.num_labels, s.trainer) for s in corpus.streams] == [
        ("data", "data", None, "rasr"),
        ("words", "orth", 99, "rasr"),
    ]
    assert [(f.ordinal, f.spec.name, f.name, f.partition) for f in corpus.sources] == [
        (0, "data", "rasr-00000-of-00002.hdf", 0),
        (1, "data", "rasr-00001-of-00002.hdf", 1),
        (2, "words", "rasr-00000-of-00002.hdf", 0),
        (3, "words", "rasr-00001-of-00002.hdf", 1),
    ]
    placed = corpus.with_spools("/out/.build").sources
    assert placed[1].path == placed[3].path == f"/out/.build/{key(corpus)}/rasr-00001-of-00002.hdf"
    process = corpus.trainers["rasr"].process(1)
    assert process.executable == (sys.executable,)
    assert process.config == ("--config=rasr.config", "--*.x=a b")
    assert (process.num_partitions, process.partition, process.folder) == (2, 1, str(folder))


def test_sources_that_are_files_stay_where_they_are(folder):
    corpus = load(folder, PLAIN + '\n    [streams.x]\n    source = "hdf"\n    files = "x.hdf"\n')
    (file,) = (file for file in corpus.with_spools("/out").sources if file.spec.name == "x")
    assert (file.ordinal, file.path) == (4, str(folder / "x.hdf"))


def test_arguments_from_the_environment(folder, monkeypatch):
    monkeypatch.setenv("RASR_OPTIONS", "--*.a=1 --*.b=2")
    text = PLAIN.replace("--*.x='a b'", "$RASR_OPTIONS")
    trainer = load(folder, text).trainers["rasr"]
    assert trainer.config == ("--config=rasr.config", "--*.a=1", "--*.b=2")


WRONG = {
    "no trainer": ('trainer = "rasr"', "", "no trainer given.*expected trainer = 'rasr'"),
    "other trainer": ('trainer = "rasr"', 'trainer = "other"', "no such trainer.*found 'other'"),
    "no executable": ('executable = "', 'executable = "" # ', "no executable given"),
    "files": ('key = "orth"', 'files = "x.hdf"', "a trainer come from no files"),
    "zero partitions": ("partitions = 2", "partitions = 0", "number of partitions.*found 0"),
    "timeout": ("partitions = 2", "timeout = 0", "must be positive"),
    "nan": ("partitions = 2", "input_stddev = nan", "must be positive"),
    "unknown option": ("partitions = 2", "partition = 2", "unknown field `partition`.*trainers"),
    "malformed config": ("'a b'", "'a b", "malformed arguments of the trainer"),
    "labels": ('key = "orth"', 'silence = "x"\nallophones = "a"', "for sprint-alignment only"),
    "name": ("trainers.rasr", 'trainers."a/b"', "no such trainer"),
    "vocabulary": ("partitions = 2", 'orth_vocab = {class = "X"}', "unknown vocabulary class 'X'"),
    "reduce": ("partitions = 2", "reduce_target_factor = 0", "is no positive integer"),
}


@pytest.mark.parametrize("case", WRONG)
def test_mistakes(case, folder):
    old, new, words = WRONG[case]
    with pytest.raises(ConfigError, match=words):
        load(folder, PLAIN.replace(old, new, 1))


def test_a_name_that_cannot_be_a_files(folder):
    with pytest.raises(ConfigError, match=r"name becomes part of a file's: no '/'"):
        load(folder, PLAIN.replace("trainers.rasr", 'trainers."a/b"').replace('"rasr"', '"a/b"'))


def test_trainer_is_for_trainers(folder):
    text = '[streams.x]\nsource = "hdf"\nfiles = "x.hdf"\ntrainer = "rasr"\n'
    with pytest.raises(ConfigError, match="trainer is for extern-sprint sources only"):
        load(folder, text)


def test_files_of_options_must_exist(folder):
    with pytest.raises(SourceNotFoundError, match=r"gone\.txt"):
        load(folder, PLAIN.replace("partitions = 2", 'target_maps = {speaker_name = "gone.txt"}'))


CHANGES = {
    "argument": ("a b", "a c"),
    "partitions": ("partitions = 2", "partitions = 3"),
    "seed": ("partitions = 2", "partitions = 2\nseed = 1"),
    "option": ("partitions = 2", "partitions = 2\ninput_stddev = 2.0"),
    "stream": ('key = "orth"', 'key = "orth0"'),
    "classes": ("num_labels = 99", "num_labels = 98"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_trainer_has_other_spools(change, folder):
    corpus, other = load(folder), load(folder, PLAIN.replace(*CHANGES[change]))
    assert key(corpus) != key(other)
    assert corpus.digest != other.digest


def test_a_changed_file_of_the_command_line_gives_other_spools(folder):
    corpus = load(folder)
    assert key(load(folder)) == key(corpus)
    os.utime(folder / "rasr.config", (1, 1))
    assert key(load(folder)) != key(corpus)
    assert load(folder).digest == corpus.digest


def test_a_changed_map_is_another_plan(folder):
    text = PLAIN.replace("partitions = 2", 'target_maps = {speaker_name = "speakers.txt"}')
    corpus = load(folder, text)
    (folder / "speakers.txt").write_text("b\na\n")
    assert load(folder, text).digest != corpus.digest


def test_timeouts_do_not_matter(folder):
    corpus = load(folder)
    timeouts = "partitions = 2\ntimeout = 5\nstart_timeout = inf"
    other = load(folder, PLAIN.replace("partitions = 2", timeouts))
    assert (key(other), other.digest) == (key(corpus), corpus.digest)
    process = other.trainers["rasr"].process(0)
    assert (process.timeout, process.start_timeout) == (5, None)
