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

from streamrl.config import Config, to_toml
from streamrl.config.sections import SlurmNodesConfig
from streamrl.errors import ConfigError, StreamRLError
from streamrl.launch.clusters import PoolName, needs, on_one_machine, pools, said_by
from streamrl.launch.processes import ProcessPlan
from streamrl.local_cache import cache_home
from streamrl.retry import Retry
from streamrl.transport.secret import Secret, given

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

    @property
    def kind(self) -> tuple[Sequence[str], int]:
        """Properties in which unlike nodes differ."""
        return tuple(self.options), self.gpus


# --- the script ---


def script(config: Config, *, config_file: Path, folder: Path) -> str:
    """Return the sbatch script of the run with its resolved configuration in `config_file`.

    `folder` is the base of relative paths in the configuration. Raises `ConfigError` if processes cannot be spread
    evenly over the nodes of [launch.slurm].
    """
    found = pools(config)
    layout = _layout(config, found)
    unlike = len({nodes.kind for nodes in layout}) > 1
    logs = config.run_dir.absolute() / "logs"

    def step(name: PoolName, command: str, *, nodes: int) -> str:
        index = next(index for index, nodes in enumerate(layout) if name in nodes.pools)
        where = _where(layout, index, unlike=unlike)
        return f'step {where} --nodes={nodes} --ntasks={nodes} --output="$logs/{name}-%N.log" \\\n    {command}'

    def pool(name: PoolName) -> str:
        nodes = next(nodes.count for nodes in layout if name in nodes.pools)
        count = f" --count {len(found[name]) // nodes}" if name in ("gserver", "rollout") else ""
        command = f'"${{streamrl[@]}}" {name} "$config" --manager "$manager"{count} --resume'
        if name == "trainer" and nodes > 1:
            command = f"bash -c '\"$@\" --nodes {nodes} --node $SLURM_PROCID' _ {command}"
        return f"{{ {step(name, command, nodes=nodes)} \\\n    || lost {name}; }} &"

    controller = '"${streamrl[@]}" controller "$config" --host "$address" --port "$port" --resume'
    lines = [
        "#!/bin/bash",
        f"# The run {config.run.name!r}, written by `streamrl launch slurm`. It may be edited, and submitted again",
        "# with sbatch: it goes on from the run's latest checkpoint.",
        *_header(config, layout, unlike=unlike, folder=folder, output=logs / "slurm.log"),
        "",
        f"streamrl=({shlex.join([sys.executable, '-m', 'streamrl'])})",
        f"config={shlex.quote(str(config_file.absolute()))}",
        f"logs={shlex.quote(str(logs))}",
        'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "address=$(scontrol show node \"$first\" | grep -o 'NodeAddr=[^ ]*' | cut -d= -f2)",
        f"port={config.run.port or '$((20000 + SLURM_JOB_ID % 20000))'}",
        "case $address in *:*) manager=http://[$address]:$port ;; *) manager=http://$address:$port ;; esac  # IPv6",
        "",
        "# A node that goes away takes its own processes with it, and nothing else.",
        'step() { srun --overlap --no-kill --kill-on-bad-exit=0 --open-mode=append "$@"; }',
        "",
        "# A pool starts its processes again that die. Without one of the pools the run cannot go on; but a pool that",
        "# has lost a node on the way ends with an error at the end of the run, too, shortly before the controller.",
        "lost() {",
        '    for _ in {1..20}; do kill -0 "$controller" 2> /dev/null || return; sleep 1; done',
        '    echo "streamrl: nothing is left of the pool $1" >&2',
        '    kill "$controller"',
        "}",
        "",
        "begin_again() {",
        '    echo "streamrl: $1; the job is begun again" >&2',
        '    scontrol requeue "$SLURM_JOB_ID" && sleep 600  # until Slurm ends this script',
        "}",
        "trap 'begin_again \"its time is nearly up\"' USR1",
        "",
        step("controller", controller, nodes=1) + " &",
        "controller=$!",
        *(pool(name) for name in found if name != "controller"),
        "",
        "# The controller's end is the run's; the others leave by themselves then.",
        'wait "$controller"',
        "code=$?",
        'state=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T | head -n 1)',
        "# Slurm's own count of restarts has those after the end of the job's time in it, which are no failures.",
        'failures="$logs/failures-$SLURM_JOB_ID"',
        'if [ "$code" != 0 ] && [ "$state" = RUNNING ] && '
        f'[ "$(cat "$failures" 2> /dev/null | wc -l)" -lt {config.restarts.number} ]; then',
        '    echo "the controller ended with code $code" >> "$failures"',
        '    begin_again "the controller ended with code $code"',
        "fi",
        "for _ in {1..30}; do",
        '    [ -n "$(jobs -r)" ] || break',
        "    sleep 1",
        "done",
        'exit "$code"',
    ]
    return "\n".join(lines) + "\n"


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


def write(config: Config, *, folder: Path) -> Path:
    """Write the script, the configuration and the secret; return the script. The run's folder must exist.

    Unless the configuration has a secret, one is made in the user's cache, which all nodes are expected to share; a
    resumed run keeps its secret. Raises `ConfigError` if a file cannot be written.
    """
    try:
        return _written(config, folder=folder)
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be written ({error.strerror}), and the job needs it") from error


def _written(config: Config, *, folder: Path) -> Path:
    if given(config) is None:
        secret = _secret_file(config)
        if not secret.exists():
            Secret.make().write(secret)
        security = msgspec.structs.replace(config.security, secret_file=str(secret))
        config = msgspec.structs.replace(config, security=security)
    settings, file = config.run_dir / SETTINGS, config.run_dir / SCRIPT
    text = script(config, config_file=settings, folder=folder)
    (config.run_dir / "logs").mkdir(exist_ok=True)
    settings.write_text(to_toml(config))
    file.write_text(text)
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
    """Run a Slurm command and return its output; raises as `said_by` does."""
    otherwise = "start this where jobs are submitted, or show the script with --dry-run and submit it there"
    return await said_by(*words, seconds=ANSWER_SECONDS, otherwise=otherwise)
