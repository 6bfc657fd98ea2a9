"""Imports go one way, and light things stay light."""

import ast
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("io", "transforms", "runners", "pipelines", "datasets")
# What a module of a folder may import of this package.
ALLOWED = {
    "io": {"io"},
    "transforms": {"io", "transforms"},
    "runners": {"io", "runners"},
    "pipelines": {"io", "transforms", "runners", "pipelines", "datasets"},
    "datasets": {"io", "datasets"},
}
HEAVY = {"apache_beam", "torch", "returnn", "tensorflow", "pandas", "matplotlib"}
FORBIDDEN = {
    "io": HEAVY,
    "transforms": HEAVY - {"apache_beam"},
    "runners": HEAVY - {"apache_beam"},
    "pipelines": {"torch", "returnn", "tensorflow", "pandas"},
    "datasets": HEAVY | {"pyarrow.dataset"},
}
# These work inside a running RETURNN, and import it only there.
GUESTS = {f"datasets/{name}.py" for name in ("returnn", "returnn_config", "ranks")}


def modules(folder):
    return sorted((ROOT / folder).rglob("*.py"))


def imports(path):
    """Every module that a file imports, absolute: ("numpy", ...) or ("seqshard.io.x", ...)."""
    package = ["seqshard", *path.relative_to(ROOT).parent.parts]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            # `from .. import storage` imports a module by its alias.
            yield from (f"{module}.{alias.name}" for alias in node.names)


def names(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("folder", FOLDERS)
def test_arrows_of_import(folder):
    assert modules(folder)
    for path in modules(folder):
        for name in imports(path):
            parts = name.split(".")
            if parts[0] == "seqshard" and parts[1] in FOLDERS:
                assert parts[1] in ALLOWED[folder], f"{names(path)} imports {name}"


@pytest.mark.parametrize("folder", FOLDERS)
def test_libraries(folder):
    for path in modules(folder):
        forbidden = FORBIDDEN[folder] - ({"returnn"} if names(path) in GUESTS else set())
        for name in imports(path):
            found = {f for f in forbidden if name == f or name.startswith(f"{f}.")}
            assert not found, f"{names(path)} imports {name}"


@pytest.mark.parametrize("folder", ["io", "transforms", "runners", "datasets"])
def test_imports_inside_the_package_are_relative(folder):
    for path in modules(folder):
        for node in ast.walk(ast.parse(path.read_text())):
            absolute = [a.name for a in getattr(node, "names", []) if isinstance(node, ast.Import)]
            if isinstance(node, ast.ImportFrom) and not node.level:
                absolute.append(node.module or "")
            assert not any(n.split(".")[0] == "seqshard" for n in absolute), names(path)


def run(code, *blocked):
    """Runs code in a process in which some modules cannot be imported."""
    finder = f"""
        import sys

        class Refuse:
            def find_spec(self, name, path=None, target=None):
                blocked = {blocked!r}
                if any(name == b or name.startswith(b + ".") for b in blocked):
                    raise ImportError("refused: " + name)

        sys.meta_path.insert(0, Refuse())
    """
    program = textwrap.dedent(finder) + textwrap.dedent(code)
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", program], cwd=ROOT, capture_output=True, text=True
    )


LIBRARIES = ("apache_beam", "torch", "returnn", "pyarrow.dataset", "fsspec", "pandas")
STAGES = ("seqshard.transforms", "seqshard.pipelines", "seqshard.runners")


def test_datasets_import_nothing_heavy():
    code = """
        import seqshard.datasets

        late = {"h5py", "pyarrow"} & set(sys.modules)
        assert not late, late
        assert len(sys.modules) < 600, len(sys.modules)
    """
    result = run(code, *LIBRARIES, *STAGES)
    assert result.returncode == 0, result.stderr


def test_every_dataset_can_be_loaded_without_beam_torch_or_returnn():
    code = """
        from seqshard import datasets
        from seqshard.datasets.registry import DATASET_CLASSES

        for name in DATASET_CLASSES:
            assert isinstance(getattr(datasets, name), type), name
    """
    result = run(code, *LIBRARIES, *STAGES)
    assert result.returncode == 0, result.stderr


def test_local_io_needs_no_fsspec(tmp_path):
    code = f"""
        from seqshard.io import storage

        storage.commit_bytes({str(tmp_path / "a")!r}, b"1")
        assert storage.glob({str(tmp_path / "*")!r}) == [{str(tmp_path / "a")!r}]
        from seqshard.io import config, shards, verification
    """
    result = run(code, *LIBRARIES, *STAGES)
    assert result.returncode == 0, result.stderr


def test_every_module_of_io_can_be_imported_without_beam():
    found = [".".join(["seqshard", *p.relative_to(ROOT).with_suffix("").parts])
             for p in modules("io") if p.name != "__init__.py"]  # fmt: skip
    # The module that RASR loads into its own process runs there only.
    found = [name for name in found if not name.endswith("extern_interface")]
    result = run(f"import importlib\nfor n in {found!r}: importlib.import_module(n)", *LIBRARIES)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("command", ["build", "verify", "inspect", "plan"])
def test_help_imports_no_beam(command):
    code = f"""
        import importlib
        import runpy

        sys.argv = ["{command}", "--help"]
        runpy.run_module("pipelines.{command}", run_name="__main__")
    """
    result = run(code, "apache_beam")
    assert result.returncode == 0, result.stderr
    assert "usage: " in result.stdout


def test_wrong_flags_are_refused_without_beam():
    code = """
        from seqshard.pipelines.build import main

        sys.exit(main(["--config=none.toml", "--output=out"]))
    """
    result = run(code, "apache_beam")
    assert result.returncode == 2
    assert "none.toml: there is no such configuration file" in result.stderr
