"""The manager's HTTP layer: bodies to Structs, errors to replies. Nothing is decided here.

Who calls is told by the head of the call: of those who may not call, no body is read.

| status | when |
|---|---|
| 400 | the body or the query is not what the call takes |
| 401 | the caller has shown nothing that is known here |
| 403 | who calls may not, says that it is somebody else, or is a web page |
| 404, 405 | there is no such call |
| 409 | the call makes sense but is refused; the message says why |
| 423 | another process has the place, and lives |
| 500 | a fault of the manager, logged with its traceback; it lives on |
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple, get_args

import msgspec

from streamrl.errors import UNDECODABLE, PeerError, StreamRLError, WireError
from streamrl.gserver.manager.access import ALLOWED, LOOKS, Allowed, check_speaker
from streamrl.gserver.manager.core import Manager
from streamrl.gserver.manager.registry import Member
from streamrl.gserver.manager.status import render
from streamrl.transport.control import (
    LONG_POLL_SECONDS,
    Admit,
    AskMember,
    AskPlace,
    AskRoute,
    Compare,
    Drain,
    FailRun,
    FinishRun,
    Heartbeat,
    HeldOutResult,
    InFlight,
    Keep,
    Leave,
    PublishBegin,
    PublishCommit,
    Register,
    Reject,
    Role,
)
from streamrl.transport.http import Answer, Call, ErrorDetail, ErrorReply, Handler, Hosts, HttpServer
from streamrl.transport.seldom import Seldom

log = logging.getLogger(__name__)

HEALTH = "/health"
_ANYONE = Allowed(frozenset())

_encoder = msgspec.json.Encoder()

MAX_BODY_BYTES = 64 * 2**20
"""A weight update names every tensor of the model."""


class Post(NamedTuple):
    """A call with a body."""

    body: type[msgspec.Struct]
    handler: Callable[[Manager], Callable[[Any], Awaitable[msgspec.Struct]]]
    """Which part of the manager carries it out."""


POSTS: Mapping[str, Post] = {
    "/register": Post(Register, lambda manager: manager.members.register),
    "/place": Post(AskPlace, lambda manager: manager.elastic.place),
    "/drain": Post(Drain, lambda manager: manager.elastic.drain),
    "/leave": Post(Leave, lambda manager: manager.elastic.left),
    "/heartbeat": Post(Heartbeat, lambda manager: manager.members.heartbeat),
    "/member": Post(AskMember, lambda manager: manager.members.is_member),
    "/admit": Post(Admit, lambda manager: manager.groups.admit),
    "/keep": Post(Keep, lambda manager: manager.groups.keep),
    "/route": Post(AskRoute, lambda manager: manager.groups.route),
    "/in_flight": Post(InFlight, lambda manager: manager.groups.in_flight),
    "/reject": Post(Reject, lambda manager: manager.groups.reject),
    "/publish/begin": Post(PublishBegin, lambda manager: manager.weights.begin),
    "/publish/commit": Post(PublishCommit, lambda manager: manager.weights.commit),
    "/compare": Post(Compare, lambda manager: manager.comparisons.ask),
    "/evaluation": Post(HeldOutResult, lambda manager: manager.groups.held_out_result),
    "/finish_run": Post(FinishRun, lambda manager: manager.finish_run),
    "/fail_run": Post(FailRun, lambda manager: manager.fail_run),
}


def server(manager: Manager, *, hosts: Hosts, on_loopback: bool) -> HttpServer:
    """Return a server for all calls of `transport/control.py`, for those who may make them (`access.py`).

    `on_loopback`: only this machine reaches it.
    """
    calls = _calls(manager)
    seldom = Seldom(log)

    def check(call: Call) -> Answer | None:
        """Tell who calls, and refuse those who may not."""
        key, headers = f"{call.method} {call.path}", call.headers
        route = calls.get(key)
        if route is None:
            if methods := [known.partition(" ")[0] for known in calls if known.endswith(f" {call.path}")]:
                return _refuse(405, f"{key}: use {' or '.join(methods)}")
            return _refuse(404, f"{key}: the manager has no such call")
        if why := hosts.forged(headers.get("host"), headers.get("origin")):
            return _refuse(403, f"{key}: {why}")
        if call.path == HEALTH or (on_loopback and key in LOOKS):
            return None
        shown = headers.get("authorization", "")
        caller = manager.access.caller(shown)
        if caller is None:
            seldom.warning("refused %s of somebody who %s", key, "shows a wrong key" if shown else "shows no key")
            return _refuse(401, f"{key}: {_WRONG_KEY if shown else _NO_KEY}")
        if isinstance(caller, Member):
            if caller.role not in route.allowed.roles:
                seldom.warning("refused %s of %s (process %d on %s)", key, caller.name, caller.pid, caller.host)
                return _refuse(403, f"{key}: this is no call of a {caller.role}, and {caller.name} makes it")
            call.member = caller
        return None

    async def handle(call: Call) -> Answer:
        key = f"{call.method} {call.path}"
        try:
            if call.member is not None and call.member.gone:
                return _refuse(401, f"{key}: {_WRONG_KEY}")  # lost while the body came
            return await calls[key].handler(call)
        except WireError as error:
            return _refuse(400, str(error))
        except PeerError as error:
            if error.status == 403:
                seldom.warning("refused %s: %s", key, error)
            return _refuse(error.status or 409, str(error), retry_seconds=error.retry_seconds)
        except StreamRLError as error:
            return _refuse(409, str(error))
        except Exception as error:  # the tolerance point: one faulty call must not end the run
            log.exception("%s failed", key)
            return _refuse(500, f"the manager failed at this call, see its log: {type(error).__name__}: {error}")

    return HttpServer(handle, check=check, refuse=_refuse, most_body_bytes=MAX_BODY_BYTES)


class _Route(NamedTuple):
    handler: Handler
    allowed: Allowed


_NO_KEY = (
    "this call needs the run's secret: set STREAMRL_SECRET or security.secret_file where it comes from to what the "
    "manager has (docs/security.md)"
)
_WRONG_KEY = (
    "the key that was shown is not of this run: either the secret (STREAMRL_SECRET, security.secret_file) is that of "
    "another run, or another process has taken this one's place"
)


def _calls(manager: Manager) -> dict[str, _Route]:
    """Method and path → call."""
    members, weights = manager.members, manager.weights
    gets: dict[str, Handler] = {
        "/publish/places": _get(lambda call: weights.places()),
        "/silent": _get(lambda call: members.silence(_count(call, "after"))),
        "/resume_point": _get(lambda call: members.resume_point()),
        "/model": _get(lambda call: manager.model.listing()),
        "/model/part": _get(lambda call: manager.model.part(call.query.get("name", ""), _count(call, "begin"))),
        "/topology": _get(
            lambda call: members.topology(
                _role(call), _count(call, "count", 1), wait=_number(call, "wait", LONG_POLL_SECONDS)
            )
        ),
        "/status": _status(manager),
        "/metrics": _metrics(manager),
        HEALTH: _health,
    }
    calls = {}
    for path, post in POSTS.items():
        allowed = ALLOWED[f"POST {path}"]
        calls[f"POST {path}"] = _Route(_post(post.body, post.handler(manager), allowed), allowed)
    for path, handler in gets.items():
        calls[f"GET {path}"] = _Route(handler, ALLOWED.get(f"GET {path}", _ANYONE))
    return calls


def _post(body: type[msgspec.Struct], call: Callable[[Any], Awaitable[msgspec.Struct]], allowed: Allowed) -> Handler:
    decoder = msgspec.json.Decoder(body)

    async def handle(request: Call) -> Answer:
        try:
            message = decoder.decode(request.body)
        except UNDECODABLE as error:
            raise WireError(
                f"POST {request.path} takes a {body.__name__} as JSON: {error}; it got {request.body[:200]!r}"
            ) from error
        if request.member is not None:
            check_speaker(request.member, allowed, message)
        return _json(await call(message))

    return handle


def _get(call: Callable[[Call], Awaitable[msgspec.Struct]]) -> Handler:
    async def handle(request: Call) -> Answer:
        return _json(await call(request))

    return handle


def _status(manager: Manager) -> Handler:
    async def handle(request: Call) -> Answer:
        return _json(manager.status())

    return handle


def _metrics(manager: Manager) -> Handler:
    async def handle(request: Call) -> Answer:
        admitted, paused = manager.admissions.admitted, manager.weights.pause_seconds_total
        content = render(manager.status(), admitted=admitted, pause_seconds_total=paused)
        return Answer(content, content_type="text/plain; version=0.0.4; charset=utf-8")

    return handle


async def _health(request: Call) -> Answer:
    return Answer(b"")


def _role(request: Call) -> Role:
    role = request.query.get("role", "")
    for known in get_args(Role):
        if role == known:
            return known  # type: ignore[no-any-return]
    raise WireError(f"{request.path}?role={role}: role is one of {', '.join(get_args(Role))}")


def _count(request: Call, name: str, default: int = 0) -> int:
    return int(_number(request, name, default))


def _number(request: Call, name: str, default: float) -> float:
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


def _refuse(status: int, message: str, *, retry_seconds: float = 0.0) -> Answer:
    return _json(ErrorReply(ErrorDetail(message, retry_seconds)), status=status)


def _json(content: Any, *, status: int = 200) -> Answer:
    return Answer(_encoder.encode(content), status=status)
