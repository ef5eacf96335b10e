"""A component's process: signals, lifeline, exit codes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRELUDE = """
import asyncio, sys
from streamrl.errors import ConfigError, ModelError, PeerError, StreamRLError
from streamrl.launch.process import Component, Departure, run_component, set_up_logging
set_up_logging("trial/0")
def go(component):
    sys.exit(run_component(lambda: Component(component)))
"""
WAITS = """
async def component():
    print("ready", flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        print("cleaned up", flush=True)
go(component)
"""
HANGS = """
import time
async def component():
    print("ready", flush=True)
    time.sleep(60)
go(component)
"""


def start(script: str, **environment: str) -> subprocess.Popen[str]:
    descriptors = [int(value) for key, value in environment.items() if key == "STREAMRL_LIFELINE"]
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + script],
        cwd=ROOT,
        env={**os.environ, **environment},
        pass_fds=descriptors,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def until_ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_first_signal_cleans_up(number: signal.Signals) -> None:
    process = start(WAITS)
    until_ready(process)
    process.send_signal(number)
    output, errors = process.communicate(timeout=60)
    assert output == "cleaned up\n"
    assert process.returncode == 128 + number
    assert "Traceback" not in errors


def test_every_component_may_have_many_connections() -> None:
    script = """
import resource
async def component():
    print(*resource.getrlimit(resource.RLIMIT_NOFILE))
go(component)
"""
    low = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (200, resource.getrlimit(7)[1]))\n"
    said = subprocess.run(
        [sys.executable, "-c", low + PRELUDE + script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    soft, hard = map(int, said.stdout.split())
    assert soft == min(hard, 65536)


@pytest.mark.parametrize("raised", [False, True])
def test_a_log_on_a_full_disk_ends_nothing(raised: bool) -> None:
    script = f"""
import logging
async def component():
    for number in range(2000):
        logging.getLogger("streamrl").info("line %d, which is long enough to fill a buffer soon", number)
        print("a line of the user's", number)
    print("an error of the user's", file=sys.stderr)
    if {raised}:
        raise ValueError("what")
go(component)
"""
    with open("/dev/full", "wb") as full:
        process = subprocess.run([sys.executable, "-c", PRELUDE + script], cwd=ROOT, stdout=full, stderr=full)
    assert process.returncode == raised


def test_second_signal_ends_at_once() -> None:
    process = start(
        """
async def component():
    print("ready", flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        print("ready", flush=True)
        await asyncio.Event().wait()
go(component)
"""
    )
    until_ready(process)
    process.terminate()
    until_ready(process)
    process.terminate()
    assert process.wait(60) in (128 + signal.SIGTERM, -signal.SIGKILL)
    process.communicate()


@pytest.mark.parametrize(("script", "least"), [(WAITS, 0.0), (HANGS, 4.0)], ids=["waits", "hangs"])
def test_cut_lifeline_ends_the_process(script: str, least: float) -> None:
    """By force only the one that hangs."""
    reader, writer = os.pipe()
    process = start(script, STREAMRL_LIFELINE=str(reader))
    until_ready(process)
    begin = time.monotonic()
    os.close(writer)
    output, _ = process.communicate(timeout=60)
    assert time.monotonic() - begin >= least
    assert (process.returncode == -signal.SIGKILL) == (script == HANGS)
    assert ("cleaned up" in output) == (script == WAITS)
    os.close(reader)


@pytest.mark.parametrize(
    ("raised", "code", "said", "traceback"),
    [
        ('ModelError("no weights")', 1, "ERROR   trial/0 ModelError: no weights", False),
        ('ConfigError("bad key")', 2, "ERROR   trial/0 bad key", False),
        ('PeerError("trial/0 is process 7", status=423)', 3, "PeerError: trial/0 is process 7", False),
        ('PeerError("not now", status=409)', 1, "PeerError: not now", False),
        ('ValueError("what")', 1, "ValueError: what", True),
        (
            'ExceptionGroup("both", [ModelError("a"), ExceptionGroup("c", [ModelError("b")])])',
            1,
            "ModelError: b",
            False,
        ),
        ('ExceptionGroup("both", [ModelError("a"), ValueError("b")])', 1, "ValueError: b", True),
    ],
)
def test_exit_codes_of_errors(raised: str, code: int, said: str, traceback: bool) -> None:
    process = start(f"async def component():\n    raise {raised}\ngo(component)\n")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    assert said in errors
    assert ("Traceback" in errors) == traceback


def test_the_failure_of_a_thread_that_nobody_awaits_ends_the_process_with_its_traceback() -> None:
    process = start(
        """
from streamrl import essential
def receive():
    raise RecursionError("a message was too deep")
async def component():
    essential.thread(receive, name="the ingress").start()
    try:
        await asyncio.Event().wait()
    finally:
        print("cleaned up", flush=True)
go(component)
"""
    )
    output, errors = process.communicate(timeout=60)
    assert output == "cleaned up\n"
    assert process.returncode == 1
    assert "in receive" in errors
    assert "EssentialFailed: the ingress failed: RecursionError: a message was too deep" in errors


def test_a_thread_that_is_stuck_does_not_keep_the_process() -> None:
    process = start(
        """
import time
from concurrent.futures import ThreadPoolExecutor
from streamrl.launch import process
process.GRACE_SECONDS = 0.2
async def component():
    asyncio.get_running_loop().run_in_executor(ThreadPoolExecutor(1, thread_name_prefix="publish"), time.sleep, 60)
    raise StreamRLError("the others are gone")
go(component)
"""
    )
    _, errors = process.communicate(timeout=10)
    assert process.returncode == 1
    assert "StreamRLError: the others are gone" in errors
    assert "publish_0 did not end within 0.2 s: ending without" in errors


def test_a_way_out_that_fails_is_no_way_to_stay() -> None:
    process = start(
        """
async def component():
    print("ready", flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        print("cleaned up", flush=True)
async def leave():
    raise LookupError("a bug")
sys.exit(run_component(lambda: Component(component, Departure(leave, "saving"))))
"""
    )
    until_ready(process)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=60)
    assert output == "cleaned up\n"
    assert "SIGTERM: saving; once more to stop at once" in errors
    assert "saving failed (LookupError: a bug); stopping" in errors
    assert process.returncode == 128 + signal.SIGTERM


DEPARTS = """
from streamrl.errors import RunStopped
left = asyncio.Event()
async def component():
    print("ready", flush=True)
    try:
        await left.wait()
        print("left", flush=True)
        {end}
    except asyncio.CancelledError:
        print("cancelled", flush=True)
        raise
async def leave():
    print("leaving", flush=True)
    await asyncio.sleep({seconds})
    left.set()
    await asyncio.Event().wait()
sys.exit(run_component(lambda: Component(component, Departure(leave, "saving"))))
"""


@pytest.mark.parametrize(("end", "code"), [("pass", 0), ('raise RunStopped("after step 3")', 128 + signal.SIGINT)])
def test_a_departure_lets_the_component_end_by_itself(end: str, code: int) -> None:
    process = start(DEPARTS.format(end=end, seconds=0))
    until_ready(process)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert output == "leaving\nleft\n"
    assert process.returncode == code
    assert "Traceback" not in errors


def test_a_second_signal_ends_a_departure() -> None:
    process = start(DEPARTS.format(end="pass", seconds=600))
    until_ready(process)
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    assert process.stdout.readline() == "leaving\n"
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert output == "cancelled\n"
    assert process.returncode == 128 + signal.SIGINT


def test_a_launcher_decides_about_the_end_of_its_processes() -> None:
    reader, writer = os.pipe()
    process = start(DEPARTS.format(end="pass", seconds=600), STREAMRL_LIFELINE=str(reader))
    until_ready(process)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert output == "cancelled\n"
    for end in (reader, writer):
        os.close(end)
