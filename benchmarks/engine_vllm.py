"""A contender of `bench_engine.py`: vLLM on a CPU, in an environment of its own that knows nothing of streamrl.

Role: answers lines of JSON on its standard input, `{"prompts": …, "new_tokens": …}`, with lines `{"tokens": …}` on
what was its standard output. It calls vLLM's engine directly: no HTTP is counted against it.

    VLLM_PYTHON benchmarks/engine_vllm.py FOLDER DTYPE THREADS
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

SEQUENCES = 64
CONTEXT = 512


def main() -> None:
    folder, dtype, threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever libraries print is no answer
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0" if threads == 1 else f"0-{threads - 1}"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    engine, params = load(folder, dtype)
    answers.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        ask = json.loads(line)
        try:
            prompts = [{"prompt_token_ids": prompt} for prompt in ask["prompts"]]
            found = engine.generate(prompts, params(ask["new_tokens"]), use_tqdm=False)
            answers.write(json.dumps({"tokens": sum(len(one.outputs[0].token_ids) for one in found)}) + "\n")
        except Exception as error:  # tolerance point: told to the benchmark, which leaves the row out
            answers.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")


def load(folder: str, dtype: str) -> Any:
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=folder,
        dtype=dtype,
        max_num_seqs=SEQUENCES,
        max_num_batched_tokens=4096,
        max_model_len=CONTEXT,
        enforce_eager=True,
        enable_prefix_caching=False,
        seed=0,
    )

    def params(new_tokens: int) -> Any:
        return SamplingParams(temperature=1.0, max_tokens=new_tokens, ignore_eos=True, logprobs=0, detokenize=False)

    return engine, params


if __name__ == "__main__":
    main()
