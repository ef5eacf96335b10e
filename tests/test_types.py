"""`streamrl.types`: packing of siblings, and what `SampleMeta` tells of a group."""

from __future__ import annotations

from collections import Counter

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.types import NO_VERSION, SampleMeta, Trajectory, TrajectoryGroup, special_counts
from tests.groups import groups


@given(groups())
def test_meta_counts_what_a_plain_loop_counts(group: TrajectoryGroup) -> None:
    lengths, counts, at = [], Counter[int](), 0
    for seqlen in group.seqlens:
        sampled = [i for i in range(at, at + seqlen) if group.packed_loss_mask[i]]
        lengths.append(len(sampled))
        counts.update(int(group.packed_policy_versions[i]) for i in sampled)
        at += seqlen
    meta = SampleMeta.of(group, head=3)
    assert meta.response_lengths == lengths
    assert meta.version_counts == counts
    assert meta.oldest_version == min(counts)
    assert meta.sampled_tokens == sum(lengths)
    assert (meta.seq, meta.head, meta.worker) == (group.seq, 3, group.worker)
    assert (meta.size, meta.tokens) == (group.size, group.tokens)
    assert meta.rewards == [float(reward) for reward in group.rewards]
    of_episodes = [
        [reward for reward, episode in zip(meta.rewards, group.episodes, strict=True) if episode == which]
        for which in range(meta.episode_count)
    ]
    assert meta.episode_rewards == [pytest.approx(sum(rewards) / len(rewards)) for rewards in of_episodes]


@given(groups(), st.sets(st.integers(0, 999), max_size=400))
def test_special_tokens_are_counted_where_the_policy_sampled_them(group: TrajectoryGroup, special: set[int]) -> None:
    counts, at = [], 0
    for seqlen in group.seqlens:
        own = range(at, at + seqlen)
        counts.append(sum(bool(group.packed_loss_mask[i]) and int(group.packed_input_ids[i]) in special for i in own))
        at += seqlen
    assert special_counts(group, special) == counts
    assert SampleMeta.of(group, head=0, special=special).special_tokens == sum(counts)


@given(groups())
def test_meta_survives_the_wire(group: TrajectoryGroup) -> None:
    meta = SampleMeta.of(group, head=0)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(meta), type=SampleMeta) == meta


def test_siblings_are_packed_in_order() -> None:
    siblings = [
        Trajectory(
            input_ids=np.array([7, 8, first], dtype=np.int32),
            loss_mask=np.array([False, False, True]),
            behavior_logprobs=np.array([0, 0, -1], dtype=np.float32),
            policy_versions=np.array([NO_VERSION, NO_VERSION, 4], dtype=np.int32),
            reward=reward,
            finish_reason=reason,
        )
        for first, reward, reason in ((1, 0.0, "stop"), (2, 1.0, "length"))
    ]
    group = TrajectoryGroup.from_trajectories(seq=5, worker="rollout/1", prompt_length=2, trajectories=siblings)
    assert group.packed_input_ids.tolist() == [7, 8, 1, 7, 8, 2]
    assert group.packed_loss_mask.tolist() == [False, False, True] * 2
    assert group.seqlens.tolist() == [3, 3]
    assert group.rewards.tolist() == [0.0, 1.0]
    assert group.episodes.tolist() == [0, 1]
    assert group.finish_reasons == ["stop", "length"]
    assert (group.size, group.tokens) == (2, 6)
    dtypes = [group.packed_input_ids, group.packed_behavior_logprobs, group.packed_policy_versions, group.rewards]
    assert [array.dtype for array in dtypes] == [np.int32, np.float32, np.int32, np.float32]
