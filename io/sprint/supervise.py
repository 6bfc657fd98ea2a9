"""Runs a command, and kills it when the process that wanted it is gone.

`python supervise.py PARENT_PID,FD,... COMMAND ARG...`: the command inherits the descriptors. It
and all that it starts are in the group of this process, which the parent kills in the end. Only
this much code, and of the standard library only what loads fast. Ends with the exit code of the
command; 128 + n if signal n killed it.
"""

from __future__ import annotations

import os
import select
import signal
import sys

CHECK_SECONDS = 0.5
CANNOT_START = 127


def main(arguments: list[str]) -> int:
    """Waits for the command; see above."""
    numbers, *command = arguments
    parent, *descriptors = map(int, numbers.split(","))
    try:
        # Python ignores these signals; the command should not.
        signals = [signal.SIGPIPE, signal.SIGXFSZ]
        child = os.posix_spawnp(command[0], command, os.environ, setsigdef=signals)
    except OSError as error:
        print(f"cannot start {command[0]}: {error.strerror}", file=sys.stderr)
        return CANNOT_START
    for descriptor in descriptors:
        os.close(descriptor)
    ended = select.poll()
    ended.register(os.pidfd_open(child), select.POLLIN)
    while not ended.poll(CHECK_SECONDS * 1000) and os.getppid() == parent:
        pass
    # A pipe would not tell that the parent is gone: processes that it forked keep it open.
    if os.getppid() != parent:
        os.killpg(0, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
