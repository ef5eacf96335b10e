"""Hosts on this machine: namespaces on a switch of their own, for tests of what crosses a network.

Each host has an address, a hostname, a /dev/shm and an /etc/hosts of its own. As on Debian, that gives a host's own
name the address 127.0.1.1, and the others' names theirs; `six` is `SIX`. The file system and process ids are shared
with this machine, whose own network is not touched: the switch is in a namespace, too. Traffic stays there.

Everything hangs on one process for each host, which holds its namespaces and ends when this process does, so nothing is
left behind however a test ends.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Self

NETWORK = "10.77.0"
SIX = "fd77::1"
"""The address of a host without IPv4, besides `::1`."""
SPACES = ("net", "uts", "ipc", "mnt")
"""Kinds of namespaces that a host has; that of mounts comes last, since the others are found below /proc."""
HOLD = """
set -e
mount -t tmpfs tmpfs /dev/shm
mount --bind "$2" /etc/hosts
hostname "$1"
ip link set lo up
echo ready
read forever || true
"""
"""What the process does that holds a host: it prepares it, says so, and waits for the end of its input."""


class Hosts:
    """`count` hosts, of which any can be cut off from the others and joined to them again."""

    def __init__(self, count: int, *, folder: Path) -> None:
        """`folder`: for their /etc/hosts."""
        self._count = count
        self._folder = folder
        self._holders: list[int] = []
        self._switch = 0
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._switch = stack.enter_context(_held("switch", self._names(None)))
            self._on_switch("ip link add name switch type bridge")
            self._on_switch("ip link set switch up")
            for host in range(self._count):
                self._holders.append(stack.enter_context(_held(f"host{host}", self._names(host))))
                self._on_switch(f"ip link add port{host} type veth peer name eth0 netns {self._holders[host]}")
                self._on_switch(f"ip link set port{host} master switch up")
                self._on(self._holders[host], f"ip address add {self.address(host)}/24 dev eth0")
                self._on(self._holders[host], "ip link set eth0 up")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def address(self, host: int) -> str:
        return f"{NETWORK}.{host + 1}"

    def holder(self, host: int) -> int:
        """Return the process in whose namespaces the host is; see `enter`."""
        return self._holders[host]

    def entering(self, host: int) -> list[str]:
        """Return the command that runs the one behind it on the host, in this folder."""
        return [*_entering(self._holders[host]), f"--wd={os.getcwd()}", "--"]

    def cut(self, host: int) -> None:
        """Take the host off the network."""
        self._on_switch(f"ip link set port{host} down")

    def mend(self, host: int) -> None:
        """Put it back."""
        self._on_switch(f"ip link set port{host} up")

    def without_ipv4(self, host: int) -> None:
        """Take its addresses of IPv4 away, 127.0.0.1 included, and give it `SIX`."""
        for interface in ("lo", "eth0"):
            self._on(self._holders[host], f"ip -4 address flush dev {interface}")
        self._on(self._holders[host], f"ip address add {SIX}/128 dev lo")

    def _names(self, own: int | None) -> Path:
        file = self._folder / f"hosts-{own}"
        others = [f"{self.address(host)} host{host}" for host in range(self._count) if host != own]
        file.write_text("\n".join(["127.0.0.1 localhost", f"{SIX} six", f"127.0.1.1 host{own}", *others, ""]))
        return file

    def _on_switch(self, command: str) -> None:
        self._on(self._switch, command)

    def _on(self, holder: int, command: str) -> None:
        subprocess.run([*_entering(holder), "--", *command.split()], check=True, capture_output=True, timeout=30)


class _held:
    """A process that holds namespaces, as `HOLD` says; its id, while it lives."""

    def __init__(self, name: str, hosts_file: Path) -> None:
        self._words = ["unshare", "--net", "--uts", "--ipc", "--mount", "sh", "-c", HOLD, "sh", name, str(hosts_file)]

    def __enter__(self) -> int:
        self._process = subprocess.Popen(
            self._words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            _, said = self._process.communicate()
            raise OSError(said.strip() or f"{self._words[0]} said nothing")
        return self._process.pid

    def __exit__(self, *_: object) -> None:
        self._process.communicate("\n", timeout=30)


def _entering(holder: int) -> list[str]:
    return ["nsenter", f"--target={holder}", "--net", "--uts", "--ipc", "--mount"]


def enter(holder: int) -> None:
    """Move this process, which must have one thread, to the host that `holder` holds."""
    libc = ctypes.CDLL(None, use_errno=True)
    folder = os.getcwd()
    spaces = [os.open(f"/proc/{holder}/ns/{kind}", os.O_RDONLY) for kind in SPACES]
    for space in spaces:
        if libc.setns(space, 0):
            raise OSError(ctypes.get_errno(), f"setns: {os.strerror(ctypes.get_errno())}")
        os.close(space)
    os.chdir(folder)


def why_not(folder: Path) -> str:
    """Return why there can be no hosts here; empty: there can."""
    try:
        with Hosts(1, folder=folder):
            return ""
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None)
        return f"{error} {said.decode().strip() if said else ''}".strip()
