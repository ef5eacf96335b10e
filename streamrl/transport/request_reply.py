"""Requests from one master to its workers, over ZMQ with msgpack.

A *request* goes to one worker or to several at once. The master collects the requests of one turn of the event loop and
flushes them one after another, each to all of its workers, so every worker sees requests in the same order: workers
that communicate within requests never wait for each other in a circle. A request to several workers begins only when
each of them has acknowledged it (`ack`), so none starts to communicate with a dead worker; the master's `syn` then
starts all of them. If the master gives a request up before `syn`, it withdraws the request, or its workers would wait
forever.

In addition to replies a worker sends *notices* (an event in the worker) and heartbeats. Each end numbers all of its
messages except heartbeats and probes, and resends them until they are confirmed: each message is processed once, in
order, even if connections break in between. All requests that wait for a worker fail, with the worker's name in the
error, if its connection has ended and it does not return within moments, if it stays silent, or if it was restarted.
The master's probes detect an ended connection within one beat.

Frames: `[kind, request id, place, incarnation, body]`. The place is the message's sequence number among the messages
from this end to the other, from 1; the incarnation identifies one start of the worker that sends or receives the
message. Kinds from the master: `C` call, `P` call that waits for its `S` syn or its withdrawal `W`. From a worker: `A`
ack, `R` reply, `E` error (body: text), `N` notice. These kinds have no place of their own: `K`, which confirms all
messages up to its place, the master's probe `B`, and a worker's heartbeat `H`, which is also its first message.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
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
    bind,
    connect,
    encrypt_server,
    user_of,
)
from streamrl.transport.liveness import LastHeard
from streamrl.transport.seldom import Seldom
from streamrl.waits import warned_of

log = logging.getLogger(__name__)

Reply = TypeVar("Reply")
Call = TypeVar("Call")
Notice = TypeVar("Notice")
Understood = TypeVar("Understood")

BEAT_SECONDS = 1.0
SILENCE_SECONDS = 20.0
"""A worker that has sent nothing for this long is lost."""
RETURN_SECONDS = 2.0
"""A worker whose connection has ended is lost after this long: a process that lives connects again at once."""
GONE = "is gone: its connection has ended"
BEGIN_WARNING_SECONDS = 30.0
"""A worker that has waited this long for the other workers to receive a call logs a warning."""
LARGEST_FRAME = 1 << 28
"""In bytes. A sender of a larger frame to the master is disconnected. Only metadata travels here."""
RESEND_SECONDS = 2.0
"""A message that the other end has not confirmed for this long is sent again. While nothing is confirmed, the delay
doubles each time, up to `LONGEST_RESEND_SECONDS`."""
LONGEST_RESEND_SECONDS = 60.0
CONNECT_AGAIN_SECONDS = 5.0
"""Interval at which a worker that has received nothing from the master connects again. The master may have rejected it
because the manager did not know its key yet, and ZMQ never retries a rejected connection."""
WELCOME_SECONDS = 60.0
"""A worker gives up if the master sends nothing for this long. The master's probes come every `BEAT_SECONDS`."""
NUMBER_BYTES = 8
"""Length of a request id, and of a place."""
_FRAMES = ("kind", "request id", "place", "incarnation", "body")


class _Message(msgspec.Struct, frozen=True):
    kind: bytes
    number: int
    """Id of the request that the message belongs to; 0 if it belongs to none."""
    place: int
    incarnation: bytes
    body: bytes = b""

    def frames(self) -> list[bytes]:
        number, place = (n.to_bytes(NUMBER_BYTES, "big") for n in (self.number, self.place))
        return [self.kind, number, place, self.incarnation, self.body]


class _Conversation:
    """One end's state of the exchange between the master and one incarnation of a worker. Each message is processed
    once, in order, and a sent message is kept until the other end has confirmed it."""

    def __init__(self, incarnation: bytes) -> None:
        self.incarnation = incarnation
        self.unconfirmed: dict[int, _Message] = {}
        """Messages sent by this end, by place, oldest first."""
        self._said = 0
        self._taken = 0
        self._since = 0.0
        """When the oldest unconfirmed message became the oldest, or was last sent again."""
        self._patience = RESEND_SECONDS

    def say(self, kind: bytes, number: int, body: bytes) -> _Message:
        """Number and keep a message; return it, ready to be sent."""
        self._said += 1
        if not self.unconfirmed:
            self._since, self._patience = time.monotonic(), RESEND_SECONDS
        message = self.unconfirmed[self._said] = _Message(kind, number, self._said, self.incarnation, body)
        return message

    def to_say_again(self) -> list[_Message]:
        """Return the messages that the other end should have confirmed by now."""
        now = time.monotonic()
        if not self.unconfirmed or now - self._since < self._patience:
            return []
        self._since, self._patience = now, min(2 * self._patience, LONGEST_RESEND_SECONDS)
        return list(self.unconfirmed.values())

    def is_next(self, message: _Message) -> bool:
        """Whether to process `message` now. Earlier messages are duplicates; later ones come again in their order."""
        following = message.place == self._taken + 1
        self._taken += following
        return following

    def confirmation(self) -> _Message:
        """Return the confirmation of all messages processed so far."""
        return _Message(b"K", 0, self._taken, self.incarnation)

    def confirm(self, place: int) -> None:
        """Forget sent messages up to `place`: the other end has processed them."""
        confirmed = [each for each in self.unconfirmed if each <= place]
        for each in confirmed:
            del self.unconfirmed[each]
        if confirmed:
            self._since, self._patience = time.monotonic(), RESEND_SECONDS


class _Request:
    """One request in flight."""

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
                future.exception()  # only one failure is raised; mark the request's other failures as retrieved


class Requests(Protocol):
    """Interface by which a master calls its workers: `RequestChannel` over ZMQ, or a test double."""

    async def wait_for(self, workers: set[int], *, patience: float, warn_after: float = ...) -> None: ...

    async def living(self, workers: Sequence[int], *, patience: float) -> list[int]: ...

    async def call(self, worker: int, call: Any, reply: type[Reply], *, timeout: float) -> Reply: ...

    async def request(self, calls: Mapping[int, Any], reply: type[Reply], *, timeout: float) -> dict[int, Reply]: ...


class RequestChannel(Generic[Notice]):
    """The master's end. All methods must be called on the event loop that created it."""

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
        """Listen at `host` on any free port; advertise the address `announced` instead of `host` if it is not empty.

        `keys`: the process's own key pair, if connections are encrypted. `on_notice` is called with the worker's number
        and each of its notices; `name_of` returns a worker's name for messages, `number_of` the number of a worker from
        its verified credential. No worker is accepted before `admit`."""
        self.context = zmq.asyncio.Context()
        self._verifier = Verifier("controller")
        self._admitting = asyncio.Event()
        self._number_of = number_of
        self._routes: dict[int, bytes] = {}
        """Routing id of the socket of each worker that has sent a message."""
        self._seldom = Seldom(log)
        self._encrypted = keys is not None
        self._socket = self.context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, LARGEST_FRAME)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a reconnecting worker replaces its old connection
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # sending to a worker without connection is an error
        if keys is not None:
            encrypt_server(self._socket, keys)
        self.endpoint = url_of(announced or host, bind(self._socket, host), scheme="tcp")
        self._encoder = msgspec.msgpack.Encoder()
        self._notices = msgspec.msgpack.Decoder(notice_type)
        self._on_notice = on_notice
        self._name_of = name_of
        self._next_id = 0
        self._pending: dict[int, _Request] = {}
        self._collected: deque[_Request] = deque()
        self._some = asyncio.Event()
        self._heard: dict[int, LastHeard] = {}
        """Each worker that has ever connected, and when its last message came."""
        self._unreachable: dict[int, float] = {}
        """Each worker whose connection has ended, and since when sending to it has failed."""
        self._conversations: dict[int, _Conversation] = {}
        """Per worker: the exchange with its latest known incarnation."""
        self._joined = asyncio.Condition()
        self._tasks = [
            essential.begin(self._receive(), name="the master's receiving of messages"),
            essential.begin(self._watch(), name="the master's watch over workers"),
            essential.begin(self._flush(), name="the master's sending of calls"),
        ]

    def admit(self, verifier: Verifier) -> None:
        """Accept messages from the senders that `verifier` knows from now on."""
        self._verifier = verifier
        self._admitting.set()

    async def wait_for(self, workers: set[int], *, patience: float, warn_after: float = BEGIN_WARNING_SECONDS) -> None:
        """Wait until all of `workers` have connected.

        After `warn_after` seconds log a warning that names the missing workers. Raises `DeadlineExceeded` after
        `patience` seconds."""

        def missing() -> str:
            return ", ".join(self._name_of(worker) for worker in sorted(workers - self._heard.keys()))

        try:
            async with asyncio.timeout(patience), self._joined:
                with warned_of(lambda: f"{missing()} to connect to the controller", after=warn_after, log=log):
                    await self._joined.wait_for(lambda: workers <= self._heard.keys())
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
                f"no word from {names}, nor within another {patience:.0f} s; look at the logs there"
            ) from error
        return [worker for worker in workers if self._lives(worker)]

    async def until_lost(self, workers: Sequence[int]) -> str:
        """Wait until a connected worker of `workers` disconnects or falls silent; return a text that names it."""
        while True:
            await asyncio.sleep(BEAT_SECONDS / 2)
            lost = [worker for worker in workers if worker in self._heard and not self._lives(worker)]
            if lost:
                seconds = self._heard[lost[0]].seconds(now=time.monotonic())
                return f"{self._name_of(lost[0])} was not heard for {seconds:.0f} s, or its connection ended"

    async def call(self, worker: int, call: Any, reply: type[Reply], *, timeout: float) -> Reply:
        """Have one worker carry out `call`; raises as `request` does."""
        return (await self.request({worker: call}, reply, timeout=timeout))[worker]

    async def request(self, calls: Mapping[int, Any], reply: type[Reply], *, timeout: float) -> dict[int, Reply]:
        """Have several workers carry out one call each, together, and return their replies by worker.

        Raises `PeerError` with the text of the first worker that fails, `PeerLost` when a worker falls silent or is
        restarted, `DeadlineExceeded` after `timeout` seconds, `WireError` for a reply of another type.
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
                self._collected.append(request)  # a second time, so that `_flush` withdraws it
                self._some.set()
        try:
            return {worker: msgspec.msgpack.decode(body, type=reply) for worker, body in bodies.items()}
        except UNDECODABLE as error:
            raise WireError(f"{what} was answered with something else: {error}") from error

    async def close(self) -> None:
        """Stop, and close the socket; pending requests are not completed."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.close()
        self.context.term()

    async def _flush(self) -> None:
        """Send the collected requests, in order."""
        while True:
            await self._some.wait()
            self._some.clear()
            while self._collected:
                request = self._collected.popleft()
                together = bool(request.unacknowledged)
                if request.number in self._pending:
                    request.sent = True
                    for worker, body in request.calls.items():
                        await self._say(worker, b"P" if together else b"C", request.number, body)
                elif request.sent and together:
                    for worker in request.calls:
                        await self._say(worker, b"W", request.number)

    async def _receive(self) -> None:
        await self._admitting.wait()
        while True:
            identity, frames, user = await self._received()
            try:
                worker = self._number_of(self._verifier.sender(identity, user=user))
            except Stranger as stranger:
                self._seldom.warning("the master refused a message of %s", stranger)
                continue
            if (message := self._understood(worker, partial(_read, frames))) is not None:
                self._routes[worker] = identity
                await self._handle(worker, message)

    def _understood(self, worker: int, read: Callable[[], Understood]) -> Understood | None:
        """Return the result of `read`, the decoding of a message from `worker`; None if it cannot be decoded."""
        try:
            return read()
        except Exception as error:  # tolerance point: no message may end the receiver, whichever error it causes
            name = self._name_of(worker)
            self._seldom.warning("the master received a message from %s that is none: %s", name, _brief(error))
            return None

    async def _received(self) -> tuple[bytes, list[bytes], str]:
        """Return the next message: routing id, frames, and the connection's CURVE key (empty if not encrypted)."""
        if not self._encrypted:
            identity, *frames = await self._socket.recv_multipart()
            return identity, frames, ""
        received = await self._socket.recv_multipart(copy=False)
        first, *rest = received
        return first.bytes, [frame.bytes for frame in rest], user_of(received[-1])

    async def _handle(self, worker: int, message: _Message) -> None:
        lived = self._lives(worker)
        self._hear(worker, now=time.monotonic())
        if not lived:
            async with self._joined:
                self._joined.notify_all()
        conversation = self._conversations.get(worker)
        if message.kind == b"H" and conversation is not None and conversation.incarnation != message.incarnation:
            self._lose(worker, "was started anew")
            conversation = None
        if conversation is None:
            conversation = self._conversations[worker] = _Conversation(message.incarnation)
        if message.kind == b"H" or conversation.incarnation != message.incarnation:
            return  # other messages of a new incarnation come again after its first heartbeat
        if message.kind == b"K":
            conversation.confirm(message.place)
            return
        if conversation.is_next(message):
            await self._take(worker, message)
        await self._send(worker, conversation.confirmation())

    async def _take(self, worker: int, message: _Message) -> None:
        if message.kind == b"N":
            if (notice := self._understood(worker, partial(self._notices.decode, message.body))) is not None:
                self._on_notice(worker, notice)
            return
        request = self._pending.get(message.number)
        if request is None or worker not in request.replies:
            return
        future = request.replies[worker]
        if message.kind == b"A":
            request.unacknowledged.discard(worker)
            if not request.unacknowledged:
                for member in request.calls:
                    await self._say(member, b"S", message.number)
        elif message.kind == b"R" and not future.done():
            future.set_result(message.body)
        elif message.kind == b"E" and not future.done():
            text = message.body.decode(errors="replace")
            request.fail(PeerError(f"{self._name_of(worker)} failed in {request.what}: {text}"))

    async def _watch(self) -> None:
        """Probe the workers, resend unconfirmed messages, and fail the requests of workers that are lost or silent."""
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            for worker, conversation in list(self._conversations.items()):
                await self._send(worker, _Message(b"B", 0, 0, conversation.incarnation))
                for message in conversation.to_say_again():
                    await self._send(worker, message)
                now, heard = time.monotonic(), self._heard[worker]
                if now - self._unreachable.get(worker, now) >= RETURN_SECONDS and not heard.ended:
                    heard.end()
                    self._lose(worker, GONE)
                elif heard.is_silent(now=now) and not heard.ended:
                    self._lose(worker, f"has been silent for {heard.seconds(now=now):.0f} s")

    def _hear(self, worker: int, *, now: float) -> None:
        self._unreachable.pop(worker, None)
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

    async def _say(self, worker: int, kind: bytes, number: int, body: bytes = b"") -> None:
        """Send a message that the worker processes once, after all earlier ones; drop it if the worker is unknown."""
        if (conversation := self._conversations.get(worker)) is not None:
            await self._send(worker, conversation.say(kind, number, body))

    async def _send(self, worker: int, message: _Message) -> None:
        try:
            await self._socket.send_multipart([self._routes[worker], *message.frames()])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            if self._heard[worker].ended:
                self._lose(worker, GONE)
            else:
                self._unreachable.setdefault(worker, time.monotonic())


class ReplyChannel(Generic[Call]):
    """A worker's end. All methods must be called on the event loop that created it."""

    def __init__(self, *, master: Peer, worker: int, shown: Shown, call_type: Any) -> None:
        """`shown`: the credential and keys that identify this process to the master; `worker`: its number, for
        messages."""
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._address = master.address
        self._welcomed = False
        """Whether a message of the master has arrived."""
        connect(self._socket, master.address, curve_key=master.curve_key, shown=shown, link=uuid.uuid4().hex[:8])
        self._encoder = msgspec.msgpack.Encoder()
        self._calls = msgspec.msgpack.Decoder(call_type)
        self._waiting: dict[int, asyncio.Future[bool]] = {}
        """Calls that wait for the other workers, by id; the result is whether to carry the call out."""
        self._conversation = _Conversation(uuid.uuid4().bytes)
        self._beating = essential.begin(self._beat(), name=f"beats of worker {worker} for the master")

    async def receive(self) -> tuple[int, Call]:
        """Return the id of the next call, and the call, in the order that all workers share.

        Call `begin` before carrying the call out. Raises `PeerLost` when the master sends nothing at all."""
        if not self._welcomed:
            await self._until_welcomed()
        while True:
            frames = await self._socket.recv_multipart()
            try:
                message = _read(frames)
                if message.kind == b"B" or message.incarnation != self._conversation.incarnation:
                    continue
                if message.kind == b"K":
                    self._conversation.confirm(message.place)
                    continue
                following = self._conversation.is_next(message)
                await self._send(self._conversation.confirmation())
                if not following:
                    continue
                if message.kind in (b"S", b"W"):
                    self._waiting[message.number].set_result(message.kind == b"S")
                    continue
                call: Call = self._calls.decode(message.body)
            except Exception as error:  # tolerance point: no message may end the receiver, whichever error it causes
                log.warning("a worker received a call that is none: %s", _brief(error))
                continue
            if message.kind == b"P":
                self._waiting[message.number] = asyncio.get_running_loop().create_future()
                await self._say(b"A", message.number)
            return message.number, call

    async def begin(self, call_id: int) -> bool:
        """Wait until all workers of the request have received it; return False if the call was withdrawn.

        `receive` must be running in the meantime."""
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
        await self._say(b"R", call_id, self._encoder.encode(result))

    async def fail(self, call_id: int, text: str) -> None:
        """Send the master the error text of a failed call: a traceback if the error was unexpected."""
        await self._say(b"E", call_id, text.encode())

    async def notify(self, notice: msgspec.Struct) -> None:
        """Send the master a notice, which it processes once and after all earlier ones, while `receive` is running."""
        await self._say(b"N", 0, self._encoder.encode(notice))

    async def close(self) -> None:
        """Stop beating, and close the socket."""
        self._beating.cancel()
        await asyncio.gather(self._beating, return_exceptions=True)
        self._socket.close()
        self._context.term()

    async def _until_welcomed(self) -> None:
        """Wait for the master's first message."""
        began = time.monotonic()
        while not await self._socket.poll(CONNECT_AGAIN_SECONDS * 1000):
            waited = time.monotonic() - began
            if waited >= WELCOME_SECONDS:
                raise PeerLost(
                    f"the master at {self._address} has not answered for {waited:.0f} s: either it cannot be reached "
                    "from here (--advertise, firewalls), or it turns this process away, because another one has taken "
                    "its place; look at the logs of the master and the manager, end the other one, and start again"
                )
            log.warning("the master at %s has not answered for %.0f s; connecting again", self._address, waited)
            with contextlib.suppress(zmq.ZMQError):  # ZMQ has given the connection up
                self._socket.disconnect(self._address)
            self._socket.connect(self._address)
        self._welcomed = True

    async def _beat(self) -> None:
        while True:
            await self._send(_Message(b"H", 0, 0, self._conversation.incarnation))
            if again := self._conversation.to_say_again():
                log.warning("the master has not confirmed %d messages; they are sent again", len(again))
                for message in again:
                    await self._send(message)
            await asyncio.sleep(BEAT_SECONDS)

    async def _say(self, kind: bytes, number: int, body: bytes = b"") -> None:
        """Send a message that the master processes once, after all earlier ones, while `receive` is running."""
        await self._send(self._conversation.say(kind, number, body))

    async def _send(self, message: _Message) -> None:
        await self._socket.send_multipart(message.frames())


def _read(frames: Sequence[bytes]) -> _Message:
    """Return the message in `frames`; raises `WireError` when their number or lengths are wrong."""
    if len(frames) != len(_FRAMES) or not len(frames[1]) == len(frames[2]) == NUMBER_BYTES:
        raise WireError(f"frames of {[len(frame) for frame in frames[:10]]} bytes are not {', '.join(_FRAMES)}")
    kind, number, place, incarnation, body = frames
    return _Message(kind, int.from_bytes(number, "big"), int.from_bytes(place, "big"), incarnation, body)


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:200]


def _has_reply(future: asyncio.Future[bytes]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None
