"""What a figure was measured on."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parent.parent


def environment(packages: Iterable[str]) -> dict[str, object]:
    """Machine, versions and commit, for the end of a report."""
    commit = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return {
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "versions": {name: version(name) for name in packages}
        | {"python": platform.python_version()},
        "commit": subprocess.run(commit, capture_output=True, text=True).stdout.strip(),
    }
