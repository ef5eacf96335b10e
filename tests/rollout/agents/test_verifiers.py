"""A taskset of verifiers is listed and played as it is, in an environment of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from streamrl.config import AgentConfig, Config, DataConfig, RolloutConfig
from streamrl.errors import AgentError, ConfigError
from streamrl.rollout.activity import Activity
from streamrl.rollout.agents.gateway import Gateway
from streamrl.rollout.agents.rendering import TemplateRenderer
from streamrl.rollout.agents.runner import agents_of
from streamrl.rollout.agents.workflow import AgentWorkflow, EpisodeTable
from streamrl.rollout.data import PromptSource
from tests.rollout.agents.installed import TASKSETS, needs_verifiers
from tests.rollout.sessions import CHAT, parts, session

TASKSET = "adding"


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> AgentConfig:
    monkeypatch.setenv("PYTHONPATH", str(TASKSETS))
    return AgentConfig(verifiers=TASKSET, python=needs_verifiers(), memory_mb=0, timeout_seconds=120)


def config_of(agent: AgentConfig, **args: int) -> Config:
    return Config(rollout=RolloutConfig(agent=agent), data=DataConfig(args=args, shuffle=False, size=50))


@asynccontextmanager
async def playing(agent: AgentConfig, folder: Path) -> AsyncIterator[AgentWorkflow]:
    CHAT.save(folder)
    agents = agents_of(config_of(agent), tokenizer=folder)
    table = EpisodeTable()
    gateway = Gateway(table, model="policy")
    try:
        await agents.start()
        url = await gateway.start()
        yield AgentWorkflow(
            agent,
            agents=agents,
            gateway=gateway,
            url=url,
            episodes=table,
            renderer=TemplateRenderer(CHAT),
            model="policy",
        )
    finally:
        await gateway.close()
        await agents.close()


async def test_tasks_are_rows_which_are_played_and_each_branch_is_trained(agent: AgentConfig, tmp_path: Path) -> None:
    prompts = PromptSource.open(config_of(agent, n=60), CHAT)
    assert len(prompts) == 50  # data.size
    assert [prompts.prompt(seq).messages for seq in (0, 2, 50)] == [
        [{"role": "user", "content": f"{i}+{i}?"}] for i in (1, 3, 1)
    ]
    assert prompts.prompt(2).metadata == {"taskset": TASKSET, "args": {"n": 60}, "index": 2}

    activity = Activity(idle="nothing")
    said = ["Hi<|im_end|>", "4<|im_end|>", "6<|im_end|>"]
    async with playing(agent, tmp_path) as workflow:
        async with session(*said, rewards=None, activity=activity) as (made, _):
            found = await workflow.run(prompts.prompt(2), made)
        assert [one.reward for one in found] == [1.0, 1.0]
        assert [parts(one) for one in found] == [
            [(False, "{user\nHi.}\n{assistant\n"), (True, "Hi}")],
            [
                (False, "{user\n3+3?}\n{assistant\n"),
                (True, "4}"),
                (False, "\n{user\nSure?}\n{assistant\n"),
                (True, "6}"),
            ],
        ]
        assert [sorted(set(one.policy_versions[one.loss_mask].tolist())) for one in found] == [[0], [1, 2]]
        stats = activity.stats()
        assert (stats["agent_metric_total/exact"], stats["agent_metric_total/turns"]) == (1.0, 3.0)

        bad = msgspec.structs.replace(
            prompts.prompt(0), metadata={"taskset": TASKSET, "args": {"first": 60}, "index": 0}
        )
        async with session(*said, rewards=None) as (made, _):
            with pytest.raises(AgentError, match=r"verifiers: .*such numbers are not added here"):
                await workflow.run(bad, made)
            gone = msgspec.structs.replace(bad, metadata={"taskset": "no_such_set", "args": {}, "index": 0})
            with pytest.raises(AgentError, match="no_such_set"):
                await workflow.run(gone, made)


def test_a_taskset_that_there_is_not_is_named(agent: AgentConfig) -> None:
    with pytest.raises(ConfigError, match=r"(?s)'no_such_set' cannot list its tasks:.*no_such_set"):
        PromptSource.open(config_of(msgspec.structs.replace(agent, verifiers="no_such_set")), CHAT)


def test_an_interpreter_that_there_is_not_is_named() -> None:
    agent = AgentConfig(verifiers=TASKSET, python="/no/such/python")
    with pytest.raises(ConfigError, match=r"rollout.agent.python = '/no/such/python' cannot be started"):
        PromptSource.open(config_of(agent), CHAT)
