"""What is written in place is what others read, and neighbours lie together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from streamrl.errors import ModelError
from streamrl.gserver.embedded.weights import joined
from streamrl.safetensors_files import layout, mapped

SHAPES = {"q.weight": (4, 6), "q.bias": (4,), "k.weight": (2, 6), "k.bias": (2,), "norm": (7,), "o.weight": (6, 4)}


def written(file: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    tensors = {name: torch.randn(shape).to(dtype) for name, shape in SHAPES.items()}
    header, begins, size = layout(list(SHAPES.items()), dtype)
    content = bytearray(size)
    content[: len(header)] = header
    for name, tensor in tensors.items():
        torch.frombuffer(content, dtype=dtype, count=tensor.numel(), offset=begins[name]).copy_(tensor.flatten())
    file.write_bytes(content)
    return tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_file_reads_the_same_for_everyone(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = written(tmp_path / "f", dtype)
    for found in (load_file(tmp_path / "f"), mapped(tmp_path / "f")):
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_files_of_others_are_mapped(tmp_path: Path) -> None:
    save_file({"a": torch.arange(6.0).view(2, 3)}, tmp_path / "f")
    assert torch.equal(mapped(tmp_path / "f")["a"], torch.arange(6.0).view(2, 3))


def test_neighbours_are_joined_without_a_copy(tmp_path: Path) -> None:
    tensors = written(tmp_path / "f", torch.float32)
    found = mapped(tmp_path / "f")
    for kind in ("weight", "bias"):
        both = joined([found[f"q.{kind}"], found[f"k.{kind}"]])
        assert torch.equal(both, torch.cat([tensors[f"q.{kind}"], tensors[f"k.{kind}"]]))
        assert both.data_ptr() == found[f"q.{kind}"].data_ptr()
    apart = joined([found["k.weight"], found["q.weight"]])
    assert torch.equal(apart, torch.cat([tensors["k.weight"], tensors["q.weight"]]))


@pytest.mark.parametrize(
    "content", [b"", b"short", b"\x10" + b"\0" * 7 + b"{", b"\x02" + b"\0" * 7 + b"[]", b"\xff" * 64]
)
def test_what_is_no_such_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(ModelError, match=r"the weights in .*f cannot be read"):
        mapped(tmp_path / "f")
