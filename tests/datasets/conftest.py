"""RETURNN, our oracle, uses three functions of dm-tree; they are here where that is missing."""

import importlib.util
import sys
import types


def flatten_with_path(structure, path=()):
    """The leaves of nested dicts (by sorted key), lists and tuples, each with its path."""
    if isinstance(structure, dict):
        items = [(key, structure[key]) for key in sorted(structure)]
    elif isinstance(structure, list | tuple):
        items = list(enumerate(structure))
    else:
        return [(path, structure)]
    return [leaf for key, value in items for leaf in flatten_with_path(value, (*path, key))]


def flatten(structure):
    """The leaves of a nested structure."""
    return [leaf for _, leaf in flatten_with_path(structure)]


def map_structure(function, structure):
    """A structure of the same kind with the function applied to every leaf."""
    if isinstance(structure, dict):
        return {key: map_structure(function, value) for key, value in structure.items()}
    if isinstance(structure, list | tuple):
        return type(structure)(map_structure(function, value) for value in structure)
    return function(structure)


if importlib.util.find_spec("tree") is None:
    module = types.ModuleType("tree")
    module.flatten = flatten
    module.flatten_with_path = flatten_with_path
    module.map_structure = map_structure
    sys.modules["tree"] = module
