"""Weights in files: what is written, what stays, what is removed, and by whom."""

from __future__ import annotations

import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from streamrl.checksum import tensor_sums
from streamrl.config import LoraConfig
from streamrl.errors import PublicationError
from streamrl.lora import adapter_settings, check_adapter
from streamrl.safetensors_files import mapped
from streamrl.trainer.worker.weight_files import PREFIX, WeightFiles
from streamrl.transport.control import PublishBeginReply
from tests.weights import FixedWeights


def some(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "a.weight": torch.randn(5, 3, generator=generator),
        "a.bias": torch.randn(7, generator=generator),
        "b.weight": torch.randn(4, 6, generator=generator).t(),
    }


def files(run_dir: Path, *, dtype: torch.dtype = torch.float32) -> WeightFiles:
    return WeightFiles(run_dir, on_disk=True, dtype=dtype, checksum=True)


def in_memory(name: str, root: Path) -> WeightFiles:
    return WeightFiles(Path(name), on_disk=False, dtype=torch.float32, checksum=True, root=root)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_written_is_what_was_trained(tmp_path: Path, dtype: torch.dtype) -> None:
    carrier = files(tmp_path, dtype=dtype)
    weights = some(1)
    carrier.prepare(1, FixedWeights(weights))
    found = load_file(Path(carrier.announce().folder) / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in found.items()} == dict.fromkeys(weights, dtype)
    for name, tensor in weights.items():
        assert torch.equal(found[name], tensor.to(dtype))
    sums = carrier.send(PublishBeginReply(group_name="g", world_size=2))
    assert sums == {name: tensor_sums(tensor) for name, tensor in found.items()}
    carrier.close()
    assert not (tmp_path / "weights").exists()


def test_an_adapter_is_written_as_peft_has_it(tmp_path: Path) -> None:
    settings = adapter_settings(LoraConfig(rank=2), "base")
    carrier = WeightFiles(tmp_path, on_disk=True, dtype=torch.float32, checksum=True, adapter=settings)
    for version in (1, 2, 3):  # the third is written over the first
        carrier.prepare(version, FixedWeights(some(version)))
        snapshot = carrier.announce()
        assert snapshot.adapter
        found = sorted(path.name for path in Path(snapshot.folder).iterdir())
        assert found == ["adapter_config.json", "adapter_model.safetensors"]
        tensors = load_file(Path(snapshot.folder) / "adapter_model.safetensors")
        assert all(torch.equal(tensors[name], tensor) for name, tensor in some(version).items())
        check_adapter(Path(snapshot.folder), LoraConfig(rank=2))
    carrier.close()


def read_in_parts(file: Path) -> Tensor:
    with safe_open(file, framework="pt") as opened:
        return opened.get_tensor("a.weight")  # type: ignore[no-any-return]


@pytest.mark.parametrize("read", [read_in_parts, lambda file: mapped(file)["a.weight"]], ids=["read", "mapped"])
def test_a_version_that_is_still_read_is_not_written_over(tmp_path: Path, read: Callable[[Path], Tensor]) -> None:
    carrier = files(tmp_path)
    folder = tmp_path / "weights"
    reused = set()
    for version in (1, 2, 3, 4):
        carrier.prepare(version, FixedWeights(some(version)))
        reused.add((Path(carrier.announce().folder) / "model.safetensors").stat().st_ino)
    assert len(reused) == 2
    held = read(folder / "v000003" / "model.safetensors")
    carrier.prepare(5, FixedWeights(some(5)))
    assert torch.equal(held, some(3)["a.weight"])
    found = load_file(folder / "v000005" / "model.safetensors")
    assert torch.equal(found["a.weight"], some(5)["a.weight"])
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == ["v000004", "v000005"]


def test_a_folder_has_one_owner_and_is_emptied_by_the_next(tmp_path: Path) -> None:
    left = tmp_path / "weights" / "v000007"
    left.mkdir(parents=True)
    carrier = files(tmp_path)
    assert not left.exists()
    with pytest.raises(PublicationError, match="is another run writing there"):
        files(tmp_path)
    carrier.close()


DYING = """
import os, sys, torch
from pathlib import Path
from streamrl.trainer.worker.weight_files import WeightFiles
WeightFiles(Path("dead"), on_disk=False, dtype=torch.float32, checksum=True, root=Path(sys.argv[1]))
os._exit(0)
"""


def test_nobody_else_can_read_guess_or_prepare_the_memory_of_a_run(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / f"{PREFIX}trap").symlink_to(elsewhere)
    files = [in_memory("run", shared) for _ in range(2)]
    assert list(elsewhere.iterdir()) == [], "a link that lies there is not followed"
    assert len({file.folder for file in files}) == 2, "the name is not made of what others know"
    files[0].prepare(1, FixedWeights(some(1)))
    assert stat.S_IMODE(files[0].folder.stat().st_mode) == 0o700
    (tensors,) = files[0].folder.glob("v*/*")
    assert stat.S_IMODE(tensors.stat().st_mode) == 0o600
    for file in files:
        file.close()


def test_memory_of_a_dead_run_is_freed_by_the_next_and_that_of_a_living_one_is_not(tmp_path: Path) -> None:
    living = in_memory("living", tmp_path)
    subprocess.run([sys.executable, "-c", DYING, str(tmp_path)], check=True, timeout=120)
    assert len(list(tmp_path.glob(f"{PREFIX}*"))) == 2
    mine = in_memory("mine", tmp_path)
    assert set(tmp_path.glob(f"{PREFIX}*")) == {living.folder, mine.folder}
    assert mine.announce().machine
