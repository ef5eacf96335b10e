"""The master's calls to a model worker, their replies, and a worker's notices.

| call | carried out | by |
|---|---|---|
| `Spec`, `ModelConfigRequest`, `ResponseRequest`, `ClearDataCache` | at once, also during a computation | any worker |
| `OpenStore`, `Initialize` | one after another, in the order of requests | worker 0; all |
| `Inference`, `Function`, `TrainStep`, `Save` | one after another, in the order of requests | all, together |
| `FinishSave` | after all requests before it | worker 0 |
| `Publish` | at the same time as others | all, together |

Two requests of other designs have another form here. `fetch` does not exist: groups reach the workers through the
stream, and a `StorageNotice` brings their metadata. `Spec` returns roles and counters and no dataset specification:
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
    """Move arrays to the workers where the call needs them; added by the master."""

    plan: list[Transfer]


class ParamRealloc(msgspec.Struct, frozen=True, tag=True):
    """Copy one role's weights to another, between any layouts and backends."""

    source: str
    target: str
    every: int = 1
    """Interval in policy versions. After a training step the hook runs when the step completes such an interval; as a
    hook of another call, it runs with the first call since then."""
    share: float = 1.0
    """Weight of the source: `target ← (1 - share) · target + share · source`."""


class Offload(msgspec.Struct, frozen=True, tag=True):
    """Move an idle role to the CPU; it returns by itself when it is called, saved or published.

    While the actor's weights are being published they stay on the device: the call then waits for the publication.
    """

    role: str


class SaveHook(msgspec.Struct, frozen=True, tag=True):
    """Write a checkpoint, in addition to those that the configuration schedules."""

    every: int = 1
    """Interval in policy versions."""


class EvaluateHook(msgspec.Struct, frozen=True, tag=True):
    """Evaluate the policy on held-out prompts, in addition to the configured evaluations; needs the section
    [evaluation]."""

    every: int = 1
    """Interval in policy versions."""


Hook = DataTransfer | ParamRealloc | Offload
"""A worker's action before or after a call."""
MasterHook = SaveHook | EvaluateHook


# --- calls ---

MOST_COMPARED = 256
"""Maximal number of a response's sampled tokens that are compared with the gservers'."""
PUBLICATION_STEPS = 7
"""Number of waits of `limits.update_seconds` in one attempt of `Publish`."""


class Spec(msgspec.Struct, frozen=True, tag=True):
    """Return the worker's roles and counters (`WorkerSpec`)."""


class ModelConfigRequest(msgspec.Struct, frozen=True, tag=True):
    """Return the configuration of the policy's transformer (`Architecture`), from its `config.json`."""


class OpenStore(msgspec.Struct, frozen=True, tag=True):
    """Open the store at which the workers meet; for worker 0."""


class Initialize(msgspec.Struct, frozen=True, tag=True):
    """Meet the other workers at the store, and load the models."""

    store_host: str
    store_port: int


class Inference(msgspec.Struct, frozen=True, tag=True):
    """Run a pass without gradients; its output stays with the DP head."""

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
    """One rank's share of an optimizer step."""

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
    """Index among its siblings."""


class ResponseRequest(msgspec.Struct, frozen=True, tag=True):
    """Return the tokens of a response, which gservers score; for the worker that received its group."""

    response: Sibling


class TrainStep(msgspec.Struct, frozen=True, tag=True):
    """Train a role on a batch; tokens older than allowed are excluded from the loss."""

    mfc: str
    policy_version: int
    oldest_version: int
    minibatches: list[MinibatchShare]
    compared: Sibling | None = None
    """The response of the first minibatch for which to return log-probabilities under the weights of
    `policy_version`."""
    lr_scale: float = 1.0
    """Factor of the policy's learning rate (`staleness.lr_by_contrast`); the critic's is not scaled."""
    kept: list[int] = []
    """Groups of this data-parallel rank for which the run keeps every token (`metrics.rollouts_per_step`)."""
    pre_hooks: list[Hook] = []
    post_hooks: list[Hook] = []


class ClearDataCache(msgspec.Struct, frozen=True, tag=True):
    """Discard groups and all arrays that were computed for them. After a training step the worker also frees the
    device's cached memory, before its next call."""

    seqs: list[int]
    come_again: bool
    """Whether the groups were dropped and must be accepted when they are sent again. The device's cache is then
    kept."""


class Publish(msgspec.Struct, frozen=True, tag=True):
    """Send the policy's weights to the gservers as `version`; worker 0 sends, the others contribute their parts."""

    version: int
    resync: bool = False
    """Whether `version` is served already, and only the gservers that lack it take part."""


class Save(msgspec.Struct, frozen=True, tag=True):
    """Copy the state from which the run can be resumed. All workers then write their parts in the background, and
    worker 0 also removes old checkpoints."""

    folder: str
    progress: Progress
    final: bool = False
    """Whether to reply only when the checkpoint is on the disk; a failure to write it is then an error."""


class FinishSave(msgspec.Struct, frozen=True, tag=True):
    """Reply when the checkpoint that is being written is on the disk."""


Call = (
    Spec
    | ModelConfigRequest
    | OpenStore
    | Initialize
    | Inference
    | Function
    | ResponseRequest
    | TrainStep
    | ClearDataCache
    | Publish
    | Save
    | FinishSave
)


class WorkerSpec(msgspec.Struct, frozen=True):
    """A worker's description and counters."""

    roles: dict[str, str]
    """Backend, layout and size of the model of each role, for people."""
    duplicated: int
    """Groups that arrived again after they had been stored."""


class StoreAddress(msgspec.Struct, frozen=True):
    """Address of the store at which the workers meet."""

    host: str
    port: int


class CallDone(msgspec.Struct, frozen=True):
    """Result of a call that was carried out."""

    compute_seconds: float
    rewards: dict[int, list[float]] = {}
    """Rewards of each group that `rew_inf` scored, by sequence number (DP heads only)."""


class SaveReply(msgspec.Struct, frozen=True):
    """Result of a checkpoint that is copied, and on the disk if it is the final one."""

    unwritten: str = ""
    """Why the previous checkpoint could not be written; reported once."""


class TrainReply(msgspec.Struct, frozen=True):
    """This rank's part of the step's result; the sums of all ranks are added up."""

    compute_seconds: float
    blocked_seconds: float
    """Seconds of waiting for the publication of the weights that are about to change."""
    sums: dict[str, float]
    maxima: dict[str, float]
    token_ages: dict[int, int]
    """Age in versions → number of tokens that entered the loss."""
    compared: list[float] = []
    """Log-probabilities, at temperature 1, of the first `MOST_COMPARED` sampled tokens of the response
    `TrainStep.compared`; empty if another rank computes it."""
    update_seconds: float = 0.0
    """The optimizer's part of `compute_seconds`."""
    updates: int = 1
    """Number of optimizer steps; the losses in `sums` are added up over all of them."""


class ResponseReply(msgspec.Struct, frozen=True):
    """The tokens of a response; both lists are empty if the worker does not hold it."""

    tokens: list[int]
    """Prompt and response, up to the last of `sampled`."""
    sampled: list[int]
    """Positions of the first `MOST_COMPARED` sampled tokens among `tokens`."""


class PublicationReply(msgspec.Struct, frozen=True):
    """Result of a publication: the gservers serve the weights."""

    seconds: float
    pause_seconds: float
    bytes: int
    """Bytes that were sent or written in all attempts, counted once for any number of receivers."""
    attempts: int


class StorageNotice(msgspec.Struct, frozen=True):
    """Notice that these groups are now in the worker's StreamDataset."""

    metas: list[SampleMeta]
