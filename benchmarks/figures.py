"""Measure what README and docs show, all of it at one state of the code on one machine, and write the tables.

    python benchmarks/figures.py                      # run all but the longest, keep the results, write the tables
    python benchmarks/figures.py --run throughput …   # only these
    python benchmarks/figures.py --keep throughput …  # keep what a run by hand has measured, write the tables
    python benchmarks/figures.py --render             # write the tables from the results that are kept

A table stands in its page between `<!-- table: NAME -->` and `<!-- end of table -->`, and is a function of
`results/<benchmark>.json` alone; a test fails where the two differ. So figures are changed by measuring them, and in
no other way. A contender that is missing would make a table look better than it is: what `--run` lacks is said before
it begins, and `--without` has to name what is to be left out.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import capacity
import staleness
from common import KEPT, LATEST, ROOT, read_results

from streamrl.planner.capacity import GIB

Results = dict[str, Any]
"""What `common.write_results` has written."""

MANAGER_KINDS = {
    "closed": "as fast as it can",
    "open": "at a fixed rate",
    "one by one": "at a fixed rate, one call each",
    "waiting": "in line, one place at a time",
}
MODES = {"collective": "broadcast", "shared_memory": "shared memory", "disk": "disk"}
TRAINERS = {
    "streamrl": "streamrl",
    "streamrl, separate": "the same, prompts not shared",
    "streamrl, Megatron": "streamrl on Megatron Core",
    "padded": "plain torch, padded",
    "unpadded": "plain torch, one by one",
    "TRL": "TRL's GRPOTrainer",
}
AGENTS_TRAINERS = {
    "streamrl": "streamrl: trees, what conversations have in common once",
    "streamrl, separate": "streamrl: each conversation",
    "streamrl, calls": "streamrl: each call with its context",
    "streamrl, Megatron": "streamrl on Megatron Core: trees",
    "padded": "plain torch: conversations, padded",
    "unpadded": "plain torch: conversations, one by one",
    "TRL": "TRL's GRPOTrainer: conversations, padded",
}
STREAMS = {
    "streamrl": "streamrl",
    "bare": "bare pyzmq",
    "send_pyobj": "send_pyobj",
    "mp_queue": "multiprocessing.Queue",
}
BY_NAME_ONLY = {"staleness", "delay", "gpu"}
"""Benchmarks that take the better part of a day, or need a GPU: run only when they are named."""
SCRIPTS = {"fuzz_sglang": "fuzz"}
"""What measures a benchmark, where it has another name."""
COMPUTED = ""
"""In place of a benchmark: the table is computed, and nothing was measured."""
GPU_FIGURES = {
    "way": "{}",
    "batch": "batch: {}",
    "micro_batches": "{} micro-batches",
    "policy_step_seconds": "{:.3f} s a step",
    "busy_share": "device busy {:.0%} of a profiled step",
    "checkpointing": "activations computed again: {}",
    "at_once": "{} at once",
    "max_staleness": "max_staleness {}",
    "tokens_per_second": "{:,.0f} tokens/s",
    "share_of_peak": "{:.0%} of the peak",
    "share_of_bare": "{:.0%} of a bare product",
    "memory_gib": "{:.0f} GiB",
    "publish_seconds": "{:.3f} s",
    "share": "{:.2f} of a bare copy",
    "groups_per_second": "{:.3g} groups/s",
    "speedup": "{:.2f} of the synchronous run",
}
"""Keys of its rows, and how they are told."""
MISSING = "–"
NOT_MEASURED = "Not measured yet."
SHOWN_STEPS = 3
"""Steps of the demo that the README shows: so many of the first and of the last."""


# --- tables --------------------------------------------------------------------------------------


def throughput(results: Results) -> str:
    header = "generation | mode | max_staleness | over-age tokens | groups/s | tokens/s | speed-up | bound"
    header += " | of the bound | cores busy | oldest token | masked or dropped | runs | final reward (least to most)"
    rows = []
    for row in results["rows"]:
        reward = row["reward_final"]
        rows.append(
            [
                "SIMULATED, long tail" if row["simulated_generation"] else "embedded engine",
                row["mode"],
                f"{row['max_staleness']}",
                f"`{row['over_age']}`",
                f"{row['groups_per_second']:.3g}",
                f"{row['tokens_per_second']:,.0f}",
                f"{row['speedup']:.2f}",
                f"{row['bound']:.2f}",
                f"{row['speedup'] / row['bound']:.2f}",
                f"{row['cores_busy']:.0%}" if "cores_busy" in row else MISSING,
                f"{row['oldest_token_age']}",
                f"{row['masked_share'] + row['dropped_share']:.1%}",
                f"{row['seeds']}",
                f"{reward['mean']:.3f} ({reward['least']:.3f} to {reward['most']:.3f})" if reward else MISSING,
            ]
        )
    return markdown(header.split(" | "), rows)


def engine(results: Results) -> str:
    points = {(row["model"], row["concurrency"], row["dtype"]): row for row in results["rows"]}
    dtypes = unique(dtype for _, _, dtype in points)
    rows = []
    for model, concurrency in unique(point[:2] for point in points):
        cells = [f"{model}, {concurrency}"]
        for dtype in dtypes:
            rates = dict(points.get((model, concurrency, dtype), {"tokens_per_second": {}})["tokens_per_second"])
            ours = rates.pop("streamrl", None)
            best = max(rates, key=lambda name: rates[name], default=None)
            cells.append(f"{ours:,.0f}" if ours else MISSING)
            cells.append(f"{rates[best]:,.0f} ({best})" if best else MISSING)
            cells.append(f"{ours / rates[best]:.2f}" if ours and best else MISSING)
        rows.append(cells)
    others = unique(name for row in results["rows"] for name in row["tokens_per_second"] if name != "streamrl")
    versions = [f"{package} {version}" for package, version in results["settings"]["versions"].items()]
    table = markdown(["model, at once", *(c for dtype in dtypes for c in (dtype, "best other", "ratio"))], rows)
    return f"{table}\n\nThe others: {', '.join(others)} ({', '.join(versions)})."


def stream(results: Results) -> str:
    def cell(row: dict[str, Any] | None) -> str:
        return f"{row['groups_per_second']:,.0f} ({row['ratio_to_bare']:.2f})" if row else MISSING

    return crossed(
        results["rows"],
        corner="group",
        line=lambda row: f"{row['siblings']} × {row['tokens']} tokens",
        column=lambda row: STREAMS[row["contender"]],
        columns=list(STREAMS.values()),
        cell=cell,
    )


def manager(results: Results) -> str:
    """Admissions under load, with their latencies."""

    def cell(row: dict[str, Any] | None) -> str:
        if row is None:
            return MISSING
        return f"{row['admissions_per_second']:,.0f} ({row['p50_ms']:.1f} ms, {row['p99_ms']:.1f} ms)"

    return crossed(
        [row for row in results["rows"] if row["kind"] != "waiting"],
        corner="gservers, at once",
        line=lambda row: f"{row['gservers']:,}, {row['in_flight']:,}",
        column=lambda row: row["kind"],
        columns=["closed", "open"],
        titles=[MANAGER_KINDS["closed"], f"{results['settings']['rate']:,.0f} a second asked for"],
        cell=cell,
    )


def manager_cost(results: Results) -> str:
    """What a call costs the manager's processor, and how soon a free place reaches who waits for it."""
    header = "admissions", "gservers", "in flight, or in line", "p50", "p99", "manager's CPU time per call"
    return markdown(
        header,
        [
            [
                MANAGER_KINDS[row["kind"]],
                f"{row['gservers']:,}",
                f"{row['in_flight']:,}",
                f"{row['p50_ms']:.1f} ms",
                f"{row['p99_ms']:.1f} ms",
                f"{row['manager_cpu_us_per_call'] / 1000:.3f} ms",
            ]
            for row in results["rows"]
        ],
    )


def rewards(results: Results) -> str:
    rows = [
        [
            row["reward"],
            row["way"],
            *(f"{row[name]:.0f}" for name in ("worker", "processes", "seconds")),
            f"{row['gain']:.2f}",
        ]
        for row in results["rows"]
    ]
    return markdown(["reward", "calls are sent", "worker", "reward processes", "by the clock", "gain"], rows)


def routing(results: Results) -> str:
    rows = results["rows"]
    base = {(row["case"], row["groups"]): row["tokens_per_second"] for row in rows if row["policy"] == "round robin"}

    def cell(row: dict[str, Any] | None) -> str:
        if row is None:
            return MISSING
        return f"{row['tokens_per_second'] / base[row['case'], row['groups']]:.2f} ({row['mean_group_seconds']:.1f} s)"

    return crossed(
        rows,
        corner="gservers, groups in flight",
        line=lambda row: f"{row['case']}, {row['groups']}",
        column=lambda row: row["policy"],
        columns=unique(row["policy"] for row in rows),
        cell=cell,
    )


def agents(results: Results) -> str:
    return markdown(
        [
            "calls/s of `/generate` directly",
            "calls/s through the gateway",
            "tokens/s, of direct",
            "processor time of the gateway",
            "tokens rendered in the first turn",
            "in a later one",
            "whole conversation",
        ],
        [
            [
                f"{row['direct_calls_per_second']:.0f}",
                f"{row['gateway_calls_per_second']:.0f}",
                f"{row['ratio']:.2f}",
                f"{row['gateway_processor_ms_per_call']:.2f} ms a call",
                f"{row['tokens_rendered_first']}",
                f"{row['tokens_rendered_later']}",
                f"{row['tokens_of_whole_conversation']}",
            ]
            for row in results["rows"]
        ],
    )


def page_views(results: Results) -> str:
    """What each view of a long run waits for."""
    return markdown(
        [
            "view, asked for the first time",
            "waits",
            "processor time",
            "memory of the page",
            "since the start of the command",
        ],
        [
            [
                row["view"],
                f"{row['seconds']:.2f} s",
                f"{row['processor']:.2f} s",
                f"{row['memory_mb']:,.0f} MB",
                f"{row['open']:.2f} s",
            ]
            for row in results["rows"]
            if "view" in row
        ],
    )


def page_cost(results: Results) -> str:
    """What keeping rollouts and being watched cost the run."""
    rows = [row for row in results["rows"] if "kept" in row]
    header = "rollouts kept, page watched", "runs", "a step", "processor time of a step, all processes"
    header += "of that in the thread that keeps rollouts", "its share"
    cells = []
    for kept in (False, True):
        mine = [row for row in rows if row["kept"] is kept]
        each = [row["processor_ms"] for row in mine]
        processor, keeping = median(each), median(row["keeping_ms"] for row in mine)
        cells.append(
            [
                "yes" if kept else "no",
                f"{len(mine)}",
                f"{median(row['step_ms'] for row in mine):.0f} ms",
                f"{processor:.0f} ms ({min(each):.0f} to {max(each):.0f})",
                f"{keeping:.2f} ms",
                f"{keeping / processor:.2%}",
            ]
        )
    return markdown(header, cells)


def weights(results: Results) -> str:
    def line(row: dict[str, Any]) -> str:
        mebibytes = row["megabytes"]
        size = f"{mebibytes / 1024:.1f} GiB" if mebibytes >= 1024 else f"{mebibytes:.0f} MiB"
        notes = [size, *([row["dtype"]] if row["dtype"] != "float32" else [])]
        notes += ["SIMULATED gservers"] if row["engine"] == "simulated" else []
        return f"{', '.join(notes)} | {row['gservers']}"

    def cell(row: dict[str, Any] | None) -> str:
        if row is None:
            return MISSING
        seconds = row["first_token_seconds"]
        shown = f"{seconds:.2f} s" if seconds >= 0.1 else f"{1000 * seconds:.0f} ms"
        return f"{shown} ({1000 * row['pause_seconds']:.0f} ms, {row['share']:.2f})"

    return crossed(
        results["rows"],
        corner="weights | gservers",
        line=line,
        column=lambda row: MODES[row["mode"]],
        columns=list(MODES.values()),
        cell=cell,
    )


def trainer(results: Results) -> str:
    def cell(row: dict[str, Any] | None) -> str:
        return f"{median(row['cpu_rounds']):,.0f} ({row['ratio_by_cpu_time']:.2f})" if row else MISSING

    rows = results["rows"]
    table = crossed(
        rows,
        corner="model (float32)",
        line=lambda row: f"{row['model']}, {row['groups']} group{'s' * (row['groups'] > 1)}",
        column=lambda row: TRAINERS[row["contender"]],
        columns=[name for contender, name in TRAINERS.items() if any(row["contender"] == contender for row in rows)],
        cell=cell,
    )
    notes = [f"{row['contender']} on {row['model']}: {row['note']}" for row in rows if row["note"]]
    threads = results["settings"]["threads"]
    return f"{table}\n\n{'. '.join([f'Threads: {threads}', *notes])}."


def agents_trainer(results: Results) -> str:
    def line(row: dict[str, Any]) -> list[str]:
        cpu_rate = median(row["cpu_rounds"])
        cpu_seconds = row["tokens_per_second"] * row["seconds_per_step"] / cpu_rate  # steps have equally many tokens
        seconds = f"{row['seconds_per_step']:.2f} ({cpu_seconds:.2f})"
        return [AGENTS_TRAINERS[row["contender"]], f"{row['tokens_computed']:,}", seconds, f"{cpu_rate:,.0f}"]

    rows = results["rows"]
    header = ["rows", "tokens computed in a step", "seconds a step (of CPU time)"]
    header += ["sampled tokens per second of CPU time"]
    notes = [f"{row['contender']}: {row['note']}" for row in rows if row["note"]]
    threads = results["settings"]["threads"]
    return f"{markdown(header, map(line, rows))}\n\n{'. '.join([f'Threads: {threads}', *notes])}."


def long_rows(results: Results) -> str:
    def cell(row: dict[str, Any] | None) -> str:
        if row is None:
            return MISSING
        return f"{row['mib']:,.0f} MiB, {row['bytes_per_token'] / 1024:,.0f} KiB a token ({row['seconds']:,.0f} s)"

    return crossed(
        results["rows"],
        corner="tokens in the row",
        line=lambda row: f"{row['tokens']:,}",
        column=lambda row: row["contender"],
        columns=unique(row["contender"] for row in results["rows"]),
        cell=cell,
    )


def checkpoint(results: Results) -> str:
    header = "model workers | each holds | training stands still | of a bare copy | on the disk after | of a bare write"
    header += " | memory, of what it holds"
    rows = [
        [
            f"{row['workers']}",
            f"{row['bytes'] / 1e6:,.0f} MB",
            f"{row['standstill']:.2f} s",
            f"{row['standstill'] / row['copy']:.2f}",
            f"{row['write']:.2f} s",
            f"{row['write'] / row['bare_write']:.2f}",
            f"{row['grown'] / row['bytes']:.2f}",
        ]
        for row in results["rows"]
    ]
    return markdown(header.split(" | "), rows)


def plan(results: Results) -> str:
    """What was predicted, and what runs then did."""
    header = "case | changed from the calibration | compared | policy | groups per second | mean age | masked | met"
    rows = []
    for row in results["rows"]:
        told, did = row["predicted"], row["actual"]
        rows.append(
            [
                row["case"],
                " ".join(f"`{word}`" for word in row["changed"]) or "nothing",
                row["stretch"],
                "has learned" if row["learned"] else "as calibrated",
                f"{told['groups_per_second']:.2f} for {did['groups_per_second']:.2f} ({row['rate_error']:+.0%})",
                f"{told['mean_token_age']:.2f} for {did['mean_token_age']:.2f}",
                f"{told['masked_share']:.1%} for {did['masked_share']:.1%}",
                "yes" if row["met"] else "no",
            ]
        )
    large = results["settings"]["thousand_gservers"]
    settings = results["settings"]
    ages = sum(abs(row["age_error"]) <= settings["age_tolerance"] for row in results["rows"])
    met = []
    for learned in (False, True):
        mine = [row for row in results["rows"] if row["learned"] is learned]
        met.append(f"{sum(abs(row['rate_error']) <= settings['rate_tolerance'] for row in mine)} of {len(mine)}")
    return (
        f"{markdown(header.split(' | '), rows)}\n\n"
        f"Throughput is met in {met[0]} rows whose policy is the calibrated one, and in {met[1]} where it has learned; "
        f"the mean age in {ages} of {len(rows)}. "
        f"{large['gservers']:,} gservers with {large['responses']:,} responses are simulated in "
        f"{large['seconds']:.1f} s of processor time ({large['events']:,} events)."
    )


def demo(results: Results) -> str:
    rows = results["rows"]
    systems = unique(row["system"] for row in rows)
    cells, medians = [], []
    for system in systems:
        mine = [row for row in rows if row["system"] == system]
        seconds = [row["seconds_to_target"] for row in mine]
        medians.append(median(seconds))
        steps = f"{min(row['steps'] for row in mine)} to {max(row['steps'] for row in mine)}"
        span = f"{medians[-1]:.0f} ({min(seconds):.0f} to {max(seconds):.0f})"
        reached = f"{sum(row['reached'] for row in mine)} of {len(mine)}"
        cells.append([system, span, f"{medians[-1] / medians[0]:.2f}", steps, reached])
    seconds = f"seconds to {results['settings']['target']} (least to most)"
    return markdown(["system", seconds, "relative to the first", "steps", "reached in"], cells)


def fuzz(results: Results) -> str:
    """What hostile messages did to each port of a run, and to the run."""
    *rows, end = results["rows"]
    grown = {row["port"]: row for row in rows if "grown_mb" in row}
    lines = []
    for port in grown:
        sent = [row for row in rows if row["port"] == port and "way" in row]
        a_second = sum(row["messages"] for row in sent) / sum(row["seconds"] for row in sent)
        changes = [", ".join(f"{size:+.0f}" for size in grown[port][key]) for key in ("grown_mb", "grown_mb_without")]
        accepted = sum(row["accepted"] for row in sent)
        lines.append([f"`{port}`", f"{sum(row['messages'] for row in sent):,}", f"{a_second:,.0f}", f"{accepted}"])
        lines[-1] += changes
    header = ["port of", "messages", "a second", "accepted", "MB grown under messages, by way", "MB grown without"]
    trained = f"The run trained on {end['groups_trained']:,} groups meanwhile, in {end['steps']:,} steps: "
    lost = f"{end['groups_twice']} twice, {end['groups_lost']} lost"
    minutes = f"All of it took {results['settings']['seconds'] / 60:.0f} minutes, pauses without messages included."
    return f"{markdown(header, lines)}\n\n{trained}{lost}. {minutes}"


def fuzz_of_sglang(results: Results) -> str:
    """The same with a real SGLang server."""
    return fuzz(results)


def scale(results: Results) -> str:
    """What more rollout workers and gservers cost the controller, with the same groups in flight."""
    process = "controller" if "controller_mib" in results["rows"][0] else "manager"  # the name in earlier results
    lines = []
    by_pool = sorted(results["rows"], key=lambda row: (row["gservers"], row["workers"]))
    for before, row in zip([None, *by_pool], by_pool, strict=False):
        used = row[f"{process}_cpu_us_per_call"] * row["calls_per_second"]
        one_more = MISSING
        if before is not None and before["gservers"] == row["gservers"]:
            more = used - before[f"{process}_cpu_us_per_call"] * before["calls_per_second"]
            one_more = f"{more / (row['workers'] - before['workers']):,.0f} µs"
        cells = [f"{row['workers']:,}", f"{row['gservers']}", f"{row['groups_per_second']:.0f}"]
        cells += [f"{row['calls_per_second']:,.0f}", f"{used / 1e6:.1%}", one_more]
        cells += [f"{row['p50_ms']:.1f} ms, {row['p99_ms']:.1f} ms", f"{row[f'{process}_mib']:.0f} MiB"]
        lines.append([*cells, f"{row['timeline_kib_per_second']:.0f} KiB", f"{row['calls_per_update']:.1f}"])
    header = f"workers | gservers | groups/s | calls/s | of a core, for the {process} | for one more worker, each"
    header += " second | a call, p50 and p99 | its memory | timeline each second | calls to a gserver for an update"
    return markdown(header.split(" | "), lines)


def staleness_verdict(results: Results) -> str:
    return staleness.verdict(results["rows"])


def staleness_default(results: Results) -> str:
    """The default objective by task and η."""
    header = "task | η | runs | fell | steps to 0.9 | seconds to 0.9 | area per token | area per second"
    header += " | worst after it was learned | effective sample size, least | mean age of a token"
    rows = [
        [
            s.kind.task,
            f"{s.kind.eta}",
            f"{s.runs}",
            f"{s.fell}",
            s.steps_to_nearly.said(".0f"),
            s.seconds_to_nearly.said(".0f"),
            s.area_per_token.said(),
            s.area_per_second.said(),
            s.worst.said(),
            s.sample_size.said(),
            s.mean_age.said(".1f"),
        ]
        for s in staleness.summaries(results["rows"])
        if s.kind.objective == "default" and s.kind.over_age == "mask"
    ]
    return f"{markdown(header.split(' | '), rows)}\n\n{staleness.conditions(results['rows'])}".rstrip()


def staleness_objectives(results: Results) -> str:
    """All objectives where there is more than the default."""
    found = [s for s in staleness.summaries(results["rows"]) if s.kind.over_age == "mask"]
    compared = {(s.kind.task, s.kind.eta) for s in found if s.kind.objective != "default"}
    header = "task", "η", "objective", "runs", "fell", "worst after it was learned", "reward at the end"
    header += "steps to 0.9", "area per token", "effective sample size, least"
    places = sorted(compared, key=lambda place: (list(staleness.TASKS).index(place[0]), place[1]))
    rows = [
        [
            s.kind.task,
            f"{s.kind.eta}",
            s.kind.objective,
            f"{s.runs}",
            f"{s.fell}",
            s.worst.said(),
            s.final.said(),
            s.steps_to_nearly.said(".0f"),
            s.area_per_token.said(),
            s.sample_size.said(),
        ]
        for place in places
        for s in sorted(found, key=lambda s: list(staleness.OBJECTIVES).index(s.kind.objective))
        if (s.kind.task, s.kind.eta) == place
    ]
    return markdown(header, rows) if rows else NOT_MEASURED


def staleness_over_age(results: Results) -> str:
    """What the policies for over-age tokens train on, where answers differ in length."""
    header = "η", "over-age tokens", "runs", "masked or dropped", "tokens per response in the loss / generated"
    header += "steps to 0.9", "area per token", "worst after it was learned"
    rows = [
        [
            f"{s.kind.eta}",
            f"`{s.kind.over_age}`",
            f"{s.runs}",
            s.rejected.said(".1%"),
            s.length_ratio.said(".3f"),
            s.steps_to_nearly.said(".0f"),
            s.area_per_token.said(),
            s.worst.said(),
        ]
        for s in staleness.summaries(results["rows"])
        if s.kind.task == staleness.LENGTH_TASK and s.kind.objective == "default"
    ]
    return markdown(header, rows) if rows else NOT_MEASURED


def delay(results: Results) -> str:
    """What was tried against the collapse of stale runs, by delay."""

    def over(runs: Sequence[dict[str, Any]], key: str, form: str) -> str:
        values = [run[key] for run in runs if run[key] is not None]
        if not values:
            return MISSING
        least, most = f"{min(values):{form}}", f"{max(values):{form}}"
        return least if least == most else f"{least} to {most}"

    rows: list[list[str]] = []

    def cell(row: dict[str, Any]) -> tuple[str, int, str]:
        return row["task"], row["delay"], row["variant"]

    for place in unique(cell(row) for row in sorted(results["rows"], key=lambda row: (row["task"], row["delay"]))):
        runs = [row for row in results["rows"] if cell(row) == place]
        cells = [*map(str, place), f"{len(runs)}", over(runs, "learned", "d"), over(runs, "worst", ".3f")]
        rows.append([*cells, over(runs, "end", ".2f"), over(runs, "area", ".2f")])
    header = "task | delay | variant | runs | learned at step | worst after that | reward at the end"
    header += " | mean reward of all steps"
    return markdown(header.split(" | "), rows)


def capacity_memory(_: Results) -> str:
    """Memory of one GPU of each pool, for given divisions of GPUs."""
    header = "model | GPUs | trainer | weights, gradients, optimizer | gathered | activations, logits | all"
    header += " | gservers | weights | KV cache | tokens in it"
    rows = []
    for machine, shape, one in capacity.divisions():
        trainer, server = one.trainer, one.server
        lacking = f" (lacks {one.lacking / GIB:.0f})" if one.lacking else ""
        rows.append(
            [
                shape.name,
                f"{machine.gpus}",
                f"{one.layout} ({one.layout.backend})",
                f"{trainer.state / GIB:.1f}",
                f"{trainer.gathered / GIB:.1f}",
                f"{(trainer.activations + trainer.logits) / GIB:.1f}",
                f"{trainer.total / GIB:.1f}{lacking}",
                f"{one.gservers} × {one.server_tensor}",
                f"{server.weights / GIB:.1f}",
                f"{server.kv_room / GIB:.1f}",
                f"{server.kv_tokens:,}",
            ]
        )
    return markdown(header.split(" | "), rows)


def capacity_roles(_: Results) -> str:
    """Memory of one GPU of the trainer with adapters, a critic and a reference."""
    header = "model | GPUs | trainer | roles | weights, gradients, optimizer | critic | reference | gathered"
    header += " | activations, logits | all | checkpoint"
    rows = []
    for machine, shape, one, roles in capacity.divisions_with_roles():
        trainer = one.trainer
        rows.append(
            [
                shape.name,
                f"{machine.gpus}",
                f"{one.layout} ({one.layout.backend})",
                "policy" + (f", {roles}" if str(roles) else ""),
                f"{(trainer.weights + trainer.gradients + trainer.optimizer) / GIB:.1f}",
                f"{trainer.critic / GIB:.1f}" if roles.critic else MISSING,
                f"{trainer.reference / GIB:.1f}" if roles.reference else MISSING,
                f"{trainer.gathered / GIB:.1f}",
                f"{(trainer.activations + trainer.logits) / GIB:.1f}",
                f"{trainer.total / GIB:.1f}" + (f" (lacks {one.lacking / GIB:.0f})" if one.lacking else ""),
                f"{one.checkpoint / GIB:,.1f} GiB",
            ]
        )
    return markdown(header.split(" | "), rows)


def capacity_traffic(_: Results) -> str:
    """What a weight update moves, and how large a checkpoint is, for the same divisions."""
    header = "model | trainer | gservers | served weights | senders | sent by each | received by each GPU | time"
    header += " | checkpoint"
    rows = []
    for _, shape, one in capacity.divisions():
        update = one.update
        rows.append(
            [
                shape.name,
                str(one.layout),
                f"{one.gservers} × {one.server_tensor}",
                f"{update.weights / GIB:.1f} GiB",
                f"{update.senders}",
                f"{update.sent_per_link / GIB:.1f} GiB",
                f"{update.received_per_link / GIB:.1f} GiB",
                f"{update.seconds:.1f} s",
                f"{one.checkpoint / GIB:,.0f} GiB",
            ]
        )
    return markdown(header.split(" | "), rows)


def gpu(results: Results) -> str:
    """What the steps of `gpu.py` came to on one kind of device."""
    rows = []
    for row in results["rows"]:
        told = ["skipped" if row["ok"] is None else "" if row["ok"] else "**failed**", row.get("note", "")]
        told += [f"{form.format(row[key])}" for key, form in GPU_FIGURES.items() if row.get(key) is not None]
        rows.append([row["step"], f"{row['seconds']:.0f}", "; ".join(filter(None, told)) or "ok"])
    return markdown(["step", "seconds", "result"], rows)


def demo_printed(results: Results) -> str:
    """The first and the last steps, and how it ended."""
    steps, _ = _steps_and_summary(results)
    return "\n".join(["```", *steps[:SHOWN_STEPS], "   …", *steps[-1 - SHOWN_STEPS :], "```"])


def demo_in_full(results: Results) -> str:
    """Steps and summary."""
    steps, summary = _steps_and_summary(results)
    return "\n".join(["```", *steps, *summary, "```"])


def _steps_and_summary(results: Results) -> tuple[list[str], list[str]]:
    """Lines that the demo printed, without what was said of the processes' state."""
    lines: list[str] = results["rows"][0]["printed"]
    summary = next(number for number, line in enumerate(lines) if line.startswith("run "))
    steps = [line for line in lines[:summary] if "  step " in line or "  finished: " in line]
    return steps, lines[summary:]


# --- how tables are made -------------------------------------------------------------------------


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines).replace("| --- ", "|---").replace("|--- |", "|---|")


def crossed(
    rows: Sequence[dict[str, Any]],
    *,
    corner: str,
    line: Callable[[dict[str, Any]], str],
    column: Callable[[dict[str, Any]], str],
    columns: Sequence[str],
    cell: Callable[[dict[str, Any] | None], str],
    titles: Sequence[str] | None = None,
) -> str:
    """A table with a line for each value of `line` and a column for each of `columns`; `corner` is above the lines."""
    found = {(line(row), column(row)): row for row in rows}
    lines = [[name, *(cell(found.get((name, other))) for other in columns)] for name in unique(line(r) for r in rows)]
    return markdown([*corner.split(" | "), *(titles or columns)], lines)


def unique(values: Iterable[Any]) -> list[Any]:
    """In the order in which they come first."""
    return list(dict.fromkeys(values))


def source(results: Results) -> str:
    """What every table says under it: which state of the code was measured on what."""
    commit, machine = results["commit"], results["machine"]
    state = f"commit {commit['id']} of {commit['date'][:10]}" if commit["id"] else "no commit"
    state += " with uncommitted changes" if commit["changed"] else ""
    devices = "".join(f", {device}" for device in unique(machine["devices"]))
    return f"*{state}, {machine['processor']}, {machine['cores']} cores{devices}*"


class Table(NamedTuple):
    page: str
    """Where it stands, relative to the root."""
    benchmark: str
    """Whose results it shows, or `COMPUTED`."""
    render: Callable[[Results], str]

    @property
    def name(self) -> str:
        return self.render.__name__.replace("_", "-")


TABLES = (
    Table("README.md", "demo", demo_printed),
    Table("README.md", "throughput", throughput),
    Table("docs/figures.md", "demo", demo_in_full),
    Table("docs/figures.md", "bench_engine", engine),
    Table("docs/figures.md", "bench_rewards", rewards),
    Table("docs/figures.md", "bench_stream", stream),
    Table("docs/figures.md", "bench_manager", manager),
    Table("docs/figures.md", "bench_weights", weights),
    Table("docs/figures.md", "bench_trainer", trainer),
    Table("docs/figures.md", "bench_demo", demo),
    Table("docs/trainer.md", "bench_long_rows", long_rows),
    Table("docs/planning.md", "bench_plan", plan),
    Table("docs/collapse.md", "delay", delay),
    Table("docs/manager.md", "bench_manager", manager_cost),
    Table("docs/manager.md", "bench_routing", routing),
    Table("docs/agents.md", "bench_agents", agents),
    Table("docs/agents.md", "bench_agents_trainer", agents_trainer),
    Table("docs/clusters.md", "bench_scale", scale),
    Table("docs/security.md", "fuzz", fuzz),
    Table("docs/security.md", "fuzz_sglang", fuzz_of_sglang),
    Table("docs/page.md", "bench_page", page_views),
    Table("docs/page.md", "bench_page", page_cost),
    Table("docs/staleness.md", "staleness", staleness_verdict),
    Table("docs/staleness.md", "staleness", staleness_default),
    Table("docs/staleness.md", "staleness", staleness_objectives),
    Table("docs/staleness.md", "staleness", staleness_over_age),
    Table("docs/scale.md", COMPUTED, capacity_memory),
    Table("docs/scale.md", COMPUTED, capacity_roles),
    Table("docs/scale.md", COMPUTED, capacity_traffic),
    Table("docs/scale.md", "bench_checkpoint", checkpoint),
    Table("docs/scale.md", "gpu", gpu),
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
            tables = [f"{table.render(results)}\n\n{source(results)}" for results in found]
            shown = "\n\n".join(tables) or NOT_MEASURED
        return f"<!-- table: {table.name} -->\n\n{shown}\n\n<!-- end of table -->"

    return BLOCK.sub(block, text)


def results_of(benchmark: str, folder: Path) -> list[Path]:
    """The results in `folder`: of `gpu`, one file for each kind of device."""
    return sorted(folder.glob("gpu-*.json" if benchmark == "gpu" else f"{benchmark}.json"))


def render() -> None:
    for page in unique(table.page for table in TABLES):
        path = ROOT / page
        path.write_text(rendered(page, path.read_text()))


# --- running -------------------------------------------------------------------------------------


class Needed(NamedTuple):
    """A contender that is not installed with streamrl."""

    name: str
    """What the benchmark calls it in its results."""
    there: Callable[[argparse.Namespace], bool]
    how: str


def _importable(module: str) -> Callable[[argparse.Namespace], bool]:
    return lambda _: find_spec(module) is not None


TRAINERS_NEEDED = {
    "megatron": Needed("streamrl, Megatron", _importable("megatron"), "pip install -c constraints.txt -e '.[dev]'"),
    "trl": Needed("TRL", _importable("trl"), "pip install -c constraints.txt trl==1.16.0"),
}
NEEDED = {
    "bench_agents_trainer": TRAINERS_NEEDED,
    "bench_engine": {
        "sglang": Needed(
            "sglang", lambda options: options.sglang_python.exists(), "`make sglang-cpu`, or --sglang-python"
        ),
        "vllm": Needed("vllm", lambda options: options.vllm_python.exists(), "`make vllm-cpu`, or --vllm-python"),
    },
    "bench_trainer": TRAINERS_NEEDED,
}


def commands(benchmark: str, options: argparse.Namespace) -> list[list[str]]:
    """What measures all that the tables of `benchmark` show: scripts with their arguments, one after another."""
    match benchmark:
        case "bench_engine":
            others: list[str] = []
            for name, python in (("sglang", options.sglang_python), ("vllm", options.vllm_python)):
                if name not in options.without:
                    others += [f"--{name}-python", str(python)]
            return [["--seconds", "6", *others]]
        case "bench_weights":
            collective = ["--append", "--modes", "collective"]
            return [
                ["--repeats", "7"],
                [*collective, "--sizes", "1.5B", "--gservers", "1", "2", "--engine", "simulated", "--repeats", "3"],
                [*collective, "shared_memory", "--sizes", "135M", "--dtype", "bfloat16", "--repeats", "7"],
            ]
        case "bench_demo":
            return [["--repeats", "3"]]
        case "fuzz_sglang":
            return [["--engine", "sglang", "--messages", "1000"]]
        case _:
            return [[]]


def run(benchmark: str, options: argparse.Namespace) -> None:
    """Measure all of it. Exit if a part fails: what was kept before stays then."""
    for arguments in commands(benchmark, options):
        script = f"{SCRIPTS.get(benchmark, benchmark)}.py"
        command = [sys.executable, str(ROOT / "benchmarks" / script), *arguments]
        print("$", *command, flush=True)
        if subprocess.run(command, cwd=ROOT, check=False).returncode:
            raise SystemExit(f"{' '.join(command)} failed; nothing of {benchmark} is kept")
    failed = [
        name for path in results_of(benchmark, LATEST) for name in unmeasured(benchmark, read_results(path), options)
    ]
    if failed:
        raise SystemExit(f"{', '.join(failed)} did not run; nothing of {benchmark} is kept (see above, or --without)")


def unmeasured(benchmark: str, results: Results, options: argparse.Namespace) -> list[str]:
    """Return the contenders that `benchmark` should have measured and that no row of `results` has."""
    if benchmark not in NEEDED:
        return []
    found: set[str] = set()
    for row in results["rows"]:
        found |= {row["contender"]} if "contender" in row else set(row.get("tokens_per_second", ()))
    needed = NEEDED.get(benchmark, {}).items()
    return [name for name, one in needed if name not in options.without and one.name not in found]


def keep(benchmark: str) -> None:
    """Copy the latest results of `benchmark`, and their plot, to where the tables are made from."""
    measured = results_of(benchmark, LATEST)
    if not measured:
        raise SystemExit(f"{benchmark} has not been run here: there is no {LATEST / f'{benchmark}.json'}")
    for results in measured:
        if read_results(results)["settings"].get("quick"):
            raise SystemExit(f"{results} is of a quick run, which is not kept")
        for found in LATEST.glob(f"{results.stem}.*"):
            shutil.copy(found, KEPT / found.name)


def check_needed(chosen: Sequence[str], options: argparse.Namespace) -> None:
    """Exit if a contender is neither there nor left out on purpose."""
    lacking = [
        f"{benchmark} lacks {name}: {needed.how}, or --without {name}"
        for benchmark in chosen
        for name, needed in NEEDED.get(benchmark, {}).items()
        if name not in options.without and not needed.there(options)
    ]
    if lacking:
        raise SystemExit("\n".join(lacking))


def main() -> None:
    benchmarks = unique(table.benchmark for table in TABLES if table.benchmark != COMPUTED)
    optional = unique(name for needed in NEEDED.values() for name in needed)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group()
    quick_enough = [name for name in benchmarks if name not in BY_NAME_ONLY]
    but = f"by default all but {', '.join(sorted(BY_NAME_ONLY))}"
    what.add_argument("--run", nargs="+", choices=benchmarks, default=quick_enough, help=but)
    what.add_argument("--keep", nargs="+", choices=benchmarks, help="keep their latest results; run nothing")
    what.add_argument("--render", action="store_true", help="run nothing")
    parser.add_argument("--without", nargs="+", choices=optional, default=[], help="contenders that are left out")
    parser.add_argument("--sglang-python", type=Path, default=ROOT / ".venv-sglang" / "bin" / "python")
    parser.add_argument("--vllm-python", type=Path, default=ROOT / ".venv-vllm" / "bin" / "python")
    options = parser.parse_args()
    if not options.render and not options.keep:
        check_needed(options.run, options)
    for benchmark in [] if options.render else options.keep or options.run:
        if not options.keep:
            run(benchmark, options)
        keep(benchmark)
    render()


if __name__ == "__main__":
    main()
