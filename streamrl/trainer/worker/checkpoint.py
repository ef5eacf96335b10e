"""Atomic checkpoints, written by all model workers in parallel while training continues.

Each model worker copies its part of the weights and optimizer states into host memory. Training pauses only for this
copy. A thread then writes it; no process holds more than its own part.

Invariants: at most one checkpoint is being written. Its folder appears with one rename, after worker 0 has checked that
all files, and the records of the steps before it, are on the disk. Older checkpoints are removed afterwards.

    FOLDER/                 the policy: weights, config.json, tokenizer; with [model.lora] an adapter in peft's format,
                            with the settings and the tokenizer of its base
    FOLDER/critic/, ref/    the same for the critic, and for the reference unless it is the first policy
    FOLDER/state/ROLE/      optimizer, schedule and coefficients of a trained role
    FOLDER/state/progress.json

Each worker writes one file per model (`model-00002-of-00004.safetensors`) with its parts of the tensors
(`safetensors_files.py`), which any layout and backend can load. A checkpoint by a single worker, the last checkpoint of
a run, and the output of `export.py` have Hugging Face's format.

torch.distributed.checkpoint is not used, because its ranks exchange pickles and its files contain some.

A checkpoint has no state of random generators. A training step draws its random numbers from the run's seed and the
policy version, a response from the run's seed and its sequence number.
"""

from __future__ import annotations

import logging
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from streamrl.config import Config, LoraConfig
from streamrl.device import compute_with
from streamrl.disk import all_to_disk
from streamrl.errors import DeadlineExceeded, ModelError, PeerLost
from streamrl.export import copy_base, copy_settings, make_whole
from streamrl.lora import TENSORS as ADAPTER
from streamrl.records import progress, snapshots
from streamrl.records.progress import Progress
from streamrl.safetensors_files import (
    BUFFER_BYTES,
    MODEL,
    Bytes,
    Specs,
    TensorBox,
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

# --- between the workers ---

FAILURE_BYTES = 1024
"""Maximal size of a worker's description of a failure."""


class Together:
    """Collective operations of the writing threads of all model workers."""

    def __init__(self, rank: int, world: int, *, seconds: float) -> None:
        """`seconds`: deadline of each wait for another worker. Collective."""
        self.rank = rank
        self.world = world
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds)) if world > 1 else None

    def do(self, act: Callable[[], None]) -> str:
        """Run `act` on each worker; return the first failure, or an empty string. Collective.

        `OSError` and `ModelError` are returned as failures. Any other exception is raised, after the other workers have
        received it as a failure. Raises `PeerLost` if another worker does not take part.
        """
        raised: Exception | None = None
        failure = ""
        try:
            act()
        except Exception as error:  # the others wait for the outcome; other than disk errors it is raised below
            failure = f"model_worker/{self.rank}: {error}" if self.world > 1 else str(error)
            raised = error
        text = torch.zeros(FAILURE_BYTES, dtype=torch.uint8)
        words = bytearray(failure.encode()[:FAILURE_BYTES])
        if words:
            text[: len(words)] = torch.frombuffer(words, dtype=torch.uint8)
        try:
            found = self.gather(text)
        except PeerLost:
            if raised is not None:
                log.error("no other worker receives this failure: %s", failure, exc_info=raised)
            raise
        if raised is not None and not isinstance(raised, OSError | ModelError):
            raise raised
        texts = (bytes(row.numpy()).rstrip(b"\0").decode(errors="replace") for row in found)
        return next((text for text in texts if text), "")

    def gather(self, own: Tensor) -> list[Tensor]:
        """Return each worker's tensor, by rank. Collective."""
        if self._group is None:
            return [own]
        found = [torch.empty_like(own) for _ in range(self.world)]
        with _naming("the others"):
            dist.all_gather(found, own, group=self._group)
        return found

    def send(self, content: Iterator[Bytes]) -> None:
        """Send `content` to worker 0, which calls `receive`. An error ends the message early and is raised."""
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
        """Yield the content that `rank` sends. Called on worker 0, which has to read it to its end."""
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
    """Raise gloo's errors as `PeerLost` with the name of the missing worker."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(f"a checkpoint cannot be written: {whom} did not take part ({error})") from error


# --- checkpoint ---


class CheckpointPart(Protocol):
    """One worker's part of a checkpoint."""

    @property
    def stems(self) -> list[str]:
        """Names of the files, relative to the checkpoint, without the worker's number and `.safetensors`."""

    @property
    def size(self) -> int:
        """Bytes of this worker's tensors."""

    def content(self, stem: str) -> Iterator[Bytes]:
        """Yield the bytes of this worker's file of `stem`."""

    def complete(self, folder: Path) -> None:
        """Add the files without tensors to `folder`. Called on worker 0; raises `ModelError` if a worker's file is
        missing."""


@dataclass(eq=False)
class CheckpointWriter:
    """Writes one checkpoint at a time, in a thread. All model workers call it from their computing thread."""

    together: Together
    _: KW_ONLY
    keep: int
    """Number of checkpoints that stay; of snapshots in memory (`records/snapshots.py`) only the latest stays."""
    spare: str | None
    """The checkpoint from which the run started, which stays, too."""
    run_dir: Path | None = None
    """None if the run takes no snapshots."""
    records_to_disk: Callable[[], None] = lambda: None
    """Waits until this worker's records of the steps so far are on the disk."""

    def __post_init__(self) -> None:
        self._memory = None if self.run_dir is None else snapshots.folder_of(self.run_dir)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint", initializer=compute_with, initargs=(1,))
        self._writing: tuple[Path, Future[str]] | None = None

    def begin(self, folder: Path, share: CheckpointPart) -> None:
        """Begin to write `share` into the checkpoint `folder` and return at once. `finish` must have been called for
        the checkpoint before it. Collective."""
        assert self._writing is None, f"{folder} before the outcome of {self._writing}"
        self._writing = folder, self._thread.submit(self._write, folder, share)

    def finish(self, *, limit: float) -> str:
        """Wait for the checkpoint that is being written; return the failure, or an empty string.

        A failure is returned once. Raises `DeadlineExceeded` after `limit` seconds.
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
        unfinished = progress.unfinished_folder(folder)
        leads = self.together.rank == 0
        token = self.together.gather(torch.tensor(secrets.randbits(62)))[0]
        sign = unfinished / f"of-worker-0-{int(token)}"
        in_memory = folder.parent == self._memory
        if in_memory:
            sizes = self.together.gather(torch.tensor(share.size))
            failure = self.together.do(lambda: snapshots.check_room(int(sum(sizes))) if leads else None)
            if failure:
                return failure
        failure = self.together.do(lambda: _begin(unfinished, sign) if leads else None)
        if not failure:
            sees = self.together.gather(torch.tensor(int(sign.exists())))
            elsewhere = [rank for rank, seen in enumerate(sees) if not seen]  # their disk is not worker 0's
            failure = self.together.do(lambda: self._write_files(unfinished, share, elsewhere))
        if not failure:
            failure = self.together.do(self.records_to_disk)
        if not failure:
            failure = self.together.do(lambda: self._complete(folder, unfinished, sign, share) if leads else None)
        if failure:  # a full disk must not end a run
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
        """Write this worker's files. Worker 0 also writes the files of workers on other disks."""
        if self.together.rank in elsewhere:
            for stem in share.stems:
                self.together.send(share.content(stem))
            return
        failed: OSError | None = None
        for rank in [self.together.rank, *(elsewhere if self.together.rank == 0 else [])]:
            for stem in share.stems:
                own = rank == self.together.rank
                content = share.content(stem) if own else self.together.receive(rank)
                file = unfinished / file_name(stem, rank, self.together.world)
                try:
                    if failed is None:
                        file.parent.mkdir(parents=True, exist_ok=True)
                        write_bytes(file, content)
                except OSError as error:
                    failed = error
                if not own:
                    for _ in content:  # the sender waits until it is read
                        pass
        if failed is not None:
            raise failed

    def _complete(self, folder: Path, unfinished: Path, sign: Path, share: CheckpointPart) -> None:
        sign.unlink()
        share.complete(unfinished)
        all_to_disk(unfinished)
        progress.put(unfinished, folder)
        keep = 1 if folder.parent == self._memory else self.keep
        progress.prune(folder.parent, keep=keep, spare=self.spare, run_dir=self.run_dir)


def _begin(unfinished: Path, sign: Path) -> None:
    progress.make_anew(unfinished)
    sign.touch()


# --- snapshot ---

CHAT_TEMPLATE = "chat_template.jinja"
"""The file in which transformers looks for the chat template first."""


class HostCopy(msgspec.Struct, frozen=True):
    """One worker's part of the run's state at the end of a step, in host memory."""

    progress: Progress
    sources: dict[str, Path]
    """Stem of a model's weights → folder from which its settings and tokenizer are copied."""
    parts: dict[str, list[TensorBox]]
    """By the stem of their file."""
    specs: dict[str, Specs]
    """All tensors of the stem, of all workers."""
    facts: dict[str, bytes]
    """Contents of small files, by their names in the checkpoint."""
    world: int
    final: bool = False
    """Whether to leave the weights in Hugging Face's format, for any number of workers."""
    lora: LoraConfig | None = None
    """Set if the policy's weights are an adapter's."""
    chat_template: str | None = None
    """The policy's chat template, or None if it is the tokenizer's own."""

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
    """Return the roles with weights that belong into a checkpoint, because training changes or has changed them."""
    saved = {"actor", CRITIC}
    if assembly.reference_changes:
        saved.add(REFERENCE)
    return [name for name in assembly.roles if name in saved]


def take_snapshot(assembly: Assembly, config: Config, reached: Progress, *, final: bool = False) -> HostCopy:
    """Copy this worker's part of a checkpoint into host memory. Collective.

    The models have to be on their devices, and no publication may be reading the weights.
    """
    lora = config.model.lora
    parts: dict[str, list[TensorBox]] = {}
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


def _copied(parts: list[TensorBox]) -> list[TensorBox]:
    return [part._replace(values=part.values.detach().to("cpu", copy=True)) for part in parts]
