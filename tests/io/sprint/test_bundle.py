from __future__ import annotations

import pytest

from seqshard.io.errors import SourceFormatError, SourceNotFoundError
from seqshard.io.sprint.archive import Archive
from seqshard.io.sprint.bundle import read_bundle

PARTS = ["part-0.cache", "part-1.cache", "part-2.cache"]


@pytest.mark.parametrize(
    "name", ["relative", "relative-no-final-newline", "blank-lines-and-spaces"]
)
def test_bundles_of_rasr(rasr, name):
    folder = rasr / "bundle"
    archives = read_bundle(str(folder / f"{name}.bundle"))
    assert archives == [str(folder / part) for part in PARTS]
    assert sum(len(Archive(path)) for path in archives) == 17


def test_relative_to_the_working_directory(rasr, monkeypatch):
    monkeypatch.chdir(rasr / "bundle")
    assert read_bundle("relative.bundle", relative_to="cwd") == PARTS
    assert read_bundle("relative.bundle") == PARTS
    monkeypatch.chdir(rasr)
    with pytest.raises(SourceNotFoundError, match=r"line 1 .*working directory"):
        read_bundle("bundle/relative.bundle", relative_to="cwd")


def test_nested_bundles_crlf_absolute_names_and_repetition(tmp_path):
    inner = tmp_path / "inner"
    inner.mkdir()
    for path in (tmp_path / "a.cache", inner / "b.cache", tmp_path / "grüße"):
        path.write_bytes(b"")
    (inner / "inner.bundle").write_text("b.cache")
    outer = tmp_path / "outer.bundle"
    outer.write_bytes(
        f"a.cache\tinner/inner.bundle\r\n\r\n{tmp_path}/grüße\r\na.cache\r\n".encode()
    )
    expected = [tmp_path / "a.cache", inner / "b.cache", tmp_path / "grüße"]
    assert read_bundle(str(outer)) == [str(path) for path in expected]


def test_cycle(tmp_path):
    (tmp_path / "a.bundle").write_text("b.bundle\n")
    (tmp_path / "b.bundle").write_text("a.bundle\n")
    with pytest.raises(SourceFormatError, match=r"contains itself.*a.bundle -> .*b.bundle -> "):
        read_bundle(str(tmp_path / "a.bundle"))


def test_missing_member_names_bundle_line_and_member(tmp_path):
    path = tmp_path / "x.bundle"
    path.write_text("\n# no comments here\n")
    with pytest.raises(SourceNotFoundError) as caught:
        read_bundle(str(path))
    assert str(path) in str(caught.value)
    assert "line 2 names an archive that does not exist" in str(caught.value)
    assert "entry '#'" in str(caught.value)
    assert "relative to the folder of the bundle" in str(caught.value)


def test_unreadable_bundles(tmp_path):
    with pytest.raises(SourceNotFoundError, match="no such bundle"):
        read_bundle(str(tmp_path / "none.bundle"))
    (tmp_path / "b.bundle").write_bytes(b"ab\xff")
    with pytest.raises(SourceFormatError, match="byte 2: a bundle must be UTF-8 text"):
        read_bundle(str(tmp_path / "b.bundle"))


def test_bundles_that_repeat_one_another_are_read_once(tmp_path):
    """Each names the next one three times: 3**30 readings otherwise."""
    for number in range(30):
        (tmp_path / f"{number}.bundle").write_text(f"{number + 1}.bundle\n" * 3)
    (tmp_path / "30.bundle").write_text("a.cache")
    (tmp_path / "a.cache").touch()
    assert read_bundle(str(tmp_path / "0.bundle")) == [str(tmp_path / "a.cache")]
