"""The sockets at which the ranks of a gloo group find each other: closed to everybody once the group has formed.

Neither gloo nor the store at which the ranks meet (`TCPStore`) asks anybody who they are.

gloo takes whoever names the right number for another rank, and those numbers count up from 0; whoever names another
number is kept for as long as the group lives, so a stranger could use up the files that a process may open, and gloo
ends a process that can open no more. The store keeps what strangers write to it, and never frees what it has read of a
command that is not whole when its sender hangs up, 4 KB at least each time.

But all ranks are connected once a group has formed, to each other and to the store, and nobody has to come later.
gloo has no way to close its socket, and takes one that fails for a fatal error; nor has the store. So they stay open,
with a filter of the kernel (`SO_ATTACH_FILTER`, socket(7)) that lets no packet through to them: who connects gets no
answer. Connections that are there are not affected. A store at which another group is to meet is opened again for that.

Not on machines with a GPU: NCCL opens sockets of the same process whenever it likes, and needs them later. Nor where
the kernel is not Linux, or ranks connect when they first have something to say (`TORCH_GLOO_LAZY_INIT`).
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
"""Torch's own variable: pairs of ranks of a group connect when one first has something for the other."""
SO_ATTACH_FILTER = 26
SO_DETACH_FILTER = 27
"""Socket options of Linux for which Python has no names."""
_LET_NOTHING_THROUGH = struct.pack("=HBBI", 0x06, 0, 0, 0)
"""The one instruction of the filter: return, and keep 0 bytes of the packet (`struct sock_filter`)."""

Place = tuple[str, int]
"""Address and port of a listening socket."""


class _Meetings:
    """The groups that form in this process at present."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way = 0
        self._others: set[Place] = set()
        """Places where this process listens for other purposes."""

    def begin(self) -> None:
        with self._lock:
            if not self._under_way:
                self._others = set(_listening())
            self._under_way += 1

    def end(self) -> None:
        """With several at once, all sockets are closed with the last of them: which belongs to which is not known."""
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
    """Whether sockets can be closed in this process."""
    return sys.platform == "linux" and not torch.cuda.is_available() and not os.environ.get(LAZY)


@contextmanager
def closed_after_forming() -> Iterator[None]:
    """Close to everybody, at the end of the block, the listening sockets that were opened in it: those of the groups
    that form in it. May be nested, and used by several threads at once."""
    if not possible():
        yield
        return
    _meetings.begin()
    try:
        yield
    finally:
        _meetings.end()


def open_for_good(host: str) -> socket.socket:
    """Return a socket that listens at a free port of `host`, and which no `closed_after_forming` closes."""
    return _meetings.open_another(host)


@contextmanager
def open_while_forming(port: int) -> Iterator[None]:
    """Let others reach the store that this process has opened at `port` until the end of the block, and nobody after
    it."""
    if possible():
        for descriptor in _listening_at(port).values():
            _let_everybody_in(descriptor)
    try:
        yield
    finally:
        shut(port)


def shut(port: int) -> None:
    """Close to everybody the store that this process has opened at `port`: all who meet there are connected."""
    if possible():
        for place, descriptor in _listening_at(port).items():
            _let_nobody_in(place, descriptor)


def _listening_at(port: int) -> dict[Place, int]:
    return {place: descriptor for place, descriptor in _listening().items() if place[1] == port}


def _listening() -> dict[Place, int]:
    """Return where this process listens, with the file descriptor of each socket."""
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
            "the port %s:%d of a process group that has formed stays open to everybody (%s)", *place, error.strerror
        )


def _let_everybody_in(descriptor: int) -> None:
    with suppress(FileNotFoundError), socket.socket(fileno=os.dup(descriptor)) as one:  # not found: has no filter
        one.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)
