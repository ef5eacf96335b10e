"""A contender of `bench_engine.py`: transformers' `generate` and its continuous batching, in one process.

Role: answers lines of JSON on its standard input, `{"method": …, "prompts": …, "new_tokens": …}`, with lines
`{"tokens": …}` on what was its standard output. Both methods sample from the same model at temperature 1.

    python benchmarks/engine_transformers.py FOLDER DTYPE THREADS CACHE_TOKENS
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

PAGE = 64
"""Tokens of a page of the cache of continuous batching; requests share no page."""
BATCH_TOKENS = 4096
"""Computed at once by continuous batching, as by the embedded engine."""


def main() -> None:
    folder, dtype, threads, cache_tokens = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever libraries print is no answer
    methods = load(folder, dtype, threads, cache_tokens)
    answers.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        ask = json.loads(line)
        try:
            tokens = methods[ask["method"]](ask["prompts"], ask["new_tokens"])
            answers.write(json.dumps({"tokens": tokens}) + "\n")
        except Exception as error:  # tolerance point: told to the benchmark, which leaves the row out
            answers.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")


def load(folder: Path, dtype: str, threads: int, cache_tokens: int) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()

    def sampling(new_tokens: int) -> GenerationConfig:
        return GenerationConfig(
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
            eos_token_id=-1,
            pad_token_id=0,
        )

    def generate(prompts: list[list[int]], new_tokens: int) -> int:
        ids = torch.tensor(prompts)
        settings = sampling(new_tokens)
        with torch.inference_mode():
            answer = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=settings)
        return int(answer[:, ids.shape[1] :].numel())

    def generate_batch(prompts: list[list[int]], new_tokens: int) -> int:
        settings = sampling(new_tokens)
        settings.min_new_tokens = None  # not supported there, and without an end of sequence not needed
        answers = model.generate_batch(
            prompts,
            generation_config=settings,
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=PAGE,
                num_blocks=cache_tokens // PAGE,
                max_batch_tokens=BATCH_TOKENS,
                max_requests_per_batch=len(prompts),
                return_logprobs=True,
            ),
        )
        return sum(len(answer.generated_tokens) for answer in answers.values())

    return {"generate": generate, "generate_batch": generate_batch}


if __name__ == "__main__":
    main()
