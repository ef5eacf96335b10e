"""Which machine this is: who shares memory with this process, and who sees the same processes."""

from __future__ import annotations

import os
import socket
from functools import cache
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
"""Files in here are memory of this host."""
GPUS_OF_WINDOWS = Path("/dev/dxg")
"""All GPUs, where Linux runs under Windows (WSL 2)."""
BOOT = Path("/proc/sys/kernel/random/boot_id")
PID_NAMESPACE = Path("/proc/self/ns/pid")


@cache
def machine_identity(*, shared_memory: Path = SHARED_MEMORY, boot: Path = BOOT) -> str:
    """Return what processes have alike if and only if they see the same shared memory.

    It is the boot of the kernel with the file system that they have as `/dev/shm`: names of hosts are often alike where
    machines are not, and containers of one machine have a `/dev/shm` each unless they were given one together.
    """
    try:
        found = os.stat(shared_memory)
        return f"{boot.read_text().strip()}/{found.st_dev}-{found.st_ino}"
    except OSError:
        return f"{socket.gethostname()}/{os.getpid()}"  # a system that tells neither: nothing is shared


@cache
def process_space(*, namespace: Path = PID_NAMESPACE, boot: Path = BOOT) -> str:
    """Return what processes have alike if and only if a pid means the same process to them; empty: nobody can know.

    Containers number processes each for themselves, also where they share the host's network, name and memory.
    """
    try:
        return f"{boot.read_text().strip()}/{os.readlink(namespace)}"
    except OSError:
        return ""
