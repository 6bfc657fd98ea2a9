"""NextGen files as sources: RETURNN's stream parsers are the oracle."""

from __future__ import annotations

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from returnn.datasets.hdf import NextGenHDFDataset

from seqshard.datasets import NextGenHDFDataset as OurDataset
from seqshard.io.errors import (
    MissingSequenceError,
    SeqshardError,
    ShapeMismatchError,
    SourceFormatError,
    UnsupportedPayloadError,
)
from seqshard.io.hdf.nextgen_source import NextGenSource
from seqshard.io.records import StreamFormat, StreamSpec
from seqshard.io.sources import open_source

NAMES = ["corpus/rec-1/ü", "corpus/rec-1/b", "c", "corpus/rec-2/d e", "e"]
LENGTHS = [3, 0, 1, 7, 2]
CLASSES = ["a", "b", "ä", "d"]
KINDS = {"features": "feature_sequence", "classes": "sparse", "align": "segment_alignment"}
DTYPES = {"features": "<f4", "classes": "<i4", "align": "<i4"}


def arrays(stream, dtype):
    rng = np.random.default_rng(1)
    if stream == "features":
        return [rng.integers(-9, 9, (n, 5)).astype(dtype) for n in LENGTHS]
    if stream == "classes":
        return [rng.integers(0, len(CLASSES), n).astype(dtype) for n in LENGTHS]
    return [rng.integers(0, 4, (n, 2)).astype(dtype) for n in LENGTHS]


def write(path, names=NAMES, dtypes=None, fixed=False, **storage):
    """A file with a stream of every kind; `storage` is for h5py's create_dataset."""
    with h5py.File(path, "w") as file:
        for stream, parser in KINDS.items():
            group = file.create_group(f"streams/{stream}")
            group.attrs["parser"] = parser
            if stream != "features":
                group.create_dataset("feature_names", data=CLASSES, dtype=h5py.string_dtype())
            values = arrays(stream, (dtypes or DTYPES)[stream])
            for name, array in zip(names, values, strict=True):
                group.create_dataset("data/" + name.replace("/", "\\"), data=array, **storage)
        encoded = np.array([name.encode() for name in names])
        file.create_dataset("seq_names", data=encoded if fixed else names)
    return str(path)


def read_all(path, stream, order=None):
    """The index, and the sequences as `read_many` gives them, by tag."""
    with NextGenSource(path, stream) as source:
        index = source.index()
    if index.format is None:
        return index, {}
    rows = np.arange(len(index.tag)) if order is None else np.array(order, int)
    length = index.length[rows]
    start = np.cumsum(length) - length
    out = np.zeros((int(length.sum()), *index.format.shape), index.format.dtype)
    with NextGenSource(path, stream) as source:
        columns = (index.position, length, index.num_bytes, index.raw_bytes)
        picked = [column[rows] if column is not length else length for column in columns]
        source.read_many(*picked, out, start)
    tags = index.tag.to_pylist()
    return index, {
        tags[row]: out[at : at + n] for row, at, n in zip(rows, start, length, strict=True)
    }


def parse(path, stream, names=NAMES):
    """What RETURNN's parser of the stream delivers, by tag, and the parser."""
    with h5py.File(path, "r", locking=False) as file:
        group = file[f"streams/{stream}"]
        inner = [name.replace("/", "\\") for name in names]
        parser = NextGenHDFDataset.parsers[group.attrs["parser"]](inner, group)
        return parser, {name: parser.get_data(key) for name, key in zip(names, inner, strict=True)}


STORAGE = {
    "contiguous": {},
    "chunked": {"chunks": True, "maxshape": (None,)},
    "gzip": {"chunks": True, "maxshape": (None,), "compression": "gzip"},
    "big-endian": {},
    "small": {},
}
ENDIAN = {name: dtype.replace("<", ">") for name, dtype in DTYPES.items()}
SMALL = {"features": "<i2", "classes": "u1", "align": "<u2"}


@pytest.mark.parametrize("stream", KINDS)
@pytest.mark.parametrize("case", STORAGE)
def test_reads_what_returnn_reads(case, stream, tmp_path):
    dtypes = {"big-endian": ENDIAN, "small": SMALL}.get(case, DTYPES)
    options = dict(STORAGE[case])
    if "maxshape" in options and stream != "classes":
        options["maxshape"] = (None, None)
    path = tmp_path / "a.hdf"
    with h5py.File(path, "w") as file:
        group = file.create_group(f"streams/{stream}")
        group.attrs["parser"] = KINDS[stream]
        group["feature_names"] = CLASSES
        for name, array in zip(NAMES, arrays(stream, dtypes[stream]), strict=True):
            group.create_dataset("data/" + name.replace("/", "\\"), data=array, **options)
        file["seq_names"] = NAMES
    index, found = read_all(str(path), stream)
    parser, expected = parse(path, stream)
    assert index.tag.to_pylist() == NAMES
    assert not index.damaged
    assert index.length.tolist() == [len(expected[name]) for name in NAMES]
    assert index.format.dtype == np.dtype(parser.get_dtype()).newbyteorder("=").name
    assert (index.format.dim, index.format.sparse) == (
        parser.num_features,
        parser.feature_type == 1,
    )
    for name in NAMES:
        np.testing.assert_array_equal(found[name], expected[name])
    direct = case in ("contiguous", "big-endian", "small")
    filled = index.num_bytes > 0
    assert ((index.position[filled] > 0) == direct).all()


def test_formats(tmp_path):
    path = write(tmp_path / "a.hdf")
    labels = tuple(CLASSES)
    expected = {
        "features": StreamFormat("float32", 5, 2, False, None, (5,)),
        "classes": StreamFormat("int32", 4, 1, True, labels),
        "align": StreamFormat("int32", 4, 1, True, labels),
    }
    for stream, stream_format in expected.items():
        assert read_all(path, stream)[0].format == stream_format


def test_reads_what_our_dataset_reads(tmp_path):
    path = write(tmp_path / "a.hdf", fixed=True)
    dataset = OurDataset("features", [path])
    dataset.initialize()
    dataset.init_seq_order(epoch=1)
    dataset.load_seqs(0, len(NAMES))
    for stream in KINDS:
        index, found = read_all(path, stream, order=[4, 2, 0, 3, 1])
        assert index.tag.to_pylist() == dataset.get_all_tags()
        for i, name in enumerate(NAMES):
            np.testing.assert_array_equal(found[name], dataset.get_data(i, stream))


runs = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5)), max_size=6)


@settings(max_examples=30, deadline=None)
@given(st.lists(runs, min_size=1, max_size=4), st.sampled_from(["i1", "<u2", "<i4", ">i8", "<u8"]))
def test_any_alignment(tmp_path_factory, alignments, dtype):
    path = tmp_path_factory.mktemp("runs") / "a.hdf"
    names = [f"seq-{i}" for i in range(len(alignments))]
    with h5py.File(path, "w") as file:
        group = file.create_group("streams/align")
        group.attrs["parser"] = "segment_alignment"
        group["feature_names"] = [str(i) for i in range(10)]
        for name, values in zip(names, alignments, strict=True):
            group[f"data/{name}"] = np.array(values, dtype).reshape(-1, 2)
        file["seq_names"] = names
    index, found = read_all(str(path), "align")
    for name, values in zip(names, alignments, strict=True):
        assert len(found[name]) == 2 * sum(length for _, length in values)
        if all(length for _, length in values):  # RETURNN's parser fails on some others
            np.testing.assert_array_equal(found[name], parse(path, "align", [name])[1][name])
        classes = [number for number, length in values for _ in range(length)]
        assert found[name][::2].tolist() == classes
    assert index.length.tolist() == [len(found[name]) for name in names]


def test_is_a_source_of_builds(tmp_path):
    path = write(tmp_path / "a.hdf")
    with open_source(StreamSpec("x", "nextgen-hdf", key="classes"), path) as source:
        assert isinstance(source, NextGenSource)
        assert source.index().tag.to_pylist() == NAMES


def test_a_file_without_sequences(tmp_path):
    path = write(tmp_path / "a.hdf")
    with h5py.File(path, "r+") as file:
        del file["seq_names"]
        file.create_dataset("seq_names", (0,), h5py.string_dtype())
    index, _ = read_all(path, "classes")
    assert index.format is None
    assert len(index.tag) == len(index.length) == 0


def test_classes_without_names(tmp_path):
    path = write(tmp_path / "a.hdf")
    with h5py.File(path, "r+") as file:
        del file["streams/classes/feature_names"]
        file.create_dataset("streams/classes/feature_names", (1 << 40,), "S1")
    index, _ = read_all(path, "classes")
    assert index.format == StreamFormat("int32", 1 << 40, 1, True)


def test_fingerprint_follows_names_and_lengths(tmp_path):
    first = read_all(write(tmp_path / "a.hdf"), "align")[0].fingerprint
    same = read_all(write(tmp_path / "b.hdf"), "align")[0].fingerprint
    renamed = write(tmp_path / "c.hdf", names=[*NAMES[:-1], "f"])
    assert first == same != read_all(renamed, "align")[0].fingerprint
    path = write(tmp_path / "d.hdf")
    with h5py.File(path, "r+") as file:
        file["streams/align/data/c"][0, 1] = 9
    assert read_all(path, "align")[0].fingerprint != first


def replaced(stream, name, value):
    def damage(file):
        del file[f"streams/{stream}/data/{name}"]
        if value is not None:
            file[f"streams/{stream}/data/{name}"] = value

    return stream, damage


def outside(file):
    del file["streams/classes/data/c"]
    file.create_dataset("streams/classes/data/c", (4,), "<i4", external=[("/dev/zero", 0, 16)])


def claims(file):
    del file["streams/classes/data/c"]
    file.create_dataset("streams/classes/data/c", (1 << 50,), "<i4", chunks=(1 << 20,))


SPOILT = {
    "missing": (*replaced("classes", "c", None), "does not have this sequence"),
    "group": (
        "classes",
        lambda f: (f.move("streams/classes/data/c", "x"), f.create_group("streams/classes/data/c")),
        "this HDF file is damaged: .*not a dataset",
    ),
    "axes": (
        *replaced("classes", "c", np.zeros((2, 2), "<i4")),
        r"sequences of one stream must be alike \(expected int32, shape .*found int32, shape \(2,",
    ),
    "type": (*replaced("features", "c", np.zeros((2, 5))), "must be alike.*found float64"),
    "dim": (
        *replaced("features", "c", np.zeros((2, 6), "<f4")),
        r"must be alike \(expected float32, shape \('time', 5\), found float32, shape \(2, 6\)",
    ),
    "soft link": (
        *replaced("features", "c", h5py.SoftLink("/streams/features/data/e")),
        "links that may leave the file are refused",
    ),
    "external link": (
        *replaced("features", "c", h5py.ExternalLink("other.hdf", "/x")),
        "links that may leave the file are refused",
    ),
    "external data": ("classes", outside, "data stored outside the file are refused"),
    "claims": ("classes", claims, "the file holds less data than it claims"),
    "negative run": (
        *replaced("align", "c", np.array([[1, 5], [2, -1]], "<i4")),
        r"impossible lengths of runs \(expected 0 to 134217728.*the shortest run -1",
    ),
    "endless run": (
        *replaced("align", "c", np.array([[1, 2**31 - 1]], "<i4")),
        "impossible lengths of runs",
    ),
}


@pytest.mark.parametrize("case", SPOILT)
def test_a_spoilt_sequence_is_one_damaged_entry(case, tmp_path):
    stream, damage, message = SPOILT[case]
    path = write(tmp_path / "a.hdf")
    intact = read_all(path, stream)[1]
    with h5py.File(path, "r+") as file:
        damage(file)
    index, found = read_all(path, stream)
    [(tag, error)] = index.damaged
    assert tag == "c"
    assert isinstance(error, SeqshardError)
    with pytest.raises(type(error), match=message):
        raise error
    assert str(error).startswith(f"{path}, entry 'c'")
    assert sorted(found) == sorted(set(NAMES) - {"c"})
    for name, values in found.items():
        np.testing.assert_array_equal(values, intact[name])


def set_parser(value):
    def damage(file):
        file["streams/classes"].attrs["parser"] = value

    return damage


def drop(name):
    def damage(file):
        del file[name]

    return damage


def sparse_floats(file):
    del file["streams/classes/data"]
    for name in NAMES:
        file["streams/classes/data/" + name.replace("/", "\\")] = np.zeros(3, "<f4")


BROKEN = {
    "parser": (set_parser("words"), SourceFormatError, "unknown kind of stream .*found 'words'"),
    "parser type": (set_parser(3), SourceFormatError, "unknown kind of stream .*found .*3"),
    "stream": (
        drop("streams/classes"),
        MissingSequenceError,
        "no stream 'classes' in this HDF file .expected align or features, found seq_names",
    ),
    "streams": (drop("streams"), MissingSequenceError, "expected a file in the NextGen layout"),
    "data": (drop("streams/classes/data"), SourceFormatError, "the stream has no data"),
    "names": (drop("seq_names"), SourceFormatError, "expected dataset seq_names"),
    "classes": (
        drop("streams/classes/feature_names"),
        SourceFormatError,
        "nothing tells the number of classes",
    ),
    "floats": (sparse_floats, UnsupportedPayloadError, "kind sparse must be integers"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_stream_is_a_typed_error(case, tmp_path):
    damage, kind, message = BROKEN[case]
    path = write(tmp_path / "a.hdf")
    with h5py.File(path, "r+") as file:
        damage(file)
    with pytest.raises(kind, match=message):
        read_all(path, "classes")


def test_names_that_are_not_utf8(tmp_path):
    path = write(tmp_path / "a.hdf")
    with h5py.File(path, "r+") as file:
        del file["seq_names"]
        file["seq_names"] = np.array([b"a", b"\xff"])
    with pytest.raises(SourceFormatError, match="a sequence name is not UTF-8"):
        NextGenSource(path, "classes")


def test_all_sequences_of_another_shape(tmp_path):
    path = write(tmp_path / "a.hdf")
    with h5py.File(path, "r+") as file:
        file["streams/features"].attrs["parser"] = "sparse"
        file["streams/features/feature_names"] = CLASSES
    with pytest.raises(UnsupportedPayloadError, match=r"must be integers \(found float32"):
        NextGenSource(path, "features")
    with h5py.File(path, "r+") as file:
        file["streams/features"].attrs["parser"] = "feature_sequence"
        file["streams/classes"].attrs["parser"] = "segment_alignment"
    index, _ = read_all(path, "classes")
    assert index.format is None
    assert [tag for tag, _ in index.damaged] == NAMES
    assert all(isinstance(error, ShapeMismatchError) for _, error in index.damaged)


def test_a_file_that_shrank_after_it_was_indexed(tmp_path):
    path = write(tmp_path / "a.hdf")
    with NextGenSource(path, "align") as source:
        columns = source.index()
        row = np.array([3])
        length, num_bytes = columns.length[row], columns.num_bytes[row]
        out = np.zeros(int(length[0]) + 2, "<i4")
        arguments = (num_bytes, columns.raw_bytes[row], out, np.zeros(1, int))
        with pytest.raises(SourceFormatError, match=r"byte .*not as long as when it was indexed"):
            source.read_many(columns.position[row], length + 2, *arguments)
        with pytest.raises(SourceFormatError, match="the file ends before this sequence"):
            source.read_many(columns.position[row] + (1 << 30), length, *arguments)


def test_any_flipped_byte_is_harmless_or_a_typed_error(tmp_path):
    original = write(tmp_path / "a.hdf")
    with open(original, "rb") as file:
        data = bytearray(file.read())
    path = tmp_path / "b.hdf"
    outcomes = set()
    for at in range(0, len(data), 37):
        data[at] ^= 0xFF
        path.write_bytes(data)
        data[at] ^= 0xFF
        try:
            read_all(str(path), "align")
            outcomes.add("read")
        except SeqshardError:
            outcomes.add("refused")
    assert outcomes == {"read", "refused"}
