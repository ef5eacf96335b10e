"""`streamrl launch slurm`: a run as one Slurm job, with a script that can be read, edited and submitted again.

The job has a step for each pool, and is heterogeneous if the pools request unlike nodes. If it is requeued (its run
failed, its node went away, its time was up), it continues from the run's latest checkpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from streamrl import config as configuration
from streamrl.config import Config, to_toml
from streamrl.config.sections import SlurmNodesConfig
from streamrl.disk import cache_home
from streamrl.errors import ConfigError, StreamRLError
from streamrl.launch.clusters import PoolName, filled, needs, on_one_machine, output_of, pools
from streamrl.launch.process import run_until_stopped, set_up_logging
from streamrl.launch.processes import ProcessPlan
from streamrl.launch.run_folders import run_folder
from streamrl.records import progress
from streamrl.transport.secret import Secret, given
from streamrl.waits import Retry

log = logging.getLogger(__name__)

SCRIPT = "slurm.sh"
"""Name of the script in the run's folder."""
SETTINGS = "slurm.toml"
"""Name of the configuration that every step reads, in the same folder."""
BUSY = ("PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING", "COMPLETING", "STAGE_OUT")
HELD = ("REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT")
ALIVE = frozenset((*BUSY, *HELD))
"""States of a job that may still run. Every other state is final, including states that only one Slurm site defines."""
FORGOTTEN = "unknown to Slurm"
"""State of a job some minutes after its end."""
FIRST_LOOK_SECONDS, LOOK_SECONDS = 0.5, 10.0
"""Interval between two polls of a job, at first and later: Slurm sends no event when a job ends."""
ANSWER_SECONDS = 60.0
"""Longest time of a Slurm command."""
TIME_UP_SECONDS = 60
"""Time before the end of its time limit at which a job requeues itself."""
GPU_OPTIONS = ("--gpus", "-G", "--gres", "--tres")


class Nodes(msgspec.Struct, frozen=True):
    """Nodes that are alike: those of one pool, or of pools that share theirs."""

    pools: Sequence[PoolName]
    count: int
    options: Sequence[str]
    """Options of sbatch for these nodes only."""
    cores: int
    """CPU cores that the processes on one of these nodes keep busy."""
    gpus: int
    """GPUs of each node that are used."""


def run_on_slurm(
    config_file: Path,
    overrides: Sequence[str],
    console: Console,
    *,
    dry_run: bool,
    resume: bool,
    wait: bool,
    template: Path | None,
) -> int:
    """Submit a run as a Slurm job, or resume one; return the exit code.

    `dry_run`: only show the script. `wait`: stay until the end of the job.
    """
    set_up_logging("slurm")
    asked = configuration.load(config_file, overrides)
    folder = Path.cwd()
    text = script(asked, config_file=asked.run_dir / SETTINGS, folder=folder, template=template)  # may reject the job
    if dry_run:
        console.out(text, end="", highlight=False)
        return 0
    resolved = run_folder(asked, overrides, console, resume=resume)
    asked = msgspec.structs.replace(asked, run=msgspec.structs.replace(asked.run, name=resolved.run.name))

    async def begin() -> None:
        if resume:
            await refuse_second_job(resolved.run_dir / SCRIPT)
            progress.begin_lineage(resolved)  # the job resumes from the latest checkpoint each time that it starts
        try:
            file = write(asked if resume else resolved, folder=folder, template=template)
            job = await submit(file)
        except StreamRLError:
            if not resume:
                discard(resolved)
            raise
        text = f"job {job} was submitted with {file}; its logs are in {resolved.run_dir / 'logs'}"
        console.print(text, markup=False, soft_wrap=True)
        if wait:
            await until_ended(job)

    return run_until_stopped(begin)


# --- the script ---


def script(config: Config, *, config_file: Path, folder: Path, template: Path | None = None) -> str:
    """Return the sbatch script of the run with its resolved configuration in `config_file`.

    `folder` is the base of relative paths in the configuration. Raises `ConfigError` if processes cannot be spread
    evenly over the nodes of [launch.slurm].
    """
    found = pools(config)
    layout = _layout(config, found)
    unlike = len({(*nodes.options, nodes.gpus) for nodes in layout}) > 1
    logs = config.run_dir.absolute() / "logs"
    values: dict[str, object] = {
        "name": repr(config.run.name),
        "header": "\n".join(_header(config, layout, unlike=unlike, folder=folder, output=logs / "slurm.log")),
        "streamrl": shlex.join([sys.executable, "-m", "streamrl"]),
        "config": shlex.quote(str(config_file.absolute())),
        "logs": shlex.quote(str(logs)),
        "port": config.run.port or "$((20000 + SLURM_JOB_ID % 20000))",
        "restarts": config.restarts.number,
    }
    for index, nodes in enumerate(layout):
        for pool in nodes.pools:
            values[f"{pool}_where"] = _where(layout, index, unlike=unlike)
            values[f"{pool}_nodes"] = nodes.count
            values[f"{pool}_count"] = len(found[pool]) // nodes.count
    return filled("slurm.sh", values, template=template)


def _layout(config: Config, found: dict[PoolName, list[ProcessPlan]]) -> list[Nodes]:
    """Return the nodes of the job, the trainer's first."""
    settings = config.launch.slurm
    trainer, gserver, rollout = settings.trainer, settings.gserver, settings.rollout
    for key, nodes in (("trainer", trainer.nodes), ("gserver", gserver.nodes)):
        if not nodes:
            raise ConfigError(f"launch.slurm.{key}.nodes must be at least 1: only rollout workers go where others are")
    if rollout.options and not rollout.nodes:
        raise ConfigError("launch.slurm.rollout.options is of nodes of their own: set launch.slurm.rollout.nodes")

    def nodes_of(names: Sequence[PoolName], asked: SlurmNodesConfig, *, key: str) -> Nodes:
        processes: list[ProcessPlan] = []
        for name in names:
            if name == "controller":
                processes += found[name]
            else:
                setting = f"launch.slurm.{key}.nodes"
                processes += on_one_machine(name, found[name], asked.nodes, setting=setting)
        needed = needs(processes, config)
        return Nodes(names, asked.nodes, asked.options, needed.cores, needed.gpus)

    layout = [nodes_of(["controller", "trainer"], trainer, key="trainer")]
    if not rollout.nodes:
        return [*layout, nodes_of(["gserver", "rollout"], gserver, key="gserver")]
    return [*layout, nodes_of(["gserver"], gserver, key="gserver"), nodes_of(["rollout"], rollout, key="rollout")]


def _where(layout: Sequence[Nodes], index: int, *, unlike: bool) -> str:
    """Return the options of srun that choose the nodes `layout[index]`."""
    if unlike:
        return f"--het-group={index}"
    return f"--relative={sum(nodes.count for nodes in layout[:index])}"


def _header(config: Config, layout: Sequence[Nodes], *, unlike: bool, folder: Path, output: Path) -> list[str]:
    """Return the #SBATCH lines."""
    general = [
        f"--job-name={config.run.name}",
        f"--output={output}",
        "--open-mode=append",
        f"--chdir={folder.absolute()}",
        f"--signal=B:USR1@{TIME_UP_SECONDS}",
    ]
    of_all = ["--requeue", "--no-kill", "--ntasks-per-node=1", *config.launch.slurm.options]
    if unlike:
        components = [
            (f"# {', '.join(nodes.pools)}", nodes.count, nodes.cores, nodes.gpus, nodes.options) for nodes in layout
        ]
    else:
        names = "; then ".join(f"{nodes.count} for {', '.join(nodes.pools)}" for nodes in layout)
        total, busy = sum(nodes.count for nodes in layout), max(nodes.cores for nodes in layout)
        components = [(f"# {names}", total, busy, layout[0].gpus, layout[0].options)]
    lines = [f"#SBATCH {shlex.quote(option)}" for option in general]  # names and folders may contain spaces
    for index, (comment, count, busy, gpus, own) in enumerate(components):
        chosen = [*of_all, *own]
        asked = [f"--nodes={count}"]
        if not _says(chosen, "--cpus-per-task", "-c", "--exclusive"):
            asked.append(f"--cpus-per-task={busy}")
        if gpus and not _says(chosen, *GPU_OPTIONS):
            asked.append(f"--gpus-per-node={gpus}")
        lines += ["#SBATCH hetjob"] * (index > 0)
        lines += [comment, *(f"#SBATCH {option}" for option in (*asked, *chosen))]
    return lines


def _says(options: Sequence[str], *names: str) -> bool:
    return any(option.startswith(names) for option in options)


def write(config: Config, *, folder: Path, template: Path | None = None) -> Path:
    """Write the script, the configuration and the secret; return the script. The run's folder must exist.

    Unless the configuration has a secret, one is made in the user's cache, which all nodes are expected to share; a
    resumed run keeps its secret. Raises `ConfigError` if a file cannot be written.
    """
    try:
        if given(config) is None:
            secret = _secret_file(config)
            if not secret.exists():
                Secret.make().write(secret)
            security = msgspec.structs.replace(config.security, secret_file=str(secret))
            config = msgspec.structs.replace(config, security=security)
        settings, file = config.run_dir / SETTINGS, config.run_dir / SCRIPT
        text = script(config, config_file=settings, folder=folder, template=template)
        (config.run_dir / "logs").mkdir(exist_ok=True)
        settings.write_text(to_toml(config))
        file.write_text(text)
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be written ({error.strerror}), and the job needs it") from error
    return file


def discard(config: Config) -> None:
    """Remove the files of a new run that could not be submitted: its folder, and its secret in the cache."""
    shutil.rmtree(config.run_dir)
    with contextlib.suppress(OSError):  # there is no secret, or the cache is no folder
        _secret_file(config).unlink()


def _secret_file(config: Config) -> Path:
    """Return the file of the run's secret."""
    folder = hashlib.blake2b(os.fsencode(config.run_dir.absolute()), digest_size=4).hexdigest()
    return (cache_home() / "secrets" / f"{config.run.name}-{folder}").absolute()


# --- the job ---


async def refuse_second_job(file: Path) -> None:
    """Raise `ConfigError` if a job with the script `file` may still run: both would write into the run's folder.

    Raises `StreamRLError` with Slurm's error output if squeue fails.
    """
    said = await _slurm("squeue", "--noheader", "--states=all", "--format=%A %T %o")
    for job, state in _jobs_of(file, said):
        if state in ALIVE:
            raise ConfigError(
                f"{file.parent} is being run by job {job}, which is {state}; wait for its end, or end it with: "
                f"scancel {job}"
            )


def _jobs_of(file: Path, said: str) -> Iterator[tuple[str, str]]:
    """Yield the jobs with the script `file`, and their states; `said` is squeue's lines of job, state and script."""
    for job, state, command in (line.split(maxsplit=2) for line in said.splitlines() if line.count(" ") > 1):
        if Path(command).resolve() == file.resolve():
            yield job, state


async def submit(file: Path) -> str:
    """Submit the script; return the job's id. Raises `StreamRLError` with Slurm's error output if it is rejected."""
    said = await _slurm("sbatch", "--parsable", str(file))
    return said.partition(";")[0]


async def state(job: str) -> str:
    """Return the state of `job` as Slurm names it; for a heterogeneous job, the state of its first component."""
    try:
        said = await _slurm("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T")
    except StreamRLError as error:
        if "Invalid job id" in str(error):
            return FORGOTTEN
        raise
    return said.splitlines()[0].strip() if said else FORGOTTEN


async def until_ended(job: str) -> None:
    """Wait until `job` has ended; if the wait is cancelled, so is the job. Raises `StreamRLError` unless it succeeded.

    If Slurm forgets a job before it is polled, nothing is known of its end. While Slurm's controller does not respond,
    jobs continue, and so does the wait.
    """
    last, pause = "", FIRST_LOOK_SECONDS
    retry = Retry(f"to ask Slurm for the state of job {job}", patience=math.inf)
    try:
        while True:
            try:
                now = await state(job)
            except ConfigError:
                raise
            except StreamRLError as error:
                await retry.pause(error)
                continue
            retry.succeeded()
            if now not in ALIVE:
                break
            if now != last:
                log.info("job %s is %s", job, now)
                last, pause = now, FIRST_LOOK_SECONDS
            await asyncio.sleep(pause)
            pause = min(1.5 * pause, LOOK_SECONDS)
    except asyncio.CancelledError:
        log.info("cancelling job %s", job)
        await _slurm("scancel", job)
        raise
    if now != "COMPLETED":
        raise StreamRLError(f"job {job} ended as {now}; see slurm.log in the run's logs, and `scontrol show job {job}`")


async def _slurm(*words: str) -> str:
    """Run a Slurm command and return its output; raises as `output_of` does."""
    otherwise = "start this where jobs are submitted, or show the script with --dry-run and submit it there"
    return await asyncio.to_thread(output_of, *words, seconds=ANSWER_SECONDS, otherwise=otherwise)
