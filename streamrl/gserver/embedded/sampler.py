"""Sampling of tokens from logits.

Each request draws with its own counter-based random numbers: the number for output token i depends only on the
request's seed and on i, so a response does not depend on the rest of the batch. A token is found by inverting the
cumulative distribution. Rows with top-p, top-k or min-p are drawn from their likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BLOCK = 128
"""Tokens whose probabilities are summed before a token among them is looked for."""
CANDIDATES = 1024
"""Number of the likeliest tokens that are examined first when top-p, top-k or min-p are set."""


class Draw(msgspec.Struct, frozen=True):
    """Sampling parameters of one row of logits."""

    seed: int
    """Below 2**64."""
    temperature: float = 1.0
    """0: take the likeliest token; log-probabilities are then computed at temperature 1."""
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0

    @property
    def filtered(self) -> bool:
        """Whether some tokens may not be drawn."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0

    @property
    def plain(self) -> bool:
        """Whether it is neither filtered nor greedy."""
        return self.temperature > 0.0 and not self.filtered

    @property
    def scale(self) -> float:
        """Factor on the logits."""
        return 1.0 / (self.temperature or 1.0)


class SamplerOutput(msgspec.Struct, frozen=True):
    """One token for each row."""

    tokens: list[int]
    logprobs: list[float]
    """Log-probabilities under the temperature-scaled distribution before top-p, top-k and min-p, in nats."""


def sample(logits: Tensor, draws: Sequence[Draw], positions: Sequence[int]) -> SamplerOutput:
    """Draw a token from each row of `logits` (`[n, vocab]`); `positions[i]` numbers row i's output token."""
    uniforms = torch.from_numpy(uniform([draw.seed for draw in draws], positions)).to(logits.device)
    plain = [i for i, draw in enumerate(draws) if draw.plain]
    if len(plain) == len(draws):
        return _sample_plain(logits, draws, uniforms)
    tokens, logprobs = [0] * len(draws), [0.0] * len(draws)
    others = [i for i, draw in enumerate(draws) if not draw.plain]
    for rows, way in ((plain, _sample_plain), (others, _sample_others)):
        if rows:
            found = way(logits[rows], [draws[i] for i in rows], uniforms[rows])
            for i, token, logprob in zip(rows, found.tokens, found.logprobs, strict=True):
                tokens[i], logprobs[i] = token, logprob
    return SamplerOutput(tokens, logprobs)


def scaled_logprobs(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Return the log-probabilities that `sample` draws from, before filters: `[n, vocab]`, float32."""
    return _scaled(logits, draws).log_softmax(-1)


def uniform(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """Return numbers in [0, 1) from (seed, position): SplitMix64 (Steele, Lea, Flood 2014), 53 bits."""
    seed = np.array(seeds, dtype=np.uint64)
    position = np.array(positions, dtype=np.uint64)
    mixed = _mix(_mix(seed) + position * np.uint64(0x9E3779B97F4A7C15))
    unit: NDArray[np.float64] = np.ldexp((mixed >> np.uint64(11)).astype(np.float64), -53)
    return unit


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = z + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _scaled(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    scales = torch.tensor([draw.scale for draw in draws], dtype=torch.float32, device=logits.device)
    return logits.float() * scales[:, None]


def _sample_plain(logits: Tensor, draws: Sequence[Draw], uniforms: Tensor) -> SamplerOutput:
    scales = torch.tensor([draw.scale for draw in draws], device=logits.device)
    return read_drawn(draw_plain(logits, scales, uniforms))


def draw_plain(logits: Tensor, scales: Tensor, uniforms: Tensor) -> Tensor:
    """Draw a token from each row of `logits` (`[n, vocab]`) times its number in `scales` (`[n]`).

    Returns the tokens and their log-probabilities, `[2, n]` in float64, so that one copy brings both to the host.
    """
    probabilities = (logits.float() * scales.float()[:, None]).softmax(-1)
    tokens = invert(probabilities, uniforms)
    return torch.stack((tokens.double(), probabilities.gather(1, tokens[:, None])[:, 0].log().double()))


def read_drawn(drawn: Tensor) -> SamplerOutput:
    """Return what `draw_plain` has drawn."""
    tokens, logprobs = drawn.tolist()
    return SamplerOutput([int(token) for token in tokens], logprobs)


def _sample_others(logits: Tensor, draws: Sequence[Draw], uniforms: Tensor) -> SamplerOutput:
    """Sample rows that are filtered or greedy."""
    logits = _scaled(logits, draws)
    probabilities = logits.softmax(-1)
    tokens = logits.argmax(-1)
    _draw_filtered(tokens, probabilities, draws, uniforms)
    logprobs = probabilities.gather(1, tokens[:, None])[:, 0].log()
    return SamplerOutput(tokens.tolist(), logprobs.tolist())


def _draw_filtered(tokens: Tensor, probabilities: Tensor, draws: Sequence[Draw], uniforms: Tensor) -> None:
    """Draw the rows of `tokens` that are not greedy, from the tokens that pass the filters."""
    rows = [i for i, draw in enumerate(draws) if draw.temperature > 0.0]
    width = probabilities.shape[-1]
    count = min(CANDIDATES, width)
    while rows:
        values, indices = probabilities[rows].topk(count, -1)
        kept = _kept(values, [draws[i] for i in rows])
        # A row may need more candidates if its last one still passes the filters.
        enough = [True] * len(rows) if count == width else (~kept[:, -1]).tolist()
        chosen = invert(values * kept, uniforms[rows])
        chosen = indices.gather(1, chosen[:, None])[:, 0]
        done = [i for i, ready in enumerate(enough) if ready]
        tokens[[rows[i] for i in done]] = chosen[done]
        rows = [row for row, ready in zip(rows, enough, strict=True) if not ready]
        count = min(count * 8, width)


def _kept(values: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Return which of the descending probabilities `values` pass the filters.

    All apply to the full distribution as in SGLang: top-k by rank, top-p by the mass before, min-p by the largest.
    """
    device = values.device
    top_k = torch.tensor([[draw.top_k if draw.top_k > 0 else 2**31 - 1] for draw in draws], device=device)
    top_p = torch.tensor([[draw.top_p if draw.top_p < 1.0 else 2.0] for draw in draws], device=device)
    min_p = torch.tensor([[draw.min_p] for draw in draws], device=device)
    before = values.cumsum(-1, dtype=torch.float64) - values
    ranks = torch.arange(values.shape[-1], device=device)
    kept: Tensor = (ranks < top_k) & (before <= top_p) & (values >= values[:, :1] * min_p)
    return kept


def invert(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Return the first index of each row of `weights` (`[rows, width]`) up to which they add up to more than
    `uniforms` (`[rows]`) times their total.

    Wide rows are searched in two stages, first for a block and then in it: `torch.multinomial`, or a cumulative sum
    over a whole vocabulary, costs more than a small model.
    """
    rows, width = weights.shape
    if width % BLOCK or width <= 8 * BLOCK:
        cumulative = weights.cumsum(-1, dtype=torch.float64)
        return _first_above(cumulative, uniforms[:, None] * cumulative[:, -1:])[:, 0]
    blocks = weights.view(rows, -1, BLOCK)
    cumulative = blocks.sum(-1).cumsum(-1, dtype=torch.float64)
    target = uniforms[:, None] * cumulative[:, -1:]
    block = _first_above(cumulative, target)
    before = torch.where(block > 0, cumulative.gather(1, (block - 1).clamp_(min=0)), 0.0)
    inside = blocks[torch.arange(rows, device=weights.device), block[:, 0]].cumsum(-1, dtype=torch.float64)
    return (block * BLOCK + _first_above(inside, target - before))[:, 0]


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    """Return the index `[rows, 1]`; where rounding finds none, the last one that has any weight."""
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous()).clamp_(max=cumulative.shape[-1] - 1)
    return torch.minimum(torch.searchsorted(cumulative, target, right=True), last)
