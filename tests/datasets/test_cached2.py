"""CachedDataset2 against RETURNN's."""

import numpy as np
import pytest
from returnn.datasets.basic import DatasetSeq as ReturnnDatasetSeq
from returnn.datasets.cached2 import CachedDataset2 as ReturnnCachedDataset2

from seqshard.datasets import CachedDataset2, DatasetSeq
from seqshard.io.errors import ConfigError


def make(base, seq_class, count=10, known=False, outputs=True, fracs=False):
    class Stream(base):
        calls = []  # noqa: RUF012

        def __init__(self):
            super().__init__()
            self.num_inputs = 3
            self.num_outputs = {"data": (3, 2), "classes": (5, 1)} if outputs else {"x": (1, 1)}
            self.calls = []

        def init_seq_order(self, epoch=None, seq_list=None, seq_order=None):
            super().init_seq_order(epoch=epoch, seq_list=seq_list, seq_order=seq_order)
            if known and epoch is not None:
                self._num_seqs = count
            return True

        def _collect_single_seq(self, seq_idx):
            self.calls.append(seq_idx)
            if seq_idx >= count:
                return None
            return seq_class(
                seq_idx=seq_idx,
                features=np.full((seq_idx % 4, 3), seq_idx, "float32"),
                targets={"classes": np.arange(seq_idx, dtype="int32"), "flag": np.array(1.5)},
                seq_tag=f"tag-{seq_idx}",
                complete_frac=(seq_idx + 1) / 20 if fracs else None,
            )

    dataset = Stream()
    dataset.initialize()
    return dataset


def both(**kwargs):
    return make(CachedDataset2, DatasetSeq, **kwargs), make(
        ReturnnCachedDataset2, ReturnnDatasetSeq, **kwargs
    )


def trace(dataset, step=1):
    """Everything that a reader sees of two epochs, and what was collected for that."""
    seen = [dataset.epoch, dataset.num_seqs]
    for epoch in (1, 2):
        seen.append(dataset.init_seq_order(epoch=epoch))
        seen.append((dataset.get_data_keys(), dataset.get_target_list()))
        for key in dataset.get_data_keys():
            seen.append(dataset.get_data_dtype(key))
            if key != "flag":
                seen.append((dataset.get_data_dim(key), dataset.is_data_sparse(key)))
        i = 0
        while dataset.is_less_than_num_seqs(i):
            dataset.load_seqs(i, i + step)
            for j in range(i, i + step):
                if dataset.is_less_than_num_seqs(j):
                    seen.append((dataset.get_tag(j), dict(dataset.get_seq_length(j).items())))
                    seen.append(dataset.get_data(j, "data").tolist())
                    seen.append(dataset.get_complete_frac(j))
                    seen.append([seq.seq_idx for seq in dataset.added_data])
            i += step
        seen.append((dataset.num_seqs, dataset.reached_final_seq, dataset.calls))
        if not seen[-1][1]:
            continue
        seen.append(dict(dataset.get_num_timesteps().items()))
    return seen


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("fracs", [False, True])
def test_reading(known, step, fracs):
    ours, theirs = both(known=known, fracs=fracs)
    assert trace(ours, step) == trace(theirs, step)


def test_looking_ahead_collects_once():
    ours, theirs = both()
    for dataset in (ours, theirs):
        dataset.init_seq_order(epoch=1)
        dataset.calls.clear()
        assert dataset.is_less_than_num_seqs(4)
        assert dataset.get_tag(2) == "tag-2"
        dataset.load_seqs(3, 6)
        assert [seq.seq_idx for seq in dataset.added_data] == [3, 4, 5]
    assert ours.calls == theirs.calls == [0, 1, 2, 3, 4, 5]


def test_shape_of_unknown_keys():
    ours, theirs = both(outputs=False)
    for dataset in (ours, theirs):
        dataset.init_seq_order(epoch=1)
    for key in ("data", "classes"):
        assert ours.is_data_sparse(key) == theirs.is_data_sparse(key)
        assert ours.get_data_dim(key) == theirs.get_data_dim(key)


def test_no_way_back():
    dataset, _ = both()
    dataset.init_seq_order(epoch=1)
    dataset.load_seqs(5, 6)
    with pytest.raises(IndexError, match="cannot go back to sequence 2, as 5 was loaded"):
        dataset.load_seqs(2, 3)
    with pytest.raises(IndexError, match="sequence 9 is not loaded"):
        dataset.get_data(9, "data")
    with pytest.raises(NotImplementedError, match="does not know its number of sequences"):
        dataset.num_seqs  # noqa: B018


def test_empty_epoch():
    dataset, _ = both(count=0)
    dataset.init_seq_order(epoch=1)
    assert not dataset.is_less_than_num_seqs(0)
    assert dataset.num_seqs == 0
    with pytest.raises(ConfigError, match="has no sequence that would tell"):
        dataset.get_data_keys()


def test_errors_of_a_subclass_are_not_the_end():
    class Broken(CachedDataset2):
        num_outputs = {"data": (1, 2)}  # noqa: RUF012

        def _collect_single_seq(self, seq_idx):
            raise OSError("the disk is gone")

    dataset = Broken()
    dataset.num_outputs = {"data": (1, 2)}
    dataset.init_seq_order(epoch=1)
    with pytest.raises(OSError, match="the disk is gone"):
        dataset.is_less_than_num_seqs(0)
