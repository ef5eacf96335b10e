"""By which address a process is reached, and where it listens."""

from __future__ import annotations

import socket
import subprocess
import sys
from typing import Any

import psutil
import pytest

from streamrl.errors import ConfigError, PeerLost
from streamrl.transport import addresses
from streamrl.transport.addresses import (
    GLOO_INTERFACE,
    LOOPBACK,
    NCCL_INTERFACE,
    Reach,
    host_of,
    interface_of,
    is_loopback,
    is_wildcard,
    meeting_interface,
    reach_of_manager,
    reach_towards,
    url_of,
    use_interface_of,
)
from tests.ipv6 import IPV6

OWN = [
    (name, entry.address)
    for name, entries in psutil.net_if_addrs().items()
    for entry in entries
    if entry.family == socket.AF_INET
]
"""The interfaces of this machine with their addresses."""


@pytest.mark.parametrize("address", [address for _, address in OWN])
def test_a_process_is_reached_where_it_reaches_the_manager_from(address: str) -> None:
    reach = reach_towards(f"http://{address}:7000")
    assert reach == Reach(announced=address, local=address)


def test_of_a_name_with_addresses_of_both_kinds_the_one_counts_at_which_zmq_can_listen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numeric = socket.getaddrinfo

    def both(host: str, *arguments: Any, **options: Any) -> list[Any]:
        hosts = ("::1", "127.0.0.1") if host == "localhost" else (host,)
        return [found for one in hosts for found in numeric(one, *arguments, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", both)
    assert reach_towards("http://localhost:7000") == LOOPBACK


@pytest.mark.parametrize("everywhere", ["0.0.0.0", "::", "*"])
def test_a_wildcard_is_never_announced(everywhere: str) -> None:
    assert is_wildcard(everywhere)
    assert not is_wildcard(reach_of_manager(everywhere).announced)
    with pytest.raises(ConfigError, match=r"--advertise .* no other process reaches it"):
        reach_towards("http://127.0.0.1:1", advertise=everywhere)


def test_advertise_replaces_the_announced_address() -> None:
    elsewhere = reach_towards("http://127.0.0.1:1", advertise="198.51.100.9")
    assert elsewhere == Reach(announced="198.51.100.9", local="127.0.0.1"), "not an address of this machine"
    assert reach_towards("http://127.0.0.1:1", advertise="127.0.0.3").local == "127.0.0.3"
    named = reach_towards("http://127.0.0.1:1", advertise=socket.gethostname())
    assert named.local == "127.0.0.1", "what a machine's own name stands for there need not lead to others"


@IPV6
def test_an_ipv6_address_may_be_given_as_a_url_has_it() -> None:
    own = Reach(announced="::1", local="::1")
    assert reach_towards("http://127.0.0.1:1", advertise="[::1]") == own
    assert reach_towards("http://127.0.0.1:1", advertise="::1") == own
    assert reach_towards("http://[::1]:7000") == Reach("::1", "::1")
    with pytest.raises(ConfigError, match="no other process reaches it there"):
        reach_towards("http://127.0.0.1:1", advertise="[::]")


def test_what_only_this_machine_reaches_is_at_a_loopback_address_of_the_kind_that_it_has() -> None:
    assert Reach(announced="fd00::7", local="fd00::7").of_this_machine == Reach("::1", "::1")
    assert Reach(announced="node7", local="10.0.0.7").of_this_machine == LOOPBACK


def test_a_manager_at_all_addresses_of_a_kind_tells_one_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    routes = {"192.0.2.1": "10.0.0.7", "2001:db8::1": "fd00::7"}
    monkeypatch.setattr(addresses, "source_address", lambda somewhere: routes[somewhere])
    assert [reach_of_manager(host).announced for host in ("0.0.0.0", "::", "*")] == ["10.0.0.7", "fd00::7", "10.0.0.7"]

    def none_of_ipv4(somewhere: str) -> str:
        if ":" not in somewhere:
            raise OSError("no route")
        return "fd00::7"

    monkeypatch.setattr(addresses, "source_address", none_of_ipv4)
    monkeypatch.setattr(addresses.psutil, "net_if_addrs", dict)
    assert [reach_of_manager(host).announced for host in ("0.0.0.0", "::", "*")] == ["127.0.0.1", "fd00::7", "fd00::7"]


def test_the_manager_is_told_of_where_it_listens() -> None:
    assert reach_of_manager("127.0.0.1").loopback
    assert reach_of_manager("10.1.2.3") == Reach("10.1.2.3", "10.1.2.3")
    assert reach_of_manager("0.0.0.0", advertise="node7").announced == "node7"


def test_there_may_be_no_way_to_the_manager() -> None:
    with pytest.raises(PeerLost, match=r"no way to the manager at http://no\.such\.host\.invalid:7"):
        reach_towards("http://no.such.host.invalid:7")
    with pytest.raises(ConfigError, match="http://HOST:PORT"):
        reach_towards("10.0.0.1:7000")


def test_process_groups_meet_at_the_interface_of_the_address() -> None:
    for name, address in OWN:
        assert interface_of(address) == name
        chosen: dict[str, str] = {}
        use_interface_of(address, environment=chosen)
        assert chosen[GLOO_INTERFACE] == name
        assert chosen.get(NCCL_INTERFACE) == (None if address.startswith("127.") else f"={name}")
    assert interface_of("127.0.0.9") == interface_of("localhost") == interface_of("127.0.0.1")
    assert interface_of("192.0.2.254") == "", "of another machine"
    chosen = {GLOO_INTERFACE: "eth7"}
    use_interface_of("127.0.0.1", environment=chosen)
    assert chosen == {GLOO_INTERFACE: "eth7"}
    use_interface_of("192.0.2.254", environment=(none := {}))
    assert none == {}


def test_messages_name_the_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    name, address = OWN[0]
    monkeypatch.setenv(GLOO_INTERFACE, name)
    assert address in meeting_interface("gloo")
    monkeypatch.setenv(NCCL_INTERFACE, "=nothing7")
    assert meeting_interface("nccl") == "nothing7, an interface that this machine does not have"
    monkeypatch.delenv(GLOO_INTERFACE)
    assert socket.gethostname() in meeting_interface("gloo")


def test_addresses_of_both_families() -> None:
    assert url_of("::1", 80) == "http://[::1]:80"
    assert url_of("10.0.0.1", 80, scheme="tcp") == "tcp://10.0.0.1:80"
    assert [host_of(text) for text in ("tcp://[::1]:80", "http://a:1/b", "")] == ["::1", "a", ""]


def test_torch_is_not_loaded_for_it() -> None:
    loaded = "import sys, streamrl.transport.addresses; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", loaded], timeout=60, check=False).returncode == 0


def test_loopback_addresses() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.1.2.3", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.org")))
