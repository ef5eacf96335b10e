"""Distance of the policy from its reference: estimators, and a coefficient that follows a target."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

KLEstimator = Literal["k1", "k2", "k3"]

LARGEST_CORRECTION = 0.2
"""Largest change in one update of the adaptive coefficient, as a share."""


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, *, kind: KLEstimator) -> Tensor:
    """Estimate KL(π || π_ref) from tokens sampled from π; all of the shape `[tokens]`.

    With `d = log π_ref - log π` (Schulman, "Approximating KL divergence",
    http://joschu.net/blog/kl-approx.html):

    - `k1`: `-d`, unbiased; as a loss its gradient is 0 on average, so it belongs into the reward;
    - `k2`: `d² / 2`, biased; as a loss its gradient is that of the true KL on average;
    - `k3`: `exp(d) - 1 - d`, unbiased and never negative.
    """
    d = ref_logprobs - logprobs
    match kind:
        case "k1":
            return -d
        case "k2":
            return d**2 / 2
        case "k3":
            return d.exp() - 1 - d


class KLCoefficient:
    """β, fixed or following a target for the KL of a token. All roles of a worker share one.

    After a training step with mean KL `k`: `β ← β · (1 + clip(k / target - 1, ±0.2) / horizon)`
    (Ziegler et al., https://arxiv.org/abs/1909.08593, section 2.2, with the horizon in steps). The new β is that
    of the next step: whoever still trains in this one, as a critic may after the actor, sees the old.
    """

    def __init__(self, value: float, *, target: float | None, horizon: int) -> None:
        self.value = value
        """β of the current step."""
        self.next_value = value
        """β of the step after it."""
        self._target = target
        self._horizon = horizon
        self._step: int | None = None

    @property
    def adapts(self) -> bool:
        return self._target is not None

    def begin_step(self, policy_version: int) -> None:
        """A role begins the step from `policy_version`; it need not be the first to do so."""
        if policy_version != self._step:
            self._step = policy_version
            self.value = self.next_value

    def update(self, kl: float) -> None:
        """All minibatches of the step are over; tokens had a mean KL of `kl`."""
        if self._target is None:
            return
        error = max(-LARGEST_CORRECTION, min(LARGEST_CORRECTION, kl / self._target - 1))
        self.next_value = self.value * (1 + error / self._horizon)

    def resume(self, value: float) -> None:
        """Go on with `value`."""
        self.value = self.next_value = value
