"""What a running SGLang server says of itself: whether it is ready, whether it still works, and its figures.

Its front may answer while its scheduler hangs, so each is asked what only it can answer.

Owns its HTTP session and the figures; the server is somebody else's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp

from streamrl import essential
from streamrl.errors import PeerLost
from streamrl.gserver.sglang.figures import Figures
from streamrl.transport.keys import bearer

log = logging.getLogger(__name__)

ANSWER_SECONDS = 5.0
"""For any question."""
FIGURES_SECONDS = 2.0
"""Between two questions for figures; each costs SGLang some milliseconds."""
SCHEDULER_SECONDS = 5.0
"""Between two questions to the scheduler."""
SILENT_QUESTIONS = 3
"""So many questions in a row have to be unanswered: it may be this process that stood still, and then it asks again
first."""


@asynccontextmanager
async def monitoring(url: str, *, key: str, stuck_seconds: float, update_seconds: float) -> AsyncIterator[Monitor]:
    """A monitor of the server at `url`, which asks callers for `key`.

    It is lost when it has answered nothing for `stuck_seconds`; its scheduler may also be silent for the
    `update_seconds` that it may wait in a weight update.
    """
    # Without a timeout of aiohttp's: a task that is cancelled in the moment when that runs out is not cancelled.
    unlimited = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=unlimited, headers=bearer(key)) as session:
        yield Monitor(session, url=url, stuck_seconds=stuck_seconds, update_seconds=update_seconds)


class _Voice:
    """A part of a server that is asked again and again."""

    def __init__(self, name: str, *, patience: float) -> None:
        self._name = name
        self._patience = patience
        self._answered = time.monotonic()
        self._unanswered = 0
        """Questions since."""

    def heard(self) -> None:
        self._answered, self._unanswered = time.monotonic(), 0

    def unheard(self) -> None:
        self._unanswered += 1

    def check(self) -> None:
        """Raise `PeerLost` when it has been silent for too long."""
        silent = time.monotonic() - self._answered
        if silent >= self._patience and self._unanswered >= SILENT_QUESTIONS:
            raise PeerLost(f"{self._name} has not answered for {silent:.0f} s; look at its log")


class Monitor:
    """Asks one server."""

    def __init__(
        self, session: aiohttp.ClientSession, *, url: str, stuck_seconds: float, update_seconds: float
    ) -> None:
        self._session = session
        self._url = url
        self._figures = Figures()
        self._stuck_seconds = stuck_seconds
        self._front = _Voice(f"the SGLang server at {url}", patience=stuck_seconds)
        self._scheduler = _Voice(
            f"the scheduler of the SGLang server at {url}", patience=stuck_seconds + update_seconds
        )

    def stats(self) -> dict[str, float]:
        """As of the last time that the server was asked."""
        return self._figures.stats()

    async def is_ready(self) -> bool:
        """Whether it answers that it is well."""
        try:
            async with self._answer("/health") as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def is_there(self) -> bool:
        """Whether anybody answers, be it paused, when /health does not; a busy server has the time of a stuck one."""
        deadline = time.monotonic() + self._stuck_seconds
        while True:
            try:
                async with self._answer("/model_info") as response:
                    return response.status < 500
            except TimeoutError:
                if time.monotonic() >= deadline:
                    return False
            except aiohttp.ClientError:
                return False

    @asynccontextmanager
    async def asking(self) -> AsyncIterator[None]:
        """`keep_figures` and `keep_asking_the_scheduler` meanwhile."""
        tasks = (
            essential.begin(self.keep_figures(), name="the watch over SGLang"),
            essential.begin(self.keep_asking_the_scheduler(), name="the watch over SGLang's scheduler"),
        )
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def keep_figures(self) -> None:
        """Ask for figures again and again; while there is no answer the last ones stand."""
        self._front.heard()
        while True:
            try:
                async with self._answer("/metrics") as response:
                    self._front.heard()
                    if response.status == 200:
                        self._figures.update(await response.text(), now=time.monotonic())
            except (aiohttp.ClientError, TimeoutError) as error:
                self._front.unheard()
                log.debug("no figures from SGLang: %s", error)
            await asyncio.sleep(FIGURES_SECONDS)

    async def keep_asking_the_scheduler(self) -> None:
        """/server_info tells the scheduler's own state, so only a scheduler that works, or is paused, answers it.
        (/health_generate, which asks for a token, is not answered by a paused one.)"""
        self._scheduler.heard()
        while True:
            try:
                async with self._answer("/server_info"):
                    self._scheduler.heard()
            except (aiohttp.ClientError, TimeoutError) as error:
                self._scheduler.unheard()
                log.debug("no answer from SGLang's scheduler: %s", error)
            await asyncio.sleep(SCHEDULER_SECONDS)

    async def until_silent(self) -> None:
        """While it is asked: wait until nothing was answered for long, and raise `PeerLost`."""
        while True:
            self._front.check()
            self._scheduler.check()
            await asyncio.sleep(FIGURES_SECONDS)

    @asynccontextmanager
    async def _answer(self, path: str) -> AsyncIterator[aiohttp.ClientResponse]:
        async with asyncio.timeout(ANSWER_SECONDS), self._session.get(self._url + path) as response:
            yield response
