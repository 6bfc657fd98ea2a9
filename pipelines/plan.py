"""Shows what a build would make, without writing anything.

python -m pipelines.plan --config=corpus.toml [--num_shards=64]
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from seqshard.io.config import Corpus, load_corpus
from seqshard.io.errors import ConfigError
from seqshard.pipelines.command import import_beam, run_command
from seqshard.pipelines.options import add_plan_arguments, shard_limits
from seqshard.transforms.order import SeqOrdering, parse_ordering


def build_parser(prog: str) -> argparse.ArgumentParser:
    """The parser of `plan`."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Dry run: what would be built, how large, how balanced, what is missing. "
        "Exit codes: 0 a build would work; 1 it would fail; 2 the command line is wrong.",
        allow_abbrev=False,
    )
    add_plan_arguments(parser)
    return parser


def describe_plan(
    corpus: Corpus,
    ordering: SeqOrdering,
    num_shards: int | None,
    shard_bytes: int,
    skip_damaged: bool,
) -> Iterator[str]:
    """The lines that describe what a build would make.

    Raises:
        SeqshardError: what the build would fail with.
    """
    from seqshard.transforms.index_sources import index_source
    from seqshard.transforms.join_streams import join_streams
    from seqshard.transforms.plan_shards import (
        assign_shards,
        check_problems,
        count_bins,
        plan_bins,
        plan_shards,
        select_cut_rows,
    )
    from seqshard.transforms.survey_sources import survey_sources

    indexed = [index_source(file, skip_damaged) for file in corpus.sources]
    survey = survey_sources([survey for survey, _ in indexed], corpus, {})
    for name, stream in survey.streams.items():
        files = [source for source in survey.sources if source.stream == name]
        yield (
            f"{name}: {sum(f.num_seqs for f in files):,} sequences in {len(files)} files, "
            f"{stream.dtype}, dim {stream.dim}"
        )
    joined = join_streams([rows for _, rows in indexed], corpus, survey.frame_bytes, ordering)
    rejected = [*survey.rejected, *joined.rejected, *joined.problems]
    for stream_name, count in sorted(Counter(r.stream for r in rejected).items()):
        example = next(r for r in rejected if r.stream == stream_name)
        yield f"rejected in {stream_name}: {count:,}, for example {example.tag!r}: {example.reason}"
    check_problems([joined.problems], corpus.on_missing)
    bins = plan_bins(count_bins(joined.rows, ordering), num_shards, shard_bytes)
    plan = plan_shards(bins, [select_cut_rows(joined.rows, bins, ordering)], ordering)
    payload = np.asarray(joined.rows.column("payload"))
    sizes = np.bincount(assign_shards(joined.rows, plan), payload, plan.num_shards)
    yield (
        f"{joined.rows.num_rows:,} sequences, {plan.num_bytes / 1e6:,.1f} MB in "
        f"{plan.num_shards} shards of {sizes.min() / 1e6:,.1f} to {sizes.max() / 1e6:,.1f} MB"
    )


def main(argv: Sequence[str] | None = None, prog: str = "python -m pipelines.plan") -> int:
    """Entry point; returns the exit code."""
    args = build_parser(prog).parse_args(argv)

    def command() -> int:
        limits = shard_limits(args)
        ordering = parse_ordering(args.seq_ordering)
        corpus = load_corpus(args.config)
        if corpus.trainers:
            raise ConfigError(
                "what trainers send is only known when they have run, which a dry run does not do",
                args.config,
                hint="Run the build.",
            )
        import_beam(args.verbose)
        for line in describe_plan(corpus, ordering, *limits, args.on_error == "skip"):
            print(line)
        return 0

    return run_command(command, prog, args.verbose)


if __name__ == "__main__":
    sys.exit(main())
