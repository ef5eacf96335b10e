"""Resyncs of gservers that come late or back, weights in files, and checksums, with scripted gservers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from streamrl.errors import PeerError
from streamrl.machine import machine_identity
from streamrl.transport.control import PublishBegin, PublishCommit, PublishReply, Snapshot
from streamrl.transport.generation import MIXED_WEIGHTS
from tests.gserver.harness import (
    Run,
    begin_publication,
    commit_publication,
    keep_beating,
    live_gservers,
    still_waits,
)
from tests.gserver.scripted import Fault, scripted
from tests.gserver.updates.scripted_fleet import calls_of_an_update, each, fleet

BEGIN = "/begin_weight_update"
LOAD = "/update_weights_from_disk"
VERIFY = "/weights_checker"
PAUSE = "/pause_generation"
NAME = "/update_weight_version"
END = "/end_weight_update"
CONTINUE = "/continue_generation"


async def publish(
    run: Run,
    version: int,
    *,
    machine: str = "",
    checksums: dict[str, str] | None = None,
    resync: bool = False,
) -> PublishReply:
    snapshot = Snapshot(folder=f"/weights/v{version}", machine=machine)
    begin = await run.client.publish_begin(PublishBegin(version=version, weights=snapshot, resync=resync), timeout=20.0)
    message = PublishCommit(version=version, group_name=begin.group_name, checksums=checksums or {})
    return await run.client.publish_commit(message, timeout=20.0)


async def test_files_are_staged_and_compared_before_anybody_pauses(tmp_path: Path) -> None:
    async with fleet(tmp_path) as (run, gservers):
        for gserver in gservers:
            gserver.sums = {"a": "1"}
        assert (await publish(run, 1, checksums={"a": "1", "ignored": "2"})).done
        for gserver in gservers:
            assert calls_of_an_update(gserver) == [BEGIN, LOAD, VERIFY, PAUSE, END, CONTINUE]
            assert gserver.bodies[LOAD][0]["model_path"] == "/weights/v1"
            assert gserver.weight_version == "1"


async def test_one_without_a_stage_is_paused_while_it_reads(tmp_path: Path) -> None:
    async with fleet(tmp_path, 1, staged=False, pause_mode="retract") as (run, (gserver,)):
        gserver.sums = {"a": "1"}
        assert (await publish(run, 1, checksums={"a": "1"})).done
        assert calls_of_an_update(gserver) == [PAUSE, NAME, LOAD, VERIFY, NAME, CONTINUE]
        assert [body["new_version"] for body in gserver.bodies[NAME]] == [MIXED_WEIGHTS, "1"]
        assert gserver.bodies[LOAD][0]["weight_version"] is None
        assert gserver.calls[gserver.calls.index(LOAD) - 1] == "/server_info", "nothing that was given up is under way"
        assert gserver.bodies[LOAD][0]["flush_cache"] is True


async def test_one_without_a_stage_that_took_other_weights_is_given_no_groups(tmp_path: Path) -> None:
    async with fleet(tmp_path, 2, staged=False, attempts=1) as (run, (good, bad)):
        good.sums = {"a": "1", "b": "2", "of a run before": "9"}
        bad.sums = {"a": "1"}
        reply = await publish(run, 1, checksums={"a": "1", "b": "2"})
        assert reply.done
        assert reply.evicted == [1]
        assert await run.manager.resync_needed() == ["gserver/1"]
        assert not (await publish(run, 1, checksums={"a": "1", "b": "2"}, resync=True)).done
        assert bad.counts[LOAD] == 2
        assert live_gservers(await run.client.status()) == {0}
        assert bad.weight_version == MIXED_WEIGHTS
        await run.until(lambda status: not bad.paused)


@pytest.mark.parametrize("others", [[{"a": "2"}], [{}], [], [{"a": "1"}] * 2], ids=["other", "none", "fewer", "more"])
async def test_every_rank_of_a_server_tells_what_it_took(tmp_path: Path, others: list[dict[str, str]]) -> None:
    async with fleet(tmp_path, 2, staged=False, attempts=1) as (run, (good, bad)):
        for gserver in (good, bad):
            gserver.ranks = 2
            gserver.sums = {"a": "1"}
        good.sums_of_others, bad.sums_of_others = [{"a": "1"}], others
        reply = await publish(run, 1, checksums={"a": "1"})
        assert reply.done
        assert reply.evicted == [1]
        assert bad.weight_version == MIXED_WEIGHTS
        assert live_gservers(await run.client.status()) == {0}


async def test_other_weights_than_were_trained_are_refused_and_named(tmp_path: Path) -> None:
    async with fleet(tmp_path) as (run, (good, bad)):
        good.sums, bad.sums = {"a": "1", "b": "2"}, {"a": "1", "b": "3"}
        reply = await publish(run, 1, checksums={"a": "1", "b": "2"})
        assert not reply.done
        assert "gserver/1 received other weights than were trained: 1 of 2 tensors differ (b)" in reply.error
        assert reply.evicted == [1]
        assert PAUSE not in good.calls + bad.calls
        assert (await publish(run, 1, checksums={"a": "1", "b": "2"})).done
        assert (good.weight_version, bad.weight_version) == ("1", "default")


async def resync(run: Run, version: int) -> None:
    """Resync gservers for as long as any lacks `version`, as the master does between two steps."""
    while True:
        await run.manager.resync_needed()
        snapshot = Snapshot(folder=f"/weights/v{version}")
        begin = await run.client.publish_begin(PublishBegin(version, snapshot, resync=True), timeout=20.0)
        if begin.world_size > 1:
            await run.client.publish_commit(PublishCommit(version, begin.group_name), timeout=20.0)
        await asyncio.sleep(0.01)


@each(["error", "nonsense", "refuse"], LOAD, BEGIN, PAUSE, END, CONTINUE)
async def test_a_resync_that_fails_is_tried_again(tmp_path: Path, path: str, fault: Fault) -> None:
    async with fleet(tmp_path, 1) as (run, (old,)), scripted() as (late,):
        assert (await publish(run, 1)).done
        old.calls.clear()
        late.faults[path] = [fault]
        await run.register("gserver", 1, address=late.url)
        resyncing = asyncio.create_task(resync(run, 1))
        async with asyncio.timeout(30):
            while live_gservers(await run.client.status()) != {0, 1} or late.paused:
                await run.beat("gserver", 1)  # a gserver that could not be resumed is checked at its heartbeat
                await asyncio.sleep(0.05)
        resyncing.cancel()
        assert late.weight_version == "1"
        assert calls_of_an_update(old) == []


async def test_a_faulty_gserver_does_not_keep_another_from_its_resync(tmp_path: Path) -> None:
    async with fleet(tmp_path, 1) as (run, _), scripted(2) as (good, bad):
        assert (await publish(run, 1)).done
        bad.faults[LOAD] = ["error"] * 10
        for index, gserver in enumerate((good, bad), start=1):
            await run.register("gserver", index, address=gserver.url)
        await run.until(lambda _: good.counts["/model_info"] > 0 and bad.counts["/model_info"] > 0)
        assert not (await publish(run, 1, resync=True)).done
        assert await run.manager.resync_needed() == ["gserver/1"], "the faulty one is checked at its next heartbeat"
        await run.beat("gserver", 2)
        await run.until(lambda _: bad.counts["/model_info"] > 2)
        assert (await publish(run, 1, resync=True)).done
        assert live_gservers(await run.client.status()) == {0, 1}
        assert bad.counts[LOAD] == 1


async def test_a_gserver_that_cannot_be_resynced_waits_for_the_next_version(tmp_path: Path) -> None:
    async with fleet(tmp_path, 1, attempts=2) as (run, _), scripted() as (late,):
        assert (await publish(run, 1)).done
        late.faults[LOAD] = ["error", "error"]
        await run.register("gserver", 1, address=late.url)
        for _ in range(2):
            assert await asyncio.wait_for(run.manager.resync_needed(), 10) == ["gserver/1"]
            assert not (await publish(run, 1, resync=True)).done
            checks = late.counts["/model_info"]
            await run.beat("gserver", 1)
            await run.until(lambda _, checks=checks: late.counts["/model_info"] > checks)
        waiting = asyncio.create_task(run.manager.resync_needed())
        await still_waits(waiting)
        assert (await publish(run, 2)).done
        assert live_gservers(await run.client.status()) == {0, 1}
        waiting.cancel()


async def test_a_gserver_on_another_host_cannot_read_this_ones_memory(tmp_path: Path) -> None:
    async with fleet(tmp_path, 1) as (run, (near,)), scripted() as (far,):
        assert (await run.client.gserver_places()).machines == [machine_identity()]
        with pytest.raises(PeerError, match=r"reach gservers on the trainer's host alone, and not gserver/0 on \S+;"):
            await publish(run, 1, machine="there")
        await run.register("gserver", 1, address=far.url, machine="there")
        await run.until_live(0, 1)
        assert (await run.client.gserver_places()).machines == sorted([machine_identity(), "there"])
        assert (await publish(run, 1, machine=machine_identity())).done
        assert (near.weight_version, far.weight_version) == ("1", "default")
        assert live_gservers(await run.client.status()) == {0}
        needed = await asyncio.wait_for(run.manager.resync_needed(), 10)
        assert needed == ["gserver/1"], "the publisher may have another way to it"
        memory = Snapshot(folder="/weights/v1", machine=machine_identity())
        begin = await run.client.publish_begin(PublishBegin(version=1, weights=memory, resync=True), timeout=10.0)
        assert begin.world_size == 1
        assert far.counts[LOAD] == 0
        broadcast = await begin_publication(run, 1, resync=True)
        assert broadcast.world_size == 1, "it is checked first, at its next heartbeat"
        await run.beat("gserver", 1)
        await asyncio.wait_for(run.manager.resync_needed(), 10)
        broadcast = await begin_publication(run, 1, resync=True)
        assert (await commit_publication(run, 1, broadcast.group_name)).done
        assert far.weight_version == "1"


async def test_the_publisher_is_asked_for_weights_that_only_it_has(tmp_path: Path) -> None:
    async with fleet(tmp_path, 1) as (run, (old,)), scripted() as (late,):
        begin = await begin_publication(run, 1)
        assert (await commit_publication(run, 1, begin.group_name)).done
        waiting = asyncio.create_task(run.manager.resync_needed())
        await still_waits(waiting)
        await run.register("gserver", 1, address=late.url)
        wanted = await asyncio.wait_for(waiting, 10)
        assert wanted == ["gserver/1"]
        old.calls.clear()
        assert (await publish(run, 1, resync=True)).done
        assert live_gservers(await run.client.status()) == {0, 1}
        assert calls_of_an_update(old) == []
        begin = await run.client.publish_begin(
            PublishBegin(version=1, weights=Snapshot(folder="/weights/v1"), resync=True), timeout=10.0
        )
        assert begin.world_size == 1, "nobody lacks it any more"


async def test_a_run_without_hope_ends_with_the_reason(tmp_path: Path) -> None:
    async with fleet(tmp_path, 1, attempts=2) as (run, (gserver,)), scripted() as (broken,):
        assert (await publish(run, 1)).done
        await gserver.die()
        broken.faults[LOAD] = ["error", "error"]
        await run.register("gserver", 0, address=broken.url, pid=999)
        working = [asyncio.create_task(work) for work in (keep_beating(run, "gserver"), resync(run, 1))]
        status = await run.until(lambda status: status.state == "failed", timeout=20)
        for task in working:
            task.cancel()
        assert (
            "no gserver serves weights v1, and gserver/0 could not be brought to them in 2 attempts" in status.message
        )
