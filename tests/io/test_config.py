"""Configurations: every option, every mistake, and what the digest depends on."""

import os
import shutil
import textwrap
import uuid

import fsspec
import pytest

from seqshard.io.config import load_corpus
from seqshard.io.errors import ConfigError, SourceFormatError, SourceNotFoundError

FILES = ("a.cache", "b.cache", "x.hdf", "phones.txt", "tying.txt", "keep.txt", "sub/c.cache")


@pytest.fixture
def corpus_folder(tmp_path):
    folder = tmp_path / "corpus"
    (folder / "sub").mkdir(parents=True)
    for name in FILES:
        (folder / name).write_text(f"content of {name}")
    (folder / "all.bundle").write_text("sub/c.cache\n\n  a.cache\n")
    return folder


def load(folder, text, name="corpus.toml"):
    (folder / name).write_text(textwrap.dedent(text))
    return load_corpus(str(folder / name))


FULL = """
    [streams.data]
    source = "sprint-features"
    files = ["all.bundle", "b.cache"]

    [streams.classes]
    source = "sprint-alignment"
    files = "sub/*.cache"
    allophones = "phones.txt"
    state_tying = "tying.txt"
    silence = "si"
    soft = "best"

    [streams.speaker]
    source = "hdf"
    files = ["x.hdf"]
    key = "data"

    [sequences]
    on_missing = "drop"
    segments = "keep.txt"
    min_length = 1
    max_length = 100000
"""


def test_all_options(corpus_folder):
    corpus = load(corpus_folder, FULL)
    data, classes, speaker = corpus.streams
    assert [s.name for s in corpus.streams] == ["data", "classes", "speaker"]
    assert (data.source, data.key) == ("sprint-features", "data")
    assert classes.allophones == str(corpus_folder / "phones.txt")
    assert classes.state_tying == str(corpus_folder / "tying.txt")
    assert (classes.silence, classes.soft, classes.phonemes) == ("si", "best", None)
    assert (speaker.source, speaker.key) == ("hdf", "data")
    assert corpus.on_missing == "drop"
    assert corpus.segments == str(corpus_folder / "keep.txt")
    assert (corpus.min_length, corpus.max_length) == (1, 100000)
    assert [(f.ordinal, f.spec.name, f.name) for f in corpus.sources] == [
        (0, "data", "sub/c.cache"),
        (1, "data", "a.cache"),
        (2, "data", "b.cache"),
        (3, "classes", "sub/c.cache"),
        (4, "speaker", "x.hdf"),
    ]
    assert all(os.path.exists(f.path) for f in corpus.sources)


def test_defaults(corpus_folder):
    corpus = load(corpus_folder, '[streams.words]\nsource = "hdf"\nfiles = "x.hdf"\n')
    assert corpus.streams[0].key == "words"
    assert (corpus.on_missing, corpus.segments) == ("error", None)
    assert (corpus.min_length, corpus.max_length) == (0, None)


def test_globs_are_sorted_and_recursive(corpus_folder):
    corpus = load(
        corpus_folder, '[streams.data]\nsource = "sprint-features"\nfiles = "**/*.cache"\n'
    )
    assert [f.name for f in corpus.sources] == ["a.cache", "b.cache", "sub/c.cache"]


def test_a_file_named_twice_is_taken_once(corpus_folder):
    text = '[streams.data]\nsource = "sprint-features"\nfiles = ["b.cache", "*.cache"]\n'
    assert [f.name for f in load(corpus_folder, text).sources] == ["b.cache", "a.cache"]


ALIGNMENT = '[streams.c]\nsource = "sprint-alignment"\nfiles = "a.cache"\n'
HDF = '[streams.x]\nsource = "hdf"\nfiles = "x.hdf"\n'
WRONG = {
    "no-toml": ("[streams", "not valid TOML"),
    "no-streams": ("[sequences]\n", "missing required field `streams`"),
    "empty-streams": ("[streams]\n", r"no \[streams.NAME\] table"),
    "unknown-table": (HDF + "[output]\n", "unknown field `output`"),
    "unknown-key": (HDF + "shards = 3\n", "unknown field `shards`.*streams"),
    "unknown-filter": (HDF + "[sequences]\nmin_len = 3\n", "unknown field `min_len`.*sequences"),
    "unknown-source": ('[streams.x]\nsource = "wav"\nfiles = "x.hdf"\n', "'wav'.*source"),
    "no-source": ('[streams.x]\nfiles = "x.hdf"\n', "missing required field `source`"),
    "no-files": ('[streams.x]\nsource = "hdf"\n', "'streams.x': no files given"),
    "empty-files": ('[streams.x]\nsource = "hdf"\nfiles = []\n', "'streams.x': no files given"),
    "number-files": ('[streams.x]\nsource = "hdf"\nfiles = [3]\n', "got `int`.*files"),
    "text-length": (HDF + '[sequences]\nmin_length = "3"\n', "Expected `int`, got `str`"),
    "float-length": (HDF + "[sequences]\nmax_length = 3.5\n", "Expected `int.*got `float`"),
    "on-missing": (HDF + '[sequences]\non_missing = "skip"\n', "'skip'.*on_missing"),
    "negative": (HDF + "[sequences]\nmin_length = -1\n", "leave no length.*found -1 and None"),
    "no-length": (HDF + "[sequences]\nmin_length = 9\nmax_length = 8\n", "found 9 and 8"),
    "slash": ('[streams."a/b"]\nsource = "hdf"\nfiles = "x.hdf"\n', "no '/'"),
    "dot": ('[streams."a.b"]\nsource = "hdf"\nfiles = "x.hdf"\n', r"no '/', no '\.'"),
    "inputs": (HDF.replace("streams.x", "streams.inputs"), "not 'inputs'"),
    "length": (HDF.replace("streams.x", "streams.length"), "not 'inputs' or 'length'"),
    "labels": (HDF + 'allophones = "phones.txt"\n', "for sprint-alignment only.*'hdf'"),
    "no-labels": (ALIGNMENT, "needs allophones and state_tying"),
    "half-labels": (ALIGNMENT + 'allophones = "phones.txt"\n', "needs allophones and"),
    "no-classes": (ALIGNMENT + "num_labels = 0\n", "num_labels.*1 or more.*found 0"),
    "codec": (ALIGNMENT + 'num_labels = 3\nencoding = "klingon"\n', "unknown enc.*'klingon'"),
    "no-text": (ALIGNMENT + 'num_labels = 3\nencoding = "zlib"\n', "unknown encoding.*'zlib'"),
    "hdf-encoding": (HDF + 'encoding = "latin-1"\n', "for sprint-features and sprint-al"),
    "bundles": (ALIGNMENT + 'num_labels = 3\nbundle_paths = "x"\n', "'x'.*bundle_paths"),
    "key": (ALIGNMENT + 'num_labels = 3\nkey = "x"\n', "key is for hdf sources only"),
}


@pytest.mark.parametrize("case", WRONG)
def test_mistakes(case, corpus_folder):
    text, words = WRONG[case]
    with pytest.raises(ConfigError, match=f"corpus.toml.*{words}"):
        load(corpus_folder, text)


def test_no_configuration(tmp_path):
    with pytest.raises(ConfigError, match="no such configuration file"):
        load_corpus(str(tmp_path / "none.toml"))
    (tmp_path / "latin.toml").write_bytes(b"# \xe4")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_corpus(str(tmp_path / "latin.toml"))


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ("none.cache", r"none.cache: no such file.*streams.data.files of .*corpus.toml"),
        ("none/*.cache", "this glob matches no file"),
        ("bad.bundle", "gone.cache"),
    ],
)
def test_files_that_are_not_there(files, words, corpus_folder):
    (corpus_folder / "bad.bundle").write_text("a.cache\ngone.cache\n")
    text = f'[streams.data]\nsource = "sprint-features"\nfiles = "{files}"\n'
    with pytest.raises(SourceNotFoundError, match=words):
        load(corpus_folder, text)


def test_folders_are_no_hdf_files(corpus_folder):
    with pytest.raises(SourceNotFoundError, match="sub: this is a folder"):
        load(corpus_folder, HDF.replace("x.hdf", "sub"))
    with pytest.raises(SourceNotFoundError, match="matches no file"):
        load(corpus_folder, HDF.replace("x.hdf", "s*"))


FEATURES = '[streams.data]\nsource = "sprint-features"\nfiles = {}\n'


@pytest.mark.parametrize(
    ("files", "names"),
    [
        ('"sub"', ["sub"]),
        ('"sub/"', ["sub"]),
        ('"s*"', ["sub"]),
        ('["*.cache", "s*"]', ["a.cache", "b.cache", "sub"]),
        ('"**/*.cache"', ["a.cache", "b.cache", "sub/c.cache"]),
        ('"[as]*/**"', ["sub/c.cache"]),
        ('"folders.bundle"', ["sub", "b.cache"]),
    ],
)
def test_folders_are_sprint_archives(files, names, corpus_folder):
    (corpus_folder / "folders.bundle").write_text("sub\nb.cache")
    corpus = load(corpus_folder, FEATURES.format(files))
    assert [file.name.rstrip("/") for file in corpus.sources] == names


def test_bundles_relative_to_the_working_directory(corpus_folder, tmp_path, monkeypatch):
    (corpus_folder / "sub" / "rasr.bundle").write_text("corpus/a.cache\ncorpus/sub/c.cache")
    monkeypatch.chdir(tmp_path)
    text = FEATURES.format('"sub/rasr.bundle"')
    with pytest.raises(SourceNotFoundError, match="relative to the folder of the bundle"):
        load(corpus_folder, text)
    corpus = load(corpus_folder, text + 'bundle_paths = "cwd"\n')
    assert [os.path.realpath(file.path) for file in corpus.sources] == [
        str(corpus_folder / "a.cache"),
        str(corpus_folder / "sub" / "c.cache"),
    ]


def test_encoding_of_names(corpus_folder):
    text = FEATURES.format('"a.cache"')
    assert load(corpus_folder, text).streams[0].encoding == "utf-8"
    corpus = load(corpus_folder, text + 'encoding = "latin-1"\n')
    assert corpus.streams[0].encoding == "latin-1"


@pytest.mark.parametrize("option", ["allophones", "state_tying"])
def test_label_files_must_exist(option, corpus_folder):
    with pytest.raises(SourceNotFoundError, match=r"gone\.txt"):
        load(corpus_folder, FULL.replace(f"{option} = ", f'{option} = "gone.txt" #'))


def test_segment_list_must_exist(corpus_folder):
    with pytest.raises(SourceNotFoundError, match=r"gone\.txt"):
        load(corpus_folder, FULL.replace("keep.txt", "gone.txt"))


def test_bundles_that_contain_themselves(corpus_folder):
    (corpus_folder / "all.bundle").write_text("all.bundle\n")
    with pytest.raises(SourceFormatError, match="contains itself"):
        load(corpus_folder, FULL)


# ----------------------------------------------------------------------------------- the digest


def test_digest_does_not_depend_on_place_and_age(corpus_folder, tmp_path, monkeypatch):
    digest = load(corpus_folder, FULL).digest
    moved = tmp_path / "elsewhere" / "deep"
    shutil.copytree(corpus_folder, moved)
    os.utime(moved / "a.cache", (1, 1))
    assert load_corpus(str(moved / "corpus.toml")).digest == digest
    monkeypatch.chdir(corpus_folder)
    assert load_corpus("corpus.toml").digest == digest
    monkeypatch.chdir(corpus_folder / "sub")
    assert load_corpus("../corpus.toml").digest == digest


def test_names_above_the_configuration_do_not_depend_on_how_it_is_named(corpus_folder, monkeypatch):
    text = '[streams.data]\nsource = "sprint-features"\nfiles = ["../a.cache"]\n'
    absolute = load(corpus_folder / "sub", text)
    monkeypatch.chdir(corpus_folder / "sub")
    relative = load_corpus("corpus.toml")
    monkeypatch.chdir(corpus_folder)
    from_above = load_corpus("sub/corpus.toml")
    for corpus in (absolute, relative, from_above):
        assert corpus.sources[0].name == "../a.cache"
        assert corpus.digest == absolute.digest


def test_files_given_by_absolute_path_keep_it_unless_they_are_inside(corpus_folder, tmp_path):
    (tmp_path / "other.hdf").touch()
    text = '[streams.x]\nsource = "hdf"\nfiles = ["{}"]\n'
    outside = load(corpus_folder, text.format(tmp_path / "other.hdf"))
    assert outside.sources[0].name == str(tmp_path / "other.hdf")
    inside = load(corpus_folder, text.format(corpus_folder / "x.hdf"))
    assert inside.sources[0].name == "x.hdf"


CHANGES = {
    "stream-name": ("streams.speaker", "streams.speakers"),
    "source-files": ('["x.hdf"]', '["a.cache"]'),
    "file-order": ('["all.bundle", "b.cache"]', '["b.cache", "all.bundle"]'),
    "key": ('key = "data"', 'key = "speaker"'),
    "silence": ('"si"', '"sil"'),
    "soft": ('soft = "best"', 'soft = "error"'),
    "state-tying-to-phonemes": ("state_tying =", "phonemes ="),
    "on-missing": ('"drop"', '"error"'),
    "min-length": ("min_length = 1", "min_length = 2"),
    "max-length": ("max_length = 100000", "max_length = 100001"),
    "no-segments": ("segments =", "# segments ="),
}


@pytest.mark.parametrize("case", CHANGES)
def test_digest_follows_every_option(case, corpus_folder):
    before = load(corpus_folder, FULL).digest
    old, new = CHANGES[case]
    assert old in FULL
    assert load(corpus_folder, FULL.replace(old, new)).digest != before


@pytest.mark.parametrize("name", ["phones.txt", "tying.txt", "keep.txt"])
def test_digest_follows_the_content_of_label_files_and_segment_list(name, corpus_folder):
    before = load(corpus_folder, FULL).digest
    (corpus_folder / name).write_text("other content")
    assert load(corpus_folder, FULL).digest != before


@pytest.mark.parametrize("name", ["phones.txt", "tying.txt", "keep.txt"])
def test_digest_ignores_the_names_of_label_files_and_segment_list(name, corpus_folder, tmp_path):
    before = load(corpus_folder, FULL).digest
    shutil.copy(corpus_folder / name, tmp_path / "renamed.txt")
    text = FULL.replace(name, str(tmp_path / "renamed.txt"))
    assert load(corpus_folder, text).digest == before


def test_digest_leaves_the_content_of_sources_to_their_fingerprints(corpus_folder):
    before = load(corpus_folder, FULL).digest
    (corpus_folder / "a.cache").write_text("other content")
    assert load(corpus_folder, FULL).digest == before


def test_comments_and_layout_do_not_matter(corpus_folder):
    before = load(corpus_folder, FULL).digest
    assert load(corpus_folder, "# a comment\n" + textwrap.dedent(FULL)).digest == before
    listed = FULL.replace('"all.bundle", "b.cache"', '"sub/c.cache", "a.cache", "b.cache"')
    assert load(corpus_folder, listed).digest == before


# ------------------------------------------------------------------------------------- remote


@pytest.fixture
def remote():
    folder = f"memory://{uuid.uuid4().hex}"
    yield folder
    fsspec.filesystem("memory").rm(folder, recursive=True)


def put(url, text=""):
    with fsspec.open(url, "w") as file:
        file.write(text)


def test_configuration_and_sources_at_urls(remote):
    put(f"{remote}/corpus.toml", HDF.replace('"x.hdf"', '["*.hdf", "sub/y.hdf"]'))
    for name in ("b.hdf", "a.hdf", "sub/y.hdf"):
        put(f"{remote}/{name}")
    corpus = load_corpus(f"{remote}/corpus.toml")
    assert [f.path.rpartition("/")[2] for f in corpus.sources] == ["a.hdf", "b.hdf", "y.hdf"]
    assert all("://" in f.path for f in corpus.sources)
    assert [f.name for f in corpus.sources] == ["a.hdf", "b.hdf", "sub/y.hdf"]


def test_local_configuration_of_remote_sources(remote, corpus_folder):
    put(f"{remote}/a.hdf")
    corpus = load(corpus_folder, HDF.replace("x.hdf", f"{remote}/*.hdf"))
    assert corpus.sources[0].path == corpus.sources[0].name
    assert corpus.sources[0].path.endswith("/a.hdf")
    with pytest.raises(SourceNotFoundError, match="no such file"):
        load(corpus_folder, HDF.replace("x.hdf", f"{remote}/none.hdf"))


@pytest.mark.parametrize("url", ["nosuch://bucket/x.hdf", "nosuch://bucket/*.hdf"])
def test_urls_that_nobody_can_open(url, corpus_folder):
    with pytest.raises(ConfigError, match=r"cannot be opened.*nosuch"):
        load(corpus_folder, HDF.replace("x.hdf", url))
