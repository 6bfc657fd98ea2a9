"""Tags that the layout cannot hold are refused, or listed."""

from __future__ import annotations

import numpy as np
import pytest

from seqshard.io.config import load_corpus
from seqshard.io.errors import SourceFormatError
from seqshard.io.sprint.writer import ArchiveWriter
from seqshard.transforms.index_sources import index_source


@pytest.fixture
def source(tmp_path):
    with ArchiveWriter(tmp_path / "a.cache") as writer:
        for name in ("x", "y\0z", "z"):
            writer.add_features(name, np.ones((3, 2), np.float32))
    config = tmp_path / "corpus.toml"
    config.write_text('[streams.data]\nsource = "sprint-features"\nfiles = ["a.cache"]\n')
    return load_corpus(str(config)).sources[0]


def test_a_tag_with_nul_is_an_error(source):
    with pytest.raises(SourceFormatError, match="a tag with a NUL cannot be stored"):
        index_source(source, skip_damaged=False)


def test_a_tag_with_nul_is_rejected_where_damage_is_skipped(source):
    survey, rows = index_source(source, skip_damaged=True)
    assert [rejection.tag for rejection in survey.rejected] == ["y\0z"]
    assert survey.num_seqs == 3
    assert rows.column("tag").to_pylist() == ["x", "z", "y\0z"]
    assert rows.column("length").to_pylist() == [3, 3, -1]
