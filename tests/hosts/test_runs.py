"""Whole runs over four hosts, started as docs/clusters.md says, each process by its own command.

They learn a little: a digit is to be copied, and what tells is that responses end where they should.
"""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path

from streamrl.transport.control import FinishRun
from streamrl.transport.manager_client import ControlClient
from streamrl.transport.secret import Secret
from tests.e2e.harness import (
    COPY_SCRATCH,
    SUPPORTED,
    assert_exactly_once,
    assert_none_missing,
    largest_difference,
    overrides,
    start_command,
    steps,
    until,
    wait_for_steps,
)
from tests.forked import forking
from tests.hosts.cluster import (
    MAX_STALENESS,
    PORT,
    SECRET,
    SMALL,
    Cluster,
    name_of,
    wait_for_output,
)
from tests.hosts.network import Hosts, enter
from tests.ipv6 import IPV6

LEARNED = 0.45
"""Mean reward of the last steps. A policy from scratch begins at 0.07, and has 0.5 when every response ends after one
character."""


def finish(holder: int, url: str) -> None:
    """End the run, from the host that `holder` holds."""
    enter(holder)

    async def tell() -> None:
        client = ControlClient(url, secret=Secret(SECRET, origin="the test"))
        await client.finish_run(FinishRun(reason="the test has seen enough"))
        await client.close()

    asyncio.run(tell())


def test_a_host_is_cut_off_for_a_moment_for_longer_and_for_good(cluster: Cluster) -> None:
    """With weights by broadcast: the last host has one of two gservers and one of two rollout workers. It is cut off
    for two seconds, then for longer than the lease, then for good."""
    cluster.settings = SMALL | {"run__total_train_steps": 100000, "run__stop_at_reward": 2.0}
    hosts, run_dir = cluster.hosts, cluster.run_dir
    # in no particular order: who comes first waits
    near_gserver = cluster.start(2, "gserver")
    far_worker = cluster.start(3, "rollout")
    second = cluster.start(2, "trainer", "--node", "1", "--nodes", "2")
    first = cluster.start(1, "trainer", "--node", "0", "--nodes", "2")
    controller = cluster.start(0, "controller", "--host", "0.0.0.0")
    far_gserver = cluster.start(3, "gserver")
    near_worker = cluster.start(1, "rollout")
    wait_for_output(controller, r"the controller of run 'run' listens at https://10\.77\.0\.1:7000")
    for address in (hosts.address(2), hosts.address(3)):
        wait_for_output(controller, rf"gserver/\d+ joined at https://{re.escape(address)}:")
    far = [name_of(far_gserver), name_of(far_worker)]
    wait_for_steps(run_dir, 5)
    wait_for_output(first, r"weights\.mode: collective \(gservers are on other hosts\)")

    def goes_on(count: int) -> None:
        wait_for_steps(run_dir, len(steps(run_dir)) + count)

    hosts.cut(3)
    time.sleep(2)
    hosts.mend(3)
    goes_on(10)

    heard = len(controller.output)
    hosts.cut(3)
    for name in far:
        wait_for_output(controller, f"{name} has been silent for", after=heard)
    heard = len(controller.output)
    hosts.mend(3)  # at once: its processes give up some 40 s after the cut
    for name in far:
        wait_for_output(controller, f"{name} is heard of again", after=heard)
    goes_on(10)
    until(lambda: steps(run_dir)[-1]["metrics"]["gservers_compared"] == 2, "the work of both gservers", seconds=120)
    heard = len(controller.output)

    hosts.cut(3)
    for name in far:
        wait_for_output(controller, f"{name} has been silent for", after=heard)
    goes_on(40)
    until(lambda: sum(cluster.rewards()[-5:]) / 5 > LEARNED, f"a reward of {LEARNED}", seconds=120)

    ending = forking().Process(target=finish, args=(hosts.holder(0), f"http://{hosts.address(0)}:{PORT}"))
    ending.start()
    for command in (controller, near_gserver, near_worker, first, second):
        command.ends_well(seconds=60)
    ending.join()
    assert_none_missing(run_dir)  # nor twice; the step that was under way at the end is not recorded
    assert all(int(age) <= MAX_STALENESS for step in steps(run_dir) for age in step["token_ages"])
    assert largest_difference(run_dir) < 1e-3


@IPV6
def test_a_machine_without_an_ipv4_address_makes_a_run(hosts: Hosts, tmp_path: Path) -> None:
    """With two model workers, weights by broadcast to two gservers, and groups that go to a name."""
    hosts.without_ipv4(0)
    settings = SMALL | {
        "run__host": "::1",
        "gserver__count": 2,
        "weights__mode": "collective",
        "run__total_train_steps": 3,
    }
    words = ["run", str(COPY_SCRATCH), *overrides(tmp_path, "run", **settings)]
    command = start_command(words, within=() if SUPPORTED else hosts.entering(0), holder=hosts.holder(0))
    try:
        command.ends_well()
    finally:
        command.end()
    assert_exactly_once(tmp_path / "run")
    assert largest_difference(tmp_path / "run") < 1e-3
