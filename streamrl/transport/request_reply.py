"""Requests from one master to its workers, over ZMQ with msgpack.

A *request* goes to one worker or to several at once. The master sends it to all of them before any other request, so
every worker receives requests in the same order: workers that communicate within requests never wait for each other in
a circle. In addition to replies a worker sends *notices* (an event in the worker). Sessions (`session.py`) send lost
messages again, so each message is processed once, in order, even if connections break in between.

All requests that wait for a worker fail, with the worker's name in the error, if its connection has ended and it does
not return within moments, if it stays silent, or if another process has taken its place. The master's beats detect an
ended connection. The other workers of that request may already wait for the lost one: the run then goes back, which
replaces all of them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from streamrl import essential
from streamrl.errors import UNDECODABLE, DeadlineExceeded, PeerError, PeerLost, WireError
from streamrl.rate_limited_log import RateLimitedLog
from streamrl.transport.control import Credential, Peer
from streamrl.transport.credentials import Identity, ReceiverKeys
from streamrl.transport.liveness import LastHeard
from streamrl.transport.session import MessageSession, Packet
from streamrl.transport.sockets import Arrival, ClientSocket, Readable, ServerSocket
from streamrl.waits import warned_of

log = logging.getLogger(__name__)

Result = TypeVar("Result")
Call = TypeVar("Call")
Notice = TypeVar("Notice")

BEAT_SECONDS = 1.0
SILENCE_SECONDS = 20.0
"""A worker that has sent nothing for this long is lost."""
RETURN_SECONDS = 2.0
"""A worker whose connection has ended is lost after this long: a process that lives connects again at once."""
GONE = "is gone: its connection has ended"
WAIT_WARNING_SECONDS = 30.0
"""Wait for workers, or for the master, after which a warning is logged."""
LARGEST_MESSAGE = 1 << 28
"""In bytes. Only metadata travels here."""
WELCOME_SECONDS = 60.0
"""A worker gives up if the master sends nothing for this long. The master's beats come every `BEAT_SECONDS`."""


class WorkerCall(msgspec.Struct, frozen=True):
    """From the master: carry out a call."""

    request: int
    """Number of the request that the call belongs to."""
    call: msgspec.Raw


class ReplyMessage(msgspec.Struct, frozen=True, tag="reply"):
    """From a worker: the result of a call."""

    request: int
    result: msgspec.Raw


class ErrorMessage(msgspec.Struct, frozen=True, tag="error"):
    """From a worker: a call has failed."""

    request: int
    text: str


class NoticeMessage(msgspec.Struct, frozen=True, tag="notice"):
    """From a worker: an event."""

    notice: msgspec.Raw


_encode = msgspec.msgpack.Encoder().encode
_calls = msgspec.msgpack.Decoder(WorkerCall)
_from_workers = msgspec.msgpack.Decoder(ReplyMessage | ErrorMessage | NoticeMessage)


def _raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(_encode(value))


class _Request:
    """One request in flight."""

    def __init__(self, workers: Collection[int], call: str) -> None:
        """`call`: the name of the call's type."""
        loop = asyncio.get_running_loop()
        self.call = call
        self.results: dict[int, asyncio.Future[msgspec.Raw]] = {worker: loop.create_future() for worker in workers}

    def fail(self, error: Exception) -> None:
        for future in self.results.values():
            if not future.done():
                future.set_exception(error)
                future.exception()  # only one failure is raised; mark the request's other failures as retrieved


class _Worker:
    """A worker that has connected."""

    def __init__(self, route: bytes, session: MessageSession, *, now: float) -> None:
        self.route = route
        self.session = session
        self.heard = LastHeard(now=now, patience=SILENCE_SECONDS)
        self.unreachable_since: float | None = None
        """When sending to it failed first, as its connection has ended; None if it is connected."""

    @property
    def lives(self) -> bool:
        return not self.heard.is_silent(now=time.monotonic())


class Requests(Protocol):
    """Interface by which a master calls its workers: `RequestChannel` over ZMQ, or a test double."""

    async def wait_for(self, workers: set[int], *, patience: float, warn_after: float = ...) -> None: ...

    async def living(self, workers: Sequence[int], *, patience: float) -> list[int]: ...

    async def call(self, worker: int, call: Any, reply: type[Result], *, timeout: float) -> Result: ...

    async def request(self, calls: Mapping[int, Any], reply: type[Result], *, timeout: float) -> dict[int, Result]: ...


class RequestChannel(Generic[Notice]):
    """The master's end. All methods must be called on the event loop that created it."""

    def __init__(
        self,
        *,
        keys: ReceiverKeys,
        host: str,
        notice_type: type[Notice],
        on_notice: Callable[[int, Notice], None],
        name_of: Callable[[int], str] = "model_worker/{}".format,
        announced: str = "",
        encrypted: bool = False,
        number_of: Callable[[Identity], int] = lambda sender: sender.index,
    ) -> None:
        """Listen at `host` on any free port; `announced`, `encrypted`: as in `ServerSocket`.

        `on_notice` is called with the worker's number and each of its notices; `name_of` returns a worker's name for
        messages, `number_of` the number of a worker from its verified credential."""
        self._server = ServerSocket(
            keys, host=host, announced=announced, encrypted=encrypted, most_packet_bytes=LARGEST_MESSAGE
        )
        self.endpoint = self._server.endpoint
        self._readable = Readable(self._server.socket)
        self._number_of = number_of
        self._name_of = name_of
        self._notices = msgspec.msgpack.Decoder(notice_type)
        self._on_notice = on_notice
        self._warnings = RateLimitedLog(log)
        self._last_request = 0
        self._pending: dict[int, _Request] = {}
        self._workers: dict[int, _Worker] = {}
        self._joined = asyncio.Condition()
        """Notified when a worker connects or returns."""
        self._tasks = [
            essential.begin(self._receive(), name="the master's receiving of messages"),
            essential.begin(self._watch(), name="the master's watch over workers"),
        ]

    async def wait_for(self, workers: set[int], *, patience: float, warn_after: float = WAIT_WARNING_SECONDS) -> None:
        """Wait until all of `workers` have connected.

        After `warn_after` seconds log a warning that names the missing workers. Raises `DeadlineExceeded` after
        `patience` seconds."""

        def missing() -> str:
            return ", ".join(self._name_of(worker) for worker in sorted(workers - self._workers.keys()))

        try:
            async with asyncio.timeout(patience), self._joined:
                with warned_of(lambda: f"{missing()} to connect to the controller", after=warn_after, log=log):
                    await self._joined.wait_for(lambda: workers <= self._workers.keys())
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"{missing()} did not connect to the controller within {patience:.0f} s; look at the logs there, or "
                "start it again"
            ) from error

    async def living(self, workers: Sequence[int], *, patience: float) -> list[int]:
        """Return the `workers` that are not silent, as soon as there is at least one.

        Raises `DeadlineExceeded` after `patience` seconds."""
        try:
            async with asyncio.timeout(patience), self._joined:
                await self._joined.wait_for(lambda: any(map(self._lives, workers)))
        except TimeoutError as error:
            names = ", ".join(map(self._name_of, workers))
            raise DeadlineExceeded(
                f"no message from {names} within {patience:.0f} s; look at the logs there"
            ) from error
        return [worker for worker in workers if self._lives(worker)]

    async def until_lost(self, workers: Sequence[int]) -> str:
        """Wait until a connected worker of `workers` disconnects or falls silent; return a text that names it."""
        while True:
            await asyncio.sleep(BEAT_SECONDS / 2)
            for worker in workers:
                if worker in self._workers and not self._lives(worker):
                    seconds = self._workers[worker].heard.seconds(now=time.monotonic())
                    return f"{self._name_of(worker)} was not heard for {seconds:.0f} s, or its connection ended"

    async def call(self, worker: int, call: Any, reply: type[Result], *, timeout: float) -> Result:
        """Have one worker carry out `call`; raises as `request` does."""
        return (await self.request({worker: call}, reply, timeout=timeout))[worker]

    async def request(self, calls: Mapping[int, Any], reply: type[Result], *, timeout: float) -> dict[int, Result]:
        """Have several workers carry out one call each, together, and return their replies by worker.

        Raises `PeerError` with the text of the first worker that fails, `PeerLost` when a worker falls silent or is
        restarted, `DeadlineExceeded` after `timeout` seconds, `WireError` for a reply of another type.
        """
        request = _Request(calls.keys(), type(next(iter(calls.values()))).__name__)
        self._last_request += 1
        number = self._last_request
        self._pending[number] = request
        for worker, call in calls.items():  # without a pause, so that all workers have the same order
            self._send(worker, WorkerCall(number, _raw(call)))
        try:
            async with asyncio.timeout(timeout):
                results = dict(zip(calls, await asyncio.gather(*request.results.values()), strict=True))
        except TimeoutError as error:
            late = ", ".join(self._name_of(w) for w, future in request.results.items() if not _has_result(future))
            raise DeadlineExceeded(f"{late} did not finish {request.call} within {timeout:.0f} s") from error
        finally:
            del self._pending[number]
        try:
            return {worker: msgspec.msgpack.decode(result, type=reply) for worker, result in results.items()}
        except UNDECODABLE as error:
            raise WireError(f"the reply to {request.call} cannot be decoded: {error}") from error

    async def close(self) -> None:
        """Stop, and close the socket; pending requests are not completed."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._readable.close()
        self._server.close()

    async def _receive(self) -> None:
        while True:
            await self._readable.wait()
            while (arrival := self._server.receive()) is not None:
                await self._handle(self._number_of(arrival.sender), arrival)

    async def _handle(self, number: int, arrival: Arrival) -> None:
        lived = self._lives(number)
        worker = self._workers.get(number)
        if worker is None or worker.route != arrival.route:
            self._lose(number, "was restarted")
            session = MessageSession(partial(self._transmit, number, arrival.route))
            worker = self._workers[number] = _Worker(arrival.route, session, now=time.monotonic())
        worker.heard.hear(now=time.monotonic())
        worker.unreachable_since = None
        if not lived:
            async with self._joined:
                self._joined.notify_all()
        if worker.session.receive(arrival.packet):
            self._process(number, arrival.packet)

    def _process(self, worker: int, packet: Packet) -> None:
        try:
            message = _from_workers.decode(packet.message)
            notice = self._notices.decode(message.notice) if isinstance(message, NoticeMessage) else None
        except Exception as error:  # tolerance point: no message may end the receiver, whichever error it causes
            text = f"{type(error).__name__}: {error}"[:200]
            self._warnings.warning("the master refused a message of %s: %s", self._name_of(worker), text)
            return
        if isinstance(message, NoticeMessage):
            assert notice is not None
            self._on_notice(worker, notice)
            return
        request = self._pending.get(message.request)
        future = request.results.get(worker) if request is not None else None
        if request is None or future is None or future.done():
            return
        if isinstance(message, ReplyMessage):
            future.set_result(message.result)
        else:
            request.fail(PeerError(f"{self._name_of(worker)} failed in {request.call}: {message.text}"))

    async def _watch(self) -> None:
        """Send beats to the workers, and fail the requests of workers that are lost or silent."""
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            for number, worker in self._workers.items():
                worker.session.beat()
                now, since = time.monotonic(), worker.unreachable_since
                if worker.heard.ended:
                    continue
                if since is not None and now - since >= RETURN_SECONDS:
                    worker.heard.end()
                    self._lose(number, GONE)
                elif worker.heard.is_silent(now=now):
                    self._lose(number, f"has been silent for {worker.heard.seconds(now=now):.0f} s")

    def _lives(self, worker: int) -> bool:
        return worker in self._workers and self._workers[worker].lives

    def _lose(self, worker: int, how: str) -> None:
        """Fail the requests that wait for `worker`."""
        for request in self._pending.values():
            future = request.results.get(worker)
            if future is not None and not future.done():
                request.fail(PeerLost(f"{self._name_of(worker)} {how}"))

    def _send(self, worker: int, message: WorkerCall) -> None:
        """Send a message; drop it if the worker has never connected."""
        if (known := self._workers.get(worker)) is not None:
            known.session.send(_encode(message))
            if known.heard.ended:
                self._lose(worker, GONE)

    def _transmit(self, number: int, route: bytes, packet: Packet, _: object) -> None:
        reached = self._server.send(route, packet)
        self._readable.look_again()
        worker = self._workers[number]
        if not reached and worker.unreachable_since is None:
            worker.unreachable_since = time.monotonic()


class ReplyChannel(Generic[Call]):
    """A worker's end. All methods must be called on the event loop that created it."""

    def __init__(self, *, master: Peer, credential: Credential, call_type: Any) -> None:
        """`credential`: identifies this process to the master."""
        self._address = master.address
        self._socket = ClientSocket(master.address, credential)
        self._calls = msgspec.msgpack.Decoder(call_type)
        self._session = MessageSession(self._socket.send)
        self._received: asyncio.Queue[tuple[int, Call]] = asyncio.Queue()
        self._welcomed = False
        """Whether a packet of the master has arrived."""
        self._beating = essential.begin(self._beat(), name="beats for the master")

    async def receive(self) -> tuple[int, Call]:
        """Return the number of the next request, and the call, in the order that all workers share.

        Raises `PeerLost` when the master rejects this process, or sends nothing at all."""
        if not self._welcomed:
            await self._until_welcomed()
        while self._received.empty():
            await self._socket.arrived()
            self._take_packets()
        return self._received.get_nowait()

    def reply(self, request: int, result: msgspec.Struct) -> None:
        """Send the master the result of a call."""
        self._session.send(_encode(ReplyMessage(request, _raw(result))))

    def fail(self, request: int, text: str) -> None:
        """Send the master the error text of a failed call: a traceback if the error was unexpected."""
        self._session.send(_encode(ErrorMessage(request, text)))

    def notify(self, notice: msgspec.Struct) -> None:
        """Send the master a notice, which it processes once and after all earlier ones, while `receive` is running."""
        self._session.send(_encode(NoticeMessage(_raw(notice))))

    async def close(self) -> None:
        """Stop the beats, and close the socket."""
        self._beating.cancel()
        await asyncio.gather(self._beating, return_exceptions=True)
        self._socket.close()

    def _take_packets(self) -> None:
        for packet in self._socket.packets():
            self._welcomed = True
            if not self._session.receive(packet):
                continue
            try:
                message = _calls.decode(packet.message)
                self._received.put_nowait((message.request, self._calls.decode(message.call)))
            except Exception as error:  # tolerance point: as in `RequestChannel`
                log.warning("a call cannot be decoded: %s", f"{type(error).__name__}: {error}"[:200])

    async def _until_welcomed(self) -> None:
        """Wait for the master's first packet."""
        try:
            async with asyncio.timeout(WELCOME_SECONDS):
                with warned_of(lambda: f"the master at {self._address} to answer", after=5.0, log=log):
                    while not self._welcomed:
                        await self._socket.arrived()
                        self._take_packets()
        except TimeoutError as error:
            raise PeerLost(
                f"the master at {self._address} has not replied for {WELCOME_SECONDS:.0f} s: it cannot be reached "
                "from here (--advertise, firewalls), or its key is not of this process's run; look at the controller's "
                "log, and start again"
            ) from error

    async def _beat(self) -> None:
        while True:
            self._session.beat()
            await asyncio.sleep(BEAT_SECONDS)


def _has_result(future: asyncio.Future[msgspec.Raw]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None
