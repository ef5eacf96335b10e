"""Contenders of `bench_engine.py` in a process of their own: transformers, and vLLM in an environment without streamrl.

It replies to lines of JSON on its standard input, `{"method": …, "prompts": …, "new_tokens": …}`, with lines
`{"tokens": …}` on its original standard output. Methods: transformers' `generate` and its continuous batching
(`generate_batch`), or `vllm`: vLLM's engine, called directly, without HTTP. All sample at temperature 1.

    PYTHON benchmarks/engine_script.py transformers|vllm FOLDER DTYPE THREADS
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

CONTEXT = 512
SEQUENCES = 64
BATCH_TOKENS = 4096
"""Computed together by continuous batching and vLLM, as by the embedded engine."""
PAGE = 64
"""Tokens of a page of the cache of continuous batching; requests share no page."""

Method = Callable[[list[list[int]], int], int]
"""Prompts and new tokens of each → tokens that were made."""


def main() -> None:
    library, folder, dtype, threads = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of libraries is no reply
    load = {"transformers": transformers_methods, "vllm": vllm_methods}[library]
    methods = load(folder, dtype, threads)
    replies.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        request = json.loads(line)
        try:
            tokens = methods[request["method"]](request["prompts"], request["new_tokens"])
            replies.write(json.dumps({"tokens": tokens}) + "\n")
        except Exception as error:  # tolerance point: the benchmark leaves the row out
            replies.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")


def transformers_methods(folder: str, dtype: str, threads: int) -> dict[str, Method]:
    import torch
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    ends: dict[str, Any] = {"eos_token_id": -1, "pad_token_id": 0}
    sampling: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, **ends}

    def generate(prompts: list[list[int]], new_tokens: int) -> int:
        ids = torch.tensor(prompts)
        settings = GenerationConfig(**sampling, min_new_tokens=new_tokens, max_new_tokens=new_tokens)
        with torch.inference_mode():
            output = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=settings)
        return int(output[:, ids.shape[1] :].numel())

    def generate_batch(prompts: list[list[int]], new_tokens: int) -> int:
        outputs = model.generate_batch(
            prompts,
            generation_config=GenerationConfig(**sampling, max_new_tokens=new_tokens),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=PAGE,
                num_blocks=SEQUENCES * CONTEXT // 2 // PAGE,
                max_batch_tokens=BATCH_TOKENS,
                max_requests_per_batch=len(prompts),
                return_logprobs=True,
            ),
        )
        return sum(len(output.generated_tokens) for output in outputs.values())

    return {"generate": generate, "generate_batch": generate_batch}


def vllm_methods(folder: str, dtype: str, threads: int) -> dict[str, Method]:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0" if threads == 1 else f"0-{threads - 1}"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=folder,
        dtype=dtype,
        max_num_seqs=SEQUENCES,
        max_num_batched_tokens=BATCH_TOKENS,
        max_model_len=CONTEXT,
        enforce_eager=True,
        enable_prefix_caching=False,
        seed=0,
    )

    def generate(prompts: list[list[int]], new_tokens: int) -> int:
        params = SamplingParams(temperature=1.0, max_tokens=new_tokens, ignore_eos=True, logprobs=0, detokenize=False)
        outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return {"vllm": generate}


if __name__ == "__main__":
    main()
