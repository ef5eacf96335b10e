"""Memory of a training step on one long row: it should grow as the row's tokens do.

    python benchmarks/bench_long_rows.py [--quick] [--threads N] [--tokens N ...] [--append]

A small model (2 layers, a vocabulary of 8,192) computes the log-probabilities of one row and their gradients, with
activations computed again in the backward pass. Each measurement is a process of its own; reported is how much its
memory grew over what it had with the model loaded. Three kinds of rows:

| row | what it holds |
|---|---|
| `chain` | one response of 7/8 of the tokens: causal attention |
| `tree` | a prompt of 1/8 of the tokens, and eight responses to it |
| `tree, dense mask` | the same under one length × length mask, as attention libraries want it; only of few tokens |

Seconds are of this machine and tell only that the row gets through.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from common import earlier_rows, write_results
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from training_contenders import model_spec
from transformers import Qwen3Config, Qwen3ForCausalLM, logging

from streamrl.device import compute_with
from streamrl.trainer.backends import attention
from streamrl.trainer.backends.base import ModelOutput
from streamrl.trainer.backends.torch import TorchModel
from streamrl.trainer.packing import pack
from streamrl.types import NO_VERSION, TrajectoryGroup

VOCABULARY = 8192
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "tie_word_embeddings": True,
}
TOKENS = (8192, 32768, 131072)
DENSE_TOKENS = 8192
"""The longest row that is tried under a dense mask."""
RESPONSES = 8
ROWS = ("chain", "tree", "tree, dense mask")
SECONDS = 840.0
"""Deadline of a measurement."""


def measure(folder: Path, row: str, tokens: int, *, threads: int) -> dict[str, Any]:
    """One row, in this process."""
    compute_with(threads)
    if row == "tree, dense mask":
        attention.DENSE_TOKENS = tokens
    model = TorchModel(msgspec.structs.replace(model_spec(folder), gradient_checkpointing=True))
    random = np.random.default_rng(0)
    prompt = random.integers(0, VOCABULARY, tokens // 8)
    responses = RESPONSES if row.startswith("tree") else 1
    lengths = [(tokens - len(prompt)) // responses] * responses
    ids = [np.concatenate([prompt, random.integers(0, VOCABULARY, length)]) for length in lengths]
    group = group_of(ids, prompt=len(prompt))
    (micro,) = pack([group], max_tokens=tokens, share_prefix=True, hidden_size=10**6)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    began = time.perf_counter()
    model.accumulate([micro], lambda _, output: loss(output))
    seconds = time.perf_counter() - began
    grown = resident("VmHWM") - before
    return {
        "contender": row,
        "tokens": micro.tokens,
        "predicted": len(micro.target_ids),
        "mib": round(grown / 2**20, 1),
        "bytes_per_token": round(grown / micro.tokens),
        "seconds": round(seconds, 1),
    }


def group_of(sequences: Sequence[NDArray[np.int64]], *, prompt: int) -> TrajectoryGroup:
    """Responses to one prompt of `prompt` tokens."""
    mask = np.concatenate([np.arange(len(ids)) >= prompt for ids in sequences])
    return TrajectoryGroup(
        seq=0,
        worker="rollout/0",
        prompt_length=prompt,
        seqlens=np.array([len(ids) for ids in sequences], np.int32),
        rewards=np.zeros(len(sequences), np.float32),
        packed_input_ids=np.concatenate(sequences).astype(np.int32),
        packed_loss_mask=mask,
        packed_behavior_logprobs=np.zeros(len(mask), np.float32),
        packed_policy_versions=np.where(mask, 0, NO_VERSION).astype(np.int32),
        finish_reasons=["stop"] * len(sequences),
    )


def loss(output: ModelOutput) -> torch.Tensor:
    return -output.values.mean()


def resident(field: str) -> int:
    """Bytes of this process's memory: `VmRSS` now, `VmHWM` at most."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {field}: this benchmark needs Linux")


def in_a_process(folder: Path, row: str, tokens: int, *, threads: int) -> dict[str, Any]:
    """As `measure`, in a process of its own."""
    command = [sys.executable, __file__, "--threads", str(threads), "--measure", str(folder), row, str(tokens)]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=SECONDS, check=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the shortest rows only")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--append", action="store_true", help="to the rows of the latest run")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--measure", nargs=3, metavar=("FOLDER", "ROW", "TOKENS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if options.measure:
        folder, row, tokens = options.measure
        print(json.dumps(measure(Path(folder), row, int(tokens), threads=options.threads)))
        return
    console = Console()
    rows = earlier_rows("bench_long_rows") if options.append else []
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        Qwen3ForCausalLM(Qwen3Config(**SHAPE)).save_pretrained(folder)
        for tokens in options.tokens[: 1 if options.quick else None]:
            for row in ROWS if tokens <= DENSE_TOKENS else ROWS[:-1]:
                rows.append(in_a_process(Path(folder), row, tokens, threads=options.threads))
                console.print(rows[-1], style="dim")
    table = Table(title="memory of a training step on one row")
    for column in ("row", "tokens", "MiB", "bytes per token", "seconds"):
        table.add_column(column, justify="left" if column == "row" else "right")
    for found in rows:
        table.add_row(*(f"{found[key]:,}" if key != "contender" else found[key] for key in found if key != "predicted"))
    console.print(table)
    settings = {"threads": options.threads, "quick": options.quick, "model": SHAPE, "responses": RESPONSES}
    console.print(f"written to {write_results('bench_long_rows', settings, rows)}")


if __name__ == "__main__":
    main()
