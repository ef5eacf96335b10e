"""What has changed of a tensor, and the new tensor made of it, to the bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from streamrl.delta import MOST_CHANGED, SAMPLE, Delta, apply, delta
from streamrl.errors import WireError
from streamrl.native.operations import INTEGERS

DTYPES = st.sampled_from([torch.bfloat16, torch.float16, torch.float32])


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Two tensors whose bits are any at all (NaNs of all kinds, infinities, both zeros), some of them equal."""
    dtype = draw(DTYPES)
    bits = st.integers(-(2 ** (8 * dtype.itemsize - 1)), 2 ** (8 * dtype.itemsize - 1) - 1)
    old = draw(st.lists(bits, min_size=1, max_size=200))
    changes = draw(st.dictionaries(st.integers(0, len(old) - 1), bits, max_size=max(1, len(old) // 5)))
    new = [changes.get(place, number) for place, number in enumerate(old)]
    integer = INTEGERS[dtype.itemsize]
    rows = draw(st.sampled_from([n for n in range(1, len(old) + 1) if len(old) % n == 0]))
    before, after = (torch.tensor(numbers, dtype=integer).view(dtype).view(rows, -1) for numbers in (old, new))
    return before, after


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(INTEGERS[tensor.element_size()])


@given(pairs())
def test_a_delta_that_is_applied_gives_the_new_tensor_to_the_bit(pair: tuple[Tensor, Tensor]) -> None:
    old, new = pair
    changed = int((bits(old) != bits(new)).count_nonzero())
    found = delta(old, new)
    if found is None:
        assert changed > MOST_CHANGED * old.numel()
        return
    assert len(found.places) == len(found.values) == changed <= MOST_CHANGED * old.numel()
    target = old.clone()
    apply(found, target)
    assert torch.equal(bits(target), bits(new))


def test_what_only_looks_equal_counts_as_changed_and_a_nan_does_not() -> None:
    old = torch.zeros(100, dtype=torch.bfloat16)
    old[7] = torch.nan
    new = old.clone()
    new[3] = -0.0
    found = delta(old, new)
    assert found is not None
    assert found.places.tolist() == [3]
    apply(found, old)
    assert torch.equal(bits(old), bits(new))


def test_a_large_tensor_that_has_changed_much_is_not_looked_at_in_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    old = torch.zeros(64 * SAMPLE)
    looked_at = 0
    differs = Tensor.__ne__

    def counted(self: Tensor, other: Tensor) -> Tensor:
        nonlocal looked_at
        looked_at += self.numel()
        return differs(self, other)

    monkeypatch.setattr(Tensor, "__ne__", counted)
    fifth = old.clone()
    fifth[::5] = 1
    for new in (old + 1, fifth):
        looked_at = 0
        assert delta(old, new) is None
        assert looked_at == 2 * SAMPLE
    half = old.clone()
    half[: len(old) // 2] = 1
    assert delta(old, half) is None
    half[len(old) // 20 :] = 0
    assert delta(old, half) is not None, "one end that has changed does not tell of all"


@pytest.mark.parametrize("place", [-1, 5])
def test_places_that_a_tensor_does_not_have_are_refused(place: int) -> None:
    target = torch.zeros(5)
    with pytest.raises(WireError, match=f"a delta has the places {place} to {place} of a tensor of 5 numbers"):
        apply(Delta(torch.tensor([place], dtype=torch.int32), torch.ones(1)), target)
    assert not target.any()
