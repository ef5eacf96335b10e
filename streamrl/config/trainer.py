"""The sections of the configuration for training: [trainer], [reference], [critic], [reward_model] and [algorithm]."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, field

from streamrl.config.fields import (
    DType,
    NonEmpty,
    NonNegative,
    NonNegativeFloat,
    Overrides,
    Positive,
    PositiveFloat,
    Section,
    Share,
    every,
    keys_of,
)

ASYNCHRONOUS, SYNCHRONOUS = "asynchronous", "synchronous"
"""Graphs that come with streamrl."""
BackendName = Literal["torch", "megatron"]
RoleName = Literal["actor", "ref", "critic", "reward"]


class LayoutConfig(Section, frozen=True):
    """Backend and layout of a model over the model workers."""

    backend: BackendName = "torch"
    """Backend of the computation: transformers with plain torch, or Megatron Core (`pip install "streamrl[megatron]"`).
    """
    data_parallel: Positive = 1
    """Number of groups of model workers that each train on a part of the batch."""
    context_parallel: Positive = 1
    """Number of model workers that share the tokens of each row, for rows that are too long for one device."""
    tensor_parallel: Positive = 1
    """Number of model workers that share each layer (megatron)."""
    pipeline_parallel: Positive = 1
    """The number of model workers is the product of these four sizes; the torch backend supports only the first two."""
    expert_parallel: Positive = 1
    """Number of model workers over which the experts of a layer are spread; a divisor of the product of the first three
    (megatron)."""


Beta = Annotated[float, Meta(ge=0, lt=1)]


class OptimizerConfig(Section, frozen=True):
    """AdamW on float32 master weights."""

    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """The second beta determines how long Adam remembers the size of gradients. With a short memory, steps on the noise
    of a plateau become as large as those that learned the task; stale runs collapsed there (docs/collapse.md)."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay, relative to the learning rate."""
    grad_clip: PositiveFloat = 1.0
    """Largest gradient norm."""
    schedule: NonEmpty = "constant"
    """Course of the learning rate after the warm-up: `constant`, `linear`, `cosine`, or
    `module:function(update, total_updates) -> share of lr` (docs/hooks.md)."""
    schedule_args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the function."""
    warmup_steps: NonNegative = 0
    """Optimizer steps in which the learning rate rises linearly from 0."""
    min_lr_ratio: Share = 0.0
    """Final value of the schedule, as a share of `lr`."""


class TrainerConfig(LayoutConfig, frozen=True):
    """The master and its model workers."""

    roles: dict[RoleName, Annotated[Overrides, keys_of(LayoutConfig)]] = field(default_factory=dict)
    """Other backends or layouts for some roles, on the same model workers, for example in [trainer.roles.critic]. If a
    role sets one size, its other sizes are 1."""
    graph: str = ASYNCHRONOUS
    """The model function calls: `asynchronous`, `synchronous` (generation is one of the master's calls), or
    `module:function`. A function that returns a graph with generation calls needs the prefix `synchronous:`
    (docs/graphs.md)."""
    shard: bool = False
    """Spread weights, gradients and optimizer state over the data- and context-parallel ranks (torch: FSDP2; megatron:
    its distributed optimizer)."""
    offload: list[RoleName | Literal["optimizer"]] = field(default_factory=list)
    """Roles that move to the CPU while they are idle, for example `["ref"]`; with `"optimizer"`, the optimizer's state
    is kept, and its step computed, on the CPU. On a CPU this only adds copies."""
    batch_groups: Positive = 8
    """P: groups in a training batch."""
    lr: PositiveFloat = 1e-5
    """Learning rate of the policy."""
    dtype: DType = "auto"
    """Dtype of the computation; master weights are float32."""
    threads: Positive = 1
    """CPU threads of one model worker."""
    max_tokens_per_microbatch: Positive = 8192
    """Most tokens in one forward and backward pass."""
    replay_routing: bool = True
    """For models with experts: train each token with the experts that computed it in the engine, if they are known."""
    share_prefix: bool = True
    """Compute common beginnings of trajectories once: a template of all groups, the prompt, and an agent's turns."""
    compile: bool = True
    """Compile decoder layers on a GPU (torch backend), unless activations are recomputed, weights are spread or tokens
    choose experts."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass, instead of keeping them."""
    save_every: str = "15m"
    """Period of checkpoints, for example "15m", "100 steps", "2 epochs", "1h, 500 steps" or "never". Several periods
    count independently of each other."""
    keep_checkpoints: Positive = 2
    """Number of checkpoints that are kept, in addition to the final one."""
    snapshot_every_steps: NonNegative | None = None
    """Training steps between snapshots: checkpoints in the memory of model worker 0's host, from which the run
    continues after a death. None: as often as costs at most 2% of the time; 0: no snapshots."""
    save_at_end: bool = True
    """Write a checkpoint at the end of the run."""
    logprob_diff_warning: PositiveFloat | None = None
    """Mean difference between the log-probabilities of a gserver and of the trainer that triggers a warning, in nats.
    It is about 1e-6 in float32, and about 0.02 in bfloat16. None: 0.05, or 0.2 if gservers quantise their weights."""
    logprob_diff_limit: PositiveFloat | None = None
    """Mean difference that stops the run, in nats."""
    optimizer: OptimizerConfig = OptimizerConfig()

    def __post_init__(self) -> None:
        every(self.save_every, key="save_every")

    @property
    def synchronous(self) -> bool:
        """Whether generation is one of the master's calls."""
        return self.graph.partition(":")[0] == SYNCHRONOUS

    @property
    def workers(self) -> int:
        """Number of model workers."""
        return self.data_parallel * self.context_parallel * self.tensor_parallel * self.pipeline_parallel


class ReferenceConfig(Section, frozen=True):
    """The reference policy for the `kl_*` settings."""

    path: str | None = None
    """Hugging Face checkpoint folder of a model with the policy's tokens, of any size: a teacher (on-policy
    distillation, docs/algorithms.md). None: the policy at the start of the run."""


class CriticConfig(Section, frozen=True):
    """The critic; used with `algorithm.advantage = "gae"`."""

    path: str | None = None
    """Hugging Face checkpoint folder of its initial weights; None: the policy's. Without a `score.weight` in the
    checkpoint, the scalar head starts at 0."""
    lr: PositiveFloat = 1e-5
    """Learning rate of the critic."""
    value_clip: PositiveFloat | None = None
    """Largest change of a value in one step; None: no limit."""
    optimizer: Annotated[Overrides, keys_of(OptimizerConfig)] = field(default_factory=dict)
    """A setting that is not given here is as in [trainer.optimizer]."""


class RewardModelConfig(Section, frozen=True):
    """A neural reward model that scores responses in `rew_inf`, in place of `rollout.reward`."""

    path: str | None = None
    """Hugging Face checkpoint folder of a sequence classifier with one label; None: no reward model."""


class AlgorithmConfig(Section, frozen=True):
    """The objective that `actor_train` minimises; by default GRPO with the decoupled PPO objective.

    docs/algorithms.md lists the settings for each algorithm.
    """

    advantage: NonEmpty = "grpo"
    """`grpo`: (r - mean) / (std + eps) in the group; `mean`: r - mean; `rloo`: r - mean of the other siblings;
    `reinforce++`: r, and `reinforce++-baseline`: r - mean; `gae`: generalised advantage estimation with a critic.
    `none`: 0, so that rewards are only monitored, and the policy learns from its reference alone. With the last four
    each token has its own advantage, and the loss whitens advantages over the batch's tokens. Or
    `module:function(rewards, episodes) -> array` (docs/hooks.md)."""
    advantage_args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the function."""
    gamma: Share = 1.0
    """Discount of later tokens, if tokens have their own advantages."""
    gae_lambda: Share = 0.95
    """Interpolates between one-step (0) and whole-response (1) estimates (`gae`)."""
    loss: NonEmpty = "ppo"
    """`ppo`: clipped ratio of each token; `gspo`: clipped ratio of a whole response; `cispo`: the clipped ratio as a
    weight without gradient. Or `module:function(tokens) -> tensor` (docs/hooks.md)."""
    loss_args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the function."""
    clip_low: NonNegativeFloat = 0.2
    """The ratio is clipped from below at 1 minus this."""
    clip_high: NonNegativeFloat = 0.28
    """The ratio is clipped from above at 1 plus this."""
    dual_clip: Annotated[float, Meta(gt=1)] | None = None
    """Bounds the objective of a negative advantage from below, by this multiple of the advantage."""
    proximal: Literal["auto", "recompute", "behavior"] = "auto"
    """Centre of the clip: log-probabilities at the start of the step (`recompute`: by `actor_inf`; `auto`: by
    `actor_inf` only if they differ from the first forward pass because there are several minibatches), or those under
    the behaviour policy (plain PPO)."""
    behavior_weight_level: Literal["token", "sequence", "geometric", "none"] = "token"
    """Level of the weight proximal / behaviour: of each token, their product over a response, or their geometric mean.
    `none`: no weight, for a loss that corrects for the behaviour policy itself."""
    behavior_weight_limit: Literal["truncate", "mask"] = "truncate"
    """A weight beyond its limits is truncated to `behavior_weight_cap`, or its tokens are masked from the loss (AReaL).
    """
    behavior_weight_cap: PositiveFloat = 5.0
    """Largest weight proximal / behaviour."""
    behavior_weight_floor: NonNegativeFloat = 0.0
    """Smallest weight; only with `behavior_weight_limit = "mask"`."""
    behavior_kl_coef: NonNegativeFloat = 0.1
    """Weight of KL(behaviour || policy) of tokens from older policies. It pulls the policy back after a step that went
    too far, even in groups that teach nothing else because all siblings scored the same (docs/collapse.md). Without
    effect at `max_staleness = 0`."""
    kl_coef: NonNegativeFloat = 0.0
    """Weight of the estimated KL(policy || reference) of a token; a value above 0 adds `ref_inf` to the graph."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL divergence from one sample (docs/algorithms.md)."""
    kl_in: Literal["loss", "reward"] = "loss"
    """`loss`: penalise each token in the loss. `reward`: penalise the reward, of each token if tokens have their own
    advantages, else of each response by the sum over its tokens."""
    kl_target: PositiveFloat | None = None
    """Target for the mean KL of a token; `kl_coef` is adjusted towards it in each step."""
    kl_horizon: Positive = 10
    """In one step `kl_coef` changes by at most a fifth, divided by this."""
    ref_update_every: NonNegative = 0
    """Policy versions between copies of the policy's weights to the reference; 0: the reference does not change."""
    ref_update_share: Share = 1.0
    """Share of the policy's weights in such a copy. 1: a full copy; below 1: a moving average, kept in float32."""
    router_aux_loss_coef: NonNegativeFloat = 0.0
    """Models with experts: weight of the load-balancing loss (`router_aux_loss_coef` in config.json is not read)."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the policy's entropy in the loss (subtracted); a value above 0 rewards exploration."""
    minibatches: Positive = 1
    """Optimizer steps in each pass over a training batch."""
    epochs: Positive = 1
    """Passes over each training batch."""
    loss_aggregation: Literal["token", "sequence", "sum", "constant"] = "token"
    """`token`: mean over tokens. The others are means over responses: of the mean over a response's tokens
    (`sequence`), of the sum over them (`sum`), or of that sum divided by `rollout.sampling.max_new_tokens`
    (`constant`)."""
    on_collapse: Literal["warn", "stop"] = "warn"
    """Response to signs of an imminent collapse of the policy (docs/collapse.md). `warn`: name them in the log; `stop`:
    also end the run with a checkpoint and an error once it collapses."""


def role_config(trainer: TrainerConfig, role: RoleName) -> LayoutConfig:
    """Return the layout of `role`: its own settings if it has some, else the settings of [trainer].

    If a role sets one size, its other sizes default to 1. If it sets only the torch backend, it is data-parallel, with
    context groups of the same size as in [trainer].
    """
    own: Overrides = {"backend": trainer.backend} | trainer.roles.get(role, {})
    if len(own) == 1 and own["backend"] == "torch" and "backend" in trainer.roles.get(role, {}):
        context = trainer.context_parallel
        own |= {"data_parallel": trainer.workers // context, "context_parallel": context}
    elif len(own) == 1:
        own = {name: getattr(trainer, name) for name in LayoutConfig.__struct_fields__} | own
    return msgspec.convert(own, LayoutConfig)
