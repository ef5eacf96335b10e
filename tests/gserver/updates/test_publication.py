"""Weight updates as transactions, with scripted gservers that fail at every step of the protocol."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from streamrl.errors import PeerError
from streamrl.transport.control import PublishReply, Status
from streamrl.transport.generation import MIXED_WEIGHTS
from tests.gserver.harness import (
    Run,
    begin_publication,
    commit_publication,
    keep_beating,
    live_gservers,
    publish,
    still_waits,
)
from tests.gserver.scripted import Fault, scripted
from tests.gserver.updates.scripted_fleet import TIMEOUT, calls_of_an_update, each, fleet

INIT = "/init_weights_update_group"
BEGIN = "/begin_weight_update"
NAME = "/update_weight_version"
RECEIVE = "/update_weights_from_distributed"
PAUSE = "/pause_generation"
END = "/end_weight_update"
CONTINUE = "/continue_generation"
DESTROY = "/destroy_weights_update_group"

FAULTS: list[Fault] = ["refuse", "nonsense", "error", "stall", "die"]


def last(status: Status) -> dict[str, Any]:
    return dict(status.publication["last"])


async def attempt(run: Run, version: int, *, group: str = "") -> tuple[PublishReply, str]:
    begin = await begin_publication(run, version, group=group)
    return await commit_publication(run, version, begin.group_name), begin.group_name


async def test_an_update_reaches_everyone_in_the_order_of_the_protocol(tmp_path: Path) -> None:
    async with fleet(tmp_path) as (run, gservers):
        reply, group = await attempt(run, 1)
        assert reply.done
        assert reply.error == ""
        assert reply.evicted == []
        assert 0 < reply.pause_seconds < TIMEOUT
        for rank, gserver in enumerate(gservers, start=1):
            assert calls_of_an_update(gserver) == [INIT, BEGIN, RECEIVE, RECEIVE, PAUSE, END, CONTINUE]
            assert gserver.bodies[INIT][0] == {
                "master_address": "127.0.0.1",
                "master_port": 29500,
                "rank_offset": rank,
                "world_size": 3,
                "group_name": group,
                "backend": "gloo",
            }
            assert gserver.bodies[RECEIVE] == [
                {
                    "names": [f"layer.{number}.weight"],
                    "dtypes": ["float32"],
                    "shapes": [[2, 3]],
                    "group_name": group,
                    "weight_version": "1",
                    "flush_cache": False,
                    "abort_all_requests": False,
                    "load_format": None,
                }
                for number in range(2)
            ]
            assert gserver.bodies[PAUSE][0] == {"mode": "in_place"}
            assert gserver.weight_version == "1"
        status = await run.client.status()
        assert status.ledger.policy_version == 1
        assert status.publication["state"] == "done"


async def test_a_server_takes_a_place_in_the_group_for_each_of_its_ranks(tmp_path: Path) -> None:
    async with fleet(tmp_path, 4) as (run, gservers):
        for gserver, ranks in zip(gservers, [1, 4, 2, 1], strict=True):
            gserver.ranks = ranks
        reply, group = await attempt(run, 1)
        assert reply.done
        joined = [gserver.bodies[INIT][0] for gserver in gservers]
        assert [body["rank_offset"] for body in joined] == [1, 2, 6, 8]
        assert {body["world_size"] for body in joined} == {9}
        await gservers[1].die()
        begin = await begin_publication(run, 2, group=group)
        assert begin.world_size == 5
        assert (await commit_publication(run, 2, begin.group_name)).done
        assert gservers[3].bodies[INIT][-1]["rank_offset"] == 4


async def test_a_group_is_formed_once_for_the_same_members_and_publisher(tmp_path: Path) -> None:
    async with fleet(tmp_path) as (run, gservers), scripted() as (restarted,):
        _, group = await attempt(run, 1)
        reply, same = await attempt(run, 2, group=group)
        assert (reply.done, same) == (True, group)
        assert [(gserver.counts[INIT], gserver.counts[DESTROY]) for gserver in gservers] == [(1, 0)] * 2
        reply, of_another_publisher = await attempt(run, 3)
        assert reply.done
        assert of_another_publisher != group
        assert [gserver.bodies[DESTROY] for gserver in gservers] == [[{"group_name": group}]] * 2
        await run.register("gserver", 1, address=restarted.url, pid=777)
        reply, with_another = await attempt(run, 4, group=of_another_publisher)
        assert reply.done
        assert with_another != of_another_publisher
        assert restarted.weight_version == "4"


async def test_a_version_that_is_served_is_not_published_again(tmp_path: Path) -> None:
    async with fleet(tmp_path) as (run, gservers):
        assert (await publish(run, 1)).done
        for version in (0, 1):
            with pytest.raises(PeerError, match=f"version {version} cannot be published: the gservers are at 1"):
                await begin_publication(run, version)
        assert [gserver.counts[BEGIN] for gserver in gservers] == [1, 1]


async def test_a_commit_that_is_sent_twice_gets_the_same_answer(tmp_path: Path) -> None:
    async with fleet(tmp_path) as (run, gservers):
        begin = await begin_publication(run, 1)
        first = await commit_publication(run, 1, begin.group_name)
        assert await commit_publication(run, 1, begin.group_name) == first
        assert [gserver.counts[END] for gserver in gservers] == [1, 1]


@each(FAULTS, RECEIVE, INIT, BEGIN)
async def test_a_gserver_that_fails_before_the_swap_rolls_the_update_back(
    tmp_path: Path, path: str, fault: Fault
) -> None:
    async with fleet(tmp_path) as (run, (good, bad)):
        bad.faults[path] = [fault]
        reply, group = await attempt(run, 1)
        assert not reply.done
        assert "gserver/1" in reply.error
        assert reply.evicted == [1]
        status = await run.client.status()
        assert status.ledger.policy_version == 0
        assert status.publication["state"] == "rolled_back"
        assert live_gservers(status) == {0}
        assert not good.paused
        assert (good.weight_version, bad.weight_version) == ("default", "default")

        again, other = await attempt(run, 1)
        assert again.done
        assert other != group
        assert good.weight_version == "1"
        assert live_gservers(await run.client.status()) == {0}
        assert good.counts[DESTROY] == 1


@each(FAULTS, END, PAUSE)
async def test_a_gserver_that_fails_in_the_swap_is_evicted_and_the_update_stands(
    tmp_path: Path, path: str, fault: Fault
) -> None:
    async with fleet(tmp_path) as (run, (good, bad)):
        bad.faults[path] = [fault]
        reply, group = await attempt(run, 1)
        assert reply.done
        assert reply.evicted == [1]
        status = await run.client.status()
        assert status.ledger.policy_version == 1
        assert live_gservers(status) == {0}
        assert not good.paused
        assert fault == "die" or not bad.paused
        if fault != "die":
            assert (await attempt(run, 2, group=group))[0].done
            assert live_gservers(await run.client.status()) == {0, 1}
            assert bad.weight_version == "2"


@pytest.mark.parametrize("fault", ["stall_after", "nonsense_after"])
async def test_a_swap_whose_answer_was_lost_counts(tmp_path: Path, fault: Fault) -> None:
    async with fleet(tmp_path) as (run, gservers):
        for gserver in gservers:
            gserver.faults[END] = [fault]
        reply, _ = await attempt(run, 1)
        assert reply.done
        assert reply.evicted == []
        assert live_gservers(await run.client.status()) == {0, 1}


@each(["refuse", "nonsense", "error", "stall"], END, PAUSE)
async def test_a_swap_that_fails_everywhere_is_rolled_back(tmp_path: Path, path: str, fault: Fault) -> None:
    async with fleet(tmp_path) as (run, gservers):
        for gserver in gservers:
            gserver.faults[path] = [fault]
        reply, _ = await attempt(run, 1)
        assert not reply.done
        status = await run.client.status()
        assert status.ledger.policy_version == 0
        assert live_gservers(status) == {0, 1}, "they serve what they served"
        assert not any(gserver.paused for gserver in gservers)
        assert (await attempt(run, 1))[0].done
        assert [gserver.weight_version for gserver in gservers] == ["1", "1"]


@pytest.mark.parametrize("fault", ["refuse", "nonsense", "error", "stall"])
async def test_a_gserver_that_cannot_be_resumed_is_resumed_at_its_next_heartbeat(tmp_path: Path, fault: Fault) -> None:
    async with fleet(tmp_path) as (run, (_, bad)):
        bad.faults[CONTINUE] = [fault]
        reply, _ = await attempt(run, 1)
        assert reply.done
        assert bad.paused
        assert live_gservers(await run.client.status()) == {0}
        await run.beat("gserver", 1)
        await run.until_live(0, 1)
        assert not bad.paused


async def test_a_transfer_may_take_long_as_long_as_it_goes_on(tmp_path: Path) -> None:
    """The deadline is on what comes next, so it is the same for a small model and for a large one."""
    async with fleet(tmp_path, timeout=2.5) as (run, gservers):
        for gserver in gservers:
            gserver.bucket_seconds = [0.5] * 6
        begin = await begin_publication(run, 1, buckets=6)
        status = await run.until(lambda s: s.publication.get("received", {}).get("gserver/1") == 1, timeout=20)
        assert status.publication["state"] == "prepare"
        assert status.publication["gservers"]["gserver/1"] == "receive"
        assert (await commit_publication(run, 1, begin.group_name, timeout=20)).done
        assert [gserver.counts[RECEIVE] for gserver in gservers] == [6, 6]


async def test_the_publishers_error_rolls_back_at_once(tmp_path: Path) -> None:
    async with fleet(tmp_path, timeout=60.0) as (run, gservers):
        for gserver in gservers:
            gserver.faults[RECEIVE] = ["stall"]
        begin = await begin_publication(run, 1)
        await run.until(lambda s: all(RECEIVE in gserver.calls for gserver in gservers))
        began = time.monotonic()
        reply = await commit_publication(run, 1, begin.group_name, error="broadcast failed")
        assert time.monotonic() - began < 30.0, "nobody has waited for a deadline"
        assert not reply.done
        assert reply.error == "the publisher failed: broadcast failed"
        assert reply.evicted == []
        assert [gserver.counts[PAUSE] for gserver in gservers] == [0, 0]
        assert (await publish(run, 1)).done


async def test_after_a_failure_the_others_have_little_time_left(tmp_path: Path) -> None:
    async with fleet(tmp_path, timeout=60.0) as (run, (slow, bad)):
        slow.faults[RECEIVE], bad.faults[RECEIVE] = ["stall"], ["refuse"]
        await begin_publication(run, 1)
        status = await run.until(lambda s: s.publication["state"] == "rolled_back", timeout=30)
        assert "gserver/1" in last(status)["error"]
        assert last(status)["evicted"] == [1]


async def test_a_publisher_that_never_commits_is_not_waited_for(tmp_path: Path) -> None:
    async with fleet(tmp_path) as (run, gservers):
        begin = await begin_publication(run, 1)
        status = await run.until(lambda s: s.publication["state"] == "rolled_back")
        assert f"the publisher did not commit within {TIMEOUT} s" in last(status)["error"]
        late = await commit_publication(run, 1, begin.group_name)
        assert not late.done
        assert [gserver.weight_version for gserver in gservers] == ["default", "default"]


async def test_a_publisher_that_begins_again_rolls_its_own_update_back(tmp_path: Path) -> None:
    async with fleet(tmp_path, timeout=30.0) as (run, gservers):
        gservers[0].faults[RECEIVE] = ["stall"]
        await begin_publication(run, 1)
        await run.until(lambda s: RECEIVE in gservers[0].calls)
        reply, _ = await attempt(run, 1)
        assert reply.done
        assert (await run.client.status()).publication["failed"] == 1


async def test_who_cannot_be_reached_holds_up_one_update_and_no_other(tmp_path: Path) -> None:
    """A firewall, for example: it is heard of, and what it is sent is lost."""
    async with fleet(tmp_path) as (run, (good, bad)):
        bad.faults["/server_info"] = ["stall"]
        begin = await begin_publication(run, 1)
        assert begin.world_size == 2
        assert (await commit_publication(run, 1, begin.group_name)).done
        assert bad.counts["/server_info"] == 1
        for version in (2, 3):
            assert (await publish(run, version)).done
        assert bad.counts["/server_info"] == 1
        assert good.weight_version == "3"
        await run.beat("gserver", 1)  # brings a check, which goes through
        await run.until(lambda status: bad.calls[-1] == "/model_info")
        begin = await begin_publication(run, 4)
        assert begin.world_size == 3
        assert (await commit_publication(run, 4, begin.group_name)).done
        assert live_gservers(await run.client.status()) == {0, 1}


async def test_an_update_waits_for_a_gserver_to_join(tmp_path: Path) -> None:
    async with fleet(tmp_path, 1, timeout=30.0) as (run, (dead,)), scripted() as (fresh,):
        await dead.die()
        publication = asyncio.create_task(publish(run, 1))
        await still_waits(publication)
        await run.register("gserver", 0, address=fresh.url, pid=888)
        assert (await asyncio.wait_for(publication, 30)).done
        assert fresh.weight_version == "1"


async def test_an_update_is_refused_in_time_though_a_gserver_that_answers_nothing_goes_on_beating(
    tmp_path: Path,
) -> None:
    async with fleet(tmp_path, 1, timeout=0.5) as (run, (gserver,)):
        gserver.faults["/server_info"] = ["stall"] * 1000
        beating = asyncio.create_task(keep_beating(run, "gserver"))
        async with asyncio.timeout(5):
            with pytest.raises(PeerError, match=r"v1 cannot be published: no gserver replied within 0\.5 s"):
                await begin_publication(run, 1)
        beating.cancel()


async def test_a_cancelled_manager_resumes_whom_it_paused(tmp_path: Path) -> None:
    async with fleet(tmp_path, 1, timeout=30.0) as (run, (gserver,)):
        gserver.faults[END] = ["stall"]
        begin = await begin_publication(run, 1)
        commit = asyncio.create_task(commit_publication(run, 1, begin.group_name))
        await run.until(lambda s: gserver.paused)
        run.serving.cancel()
        await asyncio.wait({run.serving}, timeout=20.0)
        assert not gserver.paused
        commit.cancel()
        await asyncio.gather(commit, return_exceptions=True)


class TestWithoutStaging:
    """Real SGLang writes each bucket straight into its weights."""

    async def test_gservers_are_paused_before_the_first_bucket(self, tmp_path: Path) -> None:
        async with fleet(tmp_path, staged=False) as (run, gservers):
            reply, _ = await attempt(run, 1)
            assert reply.done
            for gserver in gservers:
                assert calls_of_an_update(gserver) == [INIT, PAUSE, BEGIN, NAME, RECEIVE, RECEIVE, END, NAME, CONTINUE]
                assert [body["new_version"] for body in gserver.bodies[NAME]] == [MIXED_WEIGHTS, "1"]
                assert [body["weight_version"] for body in gserver.bodies[RECEIVE]] == [None, None]
                assert gserver.weight_version == "1"

    @pytest.mark.parametrize(("mode", "flushes"), [("in_place", [False, False]), ("retract", [False, True])])
    async def test_the_cache_is_flushed_with_the_last_bucket(
        self, tmp_path: Path, mode: str, flushes: list[bool]
    ) -> None:
        async with fleet(tmp_path, 1, staged=False, pause_mode=mode) as (run, (gserver,)):
            await attempt(run, 1)
            assert [body["flush_cache"] for body in gserver.bodies[RECEIVE]] == flushes

    @pytest.mark.parametrize("fault", FAULTS)
    async def test_mixed_weights_are_never_served(self, tmp_path: Path, fault: Fault) -> None:
        async with fleet(tmp_path, staged=False) as (run, (good, bad)):
            bad.faults[RECEIVE] = [fault]
            reply, _ = await attempt(run, 1)
            assert not reply.done
            assert reply.evicted == [0, 1]
            assert live_gservers(await run.client.status()) == set()
            assert good.calls.index("/abort_request") < good.calls.index(CONTINUE)
            assert not good.paused
            again, _ = await attempt(run, 1)
            assert again.done
            assert 0 in live_gservers(await run.client.status())
