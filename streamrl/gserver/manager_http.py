"""The manager's HTTP layer: bodies to Structs, errors to answers. Nothing is decided here.

| status | when |
|---|---|
| 400 | the body or the query is not what the call takes |
| 404, 405 | there is no such call |
| 409 | the call makes sense but is refused; the message says why |
| 500 | a fault of the manager, logged with its traceback; it lives on |
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, get_args

import msgspec
from aiohttp import web

from streamrl.errors import StreamRLError, WireError
from streamrl.gserver.manager_core import Manager
from streamrl.gserver.manager_metrics import render
from streamrl.transport.control import (
    LONG_POLL_SECONDS,
    Admit,
    Evaluate,
    EvaluationResult,
    EvaluationRoute,
    FinishRun,
    Heartbeat,
    NextEvaluation,
    PublishBegin,
    PublishCommit,
    Register,
    Reject,
    Role,
    Route,
    Settle,
    StepReport,
)
from streamrl.transport.http import ErrorDetail, ErrorReply

log = logging.getLogger(__name__)

Body = TypeVar("Body", bound=msgspec.Struct)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

MAX_BODY_BYTES = 64 * 2**20
"""A weight update names every tensor of the model."""


def application(manager: Manager) -> web.Application:
    """All calls of `transport/control.py`."""
    app = web.Application(middlewares=[_answer_errors], client_max_size=MAX_BODY_BYTES)
    app.add_routes(
        [
            _post("/register", Register, manager.register),
            _post("/heartbeat", Heartbeat, manager.heartbeat),
            _post("/admit", Admit, manager.admit),
            _post("/route", Route, manager.route),
            _post("/reject", Reject, manager.reject),
            _post("/settle", Settle, manager.settle),
            _post("/publish/begin", PublishBegin, manager.publish_begin),
            _post("/publish/commit", PublishCommit, manager.publish_commit),
            _post("/evaluate", Evaluate, manager.evaluations.ask),
            _post("/evaluation/next", NextEvaluation, manager.evaluations.next),
            _post("/evaluation/route", EvaluationRoute, manager.evaluations.route),
            _post("/evaluation", EvaluationResult, manager.evaluations.result),
            _post("/report", StepReport, manager.report),
            _post("/finish_run", FinishRun, manager.finish_run),
            web.get("/publish/wanted", _wanted(manager)),
            web.get("/topology", _topology(manager)),
            web.get("/rejections", _rejections(manager)),
            web.get("/evaluations", _evaluations(manager)),
            web.get("/data", _data(manager)),
            web.get("/status", _status(manager)),
            web.get("/metrics", _metrics(manager)),
        ]
    )
    return app


@web.middleware
async def _answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except WireError as error:
        return _refuse(400, str(error))
    except StreamRLError as error:
        return _refuse(409, str(error))
    except web.HTTPException as error:
        return _refuse(error.status, f"{request.method} {request.path}: {error.reason}")
    except Exception as error:  # the tolerance point: one faulty call must not end the run
        log.exception("%s %s failed", request.method, request.path)
        return _refuse(500, f"the manager failed at this call, see its log: {type(error).__name__}: {error}")


def _post(path: str, body: type[Body], call: Callable[[Body], Awaitable[msgspec.Struct]]) -> web.RouteDef:
    decoder = msgspec.json.Decoder(body)

    async def handle(request: web.Request) -> web.Response:
        content = await request.read()
        try:
            message = decoder.decode(content)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise WireError(
                f"POST {path} takes a {body.__name__} as JSON: {error}; it got {content[:200]!r}"
            ) from error
        return _json(await call(message))

    return web.post(path, handle)


def _topology(manager: Manager) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        role = request.query.get("role", "")
        if role not in get_args(Role):
            raise WireError(f"/topology?role={role}: role is one of {', '.join(get_args(Role))}")
        count = _number(request, "count", 1)
        wait = _number(request, "wait", LONG_POLL_SECONDS)
        return _json(await manager.topology(role, int(count), wait=wait))  # type: ignore[arg-type]

    return handle


def _rejections(manager: Manager) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        return _json(await manager.rejections(int(_number(request, "after", 0))))

    return handle


def _evaluations(manager: Manager) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        return _json(await manager.evaluations.reports(int(_number(request, "after", 0))))

    return handle


def _wanted(manager: Manager) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        return _json(await manager.weights_wanted())

    return handle


def _data(manager: Manager) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        return _json(await manager.data())

    return handle


def _status(manager: Manager) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        return _json(manager.status())

    return handle


def _metrics(manager: Manager) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        content = render(manager.status(), admitted=manager.admitted, pause_seconds_total=manager.pause_seconds_total)
        return web.Response(body=content, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    return handle


def _number(request: web.Request, name: str, default: float) -> float:
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


def _refuse(status: int, message: str) -> web.Response:
    return _json(ErrorReply(ErrorDetail(message)), status=status)


def _json(content: Any, *, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(content), status=status, content_type="application/json")
