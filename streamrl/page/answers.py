"""Replies of the page's calls: each function makes one reply from a `RunView`. Pure but for reading files.

Everything from a run is data here, regardless of its content: no module that a configuration names is imported, and no
text is meant to be inserted as HTML.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from streamrl.config.sections import DEFAULT_TRAIN_STEPS
from streamrl.config.trainer import ASYNCHRONOUS, SYNCHRONOUS
from streamrl.errors import ConfigError
from streamrl.launch.graph_picture import Arrow, Box, drawing
from streamrl.records.evaluation import EvaluationReport
from streamrl.records.rollouts import TOKEN_USES, Branch, KeptGroup
from streamrl.records.table import Column, thinned
from streamrl.records.timeline import without_figures
from streamrl.records.view import Process, RunState, RunView
from streamrl.trainer.graph import graph_of
from streamrl.types import NO_VERSION

MOST_AGES = 12
"""Most columns of tokens by age; if there are more ages, each column covers a range of them."""
MOST_POINTS = 20_000
RATE_SECONDS = 30.0
"""Length of the window over which the present rates of a process are computed."""
STANDING_BEATS = 15.0
"""A process whose last heartbeat is this many seconds older than the last record of the run counts as silent."""


class RunFacts(msgspec.Struct, frozen=True):
    """Identity and state of one of the page's runs."""

    id: int
    name: str
    folder: str
    state: RunState
    message: str
    steps: int
    most_steps: int | None
    evaluations: int
    beats: int
    """Number of heartbeats that were read; it grows with the timeline."""
    rollouts: int
    """Number of responses that were read; it grows with their table, and is 0 until the responses are requested."""
    begin: float
    """Seconds since the epoch; 0: unknown."""
    seconds: float
    """From the run's begin to its last record."""
    max_staleness: int | None
    over_age: str
    model: str
    unreadable: int
    """Lines of its files that could not be read and were left out."""


def facts(run: RunView, *, number: int) -> RunFacts:
    """Return the identity and state of `run`; `number` is its index on the page."""
    state, message = run.state()
    settings = run.settings
    begin = run.begin
    steps = _get(settings, "run", "total_train_steps")
    if steps is None and settings and _get(settings, "run", "total_train_epochs") is None:
        steps = DEFAULT_TRAIN_STEPS
    return RunFacts(
        id=number,
        name=run.name,
        folder=str(run.folder),
        state=state,
        message=message,
        steps=run.steps[-1].step if run.steps else 0,
        most_steps=steps if isinstance(steps, int) else None,
        evaluations=len(run.evaluations),
        beats=sum(len(p.stats) for p in run.processes.values()),
        rollouts=run.rollouts_read,
        begin=begin,
        seconds=max(0.0, run.end - begin) if begin else 0.0,
        max_staleness=_get(settings, "staleness", "max_staleness"),
        over_age=str(_get(settings, "staleness", "over_age") or ""),
        model=str(_get(settings, "model", "path") or ""),
        unreadable=run.unreadable,
    )


def steps(run: RunView, *, names: Sequence[str], first: float, last: float, points: int) -> bytes:
    """Return the figures of the steps from `first` to `last`, as columns of 32-bit floats.

    `names` selects the columns; if it is empty, all are returned. `step`, `time`, `run_seconds` and `tokens_until`
    (tokens trained on up to the end of the step) are always included. `age/LOW-HIGH` are the tokens that entered the
    loss, by age, and `task/NAME/FIGURE` the figures of tasks; the names `age` and `task` select all columns of a kind.
    The reply has at most `points` rows: of more, the least and greatest values of each stretch are kept.

    The reply is the length of a JSON header in 4 bytes (little endian), the header, spaces up to a multiple of 4, and
    the columns one after the other.
    """
    columns = run.columns()
    columns |= _by_age(run, [step.token_ages for step in run.steps], "age")
    columns |= _by_age(run, [step.masked_ages for step in run.steps], "masked")
    if "tokens_trained" in columns:
        columns["tokens_until"] = np.cumsum(np.nan_to_num(columns["tokens_trained"]))
    known = sorted(columns)
    wanted = [*(names or known)]
    wanted += [name for name in known for kind in ("age", "task") if name.startswith(f"{kind}/") and kind in names]
    x = columns.get("step", np.zeros(0))
    inside = (x >= first) & (x <= last)
    picked = {name: columns[name][inside] for name in dict.fromkeys(wanted) if name in columns and name != "step"}
    axes = [name for name in ("time", "run_seconds", "tokens_until") if name in columns]
    picked |= {name: columns[name][inside] for name in axes}
    rows = int(inside.sum())
    x, picked = thinned(x[inside], picked, points=min(points, MOST_POINTS))
    if rows > len(x):
        picked |= {name: np.interp(x, columns["step"], columns[name]) for name in axes}
    picked = {"step": x, **picked}
    header = {"rows": len(x), "of": rows, "names": list(picked), "known": known, "begin": run.begin}
    encoded = msgspec.json.encode(header)
    encoded += b" " * (-(len(encoded)) % 4)
    body = b"".join(np.asarray(column, dtype="<f4").tobytes() for column in picked.values())
    return struct.pack("<I", len(encoded)) + encoded + body


def _by_age(run: RunView, ages: list[dict[int, int]], prefix: str) -> dict[str, Column]:
    """Return tokens by age: `PREFIX/LOW-HIGH` → one number per step; empty if no step has any tokens."""
    limit = _get(run.settings, "staleness", "max_staleness")
    seen = [age for step in ages for age, count in step.items() if count]
    if not seen:
        return {}
    least = 0 if prefix == "age" else min(seen)
    oldest = max([limit if isinstance(limit, int) and prefix == "age" else 0, *seen])
    wide = -(-(oldest + 1 - least) // MOST_AGES)
    found: dict[str, Column] = {}
    for low in range(least, oldest + 1, wide):
        high = min(oldest, low + wide - 1)
        found[f"{prefix}/{low}-{high}"] = np.array(
            [sum(count for age, count in step.items() if low <= age <= high) for step in ages], dtype=float
        )
    return found


class EvaluationPoint(msgspec.Struct, frozen=True):
    """An evaluation, with its place on the time axis."""

    seconds_since_begin: float
    report: EvaluationReport


def evaluations(run: RunView) -> list[EvaluationPoint]:
    """Return the evaluations on held-out prompts, by policy version."""
    return [EvaluationPoint(report.time - run.begin, report) for report in run.evaluations]


class ProcessFacts(msgspec.Struct, frozen=True):
    """State of one process at its last heartbeat."""

    name: str
    role: str
    standing: str
    """`live`, `silent` (no heartbeat for a while), or its last state in the controller's records."""
    heard: float
    """Seconds from the process's last heartbeat to the run's last record."""
    restarts: int
    """Number of restarts that its counters show."""
    waiting_for: str
    rates: dict[str, float]
    """Recent growth of its counters per second."""
    gauges: dict[str, float]
    version: int | None
    """gservers: the policy version that it served; None: none, or not recorded."""
    busy: list[float]
    """gservers: share of time spent generating, in up to 60 stretches of the run."""


class ProcessesView(msgspec.Struct, frozen=True):
    """Every process of a run, and the served weights."""

    processes: list[ProcessFacts]
    served_version: int | None
    """Policy version of the last successful weight update."""
    updates: int
    updates_failed: int
    waits: list[tuple[str, str, float, float]]
    """Waits of processes: process, reason, seconds, share of its time; the longest first."""


def fleet(run: RunView) -> ProcessesView:
    """Return the state of each process."""
    done = [update for update in run.publications if update.done]
    last_status: Mapping[str, Any] = (run.final.status if run.final else None) or {}
    standing = {f"{p.get('role')}/{p.get('index')}": str(p.get("state")) for p in last_status.get("processes", [])}
    return ProcessesView(
        processes=[
            _process_facts(process, run, standing=standing.get(process.name, "")) for process in run.ordered_processes()
        ],
        served_version=done[-1].version if done else None,
        updates=len(done),
        updates_failed=len(run.publications) - len(done),
        waits=_waits(run),
    )


def _process_facts(process: Process, run: RunView, *, standing: str) -> ProcessFacts:
    times: Column = process.times
    heard = max(0.0, run.end - float(times[-1]))
    since = int(np.searchsorted(times, times[-1] - RATE_SECONDS))
    seconds = float(times[-1] - times[since])
    rates, gauges = {}, {}
    for name in process.stats.names:
        column: Column = process.stats.column(name)
        if name.endswith("_total"):
            if seconds > 0:
                grown = process.grown(name)
                rates[name.removesuffix("_total")] = float(grown[-1] - grown[since]) / seconds
        elif name != "time" and np.isfinite(column[-1]):
            gauges[name] = float(column[-1])
    busy: list[float] = []
    if process.role == "gserver" and len(times) > 2:
        edges = np.linspace(times[0], times[-1], min(60, len(times)) + 1)
        grown = np.interp(edges, times, process.grown("busy_seconds_total"))
        busy = [round(float(share), 3) for share in np.clip(np.diff(grown) / np.maximum(np.diff(edges), 1e-9), 0, 1)]
    return ProcessFacts(
        name=process.name,
        role=process.role,
        standing=standing or ("live" if heard < STANDING_BEATS else "silent"),
        heard=heard,
        restarts=process.restarts,
        waiting_for=process.waits[-1],
        rates=rates,
        gauges=gauges,
        version=int(gauges["policy_version"]) if process.role == "gserver" and "policy_version" in gauges else None,
        busy=busy,
    )


def _waits(run: RunView, *, most: int = 12) -> list[tuple[str, str, float, float]]:
    found: dict[tuple[str, str], float] = {}
    seconds: dict[str, float] = {}
    for process in run.processes.values():
        gaps = np.where(process.began_anew, 0.0, np.diff(process.times))
        seconds[process.name] = float(gaps.sum())
        for gap, text in zip(gaps, process.waits, strict=False):
            if text:
                key = process.name, without_figures(text)
                found[key] = found.get(key, 0.0) + float(gap)
    longest = sorted(found.items(), key=lambda item: -item[1])[:most]
    return [(name, what, waited, waited / max(seconds[name], 1e-9)) for (name, what), waited in longest]


class ResponseView(msgspec.Struct, frozen=True):
    """One response of a group, token by token, from the end of the prompt on."""

    index: int
    episode: int
    reward: float
    reward_parts: dict[str, float]
    finish: str
    parent: int
    """The response of the same episode with which it shares its beginning; -1: it is the first of its episode."""
    shared: int
    """Number of tokens that it shares with its parent."""
    pieces: list[str]
    """The text of each token."""
    ids: list[int]
    uses: list[int]
    """Index in `GroupView.token_uses`, for each token."""
    figures: dict[str, list[float | None]]
    """Name → one number per token; None for tokens that the policy did not sample."""


class GroupView(msgspec.Struct, frozen=True):
    """A group with all its siblings."""

    step: int
    seq: int
    seconds: float
    """Since the run's begin."""
    worker: str
    gserver: str
    prompt: list[str]
    """The text of each token that all responses share."""
    token_uses: tuple[str, ...]
    responses: list[ResponseView]


def group(run: RunView, *, step: int, seq: int) -> GroupView:
    """Return group `seq` of `step`; raises `DataError` if it is not there."""
    kept = run.rollouts.group(step, seq)
    branches = kept.branches()
    shared = min([kept.prompt_length, *kept.seqlens.tolist()])
    return GroupView(
        step=kept.step,
        seq=kept.seq,
        seconds=kept.time - run.begin,
        worker=kept.worker,
        gserver=kept.gserver,
        prompt=kept.pieces(0)[:shared] if kept.size else [],
        token_uses=TOKEN_USES,
        responses=[_response(kept, index, branch, shared) for index, branch in enumerate(branches)],
    )


def _response(kept: KeptGroup, index: int, branch: Branch, shared: int) -> ResponseView:
    first, end = kept.bounds(index)
    own = slice(first + shared, end)
    sampled = kept.policy_versions[own] != NO_VERSION
    found = {
        "version": kept.policy_versions,
        "age": kept.step - 1 - kept.policy_versions,
        "logprob": kept.behavior_logprobs,
        "proximal": kept.proximal_logprobs,
        "difference": None if kept.proximal_logprobs is None else kept.proximal_logprobs - kept.behavior_logprobs,
        "reference": kept.ref_logprobs,
        "advantage": kept.advantages,
        "value": kept.values,
        "entropy": kept.entropies,
    }
    return ResponseView(
        index=index,
        episode=int(kept.episodes[index]),
        reward=float(kept.rewards[index]),
        reward_parts=kept.reward_parts[index] if kept.reward_parts else {},
        finish=kept.finish_reasons[index],
        parent=branch.parent,
        shared=branch.shared,
        pieces=kept.pieces(index)[shared:],
        ids=kept.input_ids[own].tolist(),
        uses=kept.token_uses[own].tolist(),
        figures={name: _figures(array[own], sampled) for name, array in found.items() if array is not None},
    )


def _figures(values: NDArray[Any], sampled: NDArray[np.bool_]) -> list[float | None]:
    """Return `values` where the policy sampled, rounded to six significant figures, and None elsewhere."""
    if not sampled.any():
        return [None] * len(values)
    known = sampled & np.isfinite(values)
    return [float(f"{value:.6g}") if there else None for value, there in zip(values, known, strict=True)]


class Configuration(msgspec.Struct, frozen=True):
    """A run's resolved configuration."""

    values: dict[str, str]
    """`section.key` → its value as JSON, which mostly looks like TOML."""
    problem: str = ""


def settings(run: RunView) -> Configuration:
    """Return the configuration of the run."""
    try:
        tree = run.config_tree()
    except ConfigError as error:
        return Configuration({}, str(error))
    return Configuration(dict(_flat(tree)))


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        elif isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
            for number, each in enumerate(value):
                yield from _flat(each, f"{prefix}{key}.{each.get('name', number)}.")
        else:
            yield prefix + key, msgspec.json.encode(value).decode()


class GraphPicture(msgspec.Struct, frozen=True):
    """The model function calls of a run."""

    boxes: list[Box]
    arrows: list[Arrow]
    problem: str = ""


def graph(run: RunView) -> GraphPicture:
    """Return the graph of model function calls; a user's own graph is only named, since drawing it would run code."""
    config = run.config
    if config is None:
        return GraphPicture([], [], f"this version of streamrl cannot read the configuration in {run.folder}")
    try:
        if config.trainer.graph not in (ASYNCHRONOUS, SYNCHRONOUS):
            return GraphPicture(
                [], [], f"the graph is {config.trainer.graph}, a function of the user's: `streamrl graph` prints it"
            )
        return GraphPicture(*drawing(graph_of(config)))
    except ConfigError as error:
        return GraphPicture([], [], str(error))


def _get(tree: Mapping[str, Any], *keys: str) -> Any:
    value: Any = tree
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
