"""When a process that died is started again, and which one is to blame."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from socket import gethostname
from typing import Any, Literal, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.config import Config
from streamrl.errors import PeerLost, ProcessDied, StreamRLError
from streamrl.launch import children as child_processes
from streamrl.launch import supervisor as supervision
from streamrl.launch.children import Children
from streamrl.launch.processes import PlanRole, ProcessCommands, ProcessPlan
from streamrl.launch.supervisor import LONGEST_DELAY_SECONDS, Restarts, Supervisor
from streamrl.transport.control import FinishRun, Silence, SilentProcess, Status
from streamrl.transport.manager_client import ControlClient
from tests.launch.statuses import status

ROUNDING = 1e-6


def supervisor(children: Children, client: object, *, part: Literal["run", "trainer", "pool"] = "run") -> Supervisor:
    return Supervisor(
        Config(), children, ProcessCommands(Path("c.toml")), cast(ControlClient, cast(Any, client)), part=part
    )


class _FailedRun:
    """A client of the controller of a run that a model worker has reported as failed."""

    def __init__(self) -> None:
        self.told: list[str] = []

    async def status(self) -> Status:
        return status(1, state="failed", message="model_worker/1: RuntimeError: Connection closed by peer")

    async def silence(self, after: int) -> None:
        await asyncio.Event().wait()

    async def finish_run(self, message: FinishRun, *, patience: float) -> None:
        self.told.append(message.error)


class _GoneController(_FailedRun):
    """It said that the run is over, and why, and left before any of the run's processes did."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = asyncio.Event()

    async def silence(self, after: int) -> Silence:  # type: ignore[override]
        return Silence(changes=0, processes=[], over=True)

    async def status(self) -> Status:
        if self.asked.is_set():
            raise PeerLost("the controller cannot be reached")
        self.asked.set()
        return await super().status()


async def test_why_a_run_failed_is_known_when_its_controller_has_left_before_the_others() -> None:
    children, client = Children(logs=None), _GoneController()
    worker = await children.start(ProcessPlan("model_worker", 0, 1), ["sh", "-c", "exec sleep 60"])
    waiting = asyncio.create_task(supervisor(children, client).until_over())
    await client.asked.wait()
    worker.signal(signal.SIGTERM)
    with pytest.raises(ProcessDied) as died:
        await waiting
    assert died.value.reason == "model_worker/1: RuntimeError: Connection closed by peer"
    children.close()


async def test_who_said_nothing_is_not_given_the_words_of_an_earlier_start(tmp_path: Path) -> None:
    plan = ProcessPlan("gserver", 0, 1)
    log_file = tmp_path / plan.log_name
    log_file.write_text("12:00:00 ERROR   gserver/0 is said of the day before\n")
    children = Children(logs=tmp_path)
    try:
        await children.start(plan, ["sh", "-c", "exit 1"])
        silent = await children.next_exit()
        ended = f"gserver/0 (pid {silent.pid}) ended with exit code 1"
        assert silent.obituary() == f"{ended}; it wrote nothing to {log_file}"
        await children.start(plan, ["sh", "-c", "echo out of memory; exit 1"])
        said = await children.next_exit()
        assert said.obituary().splitlines()[1:] == ["  out of memory"]
    finally:
        await children.stop()
        children.close()


class _FinishedRun(_FailedRun):
    """A client of the controller of a run that is over, and is well."""

    async def status(self) -> Status:
        return status(1, state="finished", message="all steps are done")

    async def silence(self, after: int) -> Silence:  # type: ignore[override]
        return Silence(changes=0, processes=[], over=True)


@pytest.mark.parametrize("role", ["model_worker", "gserver"])
async def test_whoever_breaks_when_the_run_is_over_does_not_make_it_fail(
    role: PlanRole, caplog: pytest.LogCaptureFixture
) -> None:
    children = Children(logs=None)
    client = _FinishedRun()
    broken = await children.start(ProcessPlan(role, 0, 1), ["sh", "-c", "kill -SEGV $$"])
    await broken.ended.wait()
    await children.start(ProcessPlan("controller", 0, 1), ["sh", "-c", "exit 0"])
    await supervisor(children, client).until_over()
    assert f"{role}/0 was ended by SIGSEGV when the run was over" in caplog.text
    children.close()


async def test_a_controller_that_breaks_when_the_run_is_over_makes_it_fail() -> None:
    children = Children(logs=None)
    client = _FinishedRun()
    await children.start(ProcessPlan("controller", 0, 1), ["sh", "-c", "exit 1"])
    with pytest.raises(ProcessDied):
        await supervisor(children, client).until_over()
    children.close()


async def test_one_that_was_killed_is_to_blame_before_those_that_lost_it() -> None:
    """The other rank tells what a broken connection did to it, and may tell that first, or end first."""
    children, client = Children(logs=None), _FailedRun()
    workers = [ProcessPlan("model_worker", index, 1) for index in range(2)]
    started = [
        await children.start(worker, ["sh", "-c", do])
        for worker, do in zip(workers, ("kill -9 $$", "exit 1"), strict=True)
    ]
    await asyncio.gather(*(child.ended.wait() for child in started))
    with pytest.raises(ProcessDied) as died:
        await supervisor(children, client).until_over()
    killed = f"model_worker/0 (pid {started[0].pid}) was ended by SIGKILL (out of memory?)"
    assert died.value.reason == f"{killed}; then model_worker/1: RuntimeError: Connection closed by peer"
    assert client.told == [died.value.reason]
    children.close()


class _OtherTrainer(_FailedRun):
    """A client of the controller of a run in which another host has a place of this trainer's."""

    async def status(self) -> Status:
        return status(1, state="running")


async def test_a_trainer_ends_when_another_one_has_its_place_and_the_run_continues() -> None:
    children, client = Children(logs=None), _OtherTrainer()
    await children.start(ProcessPlan("model_worker", 0, 1), ["sh", "-c", "exit 69"])
    with pytest.raises(StreamRLError, match=r"model_worker/0 .* process 202 on here has taken its place; this trainer"):
        await supervisor(children, client).until_over()
    assert client.told == [], "it is no failure of the run"
    children.close()


class _RunOfOne(_FailedRun):
    """A client of the controller of a run in which model_worker/1 has joined as the process `pid`."""

    pid = 0

    async def status(self) -> Status:
        running = status(1, state="running")
        worker = msgspec.structs.replace(
            running.processes[0], role="model_worker", index=1, pid=self.pid, host=gethostname()
        )
        return msgspec.structs.replace(running, processes=[worker])


@pytest.mark.parametrize("joined", [True, False])
async def test_a_process_of_a_new_trainer_ends_the_run_only_if_it_has_joined(joined: bool) -> None:
    children, client = Children(logs=None), _RunOfOne()
    worker = ProcessPlan("model_worker", 1 if joined else 2, 1)
    client.pid = (await children.start(worker, ["sh", "-c", "exit 1"])).pid
    with pytest.raises(ProcessDied) as died:
        await supervisor(children, client, part="trainer").until_over()
    assert client.told == ([died.value.reason] if joined else [])
    children.close()


class _Interrupted(_FailedRun):
    """A client of a controller that a launcher reaches again before the process `pid` does."""

    def __init__(self, pid: int) -> None:
        super().__init__()
        self._silent = [SilentProcess("gserver", 0, pid, "here")]

    async def silence(self, after: int) -> Silence:  # type: ignore[override]
        if after == 0:
            return Silence(changes=1, processes=self._silent, over=False)
        await asyncio.sleep(0.2)
        return Silence(changes=2, processes=[], over=after == 2)


async def test_a_process_that_is_soon_heard_again_is_not_disturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_processes, "GRACE_SECONDS", 0.01)
    children = Children(logs=None)
    child = await children.start(ProcessPlan("gserver", 0, 1), ["sh", "-c", "sleep 60"])
    await supervisor(children, _Interrupted(child.pid))._watch_silence()
    await asyncio.sleep(0.1)
    assert child.exit_code is None
    await children.stop()
    children.close()


class _Silent(_FailedRun):
    """A client of a controller that reports the process `pid` as silent, and then that it has left the run."""

    def __init__(self, pid: int) -> None:
        super().__init__()
        self._silent = [SilentProcess("gserver", 0, pid, "here")]

    async def silence(self, after: int) -> Silence:  # type: ignore[override]
        if after:
            await asyncio.Event().wait()
        return Silence(changes=1, processes=self._silent, over=False)


async def test_a_silent_process_that_was_drained_before_its_end_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end is not that of a process that never joined the run, which would end the run."""
    monkeypatch.setattr(supervision, "RETURN_SECONDS", 0.0)
    children = Children(logs=None)
    child = await children.start(ProcessPlan("gserver", 0, 1), ["sh", "-c", "sleep 60"])
    watcher = supervisor(children, _Silent(child.pid))
    watching = asyncio.create_task(watcher._watch_silence())
    ended = await children.next_exit()
    assert not await watcher._was_last(ended, status(1, gservers=0))
    assert list(watcher._coming.values()) == ["gserver/0"]
    watcher.replace_none()
    watching.cancel()
    await asyncio.wait([watching])
    children.close()


def test_each_waits_twice_as_long_until_there_were_too_many() -> None:
    restarts = Restarts(most=3, window=100.0, delay=1.0)
    assert [restarts.allow("a", now=now) for now in (0.0, 10.0, 20.0, 30.0)] == [1.0, 2.0, 4.0, None]
    assert restarts.allow("b", now=30.0) == 1.0
    assert restarts.count("a") == 3


def test_one_that_may_die_thousands_of_times_is_started_again_each_time() -> None:
    restarts = Restarts(most=3000, window=1e6, delay=1e-3)
    delays = [restarts.allow("a", now=60.0 * number) for number in range(3000)]
    assert (delays[0], delays[1], set(delays[100:])) == (1e-3, 2e-3, {LONGEST_DELAY_SECONDS})


def test_what_is_long_ago_does_not_count() -> None:
    restarts = Restarts(most=1, window=100.0, delay=1.0)
    assert [restarts.allow("a", now=now) for now in (0.0, 99.0, 100.0)] == [1.0, None, 1.0]


def test_one_that_died_too_often_rests_until_the_window_has_moved_on() -> None:
    restarts = Restarts(most=2, window=100.0, delay=1.0)
    assert [restarts.allow("a", now=now) for now in (0.0, 10.0, 20.0)] == [1.0, 2.0, None]
    assert restarts.rest("a", now=20.0) == 80.0
    assert restarts.allow("a", now=101.0) is None
    assert restarts.rest("a", now=101.0) == 9.0
    assert Restarts(most=0, window=100.0, delay=1.0).rest("b", now=0.0) is None


@given(st.lists(st.floats(0, 50), max_size=60), st.integers(0, 10))
def test_never_more_than_allowed_within_a_window(pauses: list[float], most: int) -> None:
    restarts = Restarts(most=most, window=100.0, delay=1.0)
    now, times = 0.0, []
    for pause in pauses:
        now += pause
        delay = restarts.allow("a", now=now)
        if delay is None:
            rest = restarts.rest("a", now=now)
            if rest is not None:
                now += rest
                times.append(now)
        else:
            assert 1.0 <= delay <= LONGEST_DELAY_SECONDS
            times.append(now)
    assert all(sum(begin <= time < begin + 100.0 - ROUNDING for time in times) <= max(most, 0) for begin in times)
