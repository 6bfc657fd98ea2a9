"""Builds a dataset: sources are indexed, joined by tag, planned into shards and written.

python -m pipelines.build --runner=DirectRunner --config=corpus.toml --output=out
"""

from __future__ import annotations

import datetime
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from seqshard.io.config import Corpus, load_corpus
from seqshard.io.errors import ConfigError
from seqshard.io.manifest import Manifest, load_manifest
from seqshard.io.records import Layout
from seqshard.pipelines.command import import_beam, quiet_stderr, run_command
from seqshard.pipelines.options import BuildOptions, parse_build_options
from seqshard.runners.names import is_dataflow, is_local
from seqshard.runners.places import check_shared

MAX_INDEX_GROUPS = 1024

if TYPE_CHECKING:
    import apache_beam as beam


def build(
    root: beam.Pipeline, corpus: Corpus, options: BuildOptions, provenance: dict[str, Any]
) -> beam.PCollection[Manifest]:
    """The whole pipeline: source files -> index rows -> joined rows -> shards -> manifest."""
    import apache_beam as beam

    from seqshard.transforms.index_sources import IndexSources, list_sources
    from seqshard.transforms.join_streams import JoinStreams
    from seqshard.transforms.plan_shards import PlanShards
    from seqshard.transforms.prepare_output import PrepareOutput
    from seqshard.transforms.spool_trainers import SpoolTrainers
    from seqshard.transforms.survey_sources import SurveySources
    from seqshard.transforms.write_manifest import WriteManifest
    from seqshard.transforms.write_shards import WriteShards

    order, output, skip = options.ordering, options.output, options.skip_damaged
    layout = options.layout
    plan_options = [str(order), options.num_shards, options.shard_bytes, skip]
    plan_options += [layout.kind, layout.runs]

    sources = (
        root
        | "Corpus" >> beam.Create([corpus], reshuffle=False)
        | "ListSources" >> beam.FlatMap(list_sources)
    )
    if corpus.trainers:
        sources = sources | "SpoolTrainers" >> SpoolTrainers(corpus.trainers)
    index = sources | "IndexSources" >> IndexSources(
        skip, num_buckets(corpus), files_per_group(corpus)
    )
    survey = index.surveys | "SurveySources" >> SurveySources(corpus, plan_options)
    joined = index.rows | "JoinStreams" >> JoinStreams(corpus, order, survey)
    shard_plan = joined.rows | "PlanShards" >> PlanShards(
        order, options.num_shards, options.shard_bytes, corpus.on_missing, joined.problems
    )
    plan = shard_plan | "PrepareOutput" >> PrepareOutput(
        output, order, layout, options.overwrite, survey
    )
    shards = joined.rows | "WriteShards" >> WriteShards(corpus, output, layout, skip, plan)
    rejected = (joined.rejected, joined.problems) | "AllRejected" >> beam.Flatten()
    return shards | "WriteManifest" >> WriteManifest(
        output, order, layout, provenance, plan, rejected
    )


def num_buckets(corpus: Corpus) -> int:
    """How many groups the join is split into: bounded memory for each, little overhead in all.

    It decides nothing about the content of a dataset.
    """
    return min(256, 8 + len(corpus.sources))


def files_per_group(corpus: Corpus) -> int:
    """How many files are indexed in one go: one, unless there are thousands.

    It decides nothing about the content of a dataset.
    """
    return -(-len(corpus.sources) // MAX_INDEX_GROUPS)


def provenance_of(options: BuildOptions) -> dict[str, Any]:
    """When, where and with what this build runs."""
    import platform
    from importlib.metadata import version

    packages = ("apache-beam", "numpy", "h5py", "pyarrow", "xxhash", "msgspec", "fsspec")
    return {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "host": platform.node(),
        "platform": platform.platform(),
        "runner": options.runner,
        "config": options.config,
        "versions": {
            "seqshard": version("seqshard"),
            "python": platform.python_version(),
            **{name: version(name) for name in packages},
        },
    }


def with_absolute_paths(options: BuildOptions) -> BuildOptions:
    """The same options for workers with another working folder; URLs stay as they are."""
    from seqshard.io.storage import is_url

    paths = {name: getattr(options, name) for name in ("config", "output")}
    absolute = {n: path if is_url(path) else os.path.abspath(path) for n, path in paths.items()}
    return replace(options, **absolute)


def check_runs(corpus: Corpus, layout: Layout) -> None:
    """Raises `ConfigError` if --segment_alignments names a stream that there is not."""
    known = [spec.name for spec in corpus.streams]
    for name in layout.runs:
        if name not in known:
            raise ConfigError(
                "there is no such stream",
                entry="--segment_alignments",
                expected=" or ".join(known),
                found=name,
            )


def run_build(options: BuildOptions) -> Manifest:
    """Runs a build and returns the manifest that it wrote.

    Raises:
        SeqshardError: of the kind that tells what went wrong.
    """
    from seqshard.io import storage
    from seqshard.io.dataset_folder import refuse_rerun
    from seqshard.io.receipts import STAGING

    if not is_local(options.runner):
        options = with_absolute_paths(options)
    corpus = load_corpus(options.config)
    check_runs(corpus, options.layout)
    if is_dataflow(options.runner):
        check_shared(corpus, options.output)
    storage.check_writable(options.output)
    if corpus.trainers:
        refuse_rerun(options.output, options.overwrite)
        corpus = corpus.with_spools(storage.join(options.output, STAGING))
    import_beam(options.verbose)
    import apache_beam as beam

    from seqshard.pipelines.progress import watch_build
    from seqshard.runners.local import THREADS_FROM_BYTES
    from seqshard.runners.portable import wait
    from seqshard.runners.select import make_options, prepare_runner

    existing = (file.path for file in corpus.sources if file.partition is None)
    num_bytes = sum(storage.stamp(path).num_bytes for path in existing)
    if corpus.trainers:
        # How much they will send is not known, and they run in parallel only with workers.
        num_bytes = max(num_bytes, THREADS_FROM_BYTES)
    beam_options = make_options(options.runner, options.beam_args, num_bytes)
    with quiet_stderr(options.verbose) as terminal:
        prepare_runner(options.runner, beam_options, options.output)
        with watch_build(options.output, terminal):
            pipeline = beam.Pipeline(options=beam_options)
            build(pipeline, corpus, options, provenance_of(options))
            wait(pipeline.run())
    return load_manifest(options.output)


def summary(manifest: Manifest, output: str, seconds: float) -> str:
    """One line for the person who waited."""
    frames = ", ".join(f"{count:,} {name}" for name, count in manifest.num_frames.items())
    kinds = rejected_kinds(manifest, output)
    reasons = ", ".join(f"{count:,} {kind}" for kind, count in sorted(kinds.items()))
    return (
        f"{output}: {manifest.num_seqs:,} sequences in {len(manifest.shards)} shards, "
        f"{manifest.num_bytes / 1e6:,.1f} MB (frames: {frames}), "
        f"{manifest.num_rejected:,} rejected{f' ({reasons})' if reasons else ''}; "
        f"{seconds:.1f} s, {manifest.num_bytes / 1e6 / seconds:,.1f} MB/s"
    )


def rejected_kinds(manifest: Manifest, output: str) -> dict[str, int]:
    """How many sequences were rejected for which kind of reason."""
    from collections import Counter

    import msgspec

    from seqshard.io import storage
    from seqshard.io.receipts import Rejection, rejection_kind

    if manifest.rejected is None:
        return {}
    lines = storage.read_bytes(storage.join(output, manifest.rejected.path))
    rejections = msgspec.json.Decoder(Rejection).decode_lines(lines)
    return dict(Counter(map(rejection_kind, rejections)))


def main(argv: Sequence[str] | None = None, prog: str = "python -m pipelines.build") -> int:
    """Entry point; returns the exit code."""
    import time

    argv = sys.argv[1:] if argv is None else list(argv)
    start = time.monotonic()

    def command() -> int:
        options = parse_build_options(argv, prog)
        manifest = run_build(options)
        print(summary(manifest, options.output, time.monotonic() - start))
        return 0

    return run_command(command, prog, "--verbose" in argv)


if __name__ == "__main__":
    sys.exit(main())
