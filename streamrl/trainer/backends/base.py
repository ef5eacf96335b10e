"""The interface of a model that several model workers compute with together, and what every backend needs for it.

A *role* (`trainer/roles/`) knows what is computed: which loss, on which tokens. A `ParallelModel` knows how: with which
library, spread how over the ranks of a `Layout`. So each algorithm is written once and every backend computes it. Calls
marked *collective* have to be made by all ranks of the layout, in the same order, with equal arguments on all members
of one data-parallel rank.

`Ranks` is this process among the model workers, which meet in torch's default process group. Sums are over the DP
heads, which alone hold distinct data; every rank takes part and gets the same sum.

`Offloaded` keeps the memory of tensors on the CPU for a while; the tensors, and all views of them, stay valid objects.
It is the same on every device: where tensors are on the CPU anyway, their memory is given back and copied, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from streamrl.config import LoraConfig, OptimizerConfig
from streamrl.safetensors_files import MODEL, Part, Specs, TensorFiles
from streamrl.trainer.layout import Layout
from streamrl.trainer.packing import MicroBatch

# --- ranks ---


class Ranks:
    """One rank of a layout."""

    def __init__(self, layout: Layout, rank: int, *, device: torch.device) -> None:
        self.layout = layout
        self.rank = rank
        self.coordinates = layout.coordinates(rank)
        self._device = device

    @property
    def is_head(self) -> bool:
        """Whether this rank gives its data-parallel rank's output."""
        return self.rank == self.layout.head(self.coordinates.data)

    def add_up(self, values: Tensor) -> Tensor:
        """Return `values` of all heads, added; the others' do not count. Collective."""
        if self.layout.world == 1:
            return values
        total = values.to(self._device, copy=True) if self.is_head else torch.zeros_like(values, device=self._device)
        dist.all_reduce(total)
        return total.cpu()


def busy_ranks(micros: int, *, device: torch.device) -> int:
    """Return how many ranks have micro-batches, at least 1; this one has `micros`. Collective over all ranks."""
    busy = torch.tensor(int(micros > 0), device=device)
    dist.all_reduce(busy)
    return max(1, int(busy))


def dealt(sizes: Sequence[int], ranks: Sequence[Sequence[int]]) -> list[int]:
    """Give each of `sizes` to one of its `ranks`, the largest first to the one that has the least; return which."""
    load: Counter[int] = Counter()
    chosen = [0] * len(sizes)
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        chosen[place] = min(ranks[place], key=load.__getitem__)
        load[chosen[place]] += sizes[place]
    return chosen


# --- offload ---


class Offloaded:
    """The memory under some tensors, moved away on construction."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
        self._copies: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []
        for storage in storages.values():
            copy = torch.UntypedStorage(storage.nbytes())  # type: ignore[no-untyped-call]
            copy.copy_(storage)
            self._copies.append((storage, copy))
            storage.resize_(0)

    def bring_back(self) -> None:
        """Fill the memory as it was."""
        for storage, copy in self._copies:
            storage.resize_(copy.nbytes())
            storage.copy_(copy)
        self._copies.clear()


# --- base ---

Head = Literal["tokens", "scalar"]
"""`tokens`: the language model's own; `scalar`: one linear unit (critics, reward models), `score.weight` in
Hugging Face checkpoints; a checkpoint without one gets zeros."""


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a backend builds."""

    folder: Path
    """Hugging Face checkpoint with the first weights."""
    head: Head
    device: torch.device
    dtype: torch.dtype
    """Dtype of the computation. Trained and averaged weights are kept in float32 whatever it is, others in `dtype`."""
    temperature: float = 1.0
    """Logits are divided by it (head `tokens`)."""
    entropy_gradient: bool = False
    """Whether `ModelOutput.entropy` has a gradient (head `tokens`)."""
    lr: float | None = None
    """Peak learning rate; None: the model is never trained and has no optimizer."""
    averaged: bool = False
    """Whether the weights of a model that is not trained are a moving average: they are kept in float32, for what is
    added each time is less than `dtype` would round away."""
    optimizer: OptimizerConfig = OptimizerConfig()
    total_updates: int = 1
    """Optimizer steps of the whole run, for the schedule of the learning rate."""
    updates_before: int | None = None
    """How many of these a run that goes on has behind it, as it cuts its batches now; None: as many as the optimizer's
    state has."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    shard: bool = False
    """Spread weights, gradients and optimizer state over the data- and context-parallel ranks (torch: FSDP2; megatron:
    its distributed optimizer)."""
    offload_optimizer: bool = False
    """Keep the optimizer's state, and its step, on the CPU."""
    lora: LoraConfig | None = None
    """Train an adapter of the model (torch): it is what the model's weights are then, and the model itself is frozen,
    in `dtype`."""
    adapter: Path | None = None
    """Folder with the first adapter; None: a new one."""
    seed: int = 0
    """Draws a new adapter."""
    router_aux_loss_coef: float = 0.0
    """What the load-balancing loss of layers with experts is multiplied by in training."""
    replay_routing: bool = False
    """Compute tokens with the experts of `MicroBatch.routed_experts`, where these are known."""


class ModelOutput(NamedTuple):
    """For each predicted position of a micro-batch: `[predicted]` float32, with a gradient while training."""

    values: Tensor
    """Head `tokens`: log-probability of the target. Head `scalar`: the unit's value at the predictor."""
    entropy: Tensor
    """Head `tokens`: of the whole distribution. Head `scalar`: zeros."""

    @property
    def device(self) -> torch.device:
        """Where they are; Megatron's schedules ask, as they would a tensor."""
        return self.values.device


class Update(NamedTuple):
    """What an optimizer step was."""

    grad_norm: float
    """Before clipping."""
    lr: float
    expert_load: float = 0.0
    """How much more tokens than on average the expert with most of them computed, the mean of all layers: 1 where all
    have as many; 0 for models without experts."""


LossOf = Callable[[int, ModelOutput], Tensor]
"""From the number of a micro-batch and its output: its share of the minibatch's loss, a scalar."""


class WholeWeights(Protocol):
    """Named tensors that are spread over the ranks of one layout, and can be had whole."""

    def weight_specs(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return the Hugging Face name and whole shape of every weight, tied ones once, in the order of
        `gather_weights`."""
        ...

    def gather_weights(self, *, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Each weight as a whole, by Hugging Face name, one after another. Collective: all ranks iterate to the end.

        Runs on communicators of its own, so it may run beside `infer` and `accumulate`. Ranks other than 0 get empty
        tensors. Weights travel between ranks as `dtype`, if that is given. No rank holds more than a few weights at a
        time; a weight that was yielded is not written to before the caller drops it, or ends the iteration.
        """
        ...


class ParallelModel(WholeWeights, Protocol):
    """One model over the ranks of one layout."""

    @property
    def hidden_size(self) -> int: ...

    @property
    def gives_output(self) -> bool:
        """Whether this rank sees outputs: those of the last pipeline stage do."""
        ...

    def infer(self, micros: Sequence[MicroBatch], *, temperature: float | None = None) -> list[ModelOutput] | None:
        """Return the outputs of `micros`, without a gradient; None where `gives_output` is False. Collective.

        `temperature`: another than `ModelSpec.temperature`.
        """
        ...

    def accumulate(self, micros: Sequence[MicroBatch], loss: LossOf) -> None:
        """Forward and backward through `micros`; gradients add up until `update`. Collective.

        `loss` is called where `gives_output` is True. The data-parallel ranks may bring different
        numbers of micro-batches, or none.
        """
        ...

    def update(self, before_update: Callable[[], None], *, lr_scale: float = 1.0) -> Update:
        """Sum gradients over the data-parallel ranks, clip, step, and begin anew at zero. Collective.

        `lr_scale`: what the schedule's learning rate is multiplied by; the answer has the product.
        `before_update` is called when the weights are about to change. Raises `TrainingError`, with the
        weights as they were, when the norm is not finite.
        """
        ...

    def weight_parts(self) -> list[Part]:
        """Return what this rank saves of the weights, as they are now and not copied: of all ranks together each number
        once."""
        ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take over whole weights by Hugging Face name, each rank its part; raises `ModelError` if one is
        unknown, missing or of another shape."""
        ...

    @property
    def updates(self) -> int:
        """Optimizer steps so far, over all runs that this one goes on from."""
        ...

    def optimizer_parts(self) -> list[Part]:
        """Return what this rank saves of the optimizer's tensors `exp_avg/WEIGHT` and `exp_avg_sq/WEIGHT`, as
        `weight_parts`."""
        ...

    def load_state(self, folder: Path) -> None:
        """Take over `updates` and the optimizer's tensors from files, which may come from another layout.

        `backends/optimizer.py` names the files. Raises `ModelError` when they are of another model. The weights
        are not among them.
        """
        ...

    def offload(self) -> None:
        """Give the memory of weights and optimizer back, and keep a copy on the CPU until `onload`; whatever needs
        them meanwhile is an error."""
        ...

    def onload(self) -> None:
        """Bring everything back, bit for bit."""
        ...

    def close(self) -> None:
        """Leave all communicators."""
        ...


class AdaptedModel(ParallelModel, Protocol):
    """A model of which an adapter is trained (`ModelSpec.lora`): what is called its weights above are the adapter's."""

    def merged(self) -> WholeWeights:
        """Return the model's own weights with the adapter added, each as it is when it is gathered."""
        ...

    def without_adapter(self) -> AbstractContextManager[None]:
        """Inside, `infer` computes as the frozen model does."""
        ...


# --- from the files of a checkpoint into the places where a backend has its weights ---

SCORE = "score.weight"
"""The scalar head."""


def read_weights(folder: Path, specs: Specs, parts: Iterable[Part], *, head: Head) -> None:
    """Fill `parts` of a model's weights from the checkpoint in `folder`; `specs`: all weights of the model.

    A scalar head that it has none of becomes zero. Raises `ModelError`, before anything is read, that names the files
    and weights that do not fit.
    """
    files = checked(folder, specs, head=head)
    for part in parts:
        if part.name == SCORE and SCORE not in files:
            part.values.zero_()
        else:
            files.read_into(part)


def checked(folder: Path, specs: Specs, *, head: Head) -> TensorFiles:
    """Return the files of the checkpoint in `folder`, which has the weights `specs`; raises `ModelError` as
    `read_weights`."""
    files = TensorFiles(folder, MODEL)
    optional = {SCORE} - set(files.names()) if head == "scalar" else set()
    files.check([spec for spec in specs if spec[0] not in optional])
    return files
