"""Shows what is in a dataset.

python -m pipelines.inspect out [--sequence=TAG]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

from seqshard.io.manifest import Manifest, load_manifest
from seqshard.pipelines.command import run_command


def build_parser(prog: str) -> argparse.ArgumentParser:
    """The parser of `inspect`."""
    parser = argparse.ArgumentParser(
        prog=prog, description="Show streams, shards and statistics of a dataset."
    )
    parser.add_argument("dataset", help="folder of the dataset, or its manifest.json")
    parser.add_argument("--sequence", metavar="TAG", help="show one sequence instead")
    parser.add_argument("--verbose", action="store_true", help="show a trace with an error")
    return parser


def describe(manifest: Manifest) -> Iterator[str]:
    """The lines that describe a dataset."""
    yield (
        f"{manifest.num_seqs:,} sequences, {manifest.num_bytes / 1e6:,.1f} MB in "
        f"{len(manifest.shards)} shards, order {manifest.seq_ordering}, "
        f"{manifest.num_rejected:,} rejected"
    )
    for name, stream in manifest.streams.items():
        kind = "classes" if stream.sparse else "features"
        frames = manifest.num_frames[name]
        yield f"  {name}: {frames:,} frames, {stream.dim} {kind}, {stream.dtype}"
    lengths = manifest.statistics["length"]
    yield (
        f"  length of {next(iter(manifest.streams))}: {lengths['min']} to {lengths['max']} frames, "
        f"{lengths['mean']:.1f} on average"
    )
    sizes = [shard.num_bytes for shard in manifest.shards]
    mean = max(1.0, sum(sizes) / max(1, len(sizes)))
    for shard in manifest.shards:
        deviation = 100 * (shard.num_bytes / mean - 1)
        yield (
            f"  {shard.path}: {shard.num_seqs:,} sequences, {shard.num_bytes / 1e6:,.1f} MB "
            f"({deviation:+.2f} %)"
        )


def describe_sequence(path: str, tag: str) -> Iterator[str]:
    """The lines that describe one sequence."""
    from seqshard.datasets import ManifestDataset

    dataset = ManifestDataset(path)
    dataset.initialize()
    dataset.init_seq_order(epoch=1, seq_list=[tag])
    index = dataset.get_corpus_seq_idx(0)
    yield f"{tag}: sequence {index} of {dataset.get_total_num_seqs()}"
    for key in dataset.get_data_keys():
        data = dataset.get_data(0, key)
        yield f"  {key}: {data.dtype} {data.shape}, begins {data[:1].tolist()}"


def main(argv: Sequence[str] | None = None, prog: str = "python -m pipelines.inspect") -> int:
    """Entry point; returns the exit code."""
    args = build_parser(prog).parse_args(argv)

    def command() -> int:
        if args.sequence is None:
            lines = describe(load_manifest(args.dataset))
        else:
            lines = describe_sequence(args.dataset, args.sequence)
        for line in lines:
            print(line)
        return 0

    return run_command(command, prog, args.verbose)


if __name__ == "__main__":
    sys.exit(main())
