from __future__ import annotations

import os

import numpy as np
import pytest
from returnn.sprint.cache import AllophoneLabeling

from seqshard.io.errors import ConfigError, SourceFormatError, SourceNotFoundError
from seqshard.io.sprint.allophones import load_label_map

# RETURNN does not close the files that it reads.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")

ALLOPHONES = "# Number of allophones: 4\n[SILENCE]{#+#}@i@f\na{#+b}@i\n\nb{a+#}@f\nø{a+#}@f\n"
TYING = (
    "[SILENCE]{#+#}@i@f.0 3\na{#+b}@i.0 0\na{#+b}@i.1 7\nb{a+#}@f.0 1\nb{a+#}@f.2 2\n"
    "unused{#+#}.1 9\n"
)


@pytest.fixture
def files(tmp_path):
    def write(**texts):
        for name, text in texts.items():
            (tmp_path / name).write_text(text)
        return {name: str(tmp_path / name) for name in texts}

    return write


def ids(index, state):
    return np.array([index + (state << 26)], np.int64).astype(np.uint32).view(np.int32)


def all_ids(theirs):
    count = len(theirs.allophones)
    return [i + (s << 26) for s in range(theirs.num_allo_states) for i in range(count)]


@pytest.mark.parametrize("corpus", ["demo", "rasr", "own"])
def test_state_tying_agrees_with_returnn(demo, rasr, files, corpus):
    if corpus == "own":
        paths = files(allophones=ALLOPHONES, tying=TYING)
        allophones, tying, silence = paths["allophones"], paths["tying"], "[SILENCE]"
    else:
        folder, silence = (demo, "[SILENCE]") if corpus == "demo" else (rasr / "align", "si")
        allophones, tying = str(folder / "allophones.txt"), str(folder / "state-tying.txt")
    theirs = AllophoneLabeling(silence, allophones, state_tying_file=tying)
    ours = load_label_map(allophones, state_tying=tying, silence=silence)
    assert list(ours.allophones) == theirs.allophones
    assert ours.num_labels == theirs.num_labels
    assert ours.silence_label == theirs.sil_label_idx
    assert ours.labels is None
    found = ours.lookup(np.array(all_ids(theirs), np.int64).astype(np.uint32))
    expected = [theirs.state_tying_by_allo_state_idx.get(i, -1) for i in all_ids(theirs)]
    assert found.tolist() == expected
    assert found.dtype == np.int32


def test_phonemes_agree_with_returnn(files):
    paths = files(allophones=ALLOPHONES, phonemes="b\n[SILENCE]\na\nø\nunused\n")
    theirs = AllophoneLabeling("[SILENCE]", paths["allophones"], paths["phonemes"])
    ours = load_label_map(paths["allophones"], phonemes=paths["phonemes"])
    assert ours.num_labels == theirs.num_labels == 5
    assert ours.silence_label == theirs.sil_label_idx == 1
    assert ours.labels == ("b", "[SILENCE]", "a", "ø", "unused")
    for index in range(4):
        for state in range(16):
            assert ours.lookup(ids(index, state)) == theirs.get_label_idx(index, state)


def test_the_state_tying_decides_if_there_are_phonemes_too(files):
    paths = files(allophones=ALLOPHONES, tying=TYING, phonemes="a\n")
    ours = load_label_map(
        paths["allophones"], state_tying=paths["tying"], phonemes=paths["phonemes"]
    )
    assert ours.num_labels == 10


def test_ids_without_a_class(files):
    paths = files(allophones=ALLOPHONES, tying=TYING)
    ours = load_label_map(paths["allophones"], state_tying=paths["tying"])
    unknown = [(4, 0), (1, 2), (2, 1), (3, 0), (0, 1), (0, 15), (0, 16), (2**26 - 1, 63)]
    for index, state in unknown:
        assert ours.lookup(ids(index, state)).tolist() == [-1]
    assert ours.lookup(np.array([1, 4, 2], np.int32)).tolist() == [0, -1, 1]
    assert ours.describe(2 + (1 << 26)) == "id 67108866: allophone 2 ('b{a+#}@f'), state 1"
    assert "allophone 9 (unknown, there are 4), state 0" in ours.describe(9)
    nothing = load_label_map(files(none="")["none"], state_tying=paths["tying"])
    assert nothing.lookup(np.array([0, 5], np.int32)).tolist() == [-1, -1]


def test_repeated_allophones_have_one_index_as_in_rasr(files):
    text = "a{#+#}@i@f\nb{#+#}@i@f\na{#+#}@i@f\r\nc{#+#}@i@f"
    paths = files(allophones=text, phonemes="a\nb\nc")
    ours = load_label_map(paths["allophones"], phonemes=paths["phonemes"])
    assert ours.allophones == ("a{#+#}@i@f", "b{#+#}@i@f", "c{#+#}@i@f")
    assert ours.lookup(np.arange(3, dtype=np.int32)).tolist() == [0, 1, 2]
    assert ours.silence_label is None


def test_cached_until_a_file_changes(files):
    paths = files(allophones=ALLOPHONES, tying=TYING)

    def load():
        return load_label_map(paths["allophones"], state_tying=paths["tying"])

    first = load()
    assert load() is first
    os.utime(paths["tying"], ns=(1, 1))
    second = load()
    assert second is not first
    assert second.digest == first.digest
    files(tying=TYING.replace(" 7", " 8"))
    assert load().digest != first.digest


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("a{#+b}@i.0", "line 7 is no line of a state tying"),
        ("a{#+b}@i 5", "line 7 is no line"),
        ("a{#+b}@i.0 x", "line 7 is no line"),
        ("a{#+b}@i.0 -1", "line 7 is no line"),
        ("a{#+b}@i.x 1", "line 7 is no line"),
        ("a{#+b}@i.0 " + "9" * 5000, "line 7 is no line"),
        ("a{#+b}@i.1 6", r"line 7 gives state 'a{#\+b}@i.1' another class .expected 7, found 6"),
    ],
)
def test_bad_state_tying(files, line, message):
    paths = files(allophones=ALLOPHONES, tying=TYING + line + "\n")
    with pytest.raises(SourceFormatError, match=message):
        load_label_map(paths["allophones"], state_tying=paths["tying"])


def test_missing_files_and_choices(files, tmp_path):
    paths = files(allophones=ALLOPHONES)
    with pytest.raises(SourceNotFoundError, match="none: there is no such label file"):
        load_label_map(paths["allophones"], state_tying=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="without a state tying or a list of phonemes"):
        load_label_map(paths["allophones"])
    (tmp_path / "latin").write_bytes(b"a\xfcb")
    with pytest.raises(SourceFormatError, match="byte 1: a label file must be UTF-8"):
        load_label_map(str(tmp_path / "latin"), phonemes=paths["allophones"])
