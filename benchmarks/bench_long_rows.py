"""Memory of a training step on one long row: it should grow as the row's tokens do.

    python benchmarks/bench_long_rows.py [--quick] [--threads N] [--tokens N ...] [--append]

A small model (2 layers, a vocabulary of 8,192) computes the log-probabilities of one row and their gradients, with
activations computed again in the backward pass. Each measurement is a process of its own; reported is the growth of
its memory over that with the model loaded. Three kinds of rows:

| row | content |
|---|---|
| `chain` | one response of 7/8 of the tokens: causal attention |
| `tree` | a prompt of 1/8 of the tokens, and eight responses to it |
| `tree, dense mask` | the same under one length × length mask, as attention libraries want it; only of few tokens |

Seconds are of this machine and show only that the row gets through.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np
import torch
from common import Row, begin_peak, earlier_rows, parser_of, report, resident
from training_batch import MaskedTokens, packed
from training_contenders import model_spec
from transformers import Qwen3Config, Qwen3ForCausalLM, logging

from streamrl.device import compute_with
from streamrl.trainer.backends import attention
from streamrl.trainer.backends.base import ModelOutput
from streamrl.trainer.backends.torch import TorchModel
from streamrl.trainer.packing import pack

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


def measure(folder: Path, row: str, tokens: int, *, threads: int) -> Row:
    """One row, in this process."""
    compute_with(threads)
    if row == "tree, dense mask":
        attention.DENSE_TOKENS = tokens
    model = TorchModel(msgspec.structs.replace(model_spec(folder), gradient_checkpointing=True))
    random = np.random.default_rng(0)
    prompt = random.integers(0, VOCABULARY, tokens // 8)
    responses = RESPONSES if row.startswith("tree") else 1
    lengths = [(tokens - len(prompt)) // responses] * responses
    begun = MaskedTokens.of_prompt(prompt)
    sequences = [begun.more(random.integers(0, VOCABULARY, length), sampled=True) for length in lengths]
    group = packed(0, sequences, prompt=len(prompt))
    (micro,) = pack([group], max_tokens=tokens, share_prefix=True)
    before = resident("VmRSS")
    begin_peak()
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


def loss(output: ModelOutput) -> torch.Tensor:
    return -output.values.mean()


def in_a_process(folder: Path, row: str, tokens: int, *, threads: int) -> Row:
    """As `measure`, in a process of its own."""
    command = [sys.executable, __file__, "--threads", str(threads), "--measure", str(folder), row, str(tokens)]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=SECONDS, check=True, text=True)
    found: Row = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = parser_of(__doc__, quick="the shortest rows only")
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
    rows = earlier_rows("bench_long_rows") if options.append else []
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        Qwen3ForCausalLM(Qwen3Config(**SHAPE)).save_pretrained(folder)
        for tokens in options.tokens[: 1 if options.quick else None]:
            for row in ROWS if tokens <= DENSE_TOKENS else ROWS[:-1]:
                rows.append(in_a_process(Path(folder), row, tokens, threads=options.threads))
                print(rows[-1], flush=True)
    settings = {"threads": options.threads, "quick": options.quick, "model": SHAPE, "responses": RESPONSES}
    report("bench_long_rows", settings, rows)


if __name__ == "__main__":
    main()
