"""Brings gservers that came late, or back, to the version that the others serve, without the others.

Owns the latest snapshot and one task for each gserver that is being brought up to it; each is a weight update of
its own with one member (`weight_update.py`). Where weights are broadcast there is no snapshot: then `wanted` names
the gservers for which the publisher has to send them again.

Invariant: a gserver is tried `weights.attempts` times for one version, then waits for the next. It is tried again,
and the attempt counts, only when it has been heard of since: one that died has not failed, it falls silent.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass

from streamrl.config import WeightsConfig
from streamrl.gserver.routing import Fleet, Gserver, Standing
from streamrl.gserver.weight_calls import WeightCalls
from streamrl.gserver.weight_update import WeightGroup, WeightUpdate
from streamrl.transport.control.publication import Snapshot

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Offer:
    """Weights that a gserver can take at any time."""

    version: int
    snapshot: Snapshot
    checksums: dict[str, str]


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

    @property
    def busy(self) -> set[Gserver]:
        """Those that are being brought up now."""
        return set(self._running)

    def offer(self, offer: Offer | None) -> None:
        """These are the weights that are served now; None: only the publisher has them."""
        self._offer = offer
        for gserver in self._fleet.all():
            gserver.forgive()

    def lagging(self) -> list[Gserver]:
        """Those that live, do not serve the current weights, and may be brought to them now."""
        return [
            gserver
            for gserver in self._fleet.all()
            if gserver.standing is Standing.EVICTED
            and not gserver.failing
            and gserver.failed_catch_ups < self._config.attempts
        ]

    def wanted(self, version: int) -> list[Gserver]:
        """Those for which only the publisher has the weights of `version`."""
        offered = self._offer is not None and self._offer.version == version
        return [] if offered else self.lagging()

    def look(self) -> None:
        """Begin to bring up whoever lags."""
        if self._offer is None or self._offer.version != self._current():
            return
        for gserver in self.lagging():
            if gserver not in self._running and self._offer.snapshot.readable_on(gserver.host):
                task = asyncio.create_task(self._bring_up(gserver, self._offer), name=f"catch-up of {gserver.name}")
                self._running[gserver] = task

    async def close(self) -> None:
        """Resume whom they have paused, and end."""
        for update in self._updates.values():
            update.leave()
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def _bring_up(self, gserver: Gserver, offer: Offer) -> None:
        try:
            await self._try(gserver, offer)
            gserver.failing = gserver.standing is Standing.EVICTED and self._offer is offer
        finally:
            del self._running[gserver]
            self._on_ended()

    async def _try(self, gserver: Gserver, offer: Offer) -> None:
        update = self._updates[gserver] = WeightUpdate(
            version=offer.version,
            old_version=offer.version,
            weights=offer.snapshot,
            group=WeightGroup(f"catch-up-{next(self._numbers)}", (gserver,)),
            calls=self._calls,
            config=self._config,
            on_swapped=lambda version: None,
            current=self._current,
        )
        update.commit("", offer.checksums)
        reply = await update.run()
        del self._updates[gserver]
        if reply.done:
            log.info("%s at %s caught up with weights v%d", gserver.name, gserver.address, offer.version)
        else:
            log.warning("%s could not be brought to weights v%d: %s", gserver.name, offer.version, reply.error)
