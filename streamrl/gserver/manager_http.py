"""The manager's HTTP layer: bodies to Structs, errors to answers. Nothing is decided here.

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
from streamrl.gserver.manager_core import Manager
from streamrl.gserver.manager_metrics import render
from streamrl.metrics import StepReport
from streamrl.transport import keys
from streamrl.transport.control import LONG_POLL_SECONDS
from streamrl.transport.control.comparison import Compare
from streamrl.transport.control.evaluations import Evaluate, EvaluationResult, EvaluationRoute, NextEvaluation
from streamrl.transport.control.groups import Admit, InFlight, Reject, Route, Settle
from streamrl.transport.control.members import AskPlace, Drain, FinishRun, Heartbeat, Leave, Register, Role
from streamrl.transport.control.publication import PublishBegin, PublishCommit
from streamrl.transport.http import ErrorDetail, ErrorReply
from streamrl.transport.http_server import Answer, Call, Handler, HttpServer

log = logging.getLogger(__name__)

Body = TypeVar("Body", bound=msgspec.Struct)

HEALTH = "/health"

_encoder = msgspec.json.Encoder()

MAX_BODY_BYTES = 64 * 2**20
"""A weight update names every tensor of the model."""


def server(manager: Manager, *, key: str = "", key_variable: str = "") -> HttpServer:
    """Answers all calls of `transport/control/`; with a `key` only to callers that show it, but for /health.

    `key_variable`: the environment variable with the key, for those who are refused.
    """
    calls = _calls(manager)

    async def handle(call: Call) -> Answer:
        try:
            methods = calls.get(call.path)
            if methods is None:
                return _refuse(404, f"{call.method} {call.path}: the manager has no such call")
            answer = methods.get(call.method)
            if answer is None:
                return _refuse(405, f"{call.method} {call.path}: use {' or '.join(methods)}")
            if key and call.path != HEALTH and not keys.admits(key, call.headers.get(keys.HEADER.lower())):
                return _refuse(401, keys.refusal("manager.api_key_env", key_variable))
            return await answer(call)
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
        "/place": _post(AskPlace, manager.draining.place),
        "/drain": _post(Drain, manager.draining.drain),
        "/leave": _post(Leave, manager.draining.left),
        "/heartbeat": _post(Heartbeat, members.heartbeat),
        "/admit": _post(Admit, groups.admit),
        "/route": _post(Route, groups.route),
        "/in_flight": _post(InFlight, groups.in_flight),
        "/reject": _post(Reject, groups.reject),
        "/settle": _post(Settle, groups.settle),
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
        "/publish/wanted": _wanted(manager),
        "/silent": _silent(manager),
        "/compared": _compared(manager),
        "/topology": _topology(manager),
        "/rejections": _rejections(manager),
        "/evaluations": _evaluations(manager),
        "/data": _data(manager),
        "/status": _status(manager),
        "/metrics": _metrics(manager),
        HEALTH: _health,
    }
    return {path: {"POST": call} for path, call in posts.items()} | {path: {"GET": call} for path, call in gets.items()}


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


async def _health(call: Call) -> Answer:
    return Answer(b"")


def _silent(manager: Manager) -> Handler:
    async def handle(request: Call) -> Answer:
        return _json(await manager.members.silence(int(_number(request, "after", 0))))

    return handle


def _topology(manager: Manager) -> Handler:
    async def handle(request: Call) -> Answer:
        role = request.query.get("role", "")
        if role not in get_args(Role):
            raise WireError(f"/topology?role={role}: role is one of {', '.join(get_args(Role))}")
        count = _number(request, "count", 1)
        wait = _number(request, "wait", LONG_POLL_SECONDS)
        return _json(await manager.members.topology(role, int(count), wait=wait))  # type: ignore[arg-type]

    return handle


def _rejections(manager: Manager) -> Handler:
    async def handle(request: Call) -> Answer:
        return _json(await manager.groups.rejections(int(_number(request, "after", 0))))

    return handle


def _evaluations(manager: Manager) -> Handler:
    async def handle(request: Call) -> Answer:
        return _json(await manager.evaluations.reports(int(_number(request, "after", 0))))

    return handle


def _wanted(manager: Manager) -> Handler:
    async def handle(request: Call) -> Answer:
        return _json(await manager.weights.wanted(timeout=LONG_POLL_SECONDS))

    return handle


def _compared(manager: Manager) -> Handler:
    async def handle(request: Call) -> Answer:
        return _json(await manager.comparisons.compared(int(_number(request, "version", 0))))

    return handle


def _data(manager: Manager) -> Handler:
    async def handle(request: Call) -> Answer:
        return _json(await manager.groups.data())

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
