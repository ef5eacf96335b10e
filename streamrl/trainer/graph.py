"""Model function calls and the graph that their keys make. Pure.

An MFC names the keys that it needs and those that it gives; who runs after whom follows from
that alone. Three graphs come with it:

- asynchronous: rollout workers generate and score by themselves, so the master sees only what follows;
- synchronous: `actor_gen` and `rew_inf` are MFCs of the master too;
- `module:function` (`trainer.graph`): the user's own, a function from `Config` to a list of `MFC`.

docs/trainer.md has an example of the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from streamrl.config import AlgorithmConfig, Config, trainer
from streamrl.errors import ConfigError
from streamrl.importing import load_object
from streamrl.trainer.calls import EvaluateHook, Hook, MasterHook, Offload, ParamRealloc

Interface = Literal["generate", "inference", "train_step", "function"]
"""What an MFC does: sample on rollout workers, a forward pass, a training step, or call the user's function."""

SEQUENCE_KEYS = frozenset({"packed_input_ids", "packed_loss_mask", "seqlens", "episodes", "packed_facts"})
"""What a pass over a group's tokens needs."""
GENERATED_KEYS = SEQUENCE_KEYS | {"packed_behavior_logprobs", "packed_policy_versions", "packed_routed_experts"}
"""What `actor_gen` gives."""
STREAM_KEYS = GENERATED_KEYS | {"rewards"}
"""What every group brings through the stream from `actor_gen` and `rew_inf`."""
ROLLOUT = "rollout"
"""The role of the MFCs that rollout workers carry out."""


class MFC(msgspec.Struct, frozen=True):
    """A model function call of the trainer."""

    name: str
    role: str
    """The model that computes: `actor`, `ref`, `critic`, `reward`, or `rollout`."""
    interface: Interface
    inputs: frozenset[str]
    outputs: frozenset[str]
    """`inference` gives exactly one key."""
    reads: Literal["arrivals", "batch"] = "batch"
    """`arrivals`: runs on groups as they come; `batch`: on the training batch, once it is formed."""
    groups: int | None = None
    """Batch size: groups in one call; fewer at the end of a batch (docs/trainer.md). None: all that are ready, or the
    whole batch."""
    function: str = ""
    """`module:function` of the interface `function` (docs/trainer.md)."""
    pre_hooks: tuple[Hook, ...] = ()
    """Hooks that run before the call, in order."""
    post_hooks: tuple[Hook | MasterHook, ...] = ()
    """Hooks that run after it, in order."""


class Graph(msgspec.Struct, frozen=True):
    """MFCs in an order in which each one's inputs are given before it runs."""

    mfcs: tuple[MFC, ...]
    stream_keys: frozenset[str] = STREAM_KEYS
    """What groups bring when they arrive."""

    def reading(self, source: Literal["arrivals", "batch"]) -> list[MFC]:
        """Return the MFCs of model workers that read `source`, in order."""
        return [mfc for mfc in self.mfcs if mfc.reads == source and mfc.role != ROLLOUT]

    @property
    def of_rollout(self) -> list[MFC]:
        """The MFCs that rollout workers carry out for the master: none in an asynchronous graph."""
        return [mfc for mfc in self.mfcs if mfc.role == ROLLOUT]

    @property
    def roles(self) -> frozenset[str]:
        """The models that model workers hold."""
        return frozenset(mfc.role for mfc in self.mfcs if mfc.role != ROLLOUT)

    def due(self, kind: type[MasterHook], *, policy_version: int) -> bool:
        """Whether an MFC has a hook of `kind` for the step that made `policy_version`."""
        hooks = [hook for mfc in self.mfcs for hook in mfc.post_hooks if isinstance(hook, kind)]
        return any(policy_version % hook.every == 0 for hook in hooks)

    def share_taken_by(self, role: str) -> float | None:
        """Return the least share of another role's weights that `role` takes at a time; None: it takes none."""
        hooks = [hook for mfc in self.mfcs for hook in (*mfc.pre_hooks, *mfc.post_hooks)]
        shares = [hook.share for hook in hooks if isinstance(hook, ParamRealloc) and hook.target == role]
        return min(shares, default=None)

    @property
    def arrival_keys(self) -> frozenset[str]:
        """Keys that a group must have before it can be part of a batch."""
        return self.stream_keys.union(*(mfc.outputs for mfc in self.reading("arrivals")))


def build_graph(mfcs: Sequence[MFC], *, stream_keys: frozenset[str] = STREAM_KEYS, largest: int | None = None) -> Graph:
    """Order `mfcs` by their keys.

    `stream_keys` are given from the start; `largest`: most groups that a call can get. Refuses, with a
    `ConfigError` that names them: cycles, keys that nobody gives, two givers of one key, two MFCs of one name,
    impossible batch sizes, an MFC on arrivals that needs what is only given for batches, or that gives nothing.
    """
    made_by_rollout = frozenset().union(*(mfc.outputs for mfc in mfcs if mfc.role == ROLLOUT))
    given = stream_keys - made_by_rollout
    givers: dict[str, str] = dict.fromkeys(given, "the stream")
    names: set[str] = set()
    for mfc in mfcs:
        if mfc.name in names:
            raise ConfigError(f"two model function calls have the name {mfc.name}")
        names.add(mfc.name)
        _check_alone(mfc, largest)
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
    return Graph(tuple(ordered), stream_keys)


def graph_of(config: Config) -> Graph:
    """Return the graph that `trainer.graph` and the algorithm's settings ask for."""
    neural = config.reward_model.path is not None
    stream_keys = GENERATED_KEYS if neural else STREAM_KEYS
    match config.trainer.graph:
        case trainer.ASYNCHRONOUS:
            mfcs = downstream(config)
        case trainer.SYNCHRONOUS:
            mfcs = [*upstream(config), *downstream(config)]
        case name:
            mfcs = _users(name, config)
    largest = min(config.stream.capacity_groups, config.trainer.batch_groups)
    return build_graph(mfcs, stream_keys=stream_keys, largest=largest)


def upstream(config: Config) -> list[MFC]:
    """Return what rollout workers do, as MFCs of the master: generation, and rewards by verifiers."""
    mfcs = [MFC("actor_gen", ROLLOUT, "generate", frozenset(), GENERATED_KEYS, "arrivals")]
    if config.reward_model.path is None:
        mfcs.append(MFC("rew_inf", ROLLOUT, "inference", SEQUENCE_KEYS, frozenset({"rewards"}), "arrivals"))
    return mfcs


def downstream(config: Config) -> list[MFC]:
    """Return what follows generation: rewards by a model, log-probabilities, values, and training."""
    algorithm = config.algorithm
    mfcs: list[MFC] = []
    needs = set(STREAM_KEYS)

    def inference(name: str, role: str, key: str, reads: Literal["arrivals", "batch"]) -> None:
        post = (Offload(role),) if role in config.trainer.offload and role != "critic" else ()
        # what arrives together is chance, and how a pass rounds depends on all that is in it
        groups = 1 if reads == "arrivals" and config.gserver.deterministic else None
        inputs = SEQUENCE_KEYS | {"packed_routed_experts"} if role == "actor" else SEQUENCE_KEYS
        mfcs.append(MFC(name, role, "inference", inputs, frozenset({key}), reads, groups, post_hooks=post))
        needs.add(key)

    if config.reward_model.path is not None:
        inference("rew_inf", "reward", "rewards", "arrivals")
    if algorithm.kl_coef > 0:
        inference("ref_inf", "ref", "ref_logprobs", "arrivals")
    if recomputes_proximal(algorithm):
        inference("actor_inf", "actor", "proximal_logprobs", "batch")
    if algorithm.advantage == "gae":
        inference("critic_inf", "critic", "values", "batch")
        idle = (Offload("critic"),) if "critic" in config.trainer.offload else ()
        mfcs.append(MFC("critic_train", "critic", "train_step", frozenset(needs), frozenset(), post_hooks=idle))
    post: tuple[Hook | MasterHook, ...] = ()
    if algorithm.kl_coef > 0 and algorithm.ref_update_every:
        post = (ParamRealloc("actor", "ref", every=algorithm.ref_update_every, share=algorithm.ref_update_share),)
    mfcs.append(MFC("actor_train", "actor", "train_step", frozenset(needs), frozenset(), post_hooks=post))
    return mfcs


def recomputes_proximal(algorithm: AlgorithmConfig) -> bool:
    """Whether proximal log-probabilities need a pass of their own.

    With a single optimizer step those at the start of the step are the detached values of the
    forward pass that trains.
    """
    return algorithm.proximal == "recompute" or (
        algorithm.proximal == "auto" and algorithm.minibatches * algorithm.epochs > 1
    )


def _check_alone(mfc: MFC, largest: int | None) -> None:
    if mfc.groups is not None and (mfc.groups < 1 or (largest is not None and mfc.groups > largest)):
        upper = "" if largest is None else f", at most {largest} (trainer.batch_groups, stream.capacity_groups)"
        raise ConfigError(f"{mfc.name} wants {mfc.groups} groups in a call: must be at least 1{upper}")
    if mfc.interface == "inference" and mfc.role != ROLLOUT and len(mfc.outputs) != 1:
        raise ConfigError(f"{mfc.name} is an inference and gives {len(mfc.outputs)} keys; it must give one")
    if mfc.reads == "arrivals" and not mfc.outputs:
        raise ConfigError(
            f"{mfc.name} runs as groups arrive but gives no key: groups would be trained on, or dropped, before it is "
            "through with them; let it give one, or read batches"
        )
    if (mfc.interface == "function") != bool(mfc.function):
        raise ConfigError(f"{mfc.name}: the interface `function` and a function to call need each other")
    if (mfc.interface == "generate") != (mfc.role == ROLLOUT and mfc.outputs >= GENERATED_KEYS):
        raise ConfigError(f"{mfc.name}: only the role `{ROLLOUT}` generates, and then it gives all of a group's keys")


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
    """Return the list that the user's function returns."""
    if ":" not in name:
        raise ConfigError(f'trainer.graph = "{name}" is neither "asynchronous" nor "synchronous" nor module:function')
    found = load_object(name, key="trainer.graph")(config)
    if not isinstance(found, list) or not all(isinstance(mfc, MFC) for mfc in found):
        raise ConfigError(f"{name} answered {type(found).__name__}; it has to answer a list of MFC")
    for mfc in found:
        if mfc.role == ROLLOUT:
            raise ConfigError(f"{name}: {mfc.name} is for rollout workers, which only the synchronous graph directs")
        if any(isinstance(hook, EvaluateHook) for hook in mfc.post_hooks) and not config.evaluation.enabled:
            raise ConfigError(f"{name}: {mfc.name} has an EvaluateHook, but no frequency is set in [evaluation]")
    return found
