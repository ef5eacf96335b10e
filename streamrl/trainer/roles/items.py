"""Inputs of roles: groups with the results of other model function calls. Also the state of a trained role except for
its weights."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from streamrl.config import TrainerConfig
from streamrl.errors import TrainingError
from streamrl.safetensors_files import TensorBox
from streamrl.trainer.backends.base import ModelOutput, ParallelModel, Update
from streamrl.trainer.calls import Sibling
from streamrl.trainer.packing import MicroBatch, Positions, pack, pack_apart
from streamrl.types import TrajectoryGroup

# --- items ---

Array = TypeVar("Array")


class TrainItem(msgspec.Struct):
    """A group with all inputs of a `train_step`; arrays are packed like the group's own."""

    group: TrajectoryGroup
    trainable: NDArray[np.bool_]
    """`[tokens]`: sampled and young enough, so they enter the loss."""
    age: NDArray[np.int32]
    """`[tokens]`: age of sampled tokens, in policy versions."""
    comparable: NDArray[np.bool_]
    """`[tokens]`: in responses that the policy at the start of the step sampled completely, so engine and trainer have
    to agree."""
    proximal_logprobs: NDArray[np.float32] | None = None
    """None to use the log-probabilities of the first forward pass."""
    ref_logprobs: NDArray[np.float32] | None = None
    """None without a KL term."""
    values: NDArray[np.float32] | None = None
    """The critic's value of the state in which each token was sampled; None without a critic."""
    advantages: NDArray[np.float32] | None = None
    """Advantage of each token, from the user's model function call; None to use `algorithm.advantage`."""


class Outputs(NamedTuple):
    """Output of a training step's forward pass for one group: `[tokens]`, NaN where nothing was computed."""

    logprobs: NDArray[np.float32]
    entropy: NDArray[np.float32]


class StepStatistics(msgspec.Struct):
    """This rank's figures of a training step: sums over tokens or sequences, and maxima. The master combines them over
    ranks."""

    sums: dict[str, float] = msgspec.field(default_factory=lambda: defaultdict(float))
    maxima: dict[str, float] = {}
    compared: list[float] = []
    """Log-probabilities of `Minibatch.compared`; empty if another rank computes it."""
    update_seconds: float = 0.0
    """Seconds in the optimizer."""
    outputs: dict[int, Outputs] = {}
    """Outputs for the groups of `Minibatch.kept` that this rank computed, by sequence number."""

    def note_largest(self, **values: float) -> None:
        """Keep the maximum of each name."""
        for name, value in values.items():
            self.maxima[name] = max(self.maxima.get(name, value), value)


class DeviceFigures:
    """Figures of micro-batches, kept on the device until all have been computed. Reading a figure would make the host
    wait for the computation before it, and then the device for the host."""

    def __init__(self) -> None:
        self._names: list[tuple[str, bool]] = []
        """Name of each figure; whether it is a sum (else a maximum)."""
        self._values: list[Tensor] = []
        """`[figures]` float64 of each micro-batch."""

    def add(self, sums: Mapping[str, Tensor], maxima: Mapping[str, Tensor] | None = None) -> None:
        """Add the scalars of one micro-batch."""
        maxima = maxima or {}
        self._names += [*((name, True) for name in sums), *((name, False) for name in maxima)]
        self._values.append(torch.stack([value.double() for value in (*sums.values(), *maxima.values())]))

    def read_into(self, statistics: StepStatistics) -> None:
        """Copy all figures to the host at once, and add them to `statistics`."""
        values = torch.cat(self._values).tolist() if self._values else []
        for (name, is_sum), value in zip(self._names, values, strict=True):
            if is_sum:
                statistics.sums[name] += value
            else:
                statistics.note_largest(**{name: value})


class Minibatch(msgspec.Struct, frozen=True):
    """Facts about the whole minibatch, known to all ranks."""

    loss_tokens: int
    """Tokens that enter the loss."""
    episodes: int
    """Attempts at prompts."""
    compared: Sibling | None = None
    """The response for which to compute log-probabilities before the update, at temperature 1."""
    lr_scale: float = 1.0
    """Factor of the policy's learning rate."""
    kept: frozenset[int] = frozenset()
    """Sequence numbers of the groups for which to keep outputs before the update."""


def needed(array: Array | None, key: str) -> Array:
    """Return `array`, which the graph must have provided; raises `TrainingError` for None."""
    if array is None:
        raise TrainingError(f"a group came to a training step without its {key}; does the graph give it?")
    return array


def at_targets(micro: MicroBatch, arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Return the values of the predicted tokens of `micro`, from one packed array for each group."""
    offsets = np.concatenate(([0], np.cumsum([len(a) for a in arrays])))[:-1]
    values: NDArray[Any] = np.concatenate(arrays)[offsets[micro.group_index] + micro.target_index]
    return values


def pack_for(
    model: ParallelModel,
    groups: Sequence[TrajectoryGroup],
    trainer: TrainerConfig,
    *,
    positions: Positions = "sampled",
) -> list[MicroBatch]:
    """Return `groups` in micro-batches of the configured size, for `model`."""
    if not model.packs_rows:
        return pack_apart(groups, max_tokens=trainer.max_tokens_per_microbatch, positions=positions)
    return pack(
        groups,
        max_tokens=trainer.max_tokens_per_microbatch,
        share_prefix=trainer.share_prefix,
        positions=positions,
    )


def infer_packed(
    model: ParallelModel,
    groups: Sequence[TrajectoryGroup],
    trainer: TrainerConfig,
    *,
    positions: Positions = "sampled",
) -> list[NDArray[np.float32]] | None:
    """Return the model's output at `positions` (0 elsewhere), packed like each group; None where the model returns
    none. Collective."""
    micros = pack_for(model, groups, trainer, positions=positions)
    outputs = model.infer(micros)
    return None if outputs is None else unpack(micros, outputs, groups)


def unpack(
    micros: Sequence[MicroBatch], outputs: Sequence[ModelOutput], groups: Sequence[TrajectoryGroup]
) -> list[NDArray[np.float32]]:
    """Return the output values as one packed array for each group, 0 at positions without a prediction."""
    result = [np.zeros(group.tokens, dtype=np.float32) for group in groups]
    for micro, output in zip(micros, outputs, strict=True):
        values = output.values.float().cpu().numpy()
        for index in np.unique(micro.group_index):
            mine = micro.group_index == index
            result[index][micro.target_index[mine]] = values[mine]
    return result


def optimizer_step(
    model: ParallelModel, statistics: StepStatistics, *, before_update: Callable[[], None], lr_scale: float = 1.0
) -> Update:
    """Have `model` take its optimizer step, and note its seconds after the return of `before_update`, which may wait.
    Collective."""
    began = time.perf_counter()

    def update_begins() -> None:
        nonlocal began
        before_update()
        began = time.perf_counter()

    update = model.update(update_begins, lr_scale=lr_scale)
    statistics.update_seconds += time.perf_counter() - began
    return update


# --- state ---


class RoleState(NamedTuple):
    """State of a role for a checkpoint, which the role's `load_state` reads again."""

    optimizer: list[TensorBox]
    """Parts of the optimizer's tensors that this rank saves, not copied."""
    files: Mapping[str, bytes]
    """Contents of small files, by file name; equal on all ranks."""
