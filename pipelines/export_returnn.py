"""Prints a section for a RETURNN config that trains on the shards of a dataset.

seqshard export-returnn out/manifest.json [--partition_epoch=8] >> returnn.config
"""

from __future__ import annotations

import argparse
import os
import pprint
import sys
from collections.abc import Sequence

from seqshard.datasets.manifest import ManifestDataset
from seqshard.io.errors import ConfigError
from seqshard.io.manifest import folder_of
from seqshard.io.storage import is_url
from seqshard.pipelines.command import run_command

_TEMPLATE = """\
#!rnn.py
# {num_seqs} sequences in {num_files} shards, {num_bytes:.1f} MB.
files = {files}


def get_sub_epoch_dataset(files_subepoch):
    return {{"class": "HDFDataset", "files": files_subepoch, "seq_ordering": {ordering!r}}}


train = {{
    "class": "DistributeFilesDataset",
    "files": files,
    "get_sub_epoch_dataset": get_sub_epoch_dataset,
    "partition_epoch": {partition_epoch},
    "seq_ordering": "random",
    "sharding_fix": True,
}}

extern_data = {extern_data}
"""


def build_parser(prog: str) -> argparse.ArgumentParser:
    """The parser of `export-returnn`."""
    parser = argparse.ArgumentParser(
        prog=prog, description="Print a section for a RETURNN config that trains on a dataset."
    )
    parser.add_argument("dataset", help="folder of the dataset, or its manifest.json")
    parser.add_argument("--partition_epoch", type=int, default=1, help="sub-epochs (default: 1)")
    parser.add_argument(
        "--seq_ordering", default="laplace:.1000", help="within a sub-epoch (default: %(default)s)"
    )
    parser.add_argument("--verbose", action="store_true", help="show a trace with an error")
    return parser


def returnn_config(path: str, partition_epoch: int, seq_ordering: str) -> str:
    """The section as Python text.

    Raises:
        ConfigError: if the dataset has fewer shards than there are to be sub-epochs.
    """
    dataset = ManifestDataset(path)
    folder, shards = folder_of(path), dataset.info.shards
    if not 1 <= partition_epoch <= len(shards):
        raise ConfigError(
            "every sub-epoch needs a shard of its own",
            entry="--partition_epoch",
            expected=f"1 to {len(shards)}",
            found=str(partition_epoch),
            hint="Build with a larger --num_shards.",
        )
    base = folder if is_url(folder) else os.path.abspath(folder)
    return _TEMPLATE.format(
        num_seqs=dataset.info.num_seqs,
        num_files=len(shards),
        num_bytes=dataset.info.num_bytes / 1e6,
        files=pprint.pformat([f"{base}/{shard.path}" for shard in shards]),
        ordering=seq_ordering,
        partition_epoch=partition_epoch,
        extern_data=pprint.pformat(dataset.extern_data(), sort_dicts=False),
    )


def main(
    argv: Sequence[str] | None = None, prog: str = "python -m pipelines.export_returnn"
) -> int:
    """Entry point; returns the exit code."""
    args = build_parser(prog).parse_args(argv)

    def command() -> int:
        print(returnn_config(args.dataset, args.partition_epoch, args.seq_ordering), end="")
        return 0

    return run_command(command, prog, args.verbose)


if __name__ == "__main__":
    sys.exit(main())
