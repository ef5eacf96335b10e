"""The claims of the staleness study, each answered with *holds*, *fails* or *not decided*.

Pure functions of curves. A curve is the mean reward of each policy version, at the same versions for all runs of a
task. Runs of a task differ in their seed; synchronous and stale runs are not paired, since a stale run does not
reproduce the batches of its seed.

- *Area*: R = mean area of the stale runs / mean area of the synchronous ones. Holds at margin δ if the one-sided 95%
  lower bound of R is at least 1 − δ, fails if the upper bound is below it.
- *Plateau*: Q = error of the stale runs / error of the synchronous ones over the last third, where the error is
  1 − reward. Holds if the upper bound is at most the largest ratio allowed, fails if the lower bound is above it.
- *Area per second*: the same ratio, of areas over the seconds of training. Holds if the lower bound is at least 1.
- *No collapse*, of all stale runs together: a run collapses if its reward drops by more than θ from its earlier best
  and is still below that best minus θ / 2 at the end. θ is 0.05, or the largest drop of a synchronous run of the task.
  Holds if the Clopper-Pearson upper bound of the share of runs that collapse is at most 5%, fails if the lower bound is
  above it. That takes 59 runs without a collapse, or 93 with one, so the runs of all η are counted together.

Bounds of the ratios come from a bootstrap over seeds, stratified by task (Agarwal et al., NeurIPS 2021): a task counts
equally, whatever its number of runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from math import comb
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Answer = Literal["holds", "fails", "not decided"]
DRAWS = 10_000
LEVEL = 0.95
"""Confidence of each one-sided bound."""
MARGIN = {1: 0.03, 2: 0.05, 4: 0.05, 8: 0.10}
"""By η: share of the area that may be lost."""
MOST_ERROR = {1: 1.5, 2: 1.5, 4: 1.5, 8: 2.0}
"""By η: largest ratio of plateau errors."""
LEAST_ERROR = 0.002
"""A plateau error counts as at least this, so that the ratio of two perfect policies is 1."""
DROP, COLLAPSES = 0.05, 0.05
"""Least drop of the reward that counts, and the largest share of runs that may collapse."""
SMOOTH = 3
"""Points of a curve that are averaged before a drop is measured."""


class Claim(NamedTuple):
    """A claim about stale runs."""

    name: str
    estimate: float
    low: float
    high: float
    """The one-sided 95% bounds."""
    wanted: str
    """What the bounds are compared with."""
    answer: Answer


Curves = Mapping[str, Sequence[Array]]
"""Task → the curves of its runs, all of one length."""


def claims(synchronous: Curves, stale: Curves, *, eta: int, seed: int = 0) -> list[Claim]:
    """Return the claims about the runs `stale` at `eta`. Tasks without runs of both kinds are left out."""
    tasks = [task for task in stale if stale[task] and synchronous.get(task)]
    generator = np.random.default_rng(seed)
    ours, theirs = ({task: np.stack(runs[task]) for task in tasks} for runs in (stale, synchronous))
    least, most = 1 - MARGIN[eta], MOST_ERROR[eta]
    area = bounds(ours, theirs, lambda runs: runs.mean(axis=-1), generator)
    plateau = bounds(ours, theirs, errors, generator)
    return [
        Claim("area", *area, f"≥ {least:.2f}", at_least(area, least)),
        Claim("plateau error", *plateau, f"≤ {most:g}", at_most(plateau, most)),
    ]


Rates = Mapping[str, Sequence[float]]
"""Task → the area per second of its runs."""


def faster(synchronous: Rates, stale: Rates, *, seed: int = 0) -> list[Claim]:
    """Return the claim about area per second; none without tasks that have runs of both kinds."""
    tasks = [task for task in stale if task in synchronous]
    ours, theirs = ({task: np.array(runs[task])[:, None] for task in tasks} for runs in (stale, synchronous))
    found = bounds(ours, theirs, lambda rates: rates[..., 0], np.random.default_rng(seed)) if tasks else None
    return [Claim("area per second", *found, "≥ 1", at_least(found, 1.0))] if found else []


def no_collapse(synchronous: Curves, stale: Curves) -> Claim:
    """Return the claim about the runs `stale`, of any η. Tasks without synchronous runs are left out."""
    fell = [
        collapses(curve, max([DROP, *map(largest_drop, synchronous[task])]))
        for task in stale
        if synchronous.get(task)
        for curve in stale[task]
    ]
    low, high = clopper_pearson(sum(fell), len(fell))
    answer = at_most((0.0, low, high), COLLAPSES)
    return Claim("runs that collapse", sum(fell) / max(1, len(fell)), low, high, f"≤ {COLLAPSES:.0%}", answer)


def at_least(found: tuple[float, float, float], wanted: float) -> Answer:
    """Return whether an estimate with its bounds is at least `wanted`."""
    _, low, high = found
    return "holds" if low >= wanted else "fails" if high < wanted else "not decided"


def at_most(found: tuple[float, float, float], wanted: float) -> Answer:
    """Return whether an estimate with its bounds is at most `wanted`."""
    _, low, high = found
    return "holds" if high <= wanted else "fails" if low > wanted else "not decided"


def bounds(
    ours: Mapping[str, Array],
    theirs: Mapping[str, Array],
    figure: Callable[[Array], Array],
    generator: np.random.Generator,
) -> tuple[float, float, float]:
    """Return the ratio of the mean `figure` of the runs, as a mean over tasks, with its one-sided bounds.

    `figure` maps `[..., runs, points]` to `[..., runs]`.
    """
    estimates, draws = [], np.zeros(DRAWS)
    for task in ours:
        mine, other = figure(ours[task]), figure(theirs[task])
        estimates.append(mine.mean() / other.mean())
        draws += _means(mine, generator) / _means(other, generator) / len(ours)
    low, high = np.quantile(draws, [1 - LEVEL, LEVEL])
    return float(np.mean(estimates)), float(low), float(high)


def _means(values: Array, generator: np.random.Generator) -> Array:
    """Return `[DRAWS]`: means of samples of `values` with replacement."""
    chosen: Array = values[generator.integers(0, len(values), (DRAWS, len(values)))].mean(axis=1)
    return chosen


def errors(runs: Array) -> Array:
    """Return the mean error over the last third of each curve: `[..., points]` → `[...]`."""
    last: Array = np.maximum(1 - runs[..., -max(1, runs.shape[-1] // 3) :].mean(axis=-1), LEAST_ERROR)
    return last


def smoothed(curve: Array) -> Array:
    """Return the means of `SMOOTH` consecutive points."""
    return np.convolve(curve, np.full(SMOOTH, 1 / SMOOTH), mode="valid") if len(curve) >= SMOOTH else curve


def largest_drop(curve: Array) -> float:
    """Return the largest drop of the smoothed curve from its earlier best."""
    smooth = smoothed(curve)
    return float((np.maximum.accumulate(smooth) - smooth).max())


def collapses(curve: Array, threshold: float) -> bool:
    """Return whether the curve drops by more than `threshold` and does not recover by its end."""
    smooth = smoothed(curve)
    best = np.maximum.accumulate(smooth)
    return bool((best - smooth).max() > threshold and best[-1] - smooth[-1] > threshold / 2)


def clopper_pearson(count: int, runs: int) -> tuple[float, float]:
    """Return the one-sided bounds of the share that gives `count` of `runs` (Clopper and Pearson, 1934)."""

    def at_most_count(share: float, most: int) -> float:
        return sum(comb(runs, k) * share**k * (1 - share) ** (runs - k) for k in range(most + 1))

    def share_where(most: int, probability: float) -> float:
        """Return the share at which at most `most` of the runs are seen with `probability`."""
        low, high = 0.0, 1.0
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (middle, high) if at_most_count(middle, most) > probability else (low, middle)
        return (low + high) / 2

    low = share_where(count - 1, LEVEL) if count else 0.0
    return low, share_where(count, 1 - LEVEL) if count < runs else 1.0


def passes_itself(synchronous: Curves, *, eta: int) -> float:
    """Return the share of splits of the synchronous runs in halves in which one half does not fail against the other.

    The test of the criterion itself: it should be at least 0.95.
    """
    count = min(len(runs) for runs in synchronous.values())
    half = count // 2
    splits = list(combinations(range(count), half))
    passed = 0
    for chosen in splits:
        ours = {task: [runs[i] for i in chosen] for task, runs in synchronous.items()}
        theirs = {task: [runs[i] for i in range(count) if i not in chosen] for task, runs in synchronous.items()}
        found = [*claims(theirs, ours, eta=eta), no_collapse(theirs, ours)]
        passed += all(claim.answer != "fails" for claim in found)
    return passed / len(splits)
