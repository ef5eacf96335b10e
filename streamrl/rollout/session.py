"""What a workflow may do: generate and score, for one sibling of one group."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence

from streamrl.config import RewardConfig, SamplingConfig
from streamrl.errors import DataError, RewardError
from streamrl.rollout.activity import Activity
from streamrl.rollout.chat import ChatTokenizer
from streamrl.rollout.partial import Generation, Generator, Route
from streamrl.rollout.reward.pool import RewardPool
from streamrl.rollout.reward.protocol import Response
from streamrl.rollout.reward.shaping import overlong_share
from streamrl.types import Prompt

log = logging.getLogger(__name__)

BeforeScoring = Callable[[int], Awaitable[None]]
"""Awaited with the number of the sibling that is to be scored."""


class Session:
    """One sibling's access to the policy and the reward function."""

    def __init__(
        self,
        *,
        prompt: Prompt,
        sibling: int,
        generator: Generator,
        route: Route,
        rewards: RewardPool | None,
        reward: RewardConfig,
        chat: ChatTokenizer,
        sampling: SamplingConfig,
        max_context: int,
        activity: Activity,
        before_scoring: BeforeScoring | None = None,
    ) -> None:
        """`rewards`: None where a reward model of the trainer scores. `before_scoring` is awaited before each score."""
        self.prompt = prompt
        self.sibling = sibling
        """Number of the sibling in its group, from 0."""
        self.chat = chat
        """The tokenizer with its chat template."""
        self.sampling = sampling
        self.max_context = max_context
        """Tokens of prompt and responses together that the gservers take."""
        self._generator = generator
        self._route = route
        self._rewards = rewards
        self._reward = reward
        self._activity = activity
        self._before_scoring = before_scoring
        self._requests = 0

    async def generate(self, input_ids: Sequence[int], *, max_new_tokens: int | None = None) -> Generation:
        """Let the policy go on after `input_ids`, for `sampling.max_new_tokens` tokens unless told otherwise."""
        room = self.max_context - len(input_ids)
        if room < 1:
            raise DataError(
                f"seq {self.prompt.seq}: a conversation of {len(input_ids)} tokens leaves no room in "
                f"gserver.max_context = {self.max_context}"
            )
        rid = f"{self.prompt.seq}.{self.sibling}.{self._requests}"
        self._requests += 1
        with self._activity.generating(), self._route.request(len(input_ids)):
            generation = await self._generator.generate(
                input_ids,
                max_new_tokens=min(room, max_new_tokens or self.sampling.max_new_tokens),
                rid=rid,
                route=self._route,
            )
        self._activity.generated(tokens=len(generation.output_ids), interruptions=generation.interruptions)
        return generation

    def response(self, generation: Generation, *, turn: int = 1) -> Response:
        """What the reward function gets to see of `generation`."""
        text = self.chat.decode(generation.output_ids)
        if isinstance(generation.matched, str) and generation.matched:
            before, stop, _ = text.rpartition(generation.matched)
            text = before if stop else text
        return Response(
            text=text, finish_reason=generation.finish_reason, output_tokens=len(generation.output_ids), turn=turn
        )

    async def score(self, response: Response) -> float:
        """What the reward function says, less what a response of this length costs.

        0 where a reward model of the trainer will score. Raises `RewardError` unless its errors count as zero.
        """
        if self._before_scoring is not None:
            with self._activity.held_back():
                await self._before_scoring(self.sibling)
        if self._rewards is None:
            return 0.0
        with self._activity.scoring():
            try:
                judged = await self._rewards.score(response, self.prompt)
            except RewardError as error:
                self._activity.reward_errors += 1
                if self._reward.on_error != "zero":
                    raise
                self._activity.log_reason("a response scores 0", error)
                return 0.0
        overlong = overlong_share(
            response.output_tokens, most=self.sampling.max_new_tokens, buffer=self._reward.overlong_tokens
        )
        return judged - self._reward.overlong_penalty * overlong
