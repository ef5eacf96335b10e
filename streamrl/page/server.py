"""The page's web server: access control, replies, and server-sent events.

Access requires the URL: its first part is a token, compared in constant time. Invariants: there are only reading calls;
a request with a `Host` or `Origin` other than this server's is refused, so that no other site can use a visitor's
browser to read the page; only the package's own static files are read for a path; and a slow reader blocks no other,
since each write has a deadline, and the number of connections is limited.

Files are polled once a second while a page is open: a run may write them on another host, and then the file system
reports no events here.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import hmac
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

import msgspec
from aiohttp import web

from streamrl import essential
from streamrl.errors import ConfigError, DataError
from streamrl.page import answers
from streamrl.page.lanes import lanes
from streamrl.records import logs
from streamrl.records.health import findings
from streamrl.records.view import RunView
from streamrl.transport.http import Hosts

STATIC = Path(__file__).parent / "static"
CONTENT_TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".LICENSE": "text/plain",
}
LOOK_SECONDS = 1.0
KEEP_ALIVE_SECONDS = 15.0
WRITE_SECONDS = 10.0
"""Deadline for a client to receive one piece of a reply."""
IDLE_SECONDS = 5.0
"""Longest time that an idle connection stays open."""
PIECE_BYTES = 256 * 2**10
LEAST_COMPRESSED = 16 * 2**10
MOST_CONNECTIONS = 128
MOST_WATCHERS = 32
TOKEN_MAY_HAVE = "!$&'()*+,;=:@"
"""Characters allowed in addition to letters, digits and -._~ (RFC 3986, section 3.3)."""
MOST_ROWS = 500
"""Most rows of a table in one reply."""
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-store",
}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Answer = TypeVar("Answer")


class Page:
    """The runs that are shown, and the calls that show them."""

    def __init__(self, folders: Sequence[Path], *, host: str, token: str = "") -> None:
        """`host`: the address to listen at; `token`: the secret part of the URL, random if empty. Raises `ConfigError`
        for a token that cannot be a part of a URL, since no request could contain it."""
        if quote(token, safe=TOKEN_MAY_HAVE) != token:
            raise ConfigError(
                "the page's token is a part of its address, where slashes, %, ? and # have a meaning of their own; "
                "make another one, for example with: openssl rand -hex 32"
            )
        self.token = token or secrets.token_urlsafe(24)
        self._hosts = Hosts([host])
        self._runs = [RunView(folder) for folder in folders]
        self._locks = [asyncio.Lock() for _ in folders]
        self._watchers = 0
        self._news = asyncio.Condition()
        self._sent: list[answers.RunFacts] = []
        self._watched = asyncio.Event()
        self.connections: Callable[[], int] = lambda: 0
        """Returns the number of open connections."""

    def application(self) -> web.Application:
        """Return the application with all calls."""
        app = web.Application(middlewares=[self._guard])
        for path, handler in {
            "/": self._index,
            "/static/{path:.+}": self._static,
            "/api/runs": self._list,
            "/api/events": self._events,
            "/api/runs/{run:\\d+}/steps": self._steps,
        }.items():
            app.router.add_get(f"/{{token}}{path}", handler)
        for path, call in CALLS.items():
            app.router.add_get(f"/{{token}}/api/runs/{{run:\\d+}}/{path}", partial(self._call, call))
        app.cleanup_ctx.append(self._looking)
        return app

    # --- access ---

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            self._admit(request)
            return await handler(request)
        except web.HTTPException as error:
            return await _send(request, (error.text or error.reason).encode(), "text/plain", status=error.status)
        except (ConfigError, DataError, ValueError) as error:
            return await _send(request, str(error).encode(), "text/plain", status=400)
        except (TimeoutError, ConnectionError):
            if request.transport is not None:
                request.transport.abort()
            return web.Response()  # the client is gone

    def _admit(self, request: web.Request) -> None:
        """Raise `HTTPException` for a request that is not allowed."""
        if self._hosts.forged(request.headers.get("Host"), request.headers.get("Origin")):
            raise web.HTTPForbidden(
                text="requests of other sites, or by another name, are refused: use the printed address"
            )
        site, mode = request.headers.get("Sec-Fetch-Site"), request.headers.get("Sec-Fetch-Mode")
        if site in ("cross-site", "same-site") and mode != "navigate":
            raise web.HTTPForbidden(text="another site may not look at this page")
        shown = request.path.split("/", 2)[1]
        if not hmac.compare_digest(shown.encode(), self.token.encode()):
            raise web.HTTPForbidden(text="the address lacks the page's token: use the one that streamrl page printed")
        if self.connections() > MOST_CONNECTIONS:
            raise web.HTTPServiceUnavailable(text="too many connections; try again in a moment")

    # --- files ---

    async def _index(self, request: web.Request) -> web.StreamResponse:
        return await _send(request, (STATIC / "index.html").read_bytes(), CONTENT_TYPES[".html"])

    async def _static(self, request: web.Request) -> web.StreamResponse:
        file = static_files().get(request.match_info["path"])
        if file is None:
            raise web.HTTPNotFound(text="no such file")
        return await _send(request, file.read_bytes(), CONTENT_TYPES[file.suffix])

    # --- runs ---

    async def _list(self, request: web.Request) -> web.StreamResponse:
        return await _send_json(request, await self._facts())

    async def _facts(self) -> list[answers.RunFacts]:
        return [
            await self._of(number, lambda run, number=number: answers.facts(run, number=number))  # type: ignore[misc]
            for number in range(len(self._runs))
        ]

    async def _steps(self, request: web.Request) -> web.StreamResponse:
        body = await self._of(int(request.match_info["run"]), lambda run: _steps(run, request.query))
        return await _send(request, body, "application/octet-stream")

    async def _call(self, call: Call, request: web.Request) -> web.StreamResponse:
        arguments = {**request.query, **request.match_info}
        return await _send_json(request, await self._of(int(arguments["run"]), lambda run: call(run, arguments)))

    async def _of(self, number: int, made: Callable[[RunView], Answer]) -> Answer:
        """Return the result of `made` for a refreshed run. It runs in a thread, so other requests are not blocked."""
        if number >= len(self._runs):
            raise web.HTTPNotFound(text=f"there is no run {number}: this page shows {len(self._runs)}")
        run = self._runs[number]

        def work() -> Answer:
            run.refresh()
            return made(run)

        async with self._locks[number]:
            return await asyncio.to_thread(work)

    # --- events ---

    async def _events(self, request: web.Request) -> web.StreamResponse:
        """Send the facts of all runs whenever they change, as server-sent events; slow readers get only the latest."""
        if self._watchers >= MOST_WATCHERS:
            raise web.HTTPServiceUnavailable(text=f"{MOST_WATCHERS} pages are open already; close one")
        response = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream"})
        self._watchers += 1
        self._watched.set()
        try:
            await response.prepare(request)
            told: list[answers.RunFacts] = []
            while True:
                async with asyncio.timeout(WRITE_SECONDS):
                    if self._sent != told:
                        told = self._sent
                        await response.write(b"data: " + msgspec.json.encode(told) + b"\n\n")
                    else:
                        await response.write(b": still here\n\n")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(KEEP_ALIVE_SECONDS), self._news:
                        await self._news.wait_for(partial(self._is_news, told))
        finally:
            self._watchers -= 1
            if not self._watchers:
                self._watched.clear()

    def _is_news(self, told: list[answers.RunFacts]) -> bool:
        return self._sent != told

    async def _looking(self, app: web.Application) -> AsyncIterator[None]:
        task = essential.begin(self._look(), name="the look at the runs' folders")
        yield
        task.cancel()

    async def _look(self) -> None:
        """Poll the runs for changes while a page is open."""
        while True:
            await self._watched.wait()
            found = await self._facts()
            if found != self._sent:
                async with self._news:
                    self._sent = found
                    self._news.notify_all()
            await asyncio.sleep(LOOK_SECONDS)


# --- calls on one run ---

Arguments = Mapping[str, str]
"""The query of a request, and the parts of its path that are arguments, by name."""
Call = Callable[[RunView, Arguments], object]


def _steps(run: RunView, arguments: Arguments) -> bytes:
    points = int(arguments.get("points", "8000"))
    if not points >= 2:
        raise ValueError("points: at least 2")
    first, last = float(arguments.get("first", "-inf")), float(arguments.get("last", "inf"))
    return answers.steps(run, names=_words(arguments.get("names")), first=first, last=last, points=points)


def _timeline(run: RunView, arguments: Arguments) -> object:
    begin, end = float(arguments.get("begin", "0")), float(arguments.get("end", max(1.0, run.end - run.begin)))
    if not begin < end:
        raise ValueError("begin: less than end")
    return lanes(run, begin=begin, end=end, columns=min(max(int(arguments.get("columns", "600")), 10), 2000))


def _rollouts(run: RunView, arguments: Arguments) -> object:
    offset, limit = int(arguments.get("offset", "0")), int(arguments.get("limit", "50"))
    if offset < 0 or not 1 <= limit <= MOST_ROWS:
        raise ValueError(f"offset: at least 0; limit: from 1 to {MOST_ROWS}")
    return run.rollouts.table(
        sort=arguments.get("sort", "step"),
        descending=arguments.get("descending", "true") == "true",
        filter=arguments.get("filter", ""),
        offset=offset,
        limit=limit,
    )


def _search(run: RunView, arguments: Arguments) -> object:
    if not arguments.get("text"):
        raise ValueError("text: the text to search for is missing")
    before = (int(arguments["step"]), int(arguments["seq"])) if {"step", "seq"} <= set(arguments) else None
    return run.rollouts.search(arguments["text"], filter=arguments.get("filter", ""), before=before)


def _logs(run: RunView, arguments: Arguments) -> object:
    level = arguments.get("level", "DEBUG")
    if level not in logs.LEVELS:
        raise ValueError(f"level: one of {', '.join(logs.LEVELS)}")
    folder, processes = run.folder / "logs", _words(arguments.get("processes"))
    lines = logs.tail(folder, processes=processes, level=level, text=arguments.get("text", ""))
    return {"processes": logs.processes_with_logs(folder), "lines": lines}


def _words(text: str | None) -> list[str]:
    return [word for word in (text or "").split(",") if word]


CALLS: dict[str, Call] = {
    "evaluations": lambda run, _: answers.evaluations(run),
    "health": lambda run, _: findings(run.figures()),
    "timeline": _timeline,
    "fleet": lambda run, _: answers.fleet(run),
    "rollouts": _rollouts,
    "rollouts/search": _search,
    "rollouts/{step:\\d+}/{seq:\\d+}": lambda run, named: answers.group(
        run, step=int(named["step"]), seq=int(named["seq"])
    ),
    "config": lambda run, _: answers.settings(run),
    "graph": lambda run, _: answers.graph(run),
    "logs": _logs,
}
"""Path below a run → function that makes the reply."""


def static_files() -> dict[str, Path]:
    """Return the files that the page may load: path in the URL → file of the package."""
    return {
        file.relative_to(STATIC).as_posix(): file
        for file in sorted(STATIC.rglob("*"))
        if file.is_file() and file.suffix in CONTENT_TYPES
    }


async def serve(
    folders: Sequence[Path], *, host: str, port: int, token: str = "", on_ready: Callable[[str], None]
) -> None:
    """Show the runs in `folders` until cancelled; `on_ready` is called with the URL.

    Raises `ConfigError` if `host` and `port` cannot be listened at, and for a `token` that cannot be a part of a URL.
    """
    page = Page(folders, host=host, token=token)
    runner = web.AppRunner(page.application(), access_log=None, shutdown_timeout=1.0, keepalive_timeout=IDLE_SECONDS)
    await runner.setup()
    page.connections = lambda: len(runner.server.connections) if runner.server is not None else 0
    try:
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError as error:
            raise ConfigError(
                f"--host {host} --port {port}: cannot be listened at ({error.strerror}); --port 0 takes any free one"
            ) from error
        shown = f"[{host}]" if ":" in host else host
        on_ready(f"http://{shown}:{runner.addresses[0][1]}/{page.token}/")
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


async def _send_json(request: web.Request, value: object) -> web.StreamResponse:
    return await _send(request, await asyncio.to_thread(msgspec.json.encode, value), "application/json")


async def _send(request: web.Request, body: bytes, content_type: str, *, status: int = 200) -> web.StreamResponse:
    """Write a reply piece by piece, each with a deadline."""
    headers = dict(HEADERS)
    if len(body) >= LEAST_COMPRESSED and "gzip" in request.headers.get("Accept-Encoding", ""):
        body = await asyncio.to_thread(gzip.compress, body, 1)
        headers["Content-Encoding"] = "gzip"
    charset = "" if content_type == "application/octet-stream" else "; charset=utf-8"
    response = web.StreamResponse(status=status, headers={**headers, "Content-Type": content_type + charset})
    response.content_length = len(body)
    if status == web.HTTPServiceUnavailable.status_code:
        response.force_close()
    await response.prepare(request)
    if request.method != "HEAD":
        for start in range(0, len(body), PIECE_BYTES):
            async with asyncio.timeout(WRITE_SECONDS):
                await response.write(body[start : start + PIECE_BYTES])
    await response.write_eof()
    return response
