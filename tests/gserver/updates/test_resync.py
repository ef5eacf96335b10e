"""Gservers that come late or back, weights in files, and checksums, with scripted gservers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from streamrl.errors import PeerError
from streamrl.gserver.updates.calls import WeightCalls
from streamrl.machine import machine_identity
from streamrl.transport.control import PublishBegin, PublishCommit, PublishReply, Snapshot
from streamrl.transport.generation import MIXED_WEIGHTS
from tests.gserver.harness import (
    Run,
    begin_publication,
    commit_publication,
    keep_beating,
    live_gservers,
    managed,
    small_config,
)
from tests.gserver.scripted import Fault, ScriptedGserver, scripted

BEGIN = "/begin_weight_update"
LOAD = "/update_weights_from_disk"
OFFER = "/offer_weights"
SEND = "/send_weights"
JOIN = "/init_weights_update_group"
RECEIVE = "/receive_weights"
LEAVE = "/destroy_weights_update_group"
VERIFY = "/weights_checker"
PAUSE = "/pause_generation"
NAME = "/update_weight_version"
END = "/end_weight_update"
CONTINUE = "/continue_generation"


@asynccontextmanager
async def fleet(
    folder: Path, count: int = 2, *, staged: bool = True, sends: bool = False, **weights: Any
) -> AsyncIterator[Any]:
    config = small_config(folder, gserver={"count": count}, weights={"timeout_seconds": 2.0} | weights)
    async with managed(config) as run, scripted(count, staged=staged, sends=sends) as gservers:
        for index, gserver in enumerate(gservers):
            await run.register("gserver", index, address=gserver.url, pid=100 + index)
        await run.until_live(*range(count))
        for gserver in gservers:
            gserver.calls.clear()
        yield run, gservers


async def publish(
    run: Run,
    version: int,
    *,
    machine: str = "",
    gpu: str = "",
    checksums: dict[str, str] | None = None,
    resync: bool = False,
) -> PublishReply:
    snapshot = Snapshot(folder=f"/weights/v{version}", machine=machine, gpu=gpu)
    begin = await run.client.publish_begin(PublishBegin(version=version, weights=snapshot, resync=resync), timeout=20.0)
    message = PublishCommit(version=version, group_name=begin.group_name, checksums=checksums or {})
    return await run.client.publish_commit(message, timeout=20.0)


def calls(gserver: ScriptedGserver) -> list[str]:
    return [path for path in gserver.calls if path not in ("/server_info", "/model_info")]


async def test_files_are_staged_and_compared_before_anybody_pauses(tmp_path: Path) -> None:
    async with fleet(tmp_path) as (run, gservers):
        for gserver in gservers:
            gserver.sums = {"a": "1"}
        assert (await publish(run, 1, checksums={"a": "1", "ignored": "2"})).done
        for gserver in gservers:
            assert calls(gserver) == [BEGIN, LOAD, VERIFY, PAUSE, END, CONTINUE]
            assert gserver.bodies[LOAD][0]["model_path"] == "/weights/v1"
            assert gserver.weight_version == "1"


async def test_one_without_a_stage_is_paused_while_it_reads(tmp_path: Path) -> None:
    async with fleet(tmp_path, 1, staged=False, pause_mode="retract") as (run, (gserver,)):
        gserver.sums = {"a": "1"}
        assert (await publish(run, 1, checksums={"a": "1"})).done
        assert calls(gserver) == [PAUSE, NAME, LOAD, VERIFY, NAME, CONTINUE]
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
        await run.until(lambda status: bad.counts[LOAD] == 2)  # it was tried again, as one that comes late
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


async def test_one_that_cannot_tell_what_came_is_asked_once(tmp_path: Path) -> None:
    async with fleet(tmp_path, 1, staged=False) as (run, (gserver,)):
        gserver.tells_received = False
        for version in (1, 2):
            assert (await publish(run, version, checksums={"a": "1"})).done
        assert gserver.counts[VERIFY] == 1


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


async def test_a_late_gserver_takes_the_files_without_the_others(tmp_path: Path) -> None:
    async with fleet(tmp_path, 1) as (run, (old,)), scripted() as (late,):
        assert (await publish(run, 1)).done
        old.calls.clear()
        await run.register("gserver", 1, address=late.url)
        await run.until_live(0, 1)
        assert late.weight_version == "1"
        assert calls(late) == [BEGIN, LOAD, VERIFY, PAUSE, END, CONTINUE] or VERIFY not in late.calls
        assert calls(old) == []


@pytest.mark.parametrize("fault", ["error", "nonsense", "refuse"])
@pytest.mark.parametrize("path", [BEGIN, LOAD, PAUSE, END, CONTINUE])
async def test_a_catch_up_that_fails_is_tried_again(tmp_path: Path, path: str, fault: Fault) -> None:
    async with fleet(tmp_path, 1) as (run, _), scripted() as (late,):
        assert (await publish(run, 1)).done
        late.faults[path] = [fault]
        await run.register("gserver", 1, address=late.url)
        async with asyncio.timeout(30):
            while live_gservers(await run.client.status()) != {0, 1} or late.paused:
                await run.beat("gserver", 1)  # one that could not be resumed is asked again at its heartbeat
                await asyncio.sleep(0.05)
        assert late.weight_version == "1"
        assert not late.paused


async def test_a_catch_up_does_not_delay_the_next_version_and_is_not_mistaken_for_it(tmp_path: Path) -> None:
    async with fleet(tmp_path, 1, timeout_seconds=10.0) as (run, (old,)), scripted() as (late,):
        assert (await publish(run, 1)).done
        late.faults[LOAD] = ["stall"]
        await run.register("gserver", 1, address=late.url)
        await run.until(lambda status: LOAD in late.calls, timeout=20)
        assert (await publish(run, 2)).done
        assert old.weight_version == "2"
        late.let_go()  # the catch-up to version 1 goes on, and ends
        await run.until_live(0, 1)
        assert late.weight_version == "2"


async def test_one_whose_catch_up_begins_while_others_are_asked_for_the_next_version_is_left_to_it(
    tmp_path: Path,
) -> None:
    """Two updates at once would take each other's weights away."""
    async with fleet(tmp_path, 1, timeout_seconds=10.0) as (run, (old,)), scripted() as (late,):
        assert (await publish(run, 1)).done
        old.calls.clear()
        old.faults["/server_info"] = ["stall"]
        late.faults |= {"/model_info": ["stall"], LOAD: ["stall"]}
        await run.register("gserver", 1, address=late.url)
        await run.until(lambda status: "/model_info" in late.calls)
        publishing = asyncio.create_task(publish(run, 2))
        await run.until(lambda status: "/server_info" in old.calls and late.counts["/server_info"] == 2)
        late.let_go()  # it is found to serve other weights
        await run.until(lambda status: LOAD in late.calls)
        old.let_go()
        reply = await publishing
        assert (reply.done, reply.error) == (True, "")
        assert late.counts[BEGIN] == 1
        late.let_go()
        await run.until_live(0, 1)
        assert late.weight_version == "2"


async def test_one_that_new_versions_overtake_is_taken_along_by_the_next(tmp_path: Path) -> None:
    """It is not resynced for ever, always to weights that have just been replaced."""
    async with fleet(tmp_path, 1, timeout_seconds=10.0) as (run, _), scripted() as (late,):
        assert (await publish(run, 1)).done
        late.faults[LOAD] = ["stall", "stall"]
        await run.register("gserver", 1, address=late.url)
        for version in (2, 3):
            await run.until(lambda status, loads=version - 1: late.counts[LOAD] == loads, timeout=20)
            assert (await publish(run, version)).done
            late.let_go()
        await run.until(lambda status: late.counts[END] + late.counts[CONTINUE] >= 2, timeout=20)
        await asyncio.sleep(0.2)
        assert late.counts[LOAD] == 2
        assert live_gservers(await run.client.status()) == {0}
        assert (await publish(run, 4)).done
        assert late.counts[LOAD] == 3
        assert live_gservers(await run.client.status()) == {0, 1}
        assert late.weight_version == "4"


async def test_the_next_gserver_at_an_address_waits_for_what_was_begun_for_the_one_before(tmp_path: Path) -> None:
    """A joined server is still at it when the gserver that joined it has died and the next one has come."""
    async with fleet(tmp_path, 1, staged=False, timeout_seconds=10.0) as (run, _), scripted(staged=False) as (server,):
        assert (await publish(run, 1)).done
        server.faults[LOAD] = ["stall"]
        await run.register("gserver", 1, address=server.url, pid=200)
        await run.until(lambda status: LOAD in server.calls, timeout=20)
        await run.register("gserver", 1, address=server.url, pid=201)
        await asyncio.sleep(0.3)
        assert server.counts[LOAD] == 1
        assert (await publish(run, 2)).done, "nor do updates wait for it, or take it along"
        assert server.counts[LOAD] == 1
        server.let_go()
        await run.until_live(0, 1)
        assert server.counts[LOAD] == 2
        assert server.weight_version == "2"


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
        assert needed == ["gserver/1"], "these gservers do not send weights: the publisher has to"


async def test_a_gserver_on_another_gpu_is_not_told_to_read_the_trainers(tmp_path: Path) -> None:
    async with (
        managed(small_config(tmp_path, weights={"timeout_seconds": 2.0})) as run,
        scripted(3) as (near, far, late),
    ):
        await run.register("gserver", 0, address=near.url, gpu="GPU-1")
        await run.register("gserver", 1, address=far.url, gpu="GPU-2")
        await run.until_live(0, 1)
        places = await run.client.gserver_places()
        assert (places.machines, places.gpus) == ([machine_identity()], ["GPU-1", "GPU-2"])
        with pytest.raises(
            PeerError, match="weights in memory of the trainer's GPU reach gservers on the trainer's GPU"
        ):
            await publish(run, 1, machine=machine_identity(), gpu="GPU-3")
        assert (await publish(run, 1, machine=machine_identity(), gpu="GPU-1")).done
        assert (near.weight_version, far.weight_version) == ("1", "default")
        needed = await asyncio.wait_for(run.manager.resync_needed(), 10)
        assert needed == ["gserver/1"], "the publisher has to send to it"
        await run.register("gserver", 2, address=late.url, gpu="GPU-1")
        await run.until_live(0, 2)
        assert late.weight_version == "1", "it reads what lies there"


async def test_the_publisher_is_asked_for_weights_that_only_it_has(tmp_path: Path) -> None:
    async with fleet(tmp_path, 1) as (run, (old,)), scripted() as (late,):
        begin = await begin_publication(run, 1)
        assert (await commit_publication(run, 1, begin.group_name)).done
        waiting = asyncio.create_task(run.manager.resync_needed())
        done, _ = await asyncio.wait({waiting}, timeout=0.2)
        assert not done
        await run.register("gserver", 1, address=late.url)
        wanted = await asyncio.wait_for(waiting, 10)
        assert wanted == ["gserver/1"]
        old.calls.clear()
        assert (await publish(run, 1, resync=True)).done
        assert live_gservers(await run.client.status()) == {0, 1}
        assert calls(old) == []
        begin = await run.client.publish_begin(
            PublishBegin(version=1, weights=Snapshot(folder="/weights/v1"), resync=True), timeout=10.0
        )
        assert begin.world_size == 1, "nobody lacks it any more"


async def broadcast(run: Run, version: int) -> None:
    begin = await begin_publication(run, version)
    assert (await commit_publication(run, version, begin.group_name)).done


async def test_a_late_gserver_is_sent_what_another_serves(tmp_path: Path) -> None:
    async with fleet(tmp_path, 1, sends=True) as (run, (old,)), scripted() as (late,):
        await broadcast(run, 1)
        waiting = asyncio.create_task(run.manager.resync_needed())
        old.calls.clear()
        await run.register("gserver", 1, address=late.url)
        await run.until_live(0, 1)
        await run.until(lambda status: LEAVE in calls(old) and LEAVE in calls(late))
        assert calls(old) == [OFFER, SEND, LEAVE], "it is not paused"
        assert calls(late) == [JOIN, BEGIN, RECEIVE, PAUSE, END, CONTINUE, LEAVE]
        assert old.bodies[OFFER][0]["version"] == "1"
        assert late.bodies[JOIN][0]["world_size"] == 2
        assert late.weight_version == "1"
        assert not waiting.done(), "the publisher is not asked"
        waiting.cancel()


@pytest.mark.parametrize("fault", ["error", "nonsense", "refuse", "stall", "die"])
@pytest.mark.parametrize("path", [OFFER, SEND])
async def test_one_that_does_not_send_is_replaced_by_another(tmp_path: Path, path: str, fault: Fault) -> None:
    async with fleet(tmp_path, 2, sends=True, timeout_seconds=1.0) as (run, (bad, good)), scripted() as (late,):
        await broadcast(run, 1)
        bad.faults[path] = [fault]
        await run.register("gserver", 2, address=late.url)
        await run.until(lambda status: 2 in live_gservers(status) and not late.paused, timeout=20)
        assert late.weight_version == "1"
        assert calls(bad).count(OFFER) == 1
        assert SEND in calls(good)


@pytest.mark.parametrize("path", [JOIN, BEGIN, RECEIVE, PAUSE, END, CONTINUE])
async def test_one_that_does_not_receive_is_sent_to_by_another(tmp_path: Path, path: str) -> None:
    async with fleet(tmp_path, 2, sends=True) as (run, old), scripted() as (late,):
        await broadcast(run, 1)
        late.faults[path] = ["error"]
        await run.register("gserver", 2, address=late.url)
        async with asyncio.timeout(30):
            while 2 not in live_gservers(await run.client.status()) or late.paused:
                await run.beat("gserver", 2)  # one that could not be resumed is asked again at its heartbeat
                await asyncio.sleep(0.05)
        assert late.weight_version == "1"
        assert all(calls(gserver).count(OFFER) <= 1 for gserver in old)


async def test_the_publisher_is_asked_when_nobody_can_send(tmp_path: Path) -> None:
    async with fleet(tmp_path, 2, sends=True, attempts=5) as (run, old), scripted() as (late,):
        await broadcast(run, 1)
        for gserver in old:
            gserver.faults[SEND] = ["error"]
        await run.register("gserver", 2, address=late.url)
        wanted = await asyncio.wait_for(run.manager.resync_needed(), 20)
        assert wanted == ["gserver/2"]
        assert [calls(gserver).count(OFFER) for gserver in old] == [1, 1]
        assert (await publish(run, 1, resync=True)).done
        assert live_gservers(await run.client.status()) == {0, 1, 2}
        assert late.weight_version == "1"


async def test_several_late_ones_wait_for_the_one_that_can_send(tmp_path: Path) -> None:
    async with fleet(tmp_path, 1, sends=True, timeout_seconds=10.0) as (run, (old,)), scripted(2) as late:
        await broadcast(run, 1)
        old.faults[SEND] = ["stall"]
        for index, gserver in enumerate(late, start=1):
            await run.register("gserver", index, address=gserver.url)
        await run.until(lambda status: SEND in old.calls, timeout=20)
        waiting = asyncio.create_task(run.manager.resync_needed())
        done, _ = await asyncio.wait({waiting}, timeout=0.3)
        assert not done
        assert calls(old).count(OFFER) == 1
        old.let_go()
        await run.until_live(0, 1, 2)
        assert not waiting.done()
        waiting.cancel()


@pytest.mark.parametrize("path", [OFFER, SEND, LEAVE])
async def test_the_managers_end_does_not_wait_for_one_that_sends(tmp_path: Path, path: str) -> None:
    async with fleet(tmp_path, 1, sends=True, timeout_seconds=60.0) as (run, (old,)), scripted() as (late,):
        await broadcast(run, 1)
        old.faults[path] = ["stall"]
        await run.register("gserver", 1, address=late.url)
        await run.until(lambda status: path in old.calls, timeout=20)
        run.serving.cancel()
        done, _ = await asyncio.wait({run.serving}, timeout=10)
        assert done
        assert not late.paused


async def test_a_run_without_hope_ends_with_the_reason(tmp_path: Path) -> None:
    async with fleet(tmp_path, 1, attempts=2) as (run, (gserver,)), scripted() as (broken,):
        assert (await publish(run, 1)).done
        await gserver.die()
        broken.faults[LOAD] = ["error", "error"]
        await run.register("gserver", 0, address=broken.url, pid=999)
        beating = asyncio.create_task(keep_beating(run, "gserver"))
        status = await run.until(lambda status: status.state == "failed", timeout=20)
        beating.cancel()
        assert (
            "no gserver serves weights v1, and gserver/0 could not be brought to them in 2 attempts" in status.message
        )


async def test_one_that_dies_has_not_failed(tmp_path: Path) -> None:
    """The manager cannot reach it, and has yet to learn from its silence that it has died."""
    async with fleet(tmp_path, 1, attempts=1) as (run, (gserver,)), scripted(2) as (dying, successor):
        assert (await publish(run, 1)).done
        await gserver.die()
        dying.faults[BEGIN] = ["die"]
        await run.register("gserver", 0, address=dying.url, pid=999)
        await run.until(lambda status: BEGIN in dying.calls, timeout=20)
        await asyncio.sleep(0.3)
        assert dying.calls.count(BEGIN) == 1
        assert (await run.client.status()).state != "failed"
        await run.register("gserver", 0, address=successor.url, pid=1000)
        await run.until_live(0)


async def test_the_publisher_is_not_asked_again_and_again_for_one_that_died(tmp_path: Path) -> None:
    async with fleet(tmp_path, 1) as (run, (gserver,)), scripted(2) as (dying, successor):
        begin = await begin_publication(run, 1)
        assert (await commit_publication(run, 1, begin.group_name)).done
        await gserver.die()
        dying.faults[BEGIN] = ["die"]
        await run.register("gserver", 0, address=dying.url, pid=999)
        assert await run.manager.resync_needed() == ["gserver/0"]
        assert not (await publish(run, 1, resync=True)).done
        waiting = asyncio.create_task(run.manager.resync_needed())
        done, _ = await asyncio.wait({waiting}, timeout=0.3)
        assert not done
        assert (await run.client.status()).state != "failed"
        await run.register("gserver", 0, address=successor.url, pid=1000)
        assert await asyncio.wait_for(waiting, 10) == ["gserver/0"]
        assert (await publish(run, 1, resync=True)).done
        await run.until_live(0)


async def test_a_step_that_fails_unforeseen_ends_the_update_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: Any, **options: Any) -> None:
        raise ZeroDivisionError("a fault of the manager's own")

    async with fleet(tmp_path, 1) as (run, (gserver,)):
        with monkeypatch.context() as patch:
            patch.setattr(WeightCalls, "begin", broken)
            reply = await publish(run, 1)
        assert not reply.done
        assert "a fault of the manager's own" in reply.error
        assert (await publish(run, 1)).done
        assert gserver.weight_version == "1"
