"""A `GroupMaker` with a workflow of a test's, and a scripted gserver."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from streamrl.config import Config, from_dict
from streamrl.rollout.activity import Activity
from streamrl.rollout.data import PromptSource
from streamrl.rollout.generation import Generator, GroupRoute
from streamrl.rollout.groups import GroupMaker
from streamrl.rollout.workflows import Session, TrajectoryBuilder, Workflow
from streamrl.transport import codec
from streamrl.transport.generation import GenerationClient
from streamrl.types import Generation, Prompt, Trajectory, TrajectoryGroup
from tests.rollout.engine import Engine, answer, serving
from tests.rollout.sessions import CHAT, no_other


class Scripted:
    """A workflow without a gserver: sibling s earns s, or raises what `fails(seq, sibling, attempt)` returns."""

    def __init__(self, fails: Any = lambda seq, sibling, attempt: None, *, branches: int = 1) -> None:
        """`branches`: trajectories of each sibling; their rewards grow by 10."""
        self.attempts: list[tuple[int, int, int]] = []
        """Sequence number, sibling, and attempt, in the order in which they began."""
        self._fails = fails
        self._branches = branches

    async def run(self, prompt: Prompt, session: Session) -> list[Trajectory]:
        self.attempts.append((prompt.seq, session.sibling, session.attempt))
        if (error := self._fails(prompt.seq, session.sibling, session.attempt)) is not None:
            raise error
        return [trajectory(session.sibling + 10.0 * branch) for branch in range(self._branches)]


def trajectory(reward: float) -> Trajectory:
    builder = TrajectoryBuilder()
    builder.append_prompt([1, 2, 3])
    builder.append_sampled(Generation([4, 5], [-0.5, -0.5], [0, 0], "stop", None, 0))
    return builder.build(reward=reward, finish_reason="stop")


def configured(*, algorithm: dict[str, Any] | None = None, **rollout: Any) -> Config:
    """A configuration with groups of eight."""
    data = {"source": "python", "path": "tests.rollout.user_code:row", "size": 1000}
    return from_dict({"rollout": {"group_size": 8, **rollout}, "data": data, "algorithm": algorithm or {}})


def maker_of(
    workflow: Workflow, config: Config, *, activity: Activity | None = None, client: GenerationClient | None = None
) -> GroupMaker:
    generator: Any = None
    if client is not None:
        generator = Generator(
            client,
            sampling=config.rollout.sampling,
            seed=config.run.seed,
            patience=10,
            tokens_per_request=4096,
            decode=CHAT.decode,
            eos_token_ids=(),
            policy_version=lambda: 0,
        )
    return GroupMaker(
        config,
        worker="rollout/0",
        prompts=PromptSource.open(config, CHAT),
        workflow=workflow,
        chat=CHAT,
        generator=generator,
        rewards=None,
        activity=activity or Activity(idle="nothing"),
    )


def received(group: TrajectoryGroup, config: Config) -> TrajectoryGroup:
    """The group as the trainer gets it from the stream."""
    rollout = config.rollout
    limits = codec.Limits(1 << 20, fewest_siblings=rollout.fewest_siblings, group_size=rollout.group_size)
    frames = [getattr(group, name).tobytes() for name in codec.ARRAYS]
    return codec.decode(codec.header_of(group), frames, limits=limits, sender=group.worker)


def route_to(url: str = "") -> GroupRoute:
    return GroupRoute(url, find_another=no_other)


@asynccontextmanager
async def engine_and_client() -> AsyncIterator[tuple[Engine, GenerationClient]]:
    """A gserver that returns two tokens for each request."""
    client = GenerationClient(timeout=10)
    async with serving(lambda request, number: answer([4, 2], version="0")) as engine:
        try:
            yield engine, client
        finally:
            await client.close()
