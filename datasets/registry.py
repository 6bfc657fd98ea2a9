"""Dataset classes by name, loaded when first used, and datasets from their options."""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..io.errors import ConfigError, SourceNotFoundError
from .returnn_config import active_config, class_of_returnn

if TYPE_CHECKING:
    from .basic import Dataset

# Class name -> module of this package.
DATASET_CLASSES = {
    "CachedDataset": "cached",
    "CachedDataset2": "cached2",
    "Dataset": "basic",
    "DistributeFilesDataset": "distrib_files",
    "ExternSprintDataset": "sprint",
    "HDFDataset": "hdf",
    "ManifestDataset": "manifest",
    "MetaDataset": "meta",
    "NextGenHDFDataset": "nextgen",
    "SiameseHDFDataset": "siamese",
    "SprintCacheDataset": "sprint_cache",
    "SprintDatasetBase": "sprint",
}

_CLASS_AND_OPTIONS = re.compile(r"([A-Za-z_]\w*):(?!//)(.*)", re.S)


def get_dataset_class(name: str | type[Dataset]) -> type[Dataset] | None:
    """The class of a name, or None if there is none; a class stands for itself.

    Names that are none of this package's stand for RETURNN's datasets, if that is installed: they
    have the same methods, so that for example a `MetaDataset` can join them with others.

    Raises:
        TypeError: for a class that is no dataset.
    """
    if isinstance(name, type):
        if not issubclass(name, dataset_types()):
            raise TypeError(f"{name.__module__}.{name.__qualname__} is no Dataset")
        return name
    module = DATASET_CLASSES.get(name)
    if module:
        return getattr(import_module(f".{module}", __package__), name)
    return class_of_returnn(name)


def dataset_types() -> tuple[type, ...]:
    """The base class of all datasets, and RETURNN's where that is in use."""
    from .basic import Dataset

    returnn = sys.modules.get("returnn.datasets.basic")
    return (Dataset,) if returnn is None else (Dataset, returnn.Dataset)


def init_dataset(
    kwargs: dict[str, Any] | str | Callable[[], Any] | Dataset,
    extra_kwargs: dict[str, Any] | None = None,
    default_kwargs: dict[str, Any] | None = None,
    *,
    parent_dataset: Dataset | None = None,
) -> Dataset:
    """Creates and initializes a dataset from its options.

    Args:
        kwargs: a dict with "class" (a name or a class) and the options of that class; a function
            that returns one; a dataset, which is only initialized; or a string: a dict literal,
            "config:NAME" for an entry of RETURNN's active config, HDF files separated by commas,
            or "CLASS:option=value,..." with literal values.
        extra_kwargs: options that override those of `kwargs`.
        default_kwargs: options for what `kwargs` leaves open.
        parent_dataset: hands its random seed offset and shard down as defaults.

    Raises:
        ConfigError: for an unknown class or a string that is none of the above.
    """
    from .file_cache import resolve_cached_files

    if isinstance(kwargs, dataset_types()):
        kwargs.initialize()
        return kwargs
    if callable(kwargs):
        return init_dataset(kwargs(), extra_kwargs, default_kwargs, parent_dataset=parent_dataset)
    options = parse_dataset_str(kwargs) if isinstance(kwargs, str) else kwargs
    if not isinstance(options, dict):
        return init_dataset(options, extra_kwargs, default_kwargs, parent_dataset=parent_dataset)
    if "class" not in options:
        raise ConfigError("the dataset options have no 'class'", found=f"{sorted(options)}")
    defaults = extend_dataset_dict_from_parent_dataset(default_kwargs, parent_dataset)
    options = {**(defaults or {}), **options, **(extra_kwargs or {})}
    name = options.pop("class")
    dataset_class = get_dataset_class(name)
    if dataset_class is None:
        raise ConfigError(
            f"Dataset class {name!r} not found", expected=", ".join(sorted(DATASET_CLASSES))
        )
    options, leases = resolve_cached_files(options)
    dataset = dataset_class(**options)
    dataset.initialize()
    if leases:
        dataset.set_file_cache(leases)
    return dataset


def extend_dataset_dict_from_parent_dataset(
    dataset_dict: dict[str, Any] | None, parent_dataset: Dataset | None
) -> dict[str, Any] | None:
    """Adds the parent's random seed offset and shard where the options do not have their own."""
    if parent_dataset is None:
        return dataset_dict
    return {
        "random_seed_offset": parent_dataset.random_seed_offset,
        "_num_shards": parent_dataset._num_shards,
        "_shard_index": parent_dataset._shard_index,
        **(dataset_dict or {}),
    }


def parse_dataset_str(text: str) -> Any:
    """Turns the string form of a dataset into its options; see `init_dataset`. Never runs code.

    Raises:
        ConfigError: if the string is malformed.
        SourceNotFoundError: if it names HDF files that do not exist.
    """
    if text.startswith("{"):
        return _literal(text, text)
    match = _CLASS_AND_OPTIONS.fullmatch(text)
    if match and match[1] == "config":
        return _from_active_config(match[2].strip())
    if match and match[1] == "sprint":
        raise ConfigError(
            f"{text!r} needs a RETURNN config", hint="Use 'ExternSprintDataset:option=value,...'."
        )
    if match:
        return {"class": match[1], **_parse_options(match[2])}
    files = [file for file in text.split(",") if file]
    for file in files:
        if not os.path.exists(file):
            raise SourceNotFoundError("the HDF file of the dataset does not exist", file)
    if not files:
        raise ConfigError(f"there is no dataset in {text!r}")
    return {"class": "HDFDataset", "files": files}


def _parse_options(text: str) -> dict[str, Any]:
    try:
        call = ast.parse(f"dict({text})", mode="eval").body
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"the dataset options {text!r} are malformed: {error}") from error
    if not isinstance(call, ast.Call) or call.args or any(k.arg is None for k in call.keywords):
        raise ConfigError(
            f"the dataset options {text!r} are malformed", expected="option=value,..."
        )
    return {keyword.arg: _literal(keyword.value, text) for keyword in call.keywords}


def _literal(source: str | ast.AST, text: str) -> Any:
    try:
        return ast.literal_eval(source)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise ConfigError(
            f"the dataset options {text!r} are malformed: {error}", expected="literal values only"
        ) from error


def _from_active_config(name: str) -> Any:
    config = active_config()
    if config is None or name not in config.typed_dict:
        raise ConfigError(f"there is no {name!r} in an active RETURNN config")
    return config.typed_dict[name]


def convert_data_dims(
    data_dims: int | dict[str, Any], leave_dict_as_is: bool = False
) -> dict[str, tuple[int, int] | dict[str, Any]]:
    """Dimension and number of axes per data key, from all forms that `num_outputs` had.

    Args:
        data_dims: key -> dim (sparse, but for "data") or (dim, ndim); or the dim of "classes".
        leave_dict_as_is: whether a value may be a dict, which is left alone.

    Raises:
        ConfigError: for anything else.
    """
    dims = {"classes": data_dims} if isinstance(data_dims, int) else dict(data_dims)
    for key, value in dims.items():
        if isinstance(value, int):
            value = (value, 2 if key == "data" else 1)
        elif isinstance(value, dict) and leave_dict_as_is:
            continue
        well_formed = isinstance(value, tuple | list) and [type(v) for v in value] == [int, int]
        if not well_formed or value[1] < 1:
            raise ConfigError(
                f"the dimension of {key!r} is malformed", expected="(dim, ndim)", found=repr(value)
            )
        dims[key] = tuple(value)
    return dims
