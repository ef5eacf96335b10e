"""One run in which every kind of process dies, pools grow and shrink, and which two resumes bring to its end.

No failure costs a group, doubles one or mixes weights: that is checked over the whole history of the final weights.
"""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from streamrl.records import lineage as lineages
from streamrl.records import progress, snapshots
from streamrl.trainer.replay.plan import stretch
from streamrl.trainer.replay.recording import read_recording
from streamrl.transport.control import Status
from tests.e2e.harness import (
    COPY_SCRATCH,
    SMALL,
    Command,
    assert_exactly_once,
    assert_none_missing,
    assert_rollouts,
    largest_difference,
    manager_of,
    overrides,
    processes_of,
    run,
    start,
    start_command,
    steps,
    summary,
    until,
    wait_for_status,
    wait_for_steps,
    wait_until_gone,
)

MORE = 40
"""Steps that the resumed runs make; before, the run has no end of its own, so that a slow test cannot miss it."""
DEATHS: list[tuple[str, signal.Signals]] = [
    ("controller", signal.SIGKILL),
    ("model-worker", signal.SIGKILL),
    ("gserver", signal.SIGKILL),
    ("rollout", signal.SIGKILL),
    ("reward", signal.SIGKILL),
    ("model-worker", signal.SIGSTOP),
    ("gserver", signal.SIGSTOP),
    ("rollout", signal.SIGSTOP),
]
"""In this order; a stopped process keeps its connections, so only its silence betrays it."""
SETTINGS: dict[str, Any] = SMALL | {
    "run__total_train_steps": 10_000,
    "run__stop_at_reward": 2.0,
    "run__record": "true",
    "staleness__max_staleness": 4,
    "staleness__over_age": "wait",
    "algorithm__kl_coef": 0.01,
    "algorithm__minibatches": 2,
    "rollout__sampling__temperature": 0.8,
    "trainer__snapshot_every_steps": 2,
    "trainer__save_every": "10 steps",
    "trainer__keep_checkpoints": 2,
    "restarts__number": 100,
    "restarts__delay_seconds": 0.01,
    "gserver__count": 2,
    "rollout__workers": 2,
    "limits__silence_seconds": 4,
    "weights__mode": "collective",
    "weights__pause_mode": "abort",
    "weights__bucket_mb": 0.2,
    "evaluation__every": "20 steps",
    "evaluation__at_end": "true",
    "evaluation__prompts": 16,
}
TWO_SHARDS = ["trainer.data_parallel=2", "trainer.shard=true"]
ByHand = Callable[..., Command]


@pytest.fixture
def by_hand() -> Iterator[ByHand]:
    """Start a command that ends with the test."""
    started: list[Command] = []

    def begin(*words: str) -> Command:
        started.append(start_command(words))
        return started[-1]

    yield begin
    for process in started:
        process.end()


def living(run_dir: Path, role: str) -> list[psutil.Process]:
    """The processes of `role` that are not stopped; reward processes are children of rollout workers."""
    found = [p for p in processes_of(run_dir) if ("rollout" if role == "reward" else role) in p.cmdline()]
    if role == "reward":
        found = [child for worker in found for child in worker.children()]
    return [process for process in found if process.status() != psutil.STATUS_STOPPED]


def strike(run_dir: Path, role: str, number: signal.Signals) -> None:
    """Send a signal to a process of `role` as soon as there is one."""

    def sent() -> bool:
        try:
            found = living(run_dir, role)
            if found:
                random.choice(found).send_signal(number)
        except psutil.Error:  # it has just ended
            return False
        return bool(found)

    until(sent, f"a process of {role}", seconds=120)


def make_more(run_dir: Path, count: int) -> None:
    wait_for_steps(run_dir, len(steps(run_dir)) + count)


def live(status: Status) -> dict[str, dict[str, float]]:
    """Name → counters of each live process."""
    return {f"{p.role}/{p.index}": p.stats for p in status.processes if p.state == "live"}


def change_pools(run_dir: Path, by_hand: ByHand) -> None:
    """A gserver and a rollout worker join and do some work; two leave in order; one that joined is killed."""
    url, config = manager_of(run_dir), str(run_dir / "config.toml")
    before = set(live(wait_for_status(url, lambda status: len(live(status)) >= 6)))
    joined = {role: by_hand(role, config, "--manager", url) for role in ("gserver", "rollout")}
    counters = {"gserver": "requests_total", "rollout": "groups_done_total"}

    def both_worked(status: Status) -> bool:
        new = {name.split("/")[0]: stats for name, stats in live(status).items() if name not in before}
        return all(new.get(role, {}).get(counter, 0) > 0 for role, counter in counters.items())

    wait_for_status(url, both_worked)
    drained = {"gserver/0", "rollout/0"}
    for name in sorted(drained):
        by_hand("drain", url, name).ends_well(seconds=90)
    wait_for_status(url, lambda status: drained.isdisjoint(f"{p.role}/{p.index}" for p in status.processes))
    joined["gserver"].end()
    joined["rollout"].signal(signal.SIGTERM)
    joined["rollout"].ends_well(seconds=90)
    make_more(run_dir, 6)


def interrupt(process: Command, run_dir: Path) -> None:
    """Ctrl-C: the run writes a checkpoint, ends, and prints how it is resumed."""
    process.signal(signal.SIGINT)
    assert process.exit_code(seconds=90) == 130, process.output[-4000:]
    wait_until_gone(run_dir, seconds=10)
    made = len(steps(run_dir))
    assert progress.read(progress.checkpoints(run_dir)[-1]).policy_version == made
    assert summary(run_dir)["state"] == "stopped"
    assert process.output.strip().endswith("--resume")


@pytest.mark.timeout(900)
def test_a_run_reaches_its_last_step_whatever_dies_joins_or_leaves(tmp_path: Path, by_hand: ByHand) -> None:
    run_dir = tmp_path / "chaos"
    settings = overrides(tmp_path, "chaos", **SETTINGS)
    process = start(COPY_SCRATCH, [*settings, *TWO_SHARDS])
    wait_for_steps(run_dir, 5)
    for role, number in DEATHS:
        assert process.running, process.output[-6000:]
        strike(run_dir, role, number)
        make_more(run_dir, 5)
    change_pools(run_dir, by_hand)
    interrupt(process, run_dir)
    rewinds = lineages.read(run_dir)
    assert {rewind.cause.split("/")[0] for rewind in rewinds} == {"controller", "model_worker"}
    assert max(rewind.steps_lost for rewind in rewinds) <= 8, "each second step has a snapshot in memory"
    assert max(rewind.groups_kept for rewind in rewinds) > 0
    before = steps(run_dir)
    saved, last = len(before), len(before) + MORE

    settings.append(f"run.total_train_steps={last}")
    process = start(COPY_SCRATCH, [*settings, "--resume"])
    wait_for_steps(run_dir, saved + 4)
    assert steps(run_dir)[:saved] == before
    process.end()  # the launcher alone: its processes end by themselves
    wait_until_gone(run_dir, seconds=60)
    stopped = time.time()

    run(COPY_SCRATCH, [*settings, "--resume"])
    assert_exactly_once(run_dir)
    assert_none_missing(run_dir)
    assert_rollouts(run_dir, groups=4)
    assert [step["step"] for step in steps(run_dir)] == list(range(1, last + 1))
    assert any(step["spans"][0][1] > stopped for step in steps(run_dir))
    assert largest_difference(run_dir) < 1e-4, "after each death the tokens are those of the policy of their version"
    assert not snapshots.folder_of(run_dir).exists()
    versions = [json.loads(line)["policy_version"] for line in (run_dir / "evaluations.jsonl").read_text().splitlines()]
    assert versions == sorted(set(versions))
    assert versions[-1] == last
    recorded = read_recording(run_dir)
    assert stretch(recorded)[1] == saved, "a recording is replayed up to the change of layout"
    for number in (1, saved, saved + 1, last):
        seqs = sorted(group.seq for rank in recorded.load(number) for group in rank.groups)
        assert seqs == sorted(steps(run_dir)[number - 1]["seqs"])

    done = start(COPY_SCRATCH, [*settings, "--resume"])
    assert done.exit_code(seconds=60) == 2, "the run is done"
