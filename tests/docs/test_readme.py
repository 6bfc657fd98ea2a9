"""The README's code runs as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)


def blocks(language: str) -> list[str]:
    return [text for name, text in BLOCKS if name == language]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A folder that looks like the checkout, so that nothing is written into the real one."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("pipelines", "examples"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def run(command: list[str], cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_two_commands_are_targets_of_the_makefile():
    commands = re.findall(r"^make (\w+)", blocks("sh")[0], re.M)
    assert commands == ["demo", "test"]
    for target in commands:
        run(["make", "--dry-run", target], ROOT)


def test_the_configuration_is_the_one_of_the_demo():
    shown = tomllib.loads(blocks("toml")[0])
    demo = tomllib.loads((ROOT / "examples" / "demo.toml").read_text())
    del demo["streams"]["classes"]["silence"]
    assert shown == demo


def test_the_commands_and_the_code_run_in_order(checkout):
    environment = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    commands = [line for line in blocks("sh")[1].splitlines() if line]
    assert len(commands) == 3
    output = [run(["env", f"PATH={environment}", "sh", "-c", line], checkout) for line in commands]
    assert "120 sequences in 4 shards" in output[0]
    assert "intact" in output[1]
    assert "float32 (201, 16)" in output[2]
    ours, returnn = (run([sys.executable, "-c", code], checkout) for code in blocks("python"))
    assert ours.startswith("120 sequences; {'data': {'dim': 16")
    assert "120 sequences; " in returnn


def test_linked_files_exist():
    links = re.findall(r"\]\(([\w/.-]+)\)", (ROOT / "README.md").read_text())
    assert links
    assert all((ROOT / link).exists() for link in links)
