"""`RowSampler`: has `data.sampler` choose the rows of the groups that start next.

The user's function runs in a child process. So it can neither stop the controller nor read its keys, and a call that
hangs ends after `SAMPLER_SECONDS`. It is called once for each training batch, when the rows of the last call are used
up; until it returns, calls that request groups wait. An error ends the run.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from streamrl import userland
from streamrl.config import Config
from streamrl.errors import UserCodeError, UserCodeTimeout
from streamrl.ledger import Ledger
from streamrl.transport import secret

SAMPLER_SECONDS = 30.0
"""Longest time of one call."""


class RowSampler:
    """Chooses rows for the ledger's next sequence numbers."""

    def __init__(
        self, config: Config, *, ledger: Ledger, wake: Callable[[], None], fail: Callable[[str], None]
    ) -> None:
        """`wake` is called once rows were chosen; `fail` receives the reason if the function fails."""
        data = config.data
        self._seed = config.run.seed
        self._ledger = ledger
        self._wake = wake
        self._fail = fail
        self._what = f"data.sampler = {data.sampler!r}"
        self.rows = 0
        """Rows of the data set; 0: not known yet."""
        self._choosing: asyncio.Task[None] | None = None
        setup = userland.SetupMessage(
            loader="streamrl.rows:serve_sampler",
            settings={"function": data.sampler, "args": data.sampler_args},
            timeout=SAMPLER_SECONDS,
        )
        withheld = (secret.VARIABLE, config.gserver.api_key_env, config.rollout.agent.api_key_env)
        environment = userland.clean_environment(os.environ, passed=(), withheld=withheld)
        self._process = userland.UserProcesses(setup, what=self._what, processes=1, environment=environment)

    def ready(self, count: int) -> int:
        """Return how many of the ledger's next `count` groups have a row; start to choose further rows if none has."""
        chosen = self._ledger.rows.chosen
        ready = 0
        for seq in self._ledger.next_to_admit(count):
            if seq not in chosen:
                break
            ready += 1
        if not ready and count and self.rows and self._choosing is None:
            self._choosing = asyncio.create_task(self._choose(), name="data.sampler")
        return ready

    async def close(self) -> None:
        """End the child process."""
        if self._choosing is not None:
            self._choosing.cancel()
        await self._process.close()

    async def _choose(self) -> None:
        """Choose rows for as many sequence numbers as a training batch has groups."""
        ledger = self._ledger
        seqs = [seq for seq in ledger.next_to_admit(ledger.groups_per_batch) if seq not in ledger.rows.chosen]
        try:
            await self._process.start()
            found = await self._process.call(ledger.rows.request(seqs, rows=self.rows, seed=self._seed))
        except UserCodeError as error:
            late = f"no rows within {SAMPLER_SECONDS:g} s; choose them faster"
            self._fail(f"{self._what}: {late if isinstance(error, UserCodeTimeout) else error}")
            return
        finally:
            self._choosing = None
        for seq, row in zip(seqs, found, strict=True):
            if not ledger.is_closed(seq):
                ledger.rows.chosen.setdefault(seq, row)
        self._wake()
