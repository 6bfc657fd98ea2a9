"""Tag arrays and the lookup by tag."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqshard.datasets.tags import TagIndex, decode_tags, tag_array
from seqshard.io.errors import MissingSequenceError

texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=40)
corpora = st.lists(st.lists(texts, max_size=20), min_size=1, max_size=4)


def arrays_of(files):
    return [tag_array([tag.encode() for tag in tags]) for tags in files]


@given(files=corpora, others=st.lists(texts, max_size=5))
def test_index_is_a_dict(files, others):
    tags = [tag for file in files for tag in file]
    expected = {tag: i for i, tag in enumerate(tags)}
    index = TagIndex(arrays_of(files))
    assert [index.find(tag) for tag in tags] == [expected[tag] for tag in tags], (
        "scans, then hashes"
    )
    assert index.find_many(tags).tolist() == [expected[tag] for tag in tags]
    assert [index.find(tag) for tag in tags] == [expected[tag] for tag in tags]
    for tag in others:
        if tag in expected:
            assert index.find(tag) == expected[tag]
        else:
            with pytest.raises(MissingSequenceError, match="there is no sequence with this tag"):
                index.find(tag)


@given(tags=st.lists(texts, max_size=30))
def test_decode(tags):
    assert decode_tags(tag_array([tag.encode() for tag in tags])) == tags


def test_a_tag_ends_at_its_first_nul():
    raw = np.array([b"a\0rest", b"b", b"cc\0", b"\0\0x"], "S6")
    assert decode_tags(raw) == ["a", "b", "cc", ""]
    index = TagIndex([raw])
    assert index.find_many(["a", "b", "cc", ""]).tolist() == [0, 1, 2, 3]
    assert decode_tags(tag_array(raw.tolist())) == ["a", "b", "cc", ""]


def test_a_huge_tag_does_not_blow_up_the_others():
    tags = [f"seq-{i}" for i in range(1000)] + ["x" * 10**6]
    array = tag_array([tag.encode() for tag in tags])
    assert array.dtype == object
    index = TagIndex([array, tag_array([b"seq-3", b"other"])])
    assert index.find("x" * 10**6) == 1000
    assert index.find("seq-4") == 4
    assert index.find("seq-3") == 1001, "the last one of a tag"
    assert decode_tags(array) == tags


def test_hash_collisions(monkeypatch):
    monkeypatch.setattr(TagIndex, "_hash", lambda self, tags: np.zeros(len(tags), np.uint64))
    monkeypatch.setattr(TagIndex, "_hash_one", lambda self, tag: 0)
    index = TagIndex(arrays_of([["a", "b", "a"], ["c", "b"]]))
    assert index.find_many(["a", "b", "c"]).tolist() == [2, 4, 3]
    with pytest.raises(MissingSequenceError, match="entry 'd'"):
        index.find_many(["a", "d"])
