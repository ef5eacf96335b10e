"""Entry point of vLLM's interpreter: installs a lifeline and a few changes, then runs vLLM's own server.

It runs as a file, because vLLM may be installed in an environment without streamrl; it imports only one module of
streamrl, which needs the standard library alone. It takes the arguments of vLLM's server. Changes (vllm 0.32.0):

- Log-probabilities are at the temperature and over all tokens, as the trainer computes them. vLLM's own
  `processed_logprobs` exclude the tokens that top-k, top-p and min-p remove.
- On CPUs vLLM packs the head of a model again only if a checkpoint has weights for it. A head that is tied to the
  embedding would keep its old weights in an update, so here every head is packed after an update.
- vLLM reads an adapter that was loaded in place of another again at each step, from a file that the next update
  overwrites. Here it is read once.
- An endpoint of vLLM's that streamrl does not use encodes words when the server starts, which some tokenizers refuse.
- On CPUs vLLM spawns two processes, each of which imports everything again. Here its engine is forked, and computes in
  that process.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import importlib
import multiprocessing
import os
import sys
import types
from pathlib import Path
from typing import Any

ON_CPU = "STREAMRL_VLLM_ON_CPU"
"""Environment variable: set if the server computes on CPUs."""


def find_streamrl() -> None:
    """Make modules of streamrl importable from this file's folder, even if streamrl is not installed."""
    package = types.ModuleType("streamrl")
    package.__path__ = [str(Path(__file__).resolve().parents[2])]
    sys.modules["streamrl"] = package


def fork_engine() -> None:
    """Compute in the engine's process, and fork it, regardless of the start method that vLLM sets."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # otherwise a process is spawned for one rank, too
    processes: Any = importlib.import_module("vllm.v1.engine.utils")
    processes.get_mp_context = lambda: multiprocessing.get_context("fork")


def score_all_tokens() -> None:
    """Have the sampler return log-probabilities over all tokens, at the temperature of each request."""
    sampler: Any = importlib.import_module("vllm.v1.sample.sampler").Sampler
    sample = sampler.sample

    def sample_and_score(self: Any, logits: Any, metadata: Any, *mode: Any, **named: Any) -> tuple[Any, Any]:
        filtered = metadata.top_k is not None or metadata.top_p is not None or metadata.logitsprocs.argmax_invariant
        if metadata.all_greedy or not filtered:
            return sample(self, logits, metadata, *mode, **named)  # type: ignore[no-any-return]
        scaled = self.apply_temperature(logits.clone(), metadata.temperature, metadata.all_random)
        sampled, logprobs = sample(self, logits, metadata, *mode, **named)
        return sampled, None if logprobs is None else self.compute_logprobs(scaled)

    sampler.sample = sample_and_score


def pack_heads() -> None:
    """Have the worker pack the head of its model after it has loaded new weights."""
    runner: Any = importlib.import_module("vllm.v1.worker.gpu_model_runner")
    head: Any = importlib.import_module("vllm.model_executor.layers.vocab_parallel_embedding").ParallelLMHead
    reload = runner.reload_weights

    def reload_and_pack(config: Any, model: Any, **options: Any) -> None:
        reload(config, model, **options)
        for layer in model.modules():
            if isinstance(layer, head):
                layer.quant_method.process_weights_after_loading(layer)

    runner.reload_weights = reload_and_pack


def keep_adapters() -> None:
    """Have a step compute with the adapter that is loaded."""
    manager: Any = importlib.import_module("vllm.lora.worker_manager").LRUCacheWorkerLoRAManager
    apply = manager._apply_adapters

    def apply_others(self: Any, requests: Any) -> None:
        loaded = self.list_adapters()
        apply(self, {request for request in requests if request and request.lora_int_id not in loaded})

    manager._apply_adapters = apply_others


def leave_out_decisions() -> None:
    """Do not prepare vLLM's endpoint for structured decisions."""
    decisions: Any = importlib.import_module("vllm.entrypoints.generate.structured_decisions.api_router")
    decisions.init_structured_decisions_state = lambda *_, **__: None


def serve() -> None:
    """Run vLLM's server with the arguments of this process."""
    from vllm.entrypoints.launchers.api_server.entry import run_server
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    leave_out_decisions()
    if os.environ.get(ON_CPU):
        fork_engine()
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args()
    gc.freeze()
    gc.enable()
    asyncio.run(run_server(arguments))


if __name__ in ("__main__", "__mp_main__"):
    find_streamrl()
    from streamrl.gserver.server.lifeline import LIFELINE, STACKS_SIGNAL, hold_lifeline

    faulthandler.register(STACKS_SIGNAL)
    if __name__ == "__main__" and LIFELINE in os.environ:  # else a person started it
        hold_lifeline()
    gc.disable()  # while permanent modules are imported: repeated scans of them take a third of the import time
    score_all_tokens()
    keep_adapters()
    if os.environ.get(ON_CPU):
        pack_heads()
if __name__ == "__main__":
    serve()
