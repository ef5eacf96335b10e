"""What the master asks of a model worker, what it answers, and what it tells unasked."""

from __future__ import annotations

import msgspec

from streamrl.progress import Progress
from streamrl.types import SampleMeta


class OpenStore(msgspec.Struct, frozen=True, tag=True):
    """Worker 0: open the store at which the data-parallel ranks meet."""

    world_size: int


class Initialize(msgspec.Struct, frozen=True, tag=True):
    """Load the model; join the other ranks at the store if there are any."""

    world_size: int
    store_host: str
    store_port: int


class Infer(msgspec.Struct, frozen=True, tag=True):
    """Run `ref_inf` or `actor_inf` on groups that the worker holds."""

    mfc: str
    seqs: list[int]


class Minibatch(msgspec.Struct, frozen=True):
    """One optimizer step."""

    seqs: list[int]
    """The worker's own share."""
    loss_tokens: int
    """Tokens that enter the loss, over all workers."""
    sequences: int
    """Trajectories, over all workers."""


class Train(msgspec.Struct, frozen=True, tag=True):
    """Run `actor_train`, then forget the groups; tokens older than allowed stay out of the loss."""

    policy_version: int
    oldest_version: int
    minibatches: list[Minibatch]


class Discard(msgspec.Struct, frozen=True, tag=True):
    """Groups were dropped: let go of them, and take them again when they come anew."""

    seqs: list[int]


class Publish(msgspec.Struct, frozen=True, tag=True):
    """Worker 0: bring the weights to the gservers as `version`."""

    version: int


class Save(msgspec.Struct, frozen=True, tag=True):
    """Worker 0: write a checkpoint that the run can go on from, in a folder beside which old ones are removed."""

    folder: str
    progress: Progress


class Count(msgspec.Struct, frozen=True, tag=True):
    """Say what the StreamDataset has counted."""


Call = OpenStore | Initialize | Infer | Train | Discard | Publish | Save | Count


class StoreOpened(msgspec.Struct, frozen=True):
    host: str
    port: int


class Done(msgspec.Struct, frozen=True):
    compute_seconds: float


class Trained(msgspec.Struct, frozen=True):
    """This rank's part of the step; the sums of all ranks are added up."""

    compute_seconds: float
    blocked_seconds: float
    """Waiting for the publication of the weights that are about to change."""
    sums: dict[str, float]
    maxima: dict[str, float]
    token_ages: dict[int, int]
    """Age in versions → tokens that entered the loss."""


class Published(msgspec.Struct, frozen=True):
    seconds: float
    pause_seconds: float
    bytes: int
    attempts: int


class Counted(msgspec.Struct, frozen=True):
    stored: int
    duplicated: int
    refused: int
    held: int


class Stored(msgspec.Struct, frozen=True):
    """Notice: these groups are now in the worker's StreamDataset."""

    metas: list[SampleMeta]
