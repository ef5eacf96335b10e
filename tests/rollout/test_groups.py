"""Groups with failed siblings; the shared prompt of trajectories, and those that are refused."""

from __future__ import annotations

import asyncio
import random

import pytest

from streamrl.errors import RewardError, StreamRLError
from streamrl.rollout.activity import Activity
from streamrl.rollout.groups import GroupMaker, shared_prefix
from streamrl.rollout.workflows import Session, SingleTurn, TrajectoryBuilder
from streamrl.transport.generation import SamplingParams
from streamrl.types import Generation, Prompt, Trajectory, TrajectoryGroup
from tests.rollout.making import Scripted, configured, engine_and_client, maker_of, received, route_to

FAILURE = RewardError("the sandbox is gone")


def built(prompt: list[int], sampled: list[int]) -> Trajectory:
    builder = TrajectoryBuilder()
    builder.append_prompt(prompt)
    builder.append_sampled(Generation(sampled, [0.0] * len(sampled), [0] * len(sampled), "stop", None, 0))
    return builder.build(reward=0.0, finish_reason="stop")


@pytest.mark.parametrize(
    ("siblings", "length"),
    [
        ([([1, 2, 3], [4]), ([1, 2, 3], [4])], 3),  # equal responses are not shared
        ([([1, 2, 3], [4]), ([1, 2, 9, 9], [4])], 2),
        ([([1, 2, 3], [4]), ([1, 2], [3, 4])], 2),
        ([([8, 1], [4]), ([9, 1], [4])], 0),
    ],
)
def test_shared_prefix(siblings: list[tuple[list[int], list[int]]], length: int) -> None:
    assert shared_prefix([built(*sibling) for sibling in siblings]) == length


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrl.rollout.groups.FIRST_PAUSE_SECONDS", 0.0)


def five_percent(seq: int, sibling: int, attempt: int) -> Exception | None:
    """A failure of one attempt in twenty, each of another kind."""
    chance = random.Random(f"{seq}/{sibling}/{attempt}")
    kinds = [FAILURE, StreamRLError("a process was lost"), TimeoutError("too late"), LookupError("no such tool")]
    return chance.choice(kinds) if chance.random() < 0.05 else None


async def made(maker: GroupMaker, groups: int) -> list[TrajectoryGroup]:
    """The groups of the first sequence numbers that are not rejected."""
    found = await asyncio.gather(*(maker.make(seq, route_to()) for seq in range(groups)), return_exceptions=True)
    return [group for group in found if isinstance(group, TrajectoryGroup)]


@pytest.mark.usefixtures("no_pauses")
async def test_at_five_percent_failures_of_eight_siblings_almost_all_groups_are_made() -> None:
    activity = Activity(idle="nothing")
    found = await made(maker_of(Scripted(five_percent), configured(), activity=activity), 500)
    assert len(found) >= 0.98 * 500
    assert all(group.size == 8 for group in found)
    assert 150 < activity.siblings_retried < 270  # 5% of 4,000, and 5% of these
    assert activity.stats()["siblings_retried_total"] == activity.siblings_retried
    rejecting = await made(maker_of(Scripted(five_percent), configured(on_failed_sibling="reject")), 500)
    assert len(rejecting) < 0.75 * 500  # 1 - 0.95^8 = 34% are lost


@pytest.mark.usefixtures("no_pauses")
async def test_a_failed_sibling_is_made_again_up_to_a_limit_and_the_others_are_not() -> None:
    workflow = Scripted(lambda seq, sibling, attempt: FAILURE if sibling == 2 and attempt < 3 else None)
    group = await maker_of(workflow, configured(group_size=4)).make(0, route_to())
    assert group.rewards.tolist() == [0, 1, 2, 3]
    assert sorted(workflow.attempts) == [(0, 0, 0), (0, 1, 0), (0, 2, 0), (0, 2, 1), (0, 2, 2), (0, 2, 3), (0, 3, 0)]
    with pytest.raises(RewardError) as raised:
        await maker_of(workflow, configured(group_size=4, sibling_retries=2)).make(0, route_to())
    assert raised.value is FAILURE


async def test_a_retry_samples_with_seeds_of_its_own_that_are_the_same_each_time(no_pauses: None) -> None:
    class FailsOnce(SingleTurn):
        async def run(self, prompt: Prompt, session: Session) -> Trajectory:
            found = await super().run(prompt, session)
            if session.sibling == 1 and session.attempt == 0:
                raise FAILURE
            return found

    async def seeds(workflow: SingleTurn) -> list[int | None]:
        async with engine_and_client() as (engine, client):
            await maker_of(workflow, configured(group_size=3), client=client).make(7, route_to(engine.url))
        asked = [request.sampling_params for request in engine.requests]
        return [params.sampling_seed for params in asked if isinstance(params, SamplingParams)]

    undisturbed, failing, again = await seeds(SingleTurn()), await seeds(FailsOnce()), await seeds(FailsOnce())
    assert failing == again
    assert failing[:3] == undisturbed
    assert len(set(failing)) == 4


@pytest.mark.parametrize("branches", [1, 2])
async def test_a_group_shrinks_to_the_siblings_that_did_not_fail(branches: int) -> None:
    config = configured(group_size=5, on_failed_sibling="shrink", min_siblings=3)
    workflow = Scripted(lambda seq, sibling, attempt: FAILURE if sibling in (0, 3) else None, branches=branches)
    activity = Activity(idle="nothing")
    group = await maker_of(workflow, config, activity=activity).make(0, route_to())
    assert len(workflow.attempts) == 5
    assert group.rewards.tolist() == [sibling + 10 * branch for sibling in (1, 2, 4) for branch in range(branches)]
    assert group.episodes.tolist() == [episode for episode in range(3) for _ in range(branches)]
    assert activity.stats()["groups_shrunk_total"] == 1
    assert received(group, config).rewards.tolist() == group.rewards.tolist()
