"""What the master asks of rollout workers in a synchronous graph, over the channel that model workers use too.

`Generate` says how many groups are to wait at a worker to be scored. The worker starts what it lacks, and answers when
there are so many, or as many as the manager admits for now. `Score` scores them, and is answered when they are stored
with the trainer, or given up. A direction takes the place of a `Generate` that is not answered yet.
"""

from __future__ import annotations

import msgspec

FIRST_ROLLOUT_WORKER = 1_000_000
"""On the channel rollout worker i has this number plus i."""


class Generate(msgspec.Struct, frozen=True, tag=True):
    """`actor_gen`."""

    groups: int
    """To wait at the worker: those that do already are among them."""


class Score(msgspec.Struct, frozen=True, tag=True):
    """`rew_inf`, by verifiers."""

    seqs: list[int]


Direction = Generate | Score


class Generated(msgspec.Struct, frozen=True):
    """All groups that wait to be scored."""

    seqs: list[int]


class Scored(msgspec.Struct, frozen=True):
    """Those of the groups that are stored with the trainer, by this call or before."""

    seqs: list[int]


def name_on_channel(worker: int) -> str:
    """What people call a worker of the master's."""
    if worker >= FIRST_ROLLOUT_WORKER:
        return f"rollout/{worker - FIRST_ROLLOUT_WORKER}"
    return f"model_worker/{worker}"
