"""Packed products are the plain ones, are done without where they are not, and the fastest library's are taken."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from streamrl.gserver.embedded import packing as module
from streamrl.gserver.embedded.linear import Matrix
from streamrl.gserver.embedded.packing import MKL, PACKINGS, Compiled, OneDNN, Packing, can_pack, packing_for

DTYPES = [torch.float32, torch.bfloat16]
needs_both = pytest.mark.skipif(
    not (OneDNN().can(torch.float32) and MKL().can(torch.float32)), reason="this torch lacks one of the libraries"
)


@pytest.fixture
def tried_anew():
    packing_for.cache_clear()
    yield
    packing_for.cache_clear()


@pytest.mark.parametrize("packing", PACKINGS, ids=lambda packing: packing.name)
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
    packing: Packing,
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
    if packing.can(dtype):
        matrix.pack(packing)
    expected = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    product = matrix(x, bias, added=added)
    assert is_close(product, expected if added is None else expected + added.float(), dtype)


@pytest.mark.parametrize("packing", PACKINGS, ids=lambda packing: packing.name)
@settings(max_examples=40, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    rows=st.integers(1, 100),
    outputs=st.integers(1, 160),
    inputs=st.integers(1, 300),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_packed_gated_product_is_the_plain_one(
    packing: Packing, dtype: torch.dtype, rows: int, outputs: int, inputs: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(2 * outputs, inputs, generator=generator) * inputs**-0.5).to(dtype)
    x = torch.randn(rows, inputs, generator=generator).to(dtype)
    matrix = Matrix(weight, gated=True)
    if packing.can(dtype):
        matrix.pack(packing)

    def silu_times(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up

    assert is_close(matrix.gated(x, silu_times), silu_times(F.linear(x.float(), weight.float())), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 8, 21, 64])
def test_a_row_does_not_depend_on_those_it_is_computed_with(dtype: torch.dtype, rows: int) -> None:
    if not Compiled().can(dtype):
        pytest.skip("there is no C compiler")
    matrix = Matrix(torch.randn(100, 129).to(dtype))
    matrix.pack(Compiled())
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
    found = packing_for(dtype, 1, deterministic=deterministic)
    assert (found is not None) == can_pack(dtype)


@needs_both
@pytest.mark.parametrize("slow", PACKINGS, ids=lambda packing: packing.name)
@pytest.mark.usefixtures("tried_anew")
def test_the_fastest_is_taken_unless_all_processes_have_to_take_the_same(
    slow: Packing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_seconds", lambda packing, dtype: 2.0 if packing is slow else 1.0)
    found = packing_for(torch.float32, 1)
    assert found is not None
    assert found is not slow
    assert packing_for(torch.float32, 1, deterministic=True) is PACKINGS[0]


@needs_both
@pytest.mark.parametrize("wrong", PACKINGS, ids=lambda packing: packing.name)
@pytest.mark.parametrize("wrong_from", [4, 257])
@pytest.mark.usefixtures("tried_anew")
def test_a_wrong_product_is_noticed_and_the_other_library_taken(
    wrong: Packing, wrong_from: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = wrong.product

    def product(x: Tensor, packed: Tensor, weight: Tensor) -> Tensor:
        answer = right(x, packed, weight)
        if x.shape[0] >= wrong_from:
            answer[-1, -1] = float("nan")
        return answer

    monkeypatch.setattr(wrong, "product", product)
    with caplog.at_level(logging.WARNING):
        found = packing_for(torch.float32, 1)
    assert found is not None
    assert found is not wrong
    assert f"{wrong.name} packs no matrices here" in caplog.text
    assert f"product of {wrong_from} rows" in caplog.text
