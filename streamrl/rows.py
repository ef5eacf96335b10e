"""The rows that `data.sampler` chooses, and the results by which it chooses them.

Without a sampler the row of a group is a pure function of its sequence number. With one, the controller chooses the row
before the group starts, and sends it with the admission. Pure state, except for `serve_sampler`, which runs in a child
process.

Invariants: a sequence number keeps its row until its group is trained on or rejected, also when the run goes back to a
checkpoint or is resumed from one; the result of a group counts once.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from streamrl.hooks import load_hook
from streamrl.userland import UserFunction


class RowResult(msgspec.Struct, frozen=True, array_like=True):
    """The results of one row's groups that were trained on, or left out by `rollout.filter`."""

    groups: int
    reward_sum: float
    """Sum of the groups' mean rewards."""
    latest: float
    """Mean reward of the latest group."""


class RowsState(msgspec.Struct, frozen=True):
    """Chosen rows and results, as a checkpoint records them; empty without a sampler."""

    chosen: dict[int, int] = {}
    """Row of each sequence number that is open, or that starts next."""
    results: dict[str, dict[int, RowResult]] = {}
    """Results by task and row."""


class ChosenRows:
    """The rows of sequence numbers, and the results of rows."""

    def __init__(self, task: Callable[[int], str] = lambda seq: "") -> None:
        """`task` returns the name of the task of a sequence number."""
        self._task = task
        self.chosen: dict[int, int] = {}
        """As in `RowsState`; empty without a sampler."""
        self.results: dict[str, dict[int, RowResult]] = {}

    def state(self) -> RowsState:
        """Return a copy for a checkpoint."""
        return RowsState(dict(self.chosen), {task: dict(results) for task, results in self.results.items()})

    def restore(self, state: RowsState) -> None:
        """Continue from a checkpoint. Rows of later sequence numbers stay: rollout workers may have their groups."""
        self.chosen |= state.chosen
        self.results = {task: dict(results) for task, results in state.results.items()}

    def close(self, seq: int, reward: float | None) -> None:
        """Forget the row of `seq`, and count the mean reward of its group, unless it has none."""
        row = self.chosen.pop(seq, None)
        if row is None or reward is None:
            return
        results = self.results.setdefault(self._task(seq), {})
        before = results.get(row, RowResult(0, 0.0, 0.0))
        results[row] = RowResult(before.groups + 1, before.reward_sum + reward, reward)

    def request(self, seqs: Sequence[int], *, rows: int, seed: int) -> SamplerRequest:
        """Return the request for the rows of `seqs`, all of one task, whose data set has `rows` rows."""
        task = self._task(seqs[0])
        under_way = Counter(row for seq, row in self.chosen.items() if self._task(seq) == task)
        return SamplerRequest(rows, list(seqs), seed, self.results.get(task, {}), dict(under_way))


class SamplerRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request to the child process: choose one row for each of `seqs`."""

    rows: int
    seqs: list[int]
    seed: int
    results: dict[int, RowResult]
    under_way: dict[int, int]
    """Row → number of its open groups."""


@dataclass(frozen=True)
class RowResults:
    """The results of all rows of the data set so far; each array has the shape `[rows]`."""

    groups: NDArray[np.int32]
    """Finished groups."""
    rewards: NDArray[np.float32]
    """Mean reward over all groups; NaN without any."""
    latest: NDArray[np.float32]
    """Mean reward of the latest group; NaN without any."""
    under_way: NDArray[np.int32]
    """Groups that have started and are not finished."""

    @classmethod
    def of(cls, rows: int, results: Mapping[int, RowResult], under_way: Mapping[int, int]) -> RowResults:
        """Return the arrays of a data set of `rows` rows."""
        groups, running = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
        rewards, latest = np.full(rows, np.nan, np.float32), np.full(rows, np.nan, np.float32)
        for row, result in results.items():
            groups[row], latest[row] = result.groups, result.latest
            rewards[row] = result.reward_sum / result.groups
        for row, count in under_way.items():
            running[row] = count
        return cls(groups, rewards, latest, running)


def serve_sampler(*, function: str, args: dict[str, Any]) -> UserFunction:
    """Return the sampler for its child process (`userland.SetupMessage.loader`)."""
    choose = load_hook(function, key="data.sampler", args=args)
    decoder = msgspec.msgpack.Decoder(SamplerRequest)

    def sample(request: SamplerRequest) -> list[int]:
        results = RowResults.of(request.rows, request.results, request.under_way)
        key = f"rows/{request.seed}/{request.seqs[0]}".encode()
        random = np.random.default_rng(int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little"))
        found = [int(row) for row in choose(results, len(request.seqs), random)]
        if len(found) != len(request.seqs) or not all(0 <= row < request.rows for row in found):
            raise ValueError(
                f"it returned {found!s:.200}: return {len(request.seqs)} rows, each from 0 to {request.rows - 1}"
            )
        return found

    return UserFunction(sample, arguments=lambda payload: (decoder.decode(payload),), result=lambda rows: rows)


def try_sampler(function: str, args: dict[str, Any]) -> None:
    """Choose rows by made-up results; raises `ConfigError` or `ValueError` if the sampler does not fit."""
    results = {row: RowResult(groups=1 + row % 3, reward_sum=row / 8, latest=row / 8) for row in range(8)}
    serve_sampler(function=function, args=args).function(SamplerRequest(16, list(range(4)), 0, results, {0: 1}))
