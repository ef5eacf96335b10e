"""The master's calls to a model worker, their replies, and a worker's notices.

| call | carried out | by |
|---|---|---|
| `Spec`, `ModelConfig`, `HaveScored`, `ClearDataCache` | at once, also during a computation | any worker |
| `OpenStore`, `Initialize` | one after another, in the order of requests | worker 0; all |
| `Inference`, `Function`, `TrainStep`, `Save` | one after another, in the order of requests | all, together |
| `FinishSave` | after all requests before it | worker 0 |
| `Publish` | at the same time as others | all, together |

Two requests of other designs have another form here. `fetch` does not exist: groups reach the workers through the
stream, and the notice `Stored` brings their metadata. `Spec` returns roles and counters and no dataset specification:
the size of the data set comes from the rollout workers, and the master counts epochs by it (docs/trainer.md).

Hooks run before or after a model function call. Workers' hooks are carried out inside the call's request; since a
request reaches all its workers in the order that they share, hooks may communicate. The master's hooks follow the step
of the call.
"""

from __future__ import annotations

import msgspec

from streamrl.records.progress import Progress
from streamrl.trainer.redistributor import Transfer
from streamrl.types import SampleMeta

# --- hooks ---


class DataTransfer(msgspec.Struct, frozen=True, tag=True):
    """Bring arrays to where the call needs them; the master adds this one by itself."""

    plan: list[Transfer]


class ParamRealloc(msgspec.Struct, frozen=True, tag=True):
    """Give one role's weights to another, whatever layouts and backends the two have."""

    source: str
    target: str
    every: int = 1
    """Policy versions from one time to the next: after the training step that completes them, or, as a hook of another
    call, at the first of its calls since."""
    share: float = 1.0
    """How much of the source is taken: `target ← (1 - share) · target + share · source`."""


class Offload(msgspec.Struct, frozen=True, tag=True):
    """Move an idle role to the CPU; it comes back by itself when it is called, saved or published.

    The actor stays where it is while its weights are being published: the call then waits for the publication.
    """

    role: str


class SaveHook(msgspec.Struct, frozen=True, tag=True):
    """Write a checkpoint, besides those that the configuration asks for."""

    every: int = 1
    """Policy versions from one time to the next."""


class EvaluateHook(msgspec.Struct, frozen=True, tag=True):
    """Try the policy on held-out prompts, besides when the configuration says so; needs the section [evaluation]."""

    every: int = 1
    """Policy versions from one time to the next."""


Hook = DataTransfer | ParamRealloc | Offload
"""What workers do before or after a call."""
MasterHook = SaveHook | EvaluateHook


# --- calls ---

MOST_COMPARED = 256
"""Sampled tokens of a response that are compared with the gservers'."""
PUBLICATION_STEPS = 7
"""Waits of `weights.timeout_seconds` in one attempt of `Publish`."""


class Spec(msgspec.Struct, frozen=True, tag=True):
    """Say what you are and what you have counted."""


class ModelConfig(msgspec.Struct, frozen=True, tag=True):
    """Return the configuration of the policy's transformer (`Architecture`), from its `config.json`."""


class OpenStore(msgspec.Struct, frozen=True, tag=True):
    """Worker 0: open the store at which the workers meet."""


class Initialize(msgspec.Struct, frozen=True, tag=True):
    """Meet the other workers at the store, and load the models."""

    store_host: str
    store_port: int


class Inference(msgspec.Struct, frozen=True, tag=True):
    """A pass without gradients; its output stays with the DP head."""

    mfc: str
    seqs: list[int]
    """This data-parallel rank's share."""
    pre_hooks: list[Hook] = []
    post_hooks: list[Hook] = []


class Function(msgspec.Struct, frozen=True, tag=True):
    """Call the user's function on this data-parallel rank's share."""

    mfc: str
    seqs: list[int]
    pre_hooks: list[Hook] = []
    post_hooks: list[Hook] = []


class MinibatchShare(msgspec.Struct, frozen=True):
    """One optimizer step."""

    seqs: list[int]
    """This data-parallel rank's share."""
    loss_tokens: int
    """Tokens that enter the loss, over all ranks."""
    episodes: int
    """Attempts at prompts, over all ranks."""


class Sibling(msgspec.Struct, frozen=True):
    """One response of a group."""

    seq: int
    index: int
    """Among its siblings."""


class HaveScored(msgspec.Struct, frozen=True, tag=True):
    """Have the gservers that serve `version` score a response; for the worker that received its group."""

    version: int
    response: Sibling


class TrainStep(msgspec.Struct, frozen=True, tag=True):
    """Train a role on a batch; tokens older than allowed stay out of the loss."""

    mfc: str
    policy_version: int
    oldest_version: int
    minibatches: list[MinibatchShare]
    compared: Sibling | None = None
    """A response of the first minibatch whose log-probabilities under the weights of `policy_version` are wanted."""
    lr_scale: float = 1.0
    """What the policy's learning rate is multiplied by (`algorithm.on_collapse = "slow"`); the critic's is not."""
    kept: list[int] = []
    """Groups, of this data-parallel rank's, of which the run keeps every token (`metrics.rollouts_per_step`)."""
    pre_hooks: list[Hook] = []
    post_hooks: list[Hook] = []


class ClearDataCache(msgspec.Struct, frozen=True, tag=True):
    """Let go of groups and of all arrays that were computed for them. After a training step the worker also gives the
    device's cached memory back, before its next call."""

    seqs: list[int]
    come_again: bool
    """They were dropped: take them when they come again. The device's cache is kept then."""


class Publish(msgspec.Struct, frozen=True, tag=True):
    """Send the policy's weights to the gservers as `version`; worker 0 sends, the others give it their parts."""

    version: int
    resync: bool = False
    """`version` is served already: only the gservers that lack it take part."""


class Save(msgspec.Struct, frozen=True, tag=True):
    """Copy what the run can go on from; all workers then write their parts in the background, and worker 0 removes old
    checkpoints beside them."""

    folder: str
    progress: Progress
    final: bool = False
    """Answer when it is on the disk; that it cannot be written is an error."""


class FinishSave(msgspec.Struct, frozen=True, tag=True):
    """Answer when the checkpoint that is being written is on the disk."""


Call = (
    Spec
    | ModelConfig
    | OpenStore
    | Initialize
    | Inference
    | Function
    | HaveScored
    | TrainStep
    | ClearDataCache
    | Publish
    | Save
    | FinishSave
)


class WorkerSpec(msgspec.Struct, frozen=True):
    """What a worker is, and what it has counted."""

    roles: dict[str, str]
    """Backend, layout and size of the model of each role, for people."""
    duplicated: int
    """Groups that came again after they had been stored."""


class StoreOpened(msgspec.Struct, frozen=True):
    """Where the store is at which the workers meet."""

    host: str
    port: int


class CallDone(msgspec.Struct, frozen=True):
    """A call was carried out."""

    compute_seconds: float
    rewards: dict[int, list[float]] = {}
    """Rewards of each group that `rew_inf` scored, by sequence number (DP heads only)."""


class Saved(msgspec.Struct, frozen=True):
    """A checkpoint is copied; or also written, if it is the final one."""

    unwritten: str = ""
    """Why the one before it could not be written; told once."""


class Trained(msgspec.Struct, frozen=True):
    """This rank's part of the step; the sums of all ranks are added up."""

    compute_seconds: float
    blocked_seconds: float
    """Waiting for the publication of the weights that are about to change."""
    sums: dict[str, float]
    maxima: dict[str, float]
    token_ages: dict[int, int]
    """Age in versions → tokens that entered the loss."""
    compared: list[float] = []
    """Log-probabilities, at temperature 1, of the first `MOST_COMPARED` sampled tokens of the response that was named;
    empty if another rank computes it."""
    update_seconds: float = 0.0
    """The part of `compute_seconds` that the optimizer took."""
    updates: int = 1
    """Optimizer steps; the losses in `sums` are those of all of them, added up."""


class BeingScored(msgspec.Struct, frozen=True):
    """The gservers were asked to score a response."""

    sampled: list[int]
    """Places of the response's first `MOST_COMPARED` sampled tokens, from the first of them on, which has 0; empty:
    the worker does not hold it."""


class Published(msgspec.Struct, frozen=True):
    """The gservers serve the weights."""

    seconds: float
    pause_seconds: float
    bytes: int
    """What was sent or written in all attempts, once however many received it."""
    attempts: int


class Stored(msgspec.Struct, frozen=True):
    """Notice: these groups are now in the worker's StreamDataset."""

    metas: list[SampleMeta]
