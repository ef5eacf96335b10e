"""How a run ends: everyone is told, whoever ended it, and the manager leaves."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from streamrl.errors import PeerError, StreamRLError
from streamrl.gserver.manager import core, members
from streamrl.transport.control import Admit
from streamrl.transport.manager_client import GONE_BACK
from tests.gserver.harness import Run, keep_beating, managed, small_config


@pytest.fixture(autouse=True)
def _short_goodbye(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "LINGER_SECONDS", 0.2)


async def everyone(run: Run) -> None:
    for role in ("gserver", "rollout", "model_worker"):
        await run.register(role)  # type: ignore[arg-type]


async def ended(run: Run) -> None:
    await asyncio.wait_for(asyncio.shield(run.serving), 3.0)


async def test_the_manager_leaves_once_everyone_was_told(tmp_path: Path) -> None:
    async with managed(small_config(tmp_path)) as run:
        await everyone(run)
        assert not (await run.beat("rollout")).stop
        admission = asyncio.create_task(run.client.admit(Admit(worker=0, count=1)))
        topology = asyncio.create_task(run.client.topology("gserver", 2, patience=0.5))
        run.manager.finish("all steps are done", stopped=False)
        assert (await admission).stop
        await asyncio.wait({topology})
        assert topology.exception() is not None
        status = await run.client.status()
        assert (status.state, status.message) == ("finished", "all steps are done")
        assert (await run.beat("gserver")).stop
        assert not run.serving.done()
        assert (await run.beat("model_worker")).stop
        await ended(run)


async def test_the_manager_does_not_wait_for_the_silent(tmp_path: Path) -> None:
    async with managed(small_config(tmp_path, limits={"silence_seconds": 0.3})) as run:
        await everyone(run)
        run.manager.finish("done", stopped=False)
        assert (await run.beat("model_worker")).stop  # the trainer may take longer
        await ended(run)


async def test_a_process_that_gives_up_ends_the_run_for_all(tmp_path: Path) -> None:
    async with managed(small_config(tmp_path)) as run:
        await everyone(run)
        assert (await run.beat("model_worker", error="model_worker/0: out of memory")).stop
        status = await run.client.status()
        assert (status.state, status.message) == ("failed", "model_worker/0: out of memory")
        for role in ("gserver", "rollout", "model_worker"):
            assert (await run.beat(role)).stop  # type: ignore[arg-type]
        with pytest.raises(StreamRLError, match="the run has failed: model_worker/0: out of memory"):
            await ended(run)  # whoever started the manager, such as Kubernetes, is to begin the run again


async def test_a_rollout_worker_that_gives_up_ends_the_run_only_if_no_other_makes_groups(tmp_path: Path) -> None:
    config = small_config(tmp_path, rollout={"workers": 3})
    async with managed(config) as run:
        await everyone(run)
        for index in (1, 2):
            await run.register("rollout", index)
        await run.beat("rollout", 1, stats={"groups_done_total": 1.0})
        assert not (await run.beat("rollout", 0, error="rollout/0: OSError: no more files")).stop
        assert (await run.process("rollout", 0)).state == "silent"
        assert not (await run.beat("rollout", 0)).stop, "it closes what it has"
        assert (await run.process("rollout", 0)).state == "silent"
        assert not (await run.beat("rollout", 2, stats={"groups_done_total": 0.0})).stop
        assert (await run.beat("rollout", 1, error="rollout/1: KeyError: 'answer'")).stop
        status = await run.client.status()
        assert (status.state, status.message) == ("failed", "rollout/1: KeyError: 'answer'")


async def test_the_silence_of_a_model_worker_counts_as_its_death(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its machine is gone without a word, and the trainer waits for groups that would have come to it."""
    monkeypatch.setattr(members, "TRAINER_PATIENCE_SECONDS", 2.0)
    config = small_config(tmp_path, trainer={"data_parallel": 2}, limits={"silence_seconds": 2.0})
    async with managed(config) as run:
        beating = asyncio.create_task(keep_beating(run, "gserver", "rollout", "model_worker"))
        await everyone(run)
        await run.register("model_worker", 1)
        assert (await run.manager.death()).startswith("model_worker/1 has ")
        assert (await run.client.status()).state == "running"
        with pytest.raises(PeerError, match="has died, and the run goes back") as refusal:
            await run.register("model_worker", 1, pid=2)
        assert refusal.value.status == GONE_BACK
        beating.cancel()


async def test_a_cancelled_manager_leaves_nothing_behind(tmp_path: Path) -> None:
    before = asyncio.all_tasks()
    async with managed(small_config(tmp_path)) as run:
        await everyone(run)
        admission = asyncio.create_task(run.client.admit(Admit(worker=0, count=1)))
        await asyncio.sleep(0.05)
    await asyncio.gather(admission, return_exceptions=True)
    assert asyncio.all_tasks() == before
