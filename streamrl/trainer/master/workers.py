"""The master's calls to all model workers: initialization, specifications, publication, checkpoints.

A checkpoint that cannot be written is logged and does not end the run, except for the last one of the run.
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
from streamrl.records import progress, snapshots
from streamrl.records.progress import Progress
from streamrl.trainer.calls import (
    PUBLICATION_STEPS,
    Call,
    CallDone,
    ClearDataCache,
    FinishSave,
    Initialize,
    ModelConfigRequest,
    OpenStore,
    PublicationReply,
    Publish,
    ResponseReply,
    ResponseRequest,
    Save,
    SaveReply,
    Sibling,
    Spec,
    StoreAddress,
    WorkerSpec,
)
from streamrl.trainer.layout import ROLES
from streamrl.transport.request_reply import Requests

log = logging.getLogger(__name__)

SPEC_SECONDS = 30.0
"""Deadline of a reply that needs no computation."""
FINAL = "final"
"""Folder name of a run's last checkpoint."""


class ModelWorkers:
    """Calls to all workers."""

    def __init__(self, config: Config, *, channel: Requests) -> None:
        self._config = config
        self._channel = channel
        self._workers = range(config.trainer.workers)

    async def connected(self) -> None:
        """Wait until all workers have connected. Raises `DeadlineExceeded` if one does not."""
        patience, warn_after = self._config.limits.start_seconds, self._config.limits.warning_seconds
        await self._channel.wait_for(set(self._workers), patience=patience, warn_after=warn_after)

    async def initialize(self) -> None:
        """Have the workers connect to each other and load the models."""
        patience = self._config.limits.start_seconds
        store = StoreAddress(host="", port=0)
        megatron = any(role_config(self._config.trainer, role).backend == "megatron" for role in ROLES)
        if len(self._workers) > 1 or megatron:  # Megatron needs a process group for one process, too
            store = await self._channel.call(0, OpenStore(), StoreAddress, timeout=patience)
        call = Initialize(store_host=store.host, store_port=store.port)
        await self._channel.request(self._all(call), CallDone, timeout=patience)
        for role, description in (await self.specs())[0].roles.items():
            log.info("%s: %s", role, description)

    async def model_config(self) -> Architecture:
        """Return the architecture of the policy. Raises `TrainingError` if two workers have different ones."""
        calls = (self._channel.call(w, ModelConfigRequest(), Architecture, timeout=SPEC_SECONDS) for w in self._workers)
        first, *others = await asyncio.gather(*calls)
        for worker, other in enumerate(others, start=1):
            if other != first:
                raise TrainingError(
                    f"model_worker/{worker} has another model than model_worker/0 ({other}, and {first}); "
                    "give both the same config.json under model.path"
                )
        return first

    async def specs(self) -> list[WorkerSpec]:
        """Return each worker's roles and counters."""
        calls = (self._channel.call(worker, Spec(), WorkerSpec, timeout=SPEC_SECONDS) for worker in self._workers)
        return list(await asyncio.gather(*calls))

    async def clear(self, held: Mapping[int, list[int]], *, come_again: bool) -> None:
        """Have each worker discard the groups that it holds. `come_again`: they may be stored once more."""
        calls: dict[int, Call] = {worker: ClearDataCache(seqs, come_again) for worker, seqs in held.items()}
        await self._channel.request(calls, CallDone, timeout=self._config.limits.call_seconds)

    async def response(self, response: Sibling, *, worker: int) -> ResponseReply:
        """Return the tokens of `response` from `worker`, which holds its group."""
        reply: ResponseReply = await self._channel.call(
            worker, ResponseRequest(response), ResponseReply, timeout=SPEC_SECONDS
        )
        return reply

    async def publish(self, version: int, *, resync: bool = False) -> PublicationReply:
        """Send the policy's weights to the gservers as `version`; `resync`: only to those without this version."""
        config = self._config
        limit = config.weights.attempts * PUBLICATION_STEPS * config.limits.update_seconds
        return (
            await self._channel.request(self._all(Publish(version, resync=resync)), PublicationReply, timeout=limit)
        )[0]

    def _all(self, call: Call) -> dict[int, Call]:
        return dict.fromkeys(self._workers, call)


class Checkpoints:
    """Has the workers write checkpoints, and counts those that could not be written."""

    def __init__(self, config: Config, *, channel: Requests) -> None:
        self._folder = config.run_dir.absolute() / "checkpoints"
        begun = None if config.run.resume_from is None else Path(config.run.resume_from).resolve()
        self._final_version: int | None = None
        """Policy version of the checkpoint `final` if the run began from it."""
        if begun == (self._folder / FINAL).resolve():
            self._final_version = progress.read(begun).policy_version
        self._workers = range(config.trainer.workers)
        self._limit = config.limits.call_seconds
        self._channel = channel
        self._seconds = 0.0
        self._unwritten = 0
        self._memory = snapshots.folder_of(config.run_dir)
        self._asked: Path | None = None
        """The checkpoint that was requested last."""
        self.memory_is_short = False
        """Whether a checkpoint could not be written into memory."""
        self._asked_version = 0
        """Policy version of the last checkpoint that was requested."""

    async def save(self, reached: Progress) -> None:
        """Have a checkpoint written while training continues, unless this version has one."""
        if reached.policy_version == self._asked_version:
            return
        began = time.monotonic()
        self._asked_version = reached.policy_version
        await self._ask(self._folder / f"step-{reached.policy_version:06d}", reached, final=False)
        self._seconds += time.monotonic() - began

    async def take_snapshot(self, reached: Progress) -> None:
        """Have a checkpoint written into memory (`records/snapshots.py`) while training continues."""
        await self._ask(self._memory / f"step-{reached.policy_version:06d}", reached, final=False)

    async def save_final(self, reached: Progress) -> None:
        """Write the run's last checkpoint. Raises the workers' error if it cannot be written.

        A run that began from there and made no step leaves it as it is, since gservers may still be reading it.
        """
        if reached.policy_version != self._final_version:
            await self._ask(self._folder / FINAL, reached, final=True)
            log.info("saved %s", self._folder / FINAL)

    async def finish(self) -> str:
        """Wait for the checkpoint that is being written; return an addition to the reason of the run's end."""
        saved: SaveReply = await self._channel.call(0, FinishSave(), SaveReply, timeout=self._limit)
        self._note(saved, self._asked, then="it was the last")
        return f"; checkpoints that could not be written: {self._unwritten}" if self._unwritten else ""

    def take_seconds(self) -> float:
        """Return for how many seconds checkpoints have paused training since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    async def _ask(self, folder: Path, reached: Progress, *, final: bool) -> None:
        calls: dict[int, Call] = dict.fromkeys(self._workers, Save(str(folder), reached, final))
        replies = await self._channel.request(calls, SaveReply, timeout=self._limit)
        self._note(replies[0], self._asked, then="the run continues and is writing another one now")
        self._asked = folder

    def _note(self, saved: SaveReply, folder: Path | None, *, then: str) -> None:
        """Note the outcome of the previously requested checkpoint `folder`."""
        if saved.unwritten and folder is not None and folder.parent == self._memory:
            self.memory_is_short = True
            log.warning("no more snapshots are taken: %s", saved.unwritten)
        elif saved.unwritten:
            self._unwritten += 1
            log.error("%s; %s", saved.unwritten, then)
