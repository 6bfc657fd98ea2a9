"""The source distribution that workers install: complete, and without the tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# What stands in a working copy and must not get into a distribution by accident.
OUTSIDE = ("tests/", "benchmarks/", "out/", ".git/", ".venv/", ".ci/", "build/")

pytestmark = pytest.mark.slow


def run(command, folder):
    done = subprocess.run(list(map(str, command)), cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """Made by the command by which Beam makes the one that it sends to workers."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("sdist")
    ignored = shutil.ignore_patterns(".git", ".venv", "out", "build", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, source, ignore=ignored, dirs_exist_ok=True)
    run([sys.executable, "setup.py", "-q", "sdist", "--dist-dir", target], source)
    (archive,) = target.glob("seqshard-*.tar.gz")
    return archive


@pytest.fixture(scope="module")
def names(sdist):
    with tarfile.open(sdist) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


def test_all_modules_and_what_people_need_are_in_it(names):
    folders = ("datasets", "io", "pipelines", "runners", "transforms")
    modules = {
        str(path.relative_to(ROOT)) for folder in folders for path in (ROOT / folder).rglob("*.py")
    }
    assert names >= modules
    assert names >= {"__init__.py", "setup.py", "pyproject.toml", "README.md", "LICENSE"}
    assert names >= {"Dockerfile", ".dockerignore", "runners/worker-requirements.txt"}
    assert names >= {"docs/format.md", "examples/demo.toml", "examples/demo/features.0.cache"}


def test_nothing_else_is_in_it(names):
    assert not [name for name in names if name.startswith(OUTSIDE) or name.endswith(".pyc")]


@pytest.fixture(scope="module")
def python(sdist, tmp_path_factory):
    """An environment with the package from the sdist; its dependencies are those of this one."""
    folder, wheels = tmp_path_factory.mktemp("venv"), tmp_path_factory.mktemp("wheels")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip"]
    offline = ["--quiet", "--no-index", "--no-deps"]
    build = ["wheel", *offline, "--no-build-isolation", "--wheel-dir", wheels]
    run([*pip, *build, sdist], folder)
    run([*pip, "--python", python, "install", *offline, *wheels.iterdir()], folder)
    return python


def run_installed(python, folder, *args):
    """Runs the package with the dependencies, but not the packages, of this environment."""
    site = sysconfig.get_path("purelib", vars={"base": str(python.parents[1])})
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([site, sysconfig.get_path("purelib")]),
    }
    done = subprocess.run(
        [python, *map(str, args)], cwd=folder, capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_workers_import_is_the_installed_package(python, tmp_path):
    modules = "seqshard.pipelines.build, seqshard.transforms.write_shards"
    code = f"import {modules}; print(seqshard.__file__, *seqshard.__path__)"
    found = run_installed(python, tmp_path, "-c", code).split()
    assert all(path.startswith(str(python.parents[1])) for path in found)


def test_the_installed_commands_answer(python, tmp_path):
    output = run_installed(python, tmp_path, "-m", "seqshard.pipelines.build", "--help")
    assert "--seq_ordering" in output
    assert (python.parent / "seqshard").is_file()


def test_the_installed_package_builds_the_demo_of_the_sdist(python, sdist, tmp_path):
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.glob("seqshard-*")
    config, output = source / "examples" / "demo.toml", tmp_path / "out"
    flags = [f"--config={config}", f"--output={output}", "--num_shards=2"]
    run_installed(python, tmp_path, "-m", "seqshard.pipelines.build", *flags)
    assert "intact, 120 sequences" in run_installed(
        python, tmp_path, "-m", "seqshard.pipelines.verify", output
    )
