"""Megatron's process groups, one set for each layout in this process, and Megatron on the CPU.

Megatron keeps its groups in globals of `parallel_state`, one set at a time. Here each layout has its own set, which
`active` installs while Megatron runs for a model of that layout. Models of one layout share a set; the last model to be
released destroys its groups.

Megatron Core 0.16 gets the current device from `torch.cuda`, writes `device="cuda"` into its calls and compares names
of tensor types. Without CUDA it computes on the CPU, with gloo: functions of `torch.cuda`, which could only raise here,
are replaced once; calls of torch itself are redirected to the CPU only inside `as_cuda()`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.overrides import TorchFunctionMode

from streamrl.trainer.layout import Layout

# --- cpu ---

_installed = False


def install() -> None:
    """Replace the functions of `torch.cuda` that megatron needs; safe to call again."""
    global _installed
    if torch.cuda.is_available() or _installed:
        return
    _installed = True
    for name, replacement in _REPLACEMENTS.items():
        setattr(torch.cuda, name, replacement)
    _keep_random_state_on_cpu()
    _dispatch_without_streams()


def as_cuda() -> AbstractContextManager[Any]:
    """Redirect calls that name CUDA to the CPU within the context. Enter it around every call of megatron."""
    return nullcontext() if torch.cuda.is_available() else _CpuInPlaceOfCuda()


class _CpuInPlaceOfCuda(TorchFunctionMode):
    """Redirects torch calls on CUDA to the CPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:  # the schedules and the embedding move small tensors
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # the optimizers accept parameters by the name of their type, "torch.cuda.FloatTensor"
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if str(kwargs.get("device")).startswith("cuda"):  # buffers of the gradient norm and of the schedules
            kwargs["device"] = torch.device("cpu")
        return func(*args, **kwargs)


def _nothing(*_: Any, **__: Any) -> None:
    return None


_REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "current_device": lambda: torch.device("cpu"),  # buffers are made on "the current device"
    "synchronize": _nothing,  # after each exchange between pipeline stages
    "empty_cache": _nothing,
}


def _keep_random_state_on_cpu() -> None:
    """Make the recomputation of activations save and restore the CPU generator's state."""
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


def _dispatch_without_streams() -> None:
    """Keep the number of tokens of each expert where it is: Megatron copies it to the host on a separate stream, but
    here it is on the host already."""
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher as Dispatcher

    def as_lists(dispatcher: Any, _: str, tokens_per_expert: Any = None) -> Any:
        for name in ("input_splits", "output_splits"):
            counts = getattr(dispatcher, name)
            if isinstance(counts, torch.Tensor):
                setattr(dispatcher, name, counts.tolist())
        return tokens_per_expert

    Dispatcher.cuda_dtoh_stream = False  # there is no stream, and none is to be made
    Dispatcher._maybe_dtoh_and_synchronize = as_lists


# --- groups ---

_NAMES = [n for n in vars(parallel_state) if n.startswith("_") and n.isupper()] + ["_global_process_group_list"]
_BLANK = {name: getattr(parallel_state, name) for name in _NAMES}
_lock = threading.RLock()
"""Held while the globals belong to one layout."""
_sets: dict[Layout, LayoutGroups] = {}


class LayoutGroups:
    """The process groups of one layout."""

    def __init__(self, layout: Layout, timeout_seconds: float) -> None:
        self._layout = layout
        self._users = 0
        self._globals: dict[str, Any] = _BLANK
        with self.active():
            parallel_state.initialize_model_parallel(
                layout.tensor,
                layout.pipeline,
                context_parallel_size=layout.context,
                expert_model_parallel_size=layout.expert,
                expert_tensor_parallel_size=1,
                distributed_timeout_minutes=timeout_seconds / 60,
                create_gloo_process_groups=False,
            )
            self._globals = {name: getattr(parallel_state, name) for name in _NAMES}

    @contextmanager
    def active(self) -> Iterator[None]:
        """Install this layout's groups in Megatron's globals, and make its calls find a device, within the context."""
        with _lock:
            before = {name: getattr(parallel_state, name) for name in _NAMES}
            vars(parallel_state).update(self._globals)
            try:
                with as_cuda():
                    yield
            finally:
                vars(parallel_state).update(before)

    def release(self) -> None:
        """Release the groups for one model; the last model destroys them."""
        self._users -= 1
        if self._users:
            return
        del _sets[self._layout]
        for group in self._globals["_global_process_group_list"] or ():
            if group is not None:
                dist.destroy_process_group(group)


def layout_groups(layout: Layout, *, timeout_seconds: float) -> LayoutGroups:
    """Return the process groups of `layout`, made with the first model. Collective over the default group; `release`
    them afterwards."""
    with _lock:
        if layout not in _sets:
            _sets[layout] = LayoutGroups(layout, timeout_seconds)
        _sets[layout]._users += 1
        return _sets[layout]
