"""Checks a dataset: every hash, and everything that manifest, index and shards promise.

python -m pipelines.verify out
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from seqshard.io.verification import verify_dataset
from seqshard.pipelines.command import run_command


def build_parser(prog: str) -> argparse.ArgumentParser:
    """The parser of `verify`."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Recompute every hash of a dataset and check every invariant. Exit codes: 0 "
        "intact; 1 damaged, with the list of damage; 2 the command line is wrong.",
    )
    parser.add_argument("dataset", help="folder of the dataset, or its manifest.json")
    parser.add_argument("--num_workers", type=int, default=2, help="threads (default: 2)")
    parser.add_argument("--verbose", action="store_true", help="show a trace with an error")
    return parser


def main(argv: Sequence[str] | None = None, prog: str = "python -m pipelines.verify") -> int:
    """Entry point; returns the exit code."""
    args = build_parser(prog).parse_args(argv)

    def command() -> int:
        manifest, problems = verify_dataset(args.dataset, max(1, args.num_workers))
        for problem in problems:
            print(problem)
        size = f"{manifest.num_seqs:,} sequences in {len(manifest.shards)} shards"
        if problems:
            print(f"{args.dataset}: damaged, {len(problems)} problems in {size}", file=sys.stderr)
            return 1
        print(f"{args.dataset}: intact, {size}, {manifest.num_bytes / 1e6:,.1f} MB")
        return 0

    return run_command(command, prog, args.verbose)


if __name__ == "__main__":
    sys.exit(main())
