"""torch's AdamW over named local tensors, with its learning-rate schedule, its files, and a place to compute.

Files: `optimizer.safetensors`, or one file of each rank, with `exp_avg/NAME` and `exp_avg_sq/NAME` under the weights'
Hugging Face names, and `updates.json`. So another layout, or another backend, can go on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from streamrl.config import OptimizerConfig
from streamrl.errors import ModelError
from streamrl.safetensors_files import Part, Specs, TensorFiles
from streamrl.trainer.backends.base import ModelSpec

# --- schedule ---


def learning_rate(step: int, *, peak: float, config: OptimizerConfig, total_steps: int) -> float:
    """Return the learning rate of optimizer step `step`, from 0: linear warm-up, then `config.schedule` down to its end
    at `total_steps`.

    The warm-up rises from `peak / (warmup_steps + 1)`; the end is `min_lr_ratio · peak`, and stays. Pure: unlike
    torch's schedulers it has no state to save, so a run goes on from the number of steps alone, under whichever
    backend; and beyond the end the cosine does not rise again.
    """
    if step < config.warmup_steps:
        return peak * (step + 1) / (config.warmup_steps + 1)
    rest = max(1, total_steps - config.warmup_steps)
    done = min(1.0, (step - config.warmup_steps) / rest)
    match config.schedule:
        case "constant":
            return peak
        case "linear":
            return peak * (1 - (1 - config.min_lr_ratio) * done)
        case "cosine":
            return peak * (config.min_lr_ratio + (1 - config.min_lr_ratio) * (1 + math.cos(math.pi * done)) / 2)


class Schedule:
    """The learning rate of each optimizer step of a run.

    A run that goes on may cut its batches into other minibatches, or pass over them another number of times. It is as
    far in its schedule as in its training steps then, whatever number of optimizer steps the state comes after.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._ahead = spec.updates_before or 0
        """By how much the position in the schedule is larger than the number of optimizer steps."""

    def rate(self, updates: int) -> float:
        """Return the learning rate of the step that follows `updates` others."""
        assert self._spec.lr is not None
        return learning_rate(
            updates + self._ahead, peak=self._spec.lr, config=self._spec.optimizer, total_steps=self._spec.total_updates
        )

    def go_on(self, updates: int) -> None:
        """The optimizer's state was taken over, which comes after `updates` steps."""
        before = self._spec.updates_before
        self._ahead = 0 if before is None else before - updates


# --- adamw ---

MOMENTS = ("exp_avg", "exp_avg_sq")
OPTIMIZER = "optimizer"
"""The name of the tensors' files, without `.safetensors`."""
UPDATES = "updates.json"


class Spread(Protocol):
    """Knows how tensors shaped like the weights are spread over ranks."""

    def specs(self) -> list[tuple[str, tuple[int, ...]]]: ...

    def parts(self, tensors: Mapping[str, Tensor]) -> list[Part]: ...

    def own_parts(self, tensors: Mapping[str, Tensor]) -> list[Part]: ...


class AdamW:
    """One optimizer step after another on this rank's part of the weights.

    With `spec.offload_optimizer` weights and moments have a copy on the CPU on which the step is made.
    """

    def __init__(self, weights: dict[str, Tensor], spec: ModelSpec) -> None:
        """`weights`: this rank's part of each, by name; it may be empty."""
        assert spec.lr is not None
        self._weights = weights
        self._offloaded = spec.offload_optimizer
        self.updates = 0
        """Steps so far."""
        self._schedule = Schedule(spec)
        self._masters = (
            {name: w.to("cpu", copy=True) for name, w in weights.items()} if self._offloaded else dict(weights)
        )
        self._adam = torch.optim.AdamW(
            list(self._masters.values()),
            lr=spec.lr,
            betas=spec.optimizer.betas,
            eps=spec.optimizer.eps,
            weight_decay=spec.optimizer.weight_decay,
            fused=True,
        )
        self._moments = {key: {n: torch.zeros_like(w) for n, w in self._masters.items()} for key in MOMENTS}
        for name, master in self._masters.items():
            moments = {key: self._moments[key][name] for key in MOMENTS}
            self._adam.state[master] = {"step": torch.tensor(0.0, device=master.device), **moments}

    def step(self, gradients: dict[str, Tensor], *, scale: float, lr_scale: float = 1.0) -> float:
        """Update the weights by `gradients · scale`; return the learning rate, the schedule's times `lr_scale`.

        Changes `gradients`.
        """
        lr = lr_scale * self._schedule.rate(self.updates)
        self.updates += 1
        names = [name for name, weight in self._weights.items() if weight.numel()]
        if scale != 1.0:
            torch._foreach_mul_([gradients[name] for name in names], scale)
        for name in names:
            self._masters[name].grad = gradients[name].to(self._masters[name].device)
        self._adam.param_groups[0]["lr"] = lr
        self._adam.step()
        self._adam.zero_grad()
        if self._offloaded:
            with torch.no_grad():
                for name in names:
                    self._weights[name].copy_(self._masters[name])
        return lr

    def weights_changed(self) -> None:
        """The weights were set from outside."""
        if self._offloaded:
            for name, weight in self._weights.items():
                self._masters[name].copy_(weight)

    def on_device(self) -> list[Tensor]:
        """Return what lives where the weights do, besides them."""
        return [] if self._offloaded else [moment for found in self._moments.values() for moment in found.values()]

    def parts(self, spread: Spread) -> list[Part]:
        """See `ParallelModel.optimizer_parts`."""
        return [named(key, part) for key in MOMENTS for part in spread.own_parts(self._moments[key])]

    def load(self, folder: Path, spread: Spread) -> None:
        """Raises `ModelError` when `folder` holds no state, or that of another model."""
        self.updates = read_state(folder, {key: spread.parts(self._moments[key]) for key in MOMENTS}, spread.specs())
        self._schedule.go_on(self.updates)
        for state in self._adam.state.values():
            state["step"].fill_(self.updates)


class _Updates(msgspec.Struct, frozen=True):
    updates: int


def updates_file(updates: int) -> dict[str, bytes]:
    """Return the file that says how many optimizer steps there were: its name and content."""
    return {UPDATES: msgspec.json.encode(_Updates(updates))}


def load_updates(folder: Path) -> int:
    """Return how many optimizer steps the state in `folder` comes after."""
    try:
        return msgspec.json.decode((folder / UPDATES).read_bytes(), type=_Updates).updates
    except (OSError, msgspec.DecodeError) as error:
        raise _not_taken_over(folder, error) from error


def named(key: str, part: Part) -> Part:
    """Return the part of a moment, which is named like its weight, by its name in the files."""
    return part._replace(name=f"{key}/{part.name}")


def state_specs(specs: Specs) -> list[tuple[str, tuple[int, ...]]]:
    """Return the names and shapes of the optimizer's tensors; `specs`: of the weights."""
    return [(f"{key}/{name}", shape) for key in MOMENTS for name, shape in specs]


def read_state(folder: Path, moments: Mapping[str, Iterable[Part]], specs: Specs) -> int:
    """Fill the parts of each moment, named like the weights, and return the optimizer steps that they come after.

    `specs`: all weights. Raises `ModelError` when `folder` holds no state, or that of another model.
    """
    files = checked_state(folder, specs)
    try:
        for key, parts in moments.items():
            for part in parts:
                files.read_into(named(key, part))
    except ModelError as error:
        raise _not_taken_over(folder, error) from error
    return load_updates(folder)


def checked_state(folder: Path, specs: Specs) -> TensorFiles:
    """Return the files of an optimizer's state, which is that of a model with the weights `specs`; raises `ModelError`
    as `read_state`."""
    load_updates(folder)
    try:
        files = TensorFiles(folder, OPTIMIZER)
        wanted = state_specs(specs)
        files.check(wanted)
        if unknown := set(files.names()) - {name for name, _ in wanted}:
            raise ModelError(f"the model has no weight for {min(unknown)}")
    except ModelError as error:
        raise _not_taken_over(folder, error) from error
    return files


def _not_taken_over(folder: Path, error: Exception) -> ModelError:
    return ModelError(f"{folder}: the optimizer's state cannot be taken over: {error}")
