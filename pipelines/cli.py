"""The command `seqshard`: one program for all commands."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from .. import __version__

COMMANDS = {
    "build": "build a dataset",
    "plan": "show what a build would make",
    "verify": "check every hash of a dataset",
    "inspect": "show what is in a dataset",
    "export-returnn": "print a RETURNN config section for a dataset",
}


def usage() -> str:
    """The text of --help."""
    lines = [f"  {name:<14} {text}" for name, text in COMMANDS.items()]
    return "\n".join(
        ["usage: seqshard COMMAND [FLAGS]", "", *lines, "", "seqshard COMMAND --help says more."]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv[:1] in (["--version"], ["-V"]):
        print(f"seqshard {__version__}")
        return 0
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0 if argv else 2
    if argv[0] not in COMMANDS:
        print(f"seqshard: error: unknown command {argv[0]!r}\n{usage()}", file=sys.stderr)
        return 2
    module = import_module(f".{argv[0].replace('-', '_')}", __package__)
    return module.main(argv[1:], prog=f"seqshard {argv[0]}")
