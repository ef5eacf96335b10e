"""One prompt, one response, one reward."""

from __future__ import annotations

from streamrl.rollout.workflows.base import Session, TrajectoryBuilder
from streamrl.types import Prompt, Trajectory


class SingleTurn:
    """The workflow `single_turn`."""

    async def run(self, prompt: Prompt, session: Session) -> Trajectory:
        builder = TrajectoryBuilder()
        builder.append_prompt(prompt.input_ids)
        generation = await session.generate(builder.input_ids)
        builder.append_sampled(generation)
        reward = await session.score(session.response(generation))
        return builder.build(reward=reward, finish_reason=generation.finish_reason)
