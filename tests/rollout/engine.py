"""A scripted gserver: real HTTP, SGLang's API, and replies that a test decides."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from aiohttp import web

from streamrl.transport.generation import (
    FinishReason,
    GenerateReply,
    GenerateRequest,
    MetaInfo,
    ModelInfo,
    ServerInfo,
    TokenLogprob,
    VersionSpan,
)

Script = Callable[[GenerateRequest, int], Any]
"""Takes a request and its number, from 0; returns the reply, or a coroutine that does: what a stream tells one after
another is a list, in which None loses the connection."""


class Engine:
    def __init__(self, script: Script) -> None:
        self.url = ""
        self.requests: list[GenerateRequest] = []
        self.cancelled = 0
        """Requests whose client went away."""
        self.arrived = asyncio.Event()
        self._changed = asyncio.Condition()
        self._script = script

    async def until_cancelled(self, count: int) -> None:
        async with asyncio.timeout(30), self._changed:
            await self._changed.wait_for(lambda: self.cancelled >= count)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        message = msgspec.json.decode(await request.read(), type=GenerateRequest)
        parts = _parts(message)
        self.arrived.set()
        answers: list[Any] = await asyncio.gather(*(self._answer(part) for part in parts))
        for answer in answers:
            if isinstance(answer, web.Response):
                return answer
            if isinstance(answer, list):
                return await _streamed(request, answer)
            if answer is None:  # the connection is lost
                assert request.transport is not None
                request.transport.abort()
                return web.Response()
        if not message.stream:
            return web.Response(body=msgspec.json.encode(answers[0]), content_type="application/json")
        events = [msgspec.to_builtins(answer) | {"index": index} for index, answer in enumerate(answers)]
        body = b"".join(b"data: " + msgspec.json.encode(event) + b"\n\n" for event in events)
        return web.Response(body=body + b"data: [DONE]\n\n", content_type="text/event-stream")

    async def server_info(self, request: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(ServerInfo(engine="scripted")), content_type="application/json")

    async def model_info(self, request: web.Request) -> web.Response:
        info = ModelInfo(model_path="scripted", weight_version="0")
        return web.Response(body=msgspec.json.encode(info), content_type="application/json")

    async def _answer(self, message: GenerateRequest) -> Any:
        self.requests.append(message)
        try:
            answer: Any = self._script(message, len(self.requests) - 1)
            return await answer if asyncio.iscoroutine(answer) else answer
        except asyncio.CancelledError:
            self.cancelled += 1
            async with self._changed:
                self._changed.notify_all()
            raise


async def _streamed(request: web.Request, replies: list[GenerateReply | None]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for reply in replies:
        if reply is None:
            assert request.transport is not None
            request.transport.abort()
            return response
        await response.write(b"data: " + msgspec.json.encode(reply) + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    return response


def _parts(message: GenerateRequest) -> list[GenerateRequest]:
    """One request for each prompt of a batch."""
    if not isinstance(message.rid, list):
        return [message]
    assert isinstance(message.sampling_params, list)
    assert message.input_ids is not None
    adapters = message.lora_path or [None] * len(message.rid)
    assert isinstance(adapters, list)
    return [
        msgspec.structs.replace(message, input_ids=ids, sampling_params=params, rid=rid, lora_path=adapter)
        for ids, params, rid, adapter in zip(
            message.input_ids, message.sampling_params, message.rid, adapters, strict=True
        )
    ]


@asynccontextmanager
async def serving(script: Script) -> AsyncIterator[Engine]:
    engine = Engine(script)
    app = web.Application()
    app.router.add_post("/generate", engine.generate)
    app.router.add_get("/server_info", engine.server_info)
    app.router.add_get("/model_info", engine.model_info)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    engine.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield engine
    finally:
        await runner.cleanup()


def answer(
    tokens: list[int],
    *,
    finish: str | None = "stop",
    version: str = "0",
    spans: list[tuple[str, int, int]] | None = None,
    logprobs: list[TokenLogprob] | None = None,
    matched: int | str | None = None,
    status_code: int | None = None,
) -> GenerateReply:
    """What an engine says; the log-probability of token t is -t / 100 unless told otherwise, and `version` sampled all
    tokens unless `spans` do. No `spans` at all, as of an engine that tells only the version at the end: []."""
    if spans is None:
        spans = [(version, 0, len(tokens))]
    if logprobs is None:
        logprobs = [(-token / 100, token, None) for token in tokens]
    return GenerateReply(
        text="",
        output_ids=tokens,
        meta_info=MetaInfo(
            id="x",
            finish_reason=FinishReason(type=finish, matched=matched, status_code=status_code, message="scripted")  # type: ignore[arg-type]
            if finish is not None
            else None,
            prompt_tokens=0,
            completion_tokens=len(tokens),
            weight_version=version,
            weight_versions=[VersionSpan(*span) for span in spans] or None,
            output_token_logprobs=logprobs,
        ),
    )


def failure(status: int, message: str = "scripted") -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)
