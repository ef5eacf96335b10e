"""The controller's HTTP API: the messages of its calls. `manager_client.py` has the client.

One address, the controller's URL, is enough to join a run. The owner, with the run's secret, may make every call,
and joins with it; each role has a token for its own calls.

| call | by | meaning |
|---|---|---|
| POST /register | owner | a process joins; refused when its configuration differs |
| GET /resume_point | owner | the checkpoint that the run goes on from |
| POST /place | owner | a number for a process that joins a running run |
| POST /drain | owner | a gserver or rollout worker finishes and leaves; the controller saves and ends the run |
| POST /leave | gserver, rollout | it has left |
| POST /heartbeat | all | a sign of life, with figures; the reply has whether to stop |
| GET /silent | owner | the silent processes, once their set has changed more than n times |
| GET /model | all | the files of the model, for a host that does not have it |
| GET /model/part | all | bytes of one of these files |
| GET /topology | rollout, model worker | waits until the named processes are registered; their addresses |
| POST /member | model worker | whether a CURVE key belongs to a member that may send to the caller |
| POST /keep | rollout | after the run has gone back: which groups in hand the worker may finish |
| POST /admit | rollout | waits for room in the ledger, or for a held-out prompt; sequence numbers and gservers |
| POST /route | rollout | another gserver for a group whose gserver failed |
| POST /in_flight | rollout | how many requests of its groups still run |
| POST /reject | rollout | a group is given up |
| POST /evaluation | rollout | the result of a held-out prompt |
| POST /publish/begin, /publish/commit | model worker | the two ends of a weight update |
| GET /publish/places | model worker | on which machines and GPUs the gservers are |
| POST /compare | model worker | the gservers that serve a version are to score a response |
| POST /finish_run | owner | the run is over; every process learns it with its next heartbeat |
| POST /fail_run | rollout | the run has to stop because of an error there |
| GET /status, /metrics | all | the run's state as JSON; figures for Prometheus |
| GET /health | anyone | 200 while the controller lives |
"""

from __future__ import annotations

import uuid
from typing import Annotated, Any, Literal

import msgspec

from streamrl.architecture import Architecture
from streamrl.records.evaluation import EvaluationReport
from streamrl.records.lineage import Lineage
from streamrl.records.metrics import StepReport
from streamrl.records.timeline import FrequentFailure

LONG_POLL_SECONDS = 20.0
"""How long the manager holds a waiting call before it replies that there is nothing."""

# --- members: registration, heartbeats, addresses, the end of the run ---

Role = Literal["gserver", "rollout", "controller", "model_worker"]


class Register(msgspec.Struct, frozen=True):
    """A process joins the run."""

    role: Role
    index: int
    """Number within its role, from 0."""
    address: str
    """gserver: HTTP URL; model_worker: ZMQ endpoint of its stream; master: ZMQ endpoint for its
    workers; rollout: empty."""
    config_digest: str
    pid: int
    host: str
    """Its name, for people."""
    settings: dict[str, Any] = {}
    """`Config.shared_changes`: to say what differs where the digest does."""
    machine: str = ""
    """`machine_identity`: alike for processes that share memory."""
    process_space: str = ""
    """`machine.process_space`: alike for those to whom `pid` means the same process."""
    gpu: str = ""
    """UUID of the GPU from which a gserver serves its weights; empty: from none, or not from one alone."""
    curve_key: str = ""
    """Public CURVE key of the process (z85), by which encrypted sockets know it; the same as long as it lives."""
    encrypted: bool = False
    """Whether its socket at `address` takes CURVE connections alone."""
    model: str = ""
    """`weights_fingerprint` of what a gserver or a model worker begins with."""
    begins_from: str = ""
    """`progress.identity` of what a process of the trainer, or a gserver, goes on from; empty: it begins anew."""
    joined_before: str = ""
    """`RegisterReply.lineage` of the last join; empty: it is the first one."""


class RegisterReply(msgspec.Struct, frozen=True):
    """What a process is given when it joins."""

    policy_version: int
    heartbeat_seconds: float
    token: str = ""
    """For HTTP: what the process shows from now on, good for the calls of its role in its own name."""
    credentials: dict[Role, str] = {}
    """For ZMQ: what it shows to receivers of each role that it may speak to (`credentials.py`)."""
    verification_key: str = ""
    """For a receiver on ZMQ: what it knows credentials and permits by; hexadecimal."""
    gserver_key: str = ""
    """For rollout workers: the key that gservers require."""
    lineage: str = ""
    """Tells the lineage of the run from all others."""
    lineages: list[Lineage] = []
    """For rollout workers: all lineages of the run, the present one last."""


class ResumePoint(msgspec.Struct, frozen=True):
    """What the run goes on from; empty: it begins anew."""

    checkpoint: str
    """Name of the folder among the run's checkpoints."""
    identity: str
    """`progress.identity`."""


class Heartbeat(msgspec.Struct, frozen=True):
    """A sign of life, with what the process has counted."""

    role: Role
    index: int
    stats: dict[str, float]
    """Gauges and counters of the process; names ending in `_total` only grow."""
    waiting_for: str = ""
    """What the process waits for, if it does: shown to the user."""
    error: str = ""
    """Set when the process has to give up: the run stops with this message."""
    failure: FrequentFailure | None = None
    """As in `HeartbeatEntry`."""


class HeartbeatReply(msgspec.Struct, frozen=True):
    """What a process is told with each heartbeat."""

    stop: bool
    """The run is over: finish what is at hand and leave."""
    policy_version: int
    known: bool
    """False: the manager does not know (any more) who calls; register again."""
    lineage: str = ""
    """As in `RegisterReply`; register again if it is another one."""
    leave: bool = False
    """The run goes on without this process: finish what is at hand, and leave."""
    unanswering: list[str] = []
    """To rollout workers: addresses of gservers that are silent or replaced. Their requests continue elsewhere."""


class SilentProcess(msgspec.Struct, frozen=True):
    """A process of which nothing was heard for too long."""

    role: Role
    index: int
    pid: int
    host: str


class Silence(msgspec.Struct, frozen=True):
    """The members of the run that are silent at the moment."""

    changes: int
    """How often that has changed so far."""
    processes: list[SilentProcess]
    over: bool
    """The run is over: it does not matter any more."""


class AskPlace(msgspec.Struct, frozen=True):
    """A process that joins a running run asks which number it may have."""

    role: Role
    config_digest: str
    settings: dict[str, Any] = {}
    """As in `Register`."""


class Place(msgspec.Struct, frozen=True):
    """The number that a process may join under; kept for it until it does."""

    index: int


class Drain(msgspec.Struct, frozen=True):
    """This process shall finish its work and leave. The run continues without it, unless it is the controller."""

    role: Role
    index: int


class Leave(msgspec.Struct, frozen=True):
    """This process has left, or its launcher has seen it die."""

    role: Role
    index: int
    pid: int
    death: str = ""
    """How it died; empty: it has left."""


class Peer(msgspec.Struct, frozen=True):
    """A registered process, and how it is reached."""

    role: Role
    index: int
    address: str
    curve_key: str = ""
    """Public CURVE key of the socket at `address`; empty: it is not encrypted."""


class AskMember(msgspec.Struct, frozen=True):
    """Is this the CURVE key of a member?"""

    curve_key: str


class IsMember(msgspec.Struct, frozen=True):
    """Reply to `AskMember`."""

    known: bool


class Topology(msgspec.Struct, frozen=True):
    """The registered processes of a role."""

    complete: bool
    """Whether as many as asked for are registered."""
    peers: list[Peer]
    """By index."""


class FinishRun(msgspec.Struct, frozen=True):
    """The owner ends the run: every process learns it with its next heartbeat."""

    reason: str = ""
    error: str = ""
    """Not empty: the run failed, for example because a launcher has seen one of its processes die."""


class FailRun(msgspec.Struct, frozen=True):
    """A rollout worker met an error that the configuration has the run stop at."""

    worker: int
    error: str


class Done(msgspec.Struct, frozen=True):
    """The call was carried out."""


# --- the model's files ---


class ModelFile(msgspec.Struct, frozen=True):
    """One file of the model."""

    name: str
    size: int
    """In bytes."""


class ModelListing(msgspec.Struct, frozen=True):
    """The run's model as the manager's host has it."""

    files: list[ModelFile]
    fingerprint: str
    """What copies of these files have alike, and others have not."""

    @property
    def bytes(self) -> int:
        """Size of all files together."""
        return sum(file.size for file in self.files)


class ModelPart(msgspec.Struct, frozen=True):
    """Some bytes of a file of the model."""

    content: bytes
    """From where it was asked for; empty: the file ends there."""


# --- groups: admitted, routed, given up, taken by the trainer ---


class DataFacts(msgspec.Struct, frozen=True):
    """The training data, or the held-out data, which are the same for all rollout workers of a run."""

    rows: Annotated[int, msgspec.Meta(ge=0)]
    """0: no worker has reported its data yet."""
    digest: str = ""
    """Fingerprint of prompts in files; empty for those that a function or a task generates."""


class GroupInHand(msgspec.Struct, frozen=True, array_like=True):
    """A group that a worker was admitted before the run went back, and that it can finish or has finished."""

    seq: int
    gserver: str = ""
    """URL of the gserver that makes it; empty: it is finished."""
    requests: int = 0
    """As in `GroupInFlight`."""
    tokens: int = 0


class Keep(msgspec.Struct, frozen=True):
    """The groups in hand with tokens of policies in the history of the present weights alone."""

    worker: int
    groups: list[GroupInHand]


class KeepReply(msgspec.Struct, frozen=True):
    """The groups that are leased to the worker; it drops all others."""

    kept: list[int]
    policy_version: int
    """The version at which the present lineage is."""


class Admit(msgspec.Struct, frozen=True):
    """A rollout worker has room for groups."""

    worker: int
    count: int
    """How many groups the worker can start."""
    data: DataFacts = DataFacts(rows=0)
    """The worker's training data, or its held-out data."""
    held_out: bool = False
    """Whether it asks for a held-out prompt, and not for groups to train on."""
    ticket: str = ""
    """Names the call, so that asking again after a lost answer gives the same groups; set by the client."""


class Admission(msgspec.Struct, frozen=True):
    """One group that a worker may start."""

    seq: int
    gserver: str
    """URL of the gserver for all requests of this group."""
    permit: str = ""
    """Shown with the group: `seq` was leased to this worker."""
    name: str = ""
    """The gserver's, for people."""
    evaluation: str = ""
    """`id` of the `EvaluationTask` whose held-out prompt `seq` is; empty: the group is trained on."""


class AdmitReply(msgspec.Struct, frozen=True):
    """The groups that may start."""

    admissions: list[Admission]
    """Empty after a long poll without room."""
    policy_version: int
    """The version that gservers serve: a request of these groups names the adapter of this version or a newer one."""
    stop: bool


class AskRoute(msgspec.Struct, frozen=True):
    """The gserver of a group failed: the worker asks for another one."""

    worker: int
    seq: int
    failed: str
    """URL of the gserver that failed."""
    evaluation: str = ""
    """As in `Admission`."""


class RouteReply(msgspec.Struct, frozen=True):
    """The gserver for all further requests of the group."""

    gserver: str
    """Empty: none is live now; ask again."""


class GroupInFlight(msgspec.Struct, frozen=True, array_like=True):
    """How much of one group is in flight at its gserver."""

    seq: int
    requests: int
    """Requests that run or are still to begin."""
    tokens: int
    """Tokens in the contexts of the requests that run."""


class InFlight(msgspec.Struct, frozen=True):
    """What of a worker's groups is in flight now, of those for which it has changed."""

    worker: int
    groups: list[GroupInFlight]


class InFlightReply(msgspec.Struct, frozen=True):
    """How soon the worker may report again: with more workers each does so less often."""

    pause_seconds: float


class Reject(msgspec.Struct, frozen=True):
    """A worker gives a group up."""

    worker: int
    seq: int
    reason: str


# --- evaluations: held-out prompts, made by rollout workers ---


class HeldOutResult(msgspec.Struct, frozen=True):
    """The figures of the responses to one held-out prompt, or its error."""

    worker: int
    evaluation: str
    """As in `Admission`."""
    seq: int
    rewards: list[float] = []
    """`[samples]` reward of each response."""
    lengths: list[int] = []
    """Sampled tokens of each trajectory: of an agent's response there may be several."""
    cut: int = 0
    """How many trajectories reached the limit of tokens."""
    oldest_version: int = 0
    """Oldest and newest policy version among those that sampled a token."""
    newest_version: int = 0
    error: str = ""
    """Why the prompt failed; empty: it did not. A failed prompt has no figures."""
    row: str = ""
    """The row of a prompt that failed, shortened."""


class EvaluationTask(msgspec.Struct, frozen=True):
    """An evaluation of the policy on all held-out prompts."""

    policy_version: int
    step: int
    id: str = msgspec.field(default_factory=lambda: uuid.uuid4().hex)
    """Unique: a result that was meant for another evaluation does not count in this one."""


class EvaluationStatus(msgspec.Struct, frozen=True):
    """Where the run's evaluations are."""

    running: EvaluationTask | None
    waiting: EvaluationTask | None
    done: int
    """Evaluations that were reported."""
    left_out: int
    """Evaluations that were not made because a later one was due."""
    last: EvaluationReport | None
    prompts: int = 0
    """Held-out prompts of an evaluation; 0: not known yet."""
    prompts_done: int = 0
    """Those of the running evaluation that are done, or failed."""


# --- publication: the two ends of a weight update ---


class TensorSpec(msgspec.Struct, frozen=True):
    """Name, dtype and shape of one weight."""

    name: str
    """Hugging Face parameter name."""
    dtype: str
    """`float32` or `bfloat16`."""
    shape: list[int]


class Broadcast(msgspec.Struct, frozen=True, tag="broadcast"):
    """Weights that the publisher broadcasts, as rank 0 of a process group."""

    buckets: list[list[TensorSpec]]
    """The weights in the order in which they are sent; each tensor is one broadcast."""
    address: str
    """Host of the publisher's store, at which a new group meets."""
    port: int
    backend: Literal["gloo", "nccl"]
    group_name: str
    """The weight group that the publisher has now; empty if it has none."""


class Snapshot(msgspec.Struct, frozen=True, tag="snapshot"):
    """Weights that lie in a folder, as safetensors."""

    folder: str
    machine: str = ""
    """The only one that can read it, as in `Register`; empty: every host has the folder."""
    gpu: str = ""
    """As in `Register`: the weights lie in its memory, and those who serve from it can read them; empty: in files."""
    adapter: bool = False
    """Whether they are an adapter's, in peft's format."""

    def readable_by(self, machine: str, gpu: str) -> bool:
        """Return whether a gserver there can read it."""
        return self.machine in ("", machine) and self.gpu in ("", gpu)


class GserverPlaces(msgspec.Struct, frozen=True):
    """Where the gservers are that are not silent."""

    machines: list[str]
    """As in `Register`, each once."""
    gpus: list[str]
    """As in `Register`, each once."""


class PublishBegin(msgspec.Struct, frozen=True):
    """The publisher has weights of `version` ready."""

    version: int
    weights: Broadcast | Snapshot
    resync: bool = False
    """`version` is served already: only the gservers that lack it take part."""


class PublishBeginReply(msgspec.Struct, frozen=True):
    """How the publisher is to send the weights of an update."""

    group_name: str
    """Names the update for the commit, and the group to broadcast in. A publisher without this group forms it now, as
    rank 0 of `world_size`, at the address that it announced."""
    world_size: int
    """The publisher and the ranks of all gservers; 1: no gserver lacks this version, there is nothing to commit."""


class PublishCommit(msgspec.Struct, frozen=True):
    """The publisher has sent everything, or failed to (`error`)."""

    version: int
    group_name: str
    error: str = ""
    checksums: dict[str, str] = {}
    """Name → `checksum.tensor_sums` of each weight as it was trained; empty: nothing is compared."""


class PublishReply(msgspec.Struct, frozen=True):
    """How an update ended."""

    done: bool
    """False: the update was rolled back; begin again (the group may have changed)."""
    error: str
    """Why not."""
    pause_seconds: float
    """Longest pause of generation on any gserver."""
    evicted: list[int]
    """gservers that were lost in this update."""


# --- comparison: what gservers say of a response under the weights that they serve ---


class Compare(msgspec.Struct, frozen=True):
    """Have every gserver that serves `version` score a response."""

    version: int
    tokens: list[int]
    """Prompt and response."""
    start: int
    """The first token, above 0, whose log-probability is wanted; those of all after it are, too."""


class Scores(msgspec.Struct, frozen=True):
    """One gserver's answer, or why there is none."""

    gserver: str
    """Its name, for example `gserver/0`."""
    logprobs: list[float] = []
    """Log-probabilities of the tokens from `start` on, at temperature 1, in nats."""
    seconds: float = 0.0
    """From the question to the answer, the wait for a place included."""
    computed: int = 0
    """Tokens that were computed for it, which others may use: those that it had in its cache are not counted."""
    problem: str = ""


# --- status: the run as people are told of it ---


class ProcessStatus(msgspec.Struct, frozen=True):
    """One process as the manager sees it."""

    role: Role
    index: int
    address: str
    pid: int
    host: str
    silent_seconds: float
    """Since its last word."""
    stats: dict[str, float]
    waiting_for: str
    state: Literal["live", "silent", "evicted", "draining"]
    failure: FrequentFailure | None = None
    """As in `HeartbeatEntry`."""


class LedgerStatus(msgspec.Struct, frozen=True):
    """The ledger's counts, in groups."""

    policy_version: int
    max_staleness: int
    next_seq: int
    accepted: int
    trained: int
    """Accepted groups that the policy version was trained on."""
    running: int
    returned: int
    rejected: int
    dropped: int
    expired: int
    room: int
    given_up: int = 0
    """Rejected prompts whose workers died again and again."""


class Status(msgspec.Struct, frozen=True):
    """The run as the manager sees it."""

    run: str
    state: Literal["joining", "running", "finished", "stopped", "failed"]
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
    model: Architecture | None = None
    """The policy's transformer; None: the model workers have not loaded it yet."""
