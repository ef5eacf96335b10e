"""Model function calls (MFCs) and the graph that their keys define. Pure.

An MFC names its input keys and its output keys; the order follows from the keys alone. `trainer.graph` is one of:

- `asynchronous`: rollout workers generate and score independently, so the master sees only the calls that follow;
- `synchronous`: `actor_gen` and `rew_inf` are MFCs of the master too;
- `module:function`: the user's function from `Config` to a list of `MFC`, or a workflow of ECS functions
  (`streamrl/ecs.py`); `synchronous:module:function` if it also has the MFCs of rollout workers.

docs/graphs.md has examples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from streamrl.config import AlgorithmConfig, Config
from streamrl.config.trainer import ASYNCHRONOUS, SYNCHRONOUS
from streamrl.errors import ConfigError
from streamrl.hooks import load_object
from streamrl.trainer.calls import EvaluateHook, Hook, MasterHook, Offload, ParamRealloc
from streamrl.trainer.layout import ROLES

Interface = Literal["generate", "inference", "train_step", "function"]
"""Action of an MFC: sample on rollout workers, a forward pass, a training step, or call the user's function."""

SEQUENCE_KEYS = frozenset({"packed_input_ids", "packed_loss_mask", "seqlens", "episodes", "packed_facts"})
"""Keys that a pass over a group's tokens needs."""
GENERATED_KEYS = SEQUENCE_KEYS | {"packed_behavior_logprobs", "packed_policy_versions", "packed_routed_experts"}
"""Output keys of `actor_gen`."""
STREAM_KEYS = GENERATED_KEYS | {"rewards"}
"""Keys that every group brings through the stream, from `actor_gen` and `rew_inf`."""
ROLLOUT = "rollout"
"""The role of the MFCs that rollout workers carry out."""
TRAINED_ROLES = ("actor", "critic")
SETTINGS_OF_KEYS = {
    "ref_logprobs": "algorithm.kl_coef",
    "proximal_logprobs": "algorithm.proximal, algorithm.minibatches and algorithm.epochs",
    "values": "algorithm.advantage",
}
"""Input keys of a training step → the settings that decide whether it reads them."""


class MFC(msgspec.Struct, frozen=True):
    """A model function call of the trainer."""

    name: str
    role: str
    """The model that computes: `actor`, `ref`, `critic`, `reward`, or `rollout`."""
    interface: Interface
    inputs: frozenset[str]
    outputs: frozenset[str]
    """`inference` has exactly one output key."""
    reads: Literal["arrivals", "batch"] = "batch"
    """`arrivals`: runs on groups as they arrive; `batch`: on the training batch, once it is formed."""
    groups: int | None = None
    """Batch size: groups in one call; fewer at the end of a batch (docs/graphs.md). None for all groups that are
    ready, or the whole batch. Not allowed for a `train_step`."""
    function: str = ""
    """`module:function` of the interface `function` (docs/graphs.md)."""
    pre_hooks: tuple[Hook, ...] = ()
    """Hooks that run before the call, in order."""
    post_hooks: tuple[Hook | MasterHook, ...] = ()
    """Hooks that run after it, in order."""


class Graph(msgspec.Struct, frozen=True):
    """MFCs in an order in which each one runs after its inputs are computed."""

    mfcs: tuple[MFC, ...]
    stream_keys: frozenset[str] = STREAM_KEYS
    """Keys that groups have when they arrive."""

    def reading(self, source: Literal["arrivals", "batch"]) -> list[MFC]:
        """Return the MFCs of model workers that read `source`, in order."""
        return [mfc for mfc in self.mfcs if mfc.reads == source and mfc.role != ROLLOUT]

    @property
    def levels(self) -> list[list[MFC]]:
        """The MFCs by topological level: each needs only keys of the stream and of earlier levels."""
        level_of_key: dict[str, int] = {}
        levels: list[list[MFC]] = []
        for mfc in self.mfcs:
            level = max((level_of_key[key] for key in mfc.inputs if key in level_of_key), default=0)
            level_of_key.update(dict.fromkeys(mfc.outputs, level + 1))
            if level == len(levels):
                levels.append([])
            levels[level].append(mfc)
        return levels

    @property
    def of_rollout(self) -> list[MFC]:
        """The MFCs that rollout workers carry out for the master; empty in an asynchronous graph."""
        return [mfc for mfc in self.mfcs if mfc.role == ROLLOUT]

    @property
    def roles(self) -> frozenset[str]:
        """The roles with models on model workers."""
        return frozenset(mfc.role for mfc in self.mfcs if mfc.role != ROLLOUT)

    def due(self, kind: type[MasterHook], *, policy_version: int) -> bool:
        """Whether an MFC has a hook of `kind` for the step that made `policy_version`."""
        hooks = [hook for mfc in self.mfcs for hook in mfc.post_hooks if isinstance(hook, kind)]
        return any(policy_version % hook.every == 0 for hook in hooks)

    def share_taken_by(self, role: str) -> float | None:
        """Return the smallest `share` with which `role` takes over another role's weights, or None if it takes none."""
        hooks = [hook for mfc in self.mfcs for hook in (*mfc.pre_hooks, *mfc.post_hooks)]
        shares = [hook.share for hook in hooks if isinstance(hook, ParamRealloc) and hook.target == role]
        return min(shares, default=None)

    @property
    def arrival_keys(self) -> frozenset[str]:
        """Keys that a group must have before it can be part of a batch."""
        return self.stream_keys.union(*(mfc.outputs for mfc in self.reading("arrivals")))


def build_graph(mfcs: Sequence[MFC], *, stream_keys: frozenset[str] = STREAM_KEYS, largest: int | None = None) -> Graph:
    """Order `mfcs` by their keys.

    `stream_keys` are available from the start; `largest`: maximal number of groups in a call. Raises a `ConfigError`
    that names the MFC, the key and the remedy: for cycles, keys without a provider or with two, two MFCs of one name,
    an MFC on arrivals that needs a key of formed batches, a graph that does not train the actor, and the cases of
    `_faults`.
    """
    made_by_rollout = frozenset().union(*(mfc.outputs for mfc in mfcs if mfc.role == ROLLOUT))
    given = stream_keys - made_by_rollout
    givers: dict[str, str] = dict.fromkeys(given, "the stream")
    names: set[str] = set()
    for mfc in mfcs:
        if mfc.name in names:
            raise ConfigError(f"two model function calls have the name {mfc.name}")
        names.add(mfc.name)
        if fault := next(_faults(mfc, largest), None):
            raise ConfigError(f"{mfc.name}: {fault}")
        for key in sorted(mfc.outputs):
            if key in givers:
                raise ConfigError(f"key {key} is given by both {givers[key]} and {mfc.name}")
            givers[key] = mfc.name
    for mfc in mfcs:
        for key in sorted(mfc.inputs - givers.keys()):
            raise ConfigError(f"{mfc.name} needs key {key}, which no model function call gives")
    ordered = _in_order(mfcs, set(given))
    of_batches = {key: mfc.name for mfc in ordered if mfc.reads == "batch" for key in mfc.outputs}
    for mfc in ordered:
        late = sorted(of_batches.keys() & mfc.inputs)
        if mfc.reads == "arrivals" and late:
            raise ConfigError(
                f"{mfc.name} runs as groups arrive but needs {late[0]}, which {of_batches[late[0]]} gives "
                "only for formed batches"
            )
    if not any(mfc.interface == "train_step" and mfc.role == "actor" for mfc in ordered):
        raise ConfigError("the graph has no train_step of the actor, so that the policy would never change; add one")
    return Graph(tuple(ordered), stream_keys)


def required_keys(role: str, interface: Interface) -> frozenset[str]:
    """Return the keys that a call of `interface` on `role` needs with any settings."""
    match interface:
        case "generate":
            return frozenset()
        case "train_step":
            return GENERATED_KEYS
        case "inference" if role == "actor":
            return SEQUENCE_KEYS | {"packed_routed_experts"}
        case _:
            return SEQUENCE_KEYS


def training_keys(role: str, algorithm: AlgorithmConfig) -> frozenset[str]:
    """Return the keys that a `train_step` of `role` reads with the settings of `algorithm`."""
    keys = set(STREAM_KEYS)
    if algorithm.advantage == "gae":
        keys.add("values")
    if algorithm.kl_coef > 0 and (role == "actor" or algorithm.kl_in == "reward"):
        keys.add("ref_logprobs")
    if recomputes_proximal(algorithm) and role == "actor":
        keys.add("proximal_logprobs")
    return frozenset(keys)


def graph_of(config: Config) -> Graph:
    """Return the graph that `trainer.graph` and the algorithm's settings define."""
    neural = config.reward_model.path is not None
    stream_keys = GENERATED_KEYS if neural else STREAM_KEYS
    match config.trainer.graph:
        case "asynchronous":
            mfcs = downstream(config)
        case "synchronous":
            mfcs = [*upstream(config), *downstream(config)]
        case name:
            mfcs = _users(name.removeprefix(f"{SYNCHRONOUS}:"), config)
    largest = config.trainer.batch_groups
    graph = build_graph(mfcs, stream_keys=stream_keys, largest=largest)
    for mfc in graph.mfcs:
        if mfc.interface == "train_step":
            _check_training(mfc, config.algorithm)
    return graph


def upstream(config: Config) -> list[MFC]:
    """Return the work of rollout workers as MFCs of the master: generation, and rewards by verifiers."""
    mfcs = [model_call(config, "actor_gen", ROLLOUT, "generate", frozenset(), GENERATED_KEYS)]
    if config.reward_model.path is None:
        mfcs.append(model_call(config, "rew_inf", ROLLOUT, "inference", SEQUENCE_KEYS, frozenset({"rewards"})))
    return mfcs


def downstream(config: Config) -> list[MFC]:
    """Return the MFCs after generation: rewards by a model, log-probabilities, values, and training."""
    algorithm = config.algorithm
    mfcs: list[MFC] = []

    def inference(name: str, role: str, key: str) -> None:
        inputs = required_keys(role, "inference")
        mfcs.append(model_call(config, name, role, "inference", inputs, frozenset({key})))

    def training(name: str, role: str) -> None:
        mfcs.append(model_call(config, name, role, "train_step", training_keys(role, algorithm), frozenset()))

    if config.reward_model.path is not None:
        inference("rew_inf", "reward", "rewards")
    if algorithm.kl_coef > 0:
        inference("ref_inf", "ref", "ref_logprobs")
    if recomputes_proximal(algorithm):
        inference("actor_inf", "actor", "proximal_logprobs")
    if algorithm.advantage == "gae":
        inference("critic_inf", "critic", "values")
        training("critic_train", "critic")
    training("actor_train", "actor")
    return mfcs


def model_call(
    config: Config, name: str, role: str, interface: Interface, inputs: frozenset[str], outputs: frozenset[str]
) -> MFC:
    """Return an MFC that runs as early as possible, with the configured batch size and hooks.

    Models that never train run as groups arrive; the actor and the critic run on batches, because their weights change
    from step to step.
    """
    algorithm, offload = config.algorithm, config.trainer.offload
    reads: Literal["arrivals", "batch"] = "batch" if role in TRAINED_ROLES else "arrivals"
    # the groups that arrive together vary by chance, and rounding depends on all groups of a pass
    alone = reads == "arrivals" and role != ROLLOUT and config.gserver.deterministic
    post: tuple[Hook | MasterHook, ...] = ()
    if role in offload and (interface == "train_step") == (role == "critic"):  # a critic trains after its inference
        post = (Offload(role),)
    if role == "actor" and interface == "train_step" and algorithm.kl_coef > 0 and algorithm.ref_update_every:
        post = (ParamRealloc("actor", "ref", every=algorithm.ref_update_every, share=algorithm.ref_update_share),)
    return MFC(name, role, interface, inputs, outputs, reads, 1 if alone else None, post_hooks=post)


def recomputes_proximal(algorithm: AlgorithmConfig) -> bool:
    """Whether proximal log-probabilities need a pass of their own.

    With a single optimizer step, the log-probabilities at the start of the step are the detached values of the forward
    pass that trains.
    """
    return algorithm.proximal == "recompute" or (
        algorithm.proximal == "auto" and algorithm.minibatches * algorithm.epochs > 1
    )


def _faults(mfc: MFC, largest: int | None) -> Iterator[str]:
    """Yield each reason why `mfc` cannot run as written, for any other calls and settings."""
    if mfc.role not in (*ROLES, ROLLOUT):
        yield f"there is no role {mfc.role!r}; there are {', '.join(ROLES)}"
    if mfc.interface == "train_step":
        yield from _training_faults(mfc)
    if missing := sorted(required_keys(mfc.role, mfc.interface) - mfc.inputs):
        yield _lacks(missing)
    if mfc.groups is not None and (mfc.groups < 1 or (largest is not None and mfc.groups > largest)):
        most = "" if largest is None else f" to {largest} (trainer.batch_groups)"
        yield f"{mfc.groups} groups in a call; allowed are 1{most}"
    if mfc.interface == "inference" and mfc.role != ROLLOUT and len(mfc.outputs) != 1:
        yield f"an inference gives one key, not {len(mfc.outputs)}"
    if mfc.reads == "arrivals" and not mfc.outputs:
        yield (
            "it runs as groups arrive but gives no key: groups would be trained on, or dropped, before it is "
            "through with them; let it give one, or read batches"
        )
    if (mfc.interface == "function") != bool(mfc.function):
        yield "the interface `function` and a function to call need each other"
    if mfc.interface == "generate" and (mfc.role != ROLLOUT or not mfc.outputs >= GENERATED_KEYS):
        yield f"only the role {ROLLOUT} generates, and then it gives all of a group's keys"
    scores = mfc.interface == "inference" and mfc.outputs == {"rewards"}
    if mfc.role == ROLLOUT and mfc.interface != "generate" and not scores:
        yield f"a call to the role {ROLLOUT} generates, or is an inference that gives rewards, as in `upstream`"
    if mfc.role == ROLLOUT and (unknown := sorted(mfc.inputs - GENERATED_KEYS)):
        yield f"key {unknown[0]} is with the model workers, not with rollout workers; remove it from the inputs"


def _training_faults(mfc: MFC) -> Iterator[str]:
    if mfc.role not in TRAINED_ROLES:
        yield f"the role {mfc.role} is never trained, only {' and '.join(TRAINED_ROLES)}"
    if mfc.reads == "arrivals":
        yield 'a train_step runs on batches, not on arrivals; remove reads="arrivals"'
    if mfc.groups is not None:
        yield f"groups = {mfc.groups} has no effect on a train_step; remove it, and set algorithm.minibatches"
    if mfc.outputs:
        yield f"a train_step gives no key; remove {', '.join(sorted(mfc.outputs))} from its outputs"
    if mfc.role == "critic" and "advantages" in mfc.inputs:
        yield "a critic learns from rewards, which advantages would replace; remove key advantages from its inputs"
    if not mfc.inputs & {"rewards", "advantages"}:
        yield _lacks(["rewards"])


def _check_training(mfc: MFC, algorithm: AlgorithmConfig) -> None:
    """Raise `ConfigError` if the keys of a `train_step` do not match the settings of `algorithm`."""
    if mfc.role == "critic" and algorithm.advantage != "gae":
        raise ConfigError(f'{mfc.name}: a critic needs algorithm.advantage = "gae", not "{algorithm.advantage}"')
    replaced = {"rewards", "values"} if "advantages" in mfc.inputs else set[str]()
    for key in sorted(training_keys(mfc.role, algorithm) - mfc.inputs - replaced):
        raise ConfigError(f"{mfc.name}: {_lacks([key])}, or change {SETTINGS_OF_KEYS[key]}")
    for key in sorted({"ref_logprobs", "values"} & mfc.inputs - training_keys("actor", algorithm)):
        raise ConfigError(f"{mfc.name}: key {key} has no effect; set {SETTINGS_OF_KEYS[key]}, or remove the key")


def _lacks(keys: Sequence[str]) -> str:
    names = f"key {keys[0]} is" if len(keys) == 1 else f"keys {', '.join(keys)} are"
    return f"{names} missing from its inputs; add {'it' if len(keys) == 1 else 'them'}"


def _in_order(mfcs: Sequence[MFC], known: set[str]) -> list[MFC]:
    ordered: list[MFC] = []
    waiting = list(mfcs)
    while waiting:
        ready = [mfc for mfc in waiting if mfc.inputs <= known]
        if not ready:
            raise ConfigError(f"model function calls wait for each other: {', '.join(m.name for m in waiting)}")
        ordered += ready
        known.update(*(mfc.outputs for mfc in ready))
        waiting = [mfc for mfc in waiting if mfc not in ready]
    return ordered


def _users(name: str, config: Config) -> list[MFC]:
    """Return the MFCs of the user's function, or of the user's workflow of ECS functions."""
    if ":" not in name:
        raise ConfigError(
            f'trainer.graph = "{config.trainer.graph}" is neither "{ASYNCHRONOUS}" nor "{SYNCHRONOUS}" nor '
            "module:function"
        )
    found = load_object(name, key="trainer.graph")(config)
    if not isinstance(found, list) or not all(isinstance(mfc, MFC) for mfc in found):
        raise ConfigError(f"{name} returned {type(found).__name__}; it has to return a list of MFC")
    of_rollout = [mfc.name for mfc in found if mfc.role == ROLLOUT]
    if of_rollout and not config.trainer.synchronous:
        raise ConfigError(
            f"{name}: {of_rollout[0]} is a call to rollout workers, which generate and score by themselves in an "
            f'asynchronous graph; remove it, or set trainer.graph = "{SYNCHRONOUS}:{name}" and '
            "staleness.max_staleness = 0"
        )
    if config.trainer.synchronous and not any(mfc.interface == "generate" for mfc in found):
        raise ConfigError(
            f"{name}: no model function call generates, which a synchronous graph has to; add one, or set "
            f'trainer.graph = "{name}"'
        )
    for mfc in found:
        if any(isinstance(hook, EvaluateHook) for hook in mfc.post_hooks) and not config.evaluation.enabled:
            raise ConfigError(f"{name}: {mfc.name} has an EvaluateHook, but no frequency is set in [evaluation]")
    return found
