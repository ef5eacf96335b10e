"""Checksums of the weights that an SGLang server received, in their original form. Runs in SGLang's processes.

SGLang's own checksums are those of its parameters in its own layout (fused, padded, a part on each rank), which cannot
be derived from the trained weights elsewhere. Hence SGLang is patched to take `checksum.tensor_sums` of every tensor of
an update just before it loads it, and to return them at POST /weights_checker for the action `received`, in the form of
its own checksums. SGLang's later processing of a tensor is not covered.

Written for sglang 0.5.23. Imports only packages that SGLang requires itself.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from streamrl.checksum import LineSums, checksums, line_sums, tensor_sums


class AfterImport(MetaPathFinder):
    """A hook that calls `then` with the module `name` as soon as any code imports it.

    A process that SGLang forks inherits the hooks in `sys.meta_path`; a spawned one has only those that `entry.py`
    installs there again.
    """

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._then = then

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._then(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


ACTION = "received"
UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater"
CHECKER = "sglang.srt.utils.weight_checker"
ADAPTERS = "sglang.srt.lora.lora"


def install() -> None:
    """Install the patches, before SGLang is imported.

    A process that SGLang forks inherits them; a spawned one installs its own (`entry.py`).
    """
    received = ReceivedTensors()
    sys.meta_path[:0] = [
        AfterImport(UPDATER, received.note_updates),
        AfterImport(ADAPTERS, received.note_adapters),
        AfterImport(CHECKER, received.reply_with_sums),
    ]


class ReceivedTensors:
    """The tensors that one process of SGLang has loaded since it began to serve."""

    def __init__(self) -> None:
        self._sums: dict[str, str] = {}
        """Name → checksum of the last tensor of this name."""
        self._reading = False
        """Whether files are being read for an update, rather than the first weights."""

    def note_updates(self, module: Any) -> None:
        """Patch the functions of `UPDATER` to record the tensors that they receive."""
        updater, loader = module.WeightUpdater, module.DefaultModelLoader
        from_broadcast, from_disk = updater.load_weights_from_distributed, updater.update_weights_from_disk
        load = loader.load_weights_only

        def load_weights_from_distributed(of: Any, named_tensors: Iterable[tuple[str, Any]]) -> Any:
            return from_broadcast(of, list(self._noted(named_tensors)))

        def update_weights_from_disk(of: Any, *arguments: Any, **settings: Any) -> Any:
            self._reading = True
            try:
                return from_disk(of, *arguments, **settings)
            finally:
                self._reading = False

        def load_weights_only(model: Any, weights: Iterable[tuple[str, Any]], target_device: Any) -> None:
            load(model, self._noted(weights) if self._reading else weights, target_device)

        updater.load_weights_from_distributed = load_weights_from_distributed
        updater.update_weights_from_disk = update_weights_from_disk
        loader.load_weights_only = staticmethod(load_weights_only)

    def note_adapters(self, module: Any) -> None:
        """Patch the function of `ADAPTERS` that receives each tensor of an adapter's file."""
        process = module.LoRAAdapter._process_weight

        def process_weight(of: Any, name: str, tensor: Any) -> None:
            self._sums[name] = tensor_sums(tensor)
            process(of, name, tensor)

        module.LoRAAdapter._process_weight = process_weight

    def reply_with_sums(self, module: Any) -> None:
        """Patch the function of `CHECKER` to return the recorded checksums for the action `received`."""
        handle = module.WeightChecker.handle

        def check(of: Any, action: str, *arguments: Any, role: str, **settings: Any) -> Any:
            if action != ACTION:
                return handle(of, action, *arguments, role=role, **settings)
            if role != "target":  # a draft model, which gets the tensors that the target has received
                return None
            return module.ChecksumInfo(
                checksums=dict(self._sums),
                per_gpu_checksum=module.overall_checksum(self._sums),
                parallelism_info=of._parallelism_info(role=role),
            ).model_dump()

        module.WeightChecker.handle = check

    def _noted(self, tensors: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        sums: dict[str, LineSums] = {}
        try:
            for name, tensor in tensors:
                sums[name] = line_sums(tensor)
                yield name, tensor
        finally:
            self._sums |= checksums(sums)
