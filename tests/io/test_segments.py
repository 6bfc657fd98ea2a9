"""Lists of tags."""

import gzip

import pytest

from seqshard.io.errors import SourceFormatError, SourceNotFoundError
from seqshard.io.segments import load_segments

TEXT = "b/ä\n\n# a comment\n  a \nc d\r\nb/ä"
TAGS = ["b/ä", "a", "c d", "b/ä"]


def test_plain_and_gzip(tmp_path):
    (tmp_path / "keep.txt").write_bytes(TEXT.encode())
    (tmp_path / "keep.gz").write_bytes(gzip.compress(TEXT.encode()))
    for name in ("keep.txt", "keep.gz"):
        assert load_segments(str(tmp_path / name)).to_pylist() == TAGS


def test_a_changed_list_is_read_again(tmp_path):
    path = tmp_path / "keep.txt"
    path.write_text("a\n")
    assert load_segments(str(path)).to_pylist() == ["a"]
    path.write_text("a\nb\n")
    assert load_segments(str(path)).to_pylist() == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.txt", b"\xff"),
        ("a.gz", b"no gzip"),
        ("b.gz", gzip.compress(b"a\n" * 100)[:-9]),
        ("c.gz", gzip.compress(b"\xff")),
        ("d.gz", b"\x1f\x8b\x08\x00" + bytes(6) + b"\xff" * 20),
    ],
)
def test_damaged_lists(name, data, tmp_path):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(SourceFormatError, match=f"{name}: this is not a list of tags"):
        load_segments(str(tmp_path / name))


def test_missing_list(tmp_path):
    with pytest.raises(SourceNotFoundError, match="cannot read this file"):
        load_segments(str(tmp_path / "none.txt"))
