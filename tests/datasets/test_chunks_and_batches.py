"""Chunks and batches against RETURNN's."""

import itertools

import numpy as np
import pytest
from returnn.datasets.basic import Dataset as ReturnnDataset
from returnn.util.basic import NumbersDict as ReturnnNumbersDict

from seqshard.datasets import NumbersDict
from seqshard.datasets.basic import Dataset
from seqshard.datasets.chunking import parse_chunking, parse_context_window, sliding_window
from seqshard.io.errors import ConfigError


def make(base, lens, **options):
    """A dataset that knows lengths alone: `lens[i]` is a dict per data key."""
    numbers_dict = NumbersDict if base is Dataset else ReturnnNumbersDict

    class Lengths(base):
        num_seqs = len(lens)

        def get_seq_length(self, seq_idx):
            return numbers_dict(lens[seq_idx])

    dataset = Lengths(**options)
    dataset.init_seq_order(epoch=3)
    return dataset


def both(function, lens, **options):
    """The outcome of `function` for our dataset and for RETURNN's: a value or "error"."""
    outcomes = []
    for base in (Dataset, ReturnnDataset):
        try:
            outcomes.append(function(make(base, lens, **options)))
        except (ConfigError, AssertionError, Exception) as error:
            if isinstance(error, KeyError | TypeError | AttributeError):
                raise
            outcomes.append("error")
    return outcomes


def flat(numbers):
    return dict(numbers.items()), numbers.value


def chunks_of(dataset, **kwargs):
    return [(i, flat(start), flat(end)) for i, start, end in dataset.iterate_seqs(**kwargs)]


def batches_of(dataset, **kwargs):
    generator = dataset.generate_batches(**kwargs)
    batches = []
    while generator.has_more():
        (batch,) = generator.peek_next_n(1)
        parts = [
            (
                part.seq_idx,
                flat(part.seq_start_frame),
                flat(part.seq_end_frame),
                flat(part.frame_length),
                part.batch_slice,
                flat(part.batch_frame_offset),
            )
            for part in batch.seqs
        ]
        generator.advance(1)
        batches.append(
            (
                parts,
                flat(batch.max_num_frames_per_slice),
                batch.num_slices,
                (batch.start_seq, batch.end_seq, batch.get_num_seqs()),
                flat(batch.get_all_slices_num_frames()),
                flat(batch.get_total_num_frames()),
                generator.completed_frac(),
            )
        )
    return batches


SAME = [{"data": n, "classes": n} for n in (11, 1, 30, 7, 10, 0, 25)]
TEXT = [{"data": n, "classes": n, "text": 1} for n in (11, 1, 30, 7)]
RATIO = [{"data": 4 * n, "classes": n} for n in (11, 1, 30, 7, 10, 3)]
ODD = [{"data": 10, "classes": 7}]
CHUNKINGS = [None, 0, "0", 5, "10:5", (7, 3), [4, 0], "30:30", (5, 8)]
PER_KEY = [
    {"chunking": ({"data": 16, "classes": 4}, {"data": 8, "classes": 2})},
    {"chunking": {"data": 16, "classes": 4}, "min_chunk_size": {"data": 4, "classes": 1}},
    {"chunking": ({"data": 16, "classes": 4}, {"data": 8, "classes": 0})},
]


@pytest.mark.parametrize("lens", [SAME, TEXT, RATIO, ODD], ids=["same", "text", "ratio", "odd"])
def test_iterate_seqs(lens):
    for chunking, min_chunk_size, keys in itertools.product(
        CHUNKINGS, (0, 3), (None, {"data"}, {"data", "classes"}, {"classes"})
    ):
        ours, theirs = both(
            lambda dataset, keys=keys: chunks_of(dataset, used_data_keys=keys),
            lens,
            chunking=chunking,
            min_chunk_size=min_chunk_size,
        )
        assert ours == theirs


@pytest.mark.parametrize("options", PER_KEY)
@pytest.mark.parametrize("variance", [0, 0.4])
@pytest.mark.parametrize("keys", [{"data", "classes"}, {"classes"}, None])
def test_iterate_seqs_per_key(options, variance, keys):
    ours, theirs = both(
        lambda dataset: chunks_of(dataset, used_data_keys=keys),
        RATIO,
        chunking_variance=variance,
        **options,
    )
    assert ours == theirs


def test_iterate_seqs_not_recurrent_is_not_chunked():
    ours, theirs = both(lambda d: chunks_of(d, recurrent_net=False), SAME, chunking="5:5")
    assert ours == theirs
    assert len(ours) == len(SAME)


def test_custom_chunking():
    def chunking(*, dataset, seq_idx_start, recurrent_net, used_data_keys, **kwargs):
        assert kwargs, "functions get a further argument, so that they must accept any"
        for seq_idx in range(seq_idx_start, dataset.num_seqs):
            length = dataset.get_seq_length(seq_idx)
            yield seq_idx, type(length)(0), length

    ours, theirs = both(chunks_of, SAME, chunking=chunking)
    assert ours == theirs
    assert len(ours) == len(SAME)


BATCHES = [
    {"batch_size": 40},
    {"batch_size": 40, "max_seqs": 2},
    {"batch_size": {"data": 60, "classes": 20}},
    {"batch_size": 1000, "max_pad_size": 5},
    {"batch_size": 1000, "max_seq_length": 20, "min_seq_length": 2},
    {"batch_size": 1000, "max_seq_length": {"classes": 10}},
    {"batch_size": 1000, "max_seq_length": -10},
    {"batch_size": 1000, "max_seq_length": 0},
    {"batch_size": 30, "seq_drop": 0.5},
    {"batch_size": 30, "max_total_num_seqs": 2},
    {"batch_size": None, "packed_batch_size": 45},
    {"batch_size": 100, "packed_batch_size": {"data": 40}},
]


@pytest.mark.parametrize(
    ("batch", "recurrent_net"),
    [
        *[(batch, True) for batch in BATCHES],
        *[(batch, False) for batch in BATCHES if "packed_batch_size" not in batch],
    ],
)
@pytest.mark.parametrize("lens", [SAME, RATIO], ids=["same", "ratio"])
def test_generate_batches(batch, lens, recurrent_net):
    for options in (
        {},
        {"chunking": "8:4"} if lens is SAME else PER_KEY[0],
        {"context_window": {"data": 4, "classes": 2}},
    ):
        ours, theirs = both(
            lambda dataset: batches_of(dataset, recurrent_net=recurrent_net, **batch),
            lens,
            **options,
        )
        assert ours == theirs


def test_batches_of_a_cached_epoch_are_shuffled_like_theirs():
    def run(dataset):
        dataset.batch_set_generator_cache_whole_epoch = lambda: True
        generator = dataset.generate_batches(
            shuffle_batches=True, recurrent_net=True, batch_size=30
        )
        epochs = []
        for _ in range(3):
            epochs.append([])
            while generator.has_more():
                epochs[-1].append(generator.peek_next_n(1)[0].start_seq)
                generator.advance(1)
            generator.reset()
        return epochs

    ours, theirs = both(run, SAME)
    assert ours == theirs
    assert ours[0] != ours[1]


def test_index_shape_and_full_sequences():
    def run(dataset):
        generator = dataset.generate_batches(recurrent_net=True, batch_size=40)
        shape = dataset.index_shape_for_batches(generator.peek_next_n(3))
        return shape, [flat(x) for x in dataset.get_start_end_frames_full_seq(2)]

    ours, theirs = both(run, SAME, context_window=5)
    assert ours == theirs


@pytest.mark.parametrize(
    "window",
    [None, 1, 2, 3, 4, {"data": 5}, {"data": 4, "classes": 3}, ({"data": 2}, {"data": 1})],
)
def test_context_window(window):
    theirs = ReturnnDataset(context_window=window)
    left, right = parse_context_window(window)
    assert (flat(left), flat(right)) == (flat(theirs.ctx_left), flat(theirs.ctx_right))


@pytest.mark.parametrize("chunking", [*CHUNKINGS, *[options["chunking"] for options in PER_KEY]])
def test_parse_chunking(chunking):
    ours, theirs = parse_chunking(chunking), ReturnnDataset._parse_chunking(chunking)
    assert [flat(ours[i]) for i in (0, 1)] == [flat(theirs[i]) for i in (0, 1)]


def test_bad_options():
    for chunking, message in [
        ("5:x", "expected SIZE or SIZE:STEP"),
        (-3, "positive chunk sizes"),
        (({"data": 3}, {"classes": 3}), "the same keys"),
        ((5, -1), "positive step"),
        ((1, 2, 3), "a size and a step"),
    ]:
        with pytest.raises(ConfigError, match=message):
            Dataset(chunking=chunking)
    with pytest.raises(ConfigError, match="two dicts"):
        Dataset(context_window=(1, 2))
    dataset = make(Dataset, ODD, chunking=5)
    with pytest.raises(ConfigError, match="'classes' and 'data' do not give the same number of"):
        list(dataset.iterate_seqs())
    for options, message in [
        ({"batch_size": 0}, "batch_size must be positive"),
        ({"batch_size": 5, "max_seqs": 0}, "max_seqs must be positive"),
        ({"batch_size": 5, "packed_batch_size": 0}, "packed_batch_size must be positive"),
    ]:
        with pytest.raises(ConfigError, match=message):
            dataset.generate_batches(recurrent_net=True, **options).has_more()
    with pytest.raises(ConfigError, match="packed_batch_size needs recurrent_net=True"):
        dataset.generate_batches(recurrent_net=False, batch_size=5, packed_batch_size=5).has_more()
    longer = make(Dataset, [{"data": 2, "classes": 5}])
    with pytest.raises(ConfigError, match="a batch has no room for a frame"):
        batches_of(longer, recurrent_net=False, batch_size={"data": 3})
    with pytest.raises(ValueError, match="cannot advance by 9 batches"):
        make(Dataset, SAME).generate_batches(recurrent_net=True, batch_size=100).advance(9)


@pytest.mark.parametrize("window", [3, 5])
def test_sliding_window(window):
    frames = np.arange(21, dtype=np.float32).reshape(7, 3)
    theirs = ReturnnDataset(window=window)
    theirs.num_inputs = 3
    theirs.zpad = np.zeros((window // 2, 3), np.float32)
    for part in (frames, frames[:1], frames[:0]):
        expected = theirs._sliding_window(part)
        np.testing.assert_array_equal(sliding_window(part, theirs.zpad), expected)
