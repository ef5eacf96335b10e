"""Packed products are the plain ones, and are done without where they are not."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.gserver.embedded import linear
from streamrl.gserver.embedded.linear import Matrix, has_packed_products, packs, packs_exactly

CPU = torch.device("cpu")
needs_packing = pytest.mark.skipif(not has_packed_products(), reason="this torch has no packed products")


@pytest.fixture
def tried_anew():
    packs_exactly.cache_clear()
    yield
    packs_exactly.cache_clear()


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 400),
    outputs=st.integers(1, 300),
    inputs=st.integers(1, 700),
    biased=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_packed_product_is_the_plain_one(rows: int, outputs: int, inputs: int, biased: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight, bias = torch.randn(outputs, inputs, generator=generator), torch.randn(outputs, generator=generator)
    x = torch.randn(rows, inputs, generator=generator)
    matrix = Matrix(weight)
    if has_packed_products():
        matrix.pack()
    expected = F.linear(x, weight, bias if biased else None)
    assert torch.allclose(matrix(x, bias if biased else None), expected, atol=2e-4)


@needs_packing
def test_packed_copies_are_used_and_forgotten() -> None:
    weight, x = torch.randn(64, 32), torch.randn(8, 32)
    matrix = Matrix(weight)
    matrix.pack()
    before = matrix(x)
    weight.zero_()
    assert torch.equal(matrix(x), before)  # nothing says that the weights have changed: this is the packed copy's
    matrix.unpack()
    assert not matrix(x).any()
    matrix.pack()
    assert not matrix(x).any()


@needs_packing
def test_what_is_packed() -> None:
    assert packs(numbers=1000, dtype=torch.float32, device=CPU)
    assert not packs(numbers=1000, dtype=torch.bfloat16, device=CPU)
    assert not packs(numbers=1000, dtype=torch.float32, device=torch.device("cuda"))
    assert packs_exactly(1)


@needs_packing
def test_a_host_with_little_memory_packs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert not packs(numbers=10**15, dtype=torch.float32, device=CPU)
    assert "7450580.6 GiB" in caplog.text


@needs_packing
@pytest.mark.usefixtures("tried_anew")
@pytest.mark.parametrize("wrong_from", [4, 257])
def test_a_wrong_product_is_noticed(
    wrong_from: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = linear._packed_product

    def product(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        answer = right(x, *weights)
        if x.shape[0] >= wrong_from:
            answer[-1, -1] = float("nan")
        return answer

    monkeypatch.setattr(linear, "_packed_product", product)
    with caplog.at_level(logging.WARNING):
        assert not packs_exactly(1)
    assert f"product of {wrong_from} rows" in caplog.text
