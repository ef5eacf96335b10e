"""The ledger: which prompts run, which groups count, and which tokens are young enough to train on.

Pure state machines without I/O or clocks (times are passed in). The gserver manager owns the
`Ledger`; the master calls `select_batch` on its `ReadyGroups` when it forms a training batch.
Nothing here looks at all groups: adding, removing and asking cost the same, but for a logarithm, however many
there are.

With P groups in a training batch and `max_staleness` η:

- **admission**: a new group starts only while `accepted + running < trained + (η + 1) · P`, where
  *accepted* counts every group that was finished and kept since the run began, and *trained* those
  that made the present policy version: v · P, or what a resumed run had trained on, perhaps with another
  P, and P for each version since. The gate bounds the average age of tokens. While a run is slowed it
  has a smaller η (`admitted_staleness`). Where batches are taken in admission order, prompts that came
  back start again though there is no room, once nothing runs any more: the next batch waits for them;
- **selection** bounds the age of every token: none older than η versions enters a loss.

Where the number of groups ends the run (`ends_after`), no group starts that its last batch does not need.

The trainer's word on a group is final, and is a count: how often it has taken the group or let go of it
(`Fate`). Odd, it has the group; even, it does not. So its word can be told late, twice or out of order, and
ledger and trainer still come to agree.

Invariants (held by property tests): every sequence number is always in exactly one of
`waiting`, `running`, `accepted`, `rejected`; none is skipped; none is accepted twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from streamrl.seqs import SeqQueue

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
        """Enter a group that is ready; one that is here already takes the place of the old one."""
        self.discard(seq)
        self._oldest_versions[seq] = oldest_version
        self._order.add(seq)
        self._by_oldest.setdefault(oldest_version, set()).add(seq)

    def discard(self, seq: int) -> None:
        """Take `seq` out; no change if it is not here."""
        oldest = self._oldest_versions.pop(seq, None)
        if oldest is None:
            return
        self._order.discard(seq)
        self._by_oldest[oldest].remove(seq)
        if not self._by_oldest[oldest]:
            del self._by_oldest[oldest]

    def oldest(self, count: int, *, but: Iterable[int] = ()) -> list[int]:
        """Return the first `count` groups in admission order without those in `but`; fewer when there are no more."""
        left_out = set(but)
        candidates = self._order.smallest(count + len(left_out))
        return [seq for seq in candidates if seq not in left_out][:count]

    def older_than(self, policy_version: int) -> list[int]:
        """Return the groups with a token from before `policy_version`, in admission order."""
        found = [seqs for version, seqs in self._by_oldest.items() if version < policy_version]
        return sorted(seq for seqs in found for seq in seqs)


# --- ledger ---

OverAge = Literal["mask", "wait", "drop"]


GroupState = Literal["new", "leased", "returned", "accepted", "rejected"]
"""What the manager takes a group for; docs/groups.md draws who moves it from one to the next.

new: never given out. leased: a rollout worker makes it. returned: its prompt waits to be given out again. accepted:
the trainer has it, or has trained on it. rejected: given up, unless the trainer turns out to have it.
"""


class Fate(msgspec.Struct, frozen=True, array_like=True):
    """What became of a group with the trainer."""

    seq: int
    changes: int
    """How often the trainer took the group or let go of it: odd while it has the group, or has trained on it."""


class GroupOut(msgspec.Struct):
    """A group that is out: it was given out, or is to be, and is neither with the trainer nor given up."""

    seq: int
    worker: str = ""
    """The rollout worker that it was given to last; empty: nobody's, or that of a process that has ended."""
    leased: bool = False
    """Whether `worker` holds its lease; if not, its prompt waits to be given out again."""
    granted: float = 0.0
    """When the lease began, in seconds."""
    route: Any = None
    """Where its requests go while it is leased (the manager's `routing.Route`); the ledger only keeps it."""
    deaths: list[int] = []
    """The deaths of workers that it was at, by their number in the run."""


class Ledger:
    """Admission: leases sequence numbers to workers for a time, and counts what became of them.

    Of each group that is out it has one record; the accepted are only counted.
    """

    def __init__(
        self, *, groups_per_batch: int, max_staleness: int, lease_seconds: float, in_order: bool = False
    ) -> None:
        """`in_order`: batches are taken in admission order (`over_age = "wait"`)."""
        self.in_order = in_order
        self.groups_per_batch = groups_per_batch
        self.max_staleness = max_staleness
        self.admitted_staleness = max_staleness
        """The η of admission: `max_staleness`, or less for as long as a run is slowed. What runs already is not
        touched by it."""
        self.lease_seconds = lease_seconds
        self.policy_version = 0
        self.next_seq = 0
        self._began = (0, 0)  # policy version, and groups trained on, where this process began
        self.ends_after: int | None = None
        """The run is over once this many groups were trained on or given up; None: their number does not end it."""
        self.accepted = 0
        """Groups finished and kept since the run began, trained ones included."""
        self.dropped = 0
        """Times that a finished group was too old and its prompt went back (`over_age = "drop"`)."""
        self.expired = 0
        """Times that a lease ran out and its prompt was given out again."""
        self.rejected: set[int] = set()
        """Sequence numbers given up on purpose."""
        self.rejections: list[Fate] = []
        """All rejections in order, each with the trainer's word as it was then; one that the trainer knew better
        about stays listed."""
        self.out: dict[int, GroupOut] = {}
        """The groups that are out, by sequence number."""
        self._leases: dict[str, dict[int, GroupOut]] = {}  # worker → the groups that it holds, oldest lease first
        self._renewed: dict[str, float] = {}  # worker with leases → when it was last heard of
        self._returned = SeqQueue()  # those that are out without a lease
        self._drops: dict[int, int] = {}  # how often, of those that were accepted and came back

    def restore(self, *, policy_version: int, trained: Collection[int], rejected: Collection[int]) -> None:
        """Go on, before anything was admitted, where a run was at the end of a step.

        `trained` were accepted, `rejected` given up; all other sequence numbers below the largest of
        them go back to be given out again.
        """
        if self.next_seq:
            raise ValueError("a ledger that has admitted groups cannot be restored")
        closed = set(trained).union(rejected)
        self.policy_version = policy_version
        self._began = (policy_version, len(trained))
        self.accepted = len(trained)
        self.rejected = set(rejected)
        self.rejections = [Fate(seq, 0) for seq in rejected]
        self.next_seq = max(closed, default=-1) + 1
        for seq in range(self.next_seq):
            if seq not in closed:
                self._return(GroupOut(seq))

    @property
    def running(self) -> int:
        """Groups under lease."""
        return len(self.out) - len(self._returned)

    @property
    def returned(self) -> int:
        """Prompts that came back and wait to be given out again."""
        return len(self._returned)

    @property
    def trained(self) -> int:
        """Groups that the present policy version was trained on since the run began."""
        version, groups = self._began
        return groups + (self.policy_version - version) * self.groups_per_batch

    @property
    def room(self) -> int:
        """How many groups may start now."""
        bound = self.trained + (self.admitted_staleness + 1) * self.groups_per_batch
        if self.ends_after is not None:
            _, before = self._began
            left = max(0, self.ends_after - len(self.rejected) - before)
            whole_batches = -(-left // self.groups_per_batch)
            bound = min(bound, before + whole_batches * self.groups_per_batch)
        room = max(0, bound - self.accepted - self.running)
        if self.in_order and not room and not self.running:
            # They lost their places when the run was slowed, or to others that started in the place of groups which
            # were given up, and which the trainer had after all.
            return min(self.returned, self.groups_per_batch)
        return room

    def next_expiry(self) -> float | None:
        """Return when the next lease runs out unless it is renewed."""
        return min((self._expiry(next(iter(own.values()))) for own in self._leases.values()), default=None)

    def holder(self, seq: int) -> str | None:
        """Return the worker that holds the lease of `seq`, if one does."""
        group = self.out.get(seq)
        return group.worker if group is not None and group.leased else None

    def state(self, seq: int) -> GroupState:
        """Return the one state that group `seq` is in."""
        if (group := self.out.get(seq)) is not None:
            return "leased" if group.leased else "returned"
        if seq in self.rejected:
            return "rejected"
        return "accepted" if 0 <= seq < self.next_seq else "new"

    def admit(self, worker: str, count: int, *, now: float) -> list[GroupOut]:
        """Lease up to `count` groups to `worker`: returned ones first, then new ones."""
        room = min(count, self.room)
        again = [self.out[seq] for seq in self._returned.pop(room)]
        fresh = [GroupOut(seq) for seq in range(self.next_seq, self.next_seq + room - len(again))]
        self.next_seq += len(fresh)
        for group in fresh:
            self.out[group.seq] = group
        admitted = again + fresh
        for group in admitted:
            group.worker, group.leased, group.granted = worker, True, now
            self._leases.setdefault(worker, {})[group.seq] = group
        return admitted

    def changes(self, seq: int) -> int:
        """Return how often the trainer took `seq` or let go of it, as far as is known here (see `Fate`)."""
        return 2 * self._drops.get(seq, 0) + (self.state(seq) == "accepted")

    def take_change(self, fate: Fate) -> bool:
        """Note that the trainer took a group, or let go of one that was too old, whose prompt goes back.

        This overrides whatever the ledger knew of the group: a lease that runs or ran out, even a rejection. Return
        False, and change nothing, when this or something later was told before.
        """
        seq = fate.seq
        known = self.changes(seq)
        if not 0 <= seq < self.next_seq or fate.changes <= known:
            return False
        if known % 2:
            self.accepted -= 1
        else:
            self._take_out(seq)
        if drops := fate.changes // 2:
            self.dropped += drops - self._drops.get(seq, 0)
            self._drops[seq] = drops
        if fate.changes % 2:
            self.accepted += 1
        else:
            self._return(GroupOut(seq))
        return True

    def reject(self, seq: int) -> bool:
        """Give `seq` up on purpose (filtered, failed for good) and give its place back.

        Return False, and change nothing, when it is neither leased nor waits to be given out again.
        """
        if seq not in self.out:
            return False
        self.rejections.append(Fate(seq, self.changes(seq)))
        self._take_out(seq)
        self.rejected.add(seq)
        return True

    def renew(self, worker: str, *, now: float) -> None:
        """Start all leases of `worker` anew: it was heard of."""
        if worker in self._leases:
            self._renewed[worker] = now

    def excuse(self, seconds: float) -> None:
        """Let all leases run `seconds` longer, in which no worker could be heard."""
        for worker, own in self._leases.items():
            if worker in self._renewed:
                self._renewed[worker] += seconds
            for group in own.values():
                group.granted += seconds

    def release(self, worker: str) -> list[GroupOut]:
        """Take back the prompts of `worker`, which is gone; return their groups by sequence number."""
        return self._give_back(list(self._leases.get(worker, {}).values()))

    def expire(self, *, now: float) -> list[GroupOut]:
        """Give back the prompts of leases that ran out; return their groups by sequence number."""
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
        """Count from now on by policy version `version`."""
        if version < self.policy_version:
            raise ValueError(f"policy version went back from {self.policy_version} to {version}")
        self.policy_version = version

    def _take_out(self, seq: int) -> None:
        """Remove `seq` from those that are out and from the rejected; the accepted are not listed anywhere."""
        group = self.out.pop(seq, None)
        if group is not None:
            self._end_lease(group)
        self._returned.discard(seq)
        self.rejected.discard(seq)

    def _give_back(self, groups: list[GroupOut]) -> list[GroupOut]:
        for group in groups:
            self._end_lease(group)
            self._return(group)
        self.expired += len(groups)
        return sorted(groups, key=lambda group: group.seq)

    def _return(self, group: GroupOut) -> None:
        self.out[group.seq] = group
        self._returned.add(group.seq)

    def _expiry(self, group: GroupOut) -> float:
        return max(group.granted, self._renewed.get(group.worker, group.granted)) + self.lease_seconds

    def _end_lease(self, group: GroupOut) -> None:
        if not group.leased:
            return
        group.leased = False
        own = self._leases[group.worker]
        del own[group.seq]
        if not own:
            del self._leases[group.worker]
            self._renewed.pop(group.worker, None)


class Selection(msgspec.Struct, frozen=True):
    """What `select_batch` decided."""

    batch: list[int]
    """Sequence numbers to train on now, in admission order; empty: not enough yet."""
    drop: list[int]
    """Sequence numbers to discard because a token is too old (`over_age = "drop"` only)."""
    missing: list[int]
    """Sequence numbers that the batch waits for by name (`over_age = "wait"` only)."""
    short: int
    """How many groups are lacking."""


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

    `next_in_order` (for `wait`) names the next `groups_per_batch` untrained, unrejected
    sequence numbers in admission order.
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
    """Return the first `count` sequence numbers from `start` on that are not `closed` (trained on or given up)."""
    found: list[int] = []
    seq = start
    while len(found) < count:
        if not closed(seq):
            found.append(seq)
        seq += 1
    return found


def count_over_age(version_counts: Mapping[int, int], *, policy_version: int, max_staleness: int) -> int:
    """Return how many tokens of `version_counts` are older than `max_staleness` versions."""
    return sum(n for version, n in version_counts.items() if policy_version - version > max_staleness)
