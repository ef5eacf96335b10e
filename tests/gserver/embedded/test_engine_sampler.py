"""Tokens follow the distribution that was asked for."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from streamrl.gserver.embedded.request import BLOCK, Draw, invert, sample, scaled_logprobs, uniform

DRAWS = 20_000


def logits_of(width: int, *, seed: int = 0, spread: float = 1.5) -> torch.Tensor:
    return torch.randn(width, generator=torch.Generator().manual_seed(seed)) * spread


def counts_of(logits: torch.Tensor, draw: Draw, draws: int = DRAWS) -> NDArray[np.int64]:
    """How often each token comes in `draws` draws of different seeds."""
    counts = np.zeros(len(logits), dtype=np.int64)
    for low in range(0, draws, 2000):
        rows = [
            Draw(
                seed=low + i,
                temperature=draw.temperature,
                top_p=draw.top_p,
                top_k=draw.top_k,
                min_p=draw.min_p,
            )
            for i in range(2000)
        ]
        sampled = sample(logits.expand(2000, -1).clone(), rows, [3] * 2000)
        np.add.at(counts, sampled.tokens, 1)
    return counts


def filtered(logits: torch.Tensor, draw: Draw) -> NDArray[np.float64]:
    """The exact distribution, written down as SGLang describes it."""
    p = (logits.double() / draw.temperature).softmax(-1).numpy()
    order = np.argsort(-p)
    kept = np.zeros_like(p)
    mass = 0.0
    for rank, token in enumerate(order):
        if rank and draw.top_k > 0 and rank >= draw.top_k:
            break
        if mass > draw.top_p or p[token] < draw.min_p * p[order[0]]:
            break
        kept[token] = p[token]
        mass += p[token]
    distribution: NDArray[np.float64] = kept / kept.sum()
    return distribution


def assert_follows(counts: NDArray[np.int64], expected: NDArray[np.float64]) -> None:
    """Pearson's chi-square over tokens expected at least 5 times, 5 deviations of slack."""
    assert counts[expected == 0].sum() == 0
    wanted = expected * counts.sum()
    often = wanted >= 5
    statistic = (((counts - wanted) ** 2) / np.where(often, wanted, 1))[often].sum()
    freedom = often.sum() - 1
    assert statistic < freedom + 5 * math.sqrt(2 * max(freedom, 1)) + 5


@pytest.mark.parametrize(
    "draw",
    [
        Draw(seed=0),
        Draw(seed=0, temperature=0.5),
        Draw(seed=0, temperature=1.7),
        Draw(seed=0, top_k=5),
        Draw(seed=0, top_k=1),
        Draw(seed=0, top_p=0.6),
        Draw(seed=0, top_p=1e-6),
        Draw(seed=0, min_p=0.2),
        Draw(seed=0, temperature=0.8, top_k=12, top_p=0.8, min_p=0.05),
    ],
    ids=lambda d: f"t{d.temperature} p{d.top_p} k{d.top_k} m{d.min_p}",
)
def test_small_vocabulary(draw: Draw) -> None:
    logits = logits_of(30)
    assert_follows(counts_of(logits, draw), filtered(logits, draw))


@pytest.mark.parametrize("width", [3, 40, 16 * BLOCK])
def test_inversion_is_exact(width: int) -> None:
    """A grid of uniform numbers gives each token its share, to within one point of the grid."""
    points = 50_000
    weights = logits_of(width, spread=1.0).softmax(-1)
    grid = (torch.arange(points, dtype=torch.float64) + 0.5) / points
    tokens = torch.cat([invert(weights.expand(len(part), -1).contiguous(), part) for part in grid.split(1000)])
    assert (torch.diff(tokens) >= 0).all()
    counts = torch.bincount(tokens, minlength=width)
    assert (counts - weights * points).abs().max() <= 1.1


def test_greedy_rows_take_the_likeliest_and_report_temperature_one() -> None:
    logits = torch.stack([logits_of(30, seed=s) for s in range(6)])
    draws = [Draw(seed=s, temperature=0.0 if s % 2 else 1.0) for s in range(6)]
    sampled = sample(logits, draws, [0] * 6)
    for s in (1, 3, 5):
        assert sampled.tokens[s] == int(logits[s].argmax())
        assert sampled.logprobs[s] == pytest.approx(float(logits[s].log_softmax(-1).max()), abs=1e-6)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**64 - 1), st.lists(st.integers(0, 2**40), min_size=1, max_size=5))
def test_a_row_does_not_depend_on_the_batch(seed: int, others: list[int]) -> None:
    logits = torch.stack([logits_of(30, seed=s) for s in range(len(others) + 1)])
    alone = sample(logits[:1], [Draw(seed=seed, top_p=0.9)], [7])
    together = sample(logits, [Draw(seed=seed, top_p=0.9), *(Draw(seed=s) for s in others)], [7, *others])
    assert together.tokens[0] == alone.tokens[0]
    assert together.logprobs[0] == alone.logprobs[0]
    plain = sample(logits[1:2], [Draw(seed=others[0])], others[:1])
    assert (plain.tokens[0], plain.logprobs[0]) == (together.tokens[1], together.logprobs[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 7, 16, 700, 50_257])
def test_log_probabilities_are_those_of_the_scaled_distribution(dtype: torch.dtype, width: int) -> None:
    logits = torch.stack([logits_of(width, seed=s, spread=4.0) for s in range(6)]).to(dtype)
    if width > 1:
        logits[2, 0] = -math.inf  # a token that must not come
    draws = [Draw(seed=s, temperature=t) for s, t in enumerate((1.0, 0.3, 1.7, 0.01, 30.0, 0.0))]
    sampled = sample(logits, draws, [0] * 6)
    temperatures = torch.tensor([[draw.temperature or 1.0] for draw in draws]).double()
    expected = (logits.double() / temperatures).log_softmax(-1)
    assert torch.allclose(scaled_logprobs(logits, draws).double(), expected, atol=2e-4, rtol=1e-5)
    for row, (token, logprob) in enumerate(zip(sampled.tokens, sampled.logprobs, strict=True)):
        assert logprob == pytest.approx(float(expected[row, token]), abs=2e-4)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**64 - 1))
def test_uniform_numbers(seed: int) -> None:
    numbers = uniform([seed] * 4000, range(4000))
    assert ((numbers >= 0) & (numbers < 1)).all()
    assert abs(numbers.mean() - 0.5) < 0.03
    assert abs(np.corrcoef(numbers[1:], numbers[:-1])[0, 1]) < 0.1
    assert len(np.unique(numbers)) == 4000
