"""When a process that died is started again, and which one is to blame."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from socket import gethostname
from typing import Any, Literal, cast

import msgspec
import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from streamrl.config import Config
from streamrl.errors import PeerLost, ProcessDied, StreamRLError
from streamrl.launch import children as child_processes
from streamrl.launch import supervisor as supervision
from streamrl.launch.children import Child, Children
from streamrl.launch.processes import PlanRole, ProcessCommands, ProcessPlan
from streamrl.launch.supervisor import LONGEST_DELAY_SECONDS, Restarts, Supervisor
from streamrl.transport.control import FinishRun, Silence, SilentProcess, Status
from streamrl.transport.manager_client import ControlClient
from tests.launch.statuses import status

ROUNDING = 1e-6
OVER = Silence(changes=0, processes=[], over=True)
FAILED = status(1, state="failed", message="model_worker/1: RuntimeError: Connection closed by peer")
FINISHED = status(1, state="finished", message="all steps are done")
RUNNING = status(1, state="running")


class _Controller:
    """A client of a controller that returns `state`, and these replies to requests for the silent processes."""

    def __init__(self, state: Status | None, *silences: Silence) -> None:
        self.state = state
        """None: it does not reply."""
        self.asked = asyncio.Event()
        self.told: list[str] = []
        """Reports of failures."""
        self._silences = list(silences)

    async def status(self) -> Status:
        self.asked.set()
        if self.state is None:
            raise PeerLost("the controller cannot be reached")
        return self.state

    async def silence(self, after: int) -> Silence:
        if not self._silences:
            await asyncio.Event().wait()
        return self._silences.pop(0)

    async def finish_run(self, message: FinishRun, *, patience: float) -> None:
        self.told.append(message.error)


@pytest.fixture
async def children() -> AsyncIterator[Children]:
    started = Children(logs=None)
    yield started
    await started.stop()


async def start(children: Children, name: str, script: str) -> Child:
    role, _, index = name.partition("/")
    return await children.start(ProcessPlan(cast(PlanRole, role), int(index), 1), ["sh", "-c", script])


def supervisor(
    children: Children, client: _Controller, *, part: Literal["run", "trainer", "pool"] = "run"
) -> Supervisor:
    return Supervisor(
        Config(), children, ProcessCommands(Path("c.toml")), cast(ControlClient, cast(Any, client)), part=part
    )


async def died(watcher: Supervisor) -> str:
    """The reason with which the run fails."""
    with pytest.raises(ProcessDied) as error:
        await watcher.until_over()
    return error.value.reason


async def test_why_a_run_failed_is_known_when_its_controller_has_left_before_the_others(children: Children) -> None:
    client = _Controller(FAILED, OVER)
    worker = await start(children, "model_worker/0", "exec sleep 60")
    waiting = asyncio.create_task(died(supervisor(children, client)))
    await client.asked.wait()
    client.state = None
    worker.signal(signal.SIGTERM)
    assert await waiting == "model_worker/1: RuntimeError: Connection closed by peer"


async def test_who_said_nothing_is_not_given_the_words_of_an_earlier_start(tmp_path: Path) -> None:
    log_file = tmp_path / "gserver-0.log"
    log_file.write_text("12:00:00 ERROR   gserver/0 is said of the day before\n")
    children = Children(logs=tmp_path)
    await start(children, "gserver/0", "exit 1")
    silent = await children.next_exit()
    ended = f"gserver/0 (pid {silent.pid}) ended with exit code 1"
    assert silent.obituary() == f"{ended}; it wrote nothing to {log_file}"
    await start(children, "gserver/0", "echo out of memory; exit 1")
    said = await children.next_exit()
    assert said.obituary().splitlines()[1:] == ["  out of memory"]
    await children.stop()


def test_a_process_that_has_ended_can_be_sent_a_line() -> None:
    async def send() -> None:
        children = Children(logs=None)
        waiting = await children.start(ProcessPlan("gserver", 0, 1), ["true"], waits=True)
        await waiting.ended.wait()
        waiting.send("http://m:1")
        await children.stop()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as in a launcher
        runner.run(send())


@pytest.mark.parametrize("role", ["model_worker", "gserver"])
async def test_whoever_breaks_when_the_run_is_over_does_not_make_it_fail(
    role: str, children: Children, caplog: pytest.LogCaptureFixture
) -> None:
    broken = await start(children, f"{role}/0", "kill -SEGV $$")
    await broken.ended.wait()
    await start(children, "controller/0", "exit 0")
    await supervisor(children, _Controller(FINISHED, OVER)).until_over()
    assert f"{role}/0 was ended by SIGSEGV when the run was over" in caplog.text


async def test_a_controller_that_breaks_when_the_run_is_over_makes_it_fail(children: Children) -> None:
    await start(children, "controller/0", "exit 1")
    assert "controller/0" in await died(supervisor(children, _Controller(FINISHED, OVER)))


async def test_one_that_was_killed_is_to_blame_before_those_that_lost_it(children: Children) -> None:
    """The other rank tells what a broken connection did to it, and may tell that first, or end first."""
    client = _Controller(FAILED)
    started = [
        await start(children, f"model_worker/{index}", script) for index, script in enumerate(("kill -9 $$", "exit 1"))
    ]
    await asyncio.gather(*(child.ended.wait() for child in started))
    reason = await died(supervisor(children, client))
    killed = f"model_worker/0 (pid {started[0].pid}) was ended by SIGKILL (out of memory?)"
    assert reason == f"{killed}; then model_worker/1: RuntimeError: Connection closed by peer"
    assert client.told == [reason]


async def test_a_trainer_ends_when_another_one_has_its_place_and_the_run_continues(children: Children) -> None:
    client = _Controller(RUNNING)
    await start(children, "model_worker/0", "exit 69")
    with pytest.raises(StreamRLError, match=r"model_worker/0 .* process 202 on here has taken its place; this trainer"):
        await supervisor(children, client).until_over()
    assert client.told == [], "it is no failure of the run"


@pytest.mark.parametrize("joined", [True, False])
async def test_a_process_of_a_new_trainer_ends_the_run_only_if_it_has_joined(joined: bool, children: Children) -> None:
    """model_worker/1 is in the run."""
    child = await start(children, f"model_worker/{1 if joined else 2}", "exit 1")
    changes = {"role": "model_worker", "index": 1, "pid": child.pid, "host": gethostname()}
    member = msgspec.structs.replace(RUNNING.processes[0], **changes)
    client = _Controller(msgspec.structs.replace(RUNNING, processes=[member]))
    reason = await died(supervisor(children, client, part="trainer"))
    assert client.told == ([reason] if joined else [])


def silence(*silent: Child) -> Silence:
    processes = [SilentProcess("gserver", child.process.index, child.pid, "here") for child in silent]
    return Silence(changes=1, processes=processes, over=False)


async def test_a_process_that_is_soon_heard_again_is_not_disturbed(
    children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher may reach a controller again before the process does."""
    monkeypatch.setattr(child_processes, "GRACE_SECONDS", 0.01)
    monkeypatch.setattr(supervision, "RETURN_SECONDS", 0.1)
    child = await start(children, "gserver/0", "sleep 60")
    watcher = supervisor(children, _Controller(RUNNING, silence(child), silence()))
    watching = asyncio.create_task(watcher._watch_silence())
    await asyncio.wait([watching], timeout=0.3)
    assert child.exit_code is None
    watching.cancel()
    await asyncio.wait([watching])


async def test_a_silent_process_that_was_drained_before_its_end_is_replaced(
    children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its end is not that of a process that never joined the run, which would end the run."""
    monkeypatch.setattr(supervision, "RETURN_SECONDS", 0.0)
    child = await start(children, "gserver/0", "sleep 60")
    watcher = supervisor(children, _Controller(RUNNING, silence(child)))
    watching = asyncio.create_task(watcher._watch_silence())
    ended = await children.next_exit()
    assert not await watcher._was_last(ended, status(1, gservers=0))
    assert list(watcher._coming.values()) == ["gserver/0"]
    watcher.replace_none()
    watching.cancel()
    await asyncio.wait([watching])


async def test_the_model_workers_of_a_dead_controller_are_ended(
    children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may hang, and would not notice the next one."""
    monkeypatch.setattr(child_processes, "GRACE_SECONDS", 0.01)
    worker = await start(children, "model_worker/0", "sleep 60")
    await start(children, "controller/0", "kill -9 $$")
    watcher = supervisor(children, _Controller(None))
    assert not await watcher._was_last(await children.next_exit(), None)
    watcher.replace_none()
    async with asyncio.timeout(20):
        await worker.ended.wait()


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
