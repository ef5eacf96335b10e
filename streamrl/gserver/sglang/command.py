"""The command line, the environment and the polled calls of an SGLang server. Pure.

The flags of `gserver.sglang.args` come after streamrl's own, so that they replace them: SGLang uses the last value.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from streamrl.config import MAX_QUEUED, GserverConfig, LoraConfig
from streamrl.gserver.server.child import cores
from streamrl.gserver.server.monitor import MonitoredApi
from streamrl.gserver.sglang import entry
from streamrl.records.lineage import version_of
from streamrl.transport.addresses import LOOPBACK
from streamrl.transport.credentials import GserverKeys
from streamrl.transport.generation import INITIAL_WEIGHT_VERSION, adapter_name
from streamrl.transport.tls import CertificateFiles

SGLANG = MonitoredApi(
    title="SGLang",
    there="/model_info",
    scheduler="/server_info",  # /health_generate, which requests a token, gets no reply from a paused scheduler
    figures={
        "sglang:num_running_reqs": "running",
        "sglang:num_queue_reqs": "queued",
        "sglang:num_used_tokens": "running_tokens",
        "sglang:generation_tokens_total": "tokens_generated_total",
        "sglang:prompt_tokens_total": "prompt_tokens_total",
        "sglang:num_requests_total": "requests_total",
    },
)
LEAST_CACHE_TOKENS = 32768
"""Least size of the key-value cache on a CPU, where SGLang would otherwise take most of the machine's memory."""

CPU_FLAGS: Sequence[str] = (
    "--attention-backend=torch_native",
    "--sampling-backend=pytorch",
    "--grammar-backend=none",
    "--disable-overlap-schedule",
    "--disable-cuda-graph",
)
"""Select the parts of SGLang that need no CUDA operators."""

IN_PLACE_FLAGS: Sequence[str] = ("--disable-radix-cache", "--disable-overlap-schedule")
"""For requests that stay in place during a weight update. With the overlap schedule, SGLang's default on GPUs, the
results of the last step are still pending when it pauses in this mode: it would label these tokens with weights that
did not sample them, and write new weights while the step may still compute with the old ones."""


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """Start parameters of a server, in addition to its section of the configuration."""

    model_dir: Path
    host: str = LOOPBACK.local
    """Address at which it listens."""
    port: int
    device: str
    """`cpu`, or `cuda:N` with N among the devices that this process sees; the first of several ranks has it."""
    dtype: str
    seed: int
    weight_version: str
    prompt_cache: bool
    """Whether prompts are kept for later requests, so that weight updates have to flush them; False: requests stay in
    place during updates."""
    routed_experts: bool = False
    """Whether replies include, on request, the experts that computed each token."""
    certificate: CertificateFiles | None = None
    """Certificate for TLS; None: plain text."""
    lora: LoraConfig | None = None
    """Shape of the adapters that it will load in addition to the model; None: no adapters."""
    adapter: Path | None = None
    """The adapter that it starts with, under the name of `weight_version`."""


def command(settings: GserverConfig, launch: Launch) -> list[str]:
    """Return the command line: interpreter, entry and flags."""
    kind, _, number = launch.device.partition(":")
    flags = [
        f"--model-path={launch.model_dir}",
        f"--host={launch.host}",
        f"--port={launch.port}",
        f"--device={kind}",
        f"--tp-size={settings.sglang.tensor_parallel}",
        f"--dtype={launch.dtype}",
        f"--random-seed={launch.seed}",
        f"--weight-version={launch.weight_version}",
        f"--context-length={settings.max_context}",
        f"--max-running-requests={settings.max_running}",
        f"--max-queued-requests={MAX_QUEUED}",
        "--skip-server-warmup",
        "--sleep-on-idle",
        "--enable-metrics",
        "--log-level-http=warning",
    ]
    if launch.lora is not None:
        flags += _lora_flags(launch, launch.lora)
        flags += ["--lora-backend=torch_native"] if kind == "cpu" else []
    if launch.certificate is not None:
        flags += [f"--ssl-certfile={launch.certificate.certificate}", f"--ssl-keyfile={launch.certificate.key}"]
    if not launch.prompt_cache:
        flags += IN_PLACE_FLAGS
    if launch.routed_experts:
        flags.append(entry.ROUTED_EXPERTS)
    if kind == "cpu":
        cache = max(LEAST_CACHE_TOKENS, 2 * settings.max_context)
        flags += [*CPU_FLAGS, f"--max-total-tokens={cache}"]
    else:
        flags += [f"--base-gpu-id={number or 0}"]
    python = settings.sglang.python or sys.executable
    # -P: SGLang must not find the modules in the entry's folder.
    return [python, "-P", str(Path(entry.__file__).resolve()), *flags, *settings.sglang.args]


def _lora_flags(launch: Launch, lora: LoraConfig) -> list[str]:
    flags = ["--enable-lora", f"--max-lora-rank={lora.rank}", "--lora-target-modules", *sorted(lora.target_modules)]
    name = None if launch.weight_version == INITIAL_WEIGHT_VERSION else adapter_name(version_of(launch.weight_version))
    return flags if name is None or launch.adapter is None else [*flags, "--lora-paths", f"{name}={launch.adapter}"]


def environment(
    *, device: str, threads: int, index: int, ranks: int, group_seconds: float, keys: GserverKeys
) -> Mapping[str, str]:
    """Return the environment variables of server `index`.

    On a CPU each of its `ranks` gets `threads` cores, not shared as long as there are enough. `group_seconds`: the
    longest wait for the other members of a weight group. `keys`: the keys that its callers must present; not flags,
    since every user of the machine can see the flags of a process.
    """
    variables = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", entry.GROUP_SECONDS: f"{group_seconds:g}"}
    if keys.generation:
        variables |= {entry.API_KEY: keys.generation, entry.ADMIN_API_KEY: keys.control}
    if device != "cpu":
        return variables
    return variables | {
        entry.ON_CPU: "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(cores(index * ranks + rank, threads) for rank in range(ranks)),
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
    }
