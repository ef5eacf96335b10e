"""From logits to tokens.

Each request draws with its own counter-based random numbers: the number for output token i
depends on the request's seed and i only, so a response does not depend on what else is in the
batch. A token is found by inverting the cumulative distribution, in two stages for large
vocabularies (which block of tokens, then which token), because `torch.multinomial` and a
cumulative sum over the whole vocabulary cost more than the model itself. On a CPU with a C
compiler `sampling.c` does it for rows that are not filtered, without writing any distribution.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import partial

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from streamrl.gserver.embedded.compiled import FORMATS, library_for

BLOCK = 128
CANDIDATES = 1024
"""How many of the likeliest tokens are looked at first when top-p, top-k or min-p are set."""


class Draw(msgspec.Struct, frozen=True):
    """How one row of logits is to be sampled."""

    seed: int
    """Below 2**64."""
    temperature: float = 1.0
    """0: take the likeliest token; log-probabilities are then those of temperature 1."""
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0

    @property
    def filtered(self) -> bool:
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0

    @property
    def plain(self) -> bool:
        """Neither filtered nor greedy."""
        return self.temperature > 0.0 and not self.filtered

    @property
    def scale(self) -> float:
        """Of logits."""
        return 1.0 / (self.temperature or 1.0)


class Sampled(msgspec.Struct, frozen=True):
    """One token for each row."""

    tokens: list[int]
    logprobs: list[float]
    """Of the temperature-scaled distribution before top-p, top-k and min-p, in nats."""


def sample(logits: Tensor, draws: Sequence[Draw], positions: Sequence[int]) -> Sampled:
    """Draw a token from each row of `logits` (`[n, vocab]`); `positions[i]` numbers row i's output token."""
    uniforms = uniform([draw.seed for draw in draws], positions)
    library = library_for(logits.dtype) if logits.device.type == "cpu" and logits.dtype in FORMATS else None
    if library is None:
        return _sample_with_torch(logits, draws, uniforms)
    plain = [i for i, draw in enumerate(draws) if draw.plain]
    if len(plain) == len(draws):
        return _sample_compiled(library, logits, draws, uniforms)
    tokens, logprobs = [0] * len(draws), [0.0] * len(draws)
    others = sorted(set(range(len(draws))) - set(plain))
    for rows, way in ((plain, partial(_sample_compiled, library)), (others, _sample_with_torch)):
        if rows:
            found = way(logits[rows], [draws[i] for i in rows], uniforms[rows])
            for i, token, logprob in zip(rows, found.tokens, found.logprobs, strict=True):
                tokens[i], logprobs[i] = token, logprob
    return Sampled(tokens, logprobs)


def scaled_logprobs(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Of the distributions that `sample` draws from, before filters: `[n, vocab]`, float32."""
    scales = torch.tensor([[draw.scale] for draw in draws], device=logits.device)
    return (logits.float() * scales).log_softmax(-1)


def _sample_compiled(
    library: ctypes.CDLL, logits: Tensor, draws: Sequence[Draw], uniforms: NDArray[np.float64]
) -> Sampled:
    """For plain draws."""
    logits, (rows, width) = logits.contiguous(), logits.shape
    scales = np.array([draw.scale for draw in draws], dtype=np.float32)
    tokens, shares = np.empty(rows, dtype=np.int64), np.empty(rows, dtype=np.float64)
    library.draw(
        *(logits.data_ptr(), rows, width, scales.ctypes.data, uniforms.ctypes.data, tokens.ctypes.data),
        *(shares.ctypes.data, torch.get_num_threads()),
    )
    return Sampled(tokens.tolist(), np.log(shares).tolist())


def _sample_with_torch(logits: Tensor, draws: Sequence[Draw], uniforms: NDArray[np.float64]) -> Sampled:
    scales = torch.tensor([[draw.scale] for draw in draws], device=logits.device)
    logits = logits.float() * scales
    probabilities = logits.softmax(-1)
    tokens = _invert(probabilities, torch.from_numpy(uniforms).to(logits.device))
    _apply_filters(tokens, probabilities, draws, uniforms)
    greedy = [i for i, draw in enumerate(draws) if draw.temperature == 0.0]
    if greedy:
        tokens[greedy] = logits[greedy].argmax(-1)
    logprobs = probabilities.gather(1, tokens[:, None])[:, 0].log()
    return Sampled(tokens.tolist(), logprobs.tolist())


def uniform(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """Numbers in [0, 1) from (seed, position): SplitMix64 (Steele, Lea, Flood 2014), 53 bits."""
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


def _invert(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The first index of each row at which the cumulative weight exceeds `uniforms` times the total."""
    n, width = weights.shape
    if width % BLOCK or width <= 8 * BLOCK:
        cumulative = weights.cumsum(-1, dtype=torch.float64)
        return _first_above(cumulative, uniforms[:, None] * cumulative[:, -1:])[:, 0]
    blocks = weights.view(n, -1, BLOCK)
    cumulative = blocks.sum(-1).cumsum(-1, dtype=torch.float64)
    wanted = uniforms[:, None] * cumulative[:, -1:]
    block = _first_above(cumulative, wanted)
    before = torch.where(block > 0, cumulative.gather(1, (block - 1).clamp_(min=0)), 0.0)
    inside = blocks[torch.arange(n, device=weights.device), block[:, 0]].cumsum(-1, dtype=torch.float64)
    return (block * BLOCK + _first_above(inside, wanted - before))[:, 0]


def _first_above(cumulative: Tensor, wanted: Tensor) -> Tensor:
    """Index `[n, 1]`; rounding at the upper end falls back to the last index that has any weight."""
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous()).clamp_(max=cumulative.shape[-1] - 1)
    return torch.minimum(torch.searchsorted(cumulative, wanted, right=True), last)


def _apply_filters(tokens: Tensor, probabilities: Tensor, draws: Sequence[Draw], uniforms: NDArray[np.float64]) -> None:
    """Draw the rows with top-p, top-k or min-p again, from what the filters leave."""
    rows = [i for i, draw in enumerate(draws) if draw.filtered and draw.temperature > 0.0]
    width = probabilities.shape[-1]
    count = min(CANDIDATES, width)
    while rows:
        values, indices = probabilities[rows].topk(count, -1)
        kept = _kept(values, [draws[i] for i in rows])
        # A row whose last candidate is still wanted may want more of them.
        settled = [True] * len(rows) if count == width else (~kept[:, -1]).tolist()
        chosen = _invert(values * kept, torch.from_numpy(uniforms[rows]).to(values.device))
        chosen = indices.gather(1, chosen[:, None])[:, 0]
        done = [i for i, ready in enumerate(settled) if ready]
        tokens[[rows[i] for i in done]] = chosen[done]
        rows = [row for row, ready in zip(rows, settled, strict=True) if not ready]
        count = min(count * 8, width)


def _kept(values: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Which of the descending probabilities `values` pass the filters, all applied to the full
    distribution as in SGLang: top-k by rank, top-p by the mass before, min-p by the largest."""
    device = values.device
    top_k = torch.tensor([[draw.top_k if draw.top_k > 0 else 2**31 - 1] for draw in draws], device=device)
    top_p = torch.tensor([[draw.top_p if draw.top_p < 1.0 else 2.0] for draw in draws], device=device)
    min_p = torch.tensor([[draw.min_p] for draw in draws], device=device)
    before = values.cumsum(-1, dtype=torch.float64) - values
    ranks = torch.arange(values.shape[-1], device=device)
    kept: Tensor = (ranks < top_k) & (before <= top_p) & (values >= values[:, :1] * min_p)
    return kept
