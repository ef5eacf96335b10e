"""Brings gservers that came late, or back, to the version that the others serve, without the others.

Owns what is known of the served weights, and one task for each gserver that is being brought up to them; each is a
weight update of its own with one member (`weight_update.py`). Weights in files are read. Those that were broadcast
come from a gserver that serves them, which sends to one at a time, beside its requests (`sender.py`); `wanted` names
those that no gserver can send to: for them the publisher has to send its weights again.

Invariants: a gserver is tried `weights.attempts` times for one version, then waits for the next. It is tried again,
and the attempt counts, only when it has been heard of since: one that died has not failed, it falls silent. Attempts
with other gservers do not count, for these may be to blame; each of them is tried once, and at most so many.
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
from streamrl.gserver.routing import Fleet, Gserver, Standing
from streamrl.gserver.weight_calls import WeightCalls
from streamrl.gserver.weight_update import WeightGroup, WeightUpdate
from streamrl.transport.control.publication import Broadcast, Snapshot

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Offer:
    """Weights that are served."""

    version: int
    snapshot: Snapshot | None
    """Files that can be read at any time; None: they were broadcast."""
    checksums: dict[str, str]
    """Of the weights as they were trained."""


class CatchUps:
    """`look` after everything that may leave a gserver behind."""

    def __init__(
        self,
        *,
        config: WeightsConfig,
        fleet: Fleet,
        calls: WeightCalls,
        current: Callable[[], int],
        on_ended: Callable[[], None],
    ) -> None:
        """`current` tells the version that is served; `on_ended` hears that a gserver was brought up, or could
        not be."""
        self._config = config
        self._fleet = fleet
        self._calls = calls
        self._current = current
        self._on_ended = on_ended
        self._offer: Offer | None = None
        self._numbers = itertools.count(1)
        self._running: dict[Gserver, asyncio.Task[None]] = {}
        self._updates: dict[Gserver, WeightUpdate] = {}
        self._senders: dict[Gserver, Gserver] = {}
        """Who is being brought up → who sends to it."""
        self._tried: dict[Gserver, list[Gserver]] = {}
        """Who could not be brought up → by whom."""
        self._leaving: set[asyncio.Task[None]] = set()

    @property
    def busy(self) -> set[str]:
        """Addresses at which weights are being brought up now. By address, because a server that was joined outlives
        the gserver that joined it: the next one there waits until what was begun for the one before has ended."""
        return {gserver.address for gserver in self._running}

    def offer(self, offer: Offer) -> None:
        """These are the weights that are served now."""
        self._offer = offer
        self._tried.clear()
        for gserver in self._fleet.all():
            gserver.forgive()

    def lagging(self) -> list[Gserver]:
        """Those that live, do not serve the current weights, and may be brought to them now."""
        busy = self.busy
        return [
            gserver
            for gserver in self._fleet.all()
            if gserver.standing is Standing.EVICTED
            and not gserver.failing
            and gserver.failed_catch_ups < self._config.attempts
            and gserver.address not in busy
        ]

    def wanted(self, version: int) -> list[Gserver]:
        """Those to which only the publisher can send the weights of `version`."""
        offer = self._offer
        if offer is None or offer.version != version:
            return self.lagging()
        return [] if offer.snapshot is not None else [g for g in self.lagging() if not self._senders_for(g)]

    def look(self) -> None:
        """Begin to bring up whoever lags."""
        offer = self._offer
        if offer is None or offer.version != self._current():
            return
        for gserver in self.lagging():
            if offer.snapshot is None:
                busy = set(self._senders.values())
                free = [sender for sender in self._senders_for(gserver) if sender not in busy]
                if free:
                    sender = self._senders[gserver] = min(free, key=lambda g: g.load.requests)
                    self._start(gserver, partial(self._from_another, gserver, sender, offer))
            elif offer.snapshot.readable_on(gserver.host):
                self._start(gserver, partial(self._from_files, gserver, offer, offer.snapshot))

    async def close(self) -> None:
        """Resume whom they have paused, and end."""
        for gserver, task in self._running.items():
            if gserver in self._updates:
                self._updates[gserver].leave()
            else:
                task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        for task in self._leaving:
            task.cancel()
        await asyncio.gather(*self._leaving, return_exceptions=True)

    def _senders_for(self, gserver: Gserver) -> list[Gserver]:
        """Those that could send their weights to `gserver`, some of them maybe busy with another."""
        tried = self._tried.get(gserver, [])
        if len(tried) >= self._config.attempts:
            return []
        serving = self._fleet.serving()
        return [g for g in serving if g not in tried and g.info is not None and g.info.sends_weights]

    def _start(self, gserver: Gserver, bring_up: Callable[[], Awaitable[None]]) -> None:
        task = essential.begin(self._until_ended(gserver, bring_up), name=f"catch-up of {gserver.name}")
        self._running[gserver] = task

    async def _until_ended(self, gserver: Gserver, bring_up: Callable[[], Awaitable[None]]) -> None:
        try:
            await bring_up()
        finally:
            del self._running[gserver]
            self._senders.pop(gserver, None)
            self._updates.pop(gserver, None)
            self._on_ended()

    async def _from_files(self, gserver: Gserver, offer: Offer, snapshot: Snapshot) -> None:
        update = self._update(gserver, offer, snapshot, group=self._new_name())
        update.commit("", offer.checksums)
        reply = await update.run()
        self._tell(gserver, offer, source=f"the files in {snapshot.folder}", error=reply.error)
        gserver.failing = self._lags_behind(gserver, offer)

    async def _from_another(self, gserver: Gserver, sender: Gserver, offer: Offer) -> None:
        group = self._new_name()
        try:
            weights = await self._calls.offer(sender, group=group, version=offer.version)
        except StreamRLError as failure:
            error = str(failure)
        else:
            error = await self._send(gserver, sender, offer, weights, group=group)
        self._tell(gserver, offer, source=sender.name, error=error)
        if self._lags_behind(gserver, offer):
            self._tried.setdefault(gserver, []).append(sender)

    async def _send(self, gserver: Gserver, sender: Gserver, offer: Offer, weights: Broadcast, *, group: str) -> str:
        """Answers why it failed, if it did."""
        update = self._update(gserver, offer, weights, group=group)
        updating = asyncio.create_task(update.run(), name=f"update of {gserver.name}")
        sending = asyncio.create_task(
            self._calls.send(sender, group=group, buckets=len(weights.buckets)), name=f"{sender.name} sends"
        )
        await asyncio.wait({updating, sending}, return_when=asyncio.FIRST_COMPLETED)
        sending.cancel()  # unless it has ended
        (failure,) = await asyncio.gather(sending, return_exceptions=True)
        if failure is None:
            update.commit("", offer.checksums)
        else:
            update.abort(f"{sender.name} did not send its weights: {failure}")
        reply = await updating
        self._leave(group, gserver, sender)
        return reply.error

    def _lags_behind(self, gserver: Gserver, offer: Offer) -> bool:
        """Whether it still lacks what was offered, and what it lacks is still this."""
        return gserver.standing is Standing.EVICTED and self._offer is offer

    def _leave(self, group: str, *members: Gserver) -> None:
        for gserver in members:
            task = asyncio.create_task(self._calls.leave_group(gserver, group))
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)

    def _new_name(self) -> str:
        return f"catch-up-{next(self._numbers)}"

    def _update(self, gserver: Gserver, offer: Offer, weights: Broadcast | Snapshot, *, group: str) -> WeightUpdate:
        update = self._updates[gserver] = WeightUpdate(
            version=offer.version,
            old_version=offer.version,
            weights=weights,
            group=WeightGroup(group, (gserver,)),
            calls=self._calls,
            config=self._config,
            on_swapped=lambda version: None,
            current=self._current,
        )
        return update

    def _tell(self, gserver: Gserver, offer: Offer, *, source: str, error: str) -> None:
        if error:
            log.warning(
                "%s could not be brought to weights v%d from %s: %s", gserver.name, offer.version, source, error
            )
        else:
            log.info(
                "%s at %s caught up with weights v%d from %s", gserver.name, gserver.address, offer.version, source
            )
