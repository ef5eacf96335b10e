"""The C computes what its twins in torch compute, and these do it where the C cannot be had."""

from __future__ import annotations

import math
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from streamrl.architecture import Rope
from streamrl.device import compute_with
from streamrl.gserver.embedded.model import rotation_table
from streamrl.native import build
from streamrl.native import operations as module
from streamrl.native.build import SWITCH, Unavailable, has_instructions, shared_library
from streamrl.native.operations import (
    FORMATS,
    HEAD_DIMS,
    NativeOperations,
    Operations,
    SlotSpan,
    TorchOperations,
    library_for,
    operations_for,
)

CPU = torch.device("cpu")
DTYPES = list(FORMATS)
MAX_LENGTH = 300
needs_compiler = pytest.mark.skipif(library_for(torch.float32) is None, reason="there is no C for this machine")


@pytest.fixture
def made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The empty cache in which libraries are made."""
    monkeypatch.setenv("STREAMRL_CACHE", str(tmp_path))
    library_for.cache_clear()
    yield tmp_path
    library_for.cache_clear()


@pytest.fixture
def compiler_of(made_anew: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Have a shell script compile; it notes its calls in the file that is returned."""

    def use(script: str) -> Path:
        calls, compiler = made_anew / "calls", made_anew / "compiler"
        compiler.write_text(f'#!/bin/sh\necho "$*" >> {shlex.quote(str(calls))}\n{script}\n')
        compiler.chmod(0o755)
        monkeypatch.setenv("CC", shlex.quote(str(compiler)))
        return calls

    return use


def compilations(calls: Path) -> int:
    return sum("-shared" in call for call in calls.read_text().splitlines())


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    compute_with(request.param)
    yield
    compute_with(before)


def shape(*, heads: int = 4, kv_heads: int = 2, head_dim: int = 32) -> dict[str, Any]:
    rotation = rotation_table(Rope(theta=10000.0), head_dim, MAX_LENGTH)
    return {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "eps": 1e-5, "rotation": rotation}


def in_c(dtype: torch.dtype, a: dict[str, Any]) -> Operations:
    operations = operations_for(**a, dtype=dtype, device=CPU)
    assert isinstance(operations, NativeOperations)
    return operations


def in_torch(dtype: torch.dtype, a: dict[str, Any]) -> Operations:
    """In float32, with the rotations of `dtype`."""
    return TorchOperations(**a | {"rotation": a["rotation"].to(dtype).float()}, dtype=torch.float32, device=CPU)


def places(pieces: Sequence[SlotSpan]) -> tuple[Tensor, Tensor]:
    """Slots and positions of their tokens."""
    found = [(piece.slot, piece.cached + i) for piece in pieces for i in range(piece.new)]
    slots, positions = torch.tensor(found).unbind(1)
    return slots, positions


def close(found: Tensor, expected: Tensor, dtype: torch.dtype, *, exponents: float = 1.0) -> bool:
    """To rounding: of float32 sums, and of exponents of about this size, or of a bfloat16 result."""
    assert found.dtype == dtype
    tolerance = exponents * (2e-5 + 2e-5 * expected.abs()) if dtype == torch.float32 else 1e-3 + expected.abs() / 128
    return bool(((found - expected).abs() <= tolerance).all())


@needs_compiler
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=60, deadline=None)
@given(data=st.data(), head_dim=st.sampled_from(HEAD_DIMS), kv_heads=st.integers(1, 3), seed=st.integers(0, 2**32 - 1))
def test_attention(data: st.DataObject, dtype: torch.dtype, head_dim: int, kv_heads: int, seed: int) -> None:
    a = shape(heads=kv_heads * data.draw(st.integers(1, 11)), kv_heads=kv_heads, head_dim=head_dim)
    slots = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=5, unique=True))
    most = data.draw(st.sampled_from([1, 40]))
    pieces = [SlotSpan(slot, data.draw(st.integers(0, 250)), data.draw(st.integers(1, most))) for slot in slots]
    of, positions = places(pieces)
    generator = torch.Generator().manual_seed(seed)
    spread = data.draw(st.sampled_from([0.1, 1.0, 30.0]))
    qkv = torch.randn(len(of), a["heads"] + 2 * kv_heads, head_dim, generator=generator).to(dtype)
    qkv[:, : a["heads"]] *= spread
    layer = torch.randn(7, MAX_LENGTH, 2 * kv_heads, head_dim, generator=generator).to(dtype)
    layer[of, positions] = qkv[:, a["heads"] :]
    found = in_c(dtype, a).attend(of, positions, pieces)(qkv, layer)
    for i, (slot, position) in enumerate(zip(of.tolist(), positions.tolist(), strict=True)):
        held = layer[slot, : position + 1].double().transpose(0, 1)
        keys, values = held.repeat_interleave(a["heads"] // kv_heads, 0).chunk(2)
        scores = (keys @ qkv[i, : a["heads"], :, None].double())[..., 0] * head_dim**-0.5
        expected = (scores.softmax(-1)[:, None] @ values)[:, 0].flatten()
        assert close(found[i], expected, dtype, exponents=max(1.0, spread))
    for copies in (False, True):
        by_torch = TorchOperations(**a, dtype=dtype, device=CPU, copies_cache=copies)
        assert torch.allclose(
            by_torch.attend(of, positions, pieces)(qkv, layer).float(),
            found.float(),
            rtol=1e-4 if dtype == torch.float32 else 2e-2,
            atol=1e-3 if dtype == torch.float32 else 5e-2,
        )


@needs_compiler
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 70),
    width=st.integers(1, 700),
    scale=st.sampled_from([1e-6, 1.0, 100.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_norm(dtype: torch.dtype, rows: int, width: int, scale: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = (scale * torch.randn(rows, 2 * width, generator=generator)).to(dtype)
    weight = torch.randn(2 * width, generator=generator).to(dtype)
    a = shape()
    operations = in_c(dtype, a)
    expected = F.rms_norm(x.double(), (2 * width,), weight.double(), a["eps"])
    assert close(operations.rms_norm(x, weight), expected, dtype)
    heads = x.view(rows, 2, width)[:, 1:]
    expected = F.rms_norm(heads.double(), (width,), weight[:width].double(), a["eps"])
    assert close(operations.rms_norm(heads, weight[:width]), expected, dtype)


@needs_compiler
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=40, deadline=None)
@given(data=st.data(), head_dim=st.sampled_from(HEAD_DIMS), seed=st.integers(0, 2**32 - 1))
def test_rotating_and_storing(data: st.DataObject, dtype: torch.dtype, head_dim: int, seed: int) -> None:
    a = shape(heads=6, kv_heads=2, head_dim=head_dim)
    tokens, slots = data.draw(st.integers(1, 40)), 3
    generator = torch.Generator().manual_seed(seed)
    qkv = torch.randn(tokens, 10, head_dim, generator=generator).to(dtype)
    layer = torch.randn(slots, MAX_LENGTH, 4, head_dim, generator=generator).to(dtype)
    positions = torch.randint(MAX_LENGTH, (tokens,), generator=generator)
    rows = torch.randperm(slots * MAX_LENGTH, generator=generator)[:tokens]
    expected, expected_layer = qkv.float(), layer.float()
    in_torch(dtype, a).rotate_and_store(positions, rows)(expected, expected_layer)
    values = qkv[:, 8:].clone()
    in_c(dtype, a).rotate_and_store(positions, rows)(qkv, layer)
    assert close(qkv, expected, dtype)
    assert close(layer, expected_layer, dtype)
    assert torch.equal(qkv[:, 8:], values)
    assert torch.equal(layer.flatten(0, 1)[rows], qkv[:, 6:])


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
def test_extremes(dtype: torch.dtype) -> None:
    """No score is too large, nothing overflows, and what is broken is not hidden."""
    a = shape()
    operations = in_c(dtype, a)
    values = [0.0, -0.0, 20.0, -20.0, 88.0, -88.0, 1000.0, -1000.0, 1e30, -1e30, 3e-39, math.nan]
    gates, ones = torch.tensor(values, dtype=dtype)[:, None], torch.ones(len(values), 1, dtype=dtype)
    gate_and_one = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=dtype)  # the first input is the gate
    packed = module.pack(gate_and_one, gated=True)
    found = module.packed_gated_product(torch.cat([gates, ones], 1), packed, 1)
    rtol = 1e-2 if dtype == torch.bfloat16 else 1e-6
    assert torch.allclose(found.double(), F.silu(gates.double()), rtol=rtol, atol=1e-30, equal_nan=True)
    x = torch.ones(2, 64, dtype=dtype)
    x[1, 3] = math.nan
    assert operations.rms_norm(x, torch.ones(64, dtype=dtype)).isnan().any(-1).tolist() == [False, True]
    qkv, layer = torch.full((3, 8, 32), 1e4, dtype=dtype), torch.full((3, 80, 4, 32), 1e4, dtype=dtype)
    layer[0, 50], layer[1, 2], layer[2, 79] = -1e4, math.nan, math.nan
    pieces = [SlotSpan(0, 79, 1), SlotSpan(1, 79, 1), SlotSpan(2, 78, 1)]
    found = operations.attend(*places(pieces), pieces)(qkv, layer)
    assert (found[0] == layer[0, 0, 0, 0]).all()  # all the weight is on the others
    assert found[1].isnan().all()
    assert not found[2].isnan().any()  # it lies behind the end


@needs_compiler
def test_they_are_made_once(made_anew: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For each compiler, however it is named."""
    before: dict[Path, int] = {}
    for compiler, count in (("", 1), (" ", 1), ("cc", 1), ("env cc", 2), ("", 2)):
        monkeypatch.setenv("CC", compiler)
        library_for.cache_clear()
        assert library_for(torch.float32) is not None
        made = {path: path.stat().st_mtime_ns for path in made_anew.glob("layers-*")}
        assert [path.suffix for path in made] == [".so"] * count
        assert before.items() <= made.items()
        before = made


@needs_compiler
def test_of_several_processes_one_makes_them(made_anew: Path, compiler_of: Callable[[str], Path]) -> None:
    calls = compiler_of('exec cc "$@"')
    code = "import torch; from streamrl.native.operations import library_for\nassert library_for(torch.bfloat16)"
    processes = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert len(list(made_anew.glob("layers-*"))) == 1
    assert compilations(calls) == 1


@pytest.mark.parametrize(
    ("compiler", "message"),
    [("false", "has failed"), ("no-such-compiler", "there is no C compiler (no-such-compiler)")],
)
def test_without_a_compiler_torch_computes(
    compiler: str, message: str, made_anew: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setattr(module, "has_instructions", lambda name: True)
    operations = operations_for(**shape(), dtype=torch.float32, device=CPU)
    assert isinstance(operations, TorchOperations)
    assert message in caplog.text
    assert not list(made_anew.iterdir())


def test_what_cannot_be_compiled_is_tried_once(compiler_of: Callable[[str], Path]) -> None:
    calls = compiler_of('[ "$1" = --version ] || { echo too hard >&2; exit 1; }')
    for _ in range(3):
        with pytest.raises(Unavailable, match="too hard"):
            shared_library([module.FOLDER / "sums.c"])
    assert compilations(calls) == 1


def test_what_took_too_long_to_compile_is_tried_again(
    made_anew: Path, compiler_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "COMPILE_SECONDS", 1.0)
    compiler_of('[ "$1" = --version ] || exec sleep 60')
    with pytest.raises(Unavailable, match="did not end within 1 s"):
        shared_library([module.FOLDER / "sums.c"])
    assert not list(made_anew.glob("*.failed"))


def test_a_library_is_on_the_disk_before_it_is_in_its_place(
    compiler_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty one, after a loss of power, would be taken for ever."""
    compiler_of('for last; do :; done\n[ "$1" = --version ] || echo compiled > "$last"')
    on_disk: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: on_disk.append(os.fstat(descriptor).st_ino))
    library = shared_library([module.FOLDER / "sums.c"])
    assert on_disk == [library.stat().st_ino]


def test_a_processor_without_long_vectors_computes_in_torch(
    made_anew: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "has_instructions", lambda name: name != "avx512f")
    with caplog.at_level("INFO"):
        assert library_for(torch.float32) is None
    assert "processors with avx512f" in caplog.text
    assert not list(made_anew.iterdir())


@pytest.mark.skipif(sys.platform != "linux", reason="Linux says what its processor has")
def test_what_the_processor_has_is_read_word_by_word() -> None:
    flags = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")).split()
    assert has_instructions(flags[-1])
    assert not has_instructions(flags[-1][:-1]) or flags[-1][:-1] in flags
    assert not has_instructions("no_such_instructions")


def test_the_switch_turns_everything_off(made_anew: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "0")
    assert library_for(torch.float32) is None
    assert not module.has_native_products(torch.bfloat16)
    assert module.native_add_sums.__wrapped__() is None
    assert not list(made_anew.iterdir())


@needs_compiler
@pytest.mark.parametrize(
    ("right", "wrong", "what"),
    [
        ("p = p * r + 0.5f;", "p = p * r + 0.6f;", "attention"),
        ("b * load(sines + i));", "b);", "rotation"),
        ("/ (float)width", "", "norm"),
        ("+ head * head_dim, *values", "+ head, *values", "attention"),
    ],
)
def test_what_is_wrong_is_not_used(
    right: str,
    wrong: str,
    what: str,
    made_anew: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(build, "FLAGS", ["-O1" if flag == "-O3" else flag for flag in build.FLAGS])  # sooner compiled
    texts = {file.name: file.read_text() for file in (module.HEADER, *module.SOURCES)}
    assert sum(right in text for text in texts.values()) == 1
    for name, text in texts.items():
        made_anew.joinpath(name).write_text(text.replace(right, wrong))
    monkeypatch.setattr(module, "HEADER", made_anew / module.HEADER.name)
    monkeypatch.setattr(module, "SOURCES", [made_anew / file.name for file in module.SOURCES])
    assert library_for(torch.float32) is None
    assert f"is wrong: {what} is off by" in caplog.text


def test_torch_does_what_there_is_no_code_for() -> None:
    operations = operations_for(**shape(head_dim=16), dtype=torch.float32, device=CPU)
    assert isinstance(operations, TorchOperations)


def test_sums_that_are_wrong_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("STREAMRL_CACHE", str(tmp_path))
    wrong = tmp_path / "sums.c"
    wrong.write_text((module.FOLDER / "sums.c").read_text().replace("row < rows; row++", "row > rows;"))
    try:
        library = shared_library([wrong])
    except Unavailable as reason:
        pytest.skip(str(reason))
    with patch.object(module, "shared_library", lambda _: library):
        assert module.native_add_sums.__wrapped__() is None
    assert "the compiled code is wrong" in caplog.text
