"""Becomes an agent's program: `python -m streamrl.rollout.agents.command MEMORY_MB PROGRAM ARGUMENT...`.

The program, and all that it starts, ends with the rollout worker; its address space is limited (0: it is not).
"""

from __future__ import annotations

import os
import resource
import sys

from streamrl.children import die_with_parent, end_the_rest_after_death


def main() -> None:
    """Take the program's place."""
    memory_mb, *words = sys.argv[1:]
    end_the_rest_after_death()
    if most := int(memory_mb) << 20:
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    die_with_parent()
    try:
        os.execvp(words[0], words)
    except OSError as error:
        sys.exit(f"rollout.agent.command cannot be started: {words[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
