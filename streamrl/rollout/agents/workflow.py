"""`AgentWorkflow`: one episode of an agent for each sibling, from its task to its trajectories.

`Episode` is the gateway's interface to an episode: it serves the agent's calls with the policy, and records them in an
`EpisodeTree`. Invariant: exactly the answers that the agent received before its episode ended are trained on.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import ssl
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from aiohttp import web

from streamrl.config import AgentConfig, Config
from streamrl.errors import AgentError, ConfigError, DataError, StreamRLError, UnknownFault
from streamrl.models import vocab_size
from streamrl.rollout.activity import BEFORE_PLAYING, PLAYING
from streamrl.rollout.agents.gateway import GONE, EpisodeCalls, Gateway, Leases, OnPiece
from streamrl.rollout.agents.messages import (
    TOO_LONG,
    ChatRequest,
    Completion,
    Message,
    MessagePiece,
    RequestRefused,
    StreamedAnswer,
    with_tool_names,
)
from streamrl.rollout.agents.policy import Endpoint, Score
from streamrl.rollout.agents.rendering import Renderer, SampledTokens, settled
from streamrl.rollout.agents.runner import Agents
from streamrl.rollout.agents.tree import EpisodeTree, PolicyCall, discounted
from streamrl.rollout.generation import OnTokens
from streamrl.rollout.reward.functions import Response
from streamrl.rollout.workflows import Session
from streamrl.stop_strings import before_stop
from streamrl.transport.addresses import LOOPBACK, Reach, is_loopback
from streamrl.transport.http import Hosts
from streamrl.types import Prompt, Trajectory

LOOKS = 32
"""A streamed answer is parsed again once it has grown by 1 / `LOOKS` of its length."""
ENDED = "this episode has ended"
_ID = re.compile(r"(?:chatcmpl-|cmpl-|msg_|resp_)?(\w+(?:/\d+)?)")
"""The id of an answer, with or without the prefix that each API adds."""


class EpisodeScore(NamedTuple):
    """An agent's reported score, with the answers that it names resolved to calls."""

    said: Score
    rewards: list[tuple[PolicyCall, float]]


class Continuation(NamedTuple):
    """The tokens that the policy is to continue."""

    parent: PolicyCall | None
    """The call whose conversation is continued, if there is one."""
    prompt_ids: list[int]
    given: int = 0
    """Number of tokens at the end of `prompt_ids` that are the beginning of the answer."""
    begun: Message = Message("assistant")
    """The message that these tokens express."""

    def rest(self, message: Message) -> Message:
        """Return the answer's `message` without its given beginning."""
        content, reasoning = message.content[len(self.begun.content) :], message.reasoning[len(self.begun.reasoning) :]
        return msgspec.structs.replace(message, content=content, reasoning=reasoning)

    def answer(self, output_ids: Sequence[int], tools: Sequence[dict[str, Any]]) -> SampledTokens:
        """Return the whole answer: its given beginning, then the sampled `output_ids`."""
        begins = len(self.prompt_ids) - self.given
        return SampledTokens(self.prompt_ids[:begins], [*self.prompt_ids[begins:], *output_ids], tools)


class Episode:
    """One agent at work on one task."""

    def __init__(self, session: Session, renderer: Renderer, *, max_calls: int) -> None:
        self.key = secrets.token_urlsafe(24)
        """Random key that opens this episode and no other."""
        self.name = f"{session.prompt.seq}-{session.sibling}-{secrets.token_hex(4)}"
        """Name of the episode in URLs."""
        self.attempt = session.episode
        """Name of the attempt of the sibling."""
        self.calls = 0
        """How many completions the agent has requested."""
        self.rewritten = 0
        """Calls with answers in their history that the policy did not give there; each begins a new conversation."""
        self.rerendered = 0
        """Calls that continue a conversation whose earlier turns the model's template now renders differently."""
        self.drifted = 0
        """Completions with text that, tokenized again, gives other tokens than the sampled ones."""
        self.generation_seconds = 0.0
        """Seconds that the agent has waited for completions."""
        self.tokens = 0
        """Tokens sampled in this episode, including tokens of answers that the agent did not receive."""
        self.last: Completion | None = None
        """The latest completion."""
        self.failure: StreamRLError | None = None
        """The error that kept the policy from answering, if there was one; the episode is then worthless."""
        self.exhausted = False
        """Whether the last request was refused because the policy has used up its answers, or its context."""
        self._session = session
        self._renderer = renderer
        self._max_calls = max_calls
        self._tree = EpisodeTree()
        self._undelivered: list[tuple[Completion, PolicyCall]] = []
        self._ended = False
        self._answering: set[asyncio.Task[Completion]] = set()
        """The answers that are being generated."""
        self._score: asyncio.Future[EpisodeScore] = asyncio.get_running_loop().create_future()

    # --- for the gateway ---

    def count(self, request: ChatRequest) -> None:
        """Count the answers that `request` asks for; raises `RequestRefused` if they exceed the episode's limit."""
        self._check_open()
        self.exhausted = self.calls + request.n > self._max_calls
        if self.exhausted:
            raise RequestRefused(
                f"this episode has had {self.calls} answers, and rollout.agent.max_calls = {self._max_calls}"
            )
        self.calls += request.n

    async def complete(
        self, request: ChatRequest, *, call: str, on_piece: OnPiece | None = None
    ) -> Sequence[Completion]:
        """Return the policy's answers to `request`; raises `RequestRefused`.

        `call` is the id under which they are sent. `on_piece` receives the pieces of the answers as they are generated.
        """
        self._check_open()
        continued = self._with_given(request, *self._tokens_of(request))
        room = self._session.max_context - len(continued.prompt_ids)
        if room < 1:
            self.exhausted = True
            raise RequestRefused(
                f"the prompt is too long: {len(continued.prompt_ids)} tokens, and the maximum context length, "
                f"gserver.max_context = {self._session.max_context}, leaves no room for an answer",
                kind=TOO_LONG,
            )
        names = [call] if request.n == 1 else [f"{call}/{index}" for index in range(request.n)]
        answers = [
            asyncio.ensure_future(
                self._answer(request, continued, name, on_tokens=self._pieces(request, continued, index, on_piece))
            )
            for index, name in enumerate(names)
        ]
        self._answering.update(answers)
        asked = time.monotonic()
        try:
            return await asyncio.gather(*answers)
        except StreamRLError as error:
            self.failure = error
            raise RequestRefused(f"the policy cannot be asked: {error}", status=503, kind="api_error") from error
        except asyncio.CancelledError:
            self._check_open()
            raise
        finally:
            for answer in answers:
                answer.cancel()  # after one has failed, the others are useless
            self._answering.difference_update(answers)
            self.generation_seconds += time.monotonic() - asked

    def delivered(self, completions: Sequence[Completion]) -> None:
        """Note that the agent has received these answers."""
        had = set(map(id, completions))
        self._undelivered = [answer for answer in self._undelivered if id(answer[0]) not in had]

    def score(self, said: Score) -> None:
        """Accept the score that the agent reports; the last one counts. Raises `RequestRefused`."""
        self._check_open()
        try:
            earned = self.earned(said)
        except AgentError as error:
            raise RequestRefused(str(error)) from error
        if self._score.done():
            self._score = asyncio.get_running_loop().create_future()
        self._score.set_result(earned)

    # --- for the workflow ---

    @property
    def notified(self) -> EpisodeScore | None:
        """The score that the agent has reported, if there is one."""
        return self._score.result() if self._score.done() else None

    async def scored(self) -> EpisodeScore:
        """Wait for a reported score, and return it."""
        await asyncio.shield(self._score)
        return self._score.result()

    def earned(self, said: Score) -> EpisodeScore:
        """Resolve the answers that `said` names; raises `AgentError` with the name of an unknown answer."""
        return EpisodeScore(said, [(self._named(name), reward) for name, reward in said.rewards.items()])

    def _named(self, name: str) -> PolicyCall:
        bare = found.group(1) if (found := _ID.fullmatch(name)) else name
        for call in self._tree.calls:
            if bare == call.name:
                self._undelivered = [answer for answer in self._undelivered if answer[1] is not call]
                return call  # an agent that knows the id has received the answer
        undelivered = {id(call) for _, call in self._undelivered}
        had = [call for call in self._tree.calls if id(call) not in undelivered]
        if name.isdecimal() and int(name) < len(had):
            return had[int(name)]
        several = sum(call.name.startswith(f"{bare}/") for call in had)
        if several:
            raise AgentError(f"rewards: {name!r} names {several} answers; one of them is {name + '/0'!r}")
        raise AgentError(
            f"rewards: {name!r} names none of the {len(had)} answers of this episode; "
            "an answer is named by its id, or by its number from 0"
        )

    def end(self) -> None:
        """End the episode: later calls are refused, and running generations are cancelled."""
        self._ended = True
        for answer in self._answering:
            answer.cancel()

    def trajectories(self, earned: EpisodeScore, *, discount: float) -> list[Trajectory]:
        """Return the trajectories of the episode, without answers that were not delivered, each with its return.

        `discount`: factor by which a reward counts for the answer before.
        """
        for _, call in self._undelivered:
            self._tree.drop_leaf(call)
        rewards = {id(call): 0.0 for call in self._tree.calls}
        for call, reward in earned.rewards:
            rewards[id(call)] += reward
        in_order = list(rewards.values())
        if in_order:
            in_order[-1] += earned.said.score or 0.0
        returns, score = discounted(in_order, discount=discount), sum(in_order)
        return self._tree.trajectories(returns, score=None if set(returns) == {score} else score)

    @property
    def turns(self) -> int:
        """Answers in the conversation with the most of them."""
        return self._tree.turns

    @property
    def conversations(self) -> int:
        """Number of conversations."""
        return self._tree.conversations

    def _check_open(self) -> None:
        if self._ended:
            raise RequestRefused(ENDED, status=GONE)

    def _tokens_of(self, request: ChatRequest) -> tuple[PolicyCall | None, list[int]]:
        """Return the call that is continued, if there is one, and all tokens that the policy is to continue."""
        if request.prompt is not None:
            chat = self._session.chat
            try:
                ids = chat.encode(request.prompt) if isinstance(request.prompt, str) else list(request.prompt)
            except DataError as error:
                raise RequestRefused(str(error)) from error
            if not ids:
                raise RequestRefused("prompt: it has no tokens")
            return self._tree.find_tokens(ids), ids
        parent, known = self._tree.find(request.messages, request.tools)
        messages = with_tool_names(request.messages)
        new = messages[known:]
        if parent is None:
            self.rewritten += any(message.role == "assistant" for message in messages)
            return None, self._renderer.render(messages, request.tools)
        before = parent.token_ids
        sampled = SampledTokens(parent.prompt_ids, parent.generation.output_ids, request.tools)
        further = self._renderer.extend(sampled, new) if new else None
        if further is not None:
            return parent, [*before, *further]
        anew = self._renderer.render(messages, request.tools)
        if tuple(anew[: len(before)]) == before:
            return parent, anew
        self.rerendered += 1
        return None, anew

    def _with_given(self, request: ChatRequest, parent: PolicyCall | None, prompt_ids: list[int]) -> Continuation:
        """Return the tokens to continue, including the given beginning of the answer. Raises `RequestRefused` if the
        given text would not be parsed as the beginning of an answer's text."""
        if not request.given:
            return Continuation(parent, prompt_ids)
        if (own := self._cut_off(request, prompt_ids)) is not None:
            return own
        try:
            given = self._session.chat.encode(request.given)
        except DataError as error:
            raise RequestRefused(str(error)) from error
        read = self._renderer.parse(SampledTokens(prompt_ids, given, request.tools), matched_stop="")
        if read.content != request.given:
            raise RequestRefused(
                "this model cannot continue the text of an assistant: its tokens would differ, such as "
                "reasoning, or as nothing; let the conversation end with another message"
            )
        return Continuation(parent, [*prompt_ids, *given], len(given), read)

    def _cut_off(self, request: ChatRequest, prompt_ids: list[int]) -> Continuation | None:
        """Return the policy's own answer after `prompt_ids`, if it was cut off and has the given text: the policy then
        continues from the tokens that it sampled."""
        asked = (*request.messages, Message("assistant", request.given))
        call, known = self._tree.find(asked, request.tools)
        if call is None or known < len(asked) or call.generation.finish_reason != "length":
            return None
        before, ids = len(prompt_ids), list(call.token_ids)
        read = self._renderer.parse(SampledTokens(prompt_ids, ids[before:], request.tools), matched_stop="")
        if ids[:before] != prompt_ids or read.content.rstrip() != request.given:
            return None
        return Continuation(call, ids, len(ids) - before, msgspec.structs.replace(read, content=request.given))

    def _pieces(
        self, request: ChatRequest, continued: Continuation, index: int, on_piece: OnPiece | None
    ) -> OnTokens | None:
        """Return a callback that takes the tokens of an answer as they arrive, and passes the certain part of its
        message to `on_piece`."""
        if on_piece is None:
            return None
        stops = (*self._session.sampling.stop, *request.stop)
        so_far: list[int] = []
        told = StreamedAnswer()
        next_look = 0

        def take(further: list[int]) -> None:
            nonlocal next_look
            so_far.extend(further)
            if len(so_far) < next_look:
                return
            next_look = len(so_far) + 1 + len(so_far) // LOOKS  # a look at every token would take quadratic time
            said = continued.rest(self._certain(request, continued.answer(so_far, request.tools), stops=stops))
            piece = MessagePiece(index, said.content[len(told.content) :], said.reasoning[len(told.reasoning) :])
            if piece.content or piece.reasoning:
                told.add(piece)
                on_piece(piece)

        return take

    def _message(self, request: ChatRequest, sampled: SampledTokens, *, matched_stop: str) -> Message:
        """Return the policy's message; for a plain-text `prompt`, the decoded text without parsing."""
        if request.prompt is None:
            return self._renderer.parse(sampled, matched_stop=matched_stop)
        return Message("assistant", before_stop(self._session.chat.decode(sampled.output_ids), matched_stop))

    def _certain(self, request: ChatRequest, sampled: SampledTokens, *, stops: Sequence[str]) -> Message:
        """Return the part of `_message`'s result that further tokens cannot change."""
        if request.prompt is None:
            return self._renderer.certain(sampled, stops=stops)
        return Message("assistant", settled(self._session.chat.decode(sampled.output_ids), stops))

    async def _answer(
        self,
        request: ChatRequest,
        continued: Continuation,
        name: str,
        on_tokens: OnTokens | None,
    ) -> Completion:
        most = self._session.sampling.max_new_tokens
        generation = await self._session.generate(
            continued.prompt_ids,
            max_new_tokens=min(most, request.max_tokens or most),
            stop=request.stop,
            stop_token_ids=request.stop_token_ids,
            on_tokens=on_tokens,
        )
        self.tokens += len(generation.output_ids)
        self._check_open()
        matched = generation.matched if isinstance(generation.matched, str) else ""
        message = self._message(request, continued.answer(generation.output_ids, request.tools), matched_stop=matched)
        self.drifted += self._session.chat.retokenized(generation.output_ids) != generation.output_ids
        call = PolicyCall(
            parent=continued.parent, prompt_ids=tuple(continued.prompt_ids), generation=generation, name=name
        )
        messages = request.messages if request.prompt is None else None
        self._tree.add(call, messages=messages, reply=message, tools=request.tools)
        chat = self._session.chat
        completion = Completion(
            message=continued.rest(message),
            finish_reason="tool_calls" if message.tool_calls else generation.finish_reason,
            prompt_ids=call.prompt_ids,
            output_ids=tuple(generation.output_ids),
            logprobs=tuple(generation.logprobs),
            token_texts=tuple(chat.decode([token]) for token in generation.output_ids) if request.token_texts else (),
            matched_stop=matched,
        )
        self._undelivered.append((completion, call))
        self.last = completion
        return completion


ENDED_KEPT = 4096
"""Number of ended episodes that are remembered, so that late calls receive the status `GONE`."""


class EpisodeTable:
    """The running episodes, for the gateway."""

    def __init__(self) -> None:
        self._by_key: dict[str, Episode] = {}
        self._ended: OrderedDict[str, Score | None] = OrderedDict()
        """Key → the score that was reported."""

    def find(self, key: str, episode: str) -> EpisodeCalls | None:
        """Return the episode with this key, unless the URL names another; raises `RequestRefused` if it has ended."""
        found = self._by_key.get(key)
        if found is None and key in self._ended:
            raise RequestRefused(ENDED, status=GONE)
        return None if found is None or episode not in ("", found.name) else found

    def named(self, attempt: str) -> Episode | None:
        """Return the running episode of an attempt of a sibling (`Session.episode`)."""
        return next((episode for episode in self._by_key.values() if episode.attempt == attempt), None)

    def ended_with(self, key: str, score: Score) -> bool:
        """Return whether the ended episode had exactly this score: the request repeats an earlier one."""
        return self._ended.get(key) == score

    def add(self, episode: Episode) -> None:
        """Open the episode for its agent's calls."""
        self._by_key[episode.key] = episode

    def remove(self, episode: Episode) -> None:
        """Remove an ended episode."""
        del self._by_key[episode.key]
        self._ended[episode.key] = None if episode.notified is None else episode.notified.said
        if len(self._ended) > ENDED_KEPT:
            self._ended.popitem(last=False)


@dataclass(eq=False)
class AgentWorkflow:
    """A `Workflow` whose siblings are episodes of an agent."""

    config: AgentConfig
    _: KW_ONLY
    agents: Agents
    gateway: Gateway
    url: str
    """The gateway's."""
    episodes: EpisodeTable
    renderer: Renderer
    model: str
    """The name under which agents request the policy."""

    @property
    def retries_answered(self) -> int:
        """How many requests of agents received the answer of an earlier request."""
        return self.gateway.retries_answered

    def played_by(self, agents: Agents) -> AgentWorkflow:
        """Return this workflow with other agents."""
        return replace(self, agents=agents)

    async def run(self, prompt: Prompt, session: Session) -> list[Trajectory]:
        trajectories, _ = await self.play(prompt, session)
        return trajectories

    async def play(self, prompt: Prompt, session: Session) -> tuple[list[Trajectory], Score]:
        """Return the trajectories of an episode, at least one, and its score."""
        episode = Episode(session, self.renderer, max_calls=self.config.max_calls)
        self.episodes.add(episode)
        began = time.monotonic()
        try:
            earned = await self._play(prompt, session, episode)
        finally:
            episode.end()
            self.episodes.remove(episode)
            self.gateway.forget(episode.key)
        trajectories = episode.trajectories(earned, discount=self.config.discount)
        if not trajectories:
            raise AgentError(f"seq {prompt.seq}: the agent never asked the policy for anything")
        session.activity.episode_ended(
            {
                "calls": episode.calls,
                "turns": episode.turns,
                "trajectories": episode.conversations,
                "rewritten": episode.rewritten,
                "rerendered": episode.rerendered,
                "drifted": episode.drifted,
                "seconds": time.monotonic() - began,
                "generation_seconds": episode.generation_seconds,
                "tokens": episode.tokens,
                "tokens_trained": sum(int(trajectory.loss_mask.sum()) for trajectory in trajectories),
            },
            metrics=earned.said.metrics,
        )
        return trajectories, earned.said

    async def _play(self, prompt: Prompt, session: Session, episode: Episode) -> EpisodeScore:
        """Run an episode, and return its score once it is known."""
        seconds = self.config.timeout_seconds
        try:
            try:
                async with asyncio.timeout(None) as deadline, AsyncExitStack() as stages:
                    waiting = stages.enter_context(ExitStack())
                    waiting.enter_context(session.activity.in_stage(BEFORE_PLAYING))

                    def begun() -> None:
                        deadline.reschedule(asyncio.get_running_loop().time() + seconds)
                        stages.enter_context(session.activity.in_stage(PLAYING))
                        waiting.close()

                    earned = episode.earned(await self.agents.run(task_of(prompt), self._access(episode), begun=begun))
                    scores = self.config.scored_by == "agent" or self.config.remote  # else it never ends
                    if not earned.said.said and (scores or episode.notified is not None):
                        own = earned.said.metrics
                        earned = await episode.scored()
                        if own:
                            metrics = earned.said.metrics | own
                            earned = earned._replace(said=msgspec.structs.replace(earned.said, metrics=metrics))
            except TimeoutError as error:
                cancelled = error.__cause__
                if cancelled is not None and isinstance(fault := cancelled.__cause__, UnknownFault):
                    raise fault from None  # another episode may have delayed its end
                raise AgentError(
                    f"seq {prompt.seq}: no score within rollout.agent.timeout_seconds = {seconds:g}, after "
                    f"{episode.calls} answers of the policy"
                ) from error
            if episode.failure is not None:
                raise episode.failure
            if self.config.scored_by == "reward":
                judged = await session.score(_response(episode))
                return earned._replace(said=msgspec.structs.replace(earned.said, score=judged))
            await session.generated()
            return earned
        except AgentError as error:
            if episode.failure is not None:
                raise episode.failure from error
            policy_failed = episode.exhausted and episode.last is not None
            zero = policy_failed or (session.failures_score_zero and episode.calls > 0)
            if isinstance(error, UnknownFault) or not zero:
                raise
            if not policy_failed:
                session.activity.unscored(prompt.seq, error)
            session.activity.log_reason("an episode scores 0", error)
            await session.generated()
            return EpisodeScore(Score(0.0), [])

    def _access(self, episode: Episode) -> Endpoint:
        return Endpoint(root=self.url, id=episode.name, api_key=episode.key, model=self.model)


async def open_agents(
    config: Config,
    agents: Agents,
    *,
    model_dir: Path,
    renderer: Renderer,
    at_exit: AsyncExitStack,
    reach: Reach = LOOPBACK,
    port: int = 0,
    leases: Leases | None = None,
    lease_key: str = "",
    routes: Sequence[web.RouteDef] = (),
    stored: Callable[[str], Awaitable[None]] | None = None,
    tls: ssl.SSLContext | None = None,
) -> AgentWorkflow:
    """Start the model server of `agents`, which is closed at exit; return the workflow whose siblings are their
    episodes.

    `leases`, `lease_key`, `routes`, `stored` and `tls`: as of `Gateway`. Raises `ConfigError` if other machines could
    take episodes without a key.
    """
    if leases is not None and not is_loopback(reach.local) and not lease_key:
        raise ConfigError(
            f"agents are served at {reach.local}, which is open to others: rollout.agent needs an api_key_env, or "
            "anyone may take episodes"
        )
    episodes, model = EpisodeTable(), Path(config.model.path).name
    gateway = Gateway(
        episodes,
        model=model,
        sampling=config.rollout.sampling,
        vocab_size=vocab_size(model_dir),
        leases=leases,
        lease_key=lease_key,
        reach=reach,
        port=port,
        hosts=Hosts([reach.announced, *config.security.host_names]),
        tls=tls,
        routes=routes,
        stored=stored,
    )
    at_exit.push_async_callback(gateway.close)
    return AgentWorkflow(
        config.rollout.agent,
        agents=agents,
        gateway=gateway,
        url=await gateway.start(),
        episodes=episodes,
        renderer=renderer,
        model=model,
    )


def task_of(prompt: Prompt) -> dict[str, Any]:
    """Return the task for the agent: the columns of a row, with `messages`, `question` and `answer`."""
    question = prompt.messages[-1]["content"] if prompt.messages else ""
    return {"question": question, **prompt.metadata, "messages": prompt.messages, "answer": prompt.answer}


def _response(episode: Episode) -> Response:
    """Return the policy's latest answer for a reward function; raises `AgentError` if there is none."""
    last = episode.last
    if last is None:
        raise AgentError("the agent ended without a word of the policy")
    return Response(
        text=last.message.content,
        finish_reason="length" if last.finish_reason == "length" else "stop",
        output_tokens=len(last.output_ids),
        turn=episode.calls,
    )
