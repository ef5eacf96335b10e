"""Monitoring of a running inference server: its readiness, its liveness, and its figures.

Its front end may reply while its scheduler hangs, so each of them gets a request that only it can handle. Figures come
from the Prometheus text of GET /metrics, and are renamed to the figures that gservers report. Servers do not report
their busy time; that is summed from the number of running requests at each poll.

Owns its HTTP session and the figures, but not the server.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from streamrl import essential
from streamrl.errors import PeerLost
from streamrl.transport.credentials import bearer
from streamrl.transport.http import new_session
from streamrl.transport.session import LastHeard
from streamrl.waits import ANSWER_SECONDS, cancel

log = logging.getLogger(__name__)

FIGURES_SECONDS = 2.0
"""Interval, in seconds, between two requests for figures; each costs the server some milliseconds."""
SCHEDULER_SECONDS = 5.0
"""Interval, in seconds, between two requests to the scheduler."""
SILENT_QUESTIONS = 3
"""Consecutive failed requests before a part counts as lost, in case it was this process that stood still."""


class MonitoredApi(msgspec.Struct, frozen=True):
    """The calls of a kind of server that are polled."""

    title: str
    """The engine, as people write it."""
    there: str
    """GET: its front end replies, even while it is paused."""
    scheduler: str
    """GET: only a working or paused scheduler replies."""
    figures: Mapping[str, str]
    """Name in the text of /metrics → name in a gserver's figures."""


@asynccontextmanager
async def monitoring(
    api: MonitoredApi,
    url: str,
    *,
    key: str,
    stuck_seconds: float,
    update_seconds: float,
    tls: ssl.SSLContext | None = None,
    unix: Path | None = None,
) -> AsyncIterator[Monitor]:
    """Open a monitor of the server at `url`, which requires `key` of callers; `tls`: context to verify it, or None;
    `unix`: its Unix socket, if it listens there.

    The server is lost when it has replied to nothing for `stuck_seconds`; its scheduler may in addition be silent for
    the `update_seconds` that it may wait in a weight update.
    """
    async with new_session(tls, headers=bearer(key), unix=unix) as session:
        yield Monitor(api, session, url=url, stuck_seconds=stuck_seconds, update_seconds=update_seconds)


class Monitor:
    """Polls the state of one server."""

    def __init__(
        self,
        api: MonitoredApi,
        session: aiohttp.ClientSession,
        *,
        url: str,
        stuck_seconds: float,
        update_seconds: float,
    ) -> None:
        self._api = api
        self._session = session
        self._url = url
        self._figures = Figures(api.figures)
        self._stuck_seconds = stuck_seconds
        name = f"the {api.title} server at {url}"
        self._front = _Responder(name, patience=stuck_seconds)
        self._scheduler = _Responder(f"the scheduler of {name}", patience=stuck_seconds + update_seconds)

    def stats(self) -> dict[str, float]:
        """Return the figures of the last poll."""
        return self._figures.stats()

    async def is_ready(self) -> bool:
        """Return whether the server reports itself healthy."""
        try:
            async with self._answer("/health") as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def is_there(self) -> bool:
        """Return whether any server replies, including a paused one, for which /health fails.

        A busy server has as much time as a stuck one.
        """
        deadline = time.monotonic() + self._stuck_seconds
        while True:
            try:
                async with self._answer(self._api.there) as response:
                    return response.status < 500
            except TimeoutError:
                if time.monotonic() >= deadline:
                    return False
            except aiohttp.ClientError:
                return False

    @asynccontextmanager
    async def polling(self) -> AsyncIterator[None]:
        """Poll figures and scheduler until the context ends."""
        tasks = (
            essential.begin(self.poll_figures(), name=f"the watch over {self._api.title}"),
            essential.begin(self.poll_scheduler(), name=f"the watch over the scheduler of {self._api.title}"),
        )
        try:
            yield
        finally:
            await cancel(*tasks)

    async def poll_figures(self) -> None:
        """Request figures repeatedly; without a reply the last ones stand."""
        self._front.answered()
        while True:
            try:
                async with self._answer("/metrics") as response:
                    self._front.answered()
                    if response.status == 200:
                        self._figures.update(await response.text(), now=time.monotonic())
            except (aiohttp.ClientError, TimeoutError) as error:
                self._front.missed()
                log.debug("no figures from %s: %s", self._api.title, error)
            await asyncio.sleep(FIGURES_SECONDS)

    async def poll_scheduler(self) -> None:
        """Check repeatedly that the scheduler works.

        The call reports the scheduler's own state, so only a working or paused scheduler replies to it.
        """
        self._scheduler.answered()
        while True:
            try:
                async with self._answer(self._api.scheduler):
                    self._scheduler.answered()
            except (aiohttp.ClientError, TimeoutError) as error:
                self._scheduler.missed()
                log.debug("no reply from the scheduler of %s: %s", self._api.title, error)
            await asyncio.sleep(SCHEDULER_SECONDS)

    async def until_silent(self) -> None:
        """Wait, while `polling`, until nothing has replied for too long, and raise `PeerLost`."""
        while True:
            self._front.check()
            self._scheduler.check()
            await asyncio.sleep(FIGURES_SECONDS)

    @asynccontextmanager
    async def _answer(self, path: str) -> AsyncIterator[aiohttp.ClientResponse]:
        async with asyncio.timeout(ANSWER_SECONDS), self._session.get(self._url + path) as response:
            yield response


class JoinedServer:
    """One server that was started outside the run."""

    def __init__(self, name: str, monitor: Monitor, *, url: str) -> None:
        self.name = name
        self.url = url
        self._monitor = monitor

    def stats(self) -> dict[str, float]:
        """Return the server's figures from the last poll."""
        return self._monitor.stats()

    async def failed(self) -> None:
        """Wait until it no longer replies, and raise `PeerLost`."""
        await self._monitor.until_silent()


class _Responder:
    """A part of a server that is polled repeatedly, and the duration of its silence."""

    def __init__(self, name: str, *, patience: float) -> None:
        self._name = name
        self._heard = LastHeard(now=time.monotonic(), patience=patience)
        self._unanswered = 0
        """Number of failed requests since then."""

    def answered(self) -> None:
        self._heard.hear(now=time.monotonic())
        self._unanswered = 0

    def missed(self) -> None:
        self._unanswered += 1

    def check(self) -> None:
        """Raise `PeerLost` if it has been silent for too long."""
        now = time.monotonic()
        if self._heard.is_silent(now=now) and self._unanswered >= SILENT_QUESTIONS:
            raise PeerLost(f"{self._name} has not replied for {self._heard.seconds(now=now):.0f} s; look at its log")


class Figures:
    """The figures of one server."""

    def __init__(self, names: Mapping[str, str]) -> None:
        """`names`: as in `MonitoredApi.figures`."""
        self._names = names
        self._latest = dict.fromkeys([*names.values(), "busy_seconds_total", "slot_seconds_total"], 0.0)
        self._asked: float | None = None

    def stats(self) -> dict[str, float]:
        return dict(self._latest)

    def update(self, text: str, *, now: float) -> None:
        """Update the figures from `text`, the server's metrics at the time `now`, in seconds."""
        found = dict.fromkeys(self._names.values(), 0.0)
        wanted = "\n".join(line for line in text.splitlines() if line.startswith(tuple(self._names)))
        for family in text_string_to_metric_families(wanted):  # too slow for all metrics
            for sample in family.samples:
                if name := self._names.get(sample.name):
                    found[name] += sample.value
        if self._asked is not None:
            seconds = now - self._asked
            self._latest["busy_seconds_total"] += seconds * (found["running"] > 0)
            self._latest["slot_seconds_total"] += seconds * found["running"]
        self._asked = now
        self._latest |= found
