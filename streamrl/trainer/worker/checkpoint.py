"""Checkpoints that are either whole or not there, written by all model workers at once while training goes on.

A model worker copies its part of the weights and optimizer states into its own host memory; training stands still for
that copy only. A thread of its own then writes the copy, beside those of other workers; no process ever holds more than
its own part.
Invariants: at most one checkpoint is being written; its folder appears at once, when worker 0 has seen that all of it
is on the disk, after the figures and the record of its steps; older ones are removed only after that.

    FOLDER/                 the policy: weights, config.json, tokenizer; with [model.lora] an adapter as peft has it,
                            beside the settings and the tokenizer of its base
    FOLDER/critic/, ref/    likewise, where there is one (the reference: where it is not the first policy)
    FOLDER/state/ROLE/      optimizer, schedule and coefficients of a trained role
    FOLDER/state/progress.json

Each worker writes one file of each (`model-00002-of-00004.safetensors`) with its parts of tensors
(`safetensors_files.py`), so any layout and backend can go on from them. What one worker wrote alone, the last
checkpoint of a run, and what `export.py` makes of others is Hugging Face's own form.

torch.distributed.checkpoint is not used: its ranks exchange pickles, and its files hold some.

Random numbers need no place in it: those of a training step are a function of run seed and policy
version, those of a response of run seed and sequence number.
"""

from __future__ import annotations

import logging
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from streamrl.config import Config, LoraConfig
from streamrl.device import compute_with
from streamrl.disk import all_to_disk, to_disk
from streamrl.errors import DeadlineExceeded, ModelError, PeerLost
from streamrl.export import copy_base, copy_settings, make_whole
from streamrl.lora import TENSORS as ADAPTER
from streamrl.records import progress, snapshots
from streamrl.records.progress import Progress
from streamrl.safetensors_files import (
    BUFFER_BYTES,
    MODEL,
    Bytes,
    Part,
    Specs,
    TensorFiles,
    bytes_of_parts,
    file_name,
    write_bytes,
    write_index,
)
from streamrl.trainer.backends.optimizer import OPTIMIZER, state_specs
from streamrl.trainer.roles.actor import Actor
from streamrl.trainer.roles.critic import Critic
from streamrl.trainer.worker.assembly import CRITIC, REFERENCE, Assembly

log = logging.getLogger(__name__)

# --- what the workers tell one another ---

TOLD_BYTES = 1024
"""Most bytes in which a worker tells what went wrong."""


class Together:
    """The writing threads of all model workers."""

    def __init__(self, rank: int, world: int, *, seconds: float) -> None:
        """`seconds`: the longest that one may wait for another. Collective."""
        self.rank = rank
        self.world = world
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds)) if world > 1 else None

    def do(self, act: Callable[[], None]) -> str:
        """Run `act` on each; return what went wrong on whichever of them, or nothing. Collective.

        Disks and files may go wrong; anything else is raised, after the others know. Raises `PeerLost` when another
        one is gone, or does not come.
        """
        raised: Exception | None = None
        failure = ""
        try:
            act()
        except Exception as error:  # whatever it is, the others wait to be told; what is no disk error is raised below
            failure = f"model_worker/{self.rank}: {error}" if self.world > 1 else str(error)
            raised = None if isinstance(error, OSError | ModelError) else error
        told = torch.zeros(TOLD_BYTES, dtype=torch.uint8)
        words = bytearray(failure.encode()[:TOLD_BYTES])
        if words:
            told[: len(words)] = torch.frombuffer(words, dtype=torch.uint8)
        found = self.gather(told)
        if raised is not None:
            raise raised
        texts = (bytes(row.numpy()).rstrip(b"\0").decode(errors="replace") for row in found)
        return next((text for text in texts if text), "")

    def gather(self, told: Tensor) -> list[Tensor]:
        """Return what each tells, by rank. Collective."""
        if self._group is None:
            return [told]
        found = [torch.empty_like(told) for _ in range(self.world)]
        with _naming("the others"):
            dist.all_gather(found, told, group=self._group)
        return found

    def send(self, content: Iterator[Bytes]) -> None:
        """Have worker 0 `receive` `content`; if that fails, what there is of it."""
        with _naming("worker 0"):
            try:
                for some in filter(len, content):
                    whole = torch.frombuffer(bytearray(some) if isinstance(some, bytes) else some, dtype=torch.uint8)
                    for piece in torch.split(whole, BUFFER_BYTES):
                        dist.send(torch.tensor(len(piece)), 0, group=self._group)
                        dist.send(piece, 0, group=self._group)
            finally:
                dist.send(torch.tensor(0), 0, group=self._group)

    def receive(self, rank: int) -> Iterator[Bytes]:
        """On worker 0: what `rank` sends, which has to be taken to its end."""
        buffer = torch.empty(BUFFER_BYTES, dtype=torch.uint8)
        length = torch.tensor(0)
        while True:
            with _naming(f"model_worker/{rank}"):
                dist.recv(length, rank, group=self._group)
                if not length:
                    return
                dist.recv(buffer[: int(length)], rank, group=self._group)
            yield buffer[: int(length)].numpy().data


@contextmanager
def _naming(whom: str) -> Iterator[None]:
    """What gloo raises, with the name of who is missing."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(f"a checkpoint cannot be written: {whom} did not take part ({error})") from error


# --- checkpoint ---

REPLACED = ".replaced"
"""An older checkpoint of the same name, until the new one is in its place."""


class CheckpointPart(Protocol):
    """What one worker writes of a checkpoint."""

    @property
    def stems(self) -> list[str]:
        """Names of the files, relative to the checkpoint, without `.safetensors` and the worker's number."""
        ...

    @property
    def size(self) -> int:
        """Bytes of this worker's tensors."""
        ...

    def content(self, stem: str) -> Iterator[Bytes]:
        """Return the bytes of this worker's file of `stem`, piece by piece."""
        ...

    def complete(self, folder: Path) -> None:
        """On worker 0: add what is not tensors to `folder`, where the files of all workers are; raises `ModelError` if
        they are not."""
        ...


class CheckpointWriter:
    """Writes one checkpoint after another; used by the one thread that computes, on all model workers alike."""

    def __init__(
        self,
        together: Together,
        *,
        keep: int,
        spare: str | None,
        run_dir: Path | None = None,
        records_to_disk: Callable[[], None] = lambda: None,
    ) -> None:
        """`keep` checkpoints stay, and `spare`, which the run came from; of those in memory (`records/snapshots.py`)
        the latest. `run_dir`: the run's; None: none is in memory. `records_to_disk`, of each worker, waits until what
        it wrote about the steps so far is on the disk: a run that continues from a checkpoint has them all."""
        self._together = together
        self._run_dir = run_dir
        self._memory = None if run_dir is None else snapshots.folder_of(run_dir)
        self._records_to_disk = records_to_disk
        self._keep = keep
        self._spare = spare
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint", initializer=compute_with, initargs=(1,))
        self._writing: tuple[Path, Future[str]] | None = None

    def begin(self, folder: Path, share: CheckpointPart) -> None:
        """Write `share` into the checkpoint `folder`, and return at once; `finish` comes first. All workers begin the
        same ones."""
        assert self._writing is None, f"{folder} before it is known what became of {self._writing}"
        self._writing = folder, self._thread.submit(self._write, folder, share)

    def finish(self, *, limit: float) -> str:
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

    def _write(self, folder: Path, share: CheckpointPart) -> str:
        unfinished = _unfinished(folder)
        leads = self._together.rank == 0
        token = self._together.gather(torch.tensor(secrets.randbits(62)))[0]
        sign = unfinished / f"of-worker-0-{int(token)}"
        in_memory = folder.parent == self._memory
        if in_memory:
            sizes = self._together.gather(torch.tensor(share.size))
            failure = self._together.do(lambda: snapshots.check_room(int(sum(sizes))) if leads else None)
            if failure:
                return failure
        failure = self._together.do(lambda: _begin(unfinished, sign) if leads else None)
        if not failure:
            sees = self._together.gather(torch.tensor(int(sign.exists())))
            elsewhere = [rank for rank, seen in enumerate(sees) if not seen]  # their disk is not worker 0's
            failure = self._together.do(lambda: self._write_files(unfinished, share, elsewhere))
        if not failure:
            failure = self._together.do(self._records_to_disk)
        if not failure:
            failure = self._together.do(lambda: self._complete(folder, unfinished, sign, share) if leads else None)
        if failure:  # tolerance point: a full disk must not end a run
            failure = (
                f"the checkpoint {folder} cannot be written ({failure}); those before it are whole: make room there, "
                "or lower trainer.keep_checkpoints"
            )
            if leads:
                shutil.rmtree(unfinished, ignore_errors=True)
                log.error(failure)
        elif leads:
            log.log(logging.DEBUG if in_memory else logging.INFO, "%s is written", folder)
        return failure

    def _write_files(self, unfinished: Path, share: CheckpointPart, elsewhere: list[int]) -> None:
        """Write this worker's files, on worker 0 also those of workers that have another disk."""
        if self._together.rank in elsewhere:
            for stem in share.stems:
                self._together.send(share.content(stem))
            return
        failed: OSError | None = None
        for rank in [self._together.rank, *(elsewhere if self._together.rank == 0 else [])]:
            for stem in share.stems:
                own = rank == self._together.rank
                content = share.content(stem) if own else self._together.receive(rank)
                file = unfinished / file_name(stem, rank, self._together.world)
                try:
                    if failed is None:
                        file.parent.mkdir(parents=True, exist_ok=True)
                        write_bytes(file, content)
                except OSError as error:
                    failed = error
                if not own:
                    for _ in content:  # else who sends it would wait
                        pass
        if failed is not None:
            raise failed

    def _complete(self, folder: Path, unfinished: Path, sign: Path, share: CheckpointPart) -> None:
        sign.unlink()
        share.complete(unfinished)
        all_to_disk(unfinished)
        _put(unfinished, folder)
        keep = 1 if folder.parent == self._memory else self._keep
        progress.prune(folder.parent, keep=keep, spare=self._spare, run_dir=self._run_dir)


def _begin(unfinished: Path, sign: Path) -> None:
    _make_anew(unfinished)
    sign.touch()


def write_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Have `write` fill a temporary folder, then put it in the place of `folder`; if it fails, nothing is left."""
    unfinished = _unfinished(folder)
    _make_anew(unfinished)
    try:
        write(unfinished)
        all_to_disk(unfinished)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    _put(unfinished, folder)


def _unfinished(folder: Path) -> Path:
    """Return where `folder` is written."""
    return folder.with_name(folder.name + progress.UNFINISHED)


def _make_anew(unfinished: Path) -> None:
    if unfinished.exists():
        shutil.rmtree(unfinished)
    unfinished.mkdir(parents=True)


def _put(unfinished: Path, folder: Path) -> None:
    """Put `unfinished`, which is on the disk, in the place of `folder`."""
    replaced = folder.with_name(folder.name + REPLACED)
    if folder.exists():
        if replaced.exists():
            progress.remove(replaced)
        folder.rename(replaced)  # killed here, a run goes on from it under this name
    unfinished.rename(folder)
    if replaced.exists():
        progress.remove(replaced)
    to_disk(folder.parent)


# --- snapshot ---

CHAT_TEMPLATE = "chat_template.jinja"
"""Where transformers looks for the chat template first."""


class HostCopy(msgspec.Struct, frozen=True):
    """What one worker has of a run at the end of a step, in host memory."""

    progress: Progress
    sources: dict[str, Path]
    """Stem of a model's weights → checkpoint whose settings and tokenizer it has."""
    parts: dict[str, list[Part]]
    """By the stem of their file."""
    specs: dict[str, Specs]
    """All tensors of the stem, of all workers."""
    facts: dict[str, bytes]
    """Files of a few bytes, by their names in the checkpoint."""
    world: int
    final: bool = False
    """Leave weights as Hugging Face has them, whoever wrote them."""
    lora: LoraConfig | None = None
    """The policy's weights are an adapter's."""
    chat_template: str | None = None
    """What the policy was trained with in place of the tokenizer's own; None: it was that one."""

    @property
    def stems(self) -> list[str]:
        return list(self.parts)

    @property
    def size(self) -> int:
        return sum(part.values.nbytes for parts in self.parts.values() for part in parts)

    def content(self, stem: str) -> Iterator[Bytes]:
        return bytes_of_parts(self.parts[stem])

    def complete(self, folder: Path) -> None:
        for stem, specs in self.specs.items():
            home, name = (folder / stem).parent, Path(stem).name
            files = TensorFiles(home, name)
            files.check(specs)
            if name == ADAPTER and self.lora is not None:
                if self.world > 1:
                    make_whole(home, ADAPTER, limit=sys.maxsize)  # peft reads one file
                copy_base(self.sources[stem], home, lora=self.lora)
            elif name == MODEL:
                if self.final and self.world > 1:
                    make_whole(home)
                elif self.world > 1 and files.are_wholes:
                    write_index(home, MODEL)
                copy_settings(self.sources[stem], home, scalar_head=home.name == CRITIC)
        if self.chat_template is not None:
            (folder / CHAT_TEMPLATE).write_bytes(self.chat_template.encode())
        for file, content in self.facts.items():
            (folder / file).write_bytes(content)
        progress.write(folder, self.progress)


def roles_to_save(assembly: Assembly) -> list[str]:
    """Return the roles whose weights a checkpoint has: those that change, or have changed."""
    saved = {"actor", CRITIC}
    if assembly.reference_changes:
        saved.add(REFERENCE)
    return [name for name in assembly.roles if name in saved]


def take_snapshot(assembly: Assembly, config: Config, reached: Progress, *, final: bool = False) -> HostCopy:
    """Copy what this worker saves; the others do so at the same point of their calls.

    The models are on their devices, and no publication reads the weights.
    """
    lora = config.model.lora
    parts: dict[str, list[Part]] = {}
    specs: dict[str, Specs] = {}
    facts: dict[str, bytes] = {}
    sources: dict[str, Path] = {}
    for name in roles_to_save(assembly):
        role = assembly.roles[name]
        stem = f"{name}/{MODEL}" if name != "actor" else ADAPTER if lora is not None else MODEL
        sources[stem] = assembly.folders[name]
        specs[stem] = role.model.weight_specs()
        parts[stem] = _copied(role.model.weight_parts())
        if isinstance(role, Critic) or (isinstance(role, Actor) and role is assembly.actor):
            state, home = role.state(), f"{progress.STATE}/{name}"
            specs[f"{home}/{OPTIMIZER}"] = state_specs(role.model.weight_specs())
            parts[f"{home}/{OPTIMIZER}"] = _copied(state.optimizer)
            facts |= {f"{home}/{file}": content for file, content in state.files.items()}
    return HostCopy(
        progress=reached,
        sources=sources,
        parts=parts,
        specs=specs,
        facts=facts,
        world=config.trainer.workers,
        final=final,
        lora=lora,
        chat_template=config.model.chat_template,
    )


def _copied(parts: list[Part]) -> list[Part]:
    return [part._replace(values=part.values.detach().to("cpu", copy=True)) for part in parts]
