"""The messages of the controller's HTTP API.

One address, the controller's URL, is enough to join a run. The owner, with the run's secret, may make every call,
and joins with it; each role has a token for its own calls. `gserver/manager/http.py` has the table of the calls, and
`manager_client.py` the client.
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
"""How long the manager holds a waiting call before it sends an empty reply."""

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
    """Host name, for display."""
    settings: dict[str, Any] = {}
    """`Config.shared_changes`: names the settings that differ if the digests do."""
    machine: str = ""
    """`machine_identity`: equal for processes that share memory."""
    process_space: str = ""
    """`machine.process_space`: equal for processes in which `pid` means the same process."""
    gpu: str = ""
    """UUID of the GPU from which a gserver serves its weights; empty if it uses no GPU, or several."""
    process: str = ""
    """Random id of the process: another process with the same number, address and pid has another one."""
    model: str = ""
    """`weights_fingerprint` of the initial weights of a gserver or a model worker."""
    begins_from: str = ""
    """`progress.identity` of the checkpoint that a trainer process or a gserver resumes from; empty: a fresh start."""
    joined_before: str = ""
    """`RegisterReply.lineage` of the last join; empty: this is the first join."""


class Credential(msgspec.Struct, frozen=True):
    """What a process presents to receivers of one role on ZMQ (`credentials.py`)."""

    text: str
    """Begins the routing ids of its sockets, and identifies it."""
    sender_key: str
    """Secret CURVE key of all senders to that role (Z85), for encrypted sockets."""
    receiver_key: str
    """Public CURVE key of all receivers of that role (Z85)."""


class RegisterReply(msgspec.Struct, frozen=True):
    """The settings, keys and state that a process receives when it joins."""

    policy_version: int
    heartbeat_seconds: float
    token: str = ""
    """For HTTP: the token of all later calls, valid for the calls of its role in its own name."""
    credentials: dict[Role, Credential] = {}
    """For ZMQ: the credential for each role that it may send to."""
    gserver_key: str = ""
    """For rollout workers: the key that gservers require."""
    lineage: str = ""
    """Unique id of the current lineage of the run."""
    lineages: list[Lineage] = []
    """For rollout workers: all lineages of the run, the current one last."""


class ResumePoint(msgspec.Struct, frozen=True):
    """The checkpoint that the run resumes from; fields are empty for a fresh start."""

    checkpoint: str
    """Folder name among the run's checkpoints."""
    identity: str
    """`progress.identity`."""


class Heartbeat(msgspec.Struct, frozen=True):
    """A sign of life, with the process's figures."""

    role: Role
    index: int
    stats: dict[str, float]
    """Gauges and counters of the process; names ending in `_total` only grow."""
    waiting_for: str = ""
    """Text for the user: what the process waits for. Empty if it does not wait."""
    error: str = ""
    """Set when the process has to give up: the run stops with this message."""
    failure: FrequentFailure | None = None
    """As in `HeartbeatEntry`."""


class HeartbeatReply(msgspec.Struct, frozen=True):
    """The manager's state and instructions for the process, in reply to each heartbeat."""

    stop: bool
    """The run is over: finish the work in hand and leave."""
    policy_version: int
    known: bool
    """False if the manager does not know (or no longer knows) the sender; register again."""
    lineage: str = ""
    """As in `RegisterReply`; register again if it has changed."""
    leave: bool = False
    """The run continues without this process: finish the work in hand, and leave."""
    unanswering: list[str] = []
    """For rollout workers: addresses of gservers that are silent or replaced. Their requests continue elsewhere."""


class SilentProcess(msgspec.Struct, frozen=True):
    """A process whose heartbeats have stopped for too long."""

    role: Role
    index: int
    pid: int
    host: str


class Silence(msgspec.Struct, frozen=True):
    """The members of the run that are silent at the moment."""

    changes: int
    """How often the set of silent members has changed so far."""
    processes: list[SilentProcess]
    over: bool
    """The run is over: silence no longer matters."""


class AskPlace(msgspec.Struct, frozen=True):
    """A process that joins a running run requests a number."""

    role: Role
    config_digest: str
    settings: dict[str, Any] = {}
    """As in `Register`."""


class IndexReservation(msgspec.Struct, frozen=True):
    """The number that a process may join under; reserved until it joins."""

    index: int


class Drain(msgspec.Struct, frozen=True):
    """Have this process finish its work and leave. The run continues without it, unless it is the controller."""

    role: Role
    index: int


class Leave(msgspec.Struct, frozen=True):
    """This process has left, or its launcher has seen it die."""

    role: Role
    index: int
    pid: int
    death: str = ""
    """How the process died; empty if it left."""


class Peer(msgspec.Struct, frozen=True):
    """A registered process, and its address."""

    role: Role
    index: int
    address: str


class Topology(msgspec.Struct, frozen=True):
    """The registered processes of a role."""

    peers: list[Peer]
    """By index; fewer than requested if the others are not registered."""


class FinishRun(msgspec.Struct, frozen=True):
    """The owner ends the run: every process receives `stop` with its next heartbeat."""

    reason: str = ""
    error: str = ""
    """Not empty: the run failed, for example because a launcher has seen one of its processes die."""


class Steer(msgspec.Struct, frozen=True):
    """The owner changes the course of a run; a setting that is None stays as it is."""

    max_staleness: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """η for admission and for tokens in the loss, until the controller is restarted."""
    paused: bool | None = None
    """Whether to start no further group."""
    save: bool = False
    """Whether to write a checkpoint after the present step."""


class SteerReply(msgspec.Struct, frozen=True):
    """The change was made."""

    policy_version: int
    """Version that the checkpoint will have at least."""


class FailRun(msgspec.Struct, frozen=True):
    """A rollout worker met an error that, by the configuration, stops the run."""

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
    """The run's model on the manager's host."""

    files: list[ModelFile]
    fingerprint: str
    """Equal for all copies of these files, and different for other files."""

    @property
    def bytes(self) -> int:
        """Size of all files together."""
        return sum(file.size for file in self.files)


class ModelPart(msgspec.Struct, frozen=True):
    """Some bytes of a file of the model."""

    content: bytes
    """Bytes from the requested offset; empty at the end of the file."""


# --- groups: admitted, routed, given up, taken by the trainer ---


class DataFacts(msgspec.Struct, frozen=True):
    """The training data, or the held-out data, which are the same for all rollout workers of a run."""

    rows: Annotated[int, msgspec.Meta(ge=0)]
    """0: no worker has reported its data yet."""
    digest: str = ""
    """Fingerprint of prompts in files; empty for those that a function or a task generates."""
    of_tasks: list[int] = []
    """Rows of each of [[tasks]], in their order; empty without them."""


class GroupInHand(msgspec.Struct, frozen=True, array_like=True):
    """A group leased to a worker before the run went back to a checkpoint, finished or still possible to finish."""

    seq: int
    gserver: str = ""
    """URL of the gserver that generates it; empty if it is finished."""
    requests: int = 0
    """As in `GroupInFlight`."""
    tokens: int = 0
    row: int | None = None
    """As in `Admission`."""


class Keep(msgspec.Struct, frozen=True):
    """Groups in hand whose tokens all come from policies in the history of the current weights."""

    worker: int
    groups: list[GroupInHand]
    times_back: int = 0
    """How often this process has gone back with the run, this time included."""


class KeepReply(msgspec.Struct, frozen=True):
    """The groups that stay leased to the worker; it drops all others, and loses all other leases."""

    kept: list[int]
    policy_version: int
    """Current policy version of the current lineage."""


class Admit(msgspec.Struct, frozen=True):
    """A rollout worker has room for groups."""

    worker: int
    count: int
    """How many groups the worker can start."""
    data: DataFacts = DataFacts(rows=0)
    """The worker's training data, or its held-out data."""
    held_out: bool = False
    """Whether the worker requests a held-out prompt instead of groups to train on."""
    ticket: str = ""
    """Id of the call, so that a retry after a lost reply returns the same groups; set by the client."""
    times_back: int = 0
    """How often this process has gone back with the run; it no longer waits for calls from before the last time."""


class Admission(msgspec.Struct, frozen=True, omit_defaults=True):
    """One group that a worker may start."""

    seq: int
    gserver: str
    """URL of the gserver for all requests of this group."""
    permit: str = ""
    """Sent with the group: proves that `seq` was leased to this worker."""
    name: str = ""
    """The gserver's name, for display."""
    evaluation: str = ""
    """`id` of the `EvaluationTask` that the held-out prompt `seq` belongs to; empty: the group is trained on."""
    row: int | None = None
    """Row of the data set that `data.sampler` chose; None: it follows from `seq`."""


class AdmitReply(msgspec.Struct, frozen=True):
    """The groups that may start."""

    admissions: list[Admission]
    """Empty after a long poll without room."""
    policy_version: int
    """The version that gservers serve: a request of these groups names the adapter of this version or a newer one."""
    stop: bool


class AskRoute(msgspec.Struct, frozen=True):
    """The gserver of a group failed: the worker requests another one."""

    worker: int
    seq: int
    failed: str
    """URL of the gserver that failed."""
    evaluation: str = ""
    """As in `Admission`."""


class RouteReply(msgspec.Struct, frozen=True):
    """The gserver for all further requests of the group."""

    gserver: str
    """Empty if none is live now; request again."""


class GroupInFlight(msgspec.Struct, frozen=True, array_like=True):
    """How much of one group is in flight at its gserver."""

    seq: int
    requests: int
    """Requests that run or are still to begin."""
    tokens: int
    """Tokens in the contexts of the requests that run."""


class InFlight(msgspec.Struct, frozen=True):
    """The groups of a worker whose number of requests or tokens in flight has changed."""

    worker: int
    groups: list[GroupInFlight]


class InFlightReply(msgspec.Struct, frozen=True):
    """How soon the worker may report again: the more workers, the less often each reports."""

    pause_seconds: float


class Reject(msgspec.Struct, frozen=True):
    """A worker gives up a group."""

    worker: int
    seq: int
    reason: str
    reward: float | None = None
    """Its mean reward, if `rollout.filter` left it out."""


# --- evaluations: held-out prompts, sampled by rollout workers ---


class HeldOutResult(msgspec.Struct, frozen=True):
    """The figures of the responses to one held-out prompt, or its error."""

    worker: int
    evaluation: str
    """As in `Admission`."""
    seq: int
    rewards: list[float] = []
    """`[samples]` reward of each response."""
    lengths: list[int] = []
    """Sampled tokens of each trajectory; an agent's response may have several trajectories."""
    cut: int = 0
    """Number of trajectories that reached the token limit."""
    oldest_version: int = 0
    """Oldest and newest policy version among those that sampled a token."""
    newest_version: int = 0
    task: str = ""
    """Name of its task; empty without [[tasks]]."""
    error: str = ""
    """Error of the prompt; empty on success. A failed prompt has no figures."""
    row: str = ""
    """The row of a failed prompt, shortened."""


class EvaluationTask(msgspec.Struct, frozen=True):
    """An evaluation of the policy on all held-out prompts."""

    policy_version: int
    step: int
    id: str = msgspec.field(default_factory=lambda: uuid.uuid4().hex)
    """Unique: a result for another evaluation does not count in this one."""


class EvaluationStatus(msgspec.Struct, frozen=True):
    """Progress of the run's evaluations."""

    running: EvaluationTask | None
    waiting: EvaluationTask | None
    done: int
    """Evaluations that were reported."""
    left_out: int
    """Evaluations that were skipped because a later one was due."""
    last: EvaluationReport | None
    prompts: int = 0
    """Held-out prompts of an evaluation; 0: not known yet."""
    prompts_done: int = 0
    """Prompts of the running evaluation that are done, or failed."""


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
    """Host of the publisher's store, where a new group meets."""
    port: int
    backend: Literal["gloo", "nccl"]
    group_name: str
    """The publisher's current weight group; empty if it has none."""


class Snapshot(msgspec.Struct, frozen=True, tag="snapshot"):
    """Weights in a folder, as safetensors."""

    folder: str
    machine: str = ""
    """The only machine that can read the folder, as in `Register`; empty: every host can."""
    gpu: str = ""
    """As in `Register`: the weights are in this GPU's memory, and gservers on it can read them; empty: in files."""
    adapter: bool = False
    """Whether they are an adapter's, in peft's format."""

    def readable_by(self, machine: str, gpu: str) -> bool:
        """Whether a gserver on this machine and GPU can read the weights."""
        return self.machine in ("", machine) and self.gpu in ("", gpu)


class GserverPlaces(msgspec.Struct, frozen=True):
    """Machines and GPUs of the gservers that are not silent."""

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
    """Identifies the update in the commit, and is the group to broadcast in. A publisher that is not in this group
    forms it now, as rank 0 of `world_size`, at the address that it announced."""
    world_size: int
    """The publisher and the ranks of all gservers; 1: no gserver lacks this version, so there is nothing to commit."""


class PublishCommit(msgspec.Struct, frozen=True):
    """The publisher has sent everything, or failed to (`error`)."""

    version: int
    group_name: str
    error: str = ""
    checksums: dict[str, str] = {}
    """Name → `checksum.tensor_sums` of each trained weight; empty: no comparison."""


class PublishReply(msgspec.Struct, frozen=True):
    """How an update ended."""

    done: bool
    """False: the update was rolled back; begin again (the group may have changed)."""
    error: str
    """Reason if `done` is false."""
    pause_seconds: float
    """Longest pause of generation on any gserver."""
    evicted: list[int]
    """gservers that were lost in this update."""


# --- comparison: log-probabilities of a response by gservers, under the weights that they serve ---


class Scores(msgspec.Struct, frozen=True):
    """One gserver's scores, or the reason why they are missing."""

    gserver: str
    """Its name, for example `gserver/0`."""
    logprobs: list[float] = []
    """Log-probabilities of the tokens from the first sampled one on, at temperature 1, in nats."""
    seconds: float = 0.0
    """From the request to the reply, queueing included."""
    computed: int = 0
    """Tokens that the gserver computed, without those found in its cache; later requests may reuse them."""
    problem: str = ""


# --- status: the state of the run, for display ---


class ProcessStatus(msgspec.Struct, frozen=True):
    """One process as the manager sees it."""

    role: Role
    index: int
    address: str
    pid: int
    host: str
    silent_seconds: float
    """Since its last heartbeat."""
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
    """None: the configuration has no evaluation."""
    model: Architecture | None = None
    """The policy's transformer; None: the model workers have not loaded it yet."""
