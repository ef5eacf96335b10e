"""What the hosts of these tests have of their own, without which the other tests would show little."""

from __future__ import annotations

import subprocess
import sys

from tests.hosts.network import Hosts
from tests.ipv6 import IPV6

LOOK = """
import socket
from streamrl.machine import machine_identity
from streamrl.transport.addresses import interface_of, reach_of_manager, reach_towards
own = reach_towards("http://10.77.0.1:7000").announced
at = socket.gethostbyname(socket.gethostname())
print(socket.gethostname(), own, at, interface_of(own), reach_of_manager("0.0.0.0").announced, machine_identity())
"""
BY_NAME = """
import zmq
from streamrl.transport.credentials import Shown, bind, connect
context = zmq.Context()
there, here = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
port = bind(there, "six")
connect(here, f"tcp://six:{port}", curve_key="", shown=Shown("here"), link="1")
here.send(b"heard")
there.set(zmq.RCVTIMEO, 20000)
print(there.recv_multipart()[-1].decode())
context.destroy(linger=0)
"""
REACH = "import socket; socket.create_connection(('10.77.0.1', 9), timeout={})"


def on(hosts: Hosts, host: int, script: str) -> subprocess.CompletedProcess[str]:
    words = [*hosts.entering(host), sys.executable, "-c", script]
    return subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)


def test_hosts_differ_and_can_be_cut_off(hosts: Hosts) -> None:
    found = [on(hosts, host, LOOK).stdout.split() for host in range(2)]
    assert [each[:5] for each in found] == [
        [f"host{host}", address, "127.0.1.1", "eth0", address]
        for host, address in enumerate(("10.77.0.1", "10.77.0.2"))
    ]
    assert found[0][5] != found[1][5], "they share memory"
    assert "Connection refused" in on(hosts, 1, REACH.format(20)).stderr
    hosts.cut(1)
    assert "timed out" in on(hosts, 1, REACH.format(1)).stderr
    hosts.mend(1)
    assert "Connection refused" in on(hosts, 1, REACH.format(20)).stderr


@IPV6
def test_sockets_of_the_run_may_be_at_a_name_that_has_an_ipv6_address_alone(hosts: Hosts) -> None:
    """A name as the announced address."""
    hosts.without_ipv4(0)
    found = on(hosts, 0, BY_NAME)
    assert found.stdout == "heard\n", found.stderr
