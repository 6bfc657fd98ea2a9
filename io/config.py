"""The TOML configuration of a build: which streams, from which files, which sequences."""

from __future__ import annotations

import os
import pickle
import tomllib
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import msgspec
import xxhash

from . import storage
from .errors import ConfigError, SourceNotFoundError
from .records import StreamSpec
from .trainers import SPOOLS, Trainer, TrainerTable, make_trainer

SourceKind = Literal["sprint-features", "sprint-alignment", "hdf", "nextgen-hdf", "extern-sprint"]
SPRINT_KINDS = ("sprint-features", "sprint-alignment")
TRAINER_KIND = "extern-sprint"
KEYED_KINDS = ("hdf", "nextgen-hdf", TRAINER_KIND)
WILDCARDS = frozenset("*?[")
RESERVED_NAMES = ("inputs", "length")


class StreamTable(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """`[streams.NAME]` as written."""

    source: SourceKind
    files: str | list[str] = []
    trainer: str | None = None
    key: str | None = None
    allophones: str | None = None
    state_tying: str | None = None
    phonemes: str | None = None
    silence: str = "[SILENCE]"
    num_labels: int | None = None
    soft: Literal["error", "best"] = "error"
    encoding: str | None = None
    bundle_paths: Literal["bundle", "cwd"] | None = None


class SequencesTable(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """`[sequences]` as written."""

    on_missing: Literal["error", "drop"] = "error"
    segments: str | None = None
    min_length: int = 0
    max_length: int | None = None


class ConfigFile(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The whole file as written."""

    streams: dict[str, StreamTable]
    trainers: dict[str, TrainerTable] = {}
    sequences: SequencesTable = SequencesTable()


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of one stream.

    Attributes:
        ordinal: its place among all files of all streams, in the order of the configuration.
        spec: the stream that it belongs to.
        path: where to open it.
        name: the path as the manifest shows it: relative to the configuration's folder where it
            was given so, which keeps a dataset independent of where its sources stand.
        partition: of the trainer that writes the file, or None. `path` is then relative to the
            folder of the spools; see `Corpus.with_spools`.
    """

    ordinal: int
    spec: StreamSpec
    path: str
    name: str
    partition: int | None = None


@dataclass(frozen=True, slots=True)
class Corpus:
    """A checked configuration with all its files resolved.

    Attributes:
        streams: in the order of the configuration; the first one decides the default order and
            is the one whose length the limits are about.
        sources: all files of all streams.
        on_missing: "error" or "drop".
        segments: path of the list of tags to keep, or None.
        min_length, max_length: limits in frames of the first stream, inclusive; None is no limit.
        digest: hash of everything above, of the label files' and the segment list's content.
        trainers: by name.
    """

    streams: tuple[StreamSpec, ...]
    sources: tuple[SourceFile, ...]
    on_missing: str
    segments: str | None
    min_length: int
    max_length: int | None
    digest: str
    trainers: dict[str, Trainer] = field(default_factory=dict)

    def __reduce__(self) -> tuple[Callable[[bytes], Corpus], tuple[bytes]]:
        # It travels with every stage, and the names of thousands of files are all alike.
        values = tuple(getattr(self, field.name) for field in fields(self))
        return _unpack_corpus, (zlib.compress(pickle.dumps(values), 1),)

    def with_spools(self, folder: str) -> Corpus:
        """The corpus with the sources that trainers write in this folder."""
        sources = tuple(
            file if file.partition is None else replace(file, path=storage.join(folder, file.path))
            for file in self.sources
        )
        return replace(self, sources=sources)


def _unpack_corpus(data: bytes) -> Corpus:
    return Corpus(*pickle.loads(zlib.decompress(data)))


def load_corpus(path: str) -> Corpus:
    """Reads, checks and resolves a configuration file.

    Raises:
        ConfigError: for anything wrong with the file itself.
        SourceNotFoundError: for a file, glob or bundle member that is not there.
    """
    if not storage.exists(path):
        raise ConfigError("there is no such configuration file", path, hint="Check --config.")
    config = _parse(path, storage.read_bytes(path))
    folder = path.rpartition("/")[0] if storage.is_url(path) else os.path.dirname(path)
    return _resolve(config, path, folder or ".")


def _parse(path: str, data: bytes) -> ConfigFile:
    try:
        config = msgspec.convert(tomllib.loads(data.decode("utf-8")), ConfigFile)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"this is not valid TOML: {error}", path) from error
    except msgspec.ValidationError as error:
        raise ConfigError(
            str(error).replace("Object", "the table").replace("`$.", "`"),
            path,
            hint="See the configuration section of the README for what may stand there.",
        ) from error
    if not config.streams:
        raise ConfigError("no [streams.NAME] table", path, hint="Describe at least one stream.")
    for name, table in config.streams.items():
        _check_stream(path, name, table)
        _check_trainer(path, name, table, config.trainers)
    limits = config.sequences
    if limits.min_length < 0 or (
        limits.max_length is not None and limits.max_length < limits.min_length
    ):
        raise ConfigError(
            "min_length and max_length leave no length",
            path,
            entry="sequences",
            found=f"{limits.min_length} and {limits.max_length}",
        )
    return config


def _check_stream(path: str, name: str, table: StreamTable) -> None:
    where = f"streams.{name}"
    if not name or set(name) & set("/.\0") or name in RESERVED_NAMES:
        raise ConfigError(
            "a stream's name becomes an HDF name and a key of the statistics: no '/', no '.', "
            "not 'inputs' or 'length'",
            path,
            entry=where,
        )
    if not table.files and table.source != TRAINER_KIND:
        raise ConfigError("no files given", path, entry=where, hint="Set files = [...].")
    labels = [table.allophones, table.state_tying, table.phonemes]
    labels += [table.num_labels] if table.source != TRAINER_KIND else []
    if table.source != "sprint-alignment" and any(value is not None for value in labels):
        raise ConfigError(
            "allophones, state_tying, phonemes and num_labels are for sprint-alignment only",
            path,
            entry=where,
            found=f"source = {table.source!r}",
        )
    if table.source == "sprint-alignment":
        tied = table.state_tying is not None or table.phonemes is not None
        if tied != (table.allophones is not None) or (not tied and table.num_labels is None):
            raise ConfigError(
                "an alignment needs allophones and state_tying (or phonemes)",
                path,
                entry=where,
                hint="For emission ids, num_labels alone is enough.",
            )
    if table.num_labels is not None and table.num_labels < 1:
        raise ConfigError(
            "num_labels must be 1 or more", path, entry=where, found=str(table.num_labels)
        )
    _check_sprint(path, where, table)
    if table.source not in KEYED_KINDS and table.key is not None:
        raise ConfigError("key is for hdf sources only", path, entry=where)


def _check_sprint(path: str, where: str, table: StreamTable) -> None:
    if table.source not in SPRINT_KINDS and (table.encoding or table.bundle_paths):
        raise ConfigError(
            "encoding and bundle_paths are for sprint-features and sprint-alignment only",
            path,
            entry=where,
            found=f"source = {table.source!r}",
        )
    try:
        "a".encode(table.encoding or "utf-8")
    except LookupError as error:
        raise ConfigError(
            "unknown encoding", path, entry=where, found=repr(table.encoding)
        ) from error


def _check_trainer(
    path: str, name: str, table: StreamTable, trainers: dict[str, TrainerTable]
) -> None:
    where = f"streams.{name}"
    if table.source != TRAINER_KIND:
        if table.trainer is not None:
            raise ConfigError(f"trainer is for {TRAINER_KIND} sources only", path, entry=where)
        return
    if table.files:
        raise ConfigError("sequences of a trainer come from no files", path, entry=where)
    if table.trainer not in trainers:
        raise ConfigError(
            "no such trainer" if table.trainer else "no trainer given",
            path,
            entry=where,
            expected=", ".join(f"trainer = {known!r}" for known in trainers) or None,
            found=repr(table.trainer) if table.trainer else None,
            hint="Describe it in [trainers.NAME].",
        )


def _resolve(config: ConfigFile, path: str, folder: str) -> Corpus:
    streams = [_stream_spec(name, table, path, folder) for name, table in config.streams.items()]
    trainers = _resolve_trainers(config, path, folder)
    sources: list[SourceFile] = []
    for spec, table in zip(streams, config.streams.values(), strict=True):
        if spec.trainer is not None:
            sources += _spools(trainers[spec.trainer], spec, streams, len(sources))
            continue
        files = dict.fromkeys(_resolve_files(table, f"streams.{spec.name}", path, folder))
        for file in files:
            name = storage.relative(file, folder)
            sources.append(SourceFile(len(sources), spec, file, name))
    limits = config.sequences
    segments = None if limits.segments is None else storage.join(folder, limits.segments)
    for extra in filter(None, [segments, *(f for s in streams for f in _label_files(s))]):
        storage.stamp(extra)
    return Corpus(
        tuple(streams),
        tuple(sources),
        limits.on_missing,
        segments,
        limits.min_length,
        limits.max_length,
        _digest(config, streams, sources, segments, trainers),
        trainers,
    )


def _resolve_trainers(config: ConfigFile, path: str, folder: str) -> dict[str, Trainer]:
    """The trainers that streams refer to."""
    used = {table.trainer for table in config.streams.values()}
    return {
        name: make_trainer(name, table, path, folder)
        for name, table in config.trainers.items()
        if name in used
    }


def _spools(
    trainer: Trainer, spec: StreamSpec, streams: list[StreamSpec], ordinal: int
) -> Iterator[SourceFile]:
    """The files that a trainer will write, as sources of one of its streams."""
    key = trainer.spool_key([other for other in streams if other.trainer == trainer.name])
    for partition in range(trainer.options.partitions):
        name = trainer.spool_name(partition)
        path = f"{SPOOLS}-{key}/{name}"
        yield SourceFile(ordinal + partition, spec, path, name, partition)


def _stream_spec(name: str, table: StreamTable, path: str, folder: str) -> StreamSpec:
    def place(file: str | None) -> str | None:
        return None if file is None else storage.join(folder, file)

    return StreamSpec(
        name=name,
        source=table.source,
        key=table.key or (name if table.source in KEYED_KINDS else "data"),
        allophones=place(table.allophones),
        state_tying=place(table.state_tying),
        phonemes=place(table.phonemes),
        silence=table.silence,
        num_labels=table.num_labels,
        soft=table.soft,
        trainer=table.trainer,
        encoding=table.encoding or "utf-8",
    )


def _resolve_files(table: StreamTable, where: str, path: str, folder: str) -> Iterator[str]:
    patterns = [table.files] if isinstance(table.files, str) else table.files
    for pattern in patterns:
        full = storage.join(folder, pattern)
        # A folder may be a Sprint archive.
        folders = table.source in SPRINT_KINDS and not storage.is_url(full)
        if WILDCARDS & set(pattern):
            found = storage.glob(full, folders)
        else:
            found = [full] if storage.exists(full) else []
        if not found:
            kind = "this glob matches no file" if WILDCARDS & set(pattern) else "no such file"
            raise SourceNotFoundError(kind, full, hint=f"It is named in {where}.files of {path}.")
        if not folders and found == [full] and storage.is_folder(full):
            raise SourceNotFoundError(
                "this is a folder", full, hint=f"Name its files in {where}.files of {path}."
            )
        for file in found:
            if file.endswith(".bundle") and table.source in SPRINT_KINDS:
                from .sprint.bundle import read_bundle

                yield from read_bundle(file, table.bundle_paths or "bundle")
            else:
                yield file


def _label_files(spec: StreamSpec) -> list[str]:
    return [f for f in (spec.allophones, spec.state_tying, spec.phonemes) if f is not None]


def _digest(
    config: ConfigFile,
    streams: list[StreamSpec],
    sources: list[SourceFile],
    segments: str | None,
    trainers: dict[str, Trainer],
) -> str:
    """Hash of the meaning of a configuration.

    Sources count by their names as the manifest shows them, label files and the segment list by
    their content, trainers by what is written of them.
    """
    hasher = xxhash.xxh3_128()
    tables = [
        (name, _without_paths(table, "allophones", "state_tying", "phonemes"))
        for name, table in config.streams.items()
    ]
    hasher.update(msgspec.json.encode([tables, _without_paths(config.sequences, "segments")]))
    hasher.update(msgspec.json.encode([(s.spec.name, s.name) for s in sources]))
    hasher.update(msgspec.json.encode([(t.name, t.definition()) for t in trainers.values()]))
    extra = [file for spec in streams for file in _label_files(spec)]
    extra += [file for trainer in trainers.values() for file in trainer.target_files()]
    for file in [*extra, *([segments] if segments else [])]:
        content = storage.read_bytes(file)
        hasher.update(len(content).to_bytes(8, "little"))
        hasher.update(content)
    return hasher.hexdigest()


def _without_paths(table: StreamTable | SequencesTable, *options: str) -> dict[str, Any]:
    """The table without `files`; of options that name a file, only whether they are set."""
    values = msgspec.structs.asdict(table)
    values.pop("files", None)
    return values | {option: values[option] is not None for option in options}
