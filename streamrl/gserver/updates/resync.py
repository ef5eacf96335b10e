"""Resync: brings single gservers up to the current weights, while the others serve on.

A gserver lacks the current weights if it joined late, came back, or failed in an update. Three sources are tried in
this order:

- *files*, if the current weights lie in files that it can read: the gserver reads them at once;
- *another gserver* that serves them, if it cannot: it sends them in a process group of two, to one gserver at a time,
  while it generates (`gserver/server/sender.py`);
- *the publisher*, if no gserver can send them: the master learns that it is needed (`from_publisher`) and has the
  weights published once more, to those gservers alone (`PublishBegin.resync`).

`Resyncs` owns the current weights' location and checksums, and one task for each gserver that is being resynced from
the first two sources; each task is a weight update with this one member (`update.py`).

Invariants: a gserver is resynced at most `weights.attempts` times to one version, then waits for the next. After a
failure it is suspect until a check has reached it: one that has died falls silent, and has not failed. Attempts in
which another gserver sent do not count, since the sender may be to blame; each sender is tried once, and at most
`weights.attempts` senders. A gserver that newer weights have overtaken `MOST_OVERTAKEN` times, since they come faster
than it is resynced, waits for the next update, which includes it; no update includes a gserver that is being resynced.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from streamrl import essential
from streamrl.config import WeightsConfig
from streamrl.errors import StreamRLError
from streamrl.gserver.manager.gserver import Gserver
from streamrl.gserver.manager.member_states import MemberEvent, MemberState
from streamrl.gserver.manager.routing import Fleet
from streamrl.gserver.manager.run_state import Wakeup
from streamrl.gserver.updates.calls import WeightCalls
from streamrl.gserver.updates.update import WeightGroup, WeightUpdate
from streamrl.ledger import Ledger
from streamrl.transport.control import Broadcast, Snapshot

log = logging.getLogger(__name__)

MOST_OVERTAKEN = 2
"""Most resyncs of a gserver in a row that newer weights may overtake; then it waits for the next update."""


@dataclass(frozen=True)
class CurrentWeights:
    """The weights that are served now."""

    version: int
    snapshot: Snapshot | None
    """Where they can be read at any time; None: they were broadcast."""
    checksums: dict[str, str]
    """Name → checksum of each weight as it was trained."""

    def readable_by(self, gserver: Gserver) -> bool:
        """Whether they lie in files, or in memory, that `gserver` can read."""
        return self.snapshot is not None and self.snapshot.readable_by(gserver.machine, gserver.gpu)


class Resyncs:
    """All resyncs of a run. Call `start` after whatever may have left a gserver behind."""

    def __init__(
        self,
        *,
        config: WeightsConfig,
        fleet: Fleet,
        ledger: Ledger,
        calls: WeightCalls,
        changed: Wakeup,
        updating: Callable[[], bool],
        on_unrecoverable: Callable[[str], None],
    ) -> None:
        """`updating` returns whether an update by the publisher is under way: no resync starts until it has ended.
        `changed` is notified when a gserver may have come to need a resync, or has had one. `on_unrecoverable` is
        called with the reason why no live gserver can be brought to the current weights."""
        self.closing = False
        """Whether `close` was called: no resync starts any more."""
        self._config = config
        self._fleet = fleet
        self._calls = calls
        self._changed = changed
        self._ledger = ledger
        self._updating = updating
        self._on_unrecoverable = on_unrecoverable
        self._current: CurrentWeights | None = None
        self._numbers = itertools.count(1)
        self._running: dict[Gserver, asyncio.Task[None]] = {}
        self._updates: dict[Gserver, WeightUpdate] = {}
        self._senders: dict[Gserver, Gserver] = {}
        """Gserver that is being resynced → gserver that sends to it."""
        self._tried: dict[Gserver, list[Gserver]] = {}
        """Gserver that could not be resynced → gservers that have tried to send to it."""

    @property
    def addresses(self) -> set[str]:
        """The addresses of gservers that are being resynced. Addresses, because a server that a run has joined outlives
        its gserver: the next gserver there waits until the resync of the one before has ended."""
        return {gserver.address for gserver in self._running}

    def weights_served(self, current: CurrentWeights) -> None:
        """Take over `current` after an update that took effect; what failed before is forgotten."""
        self._current = current
        self._tried.clear()
        for gserver in self._fleet.all():
            gserver.failed_resyncs = 0

    def from_publisher(self) -> list[Gserver]:
        """Return the gservers that lack the current weights and can get them from the publisher alone."""
        if self._updating() or self.closing:
            return []
        current = self._current
        if current is None or current.version != self._ledger.policy_version:
            return self._lacking()
        if current.snapshot is not None and self._config.mode in ("shared_memory", "cuda_ipc"):
            return []
        return [g for g in self._lacking() if not current.readable_by(g) and not self._able_to_send(g)]

    def start(self) -> None:
        """Begin to resync the gservers that lack the current weights, as far as there is a source for them; call
        `on_unrecoverable` if all live ones have failed as often as they may."""
        self._changed.notify()
        if self._updating() or self.closing:
            return
        self._fail_if_unrecoverable()
        current = self._current
        if current is None or current.version != self._ledger.policy_version:
            return
        for gserver in self._lacking():
            if gserver.overtaken_resyncs >= MOST_OVERTAKEN and self._fleet.serving_count:
                continue
            if current.snapshot is not None and current.readable_by(gserver):
                self._begin(gserver, partial(self._from_files, gserver, current, current.snapshot))
            else:
                sending = set(self._senders.values())
                free = [sender for sender in self._able_to_send(gserver) if sender not in sending]
                if free:
                    sender = self._senders[gserver] = min(free, key=lambda g: g.load.requests)
                    self._begin(gserver, partial(self._from_gserver, gserver, sender, current))

    def _fail_if_unrecoverable(self) -> None:
        heard = [g for g in self._fleet.all() if not g.silent]
        failed = [g for g in heard if g.state is MemberState.EVICTED and g.failed_resyncs >= self._config.attempts]
        if heard and len(failed) == len(heard):
            names = ", ".join(g.name for g in failed)
            self._on_unrecoverable(
                f"no gserver serves weights v{self._ledger.policy_version}, and {names} could not be brought to them "
                f"in {self._config.attempts} attempts each; see the controller's log"
            )

    async def end_all(self) -> None:
        """Resume the gservers that a resync has paused, wait until all have ended, and forget the current weights."""
        await self.close()
        self._current = None
        self._tried.clear()
        self.closing = False

    async def close(self) -> None:
        """Start no further resync, resume the gservers that one has paused, and wait until all have ended."""
        self.closing = True
        for gserver, task in self._running.items():
            if gserver in self._updates:
                self._updates[gserver].leave()
            else:
                task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    def _lacking(self) -> list[Gserver]:
        """Return the live gservers that do not serve the current weights and may be resynced now."""
        busy = self.addresses
        return [
            gserver
            for gserver in self._fleet.all()
            if gserver.state is MemberState.EVICTED
            and gserver.failed_resyncs < self._config.attempts
            and gserver.address not in busy
        ]

    def _able_to_send(self, gserver: Gserver) -> list[Gserver]:
        """Return the gservers that can send to `gserver` and have not tried; some may be sending to another now."""
        tried = self._tried.get(gserver, [])
        if len(tried) >= self._config.attempts:
            return []
        serving = self._fleet.serving()
        return [g for g in serving if g not in tried and g.info is not None and g.info.sends_weights]

    def _begin(self, gserver: Gserver, resync: Callable[[], Awaitable[None]]) -> None:
        self._running[gserver] = essential.begin(self._run(gserver, resync), name=f"resync of {gserver.name}")

    async def _run(self, gserver: Gserver, resync: Callable[[], Awaitable[None]]) -> None:
        resynced_to = self._current
        try:
            await resync()
        finally:
            if gserver.lacks_weights and self._current is not resynced_to:
                gserver.overtaken_resyncs += 1
            del self._running[gserver]
            self._senders.pop(gserver, None)
            self._updates.pop(gserver, None)
            self._fleet.news += 1
            self.start()

    async def _from_files(self, gserver: Gserver, current: CurrentWeights, snapshot: Snapshot) -> None:
        update = self._update(gserver, current, snapshot, group=self._new_name())
        update.commit("", current.checksums)
        reply = await update.run()
        _report(gserver, current, source=f"the files in {snapshot.folder}", error=reply.error)
        if self._still_lacks(gserver, current):
            gserver.handle(MemberEvent.RESYNC_FAILED)

    async def _from_gserver(self, gserver: Gserver, sender: Gserver, current: CurrentWeights) -> None:
        group = self._new_name()
        try:
            weights = await self._calls.offer(sender, group=group, label=self._ledger.lineage.label(current.version))
        except StreamRLError as failure:
            error = str(failure)
        else:
            error = await self._send(gserver, sender, current, weights, group=group)
        _report(gserver, current, source=sender.name, error=error)
        if self._still_lacks(gserver, current):
            self._tried.setdefault(gserver, []).append(sender)

    async def _send(
        self, gserver: Gserver, sender: Gserver, current: CurrentWeights, weights: Broadcast, *, group: str
    ) -> str:
        """Have `sender` send and `gserver` receive; return why that failed, or an empty string."""
        update = self._update(gserver, current, weights, group=group)
        updating = asyncio.create_task(update.run(), name=f"update of {gserver.name}")
        sending = asyncio.create_task(
            self._calls.send(sender, group=group, buckets=sum(len(s.buckets) for s in weights.senders)),
            name=f"{sender.name} sends",
        )
        await asyncio.wait({updating, sending}, return_when=asyncio.FIRST_COMPLETED)
        sending.cancel()  # unless it has ended
        (failure,) = await asyncio.gather(sending, return_exceptions=True)
        if failure is None:
            update.commit("", current.checksums)
        else:
            update.abort(f"{sender.name} did not send its weights: {failure}")
        reply = await updating
        self._calls.leave_group(group, (gserver, sender))
        return reply.error

    def _update(
        self, gserver: Gserver, current: CurrentWeights, weights: Broadcast | Snapshot, *, group: str
    ) -> WeightUpdate:
        update = self._updates[gserver] = WeightUpdate(
            version=current.version,
            weights=weights,
            group=WeightGroup(group, (gserver,)),
            calls=self._calls,
            config=self._config,
            ledger=self._ledger,
        )
        return update

    def _still_lacks(self, gserver: Gserver, current: CurrentWeights) -> bool:
        """Whether `current` are still the current weights and `gserver` does not serve them."""
        return gserver.lacks_weights and self._current is current

    def _new_name(self) -> str:
        return f"resync-{next(self._numbers)}"


def _report(gserver: Gserver, current: CurrentWeights, *, source: str, error: str) -> None:
    if error:
        log.warning("%s could not be resynced to weights v%d from %s: %s", gserver.name, current.version, source, error)
    else:
        log.info("%s at %s was resynced to weights v%d from %s", gserver.name, gserver.address, current.version, source)
