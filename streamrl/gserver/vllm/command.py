"""The command line, the environment and the polled calls of a vLLM server. Pure.

The flags of `gserver.vllm.args` come after streamrl's own, so that they replace them: vLLM uses the last value.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from streamrl.config import GserverConfig, LoraConfig
from streamrl.gserver.server.child import cores
from streamrl.gserver.server.http import MAX_TOP_LOGPROBS
from streamrl.gserver.server.monitor import MonitoredApi
from streamrl.gserver.vllm import entry

VLLM = MonitoredApi(
    title="vLLM",
    there="/version",
    scheduler="/is_paused",
    figures={
        "vllm:num_requests_running": "running",
        "vllm:num_requests_waiting": "queued",
        "vllm:generation_tokens_total": "tokens_generated_total",
        "vllm:prompt_tokens_total": "prompt_tokens_total",
        "vllm:request_success_total": "requests_total",
    },
)
ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks that vLLM can make room for."""
CPU_CACHE_BYTES = 2**30
"""Size of the key-value cache on a CPU, where vLLM would otherwise take most of the machine's memory."""


class VllmLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """Start parameters of a server, in addition to its section of the configuration."""

    model_dir: Path
    socket: Path
    """Unix socket at which it listens."""
    device: str
    """`cpu`, or `cuda:N` with N among the devices that this process sees; the first of several ranks has it."""
    dtype: str
    seed: int
    max_context: int
    """Longest prompt and response together, in tokens."""
    routed_experts: bool = False
    """Whether replies include the experts that computed each token."""
    adapter: LoraConfig | None = None
    """The kind of adapter that requests use; None: they use none."""


def command(settings: GserverConfig, launch: VllmLaunch) -> list[str]:
    """Return the command line: interpreter, entry and flags."""
    flags = [
        f"--model={launch.model_dir}",
        f"--uds={launch.socket}",
        f"--tensor-parallel-size={settings.vllm.tensor_parallel}",
        f"--dtype={launch.dtype}",
        f"--seed={launch.seed}",
        f"--max-model-len={launch.max_context}",
        f"--max-num-seqs={settings.max_running}",
        f"--max-logprobs={MAX_TOP_LOGPROBS}",
        "--logprobs-mode=processed_logprobs",
        "--enable-scale-out",
        "--enable-prefix-caching",
        "--enable-prompt-tokens-details",
        "--disable-uvicorn-access-log",
    ]
    if launch.routed_experts:
        flags.append("--enable-return-routed-experts")
    if (lora := launch.adapter) is not None:
        room = next((rank for rank in ADAPTER_RANKS if rank >= lora.rank), lora.rank)
        flags += ["--enable-lora", "--max-loras=1", f"--max-lora-rank={room}"]
        # Without the head among them: vLLM cannot score prompts if its head takes adapters.
        flags += ["--lora-target-modules", *sorted(lora.target_modules)]
    if launch.device == "cpu":
        flags += ["--enforce-eager", f"--kv-cache-memory-bytes={CPU_CACHE_BYTES}"]
        flags += ["--distributed-executor-backend=uni"] if settings.vllm.tensor_parallel == 1 else []
    python = settings.vllm.python or sys.executable
    # -P: vLLM must not find the modules in the entry's folder.
    return [python, "-P", str(Path(entry.__file__).resolve()), *flags, *settings.vllm.args]


def environment(settings: GserverConfig, *, device: str, index: int) -> Mapping[str, str]:
    """Return the environment variables of server `index`.

    On a CPU each of its ranks gets `gserver.threads` cores, not shared as long as there are enough; on GPUs the server
    sees only its own.
    """
    ranks, threads = settings.vllm.tensor_parallel, settings.threads
    variables = {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": "",
        "VLLM_SERVER_DEV_MODE": "1",  # adds the calls for weights
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # `entry.py` changes the other one
    }
    if device == "cpu":
        bound = "|".join(cores(index * ranks + rank, threads) for rank in range(ranks))
        counts = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
        return variables | counts | {entry.ON_CPU: "1", "VLLM_CPU_OMP_THREADS_BIND": bound}
    first = int(device.partition(":")[2] or 0)
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if os.environ.get("CUDA_VISIBLE_DEVICES") else None
    names = (seen or [str(number) for number in range(first + ranks)])[first : first + ranks]
    return variables | {"CUDA_VISIBLE_DEVICES": ",".join(names)}
