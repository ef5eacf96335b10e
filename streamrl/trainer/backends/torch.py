"""Training with plain torch and a transformers model: float32 master weights, data parallel.

Each rank holds the whole model and its own groups; gradients are summed over ranks before the
update, so all ranks stay equal. Losses are normalised by counts over the whole minibatch, which
makes the result independent of how groups are spread.
"""

from __future__ import annotations

import logging
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer

from streamrl.config import AlgorithmConfig, TrainerConfig
from streamrl.errors import ModelError, TrainingError
from streamrl.trainer.algorithms.kl import KLCoefficient, KLEstimator, kl_estimate
from streamrl.trainer.algorithms.objective import Tokens, Totals, objective, response_advantages
from streamrl.trainer.backends.base import StepStatistics, TrainItem
from streamrl.trainer.packing import MicroBatch, attention_mask, pack
from streamrl.trainer.schedule import learning_rate_schedule
from streamrl.types import TrajectoryGroup

log = logging.getLogger(__name__)

OPTIMIZER_FILE = "optimizer.safetensors"
SCALARS_FILE = "trainer.json"
HEAD_CHUNK_TOKENS = 1024
"""Tokens whose logits are alive at once; more are computed chunk by chunk, again in backward."""


class TorchBackend:
    """`Backend` on one device of one process; `process_group` joins the data-parallel ranks."""

    def __init__(
        self,
        *,
        model_dir: Path,
        reference_dir: Path,
        trainer: TrainerConfig,
        algorithm: AlgorithmConfig,
        temperature: float,
        longest: int,
        total_steps: int,
        device: torch.device,
        dtype: torch.dtype,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        """`model_dir`: first weights of the policy; `reference_dir`: those of the reference.

        `longest`: most tokens that a response may have; `total_steps`: of the run, for the schedule.
        """
        self._model_dir = model_dir
        self._trainer = trainer
        self._algorithm = algorithm
        self._temperature = temperature
        self._longest = longest
        self._device = device
        self._dtype = dtype
        self._process_group = process_group
        self._model = _load(model_dir, torch.float32, device)
        self._model.train()
        if trainer.gradient_checkpointing:
            self._model.gradient_checkpointing_enable()
        self._reference = _load(reference_dir, dtype, device).eval() if algorithm.kl_coef > 0 else None
        self._kl = KLCoefficient(algorithm.kl_coef, target=algorithm.kl_target, horizon=algorithm.kl_horizon)
        optimizer = trainer.optimizer
        self._parameters = list(self._model.parameters())
        self._optimizer = torch.optim.AdamW(
            self._parameters,
            lr=trainer.lr,
            betas=optimizer.betas,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            fused=True,
        )
        self._schedule = learning_rate_schedule(
            self._optimizer, optimizer, total_steps=total_steps * algorithm.minibatches * algorithm.epochs
        )

        self._schedule_steps = 0

    def logprobs(self, groups: Sequence[TrajectoryGroup], *, reference: bool) -> list[NDArray[np.float32]]:
        model = self._reference if reference else self._model
        if model is None:
            raise TrainingError("reference log-probabilities were asked for, but algorithm.kl_coef is 0")
        result = [np.zeros(group.tokens, dtype=np.float32) for group in groups]
        with torch.no_grad():
            for micro in self._pack(groups):
                values = self._forward(model, micro, groups).logprobs.float().cpu().numpy()
                for index in np.unique(micro.group_index):
                    mine = micro.group_index == index
                    result[index][micro.target_index[mine]] = values[mine]
        return result

    def train(
        self,
        items: Sequence[TrainItem],
        *,
        loss_tokens: int,
        sequences: int,
        before_update: Callable[[], None],
    ) -> StepStatistics:
        self._optimizer.zero_grad(set_to_none=False)
        statistics = StepStatistics(sums=defaultdict(float), maxima=defaultdict(float))
        totals = Totals(tokens=loss_tokens, sequences=sequences, longest=self._longest)
        teaching, advantages = self._teaching(items)
        for micro in self._pack([item.group for item in teaching]):
            self._accumulate(micro, teaching, advantages, totals, statistics)
        self._sum_gradients()
        norm = float(clip_grad_norm_(self._parameters, self._trainer.optimizer.grad_clip))
        before_update()
        if not np.isfinite(norm):
            raise TrainingError(
                f"the gradient norm is {norm}; look at logprob_diff and the rewards of the last steps, "
                "or lower trainer.lr"
            )
        statistics.maxima["grad_norm"] = norm
        statistics.maxima["lr"] = float(self._schedule.get_last_lr()[0])
        self._optimizer.step()
        self._schedule.step()
        self._schedule_steps += 1
        if self._reference is not None:
            statistics.maxima["kl_coef"] = self._kl.value
            self._adapt_kl(statistics)
        return statistics

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._model.named_parameters():
            yield name, parameter.detach()

    def save(self, folder: Path) -> None:
        self._model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(self._model_dir).save_pretrained(folder)

    def save_state(self, folder: Path) -> None:
        tensors: dict[str, Tensor] = {}
        for name, parameter in self._model.named_parameters():
            for key, value in self._optimizer.state[parameter].items():
                tensors[f"{key}/{name}"] = value
        save_file(tensors, folder / OPTIMIZER_FILE)
        state = _Scalars(schedule_steps=self._schedule_steps, kl_coef=self._kl.value)
        (folder / SCALARS_FILE).write_bytes(msgspec.json.encode(state))

    def load_state(self, folder: Path) -> None:
        try:
            tensors = load_file(folder / OPTIMIZER_FILE)
            scalars = msgspec.json.decode((folder / SCALARS_FILE).read_bytes(), type=_Scalars)
            for name, parameter in self._model.named_parameters():
                state = {key: tensors.pop(f"{key}/{name}") for key in ("step", "exp_avg", "exp_avg_sq")}
                for key in ("exp_avg", "exp_avg_sq"):
                    if state[key].shape != parameter.shape:
                        raise ModelError(f"{key} of {name} has the shape {tuple(state[key].shape)}")
                self._optimizer.state[parameter] = {key: value.to(self._device) for key, value in state.items()}
        except (OSError, KeyError, SafetensorError, msgspec.DecodeError) as error:
            raise ModelError(f"{folder}: the optimizer's state cannot be taken over: {error!r}") from error
        self._kl.value = scalars.kl_coef
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*")  # there was no optimizer step yet
            for _ in range(scalars.schedule_steps):
                self._schedule.step()
        self._schedule_steps = scalars.schedule_steps

    def _teaching(self, items: Sequence[TrainItem]) -> tuple[list[TrainItem], list[Tensor]]:
        """The items with a gradient, and the advantage of each of their siblings.

        Without a KL or an entropy term a group whose siblings all scored the same has none; it is left out of
        the computation (not of the normalisation). One is kept if all are so, for the figures.
        """
        algorithm = self._algorithm
        penalised = self._reference is not None and algorithm.kl_in == "reward"
        advantages = response_advantages(
            [torch.from_numpy(item.group.rewards.copy()) for item in items],  # received arrays are read-only
            [_divergence(item, algorithm.kl_estimator) for item in items] if penalised else None,
            algorithm,
            kl_coef=self._kl.value,
            add_up=self._add_up,
        )
        if self._reference is not None or algorithm.entropy_coef > 0:
            return list(items), advantages
        keep = [i for i, a in enumerate(advantages) if bool(a.any())] or list(range(min(1, len(items))))
        return [items[i] for i in keep], [advantages[i] for i in keep]

    def _pack(self, groups: Sequence[TrajectoryGroup]) -> list[MicroBatch]:
        return pack(
            groups,
            max_tokens=self._trainer.max_tokens_per_microbatch,
            share_prefix=self._trainer.share_prefix,
            hidden_size=self._model.config.hidden_size,
        )

    def _forward(self, model: Any, micro: MicroBatch, groups: Sequence[TrajectoryGroup]) -> _Predicted:
        """Log-probability and entropy of each predicted token of `micro`."""
        targets = _gather(micro, [group.packed_input_ids for group in groups])
        mask = self._tensor(attention_mask(micro.branch)) if micro.branched else None
        with torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=self._dtype == torch.bfloat16):
            hidden = model.base_model(
                input_ids=self._tensor(micro.input_ids),
                attention_mask=mask,
                # without a mask positions count up from 0 anyway, and saying so would look like packing
                position_ids=self._tensor(micro.position_ids) if micro.branched else None,
                use_cache=False,
            ).last_hidden_state
            states = hidden[self._tensor(micro.row_index), self._tensor(micro.column_index)]
            ids = self._tensor(targets.astype(np.int64))
            entropy_gradient = self._algorithm.entropy_coef > 0
            chunks = range(0, len(ids), HEAD_CHUNK_TOKENS)
            if len(chunks) <= 1:
                return _Predicted(*_predict(model.lm_head, states, ids, self._temperature, entropy_gradient))
            parts = [
                checkpoint(
                    _predict,
                    model.lm_head,
                    states[start : start + HEAD_CHUNK_TOKENS],
                    ids[start : start + HEAD_CHUNK_TOKENS],
                    self._temperature,
                    entropy_gradient,
                    use_reentrant=False,
                )
                for start in chunks
            ]
        return _Predicted(torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]))

    def _accumulate(
        self,
        micro: MicroBatch,
        items: Sequence[TrainItem],
        advantages: Sequence[Tensor],
        totals: Totals,
        statistics: StepStatistics,
    ) -> None:
        """Add the gradient of one micro-batch, and its figures to `statistics`."""
        groups = [item.group for item in items]
        keep = _gather(micro, [item.trainable for item in items])
        if not keep.any():
            return
        predicted = self._forward(self._model, micro, groups)

        def kept(arrays: Sequence[NDArray[Any]]) -> Tensor:
            return self._tensor(_gather(micro, arrays)[keep])

        mask = self._tensor(keep)
        logprobs = predicted.logprobs[mask]
        behavior = kept([g.packed_behavior_logprobs for g in groups])
        if self._algorithm.proximal == "behavior":
            proximal = behavior
        elif items[0].proximal_logprobs is not None:
            proximal = kept([_some(i.proximal_logprobs) for i in items])
        else:
            proximal = logprobs.detach()
        firsts = np.cumsum([0] + [group.size for group in groups])
        sequences = [np.repeat(np.arange(g.size), g.seqlens) + first for g, first in zip(groups, firsts, strict=False)]
        tokens = Tokens(
            logprobs=logprobs,
            entropy=predicted.entropy[mask],
            behavior_logprobs=behavior,
            proximal_logprobs=proximal,
            ref_logprobs=kept([_some(i.ref_logprobs) for i in items]) if self._reference is not None else None,
            advantages=kept([np.repeat(a.numpy(), g.seqlens) for a, g in zip(advantages, groups, strict=True)]),
            sequence=kept(sequences),
            sequences=int(firsts[-1]),
            age=kept([item.age for item in items]),
            comparable=kept([item.fresh for item in items]),
        )
        found = objective(tokens, self._algorithm, kl_coef=self._kl.value, totals=totals)
        found.loss.backward()  # type: ignore[no-untyped-call]
        statistics.sums["computed_tokens"] += micro.tokens
        for name, value in found.sums.items():
            statistics.sums[name] += value
        for name, value in found.maxima.items():
            statistics.maxima[name] = max(statistics.maxima[name], value)

    def _adapt_kl(self, statistics: StepStatistics) -> None:
        """Steer the coefficient by the KL of the step, over all ranks."""
        if not self._kl.adapts:
            return
        sums = statistics.sums
        kl, tokens = self._add_up(torch.tensor([sums["kl"], sums["tokens"]], dtype=torch.float64)).tolist()
        if tokens:
            self._kl.update(kl / tokens)

    def _add_up(self, values: Tensor) -> Tensor:
        """`values` summed over all ranks."""
        if self._process_group is None:
            return values
        values = values.to(self._device)
        dist.all_reduce(values, group=self._process_group)
        return values.cpu()

    def _sum_gradients(self) -> None:
        if self._process_group is None:
            return
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        work = [dist.all_reduce(p.grad, group=self._process_group, async_op=True) for p in self._parameters]
        for pending in work:
            if pending is not None:
                pending.wait()

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device, non_blocking=True)


class _Scalars(msgspec.Struct, frozen=True):
    """What is no tensor of a backend's state."""

    schedule_steps: int
    kl_coef: float


class _Predicted:
    def __init__(self, logprobs: Tensor, entropy: Tensor) -> None:
        self.logprobs = logprobs
        """`[predicted]` float32, of the sampled tokens at the sampling temperature."""
        self.entropy = entropy
        """`[predicted]` float32, of the whole distribution; with a gradient where the loss has an entropy term."""


def _predict(
    head: torch.nn.Module, states: Tensor, ids: Tensor, temperature: float, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    logits = head(states).float()
    if temperature != 1.0:
        logits = logits / temperature
    normaliser = logits.logsumexp(-1)
    logprobs = logits.gather(-1, ids[:, None])[:, 0] - normaliser
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        probabilities = (logits - normaliser[:, None]).exp()
        entropy = normaliser - (probabilities * logits).sum(-1)
    return logprobs, entropy


def _gather(micro: MicroBatch, arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Values of the predicted tokens of `micro`, from one packed array for each group."""
    offsets = np.concatenate(([0], np.cumsum([len(a) for a in arrays])))[:-1]
    values: NDArray[Any] = np.concatenate(arrays)[offsets[micro.group_index] + micro.target_index]
    return values


def _divergence(item: TrainItem, kind: KLEstimator) -> Tensor:
    """`[siblings]`: the KL from the reference of each response's sampled tokens, as its own policy saw them."""
    group = item.group
    behavior = torch.from_numpy(group.packed_behavior_logprobs.copy())  # received arrays are read-only
    reference = torch.from_numpy(_some(item.ref_logprobs))
    kl = kl_estimate(behavior, reference, kind=kind) * torch.from_numpy(group.packed_loss_mask.copy())
    ends = np.cumsum(group.seqlens).tolist()
    return torch.stack([kl[end - n : end].sum() for end, n in zip(ends, group.seqlens.tolist(), strict=True)])


def _some(array: NDArray[np.float32] | None) -> NDArray[np.float32]:
    if array is None:
        raise TrainingError("a group came to actor_train without log-probabilities that the graph should have made")
    return array


def _load(model_dir: Path, dtype: torch.dtype, device: torch.device) -> Any:
    try:
        model = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=dtype, attn_implementation="sdpa", local_files_only=True
        )
    except (OSError, ValueError) as error:
        raise ModelError(f"{model_dir}: transformers cannot load this model: {error}") from error
    return model.to(device)
