"""What all commands share: one clear sentence for an error, and the exit code."""

from __future__ import annotations

import gc
import logging
import sys
import traceback
from collections.abc import Callable

from ..io.errors import EXIT_FAILED, SeqshardError


def run_command(command: Callable[[], int], prog: str, verbose: bool = False) -> int:
    """Runs a command; prints what went wrong as one sentence and returns the exit code."""
    try:
        return command()
    except KeyboardInterrupt:
        print(f"{prog}: interrupted; run the same command again to continue", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return EXIT_FAILED
    except Exception as error:
        if verbose:
            traceback.print_exc()
        known = _find_error(error)
        if known is not None:
            print(f"{prog}: error: {known}", file=sys.stderr)
            return known.exit_code
        text = str(error).strip().splitlines() or [""]
        print(f"{prog}: error: {type(error).__name__}: {text[-1]}", file=sys.stderr)
        if not verbose:
            print(f"{prog}: --verbose shows where this happened", file=sys.stderr)
        return EXIT_FAILED


def _find_error(error: Exception) -> SeqshardError | None:
    if isinstance(error, SeqshardError):
        return error
    from ..transforms.relay import find_error

    return find_error(error)


def import_beam(verbose: bool) -> None:
    """Imports Beam without the warning that it sends through the root logger."""
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger().setLevel(logging.INFO if verbose else logging.ERROR)
    if not verbose:
        # The runner logs what a worker raised with all its trace; the command says it in one line.
        logging.getLogger("apache_beam").setLevel(logging.CRITICAL)
    # Postponed annotations make Beam report every hint that it cannot use.
    logging.getLogger("apache_beam.typehints").setLevel(logging.ERROR)
    # Beam's import makes half a million objects that live as long as the process: collecting
    # garbage among them is in vain, then and later.
    gc.disable()
    try:
        import apache_beam  # noqa: F401
    except ImportError as error:
        raise SeqshardError(
            f"Apache Beam cannot be imported: {error}", hint="pip install 'seqshard[build]'"
        ) from error
    finally:
        gc.freeze()
        gc.enable()
