"""AdamW by Megatron: float32 gradients and master weights, optionally spread over data-parallel ranks.

Built without `get_megatron_optimizer`, which exchanges pickles between the ranks and leaves norms
and biases out of the weight decay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from torch import Tensor

from streamrl.errors import TrainingError
from streamrl.trainer.backends.base import ModelSpec, Update
from streamrl.trainer.backends.optimizer import MOMENTS, learning_rate


class Trainable:
    """A network with its gradients and its optimizer; all calls are made while its layout is active."""

    def __init__(self, network: Any, config: Any, spec: ModelSpec, *, peak_lr: float) -> None:
        self._spec = spec
        self._peak_lr = peak_lr
        self.updates = 0
        """Optimizer steps taken so far."""
        self.ddp = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=spec.shard),
            network,
        )
        """What computes the forward pass, adding up gradients in the backward pass."""
        self._adam = torch.optim.AdamW(
            [{"params": list(network.parameters()), "is_expert_parallel": False}],
            lr=peak_lr,
            betas=spec.optimizer.betas,
            eps=spec.optimizer.eps,
            weight_decay=spec.optimizer.weight_decay,
            fused=True,
        )
        self._optimizer = _mixed_precision(self._adam, self.ddp, spec)

    def update(self, before_update: Callable[[], None], *, lr_scale: float = 1.0) -> Update:
        """Sum, clip and apply the gradients, as `ParallelModel.update`."""
        finalize_model_grads([self.ddp])
        self._optimizer.prepare_grads()
        norm = float(self._optimizer.get_grad_norm())
        try:
            if not torch.isfinite(torch.tensor(norm)):
                raise TrainingError(
                    f"the gradient norm of optimizer step {self.updates} is {norm}; look at logprob_diff and the "
                    "rewards of the last steps, or lower the learning rate"
                )
            before_update()
            self._clip(norm)
            lr = lr_scale * learning_rate(
                self.updates, peak=self._peak_lr, config=self._spec.optimizer, total_steps=self._spec.total_updates
            )
            for group in self._adam.param_groups:
                group["lr"] = lr
            self._optimizer.step_with_ready_grads()
            self.updates += 1
        finally:
            self.ddp.zero_grad_buffer()
            self._optimizer.zero_grad()
        return Update(grad_norm=norm, lr=lr)

    def _clip(self, norm: float) -> None:
        share = self._spec.optimizer.grad_clip / (norm + 1e-6)
        gradients = [parameter.grad for parameter in self._optimizer.get_parameters() if parameter.grad is not None]
        if share < 1 and gradients:
            torch._foreach_mul_(gradients, share)

    def own_range(self, parameter: Tensor) -> tuple[int, int]:
        """Which elements of `parameter`, flattened, are optimized on this rank."""
        if not self._spec.shard:
            return 0, parameter.numel()
        if parameter not in self._optimizer.model_param_gbuf_map:
            return 0, 0
        found = self._optimizer._get_model_param_range_map(parameter)["param"]
        return found.start, found.end

    def master(self, parameter: Tensor) -> Tensor | None:
        """The float32 elements of `parameter` that are optimized on this rank; None if there are none."""
        if self._spec.shard:
            place = self._optimizer.model_param_group_index_map.get(parameter)
            return None if place is None else self._adam.param_groups[place[0]]["params"][place[1]]
        found: Tensor = getattr(parameter, "main_param", parameter)
        return found

    def state(self, parameter: Tensor) -> dict[str, Tensor]:
        """AdamW's state of `master(parameter)`, in float32; made if there was no update yet."""
        master = self.master(parameter)
        if master is None:
            return {}
        state: dict[str, Tensor] = self._adam.state[master]
        if not state:
            state["step"] = torch.tensor(0.0, device=master.device)
            for name in MOMENTS:
                state[name] = torch.zeros_like(master, dtype=torch.float32)
        return state

    def tensors(self) -> list[Tensor]:
        """All that lives on the device besides the parameters."""
        buffers = [data for buffer in self.ddp.buffers for data in (buffer.param_data, buffer.grad_data)]
        masters = [parameter for group in self._adam.param_groups for parameter in group["params"]]
        states = [value for state in self._adam.state.values() for value in state.values()]
        return [tensor for tensor in (*buffers, *masters, *states) if tensor is not None]


def _mixed_precision(adam: torch.optim.AdamW, ddp: Any, spec: ModelSpec) -> Any:
    """Megatron's optimizer around `adam`."""
    config = OptimizerConfig(
        bf16=spec.dtype == torch.bfloat16,
        params_dtype=spec.dtype,
        use_distributed_optimizer=spec.shard,
        clip_grad=0.0,
    )
    if spec.shard:
        optimizer = DistributedOptimizer(
            adam,
            config,
            None,
            None,
            model_chunks=[ddp],
            per_model_buffers={0: ddp.buffers},
            data_parallel_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
            data_parallel_group_gloo=None,
            data_parallel_group_idx=parallel_state.get_model_parallel_group().rank(),
            distributed_optimizer_instance_id=0,
        )
        optimizer.grad_stats_parallel_group = parallel_state.get_intra_distributed_optimizer_instance_group()
    else:
        if spec.dtype == torch.bfloat16:
            optimizer = Float16OptimizerWithFloat16Params(adam, config, None, None)
        else:
            optimizer = FP32Optimizer(adam, config, None)
        optimizer.grad_stats_parallel_group = parallel_state.get_model_parallel_group()
    optimizer.tp_group = parallel_state.get_tensor_model_parallel_group()
    return optimizer
