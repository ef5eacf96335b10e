"""The staged weights of an update, in a file that vLLM reads.

The file is written through one memory mapping: a tensor of a broadcast arrives in its final place. It lies in memory
that has no name in any file system and is freed when this process ends, however that happens; vLLM opens it through
`/proc`.
"""

from __future__ import annotations

import json
import mmap
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from streamrl.checksum import LineSums, checksums, copy_and_sum, line_sums
from streamrl.config import LoraConfig
from streamrl.lora import SETTINGS, TENSORS, adapter_settings, check_adapter
from streamrl.safetensors_files import MODEL, TensorFiles, layout


class StagedFile:
    """Implements `WeightsAside` (`server/receiver.py`) for weights with these shapes, by name; all begin as zeros."""

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, *, adapter: LoraConfig | None = None
    ) -> None:
        """`adapter`: the kind of adapter to which the weights belong; None: they are a model's."""
        self._adapter = adapter
        header, begins, size = layout(list(shapes.items()), dtype)
        self._memory = os.memfd_create("streamrl-weights")
        os.ftruncate(self._memory, size)
        mapping = mmap.mmap(self._memory, size)
        mapping[: len(header)] = header
        whole = torch.frombuffer(mapping, dtype=torch.uint8)
        self._tensors = {}
        for name, shape in shapes.items():
            end = begins[name] + torch.Size(shape).numel() * dtype.itemsize
            self._tensors[name] = whole[begins[name] : end].view(dtype).view(shape)
        self._folder = tempfile.TemporaryDirectory(prefix="streamrl-weights-")
        self.folder = Path(self._folder.name)
        """The folder with the file, as a checkpoint or as an adapter in peft's format."""
        file = f"{MODEL if adapter is None else TENSORS}.safetensors"
        (self.folder / file).symlink_to(f"/proc/{os.getpid()}/fd/{self._memory}")
        if adapter is not None:
            (self.folder / SETTINGS).write_text(json.dumps(adapter_settings(adapter, "")))

    def close(self) -> None:
        """Remove the file. Its memory is freed with the last tensor in it."""
        self._folder.cleanup()
        os.close(self._memory)

    def store(self, name: str, tensor: Tensor) -> LineSums:
        place = self._tensors[name]
        return copy_and_sum(place, tensor.to(place.dtype))

    def place(self, name: str) -> Tensor | None:
        return self._tensors[name]

    def fill(self, adapter: Path | None) -> dict[str, str]:
        """Copy the adapter in the folder `adapter`, if there is one, into the stage; return the checksums by name.

        Raises `ModelError` if it has other settings or cannot be read.
        """
        if adapter is not None:
            assert self._adapter is not None
            check_adapter(adapter, self._adapter)
            files = TensorFiles(adapter, TENSORS)
            return checksums({name: self.store(name, files.read(name)) for name in self._tensors})
        return checksums({name: self.sums(name) for name in self._tensors})

    def sums(self, name: str) -> LineSums:
        return line_sums(self._tensors[name])

    def adopt(self, weights: Mapping[str, Tensor]) -> bool:
        return False

    def forget(self) -> None:
        raise NotImplementedError("only broadcasts to a GPU leave writers behind")

    def make_ready(self) -> None:
        pass
