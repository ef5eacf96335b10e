"""The losses and advantages that `algorithm.loss` and `algorithm.advantage` name.

`BUILT_IN` has the built-in ones. A name with a colon is a function of the user.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from streamrl.config import AlgorithmConfig, Config, by_task
from streamrl.errors import ConfigError, StreamRLError, TrainingError
from streamrl.hooks import bind, is_hook, load_hook
from streamrl.mixture import Mixture
from streamrl.trainer.algorithms.advantages import (
    gae,
    grpo,
    mean,
    none,
    reinforce_pp,
    reinforce_pp_baseline,
    rloo,
)
from streamrl.trainer.algorithms.losses import cispo, gspo, ppo
from streamrl.trainer.algorithms.tokens import ClippedLoss, Tokens

PolicyLoss = Callable[[Tokens], ClippedLoss]
Advantage = Callable[[NDArray[np.float32], NDArray[np.int64]], NDArray[Any]]
"""Return the advantages `[n]` of the responses to one prompt, from their rewards `[n]` and `[n]` the number of the
attempt, from 0, that each response belongs to. An agent's attempt may have several responses."""
Result = TypeVar("Result")
TRIED_RESPONSES = 8
"""Number of responses with which functions are checked."""
BUILT_IN: Mapping[Literal["loss", "advantage"], Mapping[str, Callable[..., Any]]] = {
    "loss": {"cispo": cispo, "gspo": gspo, "ppo": ppo},
    "advantage": {
        "gae": gae,
        "grpo": grpo,
        "mean": mean,
        "none": none,
        "reinforce++": reinforce_pp,
        "reinforce++-baseline": reinforce_pp_baseline,
        "rloo": rloo,
    },
}
"""`config.checks.ALGORITHMS` has their names."""


def policy_loss(algorithm: AlgorithmConfig) -> PolicyLoss:
    """Return `algorithm.loss` with its settings; raises `ConfigError` if it cannot be loaded."""
    return functools.partial(_loss, _function("loss", algorithm), algorithm.loss)


def advantage_of(algorithm: AlgorithmConfig) -> Advantage:
    """Return `algorithm.advantage` with its settings; raises `ConfigError` if it cannot be loaded.

    The function raises `TrainingError` for advantages of the wrong shape, or that are not finite.
    """
    return functools.partial(_advantage, _function("advantage", algorithm), algorithm.advantage)


def advantage_by_task(config: Config) -> Callable[[int], Advantage] | None:
    """Return the function from a sequence number to the advantage of its task; None if all tasks have the same.

    Raises `ConfigError` if one of them cannot be loaded, or is of single tokens.
    """
    own = by_task(config)
    if all(each.algorithm == config.algorithm for each in own.values()):
        return None
    for name, each in own.items():
        if is_per_token(each.algorithm) or is_per_token(config.algorithm):
            raise ConfigError(
                f"tasks.{name}.algorithm.advantage = {each.algorithm.advantage!r}: a task has its own only if all "
                "advantages are of whole responses, not of tokens (per_token)"
            )
    advantages, mixture = {name: advantage_of(each.algorithm) for name, each in own.items()}, Mixture.of(config)
    return lambda seq: advantages[mixture.task(seq)]


def is_per_token(algorithm: AlgorithmConfig) -> bool:
    """Whether each token has its own advantage (`per_token`)."""
    return getattr(_function("advantage", algorithm), "per_token", False) is True


def check(algorithm: AlgorithmConfig) -> None:
    """Compute the loss and the advantages of random responses; raises `ConfigError` if a function does not fit."""
    generator = np.random.default_rng(0)
    rewards, attempts = generator.random(TRIED_RESPONSES, np.float32), np.arange(TRIED_RESPONSES)
    advantages = _tried(lambda: advantage_of(algorithm)(rewards, attempts), "advantage", algorithm.advantage)
    tokens = random_tokens(np.asarray(advantages, np.float32), generator)
    found = _tried(lambda: policy_loss(algorithm)(tokens).loss, "loss", algorithm.loss)
    where = f"algorithm.loss = {algorithm.loss!r}"
    if not bool(found.isfinite().all()):
        raise ConfigError(f"{where}: the loss of random tokens is not finite")
    if not found.requires_grad:
        raise ConfigError(f"{where}: the loss does not depend on tokens.logprobs; does the function detach them?")
    (gradient,) = torch.autograd.grad(found.sum(), tokens.logprobs, allow_unused=True)
    if gradient is None or not bool(gradient.isfinite().all()):
        kind = "no" if gradient is None else "no finite"
        raise ConfigError(f"{where}: the loss of random tokens has {kind} gradient with respect to tokens.logprobs")


def random_tokens(advantages: NDArray[np.float32], generator: np.random.Generator) -> Tokens:
    """Return the tokens of responses with random lengths and log-probabilities, and with these `advantages`."""
    lengths = generator.integers(1, 6, len(advantages))
    sequence = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths))
    near = torch.from_numpy(generator.normal(-2, 1, len(sequence)).clip(max=-0.01).astype(np.float32))

    def moved() -> Tensor:
        return near + torch.from_numpy(generator.normal(0, 0.2, len(near)).astype(np.float32))

    age = sequence % 2
    return Tokens(
        logprobs=moved().requires_grad_(),
        entropy=-near,
        behavior_logprobs=moved(),
        proximal_logprobs=moved(),
        ref_logprobs=moved(),
        advantages=torch.from_numpy(advantages)[sequence],
        sequence=sequence,
        sequences=len(lengths),
        of_episode=torch.from_numpy(lengths)[sequence],
        age=age,
        ages=sorted(set(age.tolist())),
        comparable=age == 0,
        comparable_tokens=int((age == 0).sum()),
        weight=torch.ones(len(near)),
    )


def _function(kind: Literal["loss", "advantage"], algorithm: AlgorithmConfig) -> Any:
    name, key = getattr(algorithm, kind), f"algorithm.{kind}"
    args = getattr(algorithm, f"{kind}_args")
    if is_hook(name):
        return load_hook(name, key=key, args=args, settings=algorithm)
    return bind(BUILT_IN[kind][name], key=key, args=args, settings=algorithm)


def _loss(function: Callable[[Tokens], Tensor | ClippedLoss], name: str, tokens: Tokens) -> ClippedLoss:
    """Call `function`; a plain tensor is a loss without a clip."""
    found = function(tokens)
    if isinstance(found, ClippedLoss):
        return found
    if not isinstance(found, Tensor) or found.shape != tokens.logprobs.shape:
        shape = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise TrainingError(
            f"algorithm.loss = {name!r} returned {shape} for {len(tokens.logprobs)} tokens: return one loss for each "
            "token; streamrl averages them (algorithm.loss_aggregation)"
        )
    return ClippedLoss(found, torch.zeros_like(found, dtype=torch.bool))


def _advantage(
    function: Advantage, name: str, rewards: NDArray[np.float32], episodes: NDArray[np.int64]
) -> NDArray[np.float32]:
    found = np.asarray(function(rewards, episodes), np.float32)
    if found.shape != rewards.shape or not np.isfinite(found).all():
        raise TrainingError(
            f"algorithm.advantage = {name!r} returned {found.tolist()} for the rewards {rewards.tolist()}: return one "
            "finite number for each reward"
        )
    return found


def _tried(call: Callable[[], Result], kind: str, name: str) -> Result:
    try:
        return call()
    except StreamRLError as error:
        raise ConfigError(str(error)) from error
    except Exception as error:  # tolerance point: the user's function may raise anything
        raise ConfigError(
            f"algorithm.{kind} = {name!r} failed with random responses: {type(error).__name__}: {error}"
        ) from error
