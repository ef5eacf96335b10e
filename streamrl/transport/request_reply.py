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
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from streamrl import essential
from streamrl.errors import UNDECODABLE, DeadlineExceeded, PeerError, PeerLost, WireError
from streamrl.records.logs import RateLimitedLog
from streamrl.transport.addresses import LOOPBACK, Reach
from streamrl.transport.control import Credential, Peer
from streamrl.transport.credentials import Identity, ReceiverKeys
from streamrl.transport.session import LastHeard
from streamrl.transport.sockets import ClientSocket, Connection, ServerSocket
from streamrl.waits import cancel, warned_of

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
"""Wait for workers after which a warning is logged."""
WARNING_SHARE = 0.1
"""Share of the deadline of a request after which a warning is logged, but not before `WAIT_WARNING_SECONDS`."""
LARGEST_MESSAGE = 1 << 28
"""In bytes. Only metadata travels here."""
WELCOME_WARNING_SECONDS = 5.0
WELCOME_SECONDS = 60.0
"""A worker logs a warning, and gives up, if the master sends nothing for this long. The master's beats come every
`BEAT_SECONDS`."""


FIRST_ROLLOUT_WORKER = 1_000_000
"""Number of rollout worker 0 on the channel. Model workers have their own numbers."""


def number_on_channel(sender: Identity) -> int:
    """Return the number of `sender` on the channel; `name_on_channel` is the inverse."""
    return sender.index + (FIRST_ROLLOUT_WORKER if sender.role == "rollout" else 0)


def name_on_channel(worker: int) -> str:
    """Return the name of the process with the number `worker` on the channel, for example `rollout/0`."""
    if worker >= FIRST_ROLLOUT_WORKER:
        return f"rollout/{worker - FIRST_ROLLOUT_WORKER}"
    return f"model_worker/{worker}"


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
        self.call = call
        self.missing = set(workers)
        """Workers that have not replied."""
        self.results: dict[int, msgspec.Raw] = {}
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def take(self, worker: int, result: msgspec.Raw) -> None:
        self.results[worker] = result
        self.missing.remove(worker)
        if not self.missing and not self.done.done():
            self.done.set_result(None)

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)


class _Worker:
    """A worker that has connected."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.heard = LastHeard(now=time.monotonic(), patience=SILENCE_SECONDS)

    def loss(self) -> str:
        """Return how it was lost; empty if it lives."""
        now, ended_at = time.monotonic(), self.connection.ended_at
        if ended_at is not None and now - ended_at >= RETURN_SECONDS:
            return GONE
        return f"has been silent for {self.heard.seconds(now=now):.0f} s" if self.heard.is_silent(now=now) else ""


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
        notice_type: type[Notice],
        on_notice: Callable[[int, Notice], None],
        reach: Reach = LOOPBACK,
        encrypted: bool = False,
    ) -> None:
        """Listen on any free port; `reach`, `encrypted`: as in `ServerSocket`.

        `on_notice` is called with the worker's number and each of its notices."""
        self._server = ServerSocket(keys, reach=reach, encrypted=encrypted, most_packet_bytes=LARGEST_MESSAGE)
        self.endpoint = self._server.endpoint
        self._notices = msgspec.msgpack.Decoder(notice_type)
        self._on_notice = on_notice
        self._warnings = RateLimitedLog(log)
        self._last_request = 0
        self._pending: dict[int, _Request] = {}
        self._workers: dict[int, _Worker] = {}
        self._heard = asyncio.Condition()
        """Notified of each packet of a worker."""
        self._tasks = [
            essential.begin(self._receive(), name="the master's receiving of messages"),
            essential.begin(self._watch(), name="the master's watch over workers"),
        ]

    async def wait_for(self, workers: set[int], *, patience: float, warn_after: float = WAIT_WARNING_SECONDS) -> None:
        """Wait until all of `workers` have connected.

        After `warn_after` seconds log a warning that names the missing workers. Raises `DeadlineExceeded` after
        `patience` seconds."""

        def missing() -> str:
            return ", ".join(name_on_channel(worker) for worker in sorted(workers - self._workers.keys()))

        try:
            async with asyncio.timeout(patience), self._heard:
                with warned_of(lambda: f"{missing()} to connect to the controller", after=warn_after, log=log):
                    await self._heard.wait_for(lambda: workers <= self._workers.keys())
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"{missing()} did not connect to the controller within {patience:.0f} s; look at the logs there, or "
                "start it again"
            ) from error

    async def living(self, workers: Sequence[int], *, patience: float) -> list[int]:
        """Return the `workers` that are not silent, as soon as there is at least one.

        Raises `DeadlineExceeded` after `patience` seconds."""
        try:
            async with asyncio.timeout(patience), self._heard:
                await self._heard.wait_for(lambda: any(map(self._lives, workers)))
        except TimeoutError as error:
            names = ", ".join(map(name_on_channel, workers))
            raise DeadlineExceeded(
                f"no message from {names} within {patience:.0f} s; look at the logs there"
            ) from error
        return [worker for worker in workers if self._lives(worker)]

    async def until_lost(self, workers: Sequence[int]) -> str:
        """Wait until a connected worker of `workers` disconnects or falls silent; return a text that names it."""
        while True:
            await asyncio.sleep(BEAT_SECONDS / 2)
            for worker in workers:
                if worker in self._workers and (loss := self._workers[worker].loss()):
                    return f"{name_on_channel(worker)} {loss}"

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

        def late() -> str:
            return ", ".join(name_on_channel(worker) for worker in calls if worker in request.missing)

        warn_after = max(WAIT_WARNING_SECONDS, WARNING_SHARE * timeout)
        try:
            with warned_of(lambda: f"{late()} to finish {request.call}", after=warn_after, log=log):
                async with asyncio.timeout(timeout):
                    await request.done
        except TimeoutError as error:
            raise DeadlineExceeded(f"{late()} did not finish {request.call} within {timeout:.0f} s") from error
        finally:
            del self._pending[number]
        try:
            return {worker: msgspec.msgpack.decode(request.results[worker], type=reply) for worker in calls}
        except UNDECODABLE as error:
            raise WireError(f"the reply to {request.call} cannot be decoded: {error}") from error

    async def close(self) -> None:
        """Stop, and close the socket; pending requests are not completed."""
        await cancel(*self._tasks)
        self._server.close()

    async def _receive(self) -> None:
        while True:
            await self._server.arrived()
            while (arrival := self._server.receive()) is not None:
                number = number_on_channel(arrival.connection.sender)
                await self._hear(number, arrival.connection)
                if arrival.message is not None:
                    self._process(number, arrival.message)

    async def _hear(self, number: int, connection: Connection) -> None:
        worker = self._workers.get(number)
        if worker is None or worker.connection is not connection:
            self._lose(number, "was restarted")
            worker = self._workers[number] = _Worker(connection)
        worker.heard.hear(now=time.monotonic())
        async with self._heard:
            self._heard.notify_all()

    def _process(self, worker: int, content: msgspec.Raw) -> None:
        try:
            message = _from_workers.decode(content)
            notice = self._notices.decode(message.notice) if isinstance(message, NoticeMessage) else None
        except Exception as error:  # tolerance point: no message may end the receiver, whichever error it causes
            text = f"{type(error).__name__}: {error}"[:200]
            self._warnings.warning("the master refused a message of %s: %s", name_on_channel(worker), text)
            return
        if isinstance(message, NoticeMessage):
            assert notice is not None
            self._on_notice(worker, notice)
            return
        request = self._pending.get(message.request)
        if request is None or worker not in request.missing:
            return
        if isinstance(message, ReplyMessage):
            request.take(worker, message.result)
        else:
            request.fail(PeerError(f"{name_on_channel(worker)} failed in {request.call}: {message.text}"))

    async def _watch(self) -> None:
        """Send beats to the workers, and fail the requests of workers that are lost or silent."""
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            for number, worker in self._workers.items():
                worker.connection.session.beat()
                if loss := worker.loss():
                    self._lose(number, loss)

    def _lives(self, worker: int) -> bool:
        return worker in self._workers and not self._workers[worker].loss()

    def _lose(self, worker: int, how: str) -> None:
        """Fail the requests that wait for `worker`."""
        for request in self._pending.values():
            if worker in request.missing:
                request.fail(PeerLost(f"{name_on_channel(worker)} {how}"))

    def _send(self, worker: int, message: WorkerCall) -> None:
        """Send a message; drop it if the worker has never connected."""
        if (known := self._workers.get(worker)) is not None:
            known.connection.session.send(_encode(message))
            if loss := known.loss():
                self._lose(worker, loss)


class ReplyChannel(Generic[Call]):
    """A worker's end. All methods must be called on the event loop that created it."""

    def __init__(self, *, master: Peer, credential: Credential, call_type: Any) -> None:
        """`credential`: identifies this process to the master."""
        self._address = master.address
        self._socket = ClientSocket(master.address, credential)
        self._calls = msgspec.msgpack.Decoder(call_type)
        self._received: asyncio.Queue[tuple[int, Call]] = asyncio.Queue()
        self._beating = essential.begin(self._beat(), name="beats for the master")

    async def receive(self) -> tuple[int, Call]:
        """Return the number of the next request, and the call, in the order that all workers share.

        Raises `PeerLost` when the master rejects this process, or sends nothing at all."""
        if not self._is_welcomed:
            await self._until_welcomed()
        while self._received.empty():
            await self._take_arrived()
        return self._received.get_nowait()

    def reply(self, request: int, result: msgspec.Struct) -> None:
        """Send the master the result of a call."""
        self._socket.session.send(_encode(ReplyMessage(request, _raw(result))))

    def fail(self, request: int, text: str) -> None:
        """Send the master the error text of a failed call: a traceback if the error was unexpected."""
        self._socket.session.send(_encode(ErrorMessage(request, text)))

    def notify(self, notice: msgspec.Struct) -> None:
        """Send the master a notice, which it processes once and after all earlier ones, while `receive` is running."""
        self._socket.session.send(_encode(NoticeMessage(_raw(notice))))

    async def close(self) -> None:
        """Stop the beats, and close the socket."""
        await cancel(self._beating)
        self._socket.close()

    @property
    def _is_welcomed(self) -> bool:
        """Whether a packet of the master has arrived."""
        return self._socket.heard_at > -math.inf

    async def _take_arrived(self) -> None:
        await self._socket.arrived()
        for content in self._socket.messages():
            try:
                message = _calls.decode(content)
                self._received.put_nowait((message.request, self._calls.decode(message.call)))
            except Exception as error:  # tolerance point: as in `RequestChannel`
                log.warning("a call cannot be decoded: %s", f"{type(error).__name__}: {error}"[:200])

    async def _until_welcomed(self) -> None:
        """Wait for the master's first packet."""
        try:
            async with asyncio.timeout(WELCOME_SECONDS):
                what, after = f"the master at {self._address} to answer", WELCOME_WARNING_SECONDS
                with warned_of(lambda: what, after=after, log=log):
                    while not self._is_welcomed:
                        await self._take_arrived()
        except TimeoutError as error:
            raise PeerLost(
                f"the master at {self._address} has not replied for {WELCOME_SECONDS:.0f} s: it cannot be reached "
                "from here (--advertise, firewalls), or its key is not of this process's run; look at the controller's "
                "log, and start again"
            ) from error

    async def _beat(self) -> None:
        while True:
            self._socket.session.beat()
            await asyncio.sleep(BEAT_SECONDS)
