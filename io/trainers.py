"""`[trainers.NAME]` of a configuration: RASR processes whose sequences are sources of a build.

Every partition of a trainer's corpus becomes a spool: an HDF file in RETURNN's layout with all
streams that refer to the trainer. Its path tells what wrote it, so that a build that continues
finds complete spools of an unchanged trainer, and no others.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import xxhash

from . import storage
from .errors import ConfigError
from .records import StreamSpec
from .sprint.trainer import TrainerSpec, expand_arguments

if TYPE_CHECKING:
    from .sprint.targets import TargetConverter

SPOOLS = "spool"
MAX_PARTITIONS = 99_999
_TIMEOUTS = ("start_timeout", "timeout")


class TrainerTable(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """`[trainers.NAME]` as written; the options for targets are those of `SprintDatasetBase`.

    Attributes:
        executable: the trainer, or a list with arguments that come first.
        config: further arguments; see `expand_arguments`.
        partitions: how many processes share the corpus.
        seed: of RASR's random numbers.
        start_timeout, timeout: seconds without a sign of life, or inf; see `TrainerSpec`.
    """

    executable: str | list[str]
    config: str | list[str] = ""
    partitions: int = 1
    seed: int = 0
    start_timeout: float = 3600.0
    timeout: float = 900.0
    target_maps: dict[str, str | dict[str, int | float | list[int | float]]] = {}
    str_add_final_zero: bool = False
    input_stddev: float = 1.0
    orth_post_process: str | list[str] | None = None
    bpe: dict[str, Any] | None = None
    orth_vocab: dict[str, Any] | None = None
    reduce_target_factor: int = 1


@dataclass(frozen=True, slots=True)
class Trainer:
    """A checked `[trainers.NAME]` table.

    Attributes:
        name: the name.
        folder: where the configuration stands; the processes run there, if it is local.
        executable, config: the command line.
        options: the table.
    """

    name: str
    folder: str
    executable: tuple[str, ...]
    config: tuple[str, ...]
    options: TrainerTable

    def process(self, partition: int) -> TrainerSpec:
        """What to run for one partition of the corpus."""
        return TrainerSpec(
            executable=self.executable,
            config=self.config,
            seed=self.options.seed,
            num_partitions=self.options.partitions,
            partition=partition,
            start_timeout=_or_none(self.options.start_timeout),
            timeout=_or_none(self.options.timeout),
            folder=None if storage.is_url(self.folder) else self.folder,
        )

    def converter(self) -> TargetConverter:
        """What makes arrays of the targets.

        Raises:
            ConfigError, SourceNotFoundError, SourceFormatError: see `TargetConverter`.
        """
        from .sprint.targets import TargetConverter

        options = self.options
        converter = TargetConverter.from_options(
            {k: self._place(v) for k, v in options.target_maps.items()},
            options.str_add_final_zero,
            options.orth_post_process,
            self._vocabulary(options.bpe),
            self._vocabulary(options.orth_vocab),
            options.reduce_target_factor,
        )
        converter.set_random_seed(options.seed)
        return converter

    def target_files(self) -> list[str]:
        """The files that the options for targets name."""
        maps = [value for value in self.options.target_maps.values() if isinstance(value, str)]
        tables = (self.options.bpe or {}, self.options.orth_vocab or {})
        named = [v for table in tables for k, v in table.items() if k.endswith("_file")]
        return [storage.join(self.folder, name) for name in (*maps, *named)]

    def definition(self) -> list[Any]:
        """What decides the sequences, as it is written in the configuration."""
        table = msgspec.structs.asdict(self.options)
        return [self.config, {k: v for k, v in table.items() if k not in _TIMEOUTS}]

    def spool_name(self, partition: int) -> str:
        """File name of a partition's spool."""
        return f"{self.name}-{partition:05d}-of-{self.options.partitions:05d}.hdf"

    def spool_key(self, streams: Sequence[StreamSpec]) -> str:
        """Hash of everything that is known to decide what is in the spools.

        Sizes and times of the files on the command line count, but not of files that are only
        named inside these.
        """
        stamps = [(file, storage.stamp(file)) for file in self._files() if os.path.isfile(file)]
        columns = [(stream.name, stream.key, stream.num_labels) for stream in streams]
        return xxhash.xxh3_64_hexdigest(msgspec.json.encode([self.definition(), columns, stamps]))

    def _files(self) -> Iterator[str]:
        yield shutil.which(self.executable[0]) or self.executable[0]
        for argument in (*self.executable[1:], *self.config):
            for name in (argument, argument.partition("=")[2]):
                yield os.path.join(self.folder, name)
        yield from self.target_files()

    def _place(self, value: Any) -> Any:
        return storage.join(self.folder, value) if isinstance(value, str) else value

    def _vocabulary(self, table: dict[str, Any] | None) -> dict[str, Any] | None:
        if table is None:
            return None
        return {k: self._place(v) if k.endswith("_file") else v for k, v in table.items()}


def _or_none(seconds: float) -> float | None:
    return None if math.isinf(seconds) else seconds


def make_trainer(name: str, table: TrainerTable, path: str, folder: str) -> Trainer:
    """Checks a table.

    Args:
        name: of the trainer.
        table: as written.
        path: of the configuration, for errors.
        folder: what paths are relative to. A bare name of an executable is looked up in PATH.

    Raises:
        ConfigError: if an option is wrong.
        SourceNotFoundError, SourceFormatError: if a file of one is missing or damaged.
    """
    command = [table.executable] if isinstance(table.executable, str) else list(table.executable)
    if not name or set(name) & set("/\\.\0"):
        raise ConfigError(
            "a trainer's name becomes part of a file's: no '/' and no '.'", path, name
        )
    if not command or not command[0]:
        raise ConfigError("no executable given", path, f"trainers.{name}")
    if not 1 <= table.partitions <= MAX_PARTITIONS:
        raise ConfigError(
            "impossible number of partitions",
            path,
            f"trainers.{name}",
            expected=f"1 to {MAX_PARTITIONS}",
            found=str(table.partitions),
        )
    positive = (table.start_timeout, table.timeout, table.input_stddev)
    if not all(number > 0 for number in positive):
        raise ConfigError(
            "start_timeout, timeout and input_stddev must be positive", path, f"trainers.{name}"
        )
    if "/" in command[0]:
        command[0] = os.path.abspath(os.path.join(folder, command[0]))
    config = tuple(expand_arguments(table.config))
    trainer = Trainer(name, folder, tuple(command), config, table)
    trainer.converter()
    return trainer
