"""The stages through Beam: coders, side inputs, and the demo corpus against its own truth."""

import pickle
from pathlib import Path

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pytest
from apache_beam.testing import test_pipeline
from apache_beam.testing.util import assert_that

from seqshard.io.columns import batch
from seqshard.io.config import SourceFile, load_corpus
from seqshard.io.errors import ShapeMismatchError, SourceFormatError
from seqshard.io.records import Layout, StreamFormat, StreamSpec
from seqshard.runners.select import make_options
from seqshard.transforms.index_sources import IndexSources, SourceSurvey, index_source
from seqshard.transforms.join_streams import JoinStreams, join_streams
from seqshard.transforms.order import parse_ordering
from seqshard.transforms.plan_shards import (
    PlanShards,
    count_bins,
    plan_bins,
    plan_shards,
    select_cut_rows,
)
from seqshard.transforms.relay import RelayedError, find_error
from seqshard.transforms.rows import KeyedRows, Rows, RowsCoder
from seqshard.transforms.stage import Stage
from seqshard.transforms.survey_sources import SurveySources, merge_formats, survey_sources
from seqshard.transforms.write_shards import WriteShards

DEMO = Path(__file__).parents[2] / "examples" / "demo"
CONFIG = str(DEMO.parent / "demo.toml")
DEFAULT = parse_ordering("default")


@pytest.fixture
def pipeline():
    """A pipeline on the runner that `DirectRunner` means here."""
    return test_pipeline.TestPipeline(options=make_options("DirectRunner", [], 0), blocking=True)


@pytest.fixture(scope="module")
def corpus():
    return load_corpus(CONFIG)


# ----------------------------------------------------------------------------------- the coder


def make_rows(num_rows):
    number = np.arange(num_rows, dtype=np.int64)
    tags = pa.array([f"sequence-{i}" for i in range(num_rows)], pa.string())
    return batch({"tag": tags, "length": number, "source": number.astype(np.int32)})


@pytest.mark.parametrize("part", [(0, 0), (0, 1), (0, 5000), (4998, 2), (1234, 60)])
def test_rows_survive_their_coder(part):
    rows = make_rows(5000).slice(*part)
    again = RowsCoder().decode(RowsCoder().encode(Rows(rows))).batch
    assert again.equals(rows)
    assert again.schema == rows.schema


def test_a_slice_is_encoded_as_a_slice():
    rows = make_rows(50_000)
    small = RowsCoder().encode(Rows(rows.slice(40_000, 20)))
    assert len(small) < 2_000
    assert len(pickle.dumps(rows.slice(40_000, 20))) > 100 * len(small)


def test_beam_uses_the_coder():
    registry = beam.coders.registry
    assert isinstance(registry.get_coder(Rows), RowsCoder)
    assert isinstance(registry.get_coder(KeyedRows).value_coder(), RowsCoder)
    assert RowsCoder().is_deterministic()


def test_every_collection_of_rows_has_the_coder(corpus):
    pipeline = beam.Pipeline()
    sources = pipeline | beam.Create(corpus.sources)
    index = sources | IndexSources(False, 3)
    survey = index.surveys | SurveySources(corpus, [])
    joined = index.rows | JoinStreams(corpus, DEFAULT, survey)
    assert index.rows.element_type == KeyedRows
    assert joined.rows.element_type == Rows
    shards = joined.rows | WriteShards(corpus, "out", Layout(), False, survey)
    assert shards.element_type is int

    proto = pipeline.to_runner_api()
    coders = proto.components.coders
    keyed = [name for name, c in coders.items() if "RowsCoder" in str(c.spec)]
    pairs = [c for c in coders.values() if set(c.component_coder_ids) & set(keyed)]
    assert keyed
    assert pairs


# ----------------------------------------------------------------------------------- the stages


def test_index_and_join_of_the_demo_corpus(pipeline, corpus):
    def check(elements):
        found = pa.Table.from_batches([rows.batch for rows in elements])
        assert sorted(found.column("tag").to_pylist()) == expected
        assert found.column("length.data").to_pylist() == found.column("length.classes").to_pylist()

    with_rows = [index_source(f, False)[1] for f in corpus.sources if f.spec.name == "data"]
    expected = sorted(t for rows in with_rows for t in rows.column("tag").to_pylist())
    assert len(expected) == 120
    with pipeline:
        index = pipeline | beam.Create(corpus.sources) | IndexSources(False, 5)
        survey = index.surveys | SurveySources(corpus, ["x"])
        joined = index.rows | JoinStreams(corpus, DEFAULT, survey)
        assert_that(joined.rows, check)


@pytest.mark.parametrize("num_buckets", [1, 7])
def test_the_plan_does_not_depend_on_the_number_of_buckets(pipeline, corpus, num_buckets):
    frame_bytes = {"data": 64, "classes": 1, "orth": 1, "speaker": 4}
    whole = [index_source(file, False)[1] for file in corpus.sources]
    rows = join_streams(whole, corpus, frame_bytes, DEFAULT).rows
    bins = plan_bins(count_bins(rows, DEFAULT), 7, 1)
    expected = plan_shards(bins, [select_cut_rows(rows, bins, DEFAULT)], DEFAULT)
    assert expected.num_shards == 7

    def check(elements):
        (plan,) = elements
        for name in ("primary", "tie", "num_seqs"):
            np.testing.assert_array_equal(getattr(plan, name), getattr(expected, name))

    with pipeline:
        index = pipeline | beam.Create(corpus.sources) | IndexSources(False, num_buckets)
        survey = index.surveys | SurveySources(corpus, [])
        assert_that(survey, lambda found: _check_frame_bytes(found, frame_bytes), label="Bytes")
        joined = index.rows | JoinStreams(corpus, DEFAULT, survey)
        plan = joined.rows | PlanShards(DEFAULT, 7, 1, "error", joined.problems)
        assert_that(plan, check)


def _check_frame_bytes(surveys, expected):
    assert [survey.frame_bytes for survey in surveys] == [expected]


def test_typed_errors_come_out_of_a_pipeline(pipeline):
    def fail(element):
        raise SourceFormatError("it is damaged", f"{element}.hdf", position=element)
        yield

    pipeline | beam.Create([3]) | beam.ParDo(Stage(fail))
    with pytest.raises(RelayedError) as caught:
        pipeline.run()
    error = find_error(caught.value)
    assert type(error) is SourceFormatError
    assert (error.path, error.position) == ("3.hdf", 3)


def test_other_errors_are_not_wrapped():
    def fail(element):
        raise ZeroDivisionError
        yield

    with pytest.raises(ZeroDivisionError):
        list(Stage(fail).process(1))


# ----------------------------------------------------------------------------------- the survey


def test_index_of_one_file(corpus):
    file = corpus.sources[0]
    survey, rows = index_source(file, False)
    assert survey.ordinal == 0
    assert survey.num_seqs == rows.num_rows > 0
    assert survey.num_bytes == Path(file.path).stat().st_size
    assert rows.schema.names == [
        "tag", "source", "row", "position", "length", "num_bytes", "raw_bytes"
    ]  # fmt: skip
    assert rows.column("row").to_pylist() == list(range(rows.num_rows))


def test_a_damaged_file_is_fatal_or_listed(tmp_path):
    path = tmp_path / "bad.hdf"
    path.write_bytes(b"not HDF")
    file = SourceFile(3, StreamSpec("data", "hdf"), str(path), "bad.hdf")
    with pytest.raises(SourceFormatError, match=r"bad\.hdf: this is not a complete HDF file"):
        index_source(file, False)
    survey, rows = index_source(file, True)
    assert rows.num_rows == survey.num_seqs == 0
    (rejection,) = survey.rejected
    assert (rejection.tag, rejection.stream, rejection.source) == ("", "data", "bad.hdf")
    assert str(tmp_path) not in rejection.reason


def survey_of(ordinal, stream_format=None, fingerprint="f", num_bytes=7, version="1"):
    return SourceSurvey(ordinal, stream_format, 2, num_bytes, fingerprint, version)


FEATURES = StreamFormat("float32", 40, 2, False, None, (40,))
CLASSES = StreamFormat("int32", 9, 1, True, ("a", "b"))


@pytest.fixture
def three_files(tmp_path):
    data, classes = StreamSpec("data", "hdf"), StreamSpec("classes", "hdf")
    corpus = load_corpus(CONFIG)
    files = [(0, data), (1, data), (2, classes)]
    sources = tuple(SourceFile(i, spec, f"/x/{i}.hdf", f"{i}.hdf") for i, spec in files)
    return type(corpus)((data, classes), sources, "error", None, 0, None, "digest")


def test_formats_of_all_files_agree(three_files):
    surveys = [survey_of(0, FEATURES), survey_of(1), survey_of(2, CLASSES)]
    assert merge_formats(surveys, three_files) == {"data": FEATURES, "classes": CLASSES}
    other = StreamFormat("float32", 41, 2, False, None, (41,))
    with pytest.raises(ShapeMismatchError, match=r"/x/1.hdf.*40 features.*0\.hdf.*41 features"):
        merge_formats([survey_of(0, FEATURES), survey_of(1, other)], three_files)
    with pytest.raises(SourceFormatError, match=r"/x/2\.hdf: no file of stream 'classes'"):
        merge_formats([survey_of(0, FEATURES), survey_of(1), survey_of(2)], three_files)


def test_plan_id_follows_contents_and_options_and_stamp_follows_versions(three_files):
    def survey(options=("x",), **changes):
        files = [survey_of(0, FEATURES), survey_of(1), survey_of(2, CLASSES, **changes)]
        return survey_sources(files[::-1], three_files, list(options))

    first = survey()
    assert [info.path for info in first.sources] == ["0.hdf", "1.hdf", "2.hdf"]
    assert survey(fingerprint="g").plan != first.plan
    assert survey(num_bytes=8).plan != first.plan
    assert survey(("y",)).plan != first.plan
    touched = survey(version="2")
    assert touched.plan == first.plan
    assert touched.stamp != first.stamp
