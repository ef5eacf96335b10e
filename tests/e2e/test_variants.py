"""Runs that use the other roads: several of everything, more MFCs, other pause modes, pools by hand."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from streamrl import config as configuration
from streamrl.models import ensure_checkpoint
from tests.e2e.harness import (
    COPY_SCRATCH,
    SMALL,
    Command,
    assert_exactly_once,
    assert_rollouts,
    largest_difference,
    listening_by_role,
    overrides,
    run,
    start_command,
    steps,
    summary,
    until,
)

SIX_STEPS = SMALL | {"run__total_train_steps": 6}


def test_two_of_everything_with_all_mfcs(tmp_path: Path) -> None:
    """Gservers are compared at every version, also with responses of any age, several optimizer steps in a step,
    and another temperature than the one that gservers score at."""
    settings = overrides(
        tmp_path,
        "two",
        **SIX_STEPS,
        trainer__data_parallel=2,
        gserver__count=2,
        rollout__workers=2,
        algorithm__kl_coef=0.01,
        algorithm__minibatches=2,
        staleness__max_staleness=4,
        rollout__sampling__temperature=0.8,
        weights__mode="collective",
        weights__pause_mode="abort",
        weights__bucket_mb=0.2,
        trainer__save_every="3 steps",
    )
    run_dir = tmp_path / "two"
    with watching_sockets(run_dir) as listened:
        run(COPY_SCRATCH, settings, fresh=True)
    assert {role for role, _ in listened} >= {"controller", "gserver", "model-worker"}
    assert all(ipaddress.ip_address(address).is_loopback for _, address in listened), listened
    assert_exactly_once(run_dir)
    assert_rollouts(run_dir, groups=4)
    names = {name for step in steps(run_dir) for name, _, _ in step["spans"]}
    assert names >= {"wait", "ref_inf", "actor_inf", "actor_train", "publish"}
    assert all("kl" in step["metrics"] for step in steps(run_dir))
    assert steps(run_dir)[0]["metrics"]["sampling_diff_max"] < 1e-4
    assert largest_difference(run_dir) < 1e-4
    compared = Counter[str]()
    for metrics in (step["metrics"] for step in steps(run_dir)):
        names = {name for name in metrics if name.startswith("logprob_diff_max/")}
        assert all(metrics[name] < 1e-4 for name in names)
        assert metrics["gservers_compared"] + metrics["gservers_not_compared"] == 2
        assert 0 < metrics["compare_tokens"] < 64
        compared.update(names)
    # On a busy machine the next weights come before one has answered, now and then.
    assert all(compared[f"logprob_diff_max/gserver_{index}"] >= 4 for index in range(2)), compared
    saved = sorted(folder.name for folder in (run_dir / "checkpoints").iterdir())
    assert saved == ["final", "step-000003", "step-000006"]


def test_model_workers_share_rows_in_a_ring(tmp_path: Path) -> None:
    """Of a model with three heads, which two workers cannot share out."""
    settings = overrides(
        tmp_path,
        "ring",
        **SMALL,
        run__total_train_steps=3,
        trainer__context_parallel=2,
        trainer__shard="true",
        model__scratch__heads=3,
        model__scratch__kv_heads=1,
    )
    run(COPY_SCRATCH, settings)
    run_dir = tmp_path / "ring"
    assert len(steps(run_dir)) == 3
    assert_exactly_once(run_dir)
    assert largest_difference(run_dir) < 1e-4


@contextlib.contextmanager
def watching_sockets(run_dir: Path) -> Iterator[set[tuple[str, str]]]:
    """Which addresses the processes of a run listen at, by role."""
    found: set[tuple[str, str]] = set()
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.5):
            found.update((role, address) for role, address, _ in listening_by_role(run_dir))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield found
    finally:
        over.set()
        watcher.join()


def test_multi_turn_conversations_survive_updates(tmp_path: Path) -> None:
    settings = overrides(
        tmp_path,
        "turns",
        **SIX_STEPS,
        weights__mode="collective",
        weights__pause_mode="retract",
        rollout__workflow__name="multi_turn",
        rollout__workflow__args__max_turns=4,
        rollout__workflow__args__feedback="=",
        rollout__sampling__stop_token_ids=list(range(8)),  # most tokens end a turn
        gserver__max_context=64,
    )
    run(COPY_SCRATCH, settings)
    assert_exactly_once(tmp_path / "turns")
    first = steps(tmp_path / "turns")[0]["metrics"]
    assert largest_difference(tmp_path / "turns") < 1e-4
    assert first["sampling_diff_max"] < 1e-4  # what is trained on is what was sampled, over all turns
    assert first["response_length_mean"] > 3  # one turn alone would have less than 2 tokens


def test_pools_started_by_hand_form_a_run_that_refuses_another_configuration(tmp_path: Path) -> None:
    arguments = overrides(tmp_path, "hand", **SIX_STEPS, evaluation__at_end="true", evaluation__prompts=8)
    ensure_checkpoint(configuration.load(COPY_SCRATCH))
    started: list[Command] = []

    def by_hand(role: str, *words: str) -> Command:
        started.append(start_command([role, str(COPY_SCRATCH), *arguments, *words], fresh=True))
        return started[-1]

    try:
        controller = by_hand("controller")
        until(lambda: re.search(r"http://127\.0\.0\.1:\d+", controller.said), "the controller's URL", seconds=180)
        (url,) = set(re.findall(r"http://127\.0\.0\.1:\d+", controller.said))
        stranger = by_hand("rollout", "--manager", url, "trainer.lr=1e-5")
        assert stranger.exit_code() == 1
        assert "another configuration" in stranger.said
        members = [by_hand(role, "--manager", url) for role in ("rollout", "trainer", "gserver")]
        for member in [*members, controller]:
            member.ends_well()
    finally:
        for process in started:
            process.end()
    assert_exactly_once(tmp_path / "hand")
    figures = summary(tmp_path / "hand")
    assert figures["steps"] == SIX_STEPS["run__total_train_steps"]
    assert [evaluation["policy_version"] for evaluation in figures["evaluations"]] == [figures["steps"]]


def test_gservers_that_round_their_weights_differ_from_the_trainer_and_the_comparison_knows(tmp_path: Path) -> None:
    """As with a quantised rollout; training goes on from the log-probabilities of what has sampled."""
    said = run(COPY_SCRATCH, overrides(tmp_path, "int8", **SIX_STEPS, gserver__simulated_int8="true"))
    assert_exactly_once(tmp_path / "int8")
    assert 1e-5 < largest_difference(tmp_path / "int8") < 0.2
    assert "logprob_diff_warning" not in said
