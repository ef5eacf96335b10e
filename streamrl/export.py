"""Checkpoints in Hugging Face's format: whole tensors in safetensors files, an index, settings and tokenizer; and
`streamrl export`.

Works in bounded memory: one tensor after another is read from the files of a checkpoint, to which many ranks may have
written a part each, and written to the current output file. This module also merges an adapter into its model, for
servers without adapter support.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from streamrl.config import LoraConfig
from streamrl.disk import cache_home, in_use, remove_unused
from streamrl.errors import ConfigError, ModelError
from streamrl.lora import SETTINGS, TENSORS, adapter_settings, check_adapter, pair_of
from streamrl.models import made, weights_fingerprint
from streamrl.records import progress
from streamrl.safetensors_files import MODEL, TensorFiles, file_name, write_file, write_index

FILE_BYTES = 4 * 2**30
"""Maximum size of a file, except for a single larger tensor."""
NOT_COPIED = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.gguf", "*.pt", "*.pth")
EXPORTS = "exports"
"""Default folder of exports, in the run's folder."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
EXPORT = "export-"
"""Prefix of the names of exports in the cache."""
DRAFT = "whole"
"""Temporary folder in which `make_whole` assembles tensors."""


def export(checkpoint: Path, target: Path, *, dtype: torch.dtype = torch.float32, limit: int = FILE_BYTES) -> None:
    """Write the model in `checkpoint` into the existing folder `target`, in files of `limit` bytes.

    Raises `ModelError` if a part of the model is missing, and for an adapter, which is in peft's format already.
    """
    if (checkpoint / SETTINGS).exists():
        base = json.loads((checkpoint / SETTINGS).read_bytes()).get("base_model_name_or_path")
        raise ModelError(f"{checkpoint} is an adapter of {base}: peft, and programs that use it, load it as it is")
    write_wholes(TensorFiles(checkpoint, MODEL), target, dtype=dtype, limit=limit)
    copy_settings(checkpoint, target, dtype=dtype)


@contextmanager
def hugging_face_folder(checkpoint: Path, *, cache: Path | None = None) -> Iterator[Path]:
    """Yield a folder with the model of `checkpoint` that every program can load: the checkpoint itself, or an export in
    the cache, which is kept during the block. Unused other exports are removed: each is as large as its model."""
    if TensorFiles(checkpoint, MODEL).are_wholes:
        yield checkpoint
        return
    folder = (cache or cache_home()) / f"{EXPORT}{weights_fingerprint(checkpoint)}"
    with in_use(folder):
        for other in folder.parent.glob(f"{EXPORT}*"):
            if other != folder:
                remove_unused(other)
        yield made(folder, lambda target: export(checkpoint, target))


def make_whole(folder: Path, stem: str = MODEL, *, limit: int = FILE_BYTES) -> None:
    """Replace the files of `stem` in `folder`, parts by many ranks, by files of whole tensors as `export` writes."""
    draft = folder / DRAFT
    draft.mkdir()
    write_wholes(TensorFiles(folder, stem), draft, stem, limit=limit)
    for file in (*folder.glob(f"{stem}*.safetensors"), *folder.glob(f"{stem}.safetensors.index.json")):
        file.unlink()
    for file in draft.iterdir():
        file.rename(folder / file.name)
    draft.rmdir()


def write_wholes(
    files: TensorFiles, folder: Path, stem: str = MODEL, *, dtype: torch.dtype | None = None, limit: int = FILE_BYTES
) -> None:
    """Write all tensors of `files`, each whole, into files of `stem` in `folder`; without `dtype` as stored."""
    files.check([(name, files.shape(name)) for name in files.names()])
    contents: list[list[tuple[str, torch.dtype, tuple[int, ...]]]] = [[]]
    size = 0
    for name in files.names():
        entry = name, dtype or files.dtype(name), files.shape(name)
        length = math.prod(entry[2]) * entry[1].itemsize
        if contents[-1] and size + length > limit:
            contents.append([])
            size = 0
        contents[-1].append(entry)
        size += length
    for number, entries in enumerate(contents):
        tensors = (files.read(name).to(kind) for name, kind, _ in entries)
        write_file(folder / file_name(stem, number, len(contents)), entries, tensors)
    if len(contents) > 1:
        write_index(folder, stem)


def copy_settings(source: Path, target: Path, *, dtype: torch.dtype = torch.float32, scalar_head: bool = False) -> None:
    """Copy a checkpoint's files except weights, its tokenizer included.

    The copied settings describe the new weights: `dtype`, and with `scalar_head` a head with one output."""
    _copy_files(source, target)
    file = target / "config.json"
    settings = json.loads(file.read_text())
    settings.pop("torch_dtype", None)
    settings["dtype"] = str(dtype).removeprefix("torch.")
    if scalar_head:
        kind = str(settings["architectures"][0]).partition("For")[0]
        settings["architectures"] = [f"{kind}ForSequenceClassification"]
        settings |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    file.write_text(json.dumps(settings, indent=2))


def copy_base(source: Path, target: Path, *, lora: LoraConfig) -> None:
    """Copy the files of an adapter's base `source` except weights, and write peft's settings of the adapter."""
    _copy_files(source, target)
    (target / SETTINGS).write_text(json.dumps(adapter_settings(lora, str(source.absolute())), indent=2))


def merge_adapter(base: Path, adapter: Path, lora: LoraConfig, *, into: Path) -> None:
    """Write the model in `base` with the `adapter` merged, as a checkpoint in the new folder `into`; each weight keeps
    its dtype in `base`. Raises `ModelError`."""
    check_adapter(adapter, lora)
    into.mkdir()
    _copy_files(base, into)
    for index in base.glob("*.safetensors.index.json"):
        shutil.copyfile(index, into / index.name)
    try:
        pairs = load_file(adapter / f"{TENSORS}.safetensors")
        for file in sorted(base.glob("*.safetensors")):
            merged: dict[str, Tensor] = {}
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - no mapping
                    weight = merged[name] = tensors.get_tensor(name)
                    a, b = (pairs.pop(each, None) for each in pair_of(name))
                    if a is not None and b is not None:
                        merged[name] = torch.addmm(weight.float(), b, a, alpha=lora.scale).to(weight.dtype)
            save_file(merged, into / file.name, metadata={"format": "pt"})
    except (SafetensorError, OSError, RuntimeError) as error:
        raise ModelError(f"the adapter in {adapter} cannot be added to the model in {base}: {error}") from error
    if pairs:
        raise ModelError(f"the adapter in {adapter} is of another model than {base}: it has {min(pairs)}")


def _copy_files(source: Path, target: Path) -> None:
    """Copy all files except weights, without times and permissions. The latest checkpoint is found by its own time, and
    a model may be on a read-only file system, with read-only files."""
    for file in source.iterdir():
        if file.is_file() and not any(fnmatch(file.name, pattern) for pattern in NOT_COPIED):
            shutil.copyfile(file, target / file.name)


def export_run(run_dir: Path, *, step: int | None, to: Path | None, dtype: str) -> Path:
    """Export the checkpoint of policy version `step`, or the last one, of the run in `run_dir`; return its folder.

    `run_dir` may also be the folder of a checkpoint. The export's folder appears when all of it is on the disk. Raises
    `ConfigError` if the checkpoint does not exist or the export does already, and `ModelError` if the checkpoint cannot
    be read or the export cannot be written.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype}: there are {', '.join(DTYPES)}")
    checkpoint = _checkpoint(run_dir, step)
    place = Path(os.path.abspath(checkpoint))  # resolves "."
    home = run_dir if checkpoint != run_dir else place.parent.parent
    target = to or home / EXPORTS / (place.name if dtype == "float32" else f"{place.name}-{dtype}")
    if target.exists():
        raise ConfigError(f"{target} exists already; remove it, or name another folder by --to")
    try:
        progress.write_folder(target, lambda folder: export(checkpoint, folder, dtype=DTYPES[dtype]))
    except OSError as error:
        raise ModelError(
            f"{target} cannot be written: {error}; make room there, or name another folder by --to"
        ) from error
    return target


def _checkpoint(run_dir: Path, step: int | None) -> Path:
    if (run_dir / progress.STATE / progress.FILE).is_file():
        return run_dir
    found = progress.checkpoints(run_dir)
    if not found:
        raise ConfigError(f"{run_dir} has no checkpoint; give the folder of a run, as runs/NAME")
    if step is None:
        return found[-1]
    versions = {progress.read(folder).policy_version: folder for folder in found}
    if step not in versions:
        raise ConfigError(
            f"--step {step}: {run_dir} has checkpoints of the steps {', '.join(map(str, sorted(versions)))}"
        )
    return versions[step]
