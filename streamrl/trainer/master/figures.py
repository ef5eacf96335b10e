"""The report of a training step: its timeline and its figures. Pure.

Figures come from the master's metadata of the batch and from the results of the model workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev

import msgspec

from streamrl.mixture import Mixture
from streamrl.records.metrics import LENGTHS_KEPT, TASK, mean_age
from streamrl.trainer.calls import TrainReply
from streamrl.trainer.master.batches import BatchFormer
from streamrl.types import SampleMeta


class Span(msgspec.Struct, frozen=True):
    """The time of one MFC in a step."""

    name: str
    begin: float
    """Seconds since the epoch."""
    end: float
    compute_seconds: float = 0.0
    """Seconds in which the slowest worker computed."""
    update_seconds: float = 0.0
    """The optimizer's part of `compute_seconds`."""


MEAN_OF_PART = {
    "policy_shift": "policy_shift_mean",
    "clipped": "clip_share",
    "weight_limited": "behavior_weight_limited_share",
    "ratio_deviation": "importance_ratio_deviation",
    "behavior_kl": "behavior_kl",
}
"""Sum → metric of a subset of the tokens."""

LOSSES = frozenset({"loss", "critic/loss"})
"""Metrics that are averaged over the optimizer steps of a training step, not added up."""


def groups_with_contrast(batch: Sequence[SampleMeta]) -> int:
    """Return the number of groups whose siblings have different rewards."""
    return sum(min(meta.rewards) < max(meta.rewards) for meta in batch)


def batch_metrics(batch: Sequence[SampleMeta], former: BatchFormer, *, policy_version: int) -> dict[str, float]:
    """Return the figures of the batch."""
    rewards = [reward for meta in batch for reward in meta.episode_rewards]
    lengths = [length for meta in batch for length in meta.response_lengths]
    sampled = sum(meta.sampled_tokens for meta in batch)
    young = sum(former.tokens_in_loss(meta, policy_version=policy_version) for meta in batch)
    return {
        "reward_mean": fmean(rewards),
        "reward_std": pstdev(rewards),
        "response_length_mean": fmean(lengths),
        "groups": len(batch),
        "groups_shrunk": sum(meta.episode_count < former.group_size for meta in batch),
        "siblings_retried": sum(meta.retries for meta in batch),
        "groups_with_contrast": groups_with_contrast(batch),
        "tokens_sampled": sampled,
        "tokens_trained": young,
        "tokens_masked": sampled - young,
        "tokens_special": sum(meta.special_tokens for meta in batch),
        "generation_seconds_mean": fmean(meta.generation_seconds for meta in batch),
    }


def task_metrics(batch: Sequence[SampleMeta], mixture: Mixture, *, policy_version: int) -> dict[str, float]:
    """Return figures of each of several tasks, as `task/NAME/FIGURE`; of a task without groups only their number."""
    found: dict[str, float] = {}
    for name in mixture.names if len(mixture.names) > 1 else ():
        own = [meta for meta in batch if mixture.task(meta.seq) == name]
        figures: dict[str, float] = {"groups": len(own)}
        if own:
            figures["reward_mean"] = fmean(reward for meta in own for reward in meta.episode_rewards)
            figures["response_length_mean"] = fmean(length for meta in own for length in meta.response_lengths)
            figures["token_age_mean"] = mean_age(sampled_ages(own, policy_version=policy_version)) or 0.0
        found |= {f"{TASK}/{name}/{figure}": value for figure, value in figures.items()}
    return found


def sampled_ages(batch: Sequence[SampleMeta], *, policy_version: int) -> dict[int, int]:
    """Return the number of sampled tokens of the batch, by their age in versions, the youngest first."""
    ages: dict[int, int] = {}
    for meta in batch:
        for version, count in meta.version_counts.items():
            age = policy_version - version
            ages[age] = ages.get(age, 0) + count
    return dict(sorted(ages.items()))


def masked_ages(batch: Sequence[SampleMeta], *, policy_version: int, max_staleness: int) -> dict[int, int]:
    """Return the number of sampled tokens of the batch that are older than `max_staleness`, by their age in
    versions."""
    ages = sampled_ages(batch, policy_version=policy_version)
    return {age: count for age, count in ages.items() if age > max_staleness}


def train_metrics(trained: Sequence[TrainReply]) -> dict[str, float]:
    """Return the figures of `actor_train` over all ranks; means are over the computed tokens.

    Effective sample sizes are missing if no token entered the loss. `sampling_diff` is the difference between the
    log-probabilities of sampling and the trainer's, on responses of age 0, and is missing if there are none;
    `policy_shift` is the same difference over all tokens, so it grows with their age.
    """
    sums: dict[str, float] = {}
    maxima: dict[str, float] = {}
    for rank in trained:
        for name, value in rank.sums.items():
            share = value / rank.updates if name in LOSSES else value
            sums[name] = sums.get(name, 0.0) + share
        for name, value in rank.maxima.items():
            maxima[name] = max(maxima.get(name, value), value)
    tokens = max(sums.get("tokens", 0.0), 1.0)
    metrics = {
        "loss": sums.get("loss", 0.0),
        "clip_share": sums.get("clipped", 0.0) / tokens,
        "behavior_weight_mean": sums.get("behavior_weight", 0.0) / tokens,
        "behavior_weight_limited_share": sums.get("weight_limited", 0.0) / tokens,
        "importance_ratio_mean": sums.get("ratio", 0.0) / tokens,
        "importance_ratio_max": maxima.get("ratio", 0.0),
        "importance_ratio_deviation": sums.get("ratio_deviation", 0.0) / tokens,
        "importance_ratio_above_2_share": sums.get("ratio_above_2", 0.0) / tokens,
        "importance_ratio_below_half_share": sums.get("ratio_below_half", 0.0) / tokens,
        "behavior_kl": sums.get("behavior_kl", 0.0) / tokens,
        "log_ratio_second_moment": sums.get("log_ratio_squares", 0.0) / tokens,
        "policy_shift_mean": sums.get("policy_shift", 0.0) / tokens,
        "entropy": sums.get("entropy", 0.0) / tokens,
        "grad_norm": maxima.get("grad_norm", 0.0),
        "lr": maxima.get("lr", 0.0),
        "tokens_computed": sums.get("computed_tokens", 0.0),
        "blocked_seconds": max((rank.blocked_seconds for rank in trained), default=0.0),
    }
    for metric, count, weight in (
        ("effective_sample_size", "tokens", "ratio"),
        ("sequence_effective_sample_size", "sequences", "sequence_weight"),
    ):
        if sums.get(f"{weight}_squares"):
            metrics[metric] = effective_sample_size(sums, count, weight)
    if comparable := sums.get("comparable_tokens"):
        metrics["sampling_diff_mean"] = sums["sampling_diff"] / comparable
        metrics["sampling_diff_max"] = maxima["sampling_diff"]
    if "expert_load" in maxima:
        metrics["expert_load"] = maxima["expert_load"]
    if routable := sums.get("routable_tokens"):
        metrics["routing_known_share"] = sums["routed_tokens"] / routable
    if "kl" in sums:
        metrics["kl"] = sums["kl"] / tokens
        metrics["kl_coef"] = maxima["kl_coef"]
    return metrics | _of_critic(sums, maxima) | _of_parts(sums)


def effective_sample_size(sums: Mapping[str, float], count: str, weight: str, *, part: str = "") -> float:
    """Return Kish's effective sample size as a share of the sample: `(Σw)² / (n · Σw²)`, from 1/n to 1.

    n is `sums[count]`, Σw `sums[weight]`, Σw² `sums[weight_squares]`, each with `part` appended.
    """
    return sums[weight + part] ** 2 / (sums[count + part] * sums[f"{weight}_squares{part}"])


def sample_of_lengths(batch: Sequence[SampleMeta]) -> list[list[int]]:
    """Return `StepReport.response_lengths` of a training batch."""
    lengths: list[list[int]] = []
    counted = 0
    for meta in batch:
        if counted >= LENGTHS_KEPT:
            break
        lengths.append(meta.response_lengths)
        counted += meta.size
    return lengths


def token_ages(trained: Sequence[TrainReply]) -> dict[int, int]:
    """Return the number of tokens that entered the policy's loss, by their age in versions, over all ranks."""
    ages: dict[int, int] = {}
    for rank in trained:
        for age, count in rank.token_ages.items():
            ages[age] = ages.get(age, 0) + count
    return dict(sorted(ages.items()))


def _of_critic(sums: dict[str, float], maxima: dict[str, float]) -> dict[str, float]:
    """Return the figures of `critic_train`; empty without a critic.

    `critic/explained_variance`: 1 - Var(return - value) / Var(return); 1 for a perfect critic, 0 for one that predicts
    the mean.
    """
    tokens = sums.get("critic/tokens")
    if not tokens:
        return {}
    spread = sums["critic/return_squares"] / tokens - (sums["critic/return"] / tokens) ** 2
    error = sums["critic/residual_squares"] / tokens - (sums["critic/residual"] / tokens) ** 2
    return {
        "critic/loss": sums["critic/loss"],
        "critic/clip_share": sums["critic/clipped"] / tokens,
        "critic/value_mean": sums["critic/value"] / tokens,
        "critic/return_mean": sums["critic/return"] / tokens,
        "critic/explained_variance": 1 - error / spread if spread > 0 else 0.0,
        "critic/grad_norm": maxima["critic/grad_norm"],
        "critic/lr": maxima["critic/lr"],
    }


def _of_parts(sums: Mapping[str, float]) -> dict[str, float]:
    """Return the means over the tokens of one age (`policy_shift_mean/age_0`), or of one sign of the advantage and
    direction (`clip_share/positive_outward`), for all such subsets in `sums`."""
    metrics: dict[str, float] = {}
    for part, tokens in sorted((n.removeprefix("tokens"), v) for n, v in sums.items() if n.startswith("tokens/")):
        if tokens:
            metrics |= {
                metric + part: sums[figure + part] / tokens
                for figure, metric in MEAN_OF_PART.items()
                if figure + part in sums
            }
            if sums.get(f"ratio_squares{part}"):
                metrics[f"effective_sample_size{part}"] = effective_sample_size(sums, "tokens", "ratio", part=part)
    return metrics
