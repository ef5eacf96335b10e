"""The processes of a configuration: role, index, environment and command of each.

Pure but for looking up the machine's GPUs. Every child gets the command that a person would type by hand on another
machine, so `streamrl run` and pools started by hand run the same processes.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Literal, get_args
from urllib.parse import urlsplit

import msgspec

from streamrl.config import Config
from streamrl.errors import ConfigError
from streamrl.machine import GPUS_OF_WINDOWS

DEVICES = Path("/dev")
DEALT_SHARE = 0.8
"""Share of a GPU's memory that is divided equally among its users; the rest is for memory that none of them counts."""
MemberRole = Literal["gserver", "model_worker", "rollout"]
"""Processes that join the controller."""
HelperRole = Literal["checkpoint", "page"]
"""Processes that a launcher starts in addition to the run's, and that take no part in the run."""
PlanRole = Literal["controller"] | MemberRole | HelperRole

COMPONENTS: dict[str, str] = {
    "checkpoint": "streamrl.models:ensure_checkpoint",
    "controller": "streamrl.controller:serve",
    "gserver": "streamrl.gserver.server.process:serve",
    "model_worker": "streamrl.trainer.worker.process:serve",
    "replay_rank": "streamrl.trainer.replay.process:serve",
    "rollout": "streamrl.rollout.worker:serve",
}
"""The function (`module:function`) that is the work of a process of each role."""
TORCH_BACKEND = "streamrl.trainer.backends.torch:TorchModel"

URL_FROM_INPUT = "-"
"""In place of the controller's URL: the process reads it from its input, where it comes once there is a controller."""

STOP_ORDER: Sequence[frozenset[PlanRole]] = (
    frozenset({"rollout"}),
    frozenset({"controller", "model_worker"}),
    frozenset({"gserver"}),
)
"""Roles that are stopped together, first to last, so that no process loses a peer that it still needs. The controller
and the model workers are stopped at the same time: neither takes the end of the other for a failure."""


class ProcessPlan(msgspec.Struct, frozen=True):
    """One process to run."""

    role: PlanRole
    index: int
    """Number within its role, from 0."""
    threads: int
    """CPU threads of its tensor operations."""
    device: str = "-"
    """For people: `cpu`, `cuda`, or `-` if it computes no model."""
    gpus: Sequence[str] = ()
    """Entries of CUDA_VISIBLE_DEVICES if this process gets GPUs of its own; empty: it sees all of them."""

    @property
    def name(self) -> str:
        """Role and index, for example `rollout/0`."""
        return f"{self.role}/{self.index}"

    @property
    def is_member(self) -> bool:
        """Whether it takes part in the run; a helper does not."""
        return self.role not in get_args(HelperRole)

    @property
    def log_name(self) -> str:
        """Name of its log file."""
        return f"{self.role}-{self.index}.log"

    @property
    def environment(self) -> dict[str, str]:
        """Variables that must be in its environment before it starts."""
        variables = thread_environment(self.threads)
        return {**variables, "CUDA_VISIBLE_DEVICES": ",".join(self.gpus)} if self.gpus else variables


def thread_environment(threads: int) -> dict[str, str]:
    """Return variables that numeric libraries read once, when they load."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OPENBLAS_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONFAULTHANDLER": "1",
    }


def imports_of(role: str, config: Config) -> list[str]:
    """Return all that a process of `role` imports (`module:name`): its component, and what that one needs later."""
    further = []
    if role == "gserver":
        further.append(config.gserver.traits.serve)
    elif role in ("model_worker", "replay_rank") and config.trainer.backend == "torch":
        further.append(TORCH_BACKEND)
    return [COMPONENTS[role], *further]


def threads_of(role: str, config: Config) -> int:
    """Return the CPU threads that a process of `role` may use for tensor operations."""
    if role in ("checkpoint", "model_worker", "replay_rank"):
        return config.trainer.threads
    return config.gserver.threads if role == "gserver" else 1


def plan(config: Config, *, gpus: Sequence[str] = ()) -> list[ProcessPlan]:
    """Return the processes of a run on this machine, in the order in which they start.

    If there are several `gpus` (entries of CUDA_VISIBLE_DEVICES), gservers and model workers take turns.
    """
    counts: dict[PlanRole, int] = {
        "controller": 1,
        "gserver": config.gserver.count,
        "model_worker": config.trainer.workers,
        "rollout": config.rollout.workers,
    }
    return _planned(config, [(role, index) for role, count in counts.items() for index in range(count)], gpus)


class TrainerShare(msgspec.Struct, frozen=True):
    """The part of the trainer that one `streamrl trainer` runs."""

    node: int
    """Index of the node, from 0."""
    nodes: int
    local: int = 0
    """Index among the nodes on this machine, which divide the machine's GPUs; `locals` is their number."""
    locals: int = 1

    def ranks(self, workers: int) -> range:
        """Return the indices of its model workers among all `workers`: as many as every other node has, or one more."""
        return range(self.node * workers // self.nodes, (self.node + 1) * workers // self.nodes)

    def of(self, gpus: Sequence[str]) -> Sequence[str]:
        """Return its part of the machine's `gpus`."""
        if len(gpus) < self.locals:
            return [gpus[self.local % len(gpus)]] if gpus else []
        return gpus[self.local * len(gpus) // self.locals : (self.local + 1) * len(gpus) // self.locals]


def share_of(config: Config, *, node: int | None, nodes: int | None, environment: Mapping[str, str]) -> TrainerShare:
    """Return the part of the trainer that is the `node`th of `nodes`; both None: from torchrun's variables.

    torchrun numbers the processes that it starts (RANK of WORLD_SIZE, and LOCAL_RANK of LOCAL_WORLD_SIZE on this
    machine, as variables in `environment`). Each of them is a node here, whether a machine has one or one for each GPU.
    Raises `ConfigError` for impossible numbers, and if there are more nodes than model workers.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if node is None and nodes is None:
        if "RANK" not in environment or "WORLD_SIZE" not in environment:
            return TrainerShare(node=0, nodes=1)
        try:
            numbers = [int(environment.get(name, default)) for name, default in zip(names, "0101", strict=True)]
        except ValueError as error:
            told = ", ".join(f"{name}={environment[name]}" for name in names if name in environment)
            raise ConfigError(
                f"{told}: torchrun's variables are numbers; unset them, or give --node and --nodes"
            ) from error
        share = TrainerShare(*numbers)
        said = f"RANK={share.node} of WORLD_SIZE={share.nodes}"
    else:
        share = TrainerShare(node=node or 0, nodes=nodes or 1)
        said = f"--node {share.node} --nodes {share.nodes}"
        if nodes is None:
            raise ConfigError(f"--node {share.node} needs the number of parts, --nodes N")
    if not 0 <= share.node < share.nodes or not 0 <= share.local < share.locals:
        raise ConfigError(f"{said}: nodes are numbered from 0 to {share.nodes - 1}")
    if share.nodes > config.trainer.workers:
        raise ConfigError(
            f"{said}: there are only {config.trainer.workers} model workers (trainer.data_parallel * "
            "context_parallel * tensor_parallel * pipeline_parallel), and each node has at least one"
        )
    return share


def plan_trainer(config: Config, *, share: TrainerShare, gpus: Sequence[str] = ()) -> list[ProcessPlan]:
    """Return the model workers of `share`, in the order in which they start.

    A trainer that is whole on this machine leaves the first `gpus` to the gservers, as in `plan`.
    """
    if share.nodes == 1:
        return [process for process in plan(config, gpus=gpus) if process.role == "model_worker"]
    ranks = share.ranks(config.trainer.workers)
    return _planned(config, [("model_worker", rank) for rank in ranks], share.of(gpus), of_machine=len(gpus))


def plan_pool(
    config: Config, role: MemberRole, *, indices: Sequence[int], gpus: Sequence[str] = ()
) -> list[ProcessPlan]:
    """Return gservers or rollout workers that have machines of their own."""
    return _planned(config, [(role, index) for index in indices], gpus)


def _planned(
    config: Config, wanted: Iterable[tuple[PlanRole, int]], gpus: Sequence[str], *, of_machine: int = 0
) -> list[ProcessPlan]:
    """Return the processes `wanted` (role and index); those that compute models take turns with the `gpus`.

    `of_machine`: number of GPUs of the machine, if `gpus` are one process's share of them.
    """
    device, taken, found = _device(config, gpus), 0, []
    dealt = device == "cuda" and (of_machine or len(gpus)) > 1
    usable: dict[PlanRole, int] = {"gserver": _ranks_of_a_gserver(config), "model_worker": 1}
    for role, index in wanted:
        ranks = usable.get(role, 0)
        own = [gpus[(taken + rank) % len(gpus)] for rank in range(ranks)] if dealt else []
        taken += ranks
        shown = f"cuda (GPU {', '.join(own)})" if own else device
        plan = ProcessPlan(role, index, threads_of(role, config), device=shown if ranks else "-", gpus=own)
        found.append(plan)
    return found


def fitted(config: Config, *, gpus: Sequence[str]) -> Config:
    """Return `config` for a whole run on a machine with these `gpus`.

    Weights are broadcast over gloo if the sending ranks of the trainer and the ranks of the gservers cannot have a GPU
    each, as NCCL demands. If GPUs are shared, SGLang takes its share of the memory instead of all that is free. Raises
    `ConfigError` if there are fewer GPUs than ranks in one server, or than model workers in the trainer.
    """
    of_a_gserver = _ranks_of_a_gserver(config)
    if _device(config, gpus) != "cuda":
        return config
    if of_a_gserver > max(len(gpus), 1):
        raise ConfigError(
            f"gserver.{config.gserver.engine}.tensor_parallel = {of_a_gserver} needs as many GPUs; this machine has "
            f"{len(gpus)}"
        )
    workers = config.trainer.workers
    if workers > max(len(gpus), 1):
        raise ConfigError(
            f"{workers} model workers (trainer.data_parallel * context_parallel * tensor_parallel * pipeline_parallel) "
            f'need as many GPUs; this machine has {len(gpus)}: have fewer, or set run.device = "cpu"'
        )
    config = _sharing_memory(config, users=-(-(config.gserver.count * of_a_gserver + workers) // max(len(gpus), 1)))
    weights = config.weights
    if weights.backend != "auto" or weights.mode not in ("auto", "collective"):
        return config
    if 1 + config.gserver.count * of_a_gserver <= len(gpus) and config.gserver.traits.computes:
        return config
    return msgspec.structs.replace(config, weights=msgspec.structs.replace(weights, backend="gloo"))


def _sharing_memory(config: Config, *, users: int) -> Config:
    """Return `config` for `users` processes per GPU.

    A server that by default takes all free memory but a small part gets an equal share, unless the configuration sets
    it.
    """
    gserver, flag = config.gserver, config.gserver.traits.memory_flag
    if gserver.server is None or not flag or users < 2 or any(arg.startswith(flag) for arg in gserver.server.args):
        return config
    args = [*gserver.server.args, f"{flag}={DEALT_SHARE / users:.2f}"]
    section = {gserver.engine: msgspec.structs.replace(gserver.server, args=args)}
    return msgspec.structs.replace(config, gserver=msgspec.structs.replace(gserver, **section))


def _device(config: Config, gpus: Sequence[str]) -> str:
    """Return `cpu` or `cuda`."""
    if config.run.device == "auto":
        return "cuda" if gpus else "cpu"
    return config.run.device


def _ranks_of_a_gserver(config: Config) -> int:
    """Return the number of ranks of a gserver process on this machine: 0 if it computes nothing here."""
    if not config.gserver.traits.computes or config.gserver.joins:
        return 0
    return config.gserver.ranks


class ProcessCommands(msgspec.Struct):
    """Command lines of one launcher's processes: those that a person would type, completed by values that the launcher
    has."""

    config_file: Path
    overrides: Sequence[str] = ()
    manager_url: str = ""
    """URL of the controller; empty until it has been started. Of a process that starts earlier: `URL_FROM_INPUT`."""
    advertise: str = ""
    resume: bool = False
    """Whether processes begin from the same checkpoint as the controller."""

    def of(self, process: ProcessPlan, *, died: str = "") -> list[str]:
        """Return the command line of `process`. `died`: how the process before it died; empty if there was none.

        A model worker or controller that replaces a dead one begins from the run's latest checkpoint, and the
        controller has the address of the one before it.
        """
        role = process.role
        words = [sys.executable, "-m", "streamrl", role.replace("_", "-"), str(self.config_file), *self.overrides]
        if role == "controller":
            previous = ["--resume", "--port", str(urlsplit(self.manager_url).port), "--died", died]
            return [*words, *previous] if died else words
        if role == "checkpoint":
            return words
        words += ["--manager", self.manager_url, "--index", str(process.index)]
        if self.resume or (died and role == "model_worker"):
            words.append("--resume")
        return [*words, "--advertise", self.advertise] if self.advertise else words


def visible_gpus() -> list[str]:
    """Return the GPUs that this process may use, as entries of CUDA_VISIBLE_DEVICES, without loading torch.

    As in CUDA, the first invalid entry ends the list: -1 is a common way to hide all GPUs.
    """
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return list(takewhile(re.compile(r"\d|GPU-|MIG-").match, map(str.strip, chosen.split(","))))
    devices = [name for name in os.listdir(DEVICES) if re.fullmatch(r"nvidia\d+", name)]
    return [str(index) for index in range(len(devices) or _gpus_lent_by_windows())]


def _gpus_lent_by_windows() -> int:
    """Return the number of GPUs that the driver of WSL 2 reports; Linux has one file for all of Windows' GPUs."""
    if not GPUS_OF_WINDOWS.exists():
        return 0
    try:
        driver = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:  # the GPUs are of another maker
        return 0
    count = ctypes.c_uint(0)
    failed = driver.nvmlInit_v2() or driver.nvmlDeviceGetCount_v2(ctypes.byref(count))
    return 0 if failed else count.value
