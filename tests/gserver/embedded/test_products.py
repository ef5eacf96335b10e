"""Packed products equal plain ones, the fastest library that is right makes them, and packing goes on beside others."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from streamrl.gserver.embedded.products import (
    LIBRARIES,
    Matrix,
    Native,
    OneDNN,
    ProductLibrary,
)

DTYPES = [torch.float32, torch.bfloat16]


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
