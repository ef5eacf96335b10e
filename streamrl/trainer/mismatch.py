"""Watches how far the engine's log-probabilities are from the trainer's, which should compute the same. Pure.

On responses of age 0 both have the same weights: a large difference means that an update did not arrive
where a gserver says it did, or that the two compute differently.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from streamrl.errors import TrainingError
from streamrl.trainer_config import TrainerConfig

log = logging.getLogger(__name__)


class MismatchWatch:
    """Looks at the figures of each step."""

    def __init__(self, config: TrainerConfig) -> None:
        self._warning = config.logprob_diff_warning
        self._limit = config.logprob_diff_limit

    def look(self, figures: Mapping[str, float], *, policy_version: int) -> None:
        """Warn, or raise `TrainingError`, if `logprob_diff_mean` (nats; missing without responses of age 0) is large.

        `policy_version`: of the weights that both computed with.
        """
        found = figures.get("logprob_diff_mean")
        if found is None or found <= self._warning:
            return
        what = (
            f"engine and trainer differ by {found:.3g} nats for each token, on the mean of {figures['groups']:.0f} "
            f"groups' responses under version {policy_version}"
        )
        look = (
            "a gserver may serve other weights than it says (compare its /weights_checker with the others'), or the "
            "two compute differently (gserver.dtype and trainer.dtype, another chat template or sampling processor)"
        )
        if self._limit is not None and found > self._limit:
            raise TrainingError(f"{what}, more than trainer.logprob_diff_limit = {self._limit:g}: {look}")
        log.warning("%s, more than trainer.logprob_diff_warning = %g: %s", what, self._warning, look)
