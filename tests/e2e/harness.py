"""Whole runs as a user starts them, and what they leave behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from streamrl.launch.process import STACKS_SIGNAL
from streamrl.records.rollouts import Rollouts
from streamrl.transport.control import ProcessStatus, Status
from streamrl.transport.manager_client import ControlClient
from streamrl.types import NO_VERSION
from tests.e2e.preloaded import COMMAND, ROOT, SUPPORTED, PreloadedProcess

COPY_SCRATCH = ROOT / "examples" / "copy_scratch.toml"
SMALL = {"trainer__batch_groups": 8, "rollout__group_size": 4}
"""A sixteenth of the responses of `COPY_SCRATCH`: for runs that need not learn."""
QUICK = {"trainer__batch_groups": 16, "rollout__group_size": 8, "trainer__save_at_end": "false"}
"""A quarter of the responses, where it is all the same how long a step takes."""
PACED: dict[str, Any] = {
    "gserver__engine": "simulated",
    "gserver__max_running": 32,
    "gserver__simulation__token_seconds": 0.4,
    "gserver__simulation__mean_length": 6,
    "gserver__simulation__sigma": 0,
    "gserver__simulation__vocab_size": 8,
    "trainer__batch_groups": 4,
    "trainer__save_at_end": "false",
    "run__stop_at_reward": 2.0,
}
"""Simulated generation, whose pace does not depend on the machine: about 2.4 s for 32 responses on a gserver."""


def overrides(folder: Path, name: str, **settings: Any) -> list[str]:
    """Command-line overrides for a run in `folder`; `a__b` stands for `a.b`."""
    base = {"run__dir": folder, "run__name": name, "metrics__plots": "false", "metrics__sinks": "[]"}
    return [f"{key.replace('__', '.')}={value}" for key, value in (base | settings).items()]


class Command:
    """A `streamrl` command under way. What it prints is read at once, so that it never waits for a reader."""

    def __init__(self, process: subprocess.Popen[str] | PreloadedProcess, *, shown: bool = False) -> None:
        """`shown`: what it prints is printed by the test, too."""
        self._process = process
        self._shown = shown
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def output(self) -> str:
        """What it has printed so far."""
        return "".join(self._lines)

    @property
    def said(self) -> str:
        """What it has printed so far, on one line."""
        return " ".join(self.output.split())

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def exit_code(self, *, seconds: float = 180.0) -> int:
        """Wait for its end, and for the end of its output; the test fails if it takes more than `seconds`."""
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._print_stacks()
            pytest.fail(f"still running after {seconds:.0f} s; its last words:\n{self.output[-16000:]}")
        self._reader.join(10)
        return code

    def ends_well(self, *, seconds: float = 180.0) -> str:
        """Wait for its end, which must be a success, and return what it printed on one line."""
        assert self.exit_code(seconds=seconds) == 0, self.output[-6000:]
        return self.said

    def _print_stacks(self) -> None:
        """Have its processes print what their threads are doing."""
        for process in (*psutil.Process(self.pid).children(recursive=True), psutil.Process(self.pid)):
            with contextlib.suppress(psutil.Error):
                process.send_signal(STACKS_SIGNAL)
        time.sleep(2)

    async def ended(self) -> None:
        """Until it has ended."""
        if isinstance(self._process, PreloadedProcess):
            await self._process.ended()
        else:
            await asyncio.to_thread(self._process.wait)

    def end(self) -> None:
        """End it by force if it is still running."""
        self._process.kill()
        self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(line)
            if self._shown:
                sys.stdout.write(line)


def start_command(
    words: Sequence[str],
    *,
    fresh: bool = False,
    within: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
    holder: int | None = None,
    shown: bool = False,
) -> Command:
    """Start `streamrl WORDS`.

    `fresh`: by the command that a user types, and so all processes that it starts; otherwise all are forks of a process
    that has imported what they need, which saves most of the time that a short run takes. `within`: a command that
    starts the one behind it. `variables` of its environment. `holder`: of the host on which it runs (`tests.hosts`).
    `shown`: what it prints is printed by the test, too.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "150"} | dict(variables or {})
    if SUPPORTED and not fresh and not within:
        return Command(PreloadedProcess(words, environment=environment, holder=holder), shown=shown)
    return Command(
        subprocess.Popen(
            [*within, *COMMAND, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env=environment,
        ),
        shown=shown,
    )


def calling(function: Callable[[], None], folder: Path) -> dict[str, str]:
    """Return the variables with which every process of a command calls `function`, of a module, as it begins; `folder`
    is given a `sitecustomize.py`."""
    name = function.__name__
    (folder / "sitecustomize.py").write_text(f"from {function.__module__} import {name}\n\n{name}()\n")
    return {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}


def start(config: Path, arguments: Sequence[str], **how: Any) -> Command:
    """Start `streamrl run`; `how`: see `start_command`."""
    return start_command(["run", str(config), *arguments], **how)


def run(config: Path, arguments: Sequence[str], *, seconds: float = 400.0, fresh: bool = False) -> str:
    """Make a whole run, which has to succeed, and return what it printed on one line."""
    process = start(config, arguments, fresh=fresh)
    try:
        return process.ends_well(seconds=seconds)
    finally:
        process.end()


def until(true: Callable[[], object], what: str, *, seconds: float) -> None:
    """Wait until `true()`; the test fails with `what` was awaited after `seconds`."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s for {what} in vain"
        time.sleep(0.05)


def wait_for_steps(run_dir: Path, count: int, *, seconds: float = 240.0) -> None:
    """Until the run has made `count` steps."""
    file = run_dir / "metrics.jsonl"
    until(lambda: file.exists() and len(steps(run_dir)) >= count, f"{count} steps", seconds=seconds)


def wait_for_words(log: Path, pattern: str) -> None:
    """Until `log` has them."""
    until(lambda: re.search(pattern, log.read_text()), f"{pattern!r} in {log}", seconds=120)


def manager_of(run_dir: Path) -> str:
    """The URL of a launched run's controller, from its log."""
    log, found = run_dir / "logs" / "controller-0.log", list[str]()

    def look() -> list[str]:
        found.extend(re.findall(r" listens at (\S+)", log.read_text()) if log.exists() else ())
        return found

    until(look, f"a controller of {run_dir}", seconds=90)
    return found[0]


def wait_for_status(url: str, ready: Callable[[Status], bool], *, seconds: float = 90.0) -> Status:
    """Until the status of the controller at `url` is as it should be; the run must not be over before."""

    async def ask() -> Status:
        client = ControlClient(url)
        try:
            return await client.status()
        finally:
            await client.close()

    deadline = time.monotonic() + seconds
    while not ready(status := asyncio.run(ask())):
        assert status.state in ("joining", "running"), status.message
        assert time.monotonic() < deadline, status.processes
        time.sleep(0.1)
    return status


def second_gserver(status: Status) -> ProcessStatus | None:
    """gserver/1, if it takes groups."""
    return next((p for p in status.processes if (p.role, p.index, p.state) == ("gserver", 1, "live")), None)


def kill_second_server(url: str, *, seconds: float) -> list[psutil.Process]:
    """Kill the server of gserver/1 and wait until its replacement has generated; return the processes it had."""
    before = second_gserver(wait_for_status(url, lambda status: second_gserver(status) is not None, seconds=seconds))
    assert before is not None
    (server,) = psutil.Process(before.pid).children()
    engines = server.children()
    server.send_signal(signal.SIGKILL)

    def has_worked_again(status: Status) -> bool:
        now = second_gserver(status)
        return now is not None and now.pid != before.pid and now.stats.get("tokens_generated_total", 0) > 0

    wait_for_status(url, has_worked_again, seconds=2 * seconds)
    return engines


def processes_of(run_dir: Path) -> list[psutil.Process]:
    """Living processes that were started for the run."""
    marker = str(run_dir)
    found = []
    for process in psutil.process_iter():
        try:
            if any(marker in word for word in process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def listening_by_role(run_dir: Path) -> Iterator[tuple[str, str, int]]:
    """The role, address and port of each socket that a process of the run listens at."""
    for process in processes_of(run_dir):
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if "streamrl" not in words:  # it is just being started
                continue
            role = words[words.index("streamrl") + 1]
            for connection in process.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN:
                    yield role, connection.laddr.ip, connection.laddr.port


def process_of(run_dir: Path, role: str) -> psutil.Process:
    """A process of the run by its role, as on the command line."""
    return next(p for p in processes_of(run_dir) if role in p.cmdline())


def wait_until_gone(run_dir: Path, *, seconds: float) -> None:
    """Until no process of the run is left."""
    until(lambda: not processes_of(run_dir), f"the end of all processes of {run_dir}", seconds=seconds)


def summary(run_dir: Path) -> dict[str, Any]:
    return dict(json.loads((run_dir / "summary.json").read_text()))


def steps(run_dir: Path) -> list[dict[str, Any]]:
    """The steps that were made, as they are recorded; a line that is being written is left out."""
    *lines, _ = (run_dir / "metrics.jsonl").read_text().split("\n")
    return [json.loads(line) for line in lines]


def trained_seqs(run_dir: Path) -> list[int]:
    """Every sequence number that was trained on, in order of training."""
    return [seq for step in steps(run_dir) for seq in step["seqs"]]


def largest_difference(run_dir: Path, *, share: float = 0.75) -> float:
    """Between the log-probabilities of gservers and trainer, over all versions. A gserver may be left out of one that
    is followed by the next within milliseconds, which a busy machine does to a small model now and then; so at least
    `share` of the versions has to be compared, less one."""
    made = [step["metrics"] for step in steps(run_dir)]
    found = [metrics["logprob_diff_max"] for metrics in made if "logprob_diff_max" in metrics]
    assert len(found) >= share * len(made) - 1, f"compared at {len(found)} of {len(made)} versions"
    return float(max(found))


def assert_rollouts(run_dir: Path, *, groups: int) -> None:
    """Of each step so many `groups` were kept, which it was trained on, and all of them can be read."""
    kept = Rollouts(run_dir)
    of_steps = {step["step"]: step for step in steps(run_dir)}
    found = {(row["step"], row["seq"]) for row in kept.rows.select(["step", "seq"]).to_pylist()}
    assert Counter(step for step, _ in found) == dict.fromkeys(of_steps, groups)
    for step, seq in found:
        assert seq in of_steps[step]["seqs"]
        group = kept.group(step, seq)
        assert all("".join(group.pieces(index)) == group.texts[index] for index in range(group.size))
        assert int((group.policy_versions != NO_VERSION).sum()) == sum(
            row["length"] for row in kept.table(filter=f"step={step} seq={seq}", texts=False).rows
        )


def assert_exactly_once(run_dir: Path) -> None:
    """No group was trained on twice, none was lost, no token was too old."""
    seqs = trained_seqs(run_dir)
    assert len(seqs) == len(set(seqs))
    figures = summary(run_dir)
    assert figures["groups_trained"] == len(seqs)
    assert figures["groups_lost"] == 0
    assert figures["oldest_token_age"] <= figures["max_staleness"]
    for step in steps(run_dir):
        assert all(int(age) <= figures["max_staleness"] for age in step["token_ages"])


def assert_none_missing(run_dir: Path) -> None:
    """Trained on were the groups that were admitted first, as always with `over_age = "wait"` unless one is lost."""
    trained = sorted(trained_seqs(run_dir))
    assert trained == list(range(len(trained)))
