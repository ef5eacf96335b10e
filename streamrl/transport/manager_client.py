"""The client of the manager that every other process uses.

Calls that may be repeated are retried until the manager replies, for `PATIENCE_SECONDS`: callers need no retry.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Collection, Coroutine
from http import HTTPStatus
from typing import Any, Self, TypeVar
from urllib.parse import quote, urlsplit, urlunsplit

import aiohttp
import msgspec

from streamrl.config import Config, SecurityConfig
from streamrl.errors import ConfigError, DeadlineExceeded, NotOfRun, PeerError
from streamrl.transport import control, http
from streamrl.transport.addresses import is_loopback
from streamrl.transport.credentials import ReceiverKeys, bearer
from streamrl.transport.secret import Secret, of_run_at
from streamrl.transport.tls import client_context
from streamrl.waits import Retry

Message = TypeVar("Message", bound=msgspec.Struct)
Reply = TypeVar("Reply")
Method = Callable[["ControlClient", Message], Coroutine[Any, Any, Reply]]

log = logging.getLogger(__name__)

PLACE_TAKEN = 423
"""HTTP status: a live process has the number already."""
GONE_BACK = 410
"""HTTP status: the run has gone back to a checkpoint, and the registering model worker started from another one."""
TAKEN_ASK_SECONDS = 1.0
"""Delay between two attempts to register under a taken number."""
TAKEN_MARGIN_SECONDS = 2.0
CONNECT_SECONDS = 10.0
"""If the connection is not accepted or refused within this time, log a warning and retry the call."""
INCOMPLETE_SECONDS = 0.5
"""Delay between two requests for the registered processes: the manager of a run that is over replies at once."""
HEARTBEAT_SECONDS = 4.0
"""Maximum wait for the reply to one heartbeat. After an interruption of the network, TCP retries on an old connection
only after pauses up to the length of the interruption; a new request connects within seconds."""
PATIENCE_SECONDS = 120.0
"""How long a call is retried after its first failure: a dead controller is restarted within this time."""
UNKNOWN = 401
"""HTTP status: the caller's token or secret is not, or no longer, known."""


def _method(path: str, message: type[Message], reply: type[Reply], *, once: bool = False) -> Method[Message, Reply]:
    """Return the method for a call that is sent once, or retried until it succeeds."""

    async def call(client: ControlClient, body: Message) -> Reply:
        return await (client._call if once else client._patiently)(path, body, reply)

    return call


class ControlClient:
    """Calls the manager. A process has one client; `close` it at the end, or use `async with`."""

    def __init__(
        self,
        url: str,
        *,
        secret: Secret | None = None,
        timeout: float = 60.0,
        security: SecurityConfig = SecurityConfig(),  # noqa: B008 (frozen)
    ) -> None:
        """`secret`: the run's secret. The client joins with it, and makes all calls with it until it receives a
        `token`. `security`: the run's settings; unless they disable encryption, http:// means https:// if `url` is not
        a loopback address."""
        parts = urlsplit(url)
        if parts.scheme == "http" and security.encryption != "off" and not is_loopback(parts.hostname or ""):
            url = urlunsplit(parts._replace(scheme="https"))
        self.url = url.rstrip("/")
        self._tls = client_context(secret, security) if self.url.startswith("https:") else None
        self._secret = secret
        self.token = ""
        """Token that the process received when it joined; empty: it has not joined."""
        self._shown = secret.shown if secret is not None else ""
        self._timeout = timeout
        self._session: aiohttp.ClientSession | None = None

    @classmethod
    def of(cls, config: Config, url: str, *, timeout: float = 60.0) -> ControlClient:
        """Return a client of the manager at `url` for a process with this configuration."""
        return cls(url, secret=of_run_at(url, config), timeout=timeout, security=config.security)

    def receiver_keys(self, role: control.Role) -> ReceiverKeys:
        """Return the keys of a receiver of `role` on ZMQ. Raises `ConfigError` if this process has no secret."""
        if self._secret is None:
            raise ConfigError(
                f"the secret of the run at {self.url} was not found here: set STREAMRL_SECRET or security.secret_file "
                "(docs/security.md)"
            )
        return ReceiverKeys.derive(self._secret, role)

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def register(self, message: control.Register, *, patience: float) -> control.RegisterReply:
        """Join the run; keep trying for `patience` seconds until the manager is there.

        If another process has the number, wait for its end; raise `PeerError` (423) if it is still alive after the time
        in which a dead one would have been detected. Later calls use the token from the reply.
        """
        given_up_at = None
        while True:
            try:
                reply = await self._join("/register", message, control.RegisterReply, patience=patience)
                break
            except PeerError as error:
                now = time.monotonic()
                if error.status != PLACE_TAKEN or (given_up_at is not None and now >= given_up_at):
                    raise
                if given_up_at is None:
                    log.warning("%s; waiting up to %.0f s for it to be gone", error, error.retry_seconds)
                    given_up_at = now + error.retry_seconds + TAKEN_MARGIN_SECONDS
                await asyncio.sleep(min(TAKEN_ASK_SECONDS, max(0.05, given_up_at - now)))
        self.token = reply.token
        return reply

    async def place(self, message: control.AskPlace, *, patience: float) -> int:
        """Return a free number beyond the configured ones; it is reserved until the caller registers.

        Keep trying for `patience` seconds until the manager is there.
        """
        return (await self._join("/place", message, control.IndexReservation, patience=patience)).index

    async def resume_point(self, *, patience: float) -> control.ResumePoint:
        """Return the checkpoint that the run resumes from; keep trying for `patience` seconds while the manager is
        missing, or belongs to a run that is over."""
        again = (HTTPStatus.CONFLICT,)
        return await self._join("/resume_point", None, control.ResumePoint, patience=patience, again=again)

    async def model(self, *, patience: float) -> control.ModelListing:
        """Return the files of the run's model; keep trying for `patience` seconds until the manager is there."""
        return await self._join("/model", None, control.ModelListing, patience=patience)

    async def model_part(self, name: str, begin: int) -> control.ModelPart:
        """Return bytes of a file of the model, starting at byte `begin`."""
        return await self._patiently(f"/model/part?name={quote(name)}&begin={begin}", None, control.ModelPart)

    async def silence(self, after: int) -> control.Silence:
        """Return the silent processes once their set has changed more than `after` times, or after a long poll."""
        timeout = control.LONG_POLL_SECONDS + self._timeout
        return await self._call(f"/silent?after={after}", None, control.Silence, timeout=timeout)

    async def topology(self, role: control.Role, count: int, *, patience: float) -> list[control.Peer]:
        """Return the addresses of the first `count` processes of `role`, once all have registered."""
        deadline = time.monotonic() + patience
        while True:
            wait = min(control.LONG_POLL_SECONDS, max(0.0, deadline - time.monotonic()))
            path = f"/topology?role={role}&count={count}&wait={wait:.3f}"
            reply = await self._patiently(path, None, control.Topology)
            if len(reply.peers) == count:
                return reply.peers
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(
                    f"{len(reply.peers)} of {count} {role} processes registered within {patience:.0f} s; "
                    "look at the others' logs, or start them"
                )
            await asyncio.sleep(INCOMPLETE_SECONDS)

    async def admit(self, message: control.Admit) -> control.AdmitReply:
        """Return groups to start. Retries use the same ticket, so no group is given twice and none is lost."""
        ticketed = msgspec.structs.replace(message, ticket=uuid.uuid4().hex)
        return await self._patiently("/admit", ticketed, control.AdmitReply)

    async def gserver_places(self) -> control.GserverPlaces:
        """Return the machines and GPUs of the gservers."""
        return await self._patiently("/publish/places", None, control.GserverPlaces)

    async def publish_begin(self, message: control.PublishBegin, *, timeout: float) -> control.PublishBeginReply:
        """Begin a weight update; return how its weights are to be sent. May be retried: a second call rolls the first
        one back."""
        path, reply = "/publish/begin", control.PublishBeginReply
        return await self._patiently(path, message, reply, timeout=timeout, again=())

    async def publish_commit(self, message: control.PublishCommit, *, timeout: float) -> control.PublishReply:
        """End this side of a weight update; return its result. May be retried: a second call returns the same."""
        path, reply = "/publish/commit", control.PublishReply
        return await self._patiently(path, message, reply, timeout=timeout, again=())

    async def finish_run(self, message: control.FinishRun, *, patience: float | None = None) -> None:
        """End the run."""
        await self._patiently("/finish_run", message, control.Done, patience=patience)

    async def status(self) -> control.Status:
        """Return the manager's view of the run."""
        return await self._call("/status", None, control.Status)

    async def heartbeat(self, message: control.Heartbeat, *, patience: float = 0.0) -> control.HeartbeatReply:
        """Report that the caller is alive; retried for `patience` seconds."""
        return await self._patiently(
            "/heartbeat",
            message,
            control.HeartbeatReply,
            what=f"the heartbeat of {message.role}/{message.index}",
            patience=patience,
            again=(HTTPStatus.CONFLICT,),
            timeout=min(HEARTBEAT_SECONDS, patience / 3) or None,
        )

    drain = _method("/drain", control.Drain, control.Done, once=True)
    leave = _method("/leave", control.Leave, control.Done, once=True)
    steer = _method("/steer", control.Steer, control.SteerReply, once=True)
    fail_run = _method("/fail_run", control.FailRun, control.Done)
    held_out_result = _method("/evaluation", control.HeldOutResult, control.Done)
    keep = _method("/keep", control.Keep, control.KeepReply)
    in_flight = _method("/in_flight", control.InFlight, control.InFlightReply)
    reject = _method("/reject", control.Reject, control.Done)
    route = _method("/route", control.AskRoute, control.RouteReply)

    @property
    def _passing(self) -> Collection[int]:
        """HTTP errors that may pass: a restarted controller knows its members again after they register again."""
        return (HTTPStatus.CONFLICT, UNKNOWN) if self.token else (HTTPStatus.CONFLICT,)

    async def _join(
        self,
        path: str,
        body: msgspec.Struct | None,
        reply: type[Reply],
        *,
        patience: float,
        again: Collection[int] = (),
    ) -> Reply:
        """Make a call of a process that is about to join, as the owner, even if it was a member before."""
        what = f"{http.method_of(body)} {path} at the manager at {self.url} (is it running there, and its port open?)"
        return await self._patiently(path, body, reply, what=what, patience=patience, again=again, joins=True)

    async def _patiently(
        self,
        path: str,
        body: msgspec.Struct | None,
        reply: type[Reply],
        *,
        what: str = "",
        patience: float | None = None,
        again: Collection[int] | None = None,
        timeout: float | None = None,
        joins: bool = False,
    ) -> Reply:
        """Call until success; raise the last error if it still fails `patience` seconds after the first failure (None:
        `PATIENCE_SECONDS`).

        Errors that may pass are retried: no connection, no reply in time, a fault of the manager, and the statuses in
        `again` (None: `_passing`). `what` names the call in the log.
        """
        what = what or f"{http.method_of(body)} {path}"
        again = self._passing if again is None else again
        retry = Retry(what, patience=PATIENCE_SECONDS if patience is None else patience)
        while True:
            try:
                found = await self._call(path, body, reply, timeout=timeout, joins=joins)
            except NotOfRun:
                raise
            except (PeerError, DeadlineExceeded) as error:
                if isinstance(error, PeerError) and 400 <= error.status < 500 and error.status not in again:
                    raise
                if not await retry.pause(error):
                    if patience != 0:
                        error.args = (f"{what}: {error}; tried again for {retry.failing_seconds:.0f} s",)
                    raise
            else:
                retry.succeeded()
                return found

    async def _call(
        self,
        path: str,
        body: msgspec.Struct | None,
        reply: type[Reply],
        *,
        timeout: float | None = None,
        joins: bool = False,
    ) -> Reply:
        """Make a call once; `joins`: with the run's secret in place of the token."""
        if self._session is None:
            self._session = http.new_session(self._tls, connect_seconds=CONNECT_SECONDS)
        return await http.call(
            self._session,
            self.url + path,
            body,
            reply,
            timeout=timeout or self._timeout,
            peer="the manager",
            headers=bearer(self._shown if joins else self.token or self._shown),
            confidential=reply is control.RegisterReply,
        )
