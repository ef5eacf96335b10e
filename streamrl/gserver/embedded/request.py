"""A job inside the embedded engine: the sampling of its tokens from logits, and its end.

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

from streamrl.gserver.embedded.adapters import Adapter
from streamrl.gserver.server.engine import Job, Output, Ticket
from streamrl.stop_strings import Decode, StopStrings
from streamrl.transport.generation import FinishReason, VersionSpan

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


GREEDY_BELOW = 1e-6
"""Temperatures below this are taken as 0, as in SGLang."""
NO_TOP_K = 2**31 - 1


class Request:
    """A request in the engine; owned by the scheduler's thread."""

    def __init__(self, ticket: Ticket, *, eos_token_ids: frozenset[int], seed: int, decode: Decode) -> None:
        job = ticket.job
        params = job.params
        self.ticket = ticket
        self.job: Job = job
        self.tokens = list(job.input_ids)
        """Prompt and response so far."""
        self.prompt_length = len(job.input_ids)
        self.logprobs: list[float] = []
        self.top_logprobs: list[list[tuple[float, int]]] = []
        self.input_logprobs: list[float | None] = []
        self.input_top_logprobs: list[list[tuple[float, int]] | None] = []
        self.cached_tokens = 0
        self.num_retractions = 0
        self.routed_experts: NDArray[np.uint8] | None = None
        self.finish_reason: FinishReason | None = None
        self.draw = Draw(
            seed=seed,
            temperature=params.temperature if params.temperature >= GREEDY_BELOW else 0.0,
            top_p=params.top_p,
            top_k=min(params.top_k, NO_TOP_K),
            min_p=params.min_p,
        )
        self.stop_token_ids = frozenset(params.stop_token_ids or ()) | (
            frozenset() if params.ignore_eos else eos_token_ids
        )
        self._stop_strings = StopStrings(job.stop, decode)
        self._versions: list[tuple[str, int]] = []
        self.adapter: Adapter | None = None
        """The adapter that computes it; None: it has not begun, or there are no adapters."""

    @property
    def produced(self) -> int:
        """Length of the response so far, in tokens."""
        return len(self.logprobs)

    @property
    def wants_input_logprobs(self) -> bool:
        return 0 <= self.job.logprob_start_len < self.prompt_length and not self.input_logprobs

    @property
    def may_not_stop(self) -> bool:
        return self.produced < self.job.params.min_new_tokens and bool(self.stop_token_ids)

    @property
    def needs_logits(self) -> bool:
        """Whether its next token takes more than a plain draw."""
        return self.may_not_stop or not self.draw.plain or self.job.top_logprobs_num > 0

    @property
    def is_to_be_told(self) -> bool:
        """Whether its last token triggers a report before the end."""
        interval = self.job.stream_interval
        return self.job.stream and self.produced % interval == 1 % interval

    def note_version(self, version: str) -> None:
        """Label tokens with `version` from the next one on."""
        if self._versions and self._versions[-1][1] == self.produced:
            self._versions.pop()
        if not self._versions or self._versions[-1][0] != version:
            self._versions.append((version, self.produced))

    def accept(self, token: int, logprob: float) -> None:
        """Append one sampled token and check whether it is the last."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        produced = len(self.logprobs)
        params = self.job.params
        if produced >= params.min_new_tokens:
            if token in self.stop_token_ids:
                self.finish_reason = FinishReason(type="stop", matched=token)
                return
            first = max(self.prompt_length, len(self.tokens) - self._stop_strings.reach)
            if stop := self._stop_strings.at_the_end(self.tokens[first:]):
                self.finish_reason = FinishReason(type="stop", matched=stop)
                return
        if produced >= params.max_new_tokens:
            self.finish_reason = FinishReason(type="length", length=params.max_new_tokens)

    def abort(self, message: str) -> None:
        """End the response with its tokens so far."""
        self.finish_reason = FinishReason(type="abort", message=message)

    def output(self) -> Output:
        """Return the present output, for the ticket."""
        final = self.finish_reason is not None
        return Output(
            output_ids=self.tokens[self.prompt_length :],
            logprobs=list(self.logprobs),
            weight_version=self._versions[-1][0],
            finish_reason=self.finish_reason,
            spans=self._spans() if final else [],
            top_logprobs=list(self.top_logprobs),
            input_logprobs=self.input_logprobs,
            input_top_logprobs=self.input_top_logprobs,
            cached_tokens=self.cached_tokens,
            num_retractions=self.num_retractions,
            routed_experts=self.routed_experts,
        )

    def _spans(self) -> list[VersionSpan]:
        ends = [start for _, start in self._versions[1:]] + [self.produced]
        return [
            VersionSpan(version=version, start=start, end=end)
            for (version, start), end in zip(self._versions, ends, strict=True)
            if end > start
        ]
