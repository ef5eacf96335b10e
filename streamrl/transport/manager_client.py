"""The client of the manager that every other process uses.

Calls that may be made twice are made again until the manager answers, for `PATIENCE_SECONDS`: nobody else has to.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Collection
from http import HTTPStatus
from typing import TypeVar
from urllib.parse import quote, urlsplit, urlunsplit

import aiohttp
import msgspec

from streamrl.config import Config, SecurityConfig
from streamrl.errors import DeadlineExceeded, NotOfRun, PeerError
from streamrl.retry import Retry
from streamrl.transport import http
from streamrl.transport.addresses import is_loopback
from streamrl.transport.control import (
    LONG_POLL_SECONDS,
    Admit,
    AdmitReply,
    AskMember,
    AskPlace,
    AskRoute,
    Compare,
    Done,
    Drain,
    FailRun,
    FinishRun,
    GserverPlaces,
    Heartbeat,
    HeartbeatReply,
    HeldOutResult,
    InFlight,
    InFlightReply,
    IsMember,
    Keep,
    KeepReply,
    Leave,
    ModelListing,
    ModelPart,
    Peer,
    Place,
    PublishBegin,
    PublishBeginReply,
    PublishCommit,
    PublishReply,
    Register,
    RegisterReply,
    Reject,
    ResumePoint,
    Role,
    RouteReply,
    Silence,
    Status,
    Topology,
)
from streamrl.transport.keys import bearer
from streamrl.transport.secret import Secret, of_run_at
from streamrl.transport.tls import client_context

Reply = TypeVar("Reply")

log = logging.getLogger(__name__)

PLACE_TAKEN = 423
"""HTTP status: another process has the place, and lives."""
GONE_BACK = 410
"""HTTP status: the run has gone back to a checkpoint, from which the model worker that registers does not begin."""
TAKEN_ASK_SECONDS = 1.0
"""Between two questions whether it is free."""
TAKEN_MARGIN_SECONDS = 2.0
CONNECT_SECONDS = 10.0
"""After this long without any answer, not even a refusal, a warning is logged and the call is tried again."""
INCOMPLETE_SECONDS = 0.5
"""Between two questions who has registered: the manager of a run that is over holds none of them."""
HEARTBEAT_SECONDS = 4.0
"""Longest wait for the reply to one heartbeat. After an interruption of the network, TCP resends over an old connection
with pauses of up to the length of the interruption; another request connects again, within seconds."""
PATIENCE_SECONDS = 120.0
"""How long after its first failure a call is tried again: a controller that has died is started again within that."""
UNKNOWN = 401
"""HTTP status: what the caller shows is not known, or not any more."""


async def patiently(
    call: Callable[[], Awaitable[Reply]], *, what: str, patience: float, again: Collection[int] = (HTTPStatus.CONFLICT,)
) -> Reply:
    """Make `call` until it succeeds; raises its last error when it still fails `patience` seconds after it did first.

    Tried again is what may pass: no connection, no answer in time, a fault of the peer, and a refusal with one of the
    statuses `again`. `what` names the call in the log.
    """
    retry = Retry(what, patience=patience)
    while True:
        try:
            reply = await call()
        except NotOfRun:
            raise
        except (PeerError, DeadlineExceeded) as error:
            if isinstance(error, PeerError) and 400 <= error.status < 500 and error.status not in again:
                raise
            if not await retry.pause(error):
                if patience:
                    error.args = (f"{what}: {error}; tried again for {retry.failing_seconds:.0f} s",)
                raise
        else:
            retry.succeeded()
            return reply


class ControlClient:
    """Calls the manager. One for each process; `close` it at the end."""

    def __init__(
        self,
        url: str,
        *,
        secret: Secret | None = None,
        timeout: float = 60.0,
        security: SecurityConfig = SecurityConfig(),  # noqa: B008 (frozen)
    ) -> None:
        """`secret`: the run's. With it the client joins, and makes all calls until it has another `token`. `security`:
        of the run; unless it says that nothing is encrypted, http:// stands for https:// where `url` is no loopback
        address."""
        parts = urlsplit(url)
        if parts.scheme == "http" and security.encryption != "off" and not is_loopback(parts.hostname or ""):
            url = urlunsplit(parts._replace(scheme="https"))
        self.url = url.rstrip("/")
        self._tls = client_context(secret, security) if self.url.startswith("https:") else None
        self.token = ""
        """What the process was given when it joined; empty: it has not joined."""
        self._shown = secret.shown if secret is not None else ""
        self._timeout = timeout
        self._session: aiohttp.ClientSession | None = None

    @classmethod
    def of(cls, config: Config, url: str, *, timeout: float = 60.0) -> ControlClient:
        """Return a client of the manager at `url` for a process with this configuration."""
        return cls(url, secret=of_run_at(url, config), timeout=timeout, security=config.security)

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    async def register(self, message: Register, *, patience: float) -> RegisterReply:
        """Join the run; keeps trying for `patience` seconds while the manager is not there yet.

        Where another process has the place, waits until that is gone; raises `PeerError` (423) when it is not gone in
        the time in which a dead one would be. From then on the client shows the token that the reply brings.
        """
        what = f"registering with the manager at {self.url} (is it running there, and its port open?)"
        given_up_at = None
        while True:
            try:
                reply = await patiently(
                    lambda: self._join("/register", message, RegisterReply),
                    what=what,
                    patience=patience,
                    again=(),
                )
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

    async def place(self, message: AskPlace, *, patience: float) -> int:
        """Return a number beyond the configured ones that nobody has; it is kept until the caller registers.

        Keeps trying for `patience` seconds while the manager is not there yet.
        """
        what = f"asking the manager at {self.url} for a place (is it running there?)"
        place = await patiently(lambda: self._join("/place", message, Place), what=what, patience=patience, again=())
        return place.index

    async def resume_point(self, *, patience: float) -> ResumePoint:
        """Return what the run goes on from; keeps trying for `patience` seconds while the manager is not there yet, or
        is that of a run which is over."""
        what = f"asking the manager at {self.url} what the run goes on from (is it running there?)"
        return await patiently(lambda: self._get("/resume_point", ResumePoint), what=what, patience=patience)

    async def model(self, *, patience: float) -> ModelListing:
        """Return the files of the run's model; keeps trying for `patience` seconds while the manager is not there."""
        what = f"asking the manager at {self.url} for the model (is it running there?)"
        return await patiently(lambda: self._get("/model", ModelListing), what=what, patience=patience, again=())

    async def model_part(self, name: str, begin: int) -> ModelPart:
        """Return bytes of a file of the model from `begin` on."""
        return await self._get_patiently(f"/model/part?name={quote(name)}&begin={begin}", ModelPart)

    async def drain(self, message: Drain) -> None:
        """Have a gserver or a rollout worker finish what it has and leave."""
        await self._post("/drain", message, Done)

    async def is_member(self, curve_key: str) -> bool:
        """Whether a CURVE key is that of a member who may speak over ZMQ."""
        return (await self._post("/member", AskMember(curve_key), IsMember)).known

    async def leave(self, message: Leave) -> None:
        """Tell the manager that this process has left."""
        await self._post("/leave", message, Done)

    async def silence(self, after: int) -> Silence:
        """Return who is silent, once that has changed after the first `after` changes, or after a long poll."""
        return await self._get(f"/silent?after={after}", Silence, timeout=LONG_POLL_SECONDS + self._timeout)

    async def topology(self, role: Role, count: int, *, patience: float) -> list[Peer]:
        """Return the addresses of the first `count` processes of `role`, once all have registered."""
        deadline = time.monotonic() + patience
        while True:
            wait = min(LONG_POLL_SECONDS, max(0.0, deadline - time.monotonic()))
            reply = await self._get_patiently(f"/topology?role={role}&count={count}&wait={wait:.3f}", Topology)
            if reply.complete:
                return reply.peers
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(
                    f"{len(reply.peers)} of {count} {role} processes registered within {patience:.0f} s; "
                    "look at the others' logs, or start them"
                )
            await asyncio.sleep(INCOMPLETE_SECONDS)

    async def admit(self, message: Admit) -> AdmitReply:
        """Return groups to start. Tried again under the same ticket, which gives no group twice and loses none."""
        ticketed = msgspec.structs.replace(message, ticket=uuid.uuid4().hex)
        return await self._post_patiently("/admit", ticketed, AdmitReply)

    async def keep(self, message: Keep) -> KeepReply:
        """Return which groups in hand the worker may finish after the run has gone back."""
        return await self._post_patiently("/keep", message, KeepReply)

    async def route(self, message: AskRoute) -> RouteReply:
        """Return another gserver for a group whose gserver failed, or none after a long poll."""
        return await self._post_patiently("/route", message, RouteReply)

    async def in_flight(self, message: InFlight) -> InFlightReply:
        """Tell the manager what of a worker's groups is in flight; return when to report again."""
        return await self._post_patiently("/in_flight", message, InFlightReply)

    async def reject(self, message: Reject) -> None:
        """Give a group up."""
        await self._post_patiently("/reject", message, Done)

    async def held_out_result(self, message: HeldOutResult) -> None:
        """Send the result of a held-out prompt."""
        await self._post_patiently("/evaluation", message, Done)

    async def gserver_places(self) -> GserverPlaces:
        """Return on which machines and GPUs the gservers are."""
        return await self._get_patiently("/publish/places", GserverPlaces)

    async def publish_begin(self, message: PublishBegin, *, timeout: float) -> PublishBeginReply:
        """Begin a weight update; return how its weights are to be sent. Tried again: a second call rolls the first
        back."""
        return await self._post_patiently("/publish/begin", message, PublishBeginReply, timeout=timeout, again=())

    async def publish_commit(self, message: PublishCommit, *, timeout: float) -> PublishReply:
        """End this side of a weight update; return how the update went. Tried again: a second call returns the same."""
        return await self._post_patiently("/publish/commit", message, PublishReply, timeout=timeout, again=())

    async def compare(self, message: Compare) -> None:
        """Have the gservers score a response; does not wait for them."""
        await self._post("/compare", message, Done)

    async def finish_run(self, message: FinishRun, *, patience: float = PATIENCE_SECONDS) -> None:
        """End the run."""
        what = "POST /finish_run"
        await patiently(lambda: self._post("/finish_run", message, Done), what=what, patience=patience)

    async def fail_run(self, message: FailRun) -> None:
        """Have the run stop because of an error."""
        await self._post_patiently("/fail_run", message, Done)

    async def status(self) -> Status:
        """Return the run as the manager sees it."""
        return await self._get("/status", Status)

    @property
    def _passing(self) -> Collection[int]:
        """Refusals that may pass: a controller that was started again learns of its members as they register again."""
        return (HTTPStatus.CONFLICT, UNKNOWN) if self.token else (HTTPStatus.CONFLICT,)

    async def _post(
        self, path: str, body: msgspec.Struct, reply: type[Reply], *, timeout: float | None = None
    ) -> Reply:
        return await self._call("POST", path, body, reply, timeout or self._timeout)

    async def _join(self, path: str, body: msgspec.Struct, reply: type[Reply]) -> Reply:
        """Make a call of one who is to become a member, whatever this client was before."""
        return await self._call("POST", path, body, reply, self._timeout, key=self._shown)

    async def _post_patiently(
        self,
        path: str,
        message: msgspec.Struct,
        reply: type[Reply],
        *,
        timeout: float | None = None,
        again: Collection[int] | None = None,
    ) -> Reply:
        """`again`: as of `patiently`; None: `_passing`."""
        return await patiently(
            lambda: self._post(path, message, reply, timeout=timeout),
            what=f"POST {path}",
            patience=PATIENCE_SECONDS,
            again=self._passing if again is None else again,
        )

    async def _get_patiently(self, path: str, reply: type[Reply]) -> Reply:
        return await patiently(
            lambda: self._get(path, reply), what=f"GET {path}", patience=PATIENCE_SECONDS, again=self._passing
        )

    async def heartbeat(self, message: Heartbeat, *, patience: float = 0.0) -> HeartbeatReply:
        """Say that the caller lives; tried again for `patience` seconds."""
        timeout = min(HEARTBEAT_SECONDS, patience / 3) or None
        return await patiently(
            lambda: self._post("/heartbeat", message, HeartbeatReply, timeout=timeout),
            what=f"the heartbeat of {message.role}/{message.index}",
            patience=patience,
        )

    async def _get(self, path: str, reply: type[Reply], *, timeout: float | None = None) -> Reply:
        return await self._call("GET", path, None, reply, timeout or self._timeout)

    async def _call(
        self,
        method: str,
        path: str,
        body: msgspec.Struct | None,
        reply: type[Reply],
        timeout: float,
        *,
        key: str | None = None,
    ) -> Reply:
        """`key`: what is shown, instead of the token or what is derived from the secret."""
        if self._session is None:
            self._session = http.new_session(self._tls, connect_seconds=CONNECT_SECONDS)
        return await http.call(
            self._session,
            method,
            self.url + path,
            body,
            reply,
            timeout=timeout,
            peer="the manager",
            headers=bearer(key or self.token or self._shown),
            confidential=reply is RegisterReply,
        )
