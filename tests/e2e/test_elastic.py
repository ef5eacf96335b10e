"""Pools change in mid-run: a gserver and a rollout worker join by hand, others leave; nothing is lost or doubled."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from streamrl.records import progress
from streamrl.transport.control import Status
from tests.e2e.harness import (
    COPY_SCRATCH,
    PACED,
    QUICK,
    Command,
    assert_none_missing,
    manager_of,
    overrides,
    start,
    start_command,
    steps,
    summary,
    until,
    wait_for_status,
    wait_for_steps,
    wait_until_gone,
)

MAX_STALENESS = 4
SETTINGS = PACED | {
    "gserver__simulation__token_seconds": 0.25,
    "run__total_train_steps": 10_000,  # until the test has seen enough
    "rollout__group_size": 4,
    "staleness__over_age": "wait",
    "staleness__max_staleness": MAX_STALENESS,
}
ByHand = Callable[..., Command]


@pytest.fixture
def by_hand() -> Iterator[ByHand]:
    started: list[Command] = []

    def begin(*words: str) -> Command:
        started.append(start_command(words))
        return started[-1]

    yield begin
    for process in started:
        process.end()


def goes_on(run_dir: Path) -> None:
    """Until more steps were made than there were groups for when the pools changed last."""
    wait_for_steps(run_dir, len(steps(run_dir)) + MAX_STALENESS + 2)


def assert_in_order(run_dir: Path) -> None:
    """Nothing was lost, doubled or too old; the step that was under way at the end is not recorded."""
    assert_none_missing(run_dir)
    assert all(int(age) <= MAX_STALENESS for step in steps(run_dir) for age in step["token_ages"])


def live(status: Status) -> set[str]:
    return {f"{p.role}/{p.index}" for p in status.processes if p.state == "live"}


def members(status: Status) -> set[str]:
    return {f"{p.role}/{p.index}" for p in status.processes}


def test_pools_grow_and_shrink_without_loss(tmp_path: Path, by_hand: ByHand) -> None:
    run_dir = tmp_path / "elastic"
    process = start(COPY_SCRATCH, overrides(tmp_path, "elastic", **SETTINGS))
    try:
        url = manager_of(run_dir)
        config = str(run_dir / "config.toml")
        _, rollout = (by_hand(role, config, "--manager", url) for role in ("gserver", "rollout"))

        def worked(status: Status) -> bool:
            """Whether the newcomers did some of the work."""
            stats = {f"{p.role}/{p.index}": p.stats for p in status.processes if p.state == "live"}
            return (
                stats.get("gserver/1", {}).get("requests_total", 0) > 0
                and stats.get("rollout/1", {}).get("groups_done_total", 0) > 0
            )

        wait_for_status(url, worked)
        for name in ("gserver/0", "rollout/0"):
            by_hand("drain", url, name).ends_well(seconds=90)
        wait_for_status(url, lambda status: {"gserver/0", "rollout/0"}.isdisjoint(members(status)))
        by_hand("rollout", config, "--manager", url)
        wait_for_status(url, lambda status: "rollout/2" in live(status))
        rollout.signal(signal.SIGTERM)
        rollout.ends_well(seconds=90)  # it has finished its groups and left in order
        goes_on(run_dir)
        process.signal(signal.SIGINT)
        assert process.exit_code(seconds=60) == 130, process.output
    finally:
        process.end()
    assert_in_order(run_dir)


def test_half_of_the_pools_is_taken_away_twice_and_given_back(tmp_path: Path, by_hand: ByHand) -> None:
    """As a cluster does it: at once, launchers and processes together, in the middle of their work."""
    run_dir = tmp_path / "taken"
    settings = {**SETTINGS, "limits__silence_seconds": 2}
    process = start(COPY_SCRATCH, overrides(tmp_path, "taken", **settings))

    def joined(status: Status) -> dict[str, float]:
        """Of those that are not the run's own: what each has done so far, in requests or groups."""
        others = [p for p in status.processes if p.role in ("gserver", "rollout") and p.index and p.state == "live"]
        key = {"gserver": "requests_total", "rollout": "groups_done_total"}
        return {p.role: p.stats.get(key[p.role], 0.0) for p in others}

    def give() -> list[Command]:
        config = str(run_dir / "config.toml")
        return [by_hand(role, config, "--manager", url, "--count", "1") for role in ("gserver", "rollout")]

    try:
        url = manager_of(run_dir)
        for _ in range(2):
            given = give()
            wait_for_status(url, lambda status: len(joined(status)) == 2 and min(joined(status).values()) > 0)
            for pool in given:
                pool.end()
            wait_for_status(url, lambda status: not joined(status))
        given = give()
        wait_for_status(url, lambda status: len(joined(status)) == 2)
        goes_on(run_dir)
        process.signal(signal.SIGINT)
        assert process.exit_code(seconds=60) == 130, process.output
    finally:
        process.end()
    assert_in_order(run_dir)


@pytest.mark.parametrize("signalled", ["trainer", "controller"])
def test_a_pool_that_is_asked_to_end_has_the_run_saved_before(tmp_path: Path, by_hand: ByHand, signalled: str) -> None:
    """As a cluster does it, which starts all again where the trainer or the controller ends with an error."""
    run_dir = tmp_path / "by-hand"
    settings = overrides(tmp_path, "by-hand", **QUICK, run__total_train_steps=4000)
    controller = by_hand("controller", str(COPY_SCRATCH), *settings, "--port", "0")
    listens = re.compile(r"listens at (http://\S+:\d+);")
    until(lambda: listens.search(controller.said), "the controller's address", seconds=60)
    url = listens.search(controller.said)[1]  # type: ignore[index]
    pools = {
        role: by_hand(role, str(COPY_SCRATCH), *settings, "--manager", url)
        for role in ("gserver", "trainer", "rollout")
    } | {"controller": controller}
    wait_for_steps(run_dir, 3)
    pools[signalled].signal(signal.SIGTERM)
    codes = {role: process.exit_code(seconds=60) for role, process in pools.items()}
    assert codes == {"gserver": 0, "rollout": 0, "trainer": 1, "controller": 1} | {signalled: 128 + signal.SIGTERM}, {
        role: process.output[-2000:] for role, process in pools.items()
    }
    (checkpoint,) = progress.checkpoints(run_dir)
    made = progress.read(checkpoint).policy_version
    assert made == len(steps(run_dir)) >= 3
    assert summary(run_dir)["message"] == f"stopped on request after step {made}"
    assert "the command that started the run, or those of all its pools, with --resume" in controller.said
    wait_until_gone(run_dir, seconds=10)
