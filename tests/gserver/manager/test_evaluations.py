"""Evaluations: the decision in virtual time and under any order of its calls; the calls over real HTTP."""

from __future__ import annotations

import asyncio
import logging
import math
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from streamrl.config import EvaluationConfig
from streamrl.errors import PeerError, StreamRLError, WireError
from streamrl.gserver.manager.evaluations import GROUPS_BETWEEN, MAX_LOSSES, Evaluations, check_result, report_of
from streamrl.gserver.manager.gserver import Gserver, Work
from streamrl.gserver.manager.registry import MemberEvent
from streamrl.gserver.manager.routing import Fleet
from streamrl.records.evaluation import EvaluationReport, pass_at_k
from streamrl.transport.control import (
    Admission,
    Admit,
    DataFacts,
    EvaluationStatus,
    EvaluationTask,
    HeldOutResult,
    Leave,
)
from streamrl.transport.generation import ServerInfo
from tests.gserver.harness import NO_PROCESS, Run, joined, managed, small_config, still_waits
from tests.gserver.scripted import scripted


def gserver_of(index: int, *, most_requests: int = 0) -> Gserver:
    """One that serves; `most_requests`: its slots, 0: any number."""
    gserver = Gserver(index, f"http://g{index}")
    gserver.info = ServerInfo(max_running_requests=most_requests)
    gserver.handle(MemberEvent.FOUND_CURRENT)
    return gserver


class Played:
    """Evaluations on a fleet, with a clock that the test sets."""

    def __init__(self, *, gservers: int = 1, most_requests: int = 0, rows: int = 10, **evaluation: Any) -> None:
        self.config = EvaluationConfig(**{"every": "1 step", "max_concurrent": 4} | evaluation)
        self.fleet = Fleet()
        for index in range(gservers):
            self.fleet.join(gserver_of(index, most_requests=most_requests))
        self.now = 1000.0
        self.reports: list[EvaluationReport] = []
        self.evaluations = Evaluations(self.config, fleet=self.fleet, clock=lambda: self.now)
        self.evaluations.on_report = self.reports.append
        self.evaluations.set_prompts(rows)

    @property
    def load(self) -> list[int]:
        """Requests that are routed to each gserver."""
        return [gserver.load.routed.requests for gserver in self.fleet.all()]

    @property
    def status(self) -> EvaluationStatus:
        return self.evaluations.status()

    def take(self, worker: str = "rollout/0", *, begun: int = 0, wait: bool = False) -> Admission | None:
        return self.evaluations.take(worker, groups_begun=begun, groups_wait=wait, now=0.0)

    def taken(self, worker: str = "rollout/0", **groups: Any) -> Admission:
        admission = self.take(worker, **groups)
        assert admission is not None
        return admission

    def end(self, admission: Admission, **fields: Any) -> HeldOutResult:
        result = result_of(admission, samples=self.config.samples, **fields)
        self.evaluations.count(result)
        return result

    def make_all(self) -> None:
        while (admission := self.take()) is not None:
            self.end(admission)


def result_of(admission: Admission, *, samples: int = 1, **fields: Any) -> HeldOutResult:
    figures = {"rewards": [1.0] * samples, "lengths": [3] * samples, "oldest_version": 1, "newest_version": 2}
    return HeldOutResult(0, admission.evaluation, admission.seq, **({} if "error" in fields else figures) | fields)


# --- the decision ---


def test_an_evaluation_from_its_request_to_its_report() -> None:
    played = Played(rows=2, samples=2, sampling={"temperature": 1.0}, max_concurrent=8)
    assert played.take() is None  # none was requested
    played.evaluations.request(7)
    task = played.status.waiting
    assert task is not None
    first, second = played.taken(), played.taken()
    assert played.take() is None  # there are two prompts
    assert [(a.seq, a.evaluation, a.gserver, a.name) for a in (first, second)] == [
        (seq, task.id, "http://g0", "gserver/0") for seq in (0, 1)
    ]
    assert played.load == [4]
    played.now += 5
    played.end(second, rewards=[0.0, 2.0], cut=1)
    assert (played.load, played.status.prompts_done, played.reports) == ([2], 1, [])
    played.end(first, error="KeyError: 'x'", row="row 3")
    (report,) = played.reports
    assert (report.policy_version, report.step, report.seconds) == (7, 7, 5.0)
    assert (report.prompts, report.rejected, report.reward_mean, report.cut_share) == (1, 1, 1.0, 0.5)
    assert report.failure is not None
    assert (report.failure.error, report.failure.example) == ("KeyError: 'x'", "row 3")
    assert played.load == [0]
    assert (played.status.done, played.status.last, played.status.running) == (1, report, None)


def test_training_groups_that_lack_a_place_come_first_but_not_for_ever() -> None:
    played = Played(gservers=2, most_requests=1, max_concurrent=99)
    played.evaluations.request(1)
    played.taken(begun=10, wait=True)  # the first one has its turn at once
    begun = [played.take(begun=10 + groups, wait=True) is not None for groups in range(2 * GROUPS_BETWEEN + 1)]
    assert [number for number, has in enumerate(begun) if has] == [GROUPS_BETWEEN, 2 * GROUPS_BETWEEN]


def test_an_evaluation_ends_though_training_takes_every_place_that_is_free() -> None:
    """Generation is the bottleneck: of ten slots none is ever left, and a group waits at any time."""
    played = Played(most_requests=10, rows=40, max_concurrent=4)
    played.evaluations.request(1)
    routes, begun, shares = [], 0, []
    made: list[Admission] = []
    for tick in range(1000):
        while (route := played.fleet.assign(Work(1, 0), now=float(tick))) is not None:  # training is first in line
            routes.append(route)
            begun += 1
        if (admission := played.take(begun=begun, wait=True)) is not None:
            made.append(admission)
        shares.append(len(made) / (len(made) + len(routes)))
        if routes:
            played.fleet.release(routes.pop(0))
        if made and tick % 4 == 0:
            played.end(made.pop(0))
        if played.reports:
            break
    assert played.reports
    assert played.reports[0].prompts == 40
    assert max(shares) < 0.3  # training keeps most of the gserver
    assert begun >= 39 * GROUPS_BETWEEN


def test_a_prompt_moves_to_another_gserver_with_its_load_as_long_as_its_worker_makes_it() -> None:
    played = Played(gservers=2, samples=3, sampling={"temperature": 1.0})
    played.evaluations.request(1)
    admission = played.taken()
    assert played.load == [3, 0]

    def moved(worker: str, evaluation: str, seq: int, avoid: str) -> str | None:
        found = played.evaluations.reroute(worker, evaluation, seq, avoid=avoid, now=0.0)
        return found.address if found is not None else None

    assert moved("rollout/0", admission.evaluation, 0, "http://g0") == "http://g1"
    assert played.load == [0, 3]
    for stranger in (
        ("rollout/1", admission.evaluation, 0),
        ("rollout/0", "another", 0),
        ("rollout/0", admission.evaluation, 5),
    ):
        assert moved(*stranger, "http://g1") == "http://g0"
        assert played.load == [0, 3]  # it finds a gserver, whose load does not change


def test_a_prompt_that_is_lost_again_and_again_fails_but_not_for_workers_that_leave() -> None:
    played = Played(rows=1)
    played.evaluations.request(1)
    for _ in range(5):
        played.taken()
        played.evaluations.give_back("rollout/0", lost=False)
    for _ in range(MAX_LOSSES):
        assert not played.reports
        assert played.taken().seq == 0
        played.evaluations.give_back("rollout/0", lost=True)
    (report,) = played.reports
    assert (report.prompts, report.rejected) == (0, 1)
    assert report.failure is not None
    assert report.failure.error == f"{MAX_LOSSES} rollout workers were lost with it"


def test_one_evaluation_waits_and_the_latest_wins(caplog: pytest.LogCaptureFixture) -> None:
    played = Played(rows=1)
    with caplog.at_level(logging.INFO):
        played.evaluations.request(1)
        admission = played.taken()
        for version in (2, 3, 3, 1):
            played.evaluations.request(version)
    assert "the evaluation of version 2 waits for the end of the one of version 1" in caplog.text
    assert (
        "the evaluation of version 2 is replaced by the one of version 3 before it has begun; evaluate less often, or "
        "fewer prompts, or raise evaluation.max_concurrent"
    ) in caplog.text
    status = played.status
    assert status.waiting is not None
    assert (status.waiting.policy_version, status.left_out) == (3, 1)
    assert played.take() is None
    played.end(admission)
    played.make_all()
    assert [report.policy_version for report in played.reports] == [1, 3]


def test_what_is_forgotten_may_be_requested_again_and_its_results_are_refused() -> None:
    played = Played(rows=2)
    played.evaluations.request(1)
    played.make_all()
    played.evaluations.request(2)
    admission = played.taken()
    played.evaluations.request(3)
    played.evaluations.forget()
    assert played.load == [0]
    assert played.status == EvaluationStatus(None, None, done=0, left_out=0, last=None, prompts=2)
    played.evaluations.request(2)
    again = played.taken()
    with pytest.raises(PeerError, match=r"no evaluation .* runs"):
        played.end(admission)
    assert (again.seq, played.status.prompts_done) == (0, 0)


GOOD = HeldOutResult(0, "", 0, rewards=[1.0, 0.5], lengths=[3, 4, 5], cut=1, oldest_version=0, newest_version=2)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"rewards": [1.0]}, r"1 rewards, not evaluation\.samples = 2"),
        ({"rewards": [1.0] * 3}, r"3 rewards, not evaluation\.samples = 2"),
        ({"rewards": [1.0, math.nan]}, "rewards .*: each is at most"),
        ({"rewards": [1.0, math.inf]}, "rewards .*: each is at most"),
        ({"rewards": [-1e300, 1.0]}, "rewards .*: each is at most"),
        ({"lengths": [3]}, r"lengths \[3\]: there are 2 or more"),
        ({"lengths": [3, 0]}, "each from 1 to"),
        ({"lengths": [3, 2**70]}, "each from 1 to"),
        ({"cut": -1}, "-1 of 3 trajectories were cut"),
        ({"cut": 4}, "4 of 3 trajectories were cut"),
        ({"oldest_version": -1}, "policy versions from -1 to 2"),
        ({"oldest_version": 3}, "policy versions from 3 to 2"),
        ({"newest_version": 2**70}, "policy versions from 0 to"),
        ({"error": "no"}, "a failed prompt has no figures"),
    ],
)
def test_figures_that_cannot_be_are_refused_by_name_and_change_nothing(fields: dict[str, Any], problem: str) -> None:
    check_result(GOOD, samples=2)
    played = Played(samples=2, sampling={"temperature": 1.0})
    played.evaluations.request(1)
    admission = played.taken()
    hostile = msgspec.structs.replace(GOOD, evaluation=admission.evaluation, **fields)
    with pytest.raises(WireError, match=f"result of held-out prompt 0: .*{problem}"):
        played.evaluations.count(hostile)
    assert (played.status.prompts_done, played.load) == (0, [2])


workers = st.sampled_from(["rollout/0", "rollout/1"])


class Evaluating(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.played = Played(gservers=2, rows=3, max_concurrent=2)
        self.requested = 0
        self.given: list[Admission] = []
        self.counted: set[tuple[str, int]] = set()
        self.holders: dict[tuple[str, int], str] = {}

    @rule()
    def request(self) -> None:
        self.played.evaluations.request(self.requested)
        self.requested += 1
        waiting = self.played.status.waiting
        assert waiting is not None
        assert waiting.policy_version == self.requested - 1  # the latest wins

    @rule(worker=workers, begun=st.integers(0, 9), wait=st.booleans())
    def take(self, worker: str, begun: int, wait: bool) -> None:
        admission = self.played.take(worker, begun=begun, wait=wait)
        if admission is not None:
            prompt = (admission.evaluation, admission.seq)
            assert prompt not in self.holders.keys() | self.counted
            self.holders[prompt] = worker
            self.given.append(admission)

    @rule(worker=workers, lost=st.booleans())
    def lose(self, worker: str, lost: bool) -> None:
        self.played.evaluations.give_back(worker, lost=lost)
        self.holders = {prompt: holder for prompt, holder in self.holders.items() if holder != worker}

    @rule()
    def forget(self) -> None:
        self.played.evaluations.forget()
        self.played.reports.clear()
        self.requested = 0
        self.holders.clear()

    @precondition(lambda self: self.given)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """From any worker that ever had it, also twice, also long after it was lost."""
        admission = data.draw(st.sampled_from(self.given))
        prompt = (admission.evaluation, admission.seq)
        before = self.played.status
        try:
            self.played.end(admission)
        except StreamRLError:
            assert before == self.played.status
            return
        self.counted.add(prompt)
        self.holders.pop(prompt, None)

    @invariant()
    def every_evaluation_is_in_one_place(self) -> None:
        status = self.played.status
        under_way = [task for task in (status.running, status.waiting) if task is not None]
        assert status.done + status.left_out + len(under_way) == self.requested
        reported = [report.policy_version for report in self.played.reports]
        assert len(set(reported)) == len(reported) == status.done
        assert not set(reported) & {task.policy_version for task in under_way}
        assert status.last == (self.played.reports[-1] if self.played.reports else None)
        assert all(report.prompts + report.rejected == 3 for report in self.played.reports)

    @invariant()
    def the_load_is_that_of_the_prompts_under_way(self) -> None:
        assert sum(self.played.load) == len(self.holders) <= 2


TestEvaluating = Evaluating.TestCase

prompt_figures = st.lists(
    st.tuples(
        st.lists(st.sampled_from([0.0, 0.1, 0.7, 1.0]), min_size=3, max_size=3),  # rewards
        st.lists(st.integers(1, 5), min_size=3, max_size=3),  # lengths
        st.integers(0, 3),  # cut
        st.integers(18, 24),  # version
    ),
    max_size=6,
)


@given(prompt_figures, st.sampled_from([0.1, 0.7, 1.0]), st.integers(0, 3))
def test_the_figures_of_an_evaluation_are_those_of_plain_counting(
    figures: list[tuple[list[float], list[int], int, int]], pass_reward: float, rejected: int
) -> None:
    as_float32 = [(np.array(r, np.float32).tolist(), lengths, cut, v) for r, lengths, cut, v in figures]
    results = [
        HeldOutResult(0, "", seq, rewards=r, lengths=lengths, cut=cut, oldest_version=v, newest_version=v)
        for seq, (r, lengths, cut, v) in enumerate(as_float32)
    ]
    results += [HeldOutResult(0, "", 99, error="no") for _ in range(rejected)]
    task, config = EvaluationTask(20, step=20), EvaluationConfig(samples=3, pass_reward=pass_reward)
    report = report_of(task, results, config, began=7.0, ended=9.0)
    assert (report.policy_version, report.step, report.time, report.seconds) == (20, 20, 9.0, 2.0)
    assert (report.prompts, report.samples, report.rejected) == (len(figures), 3, rejected)
    assert (report.failure is None) == (rejected == 0)
    if not figures:
        assert report.reward_mean is report.oldest_version is report.cut_share is report.response_length_mean is None
        assert report.pass_at == {}
        return
    rewards = [reward for r, _, _, _ in figures for reward in r]
    lengths = [length for _, many, _, _ in figures for length in many]
    versions = [version for _, _, _, version in figures]
    assert report.reward_mean == pytest.approx(sum(rewards) / len(rewards))
    assert report.response_length_mean == pytest.approx(sum(lengths) / len(lengths))
    assert report.cut_share == pytest.approx(sum(cut for _, _, cut, _ in figures) / len(lengths))
    assert (report.oldest_version, report.newest_version) == (min(versions), max(versions))
    passed = [sum(reward >= pass_reward for reward in r) for r, _, _, _ in figures]
    for k in (1, 2, 3):
        assert report.pass_at[k] == pytest.approx(sum(pass_at_k(3, c, k) for c in passed) / len(passed))


# --- the calls ---


EVALUATED: dict[str, Any] = {"evaluation": {"every": "1 step", "prompts": 3}}


async def take(run: Run, *, worker: int = 0) -> Admission:
    message = Admit(worker=worker, count=1, data=DataFacts(rows=3), held_out=True)
    (admission,) = (await asyncio.wait_for(run.client.admit(message), 30)).admissions
    return admission


async def end(run: Run, admission: Admission, **fields: Any) -> None:
    await run.client.held_out_result(result_of(admission, **fields))


async def test_an_evaluation_goes_from_the_master_to_rollout_workers_and_back(tmp_path: Path) -> None:
    async with managed(small_config(tmp_path, **EVALUATED)) as run, scripted() as (gserver,):
        await run.register("rollout")
        waiting = asyncio.create_task(take(run))
        await still_waits(waiting)
        run.manager.evaluate(3, training_over=False)
        await still_waits(waiting)  # there is no gserver
        await run.register("gserver", address=gserver.url)
        first = await asyncio.wait_for(waiting, 30)
        for version in (4, 5):
            run.manager.evaluate(version, training_over=False)
        status = (await run.client.status()).evaluation
        assert status is not None
        assert status.running is not None
        assert (status.running.policy_version, status.left_out, status.prompts, status.last) == (3, 1, 3, None)
        for admission in (first, await take(run), await take(run)):
            await end(run, admission)
            await end(run, admission)  # the reply was lost: sent again, counted once
        assert [(report.policy_version, report.prompts) for report in run.reports] == [(3, 3)]
        await end(run, await take(run), error="KeyError: 'x'")
        status = (await run.client.status()).evaluation
        assert status is not None
        assert status.running is not None
        assert (status.running.policy_version, status.prompts_done, status.done) == (5, 1, 1)
        async with aiohttp.ClientSession() as session, session.get(f"{run.url}/metrics") as response:
            text = await response.text()
        assert "streamrl_evaluations_total 1.0" in text
        assert "streamrl_evaluations_left_out_total 1.0" in text
        assert 'streamrl_evaluation_metric{metric="pass@1"} 1.0' in text
        assert (await run.client.status()).ledger.next_seq == 0


async def test_a_held_out_prompt_has_its_turn_though_groups_take_every_place(tmp_path: Path) -> None:
    async with joined(tmp_path, workers=2, trainer={"batch_groups": 100}, **EVALUATED) as (run, _):
        run.manager._fleet.all()[0].info = ServerInfo(max_running_requests=1)  # one group fills it
        (running,) = await run.admit_seqs(1)
        groups = {asyncio.create_task(run.admit_seqs(1, worker=worker)): worker for worker in (0, 1)}
        await asyncio.sleep(0.1)  # both wait, as one of them will at any time
        run.manager.evaluate(0, training_over=False)
        await take(run)  # the first prompt has its turn at once
        prompt = asyncio.create_task(take(run))
        for begun in range(1, GROUPS_BETWEEN + 1):
            await still_waits(prompt)
            run.take(running)
            done, _ = await asyncio.wait(groups, return_when=asyncio.FIRST_COMPLETED, timeout=30)
            (admitted,) = done
            (running,) = admitted.result()
            worker = groups.pop(admitted)
            if begun < GROUPS_BETWEEN:
                groups[asyncio.create_task(run.admit_seqs(1, worker=worker))] = worker
        assert (await asyncio.wait_for(prompt, 5)).seq == 1  # sooner than its long poll ends
        for task in groups:
            task.cancel()


@pytest.mark.parametrize("how", ["replaced", "silent", "left"])
async def test_the_prompts_of_a_worker_that_is_gone_go_to_another(tmp_path: Path, how: str) -> None:
    lease = {"limits": {"silence_seconds": 0.5}} if how == "silent" else {}
    async with managed(small_config(tmp_path, **EVALUATED, **lease)) as run, scripted() as (gserver,):
        await run.register("gserver", address=gserver.url)
        await run.register("rollout", pid=1)
        run.manager.evaluate(7, training_over=False)
        prompt = await take(run)
        if how == "replaced":
            await run.register("rollout", pid=2)
        elif how == "left":
            await run.client.leave(Leave(role="rollout", index=0, pid=NO_PROCESS + 1))
        else:
            await run.until(lambda status: any(p.role == "rollout" and p.state == "silent" for p in status.processes))
            await run.register("gserver", address=gserver.url, pid=2)
        await run.register("rollout", 1)
        assert (await take(run, worker=1)).seq == prompt.seq == 0
        if how == "silent":
            await end(run, prompt)  # it had only been silent
            assert run.manager.evaluations.status().prompts_done == 1


async def test_once_training_is_over_no_group_starts_and_the_evaluation_has_the_gservers(tmp_path: Path) -> None:
    async with joined(tmp_path, **EVALUATED) as (run, _):
        assert await run.admit_seqs(1) == [0]
        run.manager.evaluate(4, training_over=True)
        admission = asyncio.create_task(run.client.admit(Admit(worker=0, count=1)))
        await still_waits(admission)
        for _ in range(3):
            await end(run, await take(run))
        run.manager.evaluate(4, training_over=True)  # the same version again: it was made
        status = (await run.client.status()).evaluation
        assert status is not None
        assert (status.done, status.waiting, status.left_out) == (1, None, 0)
        run.manager.finish("done", stopped=False)
        assert (await asyncio.wait_for(admission, 30)).stop
