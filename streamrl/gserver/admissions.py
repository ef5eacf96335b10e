"""Admission with routes: the ledger's room, a gserver for each group, and what became of the prompts.

Pure: times are passed in. Invariants: a group is in flight on a gserver exactly while its lease
lasts; asking again under the same ticket gives the same groups.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Sequence

from streamrl.gserver.load import Work
from streamrl.gserver.routing import Fleet, Gserver
from streamrl.ledger import Fate, Ledger
from streamrl.transport.control.groups import Admission

log = logging.getLogger(__name__)

MAX_DEATHS = 3
"""A prompt is given up after so many deaths of workers that had it, if they are more than half of all deaths since
the first of them: it may well be what kills them. Where workers come and go, a long response sees some end."""
REMEMBERED_TICKETS = 16
"""Of each worker."""


class Admissions:
    """Gives prompts to rollout workers and takes account of them."""

    def __init__(self, *, ledger: Ledger, fleet: Fleet, group_size: int) -> None:
        self.admitted = 0
        """Groups given out since the run began, those given out again included."""
        self._ledger = ledger
        self._fleet = fleet
        self._new_group = Work(group_size, 0)
        self.given_up = 0
        """Prompts rejected since the workers that had them died."""
        self._last_with: dict[int, str] = {}  # prompts that were given out and are not settled
        self._deaths: dict[int, list[int]] = {}  # prompt → which deaths of workers it was at, by their number
        self._all_deaths = 0
        self._tickets: dict[str, OrderedDict[str, list[Admission]]] = {}

    @property
    def possible(self) -> bool:
        """Whether a group could start now."""
        return self._fleet.has_place and self._ledger.room > 0

    def given(self, worker: str, ticket: str) -> list[Admission] | None:
        """What `worker` was given under `ticket`, if it asked before."""
        return self._tickets.get(worker, OrderedDict()).get(ticket)

    def take(self, worker: str, count: int, *, workers: int, ticket: str, now: float) -> list[Admission]:
        """Up to `count` groups for `worker`, leaving room for the others of `workers` live ones."""
        given = self.given(worker, ticket)
        if given is not None:
            return given
        if not self.possible:
            return []
        share = math.ceil(self._ledger.room / max(1, workers))
        admissions: list[Admission] = []
        while len(admissions) < min(count, share) and self._fleet.has_place:
            (seq,) = self._ledger.admit(worker, 1, now=now)
            gserver = self._fleet.assign(seq, self._new_group, now=now)
            assert gserver is not None, "one has a place, as checked above"
            self._last_with[seq] = worker
            admissions.append(Admission(seq=seq, gserver=gserver.address))
        self.admitted += len(admissions)
        if ticket and admissions:
            remembered = self._tickets.setdefault(worker, OrderedDict())
            remembered[ticket] = admissions
            if len(remembered) > REMEMBERED_TICKETS:
                remembered.popitem(last=False)
        return admissions

    def reroute(self, worker: str, seq: int, *, avoid: str, now: float) -> Gserver | None:
        """Another gserver for `seq`; its load moves along only while `worker` holds the lease."""
        if self._ledger.holder(seq) == worker:
            return self._fleet.reassign(seq, now=now, avoid=avoid)
        return next((g for g in self._fleet.serving() if g.address != avoid), None)

    def in_flight(self, worker: str, seq: int, work: Work, *, now: float) -> None:
        """`worker` tells what of `seq` is in flight, which counts while it holds the lease."""
        if self._ledger.holder(seq) == worker:
            self._fleet.change(seq, work, now=now)

    def settle(self, groups: Sequence[Fate]) -> None:
        """The trainer has taken groups, or let go of them."""
        for fate in groups:
            if self._ledger.settle(fate):
                self._forget(fate.seq)

    def reject(self, worker: str, seq: int, reason: str) -> None:
        """`worker` gives `seq` up, which counts unless another holds it by now."""
        holder = self._ledger.holder(seq)
        if holder not in (worker, None) or not self._ledger.reject(seq):
            log.info("%s gave seq %d up too late (%s); it is with %s", worker, seq, reason, holder or "nobody")
            return
        self._forget(seq)
        log.info("%s gave seq %d up: %s", worker, seq, reason)

    def worker_replaced(self, worker: str) -> None:
        """The process behind `worker` is another one now: the old one's prompts go back, and may be why it ended."""
        self._tickets.pop(worker, None)
        self._came_back(self._ledger.release(worker), f"{worker} was replaced")
        if had := [seq for seq, holder in self._last_with.items() if holder == worker]:
            self._all_deaths += 1
        for seq in had:
            del self._last_with[seq]
            self._deaths.setdefault(seq, []).append(self._all_deaths)
            self._consider(seq)

    def expire(self, *, now: float) -> bool:
        """Prompts whose lease ran out go back; answers whether there are any. Silence alone is no prompt's fault."""
        lost = self._ledger.expire(now=now)
        self._came_back(lost, "their leases ran out")
        return bool(lost)

    def _came_back(self, seqs: Sequence[int], why: str) -> None:
        if seqs:
            log.warning("%d prompts go back to be given out again (first: seq %d): %s", len(seqs), seqs[0], why)
        for seq in seqs:
            self._fleet.release(seq)

    def _consider(self, seq: int) -> None:
        """Give `seq` up if it was at too many deaths to be there by chance."""
        deaths = self._deaths[seq]
        since = self._all_deaths - deaths[0] + 1
        if len(deaths) >= MAX_DEATHS and 2 * len(deaths) > since and self._ledger.reject(seq):
            self.given_up += 1
            del self._deaths[seq]
            log.error(
                "seq %d is given up: %d of the last %d workers that died had it; look at its prompt and its workflow",
                *(seq, len(deaths), since),
            )

    def _forget(self, seq: int) -> None:
        self._fleet.release(seq)
        self._last_with.pop(seq, None)
        self._deaths.pop(seq, None)
