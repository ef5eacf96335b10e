"""Runs on a real Slurm of three nodes: a node that goes away, a job that is begun again, one that is cancelled."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.config import from_dict
from streamrl.errors import ConfigError, StreamRLError
from streamrl.launch.slurm import ALIVE, FORGOTTEN, refuse_second_job, script, state, submit, until_ended, write
from tests.e2e.harness import (
    COPY_SCRATCH,
    PACED,
    Command,
    assert_exactly_once,
    overrides,
    processes_of,
    start_command,
    steps,
    wait_for_steps,
    wait_for_words,
)
from tests.launch.slurm_cluster import SlurmCluster, missing

STEPS = 16
SETTINGS = PACED | {
    "gserver__count": 2,
    "rollout__workers": 2,
    "rollout__group_size": 4,
    "limits__silence_seconds": 4,
    "trainer__save_every": "2 steps",
    "run__total_train_steps": STEPS,
}
ENDS = (
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "REVOKED",
)
"""States of Slurm's documentation in which a job is over."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    if why := missing():
        pytest.skip(why)
    with SlurmCluster(tmp_path_factory.mktemp("slurm")) as started:
        yield started


@pytest.fixture
def with_slurm(cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> SlurmCluster:
    """The cluster that commands of Slurm reach from this process."""
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    return cluster


@pytest.fixture
def launched(with_slurm: SlurmCluster, tmp_path: Path) -> Iterator[Launched]:
    started = Launched(with_slurm, tmp_path)
    yield started
    started.end()


class Launched:
    """A run on the cluster, by `streamrl launch slurm --wait`."""

    def __init__(self, cluster: SlurmCluster, folder: Path) -> None:
        self.run_dir = folder / "run"
        self._cluster = cluster
        self._folder = folder
        self._command: Command | None = None

    def begin(self, *words: str, **settings: Any) -> Command:
        chosen = overrides(self._folder, "run", **{**SETTINGS, **settings})
        self._command = start_command(["launch", "slurm", str(COPY_SCRATCH), *chosen, "--wait", *words], fresh=True)
        return self._command

    def job(self) -> str:
        assert self._command is not None
        command = self._command
        self._cluster.until(lambda: "was submitted" in command.said or not command.running, "the job's submission")
        found = re.search(r"job (\d+) was submitted", command.said)
        assert found, command.output
        return found[1]

    def said(self) -> str:
        """The last of all its logs, for whoever has to find out what went wrong."""
        logs = sorted((self.run_dir / "logs").glob("*.log"))
        return "\n".join(f"== {log.name}\n{log.read_text()[-1500:]}" for log in logs)

    def end(self) -> None:
        self._cluster.command("scancel", "--full", "--user", str(os.geteuid()))
        self._cluster.until(lambda: not self._cluster.command("squeue", "-h"), "the end of all jobs")
        self._cluster.until_ready()
        if self._command is not None:
            self._command.end()


@pytest.mark.timeout(700)
def test_a_run_outlives_a_node_and_goes_on_when_its_job_is_begun_again(
    launched: Launched, with_slurm: SlurmCluster
) -> None:
    """Half of the gservers and rollout workers go with a node; later the job is told that its time is nearly up."""
    command = launched.begin(launch__slurm__gserver__nodes=2)
    job, cluster, run_dir = launched.job(), with_slurm, launched.run_dir
    try:
        wait_for_steps(run_dir, 3)
        cluster.take_away("n3")
        cluster.command("scontrol", "update", "NodeName=n3", "State=DOWN", "Reason=gone")
        wait_for_steps(run_dir, 9)  # more than the groups that were admitted before
        assert cluster.state(job) == "RUNNING"
        assert cluster.command("squeue", "-h", "-j", job, "-o", "%N") == "n[1-2]"
        cluster.give_back("n3")
        cluster.until(lambda: cluster.answers("n3"), "n3")

        cluster.command("scancel", "--batch", "--signal=USR1", job)
        cluster.until(lambda: cluster.state(job) == "PENDING", "the requeue")
        assert not processes_of(run_dir / "logs")
        reached = len(steps(run_dir))
        cluster.command("scontrol", "update", f"JobId={job}", "StartTime=now")
        command.ends_well()
    except BaseException:
        print(launched.said())  # noqa: T201
        raise
    assert "its time is nearly up; the job starts again" in (run_dir / "logs" / "slurm.log").read_text()
    assert 9 <= reached < STEPS
    assert [step["step"] for step in steps(run_dir)] == list(range(1, STEPS + 1))
    assert_exactly_once(run_dir)


@pytest.mark.timeout(900)
def test_a_job_of_unlike_nodes_is_cancelled_by_ctrl_c(launched: Launched, with_slurm: SlurmCluster) -> None:
    command = launched.begin(launch__slurm__trainer__options='["--comment=trainer"]', launch__slurm__rollout__nodes=1)
    job = launched.job()
    wait_for_words(launched.run_dir / "slurm.sh", "#SBATCH hetjob")
    with_slurm.until(lambda: _controlled(launched.run_dir), "the controller")
    command.signal(signal.SIGINT)
    assert command.exit_code() == 130, command.output
    with_slurm.until(lambda: with_slurm.state(job) == "CANCELLED", "the cancelled job")
    with_slurm.until(lambda: not processes_of(launched.run_dir), "the end of its processes")


def _controlled(run_dir: Path) -> bool:
    return any(" listens at " in log.read_text() for log in (run_dir / "logs").glob("controller-*.log"))


@pytest.mark.parametrize(
    ("line", "end"), [("exit 0", ""), ("exit 3", "FAILED"), ("scancel $SLURM_JOB_ID; sleep 60", "CANCELLED")]
)
async def test_every_end_of_a_job_is_told(line: str, end: str, with_slurm: SlurmCluster, tmp_path: Path) -> None:
    file = tmp_path / "job.sh"
    file.write_text(f"#!/bin/bash\n#SBATCH --output=/dev/null\n{line}\n")
    job = await submit(file)
    if end:
        with pytest.raises(StreamRLError, match=f"job {job} ended as {end}"):
            await until_ended(job)
    else:
        await until_ended(job)
    assert await state("987654") == FORGOTTEN


async def test_a_controller_that_does_not_answer_ends_no_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looks = tmp_path / "looks"
    squeue = tmp_path / "squeue"
    squeue.write_text(
        f"#!/bin/sh\necho >> {looks}\n"
        f"case $(wc -l < {looks}) in 1) echo RUNNING;; 2) echo 'Unable to contact slurm controller' >&2; exit 1;; "
        "*) echo COMPLETED;; esac\n"
    )
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    await until_ended("7")
    assert "to ask Slurm for the state of job 7 is tried again until it succeeds: squeue" in caplog.text
    assert "Unable to contact slurm controller" in caplog.text


async def test_slurm_refuses_in_its_own_words(with_slurm: SlurmCluster, tmp_path: Path) -> None:
    file = tmp_path / "job.sh"
    file.write_text("#!/bin/bash\n#SBATCH --partition=nowhere\n")
    with pytest.raises(StreamRLError, match=r"sbatch .*invalid partition specified: nowhere"):
        await submit(file)


def refused(folder: Path, *, code: int) -> str:
    """`streamrl launch slurm` ends with `code` and leaves no folder of a run; return what it says."""
    command = start_command(["launch", "slurm", str(COPY_SCRATCH), *overrides(folder, "run")], fresh=True)
    assert command.exit_code() == code, command.output
    assert not (folder / "run").exists()
    return command.said


def test_a_run_that_slurm_refuses_leaves_no_folder_and_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sbatch = tmp_path / "sbatch"
    sbatch.write_text(
        f"#!/bin/sh\nls {tmp_path}/cache/secrets > {tmp_path}/secrets\necho 'no such account' >&2\nexit 1\n"
    )
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("STREAMRL_CACHE", str(tmp_path / "cache"))
    assert "no such account" in refused(tmp_path, code=1)
    assert (tmp_path / "secrets").read_text().startswith("run-")
    assert not list((tmp_path / "cache" / "secrets").iterdir())


def test_a_run_that_goes_on_keeps_its_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMRL_CACHE", str(tmp_path / "cache"))
    config = from_dict({"run": {"dir": str(tmp_path), "name": "run"}})
    config.run_dir.mkdir()
    write(config, folder=tmp_path)
    (made,) = (tmp_path / "cache" / "secrets").iterdir()
    content = made.read_text()
    write(config, folder=tmp_path)
    assert list((tmp_path / "cache" / "secrets").iterdir()) == [made]
    assert made.read_text() == content


async def test_a_run_whose_job_is_not_over_gets_no_second_one(
    with_slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = Path("some run") / "slurm.sh"
    other = Path("some run") / "other.sh"
    file.parent.mkdir()
    for each in (file, other):
        each.write_text("#!/bin/bash\n#SBATCH --output=/dev/null\nsleep 600\n")
    await refuse_second_job(file)
    job = await submit(file)
    await refuse_second_job(other)
    with pytest.raises(ConfigError, match=rf"some run is being run by job {job}, which is .*: scancel {job}"):
        await refuse_second_job(file.absolute())
    with_slurm.command("scancel", job)
    with_slurm.until(lambda: with_slurm.state(job) == "CANCELLED", "the cancelled job")
    await refuse_second_job(file)


def test_no_end_counts_as_alive() -> None:
    assert ALIVE.isdisjoint([*ENDS, "TIMEOUT", FORGOTTEN])


# --- the script alone ---


def written(**slurm: Any) -> str:
    sections = {"gserver": {"count": 4}, "rollout": {"workers": 8}, "trainer": {"data_parallel": 2}}
    config = from_dict({**sections, "launch": {"slurm": slurm}})
    return script(config, config_file=Path("c.toml"), folder=Path("/some where"))


@given(st.integers(1, 3), st.integers(1, 5), st.integers(0, 3), st.booleans())
def test_each_pool_has_a_step_on_its_own_nodes(trainer: int, gserver: int, rollout: int, unlike: bool) -> None:
    options: Sequence[str] = ["--gres=gpu:8"] if unlike else []
    chosen = {
        "trainer": {"nodes": trainer, "options": options},
        "gserver": {"nodes": gserver},
        "rollout": {"nodes": rollout},
    }
    if 2 % trainer or 4 % gserver or 8 % (rollout or gserver):
        with pytest.raises(ConfigError, match=r"launch\.slurm\.\w+\.nodes = \d: .* cannot be spread evenly"):
            written(**chosen)
        return
    text = written(**chosen)
    asked = [int(found) for found in re.findall(r"^#SBATCH --nodes=(\d+)$", text, flags=re.M)]
    whole = [trainer, gserver] + [rollout] * (rollout > 0)
    assert asked == (whole if unlike else [sum(whole)])
    steps = re.findall(r"^(?:\{ )?step --(relative|het-group)=(\d+) --nodes=(\d+) --ntasks=\3 .*?/(\w+)-%N", text, re.M)
    places = {name: (int(where), int(nodes)) for _, where, nodes, name in steps}
    assert {kind for kind, *_ in steps} == {"het-group" if unlike else "relative"}
    of_gservers, of_rollout = (1, 2 if rollout else 1) if unlike else (trainer, trainer + gserver * (rollout > 0))
    assert places == {
        "trainer": (0, trainer),
        "controller": (0, 1),
        "gserver": (of_gservers, gserver),
        "rollout": (of_rollout, rollout or gserver),
    }
    assert f"--nodes {trainer} --node $SLURM_PROCID" in text
    assert f"--count {4 // gserver} " in text


def test_the_script_is_one_that_bash_reads() -> None:
    config = from_dict(
        {
            "run": {"name": "it's", "device": "cuda"},
            "trainer": {"data_parallel": 8},
            "evaluation": {"at_end": True},
            "restarts": {"number": 5},
            "launch": {"slurm": {"options": ["--time=1:00:00"], "trainer": {"nodes": 2}}},
        }
    )
    text = script(config, config_file=Path("a folder/c.toml"), folder=Path("/some where"))
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    options = [shlex.split(line)[1:] for line in text.splitlines() if line.startswith("#SBATCH ")]
    assert ["--job-name=it's"] in options
    assert ["--chdir=/some where"] in options  # one word each, for sbatch too
    assert re.findall(r"#SBATCH --gpus-per-node=(\d)", text) == ["4", "1"]
    assert "evaluator" not in text  # rollout workers make evaluations
    assert "-lt 5 ]" in text


def carried_out(folder: Path, *, restarts: int = 0, failed_before: int = 0, **stand_ins: str) -> None:
    """Carry out the script of a job that was begun again ten times already, with stand-ins for Slurm's commands."""
    for name, line in {"squeue": "echo RUNNING", **stand_ins}.items():
        (folder / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / name).chmod(0o755)
    config = from_dict({"run": {"dir": str(folder), "name": "run"}, "restarts": {"number": restarts}})
    file, logs = folder / "job.sh", folder / "run" / "logs"
    file.write_text(script(config, config_file=Path("c.toml"), folder=folder))
    logs.mkdir(parents=True)
    (logs / "failures-7").write_text("once\n" * failed_before)
    subprocess.run(
        ["bash", str(file)],
        env={
            "PATH": f"{folder}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "here",
            "SLURM_RESTART_COUNT": "10",
        },
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("failed_before", [1, 2])
def test_the_ends_of_its_time_leave_a_job_its_restarts_after_failures(failed_before: int, tmp_path: Path) -> None:
    """Every step fails."""
    scontrol = f"case $1 in requeue) touch {tmp_path}/requeued; kill $PPID;; *) echo NodeAddr=here;; esac"
    carried_out(tmp_path, restarts=2, failed_before=failed_before, srun="exit 3", scontrol=scontrol)
    assert (tmp_path / "requeued").exists() == (failed_before < 2)


@pytest.mark.parametrize(("address", "url"), [("fd00::7", "http://[fd00::7]"), ("n1", "http://n1")])
def test_the_manager_may_be_on_a_node_with_an_ipv6_address(address: str, url: str, tmp_path: Path) -> None:
    carried_out(tmp_path, srun=f'echo "$@" >> {tmp_path}/steps', scontrol=f"echo NodeAddr={address}")
    steps_of_job = (tmp_path / "steps").read_text()
    assert f" --host {address} --port 20007" in steps_of_job
    assert set(re.findall(r"--manager (\S+)", steps_of_job)) == {f"{url}:20007"}


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"launch\.slurm\.gserver\.nodes must be at least 1"):
        written(gserver={"nodes": 0})
    with pytest.raises(ConfigError, match=r"set launch\.slurm\.rollout\.nodes"):
        written(rollout={"nodes": 0, "options": ["--exclusive"]})


def test_without_slurm_the_command_says_so_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "there is no sbatch on this machine" in refused(tmp_path, code=2)


def test_where_nothing_can_be_written_the_command_says_so_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").touch()
    monkeypatch.setenv("STREAMRL_CACHE", str(tmp_path / "cache"))
    said = refused(tmp_path, code=2)
    assert f"{tmp_path}/cache/secrets" in said
    assert "cannot be written" in said
