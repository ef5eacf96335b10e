"""The model workers as the master sees them all together: how they begin, what they are, what they let go of, the
checkpoints that they write together.

A checkpoint on the way that cannot be written does not end the run: it is told, and the next one that is due is another
try. The last one of a run has to succeed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from pathlib import Path

from streamrl.architecture import Architecture
from streamrl.config import Config
from streamrl.config.trainer import role_config
from streamrl.errors import TrainingError
from streamrl.records import progress
from streamrl.records.progress import Progress
from streamrl.trainer.calls import (
    PUBLICATION_STEPS,
    BeingScored,
    Call,
    CallDone,
    ClearDataCache,
    FinishSave,
    HaveScored,
    Initialize,
    ModelConfig,
    OpenStore,
    Publish,
    Published,
    Save,
    Saved,
    Sibling,
    Spec,
    StoreOpened,
    WorkerSpec,
)
from streamrl.trainer.layout import ROLES
from streamrl.transport.request_reply import Requests

log = logging.getLogger(__name__)

SPEC_SECONDS = 30.0
"""For a reply to what a worker is, or has."""
FINAL = "final"
"""Name of the last checkpoint's folder."""


class ModelWorkers:
    """Calls to all workers."""

    def __init__(self, config: Config, *, channel: Requests) -> None:
        self._config = config
        self._channel = channel
        self._workers = range(config.trainer.workers)

    async def connected(self) -> None:
        """Until all workers have connected; raises `DeadlineExceeded` when one does not."""
        patience, warn_after = self._config.manager.join_timeout_seconds, self._config.trainer.wait_warning_seconds
        await self._channel.wait_for(set(self._workers), patience=patience, warn_after=warn_after)

    async def initialize(self) -> None:
        """Have them meet, and load the models."""
        patience = self._config.manager.join_timeout_seconds
        store = StoreOpened(host="", port=0)
        if len(self._workers) > 1 or self._needs_world():
            store = await self._channel.call(0, OpenStore(), StoreOpened, timeout=patience)
        call = Initialize(store_host=store.host, store_port=store.port)
        await self._channel.request(self._all(call), CallDone, timeout=patience)
        for role, what in (await self.specs())[0].roles.items():
            log.info("%s: %s", role, what)

    async def model_config(self) -> Architecture:
        """Return the configuration of the policy's transformer; raises `TrainingError` if two workers differ in it."""
        calls = (self._channel.call(w, ModelConfig(), Architecture, timeout=SPEC_SECONDS) for w in self._workers)
        first, *others = await asyncio.gather(*calls)
        for worker, other in enumerate(others, start=1):
            if other != first:
                raise TrainingError(
                    f"model_worker/{worker} has another model than model_worker/0 ({other}, and {first}); "
                    "give both the same config.json under model.path"
                )
        return first

    async def specs(self) -> list[WorkerSpec]:
        """Return what each worker is and has counted."""
        calls = (self._channel.call(worker, Spec(), WorkerSpec, timeout=SPEC_SECONDS) for worker in self._workers)
        return list(await asyncio.gather(*calls))

    async def clear(self, held: Mapping[int, list[int]], *, come_again: bool) -> None:
        """Have each worker let go of the groups that it holds."""
        calls: dict[int, Call] = {worker: ClearDataCache(seqs, come_again) for worker, seqs in held.items()}
        await self._channel.request(calls, CallDone, timeout=self._config.trainer.step_timeout_seconds)

    async def have_scored(self, response: Sibling, *, version: int, worker: int) -> list[int]:
        """Have `worker`, who received its group, ask those who serve `version`; return `BeingScored.sampled`."""
        call = HaveScored(version, response)
        return (await self._channel.call(worker, call, BeingScored, timeout=SPEC_SECONDS)).sampled

    async def publish(self, version: int, *, resync: bool = False) -> Published:
        """Send the policy's weights to the gservers as `version`; `resync`: only to those that lack this version."""
        weights = self._config.weights
        limit = weights.attempts * PUBLICATION_STEPS * weights.timeout_seconds
        return (await self._channel.request(self._all(Publish(version, resync=resync)), Published, timeout=limit))[0]

    def _all(self, call: Call) -> dict[int, Call]:
        return dict.fromkeys(self._workers, call)

    def _needs_world(self) -> bool:
        """Whether a process group is needed even for one process: Megatron wants it."""
        return any(role_config(self._config.trainer, role).backend == "megatron" for role in ROLES)


class Checkpoints:
    """Has the workers write checkpoints, and remembers those that could not be written."""

    def __init__(self, config: Config, *, channel: Requests) -> None:
        self._folder = config.run_dir.absolute() / "checkpoints"
        begun = None if config.run.resume_from is None else Path(config.run.resume_from).resolve()
        self._final_version: int | None = None
        """The policy version of the checkpoint `final`, if the run goes on from that one; else None."""
        if begun == (self._folder / FINAL).resolve():
            self._final_version = progress.read(begun).policy_version
        self._workers = range(config.trainer.workers)
        self._limit = config.trainer.step_timeout_seconds
        self._channel = channel
        self._seconds = 0.0
        self._unwritten = 0
        self._asked_version = 0
        """The policy version of the last checkpoint that was asked for."""

    async def save(self, reached: Progress) -> None:
        """Have a checkpoint written while training continues."""
        began = time.monotonic()
        self._asked_version = reached.policy_version
        await self._ask(self._folder / f"step-{reached.policy_version:06d}", reached, final=False)
        self._seconds += time.monotonic() - began

    async def save_once(self, reached: Progress) -> None:
        """Have a checkpoint written, unless one of this version was asked for before."""
        if reached.policy_version != self._asked_version:
            await self.save(reached)

    async def save_final(self, reached: Progress) -> None:
        """The checkpoint of the end; raises the workers' error unless it is on the disk.

        A run that went on from there and made no step leaves it alone: gservers may still be reading it.
        """
        if reached.policy_version != self._final_version:
            await self._ask(self._folder / FINAL, reached, final=True)
            log.info("saved %s", self._folder / FINAL)

    async def finish(self) -> str:
        """Wait for what is being written; return what to add to why the run ended."""
        saved: Saved = await self._channel.call(0, FinishSave(), Saved, timeout=self._limit)
        self._note(saved, then="it was the last")
        return f"; checkpoints that could not be written: {self._unwritten}" if self._unwritten else ""

    def take_seconds(self) -> float:
        """Return how long checkpoints have held training up since the last time this was asked."""
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
