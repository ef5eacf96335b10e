"""Watch the figures of a run for signs that its policy is about to collapse. Pure.

When off-policy training collapses, figures change in an order. First the policy moves away from the data that it learns
from: importance ratios spread, so their effective sample size falls, and gradients grow. The reward falls last. The
watch looks for the first signs in order to warn before the reward falls. docs/collapse.md describes how its limits were
calibrated.

Its memory is a function of the figures of the steps so far and of nothing else, and is part of a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Literal

import msgspec

from streamrl.config import Config

HealthState = Literal["healthy", "warning", "collapsing"]

WINDOW = 5
"""Number of steps over which figures are averaged."""
REMEMBERED = 50
"""Number of steps in the baseline for the next one."""
ENOUGH = 20
"""Least number of steps in a baseline; with fewer steps nothing is compared with it."""
CALM = 10
"""Steps without a sign after which a run is healthy again."""

LARGEST_DEVIATION = 0.05
"""Largest harmless mean |ρ - 1| of a token in a window. The window's largest step is left out, since a single token can
cause it."""
GROWTH = 4.0
"""A sign's deviation also exceeds this multiple of the least one among the remembered windows: how far a policy moves
in `max_staleness` steps depends on the task and the learning rate."""
CONTRAST_STEPS = 20
"""Number of steps over which the share of groups with contrast is averaged."""
PLATEAU_STEPS = 15
PLATEAU_GAIN = 0.1
"""The reward rises if it gained more in `PLATEAU_STEPS` steps than this share of all that it ever gained. While it
rises, a policy that moves far is one that learns."""
SMALLEST_SAMPLE = 0.9
"""An effective sample size below this is reported with a deviation. Alone it also occurs in runs that recover."""
LARGEST_GRADIENT = 3.0
"""A gradient norm above this multiple of the median of earlier steps is reported with a deviation. Alone it also occurs
without any staleness, if few groups have contrast."""
REWARD_FALL = 0.1
"""A reward has fallen if it lost more than this share of its gain so far."""
REWARD_ERRORS = 4.0
"""A reward has fallen if it also lost more than this number of standard errors."""

WATCHED = (
    *("importance_ratio_deviation", "effective_sample_size", "grad_norm", "grad_norm_ratio"),
    *("reward_mean", "reward_std", "groups", "groups_with_contrast"),
)
"""Metrics that are remembered."""


class Health(msgspec.Struct, frozen=True, omit_defaults=True):
    """Health of a run's policy."""

    state: HealthState = "healthy"
    since: int = 0
    """The step at which this state began."""
    signs: list[str] = []
    """The signs, with figures; empty while healthy."""
    turn: list[str] = []
    """Settings to change, the one to try first first; empty while healthy."""

    def __str__(self) -> str:
        """Return the state as one sentence, for people."""
        match self.state:
            case "healthy":
                return "the run is healthy again" if self.since else "the run is healthy"
            case "warning":
                found = "the run may be about to fall apart"
            case "collapsing":
                found = "the run is collapsing"
        return f"{found}: {', '.join(self.signs)}; try {'; '.join(self.turn)}"


HEALTHY = Health()


class CollapseWatch(msgspec.Struct, frozen=True):
    """The state machine: figures of the last steps, the health that they show, the staleness and the steps that are
    bearable.

    Immutable: each step makes the next one."""

    health: Health = HEALTHY
    recent: dict[str, list[float]] = {}
    """Figures of the last `REMEMBERED` steps by name, the latest last."""
    best: float | None = None
    """Largest mean reward of a window so far."""
    worst: float | None = None
    """Smallest mean reward of a window so far."""
    held_out: list[float] = []
    """Mean reward of each evaluation."""
    since_sign: int = CALM
    """Steps since the last sign."""
    since_lead: int = REMEMBERED
    """Steps since the last sign that the policy is far from its data."""
    drift: float = 0.0
    """Mean |ρ - 1| of a token for each version of its age; an earlier step counts half as much as the next one."""
    mismatch: float = 0.0
    """Mean |ρ - 1| of tokens of age 0, in the last step that had some. It is no drift: engine and trainer compute
    differently, or the policy moves within a step."""
    contrast: float = 0.0
    """Largest mean share of groups with contrast, over `CONTRAST_STEPS` steps, fewer at the beginning."""
    near: int | None = None
    """The age, in versions, up to which |ρ - 1| is expected to stay below `staleness.most_drift`; None: no limit."""

    def grad_norm_ratio(self, grad_norm: float) -> float:
        """Return a step's gradient norm over the median of the steps before; 1 while those are fewer than `ENOUGH`."""
        norms = self.recent.get("grad_norm", [])
        usual = median(norms) if len(norms) >= ENOUGH else 0.0
        return grad_norm / usual if usual > 0 else 1.0

    def after(
        self,
        figures: Mapping[str, float],
        *,
        step: int,
        turn: Sequence[str],
        age: float = 0.0,
        most_drift: float = 0.0,
    ) -> CollapseWatch:
        """Return the watch after a step with the metrics `figures`; missing metrics are ignored.

        `turn`: settings to recommend; `age`: mean age of the trained tokens, in versions; `most_drift`: of [staleness].
        """
        recent = {
            name: [*self.recent.get(name, []), *([figures[name]] if _is_known(figures, name) else [])][-REMEMBERED:]
            for name in WATCHED
        }
        seen = msgspec.structs.replace(self, recent=recent)._with_best()._with_contrast()
        return seen._judged(step=step, turn=turn)._drifted(figures, age=age, most=most_drift)

    def evaluated(self, reward: float) -> CollapseWatch:
        """Return the watch after an evaluation on held-out prompts."""
        return msgspec.structs.replace(self, held_out=[*self.held_out, reward])

    def resumed(self, *, most_drift: float = 0.0) -> CollapseWatch:
        """Return the watch of a run that continues from a checkpoint.

        A collapsed run has to show signs again to count as collapsing.
        """
        found = msgspec.structs.replace(self, near=(self.near or 0) if most_drift else None)
        if self.health.state != "collapsing":
            return found
        return msgspec.structs.replace(
            found, health=msgspec.structs.replace(self.health, state="warning"), since_lead=CALM, recent={}
        )

    def staleness(self, max_staleness: int) -> int:
        """Return by how many versions groups admitted from now on may be stale, with this `max_staleness`."""
        return max_staleness if self.near is None else min(max_staleness, self.near)

    def lr_scale(self, teaching: int, groups: int) -> float:
        """Return the factor of the learning rate for a batch of `groups`, `teaching` of them with contrast.

        The noise in the direction of a step falls with the square root of the number of groups that teach, and Adam
        takes steps of the same length whatever that number is.
        """
        if not self.contrast:
            return 1.0
        return min(1.0, math.sqrt(max(teaching, 1) / groups / self.contrast))

    def _windows(self, name: str) -> list[list[float]]:
        """Return each `WINDOW` remembered steps in a row, the latest last."""
        values = self.recent.get(name, [])
        return [values[end - WINDOW : end] for end in range(WINDOW, len(values) + 1)]

    def _mean(self, name: str) -> float | None:
        """Return the mean of figure `name` over the last `WINDOW` steps; None while there are fewer."""
        return fmean(self.recent[name][-WINDOW:]) if len(self.recent.get(name, [])) >= WINDOW else None

    def _with_best(self) -> CollapseWatch:
        reward = self._mean("reward_mean")
        if reward is None:
            return self
        return msgspec.structs.replace(
            self,
            best=reward if self.best is None else max(self.best, reward),
            worst=reward if self.worst is None else min(self.worst, reward),
        )

    def _with_contrast(self) -> CollapseWatch:
        groups, contrasted = (self.recent[name][-CONTRAST_STEPS:] for name in ("groups", "groups_with_contrast"))
        if len(contrasted) < WINDOW:
            return self
        return msgspec.structs.replace(self, contrast=max(self.contrast, sum(contrasted) / max(sum(groups), 1.0)))

    def _rises(self) -> bool:
        """Return whether the reward still gains a good part of all that it ever gained; True while that is unknown."""
        rewards = [fmean(window) for window in self._windows("reward_mean")]
        if len(rewards) <= PLATEAU_STEPS or self.best is None or self.worst is None:
            return True
        return rewards[-1] - rewards[-1 - PLATEAU_STEPS] > PLATEAU_GAIN * (self.best - self.worst)

    def _leading_signs(self) -> list[str]:
        """Return the signs that the policy has moved away from its data, which precede a fall of the reward."""
        deviations = [fmean(sorted(window)[:-1]) for window in self._windows("importance_ratio_deviation")]
        if self._rises() or len(deviations) < ENOUGH:
            return []
        least, now = min(deviations), deviations[-1]
        if now <= max(LARGEST_DEVIATION, GROWTH * least):
            return []
        signs = [f"importance ratios are {now:.2f} away from 1, {now / max(least, 1e-4):.0f} times as far as before"]
        sample = self._mean("effective_sample_size")
        if sample is not None and sample < SMALLEST_SAMPLE:
            signs.append(f"effective sample size {sample:.2f}")
        gradient = max(self.recent.get("grad_norm_ratio", [])[-WINDOW:], default=0.0)
        if gradient > LARGEST_GRADIENT:
            signs.append(f"gradient norm up to {gradient:.0f} times the usual")
        return signs

    def _falls(self) -> list[str]:
        """Return the signs that a reward has fallen."""
        signs = []
        reward, spread = self._mean("reward_mean"), self._mean("reward_std")
        if reward is not None and self.best is not None and self.worst is not None:
            error = (spread or 0.0) / (max(self._mean("groups") or 1.0, 1.0) * WINDOW) ** 0.5
            lost = self.best - reward
            if lost > max(REWARD_FALL * (self.best - self.worst), REWARD_ERRORS * error) and lost > 0:
                signs.append(f"reward fallen from {self.best:.3f} to {reward:.3f}")
        if len(self.held_out) >= 3:
            least, most, now = min(self.held_out), max(self.held_out), max(self.held_out[-2:])
            if most - now > REWARD_FALL * (most - least):
                signs.append(f"held-out reward fallen from {most:.3f} to {now:.3f} in two evaluations")
        return signs

    def _judged(self, *, step: int, turn: Sequence[str]) -> CollapseWatch:
        leading, falls = self._leading_signs(), self._falls()
        since_sign = 0 if leading or falls else self.since_sign + 1
        since_lead = 0 if leading else self.since_lead + 1
        now = self.health.state
        state: HealthState = now
        if falls and (since_lead < CALM or now == "collapsing"):
            state = "collapsing"
        elif leading or falls:
            state = "collapsing" if now == "collapsing" else "warning"
        elif since_sign >= CALM:
            state = "healthy"
        if state == "healthy":
            health = Health(since=self.health.since if now == "healthy" else step)
        else:
            health = Health(
                state=state,
                since=self.health.since if now == state else step,
                signs=[*leading, *falls] or self.health.signs,
                turn=list(turn),
            )
        return msgspec.structs.replace(self, health=health, since_sign=since_sign, since_lead=since_lead)

    def _drifted(self, figures: Mapping[str, float], *, age: float, most: float) -> CollapseWatch:
        """Return the watch with the drift of the last step. The staleness that `most` allows rises by one version a
        step, since the policies of the next steps are not known, and falls at once, but not below 1."""
        if not most:
            return self
        fresh = "importance_ratio_deviation/age_0"
        drift, mismatch = self.drift, figures[fresh] if _is_known(figures, fresh) else self.mismatch
        if age > 0 and _is_known(figures, "importance_ratio_deviation"):
            now = max(0.0, figures["importance_ratio_deviation"] - mismatch) / age
            drift = (drift + now) / 2 if drift else now
        near = (self.near or 0) + 1
        if near * drift > most:
            near = max(1, int(most / drift))
        return msgspec.structs.replace(self, drift=drift, mismatch=mismatch, near=near)


def _is_known(figures: Mapping[str, float], name: str) -> bool:
    """Return whether `figures` has a finite value for `name`."""
    return math.isfinite(figures.get(name, math.nan))


def advice(config: Config) -> list[str]:
    """Return the settings to change in a run that is about to collapse, the first to try first, as `key=value`."""
    eta, lr, pull = config.staleness.max_staleness, config.trainer.lr, config.algorithm.behavior_kl_coef
    found = []
    if eta > 0:
        found.append(f"staleness.max_staleness={eta // 2} (now {eta})")
    found.append(f"trainer.lr={lr / 2:g} (now {lr:g})")
    if eta > 0:
        found.append(f"algorithm.behavior_kl_coef={2 * pull or 0.1:g} (now {pull:g})")
    return found
