"""The load of `bench_scale.py`: SIMULATED gservers, and rollout workers that are real but for what generates.

    python benchmarks/scale_load.py CONFIG MANAGER_URL SETTINGS

A rollout worker here is streamrl's own, with its admissions, reports, heartbeats and stream; in the place of what
samples and scores stands a wait of the length that a response would take, and a response of random tokens. A gserver
answers whatever the manager asks and holds no weights. All of them live in this process, each with connections of its
own. `SETTINGS` is a JSON object (`Settings`). Each line on stdin asks for figures: a line of JSON on stdout.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import Counter
from typing import Any, ClassVar

import msgspec
import numpy as np
import uvloop
from manager_load import SimulatedGservers

from streamrl import config as configuration
from streamrl.config import Config
from streamrl.launch.process import allow_many_connections
from streamrl.rollout import process
from streamrl.rollout.activity import Activity
from streamrl.rollout.generation import GroupRoute
from streamrl.rollout.process import RunConnection, serve_until_over
from streamrl.rollout.worker import RolloutWorker
from streamrl.transport.control import DataFacts
from streamrl.transport.manager_client import ControlClient
from streamrl.transport.membership import Membership
from streamrl.transport.secret import of_run_at
from streamrl.types import Trajectory, TrajectoryGroup

SIGMA = 0.6
"""Spread of the times of responses: standard deviation of their logarithm."""
PROMPT = (1, 2, 3, 4)


class Settings(msgspec.Struct, frozen=True):
    workers: int
    gservers: int
    group_seconds: float
    """Mean time of a group."""
    tokens: int
    """Length of a response."""
    slots: int
    """Requests that a gserver runs together."""


class Counted(ControlClient):
    """A client of the manager that counts its calls by path."""

    calls: ClassVar[Counter[str]] = Counter()

    async def _call(self, path: str, *rest: Any, **options: Any) -> Any:
        self.calls[path.partition("?")[0]] += 1
        return await super()._call(path, *rest, **options)


process.ControlClient = Counted  # type: ignore[misc]  # what `serve_until_over` calls the manager with


class SimulatedMaker:
    """In the place of `GroupMaker`."""

    def __init__(self, config: Config, settings: Settings, joined: RunConnection) -> None:
        self._config, self._settings, self._joined = config, settings, joined
        self._random = random.Random(joined.membership.index)

    async def make(
        self, seq: int, route: GroupRoute, before_scoring: Any = None, *, may_retry: Any = None, row: int | None = None
    ) -> TrajectoryGroup:
        siblings = range(self._config.rollout.group_size)
        found = await asyncio.gather(*(self._response(seq, sibling, route) for sibling in siblings))
        return TrajectoryGroup.from_trajectories(
            seq=seq, worker=self._joined.membership.name, prompt_length=len(PROMPT), trajectories=found
        )

    async def _response(self, seq: int, sibling: int, route: GroupRoute) -> Trajectory:
        version = self._joined.membership.policy_version
        seconds = self._settings.group_seconds * self._random.lognormvariate(-(SIGMA**2) / 2, SIGMA)
        with route.request(len(PROMPT) + self._settings.tokens):
            await asyncio.sleep(seconds)
        sampled = np.random.default_rng((seq, sibling)).integers(1, 11, self._settings.tokens, dtype=np.int32)
        ids = np.concatenate([np.array(PROMPT, np.int32), sampled])
        mask = np.arange(len(ids)) >= len(PROMPT)
        return Trajectory(
            input_ids=ids,
            loss_mask=mask,
            behavior_logprobs=np.where(mask, -2.4, 0.0).astype(np.float32),
            policy_versions=np.where(mask, version, -1).astype(np.int32),
            reward=float(sampled[0] % 2),
            finish_reason="stop",
        )


async def one_worker(config: Config, settings: Settings, *, manager_url: str, index: int) -> None:
    """Run one rollout worker until the run is over."""

    async def work(joined: RunConnection) -> None:
        maker: Any = SimulatedMaker(config, settings, joined)
        await RolloutWorker(config, joined=joined, maker=lambda seq: maker, data=DataFacts(config.data.size)).run()

    activity = Activity(idle="room in the ledger")
    await serve_until_over(config, index=index, manager_url=manager_url, advertise="", activity=activity, work=work)


async def one_gserver(config: Config, *, manager_url: str, index: int, address: str) -> None:
    """Beat for one gserver until the run is over."""
    client = Counted(manager_url, secret=of_run_at(manager_url, config))
    started = time.monotonic()

    def stats() -> dict[str, float]:
        seconds = time.monotonic() - started
        return {"running": 8.0, "queued": 0.0, "tokens_generated_total": 100 * seconds, "busy_seconds_total": seconds}

    membership = Membership(client, role="gserver", index=index, address=address, config=config, stats=stats)
    try:
        await membership.join(patience=300)
        await membership.stopping.wait()
    finally:
        await client.close()


async def main() -> None:
    config_file, manager_url, text = sys.argv[1:]
    allow_many_connections()
    config = configuration.load(config_file)
    settings = msgspec.json.decode(text, type=Settings)
    gservers = SimulatedGservers(settings.gservers, slots=settings.slots)
    orders = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    async with gservers as address, asyncio.TaskGroup() as everybody:
        for index in range(settings.gservers):
            everybody.create_task(
                one_gserver(config, manager_url=manager_url, index=index, address=f"{address}/{index}")
            )
        for index in range(settings.workers):
            everybody.create_task(one_worker(config, settings, manager_url=manager_url, index=index))
        while await orders.readline():
            found = {"calls": dict(Counted.calls), "gserver_calls": dict(gservers.calls)}
            sys.stdout.write(json.dumps(found) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    uvloop.run(main())
