"""The manager over real HTTP: membership, admission, routing, leases, faulty calls."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest

from streamrl.config import Config
from streamrl.errors import EssentialFailed, PeerError
from streamrl.essential import ends_with_its_work
from streamrl.gserver.manager.core import Manager
from streamrl.gserver.manager.http import managing
from streamrl.records import lineage as lineages
from streamrl.records import progress
from streamrl.records.files import read_records
from streamrl.records.metrics import StepReport
from streamrl.records.progress import Progress
from streamrl.records.timeline import FrequentFailure, HeartbeatEntry, TimelineEntry
from streamrl.transport import manager_client
from streamrl.transport.addresses import is_wildcard
from streamrl.transport.control import (
    Admit,
    AskPlace,
    AskRoute,
    DataFacts,
    GroupInHand,
    Heartbeat,
    Keep,
    PublishBegin,
    Reject,
    Snapshot,
)
from tests.gserver.harness import (
    commit_publication,
    joined,
    keep_beating,
    live_gservers,
    managed,
    publish,
    small_config,
    still_waits,
)
from tests.gserver.scripted import scripted
from tests.ipv6 import IPV6


def checkpoint(folder: Path, **progressed: Any) -> str:
    """A checkpoint at version 3, whose run had trained on six groups."""
    found = folder / "checkpoints" / "step-000003"
    found.mkdir(parents=True)
    prompts = progress.prompts_digest(small_config(folder))
    progress.write(found, Progress(policy_version=3, trained=[(0, 6)], rejected=[], prompts=prompts, **progressed))
    return str(found)


async def waiting(call: Any) -> asyncio.Task[Any]:
    """`call` as a task that is seen to wait."""
    task = asyncio.ensure_future(call)
    await still_waits(task)
    return task


async def result_of(task: asyncio.Task[Any]) -> Any:
    """What `task` answers now that it was woken: long before its long poll would have ended."""
    return await asyncio.wait_for(task, 30)


async def test_a_process_with_another_configuration_is_refused_and_the_settings_are_named(tmp_path: Path) -> None:
    other = small_config(tmp_path, rollout={"group_size": 31}, run={"seed": 9, "host": "0.0.0.0"})
    async with managed(small_config(tmp_path)) as run:
        told = r"rollout\.group_size is 31 there and \d+ at the manager; run\.seed is 9 there and 0 at the manager \("
        with pytest.raises(PeerError, match=told) as refusal:
            await run.register("rollout", config=other)
        assert refusal.value.status == 409
        ask = AskPlace(role="gserver", config_digest=other.digest(), settings=other.shared_changes())
        with pytest.raises(PeerError, match=told):
            await run.client.place(ask, patience=1.0)
        assert (await run.client.status()).processes == []


@pytest.mark.parametrize(
    ("host", "refused"),
    [("0.0.0.0", True), ("*", True), pytest.param("::", True, marks=IPV6), ("127.0.0.1", False)],
)
async def test_nobody_tells_others_of_a_loopback_address(tmp_path: Path, host: str, refused: bool) -> None:
    async with managed(small_config(tmp_path), host=host) as run:
        assert not is_wildcard(urlsplit(run.url).hostname or "")
        if refused:
            with pytest.raises(PeerError, match=r"announces http://127\.0\.0\.1:1, which only its own machine reaches"):
                await run.register("gserver", address="http://127.0.0.1:1")
        else:
            await run.register("gserver", address="http://127.0.0.1:1")
        await run.register("gserver", 1, address="http://10.0.0.1:1")


async def test_a_process_whose_manager_no_longer_watches_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(self: Manager) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(Manager, "watch", fail)
    with pytest.raises(EssentialFailed, match="leases and silences failed: KeyError: 'a bug'"):
        async with ends_with_its_work(), managing(small_config(tmp_path), host="127.0.0.1", port=0):
            await asyncio.sleep(30)


async def test_processes_that_do_not_join_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with managed(small_config(tmp_path, limits={"start_seconds": 0.05})) as run:
        await asyncio.sleep(0.5)
        assert run.manager.status().state == "joining"
    assert "the run still waits for gserver/0, rollout/0, model_worker/0" in caplog.text


async def test_a_resumed_run_takes_a_larger_total_and_refuses_a_pool_with_the_old_one(tmp_path: Path) -> None:
    """The manager's total ends admission: a trainer with a larger one would wait for groups for ever."""
    began = checkpoint(tmp_path, data_rows=6)

    def resumed(epochs: int) -> Config:
        return small_config(tmp_path, run={"resume_from": began, "total_train_epochs": epochs})

    async with managed(resumed(2)) as run:
        old = resumed(1)
        with pytest.raises(PeerError, match=r"run\.total_train_epochs is 1 there and 2 at the manager"):
            await run.register("model_worker", config=old, begins_from=progress.identity(old))
        await run.register("model_worker", begins_from=progress.identity(old))
        await run.register("rollout")
        await run.client.admit(Admit(worker=0, count=0, data=DataFacts(rows=6)))
        assert (await run.client.status()).ledger.room > 0


async def test_of_a_run_that_goes_on_a_gserver_may_begin_without_the_checkpoint(tmp_path: Path) -> None:
    """On a machine that has no copy: it gets the weights before it is given groups."""
    config = small_config(tmp_path, run={"resume_from": checkpoint(tmp_path)})
    identity = progress.identity(config)
    async with managed(config) as run, scripted() as (fresh,):
        await run.register("gserver", 9, address=fresh.url)
        assert await run.manager.resync_needed() == ["gserver/9"]
        await run.register("rollout")
        weights = Snapshot(folder="/weights/v3")
        begin = await run.client.publish_begin(PublishBegin(version=3, weights=weights, resync=True), timeout=10)
        assert (await commit_publication(run, 3, begin.group_name)).done
        assert await run.admit(1), "nobody starts what waited for weights"

        of_checkpoint = {"model": "the checkpoint's", "begins_from": identity}
        await run.register("gserver", 0, model="the model's")
        await run.register("model_worker", 0, **of_checkpoint)
        await run.register("gserver", 1, model="the model's")
        await run.register("gserver", 2, **of_checkpoint)
        with pytest.raises(PeerError, match=r"gserver/3 on \S+ begins with other weights"):
            await run.register("gserver", 3, model="another's", begins_from=identity)


async def test_a_heartbeat_of_a_stranger_is_told_to_register(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager_client, "PATIENCE_SECONDS", 0.3)  # it is asked again, since it may register yet
    async with managed(small_config(tmp_path)) as run:
        assert not (await run.beat("rollout", 3)).known
        with pytest.raises(PeerError, match="rollout/3 is not registered"):
            await run.admit(worker=3)


async def test_the_failure_of_a_worker_is_in_the_status_and_in_the_timeline(tmp_path: Path) -> None:
    failure = FrequentFailure("KeyError: 'x'", 5, "row 4 (seq 7)")
    async with managed(small_config(tmp_path)) as run:
        await run.register("rollout")
        await run.client.heartbeat(Heartbeat(role="rollout", index=0, stats={}, failure=failure))
        (process,) = (await run.client.status()).processes
        assert process.failure == failure
    entries = read_records(run.config.run_dir / "timeline.jsonl", TimelineEntry)  # type: ignore[arg-type]
    assert [entry.failure for entry in entries if isinstance(entry, HeartbeatEntry)] == [failure]


async def test_the_run_is_joining_until_all_have_registered(tmp_path: Path) -> None:
    async with managed(small_config(tmp_path)) as run, scripted() as (gserver,):
        status = await run.client.status()
        assert status.state == "joining"
        assert status.message == "waits for gserver/0, rollout/0, model_worker/0 to join"
        await run.join(gserver)
        assert (await run.client.status()).message == "waits for model_worker/0 to join"
        await run.register("model_worker", address="tcp://w")
        assert (await run.client.status()).state == "running"


async def test_snapshots_need_model_worker_0_on_this_host(tmp_path: Path) -> None:
    async with managed(small_config(tmp_path)) as run:
        assert not run.manager.reads_snapshots
        await run.register("model_worker", 1, address="tcp://b", machine="elsewhere")
        assert (run.manager.reads_snapshots, run.manager.trainer_is_here) == (False, False)
        await run.register("model_worker", 0, address="tcp://a")
        assert (run.manager.reads_snapshots, run.manager.trainer_is_here) == (True, False)


async def test_topology_waits_for_those_who_are_missing(tmp_path: Path) -> None:
    async with managed(small_config(tmp_path)) as run:
        await run.register("model_worker", 1, address="tcp://b")
        topology = await waiting(run.client.topology("model_worker", 2, patience=5.0))
        await run.register("model_worker", 0, address="tcp://a")
        assert [peer.address for peer in await result_of(topology)] == ["tcp://a", "tcp://b"]


async def test_a_run_admits_by_the_staleness_that_its_last_step_reports(tmp_path: Path) -> None:
    def report(step: int, staleness: float | None) -> StepReport:
        metrics = {} if staleness is None else {"admitted_staleness": staleness}
        return StepReport(step=step, time=1.0, metrics=metrics, token_ages={})

    async with joined(tmp_path) as (run, _):
        run.manager.report(report(0, 0))
        assert await run.admit_seqs() == [0, 1]
        call = await waiting(run.admit_seqs())
        run.manager.report(report(1, 7))  # more than configured is never admitted
        assert await result_of(call) == [2, 3]
        assert (await run.client.status()).ledger.room == 0
        run.manager.report(report(2, 0))
        run.take(0, 1, 2, 3)
        assert (await publish(run, 1)).done
        call = await waiting(run.admit_seqs())
        run.manager.report(report(3, None))
        assert await result_of(call) == [4, 5]


async def test_a_waiting_admission_is_woken_by_a_rejection_and_by_a_new_version(tmp_path: Path) -> None:
    async with joined(tmp_path) as (run, _):
        assert await run.admit_seqs() == [0, 1, 2, 3]
        admission = await waiting(run.admit_seqs())
        await run.client.reject(Reject(worker=0, seq=2, reason="too long"))
        assert await result_of(admission) == [4]
        assert list(run.manager.ledger.rejected) == [2]
        run.take(0, 1, 3, 4)
        admission = await waiting(run.client.admit(Admit(worker=0, count=9)))
        assert (await publish(run, 1)).done
        reply = await result_of(admission)
        assert ([a.seq for a in reply.admissions], reply.policy_version) == ([5, 6], 1)


async def test_nothing_is_admitted_before_all_gservers_have_joined(tmp_path: Path) -> None:
    config = small_config(tmp_path, gserver={"count": 2})
    async with managed(config) as run, scripted(2) as (first, second):
        await run.join(first)
        admission = await waiting(run.admit(2))
        await run.register("gserver", 1, address=second.url)
        assert {a.gserver for a in await result_of(admission)} == {first.url, second.url}


async def test_asking_again_for_an_admission_whose_answer_was_lost_gives_the_same_groups(tmp_path: Path) -> None:
    async with joined(tmp_path) as (run, _):
        body = msgspec.json.encode(Admit(worker=0, count=2, ticket="t"))
        answers = []
        async with run.session() as session:
            for _ in range(2):
                async with session.post(f"{run.url}/admit", data=body) as response:
                    answers.append(await response.json())
        assert answers[0] == answers[1]
        assert (await run.client.status()).ledger.running == 2


async def test_a_caller_that_hung_up_is_admitted_nothing(tmp_path: Path) -> None:
    async with joined(tmp_path) as (run, _):
        await run.admit()
        gone = await waiting(run.client.admit(Admit(worker=0, count=9)))
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        await asyncio.sleep(0.1)  # the hang-up has to reach the manager
        await run.client.reject(Reject(worker=0, seq=0, reason="filtered"))
        status = await run.client.status()
        assert (status.ledger.running, status.ledger.room) == (3, 1)


async def test_a_failed_gserver_is_replaced_for_its_group(tmp_path: Path) -> None:
    async with joined(tmp_path, 2) as (run, [first, second]):
        await run.admit(1)
        await first.die()
        reply = await run.client.route(AskRoute(worker=0, seq=0, failed=first.url))
        assert reply.gserver == second.url
        status = await run.until(lambda s: live_gservers(s) == {1})
        assert {p.index: p.stats["groups_in_flight"] for p in status.processes if p.role == "gserver"} == {0: 0, 1: 1}
        assert {a.gserver for a in await run.admit()} == {second.url}


async def test_a_route_waits_for_a_gserver_to_come_back(tmp_path: Path) -> None:
    async with joined(tmp_path) as (run, [dead]), scripted() as [reborn]:
        await run.admit(1)
        await dead.die()
        route = await waiting(run.client.route(AskRoute(worker=0, seq=0, failed=dead.url)))
        await run.register("gserver", 0, address=reborn.url, pid=999)
        assert (await result_of(route)).gserver == reborn.url


async def test_a_restarted_worker_gives_its_prompts_back(tmp_path: Path) -> None:
    async with joined(tmp_path, workers=2) as (run, _):
        assert await run.admit_seqs(worker=0) == [0, 1]
        await run.register("rollout", 0, pid=200)
        assert (await run.client.status()).ledger.running == 2, "the same process only asked again"
        await run.register("rollout", 0, pid=999)
        assert (await run.client.status()).ledger.returned == 2
        assert await run.admit_seqs(worker=1) == [0, 1]


async def test_the_prompts_of_a_silent_worker_go_to_another(tmp_path: Path) -> None:
    async with joined(tmp_path, workers=2, limits={"silence_seconds": 0.8}) as (run, _):
        beating = asyncio.create_task(keep_beating(run, "gserver", "rollout"))
        assert await run.admit_seqs(worker=1) == [0, 1]
        assert await run.admit_seqs(worker=0) == [2]
        assert await run.admit_seqs(worker=0) == [3]
        admission = asyncio.create_task(run.admit_seqs(worker=0))
        assert await result_of(admission) == [0, 1]
        assert (await run.process("rollout", 1)).state == "silent"
        assert (await run.client.status()).ledger.expired >= 2
        beating.cancel()


async def test_heartbeats_keep_leases(tmp_path: Path) -> None:
    async with joined(tmp_path, limits={"silence_seconds": 0.8}) as (run, _):
        await run.admit()
        beating = asyncio.create_task(keep_beating(run, "gserver", "rollout"))
        await asyncio.sleep(1.2)
        assert (await run.client.status()).ledger.expired == 0
        beating.cancel()


async def test_a_silent_gserver_leaves_routing_and_returns(tmp_path: Path) -> None:
    async with joined(tmp_path, 2, limits={"silence_seconds": 0.8}) as (run, [first, second]):
        beating = asyncio.create_task(keep_beating(run, "gserver", "rollout"))
        await run.until(lambda s: live_gservers(s) == {0})
        assert (await run.process("gserver", 1)).state == "silent"
        assert {a.gserver for a in await run.admit(2)} == {first.url}
        assert (await run.beat("rollout")).unanswering == [second.url], "what it was asked for goes on elsewhere"
        silence = await run.client.silence(0)
        assert [(p.role, p.index) for p in silence.processes] == [("gserver", 1)], "the launcher replaces it"
        heard = asyncio.create_task(run.client.silence(silence.changes))
        await run.beat("gserver", 1)
        assert (await asyncio.wait_for(heard, 30)).processes == []
        assert (await run.beat("rollout")).unanswering == []
        await run.until_live(0, 1)
        assert {a.gserver for a in await run.admit(2)} == {second.url}
        beating.cancel()


async def test_when_the_run_has_gone_back_workers_keep_what_would_be_admitted_next(tmp_path: Path) -> None:
    async with joined(tmp_path, workers=2) as (run, [gserver]):
        assert await run.admit_seqs(worker=0) == [0, 1]
        assert await run.admit_seqs(worker=1) == [2]
        assert await run.admit_seqs(worker=0) == [3]
        run.manager.ledger.advance(1)
        assert await run.admit_seqs(1, worker=1) == [4]
        lineage = progress.begin_lineage(run.config, cause="model_worker/0 died")
        await run.manager.begin(run.config, lineage=lineage)
        assert run.manager.ledger.room == 4

        in_flight = GroupInHand(3, gserver.url, requests=2, tokens=70)
        with pytest.raises(PeerError, match="gone back behind; it registers again first"):
            await run.manager.groups.keep(Keep(0, [in_flight]))
        for worker in range(2):
            granted = await run.register("rollout", worker, pid=200 + worker)
            assert [(each.number, each.cause) for each in granted.lineages] == [(1, "model_worker/0 died")]
        kept = await run.client.keep(Keep(0, [in_flight, GroupInHand(1)]))
        assert (kept.kept, kept.policy_version) == ([1, 3], 0)
        assert (await run.client.keep(Keep(0, [in_flight, GroupInHand(1)]))).kept == [1, 3], "asked again"
        assert (await run.client.keep(Keep(1, [GroupInHand(3), GroupInHand(4)]))).kept == []
        (serving,) = [p for p in (await run.client.status()).processes if p.role == "gserver"]
        assert run.manager.ledger.groups[3].route.work == (2, 70), serving
        assert await run.admit_seqs(worker=0) + await run.admit_seqs(worker=1) == [0, 2]
        assert run.manager.ledger.room == 0

        run.manager.report(StepReport(step=1, time=0.0, metrics={}, token_ages={}, spans=[]))
        assert [each.groups_kept for each in lineages.read(run.config.run_dir)] == [2]


async def test_groups_in_replies_that_a_worker_did_not_wait_for_are_given_out_again(tmp_path: Path) -> None:
    """A worker that hears that the run went back drops its calls, whose replies may be on their way."""
    async with joined(tmp_path) as (run, _):
        await run.manager.begin(run.config, lineage=progress.begin_lineage(run.config, cause="model_worker/0 died"))
        await run.register("rollout", pid=200)
        run.manager.groups.start()
        assert await run.admit_seqs(2) == [0, 1], "a reply that is lost"
        run.manager.groups.pause(True)
        late = await waiting(run.client.admit(Admit(worker=0, count=2)))
        assert (await run.client.keep(Keep(0, [GroupInHand(1)], times_back=1))).kept == [1]
        run.manager.groups.pause(False)
        assert (await result_of(late)).admissions == [], "its caller has gone back"
        given = await run.client.admit(Admit(worker=0, count=2, times_back=1))
        assert [admission.seq for admission in given.admissions] == [0, 2]


async def test_a_gserver_that_does_not_answer_is_checked_again_at_its_heartbeat(tmp_path: Path) -> None:
    async with managed(small_config(tmp_path)) as run, scripted() as (gserver,):
        gserver.faults["/server_info"] = ["error"]
        gserver.faults["/model_info"] = ["nonsense"]
        await run.register("gserver", address=gserver.url)
        await run.until(lambda s: gserver.counts["/server_info"] == 1)
        await run.beat("gserver")
        await run.until(lambda s: gserver.counts["/model_info"] == 1)
        assert live_gservers(await run.client.status()) == set()
        await run.beat("gserver")
        await run.until_live(0)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"\xff\xfe", b"[]", b'{"role": "king"}', b'{"a":' * 5000, b'{"index": "x"}']
)
@pytest.mark.parametrize("path", ["/register", "/heartbeat", "/admit", "/publish/begin"])
async def test_malformed_bodies_are_refused(tmp_path: Path, path: str, body: bytes) -> None:
    async with managed(small_config(tmp_path)) as run, run.session() as session:
        async with session.post(run.url + path, data=body) as response:
            assert response.status == 400
            assert f"POST {path} takes a " in (await response.json())["error"]["message"]
        assert (await run.client.status()).state == "joining"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("GET", "/admit", 405),
        ("POST", "/status", 405),
        ("GET", "/topology?role=king&count=1", 400),
        ("GET", "/topology?role=gserver&count=many", 400),
        ("GET", "/topology?role=gserver&count=nan", 400),
        ("GET", "/topology?role=gserver&wait=nan", 400),
        ("GET", "/topology?role=gserver&wait=-1", 400),
        ("GET", "/silent?after=-1", 400),
    ],
)
async def test_calls_that_do_not_exist_or_make_no_sense(tmp_path: Path, method: str, path: str, status: int) -> None:
    async with (
        managed(small_config(tmp_path)) as run,
        run.session() as session,
        session.request(method, run.url + path) as response,
    ):
        assert response.status == status
        assert (await response.json())["error"]["message"]


async def test_a_fault_of_the_manager_does_not_end_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(self: Manager) -> None:
        raise RuntimeError("a bug")

    async with managed(small_config(tmp_path)) as run, run.session() as session:
        with monkeypatch.context() as patch:
            patch.setattr(Manager, "status", fault)
            async with session.get(run.url + "/status") as response:
                assert response.status == 500
                assert "RuntimeError: a bug" in (await response.json())["error"]["message"]
        assert (await run.client.status()).state == "joining"


async def test_figures_for_people_and_for_prometheus(tmp_path: Path) -> None:
    async with joined(tmp_path) as (run, _), run.session() as session:
        await run.admit()
        run.take(0, 1)
        run.drop(2)
        await run.beat("gserver", stats={"running": 3.0, "tokens_total": 70.0}, waiting_for="requests")
        assert (await publish(run, 1)).done
        run.manager.report(
            StepReport(step=1, time=1.0, metrics={"loss": 0.25, "odd": math.nan}, token_ages={0: 5, 1: 2}, seqs=[0, 1])
        )
        status = await run.client.status()
        assert status.last_step is not None
        assert status.last_step.metrics == {"loss": 0.25}
        assert status.last_step.token_ages == {0: 5, 1: 2}
        assert (await run.process("gserver")).waiting_for == "requests"
        async with session.get(run.url + "/metrics") as response:
            lines = (await response.text()).splitlines()
        for line in (
            "streamrl_ledger_policy_version 1.0",
            "streamrl_ledger_accepted 2.0",
            "streamrl_ledger_dropped_total 1.0",
            "streamrl_admissions_total 4.0",
            "streamrl_publications_total 1.0",
            'streamrl_process_live{index="0",role="gserver"} 1.0',
            'streamrl_process_stat{index="0",role="gserver",stat="tokens_total"} 70.0',
            'streamrl_step_metric{metric="loss"} 0.25',
        ):
            assert line in lines


async def test_the_timeline_tells_what_the_pools_did(tmp_path: Path) -> None:
    async with joined(tmp_path) as (run, _):
        await run.beat("rollout", stats={"groups": 2.0}, waiting_for="room")
        await publish(run, 1)
        await run.beat("gserver", stats={"running": 3.0})
    lines = [json.loads(line) for line in (run.config.run_dir / "timeline.jsonl").read_text().splitlines()]
    beat, publication, of_gserver = lines
    assert of_gserver["stats"] == {"running": 3.0, "policy_version": 1.0}  # and which weights it serves
    assert (beat["kind"], beat["role"], beat["stats"], beat["waiting_for"]) == (
        "heartbeat",
        "rollout",
        {"groups": 2.0},
        "room",
    )
    assert (publication["kind"], publication["version"], publication["done"]) == ("publication", 1, True)
    assert publication["begin"] <= publication["end"] == publication["time"]
    assert 0 < publication["pause"] < 1


async def test_the_first_worker_tells_the_size_of_the_data_and_epochs_bound_what_is_handed_out(tmp_path: Path) -> None:
    async with joined(tmp_path, run={"total_train_epochs": 1}, staleness={"max_staleness": 9}) as (run, _):
        asked = await waiting(run.manager.data())
        admit = Admit(worker=0, count=100, data=DataFacts(5, "abc"))
        seqs = [admission.seq for admission in (await run.client.admit(admit)).admissions]
        assert seqs == [0, 1, 2, 3, 4, 5]  # three batches of two
        assert await result_of(asked) == DataFacts(5, "abc")
        assert (await run.client.status()).data_rows == 5
        run.take(0, 1, 2, 3)
        await waiting(run.admit())
        await run.client.reject(Reject(worker=0, seq=4, reason="no"))
        assert (await run.client.status()).ledger.room == 0  # 4 trained and 1 given up: that was the epoch


@pytest.mark.parametrize("other", [DataFacts(6, "abc"), DataFacts(5, "xyz")])
async def test_workers_that_see_other_data_stop_the_run(tmp_path: Path, other: DataFacts) -> None:
    async with joined(tmp_path) as (run, _):
        await run.register("rollout", 1)
        await run.client.admit(Admit(worker=0, count=1, data=DataFacts(5, "abc")))
        assert (await run.client.admit(Admit(worker=1, count=1, data=other))).stop
        status = await run.client.status()
        assert status.state == "failed"
        assert f"rollout/1 has {other.rows} rows of training data (fingerprint {other.digest})" in status.message
        assert "the run has 5 (abc)" in status.message


@pytest.mark.parametrize(("digest", "fails"), [("abc", False), ("xyz", True)])
async def test_a_run_is_resumed_with_its_data_alone(tmp_path: Path, digest: str, fails: bool) -> None:
    began = checkpoint(tmp_path, data_rows=5, data_digest="abc")
    async with managed(small_config(tmp_path, run={"resume_from": began})) as run:
        await run.register("rollout")
        await run.client.admit(Admit(worker=0, count=0, data=DataFacts(5, digest)))
        assert ((await run.client.status()).state == "failed") == fails
