"""Checksums of weights: any error shows, and what computes them does not."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from streamrl import checksum
from streamrl.checksum import checksums, copy_and_sum, tensor_sums
from streamrl.native.operations import native_add_sums

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.uint8]


@pytest.fixture(params=["C", "torch", "torch as on a GPU"])
def made_by(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "C":
        if native_add_sums() is None:
            pytest.skip("there is no C compiler")
        yield "C"
    else:
        on_gpu = request.param != "torch"
        with (
            patch.object(checksum, "native_add_sums", lambda: None),
            patch.object(checksum, "has_cache", lambda device: not on_gpu),
        ):
            yield request.param


def expected(tensor: Tensor) -> str:
    """The checksum by numpy, as `tensor_sums` describes it."""
    bits = tensor.flatten().view(torch.uint8).numpy().tobytes()
    width = np.dtype(f"u{tensor.element_size()}")
    matrix = np.frombuffer(bits, width).reshape(tensor.shape[0] if tensor.dim() > 1 else 1, -1)
    name = str(tensor.dtype).removeprefix("torch.")
    digest = hashlib.blake2b(f"{name}{list(tensor.shape)}".encode(), digest_size=16)
    digest.update(matrix.sum(0, dtype=width).tobytes())
    digest.update(matrix.sum(1, dtype=width).tobytes())
    return digest.hexdigest()


def some(*shape: int, dtype: torch.dtype) -> Tensor:
    if dtype == torch.uint8:
        return torch.randint(256, shape, dtype=dtype)
    return torch.randn(shape).to(dtype)


@pytest.mark.usefixtures("made_by")
@given(st.integers(1, 60), st.integers(1, 300), st.sampled_from(DTYPES), st.sampled_from(["matrix", "flat", "cube"]))
def test_the_sums_are_those_of_rows_and_columns(rows: int, columns: int, dtype: torch.dtype, form: str) -> None:
    shape = {"matrix": (rows, columns), "flat": (rows * columns,), "cube": (rows, 2, columns)}[form]
    tensor = some(*shape, dtype=dtype)
    assert tensor_sums(tensor) == expected(tensor)


@pytest.mark.usefixtures("made_by")
@given(st.integers(0, 14), st.integers(1, 2**32 - 1))
def test_any_error_in_one_number_changes_the_sums(place: int, flips: int) -> None:
    tensor = torch.arange(15.0).view(5, 3)
    bits = tensor.clone().view(torch.int32)
    bits.view(-1)[place] ^= flips - 2**32 if flips >= 2**31 else flips
    assert tensor_sums(bits.view(torch.float32)) != tensor_sums(tensor)


@pytest.mark.usefixtures("made_by")
def test_sums_do_not_depend_on_the_layout_but_on_the_order() -> None:
    tensor = torch.randn(6, 8)
    assert tensor_sums(tensor.t().contiguous().t()) == tensor_sums(tensor)
    assert tensor_sums(tensor.flip(0)) != tensor_sums(tensor)
    assert tensor_sums(tensor.t()) != tensor_sums(tensor)
    assert tensor_sums(tensor.bfloat16()) != tensor_sums(tensor)
    assert tensor_sums(torch.arange(5.0)) != tensor_sums(torch.arange(5.0).flip(0))


@pytest.mark.usefixtures("made_by")
@given(st.integers(1, 300), st.integers(1, 70), st.sampled_from([torch.float32, torch.bfloat16]), st.booleans())
def test_a_copy_has_the_sums_of_what_it_is_copied_to(rows: int, columns: int, dtype: torch.dtype, flat: bool) -> None:
    source = torch.randn(rows * columns) if flat else torch.randn(columns, rows).t()
    target = torch.zeros(source.shape, dtype=dtype)
    with patch.object(checksum, "PIECE_BYTES", 64):
        returned = checksums({"a": copy_and_sum(target, source)})["a"]
    assert torch.equal(target, source.to(dtype))
    assert returned == expected(source.to(dtype))
