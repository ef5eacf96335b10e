"""The policy: log-probabilities, and the step of the configured objective. The reference is a policy that never
trains."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from streamrl.config import AlgorithmConfig, TrainerConfig
from streamrl.device import to_device
from streamrl.errors import ModelError
from streamrl.hooks import is_hook
from streamrl.trainer.algorithms.losses import KLCoefficient
from streamrl.trainer.algorithms.objective import Totals, objective
from streamrl.trainer.algorithms.registry import Advantage, policy_loss
from streamrl.trainer.algorithms.tokens import Tokens
from streamrl.trainer.backends.base import ModelOutput, ParallelModel, Ranks
from streamrl.trainer.backends.optimizer import updates_file
from streamrl.trainer.calls import MOST_COMPARED, Sibling
from streamrl.trainer.packing import MicroBatch
from streamrl.trainer.roles.advantages import Credit, assign_credit
from streamrl.trainer.roles.items import (
    DeviceFigures,
    Minibatch,
    Outputs,
    RoleState,
    StepStatistics,
    TrainItem,
    at_targets,
    infer_packed,
    needed,
    optimizer_step,
    pack_for,
)
from streamrl.types import NO_EXPERT, TrajectoryGroup

KL_FILE = "kl.json"
PULL_SHARE = 0.25
"""Share of the groups that are computed among those that have no contrast and are only pulled to older policies."""
TokensOf = Callable[[ModelOutput], Tokens]
"""Map the output of a micro-batch to the tokens of the objective."""


@dataclass(eq=False)
class Actor:
    """A policy; it shares `kl` with the critic, so that both see the same reward."""

    model: ParallelModel
    _: KW_ONLY
    ranks: Ranks
    trainer: TrainerConfig
    algorithm: AlgorithmConfig
    advantage: Callable[[int], Advantage] | None = None
    """As in `assign_credit`."""
    kl: KLCoefficient
    longest: int
    """Maximal number of tokens of a response."""
    device: torch.device
    temperature: float = 1.0
    """Divisor of the logits in `model`."""
    inferring: Callable[[], AbstractContextManager[None]] = nullcontext
    """Context of each inference."""

    def __post_init__(self) -> None:
        self._policy_loss = policy_loss(self.algorithm)
        self._compares = self.algorithm.kl_coef > 0

    def inference(self, groups: Sequence[TrajectoryGroup]) -> list[NDArray[np.float32]] | None:
        """Return the log-probabilities of all sampled tokens (0 elsewhere), packed like each group; None where the
        model returns no output. Collective."""
        with self.inferring():
            return infer_packed(self.model, groups, self.trainer)

    def begin_step(self, items: Sequence[TrainItem], *, policy_version: int, given: bool) -> list[Credit]:
        """Return the credit of `items`, all of this rank's items of a batch. Collective.

        `given`: the items have the user's advantages.
        """
        self.kl.begin_step(policy_version)
        return assign_credit(
            items,
            self.algorithm,
            kl_coef=self.kl.value,
            given=given,
            add_up=self.ranks.add_up,
            advantage=self.advantage,
        )

    def train_step(
        self,
        items: Sequence[TrainItem],
        credits: Sequence[Credit],
        minibatch: Minibatch,
        statistics: StepStatistics,
        *,
        before_update: Callable[[], None],
    ) -> None:
        """Take one optimizer step on this rank's share of `minibatch`, `items` with their `credits`. Collective.

        The figures are added to `statistics`. `before_update` is called between the gradients and the new weights.
        """
        totals = Totals(tokens=minibatch.loss_tokens, episodes=minibatch.episodes, longest=self.longest)
        wanted = minibatch.compared
        if wanted is not None and self.temperature != 1.0:
            statistics.compared = self._score([item.group for item in items if item.group.seq == wanted.seq], wanted)
            wanted = None
        teaching = self._teaching(items, credits, wanted)
        groups = [item.group for item, _, _ in teaching]
        trained = [item.trainable for item, _, _ in teaching]
        micros = [micro for micro in pack_for(self.model, groups, self.trainer) if at_targets(micro, trained).any()]
        inputs = [self._inputs(micro, teaching) for micro in micros] if self.model.gives_output else []
        figures = DeviceFigures()
        outputs: list[tuple[MicroBatch, ModelOutput]] = []

        def loss(number: int, output: ModelOutput) -> Tensor:
            if wanted is not None or minibatch.kept:
                outputs.append((micros[number], ModelOutput(output.values.detach(), output.entropy.detach())))
            tokens, kl_coef = inputs[number](output), self.kl.value
            found = objective(tokens, self.algorithm, kl_coef=kl_coef, totals=totals, loss_of=self._policy_loss)
            figures.add(found.sums, found.maxima)
            return found.loss

        self.model.accumulate(micros, loss)
        update = optimizer_step(self.model, statistics, before_update=before_update, lr_scale=minibatch.lr_scale)
        figures.read_into(statistics)
        for micro, output in outputs:
            if wanted is not None:
                statistics.compared += _logprobs_of(wanted, micro, output, groups)
            _keep_outputs(minibatch.kept, micro, output, groups, statistics.outputs)
        statistics.sums["computed_tokens"] += sum(micro.tokens for micro in micros)
        statistics.note_largest(grad_norm=update.grad_norm, lr=update.lr)
        if update.expert_load:
            statistics.note_largest(expert_load=update.expert_load)
            _count_routes(groups, statistics.sums)
        if self._compares:
            statistics.note_largest(kl_coef=self.kl.value)

    def end_step(self, sums: Mapping[str, float]) -> None:
        """Update the KL coefficient after all minibatches of a batch; `sums`: sums of their figures. Collective."""
        if not self.kl.adapts:
            return
        found = torch.tensor([sums.get("kl", 0.0), sums.get("tokens", 0.0)], dtype=torch.float64)
        kl, tokens = self.ranks.add_up(found).tolist()
        if tokens:
            self.kl.update(kl / tokens)

    def state(self) -> RoleState:
        """Return the optimizer's state and the KL coefficient."""
        files = updates_file(self.model.updates) | {KL_FILE: msgspec.json.encode(self.kl.next_value)}
        return RoleState(self.model.optimizer_parts(), files)

    def load_state(self, folder: Path) -> None:
        """Load a `state` from `folder`; raises `ModelError` if it belongs to another model. Collective."""
        self.model.load_state(folder)
        try:
            self.kl.resume(msgspec.json.decode((folder / KL_FILE).read_bytes(), type=float))
        except (OSError, msgspec.DecodeError) as error:
            raise ModelError(f"{folder}: the KL coefficient cannot be taken over: {error}") from error

    def _score(self, groups: Sequence[TrajectoryGroup], wanted: Sibling) -> list[float]:
        """Return log-probabilities as `_logprobs_of`, in a separate pass at temperature 1. Collective; `groups`: the
        response's group, or empty on other ranks."""
        micros = pack_for(self.model, [group.alone(wanted.index) for group in groups], self.trainer)
        outputs = self.model.infer(micros, temperature=1.0) or []
        return [value for output in outputs for value in output.values[:MOST_COMPARED].tolist()]

    def _teaching(
        self, items: Sequence[TrainItem], credits: Sequence[Credit], wanted: Sibling | None
    ) -> list[tuple[TrainItem, Credit, float]]:
        """Return the items that are computed, each with its credit and the factor of its loss.

        A group with equal scores has a gradient only if there is a KL or an entropy term, a loss of the user, or a pull
        back to the older policy that wrote it; else it is left out (not of the normalisation). A sample of `PULL_SHARE`
        of the groups with a pull alone stands for all of them. The item of `wanted`, or at least one, is computed for
        the figures.
        """
        pairs = list(zip(items, credits, strict=True))
        if self._compares or self.algorithm.entropy_coef > 0 or is_hook(self.algorithm.loss):
            return [(item, credit, 1.0) for item, credit in pairs]
        pulled = [
            item.group.seq
            for item, credit in pairs
            if self.algorithm.behavior_kl_coef > 0
            and not credit.advantages.any()
            and (item.age[item.trainable] > 0).any()
        ]
        sampled = sample(pulled, PULL_SHARE)
        weights = {seq: len(pulled) / len(sampled) if seq in sampled else 0.0 for seq in pulled}
        kept = sampled | ({wanted.seq} if wanted is not None else set())
        found = [
            (item, credit, weights.get(item.group.seq, 1.0))
            for item, credit in pairs
            if credit.advantages.any() or item.group.seq in kept
        ]
        return found or [(*pair, 1.0) for pair in pairs[:1]]

    def _inputs(self, micro: MicroBatch, teaching: Sequence[tuple[TrainItem, Credit, float]]) -> TokensOf:
        """Return the function for `micro`. The facts about its tokens are copied to the device here, in advance."""
        items = [item for item, _, _ in teaching]
        groups = [item.group for item in items]
        keep = np.flatnonzero(at_targets(micro, [item.trainable for item in items]))

        def kept(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
            return at_targets(micro, arrays)[keep]

        def on_device(arrays: Sequence[NDArray[Any]]) -> Tensor:
            return to_device(kept(arrays), self.device)

        chosen = to_device(keep, self.device)
        firsts = np.cumsum([0] + [group.size for group in groups])
        sequences = [np.repeat(np.arange(g.size), g.seqlens) + first for g, first in zip(groups, firsts, strict=False)]
        behavior = on_device([g.packed_behavior_logprobs for g in groups])
        centre = None
        if self.algorithm.proximal == "behavior":
            centre = behavior
        elif items[0].proximal_logprobs is not None:
            centre = on_device([needed(i.proximal_logprobs, "proximal_logprobs") for i in items])
        reference = on_device([needed(i.ref_logprobs, "ref_logprobs") for i in items]) if self._compares else None
        advantages = on_device([credit.advantages.numpy() for _, credit, _ in teaching])
        weight = on_device([np.full(item.group.tokens, factor, np.float32) for item, _, factor in teaching])
        sequence, of_episode = on_device(sequences), on_device([_tokens_of_episode(item) for item in items])
        age, comparable = kept([item.age for item in items]).astype(np.int64), kept([i.comparable for i in items])
        age_there, comparable_there = to_device(age, self.device), to_device(comparable, self.device)

        def tokens(output: ModelOutput) -> Tokens:
            logprobs = output.values.index_select(0, chosen)
            return Tokens(
                logprobs=logprobs,
                entropy=output.entropy.index_select(0, chosen),
                behavior_logprobs=behavior,
                proximal_logprobs=logprobs.detach() if centre is None else centre,
                ref_logprobs=reference,
                advantages=advantages,
                sequence=sequence,
                sequences=int(firsts[-1]),
                of_episode=of_episode,
                age=age_there,
                ages=np.unique(age).tolist(),
                comparable=comparable_there,
                comparable_tokens=int(comparable.sum()),
                weight=weight,
            )

        return tokens


def sample(seqs: Sequence[int], share: float) -> set[int]:
    """Return a pseudo-random sample of `share` of the groups `seqs`, rounded up; the same for the same groups."""

    def rank(seq: int) -> bytes:
        return hashlib.blake2b(seq.to_bytes(8, "little")).digest()

    return set(sorted(seqs, key=rank)[: math.ceil(share * len(seqs))])


def _tokens_of_episode(item: TrainItem) -> NDArray[np.int64]:
    """Return `[tokens]`: the number of tokens of the same episode that enter the loss."""
    episodes = np.repeat(item.group.episodes, item.group.seqlens)
    counts: NDArray[np.int64] = np.bincount(episodes[item.trainable], minlength=int(episodes[-1]) + 1)
    return counts[episodes]


def _keep_outputs(
    wanted: frozenset[int],
    micro: MicroBatch,
    output: ModelOutput,
    groups: Sequence[TrajectoryGroup],
    kept: dict[int, Outputs],
) -> None:
    """Add to `kept` the outputs in `micro` of the groups with the sequence numbers `wanted`."""
    numbers = [number for number in np.unique(micro.group_index).tolist() if groups[number].seq in wanted]
    if not numbers:
        return
    logprobs, entropy = (values.float().cpu().numpy() for values in (output.values, output.entropy))
    for number in numbers:
        group = groups[number]
        if group.seq not in kept:
            kept[group.seq] = Outputs(*(np.full(group.tokens, np.nan, np.float32) for _ in range(2)))
        mine = micro.group_index == number
        kept[group.seq].logprobs[micro.target_index[mine]] = logprobs[mine]
        kept[group.seq].entropy[micro.target_index[mine]] = entropy[mine]


def _logprobs_of(
    wanted: Sibling, micro: MicroBatch, output: ModelOutput, groups: Sequence[TrajectoryGroup]
) -> list[float]:
    """Return the log-probabilities of the first `MOST_COMPARED` sampled tokens of a response, if it is in `micro`."""
    numbers = [number for number, group in enumerate(groups) if group.seq == wanted.seq]
    if not numbers:
        return []
    first, end = groups[numbers[0]].bounds(wanted.index)
    mine = np.flatnonzero(
        (micro.group_index == numbers[0]) & (first <= micro.target_index) & (micro.target_index < end)
    )
    if not len(mine):
        return []
    found: list[float] = output.values.cpu()[torch.from_numpy(mine[:MOST_COMPARED])].tolist()
    return found


def _count_routes(groups: Sequence[TrajectoryGroup], sums: dict[str, float]) -> None:
    """Count the tokens that the engine's model computed, all except the last of each trajectory, and those among them
    with known experts in the first layer; the last layer need not compute a prompt."""
    for group in groups:
        routes = group.routed_experts
        sums["routable_tokens"] += group.tokens - len(group.seqlens)
        sums["routed_tokens"] += int((routes[:, 0] != NO_EXPERT).sum()) if group.routes else 0
