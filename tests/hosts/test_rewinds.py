"""Whole runs over four hosts that continue by themselves after the loss of the controller's host or of one of the
trainer's."""

from __future__ import annotations

import re
import time
from typing import Any

from streamrl.records import lineage as lineages
from tests.e2e.harness import (
    assert_exactly_once,
    assert_none_missing,
    largest_difference,
    steps,
    until,
    wait_for_steps,
    wait_until_gone,
)
from tests.hosts.cluster import SMALL, Cluster, wait_for_output

STEPS = 40
SETTINGS: dict[str, Any] = SMALL | {
    "run__total_train_steps": STEPS,
    "run__stop_at_reward": 2.0,
    "trainer__save_every": "2 steps",
}


def wait_for_step_since(cluster: Cluster, moment: float) -> None:
    """Wait for a step that is made after `moment`."""
    until(lambda: steps(cluster.run_dir)[-1]["time"] > moment, "another step", seconds=60)


def assert_whole(cluster: Cluster, *, last: int) -> None:
    """The run is complete: each prompt was trained on once in the history of the final weights, and none is missing."""
    run_dir = cluster.run_dir
    assert [step["step"] for step in steps(run_dir)] == list(range(1, last + 1))
    assert_exactly_once(run_dir)
    assert_none_missing(run_dir)
    assert largest_difference(run_dir) < 1e-3
    wait_until_gone(run_dir, seconds=10)


def test_the_controllers_host_is_cut_off_for_longer_than_a_rewind_takes_and_returns(cluster: Cluster) -> None:
    """Only model workers are started again."""
    cluster.settings = SETTINGS | {"gserver__count": 2, "rollout__workers": 2}
    controller = cluster.start(0, "controller", "--host", "0.0.0.0")
    trainer = cluster.start(1, "trainer")
    gservers = cluster.start(2, "gserver", "--count", "2")
    workers = cluster.start(3, "rollout", "--count", "2")
    wait_for_steps(cluster.run_dir, 8)
    cluster.hosts.cut(0)
    time.sleep(25)
    cluster.hosts.mend(0)
    wait_for_step_since(cluster, time.time())
    for command in (trainer, gservers, workers, controller):
        command.ends_well(seconds=60)
    assert_whole(cluster, last=STEPS)
    assert len(lineages.read(cluster.run_dir)) == 1
    for role in ("gserver", "rollout"):
        assert len(re.findall(rf"{role}/\d+ joined", controller.output)) == 2, "none was started again"
    for pool in (gservers, workers):
        assert "the heartbeat of" in pool.output, "the warning names the call that fails"


def test_a_host_of_the_trainer_disappears_and_another_takes_its_place(cluster: Cluster) -> None:
    """The lost host returns when the run has continued without it, and its trainer ends."""
    last = 4 * STEPS  # the run must not end before the lost host has heard of its replacement
    cluster.settings = SETTINGS | {"run__total_train_steps": last}
    controller = cluster.start(0, "controller", "--host", "0.0.0.0")
    pools = [cluster.start(0, "gserver"), cluster.start(0, "rollout")]
    first, lost = (cluster.start(1 + node, "trainer", "--node", str(node), "--nodes", "2") for node in range(2))
    wait_for_steps(cluster.run_dir, 7)
    cluster.hosts.cut(2)
    wait_for_output(controller, "waiting for model_worker/1 to connect")
    second = cluster.start(3, "trainer", "--node", "1", "--nodes", "2")
    wait_for_step_since(cluster, time.time())
    cluster.hosts.mend(2)
    assert lost.exit_code(seconds=60) == 1
    for command in (first, second, *pools, controller):
        command.ends_well(seconds=120)
    assert re.search(r"process \d+ on host3 has taken its place; this trainer ends", lost.said)
    assert_whole(cluster, last=last)
    assert len(lineages.read(cluster.run_dir)) == 1
