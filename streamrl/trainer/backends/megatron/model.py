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
from streamrl.safetensors_files import Part
from streamrl.trainer.backends.base import LossOf, ModelSpec, Offloaded, Output, Update
from streamrl.trainer.backends.context import ContextGroup, heads_can_be_shared
from streamrl.trainer.backends.files import read_weights
from streamrl.trainer.backends.megatron.groups import layout_groups
from streamrl.trainer.backends.megatron.network import Network, to_batch, transformer_config
from streamrl.trainer.backends.megatron.optimizer import Trainable
from streamrl.trainer.backends.megatron.shape import read_shape
from streamrl.trainer.backends.megatron.weights import WholeTensors, stage_weights
from streamrl.trainer.backends.optimizer import MOMENTS, named, read_state
from streamrl.trainer.layout import Layout
from streamrl.trainer.packing import MicroBatch


class MegatronModel:
    """One rank's part. All ranks of the default process group make theirs at the same time."""

    def __init__(self, spec: ModelSpec, *, layout: Layout, rank: int, timeout_seconds: float) -> None:
        """Load the first weights from `spec.folder`. Collective over the default group, of `layout.world` ranks.

        Raises `ModelError` when the model, or the way to spread it, is not supported.
        """
        self._shape = read_shape(spec.folder)
        self._shape.check(layout)
        if spec.offload_optimizer and spec.device.type != "cpu":
            raise ModelError("the megatron backend cannot keep the optimizer on the CPU: set offload_optimizer = false")
        if dist.get_world_size() != layout.world:
            raise ModelError(f"{layout} needs {layout.world} ranks, but there are {dist.get_world_size()}")
        self._spec = spec
        self._layout = layout
        self._place = layout.coordinates(rank)
        self._offloaded: Offloaded | None = None
        stages = [
            stage_weights(self._shape, spec.head, stage=stage, stages=layout.pipeline)
            for stage in range(layout.pipeline)
        ]
        self._groups = layout_groups(layout, timeout_seconds=timeout_seconds)
        with self._groups.active():
            self._context = self._context_group()
            network = self._build()
            by_name = dict(network.named_parameters())
            self._weights = stages[self._place.pipeline]
            self._parameters: list[Tensor] = [by_name[weight.parameter] for weight in self._weights]
            for weight, parameter in zip(self._weights, self._parameters, strict=True):
                _mark(parameter, weight.cut.parallel_dim)
            self._trainable = None
            self._module: Any = network
            if spec.lr is not None:
                self._trainable = Trainable(network, network.config, spec, peak_lr=spec.lr)
                self._module = self._trainable.ddp
        # Over gloo from the host: NCCL would ask that all ranks order these beside the collectives of the computation.
        self._transfers = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
        self._whole = WholeTensors(
            stages,
            layout=layout,
            rank=rank,
            device=spec.device,
            group=self._transfers,
            ranges=[self._contribution(parameter) for parameter in self._parameters],
        )
        self._load_first()

    @property
    def hidden_size(self) -> int:
        return self._shape.hidden_size

    @property
    def gives_output(self) -> bool:
        return self._place.pipeline == self._layout.pipeline - 1

    def infer(self, micros: Sequence[MicroBatch], *, temperature: float | None = None) -> list[Output] | None:
        with torch.no_grad():
            outputs = self._run(micros, None, temperature=temperature)
        return outputs if self.gives_output else None

    def accumulate(self, micros: Sequence[MicroBatch], loss: LossOf) -> None:
        self._trained()
        self._run(micros, loss)

    def update(self, before_update: Callable[[], None], *, lr_scale: float = 1.0) -> Update:
        trainable = self._trained()
        with self._computing():
            return trainable.update(before_update, lr_scale=lr_scale)

    def weight_specs(self) -> list[tuple[str, tuple[int, ...]]]:
        return self._whole.specs()

    def weight_senders(self, *, most: int) -> list[int]:
        return self._whole.senders(most=most)

    def gather_weights(
        self, *, dtype: torch.dtype | None = None, to: Sequence[int] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        self._check_onloaded()

        def piece(number: int) -> Tensor:
            master = self._master(self._parameters[number])
            assert master is not None  # only what this rank contributes is asked for
            return master.detach().flatten().float()

        yield from self._whole.gather(piece, dtype=dtype or torch.float32, to=to)

    def weight_parts(self) -> list[Part]:
        self._check_onloaded()
        return [part for number, parameter in self._saved() for part in self._parts_of(number, self._master(parameter))]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self._check_onloaded()
        seen: set[str] = set()

        def noted() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                seen.add(name)
                yield name, tensor

        self._whole.scatter(noted(), self._store_weight)
        missing = [name for name in self._whole.shapes if name not in seen]
        if missing:
            raise ModelError(f"{len(missing)} weights are missing, the first of them {missing[0]}")

    @property
    def updates(self) -> int:
        return self._trained().updates

    def optimizer_parts(self) -> list[Part]:
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
        for parameter in self._parameters:
            state = trainable.state(parameter)
            if state:
                state["step"].fill_(float(updates))
        trainable.updates = updates

    def offload(self) -> None:
        if self._offloaded is not None:
            return
        tensors = [*self._parameters, *([] if self._trainable is None else self._trainable.tensors())]
        self._offloaded = Offloaded(tensors)

    def onload(self) -> None:
        if self._offloaded is not None:
            self._offloaded.bring_back()
            self._offloaded = None

    def close(self) -> None:
        dist.destroy_process_group(self._transfers)
        self._groups.release()

    def _context_group(self) -> ContextGroup:
        """The ranks with which this one shares rows."""
        tensor, context = self._layout.tensor, self._layout.context
        if context == 1:
            return ContextGroup()
        heads, kv_heads = self._shape.heads // tensor, self._shape.kv_heads // tensor
        ring = not heads_can_be_shared(heads=heads, kv_heads=kv_heads, context=context)
        return ContextGroup(parallel_state.get_context_parallel_group(), ring=ring)

    def _build(self) -> Any:
        """The network of this stage, on the device, with no weights yet."""
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
        """The weights of the checkpoint, each rank its slices, and of those the optimizer's."""
        for parameter in self._parameters:
            parameter.data.zero_()  # what pads the vocabulary stays so
        read_weights(self._spec.folder, self._whole.specs(), self._held_weights(), head=self._spec.head)

    def _held_weights(self) -> Iterator[Part]:
        """All that this rank holds of the weights: as they are computed with, and in float32 as they are optimized."""
        for number, parameter in enumerate(self._parameters):
            yield from self._whole.parts(number, parameter.data.view(-1))
            master = self._master(parameter)
            if master is not None and master.untyped_storage().data_ptr() != parameter.untyped_storage().data_ptr():
                yield from self._parts_of(number, master)

    def _held_moments(self, key: str) -> Iterator[Part]:
        """All that this rank holds of a moment."""
        for number, parameter in enumerate(self._parameters):
            yield from self._parts_of(number, self._trained().state(parameter).get(key))

    def _saved(self) -> Iterator[tuple[int, Tensor]]:
        """The parameters of which this rank saves what it optimizes. What several ranks have, one of them saves."""
        sharded = self._trainable is not None and self._spec.shard
        alike = self._layout.data * self._layout.context  # ranks that have the same unless it is sharded
        which = self._place.data * self._layout.context + self._place.context
        for number, (weight, parameter) in enumerate(zip(self._weights, self._parameters, strict=True)):
            of_this_tensor_rank = weight.cut.parallel_dim is not None or self._place.tensor == 0
            own = sharded or number % alike == which
            if of_this_tensor_rank and own and not weight.copy:
                yield number, parameter

    def _parts_of(self, number: int, held: Tensor | None) -> Iterator[Part]:
        """What `held`, shaped as what this rank optimizes of a parameter, is of whole tensors; None: nothing."""
        if held is not None:
            yield from self._whole.parts(number, held.data.view(-1), self._range(self._parameters[number])[0])

    def _run(
        self, micros: Sequence[MicroBatch], loss: LossOf | None, *, temperature: float | None = None
    ) -> list[Output]:
        """Forward through all micro-batches, and backward where there is a `loss`; the outputs where there is none."""
        divisor = self._spec.temperature if temperature is None else temperature
        outputs: list[Output] = []
        if not micros:
            return outputs
        nothing = torch.zeros((), dtype=torch.int, device=self._spec.device)

        def step(batches: Iterator[tuple[int, MicroBatch]], module: Any) -> tuple[Tensor | Output, Callable[..., Any]]:
            number, micro = next(batches)

            def finish(output: Output, non_loss_data: bool = False) -> Any:
                if loss is None:
                    outputs.append(output)
                    return None
                value = loss(number, output)
                if not value.requires_grad:  # nothing to learn here, but the stages before wait for a gradient
                    value = value + output.values[:0].sum()
                return value, nothing, {}

            return module(to_batch(micro, self._shape, self._spec.device, self._context, temperature=divisor)), finish

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

    def _contribution(self, parameter: Tensor) -> tuple[int, int]:
        """Which elements of `parameter` this rank gives when it is gathered."""
        if self._trainable is not None and self._spec.shard:
            return self._trainable.own_range(parameter)
        return (0, parameter.numel()) if self._place.data == self._place.context == 0 else (0, 0)

    def _master(self, parameter: Tensor) -> Tensor | None:
        return parameter if self._trainable is None else self._trainable.master(parameter)

    def _store_weight(self, number: int, shard: Tensor) -> None:
        parameter = self._parameters[number]
        master = self._master(parameter)
        parameter.data.copy_(shard)
        if master is not None and master is not parameter:
            start, end = self._range(parameter)
            master.data.copy_(shard.flatten()[start:end].view_as(master))

    def _range(self, parameter: Tensor) -> tuple[int, int]:
        return (0, parameter.numel()) if self._trainable is None else self._trainable.own_range(parameter)


def _mark(parameter: Any, parallel_dim: int | None) -> None:
    """Tell Megatron whether tensor ranks hold different parts: it counts the others once in the gradient norm."""
    parameter.tensor_model_parallel = parallel_dim is not None
    parameter.partition_dim = -1 if parallel_dim is None else parallel_dim
    parameter.partition_stride = 1
