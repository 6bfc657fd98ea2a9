"""The flags of a build. Nothing in here imports Beam, so that --help and bad flags are instant."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..io.errors import ConfigError
from ..io.manifest import LAYOUTS
from ..io.records import Layout
from ..transforms.order import SeqOrdering, parse_ordering

DEFAULT_SHARD_SIZE = "512MB"
DEFAULT_RUNNER = "DirectRunner"
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """A checked command line of `build`.

    Attributes:
        config: path of the TOML file.
        output: folder of the dataset.
        runner: name of a Beam runner.
        num_shards: number of shards, or None to derive it from `shard_bytes`.
        shard_bytes: payload bytes per shard.
        ordering: order of the sequences.
        skip_damaged: whether damaged sequences are rejected instead of fatal.
        layout: what shards are like.
        overwrite: whether another dataset in `output` may be replaced.
        verbose: whether to show traces and the runner's log.
        beam_args: all flags that are not ours.
    """

    config: str
    output: str
    runner: str
    num_shards: int | None
    shard_bytes: int
    ordering: SeqOrdering
    skip_damaged: bool
    layout: Layout
    overwrite: bool
    verbose: bool
    beam_args: tuple[str, ...]


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that say what is built."""
    parser.add_argument("--config", required=True, help="TOML file that describes the streams")
    parser.add_argument(
        "--num_shards",
        type=_positive,
        help="number of shards; fewer are made where there are fewer sequences",
    )
    parser.add_argument(
        "--shard_size",
        type=parse_size,
        help=f"payload per shard, for example 512MB or 1GiB (default: {DEFAULT_SHARD_SIZE})",
    )
    parser.add_argument(
        "--seq_ordering",
        default="default",
        help="order of the sequences over the whole dataset: default, reverse, random[:seed], "
        "sorted or sorted_reverse (by length of the first stream) (default: default)",
    )
    parser.add_argument(
        "--on_error",
        choices=("fail", "skip"),
        default="fail",
        help="what to do with damaged sequences and files: fail, or skip them and list them in "
        "rejected.jsonl (default: fail)",
    )
    parser.add_argument("--verbose", action="store_true", help="show traces and the runner's log")


def add_build_arguments(parser: argparse.ArgumentParser) -> None:
    """All flags of a build, for our own parser and for Beam's `PipelineOptions`."""
    add_plan_arguments(parser)
    parser.add_argument(
        "--output", required=True, help="folder of the dataset; created if it is not there"
    )
    parser.add_argument(
        "--layout",
        choices=LAYOUTS,
        default=LAYOUTS[0],
        help="what shards are like: returnn (for HDFDataset and ManifestDataset) or nextgen (for "
        f"NextGenHDFDataset; slower to write and to read) (default: {LAYOUTS[0]})",
    )
    parser.add_argument(
        "--segment_alignments",
        metavar="STREAM[,STREAM]",
        help="with --layout=nextgen: streams of classes to store as runs of equal classes",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace another dataset that stands in --output"
    )


def build_parser(prog: str) -> argparse.ArgumentParser:
    """The parser of `build`; it leaves flags that it does not know to Beam."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Build a sharded HDF dataset with a manifest from Sprint caches and HDF files.",
        epilog="All flags of Apache Beam and of its runners work beside these, for example "
        "--direct_num_workers and --direct_running_mode. Exit codes: 0 done; 1 the build failed; "
        "2 the command line or the configuration is wrong.",
        allow_abbrev=False,
    )
    add_build_arguments(parser)
    parser.add_argument(
        "--runner",
        default=DEFAULT_RUNNER,
        help="Beam runner: DirectRunner runs on this machine; FlinkRunner, DataflowRunner, "
        f"PortableRunner on a cluster (default: {DEFAULT_RUNNER})",
    )
    return parser


def parse_build_options(argv: Sequence[str], prog: str) -> BuildOptions:
    """Parses a command line; exits with 2 and a message if it is wrong.

    Raises:
        ConfigError: if the flags contradict each other.
    """
    args, beam_args = build_parser(prog).parse_known_args(argv)
    stray = [arg for arg in beam_args[:1] if not arg.startswith("-")]
    if stray:
        raise ConfigError(f"unexpected argument {stray[0]!r}", hint="See --help.")
    num_shards, shard_bytes = shard_limits(args)
    return BuildOptions(
        config=args.config,
        output=args.output,
        runner=args.runner,
        num_shards=num_shards,
        shard_bytes=shard_bytes,
        ordering=parse_ordering(args.seq_ordering),
        skip_damaged=args.on_error == "skip",
        layout=parse_layout(args),
        overwrite=args.overwrite,
        verbose=args.verbose,
        beam_args=tuple(beam_args),
    )


def shard_limits(args: argparse.Namespace) -> tuple[int | None, int]:
    """(num_shards, shard_bytes) of parsed flags, of which only one may be given."""
    if args.num_shards is not None and args.shard_size is not None:
        raise ConfigError("give --num_shards or --shard_size, not both")
    return args.num_shards, args.shard_size or parse_size(DEFAULT_SHARD_SIZE)


def parse_layout(args: argparse.Namespace) -> Layout:
    """The layout of parsed flags.

    Raises:
        ConfigError: if it has no runs, but some are wanted.
    """
    names = [name.strip() for name in (args.segment_alignments or "").split(",")]
    layout = Layout(args.layout, tuple(filter(None, names)))
    if layout.runs and layout.kind != "nextgen":
        raise ConfigError("--segment_alignments needs --layout=nextgen")
    return layout


def parse_size(text: str) -> int:
    """A size in bytes such as "512MB" (10**6), "512MiB" (2**20) or "1000"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?)(i?)B?", text.strip(), re.IGNORECASE)
    if match is None or (match[3] and not match[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 512MB or 1GiB")
    unit = match[2].upper()
    size = int(float(match[1]) * (_BINARY_UNITS[unit] if match[3] else _UNITS[unit]))
    if size < 1:
        raise argparse.ArgumentTypeError("a size must be at least 1 byte")
    return size


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value
