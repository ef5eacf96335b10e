"""The calls of a synchronous graph: the master's calls to rollout workers, over the channel of the model workers.

`GenerateGroups` sets how many groups are to wait at a worker to be scored. The worker starts the missing ones and
replies once that many wait, or as many as the manager admits for now. `ScoreGroups` has groups scored; the reply comes
when each is stored with the trainer, or given up. A new call replaces a `GenerateGroups` that has no reply yet.
"""

from __future__ import annotations

import msgspec

from streamrl.transport.credentials import Identity

FIRST_ROLLOUT_WORKER = 1_000_000
"""Number of rollout worker 0 on the channel; worker i has this number plus i."""


class GenerateGroups(msgspec.Struct, frozen=True, tag=True):
    """The MFC `actor_gen`."""

    groups: int
    """Number of groups that are to wait at the worker, including those that wait already."""


class ScoreGroups(msgspec.Struct, frozen=True, tag=True):
    """The MFC `rew_inf`, with verifiers."""

    seqs: list[int]


RolloutCall = GenerateGroups | ScoreGroups


class GenerateGroupsReply(msgspec.Struct, frozen=True):
    """The reply to `GenerateGroups`."""

    seqs: list[int]
    """All groups that wait at the worker to be scored."""


class ScoreGroupsReply(msgspec.Struct, frozen=True):
    """The reply to `ScoreGroups`."""

    seqs: list[int]
    """Sequence numbers of the groups that are stored with the trainer, by this call or before."""


def number_on_channel(sender: Identity) -> int:
    """Return the number of `sender` on the channel; `name_on_channel` is the inverse."""
    return sender.index + (FIRST_ROLLOUT_WORKER if sender.role == "rollout" else 0)


def name_on_channel(worker: int) -> str:
    """Return the name of the process with the number `worker` on the channel, for example `rollout/0`."""
    if worker >= FIRST_ROLLOUT_WORKER:
        return f"rollout/{worker - FIRST_ROLLOUT_WORKER}"
    return f"model_worker/{worker}"
