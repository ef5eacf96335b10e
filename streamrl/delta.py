"""What has changed of a tensor, as indices and values.

Numbers are compared by their bits: a NaN is equal to itself, and the two zeros differ. So `apply` of a delta gives the
new tensor to the bit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from streamrl.errors import WireError
from streamrl.native.operations import INTEGERS

MOST_CHANGED = 0.1
"""Share of the numbers of a tensor from which on it is not worth while: an index takes more room than a number."""
SAMPLE = 4096
"""Numbers at either end of a tensor that are looked at before all are."""
SURELY = 1.5
"""More of both samples than this times `MOST_CHANGED` is taken for more than `MOST_CHANGED` of all."""


class Delta(NamedTuple):
    """The numbers of a tensor that have changed."""

    places: Tensor
    """int32 `[changed]`, ascending: where they are in the flat tensor."""
    values: Tensor
    """`[changed]`, in the tensor's dtype."""


def delta(old: Tensor, new: Tensor) -> Delta | None:
    """Return what makes `new` of `old`, both contiguous and of one shape and dtype; None where that is more than
    `MOST_CHANGED` of it, or of a tensor whose places are no int32."""
    before, after = _bits(old), _bits(new)
    if len(after) > torch.iinfo(torch.int32).max or _has_changed_much(before, after):
        return None
    index = (before != after).nonzero().flatten()
    if len(index) > MOST_CHANGED * len(after):
        return None
    return Delta(index.int(), new.reshape(-1)[index])


def apply(changes: Delta, target: Tensor) -> None:
    """Write `changes` to `target`, which is contiguous. Raises `WireError` for a place that it does not have."""
    if not len(changes.places):
        return
    lowest, highest = (int(bound) for bound in changes.places.aminmax())
    if lowest < 0 or highest >= target.numel():
        raise WireError(f"a delta has the places {lowest} to {highest} of a tensor of {target.numel()} numbers")
    _bits(target).index_copy_(0, changes.places.long(), _bits(changes.values))


def _has_changed_much(before: Tensor, after: Tensor) -> bool:
    """Whether samples of both ends say so."""
    if len(after) < 8 * SAMPLE:
        return False
    ends = (slice(None, SAMPLE), slice(-SAMPLE, None))
    return all(int((before[end] != after[end]).count_nonzero()) > SURELY * MOST_CHANGED * SAMPLE for end in ends)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(INTEGERS[tensor.element_size()])
