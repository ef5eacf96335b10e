"""Requests from one master to its workers, over ZMQ with msgpack.

A *request* goes to one worker or to several at once. Requests of one turn of the event loop are collected and flushed
together, one after another to all their workers, so every worker sees requests in the same order: workers that
communicate within them never wait for each other in a circle. A request to several workers begins only when each of
them has acknowledged it (`ack`), so none starts to communicate with a worker that is gone; the master's `syn` then sets
all off. One that the master gives up before that is withdrawn, or its workers would wait for ever.

Besides replies a worker sends *notices* (something happened there) and heartbeats. Notices are numbered, and sent again
until the master has confirmed them: each is taken once, in order, whatever connections break meanwhile. A worker whose
connection ends, that stays silent, or that was restarted fails every request that waits for it, with its name; the
master's probes find out within a beat that a connection has ended.

Frames: `[kind, request id, body]`. Kinds from the master: `C` call, `P` call that waits for its `S` syn or its
withdrawal `W`, `B` probe, `K` confirmation of all notices up to this number (body: the worker's incarnation). From a
worker: `A` ack, `R` reply, `E` error (body: text), `N` notice (number; body: the worker's incarnation, then
the notice), `H` heartbeat (body: the incarnation, which tells this start of the worker from others), which is also a
worker's first word.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import msgspec
import zmq
import zmq.asyncio

from streamrl import essential
from streamrl.errors import UNDECODABLE, DeadlineExceeded, PeerError, PeerLost, WireError
from streamrl.transport.addresses import url_of
from streamrl.transport.control import Peer
from streamrl.transport.credentials import (
    CurveKeys,
    Identity,
    Shown,
    Stranger,
    Verifier,
    connect,
    encrypt_server,
    user_of,
)
from streamrl.transport.liveness import LastHeard
from streamrl.transport.seldom import Seldom

log = logging.getLogger(__name__)

Reply = TypeVar("Reply")
Call = TypeVar("Call")
Notice = TypeVar("Notice")

BEAT_SECONDS = 1.0
SILENCE_SECONDS = 20.0
"""A worker that has not been heard of for this long is lost."""
BEGIN_WARNING_SECONDS = 30.0
"""A worker that has waited this long for the others to have a call logs a warning."""
LARGEST_FRAME = 1 << 28
"""Bytes; whoever sends a larger one to the master is cut off. What moves here is metadata."""
RESEND_SECONDS = 2.0
"""A notice that the master has not confirmed for this long is sent again."""
CONNECT_AGAIN_SECONDS = 5.0
"""A worker that has heard nothing from the master yet connects again so often: whoever was turned away, because the
manager did not know its key just then, is turned away for good as far as ZMQ knows."""
WELCOME_SECONDS = 60.0
"""A worker gives up when the master has not answered for this long. The master's probes come every `BEAT_SECONDS`."""
NUMBER_BYTES = 8
"""Length of a request id."""
INCARNATION_BYTES = 16
"""Length of what tells one start of a worker from another."""
_FRAMES = ("kind", "request id", "body")


class _Request:
    """One request on its way."""

    def __init__(self, number: int, calls: Mapping[int, bytes], what: str, loop: asyncio.AbstractEventLoop) -> None:
        self.number = number
        self.calls = calls
        self.what = what
        self.replies: dict[int, asyncio.Future[bytes]] = {worker: loop.create_future() for worker in calls}
        self.unacknowledged = set(calls) if len(calls) > 1 else set()
        self.sent = False

    def fail(self, error: Exception) -> None:
        for future in self.replies.values():
            if not future.done():
                future.set_exception(error)
                future.exception()  # one failure is raised; the others of the same request are no news


class Requests(Protocol):
    """How a master calls its workers: `RequestChannel`, which does it over ZMQ, or what a test puts in its place."""

    async def wait_for(self, workers: set[int], *, patience: float) -> None: ...

    async def living(self, workers: Sequence[int], *, patience: float) -> list[int]: ...

    async def call(self, worker: int, call: Any, reply: type[Reply], *, timeout: float) -> Reply: ...

    async def request(self, calls: Mapping[int, Any], reply: type[Reply], *, timeout: float) -> dict[int, Reply]: ...


class RequestChannel(Generic[Notice]):
    """The master's end. All methods belong to the event loop that made it."""

    def __init__(
        self,
        *,
        host: str,
        notice_type: type[Notice],
        on_notice: Callable[[int, Notice], None],
        name_of: Callable[[int], str] = "model_worker/{}".format,
        announced: str = "",
        keys: CurveKeys | None = None,
        number_of: Callable[[Identity], int] = lambda sender: sender.index,
    ) -> None:
        """Listen at `host`, at any free port, and tell others that it is at `announced`, if that is another address.
        `keys`: the process's own, if connections are to be encrypted. `on_notice` is called with the worker's number
        and each notice of its; `name_of` gives a worker's name for messages, `number_of` the number of one that has
        shown its credential. Nobody is heard before `admit`."""
        self.context = zmq.asyncio.Context()
        self._verifier = Verifier("master")
        self._admitting = asyncio.Event()
        self._number_of = number_of
        self._routes: dict[int, bytes] = {}
        """Routing id of the socket of each worker that was heard."""
        self._seldom = Seldom(log)
        self._encrypted = keys is not None
        self._socket = self.context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, LARGEST_FRAME)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # one that connects again replaces its connection
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # what cannot be sent because nobody is there is an error
        if keys is not None:
            encrypt_server(self._socket, keys)
        port = self._socket.bind_to_random_port(f"tcp://{host}")
        self.endpoint = url_of(announced or host, port, scheme="tcp")
        self._encoder = msgspec.msgpack.Encoder()
        self._notices = msgspec.msgpack.Decoder(notice_type)
        self._on_notice = on_notice
        self._name_of = name_of
        self._next_id = 0
        self._pending: dict[int, _Request] = {}
        self._collected: deque[_Request] = deque()
        self._some = asyncio.Event()
        self._heard: dict[int, LastHeard] = {}
        """Each worker that has ever connected."""
        self._incarnations: dict[int, bytes] = {}
        """The incarnation of each worker that was heard last."""
        self._taken: dict[int, int] = {}
        """Number of the last notice that was taken from that incarnation."""
        self._joined = asyncio.Condition()
        self._tasks = [
            essential.begin(self._receive(), name="the master's receiving of messages"),
            essential.begin(self._watch(), name="the master's watch over workers"),
            essential.begin(self._flush(), name="the master's sending of calls"),
        ]

    def admit(self, verifier: Verifier) -> None:
        """From now on hear those whom `verifier` knows."""
        self._verifier = verifier
        self._admitting.set()

    async def wait_for(self, workers: set[int], *, patience: float) -> None:
        """Wait until all of `workers` have connected; raises `DeadlineExceeded` after `patience` seconds."""
        try:
            async with asyncio.timeout(patience), self._joined:
                await self._joined.wait_for(lambda: workers <= self._heard.keys())
        except TimeoutError as error:
            missing = ", ".join(self._name_of(worker) for worker in sorted(workers - self._heard.keys()))
            raise DeadlineExceeded(
                f"{missing} did not connect to the master within {patience:.0f} s; look at the logs there"
            ) from error

    async def living(self, workers: Sequence[int], *, patience: float) -> list[int]:
        """Return those of `workers` that are not silent, as soon as there is one; raises `DeadlineExceeded` after
        `patience` seconds."""
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
        """Have several workers carry out one call each, together, and return their replies by worker.

        Raises `PeerError` with what the first worker says that fails, `PeerLost` when one
        falls silent or is restarted, `DeadlineExceeded` after `timeout` seconds, `WireError` for another reply.
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
                bodies = dict(zip(calls, await asyncio.gather(*request.replies.values()), strict=True))
        except TimeoutError as error:
            late = ", ".join(self._name_of(w) for w, future in request.replies.items() if not _has_reply(future))
            raise DeadlineExceeded(f"{late} did not finish {what} within {timeout:.0f} s") from error
        finally:
            self._pending.pop(request.number, None)
            if request.unacknowledged:
                self._collected.append(request)  # a second time, to be withdrawn
                self._some.set()
        try:
            return {worker: msgspec.msgpack.decode(body, type=reply) for worker, body in bodies.items()}
        except UNDECODABLE as error:
            raise WireError(f"{what} was answered with something else: {error}") from error

    async def close(self) -> None:
        """Stop, and close the socket; whoever waits for a reply is not told."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.close()
        self.context.term()

    async def _flush(self) -> None:
        """Send the requests that were collected, in order."""
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
        await self._admitting.wait()
        while True:
            identity, frames, user = await self._received()
            try:
                worker = self._number_of(self._verifier.sender(identity, user=user))
            except Stranger as stranger:
                self._seldom.warning("the master refused a message of %s", stranger)
                continue
            try:
                kind, number, body = _parts(frames)
                notice = self._notices.decode(body[INCARNATION_BYTES:]) if kind == b"N" else None
            except Exception as error:  # tolerance point: no message may end the receiver, whatever it makes fail
                name = self._name_of(worker)
                self._seldom.warning("the master received a message from %s that is none: %s", name, _brief(error))
                continue
            self._routes[worker] = identity
            await self._handle(worker, kind, number, body, notice)

    async def _received(self) -> tuple[bytes, list[bytes], str]:
        """Return the next message: routing id, frames, and the CURVE key of its connection, if that is encrypted."""
        if not self._encrypted:
            identity, *frames = await self._socket.recv_multipart()
            return identity, frames, ""
        received = await self._socket.recv_multipart(copy=False)
        first, *rest = received
        return first.bytes, [frame.bytes for frame in rest], user_of(received[-1])

    async def _handle(self, worker: int, kind: bytes, number: int, body: bytes, notice: Notice | None) -> None:
        lived = self._lives(worker)
        self._hear(worker, now=time.monotonic())
        if not lived:
            async with self._joined:
                self._joined.notify_all()
        if kind == b"H":
            if self._incarnations.get(worker) != body:
                if worker in self._incarnations:
                    self._lose(worker, "was started anew")
                self._incarnations[worker] = body
                self._taken[worker] = 0
            return
        if notice is not None:
            await self._take(worker, number, body[:INCARNATION_BYTES], notice)
            return
        request = self._pending.get(number)
        if request is None or worker not in request.replies:
            return
        future = request.replies[worker]
        if kind == b"A":
            request.unacknowledged.discard(worker)
            if not request.unacknowledged:
                for member in request.calls:
                    await self._send(member, b"S", number, b"")
        elif kind == b"R" and not future.done():
            future.set_result(body)
        elif kind == b"E" and not future.done():
            text = body.decode(errors="replace")
            request.fail(PeerError(f"{self._name_of(worker)} failed in {request.what}: {text}"))

    async def _take(self, worker: int, number: int, incarnation: bytes, notice: Notice) -> None:
        """Take `notice` if it is the next one, and confirm all that were taken. Others come again in their order, as do
        those of an incarnation that has replaced another and has sent no heartbeat yet."""
        if self._incarnations.setdefault(worker, incarnation) != incarnation:
            return
        self._taken.setdefault(worker, 0)
        if number == self._taken[worker] + 1:
            self._taken[worker] = number
            self._on_notice(worker, notice)
        await self._send(worker, b"K", self._taken[worker], incarnation)

    async def _watch(self) -> None:
        """Probe the workers, and fail the requests of those that are gone or silent."""
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            for worker in list(self._heard):
                await self._send(worker, b"B", 0, b"")
                now, heard = time.monotonic(), self._heard[worker]
                if heard.is_silent(now=now) and not heard.ended:
                    self._lose(worker, f"has been silent for {heard.seconds(now=now):.0f} s")

    def _hear(self, worker: int, *, now: float) -> None:
        if worker in self._heard:
            self._heard[worker].hear(now=now)
        else:
            self._heard[worker] = LastHeard(now=now, patience=SILENCE_SECONDS)

    def _lives(self, worker: int) -> bool:
        return worker in self._heard and not self._heard[worker].is_silent(now=time.monotonic())

    def _lose(self, worker: int, how: str) -> None:
        """Fail the requests that wait for `worker`."""
        for request in list(self._pending.values()):
            future = request.replies.get(worker)
            if future is not None and not future.done():
                request.fail(PeerLost(f"{self._name_of(worker)} {how}"))

    async def _send(self, worker: int, kind: bytes, number: int, body: bytes) -> None:
        route = self._routes.get(worker)
        if route is None:
            return
        try:
            await self._socket.send_multipart([route, kind, number.to_bytes(NUMBER_BYTES, "big"), body])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            if worker in self._heard:
                self._heard[worker].end()
                self._lose(worker, "is gone: its connection has ended")


class ReplyChannel(Generic[Call]):
    """A worker's end. All methods belong to the event loop that made it."""

    def __init__(self, *, master: Peer, worker: int, shown: Shown, call_type: Any) -> None:
        """`shown`: what the master knows this process by; `worker`: its number, for messages."""
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._address = master.address
        self._welcomed = False
        """Whether the master was heard."""
        connect(self._socket, master.address, curve_key=master.curve_key, shown=shown, link=uuid.uuid4().hex[:8])
        self._encoder = msgspec.msgpack.Encoder()
        self._calls = msgspec.msgpack.Decoder(call_type)
        self._waiting: dict[int, asyncio.Future[bool]] = {}
        """Calls that wait for the other workers, by id: whether each is to be carried out."""
        self._incarnation = uuid.uuid4().bytes
        self._notified = 0
        self._unconfirmed: dict[int, bytes] = {}
        """Notices by number that the master has not confirmed, oldest first."""
        self._confirmed = -math.inf
        """When the oldest of them became the oldest, or was sent again."""
        self._beating = essential.begin(self._beat(), name=f"beats of worker {worker} for the master")

    async def receive(self) -> tuple[int, Call]:
        """Return the id of the next call, and the call, in the order that all workers share. `begin` it before it is
        carried out. Raises `PeerLost` when the master does not answer at all."""
        if not self._welcomed:
            await self._until_welcomed()
        while True:
            frames = await self._socket.recv_multipart()
            try:
                kind, call_id, body = _parts(frames)
                if kind == b"B":
                    continue
                if kind in (b"S", b"W"):
                    self._waiting[call_id].set_result(kind == b"S")
                    continue
                if kind == b"K":
                    self._confirm(call_id, body)
                    continue
                call: Call = self._calls.decode(body)
            except Exception as error:  # tolerance point: no message may end the receiver, whatever it makes fail
                log.warning("a worker received a call that is none: %s", _brief(error))
                continue
            if kind == b"P":
                self._waiting[call_id] = asyncio.get_running_loop().create_future()
                await self._send(b"A", call_id, b"")
            return call_id, call

    async def begin(self, call_id: int) -> bool:
        """Wait until all workers of this request have it, while `receive` goes on, and return whether the call is to be
        carried out: not if it was withdrawn."""
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
        """Send the master the result of a call."""
        await self._send(b"R", call_id, self._encoder.encode(result))

    async def fail(self, call_id: int, text: str) -> None:
        """Tell the master that a call failed, and how: by a traceback where it was not expected."""
        await self._send(b"E", call_id, text.encode())

    async def notify(self, notice: msgspec.Struct) -> None:
        """Send the master a notice, which it takes once and after all earlier ones, while `receive` goes on."""
        self._notified += 1
        if not self._unconfirmed:
            self._confirmed = time.monotonic()
        body = self._unconfirmed[self._notified] = self._incarnation + self._encoder.encode(notice)
        await self._send(b"N", self._notified, body)

    async def close(self) -> None:
        """Stop beating, and close the socket."""
        self._beating.cancel()
        await asyncio.gather(self._beating, return_exceptions=True)
        self._socket.close()
        self._context.term()

    async def _until_welcomed(self) -> None:
        """Wait for the master's first word."""
        began = time.monotonic()
        while not await self._socket.poll(CONNECT_AGAIN_SECONDS * 1000):
            waited = time.monotonic() - began
            if waited >= WELCOME_SECONDS:
                raise PeerLost(
                    f"the master at {self._address} has not answered for {waited:.0f} s: either it cannot be reached "
                    "from here (stream.host, firewalls), or it turns this process away, because another one has taken "
                    "its place; look at the logs of the master and the manager, end the other one, and start again"
                )
            log.warning("the master at %s has not answered for %.0f s; connecting again", self._address, waited)
            with contextlib.suppress(zmq.ZMQError):  # ZMQ has given the connection up
                self._socket.disconnect(self._address)
            self._socket.connect(self._address)
        self._welcomed = True

    async def _beat(self) -> None:
        while True:
            await self._send(b"H", 0, self._incarnation)
            if self._unconfirmed and time.monotonic() - self._confirmed >= RESEND_SECONDS:
                self._confirmed = time.monotonic()
                log.warning("the master has not confirmed %d notices; they are sent again", len(self._unconfirmed))
                for number, body in list(self._unconfirmed.items()):
                    await self._send(b"N", number, body)
            await asyncio.sleep(BEAT_SECONDS)

    def _confirm(self, number: int, incarnation: bytes) -> None:
        """Forget all notices up to `number`: the master has taken them."""
        confirmed = [n for n in self._unconfirmed if n <= number] if incarnation == self._incarnation else []
        for n in confirmed:
            del self._unconfirmed[n]
        if confirmed:
            self._confirmed = time.monotonic()

    async def _send(self, kind: bytes, call_id: int, body: bytes) -> None:
        await self._socket.send_multipart([kind, call_id.to_bytes(NUMBER_BYTES, "big"), body])


def _parts(frames: Sequence[bytes]) -> tuple[bytes, int, bytes]:
    """Return kind, request id and body; raises `WireError` when the message has other frames."""
    if len(frames) != len(_FRAMES) or len(frames[1]) != NUMBER_BYTES:
        raise WireError(f"frames of {[len(frame) for frame in frames[:10]]} bytes are not {', '.join(_FRAMES)}")
    kind, number, body = frames
    return kind, int.from_bytes(number, "big"), body


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:200]


def _has_reply(future: asyncio.Future[bytes]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None
