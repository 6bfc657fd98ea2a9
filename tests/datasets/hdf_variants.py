"""HDF files of every kind in RETURNN's layout, for differential tests."""

import h5py
import numpy as np
from returnn.datasets.hdf import HDFDataset, HDFDatasetWriter, SimpleHDFWriter

NUM_SEQS = 23
DIM = 5


def make_sequences(num_seqs=NUM_SEQS, prefix="corpus/seq", seed=0):
    """Features, targets and text of some sequences, among them empty ones."""
    rng = np.random.RandomState(seed)
    sequences = []
    for i in range(num_seqs):
        length = 0 if i % 11 == 4 else int(rng.randint(1, 30))
        sequences.append(
            {
                "tag": f"{prefix}-{i}/ä" if i % 5 == 0 else f"{prefix}-{i}",
                "data": rng.randn(length, DIM).astype("float32"),
                "classes": rng.randint(0, 7, size=length).astype("int32"),
                "text": rng.randint(0, 99, size=int(rng.randint(1, 5))).astype("uint8"),
            }
        )
    return sequences


def write_raw(
    path,
    sequences,
    keys=("classes",),
    inputs="data",
    storage=None,
    dtypes=None,
    text_tags=False,
    sizes=True,
    libver=None,
    userblock=0,
):
    """Writes a file with h5py.

    Args:
        path: of the file.
        sequences: as `make_sequences` gives them.
        keys: target keys.
        inputs: key of the inputs, or None.
        storage: options of the datasets, for example compression.
        dtypes: other element types per key.
        text_tags: whether tags are of variable length.
        sizes: True, "scalar" or False: how targets/size tells the dimension.
        libver, userblock: see h5py.File.
    """
    storage, dtypes = storage or {}, dtypes or {}

    def joined(key):
        arrays = [sequence[key] for sequence in sequences]
        return np.concatenate(arrays).astype(dtypes.get(key, arrays[0].dtype))

    columns = [*([inputs] if inputs else []), *sorted(keys)]
    lens = [[len(sequence[key]) for key in columns] for sequence in sequences]
    with h5py.File(path, "w", libver=libver, userblock_size=userblock) as file:
        if inputs:
            file.create_dataset("inputs", data=joined(inputs), **storage)
        file.attrs["inputPattSize"] = 7
        if keys:
            for group in ("data", "labels", *(["size"] if sizes else [])):
                file.create_group(f"targets/{group}")
            for key in keys:
                data = joined(key)
                file["targets/data"].create_dataset(key, data=data, **storage)
                dim = data.shape[1] if data.ndim > 1 else 9
                if sizes:
                    file["targets/size"].attrs[key] = dim if sizes == "scalar" else [dim, data.ndim]
                labels = [f"{key}-{i}".encode() for i in range(3)]
                file["targets/labels"].create_dataset(key, data=labels)
        else:
            lens = [[row[0], 0] for row in lens]
        file.create_dataset("seqLengths", data=np.array(lens, "int32").reshape(len(lens), -1))
        tags = [sequence["tag"].encode("utf-8") for sequence in sequences]
        if text_tags:
            file.create_dataset("seqTags", data=tags, dtype=h5py.string_dtype())
        else:
            file.create_dataset("seqTags", data=np.array(tags))


def write_simple(path, sequences, dim=DIM, ndim=2, key="data", extra=(), **kwargs):
    """Writes a file with RETURNN's SimpleHDFWriter, one sequence at a time."""
    writer = SimpleHDFWriter(path, dim=dim, ndim=ndim, **kwargs)
    for sequence in sequences:
        array = sequence[key]
        writer.insert_batch(
            array[None],
            [len(array)],
            [sequence["tag"]],
            extra={name: sequence[name][None] for name in extra} or None,
        )
    writer.close()


def write_dump(path):
    """Copies a file with RETURNN's HDFDatasetWriter, which fails for tags that are not ASCII."""
    source = f"{path}.source"
    ascii_only = [{**seq, "tag": seq["tag"].replace("ä", "a")} for seq in SEQUENCES]
    write_raw(source, ascii_only, ("classes", "text"))
    dataset = HDFDataset([source])
    dataset.initialize()
    dataset.labels = {key: [f"{key}{i}" for i in range(9)] for key in ("classes", "text")}
    writer = HDFDatasetWriter(path)
    writer.dump_from_dataset(dataset, use_progress_bar=False)
    writer.close()


def write_images(path):
    """Two axes of varying size: flattened, with the target `sizes`."""
    writer = SimpleHDFWriter(path, dim=3, ndim=3)
    rng = np.random.RandomState(3)
    for i in range(6):
        height, width = rng.randint(1, 6, size=2)
        image = rng.randn(1, height, width, 3).astype("float32")
        writer.insert_batch(image, {0: [height], 1: [width]}, [f"image-{i}"])
    writer.close()


def write_text(path):
    """A text per sequence beside the inputs."""
    writer = SimpleHDFWriter(path, dim=DIM, ndim=2)
    for i, sequence in enumerate(make_sequences(7)):
        array = sequence["data"] if len(sequence["data"]) else np.zeros((2, DIM), "float32")
        raw = np.array([[f"sentence {i} é"]], dtype=object)
        writer.insert_batch(array[None], [len(array)], [f"s{i}"], extra={"raw": raw})
    writer.close()


SEQUENCES = make_sequences()
NOT_EMPTY = [sequence for sequence in SEQUENCES if len(sequence["data"])]
GZIP = {"compression": "gzip", "chunks": True, "shuffle": True}

VARIANTS = {
    "contiguous": lambda path: write_raw(path, SEQUENCES, ("classes", "text")),
    "chunked": lambda path: write_raw(path, SEQUENCES, ("classes",), storage={"chunks": True}),
    "gzip": lambda path: write_raw(path, SEQUENCES, ("classes", "text"), storage=GZIP),
    "latest": lambda path: write_raw(path, SEQUENCES, libver="latest", userblock=512),
    "text-tags": lambda path: write_raw(path, SEQUENCES, text_tags=True),
    "no-inputs": lambda path: write_raw(path, SEQUENCES, ("classes", "text"), inputs=None),
    "data-target": lambda path: write_raw(path, SEQUENCES, ("data", "text"), inputs=None),
    "no-targets": lambda path: write_raw(path, SEQUENCES, ()),
    "sparse-inputs": lambda path: write_raw(path, SEQUENCES, ("text",), inputs="classes"),
    "scalar-sizes": lambda path: write_raw(path, SEQUENCES, ("classes",), sizes="scalar"),
    "other-types": lambda path: write_raw(
        path, SEQUENCES, ("classes", "text"), dtypes={"data": ">f8", "classes": "f4", "text": "i8"}
    ),
    "half": lambda path: write_raw(
        path, SEQUENCES, ("classes", "text"), dtypes={"data": "f2", "classes": "?", "text": "S3"}
    ),
    "one": lambda path: write_raw(path, SEQUENCES[:1]),
    "simple": lambda path: write_simple(path, NOT_EMPTY),
    "simple-extra": lambda path: write_simple(path, NOT_EMPTY, extra=("classes", "text")),
    "simple-sparse": lambda path: write_simple(path, NOT_EMPTY, dim=7, ndim=1, key="classes"),
    "simple-labels": lambda path: write_simple(
        path, NOT_EMPTY, dim=5, ndim=1, key="text", labels=list("abcdé")
    ),
    "simple-typed": lambda path: write_simple(
        path,
        NOT_EMPTY,
        extra=("text",),
        extra_type={"text": (3, 1, "int64")},
        extra_labels={"text": ["a", "b", "c"]},
    ),
    "dump": write_dump,
    "images": write_images,
    "text": write_text,
}
