"""What tests of several folders share."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
DEMO = ROOT / "examples" / "demo"
DEMO_CONFIG = ROOT / "examples" / "demo.toml"


@pytest.fixture(scope="session")
def run_module() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `python -m MODULE ARGS` as a user would, in the checkout."""

    def run(module: str, *args: object, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", module, *map(str, args)]
        env = {**os.environ, "PYTHONWARNINGS": "error::ResourceWarning"}
        return subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=env)

    return run


@pytest.fixture(scope="session")
def build_demo(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Builds the demo corpus in this process; equal arguments share one dataset."""
    from seqshard.pipelines.build import main

    built: dict[tuple[str, ...], Path] = {}

    def build(*args: str) -> Path:
        if args not in built:
            output = tmp_path_factory.mktemp("demo") / "out"
            code = main([f"--config={DEMO_CONFIG}", f"--output={output}", *args])
            assert code == 0
            built[args] = output
        return built[args]

    return build


@pytest.fixture(scope="session")
def child_pids() -> Callable[[], set[int]]:
    """Lists the children of this process, ended ones that nobody waited for included."""

    def children() -> set[int]:
        lists = Path("/proc/self/task").glob("*/children")
        return {int(pid) for path in lists for pid in path.read_text().split()}

    return children


@pytest.fixture(scope="session")
def synthetic() -> ModuleType:
    """The writer of synthetic corpora that the benchmarks use."""
    spec = importlib.util.spec_from_file_location(
        "benchmark_corpus", ROOT / "benchmarks" / "corpus.py"
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def same_bytes() -> Callable[[Path, Path], None]:
    """Asserts that two datasets are identical, but for their provenance."""

    def names(folder: Path) -> Sequence[str]:
        found = sorted(path.name for path in folder.iterdir())
        assert found.count("provenance.json") == 1
        return [name for name in found if name != "provenance.json"]

    def compare(a: Path, b: Path) -> None:
        assert names(a) == names(b)
        for name in names(a):
            assert (a / name).read_bytes() == (b / name).read_bytes(), name

    return compare


@pytest.fixture(scope="session")
def object_stores() -> ModuleType:
    """Servers of object stores."""
    spec = importlib.util.spec_from_file_location(
        "object_stores", ROOT / "tests" / "object_stores.py"
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _need(*modules: str) -> None:
    for name in modules:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")


@pytest.fixture(scope="session")
def s3_server(object_stores):
    _need("s3fs", "moto", "flask")
    with object_stores.serve_s3() as store, store.used():
        yield store


@pytest.fixture
def s3(s3_server, request):
    """An S3 server with a bucket; `url` is a folder of this test's own."""
    return s3_server.fresh(request.node.name)


@pytest.fixture(scope="session")
def gcs_server(object_stores):
    _need("gcsfs")  # which looks at the environment when it is imported
    if object_stores.find_gcs() is None:
        pytest.skip("fake-gcs-server is not installed; see docs/object-stores.md")
    with object_stores.serve_gcs() as store, store.used():
        yield store


@pytest.fixture
def gcs(gcs_server, request):
    """A server of Google Cloud Storage, as `s3`."""
    return gcs_server.fresh(request.node.name)
