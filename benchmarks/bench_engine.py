"""Tokens per second of the embedded gserver over HTTP, beside transformers' `generate`, in one run.

    python benchmarks/bench_engine.py [--quick] [--threads N]

Both get the same prompts, sample at temperature 1, and never stop early. The gserver runs in a
process of its own; its client is this process. Rounds of the two alternate, and the best of each
counts, so that other load on the machine hits both alike.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from common import write_results
from rich.console import Console
from rich.table import Table

from streamrl.config import Config, from_dict
from streamrl.transport.generation import GenerateReply, GenerateRequest, GenerationClient, SamplingParams

PROMPT_TOKENS = 64
SCRATCH = {"hidden_size": 256, "layers": 5, "heads": 4, "kv_heads": 2, "head_dim": 64}


class Case(msgspec.Struct, frozen=True):
    """A model and how much it is asked to write."""

    name: str
    model: dict[str, Any]
    """The section [model]."""
    new_tokens: int


CASES = (
    Case("SmolLM2-135M", {"path": "smollm2-135m-instruct"}, 32),
    Case("scratch-4.9M", {"path": "scratch", "scratch": SCRATCH}, 64),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="concurrency 1 and 8 only, one round")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    arguments = parser.parse_args()
    concurrencies = [1, 8] if arguments.quick else [1, 8, 32, 64]
    rounds = 1 if arguments.quick else arguments.rounds
    rows: list[dict[str, Any]] = []
    for case in CASES:
        rows += measure(case, concurrencies, rounds=rounds, threads=arguments.threads, dtype=arguments.dtype)
    show(rows)
    settings = {
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": {case.name: case.new_tokens for case in CASES},
        "threads": arguments.threads,
        "rounds": rounds,
        "dtype": arguments.dtype,
    }
    print("written to", write_results("bench_engine", settings, rows))


def measure(case: Case, concurrencies: list[int], *, rounds: int, threads: int, dtype: str) -> list[dict[str, Any]]:
    from streamrl.models import ensure_checkpoint

    config = from_dict({"model": case.model, "gserver": {"threads": threads, "dtype": dtype}})
    folder = ensure_checkpoint(config)
    generate = transformers_generate(config, folder)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    server = context.Process(target=serve, args=(config, folder, there), daemon=True)
    server.start()
    url, vocabulary = here.recv()
    try:
        return [
            compare(case, url, vocabulary, generate, concurrency=concurrency, rounds=rounds)
            for concurrency in concurrencies
        ]
    finally:
        here.send("stop")
        server.join()


def compare(
    case: Case,
    url: str,
    vocabulary: int,
    generate: Callable[[list[list[int]], int], int],
    *,
    concurrency: int,
    rounds: int,
) -> dict[str, Any]:
    generator = np.random.default_rng(concurrency)
    ours, theirs = [], []
    for round_ in range(rounds + 1):
        prompts = generator.integers(0, vocabulary, (concurrency, PROMPT_TOKENS)).tolist()
        new_tokens = case.new_tokens if round_ else 4  # the first round warms up
        ours.append(rate(lambda p=prompts, n=new_tokens: asyncio.run(over_http(url, p, n))))
        theirs.append(rate(lambda p=prompts, n=new_tokens: generate(p, n)))
    row = {
        "model": case.name,
        "concurrency": concurrency,
        "streamrl_tokens_per_second": max(ours[1:]),
        "generate_tokens_per_second": max(theirs[1:]),
    }
    row["ratio"] = row["streamrl_tokens_per_second"] / row["generate_tokens_per_second"]
    print({key: round(value, 2) if isinstance(value, float) else value for key, value in row.items()}, flush=True)
    return row


def rate(run: Callable[[], int]) -> float:
    """Tokens per second of one run."""
    began = time.perf_counter()
    tokens = run()
    return tokens / (time.perf_counter() - began)


async def over_http(url: str, prompts: list[list[int]], new_tokens: int) -> int:
    """All prompts at once, one request each."""
    client = GenerationClient(timeout=600)
    params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
    requests = [GenerateRequest(input_ids=prompt, sampling_params=params, return_logprob=True) for prompt in prompts]
    try:
        replies: list[GenerateReply] = await asyncio.gather(*(client.generate(url, r) for r in requests))
    finally:
        await client.close()
    return sum(len(reply.output_ids) for reply in replies)


def serve(config: Config, folder: Path, pipe: Connection) -> None:
    """The gserver's process: tells its URL, lives until told to stop."""
    from streamrl.gserver.process import running

    async def live() -> None:
        async with running(config, index=0, model_dir=folder) as (engine, url):
            pipe.send((url, engine.vocab_size))
            await asyncio.to_thread(pipe.recv)

    asyncio.run(live())


def transformers_generate(config: Config, folder: Path) -> Callable[[list[list[int]], int], int]:
    import torch
    from transformers import AutoModelForCausalLM, logging

    from streamrl.device import resolve_device, resolve_dtype

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(config.gserver.threads)
    device = resolve_device(config.run.device)
    dtype = resolve_dtype(config.gserver.dtype, device)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval().to(device)

    def generate(prompts: list[list[int]], new_tokens: int) -> int:
        ids = torch.tensor(prompts, device=device)
        with torch.inference_mode():
            answer = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                min_new_tokens=new_tokens,
                max_new_tokens=new_tokens,
            )
        return int(answer[:, ids.shape[1] :].numel())

    return generate


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(title="tokens per second")
    for column in ("model", "concurrency", "streamrl over HTTP", "transformers generate", "ratio"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for row in rows:
        table.add_row(
            row["model"],
            str(row["concurrency"]),
            f"{row['streamrl_tokens_per_second']:.0f}",
            f"{row['generate_tokens_per_second']:.0f}",
            f"{row['ratio']:.2f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
