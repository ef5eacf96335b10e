"""User code in child processes: whatever it does, calls end in time, and nothing of it is left behind."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from streamrl import userland
from streamrl.errors import UserCodeError, UserCodeTimeout, UserCodeUnusable, UserProcessDied
from streamrl.userland import SetupMessage, UserProcesses, call_once, clean_environment, run_program
from tests.processes import assert_no_more_than, below, lives

LOADER = "tests.hostile_code:serve"


def setup(function: str = "act", *, loader: str = LOADER, **more: Any) -> SetupMessage:
    return SetupMessage(loader, {"function": function}, **more)


@asynccontextmanager
async def running(
    function: str = "act", *, processes: int = 1, repeatable: bool = False, **more: Any
) -> AsyncIterator[UserProcesses]:
    before = below()
    made = UserProcesses(
        setup(function, **more), what="the function", processes=processes, environment=os.environ, repeatable=repeatable
    )
    try:
        await made.start()
        yield made
    finally:
        await made.close()
        await assert_no_more_than(before)


def pid_in(file: Path) -> int:
    """Wait for the process id in `file`."""
    deadline = time.monotonic() + 30
    while not (file.exists() and file.read_text()):
        assert time.monotonic() < deadline, f"nothing was written into {file}"
        time.sleep(0.02)
    return int(file.read_text())


def await_end(pid: int) -> None:
    deadline = time.monotonic() + 10
    while lives(pid):
        assert time.monotonic() < deadline, f"process {pid} does not end"
        time.sleep(0.02)


async def test_failures_are_reported_and_the_process_stays() -> None:
    async with running() as made:
        pid = await made.call((["pid"],))
        for words, message in (["raise"], r"hostile_code(.*\n)*LookupError"), (["allocate"], "MemoryError"):
            with pytest.raises(UserCodeError, match=message):
                await made.call((words,))
        assert await made.call((["write"],)) == 1, "its output broke the protocol, or its input was not empty"
        assert await made.call((["pid"],)) == pid


@pytest.mark.parametrize("words", [["exit", "7"], ["close"], ["spin"], ["ignore SIGTERM"]])
async def test_a_process_that_dies_or_hangs_is_replaced(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(userland, "EXIT_SECONDS", 0.5)
    async with running(timeout=2.0) as made:
        pid = await made.call((["pid"],))
        culprit = asyncio.create_task(made.call((words,)))
        await asyncio.sleep(0)
        others = [asyncio.create_task(made.call((["pid"],))) for _ in range(3)]
        expected = UserProcessDied if words[0] in ("exit", "close") else UserCodeTimeout
        with pytest.raises(expected):
            await culprit
        assert not lives(pid)
        (successor,) = set(await asyncio.gather(*others))
        assert successor != pid


async def test_memory_is_limited() -> None:
    async with running(memory_mb=2000) as made:
        with pytest.raises(UserCodeError, match="MemoryError"):
            await made.call((["allocate"],))


async def test_what_a_function_started_ends_with_its_process(tmp_path: Path) -> None:
    async with running(timeout=2.0) as made:
        with pytest.raises(UserCodeTimeout):
            await made.call((["spawn", str(tmp_path / "pid")],))
        await asyncio.to_thread(await_end, int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize("words", ["spin", "spawn"])
def test_a_process_and_what_it_started_end_when_the_parent_is_killed(words: str, tmp_path: Path) -> None:
    script = f"""
import asyncio
from tests.test_userland import *
async def main():
    async with running() as made:
        print(await made.call((["pid"],)), flush=True)
        await made.call(({[words, str(tmp_path / "pid")][: 1 + (words == "spawn")]!r},))
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(parent.stdout.readline())]
        if words == "spawn":
            pids.append(pid_in(tmp_path / "pid"))
        assert all(map(lives, pids))
        parent.kill()
    for pid in pids:
        await_end(pid)


async def test_of_concurrent_calls_only_the_culprit_fails_if_they_are_repeatable() -> None:
    async with running("act_later", concurrent_calls=8, repeatable=True) as made:
        calls = [made.call((["exit", "7"] if i == 2 else ["wait", "0.1"],)) for i in range(5)]
        found = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(value) for value in found] == [int, int, UserProcessDied, int, int]


@pytest.mark.parametrize("threads", [0, 4])
async def test_a_cancelled_call_harms_no_other(threads: int) -> None:
    async with running("act" if threads else "act_later", concurrent_calls=8, threads=threads) as made:
        verb = "sleep" if threads else "wait"
        cancelled, other = (asyncio.create_task(made.call(([verb, seconds],))) for seconds in ("600", "1"))
        await asyncio.sleep(0.5)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError) as found:
            await cancelled
        assert found.value.__cause__ is None
        assert await other == 1


async def test_a_loader_that_fails_is_named() -> None:
    for loader, message in (
        ("tests.hostile_code:nothing", "the function cannot be loaded: .* has no nothing"),
        ("tests.hostile_code:fail", "the function: its process ended with exit code 4 while it was imported"),
    ):
        with pytest.raises(UserCodeUnusable, match=message):
            async with running(loader=loader):
                pass


def test_one_call_in_a_process_of_its_own(tmp_path: Path) -> None:
    def once(*words: str, timeout: float = 60.0) -> Any:
        return call_once(setup(), (words,), timeout=timeout, environment=os.environ)

    assert once("sleep", "0") == 1
    with pytest.raises(UserCodeError, match="it returned 0"):
        once("nothing")
    with pytest.raises(UserCodeError, match="LookupError"):
        once("raise")
    with pytest.raises(UserProcessDied, match="exit code 7"):
        once("exit", "7")
    with pytest.raises(UserCodeTimeout, match="no answer within 5 s"):
        once("spawn", str(tmp_path / "pid"), timeout=5.0)
    await_end(pid_in(tmp_path / "pid"))


async def test_a_program_ends_with_what_it_started(tmp_path: Path) -> None:
    script = f"sleep 600 & echo $! > {tmp_path}/pid; echo first; echo last; exit 3"
    begun: list[int] = []
    status, lines = await run_program(["sh", "-c", script], memory_mb=0, environment=os.environ, begun=begun.append)
    assert (status, lines) == (3, ["first", "last"])
    await asyncio.to_thread(await_end, int((tmp_path / "pid").read_text()))
    await asyncio.to_thread(await_end, begun[0])


def test_secrets_are_left_out_of_the_environment() -> None:
    variables = {"RUN_KEY": "", "JUDGE_API_KEY": "", "HF_TOKEN": "", "TOKENIZERS_PARALLELISM": "", "PATH": "/bin"}
    kept = clean_environment(variables, passed=["JUDGE_API_KEY", "RUN_KEY"], withheld=["RUN_KEY"])
    assert sorted(kept) == ["JUDGE_API_KEY", "PATH", "TOKENIZERS_PARALLELISM"]
    assert clean_environment(variables, passed=[], withheld=[], python="/env/bin/python")["PATH"] == "/env/bin:/bin"
