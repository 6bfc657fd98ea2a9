"""Orders against RETURNN's, index for index."""

import itertools
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from returnn.datasets.basic import Dataset as ReturnnDataset

from seqshard.datasets import ordering
from seqshard.datasets.basic import Dataset
from seqshard.io.errors import ConfigError, MissingSequenceError, SourceFormatError

ORDERINGS = [
    "default",
    "default_every_n:3",
    "reverse",
    "sorted",
    "sorted_reverse",
    "random",
    "random:3",
    "random_sample",
    "random_sample:2",
    "laplace",
    "laplace:1",
    "laplace:5",
    "laplace:.4",
    "laplace:7:2",
    "laplace:.3:3",
    "laplace:100",
    "sort_bin_shuffle",
    "sort_bin_shuffle:5",
    "sort_bin_shuffle:.4:2",
    "sort_bin_shuffle_x2",
    "sort_bin_shuffle_x2:6",
    "sort_bin_shuffle_x2:.3:2",
]


# RETURNN leaves text files to the garbage collector.
ignore_unclosed_files = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)


def make_lens(num_seqs, kind="few"):
    rng = np.random.RandomState(num_seqs)
    if kind == "float":
        return rng.rand(num_seqs).round(1)
    return rng.randint(0, 10 if kind == "few" else 10**6, size=num_seqs)


def make_tags(num_seqs):
    return [f"corpus/rec-{i % 29}/{i * 7919 % 23}" for i in range(num_seqs)]


def make_pair(num_seqs, lens=None, **options):
    """The same dataset of ours and of RETURNN, with tags and lengths but no data."""
    lens = make_lens(num_seqs) if lens is None else lens

    def build(base):
        class Corpus(base):
            def get_all_tags(self):
                return make_tags(num_seqs)

            def get_total_num_seqs(self, *, fast=False):
                return num_seqs

            def order(self, epoch):
                return self.get_seq_order_for_epoch(epoch, num_seqs, lambda i: lens[i])

        return Corpus(**options)

    return build(Dataset), build(ReturnnDataset)


def assert_same_order(ours, theirs):
    assert isinstance(ours, range) or (ours.dtype == np.int64 and ours.ndim == 1)
    np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


@pytest.mark.parametrize("seq_ordering", ORDERINGS)
@pytest.mark.parametrize(
    ("partition_epoch", "repeat_epoch", "num_shards"),
    [(1, 1, 1), (4, 1, 1), (1, 3, 1), (1, 1, 3), (3, 1, 2), (1, 2, 3)],
)
def test_grid(seq_ordering, partition_epoch, repeat_epoch, num_shards):
    for num_seqs, seed, unique in itertools.product(
        (2, 7, 101),
        ({}, {"fixed_random_seed": 42}, {"random_seed_offset": 16127}),
        (False, True),
    ):
        if unique and num_seqs < 7 and seq_ordering.startswith("sort_bin"):
            continue  # RETURNN's empty bins make float indices, which its next step refuses
        for epoch, shard in itertools.product((1, 2, 5), range(num_shards)):
            ours, theirs = make_pair(
                num_seqs,
                seq_ordering=seq_ordering,
                partition_epoch=partition_epoch,
                repeat_epoch=repeat_epoch,
                unique_seq_tags=unique,
                _num_shards=num_shards,
                _shard_index=shard,
                **seed,
            )
            assert_same_order(ours.order(epoch), theirs.order(epoch))


@ignore_unclosed_files
@pytest.mark.parametrize("seq_ordering", ["default", "sorted", "random", "laplace:5"])
@pytest.mark.parametrize("suffix", [".txt", ".txt.gz"])
def test_filter(tmp_path, seq_ordering, suffix):
    import gzip

    path = str(tmp_path / f"keep{suffix}")
    with (gzip.open if suffix.endswith(".gz") else open)(path, "wt") as file:
        file.writelines(f"{tag}\n" for tag in [*make_tags(500)[::3], "not-in-the-corpus"])
    for options in ({}, {"partition_epoch": 3}, {"unique_seq_tags": True}, {"repeat_epoch": 2}):
        for epoch in (1, 2, 3, 4):
            ours, theirs = make_pair(
                500, seq_ordering=seq_ordering, seq_list_filter_file=path, **options
            )
            assert_same_order(ours.order(epoch), theirs.order(epoch))


@pytest.mark.parametrize("kind", ["few", "many", "float"])
@pytest.mark.parametrize(
    "seq_ordering",
    [
        "sorted",
        "sorted_reverse",
        "laplace:3",
        "laplace:.2",
        "laplace:.500",
        "sort_bin_shuffle_x2:9",
    ],
)
def test_lengths_of_all_kinds(kind, seq_ordering):
    ours, theirs = make_pair(2000, make_lens(2000, kind), seq_ordering=seq_ordering)
    assert_same_order(ours.order(2), theirs.order(2))


@settings(max_examples=40, deadline=None)
@given(
    seq_ordering=st.sampled_from(ORDERINGS),
    lens=st.lists(st.integers(0, 2**40), min_size=1, max_size=60),
    epoch=st.integers(1, 50),
    partition_epoch=st.integers(1, 5),
    num_shards=st.integers(1, 4),
    offset=st.integers(0, 2**31),
)
def test_any_corpus(seq_ordering, lens, epoch, partition_epoch, num_shards, offset):
    for shard in range(num_shards):
        ours, theirs = make_pair(
            len(lens),
            lens,
            seq_ordering=seq_ordering,
            partition_epoch=partition_epoch,
            random_seed_offset=offset,
            _num_shards=num_shards,
            _shard_index=shard,
        )
        assert_same_order(ours.order(epoch), theirs.order(epoch))


@given(
    num_seqs=st.integers(0, 1000), partition_epoch=st.integers(1, 9), num_shards=st.integers(1, 9)
)
def test_parts_are_disjoint_complete_and_balanced(num_seqs, partition_epoch, num_shards):
    parts = [
        ordering.take_part(range(num_seqs), epoch, partition_epoch, num_shards, shard)
        for epoch in range(1, partition_epoch + 1)
        for shard in range(num_shards)
    ]
    assert [i for part in parts for i in part] == list(range(num_seqs))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_lengths_at_once_and_lazily():
    lens = make_lens(300)
    dataset = Dataset(seq_ordering="laplace:5")
    expected = dataset.get_seq_order_for_epoch(3, 300, lambda i: lens[i])
    assert_same_order(dataset.get_seq_order_for_epoch(3, 300, lens.__getitem__), expected)
    seq_lens = ordering.SeqLens(lambda: lens)
    assert seq_lens(7) == lens[7]
    assert_same_order(dataset.get_seq_order_for_epoch(3, 300, seq_lens), expected)

    def never():
        raise AssertionError("the default order needs no lengths")

    dataset.seq_ordering = "random"
    dataset.get_seq_order_for_epoch(3, 300, ordering.SeqLens(never))


@ignore_unclosed_files
@pytest.mark.parametrize("text", ["{%s}", '{"x": 1, %s}'])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_seq_order_seq_lens_file(tmp_path, text, suffix):
    import gzip

    path = str(tmp_path / f"lens.txt{suffix}")
    items = [repr(tag) + f": {i * 31 % 17}" for i, tag in enumerate(make_tags(100))]
    body = text % ", ".join(items)
    for quoted in (body, body.replace("'", '"')):
        with (gzip.open if suffix else open)(path, "wt") as file:
            file.write(quoted)
        ours, theirs = make_pair(100, seq_ordering="sorted", seq_order_seq_lens_file=path)
        assert_same_order(ours.order(1), theirs.order(1))


def test_seq_lens_file_is_never_evaluated(tmp_path):
    path = tmp_path / "lens.py"
    path.write_text("{'a': __import__('os').getpid()}")
    dataset, _ = make_pair(5, seq_ordering="sorted", seq_order_seq_lens_file=str(path))
    with pytest.raises(
        SourceFormatError, match=r"lens\.py: this is not a dict of sequence lengths"
    ):
        dataset.order(1)
    path.write_text("{'a': 3}")
    with pytest.raises(MissingSequenceError, match="has no length in this file"):
        dataset.order(1)


def test_seq_ordering_as_function():
    seen = []

    def seq_ordering(epoch, **kwargs):
        seen.append((epoch, sorted(kwargs)))
        return "random" if epoch > 1 else "sorted"

    ours, theirs = make_pair(50, seq_ordering=seq_ordering)
    for epoch in (1, 2):
        assert_same_order(ours.order(epoch), theirs.order(epoch))
    assert seen[0][0] == 1
    assert seen[0][1], "functions get a further argument, so that they must accept any"
    ours, _ = make_pair(50, seq_ordering=lambda **_: 7)
    with pytest.raises(TypeError, match="gives 7, not a str"):
        ours.order(1)


def test_no_epoch_and_empty_corpus():
    for seq_ordering in ORDERINGS:
        dataset = Dataset(seq_ordering=seq_ordering)
        assert len(dataset.get_seq_order_for_epoch(None, 0)) == 0
        assert len(dataset.get_seq_order_for_epoch(1, 0, lambda i: 1)) == 0


@pytest.mark.parametrize(
    "text",
    [
        "sortd",
        "",
        "default:1",
        "random:x",
        "random:1:2",
        "laplace:0",
        "laplace:.0",
        "laplace:.",
        "laplace:-3",
        "sort_bin_shuffle:x",
        "default_every_n",
        "default_every_n:0",
    ],
)
def test_invalid_orderings(text):
    with pytest.raises(ConfigError, match="invalid seq_ordering") as info:
        Dataset(seq_ordering=text).get_seq_order_for_epoch(1, 10, lambda i: 1)
    assert str(pickle.loads(pickle.dumps(info.value))) == str(info.value)


@ignore_unclosed_files
def test_errors(tmp_path):
    with pytest.raises(ConfigError, match="needs lengths"):
        Dataset(seq_ordering="sorted").get_seq_order_for_epoch(1, 10)
    with pytest.raises(ConfigError, match=r"expected 10 numbers, found shape \(3,\)"):
        Dataset(seq_ordering="sorted").get_seq_order_for_epoch(1, 10, np.arange(3).__getitem__)
    with pytest.raises(ConfigError, match="random seed is out of range"):
        Dataset(seq_ordering="random", fixed_random_seed=-1).get_seq_order_for_epoch(1, 10)
    with pytest.raises(ConfigError, match="cannot be combined"):
        Dataset(partition_epoch=2, repeat_epoch=2)
    with pytest.raises(ConfigError, match=r"expected 0 to 1, found 2"):
        Dataset(_num_shards=2, _shard_index=2)
    path = tmp_path / "keep.txt"
    path.write_text("other\n")
    dataset, _ = make_pair(10, seq_list_filter_file=str(path))
    with pytest.raises(ConfigError, match=r"keep\.txt: .* no sequence of the epoch is in the list"):
        dataset.order(1)
    with pytest.raises(ConfigError, match="pickled lists"):
        Dataset(seq_list_filter_file="tags.pkl")
