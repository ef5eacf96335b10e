"""The interface of a model that several model workers compute together, and helpers that every backend needs.

A *role* (`trainer/roles/`) defines the computation: which loss, on which tokens. A `ParallelModel` carries it out with
one library, spread over the ranks of a `Layout`. So each algorithm is written once, and every backend computes it. All
ranks of the layout must make the calls marked *collective*, in the same order, with equal arguments on all members of
one data-parallel rank.

`Ranks` is this process among the model workers, which meet in torch's default process group. Sums are over the DP
heads, which alone hold distinct data; every rank takes part and gets the same sum.

`OffloadedMemory` moves the memory of tensors to the CPU for a while; the tensors, and all views of them, stay valid
objects. It behaves alike on every device: for tensors that are on the CPU anyway, memory is also copied and freed.
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
from streamrl.safetensors_files import MODEL, Specs, TensorBox, TensorFiles
from streamrl.trainer.layout import Layout
from streamrl.trainer.packing import MicroBatch

# --- ranks ---


class Ranks:
    """A rank of a layout."""

    def __init__(self, layout: Layout, rank: int, *, device: torch.device) -> None:
        self.layout = layout
        self.rank = rank
        self.coordinates = layout.coordinates(rank)
        self._device = device

    @property
    def is_head(self) -> bool:
        """Whether this rank returns its data-parallel rank's output."""
        return self.rank == self.layout.head(self.coordinates.data)

    def add_up(self, values: Tensor) -> Tensor:
        """Return the sum of `values` over all heads; values of other ranks are ignored. Collective."""
        if self.layout.world == 1:
            return values
        total = values.to(self._device, copy=True) if self.is_head else torch.zeros_like(values, device=self._device)
        dist.all_reduce(total)
        return total.cpu()


def busy_ranks(micros: int, *, device: torch.device) -> int:
    """Return how many ranks have micro-batches, at least 1; this rank has `micros`. Collective over all ranks."""
    busy = torch.tensor(int(micros > 0), device=device)
    dist.all_reduce(busy)
    return max(1, int(busy))


def dealt(sizes: Sequence[int], ranks: Sequence[Sequence[int]]) -> list[int]:
    """Assign each of `sizes`, the largest first, to the least loaded of its `ranks`; return the rank of each."""
    load: Counter[int] = Counter()
    chosen = [0] * len(sizes)
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        chosen[place] = min(ranks[place], key=load.__getitem__)
        load[chosen[place]] += sizes[place]
    return chosen


# --- offload ---


class OffloadedMemory:
    """The memory of some tensors, moved to the CPU on construction."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
        self._copies: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []
        for storage in storages.values():
            copy = torch.UntypedStorage(storage.nbytes())  # type: ignore[no-untyped-call]
            copy.copy_(storage)
            self._copies.append((storage, copy))
            storage.resize_(0)

    def bring_back(self) -> None:
        """Restore the memory with its content."""
        for storage, copy in self._copies:
            storage.resize_(copy.nbytes())
            storage.copy_(copy)
        self._copies.clear()


# --- base ---

Head = Literal["tokens", "scalar"]
"""`tokens`: the language model's own head; `scalar`: one linear unit (critics, reward models), `score.weight` in
Hugging Face checkpoints, zeros if the checkpoint has none."""


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Specification of a model for a backend."""

    folder: Path
    """Hugging Face checkpoint with the first weights."""
    head: Head
    device: torch.device
    dtype: torch.dtype
    """Dtype of the computation. Trained and averaged weights are always kept in float32, others in `dtype`."""
    temperature: float = 1.0
    """Divisor of the logits (head `tokens`)."""
    entropy_gradient: bool = False
    """Whether `ModelOutput.entropy` has a gradient (head `tokens`)."""
    lr: float | None = None
    """Peak learning rate; None for a model that is never trained and has no optimizer."""
    averaged: bool = False
    """Whether the weights of an untrained model are a moving average. They are then kept in float32, because `dtype`
    would round the small increments away."""
    optimizer: OptimizerConfig = OptimizerConfig()
    total_updates: int = 1
    """Optimizer steps of the whole run, for the schedule of the learning rate."""
    updates_before: int | None = None
    """How many of these a resumed run has made before, counted with its present division into minibatches; None for the
    number in the optimizer's state."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    compiled: bool = False
    """Compile the decoder layers (torch), unless activations are recomputed, weights are spread or tokens choose
    experts."""
    shard: bool = False
    """Spread weights, gradients and optimizer state over the data- and context-parallel ranks (torch: FSDP2; megatron:
    its distributed optimizer)."""
    offload_optimizer: bool = False
    """Keep the optimizer's state, and its step, on the CPU."""
    lora: LoraConfig | None = None
    """Train an adapter of the model (torch). The model's weights are then the adapter's; the model itself is frozen, in
    `dtype`."""
    adapter: Path | None = None
    """Folder with the first adapter; None for a new one."""
    seed: int = 0
    """Seed of a new adapter."""
    router_aux_loss_coef: float = 0.0
    """Factor of the load-balancing loss of layers with experts in training."""
    replay_routing: bool = False
    """Compute tokens with the experts in `MicroBatch.routed_experts`, where they are known."""


class ModelOutput(NamedTuple):
    """Values for each predicted position of a micro-batch: `[predicted]` float32, with a gradient while training."""

    values: Tensor
    """Head `tokens`: log-probability of the target. Head `scalar`: the unit's value at the predictor."""
    entropy: Tensor
    """Head `tokens`: entropy of the whole distribution. Head `scalar`: zeros."""

    @property
    def device(self) -> torch.device:
        """The device of the tensors; Megatron's schedules read it as that attribute of a tensor."""
        return self.values.device


class Update(NamedTuple):
    """The outcome of an optimizer step."""

    grad_norm: float
    """Norm before clipping."""
    lr: float
    expert_load: float = 0.0
    """Tokens computed by the most loaded expert, relative to the average, as the mean over all layers: 1 if all experts
    have equally many; 0 for models without experts."""


LossOf = Callable[[int, ModelOutput], Tensor]
"""Map the number of a micro-batch and its output to its share of the minibatch's loss, a scalar."""


class WholeWeights(Protocol):
    """Named tensors that are spread over the ranks of one layout, and can be gathered whole."""

    def weight_specs(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return the Hugging Face name and whole shape of every weight, tied ones once, in the order of
        `gather_weights`."""

    def gather_weights(self, *, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield each whole weight with its Hugging Face name, one after another. Collective: all ranks iterate to the
        end.

        Uses separate communicators, so it may run at the same time as `infer` and `accumulate`. Ranks other than 0 get
        empty tensors. Weights travel between ranks as `dtype`, if that is given. No rank holds more than a few whole
        weights at a time; a yielded weight is not written to before the caller drops it, or ends the iteration.
        """


class ParallelModel(WholeWeights, Protocol):
    """A model over the ranks of one layout."""

    @property
    def packs_rows(self) -> bool:
        """Whether rows may hold several trajectories; otherwise each trajectory needs its own row."""

    @property
    def gives_output(self) -> bool:
        """Whether this rank gets outputs, as the ranks of the last pipeline stage do."""

    def infer(self, micros: Sequence[MicroBatch], *, temperature: float | None = None) -> list[ModelOutput] | None:
        """Return the outputs of `micros`, without a gradient; None where `gives_output` is False. Collective.

        `temperature` replaces `ModelSpec.temperature`.
        """

    def accumulate(self, micros: Sequence[MicroBatch], loss: LossOf) -> None:
        """Run forward and backward through `micros`; gradients add up until `update`. Collective.

        `loss` is called where `gives_output` is True. The data-parallel ranks may bring different numbers of
        micro-batches, or none.
        """

    def update(self, before_update: Callable[[], None], *, lr_scale: float = 1.0) -> Update:
        """Sum and clip gradients over the data-parallel ranks, take an optimizer step, and zero the gradients.
        Collective.

        `lr_scale` multiplies the schedule's learning rate; `Update.lr` is the product. `before_update` is called
        when the weights are about to change. Raises `TrainingError`, with the weights unchanged, if the norm is not
        finite.
        """

    def weight_parts(self) -> list[TensorBox]:
        """Return the parts of the weights that this rank saves, current and not copied. The parts of all ranks together
        contain each number once."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load whole weights by Hugging Face name, each rank its part; raises `ModelError` if a weight is unknown,
        missing or of another shape."""

    @property
    def updates(self) -> int:
        """Optimizer steps so far, including those of the runs that this one continues."""

    def optimizer_parts(self) -> list[TensorBox]:
        """Return the parts of the optimizer's tensors `exp_avg/WEIGHT` and `exp_avg_sq/WEIGHT` that this rank saves, as
        `weight_parts`."""

    def load_state(self, folder: Path) -> None:
        """Load `updates` and the optimizer's tensors from files, which may come from another layout.

        `backends/optimizer.py` names the files. Raises `ModelError` if they belong to another model. The weights are
        not among them.
        """

    def offload(self) -> None:
        """Free the memory of weights and optimizer, and keep a copy on the CPU until `onload`; using them in between is
        an error."""

    def onload(self) -> None:
        """Restore the memory, bit for bit."""

    def close(self) -> None:
        """Leave all communicators."""


class AdaptedModel(ParallelModel, Protocol):
    """A model with a trained adapter (`ModelSpec.lora`): in the methods above, its weights are the adapter's
    weights."""

    def merged(self) -> WholeWeights:
        """Return the model's own weights with the adapter added; each is computed when it is gathered."""

    def without_adapter(self) -> AbstractContextManager[None]:
        """Make `infer` compute as the frozen model within the context."""


# --- from the files of a checkpoint into a backend's weights ---

SCORE = "score.weight"
"""Name of the scalar head's weight."""


def read_weights(folder: Path, specs: Specs, parts: Iterable[TensorBox], *, head: Head) -> None:
    """Fill `parts` of a model's weights from the checkpoint in `folder`; `specs`: all weights of the model.

    A scalar head that is missing in the checkpoint becomes zero. Raises `ModelError`, before any weight is read, that
    names the files and weights that do not fit.
    """
    files = checked(folder, specs, head=head)
    for part in parts:
        if part.name == SCORE and SCORE not in files:
            part.values.zero_()
        else:
            files.read_into(part)


def checked(folder: Path, specs: Specs, *, head: Head) -> TensorFiles:
    """Return the files of the checkpoint in `folder`, after a check that they have the weights `specs`; raises
    `ModelError` as `read_weights`."""
    files = TensorFiles(folder, MODEL)
    optional = {SCORE} - set(files.names()) if head == "scalar" else set()
    files.check([spec for spec in specs if spec[0] not in optional])
    return files
