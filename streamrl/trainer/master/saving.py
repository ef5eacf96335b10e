"""The master's side of checkpoints: asks the workers for them, and remembers those that could not be written.

A checkpoint on the way that cannot be written does not end the run: it is told, and the next one that
is due is another try. The last one of a run has to succeed.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

from streamrl.config import Config
from streamrl.records.progress import Progress
from streamrl.trainer.calls import Call, FinishSave, Save, Saved
from streamrl.transport.request_reply import Requests

log = logging.getLogger(__name__)

FINAL = "final"


class Checkpoints:
    """Between the master and the model workers, which write them together."""

    def __init__(self, config: Config, *, channel: Requests) -> None:
        self._folder = config.run_dir.absolute() / "checkpoints"
        self._workers = range(config.trainer.workers)
        self._limit = config.trainer.step_timeout_seconds
        self._channel = channel
        self._seconds = 0.0
        self._unwritten = 0

    async def save(self, reached: Progress) -> None:
        """Have a checkpoint written while the run goes on."""
        began = time.monotonic()
        await self._ask(self._folder / f"step-{reached.policy_version:06d}", reached, final=False)
        self._seconds += time.monotonic() - began

    async def save_final(self, reached: Progress) -> None:
        """The checkpoint of the end; raises the workers' error unless it is on the disk."""
        await self._ask(self._folder / FINAL, reached, final=True)
        log.info("saved %s", self._folder / FINAL)

    async def finish(self) -> str:
        """Wait for what is being written; return what to add to why the run ended."""
        saved: Saved = await self._channel.call(0, FinishSave(), Saved, timeout=self._limit)
        self._note(saved, then="it was the last")
        return f"; checkpoints that could not be written: {self._unwritten}" if self._unwritten else ""

    def take_seconds(self) -> float:
        """How long checkpoints have held training up since the last time this was asked."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    async def _ask(self, folder: Path, reached: Progress, *, final: bool) -> None:
        calls: dict[int, Call] = dict.fromkeys(self._workers, Save(str(folder), reached, final))
        replies = await self._channel.request(calls, Saved, timeout=self._limit)
        self._note(replies[0], then="the run goes on, and another one is being written now")

    def _note(self, saved: Saved, *, then: str) -> None:
        if saved.unwritten:
            self._unwritten += 1
            log.error("%s; %s", saved.unwritten, then)
