"""The calls of a synchronous graph: the master's calls to rollout workers, over the channel of the model workers.

`GenerateGroups` sets how many groups are to wait at a worker to be scored. The worker starts the missing ones and
replies once that many wait, or as many as the manager admits for now. `ScoreGroups` has groups scored; the reply comes
when each is stored with the trainer, or given up. A new call replaces a `GenerateGroups` that has no reply yet.
"""

from __future__ import annotations

import msgspec


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
