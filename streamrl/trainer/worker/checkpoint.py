"""Checkpoints that are either whole or not there, written while training goes on.

Owns the one thread that writes. Invariants: at most one checkpoint is being written; its folder
appears at once, when all of it is on the disk; older ones are removed only after that.

Everything that a checkpoint holds, copied into host memory so that training can go on while it is written.

    FOLDER/                 the policy as a Hugging Face checkpoint, with its tokenizer; with [model.lora] an adapter
                            as peft has it, beside the settings and the tokenizer of its base
    FOLDER/critic/, ref/    likewise, where there is one (the reference: where it changes)
    FOLDER/state/ROLE/      optimizer, schedule and coefficients of a trained role
    FOLDER/state/progress.json

Random numbers need no place in it: those of a training step are a function of run seed and policy
version, those of a response of run seed and sequence number.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec
from safetensors import SafetensorError
from torch import Tensor

from streamrl.config import Config, LoraConfig
from streamrl.device import compute_with
from streamrl.errors import DeadlineExceeded
from streamrl.records import progress
from streamrl.records.progress import Progress
from streamrl.trainer.backends.files import copies, export, export_adapter
from streamrl.trainer.roles.actor import Actor
from streamrl.trainer.roles.critic import Critic
from streamrl.trainer.roles.items import RoleState
from streamrl.trainer.worker.assembly import CRITIC, REFERENCE, Assembly

# --- checkpoint ---

log = logging.getLogger(__name__)

REPLACED = ".replaced"
"""An older checkpoint of the same name, until the new one is in its place."""


class CheckpointWriter:
    """Writes one checkpoint after another; used by the one thread that computes."""

    def __init__(self, *, keep: int, spare: str | None) -> None:
        """`keep` checkpoints stay, and `spare`, which the run came from."""
        self._keep = keep
        self._spare = spare
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint", initializer=compute_with, initargs=(1,))
        self._writing: tuple[Path, Future[str]] | None = None

    def begin(self, folder: Path, write: Callable[[Path], None]) -> None:
        """Have `write` fill the checkpoint `folder`, and return at once; `settle` comes first."""
        assert self._writing is None, f"{folder} before it is known what became of {self._writing}"
        self._writing = folder, self._thread.submit(self._write, folder, write)

    def settle(self, *, limit: float) -> str:
        """Wait for what is being written; return why it could not be, or nothing if it was.

        Raises `DeadlineExceeded` after `limit` seconds. A reason is given once.
        """
        if self._writing is None:
            return ""
        folder, future = self._writing
        try:
            failure = future.result(limit)
        except TimeoutError as error:
            if future.done():
                raise
            raise DeadlineExceeded(f"the checkpoint {folder} is not on the disk after {limit:.0f} s") from error
        self._writing = None
        return failure

    def _write(self, folder: Path, write: Callable[[Path], None]) -> str:
        try:
            write_folder(folder, write)
            progress.prune(folder.parent, keep=self._keep, spare=self._spare)
        except (OSError, SafetensorError) as error:  # tolerance point: a full disk must not end a run
            failure = (
                f"the checkpoint {folder} cannot be written ({error}); those before it are whole: make room there, "
                "or lower trainer.keep_checkpoints"
            )
            log.error(failure)
            return failure
        log.info("%s is written", folder)
        return ""


def write_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Have `write` fill a temporary folder, then put it in the place of `folder`; if it fails, nothing is left."""
    unfinished = folder.with_name(folder.name + progress.UNFINISHED)
    if unfinished.exists():
        shutil.rmtree(unfinished)
    unfinished.mkdir(parents=True)
    try:
        write(unfinished)
        _to_disk(unfinished)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    replaced = folder.with_name(folder.name + REPLACED)
    if folder.exists():
        if replaced.exists():
            shutil.rmtree(replaced)
        folder.rename(replaced)  # killed here, a run goes on from it under this name
    unfinished.rename(folder)
    if replaced.exists():
        shutil.rmtree(replaced)
    _sync(folder.parent)


def _to_disk(folder: Path) -> None:
    """Let a checkpoint that can be seen be one that survives the loss of power, too."""
    for path in [*folder.rglob("*"), folder]:
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- snapshot ---


class Snapshot(msgspec.Struct, frozen=True):
    """A run at the end of a step."""

    progress: Progress
    source: Path
    """Checkpoint whose settings and tokenizer the policy has."""
    weights: dict[str, dict[str, Tensor]]
    """Role → its weights, whole."""
    states: dict[str, RoleState]
    lora: LoraConfig | None = None
    """The policy's weights are an adapter's."""

    def write(self, folder: Path) -> None:
        """Into `folder`, which exists."""
        for role, weights in self.weights.items():
            if role == "actor" and self.lora is not None:
                export_adapter(folder, weights.items(), lora=self.lora, base=self.source)
                continue
            target = folder if role == "actor" else folder / role
            export(target, weights.items(), source=self.source, scalar_head=role == CRITIC)
        for role, state in self.states.items():
            home = folder / progress.STATE / role
            home.mkdir(parents=True)
            state.write(home)
        progress.write(folder, self.progress)


def roles_to_save(assembly: Assembly, config: Config) -> list[str]:
    """The roles whose weights a checkpoint has: those that change."""
    saved = {"actor", CRITIC}
    if config.algorithm.ref_update_every:
        saved.add(REFERENCE)
    return [name for name in assembly.roles if name in saved]


def take_snapshot(assembly: Assembly, config: Config, reached: Progress, *, keep: bool) -> Snapshot:
    """Gather everything from all ranks; those without `keep` only take part. Collective.

    The models are on their devices, and no publication reads the weights.
    """
    weights: dict[str, dict[str, Tensor]] = {}
    states: dict[str, RoleState] = {}
    for name in roles_to_save(assembly, config):
        role = assembly.roles[name]
        weights[name] = copies(role.model.gather_weights(), keep=keep)
        if isinstance(role, Critic) or (isinstance(role, Actor) and role is assembly.actor):
            states[name] = role.state().copied(keep=keep)
    lora = config.model.lora
    source = Path(config.run.resume_from or assembly.model_dir) if lora is None else assembly.model_dir
    return Snapshot(progress=reached, source=source, weights=weights, states=states, lora=lora)
