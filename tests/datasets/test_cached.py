"""CachedDataset: the two kinds of subclasses."""

import numpy as np
import pytest

from seqshard.datasets import CachedDataset

LENS = [4, 2, 7, 1, 5]
FRAMES = [np.full((n, 3), i, "float32") + np.arange(n)[:, None] / 10 for i, n in enumerate(LENS)]
LABELS = [np.arange(n // 2 + 1) + 10 * i for i, n in enumerate(LENS)]


class Corpus(CachedDataset):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self._num_seqs = len(LENS)
        self.num_inputs = 3
        self.num_outputs = {"data": (3, 2), "classes": (99, 1)}
        self.target_keys = ["classes"]
        self.targets = {"classes": None}

    def _get_seq_length_by_real_idx(self, real_seq_idx):
        return np.array([LENS[real_seq_idx], len(LABELS[real_seq_idx])])

    def _get_tag_by_real_idx(self, real_seq_idx):
        return f"tag-{real_seq_idx}"


class RandomAccess(Corpus):
    def _get_data_by_real_seq_idx(self, real_seq_idx, key):
        return (FRAMES if key == "data" else LABELS)[real_seq_idx]


class Store(Corpus):
    """Fills the store in `_load_seqs`, as subclasses for RETURNN's class do."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.loaded = []

    def init_seq_order(self, **kwargs):
        self.targets = {"classes": np.zeros(sum(map(len, LABELS)), "int64") - 1}
        return super().init_seq_order(**kwargs)

    def _load_seqs(self, start, end):
        super()._load_seqs(start, end)
        for idc in self.insert_alloc_interval(start, end):
            index = self._seq_index[self._index_map[idc]]
            self.loaded.append(idc)
            self._set_alloc_intervals_data(idc, data=FRAMES[index])
            first = self.get_seq_start(idc)[1]
            self.targets["classes"][first : first + len(LABELS[index])] = LABELS[index]
            self.preload_set.add(idc)


@pytest.mark.parametrize("cls", [RandomAccess, Store])
@pytest.mark.parametrize("seq_ordering", ["default", "sorted_reverse", "random"])
def test_reading(cls, seq_ordering):
    dataset = cls(seq_ordering=seq_ordering)
    dataset.initialize()
    for epoch in (1, 2):
        dataset.init_seq_order(epoch=epoch)
        order = dataset.get_current_seq_order()
        assert sorted(order) == list(range(len(LENS)))
        for i, index in enumerate(order):
            dataset.load_seqs(i, min(i + 2, dataset.num_seqs))
            np.testing.assert_array_equal(dataset.get_data(i, "data"), FRAMES[index])
            np.testing.assert_array_equal(dataset.get_data(i, "classes"), LABELS[index])
            assert dataset.get_tag(i) == f"tag-{index}"
            assert dataset.get_corpus_seq_idx(i) == index
            assert dict(dataset.get_seq_length(i).items()) == {
                "data": LENS[index],
                "classes": len(LABELS[index]),
            }
    with pytest.raises(IndexError, match="there is no sequence 5 of 5"):
        dataset.load_seqs(4, 6)


def test_a_sequence_is_stored_once_per_epoch():
    dataset = Store(window=3)
    dataset.initialize()
    dataset.init_seq_order(epoch=1)
    dataset._preload_seqs(0, 3)
    assert dataset.is_cached(0, 3)
    assert not dataset.is_cached(0, 4)
    dataset.load_seqs(1, 4)
    assert dataset.loaded == [0, 1, 2, 3]
    assert dataset.get_data(2, "data").shape == (7, 9)
    np.testing.assert_array_equal(dataset.get_data(2, "data")[:, 3:6], FRAMES[2])


def test_lookup_by_tag():
    dataset = RandomAccess()
    dataset.initialize()
    np.testing.assert_array_equal(dataset.get_data_by_seq_tag("tag-3", "data"), FRAMES[3])
    dataset.init_seq_order(epoch=1, seq_list=["tag-4", "tag-1"])
    assert dataset.get_current_seq_order() == [4, 1]


def test_what_a_subclass_must_have():
    for call in (
        lambda: CachedDataset()._get_data_by_real_seq_idx(0, "data"),
        lambda: CachedDataset()._get_seq_length_by_real_idx(0),
        lambda: CachedDataset()._get_tag_by_real_idx(0),
    ):
        with pytest.raises(NotImplementedError, match="CachedDataset must implement _get_"):
            call()
