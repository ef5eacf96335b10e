"""`EpisodeTree`: what an agent's calls become, from tokens asked and sampled to trajectories to train on.

Each call of the policy is a node: the tokens that it continued, and the tokens that it sampled. A call that continues
a conversation in which the policy has spoken is the child of the call in which it last spoke, and begins with exactly
that call's tokens: what was sampled is never tokenized again. Everything else (the first call, an edited history, a
sub-agent, other tools) begins at the root. So an episode is a forest whose leaves are its trajectories.

Invariant: every sampled token is under the loss in exactly one trajectory, with its own log-probability and version;
in the others that pass through its node it is context.

Pure: no clock, no I/O.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from streamrl.errors import UNDECODABLE
from streamrl.rollout.agents.messages import Message
from streamrl.rollout.generation import Generation, first_known, of_all_tokens
from streamrl.types import NO_VERSION, Trajectory


class PolicyCall(msgspec.Struct, eq=False):
    """One call of the policy in an episode."""

    parent: PolicyCall | None
    """The call whose conversation this one continues; None: a conversation of its own."""
    prompt_ids: tuple[int, ...]
    """`[prompt]` token ids that the policy continued; they begin with the parent's `token_ids`."""
    generation: Generation
    """What it sampled."""
    name: str = ""
    """The id under which the answer was sent; where a request had several answers, with `/0`, `/1`, ... behind it."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Prompt and answer."""
        return (*self.prompt_ids, *self.generation.output_ids)


class EpisodeTree:
    """The calls of one episode that were answered."""

    def __init__(self) -> None:
        self.calls: list[PolicyCall] = []
        """In the order of their answers."""
        self._by_conversation: dict[bytes, list[tuple[str, PolicyCall]]] = {}
        """The calls of each conversation, oldest first, with the reasoning of their answers."""

    def find(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> tuple[PolicyCall | None, int]:
        """Return the latest call that `messages` continue, and how many of them it accounts for.

        Its conversation, with the policy's answer, is word for word the beginning of `messages`; the tools are the
        same. Of several answers with the same text it is the newest one with the reasoning that the client sends back,
        or the newest one if there is none. Returns `(None, 0)` when there is no such call.
        """
        for index, digest in reversed(list(_digests(messages, tools))):
            if found := self._by_conversation.get(digest):
                thought = messages[index].reasoning.strip()
                chosen = [call for reasoning, call in found if reasoning == thought]
                return (chosen[-1] if chosen else found[-1][1]), index + 1
        return None, 0

    def find_tokens(self, prompt_ids: Sequence[int]) -> PolicyCall | None:
        """Return the call with the most tokens that `prompt_ids` begin with, if there is one."""
        asked = tuple(prompt_ids)
        found = [call for call in self.calls if asked[: len(call.token_ids)] == call.token_ids]
        return max(found, key=lambda call: len(call.token_ids), default=None)

    def add(
        self, call: PolicyCall, *, messages: Sequence[Message] | None, reply: Message, tools: Sequence[dict[str, Any]]
    ) -> None:
        """Record a call that asked `messages` (None: plain tokens) and was answered `reply`.

        Raises `ValueError` when it does not begin with its parent's tokens.
        """
        before = () if call.parent is None else call.parent.token_ids
        if call.prompt_ids[: len(before)] != before:
            raise ValueError(f"a call of {len(call.prompt_ids)} tokens does not begin with its parent's {len(before)}")
        self.calls.append(call)
        if messages is None:
            return
        *_, (_, digest) = _digests([*messages, reply], tools)
        self._by_conversation.setdefault(digest, []).append((reply.reasoning.strip(), call))

    def drop_leaf(self, call: PolicyCall) -> None:
        """Take back a call whose answer nobody has received, unless another continues it."""
        if all(other.parent is not call for other in self.calls):
            self.calls = [other for other in self.calls if other is not call]
            for found in self._by_conversation.values():
                found[:] = [(reasoning, other) for reasoning, other in found if other is not call]

    @property
    def conversations(self) -> int:
        """How many calls no other continues."""
        return len(self.calls) - len({id(call.parent) for call in self.calls if call.parent is not None})

    @property
    def turns(self) -> int:
        """How many answers the conversation with the most of them has."""
        turns: dict[int, int] = {}
        for call in self.calls:
            turns[id(call)] = 1 + (0 if call.parent is None else turns.get(id(call.parent), 0))
        return max(turns.values(), default=0)

    def trajectories(self, returns: Sequence[float], *, score: float | None = None) -> list[Trajectory]:
        """Return the trajectories of an episode whose calls have `returns` `[calls]`, oldest first.

        Where all returns are the same, there is one for each leaf; else each call is the end of a trajectory of its
        own, in which it alone is under the loss. A trajectory's `reward` is the return, its `turns` are the calls
        that are under the loss in it. `score`: what the episode earned in all, where that is something else.
        """
        continued = set() if len(set(returns)) > 1 else {id(call.parent) for call in self.calls}
        trained: set[int] = set()
        return [
            _trajectory(call, trained=trained, reward=earned, score=score)
            for call, earned in zip(self.calls, returns, strict=True)
            if id(call) not in continued
        ]


def discounted(rewards: Sequence[float], *, discount: float) -> list[float]:
    """Return the return of each call from the `rewards` of all, in order: G_k = r_k + discount · G_{k+1}."""
    returns: list[float] = []
    following = 0.0
    for reward in reversed(rewards):
        following = reward + discount * following
        returns.append(following)
    return returns[::-1]


def _trajectory(leaf: PolicyCall, *, trained: set[int], reward: float, score: float | None) -> Trajectory:
    """Return the path to `leaf`; calls on it that are not in `trained` are under the loss, and are in it afterwards."""
    tokens = len(leaf.token_ids)
    loss_mask = np.zeros(tokens, dtype=np.bool_)
    logprobs = np.zeros(tokens, dtype=np.float32)
    versions = np.full(tokens, NO_VERSION, dtype=np.int32)
    turns = 0
    experts: NDArray[np.uint8] | None = None
    for call in _path(leaf):
        experts = first_known(call.generation.routed_experts, experts)
        if id(call) in trained:
            continue
        trained.add(id(call))
        turns += 1
        sampled = slice(len(call.prompt_ids), len(call.prompt_ids) + len(call.generation.output_ids))
        loss_mask[sampled] = True
        logprobs[sampled] = call.generation.logprobs
        versions[sampled] = call.generation.versions
    return Trajectory(
        input_ids=np.array(leaf.token_ids, dtype=np.int32),
        loss_mask=loss_mask,
        behavior_logprobs=logprobs,
        policy_versions=versions,
        reward=reward,
        finish_reason=leaf.generation.finish_reason,
        turns=turns,
        score=score,
        routed_experts=of_all_tokens(experts, tokens),
    )


def _path(leaf: PolicyCall) -> Iterator[PolicyCall]:
    """Yield `leaf` and its ancestors."""
    call: PolicyCall | None = leaf
    while call is not None:
        yield call
        call = call.parent


def _digests(messages: Iterable[Message], tools: Sequence[dict[str, Any]]) -> Iterator[tuple[int, bytes]]:
    """Yield the index of each message of the assistant, with a digest of the conversation up to it."""
    digest = hashlib.blake2b(_encoder.encode(tools), digest_size=16)
    for index, message in enumerate(messages):
        digest.update(_identity(message))
        if message.role == "assistant":
            yield index, digest.digest()


def _identity(message: Message) -> bytes:
    """Return what has to be equal for two messages to be the same.

    Clients send an answer back without its reasoning, with white space around it removed, and with the arguments of
    tool calls written anew: none of that makes it another answer.
    """
    calls = [(call.id, call.name, _canonical(call.arguments)) for call in message.tool_calls]
    return _encoder.encode((message.role, message.content.strip(), calls, message.tool_call_id))


def _canonical(arguments: str) -> Any:
    try:
        return msgspec.json.decode(arguments)
    except UNDECODABLE:
        return arguments


_encoder = msgspec.json.Encoder(order="deterministic")
