"""Requests from one master to its workers, over ZMQ with msgpack.

A *request* goes to one worker or to several at once. Requests of one turn of the event loop are
collected and flushed together, one after another to all their workers, so every worker sees
requests in the same order: workers that communicate within them never wait for each other in a
circle. A request to several workers begins only when each of them has acknowledged it (`ack`), so
none starts to communicate with a worker that is gone; the master's `syn` then sets all off. One that the master gives
up before that is withdrawn, or its workers would wait for ever.

Besides replies a worker sends *notices* (something happened there) and beats. A worker whose
connection ends, that stays silent, or that was started anew fails every request that waits for it,
with its name; the master's probes find out within a beat that a connection has ended.

Frames: `[kind, request id, body]`. Kinds from the master: `C` call, `P` call that waits for its
`S` syn or its withdrawal `W`, `B` probe. From a worker: `A` ack, `R` reply, `E` error (body:
traceback text), `N` notice, `H` heartbeat (body: what tells this start of the worker from others),
which is also a worker's first word.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
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
BEGIN_WARNING_SECONDS = 30.0
"""A worker that waits so long for the others to have a call says so."""


class _Request:
    """One request on its way."""

    def __init__(self, number: int, calls: Mapping[int, bytes], what: str, loop: asyncio.AbstractEventLoop) -> None:
        self.number = number
        self.calls = calls
        self.what = what
        self.answers: dict[int, asyncio.Future[bytes]] = {worker: loop.create_future() for worker in calls}
        self.unacknowledged = set(calls) if len(calls) > 1 else set()
        self.sent = False

    def fail(self, error: Exception) -> None:
        for future in self.answers.values():
            if not future.done():
                future.set_exception(error)
                future.exception()  # one failure is told; the others of the same request are known


class RequestChannel(Generic[Notice]):
    """The master's end."""

    def __init__(
        self,
        *,
        host: str,
        notice_type: type[Notice],
        on_notice: Callable[[int, Notice], None],
        name_of: Callable[[int], str] = "model_worker/{}".format,
    ) -> None:
        """`name_of` tells people which worker a number means."""
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a worker that was started anew takes its name over
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # what cannot be sent because nobody is there is an error
        port = self._socket.bind_to_random_port(f"tcp://{host}")
        self.endpoint = f"tcp://{host}:{port}"
        self._encoder = msgspec.msgpack.Encoder()
        self._notices = msgspec.msgpack.Decoder(notice_type)
        self._on_notice = on_notice
        self._name_of = name_of
        self._next_id = 0
        self._pending: dict[int, _Request] = {}
        self._collected: deque[_Request] = deque()
        self._some = asyncio.Event()
        self._heard: dict[int, float] = {}
        """When each worker was heard last; -inf: its connection has ended since."""
        self._starts: dict[int, bytes] = {}
        """Which start of each worker was heard last."""
        self._joined = asyncio.Condition()
        self._tasks = [asyncio.create_task(work()) for work in (self._receive, self._watch, self._flush)]

    async def wait_for(self, workers: set[int], *, patience: float) -> None:
        """Until all of `workers` have spoken."""
        try:
            async with asyncio.timeout(patience), self._joined:
                await self._joined.wait_for(lambda: workers <= self._heard.keys())
        except TimeoutError as error:
            missing = ", ".join(self._name_of(worker) for worker in sorted(workers - self._heard.keys()))
            raise DeadlineExceeded(
                f"{missing} did not connect to the master within {patience:.0f} s; look at the logs there"
            ) from error

    async def living(self, workers: Sequence[int], *, patience: float) -> list[int]:
        """Those of `workers` that have spoken lately, as soon as there is one."""
        try:
            async with asyncio.timeout(patience), self._joined:
                await self._joined.wait_for(lambda: any(map(self._lives, workers)))
        except TimeoutError as error:
            names = ", ".join(map(self._name_of, workers))
            raise DeadlineExceeded(
                f"no word from {names}, nor within another {patience:.0f} s; look at the logs there"
            ) from error
        return [worker for worker in workers if self._lives(worker)]

    async def call(self, worker: int, call: Any, reply: type[Reply], *, timeout: float) -> Reply:
        """Have one worker carry out `call`; raises as `request` does."""
        return (await self.request({worker: call}, reply, timeout=timeout))[worker]

    async def request(self, calls: Mapping[int, Any], reply: type[Reply], *, timeout: float) -> dict[int, Reply]:
        """Have several workers carry out one call each, together; answers their replies by worker.

        Raises `PeerError` with the traceback of the first worker that fails, `PeerLost` when one
        falls silent or is started anew, `DeadlineExceeded` after `timeout` seconds, `WireError` for another reply.
        """
        what = type(next(iter(calls.values()))).__name__
        encoded = {worker: self._encoder.encode(call) for worker, call in calls.items()}
        request = _Request(self._next_id, encoded, what, asyncio.get_running_loop())
        self._next_id += 1
        self._pending[request.number] = request
        self._collected.append(request)
        self._some.set()
        try:
            async with asyncio.timeout(timeout):
                bodies = dict(zip(calls, await asyncio.gather(*request.answers.values()), strict=True))
        except TimeoutError as error:
            late = ", ".join(self._name_of(w) for w, future in request.answers.items() if not _answered(future))
            raise DeadlineExceeded(f"{late} did not finish {what} within {timeout:.0f} s") from error
        finally:
            self._pending.pop(request.number, None)
            if request.unacknowledged:
                self._collected.append(request)  # a second time, to be withdrawn
                self._some.set()
        try:
            return {worker: msgspec.msgpack.decode(body, type=reply) for worker, body in bodies.items()}
        except msgspec.DecodeError as error:
            raise WireError(f"{what} was answered with something else: {error}") from error

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.close()
        self._context.term()

    async def _flush(self) -> None:
        """Send what was collected, in order."""
        while True:
            await self._some.wait()
            self._some.clear()
            while self._collected:
                request = self._collected.popleft()
                together = bool(request.unacknowledged)
                if request.number in self._pending:
                    request.sent = True
                    for worker, body in request.calls.items():
                        await self._send(worker, b"P" if together else b"C", request.number, body)
                elif request.sent and together:
                    for worker in request.calls:
                        await self._send(worker, b"W", request.number, b"")

    async def _receive(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            try:
                identity, kind, number, body = frames
                await self._handle(int(identity), kind, int.from_bytes(number, "big"), body)
            except (ValueError, msgspec.DecodeError) as error:
                log.warning("the master received a message that is none: %s", error)

    async def _handle(self, worker: int, kind: bytes, number: int, body: bytes) -> None:
        lived = self._lives(worker)
        self._heard[worker] = time.monotonic()
        if not lived:
            async with self._joined:
                self._joined.notify_all()
        if kind == b"H":
            if self._starts.setdefault(worker, body) != body:
                self._starts[worker] = body
                self._lose(worker, "was started anew")
            return
        if kind == b"N":
            self._on_notice(worker, self._notices.decode(body))
            return
        request = self._pending.get(number)
        if request is None or worker not in request.answers:
            return
        future = request.answers[worker]
        if kind == b"A":
            request.unacknowledged.discard(worker)
            if not request.unacknowledged:
                for member in request.calls:
                    await self._send(member, b"S", number, b"")
        elif kind == b"R" and not future.done():
            future.set_result(body)
        elif kind == b"E" and not future.done():
            text = body.decode(errors="replace")
            request.fail(PeerError(f"{self._name_of(worker)} failed in {request.what}:\n{text}"))

    async def _watch(self) -> None:
        """Fail the requests of workers that went away or fell silent."""
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            for worker in list(self._heard):
                await self._send(worker, b"B", 0, b"")
                silent = time.monotonic() - self._heard[worker]
                if SILENCE_SECONDS < silent < math.inf:
                    self._lose(worker, f"has been silent for {silent:.0f} s")

    def _lives(self, worker: int) -> bool:
        return time.monotonic() - self._heard.get(worker, -math.inf) <= SILENCE_SECONDS

    def _lose(self, worker: int, how: str) -> None:
        """Fail the requests that wait for `worker`."""
        for request in list(self._pending.values()):
            future = request.answers.get(worker)
            if future is not None and not future.done():
                request.fail(PeerLost(f"{self._name_of(worker)} {how}"))

    async def _send(self, worker: int, kind: bytes, number: int, body: bytes) -> None:
        try:
            await self._socket.send_multipart([_identity(worker), kind, number.to_bytes(8, "big"), body])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            if worker in self._heard:
                self._heard[worker] = -math.inf
                self._lose(worker, "is gone: its connection has ended")


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
        self._waiting: dict[int, asyncio.Future[bool]] = {}
        """Of calls that wait for the other workers: whether it is to be carried out."""
        self._start = uuid.uuid4().bytes
        self._beating = asyncio.create_task(self._beat())

    async def receive(self) -> tuple[int, Call]:
        """The next call and its id, in the order that all workers share. Before it is carried out, `begin` it."""
        while True:
            frames = await self._socket.recv_multipart()
            try:
                kind, number, body = frames
                call_id = int.from_bytes(number, "big")
                if kind == b"B":
                    continue
                if kind in (b"S", b"W"):
                    self._waiting[call_id].set_result(kind == b"S")
                    continue
                call: Call = self._calls.decode(body)
            except (ValueError, KeyError, msgspec.DecodeError) as error:
                log.warning("a worker received a call that is none: %s", error)
                continue
            if kind == b"P":
                self._waiting[call_id] = asyncio.get_running_loop().create_future()
                await self._send(b"A", call_id, b"")
            return call_id, call

    async def begin(self, call_id: int) -> bool:
        """Until all workers of this request have it; `receive` has to go on meanwhile.

        Answers whether it is to be carried out: not if it was withdrawn.
        """
        waiting = self._waiting.get(call_id)
        if waiting is None:
            return True
        began = time.monotonic()
        while not (await asyncio.wait({waiting}, timeout=BEGIN_WARNING_SECONDS))[0]:
            log.warning(
                "a call of the master's waits for its other workers to have it, for %.0f s now",
                time.monotonic() - began,
            )
        del self._waiting[call_id]
        return waiting.result()

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
            await self._send(b"H", 0, self._start)
            await asyncio.sleep(BEAT_SECONDS)

    async def _send(self, kind: bytes, call_id: int, body: bytes) -> None:
        await self._socket.send_multipart([kind, call_id.to_bytes(8, "big"), body])


def _identity(worker: int) -> bytes:
    return str(worker).encode()


def _answered(future: asyncio.Future[bytes]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None
