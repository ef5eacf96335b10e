"""Workflows, those that come with streamrl and one of a user's; the session that they work with, and the builder."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.config import RewardConfig, WorkflowConfig
from streamrl.errors import ConfigError, RewardError, WireError
from streamrl.rollout.groups import check_trajectory
from streamrl.rollout.reward.functions import Response
from streamrl.rollout.workflows import TrajectoryBuilder, load_workflow
from streamrl.types import NO_VERSION, Generation, Prompt, Trajectory
from tests.rollout.sessions import CHAT, PROMPT, QUESTION, parts, session


class Rewards:
    """Scores in the order given; remembers what it saw."""

    def __init__(self, *scores: Any) -> None:
        self.seen: list[Response] = []
        self._scores = list(scores)

    async def score(self, response: Response, prompt: Prompt) -> float:
        self.seen.append(response)
        score = self._scores.pop(0)
        if isinstance(score, Exception):
            raise score
        return float(score)


def assert_provenance(trajectory: Trajectory, versions: list[int]) -> None:
    """Sampled tokens carry the engine's log-probability and `versions`, without repetitions, in order; others carry
    nothing."""
    mask = trajectory.loss_mask
    expected = np.where(mask, -trajectory.input_ids / 100, 0.0).astype(np.float32)
    np.testing.assert_array_equal(trajectory.behavior_logprobs, expected)
    assert list(dict.fromkeys(trajectory.policy_versions[mask].tolist())) == versions
    assert (trajectory.policy_versions[~mask] == NO_VERSION).all()
    check_trajectory(trajectory)


async def test_single_turn() -> None:
    rewards = Rewards(0.5)
    async with session("2<|im_end|>", rewards=rewards) as (given_session, engine):
        trajectory = await load_workflow(WorkflowConfig()).run(PROMPT, given_session)
    assert parts(trajectory) == [(False, "{user\n1+1?}\n{assistant\n"), (True, "2}")]
    assert_provenance(trajectory, [0])
    assert (trajectory.reward, trajectory.finish_reason, trajectory.turns) == (0.5, "stop", 1)
    assert rewards.seen == [Response(text="2", finish_reason="stop", output_tokens=2)]
    assert engine.requests[0].input_ids == PROMPT.input_ids


@pytest.mark.parametrize(("tokens", "cost"), [(2, 0.0), (30, 0.0), (31, 0.025), (40, 0.25), (50, 0.5)])
async def test_the_last_tokens_of_a_response_cost_reward(tokens: int, cost: float) -> None:
    shaped = RewardConfig(overlong_tokens=20, overlong_penalty=0.5)
    text = "2" * tokens
    async with session(text, rewards=Rewards(1.0), reward=shaped) as (given_session, _):
        trajectory = await load_workflow(WorkflowConfig()).run(PROMPT, given_session)
    assert trajectory.reward == pytest.approx(1.0 - cost)
    assert given_session.reward_parts == pytest.approx({"function": 1.0, "overlong": -cost})


async def test_multi_turn_until_success() -> None:
    rewards = Rewards(0.1, 0.0, 1.0)
    config = WorkflowConfig(name="multi_turn", args={"max_turns": 5, "feedback": "No.", "discount": 0.5})
    async with session("3<|im_end|>", "4<|im_end|>", "2<|im_end|>", rewards=rewards) as (given_session, engine):
        trajectory = await load_workflow(config).run(PROMPT, given_session)
    assert parts(trajectory) == [
        (False, "{user\n1+1?}\n{assistant\n"),
        (True, "3}"),
        (False, "\n{user\nNo.}\n{assistant\n"),
        (True, "4}"),
        (False, "\n{user\nNo.}\n{assistant\n"),
        (True, "2}"),
    ]
    assert_provenance(trajectory, [0, 1, 2])
    assert (trajectory.reward, trajectory.turns) == (0.25, 3)
    assert [(seen.text, seen.turn) for seen in rewards.seen] == [("3", 1), ("4", 2), ("2", 3)]
    for request in engine.requests:  # tokens in, tokens out: each turn continues the very tokens of the one before
        assert request.input_ids == trajectory.input_ids[: len(request.input_ids or ())].tolist()
    whole = CHAT.render([*QUESTION, {"role": "assistant", "content": "3"}, {"role": "user", "content": "No."}])
    assert engine.requests[1].input_ids == whole  # and the conversation is what the template makes of it


@pytest.mark.parametrize(
    ("texts", "scores", "max_context", "turns", "finish"),
    [
        (["3<|im_end|>", "4<|im_end|>"], [0, 0.2], 400, 2, "stop"),  # max_turns
        (["333"], [0], 400, 1, "length"),  # cut
        (["3<|im_end|>"], [0], 60, 1, "stop"),  # no room for feedback
    ],
)
async def test_multi_turn_ends(
    texts: list[str], scores: list[float], max_context: int, turns: int, finish: str
) -> None:
    config = WorkflowConfig(name="multi_turn")
    async with session(*texts, rewards=Rewards(*scores), max_context=max_context) as (given_session, _):
        trajectory = await load_workflow(config).run(PROMPT, given_session)
    assert (trajectory.turns, trajectory.finish_reason, trajectory.reward) == (turns, finish, scores[-1])
    assert trajectory.loss_mask[-1]


async def test_workflow_of_the_user() -> None:
    config = WorkflowConfig(name="tests.rollout.user_code:Hinted", args={"hint": "hint: "})
    async with session("2<|im_end|>", rewards=Rewards()) as (given_session, engine):
        trajectory = await load_workflow(config).run(PROMPT, given_session)
    assert parts(trajectory)[0] == (False, "hint: {user\n1+1?}\n{assistant\n")
    assert engine.requests[0].sampling_params.max_new_tokens == 3  # type: ignore[union-attr]
    assert (trajectory.reward, trajectory.finish_reason) == (0.5, "hinted")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (WorkflowConfig(name="two_turns"), "known: single_turn, multi_turn"),
        (WorkflowConfig(args={"turns": 2}), "cannot be made.*turns"),
        (WorkflowConfig(name="multi_turn", args={"max_turns": 0}), "max_turns = 0"),
        (WorkflowConfig(name="tests.rollout.user_code:NotAWorkflow"), "coroutine run"),
        (WorkflowConfig(name="tests.rollout.user_code:row"), "must be a class"),
        (WorkflowConfig(name="tests.rollout.user_code:Missing"), "has no Missing"),
        (WorkflowConfig(name="tests.rollout.user_code:Hinted"), "hint"),
    ],
)
def test_workflows_that_cannot_be_made(config: WorkflowConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_workflow(config)


async def test_reward_errors_reject_or_count_as_zero() -> None:
    response = Response(text="", finish_reason="stop", output_tokens=1)
    async with session(rewards=Rewards(RewardError("broken"))) as (given_session, _):
        with pytest.raises(RewardError, match="broken"):
            await given_session.score(response)
    async with session(rewards=Rewards(RewardError("broken")), failures_score_zero=True) as (given_session, _):
        assert await given_session.score(response) == 0.0


PIECES = st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 99), min_size=1, max_size=5)), max_size=6)


@given(prompt=st.lists(st.integers(0, 99), min_size=1, max_size=5), pieces=PIECES)
def test_builder_keeps_the_books(prompt: list[int], pieces: list[tuple[bool, list[int]]]) -> None:
    builder = TrajectoryBuilder()
    builder.append_prompt(prompt)
    versions: list[int] = []  # each token has its own
    for is_sampled, tokens in pieces:
        if is_sampled:
            own = list(range(len(versions), len(versions) + len(tokens)))
            versions += own
            logprobs = [-token / 100 for token in tokens]
            builder.append_sampled(Generation(tokens, logprobs, own, "stop", None, 0))
        else:
            builder.append_feedback(tokens)
    trajectory = builder.build(reward=1.0, finish_reason="stop")
    assert trajectory.input_ids.tolist() == [*prompt, *(token for _, tokens in pieces for token in tokens)]
    assert trajectory.loss_mask.sum() == len(versions)
    assert trajectory.turns == sum(is_sampled for is_sampled, _ in pieces)
    if versions:
        assert_provenance(trajectory, versions)
    else:
        with pytest.raises(WireError, match="sampled none"):
            check_trajectory(trajectory)
