"""Plots of a run: reward, staleness, throughput, and the overlap of the two pools in time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

import matplotlib as mpl
import matplotlib.ticker
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from streamrl.records.metrics import TASK, StepFigures, of_tasks, seconds_between
from streamrl.records.view import Process, RunView

SPAN_COLOUR: Final = {
    "wait": "#d9d9d9",
    "ref_inf": "#b07aa1",
    "actor_inf": "#76b7b2",
    "critic_inf": "#9c755f",
    "actor_train": "#4e79a7",
    "critic_train": "#1f4e79",
    "publish": "#f28e2b",
    "save": "#59a14f",
}
BUSY_COLOUR: Final = "#59a14f"
PAUSE_COLOUR: Final = "#e15759"
HELD_OUT_COLOUR: Final = "#f28e2b"
TIMELINE_SECONDS = 120.0
"""Length of the part of a long run that the timeline's lower plot enlarges."""
STYLE: Final = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "font.size": 10.0,
    "grid.alpha": 0.3,
    "legend.frameon": False,
}


def write_plots(run: RunView, folder: Path) -> list[Path]:
    """Write `reward.png`, `staleness.png`, `throughput.png` and `timeline.png`; return the files."""
    folder.mkdir(exist_ok=True)
    files = []
    with mpl.rc_context(STYLE):  # type: ignore[arg-type]
        for name, draw in (
            ("reward", _draw_reward),
            ("staleness", _draw_staleness),
            ("throughput", _draw_throughput),
            ("timeline", _draw_timeline),
        ):
            figure = draw(run)
            files.append(folder / f"{name}.png")
            figure.savefig(files[-1], dpi=130)
    return files


def _figure(*, rows: int = 1, height: float = 4.0, ratios: Sequence[float] | None = None) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(9.0, height), layout="constrained")
    axes = figure.subplots(rows, 1, squeeze=False, height_ratios=ratios)
    return figure, list(axes[:, 0])


def _draw_reward(run: RunView) -> Figure:
    steps = [step for step in run.steps if "reward_mean" in step.metrics]
    numbers = [step.step for step in steps]
    rewards = np.array([step.metrics["reward_mean"] for step in steps])
    figure, (axes,) = _figure()
    axes.plot(numbers, rewards, color="#a0cbe8", linewidth=1.0, marker=".", markersize=3, label="each step")
    window = max(1, len(rewards) // 20)
    if window > 1:
        smooth = np.convolve(rewards, np.ones(window) / window, mode="valid")
        axes.plot(numbers[window - 1 :], smooth, color="#4e79a7", linewidth=2.2, label=f"mean of {window} steps")
    for name in of_tasks(steps[-1].metrics) if steps else ():
        key = f"{TASK}/{name}/reward_mean"
        own = [(step.step, step.metrics[key]) for step in steps if key in step.metrics]
        axes.plot(*zip(*own, strict=True), linewidth=1.2, label=name)
    held_out = [(e.policy_version, e.reward_mean) for e in run.evaluations if e.reward_mean is not None]
    if held_out:
        axes.plot(*zip(*held_out, strict=True), color=HELD_OUT_COLOUR, linewidth=1.8, marker="o", label="held-out")
    if len(axes.lines) > 1:
        axes.legend(loc="best")
    axes.set(title="Reward", xlabel="policy version", ylabel="mean reward of the batch")
    return figure


def _draw_staleness(run: RunView) -> Figure:
    """Draw the share of each age among the tokens trained on, step by step, and the share of masked tokens below."""
    steps = [step for step in run.steps if step.token_ages]
    limit = run.config.staleness.max_staleness if run.config else None
    figure, (axes, below) = _figure(rows=2, height=5.6, ratios=[3, 1])
    oldest = max([limit or 0, *(age for step in steps for age in step.token_ages)])
    counts = np.array([[step.token_ages.get(age, 0) for age in range(oldest + 1)] for step in steps], dtype=float)
    numbers = [step.step for step in steps]
    if steps:
        shares = counts / counts.sum(axis=1, keepdims=True)
        colours = mpl.colormaps["viridis"](np.linspace(0.95, 0.1, oldest + 1))
        wide = 1 + oldest // 12  # the legend names at most about a dozen ages
        labels = [f"{age}" if age % wide == 0 or age == oldest else "" for age in range(oldest + 1)]
        axes.stackplot(numbers, shares.T, colors=list(colours), labels=labels, step="mid", linewidth=0)
        axes.set(ylim=(0, 1), xlim=(numbers[0], max(numbers[-1], numbers[0] + 1)))
        handles, names = axes.get_legend_handles_labels()
        kept = [(h, n) for h, n in zip(handles, names, strict=True) if n and not n.startswith("_")]
        axes.legend(*zip(*reversed(kept), strict=True), title="age", loc="center left", bbox_to_anchor=(1.0, 0.5))
    note = "" if limit is None else f" (limit {limit}: no older token enters a loss)"
    axes.set(title=f"Age of the tokens trained on, in policy versions{note}", ylabel="share of tokens")
    masked = [step.metrics.get("tokens_masked", 0.0) for step in run.steps]
    trained = [step.metrics.get("tokens_trained", 0.0) for step in run.steps]
    share = [m / (m + t) if m + t else 0.0 for m, t in zip(masked, trained, strict=True)]
    below.fill_between([s.step for s in run.steps], share, color=PAUSE_COLOUR, alpha=0.7, step="mid", linewidth=0)
    below.set(xlabel="policy version", ylabel="masked", ylim=(0, max(0.05, *share, 0.0) * 1.1), xlim=axes.get_xlim())
    below.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0, decimals=0))
    return figure


def _draw_throughput(run: RunView) -> Figure:
    begin, end = run.trained_between
    figure, (axes,) = _figure()
    steps = [step for step in run.steps if "tokens_trained" in step.metrics]
    times = [step.time - begin for step in steps]
    trained = np.cumsum([step.metrics["tokens_trained"] for step in steps])
    edges = np.linspace(0.0, max(end - begin, 1e-6), num=max(2, min(80, len(times) + 1)))
    middle = (edges[1:] + edges[:-1]) / 2
    width = edges[1] - edges[0]
    generated = np.zeros(len(edges))
    for process in _gservers(run):
        generated += np.interp(edges, process.times - begin, process.grown("tokens_generated_total"))
    axes.plot(middle, np.diff(generated) / width, color=BUSY_COLOUR, linewidth=1.8, label="generated")
    if times:
        starts = [0.0, *(b.time - begin - seconds_between(a, b) for a, b in pairwise(steps))]  # without down times
        reached = np.column_stack([np.append(0.0, trained[:-1]), trained])
        on_edges = np.interp(edges, np.column_stack([starts, times]).ravel(), reached.ravel())
        axes.plot(middle, np.diff(on_edges) / width, color="#4e79a7", linewidth=1.8, label="trained on")
    axes.set(title="Throughput", xlabel="seconds since the first step began", ylabel="tokens per second")
    axes.set_ylim(bottom=0)
    axes.legend(loc="best")
    return figure


def _draw_timeline(run: RunView) -> Figure:
    """Draw one lane for each gserver (share of time busy) and one for the trainer (its activities)."""
    begin, end = run.trained_between
    servers = _gservers(run)
    lanes = 1 + len(servers)
    span = end - begin
    zoom = min(TIMELINE_SECONDS, max(span / 6, 6 * span / max(1, len(run.steps))))
    detailed = zoom < 0.7 * span
    height = 1.6 + 0.55 * lanes
    figure, parts = _figure(rows=1 + detailed, height=height * (1 + detailed) + 0.4)
    windows = [(0.0, max(span, 1e-6))]
    if detailed:
        middle = span / 2
        windows.append((middle - zoom / 2, middle + zoom / 2))
    for axes, (left, right) in zip(parts, windows, strict=True):
        for lane, process in enumerate(servers):
            _draw_gserver(axes, process, begin=begin, lane=lane)
        _draw_trainer(axes, run.steps, begin=begin, lane=len(servers))
        axes.set_yticks(range(lanes), [*(process.name for process in servers), "trainer"])
        axes.set(ylim=(lanes - 0.4, -0.6), xlim=(left, right), xlabel="seconds since the first step began")
        axes.grid(visible=False)
    parts[0].set_title("Work of each pool")
    if detailed:
        parts[1].set_title(f"... enlarged: {zoom:.0f} seconds in the middle")
    used = [name for name in SPAN_COLOUR if any(span[0] == name for step in run.steps for span in step.spans)]
    handles = [Patch(color=BUSY_COLOUR, label="gserver busy"), Patch(color=PAUSE_COLOUR, label="paused")]
    handles += [Patch(color=SPAN_COLOUR[name], label=name) for name in used]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=9)
    return figure


def _draw_gserver(axes: Axes, process: Process, *, begin: float, lane: int) -> None:
    """Draw one lane; the height of the green area is the share of time in which the engine computed."""
    times = process.times - begin
    seconds = np.maximum(np.diff(times), 1e-6)
    bottom = lane + 0.4
    axes.hlines(bottom, times[0], times[-1], color="#bbbbbb", linewidth=0.8)
    for counter, colour in (("busy_seconds_total", BUSY_COLOUR), ("pause_seconds_total", PAUSE_COLOUR)):
        share = np.clip(np.diff(process.grown(counter)) / seconds, 0.0, 1.0)
        top = np.append(share, share[-1:]) * 0.8
        axes.fill_between(times, bottom, bottom - top, step="post", color=colour, linewidth=0, alpha=0.85)


def _draw_trainer(axes: Axes, steps: Sequence[StepFigures], *, begin: float, lane: int) -> None:
    by_name: dict[str, list[tuple[float, float]]] = {}
    for step in steps:
        for name, start, stop in step.spans:
            by_name.setdefault(name, []).append((start - begin, stop - start))
    for name, pieces in by_name.items():
        # Weight updates run during the computation of the next step: a strip of their own below it.
        place = (lane + 0.2, 0.2) if name == "publish" else (lane - 0.4, 0.55)
        axes.broken_barh(pieces, place, facecolors=SPAN_COLOUR.get(name, "#ff9da7"), linewidth=0)


def _gservers(run: RunView) -> list[Process]:
    """Return the gservers that can be drawn."""
    return [process for process in run.of_role("gserver") if (np.diff(process.times) > 0).any()]
