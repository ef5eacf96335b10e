"""The sections of the configuration that say what is trained, and how: [trainer], [reference], [critic],
[reward_model] and [algorithm]."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from msgspec import Meta, field

from streamrl.config.fields import DType, Every, NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section, Share

ASYNCHRONOUS, SYNCHRONOUS = "asynchronous", "synchronous"
"""Graphs that come with streamrl."""
BackendName = Literal["torch", "megatron"]
RoleName = Literal["actor", "ref", "critic", "reward"]


class RoleConfig(Section, frozen=True):
    """How the model workers share the model of one role. What is not set here is as in [trainer]."""

    backend: BackendName | None = None
    data_parallel: Positive | None = None
    context_parallel: Positive | None = None
    tensor_parallel: Positive | None = None
    pipeline_parallel: Positive | None = None
    expert_parallel: Positive | None = None


Beta = Annotated[float, Meta(ge=0, lt=1)]


class OptimizerConfig(Section, frozen=True):
    """AdamW on float32 master weights."""

    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """The second decides how long Adam remembers how large gradients were. A short memory makes steps on the noise of a
    plateau as large as those that learned the task; that is where stale runs fell (docs/collapse.md)."""
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    grad_clip: PositiveFloat = 1.0
    """Largest gradient norm."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: NonNegative = 0
    min_lr_ratio: Share = 0.0
    """Where the schedule ends, as a share of `lr`."""


class TrainerConfig(Section, frozen=True):
    """The master and its model workers."""

    backend: BackendName = "torch"
    """What computes: transformers with plain torch, or Megatron Core (`pip install "streamrl[megatron]"`)."""
    data_parallel: Positive = 1
    context_parallel: Positive = 1
    """Model workers that share each row's tokens among them, for rows that are too long for one device."""
    tensor_parallel: Positive = 1
    pipeline_parallel: Positive = 1
    """There are as many model workers as the product of the four; the torch backend has only the first two."""
    expert_parallel: Positive = 1
    """Model workers over which the experts of a layer are spread; a divisor of the product of the first three
    (megatron)."""
    roles: dict[RoleName, RoleConfig] = field(default_factory=dict)
    """Other backends or layouts for some roles, on the same model workers: [trainer.roles.critic]."""
    graph: str = ASYNCHRONOUS
    """The model function calls: `asynchronous`, `synchronous` (generation is one of the master's calls), or
    `module:function`, with `synchronous:` before it if it has the calls that generate (docs/trainer.md)."""
    shard: bool = False
    """Spread weights, gradients and optimizer state over the data- and context-parallel ranks (torch: FSDP2; megatron:
    its distributed optimizer)."""
    offload_optimizer: bool = False
    """Keep the optimizer's state, and its step, on the CPU."""
    offload: list[RoleName] = field(default_factory=list)
    """Roles that move to the CPU whenever they are idle, for example `["ref"]`. Where they are there anyway this only
    copies them."""
    batch_groups: Positive = 8
    """P: groups in a training batch."""
    lr: PositiveFloat = 1e-5
    dtype: DType = "auto"
    """Dtype of the computation; master weights are float32."""
    threads: Positive = 1
    """CPU threads of one model worker."""
    max_tokens_per_microbatch: Positive = 8192
    replay_routing: bool = True
    """Where the model has experts: train each token with those that computed it in the engine, as far as they are
    known."""
    share_prefix: bool = True
    """Compute once what trajectories of a group begin with in common: the prompt, an agent's turns."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass, instead of keeping them."""
    save_every_epochs: NonNegative = 0
    """Epochs between checkpoints. These, steps and seconds each count by themselves; 0: not by this one."""
    save_every_steps: NonNegative = 0
    save_every_seconds: NonNegativeFloat = 900.0
    keep_checkpoints: Positive = 2
    """How many checkpoints stay, besides that of the end."""
    snapshot_every_steps: NonNegative | None = None
    """Training steps between snapshots, that is, checkpoints in the memory of model worker 0's host, from which the run
    continues after a death. If not set, as often as costs at most 2% of the time; 0: none."""
    save_at_end: bool = True
    save_on_stop_seconds: NonNegativeFloat = 60.0
    """Deadline of the checkpoint that the first Ctrl-C or SIGTERM has written, in seconds. 0: none is written."""
    restarts: NonNegative = 5
    """How often, within `restart_window_seconds`, the run goes back to its latest checkpoint because the controller or
    a model worker has died; after that it stops."""
    restart_window_seconds: PositiveFloat = 3600.0
    restart_delay_seconds: PositiveFloat = 1.0
    step_timeout_seconds: PositiveFloat = 1800.0
    """Longest time for one model function call."""
    wait_warning_seconds: PositiveFloat = 30.0
    """A wait for data longer than this is named in the log."""
    logprob_diff_warning: PositiveFloat | None = None
    """Mean difference between a gserver's and the trainer's log-probabilities that is warned of, in nats. In float32 it
    is about 1e-6, in bfloat16 about 0.02. None: 0.05, and 0.2 where gservers quantise their weights."""
    logprob_diff_limit: PositiveFloat | None = None
    """One at which the run stops."""
    optimizer: OptimizerConfig = OptimizerConfig()

    @property
    def synchronous(self) -> bool:
        """Whether generation is one of the master's calls."""
        return self.graph.partition(":")[0] == SYNCHRONOUS

    @property
    def workers(self) -> int:
        """Model workers."""
        return self.data_parallel * self.context_parallel * self.tensor_parallel * self.pipeline_parallel

    @property
    def save_every(self) -> Every:
        """When checkpoints are written, besides at the end."""
        return Every(epochs=self.save_every_epochs, steps=self.save_every_steps, seconds=self.save_every_seconds)


class ReferenceConfig(Section, frozen=True):
    """The policy that `kl_*` measures the distance from."""

    path: str | None = None
    """Hugging Face checkpoint folder of a model with the policy's tokens, of any size: a teacher (on-policy
    distillation, docs/algorithms.md). None: what the policy was at the start of the run."""


class CriticConfig(Section, frozen=True):
    """The critic; there is one with `algorithm.advantage = "gae"`."""

    path: str | None = None
    """Hugging Face checkpoint folder of its first weights; by default the policy's own. Without a `score.weight` of
    its own the scalar head starts at 0."""
    lr: PositiveFloat = 1e-5
    value_clip: PositiveFloat | None = None
    """How far a value may move in one step; None: any distance."""
    optimizer: OptimizerConfig = OptimizerConfig()


class RewardModelConfig(Section, frozen=True):
    """A neural reward model that scores responses in `rew_inf`, in place of `rollout.reward`."""

    path: str | None = None
    """Hugging Face checkpoint folder of a sequence classifier with one label; None: no reward model."""


class AlgorithmConfig(Section, frozen=True):
    """What `actor_train` minimises; by default GRPO with the decoupled PPO objective.

    docs/algorithms.md tells which settings make which algorithm.
    """

    advantage: Literal["grpo", "mean", "rloo", "reinforce++", "reinforce++-baseline", "gae", "none"] = "grpo"
    """`grpo`: (r - mean) / (std + eps) in the group; `mean`: r - mean; `rloo`: r - mean of the other siblings;
    `reinforce++`: r, and `reinforce++-baseline`: r - mean; `gae`: generalised advantage estimation with a critic.
    `none`: 0, so that rewards are only watched, and the policy learns from its reference alone. With the last four each
    token has its own advantage, and they are whitened over the batch's tokens in the loss."""
    gamma: Share = 1.0
    """Discount of later tokens, where tokens have advantages of their own."""
    gae_lambda: Share = 0.95
    """Between one-step (0) and whole-response (1) estimates (`gae`)."""
    objective: Literal["ppo", "gspo", "cispo"] = "ppo"
    """`ppo`: clipped ratio of each token; `gspo`: clipped ratio of a whole response; `cispo`: the clipped ratio
    as a weight without gradient."""
    clip_low: NonNegativeFloat = 0.2
    clip_high: NonNegativeFloat = 0.28
    dual_clip: Annotated[float, Meta(gt=1)] | None = None
    """Bounds the objective of a negative advantage from below, by this multiple of the advantage."""
    proximal: Literal["auto", "recompute", "behavior"] = "auto"
    """Centre of the clip: log-probabilities at the start of the step (`recompute`: by `actor_inf`;
    `auto`: by `actor_inf` only where several minibatches make it differ from the first forward pass),
    or those of the behaviour policy (plain PPO)."""
    behavior_weight_level: Literal["token", "sequence", "geometric"] = "token"
    """The weight proximal / behaviour is that of each token, the product over a response, or its geometric mean."""
    behavior_weight_limit: Literal["truncate", "mask"] = "truncate"
    """A weight beyond its limits is cut to `behavior_weight_cap`, or its tokens leave the loss (AReaL)."""
    behavior_weight_cap: PositiveFloat = 5.0
    """Largest weight proximal / behaviour."""
    behavior_weight_floor: NonNegativeFloat = 0.0
    """Smallest one; only with `behavior_weight_limit = "mask"`."""
    behavior_kl_coef: NonNegativeFloat = 0.1
    """Weight of KL(behaviour || policy) of tokens from older policies: it brings the policy back where a step took it
    too far, also in groups that teach nothing else because all siblings scored the same (docs/collapse.md). Without
    effect at `max_staleness = 0`."""
    kl_coef: NonNegativeFloat = 0.0
    """Weight of the estimated KL(policy || reference) of a token; above 0 brings `ref_inf`."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    kl_in: Literal["loss", "reward"] = "loss"
    """Penalise each token in the loss; or in the reward: that of each token where tokens have advantages of their own,
    else that of each response, by the sum over its tokens."""
    kl_target: PositiveFloat | None = None
    """Mean KL of a token that `kl_coef` is steered towards from step to step."""
    kl_horizon: Positive = 10
    """`kl_coef` changes by a fifth, divided by this, at most in one step."""
    ref_update_every: NonNegative = 0
    """Policy versions after which the reference takes over the policy's weights; 0: it stays as it began."""
    ref_update_share: Share = 1.0
    """How much of them it takes: 1 all, less a moving average, which is kept in float32."""
    router_aux_loss_coef: NonNegativeFloat = 0.0
    """Models with experts: of the load-balancing loss (`router_aux_loss_coef` in config.json, which is not read)."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the policy's entropy in the loss (subtracted): above 0 the policy is paid to keep exploring."""
    minibatches: Positive = 1
    """Optimizer steps for each pass over a training batch."""
    epochs: Positive = 1
    """Passes over each training batch."""
    loss_aggregation: Literal["token", "sequence", "sum", "constant"] = "token"
    """Mean over tokens; or mean over responses: of the mean over their tokens, of the sum over them, or of that sum
    divided by `rollout.sampling.max_new_tokens`."""
    on_collapse: Literal["warn", "slow", "stop"] = "warn"
    """Response to figures which say that the policy is about to fall apart (docs/collapse.md). `warn`: name it in the
    log; `slow`: also generate synchronously until they are healthy again, and with half the staleness afterwards;
    `stop`: also end the run with a checkpoint and an error once it collapses."""


class RoleLayout(NamedTuple):
    """How the model workers share one role's model, with nothing left open."""

    backend: BackendName
    data_parallel: int
    context_parallel: int
    tensor_parallel: int
    pipeline_parallel: int
    expert_parallel: int


def role_config(trainer: TrainerConfig, role: RoleName) -> RoleLayout:
    """Return what holds for `role`: its own settings where it has some, else those of [trainer].

    A role that names one size has 1 for the others; one that names only the torch backend is data-parallel, over
    context groups as large as those of [trainer].
    """
    own = trainer.roles.get(role, RoleConfig())
    backend = own.backend or trainer.backend
    sizes = (
        own.data_parallel,
        own.context_parallel,
        own.tensor_parallel,
        own.pipeline_parallel,
        own.expert_parallel,
    )
    if own.backend == "torch" and all(size is None for size in sizes):
        return RoleLayout("torch", trainer.workers // trainer.context_parallel, trainer.context_parallel, 1, 1, 1)
    if all(size is None for size in sizes):
        return RoleLayout(
            backend,
            trainer.data_parallel,
            trainer.context_parallel,
            trainer.tensor_parallel,
            trainer.pipeline_parallel,
            trainer.expert_parallel,
        )
    return RoleLayout(backend, *(size or 1 for size in sizes))
