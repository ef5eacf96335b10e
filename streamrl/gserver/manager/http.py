"""The manager's HTTP layer: bodies to Structs, errors to replies. It makes no decisions.

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

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple, get_args

import msgspec
from aiohttp import web

from streamrl.errors import UNDECODABLE, PeerError, StreamRLError, WireError
from streamrl.gserver.manager.access import check_speaker
from streamrl.gserver.manager.core import Manager
from streamrl.gserver.manager.registry import Member
from streamrl.gserver.manager.status import render
from streamrl.rate_limited_log import RateLimitedLog
from streamrl.transport import control
from streamrl.transport.http import ErrorDetail, ErrorReply, Hosts, HttpServer, read_body
from streamrl.transport.keys import HEADER
from streamrl.transport.permissions import ALLOWED, LOOKS, Permission

log = logging.getLogger(__name__)

HEALTH = "/health"
_ANYONE = Permission(frozenset())

_JSON = {"Content-Type": "application/json"}
_encoder = msgspec.json.Encoder()

MAX_BODY_BYTES = 64 * 2**20
"""Large enough for a weight update, which names every tensor of the model."""


class Post(NamedTuple):
    """A call with a body."""

    body: type[msgspec.Struct]
    handler: Callable[[Manager], Callable[[Any], Awaitable[msgspec.Struct]]]
    """Returns the method of the manager's part that carries the call out."""


POSTS: Mapping[str, Post] = {
    "/register": Post(control.Register, lambda manager: manager.members.register),
    "/place": Post(control.AskPlace, lambda manager: manager.members.place),
    "/drain": Post(control.Drain, lambda manager: manager.members.drain),
    "/leave": Post(control.Leave, lambda manager: manager.members.left),
    "/heartbeat": Post(control.Heartbeat, lambda manager: manager.members.heartbeat),
    "/admit": Post(control.Admit, lambda manager: manager.groups.admit),
    "/keep": Post(control.Keep, lambda manager: manager.groups.keep),
    "/route": Post(control.AskRoute, lambda manager: manager.groups.route),
    "/in_flight": Post(control.InFlight, lambda manager: manager.groups.in_flight),
    "/reject": Post(control.Reject, lambda manager: manager.groups.reject),
    "/publish/begin": Post(control.PublishBegin, lambda manager: manager.weights.begin),
    "/publish/commit": Post(control.PublishCommit, lambda manager: manager.weights.commit),
    "/evaluation": Post(control.HeldOutResult, lambda manager: manager.groups.held_out_result),
    "/steer": Post(control.Steer, lambda manager: manager.steer),
    "/finish_run": Post(control.FinishRun, lambda manager: manager.finish_run),
    "/fail_run": Post(control.FailRun, lambda manager: manager.fail_run),
}


def server(manager: Manager, *, hosts: Hosts, on_loopback: bool) -> HttpServer:
    """Return a server for all calls of `transport/control.py`, which checks each caller's permission (`access.py`).

    `on_loopback`: whether only this machine reaches the server.
    """
    calls = _calls(manager)
    warnings = RateLimitedLog(log)

    def check(key: str, request: web.BaseRequest) -> _RouteCall:
        """Return the call that `request` makes; raises `PeerError` or `WireError` if its head alone is refused."""
        route, headers = calls.get(key), request.headers
        if not request.raw_path.startswith("/"):
            raise WireError(f"this is no request to a path: {request.raw_path[:100]!r}")
        if route is None:
            if methods := [known.partition(" ")[0] for known in calls if known.endswith(f" {request.path}")]:
                raise PeerError(f"{key}: use {' or '.join(methods)}", status=405)
            raise PeerError(f"{key}: the manager has no such call", status=404)
        if why := hosts.forged(headers.get("Host"), headers.get("Origin")):
            raise PeerError(f"{key}: {why}", status=403)
        if request.path == HEALTH or (on_loopback and key in LOOKS):
            return _RouteCall(request, None, route)
        shown = headers.get(HEADER, "")
        caller = manager.access.caller(shown)
        if caller is None:
            warnings.warning("refused %s of a caller with %s", key, "a wrong key" if shown else "no key")
            raise PeerError(f"{key}: {_WRONG_KEY if shown else _NO_KEY}", status=401)
        if not isinstance(caller, Member):
            return _RouteCall(request, None, route)
        if caller.role not in route.allowed.roles:
            raise PeerError(
                f"{key}: this is no call of a {caller.role}, and {caller.name} makes it (process {caller.pid} on "
                f"{caller.host})",
                status=403,
            )
        return _RouteCall(request, caller, route)

    async def handle(request: web.BaseRequest) -> web.Response:
        key = f"{request.method} {request.path}"
        try:
            call = check(key, request)
            return await call.route.handler(call)
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


class _RouteCall(NamedTuple):
    request: web.BaseRequest
    member: Member | None
    """The member of the run that makes the call; None: the owner, or any caller where that is allowed."""
    route: _Route


class _Route(NamedTuple):
    handler: _Handler
    allowed: Permission


_Handler = Callable[[_RouteCall], Awaitable[web.Response]]

_NO_KEY = (
    "this call needs the run's secret: set STREAMRL_SECRET or security.secret_file where it comes from to what the "
    "manager has (docs/security.md)"
)
_WRONG_KEY = (
    "the key that was shown is not of this run: either the secret (STREAMRL_SECRET, security.secret_file) is that of "
    "another run, or another process has taken this one's place"
)


def _calls(manager: Manager) -> dict[str, _Route]:
    """Return the calls by method and path."""
    members, weights = manager.members, manager.weights
    gets: Mapping[str, Callable[[web.BaseRequest], Awaitable[msgspec.Struct]]] = {
        "/publish/places": lambda request: weights.places(),
        "/silent": lambda request: members.silence(_count(request, "after")),
        "/resume_point": lambda request: members.resume_point(),
        "/model": lambda request: manager.model.listing(),
        "/model/part": lambda request: manager.model.part(request.query.get("name", ""), _count(request, "begin")),
        "/topology": lambda request: members.topology(
            _role(request), _count(request, "count", 1), wait=_number(request, "wait", control.LONG_POLL_SECONDS)
        ),
    }
    handlers = {f"GET {path}": _get(call) for path, call in gets.items()}
    handlers |= {f"POST {path}": _post(post.body, post.handler(manager)) for path, post in POSTS.items()}
    handlers |= {"GET /status": _status(manager), "GET /metrics": _metrics(manager), f"GET {HEALTH}": _health}
    return {key: _Route(handler, ALLOWED.get(key, _ANYONE)) for key, handler in handlers.items()}


def _post(body: type[msgspec.Struct], call: Callable[[Any], Awaitable[msgspec.Struct]]) -> _Handler:
    decoder = msgspec.json.Decoder(body)

    async def handle(made: _RouteCall) -> web.Response:
        content = await read_body(made.request)
        if made.member is not None and made.member.gone:
            raise PeerError(f"POST {made.request.path}: {_WRONG_KEY}", status=401)  # lost while the body came
        try:
            message = decoder.decode(content)
        except UNDECODABLE as error:
            raise WireError(
                f"POST {made.request.path} takes a {body.__name__} as JSON: {error}; it got {content[:200]!r}"
            ) from error
        if made.member is not None:
            check_speaker(made.member, made.route.allowed, message)
        return _json(await call(message))

    return handle


def _get(call: Callable[[web.BaseRequest], Awaitable[msgspec.Struct]]) -> _Handler:
    async def handle(made: _RouteCall) -> web.Response:
        return _json(await call(made.request))

    return handle


def _status(manager: Manager) -> _Handler:
    async def handle(made: _RouteCall) -> web.Response:
        return _json(manager.status())

    return handle


def _metrics(manager: Manager) -> _Handler:
    async def handle(made: _RouteCall) -> web.Response:
        admitted, paused = manager.admissions.admitted, manager.weights.pause_seconds_total
        content = render(manager.status(), admitted=admitted, pause_seconds_total=paused)
        return web.Response(body=content, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    return handle


async def _health(made: _RouteCall) -> web.Response:
    return web.Response(body=b"")


def _role(request: web.BaseRequest) -> control.Role:
    role = request.query.get("role", "")
    for known in get_args(control.Role):
        if role == known:
            return known  # type: ignore[no-any-return]
    raise WireError(f"{request.path}?role={role}: role is one of {', '.join(get_args(control.Role))}")


def _count(request: web.BaseRequest, name: str, default: int = 0) -> int:
    return int(_number(request, name, default))


def _number(request: web.BaseRequest, name: str, default: float) -> float:
    text = request.query.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError as error:
        raise WireError(f"{request.path}?{name}={text}: {name} is a number") from error
    if not 0 <= value < 2**53:
        raise WireError(f"{request.path}?{name}={text}: {name} is 0 or more")
    return value


def _refuse(status: int, message: str, *, retry_seconds: float = 0.0) -> web.Response:
    return _json(ErrorReply(ErrorDetail(message, retry_seconds)), status=status)


def _json(content: Any, *, status: int = 200) -> web.Response:
    return web.Response(body=_encoder.encode(content), status=status, headers=_JSON)
