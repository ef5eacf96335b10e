"""The lifeline of a server that a gserver starts, and the signal for the stacks of its threads.

Invariant: no process of the server outlives the gserver. The server's entry holds the reading end of a pipe whose only
writing end is the gserver's, and at end-of-file ends its whole process group, which it leads. Runs in the server's
processes, too, so it imports only the standard library.
"""

from __future__ import annotations

import os
import signal
import threading

LIFELINE = "STREAMRL_SERVER_LIFELINE"
"""Environment variable: file descriptor of the lifeline's reading end."""
STACKS_SIGNAL = signal.SIGUSR1
"""Has each process print the stacks of its threads, and continue."""


def hold_lifeline() -> None:
    """Become leader of a process group, and kill it as soon as the other end of the pipe is closed.

    The process stays in the gserver's session: Linux may divide processors among sessions, and busy servers in sessions
    of their own would then starve all other processes on the machine.
    """
    descriptor = int(os.environ.pop(LIFELINE))
    os.setpgid(0, 0)

    def watch() -> None:
        while os.read(descriptor, 1):
            pass
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()
