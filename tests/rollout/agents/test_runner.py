"""What becomes of episodes whose process one of them has blocked."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from streamrl.config import AgentConfig, Config, RolloutConfig
from streamrl.errors import UnknownFault
from streamrl.rollout.agents.policy import Endpoint, Score
from streamrl.rollout.agents.runner import HANG_SECONDS, Agents, agents_of

ACCESS = Endpoint(root="http://127.0.0.1:9", id="e", api_key="k", model="policy")
BLOCKED = HANG_SECONDS + 0.1


async def begun(agents: Agents, *, block: float, wait: float) -> asyncio.Task[Score]:
    """An episode that runs."""
    beginning = asyncio.Event()
    task: dict[str, Any] = {"block": block, "wait": wait}
    episode = asyncio.create_task(agents.run(task, ACCESS, begun=beginning.set))
    await beginning.wait()
    return episode


async def fault_of_late(episode: asyncio.Task[Score]) -> BaseException | None:
    """Give the episode up, and return what is said to have kept it."""
    episode.cancel()
    with pytest.raises(asyncio.CancelledError) as cancelled:
        await episode
    return cancelled.value.__cause__


async def test_an_episode_that_is_late_after_another_blocked_its_process_may_have_done_nothing_wrong() -> None:
    config = AgentConfig(function="tests.rollout.agents.waiting_agents:wait")
    agents = agents_of(Config(rollout=RolloutConfig(agent=config)))
    await agents.start()
    try:
        before = await begun(agents, block=0, wait=600)
        blocking = await begun(agents, block=BLOCKED, wait=0)
        meanwhile = await begun(agents, block=0, wait=600)
        assert await blocking == Score(1.0)
        assert isinstance(await fault_of_late(before), UnknownFault)
        assert isinstance(await fault_of_late(meanwhile), UnknownFault)
        after = await begun(agents, block=0, wait=600)
        assert await fault_of_late(after) is None
        alone = await begun(agents, block=BLOCKED, wait=600)
        await asyncio.sleep(BLOCKED)
        assert await fault_of_late(alone) is None
    finally:
        await agents.close()
