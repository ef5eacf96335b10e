"""The task pool: agents for a loop that generates and trains by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow.parquet as pq
import pytest

from examples import single_controller
from streamrl import Generation, config
from streamrl.errors import AgentError, ConfigError, DataError
from streamrl.task_pool import BufferedPrompt, ServerWithTask, create_and_launch_task_pool

SETTINGS: dict[str, Any] = {
    "model": {"path": "scratch", "scratch": {"alphabet": "0123456789!?", "hidden_size": 32, "layers": 1}},
    "rollout": {"group_size": 2, "sampling": {"max_new_tokens": 4, "stop": ["!"]}},
    "data": {"max_prompt_tokens": 8},
    "gserver": {"max_context": 64},
}
TASK = {"question": "12", "answer": "3"}
SECONDS = 60.0


def settings(agent: str, **more: Any) -> config.Config:
    agents = {"function": f"tests.pool_agents:{agent}", "timeout_seconds": 20.0, **more}
    return config.from_dict({**SETTINGS, "rollout": SETTINGS["rollout"] | {"agent": agents}}, where="test")


def sampled(tokens: list[int], version: int) -> Generation:
    return Generation(tokens, [-0.25] * len(tokens), [version] * len(tokens), "length")


async def answered(pool: ServerWithTask, count: int, *, version: int) -> list[str]:
    """Wait for `count` prompts, and answer the n-th of them with the token n; return their episodes, sorted."""
    prompts = []
    async with asyncio.timeout(SECONDS):
        while len(prompts) < count:
            prompts += await pool.prompts.sample(count - len(prompts), seconds=1.0)
    prompts.sort(key=lambda prompt: prompt.episode)
    pool.rounds.put_batch(prompts, [sampled([number], version) for number in range(count)])
    return [prompt.episode for prompt in prompts]


async def first_prompts(pool: ServerWithTask) -> list[BufferedPrompt]:
    async with asyncio.timeout(SECONDS):
        while not (prompts := await pool.prompts.sample(1)):
            pass
    return prompts


async def finished(pool: ServerWithTask) -> None:
    async with asyncio.timeout(SECONDS):
        while pool.unfinished:
            assert await pool.prompts.sample(1, seconds=0.1) == []


async def test_rounds_become_groups_with_exact_tokens_once_all_episodes_are_scored() -> None:
    async with create_and_launch_task_pool(settings("two_rounds")) as pool:
        seq = pool.enqueue_task(TASK)
        first = await answered(pool, 2, version=3)
        assert first == ["0.0", "0.1"]
        assert pool.rounds.sample(1) is None
        assert await answered(pool, 2, version=4) == first
        await finished(pool)
        found = pool.rounds.sample(1)
        assert pool.rounds.sample(1) is None
    assert found is not None
    (group,) = found
    assert (group.seq, group.rewards.tolist()) == (seq, [0.0, 1.0])
    for start, end in (group.bounds(index) for index in range(2)):
        mask = group.packed_loss_mask[start:end]
        assert mask.sum() == 2
        assert group.packed_policy_versions[start:end][mask].tolist() == [3, 4]
        assert group.packed_behavior_logprobs[start:end][mask].tolist() == [-0.25, -0.25]


async def test_the_loop_may_score_an_episode_itself() -> None:
    async with create_and_launch_task_pool(settings("unscored")) as pool:
        pool.enqueue_task(TASK)
        first, second = await answered(pool, 2, version=0)
        with pytest.raises(DataError, match=r"7\.0"):
            pool.rounds.notify_score("7.0", 1.0)
        with pytest.raises(DataError, match="rewards"):
            pool.rounds.notify_score(first, 1.0, rewards={"9": 1.0})
        pool.rounds.notify_score(second, 0.5)
        pool.rounds.notify_score(first, -1.0)
        await finished(pool)
        found = pool.rounds.sample(1)
    assert found is not None
    assert found[0].rewards.tolist() == [-1.0, 0.5]


async def test_the_parameters_of_a_request_reach_the_loop() -> None:
    async with create_and_launch_task_pool(settings("two_rounds")) as pool:
        pool.enqueue_task(TASK)
        prompts = await first_prompts(pool)
    params = prompts[0].params
    assert (params.max_new_tokens, params.stop) == (1, ["!", "7"])


async def test_a_failed_task_is_raised_and_the_next_one_succeeds() -> None:
    async with create_and_launch_task_pool(settings("failing_once")) as pool:
        pool.enqueue_task(TASK | {"fails": True})
        await finished(pool)
        with pytest.raises(AgentError, match="no such luck"):
            pool.rounds.sample(1)
        with pytest.raises(DataError, match="question"):
            pool.enqueue_task({"answer": "3"})
        pool.enqueue_task(TASK)
        await answered(pool, 2, version=0)
        await finished(pool)
        assert pool.rounds.sample(1) is not None


async def test_responses_without_log_probabilities_or_for_no_prompt_are_refused() -> None:
    async with create_and_launch_task_pool(settings("two_rounds")) as pool:
        with pytest.raises(DataError, match="1 responses for 0 prompts"):
            pool.rounds.put_batch([], [sampled([1], 0)])
        pool.enqueue_task(TASK)
        prompts = await first_prompts(pool)
        for wrong in (Generation([1, 2], [-0.5], [0, 0], "stop"), Generation([], [], [], "stop")):
            with pytest.raises(DataError, match="response 0"):
                pool.rounds.put_batch(prompts, [wrong])


@pytest.mark.parametrize("agent", [{}, {"remote": True}, {"scored_by": "reward", "function": "a:b"}])
async def test_a_pool_needs_an_agent_that_it_can_start(agent: dict[str, Any]) -> None:
    wrong = config.from_dict({**SETTINGS, "rollout": SETTINGS["rollout"] | {"agent": agent}}, where="test")
    with pytest.raises(ConfigError, match=r"rollout\.agent"):
        async with create_and_launch_task_pool(wrong):
            pass


async def test_the_single_controller_learns(tmp_path: Path) -> None:
    single_controller.write_tasks(tmp_path / "tasks.parquet")
    tasks: Iterator[dict[str, Any]] = cycle(pq.read_table(tmp_path / "tasks.parquet").to_pylist())
    rewards = await single_controller.train(tasks, steps=24)
    assert fmean(rewards[:2]) < 0.4
    assert fmean(rewards[-3:]) > 0.65
