"""The address by which others reach a process, and the one where it listens: two questions.

A process is reached where its packets to the manager come from: everybody else can reach the manager, too. So nothing
has to be said on a machine with one network, and `--advertise` says it where that is the wrong one, or where others
reach this machine by another address than it has itself. What is announced is never a wildcard address.
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
"""Environment variables: the network interface at which gloo, or NCCL, listens and which it announces to the others."""
SOMEWHERE_ELSE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Addresses that nobody has (RFC 5737, RFC 3849), to ask for the route that leads off this machine."""
DISCARD_PORT = 9
"""For sockets that are connected and never send."""
RESOLVE_SECONDS = 1.0
"""Between two tries to resolve the manager's name."""


class Listening(NamedTuple):
    """Where one socket listens."""

    at: str
    """The address where it listens; a wildcard address: at all of the machine's."""
    announced: str
    """The address that others are told."""


LOOPBACK = Listening("127.0.0.1", "127.0.0.1")
"""For what only this machine reaches."""
LOOPBACK_IPV6 = Listening("::1", "::1")
"""The same on a machine that may have no IPv4 address at all."""


class Reach(NamedTuple):
    """How others reach this process."""

    announced: str
    local: str
    """An address of this machine: where it listens unless a setting says otherwise. Its interface is the one over which
    process groups meet."""
    told: bool = False
    """Whether `announced` was given by `--advertise`."""

    def listening(self, setting: str) -> Listening:
        """Return where a socket listens whose setting (`gserver.host` and the like) is `setting`; it may be empty.

        Raises `ConfigError` for what is no address of this machine.
        """
        if not setting:
            return Listening(at=self.local, announced=self.announced)
        if is_wildcard(setting):
            return Listening(at=everywhere(self.local), announced=self.announced)
        try:
            family, *_, address = socket.getaddrinfo(setting, 0, type=socket.SOCK_STREAM)[0]
            with socket.socket(family) as trying:
                trying.bind(address)
        except OSError as error:
            raise ConfigError(
                f"nothing can listen at {setting} ({error.strerror}): gserver.host, stream.host, weights.host and "
                "rollout.agent.host are addresses of the machine itself, 0.0.0.0 for all that it has, or empty"
            ) from error
        return Listening(at=setting, announced=self.announced if self.told else setting)

    @property
    def loopback(self) -> bool:
        """Whether only this machine reaches this process."""
        return is_loopback(self.announced)

    @property
    def of_this_machine(self) -> Reach:
        """How processes of this machine alone reach this one: the loopback address of the kind that it has."""
        return Reach(*(LOOPBACK_IPV6 if ":" in self.local else LOOPBACK))


LOCAL = Reach(*LOOPBACK)
"""For a process that talks to others of its machine alone."""


def reach_towards(manager_url: str, *, advertise: str = "", patience: float = 0.0) -> Reach:
    """Return how others reach a process of this machine, in a run whose manager is at `manager_url`.

    `advertise`: the address that others are to be told. A manager whose name cannot be resolved yet, or to which there
    is no route yet, is tried again for `patience` seconds; then `PeerLost` is raised. Raises `ConfigError` for a URL
    without a host, and for an address that nobody can be reached at.
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
    return _reach(next(found, (LOOPBACK_IPV6 if ":" in host else LOOPBACK).at), advertise)


def source_address(host: str) -> str:
    """Return the address of this machine from which it reaches `host`; raises `OSError` where there is no route.

    Nothing is sent: the system chooses the address when a datagram socket is connected. Of a name, the address that
    `address_of` returns counts.
    """
    family, kind, protocol, _, address = _preferred(socket.getaddrinfo(host, DISCARD_PORT, type=socket.SOCK_DGRAM))
    with socket.socket(family, kind, protocol) as asking:
        asking.connect(address)
        found: str = asking.getsockname()[0]
    return found


def address_of(host: str) -> str:
    """Return the address that `host` stands for; raises `OSError` where it stands for none.

    Of a name with addresses of both kinds, as `localhost` is on many machines, that of IPv4: a ZMQ socket speaks one
    kind, and all have to choose the same.
    """
    return str(_preferred(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))[4][0])


def _preferred(known: list[Any]) -> Any:
    return min(known, key=lambda one: one[0] != socket.AF_INET)


def interface_of(address: str) -> str:
    """Return the name of the network interface that has `address`; empty: this machine does not have it.

    A loopback interface has all of its network.
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
    """Have gloo and NCCL of this process, and of what it starts, meet others at the interface that has `address`.

    To be called before torch makes a process group. Without it they take what the machine's own name stands for: on
    Debian 127.0.1.1, which nobody else reaches. An interface that was chosen by the environment stays. Over loopback
    addresses NCCL is left to itself: it then knows faster ways between the GPUs of one machine.
    """
    interface = interface_of(address)
    if not interface:
        return
    environment.setdefault(GLOO_INTERFACE, interface)
    if not is_loopback(address):
        environment.setdefault(NCCL_INTERFACE, f"={interface}")  # exactly this one, not all whose names begin so


def meeting_interface(backend: str) -> str:
    """Return, for messages, at which interface and address a process group of this process meets the others."""
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
    """Return the wildcard for all addresses of the kind of `address`: servers of one kind do not hear the other."""
    return "::" if ":" in address else "0.0.0.0"


def url_of(host: str, port: int | str, *, scheme: str = "http") -> str:
    """Return the URL of a server, with brackets around an IPv6 address; `port` may be what people are told of it."""
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def host_of(address: str) -> str:
    """Return the host of a URL or a ZMQ endpoint; empty: it names none."""
    return urlsplit(address).hostname or ""


def _reach(local: str, advertise: str) -> Reach:
    advertise = advertise.removeprefix("[").removesuffix("]")  # as an IPv6 address is written in a URL
    if not advertise:
        return Reach(announced=local, local=local)
    if is_wildcard(advertise):
        raise ConfigError(f"--advertise {advertise}: no other process reaches it there; give one address of this host")
    return Reach(announced=advertise, local=advertise if _is_own(advertise) else local, told=True)


def _towards_others(kind: socket.AddressFamily) -> Iterator[str]:
    """Yield addresses of this machine by which others may reach it: that of its route to them, and those of its
    interfaces that are up, without loopback ones and those that count for one link only."""
    with suppress(OSError):  # no default route, as on the nodes of many clusters
        yield source_address(SOMEWHERE_ELSE[kind])
    states = psutil.net_if_stats()
    for name, entries in psutil.net_if_addrs().items():
        if name in states and states[name].isup:
            own = (e.address for e in entries if e.family == kind and "%" not in e.address)
            yield from (address for address in own if not is_loopback(address))


def _is_own(host: str) -> bool:
    """Whether `host` is an address of this machine, as a number; what a name stands for here may be 127.0.1.1."""
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
