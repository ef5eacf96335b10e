"""Keeps torch from AMX instructions on machines where they are broken.

Some virtual machines report AMX (tiles, for matrix products in bfloat16), but end a process that uses it by SIGILL, or
lose the content of the tiles when the process is switched out. So bfloat16 products are tried once in a child process
(`python -m streamrl.processor`). If the trial fails, environment variables keep torch's libraries (oneDNN, MKL) from
AMX. The libraries read them at their first product, and child processes inherit them. The result is kept in streamrl's
cache. A processor that does not report AMX is not tried.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import os
import platform
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from streamrl.disk import cache_home

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

ONEDNN_LIMIT, MKL_LIMIT = "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS"
"""Environment variables: the newest instructions that a library may use. If the user has set one, there is no trial."""
WITHOUT_AMX = {ONEDNN_LIMIT: "AVX512_CORE_BF16", MKL_LIMIT: "AVX512_E3"}
_WITHOUT_BFLOAT16 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI")
"""Values of `ONEDNN_MAX_CPU_ISA` without bfloat16 instructions."""

TRIAL: Sequence[str] = (sys.executable, "-m", "streamrl.processor")
TRIAL_SECONDS = 180.0
"""Timeout of the trial, which takes some seconds, mostly to import torch; the machine may be busy."""
FAULTS = frozenset({signal.SIGILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGTRAP, signal.SIGABRT})
"""Signals by which an instruction ends a process; other signals come from users, or from a system out of memory."""
WRONG_NUMBERS = 3
"""Exit code of a trial with wrong results."""


def avoid_broken_instructions(
    *,
    environment: MutableMapping[str, str] = os.environ,
    cpuinfo: str | None = None,
    trial: Sequence[str] = TRIAL,
    cache: Path | None = None,
) -> None:
    """Add limits to `environment` that keep torch from AMX, if it is broken; call it before torch computes.

    `cpuinfo` is the system's description of the processor, `trial` the command of the trial, `cache` the folder of the
    kept result (default: `cache_home`).
    """
    found = _cpuinfo() if cpuinfo is None else cpuinfo
    if not re.search(r"^flags\s*:.*\bamx_tile\b", found, re.MULTILINE):
        return
    if any(environment.get(name) for name in (ONEDNN_LIMIT, MKL_LIMIT)):
        return
    identity = [line for line in found.splitlines() if not line.startswith(("cpu MHz", "bogomips"))]
    made_of = repr((identity, platform.release(), importlib.metadata.version("torch")))
    file = (cache or cache_home()) / f"amx-{hashlib.sha256(made_of.encode()).hexdigest()[:16]}.txt"
    fault = _kept(file)
    if fault is None:
        fault, conclusive = _try(environment, trial)
        if conclusive:
            _keep(file, fault)
    if fault:
        limits = " ".join(f"{name}={value}" for name, value in WITHOUT_AMX.items())
        log.warning("this processor reports AMX, but %s; torch computes with %s", fault, limits)
        environment.update(WITHOUT_AMX)


def bfloat16_is_ruled_out() -> bool:
    """Whether a limit keeps oneDNN from the processor's bfloat16 instructions."""
    return os.environ.get(ONEDNN_LIMIT, "").upper() in _WITHOUT_BFLOAT16


def _cpuinfo() -> str:
    """Return the system's description of the first core; empty if there is no such file."""
    file = Path("/proc/cpuinfo")
    return file.read_text().partition("\n\n")[0] if file.exists() else ""


def _try(environment: MutableMapping[str, str], trial: Sequence[str]) -> tuple[str, bool]:
    """Return the fault of the trial, empty if there is none, and whether the processor is its cause."""
    log.info("trying whether AMX works on this processor (once, some seconds)")
    try:
        done = subprocess.run(
            trial,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TRIAL_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"the trial failed: {error}", False
    if -done.returncode in FAULTS:
        return f"products in bfloat16 end a process by {signal.Signals(-done.returncode).name}", True
    if done.returncode == WRONG_NUMBERS:
        return "products in bfloat16 give wrong numbers", True
    if done.returncode:
        return f"the trial failed with exit code {done.returncode}: {done.stderr.strip()[-300:]}", False
    return "", True


def _kept(file: Path) -> str | None:
    """Return the kept fault; None if there was no trial yet."""
    try:
        return file.read_text()
    except OSError:
        return None


def _keep(file: Path, fault: str) -> None:
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(fault)
        draft.replace(file)
    except OSError as error:
        log.warning("the result of the trial cannot be kept in %s (%s): set STREAMRL_CACHE", file.parent, error)


SHAPES = ((1, 64, 96), (33, 576, 1536), (300, 200, 72))
"""Rows, inputs and outputs of the tested products."""
SECONDS = 1.0
"""Duration of the trial's products, many time slices of a core."""
THREADS = 3
"""Number of threads that share one core, so that the system has to save and restore the tiles of each."""
TOLERANCE = 0.03
"""Relative to the largest entry: several times the rounding error of bfloat16."""


def try_products() -> None:
    """Compute bfloat16 products in threads that share a core. End the process with `WRONG_NUMBERS` if a result is
    wrong."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core dump: an end by a signal is expected here
    core = min(os.sched_getaffinity(0))
    threads = [threading.Thread(target=_multiply, args=(core,)) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _multiply(core: int) -> None:
    """Multiply, differentiate and attend on one core for `SECONDS`, with pauses in which other threads get the
    core."""
    import torch
    import torch.nn.functional as F

    os.sched_setaffinity(0, {core})
    torch.get_num_threads()  # a new thread first takes over the last setting of another thread
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        for rows, inputs, outputs in SHAPES:
            x, y = torch.randn(rows, inputs, generator=generator), torch.randn(outputs, inputs, generator=generator)
            query, key = x[None, None], y[None, None]
            operations: list[tuple[Callable[..., Tensor], list[Tensor]]] = [
                (F.linear, [x, y]),
                (torch.matmul, [y, x.T]),
                (F.scaled_dot_product_attention, [query, key, key]),
            ]
            for function, arguments in operations:
                rounded = [argument.bfloat16() for argument in arguments]
                right = function(*(argument.float() for argument in rounded))
                found = function(*rounded).float()
                if not (found - right).abs().max() <= TOLERANCE * right.abs().max():
                    os._exit(WRONG_NUMBERS)
            time.sleep(0.001)


if __name__ == "__main__":
    try_products()
