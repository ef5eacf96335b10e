"""Figures about the distance of the policy from its data: against loops, however the tokens are spread."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.config import AlgorithmConfig, from_dict
from streamrl.trainer.algorithms.objective import LARGEST_LOG_WEIGHT, Objective, Totals, objective
from streamrl.trainer.algorithms.tokens import Tokens
from streamrl.trainer.calls import TrainReply
from streamrl.trainer.master.figures import train_metrics
from tests.trainer.pretended import whole_run


class Token(NamedTuple):
    behavior: float
    now: float
    advantage: float
    age: int
    response: int


def computed(tokens: list[Token], algorithm: AlgorithmConfig, *, total: int) -> Objective:
    """The objective of a part of a batch of `total` tokens; `response` numbers are as in the batch."""

    def column(name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor([getattr(token, name) for token in tokens], dtype=dtype)

    behavior, responses = column("behavior"), column("response", torch.int64)
    return objective(
        Tokens(
            logprobs=column("now").requires_grad_(),
            entropy=torch.zeros(len(tokens)),
            behavior_logprobs=behavior,
            proximal_logprobs=behavior,
            ref_logprobs=None,
            advantages=column("advantage"),
            sequence=responses,
            sequences=8,
            of_episode=responses.bincount()[responses],
            age=column("age", torch.int64),
            ages=sorted({token.age for token in tokens}),
            comparable=torch.zeros(len(tokens), dtype=torch.bool),
            comparable_tokens=0,
            weight=torch.ones(len(tokens)),
        ),
        algorithm,
        kl_coef=0.0,
        totals=Totals(tokens=total, episodes=8, longest=8),
    )


def metrics_of(ranks: list[list[list[Token]]], algorithm: AlgorithmConfig) -> dict[str, float]:
    """Metrics of a step: ranks → micro-batches → tokens."""
    total = sum(len(micro) for rank in ranks for micro in rank)
    trained = []
    for rank in ranks:
        sums: defaultdict[str, float] = defaultdict(float)
        maxima: dict[str, float] = {}
        for micro in rank:
            found = computed(micro, algorithm, total=total)
            for name, value in found.sums.items():
                sums[name] += float(value)
            for name, value in found.maxima.items():
                maxima[name] = max(maxima.get(name, float(value)), float(value))
        trained.append(TrainReply(0.0, 0.0, dict(sums), maxima, {}))
    return train_metrics(trained)


def ess(weights: list[float]) -> float:
    return sum(weights) ** 2 / (len(weights) * sum(w * w for w in weights))


def expected(tokens: list[Token], algorithm: AlgorithmConfig) -> dict[str, float]:
    """The same by a loop over tokens, in float64."""
    shifts = [float(torch.tensor(t.now)) - float(torch.tensor(t.behavior)) for t in tokens]  # as float32 has them
    ratios = [math.exp(shift) for shift in shifts]
    clipped = [
        (t.advantage > 0 and r > 1 + algorithm.clip_high) or (t.advantage < 0 and r < 1 - algorithm.clip_low)
        for t, r in zip(tokens, ratios, strict=True)
    ]
    wanted = {
        "clip_share": fmean(clipped),
        "importance_ratio_mean": fmean(ratios),
        "importance_ratio_max": max(ratios),
        "importance_ratio_deviation": fmean(abs(r - 1) for r in ratios),
        "importance_ratio_above_2_share": fmean(r > 2 for r in ratios),
        "importance_ratio_below_half_share": fmean(r < 0.5 for r in ratios),
        "effective_sample_size": ess(ratios),
        "behavior_kl": fmean(r - 1 - s for r, s in zip(ratios, shifts, strict=True)),
        "log_ratio_second_moment": fmean(s * s for s in shifts),
        "policy_shift_mean": fmean(abs(s) for s in shifts),
    }
    products: dict[int, float] = defaultdict(float)
    for token, shift in zip(tokens, shifts, strict=True):
        products[token.response] += shift
    wanted["sequence_effective_sample_size"] = ess([math.exp(p) for p in products.values()])
    for age in {t.age for t in tokens}:
        mine = [number for number, token in enumerate(tokens) if token.age == age]
        wanted |= {
            f"clip_share/age_{age}": fmean(clipped[n] for n in mine),
            f"effective_sample_size/age_{age}": ess([ratios[n] for n in mine]),
            f"importance_ratio_deviation/age_{age}": fmean(abs(ratios[n] - 1) for n in mine),
            f"behavior_kl/age_{age}": fmean(ratios[n] - 1 - shifts[n] for n in mine),
            f"policy_shift_mean/age_{age}": fmean(abs(shifts[n]) for n in mine),
            f"behavior_weight_limited_share/age_{age}": 0.0,
        }
    for sign in (1, -1):
        for outward in (True, False):
            mine = [
                number
                for number, token in enumerate(tokens)
                if token.advantage * sign > 0 and (token.advantage * shifts[number] > 0) == outward
            ]
            if mine:
                name = f"{'positive' if sign > 0 else 'negative'}_{'outward' if outward else 'restoring'}"
                wanted[f"clip_share/{name}"] = fmean(clipped[n] for n in mine)
    return wanted


drawn_tokens = st.lists(
    st.builds(
        Token,
        behavior=st.floats(-5, -0.01),
        now=st.floats(-5, -0.01),
        advantage=st.sampled_from([-1.5, -0.25, 0.0, 0.25, 1.5]),
        age=st.integers(0, 3),
        response=st.integers(0, 7),
    ),
    min_size=1,
    max_size=40,
)


@given(drawn_tokens, st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_figures_are_those_of_a_loop_over_all_tokens_however_they_are_spread(tokens, chance):
    """Over two ranks of one to three micro-batches each; a response stays whole."""
    algorithm = AlgorithmConfig(proximal="behavior")
    spread: list[list[list[Token]]] = [[[] for _ in range(chance.randint(1, 3))] for _ in range(2)]
    for response in {token.response for token in tokens}:
        micro = chance.choice(chance.choice(spread))
        micro += [token for token in tokens if token.response == response]
    ranks = [[micro for micro in rank if micro] for rank in spread]
    found = metrics_of(ranks, algorithm)
    wanted = expected(tokens, algorithm)
    assert {name: found.get(name) for name in wanted} == pytest.approx(wanted, rel=1e-6, abs=1e-9)
    cells = {name for name in found if "/" in name}
    assert cells == {name for name in wanted if "/" in name}


def test_nothing_has_moved_on_policy():
    tokens = [Token(-0.3 * n - 0.1, -0.3 * n - 0.1, 1.0, 0, n % 4) for n in range(12)]
    found = metrics_of([[tokens]], AlgorithmConfig())
    assert found["effective_sample_size"] == found["sequence_effective_sample_size"] == 1
    assert found["importance_ratio_deviation"] == found["behavior_kl"] == found["log_ratio_second_moment"] == 0


def test_a_response_whose_weight_overflows_leaves_figures_finite():
    """Log-ratios of 200 a token: their product is beyond float64, which one token's square is not."""
    far = [Token(-200.1, -0.1, 1.0, 1, 0) for _ in range(5)]
    found = metrics_of([[[*far, Token(-0.1, -0.1, -1.0, 1, 1)]]], AlgorithmConfig())
    assert LARGEST_LOG_WEIGHT < 5 * 200
    assert all(math.isfinite(value) for value in found.values())
    assert found["sequence_effective_sample_size"] == pytest.approx(0.5)


def test_every_figure_is_in_the_table_of_metrics(tmp_path):
    table = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text().partition("\n## The metrics of a step\n")[2]
    documented = set(re.findall(r"`([a-z0-9_/]+)`", table.partition("\n## ")[0]))
    of_parts = {"age_0", "positive_outward", "positive_restoring", "negative_outward", "negative_restoring"}
    tokens = [Token(-1.0, -1.0 + shift, advantage, 0, 0) for shift in (-0.5, 0.5) for advantage in (-1.0, 1.0)]
    config = from_dict(
        {"run": {"dir": str(tmp_path), "total_train_steps": 2}, "rollout": {"group_size": 2}, "metrics": {"sinks": []}}
    )
    _, run = whole_run(config)
    given = {name.partition("/gserver")[0] for report in run.manager.reports for name in report.metrics}
    given |= set(metrics_of([[tokens]], AlgorithmConfig()))
    assert {"grad_norm_ratio", "clip_share/age_0", "clip_share/negative_outward"} <= given
    assert {name for name in given if name.partition("/")[2] not in of_parts} <= documented
