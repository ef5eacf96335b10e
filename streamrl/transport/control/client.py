"""The client of the manager that every other process uses."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import TypeVar

import aiohttp
import msgspec

from streamrl.errors import DeadlineExceeded, PeerLost
from streamrl.metrics import StepReport
from streamrl.transport import http
from streamrl.transport.control import LONG_POLL_SECONDS
from streamrl.transport.control.evaluations import (
    Evaluate,
    EvaluationReports,
    EvaluationResult,
    EvaluationRoute,
    NextEvaluation,
    NextEvaluationReply,
)
from streamrl.transport.control.groups import (
    Admit,
    AdmitReply,
    DataFacts,
    InFlight,
    Reject,
    Rejections,
    Route,
    RouteReply,
    Settle,
)
from streamrl.transport.control.members import (
    AskPlace,
    Done,
    Drain,
    FinishRun,
    Heartbeat,
    HeartbeatReply,
    Leave,
    Peer,
    Place,
    Register,
    RegisterReply,
    Role,
    Topology,
)
from streamrl.transport.control.publication import PublishBegin, PublishBeginReply, PublishCommit, PublishReply, Wanted
from streamrl.transport.control.status import Status
from streamrl.transport.keys import bearer

Reply = TypeVar("Reply")

ADMIT_RETRY_SECONDS = (0.1, 0.5, 2.0)
"""Pauses before an admission whose connection broke is asked for again."""


class ControlClient:
    """Calls the manager. One for each process; `close` it at the end."""

    def __init__(self, url: str, *, key: str = "", timeout: float = 60.0) -> None:
        """`key`: what the manager asks for, if it does."""
        self.url = url.rstrip("/")
        self._headers = bearer(key)
        self._timeout = timeout
        self._session: aiohttp.ClientSession | None = None
        self._ticket = ""
        """Of the admission that was asked for and not answered yet."""

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def register(self, message: Register, *, patience: float) -> RegisterReply:
        """Join the run; keeps trying for `patience` seconds while the manager is not there yet."""
        return await self._post_patiently("/register", message, RegisterReply, patience=patience)

    async def place(self, message: AskPlace, *, patience: float) -> int:
        """A number beyond the configured ones that nobody has; it is kept until the caller registers.

        Keeps trying for `patience` seconds while the manager is not there yet.
        """
        return (await self._post_patiently("/place", message, Place, patience=patience)).index

    async def drain(self, message: Drain) -> None:
        """Have a gserver or a rollout worker finish what it has and leave."""
        await self._post("/drain", message, Done)

    async def leave(self, message: Leave) -> None:
        await self._post("/leave", message, Done)

    async def topology(self, role: Role, count: int, *, patience: float) -> list[Peer]:
        """Addresses of the first `count` processes of `role`, once all have registered."""
        deadline = time.monotonic() + patience
        while True:
            wait = min(LONG_POLL_SECONDS, max(0.0, deadline - time.monotonic()))
            reply = await self._get(f"/topology?role={role}&count={count}&wait={wait:.3f}", Topology)
            if reply.complete:
                return reply.peers
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(
                    f"{len(reply.peers)} of {count} {role} processes registered within {patience:.0f} s; "
                    "look at the others' logs, or start them"
                )

    async def admit(self, message: Admit) -> AdmitReply:
        """Groups to start; asks again when the connection breaks, which gives no group twice.

        Nor is one lost if this raises: the next call asks under the same ticket.
        """
        self._ticket = self._ticket or uuid.uuid4().hex
        ticketed = msgspec.structs.replace(message, ticket=self._ticket)
        for delay in (*ADMIT_RETRY_SECONDS, None):
            try:
                reply = await self._post("/admit", ticketed, AdmitReply)
            except PeerLost:
                if delay is None:
                    raise
                await asyncio.sleep(delay)
            else:
                break
        self._ticket = ""
        return reply

    async def route(self, message: Route) -> RouteReply:
        return await self._post("/route", message, RouteReply)

    async def in_flight(self, message: InFlight) -> None:
        await self._post("/in_flight", message, Done)

    async def reject(self, message: Reject) -> None:
        await self._post("/reject", message, Done)

    async def settle(self, message: Settle) -> None:
        await self._post("/settle", message, Done)

    async def rejections(self, after: int) -> list[int]:
        """Sequence numbers rejected after the first `after`; empty after a long poll without any."""
        return (await self._get(f"/rejections?after={after}", Rejections)).rejected

    async def data_rows(self) -> int:
        """Rows of the training data; 0 after a long poll without a rollout worker that knows."""
        return (await self._get("/data", DataFacts)).rows

    async def evaluate(self, message: Evaluate) -> None:
        await self._post("/evaluate", message, Done)

    async def next_evaluation(self, message: NextEvaluation) -> NextEvaluationReply:
        return await self._post("/evaluation/next", message, NextEvaluationReply)

    async def evaluation_route(self, message: EvaluationRoute) -> RouteReply:
        return await self._post("/evaluation/route", message, RouteReply)

    async def evaluation_result(self, message: EvaluationResult) -> None:
        await self._post("/evaluation", message, Done)

    async def evaluations(self, after: int) -> EvaluationReports:
        """Reports after the first `after`; none after a long poll without any."""
        return await self._get(f"/evaluations?after={after}", EvaluationReports)

    async def publish_begin(self, message: PublishBegin, *, timeout: float) -> PublishBeginReply:
        return await self._post("/publish/begin", message, PublishBeginReply, timeout=timeout)

    async def publish_commit(self, message: PublishCommit, *, timeout: float) -> PublishReply:
        return await self._post("/publish/commit", message, PublishReply, timeout=timeout)

    async def weights_wanted(self) -> Wanted:
        """Waits a while for a gserver that needs the weights that are served already."""
        return await self._get("/publish/wanted", Wanted)

    async def report(self, message: StepReport) -> None:
        await self._post("/report", message.finite(), Done)

    async def finish_run(self, message: FinishRun) -> None:
        await self._post("/finish_run", message, Done)

    async def status(self) -> Status:
        return await self._get("/status", Status)

    async def _post(
        self, path: str, body: msgspec.Struct, reply: type[Reply], *, timeout: float | None = None
    ) -> Reply:
        return await self._call("POST", path, body, reply, timeout or self._timeout)

    async def _post_patiently(
        self, path: str, message: msgspec.Struct, reply: type[Reply], *, patience: float
    ) -> Reply:
        deadline = time.monotonic() + patience
        while True:
            try:
                return await self._post(path, message, reply)
            except PeerLost as error:
                if time.monotonic() > deadline:
                    raise PeerLost(f"{error}; is the manager running there? (waited {patience:.0f} s)") from error
            await asyncio.sleep(0.2)

    async def heartbeat(self, message: Heartbeat) -> HeartbeatReply:
        return await self._post("/heartbeat", message, HeartbeatReply)

    async def _get(self, path: str, reply: type[Reply]) -> Reply:
        return await self._call("GET", path, None, reply, self._timeout)

    async def _call(
        self, method: str, path: str, body: msgspec.Struct | None, reply: type[Reply], timeout: float
    ) -> Reply:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(
                connector=connector, timeout=aiohttp.ClientTimeout(total=None), headers=self._headers
            )
        return await http.call(self._session, method, self.url + path, body, reply, timeout=timeout, peer="the manager")
