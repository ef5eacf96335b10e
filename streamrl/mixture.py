"""The order in which the tasks of a run take turns: a pure function of the sequence number."""

from __future__ import annotations

import math
from collections.abc import Mapping

from streamrl.config import Config


class Mixture:
    """Smooth weighted round-robin over tasks.

    In each cycle of as many groups as the weights add up to, divided by their greatest common divisor, a task has
    groups in proportion to its weight, spread evenly. So the weights hold over any stretch of sequence numbers, up to
    one group for each task.
    """

    def __init__(self, weights: Mapping[str, int]) -> None:
        """`weights`: positive weights by the names of the tasks. Without [[tasks]] there is one, with an empty name."""
        self.names = list(weights)
        divisor = math.gcd(*weights.values())
        self._shares = {name: weight // divisor for name, weight in weights.items()}
        self._cycle: list[tuple[str, int]] = []
        """Task of each place of a cycle, and the number of its earlier places."""
        length = sum(self._shares.values())
        credit, taken = dict.fromkeys(self.names, 0), dict.fromkeys(self.names, 0)
        for _ in range(length):
            for name, share in self._shares.items():
                credit[name] += share
            chosen = max(self.names, key=credit.__getitem__)
            credit[chosen] -= length
            self._cycle.append((chosen, taken[chosen]))
            taken[chosen] += 1

    @classmethod
    def of(cls, config: Config) -> Mixture:
        """Return the order of the tasks of `config`."""
        return cls({task.name: task.weight for task in config.tasks} or {"": 1})

    def task(self, seq: int) -> str:
        """Return the name of the task of sequence number `seq`."""
        return self._cycle[seq % len(self._cycle)][0]

    def position(self, seq: int) -> int:
        """Return how many earlier sequence numbers have the task of `seq`."""
        cycle, place = divmod(seq, len(self._cycle))
        name, before = self._cycle[place]
        return cycle * self._shares[name] + before
