"""Packed products equal plain ones, the fastest library that is right makes them, and packing goes on beside others."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from streamrl.gserver.embedded import products as module
from streamrl.gserver.embedded.products import (
    LIBRARIES,
    MKL,
    Matrix,
    Native,
    OneDNN,
    Packer,
    ProductLibrary,
    can_pack,
    choose_library,
    packs,
)

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
needs_packing = pytest.mark.skipif(not can_pack(torch.float32), reason="this torch has no packed products")
HERE = [library for library in LIBRARIES if library.can(torch.float32)]
"""The libraries that there are for this machine."""
needs_both = pytest.mark.skipif(
    not (OneDNN().can(torch.float32) and MKL().can(torch.float32)), reason="this torch lacks one of the libraries"
)


@pytest.fixture
def tried_anew():
    choose_library.cache_clear()
    yield
    choose_library.cache_clear()


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    rows=st.integers(1, 400),
    outputs=st.integers(1, 300),
    inputs=st.integers(1, 700),
    biased=st.booleans(),
    adding=st.booleans(),
    sliced=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_packed_product_is_the_plain_one(
    library: ProductLibrary,
    dtype: torch.dtype,
    rows: int,
    outputs: int,
    inputs: int,
    biased: bool,
    adding: bool,
    sliced: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
    bias = torch.randn(outputs, generator=generator).to(dtype) if biased else None
    x = torch.randn(rows, inputs + 3, generator=generator).to(dtype)
    x = x[:, :inputs] if sliced else x[:, :inputs].contiguous()
    added = torch.randn(rows, outputs + 1, generator=generator).to(dtype)[:, :outputs] if adding else None
    matrix = Matrix(weight)
    if library.can(dtype):
        matrix.pack(library)
    expected = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    product = matrix(x, bias, added=added)
    assert is_close(product, expected if added is None else expected + added.float(), dtype)


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
@settings(max_examples=40, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    rows=st.integers(1, 100),
    outputs=st.integers(1, 160),
    inputs=st.integers(1, 300),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_packed_gated_product_is_the_plain_one(
    library: ProductLibrary, dtype: torch.dtype, rows: int, outputs: int, inputs: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(2 * outputs, inputs, generator=generator) * inputs**-0.5).to(dtype)
    x = torch.randn(rows, inputs, generator=generator).to(dtype)
    matrix = Matrix(weight, gated=True)
    if library.can(dtype):
        matrix.pack(library)

    gate, up = F.linear(x.float(), weight.float()).chunk(2, -1)
    assert is_close(matrix.gated(x), F.silu(gate) * up, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 8, 21, 64])
def test_a_row_does_not_depend_on_those_it_is_computed_with(dtype: torch.dtype, rows: int) -> None:
    if not Native().can(dtype):
        pytest.skip("there is no C for this machine")
    matrix = Matrix(torch.randn(100, 129).to(dtype))
    matrix.pack(Native())
    x = torch.randn(70, 129).to(dtype)
    assert torch.equal(matrix(x)[5 : 5 + rows], matrix(x[5 : 5 + rows]))


def is_close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    assert found.dtype == dtype
    assert found.is_contiguous()
    error = (found - expected).abs()
    return bool((error <= (2e-4 if dtype == torch.float32 else 4e-2 + expected.abs() / 128)).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.usefixtures("tried_anew")
def test_one_is_found_where_there_is_one(dtype: torch.dtype, deterministic: bool) -> None:
    found = choose_library(dtype, 1, deterministic=deterministic)
    assert (found is not None) == can_pack(dtype)


@needs_both
@pytest.mark.parametrize("slow", HERE, ids=lambda library: library.name)
@pytest.mark.usefixtures("tried_anew")
def test_the_fastest_is_taken_unless_all_processes_have_to_take_the_same(
    slow: ProductLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_seconds", lambda library, dtype: 2.0 if library is slow else 1.0)
    found = choose_library(torch.float32, 1)
    assert found is not None
    assert found is not slow
    assert choose_library(torch.float32, 1, deterministic=True) is HERE[0]


@needs_both
@pytest.mark.parametrize("wrong", HERE, ids=lambda library: library.name)
@pytest.mark.parametrize("wrong_from", [4, 257])
@pytest.mark.usefixtures("tried_anew")
def test_a_wrong_product_is_noticed_and_the_other_library_taken(
    wrong: ProductLibrary, wrong_from: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = wrong.product

    def product(x: Tensor, packed: Tensor, weight: Tensor) -> Tensor:
        answer = right(x, packed, weight)
        if x.shape[0] >= wrong_from:
            answer[-1, -1] = float("nan")
        return answer

    monkeypatch.setattr(wrong, "product", product)
    with caplog.at_level(logging.WARNING):
        found = choose_library(torch.float32, 1)
    assert found is not None
    assert found is not wrong
    assert f"{wrong.name} packs no matrices here" in caplog.text
    assert f"product of {wrong_from} rows" in caplog.text


@pytest.mark.skipif(not OneDNN().can(torch.float32), reason="this torch has no oneDNN")
def test_packed_copies_are_used_and_forgotten() -> None:
    weight, x = torch.randn(64, 32), torch.randn(8, 32)
    matrix = Matrix(weight)
    matrix.pack(OneDNN())
    before = matrix(x)
    weight.zero_()
    assert torch.equal(matrix(x), before)  # nothing says that the weights have changed: this is the packed copy's
    matrix.unpack()
    assert not matrix(x).any()
    matrix.pack(OneDNN())
    assert not matrix(x).any()


@needs_packing
def test_what_is_packed() -> None:
    assert packs(numbers=1000, dtype=torch.float32, device=CPU)
    assert packs(numbers=1000, dtype=torch.bfloat16, device=CPU) == can_pack(torch.bfloat16)
    assert not packs(numbers=1000, dtype=torch.float16, device=CPU)
    assert not packs(numbers=1000, dtype=torch.float32, device=torch.device("cuda"))


@needs_packing
def test_a_host_with_little_memory_packs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert not packs(numbers=10**15, dtype=torch.float32, device=CPU)
    assert "7450580.6 GiB" in caplog.text


@needs_packing
def test_without_memory_for_one_the_others_are_not_tried(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    library = choose_library(torch.float32, 1)  # tried with memory
    assert library is not None
    matrices = [Matrix(torch.randn(8, 8)) for _ in range(5)]
    packer = Packer(threads=1)
    with monkeypatch.context() as patched:

        def no_memory(weight: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("not enough memory")

        patched.setattr(library, "pack", no_memory)
        packer.start(matrices)
        packer.finish()
    assert not any(matrix.packed for matrix in matrices)
    assert caplog.text.count("not enough memory") == 1
    packer.start(matrices)
    packer.finish()
    assert all(matrix.packed for matrix in matrices)
