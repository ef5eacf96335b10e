"""The policy: log-probabilities, and the step of the configured objective. The reference is one that never trains."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from streamrl.config import AlgorithmConfig, TrainerConfig
from streamrl.errors import ModelError
from streamrl.trainer.algorithms.kl import KLCoefficient
from streamrl.trainer.algorithms.objective import Tokens, Totals, objective
from streamrl.trainer.backends.adamw import updates_file
from streamrl.trainer.backends.base import Output, ParallelModel
from streamrl.trainer.packing import MicroBatch
from streamrl.trainer.ranks import Ranks
from streamrl.trainer.roles.credit import Credit, assign_credit
from streamrl.trainer.roles.items import (
    Minibatch,
    StepStatistics,
    TrainItem,
    at_targets,
    infer_packed,
    needed,
    pack_for,
)
from streamrl.trainer.roles.state import RoleState
from streamrl.types import TrajectoryGroup

KL_FILE = "kl.json"


class Actor:
    """A policy; `kl` is shared with the critic, so that both see the same reward."""

    def __init__(
        self,
        model: ParallelModel,
        *,
        ranks: Ranks,
        trainer: TrainerConfig,
        algorithm: AlgorithmConfig,
        kl: KLCoefficient,
        longest: int,
        device: torch.device,
    ) -> None:
        """`longest`: most tokens that a response may have."""
        self.model = model
        self._ranks = ranks
        self._trainer = trainer
        self._algorithm = algorithm
        self._kl = kl
        self._longest = longest
        self._device = device
        self._compares = algorithm.kl_coef > 0

    def inference(self, groups: Sequence[TrajectoryGroup]) -> list[NDArray[np.float32]] | None:
        """Log-probabilities of all sampled tokens (0 elsewhere), packed like each group; None where the model
        gives no output. Collective."""
        return infer_packed(self.model, groups, self._trainer)

    def train_step(
        self, items: Sequence[TrainItem], minibatch: Minibatch, *, before_update: Callable[[], None]
    ) -> StepStatistics:
        """One optimizer step on this rank's share of `minibatch`. Collective.

        `before_update` is called when gradients are ready and weights are about to change.
        """
        statistics = StepStatistics(sums=defaultdict(float), maxima={})
        totals = Totals(tokens=minibatch.loss_tokens, sequences=minibatch.sequences, longest=self._longest)
        penalised = self._compares and self._algorithm.kl_in == "reward"
        credits = assign_credit(
            items, self._algorithm, kl_coef=self._kl.value, penalised=penalised, add_up=self._ranks.add_up
        )
        teaching, credits = self._teaching(items, credits)
        groups = [item.group for item in teaching]
        trained = [item.trainable for item in teaching]
        micros = [micro for micro in pack_for(self.model, groups, self._trainer) if at_targets(micro, trained).any()]

        def loss(number: int, output: Output) -> Tensor:
            return self._loss(micros[number], output, teaching, credits, totals, statistics)

        self.model.accumulate(micros, loss)
        update = self.model.update(before_update)
        statistics.sums["computed_tokens"] += sum(micro.tokens for micro in micros)
        statistics.maxima |= {"grad_norm": update.grad_norm, "lr": update.lr}
        if self._compares:
            statistics.maxima["kl_coef"] = self._kl.value
            self._adapt_kl(statistics)
        return statistics

    def state(self) -> RoleState:
        """Optimizer and KL coefficient."""
        files = updates_file(self.model.updates) | {KL_FILE: msgspec.json.encode(self._kl.value)}
        return RoleState(self.model.optimizer_state(), files)

    def load_state(self, folder: Path) -> None:
        """Take over a `state` that was written; raises `ModelError` when it is of another model. Collective."""
        self.model.load_state(folder)
        try:
            self._kl.value = msgspec.json.decode((folder / KL_FILE).read_bytes(), type=float)
        except (OSError, msgspec.DecodeError) as error:
            raise ModelError(f"{folder}: the KL coefficient cannot be taken over: {error}") from error

    def _teaching(self, items: Sequence[TrainItem], credits: Sequence[Credit]) -> tuple[list[TrainItem], list[Credit]]:
        """The items with a gradient.

        Without a KL or an entropy term a group whose siblings all scored the same has none; it is left out of
        the computation (not of the normalisation). One is kept if all are so, for the figures.
        """
        if self._compares or self._algorithm.entropy_coef > 0:
            return list(items), list(credits)
        keep = [i for i, credit in enumerate(credits) if bool(credit.advantages.any())] or list(range(len(items)))[:1]
        return [items[i] for i in keep], [credits[i] for i in keep]

    def _loss(
        self,
        micro: MicroBatch,
        output: Output,
        items: Sequence[TrainItem],
        credits: Sequence[Credit],
        totals: Totals,
        statistics: StepStatistics,
    ) -> Tensor:
        """The micro-batch's share of the loss; its figures go to `statistics`."""
        groups = [item.group for item in items]
        keep = at_targets(micro, [item.trainable for item in items])

        def kept(arrays: Sequence[NDArray[Any]]) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(at_targets(micro, arrays)[keep])).to(self._device)

        mask = torch.from_numpy(keep).to(self._device)
        logprobs = output.values[mask]
        behavior = kept([g.packed_behavior_logprobs for g in groups])
        if self._algorithm.proximal == "behavior":
            proximal = behavior
        elif items[0].proximal_logprobs is not None:
            proximal = kept([needed(i.proximal_logprobs, "proximal_logprobs") for i in items])
        else:
            proximal = logprobs.detach()
        firsts = np.cumsum([0] + [group.size for group in groups])
        sequences = [np.repeat(np.arange(g.size), g.seqlens) + first for g, first in zip(groups, firsts, strict=False)]
        found = objective(
            Tokens(
                logprobs=logprobs,
                entropy=output.entropy[mask],
                behavior_logprobs=behavior,
                proximal_logprobs=proximal,
                ref_logprobs=kept([needed(i.ref_logprobs, "ref_logprobs") for i in items]) if self._compares else None,
                advantages=kept([credit.advantages.numpy() for credit in credits]),
                sequence=kept(sequences),
                sequences=int(firsts[-1]),
                age=kept([item.age for item in items]).long(),
                comparable=kept([item.fresh for item in items]),
            ),
            self._algorithm,
            kl_coef=self._kl.value,
            totals=totals,
        )
        for name, value in found.sums.items():
            statistics.sums[name] += value
        for name, value in found.maxima.items():
            statistics.maxima[name] = max(statistics.maxima.get(name, value), value)
        return found.loss

    def _adapt_kl(self, statistics: StepStatistics) -> None:
        if not self._kl.adapts:
            return
        sums = statistics.sums
        kl, tokens = self._ranks.add_up(torch.tensor([sums["kl"], sums["tokens"]], dtype=torch.float64)).tolist()
        if tokens:
            self._kl.update(kl / tokens)
