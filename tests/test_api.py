"""Runs from Python: settings, the course of a run, and its end in all ways."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import streamrl
from streamrl.api import Run
from streamrl.config import from_dict
from streamrl.errors import ConfigError, StreamRLError
from tests.e2e.harness import COPY_SCRATCH, ROOT
from tests.processes import assert_ended, below

SMALL: dict[str, Any] = {
    "trainer.batch_groups": 8,
    "rollout.group_size": 4,
    "metrics.plots": False,
    "metrics.sinks": [],
    "run.name": "trial",
}


def reward(response: Any, prompt: Any) -> float:
    return 0.25 + 0.5 * (response.text.strip() == prompt.answer)


def crashes(response: Any, prompt: Any) -> float:
    raise RuntimeError("no reward today")


def settings(tmp_path: Path, **others: Any) -> dict[str, Any]:
    return SMALL | {"run.dir": str(tmp_path)} | {key.replace("__", "."): value for key, value in others.items()}


# --- settings ---


def test_shortcuts_and_functions_are_settings(tmp_path: Path) -> None:
    run = Run(
        COPY_SCRATCH,
        reward=reward,
        max_staleness=2,
        lr=1e-4,
        group_size=6,
        data=[{"prompt": "12=", "answer": "12"}],
        overrides={"run.dir": tmp_path, "metrics.hook": reward, "algorithm.loss": "cispo"},
    )
    config = run.config
    assert config.rollout.reward.function == config.metrics.hook == "tests.test_api:reward"
    assert (config.staleness.max_staleness, config.trainer.lr, config.rollout.group_size) == (2, 1e-4, 6)
    assert (config.data.source, config.algorithm.loss) == ("jsonl", "cispo")
    assert Path(config.data.path).read_text() == '{"prompt":"12=","answer":"12"}\n'
    again = Run(config, data=[{"prompt": "12=", "answer": "12"}])
    assert again.config == config
    assert Run({"model": {"path": "scratch", "scratch": {}}}, model="/models/mine").config.model.scratch is None


def test_a_configuration_is_a_file_a_mapping_or_a_config(tmp_path: Path) -> None:
    config = from_dict({"trainer": {"lr": 0.5}})
    assert Run(config).config == Run({"trainer": {"lr": 0.5}}).config == Run(lr=0.5).config == config


def own_reward(response: Any, prompt: Any) -> float:
    return 0.0


def test_a_task_takes_functions_and_overrides() -> None:
    given = {"tasks": [{"name": "math", "reward": {"function": own_reward}}, {"name": "tools"}]}
    config = Run(given, overrides={"tasks.math.weight": 3}).config
    assert config.tasks[0].reward["function"] == f"{__name__}:own_reward"
    assert [task.weight for task in config.tasks] == [3, 1]
    assert given["tasks"][0] == {"name": "math", "reward": {"function": own_reward}}, (
        "the caller's mapping is unchanged"
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"lr": -1.0}, r"trainer\.lr"),
        ({"overrides": {"trainer.lrr": 1.0}}, r"unknown key trainer\.lrr; did you mean"),
        ({"data": "nowhere.csv"}, r"data = 'nowhere\.csv': there is no such"),
        ({"data": [1]}, "row 0 is a int, not a mapping"),
        ({"data": 3}, "int is neither rows"),
        ({"reward": lambda response, prompt: 0.0}, r"rollout\.reward\.function: .*lambda"),
        ({"agent": "my:agent", "workflow": "my:Workflow"}, "give one of agent, workflow"),
    ],
)
def test_wrong_settings_are_refused_before_anything_starts(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Run(**given)


def test_the_names_of_the_package() -> None:
    assert streamrl.Run is Run
    assert {"Config", "Ledger", "Run", "objective", "pack", "run"} <= set(dir(streamrl))
    with pytest.raises(AttributeError, match="no attribute 'Rum'"):
        _ = streamrl.Rum  # type: ignore[attr-defined]


def test_the_pieces_on_the_page_work_without_a_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(), re.DOTALL)
    assert (ROOT / "examples" / "from_python.py").read_text() in blocks
    for block in blocks[-2:]:
        exec(compile(block, "docs/python.md", "exec"), {"__name__": "page"})


# --- runs ---


async def test_a_run_is_watched_and_steered_within_an_event_loop(tmp_path: Path) -> None:
    """Within a running loop and outside the main thread."""

    before = below()

    def work() -> tuple[list[streamrl.Step], Run, set[int]]:
        steps = []
        chosen = settings(tmp_path, run__total_train_steps=200, run__stop_at_reward=2.0)
        with Run(COPY_SCRATCH, reward=reward, max_staleness=1, overrides=chosen) as run:
            for step in run:
                steps.append(step)
                if step.policy_version == 2:
                    assert run.max_staleness == 1
                    run.max_staleness = 3
                    assert run.max_staleness == 3
                    run.pause()
                    time.sleep(0.5)
                    assert run.status().state == "running"
                    run.resume()
                    model = run.save(tmp_path / "model")
                    assert (model / "config.json").is_file()
                    pids = below() - before
                if step.policy_version >= 6:
                    break
        return steps, run, pids

    steps, run, pids = await asyncio.to_thread(work)
    assert [step.policy_version for step in steps] == list(range(1, len(steps) + 1))
    assert all(0.25 <= step.reward <= 0.75 for step in steps)
    assert len(pids) >= 4
    assert_ended(pids)
    assert run.dir == tmp_path / "trial"
    assert run.summary["state"] == "stopped"
    assert run.summary["steps"] >= 6
    assert {row["step"] for row in run.rollouts(3)} == {3}
    with pytest.raises(StreamRLError, match="has ended"):
        run.status()


def test_a_run_that_fails_raises_its_error(tmp_path: Path) -> None:
    with pytest.raises(StreamRLError, match="no reward today"):
        streamrl.run(COPY_SCRATCH, reward=crashes, overrides=settings(tmp_path, rollout__on_failed_sibling="stop"))


SCRIPT = """
import streamrl

BONUS = 0.25


def reward(response, prompt) -> float:
    return BONUS + (response.text.strip() == prompt.answer)


def loss(tokens: streamrl.Tokens):
    return -tokens.advantages * tokens.logprobs


def advantage(rewards, episodes):
    return rewards - rewards.mean()


def wanted(group) -> bool:
    return group.size == 4


def groups_of_step(report, batch) -> dict[str, float]:
    return {{"own/groups": len(batch)}}


def schedule(update, total_updates) -> float:
    return 0.5


hooks = {{
    "algorithm.loss": loss,
    "algorithm.advantage": advantage,
    "rollout.filter": wanted,
    "metrics.hook": groups_of_step,
    "trainer.optimizer.schedule": schedule,
    "trainer.optimizer.warmup_steps": 0,
}}
with streamrl.Run({config!r}, reward=reward, overrides={overrides!r} | hooks) as run:
    for step in run:
        print(step.policy_version, step.reward >= BONUS, step.metrics["own/groups"], step.metrics["lr"], flush=True)
"""


KILLED = """
import time

import streamrl

with streamrl.Run({config!r}, overrides={overrides!r}) as run:
    run.status()
    print("begun", flush=True)
    time.sleep(600)
"""


@contextmanager
def running(tmp_path: Path, text: str, *, prints: str) -> Iterator[subprocess.Popen[str]]:
    """Run a script of a user, which `prints` a line when its run is under way; all its processes end with it. `text`
    names its settings `config` and `overrides`."""
    script = tmp_path / "script.py"
    overrides = settings(tmp_path, run__total_train_steps=500, run__stop_at_reward=2.0)
    script.write_text(text.format(config=str(COPY_SCRATCH), overrides=overrides))
    with subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line == prints, line + process.stdout.read()
        pids = below(process.pid)
        assert len(pids) >= 4
        yield process
    assert_ended(pids)


def test_a_script_runs_with_its_own_functions_until_it_is_interrupted(tmp_path: Path) -> None:
    with running(tmp_path, SCRIPT, prints="1 True 8.0 0.0005\n") as process:
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        assert "KeyboardInterrupt" in process.stdout.read()


def test_no_process_outlives_a_script_that_is_killed(tmp_path: Path) -> None:
    with running(tmp_path, KILLED, prints="begun\n") as process:
        process.kill()
