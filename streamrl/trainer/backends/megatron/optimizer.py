"""AdamW by Megatron: float32 gradients and master weights, optionally spread over data-parallel ranks.

Built without `get_megatron_optimizer`, which exchanges pickles between the ranks and leaves norms
and biases out of the weight decay.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer.clip_grads import get_grad_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from torch import Tensor

from streamrl.errors import TrainingError
from streamrl.trainer.backends.base import ModelSpec, Update
from streamrl.trainer.backends.optimizer import MOMENTS, Schedule


class Trainable:
    """A network with its gradients and its optimizer; all methods are called while its layout is active."""

    def __init__(self, network: Any, config: Any, spec: ModelSpec) -> None:
        self._spec = spec
        self.updates = 0
        """Number of optimizer steps so far."""
        self._schedule = Schedule(spec)
        self.ddp = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=spec.shard),
            network,
        )
        """Wrapper that runs the network's forward pass, and adds up gradients in the backward pass."""
        parts = {experts: [p for p in network.parameters() if p.allreduce != experts] for experts in (False, True)}
        self._parts = {
            experts: _PartOptimizer(own, self.ddp, spec, experts=experts) for experts, own in parts.items() if own
        }
        """The optimizers of the experts, which differ between ranks, and of all other parameters."""
        self._has_experts = config.num_moe_experts is not None

    def update(self, before_update: Callable[[], None], *, lr_scale: float = 1.0) -> Update:
        """Sum, clip and apply the gradients, as `ParallelModel.update`."""
        finalize_model_grads([self.ddp])
        for part in self._parts.values():
            part.optimizer.prepare_grads()
        norm = self._grad_norm()
        try:
            if not torch.isfinite(torch.tensor(norm)):
                raise TrainingError(
                    f"the gradient norm of optimizer step {self.updates} is {norm}; look at logprob_diff and the "
                    "rewards of the last steps, or lower the learning rate"
                )
            before_update()
            self._clip(norm)
            lr = lr_scale * self._schedule.rate(self.updates)
            for part in self._parts.values():
                for group in part.adam.param_groups:
                    group["lr"] = lr
                part.optimizer.step_with_ready_grads()
            self.updates += 1
        finally:
            self.ddp.zero_grad_buffer()
            for part in self._parts.values():
                part.optimizer.zero_grad()
        return Update(grad_norm=norm, lr=lr)

    def _grad_norm(self) -> float:
        """Return the norm of all gradients of the model. A stage without experts takes part in the sum over the
        experts' gradients."""
        squares = 0.0
        for experts in (False, True) if self._has_experts else (False,):
            part = self._parts.get(experts)
            own = [] if part is None else part.optimizer.get_main_grads_for_grad_norm()
            group = _norm_group(sharded=self._spec.shard, experts=experts)
            squares += float(get_grad_norm_fp32(own, grad_stats_parallel_group=group)) ** 2
        return math.sqrt(squares)

    def _clip(self, norm: float) -> None:
        share = self._spec.optimizer.grad_clip / (norm + 1e-6)
        parameters = [parameter for part in self._parts.values() for parameter in part.optimizer.get_parameters()]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if share < 1 and gradients:
            torch._foreach_mul_(gradients, share)

    def go_on(self, updates: int) -> None:
        """Continue from a loaded state, after `updates` steps."""
        self.updates = updates
        self._schedule.go_on(updates)

    def own_range(self, parameter: Tensor) -> tuple[int, int]:
        """Return the range of elements of `parameter`, flattened, that this rank optimizes."""
        if not self._spec.shard:
            return 0, parameter.numel()
        optimizer = self._part(parameter).optimizer
        if parameter not in optimizer.model_param_gbuf_map:
            return 0, 0
        found = optimizer._get_model_param_range_map(parameter)["param"]
        return found.start, found.end

    def master(self, parameter: Tensor) -> Tensor | None:
        """Return the float32 elements of `parameter` that this rank optimizes; None if there are none."""
        if self._spec.shard:
            part = self._part(parameter)
            place = part.optimizer.model_param_group_index_map.get(parameter)
            return None if place is None else part.adam.param_groups[place[0]]["params"][place[1]]
        found: Tensor = getattr(parameter, "main_param", parameter)
        return found

    def state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return AdamW's state of `master(parameter)`, in float32; it is made if there was no update yet."""
        master = self.master(parameter)
        if master is None:
            return {}
        state: dict[str, Tensor] = self._part(parameter).adam.state[master]
        if not state:
            state["step"] = torch.tensor(0.0, device=master.device)
            for name in MOMENTS:
                state[name] = torch.zeros_like(master, dtype=torch.float32)
        return state

    def tensors(self) -> list[Tensor]:
        """Return all tensors on the device, except for the parameters."""
        buffers = [*self.ddp.buffers, *self.ddp.expert_parallel_buffers]
        found = [data for buffer in buffers for data in (buffer.param_data, buffer.grad_data)]
        for part in self._parts.values():
            found += [parameter for group in part.adam.param_groups for parameter in group["params"]]
            found += [value for state in part.adam.state.values() for value in state.values()]
        return [tensor for tensor in found if tensor is not None]

    def _part(self, parameter: Any) -> _PartOptimizer:
        return self._parts[not parameter.allreduce]


class _PartOptimizer:
    """Megatron's optimizer of some parameters, with torch's inside it."""

    def __init__(self, parameters: list[Tensor], ddp: Any, spec: ModelSpec, *, experts: bool) -> None:
        self.adam = torch.optim.AdamW(
            [{"params": parameters, "is_expert_parallel": experts}],
            lr=spec.lr or 0.0,
            betas=spec.optimizer.betas,
            eps=spec.optimizer.eps,
            weight_decay=spec.optimizer.weight_decay,
            fused=True,
        )
        self.optimizer = _mixed_precision(self.adam, ddp, spec, experts=experts)


def _mixed_precision(adam: torch.optim.AdamW, ddp: Any, spec: ModelSpec, *, experts: bool) -> Any:
    """Return Megatron's optimizer around `adam`."""
    config = OptimizerConfig(
        bf16=spec.dtype == torch.bfloat16,
        params_dtype=spec.dtype,
        use_distributed_optimizer=spec.shard,
        clip_grad=0.0,
    )
    if spec.shard:
        if experts:
            buffers, alike = ddp.expert_parallel_buffers, parallel_state.get_expert_data_parallel_group()
        else:
            buffers, alike = ddp.buffers, parallel_state.get_data_parallel_group(with_context_parallel=True)
        optimizer = DistributedOptimizer(
            adam,
            config,
            None,
            None,
            model_chunks=[ddp],
            per_model_buffers={0: buffers},
            data_parallel_group=alike,
            data_parallel_group_gloo=None,
            data_parallel_group_idx=_norm_group(sharded=False, experts=experts).rank(),
            distributed_optimizer_instance_id=0,
        )
    elif spec.dtype == torch.bfloat16:
        optimizer = Float16OptimizerWithFloat16Params(adam, config, None, None)
    else:
        optimizer = FP32Optimizer(adam, config, None)
    optimizer.tp_group = parallel_state.get_tensor_model_parallel_group()
    return optimizer


def _norm_group(*, sharded: bool, experts: bool) -> Any:
    """Return the group of ranks that hold different parts of the gradients, of the experts or of all other
    parameters."""
    if sharded:
        return parallel_state.get_intra_distributed_optimizer_instance_group()
    if experts:
        return parallel_state.get_expert_tensor_model_pipeline_parallel_group()
    return parallel_state.get_model_parallel_group()
