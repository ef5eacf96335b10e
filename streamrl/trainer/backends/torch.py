"""transformers models with plain torch: data parallelism, whole or sharded (FSDP2), float32 master weights.

Without `shard` each rank holds the whole model, and gradients are summed over ranks. With it each rank holds its rows
of every weight (`Shards`), and whole layers exist only while they compute. In both cases the optimizer sees plain local
tensors, so a step is the same arithmetic. Rows are dealt as FSDP2 deals them: chunks of `ceil(rows / world)`, so the
last ranks may have fewer, or none.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from streamrl import causal_models
from streamrl.causal_models import View, allocate, body_of, load_config, token_logits, weight_views
from streamrl.device import SideStream, to_device
from streamrl.errors import ModelError, TrainingError
from streamrl.lora import pair_of
from streamrl.safetensors_files import MODEL, TensorBox, TensorFiles
from streamrl.trainer.backends.attention import TREE_ATTENTION, TreeMask
from streamrl.trainer.backends.base import (
    Head,
    LossOf,
    ModelOutput,
    ModelSpec,
    OffloadedMemory,
    Update,
    WholeWeights,
    busy_ranks,
    dealt,
    read_weights,
)
from streamrl.trainer.backends.compiled import compile_layers
from streamrl.trainer.backends.context import ContextGroup, heads_can_be_shared
from streamrl.trainer.backends.distribution import Predictions, in_chunks, token_distribution
from streamrl.trainer.backends.experts import route, separate_experts, sparse_layers
from streamrl.trainer.backends.lora import adapt, first_adapter, peft_name, without_adapters
from streamrl.trainer.backends.optimizer import AdamW
from streamrl.trainer.backends.probe import packing_problem
from streamrl.trainer.packing import IDLE, MicroBatch

log = logging.getLogger(__name__)

# --- shards ---


class Shard(msgspec.Struct):
    """A weight with this rank's rows."""

    shape: tuple[int, ...]
    """Shape of the whole weight."""
    local: Tensor
    """This rank's rows; shares memory with the model."""

    @classmethod
    def of(cls, parameter: nn.Parameter) -> Shard:
        return cls(tuple(parameter.shape), _local(parameter))


class Shards:
    """The weights of one model on this rank; gathers and loads tensors that are spread like them."""

    def __init__(
        self, weights: dict[str, Shard], *, world: int, sharded: bool, views: Mapping[str, View] | None = None
    ) -> None:
        """`views`: the names that others use for the weights; without them, the names in `weights`.

        Collective when `sharded`: the ranks form a separate group for gathering, so that it may run at the same time as
        the computation."""
        self._weights = weights
        self._views: dict[str, dict[str, View]] = {name: {} for name in weights}
        """Parameter → name and view of each weight in it."""
        for name, view in (views or _own_views(weights)).items():
            if view.parameter in weights:
                self._views[view.parameter][name] = view
        self._world = world
        self._rank = dist.get_rank() if world > 1 else 0
        # Over gloo from the host: with NCCL, all ranks would have to order these and the computation's collectives
        # alike.
        self._group = dist.new_group(backend="gloo") if sharded else None
        self._beside = SideStream(next(iter(weights.values())).local.device)

    def specs(self) -> list[tuple[str, tuple[int, ...]]]:
        return [(name, view.shape) for views in self._views.values() for name, view in views.items()]

    def local(self) -> dict[str, Tensor]:
        """Return this rank's part of each weight."""
        return {name: shard.local for name, shard in self._weights.items()}

    def gather(self, parts: Mapping[str, Tensor], *, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield whole tensors from `parts`, one after another, on rank 0; empty ones elsewhere. They travel as `dtype`.
        Collective when sharded."""
        for parameter in self._weights:
            yield from self.named(parameter, self.whole(parameter, parts[parameter], dtype=dtype))

    def named(self, parameter: str, whole: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights in a parameter, contiguous; `whole`: the parameter, or an empty tensor, which is yielded
        for each."""
        for name, view in self._views[parameter].items():
            yield name, view.of(whole).contiguous() if whole.numel() else whole

    def whole(self, name: str, part: Tensor, *, dtype: torch.dtype | None) -> Tensor:
        """Return the whole tensor from this rank's rows `part`, as `gather` yields it. Collective when sharded."""
        mine = part.detach()
        if self._group is None:
            return mine if self._rank == 0 else mine.new_empty(0)
        total, *rest = self._weights[name].shape
        pinned = mine.device.type == "cuda"
        padded = torch.zeros((self._rows(total), *rest), dtype=dtype or mine.dtype, pin_memory=pinned)
        with self._beside.after_computation():
            padded[: len(mine)].copy_(mine, non_blocking=pinned)
        found = [torch.empty_like(padded) for _ in range(self._world)] if self._rank == 0 else None
        dist.gather(padded, found, dst=0, group=self._group)
        return mine.new_empty(0) if found is None else torch.cat(found)[:total].to(mine.device)

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy this rank's part of each whole tensor; raises `ModelError` unless `tensors` are exactly the weights."""
        places = {part.name: part for part in self.parts(self.local())}
        shapes = dict(self.specs())
        missing = set(shapes)
        for name, tensor in tensors:
            if name not in shapes:
                raise ModelError(f"the model has no weight {name}")
            if tuple(tensor.shape) != shapes[name]:
                raise ModelError(f"{name} has the shape {tuple(tensor.shape)}, the model's is {shapes[name]}")
            missing.discard(name)
            if (part := places.get(name)) is not None:
                box = tuple(slice(a, a + n) for a, n in zip(part.start, part.values.shape, strict=True))
                with torch.no_grad():
                    part.values.copy_(tensor[box])
        if missing:
            raise ModelError(f"{len(missing)} weights are missing, for example {min(missing)}")

    def parts(self, tensors: Mapping[str, Tensor]) -> list[TensorBox]:
        """Return `tensors`, shaped as this rank's part of each weight, as parts of whole tensors; without empty
        ones."""
        found = []
        for parameter, views in self._views.items():
            shape, local = self._weights[parameter].shape, tensors[parameter]
            rows = len(local) if local.dim() else local.numel()
            for name, view in views.items():
                first = 0 if self._group is None else self._rank * self._rows(shape[0] if shape else 1)
                part = view.within(shape, first, rows)
                if part is not None:
                    start, own = part
                    found.append(TensorBox(name, view.shape, start, own.of(local)))
        return found

    def own_parts(self, tensors: Mapping[str, Tensor]) -> list[TensorBox]:
        """Return the parts that this rank saves: if all ranks have all tensors, each saves some of them."""
        parts = self.parts(tensors)
        if self._group is not None:
            return parts
        ranks = dealt([part.values.nbytes for part in parts], [range(self._world)] * len(parts))
        return [part for part, rank in zip(parts, ranks, strict=True) if rank == self._rank]

    def close(self) -> None:
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def _rows(self, total: int) -> int:
        return -(-total // self._world)


def _own_views(weights: Mapping[str, Shard]) -> dict[str, View]:
    def strides(shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(math.prod(shape[place + 1 :]) for place in range(len(shape)))

    return {name: View(name, shard.shape, strides(shard.shape), 0) for name, shard in weights.items()}


def _local(parameter: nn.Parameter) -> Tensor:
    whole = parameter.detach()
    return whole.to_local() if isinstance(whole, DTensor) else whole


# --- torch ---


class TorchModel:
    """`ParallelModel` over `world` ranks, which meet in torch's default process group. Each run of `context`
    consecutive ranks shares its rows; otherwise the ranks are data-parallel."""

    def __init__(self, spec: ModelSpec, *, world: int = 1, context: int = 1) -> None:
        """Load the model. Collective. Raises `ModelError` if the model is not supported, or not with so many ranks."""
        self._spec = spec
        self._world = world
        changes = spec.averaged or (spec.lr is not None and spec.lora is None)
        kept_in = torch.float32 if changes else spec.dtype
        problem = packing_problem(spec.folder)
        self.packs_rows = problem is None
        if problem is not None:
            log.warning("%s is computed with one trajectory per row, which is slower: %s", spec.folder, problem)
        model = on_meta(spec.folder, head=spec.head, dtype=kept_in, packs_rows=self.packs_rows)
        views = weight_views(model, names=set(TensorFiles(spec.folder, MODEL).names()))
        if spec.gradient_checkpointing and spec.lr is not None:
            _recompute_activations(model)
        if spec.lora is not None:
            adapt(model, spec.lora)
        self._net = _Net(model, spec, packs_rows=self.packs_rows)
        self._context = _context_group(model.config, world=world, context=context, packs_rows=self.packs_rows)
        self._frozen: Shards | None = None
        """The untrained weights of a model with an adapter."""
        self._sharded = spec.shard and world > 1
        if self._sharded:
            _shard(self._net, spec.device, world)
        allocate(self._net, model, spec.device)
        names = {name.removeprefix("model."): p for name, p in self._net.named_parameters()}
        if spec.lora is not None:
            adapters = {peft_name(name): p for name, p in names.items() if p.requires_grad}
            self._frozen = self._spread({name: p for name, p in names.items() if not p.requires_grad}, views)
            names = adapters
        self._parameters = {name: parameter for name, parameter in names.items() if parameter.requires_grad}
        self._shards = self._spread(names, None if spec.lora is not None else views)
        model_weights = self._frozen or self._shards
        parts = model_weights.parts(model_weights.local())
        read_weights(spec.folder, model_weights.specs(), parts, head=spec.head)
        if spec.lora is not None:
            self._shards.load(first_adapter(self._shards.specs(), spec.lora, folder=spec.adapter, seed=spec.seed))
        self._optimizer = None
        if spec.lr is not None:
            self._net.train()
            self._optimizer = AdamW(self._shards.local(), spec)
        else:
            self._net.eval().requires_grad_(False)
        self._offloaded: OffloadedMemory | None = None
        self._replays = spec.replay_routing
        sparse = list(sparse_layers(model).values())
        self._load = (
            torch.zeros(len(sparse), len(sparse[0].experts), dtype=torch.long, device=spec.device) if sparse else None
        )
        """`[layers, experts]`: how often each was chosen since the last update; None if the model has no experts."""
        if spec.compiled and not (self._sharded or spec.gradient_checkpointing or sparse):
            compile_layers(_decoder_layers(model), self._try)

    @property
    def gives_output(self) -> bool:
        return True

    def infer(self, micros: Sequence[MicroBatch], *, temperature: float | None = None) -> list[ModelOutput]:
        self._check_here()
        idle = self._others_have_more(len(micros))
        with torch.no_grad():
            outputs = [self._forward(micro, temperature) for micro in micros]
            for _ in range(idle):
                self._forward(IDLE)
        return outputs

    def accumulate(self, micros: Sequence[MicroBatch], loss: LossOf) -> None:
        self._check_here()
        idle = self._others_have_more(len(micros))
        tokens = sum(micro.tokens for micro in micros)
        coefficient = self._spec.router_aux_loss_coef
        if coefficient and self._world > 1:
            coefficient /= busy_ranks(len(micros), device=self._spec.device)
        with _casts_kept():
            for number, micro in enumerate(micros):
                balance = coefficient * micro.tokens / tokens
                output = self._forward(micro, balance=balance)
                self._count_load()
                share = loss(number, output)
                if not share.requires_grad:
                    share = output.values.sum() * 0.0  # sharded layers expect a backward pass after each forward pass
                share.backward()  # type: ignore[no-untyped-call]
        for _ in range(idle):
            output = self._forward(IDLE)
            (output.values.sum() * 0.0 + output.entropy.sum() * 0.0).backward()  # type: ignore[no-untyped-call]

    def update(self, before_update: Callable[[], None], *, lr_scale: float = 1.0) -> Update:
        self._check_here()
        optimizer = self._trained
        gradients = self._gradients()
        squares = (torch.stack(torch._foreach_norm(list(gradients.values()))).double() ** 2).sum()
        if self._sharded:
            dist.all_reduce(squares)
        norm = float(squares.sqrt())
        if not math.isfinite(norm):
            self._forget_gradients()
            raise TrainingError(
                f"the gradient norm is {norm}; look at logprob_diff and the rewards of the last steps, "
                "or lower the learning rate"
            )
        before_update()
        share = min(1.0, self._spec.optimizer.grad_clip / (norm + 1e-6))
        lr = optimizer.step(gradients, scale=share, lr_scale=lr_scale)
        self._forget_gradients()
        return Update(grad_norm=norm, lr=lr, expert_load=self._take_load())

    def weight_specs(self) -> list[tuple[str, tuple[int, ...]]]:
        return self._shards.specs()

    def gather_weights(self, *, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        self._check_here()
        return self._shards.gather(self._shards.local(), dtype=dtype)

    def weight_parts(self) -> list[TensorBox]:
        self._check_here()
        return self._shards.own_parts(self._shards.local())

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self._check_here()
        self._shards.load(weights)
        if self._optimizer is not None:
            self._optimizer.weights_changed()

    @property
    def updates(self) -> int:
        return self._trained.updates

    def optimizer_parts(self) -> list[TensorBox]:
        self._check_here()
        return self._trained.parts(self._shards)

    def load_state(self, folder: Path) -> None:
        self._check_here()
        self._trained.load(folder, self._shards)

    def offload(self) -> None:
        if self._offloaded is None:
            moments = [] if self._optimizer is None else self._optimizer.on_device()
            frozen = self._frozen.local() if self._frozen is not None else {}
            self._offloaded = OffloadedMemory(
                [*self._shards.local().values(), *frozen.values(), *self._net.buffers(), *moments]
            )

    def onload(self) -> None:
        if self._offloaded is not None:
            self._offloaded.bring_back()
            self._offloaded = None

    def merged(self) -> WholeWeights:
        assert self._frozen is not None, "there is no adapter"
        assert self._spec.lora is not None
        return _MergedModel(self._frozen, self._shards, scale=self._spec.lora.scale)

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        replays, self._replays = self._replays, False  # another policy's tokens, for which this model's router chooses
        try:
            with without_adapters(self._net):
                yield
        finally:
            self._replays = replays

    def close(self) -> None:
        self._shards.close()
        self._context.close()
        if self._frozen is not None:
            self._frozen.close()

    def _spread(self, parameters: Mapping[str, nn.Parameter], views: Mapping[str, View] | None) -> Shards:
        weights = {name: Shard.of(parameter) for name, parameter in parameters.items()}
        return Shards(weights, world=self._world, sharded=self._sharded, views=views)

    @property
    def _trained(self) -> AdamW:
        if self._optimizer is None:
            raise TrainingError("this model is not trained: it has no optimizer state")
        return self._optimizer

    def _forward(self, micro: MicroBatch, temperature: float | None = None, *, balance: float = 0.0) -> ModelOutput:
        """Run the forward pass; `balance`: see `route`."""
        share = self._context.share(micro)
        own = share.micro
        if self._load is not None:
            known = own.routed_experts if self._replays else None
            experts = None if known is None else self._tensor(known).long()
            route(self._net.model, self._tensor(share.real), experts, balance=balance)
        with torch.autocast(
            self._spec.device.type,
            dtype=torch.bfloat16,
            enabled=self._spec.dtype == torch.bfloat16,
            cache_enabled=not self._sharded,  # it would keep a copy of every weight until all layers have computed
        ):
            values, entropy = self._net(
                self._tensor(own.input_ids),
                TreeMask(micro, self._spec.device, self._context),
                self._tensor(own.position_ids),
                Predictions.of(own, self._spec.device),
                self._spec.temperature if temperature is None else temperature,
            )
        return ModelOutput(self._context.gather(values, share), self._context.gather(entropy, share))

    def _try(self) -> None:
        """Compute a short row, in training with its gradients."""
        length = 8
        row = msgspec.structs.replace(
            IDLE,
            input_ids=np.zeros((1, length), np.int64),
            position_ids=np.arange(length)[None],
            visible_until=np.full((1, length), length),
        )
        values = self._forward(row).values
        if values.requires_grad:
            values.sum().backward()  # type: ignore[no-untyped-call]
        self._forget_gradients()

    def _others_have_more(self, mine: int) -> int:
        """Return how many micro-batches more another rank has: sharded ranks have to compute layers together."""
        if not self._sharded:
            return 0
        most = torch.tensor(mine, device=self._spec.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return int(most) - mine

    def _gradients(self) -> dict[str, Tensor]:
        """Return the gradients of this rank's part of each weight, summed over all ranks."""
        found = {}
        for name, parameter in self._parameters.items():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            found[name] = parameter.grad.to_local() if self._sharded else parameter.grad  # type: ignore[attr-defined]
        if self._world > 1 and not self._sharded:
            for work in [dist.all_reduce(gradient, async_op=True) for gradient in found.values()]:
                work.wait()
        return found

    def _count_load(self) -> None:
        if self._load is not None:
            self._load += torch.stack(
                [mlp.load for mlp in sparse_layers(self._net.model).values() if mlp.load is not None]
            )

    def _take_load(self) -> float:
        """Return `Update.expert_load` since the last call. Collective."""
        if self._load is None:
            return 0.0
        if self._world > 1:
            dist.all_reduce(self._load)
        load = self._load.double()
        self._load.zero_()
        return float((load.amax(1) / load.mean(1).clamp(min=1e-9)).mean())

    def _forget_gradients(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    def _check_here(self) -> None:
        if self._offloaded is not None:
            raise TrainingError("this model is offloaded: call onload before computing with it")

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return to_device(array, self._spec.device)


@contextmanager
def _casts_kept() -> Iterator[None]:
    """Keep the bfloat16 copies of weights that autocast makes in the block, so that each weight is cast once in it.

    Weights must not change in the block. Autocast drops its copies when the outermost context ends; this one is a
    context that does not cast, so that backward passes may run in it.
    """
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()


class _MergedModel:
    """`AdaptedModel.merged`."""

    def __init__(self, frozen: Shards, adapter: Shards, *, scale: float) -> None:
        self._frozen = frozen
        self._adapter = adapter
        self._scale = scale

    def weight_specs(self) -> list[tuple[str, tuple[int, ...]]]:
        return self._frozen.specs()

    def gather_weights(self, *, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        frozen, adapter = self._frozen.local(), self._adapter.local()
        for name in frozen:
            weight = self._frozen.whole(name, frozen[name], dtype=None)
            if (pair := pair_of(name))[0] in adapter:
                a, b = (self._adapter.whole(each, adapter[each], dtype=None) for each in pair)
                if weight.numel():
                    weight = torch.addmm(weight.float(), b, a, alpha=self._scale)
            yield from self._frozen.named(name, weight if dtype is None else weight.to(dtype))


class _Net(nn.Module):
    """The forward pass from token ids to predictions: all computation of a micro-batch in one module, as FSDP2
    requires."""

    def __init__(self, model: Any, spec: ModelSpec, *, packs_rows: bool) -> None:
        super().__init__()
        self.model = model
        self._spec = spec
        self._packs_rows = packs_rows

    def forward(
        self,
        input_ids: Tensor,
        tree: TreeMask,
        position_ids: Tensor,
        predictions: Predictions,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        """Return `(values, entropy)` of `ModelOutput`."""
        packed = {"position_ids": position_ids, "tree": tree} if self._packs_rows else {}
        hidden = body_of(self.model)(input_ids=input_ids, use_cache=False, **packed).last_hidden_state
        states = hidden[predictions.rows, predictions.columns]
        if self._spec.head == "scalar":
            values = self.model.score(states).float()[:, 0].index_select(0, predictions.of_state)
            return values, torch.zeros_like(values)
        return in_chunks(partial(self._predict, temperature=temperature), states, predictions)

    def _predict(self, states: Tensor, of_state: Tensor, ids: Tensor, *, temperature: float) -> tuple[Tensor, Tensor]:
        return token_distribution(
            token_logits(self.model, states),
            of_state,
            ids,
            temperature=temperature,
            entropy_gradient=self._spec.entropy_gradient,
        )


def _recompute_activations(model: Any) -> None:
    try:
        model.gradient_checkpointing_enable()
    except ValueError as error:
        raise ModelError(f"{error}; set trainer.gradient_checkpointing = false") from error


def on_meta(folder: Path, *, head: Head, dtype: torch.dtype = torch.float32, packs_rows: bool = True) -> Any:
    """Return the transformers model of a checkpoint, without memory; raises `ModelError` for a model that cannot be
    trained."""
    kind = AutoModelForCausalLM if head == "tokens" else AutoModelForSequenceClassification
    config = load_config(folder, **({} if head == "tokens" else {"num_labels": 1}))
    attention = TREE_ATTENTION if packs_rows else None
    model = causal_models.on_meta(config, kind=kind, dtype=dtype, attention=attention)
    separate_experts(model)
    model.get_input_embeddings().padding_idx = None  # a padding token in a prompt learns like any other
    return model


def _context_group(config: Any, *, world: int, context: int, packs_rows: bool) -> ContextGroup:
    """Return the ranks that share rows with this one. Collective."""
    if context == 1:
        return ContextGroup()
    if not packs_rows:
        raise ModelError(
            f"a model of type {config.model_type!r} is computed with one trajectory per row, which ranks cannot share; "
            "set trainer.context_parallel = 1"
        )
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    groups = [dist.new_group(list(range(first, first + context))) for first in range(0, world, context)]
    ring = not heads_can_be_shared(heads=heads, kv_heads=kv_heads, context=context)
    return ContextGroup(groups[dist.get_rank() // context], ring=ring)


def _decoder_layers(model: Any) -> list[nn.Module]:
    names = model._no_split_modules
    return [module for module in model.modules() if type(module).__name__ in names]


def _shard(net: _Net, device: torch.device, world: int) -> None:
    """Shard each layer's weights, and the rest as one unit, by rows over the ranks."""
    mesh = init_device_mesh(device.type, (world,))
    for part in (*_decoder_layers(net.model), net):
        fully_shard(part, mesh=mesh, reshard_after_forward=True)
        assert isinstance(part, FSDPModule)
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)
