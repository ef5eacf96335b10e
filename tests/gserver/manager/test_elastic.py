"""Elastic pools at the manager, over real HTTP: numbers for newcomers, and the way out without loss."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from streamrl.errors import PeerError, RunStopped
from streamrl.transport.control import AskPlace, AskRoute, Drain, GroupInFlight, Heartbeat, InFlight, Leave
from tests.gserver.harness import NO_PROCESS, Run, joined, managed, publish, small_config


def members(run_status: object) -> set[str]:
    return {f"{p.role}/{p.index}" for p in run_status.processes}  # type: ignore[attr-defined]


async def told_to_leave(run: Run, index: int) -> None:
    """Until a heartbeat of the gserver is answered so."""
    async with asyncio.timeout(30):
        while not (await run.beat("gserver", index)).leave:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_newcomers_get_numbers_beyond_the_configured_ones(tmp_path: Path) -> None:
    config = small_config(tmp_path, gserver={"count": 2})
    ask = AskPlace(role="gserver", config_digest=config.digest())
    async with managed(config) as run:
        assert [await run.client.place(ask, patience=1.0) for _ in range(2)] == [2, 3]
        await run.register("gserver", 2, address="http://127.0.0.1:1")
        assert await run.client.place(ask, patience=1.0) == 4
        with pytest.raises(PeerError, match="a model_worker cannot join a running run"):
            await run.client.place(AskPlace(role="model_worker", config_digest=config.digest()), patience=1.0)


async def test_workers_of_a_synchronous_graph_get_the_numbers_that_its_master_calls(tmp_path: Path) -> None:
    synchronous = {"trainer": {"graph": "synchronous"}, "staleness": {"max_staleness": 0}}
    config = small_config(tmp_path, rollout={"workers": 2}, limits={"silence_seconds": 0.5}, **synchronous)
    ask = AskPlace(role="rollout", config_digest=config.digest())
    async with managed(config) as run:
        assert [await run.client.place(ask, patience=1.0) for _ in range(2)] == [0, 1]
        await run.register("rollout", 0)
        with pytest.raises(PeerError, match="all 2 rollout workers are there"):
            await run.client.place(ask, patience=1.0)
        await run.until(lambda status: status.processes[0].state == "silent")
        assert await run.client.place(ask, patience=1.0) == 0
        with pytest.raises(PeerError, match="all 2 rollout workers are there"):
            await run.client.place(ask, patience=1.0)
        assert await run.client.place(AskPlace(role="gserver", config_digest=config.digest()), patience=1.0) == 1


async def test_a_drained_worker_is_told_and_forgotten_once_it_has_left(tmp_path: Path) -> None:
    async with joined(tmp_path) as (run, _):
        assert not (await run.beat("rollout")).leave
        await run.client.drain(Drain(role="rollout", index=0))
        assert (await run.process("rollout")).state == "draining"
        assert (await run.beat("rollout")).leave
        await run.client.leave(Leave(role="rollout", index=0, pid=NO_PROCESS + 999))
        assert "rollout/0" in members(await run.client.status()), "another process took its place before"
        await run.client.leave(Leave(role="rollout", index=0, pid=NO_PROCESS + 200))
        assert "rollout/0" not in members(await run.client.status())


async def test_a_drained_gserver_leaves_when_nothing_runs_there_and_no_update_is_under_way(tmp_path: Path) -> None:
    async with joined(tmp_path, 2) as (run, [first, second]):
        assert [a.gserver for a in await run.admit(2)] == [first.url, second.url]
        await run.client.drain(Drain(role="gserver", index=0))
        assert {a.gserver for a in await run.admit(2)} == {second.url}
        assert not (await run.beat("gserver", 0)).leave
        assert (await publish(run, 1)).done, "it still gets weights"
        assert first.weight_version == second.weight_version == "1"
        assert (await run.process("gserver", 0)).state == "draining"
        await run.client.in_flight(InFlight(worker=0, groups=[GroupInFlight(0, 0, 0)]))
        await told_to_leave(run, 0)
        await run.client.leave(Leave(role="gserver", index=0, pid=NO_PROCESS + 100))
        assert "gserver/0" not in members(await run.client.status())
        assert "/pause_generation" not in first.calls[first.calls.index("/continue_generation") :]
        assert (await publish(run, 2)).done
        assert first.weight_version == "1"
        run.take(0)
        assert (await run.client.status()).ledger.accepted == 1


async def test_what_does_not_finish_is_handed_over(tmp_path: Path) -> None:
    async with joined(tmp_path, 2, limits={"drain_seconds": 0.1}) as (run, [first, second]):
        await run.admit(2)
        await run.client.drain(Drain(role="gserver", index=0))
        await told_to_leave(run, 0)
        assert first.paused, "its requests are aborted, and none begins there any more"
        await first.die()
        assert (await run.client.route(AskRoute(worker=0, seq=0, failed=first.url))).gserver == second.url


async def test_a_drained_controller_ends_the_run_as_stopped(tmp_path: Path) -> None:
    async with managed(small_config(tmp_path)) as run:
        run.manager.enter(run.registration("controller"))
        await run.register("rollout")  # keeps the manager there until it has heard of the end
        await run.client.drain(Drain(role="controller", index=0))
        assert (await run.manager.members.heartbeat(Heartbeat(role="controller", index=0, stats={}))).leave
        run.manager.finish("stopped after step 3", stopped=True)
        status = await run.client.status()
        assert (status.state, status.message) == ("stopped", "stopped after step 3")
        assert (await run.beat("rollout")).stop
        with pytest.raises(RunStopped, match="the run was stopped: stopped after step 3"):
            await asyncio.wait_for(asyncio.shield(run.serving), 5.0)


async def test_who_cannot_be_drained(tmp_path: Path) -> None:
    async with managed(small_config(tmp_path)) as run:
        await run.register("model_worker")
        with pytest.raises(PeerError, match="a model_worker cannot be drained"):
            await run.client.drain(Drain(role="model_worker", index=0))
        with pytest.raises(PeerError, match="gserver/3 is not in this run; there are: none"):
            await run.client.drain(Drain(role="gserver", index=3))
