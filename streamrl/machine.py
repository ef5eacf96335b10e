"""The identity of this machine: which processes share memory with this one, and which see the same processes."""

from __future__ import annotations

import os
import socket
from functools import cache
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
"""Files in this folder are memory of this host."""
GPUS_OF_WINDOWS = Path("/dev/dxg")
"""All GPUs, where Linux runs under Windows (WSL 2)."""
BOOT = Path("/proc/sys/kernel/random/boot_id")
PID_NAMESPACE = Path("/proc/self/ns/pid")


@cache
def machine_identity(*, shared_memory: Path = SHARED_MEMORY, boot: Path = BOOT) -> str:
    """Return an id that is equal for two processes if and only if they see the same shared memory.

    It combines the boot id of the kernel with the identity of the file system at `/dev/shm`. Host names are not enough:
    different machines often have the same name, and containers of one machine have separate `/dev/shm` unless
    configured otherwise.
    """
    try:
        found = os.stat(shared_memory)
        return f"{boot.read_text().strip()}/{found.st_dev}-{found.st_ino}"
    except OSError:
        return f"{socket.gethostname()}/{os.getpid()}"  # a system without either: assume that nothing is shared


@cache
def process_space(*, namespace: Path = PID_NAMESPACE, boot: Path = BOOT) -> str:
    """Return an id that is equal for two processes if and only if a pid means the same process to both; empty: unknown.

    Each container numbers its processes separately, even if it shares the host's network, name and memory.
    """
    try:
        return f"{boot.read_text().strip()}/{os.readlink(namespace)}"
    except OSError:
        return ""
