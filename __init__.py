"""seqshard: speech corpora as sharded HDF datasets with a manifest, and readers for training."""

__version__ = "0.1.0"
