"""Staleness without a system around it: a synchronous loop that trains on data of the policy of some versions ago.

    python benchmarks/delay.py [--tasks sort increment] [--delays 4 8] [--seeds 0 1 2] [--variants …]

One process, one thread, the model and the settings of examples/copy_scratch.toml, and a task of `TASKS`. At version v
the batch is drawn from the policy of version v - delay, as a whole. Nothing is interrupted, no engine differs from the
trainer, nothing is late: any loss here is the algorithm's. Variants of streamrl are trained through its own objective;
the others are written here.

A run has learned where the mean reward of three steps reaches 0.95; `worst` is the least such mean afterwards. A run
takes some ten seconds on one core. Its row is written when it ends; a run that has a row is not run again.
"""

from __future__ import annotations

import copy
import json
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import product
from statistics import fmean
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import torch
from common import EXAMPLES, KEPT, commit, latest, parser_of, read_results, write_results
from recipes import divergence_masked, low_baseline, probability_masked
from staleness import commits
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from streamrl.config import Config, load
from streamrl.models import ensure_checkpoint
from streamrl.records.collapse import CollapseWatch
from streamrl.rollout.reward.functions import Response
from streamrl.rollout.tasks import copy_digits, copy_reward, sort_digits
from streamrl.trainer.algorithms.losses import behavior_kl
from streamrl.trainer.algorithms.objective import Totals, objective
from streamrl.trainer.algorithms.registry import advantage_of
from streamrl.trainer.algorithms.tokens import ClippedLoss, Tokens
from streamrl.trainer.roles.actor import PULL_SHARE, sample
from streamrl.types import Prompt

EXAMPLE = EXAMPLES / "copy_scratch.toml"
LEARNED = 0.95
SHOWN = ("task", "variant", "delay", "seed", "learned", "worst", "seconds")
FIGURES = ("reward", "age", "ratio_deviation", "cosine")
"""Figures of each step that are kept."""
WINDOW = 3
"""Steps over which a reward is averaged."""
CAP = 5.0
"""Largest weight ρ of a success."""

Seen = Sequence[Mapping[str, float]]
"""Figures of each step so far, the present one last."""


# --- methods -------------------------------------------------------------------------------------


def each_versions(number: int) -> Callable[[Seen, int], int]:
    """Return the staleness that rises by 1 every `number` versions."""
    return lambda seen, delay: min(delay, len(seen) // number)


def by_drift(seen: Seen, delay: int) -> int:
    """Return the staleness of `staleness.most_drift = 0.1`, by streamrl's own watch."""
    watch = CollapseWatch(near=0)
    for step, figures in enumerate(seen):
        metrics = {"importance_ratio_deviation": figures["ratio_deviation"]}
        watch = watch.after(metrics, step=step, turn=(), age=figures["age"], most_drift=0.1)
    return watch.staleness(delay)


def by_contrast(seen: Seen, *, groups: int = 32) -> float:
    """Return √(contrasted groups of the batch / their largest 20-step mean so far), at most 1."""
    counts = [figures["contrasted"] for figures in seen]
    usual = max((fmean(counts[end - 20 : end]) for end in range(20, len(counts) + 1)), default=groups / 2)
    return float(min(1.0, (counts[-1] / usual if counts[-1] else 1 / groups) ** 0.5))


def falling(seen: Seen, *, steps: int = 150, least: float = 0.1) -> float:
    """Return the factor of a schedule that falls linearly to `least`."""
    return max(least, 1 - (1 - least) * len(seen) / steps)


def by_deviation(seen: Seen, *, most: float = 0.02) -> float:
    """Return a factor below 1 if mean |ρ - 1| of five steps, without the largest, exceeds `most` on a plateau."""
    rewards = [fmean(figures["reward"] for figures in seen[end - 5 : end]) for end in range(5, len(seen) + 1)]
    if len(rewards) <= 15 or rewards[-1] - rewards[-16] > 0.1 * (max(rewards) - min(rewards)):
        return 1.0
    return min(1.0, most / max(most, fmean(sorted(figures["ratio_deviation"] for figures in seen[-5:])[:-1])))


def steered(seen: Seen, *, target: float = 1e-3) -> float:
    """Return the coefficient of the pull that keeps the KL of groups without contrast at `target`."""
    coefficient = 0.1
    for figures in seen:
        if figures["uniform_kl"]:
            error = max(-0.2, min(0.2, figures["uniform_kl"] / target - 1))
            coefficient = max(0.02, min(1.0, coefficient * (1 + error / 5)))
    return coefficient


def cautious(tokens: Tokens) -> Tensor:
    """Failures weigh at most 1, and nothing once their token's probability has fallen by more than 0.2."""
    negative = tokens.advantages < 0
    corrected = negative & (tokens.logprobs.detach().exp() - tokens.behavior_logprobs.exp() < -0.2)
    weight = _ratio(tokens).minimum(torch.where(negative, 1.0, CAP))
    return -weight * ~corrected * tokens.advantages * tokens.logprobs


def _ratio(tokens: Tokens) -> Tensor:
    return (tokens.logprobs.detach() - tokens.behavior_logprobs).exp()


def _unclipped(loss: Callable[[Tokens], Tensor], tokens: Tokens) -> ClippedLoss:
    return ClippedLoss(loss(tokens), torch.zeros_like(tokens.age, dtype=torch.bool))


def _uniform_kl(tokens: Tokens) -> float:
    """Return the mean KL of an older token in groups without contrast; 0 without any."""
    mean = tokens.weight * (tokens.advantages == 0) * (tokens.age > 0)
    kl = behavior_kl(tokens.logprobs.detach(), tokens.behavior_logprobs)
    return float((kl * mean).sum() / mean.sum().clamp(min=1e-9))


class Variant(NamedTuple):
    algorithm: Mapping[str, Any] = MappingProxyType({})
    """Settings of [algorithm]."""
    betas: tuple[float, float] = (0.9, 0.999)
    step_share: Callable[[Seen], float] = lambda seen: 1.0
    """Factor on the learning rate of a step."""
    staleness: Callable[[Seen, int], int] = lambda seen, delay: delay
    """Staleness of the next batch."""
    loss: Callable[[Tokens], Tensor] | None = None
    """Loss of each token, in a method that streamrl does not have."""
    pull: Callable[[Seen], float] | None = None
    """Coefficient of the pull in groups without contrast; then it is 0.02 in the others."""
    pull_share: float = PULL_SHARE
    """Share of the groups without contrast that are pulled to the older policy, each in place of several."""


ALONE = {"behavior_kl_coef": 0.0}
OWN_WEIGHTS = {"behavior_weight_level": "none"}
SHORT = (0.9, 0.95)
"""Adam's betas with which runs without a pull were seen to fall."""
VARIANTS = {
    "default": Variant(),
    "default, beta2 0.95": Variant(betas=SHORT),
    "half the lr": Variant(step_share=lambda seen: 0.5),
    "twice the pull": Variant({"behavior_kl_coef": 0.2}),
    "beta2 0.999": Variant(ALONE),
    "decoupled": Variant(ALONE, SHORT),
    "ppo": Variant(ALONE | {"proximal": "behavior"}, SHORT),
    "staleness rises every 2 versions": Variant(staleness=each_versions(2)),
    "staleness rises every 4 versions": Variant(staleness=each_versions(4)),
    "staleness by drift": Variant(staleness=by_drift),
    "staleness by drift, and lr falls to a tenth": Variant(staleness=by_drift, step_share=falling),
    "steps by contrast": Variant(step_share=by_contrast),
    "lr falls to a tenth": Variant(step_share=falling),
    "both": Variant(step_share=lambda seen: by_contrast(seen) * falling(seen)),
    "steps by deviation": Variant(step_share=by_deviation),
    "cautious with failures": Variant(OWN_WEIGHTS, loss=cautious),
    "near tokens alone": Variant(OWN_WEIGHTS, loss=partial(probability_masked, kl=0.0)),
    "baseline below the mean": Variant(OWN_WEIGHTS, loss=low_baseline),
    "dppo with the pull": Variant(OWN_WEIGHTS, loss=divergence_masked),
    "every group pulled": Variant(pull_share=1.0),
    "steered pull": Variant(ALONE, pull=steered),
    "steered pull of every group": Variant(ALONE, pull=steered, pull_share=1.0),
}
"""Others, which lost their task with most seeds, are in earlier states of this file: the kept results name them."""


# --- runs ----------------------------------------------------------------------------------------


def increment_digits(index: int, seed: int) -> dict[str, Any]:
    """`1239=`, to be answered `2340`."""
    row = copy_digits(index, seed)
    return row | {"answer": "".join(str((int(digit) + 1) % 10) for digit in row["answer"])}


class Task(NamedTuple):
    row: Callable[[int, int], dict[str, Any]]
    """Makes the row of data of an index and a seed."""
    steps: int
    after: str = ""
    """The task that the policy has already learned."""


TASKS = {
    "copy": Task(copy_digits, 200),
    "increment": Task(increment_digits, 200),
    "sort": Task(partial(sort_digits, digits=2), 150),
    "increment after copy": Task(increment_digits, 40, after="copy"),
}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=["sort"])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["default"])
    parser.add_argument("--delays", type=int, nargs="+", default=[0, 4, 8])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    torch.set_num_threads(1)
    for seed, task, delay, name in product(options.seeds, options.tasks, options.delays, options.variants):
        rows = known_rows()
        if (task, name, delay, seed) not in {(row["task"], row["variant"], row["delay"], row["seed"]) for row in rows}:
            rows.append(run(task, name, delay=delay, seed=seed, steps=TASKS[task].steps))
            print(json.dumps({key: rows[-1][key] for key in SHOWN}), flush=True)
            write_results("delay", {"example": EXAMPLE.name}, rows, measured_at=commits(rows), row_per_line=True)


def known_rows() -> list[dict[str, Any]]:
    """Return the latest rows, or the kept ones while there are none."""
    file = latest("delay.json")
    rows: list[dict[str, Any]] = read_results(file if file.exists() else KEPT / file.name)["rows"]
    return rows


def run(task: str, name: str, *, delay: int, seed: int, steps: int, afterwards: int | None = None) -> dict[str, Any]:
    """Train for `steps`, or until `afterwards` steps after it has learned; return the row of the table, with the
    figures of each step."""
    began = time.perf_counter()
    loop = Loop(load(EXAMPLE, [f"run.seed={seed}"]), VARIANTS[name], TASKS[task], delay=delay)
    smooth: list[float] = []
    learned = None
    while len(smooth) < steps and (learned is None or afterwards is None or len(smooth) < learned + afterwards):
        loop.step()
        smooth.append(fmean(figures["reward"] for figures in loop.seen[-WINDOW:]))
        if learned is None and smooth[-1] >= LEARNED:
            learned = len(smooth) - 1
    return {
        "task": task,
        "variant": name,
        "delay": delay,
        "seed": seed,
        "learned": learned,
        "worst": None if learned is None else round(min(smooth[learned:]), 3),
        "seconds": round(time.perf_counter() - began, 1),
        "commit": commit(),
        **{key: [float(f"{figures[key]:.4g}") for figures in loop.seen] for key in FIGURES},
    }


@cache
def learned_policy(task: str) -> Mapping[str, Tensor]:
    """Return the weights of a policy that has learned `task` on its own data."""
    loop = Loop(load(EXAMPLE, ["run.seed=0"]), VARIANTS["default"], TASKS[task], delay=0)
    while len(loop.seen) < WINDOW or fmean(figures["reward"] for figures in loop.seen[-WINDOW:]) < LEARNED:
        loop.step()
    return loop.model.state_dict()


class Batch(NamedTuple):
    """Responses, all siblings of one group after another."""

    prompts: Tensor
    """`[responses, prompt length]`"""
    tokens: Tensor
    """`[responses, longest]`"""
    logprobs: Tensor
    """`[responses, longest]`: under the policy that drew them."""
    mask: Tensor
    """`[responses, longest]`: False behind a response's end."""
    advantages: Tensor
    """`[groups, siblings]`"""
    reward: float


class Loop:
    """The policy, its earlier versions, and the optimizer."""

    def __init__(self, config: Config, variant: Variant, task: Task, *, delay: int) -> None:
        self._config = config
        self._task = task
        self._variant = variant
        self._delay = delay
        self._algorithm = msgspec.structs.replace(config.algorithm, **variant.algorithm)
        self._loss_of = None if variant.loss is None else partial(_unclipped, variant.loss)
        folder = ensure_checkpoint(config)
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        if task.after:
            self.model.load_state_dict(learned_policy(task.after))
        self._sampler = copy.deepcopy(self.model)
        self._eos: int = self._tokenizer.eos_token_id
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=config.trainer.lr, betas=variant.betas, weight_decay=0.0, fused=True
        )
        self._admitted: deque[tuple[int, list[Tensor]]] = deque()
        """Of each batch that is under way, the policy that draws it: version and weights."""
        self.seen: list[dict[str, float]] = []
        self._random = torch.Generator().manual_seed(config.run.seed)
        self._index = 0

    def step(self) -> None:
        """Draw a batch from the old policy and train the present one on it; add its figures to those `seen`."""
        weights = [weight.detach().clone() for weight in self.model.parameters()]
        while not self._admitted or len(self._admitted) <= self._variant.staleness(self.seen, self._delay):
            self._admitted.append((len(self.seen), weights))
        version, drawn_by = self._admitted.popleft()
        with torch.no_grad():
            for mine, old in zip(self._sampler.parameters(), drawn_by, strict=True):
                mine.copy_(old)
        batch = self._draw()
        tokens = self._tokens(batch, age=len(self.seen) - version)
        self._optimizer.zero_grad(set_to_none=True)
        self._loss(tokens).backward()
        self.seen.append(
            {
                "reward": batch.reward,
                "age": len(self.seen) - version,
                "ratio_deviation": float((_ratio(tokens) - 1).abs().mean()),
                "contrasted": int(batch.advantages.any(1).sum()),
                "uniform_kl": _uniform_kl(tokens),
                "cosine": self._cosine() if self.seen else 0.0,
            }
        )
        self._update(self._variant.step_share(self.seen))

    def _loss(self, tokens: Tokens) -> Tensor:
        totals = Totals(tokens=len(tokens.logprobs), episodes=tokens.sequences, longest=1)
        loss = objective(tokens, self._algorithm, kl_coef=0.0, totals=totals, loss_of=self._loss_of).loss
        if self._variant.pull is not None:
            pull = behavior_kl(tokens.logprobs, tokens.behavior_logprobs) * (tokens.age > 0) * tokens.weight
            loss = loss + (torch.where(tokens.advantages == 0, self._variant.pull(self.seen), 0.02) * pull).mean()
        return loss

    def _cosine(self) -> float:
        """Return the cosine of the angle between the gradient and Adam's momentum."""
        state = self._optimizer.state
        pairs = [(weight.grad, state[weight]["exp_avg"]) for weight in self.model.parameters() if weight in state]
        gradient, momentum = (torch.cat([part.flatten() for part in parts]) for parts in zip(*pairs, strict=True))
        return float(torch.nn.functional.cosine_similarity(gradient, momentum, dim=0))

    def _update(self, share: float) -> None:
        """Take one step of the optimizer with `share` of the learning rate."""
        optimizer = self._config.trainer.optimizer
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), optimizer.grad_clip)
        for group in self._optimizer.param_groups:
            group["lr"] = self._config.trainer.lr * min(1.0, len(self.seen) / optimizer.warmup_steps) * share
        self._optimizer.step()

    @torch.no_grad()
    def _draw(self) -> Batch:
        groups, siblings = self._config.trainer.batch_groups, self._config.rollout.group_size
        rows = [self._task.row(self._index + i, self._config.run.seed) for i in range(groups)]
        self._index += groups
        texts = [row["prompt"] for row in rows for _ in range(siblings)]
        prompts = self._tokenizer(texts, add_special_tokens=False, return_tensors="pt").input_ids
        different, prefix = prompts.unique(dim=0, return_inverse=True)
        output = self._sampler(different, use_cache=True)
        logits, cache = output.logits[:, -1], output.past_key_values
        alive = torch.ones(len(prompts), dtype=torch.bool)
        drawn, found, mask = [], [], []
        while bool(alive.any()) and len(drawn) < self._config.rollout.sampling.max_new_tokens:
            if drawn:
                different, prefix = torch.stack([prefix, drawn[-1]], 1).unique(dim=0, return_inverse=True)
                cache.batch_select_indices(different[:, 0])
                logits = self._sampler(different[:, 1:], past_key_values=cache).logits[:, -1]
            logprobs = logits.log_softmax(-1)[prefix]
            noise = torch.empty_like(logprobs).exponential_(generator=self._random)
            drawn.append((logprobs - noise.log()).argmax(-1).where(alive, self._eos))
            found.append(logprobs.gather(1, drawn[-1][:, None])[:, 0])
            mask.append(alive)
            alive = alive & (drawn[-1] != self._eos)
        tokens, kept = torch.stack(drawn, 1), torch.stack(mask, 1)
        rewards = torch.tensor([self._reward(row, kept[i], rows[i // siblings]) for i, row in enumerate(tokens)])
        compare, attempts = advantage_of(self._algorithm), torch.arange(siblings).numpy()
        advantages = [torch.from_numpy(compare(group.numpy(), attempts)) for group in rewards.view(groups, siblings)]
        return Batch(
            prompts=prompts,
            tokens=tokens,
            logprobs=torch.stack(found, 1),
            mask=kept,
            advantages=torch.stack(advantages),
            reward=float(rewards.mean()),
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
        different, place = torch.cat([batch.prompts, batch.tokens], 1).unique(dim=0, return_inverse=True)
        begin = batch.prompts.shape[1]
        distribution = self.model(different[:, :-1]).logits[:, begin - 1 :].log_softmax(-1)
        entropy = -(distribution.exp() * distribution).sum(-1)
        logprobs = distribution.gather(2, different[:, begin:, None])[..., 0][place][batch.mask]
        responses = torch.arange(len(batch.tokens))[:, None].expand_as(batch.tokens)[batch.mask]
        behavior = batch.logprobs[batch.mask]
        return Tokens(
            logprobs=logprobs,
            entropy=entropy[place][batch.mask],
            behavior_logprobs=behavior,
            proximal_logprobs=behavior if self._algorithm.proximal == "behavior" else logprobs.detach(),
            ref_logprobs=None,
            advantages=batch.advantages.flatten()[responses],
            sequence=responses,
            sequences=len(batch.tokens),
            of_episode=responses.bincount()[responses],
            age=torch.full_like(responses, age),
            ages=(age,),
            comparable=torch.zeros_like(responses, dtype=torch.bool),
            comparable_tokens=0,
            weight=self._weights(batch).repeat_interleave(batch.advantages.shape[1])[responses],
        )

    def _weights(self, batch: Batch) -> Tensor:
        """Return `[groups]`: how many groups each one stands for."""
        contrast = batch.advantages.any(1).tolist()
        uniform = [place for place, there in enumerate(contrast) if not there]
        first = self._index - len(contrast)
        chosen = {seq - first for seq in sample([first + place for place in uniform], self._variant.pull_share)}
        factor = len(uniform) / max(1, len(chosen))
        return torch.tensor([1.0 if there else factor * (i in chosen) for i, there in enumerate(contrast)])


if __name__ == "__main__":
    main()
