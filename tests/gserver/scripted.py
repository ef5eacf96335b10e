"""A gserver without an engine: it speaks the API over real HTTP and misbehaves where a test says so."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

import msgspec
from aiohttp import web

from streamrl.transport.generation import (
    FinishReason,
    GenerateReply,
    LoadedAdapters,
    MetaInfo,
    ModelInfo,
    Outcome,
    RankSums,
    ReceivedSums,
    ServerInfo,
    StagedSums,
    TokenLogprob,
)

Fault = Literal["refuse", "nonsense", "error", "stall", "die", "stall_after", "nonsense_after"]
"""`..._after`: the call takes effect, but its answer is late or nonsense."""


class ScriptedGserver:
    """`faults[path]` says how the next calls of `path` go wrong, one entry for each call."""

    def __init__(
        self,
        *,
        staged: bool = True,
        version: str = "default",
        ranks: int = 1,
        engine: str = "scripted",
    ) -> None:
        self.engine = engine
        self.staged = staged
        self.ranks = ranks
        self.weight_version = version
        self.calls: list[str] = []
        self.bodies: dict[str, list[Any]] = {}
        self.faults: dict[str, list[Fault]] = {}
        self.paused = False
        self.bucket_seconds: list[float] = []
        """How long the next buckets take to receive."""
        self.pending_version = ""
        self.adapters: dict[str, str] = {}
        """Name → folder of what it has loaded, as SGLang would."""
        self.sums: dict[str, str] = {}
        """Checksums of what it says has come."""
        self.sums_of_others: list[dict[str, str]] = []
        """The same of its further ranks."""
        self.url = ""
        self._runner: web.AppRunner | None = None
        self._stalled = asyncio.Event()

    @property
    def counts(self) -> Counter[str]:
        return Counter(self.calls)

    async def start(self, *, port: int = 0) -> ScriptedGserver:
        app = web.Application()
        app.router.add_route("*", "/{path}", self._handle)
        self._runner = web.AppRunner(app, shutdown_timeout=0.05, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", port).start()
        self.url = "http://127.0.0.1:{1}".format(*self._runner.addresses[0][:2])
        return self

    async def die(self) -> None:
        """Like a killed process: connections break, and nobody listens any more."""
        if self._runner is not None:
            for site in list(self._runner.sites):
                await site.stop()
            server = self._runner.server
            for connection in list(server.connections if server else []):
                if connection.transport is not None:
                    connection.transport.abort()
            runner, self._runner = self._runner, None
            self._cleanup = asyncio.create_task(runner.cleanup())

    async def close(self) -> None:
        self._stalled.set()
        if self._runner is not None:
            await self._runner.cleanup()
        elif hasattr(self, "_cleanup"):
            await asyncio.gather(self._cleanup, return_exceptions=True)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        self.calls.append(path)
        body = await request.read()
        self.bodies.setdefault(path, []).append(msgspec.json.decode(body) if body else None)
        queue = self.faults.get(path, [])
        fault = queue.pop(0) if queue else None
        if fault == "refuse":
            return _json(Outcome(False, "not today"))
        if fault == "nonsense":
            return web.Response(body=b"\xff[nonsense")
        if fault == "error":
            return web.Response(status=500, body=b"Internal Server Error")
        if fault == "stall":
            await self._stalled.wait()
        if fault == "die":
            await self.die()
        answer = self._carry_out(path)
        if fault == "stall_after":
            await self._stalled.wait()
        if fault == "nonsense_after":
            return web.Response(body=b"{}")
        if path == "/update_weights_from_distributed" and self.bucket_seconds:
            await asyncio.sleep(self.bucket_seconds.pop(0))
        return _json(answer)

    def _carry_out(self, path: str) -> msgspec.Struct:
        match path:
            case "/server_info":
                return ServerInfo(
                    engine=self.engine,
                    staged_weight_update=self.staged,
                    tp_size=self.ranks,
                )
            case "/model_info":
                return ModelInfo(model_path="scripted", weight_version=self.weight_version)
            case "/pause_generation" | "/continue_generation":
                self.paused = path == "/pause_generation"
            case "/update_weights_from_distributed" | "/update_weights_from_disk":
                self.pending_version = self.bodies[path][-1]["weight_version"] or self.weight_version
            case "/update_weight_version":
                self.weight_version = self.bodies[path][-1]["new_version"]
            case "/load_lora_adapter":
                body = self.bodies[path][-1]
                if body["lora_name"] in self.adapters:
                    raise _refused("Failed to load LoRA adapter because it is already loaded")
                self.adapters[body["lora_name"]] = body["lora_path"]
                return LoadedAdapters(dict(self.adapters))
            case "/unload_lora_adapter":
                if self.adapters.pop(self.bodies[path][-1]["lora_name"], None) is None:
                    raise _refused("LoRA does not exist")
                return LoadedAdapters(dict(self.adapters))
            case "/generate":
                return self._score(self.bodies[path][-1])
            case "/weights_checker":
                if self.staged:
                    return StagedSums(self.sums)
                return ReceivedSums([RankSums(sums) for sums in (self.sums, *self.sums_of_others)])
            case "/end_weight_update":
                self.weight_version = self.pending_version
        return Outcome(True)

    def _score(self, body: Any) -> GenerateReply:
        """Prompts are all that it can score: each token has the log-probability -1."""
        start = body["logprob_start_len"]
        scores: list[TokenLogprob] = [(-1.0, token, None) for token in body["input_ids"][start:]]
        meta = MetaInfo(
            id="",
            finish_reason=FinishReason(type="length", length=0),
            prompt_tokens=len(body["input_ids"]),
            weight_version=self.weight_version,
            input_token_logprobs=scores,
        )
        return GenerateReply(text="", output_ids=[], meta_info=meta)


@asynccontextmanager
async def scripted(count: int = 1, **options: Any) -> AsyncIterator[list[ScriptedGserver]]:
    gservers = [await ScriptedGserver(**options).start() for _ in range(count)]
    try:
        yield gservers
    finally:
        for gserver in gservers:
            await gserver.close()


def _refused(message: str) -> web.HTTPBadRequest:
    return web.HTTPBadRequest(body=msgspec.json.encode({"success": False, "error_message": message}))


def _json(content: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(content), content_type="application/json")
