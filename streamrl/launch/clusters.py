"""Common parts of the launchers for clusters: the pools of a run, the resources of each process, their spread over
machines, templates of jobs, and calls of a cluster's own command.

The processes are those of `launch.processes.plan`, as `streamrl run` starts them.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from streamrl.config import Config
from streamrl.errors import ConfigError, DeadlineExceeded, StreamRLError
from streamrl.launch.processes import PlanRole, ProcessPlan, plan, threads_of

TEMPLATES = Path(__file__).parent / "templates"
_KEY = re.compile(r"\{\{(\w+)\}\}")

PoolName = Literal["controller", "trainer", "gserver", "rollout"]
"""Names of pools; the command `streamrl NAME` starts the pool's processes of one machine."""

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
"""Settings for the number of processes in a pool, which are spread over its machines."""


class Needs(msgspec.Struct, frozen=True):
    """Resources of a machine that some processes need together."""

    cores: int
    """CPU cores that they and their helpers keep busy."""
    gpus: int


def pools(config: Config) -> dict[PoolName, list[ProcessPlan]]:
    """Return the processes of each pool of a run; `run.device = "auto"` means the CPU."""
    processes = plan(config)
    return {name: [p for p in processes if p.role in roles] for name, roles in MEMBERS.items()}


def needs(processes: Iterable[ProcessPlan], config: Config) -> Needs:
    """Return the resources that `processes` need if they are all on one machine."""
    found = list(processes)
    return Needs(
        cores=sum(_cores(process.role, config) for process in found),
        gpus=sum(_gpus(process, config) for process in found),
    )


def on_one_machine(
    name: PoolName, processes: Sequence[ProcessPlan], machines: int, *, setting: str
) -> list[ProcessPlan]:
    """Return the part of a pool that is on the first of its `machines`; every other machine has as many processes.

    Raises `ConfigError` if they cannot be spread evenly; `setting` is the key for the number of machines.
    """
    if len(processes) % machines:
        raise ConfigError(
            f"{setting} = {machines}: the {len(processes)} processes of {name} cannot be spread evenly over so many; "
            f"change it, or {COUNTED_BY.get(name, 'leave it out')}"
        )
    return list(processes[: len(processes) // machines])


def _cores(role: PlanRole, config: Config) -> int:
    if role == "gserver":
        return config.gserver.threads * config.gserver.ranks
    if role != "rollout":
        return threads_of(role, config)
    agents = config.rollout.agent.processes if config.rollout.agent.used else 0
    return 1 + config.rollout.reward.processes + agents


def _gpus(process: ProcessPlan, config: Config) -> int:
    if not process.device.startswith("cuda"):
        return 0
    return config.gserver.ranks if process.role == "gserver" else 1


def filled(name: str, values: Mapping[str, object], *, template: Path | None) -> str:
    """Return the text of the file `template`, or of streamrl's own template `name`, with `values` for {{KEY}}.

    Further lines of a value are indented like its first one. A line with an empty value is left out. Raises
    `ConfigError` if the file cannot be read, or has a key that is not in `values`.
    """
    file = template or TEMPLATES / name
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--template {file}: cannot be read ({error})") from error

    def line_of(line: str) -> str | None:
        keys = _KEY.findall(line)
        if unknown := sorted(set(keys) - values.keys()):
            raise ConfigError(f"{file}: there is no value for {unknown[0]}; there are {', '.join(sorted(values))}")
        if any(str(values[key]) == "" for key in keys):
            return None
        indent = line[: len(line) - len(line.lstrip())]
        text = _KEY.sub(lambda found: str(values[found[1]]).rstrip("\n"), line)
        return text.replace("\n", f"\n{indent}")

    return "\n".join(line for line in map(line_of, lines) if line is not None) + "\n"


def output_of(*words: str, given: str = "", seconds: float, otherwise: str) -> str:
    """Run a cluster's own command, and return its output; `given`: its input.

    Raises `ConfigError` with the remedy `otherwise` if there is no such command, `DeadlineExceeded` after `seconds`,
    and `StreamRLError` with the command's error output if it fails.
    """
    try:
        done = subprocess.run(words, input=given, capture_output=True, encoding="utf-8", timeout=seconds, check=False)
    except FileNotFoundError as error:
        raise ConfigError(f"there is no {words[0]} on this machine: {otherwise}") from error
    except subprocess.TimeoutExpired as error:
        raise DeadlineExceeded(f"waited {seconds:.0f} s for an answer to `{shlex.join(words)}` in vain") from error
    if done.returncode:
        raise StreamRLError(f"{shlex.join(words)}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout.strip()
