"""Tensors in safetensors files, written one after another so that a model never has to be in memory whole."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from streamrl.config import LoraConfig
from streamrl.errors import ModelError
from streamrl.lora import SETTINGS, TENSORS, adapter_settings

FILE_BYTES = 4 * 2**30
"""A file is closed once it holds so much."""
NOT_COPIED = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.gguf", "*.pt", "*.pth")


def write_tensors(folder: Path, stem: str, tensors: Iterable[tuple[str, Tensor]], *, limit: int = FILE_BYTES) -> None:
    """Write `stem.safetensors`, or several files with an index as Hugging Face names them."""
    held: dict[str, Tensor] = {}
    size = 0
    parts: list[list[str]] = []

    def flush() -> None:
        nonlocal held, size
        save_file(held, folder / _part(stem, len(parts)), metadata={"format": "pt"})
        parts.append(list(held))
        held, size = {}, 0

    for name, tensor in tensors:
        held[name] = tensor.detach().to("cpu", copy=False).contiguous()
        size += tensor.nbytes
        if size >= limit:
            flush()
    if held or not parts:
        flush()
    if len(parts) == 1:
        (folder / _part(stem, 0)).rename(folder / f"{stem}.safetensors")
        return
    index: dict[str, Any] = {"metadata": {}, "weight_map": {}}
    for number, names in enumerate(parts):
        file = f"{stem}-{number + 1:05d}-of-{len(parts):05d}.safetensors"
        (folder / _part(stem, number)).rename(folder / file)
        index["weight_map"] |= dict.fromkeys(names, file)
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=1))


class TensorFiles:
    """Reads what `write_tensors` wrote, or the weights of any Hugging Face checkpoint, one tensor at a time."""

    def __init__(self, folder: Path, stem: str) -> None:
        """Raises `ModelError` where there are no such files, or they cannot be read."""
        files = sorted(folder.glob(f"{stem}.safetensors")) or sorted(folder.glob(f"{stem}-*.safetensors"))
        if not files:
            raise ModelError(f"{folder} has no {stem}.safetensors")
        self._where: dict[str, Path] = {}
        try:
            for file in files:
                with safe_open(file, framework="pt") as opened:
                    self._where |= dict.fromkeys(opened.keys(), file)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{folder}: {stem}.safetensors cannot be read: {error}") from error

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def names(self) -> Iterator[str]:
        """In the order of the files."""
        yield from self._where

    def read(self, name: str) -> Tensor:
        """One tensor as a whole; raises `ModelError` if there is none of that name."""
        if name not in self._where:
            raise ModelError(f"the checkpoint has no tensor {name}")
        with safe_open(self._where[name], framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(name)
        return tensor


def copies(tensors: Iterable[tuple[str, Tensor]], *, keep: bool) -> dict[str, Tensor]:
    """Copies in host memory, by name; ranks that only take part in the gathering say `keep=False`."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if keep:
            found[name] = tensor.detach().to("cpu", copy=True)
    return found


def export(folder: Path, weights: Iterable[tuple[str, Tensor]], *, source: Path, scalar_head: bool) -> None:
    """Write whole `weights` into `folder` as a Hugging Face checkpoint like `source`, tokenizer included."""
    copy_settings(source, folder, scalar_head=scalar_head)
    write_tensors(folder, "model", weights)


def export_adapter(folder: Path, tensors: Iterable[tuple[str, Tensor]], *, lora: LoraConfig, base: Path) -> None:
    """Write an adapter of the model in `base` into `folder`, as peft has it, with the model's tokenizer."""
    shutil.copytree(base, folder, ignore=_ignored, dirs_exist_ok=True)
    (folder / SETTINGS).write_text(json.dumps(adapter_settings(lora, str(base.absolute())), indent=2))
    write_tensors(folder, TENSORS, tensors, limit=sys.maxsize)  # peft reads one file


def copy_settings(source: Path, target: Path, *, scalar_head: bool) -> None:
    """Copy what a checkpoint holds besides weights, its tokenizer included, and say what the weights are now."""
    shutil.copytree(source, target, ignore=_ignored, dirs_exist_ok=True)
    file = target / "config.json"
    settings = json.loads(file.read_text())
    settings.pop("torch_dtype", None)
    settings["dtype"] = "float32"
    if scalar_head:
        kind = str(settings["architectures"][0]).partition("For")[0]
        settings["architectures"] = [f"{kind}ForSequenceClassification"]
        settings |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    file.write_text(json.dumps(settings, indent=2))


def _ignored(folder: str, names: list[str]) -> set[str]:
    patterns = shutil.ignore_patterns(*NOT_COPIED)(folder, names)
    return {*patterns, *(name for name in names if (Path(folder) / name).is_dir())}


def _part(stem: str, number: int) -> str:
    return f"{stem}-{number + 1:05d}.part"
