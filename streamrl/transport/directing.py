"""What the master asks of rollout workers in a synchronous graph, over the channel that model workers use too.

`Generate` starts groups, as many as the manager admits, and is answered when each waits to be scored;
`Score` scores them and is answered when they are stored with the trainer, or given up.
"""

from __future__ import annotations

import msgspec

FIRST_ROLLOUT_WORKER = 1_000_000
"""On the channel rollout worker i has this number plus i."""


class Generate(msgspec.Struct, frozen=True, tag=True):
    """`actor_gen`."""

    groups: int


class Score(msgspec.Struct, frozen=True, tag=True):
    """`rew_inf`, by verifiers."""

    seqs: list[int]


Direction = Generate | Score


class Generated(msgspec.Struct, frozen=True):
    """Groups that wait to be scored; those that failed are told to the manager."""

    seqs: list[int]


class Scored(msgspec.Struct, frozen=True):
    """Groups that are stored with the trainer."""

    seqs: list[int]


def name_on_channel(worker: int) -> str:
    """What people call a worker of the master's."""
    if worker >= FIRST_ROLLOUT_WORKER:
        return f"rollout/{worker - FIRST_ROLLOUT_WORKER}"
    return f"model_worker/{worker}"
