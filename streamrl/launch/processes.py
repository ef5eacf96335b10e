"""Which processes a configuration asks for: role, number, environment and command of each.

Pure but for one look at the machine's GPUs. Every child gets the command that a person would
type by hand on another machine, so `streamrl run` and pools started by hand are the same thing.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import psutil

from streamrl.config import Config
from streamrl.errors import ConfigError

PlanRole = Literal["manager", "gserver", "model_worker", "master", "rollout", "evaluator"]

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
"""gloo's environment variable: the network interface at which it listens."""

COMPONENTS: Mapping[str, str] = {
    "checkpoint": "streamrl.models:ensure_checkpoint",
    "manager": "streamrl.gserver.manager.process:serve",
    "gserver": "streamrl.gserver.server.process:serve",
    "model_worker": "streamrl.trainer.worker.process:serve",
    "master": "streamrl.trainer.master.process:serve",
    "rollout": "streamrl.rollout.worker:serve",
    "evaluator": "streamrl.rollout.evaluator:serve",
}
"""What runs in a process of each role, and what makes the model folder: `module:function`."""

STOP_ORDER: Sequence[frozenset[PlanRole]] = (
    frozenset({"rollout", "evaluator"}),
    frozenset({"master", "model_worker"}),
    frozenset({"gserver"}),
    frozenset({"manager"}),
)
"""Who is stopped together, first to last: nobody loses a peer that it still needs."""


class ProcessPlan(msgspec.Struct, frozen=True):
    """One process that is to run."""

    role: PlanRole
    index: int
    """Number within its role, from 0."""
    threads: int
    """CPU threads of its tensor operations."""
    device: str
    """For people: `cpu`, `cuda`, or `-` where no model is computed."""
    gpus: Sequence[str]
    """Entries of CUDA_VISIBLE_DEVICES if this process gets GPUs of its own; none: it sees all of them."""
    address: str
    """For people: where it listens."""

    @property
    def name(self) -> str:
        return f"{self.role}/{self.index}"

    @property
    def log_name(self) -> str:
        return f"{self.role}-{self.index}.log"

    @property
    def environment(self) -> dict[str, str]:
        """What its environment must hold before it starts."""
        variables = thread_environment(self.threads)
        return {**variables, "CUDA_VISIBLE_DEVICES": ",".join(self.gpus)} if self.gpus else variables


def thread_environment(threads: int) -> dict[str, str]:
    """Variables that numeric libraries read once, when they load."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OPENBLAS_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONFAULTHANDLER": "1",
    }


def gloo_environment(host: str) -> dict[str, str]:
    """Return the variable that has gloo listen at the interface of `host`; empty where this machine does not have that
    interface, or another was chosen.

    Without it gloo listens at what the machine's own name stands for, which others may reach.
    """
    if GLOO_INTERFACE in os.environ:
        return {}
    wanted = {address[0] for *_, address in socket.getaddrinfo(host, None)}
    for name, addresses in psutil.net_if_addrs().items():
        if any(_covers(entry, wanted) for entry in addresses):
            return {GLOO_INTERFACE: name}
    return {}


def _covers(entry: Any, wanted: set[Any]) -> bool:
    """Return whether an interface's address is one of `wanted`; a loopback interface has all of its network."""
    if entry.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    own = ipaddress.ip_address(entry.address.partition("%")[0])
    return any(own == other or (own.is_loopback and other.is_loopback) for other in map(ipaddress.ip_address, wanted))


def threads_of(role: PlanRole, config: Config) -> int:
    """CPU threads that a process of `role` may use for tensor operations."""
    return {"gserver": config.gserver.threads, "model_worker": config.trainer.threads}.get(role, 1)


def plan(config: Config, *, gpus: Sequence[str] = ()) -> list[ProcessPlan]:
    """The processes of a run, in the order in which they start.

    Of several `gpus` (entries of CUDA_VISIBLE_DEVICES), gservers and model workers take turns.
    """
    device = _device(config, gpus)
    taken = 0

    def one(role: PlanRole, index: int, *, address: str, ranks: int = 0) -> ProcessPlan:
        """`ranks`: how many GPUs it can use."""
        nonlocal taken
        own = [gpus[(taken + rank) % len(gpus)] for rank in range(ranks)] if device == "cuda" and len(gpus) > 1 else []
        taken += ranks
        return ProcessPlan(
            role=role,
            index=index,
            threads=threads_of(role, config),
            device=(f"cuda (GPU {', '.join(own)})" if own else device) if ranks else "-",
            gpus=own,
            address=address,
        )

    manager_port = str(config.manager.port) if config.manager.port else "free port"
    return [
        one("manager", 0, address=f"http://{config.manager.host}:{manager_port}"),
        *(
            one(
                "gserver",
                index,
                address=f"http://{config.gserver.host}:free port",
                ranks=_ranks_of_a_gserver(config),
            )
            for index in range(config.gserver.count)
        ),
        *(
            one(
                "model_worker",
                index,
                address=f"tcp://{config.stream.host}:free port",
                ranks=1,
            )
            for index in range(config.trainer.workers)
        ),
        one("master", 0, address=f"tcp://{config.stream.host}:free port"),
        *(one("rollout", index, address="-") for index in range(config.rollout.workers)),
        *(one("evaluator", index, address="-") for index in range(config.evaluation.enabled)),
    ]


def fitted(config: Config, *, gpus: Sequence[str]) -> Config:
    """`config` for a whole run on a machine with these `gpus`.

    Weights are broadcast over gloo where the trainer's first rank and those of the gservers cannot have a GPU each, as
    NCCL demands. Raises `ConfigError` when there are fewer GPUs than one server has ranks.
    """
    weights, of_a_gserver = config.weights, _ranks_of_a_gserver(config)
    if _device(config, gpus) != "cuda":
        return config
    if of_a_gserver > max(len(gpus), 1):
        raise ConfigError(
            f"gserver.sglang.tensor_parallel = {of_a_gserver} needs as many GPUs; this machine has {len(gpus)}"
        )
    if weights.backend != "auto" or weights.mode not in ("auto", "collective"):
        return config
    ranks = 1 + config.gserver.count * of_a_gserver
    if ranks <= len(gpus) and config.gserver.engine != "simulated":
        return config
    return msgspec.structs.replace(config, weights=msgspec.structs.replace(weights, backend="gloo"))


def _device(config: Config, gpus: Sequence[str]) -> str:
    """`cpu` or `cuda`."""
    if config.run.device == "auto":
        return "cuda" if gpus else "cpu"
    return config.run.device


def _ranks_of_a_gserver(config: Config) -> int:
    """How many a gserver process has on this machine: none if it computes nothing, or somewhere else."""
    if config.gserver.engine == "simulated" or config.gserver.sglang.addresses:
        return 0
    return config.gserver.sglang.tensor_parallel if config.gserver.engine == "sglang" else 1


def command(
    process: ProcessPlan,
    *,
    config_file: Path,
    manager_url: str | None = None,
    model_dir: Path | None = None,
    overrides: Sequence[str] = (),
    components: Mapping[str, str] = COMPONENTS,
) -> list[str]:
    """The command line of `process`: the one to type by hand, completed by what the launcher knows already."""
    words = [sys.executable, "-m", "streamrl", process.role.replace("_", "-"), str(config_file), *overrides]
    if manager_url is not None:
        words += ["--manager", manager_url]
    if process.role in ("gserver", "model_worker", "rollout"):
        words += ["--index", str(process.index)]
    if model_dir is not None:
        words += ["--model-dir", str(model_dir)]
    return words + _component_option(process.role, components)


def checkpoint_command(
    config_file: Path, *, overrides: Sequence[str] = (), components: Mapping[str, str] = COMPONENTS
) -> list[str]:
    """The command line that makes the run's model folder and tells where it is."""
    words = [sys.executable, "-m", "streamrl", "checkpoint", str(config_file), *overrides]
    return words + _component_option("checkpoint", components)


def _component_option(role: str, components: Mapping[str, str]) -> list[str]:
    chosen = components.get(role, COMPONENTS[role])
    return [] if chosen == COMPONENTS[role] else ["--component", chosen]


def visible_gpus() -> list[str]:
    """GPUs that this process may use, as entries of CUDA_VISIBLE_DEVICES; finds them without loading torch."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [entry.strip() for entry in chosen.split(",") if entry.strip()]
    devices = [name for name in os.listdir("/dev") if re.fullmatch(r"nvidia\d+", name)]
    return [str(index) for index in range(len(devices))]
