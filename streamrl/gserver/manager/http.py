"""The manager behind its address, the run's one URL: bodies to Structs, errors to replies. It makes no decisions.

`managing` opens the `Manager` (`core.py`, the decisions) with this server; the controller (`streamrl/controller.py`)
also runs the trainer's master.

The head of a call identifies the caller. The body is read only if the caller may make the call.

| status | when |
|---|---|
| 400 | the body or the query does not fit the call |
| 401 | the caller shows no key, or an unknown one |
| 403 | the caller may not make the call, makes it in the name of another member, or is a web page |
| 404, 405 | there is no such call |
| 408, 413 | the body is too slow, or too large |
| 409 | the call makes sense but is refused; the message has the reason |
| 423 | another process has the place, and lives |
| 500 | a fault of the manager, logged with its traceback; it lives on |
"""

from __future__ import annotations

import errno
import logging
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Set
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Annotated, Any, NamedTuple, get_args

import msgspec
from aiohttp import web

from streamrl import essential
from streamrl.config import Config
from streamrl.disk import cache_home
from streamrl.errors import UNDECODABLE, PeerError, StreamRLError, WireError
from streamrl.gserver.manager.core import Manager
from streamrl.gserver.manager.registry import Member, check_speaker
from streamrl.gserver.manager.status import render
from streamrl.records.logs import RateLimitedLog
from streamrl.records.timeline import Timeline
from streamrl.transport import control
from streamrl.transport.addresses import Reach, everywhere, is_loopback, is_wildcard, reach_of_manager, url_of
from streamrl.transport.credentials import HEADER, generation_key
from streamrl.transport.generation import GenerationClient
from streamrl.transport.http import ErrorDetail, ErrorReply, Hosts, HttpServer, read_body
from streamrl.transport.secret import encrypts, left_for, of_new_run
from streamrl.transport.tls import client_context, server_context
from streamrl.waits import CLOSE_SECONDS, cancel

log = logging.getLogger(__name__)

HEALTH = "/health"

_JSON = {"Content-Type": "application/json"}
_encoder = msgspec.json.Encoder()

MAX_BODY_BYTES = 64 * 2**20
"""Large enough for a weight update, which names every tensor of the model."""


Count = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]


class SilenceQuery(msgspec.Struct, frozen=True):
    """Number of silences and returns that the caller knows."""

    after: Count = 0


class PartQuery(msgspec.Struct, frozen=True):
    """A file of the model, and the first byte that is wanted."""

    name: str = ""
    begin: Count = 0


class TopologyQuery(msgspec.Struct, frozen=True):
    """The first `count` processes of `role`, and how many seconds to wait for them."""

    role: control.Role
    count: Count = 1
    wait: Annotated[float, msgspec.Meta(ge=0)] = control.LONG_POLL_SECONDS


class Call(NamedTuple):
    """A call of the API."""

    handler: Callable[[Manager], Callable[..., Awaitable[msgspec.Struct | web.Response]]]
    """Returns the function that carries the call out."""
    message: type[msgspec.Struct] | None = None
    """The body of a POST, or the query of a GET; None if it has neither."""
    roles: Set[control.Role] = frozenset()
    """The roles that may make it, in addition to the owner."""


_ALL: Set[control.Role] = frozenset(get_args(control.Role))
_ROLLOUT: Set[control.Role] = {"rollout"}
_MODEL_WORKER: Set[control.Role] = {"model_worker"}

CALLS: Mapping[str, Call] = {
    # a process joins; rejected if its configuration differs
    "POST /register": Call(lambda manager: manager.members.register, control.Register),
    # the checkpoint that the run resumes from
    "GET /resume_point": Call(lambda manager: manager.members.resume_point),
    # a number for a process that joins a running run
    "POST /place": Call(lambda manager: manager.members.place, control.AskPlace),
    # a gserver or rollout worker finishes and leaves; the controller saves and ends the run
    "POST /drain": Call(lambda manager: manager.members.drain, control.Drain),
    # the process has left
    "POST /leave": Call(lambda manager: manager.members.left, control.Leave, roles={"gserver", "rollout"}),
    # a sign of life, with figures; the reply contains whether to stop
    "POST /heartbeat": Call(lambda manager: manager.members.heartbeat, control.Heartbeat, _ALL),
    # the silent processes, once their set has changed more than n times
    "GET /silent": Call(lambda manager: lambda query: manager.members.silence(query.after), SilenceQuery),
    # the files of the model, for a host that does not have it, and bytes of one of these files
    "GET /model": Call(lambda manager: manager.model.listing, roles=_ALL),
    "GET /model/part": Call(lambda manager: lambda part: manager.model.part(part.name, part.begin), PartQuery, _ALL),
    # waits until the named processes are registered; their addresses
    "GET /topology": Call(
        lambda manager: lambda query: manager.members.topology(query.role, query.count, wait=query.wait),
        TopologyQuery,
        roles={"rollout", "model_worker"},
    ),
    # after the run went back to a checkpoint: the groups in hand that the worker may finish
    "POST /keep": Call(lambda manager: manager.groups.keep, control.Keep, _ROLLOUT),
    # waits for room in the ledger, or for a held-out prompt; sequence numbers and gservers
    "POST /admit": Call(lambda manager: manager.groups.admit, control.Admit, _ROLLOUT),
    # another gserver for a group whose gserver failed
    "POST /route": Call(lambda manager: manager.groups.route, control.AskRoute, _ROLLOUT),
    # how many requests of the worker's groups still run
    "POST /in_flight": Call(lambda manager: manager.groups.in_flight, control.InFlight, _ROLLOUT),
    # a group is given up
    "POST /reject": Call(lambda manager: manager.groups.reject, control.Reject, _ROLLOUT),
    # the result of a held-out prompt
    "POST /evaluation": Call(lambda manager: manager.groups.held_out_result, control.HeldOutResult, _ROLLOUT),
    # stops the run because of an error in the worker
    "POST /fail_run": Call(lambda manager: manager.fail_run, control.FailRun, _ROLLOUT),
    # the two ends of a weight update
    "POST /publish/begin": Call(lambda manager: manager.weights.begin, control.PublishBegin, _MODEL_WORKER),
    "POST /publish/commit": Call(lambda manager: manager.weights.commit, control.PublishCommit, _MODEL_WORKER),
    # on which machines and GPUs the gservers are
    "GET /publish/places": Call(lambda manager: manager.weights.places, roles=_MODEL_WORKER),
    # changes the staleness, pauses admission, requests a checkpoint
    "POST /steer": Call(lambda manager: manager.steer, control.Steer),
    # the run is over; every process receives `stop` with its next heartbeat
    "POST /finish_run": Call(lambda manager: manager.finish_run, control.FinishRun),
    # the run's state as JSON, and figures for Prometheus
    "GET /status": Call(lambda manager: lambda: _status(manager), roles=_ALL),
    "GET /metrics": Call(lambda manager: lambda: _metrics(manager), roles=_ALL),
    # whether the controller lives; any caller may ask
    f"GET {HEALTH}": Call(lambda manager: _health),
}
"""All calls."""
LOOKS = frozenset({"GET /status", "GET /metrics"})
"""Read-only calls that reveal no secret: on a loopback address any caller may make them."""


def server(manager: Manager, *, hosts: Hosts, on_loopback: bool) -> HttpServer:
    """Return a server for all calls of `transport/control.py`, which checks each caller's permission (`Access`).

    `on_loopback`: whether only this machine reaches the server.
    """
    routes = {key: _Route(key, call, manager) for key, call in CALLS.items()}
    warnings = RateLimitedLog(log)

    def check(key: str, request: web.BaseRequest) -> tuple[_Route, Member | None]:
        """Return the call that `request` makes, and the member that makes it; None for the owner, and for any caller
        where that is allowed. Raises `PeerError` or `WireError` if its head alone is refused."""
        route, headers = routes.get(key), request.headers
        if not request.raw_path.startswith("/"):
            raise WireError(f"this is no request to a path: {request.raw_path[:100]!r}")
        if route is None:
            if methods := [known.partition(" ")[0] for known in CALLS if known.endswith(f" {request.path}")]:
                raise PeerError(f"{key}: use {' or '.join(methods)}", status=405)
            raise PeerError(f"{key}: the manager has no such call", status=404)
        if why := hosts.forged(headers.get("Host"), headers.get("Origin")):
            raise PeerError(f"{key}: {why}", status=403)
        if request.path == HEALTH or (on_loopback and key in LOOKS):
            return route, None
        shown = headers.get(HEADER, "")
        caller = manager.access.caller(shown)
        if caller is None:
            warnings.warning("refused %s of a caller with %s", key, "a wrong key" if shown else "no key")
            raise PeerError(f"{key}: {_WRONG_KEY if shown else _NO_KEY}", status=401)
        if not isinstance(caller, Member):
            return route, None
        if caller.role not in CALLS[key].roles:
            raise PeerError(
                f"{key}: this is no call of a {caller.role}, and {caller.name} makes it (process {caller.pid} on "
                f"{caller.host})",
                status=403,
            )
        return route, caller

    async def handle(request: web.BaseRequest) -> web.Response:
        key = f"{request.method} {request.path}"
        try:
            route, member = check(key, request)
            return await route.carry_out(request, member)
        except WireError as error:
            return _refuse(400, str(error))
        except PeerError as error:
            if error.status == 403:
                warnings.warning("refused %s: %s", key, error)
            return _refuse(error.status or 409, str(error), retry_seconds=error.retry_seconds)
        except StreamRLError as error:
            return _refuse(409, str(error))
        except Exception as error:  # the tolerance point: one faulty call must not end the run
            log.exception("%s failed", key)
            return _refuse(500, f"the manager failed at this call, see its log: {type(error).__name__}: {error}")

    return HttpServer(handle, most_body_bytes=MAX_BODY_BYTES)


class _Route:
    """One call at one manager."""

    def __init__(self, key: str, call: Call, manager: Manager) -> None:
        self._key = key
        self._message = call.message
        self._decoder = msgspec.json.Decoder(call.message)
        self._handler = call.handler(manager)

    async def carry_out(self, request: web.BaseRequest, member: Member | None) -> web.Response:
        """Carry the call out for `member`, or for the owner if None."""
        if self._message is None:
            reply = await self._handler()
        else:
            message = await self._read(request)
            if member is not None:
                if member.gone:
                    raise PeerError(f"{self._key}: {_WRONG_KEY}", status=401)  # lost while the body came
                check_speaker(member, message)
            reply = await self._handler(message)
        return reply if isinstance(reply, web.Response) else _json(reply)

    async def _read(self, request: web.BaseRequest) -> Any:
        """Return the message of the call; raises `WireError` if it is malformed."""
        assert self._message is not None
        body = await read_body(request) if request.method == "POST" else b""
        try:
            if request.method == "POST":
                return self._decoder.decode(body)
            return msgspec.convert(dict(request.query), self._message, strict=False)
        except UNDECODABLE as error:
            given = body[:200] or request.query_string[:200]
            raise WireError(f"{self._key} takes a {self._message.__name__}: {error}; it got {given!r}") from error


_NO_KEY = (
    "this call needs the run's secret: set STREAMRL_SECRET or security.secret_file on the caller's machine to the "
    "manager's (docs/security.md)"
)
_WRONG_KEY = (
    "the key is not of this run: either the secret (STREAMRL_SECRET, security.secret_file) belongs to another run, or "
    "another process has taken this one's place"
)


async def _status(manager: Manager) -> control.Status:
    return manager.status()


async def _metrics(manager: Manager) -> web.Response:
    admitted, paused = manager.admissions.admitted, manager.weights.pause_seconds_total
    content = render(manager.status(), admitted=admitted, pause_seconds_total=paused)
    return web.Response(body=content, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


async def _health() -> web.Response:
    return web.Response(body=b"")


def _refuse(status: int, message: str, *, retry_seconds: float = 0.0) -> web.Response:
    return _json(ErrorReply(ErrorDetail(message, retry_seconds)), status=status)


def _json(content: Any, *, status: int = 200) -> web.Response:
    return web.Response(body=_encoder.encode(content), status=status, headers=_JSON)


# --- the server ---


class ManagerService(NamedTuple):
    """A listening manager."""

    manager: Manager
    url: str
    reach: Reach
    """The addresses by which others reach this process."""


@asynccontextmanager
async def managing(config: Config, *, host: str, port: int, advertise: str = "") -> AsyncIterator[ManagerService]:
    """Manage a run until the context ends.

    `advertise`: the address by which others reach the manager; if empty, `host`, or if `host` stands for all addresses
    of this machine, the address from which this machine reaches others. Raises `StreamRLError` if the manager cannot
    listen at the address, `ConfigError` for a secret that cannot be used.
    """
    secret = of_new_run(config)
    reach = reach_of_manager(host, advertise=advertise)
    async with AsyncExitStack() as stack:
        client = GenerationClient(
            timeout=config.limits.update_seconds,
            key=generation_key(config, secret),
            tls=client_context(secret, config.security),
        )
        stack.push_async_callback(client.close)
        timeline = Timeline(config.run_dir)
        stack.callback(timeline.close)
        manager = Manager(config, client=client, timeline=timeline, secret=secret, open_to_others=not reach.loopback)
        hosts = Hosts([host, advertise, *config.security.host_names])
        listener = server(manager, hosts=hosts, on_loopback=is_loopback(host))
        stack.push_async_callback(listener.close, patience=CLOSE_SECONDS)
        stack.push_async_callback(manager.close)
        tls = server_context(secret, config.security) if encrypts(config, host) else None
        url = await _listen(listener, host, port, reach, advertised=bool(advertise), tls=tls)
        if stack.enter_context(left_for(url, secret)) is None:
            log.warning("the run's secret cannot be left in %s: processes that join by hand need it", cache_home())
        log.info("the controller of run %r listens at %s", config.run.name, url)
        watching = essential.begin(manager.watch(), name="the watch over leases and silences")
        try:
            yield ManagerService(manager, url, reach)
        finally:
            await cancel(watching)


async def _listen(
    server: HttpServer, host: str, port: int, reach: Reach, *, advertised: bool, tls: ssl.SSLContext | None
) -> str:
    """Listen, and return the URL, with `reach.announced` if that was given (`advertised`)."""
    try:
        address, bound = await server.listen(everywhere(reach.local) if is_wildcard(host) else host, port, tls=tls)
    except OSError as error:
        advice = (
            "is another one running there? choose another run.port, or 0 for any"
            if error.errno == errno.EADDRINUSE
            else "run.host is an address of this machine (::1 if it has none of IPv4), or 0.0.0.0 or :: for all of them"
        )
        raise StreamRLError(
            f"the controller cannot listen at {host}:{port} ({error.strerror or error}); {advice}"
        ) from error
    if is_loopback(address) and not is_loopback(host):
        log.warning("run.host = %r stands for %s here, which no other machine reaches: give an address", host, address)
    announced = reach.announced if advertised or is_wildcard(host) else address
    return url_of(announced, bound, scheme="http" if tls is None else "https")
