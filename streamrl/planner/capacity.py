"""Capacity planning: whether a model fits on a number of GPUs, their best division, and the traffic of a weight update.

Everything here is computed from the model's shape; nothing is measured. Weights, gradients, optimizer state and KV
cache are exact counts of streamrl's allocations (tests compare them with real ones); activations and rates are
estimates from the constants below. docs/scale.md shows the results for models of 7B, 32B and 70B. Pure.

If only data and context parallelism are used, the model is trained by the torch backend, sharded (FSDP2), else by
Megatron with its distributed optimizer. Activations are recomputed in the backward pass, layer by layer. The model is
served by SGLang in bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from streamrl.errors import ConfigError, ModelError
from streamrl.planner.shapes import Shape, shape_of
from streamrl.trainer.layout import Layout

GIB = 2**30
RESERVED = 0.08
"""Share of a GPU's memory for the CUDA context, NCCL's buffers and fragmentation."""
TRAINED_SHARE = 0.32
"""Share of a GPU's peak that training reaches, with the recomputed forward pass counted: measured for the torch backend
with 1.2 billion weights on an H200 (`benchmarks/results/gpu-h200.json`); Megatron reached 0.36. By one
profiled step, compiled layers reach about as much on an H100."""
DECODED_SHARE = 0.4
"""Share of a GPU's peak that decoding reaches if it is limited by arithmetic; not measured."""
BANDWIDTH_SHARE = 0.6
"""Share of the memory's bandwidth that decoding reaches; not measured with large models. The embedded engine reached
0.37 with 1.2 billion weights and one request on an H100 (`benchmarks/results/gpu-h100-80gb-hbm3.json`)."""
LINK_SHARE = 0.8
"""Share of a host's network bandwidth that a broadcast reaches."""
HEAD_CHUNK_TOKENS = 1024
"""Tokens in a chunk of the head: only the logits of one chunk are held at once (`trainer/backends/torch.py`)."""
LOGIT_BYTES = 24
"""Bytes for one of these logits, forward and backward: in bfloat16, in float32, scaled, as a probability, its products,
and their gradients."""
PREFILL_TOKENS = 8192
"""Prompt tokens that a server computes in one batch."""
MOST_RUNNING = 256
"""Most responses that a server decodes together."""
MOST_CONTEXT = 32
"""Most ranks of context parallelism that are tried."""
BETTER = 0.02
"""Share by which a division has to be faster to be preferred to a simpler one."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """The GPUs; by default hosts of eight H100s with one network card of 400 Gbit/s for each GPU."""

    gpus: int
    gpu_memory_gib: float = 80.0
    gpus_per_host: int = 8
    peak_tflops: float = 989.0
    """Peak of bfloat16 matrix products, without sparsity."""
    memory_tb_s: float = 3.35
    """Bandwidth of a GPU's memory."""
    host_gbit_s: float = 3200.0
    """Network bandwidth of one host, all its cards together."""

    @property
    def usable(self) -> float:
        """Usable bytes of a GPU's memory."""
        return self.gpu_memory_gib * GIB * (1 - RESERVED)

    @property
    def link(self) -> float:
        """Bytes per second that reach a GPU over the network when all GPUs of its host receive."""
        return self.host_gbit_s / 8 * 1e9 * LINK_SHARE / self.gpus_per_host


class Roles(msgspec.Struct, frozen=True, kw_only=True):
    """Models that the trainer holds in addition to the policy, and how the policy is trained."""

    lora_rank: int = 0
    """Rank of the adapters of all linear layers, which are trained instead of the policy's weights (`model.lora.rank`);
    0: the weights themselves are trained."""
    critic: bool = False
    """Whether there is a critic, on a body like the policy's (`algorithm.advantage = "gae"`)."""
    reference: bool = False
    """Whether there is a frozen policy (`algorithm.kl_coef`). With adapters it is the policy without them, and takes no
    memory."""

    @property
    def passes(self) -> int:
        """Arithmetic of a step for one token, in forward passes, over all roles.

        The policy: `actor_inf`, and in `actor_train` the forward pass, its recomputation, and the backward pass, which
        counts as two where weights have gradients, and as one where only their inputs do. A critic has as many as a
        policy without adapters; a reference has one.
        """
        trained = 1 + 1 + 1 + 2
        return trained - (1 if self.lora_rank else 0) + (trained if self.critic else 0) + (1 if self.reference else 0)

    def __str__(self) -> str:
        words = [f"adapters of rank {self.lora_rank}"] if self.lora_rank else []
        words += ["a critic"] if self.critic else []
        words += ["a reference"] if self.reference else []
        return ", ".join(words)


ONLY_POLICY = Roles()


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """The lengths of sequences, and the roles in training."""

    context: int = 16384
    """Longest prompt and response together, in tokens."""
    mean_context: int = 4096
    """Mean of a prompt and response together, in tokens."""
    microbatch_tokens: int = 8192
    """Tokens of the rows of one micro-batch (`trainer.max_tokens_per_microbatch`); a longer row is one by itself."""
    roles: Roles = ONLY_POLICY


class Sizes(msgspec.Struct, frozen=True):
    """The given sizes of a division; None: any."""

    data_parallel: int | None = None
    tensor_parallel: int | None = None
    pipeline_parallel: int | None = None
    context_parallel: int | None = None
    expert_parallel: int | None = None
    gservers: int | None = None
    gserver_tensor: int | None = None
    """GPUs of one gserver."""


ANY_SIZES = Sizes()


def backend_of(layout: Layout) -> str:
    """Return the backend that trains a model with this layout."""
    return "torch" if layout.tensor == layout.pipeline == layout.expert == 1 else "megatron"


class TrainerMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on the fullest of the trainer's GPUs, while the role that needs the most memory computes."""

    weights: float
    """The policy's weights, with its adapters, in the precision in which they are kept between steps."""
    optimizer: float
    """The policy's optimizer: both moments, and master weights if they are separate."""
    critic: float = 0.0
    """Weights and optimizer of the critic between steps, with Megatron also its gradients."""
    reference: float = 0.0
    """Weights of the reference."""
    gradients: float
    """Gradients of the role that is computing; with Megatron the policy's gradients, which stay allocated."""
    gathered: float
    """Whole layers that sharded ranks gather while they compute them."""
    activations: float
    logits: float

    @property
    def state(self) -> float:
        """Bytes that stay allocated between two steps, gradients included."""
        return self.weights + self.gradients + self.optimizer + self.critic + self.reference

    @property
    def total(self) -> float:
        return self.state + self.gathered + self.activations + self.logits


class ServerMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on one GPU of a gserver."""

    weights: float
    working: float
    """Activations of a prompt, logits, and a bucket of new weights."""
    kv_token: float
    """Bytes of one token in the KV cache."""
    kv_room: float
    """Bytes left for the KV cache; negative: the number of missing bytes."""

    @property
    def kv_tokens(self) -> int:
        """Tokens that fit into the KV cache."""
        return max(0, int(self.kv_room / self.kv_token))


class UpdateTraffic(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that one weight update moves, and how long it takes."""

    weights: int
    """All weights, in the served precision."""
    per_link: float
    """Sent by the trainer's first rank, and received by each GPU of a gserver, regardless of its slice of the model."""
    seconds: float


class Division(msgspec.Struct, frozen=True, kw_only=True):
    """A division of the GPUs between trainer and gservers, with its memory and rates."""

    layout: Layout
    gservers: int
    server_tensor: int
    """GPUs of one gserver."""
    trainer: TrainerMemory
    server: ServerMemory
    running: int
    """Responses of mean length that all gservers together hold."""
    trained_per_second: float
    """Tokens per second that the trainer can train on."""
    generated_per_second: float
    """Tokens per second that the gservers can generate."""
    update: UpdateTraffic
    checkpoint: int
    """Bytes of a checkpoint: float32 weights and both moments of all trained weights."""
    lacking: float
    """Bytes missing on the GPU with the largest shortage; 0: the division fits."""
    lacks: str
    """The GPU with this shortage, in words; empty if the division fits."""

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of the slower pool."""
        return min(self.trained_per_second, self.generated_per_second)


class CapacityPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Divisions that fit, the recommended one first."""

    shape: Shape
    machine: Machine
    job: Workload
    divisions: list[Division]
    reason: str


# --- memory --------------------------------------------------------------------------------------


def trainer_memory(
    shape: Shape, layout: Layout, *, tokens: int, shard: bool = True, roles: Roles = ONLY_POLICY
) -> TrainerMemory:
    """Return the memory of the fullest rank; `tokens`: of one micro-batch, over all ranks of the context dimension.

    An upper bound over pipeline stages: with as many micro-batches in flight as in the first stage, and the logits of
    the last. The torch backend computes in bfloat16 with float32 weights, Megatron with bfloat16 weights and float32
    gradients. `shard`: whether data-parallel ranks share their state, or each holds all of it.
    """
    policy = _held(shape, layout, _ends(shape, layout), shard=shard)
    body = _held(shape, layout, shape.embedding, shard=shard)  # the critic's
    layers = math.ceil(shape.layers / layout.pipeline)
    if backend_of(layout) == "megatron":
        return TrainerMemory(
            weights=2 * policy.whole,
            optimizer=12 * policy.own,
            critic=(2 + 4) * body.whole + 12 * body.own if roles.critic else 0.0,
            reference=2 * policy.whole if roles.reference else 0.0,
            gradients=4 * policy.whole,
            gathered=0.0,
            activations=_activations(shape, layout, tokens, layers=layers, residual=2),
            logits=LOGIT_BYTES * min(tokens / layout.context, HEAD_CHUNK_TOKENS) * shape.vocab_size / layout.tensor,
        )
    sharded = shard and layout.data * layout.context > 1
    adapter = shape.adapter(roles.lora_rank)
    trained = adapter * policy.own / policy.whole if adapter else policy.own
    logits = float(LOGIT_BYTES * min(tokens, HEAD_CHUNK_TOKENS) * shape.vocab_size)
    calls = [(4 * trained, _gathered(shape, policy, _ends(shape, layout), sharded=sharded, adapter=adapter), logits)]
    if roles.critic:
        calls.append((4 * body.own, _gathered(shape, body, shape.embedding, sharded=sharded), 0.0))
    gradients, gathered, logits = max(calls, key=sum)
    return TrainerMemory(
        weights=4 * trained + (2 * policy.own if adapter else 0),
        optimizer=8 * trained,
        critic=12 * body.own if roles.critic else 0.0,
        reference=2 * policy.own if roles.reference and not adapter else 0.0,
        gradients=gradients,
        gathered=gathered,
        activations=_activations(shape, layout, tokens, layers=layers, residual=4),
        logits=logits,
    )


class RankWeights(NamedTuple):
    """Number of weights on the rank that has the most."""

    whole: float
    """Weights in its tensor, pipeline and expert slice of the model."""
    own: float
    """Share of `whole` that this rank stores if its data and context ranks shard the weights."""


def _ends(shape: Shape, layout: Layout) -> int:
    """Return the weights of embedding and head, both if one stage has both."""
    return shape.embedding if layout.pipeline > 1 or shape.tied else 2 * shape.embedding


def _held(shape: Shape, layout: Layout, ends: int, *, shard: bool) -> RankWeights:
    """Return the weights of the fullest rank; `ends`: number of weights of embedding and head."""
    layers = math.ceil(shape.layers / layout.pipeline)
    spread = layout.data * layout.context if shard else 1
    found = RankWeights(0.0, 0.0)
    for first in range(0, shape.layers, layers):
        end = min(first + layers, shape.layers)
        dense = (shape.dense_between(first, end) + ends + shape.hidden_size) / layout.tensor
        experts = shape.sparse_between(first, end) * shape.experts * shape.expert / layout.expert
        shared = dense / spread + experts / max(1, spread * layout.tensor // layout.expert)
        found = max(found, RankWeights(dense + experts, shared if shard else dense + experts))
    return found


def _gathered(shape: Shape, held: RankWeights, ends: int, *, sharded: bool, adapter: int = 0) -> float:
    """Return the bytes that the torch backend gathers or copies of a model with `held` weights while it computes."""
    if not sharded:
        return 2 * (adapter or held.whole)  # copies in bfloat16 of all float32 weights, which autocast keeps
    # two layers at a time are gathered in their stored precision, and cast; the rest stays whole for the whole pass
    layer, rest = shape.largest_layer, ends + shape.hidden_size
    if adapter:
        frozen = 2 * 2 * layer + 2 * rest
        return frozen + (2 * 4 + 2 + 4) * adapter / shape.layers
    return 2 * 4 * layer + 2 * layer + 4 * rest + 4 * layer


def _activations(shape: Shape, layout: Layout, tokens: int, *, layers: int, residual: int) -> float:
    """Return an estimate of the bytes of activations: the input of each layer, and everything that the backward pass of
    one recomputed layer needs, with its gradients. `residual`: bytes of a number between layers."""
    mine = tokens / layout.context
    kept = residual * shape.hidden_size * (layers + 1)
    in_flight = layout.pipeline  # micro-batches of the first stage that are between forward and backward pass
    heads = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    recomputed = (3 * residual + 8) * shape.hidden_size + (8 * heads + 8 * shape.width) / layout.tensor
    if shape.experts:
        recomputed += 4 * shape.experts_per_token * shape.hidden_size  # tokens sent to their experts, and back
    return mine * (kept * in_flight + 1.5 * recomputed)


def server_memory(shape: Shape, machine: Machine, *, tensor: int) -> ServerMemory:
    """Return the memory of one GPU of a gserver over `tensor` GPUs. If there are fewer key-value heads than GPUs, some
    GPUs hold the same head."""
    working = PREFILL_TOKENS * 2 * (6 * shape.hidden_size + 3 * shape.width / tensor)
    working += MOST_RUNNING * 8 * shape.vocab_size + 256 * 2**20
    weights = 2 * shape.parameters / tensor
    heads = math.ceil(shape.kv_heads / tensor)
    return ServerMemory(
        weights=weights,
        working=working,
        kv_token=2 * shape.kv_numbers / shape.kv_heads * heads,
        kv_room=machine.usable - weights - working,
    )


# --- traffic and rates ---------------------------------------------------------------------------


def update_traffic(shape: Shape, machine: Machine, *, gservers: int) -> UpdateTraffic:
    """Return the traffic of an update by broadcast: weights are sent along the ranks, each rank forwards them once, and
    so all of them pass each link once."""
    weights = 2 * shape.parameters
    per_link = float(weights) if gservers else 0.0
    return UpdateTraffic(weights=weights, per_link=per_link, seconds=per_link / machine.link)


def trained_per_second(
    shape: Shape, machine: Machine, *, gpus: int, mean_context: int, roles: Roles = ONLY_POLICY
) -> float:
    """Return an estimate for a step with `actor_inf`, at `TRAINED_SHARE` of the peak."""
    return gpus * machine.peak_tflops * 1e12 * TRAINED_SHARE / (roles.passes * shape.forward_flops(mean_context))


def generated_per_second(shape: Shape, machine: Machine, *, tensor: int, running: int, mean_context: int) -> float:
    """Return an estimate for one gserver: a decode step reads the weights and the used KV cache, and computes."""
    if running == 0:
        return 0.0
    touched = min(shape.experts, running * shape.experts_per_token)  # experts that some token of the step needs
    sparse = shape.sparse_between(0, shape.layers)
    read = 2 * (shape.parameters - sparse * (shape.experts - touched) * shape.expert) / tensor
    read += running * mean_context / 2 * 2 * shape.kv_numbers / shape.kv_heads * math.ceil(shape.kv_heads / tensor)
    seconds = read / (machine.memory_tb_s * 1e12 * BANDWIDTH_SHARE)
    flops = running * shape.forward_flops(mean_context) / tensor
    return running / max(seconds, flops / (machine.peak_tflops * 1e12 * DECODED_SHARE))


# --- divisions -----------------------------------------------------------------------------------


def division(
    shape: Shape, machine: Machine, job: Workload, *, layout: Layout, gservers: int, server_tensor: int
) -> Division:
    """Compute one division; raises `ModelError` if the model cannot be cut so, `ConfigError` with too few GPUs."""
    check_layout(shape, layout, gpus_per_host=machine.gpus_per_host, roles=job.roles)
    _check_server(shape, server_tensor, gpus_per_host=machine.gpus_per_host)
    needed = layout.world + gservers * server_tensor
    if needed > machine.gpus:
        raise ConfigError(
            f"{layout} and {gservers} gservers of {server_tensor} GPUs need {needed} GPUs, "
            f"{needed - machine.gpus} more than --gpus {machine.gpus}"
        )
    trainer = trainer_memory(shape, layout, tokens=max(job.context, job.microbatch_tokens), roles=job.roles)
    server = server_memory(shape, machine, tensor=server_tensor)
    running = min(MOST_RUNNING, server.kv_tokens // job.mean_context) if server.kv_tokens >= job.context else 0
    missing = {
        "a GPU of the trainer": trainer.total - machine.usable,
        f"a GPU of a gserver, for one response of {job.context:,} tokens": job.context * server.kv_token
        - server.kv_room,
    }
    where = max(missing, key=lambda name: missing[name])
    lacking = max(0.0, missing[where])
    trained = shape.adapter(job.roles.lora_rank) or shape.parameters
    if job.roles.critic:
        trained += shape.parameters - (0 if shape.tied else shape.embedding) + shape.hidden_size
    generated = generated_per_second(
        shape, machine, tensor=server_tensor, running=running, mean_context=job.mean_context
    )
    return Division(
        layout=layout,
        gservers=gservers,
        server_tensor=server_tensor,
        trainer=trainer,
        server=server,
        running=running * gservers,
        trained_per_second=trained_per_second(
            shape, machine, gpus=layout.world, mean_context=job.mean_context, roles=job.roles
        ),
        generated_per_second=gservers * generated,
        update=update_traffic(shape, machine, gservers=gservers),
        checkpoint=12 * trained,
        lacking=lacking,
        lacks=where if lacking else "",
    )


def check_layout(shape: Shape, layout: Layout, *, gpus_per_host: int, roles: Roles = ONLY_POLICY) -> None:
    """Raise `ModelError` if the model cannot be cut by `layout`, or not for these `roles`."""
    problems = layout.obstacles(shape)
    if roles.lora_rank and backend_of(layout) == "megatron":
        problems.append("adapters are trained by the torch backend, which has data and context parallelism alone")
    if layout.tensor > gpus_per_host:
        problems.append(f"tensor {layout.tensor} is more than the {gpus_per_host} GPUs of a host")
    if problems:
        raise ModelError(f"{shape.name} cannot be trained as {layout}: {'; '.join(problems)}")


def _check_server(shape: Shape, tensor: int, *, gpus_per_host: int) -> None:
    few, many = sorted((tensor, shape.kv_heads))
    if shape.heads % tensor or many % few:
        raise ModelError(
            f"{shape.name} cannot be served over {tensor} GPUs: it has {shape.heads} heads and {shape.kv_heads} for "
            "keys and values"
        )
    if tensor > gpus_per_host:
        raise ModelError(f"a gserver over {tensor} GPUs does not fit on a host of {gpus_per_host}")


def capacity_plan(
    shape: Shape,
    machine: Machine,
    job: Workload,
    sizes: Sizes = ANY_SIZES,
) -> CapacityPlan:
    """Compute all divisions of the GPUs with the given `sizes`, and recommend one.

    Among the divisions that fit, the one with the fastest slower pool is recommended; of divisions within `BETTER` of
    it, the one with the simplest layout. Raises `ConfigError` if none fits, with the shortage of the nearest one.
    """
    if machine.gpus < 2:
        raise ConfigError(f"--gpus {machine.gpus}: a division needs one GPU for the trainer and one for a gserver")
    found, problem = list[Division](), ""
    for width, count in _servers(shape, machine, gservers=sizes.gservers, tensor=sizes.gserver_tensor):
        for layout in _layouts(shape, machine, machine.gpus - width * count, roles=job.roles, sizes=sizes):
            try:
                found.append(division(shape, machine, job, layout=layout, gservers=count, server_tensor=width))
            except ModelError as error:
                problem = str(error)
    if not found:
        reason = problem or f"no division of {machine.gpus} GPUs has the given sizes"
        raise ConfigError(f"{reason}; give fewer sizes, or others")
    fitting = [one for one in found if not one.lacking]
    if not fitting:
        nearest = min(found, key=lambda one: one.lacking)
        raise ConfigError(
            f"{shape.name} does not fit on {machine.gpus} GPUs of {machine.gpu_memory_gib:g} GiB: what comes nearest "
            f"is {nearest.layout} with {nearest.gservers} gservers of {nearest.server_tensor} GPUs, where "
            f"{nearest.lacks} lacks {nearest.lacking / GIB:.1f} GiB; take more or larger GPUs, or a shorter --context"
        )
    ordered = _ordered(fitting)
    return CapacityPlan(
        shape=shape, machine=machine, job=job, divisions=ordered, reason=_reason(ordered, machine, tried=len(found))
    )


def plan_of_options(
    *,
    model_shape: str,
    context: int,
    mean_context: int | None,
    microbatch_tokens: int,
    lora_rank: int,
    critic: bool,
    reference: bool,
    gpu_memory: float,
    **others: Any,
) -> CapacityPlan:
    """Return the plan for the options of `streamrl plan --model-shape`; raises as `capacity_plan` does.

    `others`: the fields of `Sizes`, and further ones of `Machine`.
    """
    sizes = Sizes(**{name: others.pop(name) for name in Sizes.__struct_fields__})
    return capacity_plan(
        shape_of(model_shape),
        Machine(gpu_memory_gib=gpu_memory, **others),
        Workload(
            context=context,
            mean_context=mean_context or max(1, context // 4),
            microbatch_tokens=microbatch_tokens,
            roles=Roles(lora_rank=lora_rank, critic=critic, reference=reference),
        ),
        sizes,
    )


def _ordered(fitting: Sequence[Division]) -> list[Division]:
    """Return `fitting` with the recommended division first, then the others by throughput."""
    fastest = max(one.tokens_per_second for one in fitting)

    def simplicity(one: Division) -> tuple[int, int, int, int, float]:
        layout = one.layout
        cut = layout.tensor * layout.pipeline
        return cut, layout.pipeline, layout.context * layout.expert, one.server_tensor, -one.tokens_per_second

    near = [one for one in fitting if one.tokens_per_second >= (1 - BETTER) * fastest]
    best = min(near, key=simplicity)
    rest = [one for one in fitting if one is not best]
    return [best, *sorted(rest, key=lambda one: (-one.tokens_per_second, simplicity(one)))]


def _reason(ordered: Sequence[Division], machine: Machine, *, tried: int) -> str:
    best = ordered[0]
    slower = "training" if best.trained_per_second < best.generated_per_second else "generation"
    backend = "the torch backend, sharded" if backend_of(best.layout) == "torch" else "Megatron"
    told = (
        f"Of {tried} divisions {len(ordered)} fit. In the recommended one the trainer has {best.layout.world} GPUs "
        f"({best.layout}; {backend}), the gservers {best.gservers * best.server_tensor} ({best.gservers} of "
        f"{best.server_tensor}). The trainer keeps up with {best.trained_per_second:,.0f} tokens a second and the "
        f"gservers with {best.generated_per_second:,.0f}, so {slower} is what limits it"
    )
    fastest = max(one.tokens_per_second for one in ordered)
    if best.tokens_per_second < fastest:
        told += f"; within {BETTER:.0%} of the fastest it has the simplest layout"
    idle = machine.gpus - best.layout.world - best.gservers * best.server_tensor
    return told + (f". {idle} GPUs are left over." if idle else ".")


def _servers(shape: Shape, machine: Machine, *, gservers: int | None, tensor: int | None) -> Iterator[tuple[int, int]]:
    """Yield the possible (GPUs of a gserver, number of gservers)."""
    for width in [tensor] if tensor else _powers(machine.gpus_per_host):
        try:
            _check_server(shape, width, gpus_per_host=machine.gpus_per_host)
        except ModelError:
            if tensor:
                raise
            continue
        most = (machine.gpus - 1) // width
        if gservers:
            counts: Sequence[int] = [gservers] if gservers <= most else []
        else:  # only counts that leave a number of GPUs that divides well
            counts = [count for count in range(1, most + 1) if _is_round(machine.gpus - width * count, machine.gpus)]
        yield from ((width, count) for count in counts)


def _is_round(gpus: int, of: int) -> bool:
    """Return whether `gpus` is a multiple of a sixteenth of all GPUs."""
    return gpus % max(1, of // 16) == 0


def _layouts(shape: Shape, machine: Machine, gpus: int, *, roles: Roles, sizes: Sizes) -> Iterator[Layout]:
    """Yield the layouts over `gpus` GPUs; with a given `data_parallel`, also over fewer."""
    data, tensor, pipeline, context, expert, *_ = msgspec.structs.astuple(sizes)
    for tensors in [tensor] if tensor else _powers(machine.gpus_per_host):
        for stages in [pipeline] if pipeline else _powers(min(shape.layers, gpus)):
            for contexts in [context] if context else _powers(min(MOST_CONTEXT, gpus)):
                copies = data or gpus // (tensors * stages * contexts)
                if copies == 0 or copies * tensors * stages * contexts > gpus:
                    continue
                if data is None and copies * tensors * stages * contexts != gpus:
                    continue
                experts = [expert] if expert else _powers(min(max(1, shape.experts), copies * contexts * tensors))
                for spread in experts:
                    layout = Layout(data=copies, tensor=tensors, pipeline=stages, context=contexts, expert=spread)
                    given = any(size is not None for size in (data, tensor, pipeline, context, expert))
                    try:
                        check_layout(shape, layout, gpus_per_host=machine.gpus_per_host, roles=roles)
                    except ModelError:
                        if given and len(experts) == 1:
                            yield layout  # it was requested: `division` raises the reason why it is impossible
                        continue
                    yield layout


def _powers(most: int) -> list[int]:
    """Return 1, 2, 4, ... up to `most`."""
    return [2**i for i in range(max(1, most).bit_length())]


# --- output --------------------------------------------------------------------------------------


def as_json(plan: CapacityPlan) -> str:
    """Return the plan as JSON, in bytes and seconds, with the computed properties that people are shown."""
    tree = msgspec.to_builtins(plan)
    tree["shape"]["parameters"] = plan.shape.parameters
    for told, one in zip(tree["divisions"], plan.divisions, strict=True):
        told["trainer"]["total"] = one.trainer.total
        told["layout"]["backend"] = backend_of(one.layout)
        told["tokens_per_second"] = one.tokens_per_second
    return msgspec.json.format(msgspec.json.encode(tree), indent=2).decode()


SHOWN = 8
"""Most divisions that are shown to people."""


def shown(plan: CapacityPlan) -> RenderableType:
    """Return the recommended division in full, and a table of the divisions that fit."""
    best, machine = plan.divisions[0], plan.machine
    parts = Table(box=SIMPLE_HEAD, pad_edge=False)
    parts.add_column("of one GPU")
    for heading in ("GiB", "what it is"):
        parts.add_column(heading, justify="right" if heading == "GiB" else "left")
    for where, amount, what in memory_rows(best, machine, plan.job):
        parts.add_row(where, f"{amount / GIB:.1f}", what)
    others = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for heading in ("trainer", "gservers", "trainer GiB", "KV tokens", "trained/s", "generated/s"):
        others.add_column(heading, justify="left" if heading in ("trainer", "gservers") else "right")
    for number, one in enumerate(plan.divisions[:SHOWN]):
        others.add_row(
            str(one.layout),
            f"{one.gservers} × {one.server_tensor}",
            f"{one.trainer.total / GIB:.1f}",
            f"{one.server.kv_tokens:,}",
            f"{one.trained_per_second:,.0f}",
            f"{one.generated_per_second:,.0f}",
            style="bold green" if number == 0 else "",
        )
    update = best.update
    lines = [
        f"weight update: {update.weights / GIB:.1f} GiB in bfloat16, {update.per_link / GIB:.1f} over the link of each "
        f"GPU: {update.seconds:.1f} s at {machine.link / 1e9:.0f} GB/s for a GPU",
        f"checkpoint: {best.checkpoint / GIB:,.1f} GiB (float32 weights and both moments of all that is trained)",
    ]
    note = "Computed from the model's shape; nothing was measured (docs/scale.md)."
    return Group(
        Text(_title(plan), style="bold"),
        parts,
        Text(plan.reason),
        *(Text(line) for line in lines),
        others,
        Text(note, style="dim"),
    )


def _title(plan: CapacityPlan) -> str:
    shape, machine = plan.shape, plan.machine
    roles = f", {plan.job.roles}" if str(plan.job.roles) else ""
    active = f" ({shape.active_parameters / 1e9:.1f} for a token)" if shape.experts else ""
    return (
        f"{shape.name}: {shape.parameters / 1e9:.1f} billion weights{active}{roles}; {machine.gpus} GPUs of "
        f"{machine.gpu_memory_gib:g} GiB, contexts of {plan.job.context:,} tokens"
    )


def memory_rows(one: Division, machine: Machine, job: Workload) -> Iterator[tuple[str, float, str]]:
    """Yield (pool, bytes, description) for one GPU of each pool."""
    trainer, server = one.trainer, one.server
    yield "trainer", trainer.weights, "weights"
    yield "trainer", trainer.gradients, "gradients"
    yield "trainer", trainer.optimizer, "optimizer"
    if trainer.critic:
        yield "trainer", trainer.critic, "critic"
    if trainer.reference:
        yield "trainer", trainer.reference, "reference"
    if trainer.gathered:
        yield "trainer", trainer.gathered, "layers gathered from other ranks, or copied in bfloat16, while they compute"
    yield "trainer", trainer.activations, "activations, computed again layer by layer (estimated)"
    yield "trainer", trainer.logits, f"logits of {HEAD_CHUNK_TOKENS} tokens (estimated)"
    yield "trainer", machine.usable - trainer.total, f"free of {machine.usable / GIB:.1f}"
    yield "gserver", server.weights, "weights"
    yield "gserver", server.working, "activations, logits, new weights under way (estimated)"
    responses = server.kv_tokens // job.context
    yield "gserver", server.kv_room, f"KV cache: {server.kv_tokens:,} tokens, {responses:,} of the longest responses"
