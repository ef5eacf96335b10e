"""torch's AdamW over named local tensors, with its learning-rate schedule, its files, and an optional copy on the CPU.

Files: `optimizer.safetensors`, or one file of each rank, with `exp_avg/NAME` and `exp_avg_sq/NAME` under the weights'
Hugging Face names, and `updates.json`. So a run can be resumed with another layout, or another backend.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from streamrl.config import OptimizerConfig
from streamrl.errors import ConfigError, ModelError
from streamrl.hooks import load_hook
from streamrl.safetensors_files import Specs, TensorBox, TensorFiles
from streamrl.trainer.backends.base import ModelSpec

# --- schedule ---


Shares = Callable[[int, int], float]
"""Return the learning rate as a share of its peak, from the number of steps after the warm-up and their total."""


def share_of_peak(config: OptimizerConfig, *, key: str = "trainer.optimizer.schedule") -> Shares:
    """Return the schedule after the warm-up, down to `min_lr_ratio` of the peak.

    Raises `ConfigError`, which names `key`, if a function of the user cannot be loaded or fails.
    """
    end = config.min_lr_ratio

    def done(step: int, total: int) -> float:
        return min(1.0, step / max(1, total))

    match config.schedule:
        case "constant":
            return lambda step, total: 1.0
        case "linear":
            return lambda step, total: 1 - (1 - end) * done(step, total)
        case "cosine":
            return lambda step, total: end + (1 - end) * (1 + math.cos(math.pi * done(step, total))) / 2
    function = load_hook(config.schedule, key=key, args=config.schedule_args)
    for step in (0, 5, 10):
        try:
            share = float(function(step, 10))
        except Exception as error:  # tolerance point: the user's function may raise anything
            raise ConfigError(f"{key} = {config.schedule!r} failed at ({step}, 10): {error!r}") from error
        if not 0 <= share < math.inf:
            raise ConfigError(f"{key} = {config.schedule!r} returned {share} at ({step}, 10): return a share of lr")
    chosen: Shares = function
    return chosen


def learning_rate(
    step: int, *, peak: float, config: OptimizerConfig, total_steps: int, share: Shares | None = None
) -> float:
    """Return the learning rate of optimizer step `step`, from 0: linear warm-up, then `config.schedule` down to its end
    at `total_steps`. `share`: `share_of_peak(config)`, for callers with many steps.

    The warm-up rises from `peak / (warmup_steps + 1)`; the end is `min_lr_ratio · peak`, and stays. Pure: unlike
    torch's schedulers it has no state to save, so a resumed run needs only the number of steps, under any backend.
    After the end the cosine does not rise again.
    """
    if step < config.warmup_steps:
        return peak * (step + 1) / (config.warmup_steps + 1)
    return peak * float((share or share_of_peak(config))(step - config.warmup_steps, total_steps - config.warmup_steps))


class Schedule:
    """The learning rate of each optimizer step of a run.

    A resumed run may divide its batches into other minibatches, or make another number of passes over them. Its
    position in the schedule then follows from its training steps, not from the number of optimizer steps in the loaded
    state.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._share = share_of_peak(spec.optimizer)
        self._ahead = spec.updates_before or 0
        """Position in the schedule minus the number of optimizer steps."""

    def rate(self, updates: int) -> float:
        """Return the learning rate of the next step after `updates` steps."""
        assert self._spec.lr is not None
        return learning_rate(
            updates + self._ahead,
            peak=self._spec.lr,
            config=self._spec.optimizer,
            total_steps=self._spec.total_updates,
            share=self._share,
        )

    def go_on(self, updates: int) -> None:
        """Continue from a loaded optimizer state, after `updates` steps."""
        before = self._spec.updates_before
        self._ahead = 0 if before is None else before - updates


# --- adamw ---

MOMENTS = ("exp_avg", "exp_avg_sq")
OPTIMIZER = "optimizer"
"""Name of the tensors' files, without `.safetensors`."""
UPDATES = "updates.json"


class Spread(Protocol):
    """Access to tensors that are spread over ranks like the weights."""

    def specs(self) -> list[tuple[str, tuple[int, ...]]]: ...

    def parts(self, tensors: Mapping[str, Tensor]) -> list[TensorBox]: ...

    def own_parts(self, tensors: Mapping[str, Tensor]) -> list[TensorBox]: ...


class AdamW:
    """AdamW on this rank's part of the weights.

    With `spec.offload_optimizer` weights and moments have a copy on the CPU, where the step is computed.
    """

    def __init__(self, weights: dict[str, Tensor], spec: ModelSpec) -> None:
        """`weights`: this rank's part of each weight, by name; it may be empty."""
        assert spec.lr is not None
        self._weights = weights
        self._offloaded = spec.offload_optimizer
        self.updates = 0
        """Number of steps so far."""
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

        Weights without a gradient stay as they are. Changes `gradients`.
        """
        lr = lr_scale * self._schedule.rate(self.updates)
        self.updates += 1
        names = [name for name in gradients if self._weights[name].numel()]
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
        """Update the copy on the CPU after the weights were set from outside."""
        if self._offloaded:
            for name, weight in self._weights.items():
                self._masters[name].copy_(weight)

    def on_device(self) -> list[Tensor]:
        """Return the tensors on the weights' device, without the weights."""
        return [] if self._offloaded else [moment for found in self._moments.values() for moment in found.values()]

    def parts(self, spread: Spread) -> list[TensorBox]:
        """See `ParallelModel.optimizer_parts`."""
        return [named(key, part) for key in MOMENTS for part in spread.own_parts(self._moments[key])]

    def load(self, folder: Path, spread: Spread) -> None:
        """Load the state in `folder`; raises `ModelError` if there is none, or if it belongs to another model."""
        self.updates = read_state(folder, {key: spread.parts(self._moments[key]) for key in MOMENTS}, spread.specs())
        self._schedule.go_on(self.updates)
        for state in self._adam.state.values():
            state["step"].fill_(self.updates)


class _Updates(msgspec.Struct, frozen=True):
    updates: int


def updates_file(updates: int) -> dict[str, bytes]:
    """Return the file with the number of optimizer steps: its name and content."""
    return {UPDATES: msgspec.json.encode(_Updates(updates))}


def load_updates(folder: Path) -> int:
    """Return the number of optimizer steps of the state in `folder`."""
    try:
        return msgspec.json.decode((folder / UPDATES).read_bytes(), type=_Updates).updates
    except (OSError, msgspec.DecodeError) as error:
        raise _not_taken_over(folder, error) from error


def named(key: str, part: TensorBox) -> TensorBox:
    """Return the part of a moment, which is named like its weight, under its name in the files."""
    return part._replace(name=f"{key}/{part.name}")


def state_specs(specs: Specs) -> list[tuple[str, tuple[int, ...]]]:
    """Return the names and shapes of the optimizer's tensors; `specs`: names and shapes of the weights."""
    return [(f"{key}/{name}", shape) for key in MOMENTS for name, shape in specs]


def read_state(folder: Path, moments: Mapping[str, Iterable[TensorBox]], specs: Specs) -> int:
    """Fill the parts of each moment, named like the weights, and return the number of optimizer steps so far.

    `specs`: all weights. Raises `ModelError` if `folder` has no state, or the state of another model.
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
    """Return the files of an optimizer's state, after a check that it belongs to a model with the weights `specs`;
    raises `ModelError` as `read_state`."""
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
