"""`EpisodeTree`: turns an agent's calls (prompt tokens and sampled tokens) into trajectories to train on.

Each call of the policy is a node with the tokens that it continued and the tokens that it sampled. A call that
continues a conversation with earlier answers of the policy is the child of the call with the last of these answers, and
begins with exactly that call's tokens: sampled tokens are never tokenized again. All other calls (the first call, an
edited history, a sub-agent, other tools) begin at the root. So an episode is a forest, and its leaves are its
trajectories.

Invariant: every sampled token is under the loss in exactly one trajectory, with its own log-probability and version; in
other trajectories through its node it is context.

Pure: no clock, no I/O.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from streamrl.rollout.agents.messages import Message
from streamrl.rollout.generation import first_known, of_all_tokens
from streamrl.types import NO_VERSION, Generation, Trajectory


class PolicyCall(msgspec.Struct, eq=False):
    """One call of the policy in an episode."""

    parent: PolicyCall | None
    """The call whose conversation this one continues; None: it begins a conversation."""
    prompt_ids: tuple[int, ...]
    """`[prompt]` token ids that the policy continued; they begin with the parent's `token_ids`."""
    generation: Generation
    """The sampled answer."""
    name: str = ""
    """The id under which the answer was sent. If a request had several answers, `/0`, `/1`, ... is appended."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens of prompt and answer."""
        return (*self.prompt_ids, *self.generation.output_ids)


class EpisodeTree:
    """The answered calls of one episode."""

    def __init__(self) -> None:
        self.calls: list[PolicyCall] = []
        """In the order of their answers."""
        self._by_conversation: dict[bytes, list[tuple[str, PolicyCall]]] = {}
        """The calls of each conversation, oldest first, with the reasoning of their answers."""

    def find(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> tuple[PolicyCall | None, int]:
        """Return the latest call that `messages` continue, and the number of messages up to its answer.

        The call's conversation, with the policy's answer, equals the beginning of `messages`, and the tools are the
        same. If several answers have the same text, the newest one with the reasoning in `messages` is taken, or else
        the newest one. Returns `(None, 0)` if no call matches.
        """
        for index, digest in reversed(list(_digests(messages, tools))):
            if found := self._by_conversation.get(digest):
                thought = messages[index].reasoning.strip()
                chosen = [call for reasoning, call in found if reasoning == thought]
                return (chosen[-1] if chosen else found[-1][1]), index + 1
        return None, 0

    def find_tokens(self, prompt_ids: Sequence[int]) -> PolicyCall | None:
        """Return the call with the most tokens that are the beginning of `prompt_ids`, or None."""
        asked = tuple(prompt_ids)
        found = [call for call in self.calls if asked[: len(call.token_ids)] == call.token_ids]
        return max(found, key=lambda call: len(call.token_ids), default=None)

    def add(
        self, call: PolicyCall, *, messages: Sequence[Message] | None, reply: Message, tools: Sequence[dict[str, Any]]
    ) -> None:
        """Record a call with the conversation `messages` (None: plain tokens) and the answer `reply`.

        Raises `ValueError` if it does not begin with its parent's tokens.
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
        """Remove a call with an undelivered answer, unless another call continues it."""
        if all(other.parent is not call for other in self.calls):
            self.calls = [other for other in self.calls if other is not call]
            for found in self._by_conversation.values():
                found[:] = [(reasoning, other) for reasoning, other in found if other is not call]

    @property
    def conversations(self) -> int:
        """Number of calls that no other call continues."""
        return len(self.calls) - len({id(call.parent) for call in self.calls if call.parent is not None})

    @property
    def turns(self) -> int:
        """Answers in the conversation with the most of them."""
        turns: dict[int, int] = {}
        for call in self.calls:
            turns[id(call)] = 1 + (0 if call.parent is None else turns.get(id(call.parent), 0))
        return max(turns.values(), default=0)

    def trajectories(self, returns: Sequence[float], *, score: float | None = None) -> list[Trajectory]:
        """Return the trajectories of an episode whose calls have `returns` `[calls]`, oldest first.

        If all returns are equal, there is one trajectory for each leaf; else one for each call, with that call alone
        under the loss. A trajectory's `reward` is the return; its `turns` is the number of calls under the loss in it.
        `score`: total reward of the episode, if it differs from the returns.
        """
        continued = set() if len(set(returns)) > 1 else {id(call.parent) for call in self.calls}
        trained: set[int] = set()
        return [
            _trajectory(call, trained=trained, reward=earned, score=score)
            for call, earned in zip(self.calls, returns, strict=True)
            if id(call) not in continued
        ]


def discounted(rewards: Sequence[float], *, discount: float) -> list[float]:
    """Return the return of each call from the `rewards` of all calls, in order: G_k = r_k + discount · G_{k+1}."""
    returns: list[float] = []
    following = 0.0
    for reward in reversed(rewards):
        following = reward + discount * following
        returns.append(following)
    return returns[::-1]


def _trajectory(leaf: PolicyCall, *, trained: set[int], reward: float, score: float | None) -> Trajectory:
    """Return the path to `leaf`. Calls on it outside `trained` are under the loss, and are added to `trained`."""
    tokens = len(leaf.token_ids)
    loss_mask = np.zeros(tokens, dtype=np.bool_)
    logprobs = np.zeros(tokens, dtype=np.float32)
    versions = np.full(tokens, NO_VERSION, dtype=np.int32)
    turns = 0
    experts: NDArray[np.uint8] | None = None
    path = [leaf]
    while (parent := path[-1].parent) is not None:
        path.append(parent)
    for call in path:
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


def _digests(messages: Iterable[Message], tools: Sequence[dict[str, Any]]) -> Iterator[tuple[int, bytes]]:
    """Yield the index of each assistant message, with a digest of the conversation up to it."""
    digest = hashlib.blake2b(_encoder.encode(tools), digest_size=16)
    for index, message in enumerate(messages):
        digest.update(_identity(message))
        if message.role == "assistant":
            yield index, digest.digest()


def _identity(message: Message) -> bytes:
    """Return the fields that must be equal for two messages to be the same.

    Clients may send an answer back without its reasoning, without surrounding white space, and with reformatted
    arguments of tool calls. It remains the same answer.
    """
    calls = [(call.id, call.name, call.parsed) for call in message.tool_calls]
    return _encoder.encode((message.role, message.content.strip(), calls, message.tool_call_id))


_encoder = msgspec.json.Encoder(order="deterministic")
