"""The data between a prompt and a gradient: `Prompt`, `Generation`, `Trajectory`, `TrajectoryGroup`, `SampleMeta`.

Array dtypes are part of the contract; the stream rejects all others.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, groupby
from operator import itemgetter
from statistics import fmean
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

NO_VERSION = -1
"""The policy version of a token that no policy sampled (prompt, environment feedback)."""
NO_EXPERT = 255
"""Replaces an expert's index if the engine did not report which experts computed the token in this layer. Models with
more experts do not fit into one byte per expert."""
LARGEST_REWARD = 1e9
"""Maximum magnitude of a reward: losses square rewards, in float32."""


class Prompt(msgspec.Struct, frozen=True):
    """The task of one sequence number: a pure function of data set, shuffle seed and `seq`."""

    seq: int
    """Position in the run's endless stream of prompts, from 0."""
    index: int
    """Row of the data set."""
    epoch: int
    """Number of passes through the data set before this prompt."""
    messages: list[dict[str, Any]]
    """The conversation so far, as chat messages with `role`, `content` and all other fields of the row (JSON types)."""
    input_ids: list[int]
    """`messages` rendered by the chat template and tokenized, generation prompt included."""
    answer: Any
    """The reference answer as text, or of the row's own JSON type with `data.answer_type = "as_is"`; None if the row
    has none."""
    metadata: dict[str, Any]
    """Everything else in the row, for the reward function (JSON types)."""


class Generation(msgspec.Struct, frozen=True):
    """One response; the lists have one item for each sampled token."""

    output_ids: list[int]
    """`[tokens]` token ids."""
    logprobs: list[float]
    """`[tokens]`, in nats, under the policy that sampled the token."""
    versions: list[int]
    """`[tokens]` versions of the policy that sampled the token."""
    finish_reason: Literal["stop", "length"]
    """`stop`: the model ended it; `length`: it reached its limit of tokens, or its gserver had no more room."""
    matched: str | int | None = None
    """The token id or the stop string that ended the response."""
    interruptions: int = 0
    """How often the response was interrupted and continued."""
    routed_experts: NDArray[np.uint8] | None = None
    """`[prompt + tokens - 1, layers · top_k]` experts of prompt and response without the last token, as in
    `Trajectory`; None: unknown."""


class Trajectory(msgspec.Struct, frozen=True):
    """One response (of one or several turns) with its provenance token by token.

    All arrays cover prompt, responses and environment feedback; unless stated otherwise their shape is `[tokens]`.
    """

    input_ids: NDArray[np.int32]
    """Token ids."""
    loss_mask: NDArray[np.bool_]
    """True where the policy sampled the token; only these tokens enter a loss."""
    behavior_logprobs: NDArray[np.float32]
    """Log-probability under the policy that sampled the token, in nats; 0 where `loss_mask` is False."""
    policy_versions: NDArray[np.int32]
    """Version of the policy that sampled the token; `NO_VERSION` where `loss_mask` is False."""
    reward: float
    """Result of `rew_inf`, at most `LARGEST_REWARD` in magnitude."""
    finish_reason: str
    """`stop`, `length`, or a value defined by the workflow."""
    turns: int = 1
    """Number of generations."""
    score: float | None = None
    """Reward of the whole episode, the same in all of its trajectories; None: equal to `reward`."""
    routed_experts: NDArray[np.uint8] | None = None
    """`[tokens, layers · top_k]` experts that computed each token in each layer when its successor was sampled, layer
    after layer; `NO_EXPERT` where unknown, and in layers without experts. None if all are unknown."""


class ArrayField(NamedTuple):
    """One array of a group."""

    name: str
    dtype: str
    """Dtype on the wire and in recordings."""
    per: Literal["trajectory", "token", "expert"]
    """Unit of its items: one per trajectory, per token, or per known expert of a token."""

    def length(self, *, size: int, tokens: int, routes: int) -> int:
        """Return the number of items in a group of `size` trajectories, with `routes` experts known of each token."""
        return {"trajectory": size, "token": tokens, "expert": tokens * routes}[self.per]


ARRAY_FIELDS = (
    ArrayField("seqlens", "<i4", "trajectory"),
    ArrayField("rewards", "<f4", "trajectory"),
    ArrayField("episodes", "<i4", "trajectory"),
    ArrayField("packed_input_ids", "<i4", "token"),
    ArrayField("packed_behavior_logprobs", "<f4", "token"),
    ArrayField("packed_policy_versions", "<i4", "token"),
    ArrayField("packed_loss_mask", "|b1", "token"),
    ArrayField("packed_routed_experts", "|u1", "expert"),
)
"""The arrays of a `TrajectoryGroup`, for the stream, the buffer, transfers and recordings. Arrays of single bytes are
last, so that all stay aligned when they follow each other."""


class GroupFacts(msgspec.Struct, frozen=True):
    """The fields of a `TrajectoryGroup` except `seq` and the arrays."""

    worker: str
    prompt_length: int
    finish_reasons: list[str]
    generation_seconds: float = 0.0
    scores: list[float] = []
    gserver: str = ""
    reward_parts: list[dict[str, float]] = []
    retries: Annotated[int, msgspec.Meta(ge=0)] = 0


class TrajectoryGroup(msgspec.Struct):
    """All trajectories of one prompt, packed: the unit of the stream.

    Each episode is an independent attempt at the prompt. It has one trajectory, or several if it is an agent's with
    branching conversations. A group has `rollout.group_size` episodes, or fewer if some failed. It has `n` trajectories
    of `seqlens[i]` tokens each; packed arrays have the shape `[sum(seqlens)]`.
    """

    seq: int
    """The prompt's sequence number."""
    worker: str
    """The rollout worker that generated the group, for example `rollout/0`."""
    prompt_length: int
    """Number of leading tokens that all trajectories share."""
    seqlens: NDArray[np.int32]
    """`[n]` tokens of each trajectory."""
    rewards: NDArray[np.float32]
    """`[n]` reward of each trajectory."""
    packed_input_ids: NDArray[np.int32]
    """`[sum(seqlens)]`; this and the next three fields are the concatenated arrays of all trajectories, as in
    `Trajectory`."""
    packed_loss_mask: NDArray[np.bool_]
    packed_behavior_logprobs: NDArray[np.float32]
    packed_policy_versions: NDArray[np.int32]
    finish_reasons: list[str]
    """`[n]` reason why each trajectory ended."""
    generation_seconds: float = 0.0
    """From admission to the last reward, in seconds."""
    episodes: NDArray[np.int32] = msgspec.field(default_factory=lambda: np.zeros(0, np.int32))
    """`[n]` episode of each trajectory, from 0; the trajectories of an episode are adjacent, in order. Default: each
    trajectory is an episode of its own."""
    scores: list[float] = []
    """Reward of each episode, for figures. If calls are rewarded one by one, `rewards` contains the returns that
    followed them. Default: the mean of the episode's trajectory rewards."""
    gserver: str = ""
    """The gserver that received its last requests, for example `gserver/1`; for display."""
    reward_parts: list[dict[str, float]] = []
    """Components of the reward of each episode, by name, for display; empty if the reward has only one."""
    retries: int = 0
    """Number of times that failed siblings were generated again."""
    packed_routed_experts: NDArray[np.uint8] = msgspec.field(default_factory=lambda: np.zeros(0, np.uint8))
    """`[sum(seqlens) · layers · top_k]` experts of all trajectories, as in `Trajectory`; empty if unknown."""

    def __post_init__(self) -> None:
        if not len(self.episodes):
            self.episodes = np.arange(len(self.seqlens), dtype=np.int32)

    @classmethod
    def from_trajectories(
        cls,
        *,
        seq: int,
        worker: str,
        prompt_length: int,
        trajectories: Sequence[Trajectory],
        generation_seconds: float = 0.0,
        episodes: Sequence[int] = (),
        gserver: str = "",
        reward_parts: Sequence[dict[str, float]] = (),
        retries: int = 0,
    ) -> TrajectoryGroup:
        """Pack trajectories that share their first `prompt_length` tokens into a group."""
        group = cls(
            seq=seq,
            worker=worker,
            prompt_length=prompt_length,
            seqlens=np.array([len(t.input_ids) for t in trajectories], dtype=np.int32),
            rewards=np.array([t.reward for t in trajectories], dtype=np.float32),
            packed_input_ids=np.concatenate([t.input_ids for t in trajectories]),
            packed_loss_mask=np.concatenate([t.loss_mask for t in trajectories]),
            packed_behavior_logprobs=np.concatenate([t.behavior_logprobs for t in trajectories]),
            packed_policy_versions=np.concatenate([t.policy_versions for t in trajectories]),
            finish_reasons=[t.finish_reason for t in trajectories],
            generation_seconds=generation_seconds,
            episodes=np.array(episodes, dtype=np.int32),
            gserver=gserver,
            reward_parts=list(reward_parts),
            retries=retries,
            packed_routed_experts=_packed_experts(trajectories),
        )
        if any(t.score is not None for t in trajectories):
            said = [t.reward if t.score is None else t.score for t in trajectories]
            group.scores = _means(said, group.episodes.tolist())
        return group

    @classmethod
    def of(cls, seq: int, facts: GroupFacts, arrays: Mapping[str, NDArray[Any]]) -> TrajectoryGroup:
        """Return the group with these facts and `arrays` (`ARRAY_FIELDS`)."""
        fields: dict[str, Any] = {name: getattr(facts, name) for name in GroupFacts.__struct_fields__}
        fields |= arrays
        return cls(seq=seq, **fields)

    @property
    def facts(self) -> GroupFacts:
        """All fields except `seq` and the arrays."""
        return GroupFacts(**{name: getattr(self, name) for name in GroupFacts.__struct_fields__})

    @property
    def packed_facts(self) -> NDArray[np.uint8]:
        """The facts as an array of msgpack bytes."""
        return np.frombuffer(msgspec.msgpack.encode(self.facts), np.uint8)

    @property
    def mean_reward(self) -> float:
        """Mean reward of its episodes."""
        return fmean(self.scores or _means(self.rewards.tolist(), self.episodes.tolist()))

    @property
    def size(self) -> int:
        """Number of trajectories."""
        return len(self.seqlens)

    @property
    def tokens(self) -> int:
        """Tokens of all trajectories, with the prompt counted in each."""
        return len(self.packed_input_ids)

    @property
    def routes(self) -> int:
        """Number of known experts per token: 0, or layers · top_k."""
        return len(self.packed_routed_experts) // self.tokens if self.tokens else 0

    @property
    def routed_experts(self) -> NDArray[np.uint8]:
        """`packed_routed_experts` by token: `[sum(seqlens), routes]`."""
        return self.packed_routed_experts.reshape(self.tokens, self.routes)

    def bounds(self, index: int) -> tuple[int, int]:
        """Return the start and end of trajectory `index` in the packed arrays."""
        end = int(self.seqlens[: index + 1].sum())
        return end - int(self.seqlens[index]), end

    def alone(self, index: int) -> TrajectoryGroup:
        """Return a group with only trajectory `index`."""
        first, end = self.bounds(index)
        return TrajectoryGroup(
            seq=self.seq,
            worker=self.worker,
            prompt_length=self.prompt_length,
            seqlens=self.seqlens[index : index + 1],
            rewards=self.rewards[index : index + 1],
            packed_input_ids=self.packed_input_ids[first:end],
            packed_loss_mask=self.packed_loss_mask[first:end],
            packed_behavior_logprobs=self.packed_behavior_logprobs[first:end],
            packed_policy_versions=self.packed_policy_versions[first:end],
            finish_reasons=self.finish_reasons[index : index + 1],
            generation_seconds=self.generation_seconds,
            packed_routed_experts=self.routed_experts[first:end].reshape(-1),
        )


class SampleMeta(msgspec.Struct, frozen=True):
    """The master's data about a stored group; the arrays stay on the model worker."""

    seq: int
    """The prompt's sequence number."""
    head: int
    """The model worker that received and stored the group."""
    worker: str
    """The rollout worker that generated it."""
    size: int
    """Number of trajectories."""
    tokens: int
    """Tokens of all trajectories."""
    rewards: list[float]
    """`[size]` reward of each trajectory."""
    response_lengths: list[int]
    """`[size]` number of sampled tokens of each trajectory."""
    version_counts: dict[int, int]
    """Policy version → number of the group's tokens that it sampled."""
    generation_seconds: float
    """From admission to the last reward, in seconds."""
    episodes: list[int] = []
    """`[size]` episode of each trajectory, as in `TrajectoryGroup`; empty: each is an episode of its own."""
    scores: list[float] = []
    """As in `TrajectoryGroup`."""
    routes: int = 0
    """As in `TrajectoryGroup`."""
    facts_bytes: int = 0
    """Length of the group's `packed_facts`."""
    retries: int = 0
    """As in `TrajectoryGroup`."""
    special_tokens: int = 0
    """Sampled special tokens that do not end a response: `Response.text` lacks them."""

    @property
    def episode_count(self) -> int:
        """Number of episodes."""
        return self.episodes[-1] + 1 if self.episodes else self.size

    @property
    def episode_rewards(self) -> list[float]:
        """Reward of each episode."""
        if self.scores:
            return self.scores
        return _means(self.rewards, self.episodes) if self.episodes else self.rewards

    @property
    def oldest_version(self) -> int:
        """The oldest policy version among the sampled tokens."""
        return min(self.version_counts)

    @property
    def sampled_tokens(self) -> int:
        """Tokens that the policy sampled."""
        return sum(self.version_counts.values())

    @classmethod
    def of(cls, group: TrajectoryGroup, *, head: int, special: Collection[int] = ()) -> SampleMeta:
        """Describe `group`, which model worker `head` has stored; `special`: as in `special_counts`."""
        response_lengths, version_counts = _count_sampled(group)
        return cls(
            seq=group.seq,
            head=head,
            worker=group.worker,
            size=group.size,
            tokens=group.tokens,
            rewards=group.rewards.tolist(),
            response_lengths=response_lengths,
            version_counts=version_counts,
            generation_seconds=group.generation_seconds,
            episodes=group.episodes.tolist() if int(group.episodes[-1]) + 1 < group.size else [],
            scores=group.scores,
            routes=group.routes,
            facts_bytes=len(group.packed_facts),
            retries=group.retries,
            special_tokens=sum(special_counts(group, special)),
        )


def _means(rewards: Sequence[float], episodes: Sequence[int]) -> list[float]:
    """Return the mean of the `rewards` of each episode."""
    of_episodes = groupby(zip(episodes, rewards, strict=True), key=itemgetter(0))
    return [fmean(reward for _, reward in of_one) for _, of_one in of_episodes]


def _packed_experts(trajectories: Sequence[Trajectory]) -> NDArray[np.uint8]:
    """Return `TrajectoryGroup.packed_routed_experts`, with `NO_EXPERT` for trajectories without known experts."""
    width = max(0 if t.routed_experts is None else t.routed_experts.shape[1] for t in trajectories)
    routed = [
        np.full((len(t.input_ids), width), NO_EXPERT, np.uint8) if t.routed_experts is None else t.routed_experts
        for t in trajectories
    ]
    return np.concatenate(routed).reshape(-1)


def special_counts(group: TrajectoryGroup, special: Collection[int]) -> list[int]:
    """Return the number of sampled tokens of each trajectory that are in `special` (`models.special_token_ids`)."""
    if not special:
        return [0] * group.size
    found = group.packed_loss_mask & np.isin(group.packed_input_ids, list(special))
    starts = np.cumsum(group.seqlens) - group.seqlens
    counts: list[int] = np.add.reduceat(found, starts, dtype=np.int64).tolist()
    return counts


def _count_sampled(group: TrajectoryGroup) -> tuple[list[int], dict[int, int]]:
    """Return the number of sampled tokens of each trajectory, and of each policy version.

    Counts by runs of equal versions, because versions change rarely.
    """
    versions = group.packed_policy_versions
    changes = (versions[1:] != versions[:-1]).nonzero()[0] + 1
    run_ends = [*changes.tolist(), len(versions)]
    run_versions = [int(versions[0]), *versions[changes].tolist()]
    lengths: list[int] = []
    counts: dict[int, int] = {}
    ends_of_all = accumulate(group.seqlens.tolist())
    start, own_end, length = 0, next(ends_of_all), 0
    for version, end in zip(run_versions, run_ends, strict=True):
        while end > own_end:  # the run continues in the next trajectory
            if version != NO_VERSION:
                length += own_end - start
                counts[version] = counts.get(version, 0) + own_end - start
            lengths.append(length)
            start, own_end, length = own_end, next(ends_of_all), 0
        if version != NO_VERSION:
            length += end - start
            counts[version] = counts.get(version, 0) + end - start
        start = end
    return [*lengths, length], counts
