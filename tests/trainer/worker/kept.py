"""Where a receiver of tests keeps what comes."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from streamrl.checksum import LineSums, line_sums


class Kept:
    """Keeps what comes; a `WeightsAside`."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def store(self, name: str, tensor: Tensor) -> LineSums:
        self.tensors[name] = tensor.clone()
        return line_sums(tensor)

    def place(self, name: str) -> Tensor | None:
        return None

    def sums(self, name: str) -> LineSums:
        return line_sums(self.tensors[name])

    def adopt(self, weights: Mapping[str, Tensor]) -> bool:
        return False

    def forget(self) -> None:
        self.tensors.clear()

    def make_ready(self) -> None:
        """There is nothing to do."""
