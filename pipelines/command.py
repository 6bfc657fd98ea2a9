"""What all commands share: one clear sentence for an error, and the exit code."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import TextIO

from ..io.errors import EXIT_FAILED, SeqshardError, redact


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
            print(redact(traceback.format_exc()), file=sys.stderr, end="")
        known = _find_error(error)
        if known is not None:
            print(f"{prog}: error: {known}", file=sys.stderr)
            return known.exit_code
        text = str(error).strip().splitlines() or [""]
        print(f"{prog}: error: {type(error).__name__}: {redact(text[-1])}", file=sys.stderr)
        if not verbose:
            print(f"{prog}: --verbose shows where this happened", file=sys.stderr)
        return EXIT_FAILED


def _find_error(error: Exception) -> SeqshardError | None:
    if isinstance(error, SeqshardError):
        return error
    from ..transforms.relay import find_error

    known = find_error(error)
    if known is not None or "apache_beam" not in sys.modules:
        return known
    from ..runners.portable import find_job_error

    return find_job_error(error)


def import_beam(verbose: bool) -> None:
    """Imports Beam without the warning that it sends through the root logger."""
    if verbose:
        logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.INFO)
    logging.getLogger("apache_beam").setLevel(logging.INFO if verbose else logging.ERROR)
    # What Beam's job servers print is shown whatever the level of Beam's other loggers.
    for server in ("FlinkJarJobServer", "PrismJobServer"):
        logging.getLogger(server).disabled = not verbose
    # Postponed annotations make Beam report every hint that it cannot use.
    logging.getLogger("apache_beam.typehints").setLevel(logging.ERROR)
    # Beam's import makes half a million objects that live as long as the process: collecting
    # garbage among them is in vain, then and later.
    gc.disable()
    disabled = logging.root.manager.disable
    logging.disable(disabled if verbose else logging.WARNING)
    try:
        import apache_beam  # noqa: F401
    except ImportError as error:
        raise SeqshardError(
            f"Apache Beam cannot be imported: {error}", hint="pip install 'seqshard[build]'"
        ) from error
    finally:
        logging.disable(disabled)
        gc.freeze()
        gc.enable()


@contextlib.contextmanager
def quiet_stderr(verbose: bool) -> Iterator[TextIO]:
    """Mutes standard error, also that of child processes; yields a stream to the real one.

    Beam's workers print every exception with all its trace, and say much of themselves, wherever
    they run. The command says in one line what happened.
    """
    if verbose:
        yield sys.stderr
        return
    own, real = sys.stderr, os.dup(2)
    own.flush()
    with open(os.devnull, "w") as nowhere, open(real, "w", buffering=1) as terminal:
        os.dup2(nowhere.fileno(), 2)
        sys.stderr = nowhere
        try:
            yield terminal
        finally:
            sys.stderr = own
            os.dup2(terminal.fileno(), 2)
