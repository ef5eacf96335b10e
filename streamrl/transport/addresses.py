"""Two addresses of a process: the one that it announces to others, and the one where it listens.

A process announces the source address of its packets to the manager: every other process reaches the manager, too. So a
machine with one network needs no setting. `--advertise` gives the address if that one belongs to the wrong network, or
if others reach this machine by an address that it does not have itself. An announced address is never a wildcard.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import time
from collections.abc import Iterator, MutableMapping
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import psutil

from streamrl.errors import ConfigError, PeerLost

log = logging.getLogger(__name__)

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"
"""Environment variables: the network interface at which gloo, or NCCL, listens, and which it announces to peers."""
SOMEWHERE_ELSE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Addresses that no host has (RFC 5737, RFC 3849), to find the route that leads off this machine."""
DISCARD_PORT = 9
"""Port of sockets that are connected and never send."""
RESOLVE_SECONDS = 1.0
"""Delay between two attempts to resolve the manager's name."""


class Reach(NamedTuple):
    """How others reach this process."""

    announced: str
    """The address that is given to other processes."""
    local: str
    """An address of this machine. The process listens there, and process groups meet at its interface."""

    @property
    def loopback(self) -> bool:
        """Whether only this machine reaches this process."""
        return is_loopback(self.announced)

    @property
    def of_this_machine(self) -> Reach:
        """Return how only processes of this machine reach this one: a loopback address of the same IP version."""
        return LOOPBACK_IPV6 if ":" in self.local else LOOPBACK


LOOPBACK = Reach("127.0.0.1", "127.0.0.1")
"""For a process that communicates only with processes of its machine."""
LOOPBACK_IPV6 = Reach("::1", "::1")
"""The same on a machine that may have no IPv4 address at all."""


def reach_towards(manager_url: str, *, advertise: str = "", patience: float = 0.0) -> Reach:
    """Return how others reach a process of this machine, in a run whose manager is at `manager_url`.

    `advertise`: the address to announce; empty to find it. If the manager's name cannot be resolved yet, or there is no
    route to it yet, retry for `patience` seconds, then raise `PeerLost`. Raises `ConfigError` for a URL without a host,
    and for a wildcard address in `advertise`.
    """
    manager = urlsplit(manager_url).hostname
    if not manager:
        raise ConfigError(f"--manager {manager_url}: write it as http://HOST:PORT")
    deadline = time.monotonic() + patience
    warned = False
    while True:
        try:
            return _reach(source_address(manager), advertise)
        except OSError as error:
            reason = f"there is no way to the manager at {manager_url}: {error.strerror or error}"
            if time.monotonic() >= deadline:
                raise PeerLost(f"{reason}; tried for {patience:.0f} s") from error
            if not warned:
                log.warning("%s; trying again for %.0f s", reason, patience)
            warned = True
            time.sleep(RESOLVE_SECONDS)


def reach_of_manager(host: str, *, advertise: str = "") -> Reach:
    """Return how others reach a manager that listens at `host`."""
    if not is_wildcard(host):
        return _reach(host, advertise)
    kinds = {"0.0.0.0": [socket.AF_INET], "*": [socket.AF_INET, socket.AF_INET6]}.get(host, [socket.AF_INET6])
    found = (address for kind in kinds for address in _towards_others(kind))
    return _reach(next(found, (LOOPBACK_IPV6 if ":" in host else LOOPBACK).local), advertise)


def source_address(host: str) -> str:
    """Return the address of this machine from which it reaches `host`; raises `OSError` if there is no route.

    Nothing is sent: the system chooses the address when a datagram socket is connected. A name is resolved as in
    `address_of`.
    """
    family, kind, protocol, _, address = _preferred(socket.getaddrinfo(host, DISCARD_PORT, type=socket.SOCK_DGRAM))
    with socket.socket(family, kind, protocol) as asking:
        asking.connect(address)
        found: str = asking.getsockname()[0]
    return found


def address_of(host: str) -> str:
    """Return the address of `host`; raises `OSError` if it has none.

    If a name has IPv4 and IPv6 addresses, as `localhost` on many machines, return an IPv4 one: a ZMQ socket supports
    one kind at a time, and all processes have to choose the same.
    """
    return str(_preferred(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))[4][0])


def _preferred(known: list[Any]) -> Any:
    return min(known, key=lambda one: one[0] != socket.AF_INET)


def interface_of(address: str) -> str:
    """Return the name of the network interface that has `address`; empty if this machine does not have it.

    A loopback interface has all loopback addresses.
    """
    try:
        wanted = {
            ipaddress.ip_address(str(entry[0]).partition("%")[0]) for *_, entry in socket.getaddrinfo(address, None)
        }
    except OSError:
        return ""
    interfaces = psutil.net_if_addrs().items()
    return next((str(name) for name, entries in interfaces if any(_covers(entry, wanted) for entry in entries)), "")


def use_interface_of(address: str, *, environment: MutableMapping[str, str] = os.environ) -> None:
    """Have gloo and NCCL of this process, and of its child processes, use the interface that has `address`.

    Call it before torch creates a process group. Otherwise both use the address of the machine's own host name: on
    Debian 127.0.1.1, which no other machine reaches. An interface that is set in the environment stays. For loopback
    addresses NCCL's choice is left alone: it then finds faster paths between the GPUs of one machine.
    """
    interface = interface_of(address)
    if not interface:
        return
    environment.setdefault(GLOO_INTERFACE, interface)
    if not is_loopback(address):
        environment.setdefault(NCCL_INTERFACE, f"={interface}")  # "=": this name exactly, not as a prefix


def meeting_interface(backend: str) -> str:
    """Return, for messages, the interface and address at which process groups of this process meet their peers."""
    name = os.environ.get(NCCL_INTERFACE if backend == "nccl" else GLOO_INTERFACE, "").lstrip("=")
    if not name:
        return f"the address that {socket.gethostname()} stands for"
    entries = psutil.net_if_addrs().get(name)
    if entries is None:
        return f"{name}, an interface that this machine does not have"
    own = [e.address for e in entries if e.family in (socket.AF_INET, socket.AF_INET6)]
    return f"{name} ({', '.join(own) or 'without an address'})"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens at `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_wildcard(host: str) -> bool:
    """Whether `host` stands for all addresses of a machine."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return host == "*"


def everywhere(address: str) -> str:
    """Return the wildcard of the IP version of `address`: a server of one version is not reached by the other."""
    return "::" if ":" in address else "0.0.0.0"


def url_of(host: str, port: int | str, *, scheme: str = "http") -> str:
    """Return the URL of a server, with brackets around an IPv6 address; `port` may be a placeholder for display."""
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def host_of(address: str) -> str:
    """Return the host of a URL or a ZMQ endpoint; empty if it has none."""
    return urlsplit(address).hostname or ""


def _reach(local: str, advertise: str) -> Reach:
    advertise = advertise.removeprefix("[").removesuffix("]")  # the brackets of an IPv6 address in a URL
    if not advertise:
        return Reach(announced=local, local=local)
    if is_wildcard(advertise):
        raise ConfigError(f"--advertise {advertise}: no other process reaches it there; give one address of this host")
    return Reach(announced=advertise, local=advertise if _is_own(advertise) else local)


def _towards_others(kind: socket.AddressFamily) -> Iterator[str]:
    """Yield addresses of this machine by which others may reach it: the source address of its default route, then the
    addresses of its active interfaces, except loopback and link-local ones."""
    with suppress(OSError):  # no default route, as on the nodes of many clusters
        yield source_address(SOMEWHERE_ELSE[kind])
    states = psutil.net_if_stats()
    for name, entries in psutil.net_if_addrs().items():
        if name in states and states[name].isup:
            own = (e.address for e in entries if e.family == kind and "%" not in e.address)
            yield from (address for address in own if not is_loopback(address))


def _is_own(host: str) -> bool:
    """Whether `host` is a numeric address of this machine. Names do not count: they may resolve to 127.0.1.1 here."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return bool(interface_of(host))


def _covers(entry: Any, wanted: set[ipaddress.IPv4Address | ipaddress.IPv6Address]) -> bool:
    if entry.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    own = ipaddress.ip_address(entry.address.partition("%")[0])
    return any(own == other or (own.is_loopback and other.is_loopback) for other in wanted)
