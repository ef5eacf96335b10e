"""The ledger: one record for each open group, the rules of admission, and the rules for choosing batches.

Pure state machines without I/O or clocks (times are passed in). The gserver manager leases, rejects and returns groups
here; the master's buffer (`trainer/master/buffer.py`) accepts and closes them, and calls `select_batch` to form a
training batch. No operation scans all groups: each takes constant or logarithmic time in their number.

With P groups in a training batch and `max_staleness` η:

- **admission**: a new group starts only while `accepted + running < trained + (η + 1) · P`. *accepted* counts every
  group stored with the trainer since the run began. *trained* counts the groups that the served policy version was
  trained on: v · P; for a resumed run, the groups trained on before (perhaps with another P), plus P for each version
  since. This bounds the average age of tokens. While the policy moves fast, η is smaller (`admitted_staleness`). If
  batches are taken in admission order, returned prompts may start without room once no group runs, because the next
  batch waits for them;
- **selection** bounds the age of every token: no token older than η versions enters a loss.

If the number of groups ends the run (`ends_after`), no group starts that its last batch does not need.

Invariants (checked by property tests): every sequence number is always in exactly one state (`GroupState`); none is
skipped; none is trained on twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, Literal

import msgspec

from streamrl.records.lineage import FIRST, Lineage
from streamrl.rows import ChosenRows, RowsState
from streamrl.seqs import SeqQueue, SeqSet
from streamrl.types import SampleMeta

# --- ready ---


class ReadyGroups:
    """The groups that can be part of a training batch, by sequence number and by the age of their oldest token."""

    def __init__(self, oldest_versions: Mapping[int, int] | None = None) -> None:
        """`oldest_versions`: by sequence number, the oldest policy version among the tokens of each group."""
        self._oldest_versions: dict[int, int] = {}
        self._order = SeqQueue()
        self._by_oldest: dict[int, set[int]] = {}  # oldest policy version → groups
        for seq, version in (oldest_versions or {}).items():
            self.add(seq, version)

    def __contains__(self, seq: int) -> bool:
        return seq in self._oldest_versions

    def __len__(self) -> int:
        return len(self._oldest_versions)

    def add(self, seq: int, oldest_version: int) -> None:
        """Add a ready group; it replaces an entry with the same `seq`."""
        self.discard(seq)
        self._oldest_versions[seq] = oldest_version
        self._order.add(seq)
        self._by_oldest.setdefault(oldest_version, set()).add(seq)

    def discard(self, seq: int) -> None:
        """Remove `seq`; no change if it is absent."""
        oldest = self._oldest_versions.pop(seq, None)
        if oldest is None:
            return
        self._order.discard(seq)
        self._by_oldest[oldest].remove(seq)
        if not self._by_oldest[oldest]:
            del self._by_oldest[oldest]

    def oldest(self, count: int, *, but: Iterable[int] = ()) -> list[int]:
        """Return the first `count` groups in admission order except the groups in `but`; fewer if there are no more."""
        left_out = set(but)
        candidates = self._order.smallest(count + len(left_out))
        return [seq for seq in candidates if seq not in left_out][:count]

    def older_than(self, policy_version: int) -> list[int]:
        """Return the groups with a token older than `policy_version`, in admission order."""
        found = [seqs for version, seqs in self._by_oldest.items() if version < policy_version]
        return sorted(seq for seqs in found for seq in seqs)


# --- ledger ---

OverAge = Literal["mask", "wait", "drop"]


GroupState = Literal["new", "leased", "returned", "accepted", "trained", "rejected"]
"""docs/groups.md shows the state transitions.

new: never admitted. leased: a rollout worker generates it. returned: its prompt waits to be admitted again. accepted:
it is stored with the trainer. trained: a training step has used it. rejected: given up permanently.
"""


class Group(msgspec.Struct, eq=False):
    """The record of an open group: leased, returned or accepted."""

    seq: int
    state: GroupState = "new"
    # while a rollout worker generates it
    worker: str = ""
    """The rollout worker with its latest lease; empty if there was none, or that process has ended."""
    granted: float = 0.0
    """Start of the lease, in seconds."""
    route: Any = None
    """Route of its requests while it is leased (the manager's `routing.Route`); the ledger only stores it."""
    deaths: list[int] = []
    """Deaths of workers that held it, by their number in the run."""
    # while the trainer has it
    meta: SampleMeta | None = None
    """None if it is not stored with the trainer, or is being discarded there."""
    keys: frozenset[str] = frozenset()
    """Keys whose arrays are ready."""
    holders: Mapping[str, frozenset[int]] = {}
    """Key → model workers that hold its array. Shared between groups: replace the mapping, never change it."""


class Ledger:
    """The table of groups: leases sequence numbers to workers for a time, and counts the results.

    Open groups have a record each; closed ones (trained, rejected) are sets of sequence numbers.
    """

    def __init__(
        self,
        *,
        groups_per_batch: int,
        max_staleness: int,
        lease_seconds: float,
        in_order: bool = False,
        task: Callable[[int], str] = lambda seq: "",
    ) -> None:
        """`in_order`: batches are taken in admission order (`over_age = "wait"`). `task`: as in `ChosenRows`."""
        self.in_order = in_order
        self.groups_per_batch = groups_per_batch
        self.max_staleness = max_staleness
        self.admitted_staleness = max_staleness
        """The η of admission: `max_staleness`, or less while the policy drifts. It does not affect groups that run."""
        self.lease_seconds = lease_seconds
        self.lineage = FIRST
        """The lineage whose policy versions are counted."""
        self.policy_version = 0
        """The policy version that the gservers serve; admission uses it. Only `advance` and `restore` change it."""
        self.next_seq = 0
        self._began = (0, 0)  # policy version, and number of trained groups, at the start of this process
        self.ends_after: int | None = None
        """The run is over once this many groups were trained on or rejected; None: no such limit."""
        self.dropped = 0
        """Number of stored groups that were too old, so that their prompts were returned (`over_age = "drop"`)."""
        self.expired = 0
        """Number of leases that expired or were released, so that their prompts were returned."""
        self.kept = 0
        """Groups that workers had in hand when `lineage` began, and that are leased to them again."""
        self.groups: dict[int, Group] = {}
        """Open groups by sequence number."""
        self.trained_seqs = SeqSet()
        self.rejected = SeqSet()
        self.rows = ChosenRows(task)
        """Rows of open groups, and of those that start next, if `data.sampler` chooses them."""
        self.on_lease_end: Callable[[Group], None] = lambda group: None
        """Called with each group at the end of its lease."""
        self.observers: list[Callable[[], None]] = []
        """Called after each change that a waiting admission or batch may depend on."""
        self._leases: dict[str, dict[int, Group]] = {}  # worker → its leased groups, oldest lease first
        self._renewed: dict[str, float] = {}  # worker with leases → time of its last message
        self._returned = SeqQueue()
        self._held = 0  # groups in state accepted
        self._first_open = 0  # all sequence numbers below are closed

    def restore(
        self, lineage: Lineage, *, trained: Iterable[int], rejected: Iterable[int], rows: RowsState | None = None
    ) -> None:
        """Continue from the end of the step at which `lineage` begins, and forget all later admissions.

        All leases end. All other sequence numbers that were ever handed out are returned: `admit` leases them again, or
        `keep` does.
        """
        for group in [group for own in self._leases.values() for group in own.values()]:
            self._end_lease(group)
        self.groups.clear()
        self._returned = SeqQueue()
        self._held = self._first_open = self.kept = 0
        self.trained_seqs, self.rejected = SeqSet(trained), SeqSet(rejected)
        self.rows.restore(rows or RowsState())
        self.lineage, self.policy_version = lineage, lineage.policy_version
        self._began = (lineage.policy_version, len(self.trained_seqs))
        ends = [ranges[-1][1] for closed in (self.trained_seqs, self.rejected) if (ranges := closed.ranges())]
        self.next_seq = max([self.next_seq, *ends])
        for seq in range(self.next_seq):
            if not self.is_closed(seq):
                self._return(Group(seq))
        self._changed()

    @property
    def accepted(self) -> int:
        """Groups stored with the trainer since the run began, trained ones included."""
        return self._held + len(self.trained_seqs)

    @property
    def running(self) -> int:
        """Groups under lease."""
        return len(self.groups) - len(self._returned) - self._held

    @property
    def returned(self) -> int:
        """Returned prompts that wait to be leased again."""
        return len(self._returned)

    @property
    def trained(self) -> int:
        """Groups that the current policy version was trained on since the run began."""
        version, groups = self._began
        return groups + (self.policy_version - version) * self.groups_per_batch

    @property
    def room(self) -> int:
        """Number of groups that may start now."""
        bound = self.trained + (self.admitted_staleness + 1) * self.groups_per_batch
        if self.ends_after is not None:
            _, before = self._began
            left = max(0, self.ends_after - len(self.rejected) - before)
            whole_batches = -(-left // self.groups_per_batch)
            bound = min(bound, before + whole_batches * self.groups_per_batch)
        room = max(0, bound - self.accepted - self.running)
        if self.in_order and not room and not self.running and self.returned:
            # Groups of the next batch lost their places when staleness fell or the run went back; others are too old.
            return sum(self.state(seq) == "returned" for seq in self.next_in_order(self.groups_per_batch))
        return room

    def next_expiry(self) -> float | None:
        """Return when the next lease expires unless it is renewed; None if there is no lease."""
        return min((self._expiry(next(iter(own.values()))) for own in self._leases.values()), default=None)

    def holder(self, seq: int) -> str | None:
        """Return the worker that holds the lease of `seq`; None if it is not leased."""
        group = self.groups.get(seq)
        return group.worker if group is not None and group.state == "leased" else None

    def state(self, seq: int) -> GroupState:
        """Return the state of group `seq`."""
        if (group := self.groups.get(seq)) is not None:
            return group.state
        if seq in self.trained_seqs:
            return "trained"
        return "rejected" if seq in self.rejected else "new"

    def is_closed(self, seq: int) -> bool:
        """Whether `seq` was trained on or rejected."""
        return seq in self.trained_seqs or seq in self.rejected

    def next_in_order(self, count: int) -> list[int]:
        """Return the first `count` sequence numbers that are neither trained on nor rejected."""
        while self.is_closed(self._first_open):
            self._first_open += 1
        return next_in_order(self.is_closed, start=self._first_open, count=count)

    def next_to_admit(self, count: int) -> list[int]:
        """Return the sequence numbers of the next `count` groups: returned ones first, then new ones."""
        again = self._returned.smallest(count)
        return [*again, *range(self.next_seq, self.next_seq + count - len(again))]

    def admit(self, worker: str, count: int, *, now: float) -> list[Group]:
        """Lease up to `count` groups to `worker`: returned ones first, then new ones."""
        room = min(count, self.room)
        again = [self.groups[seq] for seq in self._returned.pop(room)]
        fresh = [Group(seq) for seq in range(self.next_seq, self.next_seq + room - len(again))]
        self.next_seq += len(fresh)
        for group in fresh:
            self.groups[group.seq] = group
        return self._lease([*again, *fresh], worker, now=now)

    def keep(self, worker: str, seqs: Collection[int], *, now: float) -> list[Group]:
        """Lease to `worker` the groups of `seqs` that `admit` would lease next; the worker has them in hand from an
        earlier lineage. Return all groups of `seqs` that it then holds.

        A kept group thus takes exactly the place of the same group generated again.
        """
        kept = sorted(set(self.next_to_admit(self.room)).intersection(seqs))
        end = max([self.next_seq, *(seq + 1 for seq in kept)])
        for seq in range(self.next_seq, end):  # earlier sequence numbers were handed out, too
            self._return(Group(seq))
        self.next_seq = end
        for seq in kept:
            self._returned.discard(seq)
        self._lease([self.groups[seq] for seq in kept], worker, now=now)
        self.kept += len(kept)
        return [self.groups[seq] for seq in sorted(seqs) if self.holder(seq) == worker]

    def accept(self, meta: SampleMeta) -> Group | None:
        """Enter a group that is stored with the trainer, and return its record; None if it was closed before.

        The worker may no longer have the lease, and another worker may be generating the same group. A group that is
        stored again gets the new metadata.
        """
        group = self.groups.get(meta.seq)
        if group is None:
            return None
        if group.state != "accepted":
            self._end_lease(group)
            self._returned.discard(meta.seq)
            group.state = "accepted"
            self._held += 1
        group.meta, group.keys, group.holders = meta, frozenset(), {}
        return group

    def discarding(self, seq: int) -> None:
        """Mark the accepted group `seq`, which is too old, as being discarded by the model workers.

        It may be stored again."""
        self.groups[seq].meta = None

    def discarded(self, seq: int) -> None:
        """Return the prompt of `seq`, unless the group was stored again while it was being discarded."""
        self.dropped += 1
        group = self.groups[seq]
        if group.meta is None:
            self._held -= 1
            self._return(Group(seq))
            self._changed()

    def trained_on(self, seq: int) -> None:
        """Close the accepted group `seq` as trained."""
        meta = self.groups.pop(seq).meta
        rewards = meta.episode_rewards if meta is not None else []
        self.rows.close(seq, fmean(rewards) if rewards else None)  # a planned group has none
        self._held -= 1
        self.trained_seqs.add(seq)

    def reject(self, seq: int, *, reward: float | None = None) -> bool:
        """Give up `seq` (filtered out, or failed after all retries), which frees its place.

        `reward`: its mean reward, if it was filtered out.

        Return False, and change nothing, unless it is leased or returned.
        """
        group = self.groups.get(seq)
        if group is None or group.state == "accepted":
            return False
        self._end_lease(group)
        self._returned.discard(seq)
        del self.groups[seq]
        self.rows.close(seq, reward)
        self.rejected.add(seq)
        self._changed()
        return True

    def renew(self, worker: str, *, now: float) -> None:
        """Restart all leases of `worker` because a message of it arrived."""
        if worker in self._leases:
            self._renewed[worker] = now

    def excuse(self, seconds: float) -> None:
        """Extend all leases by `seconds`, in which messages of workers could not be received."""
        for worker, own in self._leases.items():
            if worker in self._renewed:
                self._renewed[worker] += seconds
            for group in own.values():
                group.granted += seconds

    def release(self, worker: str, *, but: Collection[int] = ()) -> list[Group]:
        """End the leases of `worker` on groups that it does not have, all but those of the seqs `but`; return the
        groups, ordered by sequence number."""
        return self._give_back([group for seq, group in self._leases.get(worker, {}).items() if seq not in but])

    def expire(self, *, now: float) -> list[Group]:
        """End the leases that have expired; return their groups, ordered by sequence number."""
        return self._give_back(
            [
                group
                for worker, own in self._leases.items()
                if self._renewed.get(worker, -math.inf) + self.lease_seconds <= now
                for group in own.values()
                if self._expiry(group) <= now
            ]
        )

    def advance(self, version: int) -> None:
        """Note that the gservers serve policy version `version`."""
        if version < self.policy_version:
            raise ValueError(f"policy version went back from {self.policy_version} to {version}")
        self.policy_version = version
        self._changed()

    def _give_back(self, groups: list[Group]) -> list[Group]:
        for group in groups:
            self._end_lease(group)
            self._return(group)
        self.expired += len(groups)
        if groups:
            self._changed()
        return sorted(groups, key=lambda group: group.seq)

    def _lease(self, groups: list[Group], worker: str, *, now: float) -> list[Group]:
        for group in groups:
            group.state, group.worker, group.granted = "leased", worker, now
            self._leases.setdefault(worker, {})[group.seq] = group
        return groups

    def _return(self, group: Group) -> None:
        group.state = "returned"
        self.groups[group.seq] = group
        self._returned.add(group.seq)

    def _changed(self) -> None:
        for observer in self.observers:
            observer()

    def _expiry(self, group: Group) -> float:
        return max(group.granted, self._renewed.get(group.worker, group.granted)) + self.lease_seconds

    def _end_lease(self, group: Group) -> None:
        if group.state != "leased":
            return
        own = self._leases[group.worker]
        del own[group.seq]
        if not own:
            del self._leases[group.worker]
            self._renewed.pop(group.worker, None)
        self.on_lease_end(group)


class Selection(msgspec.Struct, frozen=True):
    """Result of `select_batch`."""

    batch: list[int]
    """Sequence numbers to train on now, in admission order; empty if there are not enough yet."""
    drop: list[int]
    """Sequence numbers to discard because a token is too old (`over_age = "drop"` only)."""
    missing: list[int]
    """Sequence numbers that the batch waits for by name (`over_age = "wait"` only)."""
    short: int
    """Number of missing groups."""


def select_batch(
    ready: ReadyGroups,
    *,
    policy_version: int,
    groups_per_batch: int,
    max_staleness: int,
    over_age: OverAge,
    next_in_order: Sequence[int] = (),
) -> Selection:
    """Choose the next training batch among the groups that are ready for one.

    `next_in_order` (for `wait`): the next `groups_per_batch` sequence numbers in admission order that are neither
    trained nor rejected.
    """
    if over_age == "wait":
        missing = [seq for seq in next_in_order if seq not in ready]
        complete = not missing and len(next_in_order) == groups_per_batch
        return Selection(
            batch=list(next_in_order) if complete else [],
            drop=[],
            missing=missing,
            short=len(missing),
        )
    drop = ready.older_than(policy_version - max_staleness) if over_age == "drop" else []
    short = max(0, groups_per_batch - (len(ready) - len(drop)))
    batch = [] if short else ready.oldest(groups_per_batch, but=drop)
    return Selection(batch=batch, drop=drop, missing=[], short=short)


def next_in_order(closed: Callable[[int], bool], *, start: int, count: int) -> list[int]:
    """Return the first `count` sequence numbers from `start` on that are not `closed` (trained on or rejected)."""
    found: list[int] = []
    seq = start
    while len(found) < count:
        if not closed(seq):
            found.append(seq)
        seq += 1
    return found


def count_over_age(version_counts: Mapping[int, int], *, policy_version: int, max_staleness: int) -> int:
    """Return the number of tokens in `version_counts` that are older than `max_staleness` versions."""
    return sum(n for version, n in version_counts.items() if policy_version - version > max_staleness)
