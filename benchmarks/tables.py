"""The tables of README and docs, each a function of the results of one benchmark; `figures.py` writes them.

A table stands in its page between `<!-- table: NAME -->` and `<!-- end of table -->`. A benchmark prints its tables
when it ends.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import capacity
import criterion
import numpy as np
import staleness
from common import KEPT, Row, read_results
from criterion import Array

from streamrl.planner.capacity import GIB, Division, backend_of

Results = dict[str, Any]
"""As `common.write_results` writes them."""
Render = Callable[[Results], str]
Cell = str | Callable[[Row], str]
"""A cell of a row: a format string over the row's keys, or a function."""

COMPUTED = ""
"""In place of a benchmark: the table is computed, and nothing was measured."""
MISSING = "–"
NOT_MEASURED = "Not measured yet."


# --- forms of tables -----------------------------------------------------------------------------


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines).replace("| --- ", "|---").replace("|--- |", "|---|")


def filled(form: Cell, row: Row) -> str:
    return form.format_map(row) if isinstance(form, str) else form(row)


def listed(columns: Mapping[str, Cell], rows: Iterable[Row]) -> str:
    """A table with a line for each of `rows`; `columns`: title → cell."""
    return markdown(list(columns), [[filled(form, row) for form in columns.values()] for row in rows])


def all_columns(results: Results) -> str:
    """A table of all rows with all their figures, for a benchmark that no page shows."""
    titles = unique(key for row in results["rows"] for key in row)
    cells = [[short(row.get(key, MISSING)) for key in titles] for row in results["rows"]]
    return markdown([title.replace("_", " ") for title in titles], cells)


def short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def lines_of(columns: Mapping[str, Cell]) -> Render:
    return lambda results: listed(columns, results["rows"])


def crossed(
    rows: Sequence[Row], *, corner: str, line: Cell, column: Callable[[Row], str], columns: Sequence[str], cell: Cell
) -> str:
    """A table with a line for each value of `line` and a column for each of `columns`; `corner` is above the lines."""
    found = {(filled(line, row), column(row)): row for row in rows}
    lines = [
        [name, *(filled(cell, found[name, other]) if (name, other) in found else MISSING for other in columns)]
        for name in unique(filled(line, row) for row in rows)
    ]
    return markdown([*corner.split(" | "), *columns], lines)


def from_to(values: Sequence[float], form: str) -> str:
    """A cell with the least and the greatest of `values`, once if they are shown alike."""
    if not values:
        return MISSING
    least, most = f"{min(values):{form}}", f"{max(values):{form}}"
    return least if least == most else f"{least} to {most}"


def ends_of(values: Iterable[int]) -> tuple[int, int]:
    """The least and the greatest."""
    found = sorted(values)
    return found[0], found[-1]


def unique(values: Iterable[Any]) -> list[Any]:
    """In the order in which they come first."""
    return list(dict.fromkeys(values))


# --- rollout, engine, stream, manager ------------------------------------------------------------

THROUGHPUT: dict[str, Cell] = {
    "generation": lambda row: "SIMULATED" if row["simulated_generation"] else "embedded",
    "max_staleness": lambda row: (
        f"{row['max_staleness']}" + (f", `{row['over_age']}`" if row["over_age"] != "mask" else "")
    ),
    "groups/s": "{groups_per_second:.3g}",
    "speed-up": "{speedup:.2f}",
    "bound": "{bound:.2f}",
    "processor s/group": "{processor_seconds_per_group:.3f}",
    "oldest token": "{oldest_token_age}",
    "masked or dropped": lambda row: f"{row['masked_share'] + row['dropped_share']:.1%}",
    "final reward": lambda row: (
        "{least:.3f} to {most:.3f}".format_map(row["reward_final"]) if row["reward_final"] else MISSING
    ),
}
THROUGHPUT_SHORT = ("generation", "max_staleness", "groups/s", "speed-up", "oldest token")


def throughput(results: Results) -> str:
    """All rows."""
    return listed(THROUGHPUT, results["rows"])


def throughput_short(results: Results) -> str:
    """The columns of `THROUGHPUT_SHORT` and the final reward, at some η, for over-age tokens that are masked."""
    columns = {name: THROUGHPUT[name] for name in THROUGHPUT_SHORT}
    columns["final reward"] = lambda row: f"{row['reward_final']['mean']:.3f}" if row["reward_final"] else MISSING
    chosen = [row for row in results["rows"] if row["over_age"] == "mask" and row["max_staleness"] in (0, 1, 4, 8)]
    return listed(columns, chosen)


AGENTS: dict[str, Cell] = {
    "calls/s of `/generate` directly": "{direct_calls_per_second:.0f}",
    "calls/s through the gateway": "{gateway_calls_per_second:.0f}",
    "tokens/s, of direct": "{ratio:.2f}",
    "processor time of the gateway": "{gateway_processor_ms_per_call:.2f} ms a call",
}
STREAMS = {
    "streamrl": "streamrl",
    "bare": "bare pyzmq",
    "send_pyobj": "send_pyobj",
    "mp_queue": "multiprocessing.Queue",
}
MANAGER_KINDS = {
    "closed": "as fast as it can",
    "open": "at a fixed rate",
    "one by one": "at a fixed rate, one call each",
    "waiting": "in line, one place at a time",
}
ENGINE_SHOWN = (1, 64)
"""Numbers of concurrent requests in the table of the engine."""
MODES = {"collective": "broadcast", "shared_memory": "shared memory", "disk": "disk"}


def engine(results: Results) -> str:
    shown = [row for row in results["rows"] if row["concurrency"] in ENGINE_SHOWN]
    points = {(row["model"], row["concurrency"], row["dtype"]): row for row in shown}
    dtypes = unique(dtype for _, _, dtype in points)
    rows = []
    for model, concurrency in unique(point[:2] for point in points):
        cells = [f"{model}, {concurrency}"]
        for dtype in dtypes:
            rates = dict(points.get((model, concurrency, dtype), {"tokens_per_second": {}})["tokens_per_second"])
            ours = rates.pop("streamrl", None)
            best = max(rates, key=lambda name: rates[name], default=None)
            compared = f" ({ours / rates[best]:.2f} × {best})" if ours and best else ""
            cells.append(f"{ours:,.0f}{compared}" if ours else MISSING)
        rows.append(cells)
    others = unique(name for row in results["rows"] for name in row["tokens_per_second"] if name != "streamrl")
    versions = [f"{package} {version}" for package, version in results["settings"]["versions"].items()]
    table = markdown(["model, at once", *dtypes], rows)
    return f"{table}\n\nThe others: {', '.join(others)} ({', '.join(versions)})."


def stream(results: Results) -> str:
    return crossed(
        results["rows"],
        corner="group",
        line="{siblings} × {tokens} tokens",
        column=lambda row: STREAMS[row["contender"]],
        columns=list(STREAMS.values()),
        cell="{groups_per_second:,.0f} ({ratio_to_bare:.2f})",
    )


def manager(results: Results) -> str:
    """Admissions under load, with their latencies, for the fewest and the most gservers."""
    ends = ends_of(row["gservers"] for row in results["rows"])
    kinds = {"closed": MANAGER_KINDS["closed"], "open": f"{results['settings']['rate']:,.0f} a second asked for"}
    return crossed(
        [row for row in results["rows"] if row["kind"] in kinds and row["gservers"] in ends],
        corner="gservers, at once",
        line="{gservers:,}, {in_flight:,}",
        column=lambda row: kinds[row["kind"]],
        columns=list(kinds.values()),
        cell="{admissions_per_second:,.0f} ({p50_ms:.1f} ms, {p99_ms:.1f} ms)",
    )


def routing(results: Results) -> str:
    """Rules of routing, for the most groups in flight."""
    most = max(row["groups"] for row in results["rows"])
    rows = [row for row in results["rows"] if row["groups"] == most]
    base = {row["case"]: row["tokens_per_second"] for row in rows if row["policy"] == "round robin"}
    return crossed(
        rows,
        corner=f"gservers, with {most} groups in flight",
        line="{case}",
        column=lambda row: row["policy"],
        columns=unique(row["policy"] for row in rows),
        cell=lambda row: f"{row['tokens_per_second'] / base[row['case']]:.2f} ({row['mean_group_seconds']:.1f} s)",
    )


def scale(results: Results) -> str:
    """The cost of more rollout workers and gservers for the controller, with the same groups in flight."""
    process = "controller" if "controller_mib" in results["rows"][0] else "manager"  # the name in earlier results

    def used(row: Row) -> float:
        """Microseconds of a core for calls, each second."""
        return float(row[f"{process}_cpu_us_per_call"] * row["calls_per_second"])

    columns: dict[str, Cell] = {
        "workers": "{workers:,}",
        "gservers": "{gservers}",
        "calls/s": "{calls_per_second:,.0f}",
        f"of a core, for the {process}": lambda row: f"{used(row) / 1e6:.1%}",
        "a call, p50 and p99": "{p50_ms:.1f} ms, {p99_ms:.1f} ms",
    }
    return listed(columns, sorted(results["rows"], key=lambda row: (row["gservers"], row["workers"])))


def weights(results: Results) -> str:
    """Weight updates by size, for the fewest and the most gservers of each."""

    def size_of(row: Row) -> str:
        mebibytes = row["megabytes"]
        size = f"{mebibytes / 1024:.1f} GiB" if mebibytes >= 1024 else f"{mebibytes:.0f} MiB"
        notes = [size, *([row["dtype"]] if row["dtype"] != "float32" else [])]
        notes += ["SIMULATED gservers"] if row["engine"] == "simulated" else []
        return ", ".join(notes)

    def cell(row: Row) -> str:
        seconds = row["first_token_seconds"]
        shown = f"{seconds:.2f} s" if seconds >= 0.1 else f"{1000 * seconds:.0f} ms"
        return f"{shown} ({1000 * row['pause_seconds']:.0f} ms, {row['share']:.2f})"

    gservers: dict[str, list[int]] = {}
    for row in results["rows"]:
        gservers.setdefault(size_of(row), []).append(row["gservers"])
    return crossed(
        [row for row in results["rows"] if row["gservers"] in ends_of(gservers[size_of(row)])],
        corner="weights | gservers",
        line=lambda row: f"{size_of(row)} | {row['gservers']}",
        column=lambda row: MODES[row["mode"]],
        columns=list(MODES.values()),
        cell=cell,
    )


# --- trainer -------------------------------------------------------------------------------------

TRAINERS = {
    "streamrl": "streamrl",
    "streamrl, separate": "the same, prompts not shared",
    "streamrl, Megatron": "streamrl on Megatron Core",
    "padded": "plain torch, padded",
    "unpadded": "plain torch, one by one",
    "TRL": "TRL's GRPOTrainer",
}
AGENTS_TRAINERS = {
    "streamrl": "streamrl: trees",
    "streamrl, separate": "streamrl: each conversation",
    "streamrl, calls": "streamrl: each call with its context",
    "streamrl, Megatron": "streamrl on Megatron Core: trees",
    "padded": "plain torch: conversations, padded",
    "unpadded": "plain torch: conversations, one by one",
    "TRL": "TRL: conversations, padded",
}


def trainer(results: Results) -> str:
    rows = results["rows"]
    table = crossed(
        rows,
        corner="model (float32)",
        line=lambda row: f"{row['model']}, {row['groups']} group{'s' * (row['groups'] > 1)}",
        column=lambda row: TRAINERS[row["contender"]],
        columns=[name for contender, name in TRAINERS.items() if any(row["contender"] == contender for row in rows)],
        cell=lambda row: f"{median(row['cpu_rounds']):,.0f} ({row['ratio_by_cpu_time']:.2f})",
    )
    return with_versions(table, results)


def agents_trainer(results: Results) -> str:
    def seconds(row: Row) -> str:
        cpu_rate = median(row["cpu_rounds"])
        cpu_seconds = row["tokens_per_second"] * row["seconds_per_step"] / cpu_rate  # steps have equally many tokens
        return f"{row['seconds_per_step']:.2f} ({cpu_seconds:.2f})"

    columns: dict[str, Cell] = {
        "rows": lambda row: AGENTS_TRAINERS[row["contender"]],
        "tokens computed in a step": "{tokens_computed:,}",
        "seconds a step (of CPU time)": seconds,
        "sampled tokens per second of CPU time": lambda row: f"{median(row['cpu_rounds']):,.0f}",
    }
    return with_versions(listed(columns, results["rows"]), results)


def with_versions(table: str, results: Results) -> str:
    """The table, the number of threads, and the versions of other libraries: the beginnings of the rows' notes."""
    notes = [f"Threads: {results['settings']['threads']}"]
    notes += [f"{row['contender']}: {row['note'].partition(';')[0]}" for row in results["rows"] if row["note"]]
    return f"{table}\n\n{'. '.join(unique(notes))}."


def long_rows(results: Results) -> str:
    return crossed(
        results["rows"],
        corner="tokens in the row",
        line="{tokens:,}",
        column=lambda row: row["contender"],
        columns=unique(row["contender"] for row in results["rows"]),
        cell="{mib:,.0f} MiB ({seconds:,.0f} s)",
    )


CHECKPOINT: dict[str, Cell] = {
    "model workers": "{workers}",
    "each holds": lambda row: f"{row['bytes'] / 1e6:,.0f} MB",
    "training stands still": "{standstill:.2f} s",
    "of a bare copy": lambda row: f"{row['standstill'] / row['copy']:.2f}",
    "on the disk after": "{write:.2f} s",
    "of a bare write": lambda row: f"{row['write'] / row['bare_write']:.2f}",
}
GPU_FIGURES = {
    "way": "{}",
    "batch": "batch: {}",
    "policy_step_seconds": "{:.3f} s a step",
    "busy_share": "device busy {:.0%}",
    "compiled": "layers compiled: {}",
    "checkpointing": "checkpointing: {}",
    "cuda_graphs": "CUDA graphs: {}",
    "overlap": "overlap: {}",
    "at_once": "{} at once",
    "max_staleness": "max_staleness {}",
    "tokens_per_second": "{:,.0f} tokens/s",
    "share_of_peak": "{:.0%} of the peak",
    "memory_gib": "{:.0f} GiB",
    "publish_seconds": "{:.3f} s",
    "pause_seconds": "pause {:.4f} s",
    "share": "{:.2f} of a bare copy",
    "groups_per_second": "{:.3g} groups/s",
    "speedup": "speed-up {:.2f}",
}
"""Keys of the rows of `gpu.py`, and how they are shown."""


def gpu(results: Results) -> str:
    """The results of the steps of `gpu.py` on one kind of device. Steps with equal results share a row."""

    def result(row: Row) -> str:
        notes = [note for note in row.get("note", "").split("; ") if not note.startswith("[")]  # no lines of a log
        parts = ["skipped" if row["ok"] is None else "" if row["ok"] else "**failed**", *notes]
        parts += [form.format(row[key]) for key, form in GPU_FIGURES.items() if row.get(key) is not None]
        return "; ".join(filter(None, parts)) or "ok"

    steps: dict[str, list[str]] = {}
    for row in results["rows"]:
        steps.setdefault(result(row), []).append(row["step"])
    return markdown(["step", "result"], [["; ".join(unique(names)), shown] for shown, names in steps.items()])


# --- whole runs ----------------------------------------------------------------------------------


def demo(results: Results) -> str:
    rows = results["rows"]
    cells, medians = [], []
    for system in unique(row["system"] for row in rows):
        mine = [row for row in rows if row["system"] == system]
        seconds = [row["seconds_to_target"] for row in mine]
        medians.append(median(seconds))
        steps = from_to([row["steps"] for row in mine], "d")
        reached = f"{sum(row['reached'] for row in mine)} of {len(mine)}"
        cells.append([system, from_to(seconds, ".0f"), f"{medians[-1] / medians[0]:.2f}", steps, reached])
    title = f"seconds to {results['settings']['target']}"
    return markdown(["system", title, "relative to the first", "steps", "runs that reached it"], cells)


def plan(results: Results) -> str:
    """Errors of predictions for the runs that followed."""
    rows, settings = results["rows"], results["settings"]
    policies = {False: "policy as calibrated", True: "it has learned"}
    table = crossed(
        rows,
        corner="case",
        line=lambda row: ", ".join([row["case"], *(f"`{word}`" for word in row["changed"])]),
        column=lambda row: policies[row["learned"]],
        columns=list(policies.values()),
        cell="{rate_error:+.0%}, {age_error:+.2f}",
    )
    ages = sum(abs(row["age_error"]) <= settings["age_tolerance"] for row in rows)
    met = []
    for learned in (False, True):
        mine = [row for row in rows if row["learned"] is learned]
        met.append(f"{sum(abs(row['rate_error']) <= settings['rate_tolerance'] for row in mine)} of {len(mine)}")
    return (
        f"{table}\n\n"
        f"Throughput is met in {met[0]} cases with the calibrated policy, and in {met[1]} where it has learned; the "
        f"mean age in {ages} of {len(rows)}."
    )


def page_views(results: Results) -> str:
    """The wait for the slowest views of a long run, and the page's memory after all of them."""
    views = [row for row in results["rows"] if "view" in row]
    *slow, other = sorted(views, key=lambda row: -row["seconds"])[:4]
    shown = ", ".join("{view} {seconds:.2f} s".format_map(row) for row in slow)
    rest = f"the other {len(views) - len(slow)} at most {other['seconds']:.2f} s"
    return f"{shown}, {rest}; then the page has {views[-1]['memory_mb']:,.0f} MB."


def page_cost(results: Results) -> str:
    """The cost of keeping rollouts and of being watched for the run."""
    header = "rollouts kept, page watched", "runs", "a step", "processor time of a step, all processes"
    cells = []
    for kept in (False, True):
        mine = [row for row in results["rows"] if row.get("kept") is kept]
        each = [row["processor_ms"] for row in mine]
        step = f"{median(row['step_ms'] for row in mine):.0f} ms"
        cells.append(["yes" if kept else "no", f"{len(mine)}", step])
        cells[-1] += [f"{median(each):.0f} ms ({min(each):.0f} to {max(each):.0f})"]
    return markdown(header, cells)


def fuzz(results: Results) -> str:
    """The effect of hostile messages on the ports of a run, torch's and streamrl's own, and on the run."""
    *rows, end = results["rows"]
    lines = []
    for owner in ("streamrl", "torch"):
        mine = [row for row in rows if ("torch" if " " in row["port"] else "streamrl") == owner]
        sent = [row for row in mine if "way" in row]
        grown = max(size for row in mine for size in row.get("grown_mb", [0]))
        ports, messages = len(unique(row["port"] for row in mine)), sum(row["messages"] for row in sent)
        lines.append([owner, f"{ports}", f"{messages:,}", f"{sum(row['accepted'] for row in sent)}", f"{grown:.0f} MB"])
    header = ["ports of", "ports", "messages", "accepted", "most that a process grew in one of the ways"]
    trained = f"The run trained on {end['groups_trained']:,} groups in the same time: "
    return f"{markdown(header, lines)}\n\n{trained}{end['groups_twice']} twice, {end['groups_lost']} lost."


# --- staleness -----------------------------------------------------------------------------------


def staleness_claims(results: Results) -> str:
    """The claims with their bounds, by η, and the number of runs that are missing."""
    found = {(eta, claim.name): claim for eta, claim in staleness.found_claims(results["rows"])}
    if not found:
        return NOT_MEASURED
    names = unique(name for _, name in found)
    cells = {
        place: f"{c.estimate:.3f} ({c.low:.3f} to {c.high:.3f}), {c.wanted}: {c.answer}" for place, c in found.items()
    }
    rows = [[str(eta), *(cells.get((eta, name), MISSING) for name in names)] for eta in unique(eta for eta, _ in found)]
    missing, wanted = staleness.missing_runs(results["rows"])
    note = f"\n\n{missing} of {wanted} runs are missing." if missing else ""
    return markdown(["η", *names], rows) + note


def staleness_default(results: Results) -> str:
    """The default, and the same without its limits, on the tasks that count: area by task and η, and the runs that
    collapsed."""
    found = [s for s in staleness.summaries(results["rows"]) if s.kind.over_age == "mask"]
    by_place = {(s.kind.task, s.kind.objective, s.kind.eta): s for s in found}
    etas = (0, *staleness.STALE_ETAS)
    rows = [
        [task, kind, *(area_and_collapses(by_place.get((task, kind, e))) for e in etas)]
        for task in (*staleness.STEADY, *staleness.PRETRAINED)
        for kind in ("default", "drift", "constant")
        if any(place[:2] == (task, kind) for place in by_place)
    ]
    return markdown(["task", "runs", *(f"η = {eta}" for eta in etas)], rows) if rows else NOT_MEASURED


def area_and_collapses(found: staleness.Summary | None) -> str:
    """A cell: the mean area, the plateau error, and the runs that collapsed if there are any."""
    if found is None or not found.area.values:
        return MISSING
    fell = f"; {found.collapsed} of {found.runs} collapsed" if found.collapsed else ""
    return f"{found.area.mean:.2f}, {found.error.mean:.3f}{fell}"


def staleness_objectives(results: Results) -> str:
    """All objectives on two tasks."""
    found = {
        (s.kind.objective, s.kind.task, s.kind.eta): s
        for s in staleness.summaries(results["rows"])
        if s.kind.over_age == "mask"
    }
    places = [(task, eta) for task in staleness.SIDE_BY_SIDE for eta in staleness.CLOSE_ETAS]
    rows = [
        [objective, *(area_and_collapses(found.get((objective, *place))) for place in places)]
        for objective in staleness.OBJECTIVES
        if any(found.get((objective, *place)) for place in places)
    ]
    return markdown(["objective", *(f"{task}, η = {eta}" for task, eta in places)], rows) if rows else NOT_MEASURED


def staleness_over_age(results: Results) -> str:
    """The tokens that the policies for over-age tokens train on, where answers differ in length."""
    found = staleness.summaries(results["rows"])
    rows = [
        [
            str(s.kind.eta),
            f"`{s.kind.over_age}`",
            f"{s.rejected.mean:.1%}" if s.rejected.values else MISSING,
            s.length_ratio.said(".3f"),
            s.steps_to_nearly.said(".0f"),
            f"{s.area.mean:.2f}" if s.area.values else MISSING,
        ]
        for s in sorted(found, key=lambda s: s.kind.eta)
        if s.kind.task == staleness.LENGTH_TASK and s.kind.objective == "constant" and s.kind.eta
    ]
    header = ["η", "over-age tokens", "masked or dropped", "length in the loss / generated", "steps to 0.9", "area"]
    return markdown(header, rows) if rows else NOT_MEASURED


def learning(results: Results) -> str:
    """Held-out accuracy by η and step: the mean over seeds, the least, and the largest."""
    rows = results["rows"]
    steps = unique(row["step"] for row in rows)

    def cell(eta: int, step: int) -> str:
        found = [row["accuracy"] for row in rows if (row["max_staleness"], row["step"]) == (eta, step)]
        return f"{fmean(found):.2f} ({from_to(found, '.2f')})" if found else MISSING

    lines = []
    for eta in sorted(unique(row["max_staleness"] for row in rows)):
        mine = [row for row in rows if row["max_staleness"] == eta]
        seeds = unique(row["seed"] for row in mine)
        seconds = fmean(max(row["seconds"] for row in mine if row["seed"] == seed) for seed in seeds)
        lines.append([str(eta), str(len(seeds)), *(cell(eta, step) for step in steps), f"{seconds:.0f}"])
    return markdown(["η", "seeds", *(f"step {step}" for step in steps), "seconds of training"], lines)


def delay(results: Results) -> str:
    """Remedies against the collapse of stale runs, by delay: all on one task, and the default on others."""
    every = [row for row in results["rows"] if row["task"] != AFTER_COPY]
    shown = [row for row in every if row["variant"] == "default" or row["task"] == staleness.SIDE_BY_SIDE[0]]

    def over(runs: Sequence[Row], key: str, form: str) -> str:
        return from_to([run[key] for run in runs if run[key] is not None], form)

    rows: list[list[str]] = []

    def kind(row: Row) -> tuple[str, int, str]:
        return row["task"], row["delay"], row["variant"]

    for place in unique(kind(row) for row in sorted(shown, key=lambda row: (row["task"], row["delay"]))):
        runs = [row for row in shown if kind(row) == place]
        task, versions, variant = place
        cells = [f"{task}, {versions}", variant, f"{len(runs)}", over(runs, "learned", "d")]
        error = float(criterion.errors(np.stack([run["reward"] for run in runs])).mean())
        rows.append([*cells, over(runs, "worst", ".3f"), f"{error:.3f}"])
    header = ["task, delay", "variant", "runs", "learned at step", "worst after that", "plateau error"]
    return markdown(header, rows)


class Experiment(NamedTuple):
    """A change of the default in `delay.py`."""

    variant: str
    task: str
    predicted: str


AFTER_COPY = "increment after copy"
EXPERIMENTS = (
    Experiment("staleness rises every 2 versions", AFTER_COPY, "more area"),
    Experiment("staleness rises every 4 versions", AFTER_COPY, "more area"),
    Experiment("staleness by drift", AFTER_COPY, "more area"),
    Experiment("staleness by drift", "sort", "more area"),
    Experiment("staleness by drift, and lr falls to a tenth", "sort", "more area"),
    Experiment("steps by contrast", "sort", "error 0.7"),
    Experiment("lr falls to a tenth", "sort", "error 0.7"),
    Experiment("both", "sort", "error 0.7"),
    Experiment("steps by deviation", "sort", "error 0.7"),
    Experiment("cautious with failures", "sort", "less error"),
    Experiment("near tokens alone", "sort", "less error"),
    Experiment("baseline below the mean", "sort", "less error"),
    Experiment("dppo with the pull", "sort", "less error"),
    Experiment("every group pulled", "sort", "the same"),
    Experiment("steered pull", "sort", "less error"),
)


def delay_experiments(results: Results) -> str:
    """Each experiment against the default at the same delay and seeds: bounds of the ratios of area and error."""
    found: dict[tuple[str, str, int], dict[int, Array]] = defaultdict(dict)
    for row in results["rows"]:
        if "age" in row:
            curve = staleness.rewards_by_version(row["reward"], row["age"])
            found[row["task"], row["variant"], row["delay"]][row["seed"]] = curve
    rows = []
    for variant, task, predicted in EXPERIMENTS:
        pairs = {
            delay: (runs, found[task, "default", delay])
            for (where, name, delay), runs in sorted(found.items())
            if (where, name) == (task, variant)
        }
        cells, verdict = [], []
        for name, figure in (("area", partial(np.mean, axis=-1)), ("error", criterion.errors)):
            ratios = {}
            for delay, (ours, theirs) in pairs.items():
                stacks = [{task: np.stack([runs[seed] for seed in ours])} for runs in (ours, theirs)]
                _, *ratios[delay] = criterion.bounds(*stacks, figure, np.random.default_rng(0))
            cells.append(", ".join(f"{low:.2f}–{high:.2f}" for low, high in ratios.values()))
            more, less = ([d for d, r in ratios.items() if r[0] > 1], [d for d, r in ratios.items() if r[1] < 1])
            verdict += [
                f"{word} {name} at {', '.join(map(str, at))}" for word, at in (("more", more), ("less", less)) if at
            ]
        if pairs:
            runs = ", ".join(f"{len(ours)} at {delay}" for delay, (ours, _) in pairs.items())
            rows.append([variant, predicted, runs, *cells, "; ".join(verdict) or "no difference"])
    return markdown(["variant", "predicted", "runs, delays", "area", "plateau error", "verdict"], rows) + alignment(
        results
    )


def alignment(results: Results) -> str:
    """The cosine of gradient and momentum on the plateau of the default, by delay."""
    mine = [row for row in results["rows"] if "cosine" in row and (row["task"], row["variant"]) == ("sort", "default")]
    delays = sorted({row["delay"] for row in mine})
    means = [fmean(np.mean(row["cosine"][-50:]) for row in mine if row["delay"] == delay) for delay in delays]
    shown = ", ".join(f"{mean:.2f} at {delay}" for mean, delay in zip(means, delays, strict=True))
    return f"\n\nOn the default's plateau the cosine of a gradient and Adam's momentum is {shown}."


# --- memory, computed ----------------------------------------------------------------------------


def gib(value: float, form: str = ".1f") -> str:
    return f"{value / GIB:{form}}"


def capacity_memory(_: Results) -> str:
    """Memory of one GPU of each pool, for given divisions of GPUs."""
    header = "model, GPUs | trainer | state | activations, logits | all | gservers | tokens in the KV cache"
    rows = []
    for machine, shape, one in capacity.divisions():
        trainer = one.trainer
        cells = [f"{shape.name}, {machine.gpus}", f"{one.layout} ({backend_of(one.layout)})"]
        cells += map(gib, (trainer.state + trainer.gathered, trainer.activations + trainer.logits))
        cells += [total(one), f"{one.gservers} × {one.server_tensor}"]
        rows.append([*cells, f"{one.server.kv_tokens:,}"])
    return markdown(header.split(" | "), rows)


def capacity_roles(_: Results) -> str:
    """Memory of one GPU of the trainer with adapters, a critic and a reference."""
    header = "model, GPUs | trainer | roles | critic | reference | all | checkpoint"
    rows = []
    for machine, shape, one, roles in capacity.divisions_with_roles():
        cells = [f"{shape.name}, {machine.gpus}", f"{one.layout} ({backend_of(one.layout)})"]
        cells += ["policy" + (f", {roles}" if str(roles) else "")]
        cells += [
            gib(one.trainer.critic) if roles.critic else MISSING,
            gib(one.trainer.reference) if roles.reference else MISSING,
        ]
        rows.append([*cells, total(one), f"{gib(one.checkpoint, ',.1f')} GiB"])
    return markdown(header.split(" | "), rows)


def total(one: Division) -> str:
    """All memory of a GPU of the trainer, with the part of it that is lacking."""
    lacking = f" (lacks {gib(one.lacking, '.0f')})" if one.lacking else ""
    return f"{gib(one.trainer.total)}{lacking}"


def capacity_traffic(_: Results) -> str:
    """Bytes that a weight update moves, for the same divisions."""
    rows = []
    for _, shape, one in capacity.divisions():
        rows.append((shape.name, f"{gib(one.update.weights)} GiB", f"{one.update.seconds:.1f} s"))
    return markdown(["model", "served weights", "time"], unique(rows))


# --- pages ---------------------------------------------------------------------------------------


def source(results: Results, *, page: str) -> str:
    """The line under each table: the state of the code that was measured, and the machine; on README the date alone."""
    commit, machine = results["commit"], results["machine"]
    if page == "README.md":
        return f"*{commit['date'][:10]}; [state of the code and machine](docs/figures.md)*"
    ids = commit["id"].split(" and ")
    named = commit["id"] if len(ids) < 3 else f"{ids[0]} and {len(ids) - 1} others"
    state = f"{named}, {commit['date'][:10]}" if commit["id"] else "no commit"
    state += " with uncommitted changes" if commit["changed"] else ""
    devices = "".join(f", {device}" for device in unique(machine["devices"]))
    return f"*{state}, {machine['processor']}, {machine['cores']} cores{devices}*"


class Table(NamedTuple):
    page: str
    """The page that has the table, relative to the root."""
    name: str
    benchmark: str
    """The benchmark whose results it shows, or `COMPUTED`."""
    render: Render


TABLES = (
    Table("README.md", "throughput-short", "throughput", throughput_short),
    Table("docs/figures.md", "throughput", "throughput", throughput),
    Table("docs/figures.md", "engine", "bench_engine", engine),
    Table("docs/figures.md", "stream", "bench_stream", stream),
    Table("docs/figures.md", "manager", "bench_manager", manager),
    Table("docs/figures.md", "weights", "bench_weights", weights),
    Table("docs/figures.md", "trainer", "bench_trainer", trainer),
    Table("docs/figures.md", "demo", "bench_demo", demo),
    Table("docs/figures.md", "long-rows", "bench_long_rows", long_rows),
    Table("docs/figures.md", "plan", "bench_plan", plan),
    Table("docs/collapse.md", "delay", "delay", delay),
    Table("docs/collapse.md", "delay-experiments", "delay", delay_experiments),
    Table("docs/figures.md", "routing", "bench_routing", routing),
    Table("docs/figures.md", "agents", "bench_agents", lines_of(AGENTS)),
    Table("docs/figures.md", "agents-trainer", "bench_agents_trainer", agents_trainer),
    Table("docs/figures.md", "scale", "bench_scale", scale),
    Table("docs/figures.md", "fuzz", "fuzz", fuzz),
    Table("docs/figures.md", "fuzz-of-sglang", "fuzz_sglang", fuzz),
    Table("docs/figures.md", "page-views", "bench_page", page_views),
    Table("docs/figures.md", "page-cost", "bench_page", page_cost),
    Table("docs/staleness.md", "staleness-claims", "staleness", staleness_claims),
    Table("docs/staleness.md", "staleness-default", "staleness", staleness_default),
    Table("docs/staleness.md", "staleness-objectives", "staleness", staleness_objectives),
    Table("docs/staleness.md", "staleness-over-age", "staleness", staleness_over_age),
    Table("docs/staleness.md", "learning", "learning_gpu", learning),
    Table("docs/scale.md", "capacity-memory", COMPUTED, capacity_memory),
    Table("docs/scale.md", "capacity-roles", COMPUTED, capacity_roles),
    Table("docs/scale.md", "capacity-traffic", COMPUTED, capacity_traffic),
    Table("docs/scale.md", "checkpoint", "bench_checkpoint", lines_of(CHECKPOINT)),
    Table("docs/scale.md", "gpu", "gpu", gpu),
)
BLOCK = re.compile(r"<!-- table: (?P<name>\S+) -->\n.*?<!-- end of table -->", re.DOTALL)


def rendered(page: str, text: str, tables: Sequence[Table] = TABLES, kept: Path = KEPT) -> str:
    """`text`, the content of `page`, with all its tables as the results in `kept` have them."""
    mine = {table.name: table for table in tables if table.page == page}
    there = [match["name"] for match in BLOCK.finditer(text)]
    if sorted(there) != sorted(mine):
        raise SystemExit(f"{page} has places for the tables {sorted(there)}, and should have them for {sorted(mine)}")

    def block(match: re.Match[str]) -> str:
        table = mine[match["name"]]
        if table.benchmark == COMPUTED:
            shown = f"{table.render({})}\n\n*computed, not measured*"
        else:
            found = [read_results(path) for path in results_of(table.benchmark, kept)]
            tables = [f"{table.render(results)}\n\n{source(results, page=page)}" for results in found]
            shown = "\n\n".join(tables) or NOT_MEASURED
        return f"<!-- table: {table.name} -->\n\n{shown}\n\n<!-- end of table -->"

    return BLOCK.sub(block, text)


def results_of(benchmark: str, folder: Path) -> list[Path]:
    """The results in `folder`: of `gpu`, one file for each kind of device."""
    return sorted(folder.glob("gpu-*.json" if benchmark == "gpu" else f"{benchmark}.json"))
