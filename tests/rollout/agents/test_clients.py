"""A framework and Anthropic's client as agents that use a tool, from their first call to the trajectory."""

from __future__ import annotations

from itertools import product

import pytest

from streamrl.config import AgentConfig
from streamrl.rollout.activity import Activity
from streamrl.rollout.agents.workflow import AgentWorkflow
from tests.rollout.agents.test_episodes import play_in, playing
from tests.rollout.sessions import parts

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 1}}</tool_call>'


@pytest.mark.parametrize("name", ["with_pydantic_ai", "with_pydantic_ai_and_anthropic", "with_anthropic"])
async def test_an_agent_with_a_tool_is_one_conversation(name: str) -> None:
    """However it asks, and whether or not the policy thinks: all in one process, since to import a client takes much
    longer than an episode."""
    config = AgentConfig(function=f"tests.rollout.agents.client_agents:{name}", timeout_seconds=120, memory_mb=0)
    async with playing(config) as workflow:
        for thought, question in product(("", "<think>hm</think>"), ("whole", "stream")):
            try:
                await converse(workflow, thought, question)
            except BaseException as error:
                error.add_note(f"asked for the {question}; thought: {thought or 'none'}")
                raise


async def converse(workflow: AgentWorkflow, thought: str, question: str) -> None:
    """One episode, in which the agent calls its tool once."""
    activity = Activity(idle="nothing")
    said = f"{thought}Let me see. {CALL}<|im_end|>", "2.<|im_end|>"
    (found,) = await play_in(workflow, question, *said, activity=activity, tokens=200)
    opening, call, result, answer = parts(found)
    assert opening == (False, "{system\nUse the tool.}\n{user\n1+1?}\n{assistant\n")
    assert call == (True, f"{thought}Let me see. {CALL}}}")
    assert result == (False, "\n{tool\n2}\n{assistant\n")
    assert answer == (True, "2.}")
    assert (found.reward, found.turns) == (1.0, 2)
    assert activity.stats()["agent_rewritten_total"] == 0
