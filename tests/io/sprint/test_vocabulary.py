"""Vocabularies and post-processors next to RETURNN's."""

from __future__ import annotations

import gzip

import pytest
from hypothesis import given
from hypothesis import strategies as st
from returnn.datasets.lm import get_post_processor_function
from returnn.datasets.util.vocabulary import Vocabulary as Oracle

from seqshard.io.errors import ConfigError, SourceFormatError, SourceNotFoundError
from seqshard.io.sprint.post_process import get_post_processor
from seqshard.io.sprint.vocabulary import Vocabulary, create_vocabulary

WORDS = ["UNK", "hello", "world", "größe", "a"]
PAIRS = ["h e", "l l", "he ll", "hell o</w>", "w o", "wo r", "l d</w>", "a b", "ab a", "ab a</w>"]
BPE_LABELS = ["UNK", "he@@", "ll@@", "o", "l", "ld", "wor@@", "h@@", "a", "a@@", "b", "b@@", "ab@@"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vocabularies")

    def write(name, text):
        (folder / name).write_text(text, encoding="utf-8")
        return str(folder / name)

    return {
        "words": write("words.txt", "\n".join(WORDS) + "\n"),
        "dict": write("words.dict", repr({word: i for i, word in enumerate(WORDS)})),
        "chars": write("chars.txt", "\n".join("@ abcdé")),
        "labels": write("bpe.vocab", repr({label: i for i, label in enumerate(BPE_LABELS)})),
        "codes1": write("codes1", "\n".join(PAIRS)),
        "codes2": write("codes2", "\n".join(["#version: 0.2", *PAIRS])),
    }


def assert_same(options, texts):
    ours, theirs = create_vocabulary(options), Oracle.create_vocab(**options)
    assert isinstance(ours, Vocabulary)
    assert list(ours.labels) == list(theirs.labels)
    assert ours.num_labels == theirs.num_labels
    for text in texts:
        assert ours.get_seq(text) == list(theirs.get_seq(text)), text


TEXTS = ["", "hello world", "größe  hello nothing", " a a\tb ", "abcdé ü"]


@pytest.mark.parametrize(
    "options",
    [
        {"vocab_file": "words"},
        {"vocab_file": "dict", "unknown_label": "a", "seq_postfix": [0]},
        {"vocab_file": "words", "num_labels": 5, "eos_label": "a", "bos_label": 1},
        {"class": "CharacterTargets", "vocab_file": "chars", "seq_postfix": [1, 2]},
        {"class": "Utf8ByteTargets", "seq_postfix": [0]},
        {"class": "Vocabulary", "vocab_file": None, "labels": WORDS},
    ],
)
def test_same_as_returnn(files, options):
    assert_same({k: files.get(v, v) if k == "vocab_file" else v for k, v in options.items()}, TEXTS)


# RETURNN leaves files open.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("codes", ["codes1", "codes2"])
@given(st.lists(st.text("helowrdabü", min_size=1, max_size=8), max_size=4).map(" ".join))
def test_bpe_same_as_returnn(files, codes, text):
    options = {"bpe_file": files[codes], "vocab_file": files["labels"], "seq_postfix": [0]}
    assert_same(options, [text, "hello $name { hello } hello", "$x hello", "$ { a"])


def test_compressed_file(files, tmp_path):
    path = tmp_path / "words.gz"
    path.write_bytes(gzip.compress("\n".join(WORDS).encode()))
    assert create_vocabulary({"vocab_file": path}).labels == WORDS


def test_objects_stay_as_they_are():
    theirs = Oracle(vocab_file=None, labels=WORDS)
    assert create_vocabulary(theirs) is theirs


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (object(), "this is no vocabulary .*found object"),
        (
            {"class": "SentencePieces"},
            r"unknown vocabulary class 'SentencePieces'.*RETURNN's class",
        ),
        ({"labels": WORDS, "color": 1}, "wrong options of Vocabulary: .*'color'"),
        ({}, "needs either vocab_file or labels"),
        ({"labels": ["a"]}, "special label 'UNK' is not in the vocabulary"),
        ({"labels": WORDS, "num_labels": 4}, "another size .*expected 4, found 5"),
    ],
)
def test_wrong_options(options, match):
    with pytest.raises(ConfigError, match=match):
        create_vocabulary(options)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("a\nb\na\n", "'a': a label is in the vocabulary twice"),
        ("{'a': 0, 'b': 2}", "does not use each class once"),
        ("{'a': open('x')}", "this is no vocabulary"),
    ],
)
def test_damaged_vocabulary(tmp_path, text, match):
    path = tmp_path / "vocab"
    path.write_text(text)
    with pytest.raises(SourceFormatError, match=match):
        create_vocabulary({"vocab_file": path, "unknown_label": None})


@pytest.mark.parametrize(
    ("codes", "match"),
    [("#version: 0.3\na b", "expected 0.1 or 0.2, found 0.3"), ("a b\nc", "pair 1.*is no pair")],
)
def test_damaged_codes(files, tmp_path, codes, match):
    path = tmp_path / "codes"
    path.write_text(codes)
    with pytest.raises(SourceFormatError, match=match):
        create_vocabulary({"bpe_file": path, "vocab_file": files["labels"]})


def test_missing_file_and_unknown_word():
    with pytest.raises(SourceNotFoundError, match="/nowhere: the file does not exist"):
        create_vocabulary({"vocab_file": "/nowhere"})
    with pytest.raises(SourceFormatError, match="'x' is not in the vocabulary"):
        create_vocabulary({"labels": ["a"], "unknown_label": None}).get_seq("a x")


SAMPLES = ["", " Hello,  World. ", "[NOISE] Größe <UNK> A-B [x Y]", "a,b.c/d"]


@pytest.mark.parametrize(
    "spec",
    [
        None,
        "lowercase",
        "lowercase_keep_special",
        "collapse_whitespace",
        "basic_cleaners",
        "get_remove_chars(',./')",
        "get_remove_chars([',', 'Wo'])",
        "get_replace('a', 'bb')",
        "get_replace(old='a', new='b')",
        "lowercase, get_remove_chars('.')",
        ["lowercase", "get_replace('h', 'H')"],
        str.upper,
    ],
)
def test_post_processors_same_as_returnn(spec):
    ours, theirs = get_post_processor(spec), get_post_processor_function(spec)
    assert [ours(text) for text in SAMPLES] == [theirs(text) for text in SAMPLES]


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        ("open('x')", r"unknown post-processor \"open\('x'\)\""),
        ("english_cleaners", "unknown post-processor.*Any function from text to text"),
        ("get_replace('a')", "is malformed: .*'new'"),
        ("get_replace(open('x'), 'b')", "is malformed"),
        ("lowercase(", "is malformed"),
        (3, "no post-processor .*found 3"),
    ],
)
def test_wrong_post_processors(spec, match):
    with pytest.raises(ConfigError, match=match):
        get_post_processor(spec)
