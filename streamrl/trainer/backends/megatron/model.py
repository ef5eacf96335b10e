"""`ParallelModel` by Megatron Core: this rank's part of a model spread over a layout.

Owns the network, its gradients and its optimizer, and a communicator for moving whole weights.
Invariant: gradients are summed, over micro-batches and data-parallel ranks, and never divided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from streamrl.errors import ModelError, TrainingError
from streamrl.safetensors_files import TensorBox
from streamrl.trainer.backends.base import (
    LossOf,
    ModelOutput,
    ModelSpec,
    OffloadedMemory,
    Update,
    busy_ranks,
    read_weights,
)
from streamrl.trainer.backends.context import ContextGroup, heads_can_be_shared
from streamrl.trainer.backends.megatron.experts import ReplayingRouter
from streamrl.trainer.backends.megatron.groups import layout_groups
from streamrl.trainer.backends.megatron.network import Batch, Network, to_batch, transformer_config
from streamrl.trainer.backends.megatron.optimizer import Trainable
from streamrl.trainer.backends.megatron.shape import read_shape
from streamrl.trainer.backends.megatron.weights import Weight, WholeTensors, stage_weights
from streamrl.trainer.backends.optimizer import MOMENTS, named, read_state
from streamrl.trainer.layout import Layout
from streamrl.trainer.packing import IDLE, MicroBatch


class MegatronModel:
    """One rank's part of a model. All ranks of the default process group construct their parts at the same time."""

    def __init__(self, spec: ModelSpec, *, layout: Layout, rank: int, timeout_seconds: float) -> None:
        """Load the first weights from `spec.folder`. Collective over the default group, of `layout.world` ranks.

        Raises `ModelError` if the model, or the layout for it, is not supported.
        """
        self._shape = read_shape(spec.folder)
        self._shape.check(layout)
        if spec.offload_optimizer and spec.device.type != "cpu":
            raise ModelError(
                "the megatron backend cannot keep the optimizer on the CPU: take 'optimizer' out of trainer.offload"
            )
        if dist.get_world_size() != layout.world:
            raise ModelError(f"{layout} needs {layout.world} ranks, but there are {dist.get_world_size()}")
        self._spec = spec
        self._layout = layout
        self._rank = rank
        self._place = layout.coordinates(rank)
        self._offloaded: OffloadedMemory | None = None
        stages = [stage_weights(self._shape, spec.head, stage=stage, layout=layout) for stage in range(layout.pipeline)]
        self._groups = layout_groups(layout, timeout_seconds=timeout_seconds)
        with self._groups.active():
            self._context = self._context_group()
            network = self._build()
            by_name = dict(network.named_parameters())
            self._weights = stages[self._place.pipeline]
            self._parameters: dict[int, Tensor] = {
                number: by_name[weight.parameter]
                for number, weight in enumerate(self._weights)
                if weight.is_held(layout, rank)
            }
            """This rank's parameters of its stage, by their number."""
            for number, parameter in self._parameters.items():
                _mark(parameter, self._weights[number])
            self._averages: dict[Tensor, Tensor] = {}
            """The float32 weights of a moving average, by the parameters used in the computation."""
            if spec.averaged and spec.dtype != torch.float32:
                self._averages = {p: torch.zeros_like(p, dtype=torch.float32) for p in self._parameters.values()}
            self._routers = [module for module in network.modules() if isinstance(module, ReplayingRouter)]
            self._trainable = None
            self._module: Any = network
            if spec.lr is not None:
                self._trainable = Trainable(network, network.config, spec)
                self._module = self._trainable.ddp
        # Over gloo from the host: with NCCL, all ranks would have to order these and the computation's collectives
        # alike.
        self._transfers = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
        self._whole = WholeTensors(
            stages,
            layout=layout,
            rank=rank,
            device=spec.device,
            group=self._transfers,
            ranges=[self._contribution(number) for number in range(len(self._weights))],
        )
        self._load_first()

    @property
    def packs_rows(self) -> bool:
        return True

    @property
    def gives_output(self) -> bool:
        return self._place.pipeline == self._layout.pipeline - 1

    def infer(self, micros: Sequence[MicroBatch], *, temperature: float | None = None) -> list[ModelOutput] | None:
        with torch.no_grad():
            outputs = self._run(micros, None, temperature=temperature)
        return outputs if self.gives_output else None

    def accumulate(self, micros: Sequence[MicroBatch], loss: LossOf) -> None:
        self._trained()
        tokens = sum(micro.tokens for micro in micros)
        share = self._spec.router_aux_loss_coef / max(1, tokens)
        if share:
            members = self._layout.world // self._layout.data  # of a data-parallel rank, with the same micro-batches
            share *= members / busy_ranks(len(micros), device=self._spec.device)
        for router in self._routers:
            router.balance = share / len(self._shape.sparse)
        self._run(micros, loss)

    def update(self, before_update: Callable[[], None], *, lr_scale: float = 1.0) -> Update:
        trainable = self._trained()
        with self._computing():
            done = trainable.update(before_update, lr_scale=lr_scale)
        return done._replace(expert_load=self._take_load())

    def weight_specs(self) -> list[tuple[str, tuple[int, ...]]]:
        return self._whole.specs()

    def gather_weights(self, *, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        self._check_onloaded()

        def piece(number: int) -> Tensor:
            master = self._master(self._parameters[number])
            assert master is not None  # only contributed elements are requested
            return master.detach().flatten().float()

        yield from self._whole.gather(piece, dtype=dtype or torch.float32)

    def weight_parts(self) -> list[TensorBox]:
        self._check_onloaded()
        return [part for number, parameter in self._saved() for part in self._parts_of(number, self._master(parameter))]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self._check_onloaded()
        self._whole.scatter(weights, self._store_weight)

    @property
    def updates(self) -> int:
        return self._trained().updates

    def optimizer_parts(self) -> list[TensorBox]:
        trainable = self._trained()
        self._check_onloaded()
        return [
            named(key, part)
            for key in MOMENTS
            for number, parameter in self._saved()
            for part in self._parts_of(number, trainable.state(parameter).get(key))
        ]

    def load_state(self, folder: Path) -> None:
        trainable = self._trained()
        self._check_onloaded()
        moments = {key: self._held_moments(key) for key in MOMENTS}
        updates = read_state(folder, moments, self._whole.specs())
        for parameter in self._parameters.values():
            state = trainable.state(parameter)
            if state:
                state["step"].fill_(float(updates))
        trainable.go_on(updates)

    def offload(self) -> None:
        if self._offloaded is not None:
            return
        trained = [] if self._trainable is None else self._trainable.tensors()
        self._offloaded = OffloadedMemory([*self._parameters.values(), *self._averages.values(), *trained])

    def onload(self) -> None:
        if self._offloaded is not None:
            self._offloaded.bring_back()
            self._offloaded = None

    def close(self) -> None:
        dist.destroy_process_group(self._transfers)
        self._groups.release()

    def _context_group(self) -> ContextGroup:
        """Return the ranks that share rows with this one."""
        tensor, context = self._layout.tensor, self._layout.context
        if context == 1:
            return ContextGroup()
        heads, kv_heads = self._shape.heads // tensor, self._shape.kv_heads // tensor
        ring = not heads_can_be_shared(heads=heads, kv_heads=kv_heads, context=context)
        return ContextGroup(parallel_state.get_context_parallel_group(), ring=ring)

    def _build(self) -> Any:
        """Return the network of this stage on the device; its weights are not initialized."""
        if self._spec.device.type == "cuda":
            torch.cuda.set_device(self._spec.device)
        network = Network(
            transformer_config(self._shape, self._spec, self._layout),
            self._shape,
            self._spec,
            self._context,
            first=self._place.pipeline == 0,
            last=self.gives_output,
        )
        network.to(device=self._spec.device, dtype=self._spec.dtype)
        return network.requires_grad_(self._spec.lr is not None)

    def _load_first(self) -> None:
        """Load the weights of the checkpoint: each rank's slices, and their float32 copies for the optimizer."""
        for parameter in self._parameters.values():
            parameter.data.zero_()  # the padding of the vocabulary stays zero
        read_weights(self._spec.folder, self._whole.specs(), self._held_weights(), head=self._spec.head)

    def _held_weights(self) -> Iterator[TensorBox]:
        """Yield all parts of the weights on this rank: as used in the computation, and in float32 as optimized."""
        for number, parameter in self._parameters.items():
            yield from self._whole.parts(number, parameter.data.view(-1))
            master = self._master(parameter)
            if master is not None and master.untyped_storage().data_ptr() != parameter.untyped_storage().data_ptr():
                yield from self._parts_of(number, master)

    def _held_moments(self, key: str) -> Iterator[TensorBox]:
        """Yield all parts of a moment on this rank."""
        for number, parameter in self._parameters.items():
            yield from self._parts_of(number, self._trained().state(parameter).get(key))

    def _saved(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the parameters of which this rank saves the optimized elements. Elements that several ranks hold are
        saved by one rank."""
        sharded = self._trainable is not None and self._spec.shard
        for number, parameter in self._parameters.items():
            replica = self._weights[number].replica(self._layout, self._rank)
            if replica is None or self._weights[number].copy:
                continue
            copies, which = replica  # unless it is sharded
            if sharded or number % copies == which:
                yield number, parameter

    def _parts_of(self, number: int, held: Tensor | None) -> Iterator[TensorBox]:
        """Yield `held` as parts of whole tensors. `held` has the shape of this rank's optimized elements of a
        parameter; with None, yield no part."""
        if held is not None:
            yield from self._whole.parts(number, held.data.view(-1), self._range(self._parameters[number])[0])

    def _run(
        self, micros: Sequence[MicroBatch], loss: LossOf | None, *, temperature: float | None = None
    ) -> list[ModelOutput]:
        """Run forward through all micro-batches, and backward if `loss` is given; return the outputs if it is None."""
        divisor = self._spec.temperature if temperature is None else temperature
        outputs: list[ModelOutput] = []
        idle = self._others_have_more(len(micros))
        if not micros and not idle:
            return outputs
        nothing = torch.zeros((), dtype=torch.int, device=self._spec.device)
        real = len(micros)
        micros = [*micros, *[IDLE] * idle]

        def step(
            batches: Iterator[tuple[int, MicroBatch]], module: Any
        ) -> tuple[Tensor | ModelOutput, Callable[..., Any]]:
            number, micro = next(batches)

            def finish(output: ModelOutput, non_loss_data: bool = False) -> Any:
                if loss is None:
                    outputs.extend([output] if number < real else [])
                    return None
                value = loss(number, output) if number < real else output.values.sum()
                if not value.requires_grad:  # without a gradient here, but earlier stages wait for one
                    value = value + output.values[:0].sum()
                return value, nothing, {}

            return module(self._batch(micro, temperature=divisor)), finish

        with self._computing():
            get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=iter(enumerate(micros)),
                model=[self._module],
                num_microbatches=len(micros),
                seq_length=micros[0].input_ids.shape[1],
                micro_batch_size=micros[0].input_ids.shape[0],
                forward_only=loss is None,
                collect_non_loss_data=loss is None,
            )
        return outputs

    def _batch(self, micro: MicroBatch, *, temperature: float) -> Batch:
        return to_batch(
            micro,
            self._shape,
            self._spec.device,
            self._context,
            temperature=temperature,
            replays=self._spec.replay_routing,
        )

    def _others_have_more(self, mine: int) -> int:
        """Return how many micro-batches more another rank has: ranks with experts that it needs have to compute as
        well."""
        if self._layout.expert == 1:
            return 0
        most = torch.tensor(mine, device=self._spec.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return int(most) - mine

    def _take_load(self) -> float:
        """Return `Update.expert_load` since the last call. Collective."""
        if (moe := self._shape.moe) is None:
            return 0.0
        load = torch.zeros(len(moe.layers), moe.experts, dtype=torch.double, device=self._spec.device)
        for router in self._routers:
            if router.load is not None:
                load[moe.layers.index(router.layer_number - 1)] = router.load
            router.load = None
        if self._layout.world > 1:
            dist.all_reduce(load)
        return float((load.amax(1) / load.mean(1).clamp(min=1e-9)).mean())

    def _trained(self) -> Trainable:
        if self._trainable is None:
            raise TrainingError(f"the model of {self._spec.folder} is not trained: it has no learning rate")
        return self._trainable

    def _computing(self) -> AbstractContextManager[None]:
        self._check_onloaded()
        return self._groups.active()

    def _check_onloaded(self) -> None:
        if self._offloaded is not None:
            raise TrainingError(f"the model of {self._spec.folder} is offloaded; bring it back first")

    def _contribution(self, number: int) -> tuple[int, int]:
        """Return the range of elements of parameter `number` of its stage that this rank contributes to a gathered
        weight."""
        replica = self._weights[number].replica(self._layout, self._rank)
        if replica is None:
            return 0, 0
        parameter = self._parameters[number]
        if self._trainable is not None and self._spec.shard:
            return self._trainable.own_range(parameter)
        _, which = replica
        return (0, parameter.numel()) if which == 0 else (0, 0)

    def _master(self, parameter: Tensor) -> Tensor | None:
        if self._trainable is None:
            return self._averages.get(parameter, parameter)
        return self._trainable.master(parameter)

    def _store_weight(self, number: int, shard: Tensor) -> None:
        parameter = self._parameters[number]
        master = self._master(parameter)
        parameter.data.copy_(shard)
        if master is not None and master is not parameter:
            start, end = self._range(parameter)
            master.data.copy_(shard.flatten()[start:end].view_as(master))

    def _range(self, parameter: Tensor) -> tuple[int, int]:
        return (0, parameter.numel()) if self._trainable is None else self._trainable.own_range(parameter)


def _mark(parameter: Any, weight: Weight) -> None:
    """Set over which ranks Megatron sums a parameter's gradients, and whether tensor ranks hold different parts; other
    parameters are counted once in the gradient norm."""
    parallel_dim = weight.cut.parallel_dim
    parameter.allreduce = weight.share is None  # if False, over the ranks that have the same experts
    parameter.tensor_model_parallel = parallel_dim is not None or weight.share is not None
    parameter.partition_dim = -1 if parallel_dim is None else parallel_dim
    parameter.partition_stride = 1
