"""The recipes of docs/algorithms.md, each against a loop over responses and tokens written from its paper.

A recipe is read from the page and run as a model worker runs it: groups in the stream's data set, inference calls, a
training step of several minibatches. Its numbers are written again in the loops, which know nothing of streamrl.
"""

from __future__ import annotations

import math
import re
import statistics
import threading
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from streamrl.config import from_dict
from streamrl.stream_dataset import StreamDataset
from streamrl.trainer.calls import Inference, MinibatchShare, TrainStep
from streamrl.trainer.graph import graph_of
from streamrl.trainer.worker.assembly import Assembly
from streamrl.trainer.worker.computation import Computation
from streamrl.trainer.worker.data import WorkerData
from tests.trainer.models import random_group, save_model

PAGE = Path(__file__).parents[2] / "docs" / "algorithms.md"
RECIPES = dict(re.findall(r"^### ([^\n]+)\n+```toml\n(.*?)```", PAGE.read_text(), re.MULTILINE | re.DOTALL))
LONGEST = 64
"""`max_new_tokens`."""
GROUPS = 4
VERSION = 9


@dataclass
class Response:
    """What a paper's formula may look at, of one response's sampled tokens."""

    reward: float
    behavior: list[float]
    """log π_b."""
    proximal: list[float]
    """log π at the start of the step."""
    ages: list[int]
    """In policy versions."""
    ref: list[float]
    old_values: list[float]
    """The critic's at the start of the step."""
    now: list[Tensor] = field(default_factory=list)
    """log π, with a gradient."""
    values: list[Tensor] = field(default_factory=list)
    """The critic's, with a gradient."""
    advantages: list[float] = field(default_factory=list)
    returns: list[float] = field(default_factory=list)


Batch = list[list[Response]]
"""Of each group its responses."""


# Advantages: from a batch, for each of its responses.


def constant_in_responses(batch: Batch, compare: Callable[[list[float]], list[float]], penalty: float = 0.0) -> None:
    """`compare` gets the rewards of one group, less `penalty` times the KL of the whole response."""
    for group in batch:
        rewards = [
            r.reward - penalty * sum(b - f for b, f in zip(r.behavior, r.ref, strict=True)) if penalty else r.reward
            for r in group
        ]
        for response, advantage in zip(group, compare(rewards), strict=True):
            response.advantages = [advantage] * len(response.behavior)


def standardised(rewards: list[float]) -> list[float]:
    mean, deviation = statistics.fmean(rewards), statistics.stdev(rewards)
    return [(r - mean) / (deviation + 1e-4) for r in rewards]


def centred(rewards: list[float]) -> list[float]:
    return [r - statistics.fmean(rewards) for r in rewards]


def leave_one_out(rewards: list[float]) -> list[float]:
    return [r - statistics.fmean(rewards[:i] + rewards[i + 1 :]) for i, r in enumerate(rewards)]


def normalised_over_tokens(batch: Batch) -> None:
    everything = [a for group in batch for response in group for a in response.advantages]
    mean, deviation = statistics.fmean(everything), statistics.stdev(everything)
    for group in batch:
        for response in group:
            response.advantages = [(a - mean) / (deviation + 1e-4) for a in response.advantages]


def reinforce_pp(batch: Batch, *, beta: float) -> None:
    """A_t = r - β Σ_{i ≥ t} log(π_b / π_ref)(i), normalised over the batch's tokens."""
    for group in batch:
        for response in group:
            kl = [b - f for b, f in zip(response.behavior, response.ref, strict=True)] if beta else []
            response.advantages = [response.reward - beta * sum(kl[t:]) for t in range(len(response.behavior))]
    normalised_over_tokens(batch)


def taught(batch: Batch) -> None:
    """A_t = log(π_teacher / π_b)(t), normalised over the batch's tokens."""
    for group in batch:
        for response in group:
            response.advantages = [f - b for b, f in zip(response.behavior, response.ref, strict=True)]
    normalised_over_tokens(batch)


def generalised(batch: Batch, *, beta: float, gae_lambda: float, gamma: float = 1.0) -> None:
    """GAE as the sum that defines it, on rewards -β log(π_b / π_ref), and r at the end."""
    for group in batch:
        for response in group:
            n, values = len(response.behavior), [*response.old_values, 0.0]
            rewards = [-beta * (b - f) for b, f in zip(response.behavior, response.ref, strict=True)]
            rewards[-1] += response.reward
            deltas = [rewards[t] + gamma * values[t + 1] - values[t] for t in range(n)]
            decay = gamma * gae_lambda
            response.advantages = [sum(decay ** (k - t) * deltas[k] for k in range(t, n)) for t in range(n)]
            response.returns = [a + v for a, v in zip(response.advantages, values, strict=False)]
    normalised_over_tokens(batch)


# Losses: of a minibatch whose responses have their advantages.


def clipped(ratio: Tensor, advantage: float, low: float, high: float) -> Tensor:
    return -torch.min(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def surrogates(r: Response, old: list[float], *, high: float = 0.2) -> list[Tensor]:
    """PPO's for each token."""
    return [clipped((n - o).exp(), a, 0.2, high) for n, o, a in zip(r.now, old, r.advantages, strict=True)]


def mean_over_tokens(part: list[Response], terms: Callable[[Response], list[Tensor]]) -> Tensor:
    return sum(sum(terms(r)) for r in part) / sum(len(r.now) for r in part)


def mean_over_responses(part: list[Response], terms: Callable[[Response], list[Tensor]]) -> Tensor:
    return sum(sum(terms(r)) / len(r.now) for r in part) / len(part)


def grpo_loss(part: list[Response]) -> Tensor:
    def terms(r: Response) -> list[Tensor]:
        kl = [(f - n).exp() - (f - n) - 1 for n, f in zip(r.now, r.ref, strict=True)]
        return [s + 0.04 * k for s, k in zip(surrogates(r, r.behavior), kl, strict=True)]

    return mean_over_responses(part, terms)


def dr_grpo_loss(part: list[Response]) -> Tensor:
    return sum(sum(surrogates(r, r.behavior)) / LONGEST for r in part) / len(part)


def rloo_loss(part: list[Response]) -> Tensor:
    """REINFORCE; on data of another policy with our weights, which are 1 on its own."""
    return -sum(
        r.advantages[0] * sum(min(w, 5.0) * n for w, n in zip(weights_of_tokens(r), r.now, strict=True)) for r in part
    ) / len(part)


def ppo_loss(part: list[Response]) -> Tensor:
    return mean_over_tokens(part, lambda r: surrogates(r, r.behavior))


def baseline_loss(part: list[Response]) -> Tensor:
    def terms(r: Response) -> list[Tensor]:
        kl = [(n - f) ** 2 / 2 for n, f in zip(r.now, r.ref, strict=True)]
        return [s + 0.01 * k for s, k in zip(surrogates(r, r.behavior), kl, strict=True)]

    return mean_over_tokens(part, terms)


def dapo_loss(part: list[Response]) -> Tensor:
    return mean_over_tokens(part, lambda r: surrogates(r, r.behavior, high=0.28))


def gspo_loss(part: list[Response]) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for r in part:
        ratio = (sum(n - b for n, b in zip(r.now, r.behavior, strict=True)) / len(r.now)).exp()
        total = total + clipped(ratio, r.advantages[0], 3e-4, 4e-4)
    return total / len(part)


def cispo_loss(part: list[Response]) -> Tensor:
    def terms(r: Response) -> list[Tensor]:
        ratios = [min(math.exp(float(n.detach()) - b), 1 + 4.0) for n, b in zip(r.now, r.behavior, strict=True)]
        return [-ratio * a * n for ratio, a, n in zip(ratios, r.advantages, r.now, strict=True)]

    return mean_over_tokens(part, terms)


def weights_of_tokens(r: Response) -> list[float]:
    return [math.exp(p - b) for p, b in zip(r.proximal, r.behavior, strict=True)]


def decoupled_loss(part: list[Response], weigh: Callable[[Response], list[float]], *, high: float) -> Tensor:
    """AReaL, eq. 5, with weights by `weigh`."""
    return mean_over_tokens(
        part, lambda r: [w * s for w, s in zip(weigh(r), surrogates(r, r.proximal, high=high), strict=True)]
    )


def default_loss(part: list[Response]) -> Tensor:
    def pulls(r: Response) -> list[Tensor]:
        """0.1 KL(π_b || π) of older tokens."""
        moved = [n - b for n, b in zip(r.now, r.behavior, strict=True)]
        found = [x + 1 - 2 * math.log(2) if x.detach() > math.log(2) else x.exp() - 1 - x for x in moved]
        return [0.1 * pull * (age > 0) for pull, age in zip(found, r.ages, strict=True)]

    decoupled = decoupled_loss(part, lambda r: [min(w, 5.0) for w in weights_of_tokens(r)], high=0.28)
    return decoupled + mean_over_tokens(part, pulls)


def areal_loss(part: list[Response]) -> Tensor:
    return decoupled_loss(part, lambda r: [w if w <= 5.0 else 0.0 for w in weights_of_tokens(r)], high=0.2)


def masked_responses_loss(part: list[Response]) -> Tensor:
    def weigh(r: Response) -> list[float]:
        weight = math.prod(weights_of_tokens(r))
        return [weight if 0.5 <= weight <= 2.0 else 0.0] * len(r.now)

    return decoupled_loss(part, weigh, high=0.28)


def critic_loss(part: list[Response], clip: float = 0.2) -> Tensor:
    def terms(r: Response) -> list[Tensor]:
        return [
            torch.max((v - wanted) ** 2, (v.clamp(old - clip, old + clip) - wanted) ** 2) / 2
            for v, old, wanted in zip(r.values, r.old_values, r.returns, strict=True)
        ]

    return mean_over_tokens(part, terms)


@dataclass
class Paper:
    credit: Callable[[Batch], None]
    loss: Callable[[list[Response]], Tensor]
    by_gradient: bool = False
    """It gives a gradient, which any loss may have."""


PAPERS = {
    "The default": Paper(lambda batch: constant_in_responses(batch, standardised), default_loss),
    "GRPO": Paper(lambda batch: constant_in_responses(batch, standardised), grpo_loss),
    "Dr. GRPO": Paper(lambda batch: constant_in_responses(batch, centred), dr_grpo_loss),
    "RLOO": Paper(lambda batch: constant_in_responses(batch, leave_one_out, 0.03), rloo_loss, by_gradient=True),
    "REINFORCE++": Paper(lambda batch: reinforce_pp(batch, beta=0.01), ppo_loss),
    "PPO": Paper(lambda batch: generalised(batch, beta=0.01, gae_lambda=0.95), ppo_loss),
    "DAPO": Paper(lambda batch: constant_in_responses(batch, standardised), dapo_loss),
    "GSPO": Paper(lambda batch: constant_in_responses(batch, standardised), gspo_loss),
    "CISPO": Paper(lambda batch: constant_in_responses(batch, standardised), cispo_loss),
    "AReaL": Paper(lambda batch: reinforce_pp(batch, beta=0.0), areal_loss),
    "On-policy distillation": Paper(taught, dapo_loss),
    "Masked importance sampling on whole responses": Paper(
        lambda batch: constant_in_responses(batch, standardised), masked_responses_loss
    ),
}


def baseline_credit(batch: Batch) -> None:
    constant_in_responses(batch, centred)
    normalised_over_tokens(batch)


PAPERS["REINFORCE++ with a baseline"] = Paper(baseline_credit, baseline_loss)
DECOUPLED = {"The default", "RLOO", "AReaL", "Masked importance sampling on whole responses"}
"""Their loops know of both policies; the others' of one, which is the behaviour policy."""


class Run:
    """One training step of a recipe on a tiny policy, with what its updates were made from."""

    def __init__(
        self, tmp_path: Path, recipe: str, *, fresh: bool, critic: dict[str, object] | None = None, **algorithm: object
    ) -> None:
        """`fresh`: the policy at the start of the step wrote the data; else another one, far from it."""
        sections = tomllib.loads(recipe)
        sections["algorithm"] |= algorithm
        sections["critic"] = sections.get("critic", {}) | (critic or {})
        if "reference" in sections:
            sections["reference"]["path"] = str(save_model(tmp_path / "teacher", "qwen3", seed=3))
        sections.setdefault("rollout", {}).update(group_size=4, sampling={"max_new_tokens": LONGEST})
        self.config = from_dict(
            {
                "trainer": {"dtype": "float32", "batch_groups": GROUPS, "lr": 1e-2, "max_tokens_per_microbatch": 90},
                "run": {"device": "cpu"},
                **sections,
            }
        )
        folder = save_model(tmp_path / "model")
        self.graph = graph_of(self.config)
        self.assembly = Assembly(
            self.config, roles=self.graph.roles, model_dir=folder, rank=0, device=torch.device("cpu")
        )
        self._move_policy()
        self.dataset = StreamDataset(rank=0, capacity_groups=GROUPS)
        self.data = WorkerData(self.dataset, rank=0)
        free = threading.Event()
        free.set()
        self.computation = Computation(
            self.config, rank=0, graph=self.graph, assembly=self.assembly, data=self.data, weights_free=free
        )
        rng = np.random.default_rng(1)
        self.groups = [random_group(i, rng, gaps=i == 1, versions=(5, VERSION + 1)) for i in range(GROUPS)]
        self.proximal = self.assembly.actor.inference(self.groups)
        for i, (group, proximal) in enumerate(zip(self.groups, self.proximal, strict=True)):
            noise = 0.0 if fresh else rng.normal(size=group.tokens, scale=1.0) * group.packed_loss_mask
            behavior = (proximal + noise).astype(np.float32)
            self.groups[i] = msgspec.structs.replace(group, packed_behavior_logprobs=behavior)
            self.dataset.offer(self.groups[i])
        self.seen: dict[str, list[tuple[dict[str, Tensor], dict[str, Tensor]]]] = {}
        """Of each role's updates: the weights that made the gradient, and the gradient."""
        for role in sorted({"actor", "critic"} & self.graph.roles):
            self._record(role)
        count = self.config.algorithm.minibatches
        size = GROUPS // count
        self.parts = [list(range(i * size, (i + 1) * size)) for i in range(count)]
        self.figures: dict[str, float] = {}

    def step(self, order: tuple[str, ...] = ("critic_train", "actor_train")) -> None:
        """The calls of one step, the trainings in `order`."""
        seqs = list(range(GROUPS))
        for mfc in (*self.graph.reading("arrivals"), *self.graph.reading("batch")):
            if mfc.interface == "inference":
                self.computation.carry_out(Inference(mfc.name, seqs))
        trained = {mfc.name for mfc in self.graph.mfcs if mfc.interface == "train_step"}
        minibatches = [
            MinibatchShare(
                part,
                sum(int(self.groups[seq].packed_loss_mask.sum()) for seq in part),
                sum(self.groups[seq].size for seq in part),
            )
            for part in self.parts
        ]
        for name in order:
            if name in trained:
                self.figures |= self.computation.carry_out(TrainStep(name, VERSION, 0, minibatches)).sums

    @torch.no_grad()
    def batch(self) -> Batch:
        """What the formulas see at the start of the step."""
        if "ref" in self.graph.roles:
            ref = self._transformer("ref")
            refs = [self._packed(ref, group, scalar=False) for group in self.groups]
        if "critic" in self.graph.roles:
            judge = self._transformer("critic", self.seen["critic"][0][0])
            values = [self._packed(judge, group, scalar=True) for group in self.groups]
        policy = self._transformer("actor", self.seen["actor"][0][0])
        proximal = [self._packed(policy, group, scalar=False) for group in self.groups]

        def of(arrays: list[Tensor], number: int, places: np.ndarray) -> list[float]:
            return [float(arrays[number][t]) for t in places]

        return [
            [
                Response(
                    reward=float(group.rewards[i]),
                    behavior=[float(group.packed_behavior_logprobs[t]) for t in places],
                    proximal=of(proximal, number, places),
                    ages=[VERSION - int(group.packed_policy_versions[t]) for t in places],
                    ref=of(refs, number, places) if "ref" in self.graph.roles else [],
                    old_values=of(values, number, places) if "critic" in self.graph.roles else [],
                )
                for i, places in enumerate(sampled_places(group))
            ]
            for number, group in enumerate(self.groups)
        ]

    def compare(self, role: str, batch: Batch, loss_of: Callable[[list[Response]], Tensor]) -> float:
        """Hold the gradient of each of the role's updates against that of `loss_of`; the sum of the losses."""
        total = 0.0
        assert len(self.seen[role]) == len(self.parts)
        for part, (weights, gradients) in zip(self.parts, self.seen[role], strict=True):
            model = self._transformer(role, weights)
            for seq in part:
                packed = self._packed(model, self.groups[seq], scalar=role == "critic")
                for response, places in zip(batch[seq], sampled_places(self.groups[seq]), strict=True):
                    found = [packed[t] for t in places]
                    if role == "critic":
                        response.values = found
                    else:
                        response.now = found
            loss = loss_of([response for seq in part for response in batch[seq]])
            loss.backward()
            total += float(loss.detach())
            wanted = {name: parameter.grad for name, parameter in model.named_parameters()}
            largest = max(float(gradient.abs().max()) for gradient in wanted.values())
            assert largest > 1e-4
            for name, gradient in wanted.items():
                difference = float((gradients[name] - gradient).abs().max())
                assert difference < 1e-4 * largest, (role, part, name, difference / largest)
        return total

    def _move_policy(self) -> None:
        """Away from the reference, and a critic's head away from 0."""
        generator = torch.Generator().manual_seed(5)
        for role in sorted({"actor", "critic"} & self.graph.roles):
            model = self.assembly.roles[role].model
            model.load_weights(
                [
                    (name, weight + torch.randn(weight.shape, generator=generator) * 0.05)
                    for name, weight in model.gather_weights()
                ]
            )

    def _record(self, role: str) -> None:
        model = self.assembly.roles[role].model
        update = model.update
        seen = self.seen[role] = []

        def recorded(before_update: Callable[[], None], **more: float) -> object:
            parameters = model._parameters
            weights = {name: weight.detach().clone() for name, weight in parameters.items()}
            seen.append((weights, {name: weight.grad.clone() for name, weight in parameters.items()}))
            return update(before_update, **more)

        model.update = recorded

    def _transformer(self, role: str, weights: dict[str, Tensor] | None = None) -> torch.nn.Module:
        kind = AutoModelForSequenceClassification if role == "critic" else AutoModelForCausalLM
        options = {"num_labels": 1} if role == "critic" else {}
        folder = self.config.reference.path if role == "ref" else None
        model = kind.from_pretrained(folder or self.assembly.model_dir, dtype=torch.float64, **options)
        for name, parameter in model.named_parameters() if weights else ():
            parameter.data.copy_(weights[name])
        return model

    def _packed(self, model: torch.nn.Module, group: object, *, scalar: bool) -> Tensor:
        """Log-probability of each token, or the value of the state before it, sequence by sequence."""
        parts = []
        for end, length in zip(np.cumsum(group.seqlens), group.seqlens, strict=True):
            ids = torch.from_numpy(group.packed_input_ids[end - length : end].astype(np.int64))
            if scalar:
                own = model.score(model.model(ids[None]).last_hidden_state)[0, :-1, 0]
            else:
                own = model(ids[None]).logits[0].log_softmax(-1)[:-1].gather(-1, ids[1:, None])[:, 0]
            parts.append(torch.cat([torch.zeros(1, dtype=own.dtype), own]))
        return torch.cat(parts)


def sampled_places(group: object) -> list[np.ndarray]:
    """Of each response, where its sampled tokens are in the packed arrays."""
    ends = np.cumsum(group.seqlens)
    return [
        np.flatnonzero(group.packed_loss_mask[end - length : end]) + end - length
        for end, length in zip(ends, group.seqlens, strict=True)
    ]


def test_every_recipe_has_its_loop():
    assert RECIPES.keys() == PAPERS.keys()


@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "stale"])
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_its_papers(tmp_path, name, fresh):
    changes: dict[str, object] = {} if name == "RLOO" else {"minibatches": 2}
    if not fresh and name not in DECOUPLED:
        changes["proximal"] = "behavior"
    if name != "The default":
        changes["behavior_kl_coef"] = 0.0
    run = Run(tmp_path, RECIPES[name], fresh=fresh, **changes)
    run.step()
    paper, batch = PAPERS[name], run.batch()
    paper.credit(batch)
    loss = run.compare("actor", batch, paper.loss)
    if not paper.by_gradient:
        assert run.figures["loss"] == pytest.approx(loss, abs=2e-5)
    if "critic" in run.graph.roles:
        assert run.figures["critic/loss"] == pytest.approx(run.compare("critic", batch, critic_loss), abs=2e-5)


@pytest.mark.parametrize("order", [("critic_train", "actor_train"), ("actor_train", "critic_train")])
def test_an_adaptive_kl_coefficient_is_one_in_a_step_for_both_roles_and_all_minibatches(tmp_path, order):
    run = Run(
        tmp_path,
        RECIPES["PPO"],
        fresh=False,
        minibatches=2,
        proximal="behavior",
        behavior_kl_coef=0.0,
        kl_coef=0.5,
        kl_target=1e-4,
        kl_horizon=1,
    )
    run.step(order)
    batch = run.batch()
    generalised(batch, beta=0.5, gae_lambda=0.95)
    run.compare("actor", batch, ppo_loss)
    run.compare("critic", batch, critic_loss)
    # the largest change, once; on tokens that the policy did not draw itself the estimate may be below 0
    change = 0.2 if run.figures["kl"] > 0 else -0.2
    assert float(run.assembly.actor.state().files["kl.json"]) == pytest.approx(0.5 * (1 + change))


@pytest.mark.parametrize("clip", [None, 1e-3])
def test_ppo_with_a_discount_and_values_that_move_freely_or_hardly(tmp_path, clip):
    changes = {"gamma": 0.9, "minibatches": 2, "proximal": "behavior", "behavior_kl_coef": 0.0}
    run = Run(tmp_path, RECIPES["PPO"], fresh=False, critic={"value_clip": clip}, **changes)
    run.step()
    batch = run.batch()
    generalised(batch, beta=0.01, gae_lambda=0.95, gamma=0.9)
    run.compare("actor", batch, ppo_loss)
    run.compare("critic", batch, lambda part: critic_loss(part, clip=clip or math.inf))
