"""Held-out prompts through real gservers: the embedded engine and the simulated one, greedy and sampled."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from streamrl.config import Config, from_dict
from streamrl.gserver.server.process import serve as serve_gserver
from streamrl.models import initial_checkpoint
from tests.rollout.evaluating import evaluating


def configure(folder: Path, engine: str, **evaluation: Any) -> Config:
    return from_dict(
        {
            "run": {"dir": str(folder), "device": "cpu"},
            "model": {"path": "scratch", "scratch": {"alphabet": "0123456789= ", "hidden_size": 32}},
            "data": {"source": "python", "path": "streamrl.rollout.tasks:copy_digits", "max_prompt_tokens": 16},
            "rollout": {
                "reward": {"function": "streamrl.rollout.tasks:hash_reward"},
                "sampling": {"max_new_tokens": 6},
            },
            "gserver": {
                "engine": engine,
                "dtype": "float32",
                "max_context": 32,
                "simulation": {"token_seconds": 0.001, "mean_length": 3.0},
            },
            "limits": {"heartbeat_seconds": 0.05},
            "evaluation": {"every": "1 step", "prompts": 8, "pass_reward": 0.5} | evaluation,
        }
    )


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return initial_checkpoint(configure(folder, "embedded"), cache=folder)


@pytest.mark.parametrize("engine", ["embedded", "simulated"])
@pytest.mark.parametrize("sampled", [False, True])
async def test_greedy_and_sampled(tmp_path: Path, model_dir: Path, engine: str, sampled: bool) -> None:
    how = {"samples": 4, "temperature": 1.0} if sampled else {}
    config = configure(tmp_path, engine, **how)
    async with evaluating(config, model_dir) as on:
        gserver = asyncio.create_task(serve_gserver(config, manager_url=on.run.url, model_dir=model_dir))
        first, second = await on.evaluate(1), await on.evaluate(2)
        await on.finish()
        async with asyncio.timeout(30):
            await gserver
    for report in (first, second):
        assert (report.prompts, report.rejected, report.samples) == (8, 0, 4 if sampled else 1)
        assert (report.oldest_version, report.newest_version) == (0, 0)
        assert report.response_length_mean is not None
        assert 1 <= report.response_length_mean <= 6
        assert 0 <= report.pass_at[1] <= max(report.pass_at.values()) <= 1
    # the weights are the same, and so are the draws: a change between two evaluations is one of the policy
    assert first.reward_mean == pytest.approx(second.reward_mean)
    assert first.pass_at == pytest.approx(second.pass_at)
