"""Runs that use the other roads: several of everything, more MFCs, other pause modes, pools by hand."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import subprocess
import sys
import threading

import psutil

from streamrl import config as configuration
from streamrl.models import ensure_checkpoint
from tests.e2e.harness import (
    COPY_SCRATCH,
    ROOT,
    assert_exactly_once,
    largest_difference,
    overrides,
    processes_of,
    run,
    steps,
    summary,
)

SMALL = {"run__total_train_steps": 6, "trainer__batch_groups": 8, "rollout__group_size": 4}


def test_two_of_everything_with_all_mfcs(tmp_path):
    settings = overrides(
        tmp_path,
        "two",
        **SMALL,
        trainer__data_parallel=2,
        gserver__count=2,
        rollout__workers=2,
        algorithm__kl_coef=0.01,
        algorithm__minibatches=2,
        weights__mode="collective",
        weights__pause_mode="abort",
        weights__bucket_mb=0.2,
        trainer__save_every_steps=3,
    )
    run_dir = tmp_path / "two"
    with watching_sockets(run_dir) as listened:
        run(COPY_SCRATCH, settings)
    assert {role for role, _ in listened} >= {"manager", "gserver", "model-worker", "master"}
    assert all(ipaddress.ip_address(address).is_loopback for _, address in listened), listened
    assert_exactly_once(run_dir)
    names = {name for step in steps(run_dir) for name, _, _ in step["spans"]}
    assert names >= {"wait", "ref_inf", "actor_inf", "actor_train", "publish"}
    assert all("kl" in step["metrics"] for step in steps(run_dir))
    assert steps(run_dir)[0]["metrics"]["sampling_diff_max"] < 1e-4
    assert largest_difference(run_dir) < 1e-4
    saved = sorted(folder.name for folder in (run_dir / "checkpoints").iterdir())
    assert saved == ["final", "step-000003", "step-000006"]


@contextlib.contextmanager
def watching_sockets(run_dir):
    """Which addresses the processes of a run listen at, by role."""
    found, over = set(), threading.Event()

    def watch():
        while not over.wait(0.5):
            for process in processes_of(run_dir):
                with contextlib.suppress(psutil.Error):
                    words = process.cmdline()
                    role = words[words.index("streamrl") + 1]
                    for connection in process.net_connections("inet"):
                        if connection.status == psutil.CONN_LISTEN:
                            found.add((role, connection.laddr.ip))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield found
    finally:
        over.set()
        watcher.join()


def test_multi_turn_conversations_survive_updates(tmp_path):
    settings = overrides(
        tmp_path,
        "turns",
        **SMALL,
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


def _spawn(words, arguments):
    command = [sys.executable, "-m", "streamrl", *words, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)


def test_pools_started_by_hand_form_a_run_that_refuses_another_configuration(tmp_path):
    arguments = overrides(tmp_path, "hand", **SMALL, evaluation__at_end="true", evaluation__prompts=8)
    ensure_checkpoint(configuration.load(COPY_SCRATCH))
    manager = _spawn(["manager", str(COPY_SCRATCH)], arguments)
    processes = [manager]
    try:
        url = None
        said = []
        for line in manager.stdout:
            said.append(line)
            if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                url = found.group()
                break
        assert url, said
        threading.Thread(target=manager.stdout.read, daemon=True).start()
        stranger = _spawn(["rollout", str(COPY_SCRATCH), "--manager", url], [*arguments, "trainer.lr=1e-5"])
        processes.append(stranger)
        output, _ = stranger.communicate(timeout=60)
        assert stranger.returncode == 1
        assert "another configuration" in " ".join(output.split())
        for role in ("rollout", "evaluator", "trainer", "gserver"):
            processes.append(_spawn([role, str(COPY_SCRATCH), "--manager", url], arguments))
        for process in processes[2:]:
            output, _ = process.communicate(timeout=120)
            assert process.returncode == 0, output[-3000:]
        assert manager.wait(30) == 0
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()
                process.wait(30)
    assert_exactly_once(tmp_path / "hand")
    figures = summary(tmp_path / "hand")
    assert figures["steps"] == SMALL["run__total_train_steps"]
    assert [evaluation["policy_version"] for evaluation in figures["evaluations"]] == [figures["steps"]]
