"""Staleness without a system around it: a synchronous loop that trains on data of the policy of some versions ago.

    python benchmarks/delay.py [--tasks copy increment] [--delays 4 8] [--seeds 0 1 2] [--variants …] [--append]

One process, one thread, a task (copy four digits, or increment each), the model and the settings of
examples/copy_scratch.toml. At version v the batch is drawn from the policy of version v - delay, as a whole. Nothing is
interrupted, no engine differs from the trainer, nothing is late: any collapse here is the algorithm's. Variants of
streamrl are trained through its own objective; the others are written here from their papers. Variants called `slowed`
have algorithm.on_collapse = "slow": streamrl's own watch judges the figures of each step.

A run has learned where the mean reward of three steps reaches 0.95; `worst` is the least such mean afterwards, `area`
the mean reward of all steps. A run takes about a minute on one core.
"""

from __future__ import annotations

import copy
import json
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from statistics import fmean, median
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import torch
from common import EXAMPLES, earlier_rows, parser_of, write_results
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from streamrl.config import Config, load
from streamrl.models import ensure_checkpoint
from streamrl.records.collapse import CollapseWatch
from streamrl.rollout.reward.functions import Response
from streamrl.rollout.tasks import copy_digits, copy_reward, sort_digits
from streamrl.trainer.algorithms.objective import Totals, objective
from streamrl.trainer.algorithms.registry import advantage_of
from streamrl.trainer.algorithms.tokens import Tokens
from streamrl.trainer.roles.actor import PULL_SHARE, sample
from streamrl.types import Prompt

EXAMPLE = EXAMPLES / "copy_scratch.toml"
LEARNED = 0.95
WINDOW = 3
"""Steps over which a reward is averaged."""
NORMS = 50
"""Steps with which a gradient norm is compared."""
CAP = 5.0
"""Of the weights ρ of the methods written here."""


class Variant(NamedTuple):
    algorithm: Mapping[str, Any] = MappingProxyType({})
    """Settings of [algorithm]."""
    betas: tuple[float, float] = (0.9, 0.95)
    lr_share: Callable[[int], float] = lambda delay: 1.0
    """Of the learning rate, for a delay."""
    clip_to_median: float | None = None
    """Largest gradient norm, as a multiple of the median of the last steps'."""
    keep: Callable[[Tokens], Tensor] | None = None
    """Which tokens keep their gradient min(ρ, 5) · A · ∇ log π, in a method that streamrl does not have."""
    step_share: Callable[[Tokens], float] = lambda tokens: 1.0
    """Of the learning rate, for a batch."""
    squared_pull: float = 0.0
    """Coefficient of the mean of (log ρ)²."""
    slow: bool = False
    """Whether `algorithm.on_collapse` is "slow"."""
    pull_share: float = PULL_SHARE
    """Share of the groups without contrast that are pulled to the older policy, each in place of several."""


def age_widened(tokens: Tokens) -> Tensor:
    """PPO's clip around π_b with a range that widens with a token's age d, [0.8^d, 1.28^d], as what A-3PO
    (https://arxiv.org/abs/2512.06547) comes to with one minibatch."""
    log_ratio, age = _log_ratio(tokens), tokens.age.clamp(min=1)
    low, high = age * torch.tensor(0.8).log(), age * torch.tensor(1.28).log()
    return ~(((tokens.advantages > 0) & (log_ratio > high)) | ((tokens.advantages < 0) & (log_ratio < low)))


def divergence_mask(tokens: Tokens) -> Tensor:
    """DPPO with total variation (https://arxiv.org/abs/2602.04879): no update that moves a token's probability further
    than 0.2 away from what it was."""
    moved = tokens.logprobs.detach().exp() - tokens.behavior_logprobs.exp()
    return ~(((tokens.advantages > 0) & (moved > 0.2)) | ((tokens.advantages < 0) & (moved < -0.2)))


def second_moment_mask(tokens: Tokens) -> Tensor:
    """M2PO (https://arxiv.org/abs/2510.01161), over outward tokens as in its authors' code: the largest |log ρ| are cut
    until the mean of (log ρ)² over all of them is at most 0.04; never one inside [0.7, 1.5]."""
    log_ratio = _log_ratio(tokens)
    outward = (log_ratio * tokens.advantages) > 0
    squares = torch.where(outward, log_ratio**2, 0.0)
    order = squares.argsort()
    kept = torch.empty_like(outward)
    kept[order] = squares[order].cumsum(0) <= 0.04 * max(int(outward.sum()), 1)
    inside = (log_ratio >= math.log(0.7)) & (log_ratio <= math.log(1.5))
    return ~outward | kept | inside


def sequence_mask(tokens: Tokens) -> Tensor:
    """Off-policy sequence masking (DeepSeek-V3.2, https://arxiv.org/abs/2512.02556): responses with A < 0 which the
    policy has left by more than 0.1 for each token, in the mean of log π_b / π, have no gradient."""
    counts = tokens.sequence.bincount(minlength=tokens.sequences).clamp(min=1)
    left = torch.zeros(tokens.sequences).index_add_(0, tokens.sequence, -_log_ratio(tokens)) / counts
    return ~((tokens.advantages < 0) & (left[tokens.sequence] > 0.1))


def effective_sample_share(tokens: Tokens) -> float:
    """The step size of VCPO (https://arxiv.org/abs/2602.17616): the square root of the share of responses that is left
    when each is weighed by Π ρ, without a cap."""
    weights = (
        torch.zeros(tokens.sequences).index_add_(0, tokens.sequence, _log_ratio(tokens)).clamp(max=300).double().exp()
    )
    return math.sqrt(float(weights.sum() ** 2 / (tokens.sequences * (weights**2).sum())))


def _log_ratio(tokens: Tokens) -> Tensor:
    return tokens.logprobs.detach() - tokens.behavior_logprobs


def increment_digits(index: int, seed: int) -> dict[str, Any]:
    """`1239=`, to be answered `2340`."""
    row = copy_digits(index, seed)
    return row | {"answer": "".join(str((int(digit) + 1) % 10) for digit in row["answer"])}


Task = Callable[[int, int], dict[str, Any]]
"""Makes the row of data of an index and a seed."""
TASKS: dict[str, Task] = {
    "copy": copy_digits,
    "increment": increment_digits,
    "sort": partial(sort_digits, digits=2),
}
ALONE = {"behavior_kl_coef": 0.0}
LONG = (0.9, 0.999)
"""Streamrl's betas. Where a variant does not say so, Adam has the shorter memory with which stale runs were seen to
fall."""
VARIANTS = {
    "default": Variant(betas=LONG),
    "every group pulled": Variant(betas=LONG, pull_share=1.0),
    "default, beta2 0.99": Variant(betas=(0.9, 0.99)),
    "default, beta2 0.95": Variant(),
    "default, beta2 0.95, clipped to 3 medians": Variant(clip_to_median=3.0),
    "a third of the pull": Variant({"behavior_kl_coef": 0.03}, betas=LONG),
    "twice the pull": Variant({"behavior_kl_coef": 0.2}, betas=LONG),
    "twice the pull, beta2 0.95": Variant({"behavior_kl_coef": 0.2}),
    "half the lr": Variant(betas=LONG, lr_share=lambda delay: 0.5),
    "default, age-widened": Variant(betas=LONG, keep=age_widened),
    "beta2 0.999": Variant(ALONE, betas=LONG),
    "half the lr, beta2 0.999": Variant(ALONE, betas=LONG, lr_share=lambda delay: 0.5),
    "decoupled": Variant(ALONE),
    "ppo": Variant(ALONE | {"proximal": "behavior"}),
    "masked": Variant(
        ALONE | {"behavior_weight_limit": "mask", "behavior_weight_floor": 0.5, "behavior_weight_cap": 2.0}
    ),
    "cap 1": Variant(ALONE | {"behavior_weight_cap": 1.0}),
    "age-widened": Variant(ALONE, keep=age_widened),
    "dppo": Variant(ALONE, keep=divergence_mask),
    "m2po": Variant(ALONE, keep=second_moment_mask),
    "opsm": Variant(ALONE, keep=sequence_mask),
    "vcpo's step size": Variant(
        ALONE | {"behavior_weight_level": "sequence", "behavior_weight_cap": 8.0}, step_share=effective_sample_share
    ),
    "dppo, (log ρ)²": Variant(ALONE, keep=divergence_mask, squared_pull=1e-3),
    "dppo, 0.05 (log ρ)²": Variant(ALONE, keep=divergence_mask, squared_pull=0.05),
    "no entropy bonus": Variant(ALONE | {"entropy_coef": 0.0}),
    "no deviation": Variant(ALONE | {"advantage": "mean"}),
    "clipped to 3 medians": Variant(ALONE, clip_to_median=3.0),
    "lr / (1 + delay)": Variant(ALONE, lr_share=lambda delay: 1 / (1 + delay)),
    "decoupled, slowed": Variant(ALONE, slow=True),
    "ppo, slowed": Variant(ALONE | {"proximal": "behavior"}, slow=True),
}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["default", "decoupled"])
    parser.add_argument("--delays", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--append", action="store_true", help="keep the rows of the last run by hand")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=["increment"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = earlier_rows("delay") if options.append else []
    there = {(row["task"], row["variant"], row["delay"], row["seed"]) for row in rows}
    for task, delay, name, seed in product(options.tasks, options.delays, options.variants, options.seeds):
        if (task, name, delay, seed) not in there:
            rows.append(run(task, name, delay=delay, seed=seed, steps=options.steps))
            shown = ("task", "variant", "delay", "seed", "learned", "worst", "end", "area", "error", "seconds")
            print(json.dumps({key: rows[-1][key] for key in shown}), flush=True)
            write_results("delay", {"steps": options.steps, "example": EXAMPLE.name}, rows, row_per_line=True)


def run(task: str, name: str, *, delay: int, seed: int, steps: int, afterwards: int | None = None) -> dict[str, Any]:
    """Train for `steps`, or until `afterwards` steps after it has learned; return the row of the table, with the curves
    of reward and mean |ρ - 1|."""
    loop = Loop(load(EXAMPLE, [f"run.seed={seed}"]), VARIANTS[name], TASKS[task], delay=delay)
    began = time.perf_counter()
    found: list[dict[str, float]] = []
    smooth: list[float] = []
    learned = None
    while len(found) < steps and (learned is None or afterwards is None or len(found) < learned + afterwards):
        found.append(loop.step())
        smooth.append(fmean(figures["reward"] for figures in found[-WINDOW:]))
        if learned is None and smooth[-1] >= LEARNED:
            learned = len(found) - 1
    rewards = [figures["reward"] for figures in found]
    return {
        "task": task,
        "variant": name,
        "delay": delay,
        "seed": seed,
        "learned": learned,
        "worst": None if learned is None else round(min(smooth[learned:]), 3),
        "end": round(smooth[-1], 3),
        "area": round(fmean(rewards), 3),
        "error": round(1 - fmean(rewards[-len(rewards) // 3 :]), 4),
        "seconds": round(time.perf_counter() - began, 1),
        **{key: [round(figures[key], 4) for figures in found] for key in found[0]},
    }


class Batch(NamedTuple):
    """Responses of `groups` prompts, all siblings of one group after another."""

    prompts: Tensor
    """`[groups, prompt length]`"""
    tokens: Tensor
    """`[responses, longest]`"""
    logprobs: Tensor
    """`[responses, longest]`: under the policy that drew them."""
    mask: Tensor
    """`[responses, longest]`: False behind a response's end."""
    advantages: Tensor
    """`[responses]`"""
    reward: float
    spread: float
    """Standard deviation of the responses' rewards."""
    contrasted: int
    """Groups whose siblings did not all score the same."""


class Loop:
    """The policy, its earlier versions, and the optimizer."""

    def __init__(self, config: Config, variant: Variant, task: Task, *, delay: int) -> None:
        self._config = config
        self._task = task
        self._variant = variant
        self._delay = delay
        self._algorithm = msgspec.structs.replace(config.algorithm, **variant.algorithm)
        folder = ensure_checkpoint(config)
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._sampler = copy.deepcopy(self._model)
        self._eos: int = self._tokenizer.eos_token_id
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=config.trainer.lr, betas=variant.betas, weight_decay=0.0, fused=True
        )
        self._admitted: deque[tuple[int, list[Tensor]]] = deque()
        """Of each batch that is under way, the policy that draws it: version and weights."""
        self.watch = CollapseWatch()
        self._norms: deque[float] = deque(maxlen=NORMS)
        self._random = torch.Generator().manual_seed(config.run.seed)
        self._updates = self._index = 0

    def step(self) -> dict[str, float]:
        """Draw a batch from the old policy and train the present one on it; return figures of the step."""
        weights = [weight.detach().clone() for weight in self._model.parameters()]
        while len(self._admitted) <= self.watch.staleness(self._delay):
            self._admitted.append((self._updates, weights))
        version, drawn_by = self._admitted.popleft()
        with torch.no_grad():
            for mine, old in zip(self._sampler.parameters(), drawn_by, strict=True):
                mine.copy_(old)
        batch = self._draw()
        tokens = self._tokens(batch, age=self._updates - version)
        loss = self._loss(tokens)
        if self._variant.squared_pull:
            moved = (tokens.logprobs - tokens.behavior_logprobs).square()
            loss = loss + self._variant.squared_pull * moved.mean()
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = self._update(self._variant.step_share(tokens) * self.watch.lr_scale)
        ratio = _log_ratio(tokens).exp()
        deviation = float((ratio - 1).abs().mean())
        self._look(batch, ratio, deviation, norm)
        return {
            "reward": batch.reward,
            "ratio_deviation": deviation,
            "grad_norm": norm,
            "contrasted": batch.contrasted,
        }

    def _look(self, batch: Batch, ratio: Tensor, deviation: float, norm: float) -> None:
        """Judge the run's health by the step that was just made, as the master does."""
        self.watch = self.watch.after(
            {
                "importance_ratio_deviation": deviation,
                "effective_sample_size": float(ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum())),
                "grad_norm": norm,
                "grad_norm_ratio": self.watch.grad_norm_ratio(norm),
                "reward_mean": batch.reward,
                "reward_std": batch.spread,
                "groups": float(len(batch.prompts)),
            },
            step=self._updates,
            turn=[],
            slow=self._variant.slow,
        )

    def _loss(self, tokens: Tokens) -> Tensor:
        totals = Totals(tokens=len(tokens.logprobs), episodes=tokens.sequences, longest=1)
        if self._variant.keep is None:
            return objective(tokens, self._algorithm, kl_coef=0.0, totals=totals).loss
        weight = _log_ratio(tokens).exp().clamp(max=CAP) * self._variant.keep(tokens)
        others = objective(
            tokens._replace(advantages=torch.zeros_like(tokens.advantages)), self._algorithm, kl_coef=0.0, totals=totals
        )
        return others.loss - (weight * tokens.advantages * tokens.logprobs).mean()

    def _update(self, share: float) -> float:
        """One step of the optimizer with `share` of the learning rate; return the gradient norm before it was
        clipped."""
        limit = self._config.trainer.optimizer.grad_clip
        if self._variant.clip_to_median and len(self._norms) >= 10:
            limit = min(limit, self._variant.clip_to_median * median(self._norms))
        norm = float(torch.nn.utils.clip_grad_norm_(self._model.parameters(), limit))
        self._norms.append(norm)
        self._updates += 1
        warmup = min(1.0, self._updates / self._config.trainer.optimizer.warmup_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = self._config.trainer.lr * self._variant.lr_share(self._delay) * warmup * share
        self._optimizer.step()
        return norm

    @torch.no_grad()
    def _draw(self) -> Batch:
        groups, siblings = self._config.trainer.batch_groups, self._config.rollout.group_size
        rows = [self._task(self._index + i, self._config.run.seed) for i in range(groups)]
        self._index += groups
        prompts = torch.tensor([self._tokenizer(row["prompt"], add_special_tokens=False).input_ids for row in rows])
        output = self._sampler(prompts, use_cache=True)
        cache = output.past_key_values
        cache.batch_repeat_interleave(siblings)
        logits = output.logits[:, -1].repeat_interleave(siblings, 0)
        alive = torch.ones(len(logits), dtype=torch.bool)
        drawn, found, mask = [], [], []
        while bool(alive.any()) and len(drawn) < self._config.rollout.sampling.max_new_tokens:
            if drawn:
                logits = self._sampler(drawn[-1][:, None], past_key_values=cache, use_cache=True).logits[:, -1]
            logprobs = logits.log_softmax(-1)
            noise = torch.empty_like(logprobs).exponential_(generator=self._random)
            drawn.append((logprobs - noise.log()).argmax(-1))
            found.append(logprobs.gather(1, drawn[-1][:, None])[:, 0])
            mask.append(alive)
            alive = alive & (drawn[-1] != self._eos)
        tokens, kept = torch.stack(drawn, 1), torch.stack(mask, 1)
        rewards = torch.tensor([self._reward(row, kept[i], rows[i // siblings]) for i, row in enumerate(tokens)])
        grouped = rewards.view(groups, siblings)
        compare, attempts = advantage_of(self._algorithm), torch.arange(siblings).numpy()
        advantages = [torch.from_numpy(compare(group.numpy(), attempts)) for group in grouped]
        contrasted = sum(bool(group.any()) for group in advantages)
        return Batch(
            prompts=prompts,
            tokens=tokens,
            logprobs=torch.stack(found, 1),
            mask=kept,
            advantages=torch.cat(advantages),
            reward=float(rewards.mean()),
            spread=float(rewards.std(correction=0)),
            contrasted=contrasted,
        )

    def _reward(self, tokens: Tensor, mask: Tensor, row: dict[str, Any]) -> float:
        ids = tokens[mask].tolist()
        response = Response(
            text=self._tokenizer.decode(ids, skip_special_tokens=True),
            finish_reason="stop" if ids[-1] == self._eos else "length",
            output_tokens=len(ids),
        )
        prompt = Prompt(seq=0, index=0, epoch=0, messages=[], input_ids=[], answer=row["answer"], metadata={})
        return copy_reward(response, prompt)

    def _tokens(self, batch: Batch, *, age: int) -> Tokens:
        siblings = self._config.rollout.group_size
        output = self._model(batch.prompts, use_cache=True)
        cache = output.past_key_values
        cache.batch_repeat_interleave(siblings)
        logits = output.logits[:, -1:].repeat_interleave(siblings, 0)
        if batch.tokens.shape[1] > 1:
            later = self._model(batch.tokens[:, :-1], past_key_values=cache, use_cache=True).logits
            logits = torch.cat([logits, later], 1)
        distribution = logits.log_softmax(-1)
        logprobs = distribution.gather(2, batch.tokens[..., None])[..., 0][batch.mask]
        responses = torch.arange(len(batch.tokens))[:, None].expand_as(batch.tokens)[batch.mask]
        behavior = batch.logprobs[batch.mask]
        return Tokens(
            logprobs=logprobs,
            entropy=-(distribution.exp() * distribution).sum(-1)[batch.mask],
            behavior_logprobs=behavior,
            proximal_logprobs=behavior if self._algorithm.proximal == "behavior" else logprobs.detach(),
            ref_logprobs=None,
            advantages=batch.advantages[responses],
            sequence=responses,
            sequences=len(batch.tokens),
            of_episode=responses.bincount()[responses],
            age=torch.full_like(responses, age),
            ages=(age,),
            comparable=torch.zeros_like(responses, dtype=torch.bool),
            comparable_tokens=0,
            weight=self._weights(batch)[responses // siblings],
        )

    def _weights(self, batch: Batch) -> Tensor:
        """Return `[groups]`: how many groups each one stands for."""
        groups = self._config.trainer.batch_groups
        contrast = batch.advantages.view(groups, -1).any(1)
        uniform = (~contrast).nonzero()[:, 0].tolist()
        first = self._index - groups
        chosen = {seq - first for seq in sample([first + place for place in uniform], self._variant.pull_share)}
        factor = len(uniform) / max(1, len(chosen))
        return torch.tensor([1.0 if contrast[i] else factor * (i in chosen) for i in range(groups)])


if __name__ == "__main__":
    main()
