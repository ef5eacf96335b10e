"""The division of one model among the model workers: data, context, tensor, pipeline and expert parallelism. Pure.

Ranks are numbered as Megatron numbers them: tensor rank fastest, then context, then data, then pipeline.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from streamrl.architecture import Architecture
from streamrl.config.trainer import RoleName, TrainerConfig, role_config
from streamrl.errors import ModelError

ROLES: tuple[RoleName, ...] = ("actor", "ref", "critic", "reward")


class Coordinates(NamedTuple):
    """Coordinates of a rank in a layout; each counts from 0."""

    data: int
    context: int
    tensor: int
    pipeline: int


class Layout(msgspec.Struct, frozen=True):
    """Sizes of the dimensions. The product of all except `expert` is the number of model workers."""

    data: int = 1
    context: int = 1
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    """Number of ranks over which the experts of a layer are spread; a divisor of `stage`."""

    @property
    def world(self) -> int:
        """Number of model workers."""
        return self.data * self.context * self.tensor * self.pipeline

    @property
    def stage(self) -> int:
        """Number of model workers of one pipeline stage."""
        return self.data * self.context * self.tensor

    def expert_rank(self, rank: int) -> int:
        """Return the index of the share of a layer's experts on `rank`."""
        return rank % self.expert

    def coordinates(self, rank: int) -> Coordinates:
        """Return the coordinates of `rank`."""
        return Coordinates(
            data=rank // (self.tensor * self.context) % self.data,
            context=rank // self.tensor % self.context,
            tensor=rank % self.tensor,
            pipeline=rank // (self.tensor * self.context * self.data),
        )

    def rank(self, *, data: int, context: int, tensor: int, pipeline: int) -> int:
        """Return the rank at these coordinates."""
        return tensor + self.tensor * (context + self.context * (data + self.data * pipeline))

    def head(self, data: int) -> int:
        """Return the DP head of data-parallel rank `data`: it holds the data and returns the output."""
        return self.rank(data=data, context=0, tensor=0, pipeline=self.pipeline - 1)

    @property
    def heads(self) -> list[int]:
        """The DP heads, by data-parallel rank."""
        return [self.head(data) for data in range(self.data)]

    def members(self, data: int) -> list[int]:
        """Return all ranks of data-parallel rank `data`; they get identical input."""
        return [rank for rank in range(self.world) if self.coordinates(rank).data == data]

    def obstacles(self, model: Architecture) -> list[str]:
        """Return why `model` cannot be divided by this layout; empty if it can."""
        experts = 0 if model.moe is None else model.moe.experts
        found = [
            f"{what} = {count} is no multiple of {name} = {parts}"
            for what, count, name, parts in (
                ("num_attention_heads", model.heads, "tensor", self.tensor),
                ("num_key_value_heads", model.kv_heads, "tensor", self.tensor),
                ("intermediate_size", model.intermediate_size, "tensor", self.tensor),
                ("num_hidden_layers", model.layers, "pipeline", self.pipeline),
                ("num_experts", experts, "expert", self.expert),
                ("data × context × tensor", self.stage, "expert", self.expert),
            )
            if count % parts
        ]
        if -(-model.vocab_size // self.tensor) * (self.tensor - 1) >= model.vocab_size:
            found.append(f"vocab_size = {model.vocab_size} is too small for tensor = {self.tensor}")
        if self.expert > 1 and not experts:
            found.append(f"expert = {self.expert}, and it has no experts")
        return found

    def __str__(self) -> str:
        sizes = zip(self.__struct_fields__, msgspec.structs.astuple(self), strict=True)
        return " × ".join(f"{name} {size}" for name, size in sizes if size > 1) or "one rank"


def layout_of(trainer: TrainerConfig, role: str) -> Layout:
    """Return the layout of the model of `role`."""
    for known in ROLES:
        if known == role:
            chosen = role_config(trainer, known)
            return Layout(
                data=chosen.data_parallel,
                context=chosen.context_parallel,
                tensor=chosen.tensor_parallel,
                pipeline=chosen.pipeline_parallel,
                expert=chosen.expert_parallel,
            )
    raise ModelError(f"there is no role {role!r}; there are {', '.join(ROLES)}")
