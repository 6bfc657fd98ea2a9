"""HDF files as sources: what RETURNN reads, we read; what is damaged or hostile is refused."""

import h5py
import numpy as np
import pytest
from returnn.datasets.hdf import HDFDataset, HDFDatasetWriter, SimpleHDFWriter

from seqshard.io.errors import (
    MissingSequenceError,
    SourceFormatError,
    SourceNotFoundError,
    UnsupportedPayloadError,
)
from seqshard.io.hdf.source import HdfSource

LENGTHS = [3, 0, 7, 1, 12, 5]
TAGS = [f"corpus/ä-{i}" if i % 2 else f"corpus/seq-{i}" for i in range(len(LENGTHS))]


def features(shape=(4,), dtype="float32"):
    rng = np.random.RandomState(1)
    return [rng.randint(0, 100, (n, *shape)).astype(dtype) for n in LENGTHS]


def write_raw(path, inputs=None, targets=None, tags=TAGS, **storage):
    """A file as RETURNN's tools leave it, by h5py alone."""
    targets = targets or {}
    arrays = [*([inputs] if inputs else []), *(targets[key] for key in sorted(targets))]
    lengths = np.array([[len(a) for a in row] for row in zip(*arrays, strict=True)], "int32")
    with h5py.File(path, "w") as file:
        if inputs:
            file.create_dataset("inputs", data=np.concatenate(inputs), **storage)
            file.attrs["inputPattSize"] = inputs[0].shape[1] if inputs[0].ndim > 1 else 101
        for key, values in targets.items():
            data = np.concatenate(values)
            file.create_dataset(f"targets/data/{key}", data=data, **storage)
            file.require_group("targets/size").attrs[key] = [101, data.ndim]
            labels = [f"{key}-{i}".encode() for i in range(3)]
            file[f"targets/labels/{key}"] = np.array(labels)
        file["seqLengths"] = lengths if targets else np.pad(lengths, ((0, 0), (0, 1)))
        file["seqTags"] = np.array([tag.encode() for tag in tags])
    return str(path)


def write_simple(path, inputs, targets=None, **options):
    """A file as RETURNN's SimpleHDFWriter makes it: chunked, growing, tags of variable length."""
    extra_type = {key: (101, v[0].ndim, str(v[0].dtype)) for key, v in (targets or {}).items()}
    writer = SimpleHDFWriter(str(path), extra_type=extra_type, **options)
    for i, (tag, array) in enumerate(zip(TAGS, inputs, strict=True)):
        extra = {key: values[i][None] for key, values in (targets or {}).items()}
        writer.insert_batch(array[None], [len(array)], [tag], extra=extra)
    writer.close()
    return str(path)


def write_dumped(path, scratch):
    """A file as RETURNN's HDFDatasetWriter makes it."""
    tags = [f"seq-{i}" for i in range(len(LENGTHS))]
    write_raw(scratch, features(), {"words": features((), "int32")}, tags)
    with h5py.File(scratch, "r+") as file:
        del file["targets/labels/words"]
    source = HDFDataset([str(scratch)])
    source.initialize()
    writer = HDFDatasetWriter(str(path))
    writer.dump_from_dataset(source, use_progress_bar=False)
    writer.close()
    return str(path)


VARIANTS = {
    "contiguous": lambda p: write_raw(p, features(), {"classes": features((), "int32")}),
    "chunked": lambda p: write_raw(
        p, features(), {"classes": features((), "int32")}, chunks=True, maxshape=None
    ),
    "gzip": lambda p: write_raw(
        p, features(), {"classes": features((2,), "int16")}, compression="gzip", shuffle=True
    ),
    "inputs-only": lambda p: write_raw(p, features(dtype="float64")),
    "sparse-inputs": lambda p: write_raw(p, features((), "int32")),
    "targets-only": lambda p: write_raw(p, None, {"b": features((), "int32"), "a": features()}),
    "three-axes": lambda p: write_raw(p, features((4, 2)), {"cls": features((), "uint8")}),
    "one-axis-float": lambda p: write_raw(p, features(()), {"x": features((), "float32")}),
    "big-endian": lambda p: write_raw(p, features(dtype=">f4"), {"c": features((), ">i4")}),
    "half": lambda p: write_raw(p, features(dtype="float16")),
    "simple": lambda p: write_simple(p, features(), {"classes": features((), "int32")}, dim=4),
    "simple-sparse": lambda p: write_simple(p, features((), "int32"), dim=101, ndim=1),
    "dumped": lambda p: write_dumped(p, p.with_suffix(".scratch.hdf")),
}


def read_all(path, key):
    """Index and arrays of one key, the arrays read in another order than they are stored."""
    with HdfSource(path, key) as source:
        index = source.index()
        shape, dtype = index.format.shape, index.format.dtype
        order = np.random.RandomState(2).permutation(len(index.length))
        out = np.empty((int(index.length.sum()), *shape), dtype)
        columns = (index.position, index.length, index.num_bytes, index.raw_bytes)
        stop = np.cumsum(index.length[order])
        start = stop - index.length[order]
        source.read_many(*(column[order] for column in columns), out, start)
    arrays = [None] * len(order)
    for row, first, last in zip(order.tolist(), start, stop, strict=True):
        arrays[row] = out[first:last]
    return index, arrays


@pytest.mark.parametrize("variant", VARIANTS)
def test_reads_what_returnn_reads(variant, tmp_path):
    path = VARIANTS[variant](tmp_path / "source.hdf")
    oracle = HDFDataset([path])
    oracle.initialize()
    oracle.init_seq_order(epoch=1)
    oracle.load_seqs(0, oracle.num_seqs)
    for key in oracle.get_data_keys():
        index, arrays = read_all(path, key)
        assert index.tag.to_pylist() == [oracle.get_tag(i) for i in range(oracle.num_seqs)]
        assert not index.damaged
        expected = [oracle.get_data(i, key) for i in range(oracle.num_seqs)]
        assert index.length.tolist() == [len(array) for array in expected]
        for ours, theirs in zip(arrays, expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)
            assert ours.dtype == theirs.dtype.newbyteorder("=")
        stream = index.format
        assert (stream.dim, stream.ndim) == tuple(oracle.num_outputs[key])
        assert stream.sparse == oracle.is_data_sparse(key)
        assert np.dtype(stream.dtype) == np.dtype(oracle.get_data_dtype(key)).newbyteorder("=")
        assert list(stream.labels or []) == list(oracle.labels.get(key) or [])
        assert index.num_bytes.tolist() == [array.nbytes for array in arrays]


def test_byte_strings_are_read_as_they_are(tmp_path):
    words = [np.array([b"a", b"bcd", b""][:n], "S3") for n in (3, 2, 1)]
    path = write_raw(tmp_path / "source.hdf", None, {"raw": words}, tags=["a", "b", "c"])
    index, arrays = read_all(path, "raw")
    assert index.format.dtype == "|S3"
    assert not index.format.sparse
    assert [array.tolist() for array in arrays] == [word.tolist() for word in words]


def test_more_tags_than_arrow_keeps_in_one_chunk(tmp_path):
    path = str(tmp_path / "long.hdf")
    num_seqs = 600_000
    tags = np.char.add(b"a/long/name/of/a/recording/", np.arange(num_seqs).astype("S6"))
    with h5py.File(path, "w") as file:
        file["inputs"] = np.zeros((num_seqs, 1), "int8")
        file["seqLengths"] = np.pad(np.ones((num_seqs, 1), "int32"), ((0, 0), (0, 1)))
        file["seqTags"] = tags
    with HdfSource(path, "data") as source:
        index = source.index()
    assert index.tag[num_seqs - 1].as_py() == "a/long/name/of/a/recording/599999"
    assert len(index.tag) == index.length.sum() == num_seqs


def test_fingerprint_follows_the_tables_and_not_the_payload(tmp_path):
    def fingerprint(name, **options):
        options = {"inputs": features(), **options}
        with HdfSource(write_raw(tmp_path / name, **options), "data") as source:
            return source.index().fingerprint

    first = fingerprint("a.hdf")
    assert fingerprint("b.hdf") == first
    assert fingerprint("b.hdf", inputs=[array + 1 for array in features()]) == first
    assert fingerprint("c.hdf", tags=[f"{tag}x" for tag in TAGS]) != first
    assert fingerprint("d.hdf", inputs=features((5,))) != first
    assert fingerprint("e.hdf", inputs=features()[::-1]) != first


# --------------------------------------------------------------------------- damaged and hostile


def replace(file, name, value):
    del file[name]
    file[name] = value


def lengths(values, dtype="float64"):
    return lambda file: replace(file, "seqLengths", np.array(values, dtype).reshape(-1, 1))


def external_storage(file):
    del file["inputs"]
    file.create_dataset("inputs", (28, 4), "f4", external=[("elsewhere.bin", 0, 28 * 16)])


def virtual(file):
    layout = h5py.VirtualLayout((28, 4), "f4")
    layout[:] = h5py.VirtualSource("elsewhere.hdf", "inputs", (28, 4))
    del file["inputs"]
    file.create_virtual_dataset("inputs", layout)


def never_written(file):
    del file["inputs"]
    file.create_dataset("inputs", (28, 10**12), "f4", chunks=(1, 1000))


def vlen_inputs(file):
    del file["inputs"]
    file["inputs"] = ["text"] * 28


DAMAGE = {
    "nan": (lengths([3, np.nan, 7, 1, 12, 5]), "row 1.*not a count of frames.*found nan"),
    "infinite": (lengths([3, 0, 7, 1, 12, np.inf]), "row 5.*not a count of frames.*found inf"),
    "half": (lengths([3, 0, 7.5, 1, 12, 5]), "row 2.*whole number.*found 7.5"),
    "negative": (lengths([3, -1, 8, 1, 12, 5], "int32"), "row 1.*found -1"),
    "too-long": (lengths([2**62] * 4 + [28, 0], "int64"), "row 0.*the 28 frames.*found 4611"),
    "sum": (lengths([3, 0, 7, 1, 12, 6], "int32"), "fit together.*expected 29 frames, found 28"),
    "few-lengths": (lengths([28], "int32"), "seqLengths and seqTags.*6 rows.*shape \\(1, 1\\)"),
    "text-lengths": (lambda f: replace(f, "seqLengths", ["3"] * 6), "table of numbers"),
    "one-length": (lambda f: replace(f, "seqLengths", 28), "table of numbers.*shape \\(\\)"),
    "no-lengths": (lambda f: f.__delitem__("seqLengths"), "expected dataset seqLengths"),
    "no-tags": (lambda f: f.__delitem__("seqTags"), "expected dataset seqTags"),
    "number-tags": (lambda f: replace(f, "seqTags", [1] * 6), "seqTags must be a list of strings"),
    "square-tags": (
        lambda f: replace(f, "seqTags", np.full((6, 2), b"a")),
        "list of strings.*shape \\(6, 2\\)",
    ),
    "latin-tags": (lambda f: replace(f, "seqTags", [b"\xe4"] * 6), "a sequence tag is not UTF-8"),
    "number-labels": (lambda f: f.create_dataset("labels", data=[1]), "list of strings"),
    "latin-labels": (
        lambda f: f.create_dataset("labels", data=[b"\xe4"]),
        "a label is not UTF-8",
    ),
    "scalar": (lambda f: replace(f, "inputs", 3.0), "no time axis.*shape \\(\\)"),
    "empty": (lambda f: replace(f, "inputs", h5py.Empty("f4")), "no time axis.*shape None"),
    "group": (lambda f: (f.__delitem__("inputs"), f.create_group("inputs")), "not a dataset"),
    "soft-link": (lambda f: replace(f, "inputs", h5py.SoftLink("/seqTags")), "links.*SoftLink"),
    "external-link": (
        lambda f: replace(f, "inputs", h5py.ExternalLink("other.hdf", "/inputs")),
        "links that may leave the file are refused.*ExternalLink",
    ),
    "external-storage": (external_storage, "stored outside the file are refused"),
    "virtual": (virtual, "stored outside the file are refused"),
    "never-written": (never_written, "holds less data than it claims.*found 0 bytes stored"),
}
UNSUPPORTED = {
    "vlen-strings": (vlen_inputs, "elements of this type.*fixed-length bytes, found object"),
    "compound": (
        lambda f: replace(f, "inputs", np.zeros(28, [("a", "f4"), ("b", "i4")])),
        "elements of this type cannot be stored",
    ),
    "long-double": (
        lambda f: replace(f, "inputs", np.zeros((28, 2), np.longdouble)),
        "numbers of up to 64 bits.*found float128",
    ),
}


def damaged(path, mutate):
    write_raw(path, features())
    with h5py.File(path, "r+") as file:
        mutate(file)
    return str(path)


def index_of(path, key="data"):
    with HdfSource(path, key) as source:
        return source.index()


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_a_typed_error(case, tmp_path):
    mutate, words = DAMAGE[case]
    path = damaged(tmp_path / "bad.hdf", mutate)
    with pytest.raises(SourceFormatError, match=f"(?s)bad.hdf.*{words}"):
        index_of(path)


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_unsupported_elements_are_a_typed_error(case, tmp_path):
    mutate, words = UNSUPPORTED[case]
    path = damaged(tmp_path / "bad.hdf", mutate)
    with pytest.raises(UnsupportedPayloadError, match=f"entry 'inputs'.*{words}"):
        index_of(path)


@pytest.mark.parametrize(
    ("attribute", "found"), [("x", "'x'"), (np.nan, "nan"), (-3, "-3"), ([1, 2, 3], "array")]
)
def test_dimension_must_be_a_number(attribute, found, tmp_path):
    path = write_raw(tmp_path / "bad.hdf", features((), "int32"))
    with h5py.File(path, "r+") as file:
        file.attrs["inputPattSize"] = attribute
    with pytest.raises(SourceFormatError, match=f"'inputPattSize'.*whole numbers.*{found}"):
        index_of(path)


def test_missing_key_names_those_that_are_there(tmp_path):
    path = write_raw(tmp_path / "a.hdf", features(), {"classes": features((), "int32")})
    with pytest.raises(MissingSequenceError, match=r"no data key 'words'.*data or classes"):
        HdfSource(path, "words")


def test_file_in_another_layout_shows_what_is_in_it(tmp_path):
    with h5py.File(tmp_path / "a.hdf", "w") as file:
        file["streams/x"] = [1]
    with pytest.raises(MissingSequenceError, match="RETURNN's layout, found streams"):
        HdfSource(str(tmp_path / "a.hdf"), "data")


def test_targets_that_are_no_group(tmp_path):
    with h5py.File(tmp_path / "a.hdf", "w") as file:
        file["targets/data"] = [1]
    with pytest.raises(SourceFormatError, match="'targets/data': this is not a group"):
        HdfSource(str(tmp_path / "a.hdf"), "x")


def test_sizes_behind_an_external_link_are_refused(tmp_path):
    path = write_raw(tmp_path / "a.hdf", None, {"x": features()})
    with h5py.File(path, "r+") as file:
        replace(file, "targets/size", h5py.ExternalLink("other.hdf", "/"))
    with pytest.raises(SourceFormatError, match=r"targets/size.*ExternalLink"):
        index_of(path, "x")


def test_lengths_without_a_column_for_the_key(tmp_path):
    path = write_raw(tmp_path / "a.hdf", features(), {"x": features()})
    with h5py.File(path, "r+") as file:
        replace(file, "seqLengths", file["seqLengths"][:, :1])
    assert len(index_of(path).length) == len(LENGTHS)
    with pytest.raises(SourceFormatError, match=r"no column for this key.*2 columns, found 1"):
        index_of(path, "x")


@pytest.mark.parametrize("keep", [0, 7, 100, 0.5, 0.95])
def test_truncated_file(keep, tmp_path):
    path = write_raw(tmp_path / "cut.hdf", features())
    data = (tmp_path / "cut.hdf").read_bytes()
    (tmp_path / "cut.hdf").write_bytes(data[: int(keep * len(data)) if keep < 1 else keep])
    with pytest.raises(SourceFormatError, match=r"cut.hdf: this is not a complete HDF file"):
        index_of(path)


def test_missing_file(tmp_path):
    with pytest.raises(SourceNotFoundError, match="no such file"):
        HdfSource(str(tmp_path / "none.hdf"), "data")


def test_sequences_beyond_the_end_are_refused(tmp_path):
    path = write_raw(tmp_path / "a.hdf", features())
    with HdfSource(path, "data") as source:
        ranges = [np.array([value]) for value in (20, 9, 144, -1)]
        with pytest.raises(SourceFormatError, match="'inputs, frame 20': the data end before"):
            source.read_many(*ranges, np.empty((9, 4), "f4"), np.array([0]))


def test_damaged_chunk_names_the_frame(tmp_path):
    path = write_raw(tmp_path / "a.hdf", features(), chunks=(7, 4), compression="gzip")
    with h5py.File(path) as file:
        place = file["inputs"].id.get_chunk_info(2).byte_offset
    data = bytearray((tmp_path / "a.hdf").read_bytes())
    data[place + 2] ^= 0xFF
    (tmp_path / "a.hdf").write_bytes(data)
    with HdfSource(path, "data") as source:
        index = source.index()
        columns = [c[4:5] for c in (index.position, index.length, index.num_bytes)]
        with pytest.raises(SourceFormatError, match="'inputs, frame 11': this HDF file is damaged"):
            source.read_many(*columns, np.array([-1]), np.empty((12, 4), "f4"), np.array([0]))


@pytest.mark.parametrize("storage", [{}, {"compression": "gzip"}])
def test_any_flipped_byte_is_harmless_or_a_typed_error(storage, tmp_path):
    path = tmp_path / "fuzz.hdf"
    write_raw(path, features(), {"classes": features((), "int32")}, **storage)
    data = path.read_bytes()
    rng = np.random.RandomState(0)
    used = np.flatnonzero(np.frombuffer(data, np.uint8))
    outcomes = set()
    for place in rng.choice(used, 150, replace=False).tolist():
        changed = bytearray(data)
        changed[place] ^= int(rng.randint(1, 256))
        path.write_bytes(changed)
        for key in ("data", "classes"):
            try:
                read_all(str(path), key)
                outcomes.add("read")
            except (SourceFormatError, MissingSequenceError, SourceNotFoundError):
                outcomes.add("refused")
    assert outcomes == {"read", "refused"}
