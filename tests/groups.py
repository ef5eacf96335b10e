"""Trajectory groups for tests: one by hand, and a hypothesis strategy for any."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from hypothesis import strategies as st

from streamrl.ledger import Ledger
from streamrl.stream_dataset import StreamDataset
from streamrl.types import NO_VERSION, SampleMeta, TrajectoryGroup


def admitted_ledger(*, batch: int = 2, count: int = 100, rejected: Sequence[int] = ()) -> Ledger:
    """A ledger that has leased `count` groups to one worker, which gave some up; batches are of `batch` groups."""
    ledger = Ledger(groups_per_batch=batch, max_staleness=count, lease_seconds=1e9)
    ledger.admit("rollout/0", count, now=0.0)
    for seq in rejected:
        assert ledger.reject(seq)
    return ledger


def make_group(
    seq: int = 0,
    *,
    seqlens: tuple[int, ...] = (5, 7),
    prompt_length: int = 3,
    version: int = 0,
    worker: str = "rollout/0",
    routes: int = 0,
) -> TrajectoryGroup:
    """Siblings of `seqlens` tokens that share a prompt; every other token was sampled under `version`. Of each token
    `routes` experts are known."""
    mask = np.concatenate([np.arange(n) >= prompt_length for n in seqlens])
    return TrajectoryGroup(
        seq=seq,
        worker=worker,
        prompt_length=prompt_length,
        seqlens=np.array(seqlens, dtype=np.int32),
        rewards=np.linspace(0, 1, len(seqlens), dtype=np.float32),
        packed_input_ids=np.concatenate([np.arange(n) % 1000 for n in seqlens]).astype(np.int32),
        packed_loss_mask=mask,
        packed_behavior_logprobs=np.where(mask, -0.5, 0).astype(np.float32),
        packed_policy_versions=np.where(mask, version, NO_VERSION).astype(np.int32),
        finish_reasons=["stop"] * len(seqlens),
        packed_routed_experts=(np.arange(sum(seqlens) * routes) % 100).astype(np.uint8),
    )


def make_meta(
    seq: int,
    lengths: Sequence[int] = (3, 5),
    *,
    rewards: Sequence[float] | None = None,
    versions: Mapping[int, int] | None = None,
    head: int = 0,
) -> SampleMeta:
    """What the trainer knows of a group of responses of `lengths` tokens behind a prompt of 6. `versions`: how many
    tokens each one sampled, if not version 0 all; the rewards are 0, 1, … unless given."""
    return SampleMeta(
        seq=seq,
        head=head,
        worker="rollout/0",
        size=len(lengths),
        tokens=6 * len(lengths) + sum(lengths),
        rewards=[*(range(len(lengths)) if rewards is None else rewards)],
        response_lengths=[*lengths],
        version_counts=dict(versions or {0: sum(lengths)}),
        generation_seconds=1.0,
    )


@st.composite
def groups(draw: st.DrawFn) -> TrajectoryGroup:
    """Any valid group: several turns, versions that change in the middle of a turn."""
    siblings = draw(st.integers(1, 5))
    episodes = np.cumsum([0, *draw(st.lists(st.integers(0, 1), min_size=siblings - 1, max_size=siblings - 1))])
    prompt_length = draw(st.integers(0, 6))
    lengths = draw(st.lists(st.integers(1, 12), min_size=siblings, max_size=siblings))
    seqlens = np.array(lengths, dtype=np.int32) + max(prompt_length, 1)
    tokens = int(seqlens.sum())
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    starts = np.cumsum(seqlens) - seqlens
    ids = random.integers(0, 1000, tokens).astype(np.int32)
    mask = random.random(tokens) < draw(st.sampled_from([0.2, 0.9, 1.0]))
    for start in starts:
        ids[start : start + prompt_length] = ids[:prompt_length]
        mask[start : start + max(prompt_length, 1)] = False
        mask[start + max(prompt_length, 1)] = True
    versions = np.sort(random.integers(0, draw(st.integers(1, 9)), tokens))
    return TrajectoryGroup(
        seq=draw(st.integers(0, 2**40)),
        worker=draw(st.text(max_size=12)),
        prompt_length=prompt_length,
        seqlens=seqlens,
        rewards=random.normal(size=siblings).astype(np.float32),
        packed_input_ids=ids,
        packed_loss_mask=mask,
        packed_behavior_logprobs=np.where(mask, -random.random(tokens), 0).astype(np.float32),
        packed_policy_versions=np.where(mask, versions, NO_VERSION).astype(np.int32),
        finish_reasons=draw(st.lists(st.text(max_size=8), min_size=siblings, max_size=siblings)),
        generation_seconds=draw(st.floats(0, 1e6)),
        episodes=episodes.astype(np.int32),
        gserver=draw(st.text(max_size=12)),
        retries=draw(st.integers(0, 9)),
        reward_parts=[{"function": 0.5, "overlong": -0.25}] * (int(episodes[-1]) + 1) * draw(st.booleans()),
        packed_routed_experts=random.integers(0, 256, tokens * draw(st.sampled_from([0, 0, 6])), np.uint8),
    )


def held(dataset: StreamDataset, *, below: int = 1000) -> list[int]:
    """Sequence numbers `below` a limit of the groups that `dataset` holds."""
    return [seq for seq in range(below) if dataset.find(seq) is not None]
