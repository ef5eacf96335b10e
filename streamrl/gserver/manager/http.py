"""The manager's HTTP layer: bodies to Structs, errors to replies. Nothing is decided here.

| status | when |
|---|---|
| 400 | the body or the query is not what the call takes |
| 401 | the key is missing or wrong (`manager.api_key_env`) |
| 404, 405 | there is no such call |
| 409 | the call makes sense but is refused; the message says why |
| 500 | a fault of the manager, logged with its traceback; it lives on |
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, get_args

import msgspec

from streamrl.errors import UNDECODABLE, StreamRLError, WireError
from streamrl.gserver.manager.core import Manager
from streamrl.gserver.manager.status import render
from streamrl.records.metrics import StepReport
from streamrl.transport import keys
from streamrl.transport.control import (
    LONG_POLL_SECONDS,
    Admit,
    AskPlace,
    Compare,
    Drain,
    Evaluate,
    EvaluationResult,
    EvaluationRoute,
    FinishRun,
    GroupChanges,
    Heartbeat,
    InFlight,
    Leave,
    NextEvaluation,
    PublishBegin,
    PublishCommit,
    Register,
    Reject,
    Role,
    Route,
)
from streamrl.transport.http import Answer, Call, ErrorDetail, ErrorReply, Handler, HttpServer

log = logging.getLogger(__name__)

Body = TypeVar("Body", bound=msgspec.Struct)

HEALTH = "/health"

_encoder = msgspec.json.Encoder()

MAX_BODY_BYTES = 64 * 2**20
"""A weight update names every tensor of the model."""


def server(manager: Manager, *, key: str = "", key_variable: str = "") -> HttpServer:
    """Return a server for all calls of `transport/control.py`; with a `key` it serves only callers that show it, but
    for /health. `key_variable` names the environment variable with the key, for those who are refused.
    """
    calls = _calls(manager)

    async def handle(call: Call) -> Answer:
        try:
            methods = calls.get(call.path)
            if methods is None:
                return _refuse(404, f"{call.method} {call.path}: the manager has no such call")
            handler = methods.get(call.method)
            if handler is None:
                return _refuse(405, f"{call.method} {call.path}: use {' or '.join(methods)}")
            if key and call.path != HEALTH and not keys.admits(key, call.headers.get(keys.HEADER.lower())):
                return _refuse(401, keys.refusal("manager.api_key_env", key_variable))
            return await handler(call)
        except WireError as error:
            return _refuse(400, str(error))
        except StreamRLError as error:
            return _refuse(409, str(error))
        except Exception as error:  # the tolerance point: one faulty call must not end the run
            log.exception("%s %s failed", call.method, call.path)
            return _refuse(500, f"the manager failed at this call, see its log: {type(error).__name__}: {error}")

    return HttpServer(handle, refuse=_refuse, most_body_bytes=MAX_BODY_BYTES)


def _calls(manager: Manager) -> dict[str, dict[str, Handler]]:
    """Path → method → call."""
    members, groups, weights, evaluations = manager.members, manager.groups, manager.weights, manager.evaluations
    posts = {
        "/register": _post(Register, members.register),
        "/place": _post(AskPlace, manager.elastic.place),
        "/drain": _post(Drain, manager.elastic.drain),
        "/leave": _post(Leave, manager.elastic.left),
        "/heartbeat": _post(Heartbeat, members.heartbeat),
        "/admit": _post(Admit, groups.admit),
        "/route": _post(Route, groups.route),
        "/in_flight": _post(InFlight, groups.in_flight),
        "/reject": _post(Reject, groups.reject),
        "/groups": _post(GroupChanges, groups.take_changes),
        "/publish/begin": _post(PublishBegin, weights.begin),
        "/publish/commit": _post(PublishCommit, weights.commit),
        "/compare": _post(Compare, manager.comparisons.ask),
        "/evaluate": _post(Evaluate, evaluations.ask),
        "/evaluation/next": _post(NextEvaluation, evaluations.next),
        "/evaluation/route": _post(EvaluationRoute, evaluations.route),
        "/evaluation": _post(EvaluationResult, evaluations.result),
        "/report": _post(StepReport, manager.report),
        "/finish_run": _post(FinishRun, manager.finish_run),
    }
    gets = {
        "/publish/machines": _get(lambda call: weights.machines()),
        "/publish/resync": _get(lambda call: weights.resync_needed(timeout=LONG_POLL_SECONDS)),
        "/silent": _get(lambda call: members.silence(_count(call, "after"))),
        "/compared": _get(lambda call: manager.comparisons.compared(_count(call, "version"))),
        "/topology": _get(
            lambda call: members.topology(
                _role(call), _count(call, "count", 1), wait=_number(call, "wait", LONG_POLL_SECONDS)
            )
        ),
        "/groups": _get(lambda call: groups.given_up(_count(call, "after"))),
        "/evaluations": _get(lambda call: evaluations.reports(_count(call, "after"))),
        "/data": _get(lambda call: groups.data()),
        "/status": _status(manager),
        "/metrics": _metrics(manager),
        HEALTH: _health,
    }
    calls: dict[str, dict[str, Handler]] = {path: {"POST": call} for path, call in posts.items()}
    for path, call in gets.items():
        calls.setdefault(path, {})["GET"] = call
    return calls


def _post(body: type[Body], call: Callable[[Body], Awaitable[msgspec.Struct]]) -> Handler:
    decoder = msgspec.json.Decoder(body)

    async def handle(request: Call) -> Answer:
        try:
            message = decoder.decode(request.body)
        except UNDECODABLE as error:
            raise WireError(
                f"POST {request.path} takes a {body.__name__} as JSON: {error}; it got {request.body[:200]!r}"
            ) from error
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
        content = render(manager.status(), admitted=manager.admitted, pause_seconds_total=manager.pause_seconds_total)
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


def _refuse(status: int, message: str) -> Answer:
    return _json(ErrorReply(ErrorDetail(message)), status=status)


def _json(content: Any, *, status: int = 200) -> Answer:
    return Answer(_encoder.encode(content), status=status)
