"""Several attempts at one prompt, with feedback after a wrong answer."""

from __future__ import annotations

from streamrl.errors import ConfigError
from streamrl.rollout.workflows.base import Session, TrajectoryBuilder
from streamrl.types import Prompt, Trajectory


class MultiTurn:
    """The workflow `multi_turn`: the reward is the last attempt's, times `discount` for each attempt before it.

    Another attempt follows while the reward is below `success`, the model ended its answer by itself, and turns and
    context are left.
    """

    def __init__(
        self,
        *,
        max_turns: int = 2,
        feedback: str = "That is not correct. Try again.",
        success: float = 1.0,
        discount: float = 1.0,
    ) -> None:
        """`success`: the reward from which on no further attempt is made."""
        if max_turns < 1 or not 0 < discount <= 1:
            raise ConfigError(
                f"rollout.workflow.args: max_turns = {max_turns} must be at least 1, "
                f"discount = {discount} above 0 and at most 1"
            )
        self._max_turns = max_turns
        self._feedback = feedback
        self._success = success
        self._discount = discount

    async def run(self, prompt: Prompt, session: Session) -> Trajectory:
        builder = TrajectoryBuilder()
        builder.append_prompt(prompt.input_ids)
        while True:
            generation = await session.generate(builder.input_ids)
            builder.append_sampled(generation)
            reward = await session.score(session.response(generation, turn=builder.turns))
            if reward >= self._success or generation.finish_reason != "stop" or builder.turns == self._max_turns:
                break
            feedback = session.chat.next_turn(generation.output_ids, [{"role": "user", "content": self._feedback}])
            if len(builder.input_ids) + len(feedback) >= session.max_context:
                break
            builder.append_feedback(feedback)
        return builder.build(
            reward=reward * self._discount ** (builder.turns - 1), finish_reason=generation.finish_reason
        )
