"""Whole runs with agents: one that learns while a worker dies, a program, a harness elsewhere, a verifiers taskset."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import openai
import pytest

from examples import guess_number
from streamrl.gserver.sglang.serving import reserved_port
from tests.e2e.harness import (
    ROOT,
    Command,
    assert_exactly_once,
    assert_none_missing,
    overrides,
    process_of,
    run,
    start,
    steps,
    summary,
    until,
    wait_for_steps,
    wait_until_gone,
)
from tests.processes import lives
from tests.rollout.agents.installed import TASKSETS, needs_verifiers

GUESS_NUMBER = ROOT / "examples" / "guess_number.toml"
EASY: dict[str, Any] = {"data__args__highest": 3, "data__args__guesses": 2, "trainer__save_at_end": "false"}


@pytest.mark.timeout(900)
def test_an_agent_of_several_turns_learns_though_a_rollout_worker_dies_in_mid_episode(tmp_path: Path) -> None:
    settings = EASY | {
        "staleness__max_staleness": 4,
        "staleness__over_age": "wait",
        "rollout__workers": 2,
        "restarts__delay_seconds": 0.1,
        "limits__silence_seconds": 2,
        "trainer__batch_groups": 32,
        "run__total_train_steps": 120,
        "run__stop_at_reward": 0.85,
    }
    run_dir = tmp_path / "guess"
    process = start(GUESS_NUMBER, overrides(tmp_path, "guess", **settings))
    wait_for_steps(run_dir, 3)
    worker = process_of(run_dir, "rollout")
    agents = [child.pid for child in worker.children(recursive=True)]
    assert agents
    worker.kill()
    until(lambda: not any(map(lives, agents)), "the end of the agents of the worker that died", seconds=30)
    process.ends_well(seconds=600)
    rewards = [step["metrics"]["reward_mean"] for step in steps(run_dir)]
    assert sum(rewards[:3]) / 3 < 0.35
    assert sum(rewards[-3:]) / 3 > 0.8, rewards
    assert_exactly_once(run_dir)
    assert_none_missing(run_dir)
    wait_until_gone(run_dir, seconds=10)


SHORT: dict[str, Any] = EASY | {
    "rollout__agent__function": "''",
    "rollout__group_size": 2,
    "trainer__batch_groups": 4,
    "run__total_train_steps": 3,
    "run__stop_at_reward": 2.0,
    "staleness__max_staleness": 1,
}


def assert_played(run_dir: Path) -> None:
    """Three steps on episodes of agents, nothing lost or doubled; each is a conversation of one or two answers."""
    assert_exactly_once(run_dir)
    assert summary(run_dir)["steps"] == 3
    for step in steps(run_dir):
        figures = step["metrics"]
        assert figures["groups"] == 4
        assert 8 <= figures["tokens_trained"] <= 16


@pytest.mark.timeout(300)
def test_a_program_is_trained_as_an_agent(tmp_path: Path) -> None:
    program = [sys.executable, str(ROOT / "tests" / "e2e" / "cli_agent.py"), "--guesses", "{guesses}"]
    run(GUESS_NUMBER, overrides(tmp_path, "program", rollout__agent__command=json.dumps(program), **SHORT))
    assert_played(tmp_path / "program")


@pytest.mark.timeout(300)
def test_a_harness_elsewhere_is_trained_as_an_agent(tmp_path: Path) -> None:
    run_dir = tmp_path / "elsewhere"
    with reserved_port("127.0.0.1") as reserved:
        port = reserved.getsockname()[1]
        settings = SHORT | {"rollout__agent__remote": "true", "rollout__agent__port": port}
        process = start(GUESS_NUMBER, overrides(tmp_path, "elsewhere", **settings))
        try:
            played = asyncio.run(play_elsewhere(f"http://127.0.0.1:{port}", process))
            process.ends_well()
        finally:
            process.end()
    assert_played(run_dir)
    assert played >= 24


async def play_elsewhere(url: str, run: Command) -> int:
    """Play episodes for as long as the run goes, eight at a time; return how many were scored."""
    scored = 0

    async def play(session: aiohttp.ClientSession) -> None:
        nonlocal scored
        while run.running:
            try:
                async with session.post(f"{url}/episodes") as answer:
                    if answer.status == 204:
                        continue
                    lease = await answer.json()
                policy = SimpleNamespace(**{name: lease[name] for name in ("base_url", "api_key", "model")})
                score = await guess_number.play(lease["task"], policy)
                shown = {"Authorization": f"Bearer {lease['api_key']}"}
                async with session.post(lease["score_url"], json={"score": score}, headers=shown) as answer:
                    scored += answer.status == 200
            except (aiohttp.ClientError, openai.APIError):  # before the rollout worker listens, or after the end
                await asyncio.sleep(0.2)

    async with aiohttp.ClientSession() as session:
        await asyncio.gather(*(play(session) for _ in range(8)))
    return scored


ALPHABET = "".join(sorted({*"0123456789+?", *"Hi.", *"Sure?", *"<|im_start|>assistant", *"</think>"})) + "\\n"
"""Of prompts; and `renderers` looks for the beginning of ChatML's answers, and for reasoning, in all models."""
VERIFIERS = """
[model]
path = "scratch"
[model.scratch]
alphabet = "{alphabet}"
hidden_size = 32
layers = 1
heads = 2
kv_heads = 1
head_dim = 16
max_position_embeddings = 64
[data]
args = {{ n = 20 }}
max_prompt_tokens = 16
[rollout]
group_size = 2
[rollout.agent]
verifiers = "adding"
python = "{python}"
memory_mb = 0
[rollout.sampling]
max_new_tokens = 2
[gserver]
dtype = "float32"
max_context = 48
[trainer]
batch_groups = 4
dtype = "float32"
save_at_end = false
[evaluation.data]
args = {{ n = 3, first = 40 }}
"""


@pytest.mark.timeout(600)
def test_a_taskset_of_verifiers_is_trained_and_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "verifiers.toml"
    config.write_text(VERIFIERS.format(python=needs_verifiers(), alphabet=ALPHABET))
    monkeypatch.setenv("PYTHONPATH", str(TASKSETS))
    settings = {"run__total_train_steps": 3, "evaluation__at_end": "true"}
    run(config, overrides(tmp_path, "verifiers", **settings), seconds=400)
    folder = tmp_path / "verifiers"
    assert_exactly_once(folder)
    found = summary(folder)
    assert found["groups_trained"] == 12
    assert (found["calls_per_episode"], found["agent_metrics"]["turns"]) == (3.0, 3.0)
    # the template leaves out the end that the model may have sampled: then the second turn is written anew
    assert 2 <= found["trajectories_per_episode"] <= 3
    assert 0 <= found["agent_metrics"]["exact"] <= 1
    (line,) = (folder / "evaluations.jsonl").read_text().splitlines()
    report = json.loads(line)
    assert (report["policy_version"], report["prompts"], report["rejected"]) == (3, 3, 0)
