"""What is written, in place or in parts, is what others read; neighbours lie together."""

from __future__ import annotations

import tempfile
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from streamrl import safetensors_files
from streamrl.errors import ModelError
from streamrl.safetensors_files import (
    TensorBox,
    TensorFiles,
    bytes_of_parts,
    file_name,
    layout,
    mapped,
    write_bytes,
    write_index,
)

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


@pytest.mark.parametrize(
    "content", [b"", b"short", b"\x10" + b"\0" * 7 + b"{", b"\x02" + b"\0" * 7 + b"[]", b"\xff" * 64]
)
def test_what_is_no_such_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(ModelError, match=r"the weights in .*f cannot be read"):
        mapped(tmp_path / "f")


def borders(draw: st.DrawFn, size: int) -> list[tuple[int, int]]:
    """Up to four ranges that `size` falls into."""
    cuts = draw(st.sets(st.integers(1, size - 1), max_size=3)) if size > 1 else set()
    return list(pairwise([0, *sorted(cuts), size]))


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[slice, ...]], tuple[slice, ...]]:
    """The shape of a tensor, boxes that it falls into, and another box of it."""
    shape = tuple(draw(st.lists(st.integers(1, 12), min_size=1, max_size=3)))
    parts = [tuple(slice(*ends) for ends in box) for box in product(*(borders(draw, size) for size in shape))]
    firsts = [draw(st.integers(0, size - 1)) for size in shape]
    wanted = tuple(slice(a, draw(st.integers(a + 1, size))) for a, size in zip(firsts, shape, strict=True))
    return shape, parts, wanted


def write_parts(file: Path, parts: list[TensorBox]) -> None:
    write_bytes(file, bytes_of_parts(parts))


def part_of(name: str, whole: torch.Tensor, box: tuple[slice, ...]) -> TensorBox:
    return TensorBox(name, tuple(whole.shape), tuple(part.start for part in box), whole[box])


@given(
    boxes(),
    st.integers(1, 3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([16, 64, 1 << 20]),
)
def test_any_box_is_read_out_of_any_parts(found, files, stored, wanted_dtype, buffer) -> None:
    shape, parts, wanted = found
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(stored)
    before, safetensors_files.BUFFER_BYTES = safetensors_files.BUFFER_BYTES, buffer
    try:
        with tempfile.TemporaryDirectory() as folder:
            for number in range(files):
                mine = [part_of("w", whole, box) for box in parts[number::files]]
                write_parts(Path(folder) / file_name("model", number, files), mine)
            read = TensorFiles(Path(folder), "model")
            read.check([("w", shape)])
            assert torch.equal(read.read("w"), whole)
            assert read.are_wholes == (len(parts) == 1)
            expected = whole[wanted].to(wanted_dtype)
            place = torch.full([n + 1 for n in expected.shape], torch.nan, dtype=wanted_dtype)
            inside = place[tuple(slice(0, n) for n in expected.shape)]
            read.read_into(TensorBox("w", shape, tuple(part.start for part in wanted), inside))
            assert torch.equal(inside, expected)
            assert int(place.isnan().sum()) == place.numel() - expected.numel()  # nothing beside it
            for number in range(files):  # valid files for everyone, though parts do not have the tensor's name
                load_file(Path(folder) / file_name("model", number, files))
    finally:
        safetensors_files.BUFFER_BYTES = before


def test_several_files_of_whole_tensors_are_found_by_their_index(tmp_path: Path) -> None:
    tensors = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    tensors["one"] = torch.tensor(3.0)
    for number in range(2):
        mine = [TensorBox.whole(name, tensor) for name, tensor in list(tensors.items())[number::2]]
        write_parts(tmp_path / file_name("model", number, 2), mine)
    write_index(tmp_path, "model")
    read = TensorFiles(tmp_path, "model")
    assert read.are_wholes
    assert all(torch.equal(read.read(name), tensor) for name, tensor in tensors.items())
    (tmp_path / file_name("model", 1, 2)).unlink()
    for index in (True, False):
        with pytest.raises(ModelError, match=r"lacks model-00002-of-00002\.safetensors"):
            TensorFiles(tmp_path, "model")
        if index:
            (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelError, match=r"has no optimizer\.safetensors"):
        TensorFiles(tmp_path, "optimizer")


def test_what_does_not_fit_is_named_with_its_file(tmp_path: Path) -> None:
    whole = torch.randn(4, 6)
    parts = [
        part_of("w", whole, (slice(0, 2), slice(0, 6))),
        TensorBox.whole("v", torch.randn(3)),
        TensorBox.whole("i", whole),
    ]
    write_parts(tmp_path / "model.safetensors", parts)
    read = TensorFiles(tmp_path, "model")
    with pytest.raises(ModelError) as raised:
        read.check([("w", (4, 6)), ("v", (4,)), ("n", (1,)), ("i", (4, 6))])
    problems = str(raised.value)
    for problem in (
        "parts of w are missing",
        "model.safetensors: v has the shape (3,), the model's has (4,)",
        "n is missing",
    ):
        assert problem in problems
    assert " i " not in problems
    for call, problem in (
        (lambda: read.read("w"), "parts of w are missing"),
        (lambda: read.read("n"), "has no tensor n"),
        (lambda: read.read_into(TensorBox.whole("v", torch.empty(4))), r"model\.safetensors: v has the shape \(3,\)"),
    ):
        with pytest.raises(ModelError, match=problem):
            call()
    save_file({"w": torch.arange(3)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.safetensors: w is of the type I64"):
        TensorFiles(tmp_path, "model").check([("w", (3,))])
    with pytest.raises(ModelError, match="w is of the type I64"):
        TensorFiles(tmp_path, "model").read("w")
