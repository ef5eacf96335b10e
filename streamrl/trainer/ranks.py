"""This process among the model workers, and what all of them add up.

The ranks meet in torch's default process group. Sums are over the DP heads, which alone hold
distinct data; every rank takes part and gets the same sum.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from streamrl.trainer.layout import Layout


class Ranks:
    """One rank of a layout."""

    def __init__(self, layout: Layout, rank: int, *, device: torch.device) -> None:
        self.layout = layout
        self.rank = rank
        self.coordinates = layout.coordinates(rank)
        self._device = device

    @property
    def is_head(self) -> bool:
        """Whether this rank gives its data-parallel rank's output."""
        return self.rank == self.layout.head(self.coordinates.data)

    def add_up(self, values: Tensor) -> Tensor:
        """`values` of all heads, added; the others' do not count. Collective."""
        if self.layout.world == 1:
            return values
        total = values.to(self._device, copy=True) if self.is_head else torch.zeros_like(values, device=self._device)
        dist.all_reduce(total)
        return total.cpu()
