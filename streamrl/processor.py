"""Keeps torch from using instructions that this machine's processor reports but does not support.

Some virtual machines report AMX (tiles, for matrix products in bfloat16), but end a process that uses it by SIGILL, or
lose the content of the tiles when the process is switched out. So torch's products are tried once in a child process
(`python -m streamrl.processor`), under each of `LIMITS` in turn until the process survives. The result is kept in
streamrl's cache, for this processor, kernel and torch version. It is put into the environment, where torch's libraries
(oneDNN, MKL) read it at their first product, and child processes inherit it. A processor that does not report AMX is
not tried.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import itertools
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
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from streamrl.local_cache import cache_home, making

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

ONEDNN_LIMIT, MKL_LIMIT = "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS"
"""Environment variables: the newest instructions that a library may use. If the user has set one, there is no trial."""
LIMITS: Sequence[Mapping[str, str]] = (
    {},
    {ONEDNN_LIMIT: "AVX512_CORE_BF16", MKL_LIMIT: "AVX512_E3"},
    {ONEDNN_LIMIT: "AVX512_CORE", MKL_LIMIT: "AVX512"},
)
"""No limit; bfloat16 without AMX; no bfloat16 instructions at all, so that `dtype = "auto"` is float32."""
_WITHOUT_BFLOAT16 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI")
"""Values of `ONEDNN_MAX_CPU_ISA` without bfloat16 instructions."""

TRIAL: Sequence[str] = (sys.executable, "-m", "streamrl.processor")
TRIAL_SECONDS = 180.0
"""Timeout of one trial, which takes some seconds, mostly to import torch; the machine may be busy."""
TRIAL_FORMAT = 1
"""Increase it when the trial changes."""
FAULTS = frozenset({signal.SIGILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGTRAP, signal.SIGABRT})
"""Signals by which an instruction ends a process; other signals come from users, or from a system out of memory."""
WRONG_NUMBERS = 3
"""Exit code of a trial with wrong results."""


class Trials(msgspec.Struct, frozen=True):
    """Result of the trials of one processor."""

    limits: dict[str, str]
    """Environment variables to set, one of `LIMITS`."""
    reasons: list[str]
    """Why the earlier `LIMITS` failed."""


class _Inconclusive(Exception):
    """A trial ended for a reason unrelated to the processor."""


def avoid_broken_instructions(
    *,
    environment: MutableMapping[str, str] = os.environ,
    cpuinfo: str | None = None,
    trial: Sequence[str] = TRIAL,
    cache: Path | None = None,
) -> None:
    """Add the limits to `environment` that keep torch from broken instructions; call it before torch computes.

    `cpuinfo` is the system's description of the processor, `trial` the command of a trial, `cache` the folder of the
    kept results (default: `cache_home`).
    """
    told = _cpuinfo() if cpuinfo is None else cpuinfo
    if not re.search(r"^flags\s*:.*\bamx_tile\b", told, re.MULTILINE):
        return
    if any(environment.get(name) for name in (ONEDNN_LIMIT, MKL_LIMIT)):
        return
    finding = _finding(environment, told, trial, cache or cache_home())
    if finding.limits:
        log.warning(
            "this processor claims AMX, but %s; so torch computes with %s%s",
            "; ".join(finding.reasons),
            " ".join(f"{name}={value}" for name, value in finding.limits.items()),
            ', and dtype = "auto" is float32' if finding.limits == LIMITS[-1] else "",
        )
    environment.update(finding.limits)


def bfloat16_is_ruled_out() -> bool:
    """Whether a limit keeps oneDNN from the processor's bfloat16 instructions."""
    return os.environ.get(ONEDNN_LIMIT, "").upper() in _WITHOUT_BFLOAT16


def _cpuinfo() -> str:
    """Return the system's description of the first core; empty if there is no such file."""
    file = Path("/proc/cpuinfo")
    return file.read_text().partition("\n\n")[0] if file.exists() else ""


def _finding(environment: Mapping[str, str], cpuinfo: str, trial: Sequence[str], cache: Path) -> Trials:
    """Return the result in the cache; run the trials first if it is missing."""
    identity = [line for line in cpuinfo.splitlines() if not line.startswith(("cpu MHz", "bogomips"))]
    made_of = (TRIAL_FORMAT, identity, platform.release(), importlib.metadata.version("torch"))
    file = cache / f"processor-{hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]}.json"
    if found := _read(file):
        return found
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with making(file):
            found = _read(file)
            if found is None:
                found, conclusive = _try_all(environment, trial)
                if conclusive:
                    _write(file, found)
            return found
    except OSError as error:
        log.warning("what the processor can do cannot be kept in %s (%s): set STREAMRL_CACHE", cache, error)
        return _try_all(environment, trial)[0]


def _try_all(environment: Mapping[str, str], trial: Sequence[str]) -> tuple[Trials, bool]:
    """Return the result of the trials, and whether it may be kept in the cache."""
    log.info("trying whether this processor can do what it claims (once, some seconds)")
    reasons: list[str] = []
    for limits in LIMITS[:-1]:
        try:
            reason = _try({**environment, **limits}, trial)
        except _Inconclusive as error:
            return Trials(
                dict(limits or LIMITS[1]), [*reasons, f"whether that works could not be tried: {error}"]
            ), False
        if not reason:
            return Trials(dict(limits), reasons), True
        reasons.append(f"{'without AMX ' if limits else ''}{reason}")
    return Trials(dict(LIMITS[-1]), reasons), True


def _try(environment: Mapping[str, str], trial: Sequence[str]) -> str:
    """Return the fault of torch's products in `environment`; empty if they work. Raises `_Inconclusive`."""
    try:
        done = subprocess.run(
            trial,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TRIAL_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _Inconclusive(str(error)) from error
    doing = (done.stdout.splitlines() or ["the import of torch"])[-1]
    if -done.returncode in FAULTS:
        return f"{doing} ends a process by {signal.Signals(-done.returncode).name}"
    if done.returncode == WRONG_NUMBERS:
        return f"{doing} gives wrong numbers"
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise _Inconclusive(f"exit code {done.returncode} during {doing}: {said}")
    return ""


def _read(file: Path) -> Trials | None:
    try:
        return msgspec.json.decode(file.read_bytes(), type=Trials)
    except (OSError, msgspec.DecodeError):
        return None


def _write(file: Path, finding: Trials) -> None:
    """Write `file` atomically."""
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    draft.write_bytes(msgspec.json.format(msgspec.json.encode(finding)))
    draft.replace(file)


SHAPES = ((1, 64, 96), (33, 576, 1536), (300, 200, 72))
"""Rows, inputs and outputs of the tested products."""
ALONE_SECONDS, TOGETHER_SECONDS = 0.05, 1.0
"""Duration of the test of each product alone, and of all in threads that share a core, which takes many time slices."""
THREADS = 3
"""Number of threads that share one core, so that the system has to save and restore the tiles of each."""
TOLERANCE = 0.03
"""Relative to the largest entry: several times the rounding error of bfloat16."""


class Product(NamedTuple):
    """A tested operation, in bfloat16."""

    name: str
    function: Callable[..., Tensor]
    arguments: tuple[Any, ...]
    right: Tensor
    """The expected result, computed in float32 from the same numbers."""


def try_products() -> None:
    """Run the operations of trainer and embedded engine in this process, and print the name of each before it starts.

    Ends the process with `WRONG_NUMBERS` if a result is wrong. A process that ends earlier is a result of the trial,
    too.
    """
    import torch

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core dump: an end by a signal is expected here
    products = _products()
    cores = sorted(os.sched_getaffinity(0))
    for threads in sorted({1, min(len(cores), 4)}):
        torch.set_num_threads(threads)
        for product in products:
            _say(f"{product.name} with {threads} threads" if threads > 1 else product.name)
            _repeat([product], ALONE_SECONDS)
    _say("computing in threads that share a core")
    together = [threading.Thread(target=_repeat_on, args=(cores[0], products)) for _ in range(THREADS)]
    for thread in together:
        thread.start()
    for thread in together:
        thread.join()


def _say(what: str) -> None:
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


def _repeat_on(core: int, products: Sequence[Product]) -> None:
    """Repeat `products` on one core; called in its own thread."""
    import torch

    os.sched_setaffinity(0, {core})
    torch.get_num_threads()  # a new thread first takes over the last setting of another thread
    torch.set_num_threads(1)
    _repeat(products, TOGETHER_SECONDS)


def _repeat(products: Sequence[Product], seconds: float) -> None:
    """Compute each in turn for `seconds`, with pauses in which other threads get the core."""
    until = time.monotonic() + seconds
    for count, product in enumerate(itertools.cycle(products)):
        if count > len(products) and time.monotonic() > until:
            return
        found = product.function(*product.arguments)
        if not (found.float() - product.right).abs().max() <= TOLERANCE * product.right.abs().max():
            os._exit(WRONG_NUMBERS)
        if count % 4:
            os.sched_yield()
        else:
            time.sleep(0.001)


def _products() -> list[Product]:
    import torch
    import torch.nn.functional as F

    generator = torch.Generator().manual_seed(0)
    packs = hasattr(torch.ops.mkldnn, "_linear_pointwise") and torch.ops.mkldnn._is_mkldnn_bf16_supported()

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    found = []
    for rows, inputs, outputs in SHAPES:
        x, weight, gradient = drawn(rows, inputs), drawn(outputs, inputs), drawn(rows, outputs)
        size = f"of {rows} x {inputs} and {inputs} x {outputs} in bfloat16"
        right = F.linear(x.float(), weight.float())
        found.append(Product(f"a product {size}", F.linear, (x, weight), right))
        gradients = gradient.float().T @ x.float()
        found.append(Product(f"the gradient of a product {size}", torch.matmul, (gradient.T, x), gradients))
        if packs:
            packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
            arguments: tuple[Any, ...] = (x, packed, None, "none", [], "")
            function = torch.ops.mkldnn._linear_pointwise.default
            found.append(Product(f"a packed product {size}", function, arguments, right))
    query, key, value = (drawn(1, 2, 300, 64) for _ in range(3))
    attend = functools.partial(F.scaled_dot_product_attention, is_causal=True)
    right = attend(query.float(), key.float(), value.float())
    found.append(Product("attention in bfloat16", attend, (query, key, value), right))
    batch, other = drawn(3, 40, 64), drawn(3, 64, 50)
    right = torch.bmm(batch.float(), other.float())
    found.append(Product("a batch of products in bfloat16", torch.bmm, (batch, other), right))
    return found


if __name__ == "__main__":
    try_products()
