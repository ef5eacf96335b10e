"""`streamrl run` from the outside, with real processes: how it ends, and that it leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from streamrl.launch.supervisor import LEAVE_SECONDS
from tests.e2e.harness import calling, start_command
from tests.launch.run_standins import use_standins
from tests.processes import lives

PATIENCE = 90.0
MEMBERS = ("controller", "gserver0", "model_worker0", "rollout0")


class Launched:
    """A launcher under test."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        config = folder / "config.toml"
        config.write_text(f'[run]\nname = "trial"\ndir = "{folder}/runs"\n')
        self.run_dir = folder / "runs" / "trial"
        cache = str(folder / "cache")  # empty, so the model has to be made
        variables = {"COLUMNS": "140", "STREAMRL_CACHE": cache, **calling(use_standins, folder)}
        self.command = start_command(["run", str(config), *overrides], variables=variables)

    def pids(self) -> dict[str, int]:
        return {file.stem: int(file.read_text() or 0) for file in self.run_dir.glob("*.pid")}

    def until_all_run(self) -> dict[str, int]:
        until(lambda: set(self.pids()) == set(MEMBERS) and all(self.pids().values()), self)
        return self.pids()

    def ends(self) -> int:
        return self.command.exit_code(seconds=PATIENCE)

    def ended(self) -> tuple[str, str]:
        summary = json.loads((self.run_dir / "summary.json").read_text())
        return summary["state"], summary["message"]

    def said(self) -> str:
        return self.command.output


def until(true: Callable[[], bool], launched: Launched, *, seconds: float = PATIENCE) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, launched.said()
        time.sleep(0.02)


def alive(pids: dict[str, int]) -> list[str]:
    return [name for name, pid in pids.items() if lives(pid)]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    launched: list[Launched] = []

    def start(*overrides: str) -> Launched:
        launched.append(Launched(tmp_path, *overrides))
        return launched[-1]

    yield start
    for one in launched:
        one.command.end()


def test_normal_end(launch: Callable[..., Launched]) -> None:
    run = launch("evaluation.at_end=true", "--page")  # evaluation has no process of its own
    assert run.ends() == 0, run.said()
    assert alive(run.pids()) == []
    assert set(run.pids()) == set(MEMBERS)
    assert (run.run_dir / "config.toml").exists()
    assert (run.run_dir / "summary.json").exists()
    logs = {file.stem for file in (run.run_dir / "logs").iterdir()}
    assert logs == {"checkpoint-0", "controller-0", "gserver-0", "model_worker-0", "page-0", "rollout-0"}
    assert "has not left" not in run.said(), "the run does not wait for its page"


@pytest.mark.parametrize("args", ['controller="wait"', 'controller="until drained", model_worker="wait"'])
def test_ctrl_c_stops_everything(launch: Callable[..., Launched], args: str) -> None:
    """Also if the controller ends the run before a model worker has joined it, which nobody tells of the end."""
    run = launch(f"data.args={{{args}}}")
    pids = run.until_all_run()
    begin = time.monotonic()
    run.command.signal(signal.SIGINT)
    assert run.ends() == 130, run.said()
    assert time.monotonic() - begin < LEAVE_SECONDS
    assert alive(pids) == []
    assert "run trial" in run.said()  # the summary of what was done
    assert run.ended()[0] == "stopped"
    assert "Traceback" not in run.said()


def test_the_page_is_there_while_the_run_goes_on(launch: Callable[..., Launched]) -> None:
    run = launch('data.args={controller="wait"}', "--page")
    pids = run.until_all_run()
    told = re.compile(r"in a browser: (http://127\.0\.0\.1:\d+/\S+/)")
    until(lambda: bool(told.search(run.said())), run)
    match = told.search(run.said())
    assert match is not None
    with urllib.request.urlopen(f"{match[1]}api/runs", timeout=PATIENCE) as answer:
        assert json.load(answer)[0]["name"] == "trial"
    run.command.signal(signal.SIGINT)
    assert run.ends() == 130, run.said()
    assert alive(pids) == []
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"{match[1]}api/runs", timeout=PATIENCE)


def test_ctrl_c_ends_a_process_that_does_not_listen(launch: Callable[..., Launched]) -> None:
    run = launch('data.args={controller="wait", rollout="stubborn"}')
    pids = run.until_all_run()
    run.command.signal(signal.SIGINT)
    assert run.ends() == 130, run.said()
    assert alive(pids) == []
    assert "rollout/0 did not stop within 5 s" in run.said()


def starts(run: Launched, role: str) -> int:
    file = run.run_dir / f"{role}-starts.txt"
    return len(file.read_text().split()) if file.exists() else 0


def test_a_gserver_that_dies_is_started_again_until_it_was_too_often(launch: Callable[..., Launched]) -> None:
    run = launch('data.args={controller="wait"}', "restarts.number=2", "restarts.delay_seconds=0.1")
    for count in (1, 2, 3):
        until(lambda count=count: starts(run, "gserver") == count, run)  # type: ignore[misc]
        pids = run.until_all_run()
        os.kill(pids["gserver0"], signal.SIGKILL)
    assert run.ends() == 1
    assert alive(run.pids()) == []
    said = " ".join(run.said().split())
    assert f"gserver/0 (pid {pids['gserver0']}) was ended by SIGKILL (out of memory?)" in said
    assert "others continue its requests, and it is restarted (2 of 2, in 0.2 s)" in said
    assert "it was restarted 2 times within 3600 s already" in said


def test_a_pool_that_still_has_members_goes_on_smaller(launch: Callable[..., Launched]) -> None:
    settings = ("restarts.number=1", "restarts.delay_seconds=0.1")
    run = launch('data.args={controller="wait"}', "gserver.count=2", "rollout.workers=2", *settings)
    everyone = {*MEMBERS, "gserver1", "rollout1"}
    until(lambda: set(run.pids()) == everyone and all(run.pids().values()), run)
    for name in ("gserver1", "rollout1"):
        first = run.pids()[name]
        os.kill(first, signal.SIGKILL)
        until(lambda name=name, first=first: run.pids()[name] not in (0, first), run)  # type: ignore[misc]
        os.kill(run.pids()[name], signal.SIGKILL)
        role = name.removesuffix("1")
        until(lambda role=role: f"the run continues with {role}/0" in " ".join(run.said().split()), run)  # type: ignore[misc]
    assert run.command.running
    before = run.pids()["gserver0"]
    os.kill(before, signal.SIGKILL)
    until(lambda: run.pids()["gserver0"] not in (0, before), run)
    os.kill(run.pids()["gserver0"], signal.SIGKILL)
    assert run.ends() == 1, "none is left"
    said = " ".join(run.said().split())
    assert "it was restarted 1 times within 3600 s already; the run continues with gserver/0; it is tried again" in said
    assert alive(run.pids()) == []


@pytest.mark.parametrize(
    ("args", "role", "count", "said"),
    [
        ('gserver="die-first"', "gserver", 1, ["gserver/0", "ended with exit code 3", "gserver 0: something broke"]),
        ('model_worker="raise"', "model_worker", 1, ["model_worker/0", "ended with exit code 1", "is broken"]),
        ('rollout="die"', "rollout", 2, ["restarted 1 times within 3600 s already", "rollout 0: something broke"]),
    ],
)
def test_an_error_that_ends_the_run_is_shown_with_the_last_lines_of_the_log(
    launch: Callable[..., Launched], args: str, role: str, count: int, said: list[str]
) -> None:
    """At once, if the process never came up; an error of a rollout worker may be that of a prompt."""
    settings = ("restarts.number=1", "restarts.delay_seconds=0.01")
    run = launch(f'data.args={{controller="wait", {args}}}', *settings)
    assert run.ends() == 1
    assert [part for part in said if part not in " ".join(run.said().split())] == []
    assert "Traceback" not in run.said()
    assert starts(run, role) == count
    assert alive(run.pids()) == []


def test_run_that_gives_up_names_the_culprit(launch: Callable[..., Launched]) -> None:
    run = launch('data.args={controller="fail"}')
    assert run.ends() == 1
    assert "the run failed: gserver/0: ModelError: out of memory" in run.said()
    assert "gserver-0.log" in run.said()
    assert run.ended() == ("failed", "gserver/0: ModelError: out of memory")


def test_failed_checkpoint_in_a_folder_of_its_own(launch: Callable[..., Launched], tmp_path: Path) -> None:
    (tmp_path / "runs" / "trial").mkdir(parents=True)
    (tmp_path / "runs" / "trial-2").mkdir()
    run = launch('data.args={checkpoint="fail"}')
    assert run.ends() == 1
    assert "no such model: nowhere" in run.said()
    assert run.pids() == {}
    assert "trial-3" in run.said()
    assert 'name = "trial-3"' in (tmp_path / "runs" / "trial-3" / "config.toml").read_text()


def test_a_model_that_is_there_needs_no_process(launch: Callable[..., Launched], tmp_path: Path) -> None:
    (tmp_path / "cache" / "smollm2-135m-instruct-1").mkdir(parents=True)
    run = launch()
    assert run.ends() == 0, run.said()
    assert not (run.run_dir / "logs" / "checkpoint-0.log").exists()


def test_members_import_while_the_model_is_made_and_the_controller_starts(launch: Callable[..., Launched]) -> None:
    run = launch('data.args={checkpoint="await members"}')
    assert run.ends() == 0, run.said()


@pytest.mark.parametrize("victim", MEMBERS)
def test_records_name_who_was_killed_whoever_it_was(launch: Callable[..., Launched], victim: str) -> None:
    never = ("restarts.number=0",)
    run = launch('data.args={controller="wait"}', *never)
    pids = run.until_all_run()
    os.kill(pids[victim], signal.SIGKILL)
    assert run.ends() == 1
    name = victim.rstrip("0")
    why = f"{name}/0 (pid {pids[victim]}) was ended by SIGKILL (out of memory?)"
    assert run.ended() == ("failed", why)
    if victim != "controller":  # the others are to hear it before they are stopped
        assert f"told that the run failed: {why}" in (run.run_dir / "logs" / "controller-0.log").read_text()


def test_killed_launcher_leaves_nothing(launch: Callable[..., Launched]) -> None:
    run = launch('data.args={controller="wait", rollout="stubborn"}')
    pids = run.until_all_run()
    run.command.end()
    until(lambda: alive(pids) == [], run, seconds=15)
