"""The independent reference of the parallel models' tests: transformers, one sequence at a time, in float32.

What it finds is a pure function of a checkpoint and the groups that it has learned from. So each process computes it
once, and of a world's steps rank 0 tells the others.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from streamrl.config import OptimizerConfig
from streamrl.trainer.backends.base import ModelOutput, ModelSpec
from streamrl.trainer.backends.optimizer import learning_rate
from streamrl.trainer.packing import MicroBatch, pack
from streamrl.types import TrajectoryGroup
from tests.experts import as_in_files
from tests.trainer.models import SHAPE, branching_group, random_group, save_tokenizer

SMALL: dict[str, Any] = {**SHAPE, "initializer_range": 0.1}
KINDS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
    "llama_tied": lambda: LlamaForCausalLM(
        LlamaConfig(
            **SMALL,
            tie_word_embeddings=True,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        )
    ),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=16, tie_word_embeddings=True)),
    # a vocabulary that two tensor ranks cannot share evenly
    "odd": lambda: Qwen2ForCausalLM(Qwen2Config(**{**SMALL, "vocab_size": 49}, tie_word_embeddings=True)),
}
SCALAR = "scalar"
EXPERTS = "experts"
THREE_HEADS = "three_heads"
"""A model whose heads two or four ranks cannot share."""
TEMPERATURE = 0.7
ENTROPY = 0.3
"""Coefficient of the entropy in the test's loss."""
# a large eps keeps AdamW from turning rounding noise of tiny gradients into whole steps
OPTIMIZER = OptimizerConfig(grad_clip=0.5, eps=1e-3, weight_decay=0.1, schedule="linear", warmup_steps=1)
LR = 1e-2
UPDATES = 6


def _with_experts() -> Any:
    """A Qwen3-MoE model; its second layer has no experts."""
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **{**SMALL, "num_hidden_layers": 3},
            head_dim=16,
            mlp_only_layers=[1],
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            norm_topk_prob=True,
        )
    )


def _with_three_heads() -> Any:
    heads = {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16}
    return Qwen3ForCausalLM(Qwen3Config(**{**SMALL, **heads}))


def save_models(folder: Path) -> None:
    """One checkpoint for each kind, one with experts, one with three heads, and one with a scalar head."""
    for seed, (kind, make) in enumerate({**KINDS, EXPERTS: _with_experts, THREE_HEADS: _with_three_heads}.items()):
        torch.manual_seed(seed)
        model = make()
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # else norms are one and biases zero everywhere
                torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.1)
        model.save_pretrained(folder / kind)
        save_tokenizer(folder / kind)
    LlamaForSequenceClassification(LlamaConfig(**SMALL, num_labels=1)).save_pretrained(folder / SCALAR)


def make_spec(folder: Path, **changes: Any) -> ModelSpec:
    """A trained model of `folder`, in float32 on the CPU."""
    settings: dict[str, Any] = {
        "folder": folder,
        "head": "tokens",
        "device": torch.device("cpu"),
        "dtype": torch.float32,
        "temperature": TEMPERATURE,
        "entropy_gradient": True,
        "lr": LR,
        "optimizer": OPTIMIZER,
        "total_updates": UPDATES,
    }
    return ModelSpec(**{**settings, **changes})


def make_groups(step: int = 0, count: int = 3) -> list[TrajectoryGroup]:
    """Groups of several lengths, some with feedback tokens; every third one branches after each turn."""
    rng = np.random.default_rng(step)
    return [
        branching_group(10 * step + i, rng)
        if i % 3 == 2
        else random_group(10 * step + i, rng, prompt=3 + 2 * i, gaps=i % 2 == 1)
        for i in range(count)
    ]


def micro_batches(
    groups: Sequence[TrajectoryGroup], *, share_prefix: bool = True, max_tokens: int = 60
) -> list[MicroBatch]:
    return pack(groups, max_tokens=max_tokens, share_prefix=share_prefix)


def token_weights(group: TrajectoryGroup) -> Tensor:
    """How the test's loss weighs the tokens of `group`, packed."""
    return torch.from_numpy(np.random.default_rng(group.seq).normal(size=group.tokens).astype(np.float32))


def loss_of(groups: Sequence[TrajectoryGroup], micros: Sequence[MicroBatch]) -> Callable[[int, ModelOutput], Tensor]:
    weights = [token_weights(group) for group in groups]

    def loss(number: int, output: ModelOutput) -> Tensor:
        micro = micros[number]
        own = torch.stack([weights[g][t] for g, t in zip(micro.group_index, micro.target_index, strict=True)])
        return (output.values * own).sum() + ENTROPY * output.entropy.sum()

    return loss


@cache
def _load(folder: Path) -> Any:
    kind = LlamaForSequenceClassification if folder.name == SCALAR else AutoModelForCausalLM
    return kind.from_pretrained(folder, dtype=torch.float32)


Past = tuple[str | tuple[float, ...], ...]
"""Folder of a checkpoint, and the sequence numbers of the groups of each step since: what makes a reference."""


@dataclass(frozen=True)
class Stepped:
    """A reference after a step."""

    norm: float
    lr: float
    gradients: dict[str, Tensor]
    """Before they were clipped."""
    weights: dict[str, Tensor]
    optimizer: dict[str, Any]


_stepped: dict[Past, Stepped] = {}
_predicted: dict[tuple[Past, int, float], tuple[Tensor, Tensor]] = {}


class Reference:
    """The model in transformers, one sequence at a time, and torch's AdamW."""

    def __init__(self, folder: Path) -> None:
        self._past: Past = (str(folder),)
        self.scalar = folder.name == SCALAR
        self.model = copy.deepcopy(_load(folder))
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=LR,
            betas=OPTIMIZER.betas,
            eps=OPTIMIZER.eps,
            weight_decay=OPTIMIZER.weight_decay,
        )
        self.steps = 0

    def predicted(self, group: TrajectoryGroup, *, temperature: float = TEMPERATURE) -> tuple[Tensor, Tensor]:
        """Packed values and entropies, without gradients; those of the first token of each sequence are zero."""
        key = (self._past, group.seq, temperature)
        if key not in _predicted:
            with torch.no_grad():
                _predicted[key] = self._predict(group, temperature)
        return _predicted[key]

    def _predict(self, group: TrajectoryGroup, temperature: float = TEMPERATURE) -> tuple[Tensor, Tensor]:
        values, entropies = [], []
        for end, length in zip(np.cumsum(group.seqlens), group.seqlens, strict=True):
            ids = torch.from_numpy(group.packed_input_ids[end - length : end].astype(np.int64))
            if self.scalar:
                unit = self.model.score(self.model.model(ids[None]).last_hidden_state)[0, :, 0]
                values.append(torch.cat([torch.zeros(1), unit[:-1]]))
                entropies.append(torch.zeros(len(ids)))
                continue
            logits = self.model(ids[None]).logits[0] / temperature
            own = logits.log_softmax(-1)[:-1].gather(-1, ids[1:, None])[:, 0]
            values.append(torch.cat([torch.zeros(1), own]))
            entropy = torch.distributions.Categorical(logits=logits[:-1]).entropy()
            entropies.append(torch.cat([torch.zeros(1), entropy]))
        return torch.cat(values), torch.cat(entropies)

    def _gradients(self, groups: Sequence[TrajectoryGroup]) -> dict[str, Tensor]:
        """Of the test's loss over all `groups`; they stay in the parameters."""
        self.optimizer.zero_grad()
        loss = torch.zeros(())
        for group in groups:
            values, entropies = self._predict(group)
            sampled = torch.from_numpy(group.packed_loss_mask)
            loss = loss + (values * token_weights(group))[sampled].sum() + ENTROPY * entropies[sampled].sum()
        loss.backward()
        return as_in_files({name: parameter.grad.clone() for name, parameter in self.model.named_parameters()})

    def step(self, groups: Sequence[TrajectoryGroup], *, lr_scale: float = 1.0) -> Stepped:
        """One optimizer step. All ranks of a world make it together."""
        self._past += ((lr_scale, *(group.seq for group in groups)),)
        if self._past not in _stepped:
            _stepped[self._past] = _of_rank_0(lambda: self._step(groups, lr_scale=lr_scale))
        made = _stepped[self._past]
        self.model.load_state_dict(made.weights)
        self.optimizer.load_state_dict(copy.deepcopy(made.optimizer))
        self.steps += 1
        return made

    def _step(self, groups: Sequence[TrajectoryGroup], *, lr_scale: float) -> Stepped:
        gradients = self._gradients(groups)
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), OPTIMIZER.grad_clip))
        lr = lr_scale * learning_rate(self.steps, peak=LR, config=OPTIMIZER, total_steps=UPDATES)
        self.optimizer.param_groups[0]["lr"] = lr
        self.optimizer.step()
        return Stepped(
            norm, lr, gradients, copy.deepcopy(self.model.state_dict()), copy.deepcopy(self.optimizer.state_dict())
        )

    def disturb(self) -> None:
        """Turn it into another model of the same shape."""
        self._past += ("disturbed",)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) / 10)

    def weights(self) -> dict[str, Tensor]:
        return as_in_files({name: parameter.detach().clone() for name, parameter in self.model.named_parameters()})


def _of_rank_0(compute: Callable[[], Stepped]) -> Stepped:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return compute()
    told = [compute() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(told, src=0)
    assert told[0] is not None
    return told[0]
