"""`RowSampler`: has `data.sampler` choose the rows of the groups that start next.

The user's function runs in a child process. So it can neither stop the controller nor read its keys, and a call that
hangs ends after `SAMPLER_SECONDS`. It is called once for each training batch, when the rows of the last call are used
up; until it returns, calls that request groups wait. An error ends the run.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from streamrl import essential, userland
from streamrl.config import Config, by_task
from streamrl.errors import UserCodeError, UserCodeTimeout
from streamrl.ledger import Ledger
from streamrl.mixture import Mixture
from streamrl.transport import secret

SAMPLER_SECONDS = 30.0
"""Longest time of one call."""


class RowSampler:
    """Chooses rows for the ledger's next sequence numbers, with the function of each task that has one."""

    def __init__(
        self, config: Config, *, ledger: Ledger, wake: Callable[[], None], fail: Callable[[str], None]
    ) -> None:
        """`wake` is called once rows were chosen; `fail` receives the reason if a function fails."""
        self._seed = config.run.seed
        self._mixture = Mixture.of(config)
        self._ledger = ledger
        self._wake = wake
        self._fail = fail
        self.rows: dict[str, int] = {}
        """Rows of the data set of each task; empty: not known yet."""
        self._choosing: asyncio.Task[None] | None = None
        self._processes = {name: _process(own) for name, own in by_task(config).items() if own.data.sampler}

    def ready(self, count: int) -> int:
        """Return how many of the ledger's next `count` groups have a row; start to choose further rows if none has."""
        seqs = self._ledger.next_to_admit(count)
        ready = next((number for number, seq in enumerate(seqs) if self._lacks_row(seq)), len(seqs))
        if not ready and seqs and self.rows and self._choosing is None:
            self._choosing = essential.begin(self._choose(), name="data.sampler")
        return ready

    async def close(self) -> None:
        """End the child processes."""
        if self._choosing is not None:
            self._choosing.cancel()
        for process in self._processes.values():
            await process.close()

    def _lacks_row(self, seq: int) -> bool:
        return seq not in self._ledger.rows.chosen and self._mixture.task(seq) in self._processes

    async def _choose(self) -> None:
        """Choose rows for as many sequence numbers as a training batch has groups."""
        ledger = self._ledger
        lacking = [seq for seq in ledger.next_to_admit(ledger.groups_per_batch) if self._lacks_row(seq)]
        try:
            for task, process in self._processes.items():
                if not (seqs := [seq for seq in lacking if self._mixture.task(seq) == task]):
                    continue
                await process.start()
                found = await process.call(ledger.rows.request(seqs, rows=self.rows[task], seed=self._seed))
                for seq, row in zip(seqs, found, strict=True):
                    if not ledger.is_closed(seq):
                        ledger.rows.chosen.setdefault(seq, row)
        except UserCodeError as error:
            late = isinstance(error, UserCodeTimeout)
            reason = f"no rows within {SAMPLER_SECONDS:g} s; choose them faster" if late else error
            self._fail(f"{f'tasks.{task}.' if task else ''}data.sampler: {reason}")
        else:
            self._wake()
        finally:
            self._choosing = None


def _process(config: Config) -> userland.UserProcesses:
    """Return the child process, not yet started, with the sampler of `config`."""
    data = config.data
    setup = userland.SetupMessage(
        loader="streamrl.rows:serve_sampler",
        settings={"function": data.sampler, "args": data.sampler_args},
        timeout=SAMPLER_SECONDS,
    )
    withheld = (secret.VARIABLE, config.gserver.api_key_env, config.rollout.agent.api_key_env)
    environment = userland.clean_environment(os.environ, passed=(), withheld=withheld)
    return userland.UserProcesses(setup, what=f"{data.sampler}", processes=1, environment=environment)
