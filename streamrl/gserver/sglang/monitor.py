"""What a running SGLang server says of itself: whether it is ready, and its figures.

Owns its HTTP session and the figures; the server is somebody else's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp

from streamrl.errors import PeerLost
from streamrl.gserver.sglang.figures import Figures
from streamrl.transport.keys import bearer

log = logging.getLogger(__name__)

ANSWER_SECONDS = 5.0
"""For any question."""
FIGURES_SECONDS = 2.0
"""Between two questions for figures; each costs SGLang some milliseconds."""
SILENT_SECONDS = 60.0
"""A server that has answered nothing for so long is lost: long enough for a prefill that keeps it from answering."""
SILENT_QUESTIONS = 3
"""And so many questions in a row: it may be this process that stood still, and then it is asked again first."""


@asynccontextmanager
async def monitoring(url: str, *, key: str) -> AsyncIterator[Monitor]:
    """A monitor of the server at `url`, which asks callers for `key`."""
    # Without a timeout of aiohttp's: a task that is cancelled in the moment when that runs out is not cancelled.
    unlimited = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=unlimited, headers=bearer(key)) as session:
        yield Monitor(session, url=url)


class Monitor:
    """Asks one server."""

    def __init__(self, session: aiohttp.ClientSession, *, url: str) -> None:
        self._session = session
        self._url = url
        self._figures = Figures()
        self._answered = time.monotonic()
        self._unanswered = 0
        """Questions for figures since."""

    def stats(self) -> dict[str, float]:
        """As of the last time that the server was asked."""
        return self._figures.stats()

    async def is_ready(self) -> bool:
        """Whether it answers that it is well."""
        try:
            async with self._answer("/health") as response:
                self._answered = time.monotonic()
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def is_there(self) -> bool:
        """Whether anybody answers, be it paused, when /health does not; a busy server has `SILENT_SECONDS`."""
        deadline = time.monotonic() + SILENT_SECONDS
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
    async def keeping_figures(self) -> AsyncIterator[None]:
        """`keep_figures` meanwhile."""
        task = asyncio.create_task(self.keep_figures(), name="figures of SGLang")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def keep_figures(self) -> None:
        """Ask for figures again and again; while there is no answer the last ones stand."""
        while True:
            try:
                async with self._answer("/metrics") as response:
                    self._answered, self._unanswered = time.monotonic(), 0
                    if response.status == 200:
                        self._figures.update(await response.text(), now=self._answered)
            except (aiohttp.ClientError, TimeoutError) as error:
                self._unanswered += 1
                log.debug("no figures from SGLang: %s", error)
            await asyncio.sleep(FIGURES_SECONDS)

    async def until_silent(self) -> None:
        """While `keep_figures` asks: wait until nothing was answered for long, and raise `PeerLost`."""
        while True:
            silent = time.monotonic() - self._answered
            if silent >= SILENT_SECONDS and self._unanswered >= SILENT_QUESTIONS:
                raise PeerLost(f"the SGLang server at {self._url} has not answered for {silent:.0f} s; look at its log")
            await asyncio.sleep(max(SILENT_SECONDS - silent, FIGURES_SECONDS))

    @asynccontextmanager
    async def _answer(self, path: str) -> AsyncIterator[aiohttp.ClientResponse]:
        async with asyncio.timeout(ANSWER_SECONDS), self._session.get(self._url + path) as response:
            yield response
