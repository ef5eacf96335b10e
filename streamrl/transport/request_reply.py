"""Requests from one master to its model workers, over ZMQ with msgpack.

A worker carries out calls one after another in the order of their sending; the master may have
many on the way. Besides replies a worker sends *notices* (something happened there) and beats;
a worker that stays silent fails every call that waits for it, with its name.

Frames: `[kind, call id, body]`. Kinds: `C` call, `R` reply, `E` error (body: traceback text),
`N` notice, `H` heartbeat, which is also the first word of a worker.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec
import zmq
import zmq.asyncio

from streamrl.errors import DeadlineExceeded, PeerError, PeerLost, WireError

log = logging.getLogger(__name__)

Reply = TypeVar("Reply")
Call = TypeVar("Call")
Notice = TypeVar("Notice")

BEAT_SECONDS = 1.0
SILENCE_SECONDS = 20.0
"""A worker not heard of for so long is lost."""


class RequestChannel(Generic[Notice]):
    """The master's end."""

    def __init__(self, *, host: str, notice_type: type[Notice], on_notice: Callable[[int, Notice], None]) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        port = self._socket.bind_to_random_port(f"tcp://{host}")
        self.endpoint = f"tcp://{host}:{port}"
        self._encoder = msgspec.msgpack.Encoder()
        self._notices = msgspec.msgpack.Decoder(notice_type)
        self._on_notice = on_notice
        self._next_id = 0
        self._pending: dict[int, tuple[int, asyncio.Future[bytes]]] = {}
        self._heard: dict[int, float] = {}
        self._joined = asyncio.Condition()
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._watch())]

    async def wait_for(self, count: int, *, patience: float) -> None:
        """Until workers 0 … `count` - 1 have spoken."""
        try:
            async with asyncio.timeout(patience), self._joined:
                await self._joined.wait_for(lambda: len(self._heard) >= count)
        except TimeoutError as error:
            missing = sorted(set(range(count)) - set(self._heard))
            raise DeadlineExceeded(
                f"model workers {missing} did not connect to the master within {patience:.0f} s; look at their logs"
            ) from error

    async def call(self, worker: int, call: Any, reply: type[Reply], *, timeout: float) -> Reply:
        """Have `worker` carry out `call`.

        Raises `PeerError` with the worker's traceback, `PeerLost` when it falls silent,
        `DeadlineExceeded` after `timeout` seconds.
        """
        call_id = self._next_id
        self._next_id += 1
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._pending[call_id] = (worker, future)
        name = type(call).__name__
        try:
            await self._socket.send_multipart(
                [_identity(worker), b"C", call_id.to_bytes(8, "big"), self._encoder.encode(call)]
            )
            async with asyncio.timeout(timeout):
                body = await future
        except TimeoutError as error:
            raise DeadlineExceeded(f"model_worker/{worker} did not finish {name} within {timeout:.0f} s") from error
        finally:
            self._pending.pop(call_id, None)
        try:
            return msgspec.msgpack.decode(body, type=reply)
        except msgspec.DecodeError as error:
            raise WireError(f"model_worker/{worker} answered {name} with something else: {error}") from error

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.close()
        self._context.term()

    async def _receive(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            try:
                identity, kind, call_id, body = frames
                worker = int(identity)
                await self._handle(worker, kind, int.from_bytes(call_id, "big"), body)
            except (ValueError, msgspec.DecodeError) as error:
                log.warning("the master received a message that is none: %s", error)

    async def _handle(self, worker: int, kind: bytes, call_id: int, body: bytes) -> None:
        first = worker not in self._heard
        self._heard[worker] = time.monotonic()
        if first:
            async with self._joined:
                self._joined.notify_all()
        if kind == b"N":
            self._on_notice(worker, self._notices.decode(body))
        elif kind in (b"R", b"E"):
            _, future = self._pending.get(call_id, (worker, None))
            if future is None or future.done():
                return
            if kind == b"R":
                future.set_result(body)
            else:
                future.set_exception(PeerError(f"model_worker/{worker} failed:\n{body.decode(errors='replace')}"))

    async def _watch(self) -> None:
        """Fail the calls of workers that fell silent."""
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            now = time.monotonic()
            for worker, future in list(self._pending.values()):
                silent = now - self._heard.get(worker, now)
                if silent > SILENCE_SECONDS and not future.done():
                    future.set_exception(PeerLost(f"model_worker/{worker} has been silent for {silent:.0f} s"))


class ReplyChannel(Generic[Call]):
    """A worker's end. All methods belong to the event loop that made it."""

    def __init__(self, *, endpoint: str, worker: int, call_type: Any) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.IDENTITY, _identity(worker))
        self._socket.connect(endpoint)
        self._encoder = msgspec.msgpack.Encoder()
        self._calls = msgspec.msgpack.Decoder(call_type)
        self._beating = asyncio.create_task(self._beat())

    async def receive(self) -> tuple[int, Call]:
        """The next call and its id."""
        while True:
            frames = await self._socket.recv_multipart()
            try:
                _, call_id, body = frames
                return int.from_bytes(call_id, "big"), self._calls.decode(body)
            except (ValueError, msgspec.DecodeError) as error:
                log.warning("a worker received a call that is none: %s", error)

    async def reply(self, call_id: int, result: msgspec.Struct) -> None:
        await self._send(b"R", call_id, self._encoder.encode(result))

    async def fail(self, call_id: int, traceback: str) -> None:
        await self._send(b"E", call_id, traceback.encode())

    async def notify(self, notice: msgspec.Struct) -> None:
        await self._send(b"N", 0, self._encoder.encode(notice))

    async def close(self) -> None:
        self._beating.cancel()
        await asyncio.gather(self._beating, return_exceptions=True)
        self._socket.close()
        self._context.term()

    async def _beat(self) -> None:
        while True:
            await self._send(b"H", 0, b"")
            await asyncio.sleep(BEAT_SECONDS)

    async def _send(self, kind: bytes, call_id: int, body: bytes) -> None:
        await self._socket.send_multipart([kind, call_id.to_bytes(8, "big"), body])


def _identity(worker: int) -> bytes:
    return str(worker).encode()
