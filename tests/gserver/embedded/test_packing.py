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
from streamrl.gserver.embedded.packing import MKL, PACKINGS, OneDNN, Packing, can_pack, packing_for

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
    sliced=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_packed_product_is_the_plain_one(
    packing: Packing, dtype: torch.dtype, rows: int, outputs: int, inputs: int, biased: bool, sliced: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
    bias = torch.randn(outputs, generator=generator).to(dtype) if biased else None
    x = torch.randn(rows, inputs + 3, generator=generator).to(dtype)
    x = x[:, :inputs] if sliced else x[:, :inputs].contiguous()
    matrix = Matrix(weight)
    if packing.can(dtype):
        matrix.pack(packing)
    expected = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    product = matrix(x, bias)
    assert product.dtype == dtype
    assert product.is_contiguous()
    error = (product - expected).abs()
    exact = dtype == torch.float32
    assert (error <= (2e-4 if exact else 2e-2 + expected.abs() / 128)).all()


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

    def product(x: Tensor, packed: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        answer = right(x, packed, weight, bias)
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
