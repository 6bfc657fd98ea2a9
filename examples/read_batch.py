"""Reads one batch of a built dataset as a training program would: python read_batch.py out/demo"""

import sys

import numpy as np

from seqshard.datasets import init_dataset

BATCH_SEQS = 4

dataset = init_dataset(
    {"class": "ManifestDataset", "manifest": sys.argv[1], "seq_ordering": "laplace:.16"}
)
dataset.init_seq_order(epoch=1)
dataset.load_seqs(0, BATCH_SEQS)
print("extern_data for RETURNN:")
for key, value in dataset.extern_data().items():
    print(f"  {key}: {value}")

print(f"first batch of epoch 1, {BATCH_SEQS} of {dataset.num_seqs} sequences:")
lengths = [dataset.get_seq_length(i)["data"] for i in range(BATCH_SEQS)]
batch = np.zeros((BATCH_SEQS, max(lengths), dataset.get_data_dim("data")), np.float32)
for i, length in enumerate(lengths):
    batch[i, :length] = dataset.get_data(i, "data")
    classes = dataset.get_data(i, "classes")
    text = dataset.get_data(i, "orth").tobytes().decode("utf-8")
    print(f"  {dataset.get_tag(i)}: {length} frames, classes {classes[:6]}..., {text!r}")
print(f"padded features: {batch.shape}, mean {batch.mean():.4f}")
