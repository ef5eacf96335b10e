"""Megatron's process groups, one set for each layout that lives in this process.

Megatron keeps its groups in globals of `parallel_state`, one set at a time. Here each layout has its
own, which `active` puts in place while megatron runs for a model of that layout. Models of one
layout share a set; the last that leaves destroys its groups.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from streamrl.trainer.backends.megatron import cpu
from streamrl.trainer.layout import Layout

_NAMES = [n for n in vars(parallel_state) if n.startswith("_") and n.isupper()] + ["_global_process_group_list"]
_BLANK = {name: getattr(parallel_state, name) for name in _NAMES}
_lock = threading.RLock()
"""Held while the globals are those of one layout."""
_sets: dict[Layout, LayoutGroups] = {}


class LayoutGroups:
    """The groups of one layout."""

    def __init__(self, layout: Layout, timeout_seconds: float) -> None:
        self._layout = layout
        self._users = 0
        self._globals: dict[str, Any] = _BLANK
        with self.active():
            parallel_state.initialize_model_parallel(
                layout.tensor,
                layout.pipeline,
                distributed_timeout_minutes=timeout_seconds / 60,
                create_gloo_process_groups=False,
            )
            self._globals = {name: getattr(parallel_state, name) for name in _NAMES}

    @contextmanager
    def active(self) -> Iterator[None]:
        """Megatron's globals are those of this layout, and its calls find a device."""
        with _lock:
            before = {name: getattr(parallel_state, name) for name in _NAMES}
            vars(parallel_state).update(self._globals)
            try:
                with cpu.as_cuda():
                    yield
            finally:
                vars(parallel_state).update(before)

    def release(self) -> None:
        """One model less uses them."""
        self._users -= 1
        if self._users:
            return
        del _sets[self._layout]
        for group in self._globals["_global_process_group_list"] or ():
            if group is not None:
                dist.destroy_process_group(group)


def layout_groups(layout: Layout, *, timeout_seconds: float) -> LayoutGroups:
    """Those of `layout`, made with the first model. Collective over the default group; `release` them after."""
    with _lock:
        if layout not in _sets:
            _sets[layout] = LayoutGroups(layout, timeout_seconds)
        _sets[layout]._users += 1
        return _sets[layout]
