"""Model function calls and the graph that their keys make. Pure.

An MFC names the keys that it needs and those that it gives; who runs after whom follows from
that alone. Keys that come with the stream are given from the start.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from streamrl.config import AlgorithmConfig
from streamrl.errors import ConfigError

STREAM_KEYS = frozenset({"packed_input_ids", "seqlens", "loss_mask", "behavior_logprobs", "policy_versions", "rewards"})
"""What every group brings from `actor_gen` and `rew_inf`."""


class MFC(msgspec.Struct, frozen=True):
    """A model function call of the trainer."""

    name: str
    inputs: frozenset[str]
    outputs: frozenset[str]
    reads: Literal["arrivals", "batch"]
    """`arrivals`: runs on groups as they come; `batch`: on the training batch, once it is formed."""


class Graph(msgspec.Struct, frozen=True):
    """MFCs in an order in which each one's inputs are given before it runs."""

    mfcs: tuple[MFC, ...]

    def reading(self, source: Literal["arrivals", "batch"]) -> list[MFC]:
        """The MFCs that read `source`, in order."""
        return [mfc for mfc in self.mfcs if mfc.reads == source]

    @property
    def arrival_keys(self) -> frozenset[str]:
        """Keys that a group must have before it can be part of a batch."""
        return STREAM_KEYS.union(*(mfc.outputs for mfc in self.reading("arrivals")))


def build_graph(mfcs: Sequence[MFC]) -> Graph:
    """Order `mfcs` by their keys; refuses cycles, unknown keys and two givers of one key."""
    givers: dict[str, str] = dict.fromkeys(STREAM_KEYS, "the stream")
    for mfc in mfcs:
        for key in sorted(mfc.outputs):
            if key in givers:
                raise ConfigError(f"key {key} is given by both {givers[key]} and {mfc.name}")
            givers[key] = mfc.name
    for mfc in mfcs:
        for key in sorted(mfc.inputs - givers.keys()):
            raise ConfigError(f"{mfc.name} needs key {key}, which no model function call gives")
    ordered: list[MFC] = []
    known = set(STREAM_KEYS)
    waiting = list(mfcs)
    while waiting:
        ready = [mfc for mfc in waiting if mfc.inputs <= known]
        if not ready:
            raise ConfigError(f"model function calls wait for each other: {', '.join(m.name for m in waiting)}")
        ordered += ready
        known.update(*(mfc.outputs for mfc in ready))
        waiting = [mfc for mfc in waiting if mfc not in ready]
    of_batches = {key: mfc.name for mfc in ordered if mfc.reads == "batch" for key in mfc.outputs}
    for mfc in ordered:
        late = sorted(of_batches.keys() & mfc.inputs)
        if mfc.reads == "arrivals" and late:
            raise ConfigError(
                f"{mfc.name} runs as groups arrive but needs {late[0]}, which {of_batches[late[0]]} gives "
                "only for formed batches"
            )
    return Graph(tuple(ordered))


def grpo_graph(algorithm: AlgorithmConfig) -> Graph:
    """The trainer's side of asynchronous GRPO."""
    needs = set(STREAM_KEYS)
    mfcs = []
    if algorithm.kl_coef > 0:
        mfcs.append(MFC("ref_inf", frozenset({"packed_input_ids", "seqlens"}), frozenset({"ref_logprobs"}), "arrivals"))
        needs.add("ref_logprobs")
    if recomputes_proximal(algorithm):
        inputs = frozenset({"packed_input_ids", "seqlens"})
        mfcs.append(MFC("actor_inf", inputs, frozenset({"proximal_logprobs"}), "batch"))
        needs.add("proximal_logprobs")
    mfcs.append(MFC("actor_train", frozenset(needs), frozenset(), "batch"))
    return build_graph(mfcs)


def recomputes_proximal(algorithm: AlgorithmConfig) -> bool:
    """Whether proximal log-probabilities need a pass of their own.

    With a single optimizer step those at the start of the step are the detached values of the
    forward pass that trains.
    """
    return algorithm.proximal == "recompute" or (
        algorithm.proximal == "auto" and algorithm.minibatches * algorithm.epochs > 1
    )
