"""The manager's HTTP API: its message types, and the client that every other process uses.

One address, the manager's URL, is enough to join a run.

| call | by | meaning |
|---|---|---|
| POST /register | all | a process joins; refused when its configuration differs |
| POST /heartbeat | all | it lives, and how it does; answers whether to stop |
| GET /topology | rollout, master | waits until the named processes are registered; their addresses |
| POST /admit | rollout | waits for room in the ledger; sequence numbers with a gserver for each |
| POST /route | rollout | another gserver for a group whose gserver failed |
| POST /reject | rollout | a group is given up |
| POST /settle | master | groups stored (accepted) and groups dropped |
| GET /rejections | master | waits for rejections after the n-th |
| POST /evaluate | master | an evaluation is due |
| POST /evaluation/next | evaluator | waits for the next evaluation |
| POST /evaluation/route | evaluator | a gserver for a prompt, another one if that failed |
| POST /evaluation | evaluator | what an evaluation found |
| GET /evaluations | master | waits for reports of evaluations after the n-th |
| GET /data | master | waits until a rollout worker has told the size of the data set |
| POST /publish/begin, /publish/commit | publisher | the two ends of a weight update |
| POST /report | master | the figures of one training step |
| POST /finish_run | master | the run is over; every process is told at its next heartbeat |
| GET /status, /metrics | anyone | the run's state as JSON; figures for Prometheus |
"""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Any, Literal, TypeVar

import aiohttp
import msgspec

from streamrl.errors import DeadlineExceeded, PeerLost
from streamrl.evaluation import EvaluationReport as EvaluationReport
from streamrl.metrics import StepReport as StepReport
from streamrl.transport import http

Role = Literal["gserver", "rollout", "evaluator", "master", "model_worker"]
Reply = TypeVar("Reply")

LONG_POLL_SECONDS = 20.0
"""How long the manager holds a waiting call before it answers empty-handed."""

ADMIT_RETRY_SECONDS = (0.1, 0.5, 2.0)
"""Pauses before an admission whose connection broke is asked for again."""


class Register(msgspec.Struct, frozen=True):
    role: Role
    index: int
    """Number within its role, from 0."""
    address: str
    """gserver: HTTP URL; model_worker: ZMQ endpoint of its stream; master: ZMQ endpoint for its
    workers; rollout: empty."""
    config_digest: str
    pid: int
    host: str


class RegisterReply(msgspec.Struct, frozen=True):
    policy_version: int
    heartbeat_seconds: float


class Heartbeat(msgspec.Struct, frozen=True):
    role: Role
    index: int
    stats: dict[str, float]
    """Gauges and counters of the process; names ending in `_total` only grow."""
    waiting_for: str = ""
    """What the process waits for, if it does: shown to the user."""
    error: str = ""
    """Set when the process has to give up: the run stops with this message."""


class HeartbeatReply(msgspec.Struct, frozen=True):
    stop: bool
    """The run is over: finish what is at hand and leave."""
    policy_version: int
    known: bool
    """False: the manager does not know (any more) who calls; register again."""


class Peer(msgspec.Struct, frozen=True):
    role: Role
    index: int
    address: str


class Topology(msgspec.Struct, frozen=True):
    complete: bool
    """Whether as many as asked for are registered."""
    peers: list[Peer]
    """By index."""


class Admit(msgspec.Struct, frozen=True):
    worker: int
    count: int
    """How many groups the worker can start."""
    data_rows: int = 0
    """Rows of the worker's training data: the same for all workers of a run; 0: not told."""
    ticket: str = ""
    """Names the call, so that asking again after a lost answer gives the same groups; set by the client."""


class Admission(msgspec.Struct, frozen=True):
    seq: int
    gserver: str
    """URL of the gserver for all requests of this group."""


class AdmitReply(msgspec.Struct, frozen=True):
    admissions: list[Admission]
    """Empty after a long poll without room."""
    policy_version: int
    stop: bool


class Route(msgspec.Struct, frozen=True):
    worker: int
    seq: int
    failed: str
    """URL of the gserver that failed."""


class RouteReply(msgspec.Struct, frozen=True):
    gserver: str
    """Empty: none is live now; ask again."""


class Reject(msgspec.Struct, frozen=True):
    worker: int
    seq: int
    reason: str


class Settle(msgspec.Struct, frozen=True):
    finished: list[int]
    """Sequence numbers of groups now stored with the trainer."""
    dropped: list[int]
    """Sequence numbers of stored groups that were discarded as too old."""


class Rejections(msgspec.Struct, frozen=True):
    rejected: list[int]
    """All since the n-th that was asked for."""


class Evaluate(msgspec.Struct, frozen=True):
    """The policy is to be tried on held-out prompts."""

    policy_version: int
    """Which one, as the gservers have it now."""
    step: int
    """Training steps that are done."""
    training_over: bool = False
    """The run ends after this evaluation: no further group is started."""


class EvaluationTask(msgspec.Struct, frozen=True):
    """An evaluation on its way from the master to an evaluator."""

    number: int
    """Of the evaluation, from 0, as the manager counts."""
    policy_version: int
    step: int


class NextEvaluation(msgspec.Struct, frozen=True):
    evaluator: int


class NextEvaluationReply(msgspec.Struct, frozen=True):
    task: EvaluationTask | None
    """None after a long poll without one."""
    stop: bool


class EvaluationRoute(msgspec.Struct, frozen=True):
    evaluator: int
    prompt: int
    """Number of the prompt within the evaluation."""
    failed: str = ""
    """URL of the gserver that failed; empty when the prompt begins."""
    done: list[int] = []
    """Prompts that have ended since the last call: their gservers are free of them."""


class EvaluationResult(msgspec.Struct, frozen=True):
    evaluator: int
    number: int
    """Of the `EvaluationTask`."""
    report: EvaluationReport


class EvaluationReports(msgspec.Struct, frozen=True):
    reports: list[EvaluationReport]
    """All since the n-th that was asked for."""
    stop: bool
    """The run is over: there will be no more."""


class EvaluationStatus(msgspec.Struct, frozen=True):
    running: EvaluationTask | None
    waiting: EvaluationTask | None
    done: int
    left_out: int
    """Evaluations that were not made because a later one was due."""
    last: EvaluationReport | None


class DataFacts(msgspec.Struct, frozen=True):
    """The training data as the rollout workers see it."""

    rows: int
    """0: no worker has told yet; ask again."""


class TensorSpec(msgspec.Struct, frozen=True):
    name: str
    """Hugging Face parameter name."""
    dtype: str
    """`float32` or `bfloat16`."""
    shape: list[int]


class Broadcast(msgspec.Struct, frozen=True, tag="broadcast"):
    """Weights that rank 0 of a weight group sends, in these buckets, in this order."""

    buckets: list[list[TensorSpec]]
    master_address: str
    """Host of rank 0's store for a new weight group."""
    master_port: int
    backend: Literal["gloo", "nccl"]
    group_name: str
    """Name of the weight group that the publisher has now; empty: none."""


class Snapshot(msgspec.Struct, frozen=True, tag="snapshot"):
    """Weights that lie in a folder, as safetensors."""

    folder: str
    host: str = ""
    """The only host that can read it; empty: every host has the folder."""

    def readable_on(self, host: str) -> bool:
        return self.host in ("", host)


class PublishBegin(msgspec.Struct, frozen=True):
    """The publisher has weights of `version` ready."""

    version: int
    weights: Broadcast | Snapshot
    again: bool = False
    """The version that is served already, for those gservers alone that came too late for it."""


class PublishBeginReply(msgspec.Struct, frozen=True):
    group_name: str
    """Names the update for the commit, and is the group to broadcast in: if it is not the one that the publisher
    has, it must form it now, as rank 0 of `world_size`, on the address that it gave."""
    world_size: int
    """Publisher and gservers; 1: no gserver lacks this version, there is nothing to do or to commit."""


class PublishCommit(msgspec.Struct, frozen=True):
    """The publisher has brought everything (or failed to: `error`)."""

    version: int
    group_name: str
    error: str = ""
    checksums: dict[str, str] = {}
    """Name → `checksum.tensor_sums` of each weight as it was trained; empty: nothing is compared."""


class Wanted(msgspec.Struct, frozen=True):
    """Which gservers wait for weights that nobody but the publisher has."""

    version: int
    """What the others serve."""
    gservers: list[str]
    serving: int
    """How many serve."""


class PublishReply(msgspec.Struct, frozen=True):
    done: bool
    """False: the update was rolled back; begin again (the group may have changed)."""
    error: str
    """Why not."""
    pause_seconds: float
    """Longest pause of generation on any gserver."""
    evicted: list[int]
    """gservers that were lost in this update."""


class FinishRun(msgspec.Struct, frozen=True):
    reason: str
    error: str = ""
    """Not empty: the run failed."""


class Done(msgspec.Struct, frozen=True):
    """The call was carried out."""


class ProcessStatus(msgspec.Struct, frozen=True):
    role: Role
    index: int
    address: str
    pid: int
    host: str
    silent_seconds: float
    """Since its last word."""
    stats: dict[str, float]
    waiting_for: str
    state: Literal["live", "silent", "evicted"]


class LedgerStatus(msgspec.Struct, frozen=True):
    policy_version: int
    max_staleness: int
    next_seq: int
    accepted: int
    running: int
    returned: int
    rejected: int
    dropped: int
    expired: int
    room: int


class Status(msgspec.Struct, frozen=True):
    """The run as the manager sees it."""

    run: str
    state: Literal["joining", "running", "finished", "failed"]
    message: str
    """Why the run ended, or what it waits for."""
    ledger: LedgerStatus
    processes: list[ProcessStatus]
    last_step: StepReport | None
    publication: dict[str, Any]
    """State of the weight update in progress, and figures of the last one."""
    data_rows: int = 0
    """Rows of the training data; 0: not known yet."""
    evaluation: EvaluationStatus | None = None
    """None: the configuration asks for none."""


class ControlClient:
    """Calls the manager. One for each process; `close` it at the end."""

    def __init__(self, url: str, *, timeout: float = 60.0) -> None:
        self.url = url.rstrip("/")
        self._timeout = timeout
        self._session: aiohttp.ClientSession | None = None
        self._ticket = ""
        """Of the admission that was asked for and not answered yet."""

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def register(self, message: Register, *, patience: float) -> RegisterReply:
        """Join the run; keeps trying for `patience` seconds while the manager is not there yet."""
        deadline = time.monotonic() + patience
        while True:
            try:
                return await self._post("/register", message, RegisterReply)
            except PeerLost as error:
                if time.monotonic() > deadline:
                    raise PeerLost(f"{error}; is the manager running there? (waited {patience:.0f} s)") from error
            await asyncio.sleep(0.2)

    async def heartbeat(self, message: Heartbeat) -> HeartbeatReply:
        return await self._post("/heartbeat", message, HeartbeatReply)

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

    async def _get(self, path: str, reply: type[Reply]) -> Reply:
        return await self._call("GET", path, None, reply, self._timeout)

    async def _call(
        self, method: str, path: str, body: msgspec.Struct | None, reply: type[Reply], timeout: float
    ) -> Reply:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        return await http.call(self._session, method, self.url + path, body, reply, timeout=timeout, peer="the manager")
