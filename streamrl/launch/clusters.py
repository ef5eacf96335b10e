"""What the launchers for clusters have in common: the pools of a run, what each process needs, how they are spread, and
asking a cluster's own command.

The processes are those of `launch.processes.plan`, as `streamrl run` starts them.
"""

from __future__ import annotations

import asyncio
import shlex
import tempfile
from asyncio.subprocess import PIPE
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from streamrl.config import Config
from streamrl.errors import ConfigError, DeadlineExceeded, StreamRLError
from streamrl.launch.processes import PlanRole, ProcessPlan, plan, threads_of

PoolName = Literal["controller", "trainer", "gserver", "rollout"]
"""Processes that one command, `streamrl NAME`, starts on each of their machines."""

MEMBERS: Mapping[PoolName, Sequence[PlanRole]] = {
    "controller": ("controller",),
    "trainer": ("model_worker",),
    "gserver": ("gserver",),
    "rollout": ("rollout",),
}
COUNTED_BY: Mapping[PoolName, str] = {
    "trainer": "the layout in [trainer]",
    "gserver": "gserver.count",
    "rollout": "rollout.workers",
}
"""Settings that say how many processes a pool has, which are spread over its machines."""


class Needs(msgspec.Struct, frozen=True):
    """What processes need together of a machine."""

    cores: int
    """CPU cores that they and their helpers keep busy."""
    gpus: int


def pools(config: Config, *, gpus: Sequence[str] = ()) -> dict[PoolName, list[ProcessPlan]]:
    """Return the processes of each pool of a run. `gpus` is empty where `run.device = "auto"` is to mean the CPU."""
    processes = plan(config, gpus=gpus)
    return {name: [p for p in processes if p.role in roles] for name, roles in MEMBERS.items()}


def needs(processes: Iterable[ProcessPlan], config: Config) -> Needs:
    """Return what `processes` need if they are on one machine."""
    found = list(processes)
    return Needs(
        cores=sum(_cores(process.role, config) for process in found),
        gpus=sum(_gpus(process, config) for process in found),
    )


def on_one_machine(
    name: PoolName, processes: Sequence[ProcessPlan], machines: int, *, setting: str
) -> list[ProcessPlan]:
    """Return the part of a pool that is on the first of its `machines`, as many as each other has.

    Raises `ConfigError` if they cannot be spread evenly; `setting` names the number of machines.
    """
    if len(processes) % machines:
        raise ConfigError(
            f"{setting} = {machines}: the {len(processes)} processes of {name} cannot be spread evenly over so many; "
            f"change it, or {COUNTED_BY.get(name, 'leave it out')}"
        )
    return list(processes[: len(processes) // machines])


def _cores(role: PlanRole, config: Config) -> int:
    if role == "gserver" and config.gserver.engine == "sglang":
        return config.gserver.threads * config.gserver.sglang.tensor_parallel
    if role != "rollout":
        return threads_of(role, config)
    agents = config.rollout.agent.processes if config.rollout.agent.used else 0
    return 1 + config.rollout.reward.processes + agents


def _gpus(process: ProcessPlan, config: Config) -> int:
    if not process.device.startswith("cuda"):
        return 0
    return config.gserver.sglang.tensor_parallel if process.role == "gserver" else 1


async def said_by(*words: str, given: str = "", seconds: float, otherwise: str) -> str:
    """Run a cluster's own command and return what it prints; `given`: its input.

    Raises `ConfigError` where there is no such command, with what to do `otherwise`, `DeadlineExceeded` after
    `seconds`, and `StreamRLError` with what it says if it fails.
    """
    with tempfile.TemporaryFile() as entered:  # a pipe breaks when the command ends before all was written
        entered.write(given.encode())
        entered.seek(0)
        try:
            process = await asyncio.create_subprocess_exec(*words, stdin=entered, stdout=PIPE, stderr=PIPE)
        except FileNotFoundError as error:
            raise ConfigError(f"there is no {words[0]} on this machine: {otherwise}") from error
    try:
        async with asyncio.timeout(seconds):
            said, wrong = await process.communicate()
    except TimeoutError as error:
        raise DeadlineExceeded(f"waited {seconds:.0f} s for an answer to `{shlex.join(words)}` in vain") from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise StreamRLError(f"{shlex.join(words)}: {wrong.decode().strip() or f'exit code {process.returncode}'}")
    return said.decode().strip()
