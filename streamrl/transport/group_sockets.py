"""The listening sockets at which the ranks of a gloo group meet: closed to new connections once the group has formed.

Neither gloo nor the store at which the ranks meet (`TCPStore`) authenticates connections.

gloo accepts any client that sends the right number as another rank, and these numbers count up from 0. A client with
another number stays connected as long as the group lives, so a stranger could exhaust the process's file descriptors,
and gloo ends a process that cannot open more. The store keeps all data that strangers write to it. It also never frees
the part of a command that arrived before its sender disconnected, at least 4 KB each time.

But once a group has formed, all ranks are connected to each other and to the store, and no process has to connect
later. Neither gloo nor the store can close its listening socket, and gloo treats a failing one as a fatal error. So the
sockets stay open behind a kernel filter (`SO_ATTACH_FILTER`, socket(7)) that drops all packets to them: a new client
gets no reply. Existing connections are not affected. When another group is to meet at a store, the store is opened
again.

The filter is not used on machines with a GPU, where NCCL opens sockets of the same process at any time and needs them
later; nor on systems other than Linux; nor if ranks connect lazily (`TORCH_GLOO_LAZY_INIT`).
"""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil
import torch

log = logging.getLogger(__name__)

LAZY = "TORCH_GLOO_LAZY_INIT"
"""Torch's own variable: two ranks of a group connect only when one first sends data to the other."""
SO_ATTACH_FILTER = 26
SO_DETACH_FILTER = 27
"""Linux socket options that Python does not name."""
_LET_NOTHING_THROUGH = struct.pack("=HBBI", 0x06, 0, 0, 0)
"""The filter's only instruction: return, and keep 0 bytes of the packet (`struct sock_filter`)."""

Place = tuple[str, int]
"""Address and port of a listening socket."""


class _Meetings:
    """The groups that are forming in this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way = 0
        self._others: set[Place] = set()
        """Addresses where this process listens for other purposes."""

    def begin(self) -> None:
        with self._lock:
            if not self._under_way:
                self._others = set(_listening())
            self._under_way += 1

    def end(self) -> None:
        """End one forming; the last of several at once closes all sockets, as it is unknown which belongs to which."""
        with self._lock:
            self._under_way -= 1
            if self._under_way:
                return
            for place, descriptor in _listening().items():
                if place not in self._others:
                    _let_nobody_in(place, descriptor)

    def open_another(self, host: str) -> socket.socket:
        family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with self._lock:
            listening = socket.create_server(address[:2], family=family)
            self._others.add(listening.getsockname()[:2])
        return listening


_meetings = _Meetings()


def possible() -> bool:
    """Whether listening sockets can be closed to new connections in this process."""
    return sys.platform == "linux" and not torch.cuda.is_available() and not os.environ.get(LAZY)


@contextmanager
def closed_after_forming() -> Iterator[None]:
    """Close the listening sockets that were opened in the block to new connections at its end: the sockets of the
    groups that form in it. May be nested, and used by several threads at once."""
    if not possible():
        yield
        return
    _meetings.begin()
    try:
        yield
    finally:
        _meetings.end()


def open_for_good(host: str) -> socket.socket:
    """Return a socket that listens at a free port of `host` and that no `closed_after_forming` closes."""
    return _meetings.open_another(host)


@contextmanager
def open_while_forming(port: int) -> Iterator[None]:
    """Open the store that this process has at `port` to new connections for the duration of the block."""
    if possible():
        for descriptor in _listening_at(port).values():
            _let_everybody_in(descriptor)
    try:
        yield
    finally:
        shut(port)


def shut(port: int) -> None:
    """Close the store that this process has at `port` to new connections: all ranks that meet there are connected."""
    if possible():
        for place, descriptor in _listening_at(port).items():
            _let_nobody_in(place, descriptor)


def _listening_at(port: int) -> dict[Place, int]:
    return {place: descriptor for place, descriptor in _listening().items() if place[1] == port}


def _listening() -> dict[Place, int]:
    """Return the addresses where this process listens, with the file descriptor of each socket."""
    found = psutil.Process().net_connections("tcp")
    return {(one.laddr.ip, one.laddr.port): one.fd for one in found if one.status == psutil.CONN_LISTEN}


def _let_nobody_in(place: Place, descriptor: int) -> None:
    instructions = ctypes.create_string_buffer(_LET_NOTHING_THROUGH)
    program = struct.pack("@HP", 1, ctypes.addressof(instructions))
    try:
        with socket.socket(fileno=os.dup(descriptor)) as one:
            one.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)
    except OSError as error:
        log.warning(
            "the port %s:%d of a process group that has formed stays open to all hosts (%s)", *place, error.strerror
        )


def _let_everybody_in(descriptor: int) -> None:
    with suppress(FileNotFoundError), socket.socket(fileno=os.dup(descriptor)) as one:  # not found: has no filter
        one.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)
