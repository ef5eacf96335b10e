"""Watches the figures of a run for signs that its policy is about to fall apart. Pure.

Where off-policy training collapses, figures change in an order: the policy moves away from the data that it learns
from (importance ratios spread, so their effective sample size falls, and gradients grow), and the reward falls last.
The watch looks for the first, to warn before the last. docs/collapse.md tells what its limits were calibrated on.

What it remembers is a function of the figures of the steps so far and of nothing else, and part of a checkpoint.
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
"""Steps over whose mean figures are judged."""
REMEMBERED = 50
"""Steps that are the measure of the next one."""
ENOUGH = 20
"""Steps that make a measure; before, nothing is judged by it."""
CALM = 10
"""Steps without a sign after which a run is healthy again."""

LARGEST_DEVIATION = 0.05
"""Mean |ρ - 1| of a token in a window without its largest step, which a single token can make: what is less does no
harm."""
GROWTH = 4.0
"""How many times its least of the windows remembered it has to be, too: how far a policy moves in `max_staleness` steps
depends on the task and the learning rate."""
PLATEAU_STEPS = 15
PLATEAU_GAIN = 0.1
"""Where the reward has gained less in `PLATEAU_STEPS` steps than this share of all that it ever gained, it is not
rising. While it rises, a policy that moves far is one that learns."""
SMALLEST_SAMPLE = 0.9
"""Effective sample size of tokens that is told of beside that. By itself it comes in runs that recover, too."""
LARGEST_GRADIENT = 3.0
"""Gradient norm, in medians of the steps before, that is told of beside that. By itself it comes without any staleness,
where few groups have contrast."""
REWARD_FALL = 0.1
"""Share of what the reward had gained that has to be lost."""
REWARD_ERRORS = 4.0
"""Standard errors that have to be lost."""

WATCHED = (
    *("importance_ratio_deviation", "effective_sample_size", "grad_norm", "grad_norm_ratio"),
    *("reward_mean", "reward_std", "groups"),
)
"""Metrics that are remembered."""

SLOWER = 0.25
"""What a slowed run's learning rate is multiplied by while the policy is far from its data, which do not show what a
step has done. No longer: with fresh data the policy has to learn again what it lost."""
RECOVERY = 25
"""Steps without a sign after which a slowed run is stale again, by half of what was too much."""


class Health(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a run is."""

    state: HealthState = "healthy"
    since: int = 0
    """The step at which this state began."""
    signs: list[str] = []
    """What was seen, with figures; empty while healthy."""
    turn: list[str] = []
    """Settings to change, the one to try first first; empty while healthy."""

    def __str__(self) -> str:
        """In one sentence, for people."""
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
    """The state machine: the figures of the last steps, the verdict on them, and the pace that follows.

    Immutable: each step makes the next one."""

    health: Health = HEALTHY
    lr_scale: float = 1.0
    """What the policy's learning rate has to be multiplied by in the next step."""
    staleness_share: float = 1.0
    """The factor on `max_staleness` at which groups are admitted from now on."""
    bearable_share: float = 1.0
    """What `staleness_share` comes back to."""
    recent: dict[str, list[float]] = {}
    """Figures of the last `REMEMBERED` steps by name, the latest last."""
    best: float | None = None
    """Largest mean reward of a window so far."""
    worst: float | None = None
    """Smallest one."""
    held_out: list[float] = []
    """Mean reward of each evaluation."""
    since_sign: int = CALM
    """Steps since the last sign."""
    since_lead: int = REMEMBERED
    """Steps since the last sign that the policy is far from its data."""

    def grad_norm_ratio(self, grad_norm: float) -> float:
        """Return a step's gradient norm over the median of the steps before; 1 while they are too few to tell."""
        norms = self.recent.get("grad_norm", [])
        usual = median(norms) if len(norms) >= ENOUGH else 0.0
        return grad_norm / usual if usual > 0 else 1.0

    def after(self, figures: Mapping[str, float], *, step: int, turn: Sequence[str], slow: bool) -> CollapseWatch:
        """Return the watch after a step with the metrics `figures`, those that it lacks left out of the judgement.

        `turn`: what to tell to change; `slow`: slow the run down while there are signs.
        """
        recent = {
            name: [*self.recent.get(name, []), *([figures[name]] if _is_known(figures, name) else [])][-REMEMBERED:]
            for name in WATCHED
        }
        seen = msgspec.structs.replace(self, recent=recent)
        return seen._with_best()._judged(step=step, turn=turn)._paced(slow=slow)

    def evaluated(self, reward: float) -> CollapseWatch:
        """Return the watch after an evaluation on held-out prompts."""
        return msgspec.structs.replace(self, held_out=[*self.held_out, reward])

    def resumed(self, *, slow: bool) -> CollapseWatch:
        """Return the watch of a run that goes on from a checkpoint: one that collapsed has to be seen to do so again,
        and one that is not to be slowed any more (`slow`) goes at its whole pace."""
        found = self if slow else msgspec.structs.replace(self, lr_scale=1.0, staleness_share=1.0, bearable_share=1.0)
        if self.health.state != "collapsing":
            return found
        return msgspec.structs.replace(
            found, health=msgspec.structs.replace(self.health, state="warning"), since_lead=CALM, recent={}
        )

    def staleness(self, max_staleness: int) -> int:
        """By how many versions groups may be stale that are admitted from now on, with this `max_staleness`."""
        return int(self.staleness_share * max_staleness)

    def _windows(self, name: str) -> list[list[float]]:
        """Each `WINDOW` steps in a row that are remembered, the latest last."""
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

    def _rises(self) -> bool:
        """Whether the reward still gains a good part of what it ever gained; so it is while nobody can tell."""
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
        """Rewards that have fallen."""
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

    def _paced(self, *, slow: bool) -> CollapseWatch:
        """With the pace of the next step: fresh data at any sign, and smaller steps while the policy is far from its
        data. A reward that has fallen makes them no smaller: it has to be learned again."""
        if not slow:
            return self
        share, bearable = self.staleness_share, self.bearable_share
        if self.since_sign == 0 and share > 0:
            share, bearable = 0.0, share / 2
        elif self.since_sign >= RECOVERY:
            share = bearable
        return msgspec.structs.replace(
            self,
            lr_scale=SLOWER if self.since_lead == 0 else 1.0,
            staleness_share=share,
            bearable_share=bearable,
        )


def _is_known(figures: Mapping[str, float], name: str) -> bool:
    """Whether there is such a figure, and it is a number."""
    return math.isfinite(figures.get(name, math.nan))


def advice(config: Config) -> list[str]:
    """Return what to change in a run that is about to fall apart, the first to try first, as `key=value`."""
    eta, lr, pull = config.staleness.max_staleness, config.trainer.lr, config.algorithm.behavior_kl_coef
    found = []
    if eta > 0:
        found.append(f"staleness.max_staleness={eta // 2} (now {eta})")
    found.append(f"trainer.lr={lr / 2:g} (now {lr:g})")
    if eta > 0:
        found.append(f"algorithm.behavior_kl_coef={2 * pull or 0.1:g} (now {pull:g})")
    return found
