"""vLLM behind the server's interface: a real vLLM server, and the stage for its weights.

The gserver's own HTTP server takes requests and receives weights (`server/http.py`, `server/receiver.py`); this engine
passes requests on to vLLM, which runs as a child process or did so before, and listens at a Unix socket that only this
user can open. An update is staged in a file (`StagedFile`) while vLLM generates; the swap has vLLM load it between two
steps. vLLM itself labels each token with the version that sampled it.

Requests in excess of `max_running` wait here, as do all new ones during a pause.
"""

from __future__ import annotations

import asyncio
import json
import logging
import mmap
import os
import tempfile
import time
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from pathlib import Path

import torch
from torch import Tensor

from streamrl.checksum import (
    LineSums,
    WeightsChecksum,
    checksums,
    copy_and_sum,
    dtype_name,
    joint_checksum,
    line_sums,
    tensor_sums,
)
from streamrl.config import MAX_QUEUED, LoraConfig
from streamrl.errors import StreamRLError
from streamrl.gserver.server.child import ChildServer, ServerProcess
from streamrl.gserver.server.engine import Engine, Job, QueueFull, Text, Ticket
from streamrl.gserver.server.monitor import JoinedServer, monitoring
from streamrl.gserver.server.receiver import ExpectedWeights, StagedWeights, WeightReceiver, in_thread
from streamrl.gserver.server.serving import GserverLaunch, behind_http
from streamrl.gserver.vllm.client import ADAPTER, ResponseBuilder, VllmClient, request
from streamrl.gserver.vllm.command import VLLM, command, environment
from streamrl.gserver.vllm.joined import join, joined_socket, vllm_launch
from streamrl.lora import SETTINGS, TENSORS, adapter_settings, adapter_specs, check_adapter
from streamrl.models import max_position, vocab_size
from streamrl.safetensors_files import MODEL, TensorFiles, layout
from streamrl.transport.generation import PauseMode
from streamrl.transport.http import new_session
from streamrl.transport.vllm import TokenReply

log = logging.getLogger(__name__)

URL = "http://vllm"
"""The server at the Unix socket."""
ABORT_SECONDS = 0.2
"""Time, in seconds, until a request that has not ended is aborted again: vLLM ignores one that has not arrived yet."""
TIED_HEAD = "lm_head.weight"


def serve(launch: GserverLaunch) -> AbstractAsyncContextManager[tuple[Engine, str]]:
    """Return the context in which the engine and its URL exist."""
    return behind_http(VllmEngine(launch), launch, text=Text(launch.model_dir))


class VllmEngine:
    """Serves one model; `gserver.server.engine.Engine` documents its methods."""

    name = "vllm"

    def __init__(self, launch: GserverLaunch) -> None:
        folder, settings, limits = launch.model_dir, launch.config.gserver, launch.config.limits
        self.model_path = str(folder)
        self.vocab_size = vocab_size(folder)
        self.max_running = settings.max_running
        self.max_context = min(settings.max_context, max_position(folder))
        self._launch = launch
        self._dtype = launch.dtype
        self._version = launch.version
        files = TensorFiles(folder, MODEL)
        shapes = {name: files.shape(name) for name in files.names()}
        self._lora = launch.config.model.lora if launch.config.weights.lora == "adapter" else None
        """Settings of the adapter that updates bring and requests use; None: updates bring the model."""
        if self._lora is not None:
            shapes = dict(adapter_specs(shapes.items(), self._lora))
        self._stage = StagedFile(shapes, self._dtype, adapter=self._lora)
        self._sums: dict[str, str] = {}
        """Name → `tensor_sums` of the served weights; empty: those of the checkpoint."""
        self.receiver = WeightReceiver(
            expected=ExpectedWeights(shapes, self._dtype, ignored=frozenset({TIED_HEAD} - shapes.keys())),
            aside=self._stage,
            device=torch.device("cpu"),
            timeout=limits.update_seconds,
        )
        self._stack = AsyncExitStack()
        self._places = asyncio.Semaphore(settings.max_running)
        self._open = asyncio.Event()
        """Not set during a pause."""
        self._open.set()
        self._pause_mode: PauseMode = "in_place"
        """Mode of the latest pause."""
        self._paused_at: float | None = None
        self._pause_seconds = 0.0
        self._jobs: dict[str, _RunningJob] = {}
        self._number = 0
        self._weight_updates = 0

    @property
    def weight_version(self) -> str:
        return self._version

    async def start(self) -> None:
        try:
            await self._start()
        except BaseException:
            await asyncio.shield(self._stack.aclose())
            raise

    async def _start(self) -> None:
        self._stack.callback(self._stage.close)
        limits, joins = self._launch.config.limits, self._launch.config.gserver.joins
        process = None
        if joins:
            socket = joined_socket(joins, self._launch.index)
        else:
            folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="streamrl-vllm-"))
            socket = Path(folder) / "socket"
            process = await self._start_process(socket)
        watching = monitoring(
            VLLM,
            URL,
            key="",
            stuck_seconds=limits.stuck_seconds,
            update_seconds=limits.update_seconds,
            unix=socket,
        )
        monitor = await self._stack.enter_async_context(watching)
        session = await self._stack.enter_async_context(new_session(None, unix=socket))
        self._client = VllmClient(
            session, url=URL, timeout=limits.update_seconds, request_seconds=limits.request_seconds
        )
        if process is None:
            self._server: ChildServer | JoinedServer = JoinedServer(self.name, monitor, url=URL)
            await join(self._client, socket, model_dir=self._launch.model_dir, max_context=self.max_context)
        else:
            self._server = child = ChildServer(process, monitor, url=URL)
            await child.until_ready(timeout=limits.start_seconds)
        if self._lora is not None:
            self._sums = await in_thread(lambda: self._stage.fill(self._launch.first_adapter))
            await self._client.load_adapter(self._stage.folder)
        await self._client.name_weights(self._version)
        await self._stack.enter_async_context(monitor.polling())

    async def _start_process(self, socket: Path) -> ServerProcess:
        settings = self._launch.config.gserver
        words = command(settings, vllm_launch(self._launch, socket))
        log.info("starting vLLM: %s", " ".join(words))
        variables = environment(settings, device=str(self._launch.device), index=self._launch.index)
        process = await ServerProcess.start("vLLM", words, variables)
        self._stack.push_async_callback(process.stop)
        return process

    async def failed(self) -> None:
        await self._server.failed()

    async def close(self) -> None:
        unfinished = list(self._jobs.values())
        for running in unfinished:
            running.task.cancel()
            running.ticket.fail("the gserver is stopping")
        await asyncio.gather(*(running.task for running in unfinished), return_exceptions=True)
        await self.receiver.close()
        await asyncio.shield(self._stack.aclose())

    def submit(self, job: Job) -> Ticket:
        if len(self._jobs) >= self.max_running + MAX_QUEUED:
            raise QueueFull(
                f"{len(self._jobs)} requests are running or waiting, no more are taken; try again later, "
                "or start more gservers"
            )
        self._number += 1
        running = _RunningJob(Ticket(job), request_id=f"{self._number}-{job.rid}")
        self._jobs[job.rid] = running
        running.task = asyncio.create_task(self._respond(running), name=f"response {running.request_id}")
        running.task.add_done_callback(lambda _: self._jobs.pop(job.rid, None))
        return running.ticket

    async def _respond(self, running: _RunningJob) -> None:
        def take(reply: TokenReply) -> None:
            if reply.error:
                ticket.fail(f"vLLM: {bytes(reply.error).decode()}")
            elif output := running.response.add(reply, version=self._version):
                ticket.deliver(output)

        ticket = running.ticket
        try:
            # A comparison of weights must not wait until those are old.
            async with self._places if ticket.job.params.max_new_tokens else nullcontext():
                await self._open.wait()
                running.begun = True
                adapter = ADAPTER if self._lora is not None else None
                body = request(ticket.job, request_id=running.request_id, version=self._version, adapter=adapter)
                await self._client.generate(body, take)
            if not ticket.done:
                ticket.fail(f"vLLM ended request {ticket.job.rid} without a finish reason")
        except StreamRLError as error:
            ticket.fail(str(error))

    async def abort(self, rid: str) -> bool:
        running = self._jobs.get(rid)
        if running is None:
            return False
        await self._abort([running])
        return True

    async def abort_all(self) -> int:
        found = list(self._jobs.values())
        await self._abort(found)
        return len(found)

    async def _abort(self, found: list[_RunningJob]) -> None:
        for running in found:
            if not running.begun:
                running.task.cancel()
                running.ticket.deliver(running.response.aborted(version=self._version))
        while begun := [running for running in found if running.begun and not running.task.done()]:
            await self._client.abort([running.request_id for running in begun])
            await asyncio.wait([running.task for running in begun], timeout=ABORT_SECONDS)

    async def pause(self, mode: PauseMode) -> None:
        self._open.clear()
        self._pause_mode = mode
        if self._paused_at is None:
            self._paused_at = time.monotonic()
        await self._client.pause()
        if mode == "abort":
            await self._abort([running for running in self._jobs.values() if running.begun])

    async def resume(self) -> None:
        await self._client.resume()
        self._open.set()
        if self._paused_at is not None:
            self._pause_seconds += time.monotonic() - self._paused_at
            self._paused_at = None

    async def end_update(self) -> str:
        staged = await self.receiver.take()
        return await self.receiver.apart(lambda: self._swap(staged))

    async def load(self, folder: Path, version: str | None) -> str:
        begun = self.receiver.begun
        if not begun:
            await self.receiver.begin()
        await self.receiver.load(folder, version)
        if begun:
            return f"the weights in {folder} wait for /end_weight_update"
        return await self.end_update()

    async def _swap(self, staged: StagedWeights) -> str:
        """Have vLLM serve the staged weights, which are complete; return a description."""
        began = time.monotonic()
        if staged.abort_all_requests:
            await self.abort_all()
        if generates := self._open.is_set():  # a call to resume came before this one: the pause's mode still applies
            await self.pause(self._pause_mode)
        load = self._client.load if self._lora is None else self._client.load_adapter
        await load(self._stage.folder)
        self._sums = staged.sums
        if self._pause_mode != "in_place":
            await self._client.forget_prompts()
            for running in self._jobs.values():
                running.response.retractions += running.begun
        await self.set_version(staged.version or self._version)
        if generates:
            await self.resume()
        self._weight_updates += 1
        return f"{len(staged.sums)} tensors loaded within {time.monotonic() - began:.3f} s"

    async def set_version(self, version: str) -> None:
        await self._client.name_weights(version)
        self._version = version

    async def checksum(self) -> WeightsChecksum:
        return await self.receiver.exclusively(self._checksum)

    def stats(self) -> dict[str, float]:
        waiting = sum(not running.begun for running in self._jobs.values())
        figures = self._server.stats()
        paused = time.monotonic() - self._paused_at if self._paused_at is not None else 0.0
        return figures | {
            "queued": figures["queued"] + waiting,
            "pause_seconds_total": self._pause_seconds + paused,
            "weight_updates_total": float(self._weight_updates),
        }

    def _checksum(self) -> WeightsChecksum:
        """Return the checksum of the weights as vLLM received them: it does not keep all in this form."""
        if not self._sums:
            files = TensorFiles(Path(self.model_path), MODEL)
            self._sums = {name: tensor_sums(files.read(name).to(self._dtype)) for name in files.names()}
        return joint_checksum(self._sums, dtype=dtype_name(self._dtype))


class _RunningJob:
    """A job, from its arrival to its end."""

    def __init__(self, ticket: Ticket, *, request_id: str) -> None:
        self.ticket = ticket
        self.request_id = request_id
        self.response = ResponseBuilder(ticket.job)
        self.begun = False
        """Whether vLLM has its request."""
        self.task: asyncio.Task[None]


class StagedFile:
    """Staged weights of an update, with these shapes by name, in a file that vLLM reads; all begin as zeros.

    Implements `WeightsAside` (`server/receiver.py`). The file is written through one memory mapping: a tensor of a
    broadcast arrives in its final place. It lies in memory that has no name in any file system and is freed when this
    process ends, however that happens; vLLM opens it through `/proc`.
    """

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, *, adapter: LoraConfig | None = None
    ) -> None:
        """`adapter`: the kind of adapter to which the weights belong; None: they are a model's."""
        self._adapter = adapter
        header, begins, size = layout(list(shapes.items()), dtype)
        self._memory = os.memfd_create("streamrl-weights")
        os.ftruncate(self._memory, size)
        mapping = mmap.mmap(self._memory, size)
        mapping[: len(header)] = header
        whole = torch.frombuffer(mapping, dtype=torch.uint8)
        self._tensors = {}
        for name, shape in shapes.items():
            end = begins[name] + torch.Size(shape).numel() * dtype.itemsize
            self._tensors[name] = whole[begins[name] : end].view(dtype).view(shape)
        self._folder = tempfile.TemporaryDirectory(prefix="streamrl-weights-")
        self.folder = Path(self._folder.name)
        """The folder with the file, as a checkpoint or as an adapter in peft's format."""
        file = f"{MODEL if adapter is None else TENSORS}.safetensors"
        (self.folder / file).symlink_to(f"/proc/{os.getpid()}/fd/{self._memory}")
        if adapter is not None:
            (self.folder / SETTINGS).write_text(json.dumps(adapter_settings(adapter, "")))

    def close(self) -> None:
        """Remove the file. Its memory is freed with the last tensor in it."""
        self._folder.cleanup()
        os.close(self._memory)

    def store(self, name: str, tensor: Tensor) -> LineSums:
        place = self._tensors[name]
        return copy_and_sum(place, tensor.to(place.dtype))

    def place(self, name: str) -> Tensor | None:
        return self._tensors[name]

    def fill(self, adapter: Path | None) -> dict[str, str]:
        """Copy the adapter in the folder `adapter`, if there is one, into the stage; return the checksums by name.

        Raises `ModelError` if it has other settings or cannot be read.
        """
        if adapter is not None:
            assert self._adapter is not None
            check_adapter(adapter, self._adapter)
            files = TensorFiles(adapter, TENSORS)
            return checksums({name: self.store(name, files.read(name)) for name in self._tensors})
        return checksums({name: self.sums(name) for name in self._tensors})

    def sums(self, name: str) -> LineSums:
        return line_sums(self._tensors[name])

    def adopt(self, weights: Mapping[str, Tensor]) -> bool:
        return False

    def forget(self) -> None:
        raise NotImplementedError("only broadcasts to a GPU leave writers behind")

    def make_ready(self) -> None:
        pass
