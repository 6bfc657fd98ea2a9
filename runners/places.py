"""What workers on other machines can reach, told without importing Beam."""

from __future__ import annotations

from collections.abc import Iterator

from ..io.config import Corpus
from ..io.errors import ConfigError
from ..io.storage import is_url

# Schemes of fsspec that mean this machine, or this process.
LOCAL_SCHEMES = ("file", "local", "memory")


def is_shared(path: str) -> bool:
    """Whether a path means the same on machines that share no file system."""
    return is_url(path) and path.partition("://")[0] not in LOCAL_SCHEMES


def corpus_paths(corpus: Corpus) -> Iterator[tuple[str, str]]:
    """Every file that workers read, as (where the configuration names it, path)."""
    for file in corpus.sources:
        if file.partition is None:
            yield f"streams.{file.spec.name}.files", file.path
    for spec in corpus.streams:
        for option in ("allophones", "state_tying", "phonemes"):
            path = getattr(spec, option)
            if path is not None:
                yield f"streams.{spec.name}.{option}", path
    if corpus.segments is not None:
        yield "sequences.segments", corpus.segments


def check_shared(corpus: Corpus, output: str) -> None:
    """Checks that everything stands where workers without a common file system find it.

    Raises:
        ConfigError: naming the first path that is local, and where it comes from.
    """
    for entry, path in [("--output", output), *corpus_paths(corpus)]:
        if not is_shared(path):
            raise ConfigError(
                "workers on Dataflow cannot reach a local path",
                path,
                entry,
                expected="a URL such as gs://my-bucket/corpus",
                hint="Copy it to a bucket; a configuration in the same bucket can keep its "
                "relative paths.",
            )
