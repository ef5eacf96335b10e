"""Keeps torch from instructions that this machine's processor claims and does not have.

Some virtual machines report that the processor has AMX (tiles, for products in bfloat16), and end a process that uses
them by SIGILL, or lose what is in the tiles when the process is switched out. So torch's products are tried once in a
child process (`python -m streamrl.processor`), under each of `LIMITS` in turn until it survives one. The finding is
kept in streamrl's cache, for this processor, kernel and torch. It is put into the environment, where the libraries in
torch (oneDNN, MKL) look for it at their first product, and where child processes find it, too. A processor that claims
no AMX is not tried.
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
"""Environment variables: the newest instructions that a library may use. If the user has set one, nothing is tried."""
LIMITS: Sequence[Mapping[str, str]] = (
    {},
    {ONEDNN_LIMIT: "AVX512_CORE_BF16", MKL_LIMIT: "AVX512_E3"},
    {ONEDNN_LIMIT: "AVX512_CORE", MKL_LIMIT: "AVX512"},
)
"""Everything; bfloat16 without AMX; no instruction for bfloat16 at all, so that `dtype = "auto"` is float32."""
_WITHOUT_BFLOAT16 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI")
"""Values of `ONEDNN_MAX_CPU_ISA`."""

TRIAL: Sequence[str] = (sys.executable, "-m", "streamrl.processor")
TRIAL_SECONDS = 180.0
"""Limit of one trial, which takes some seconds, most of them to import torch; the machine may be busy."""
TRIAL_FORMAT = 1
"""To be changed when the trial tries something else."""
FAULTS = frozenset({signal.SIGILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGTRAP, signal.SIGABRT})
"""Signals by which an instruction ends a process; others come from people, or from a system out of memory."""
WRONG_NUMBERS = 3
"""Exit code of a trial whose products were wrong."""


class Trials(msgspec.Struct, frozen=True):
    """What the trials of one processor have shown."""

    limits: dict[str, str]
    """Environment variables, one of `LIMITS`."""
    reasons: list[str]
    """Why the ones before it were not taken."""


class _Inconclusive(Exception):
    """A trial ended for a reason that says nothing about the processor."""


def avoid_broken_instructions(
    *,
    environment: MutableMapping[str, str] = os.environ,
    cpuinfo: str | None = None,
    trial: Sequence[str] = TRIAL,
    cache: Path | None = None,
) -> None:
    """Put into `environment` what keeps torch from instructions that do not work here, before torch computes.

    `cpuinfo` is what the system says of the processor, `trial` the command that tries it, `cache` the folder where the
    finding is kept (default: `cache_home`).
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
    """Return whether oneDNN is kept from the processor's instructions for bfloat16."""
    return os.environ.get(ONEDNN_LIMIT, "").upper() in _WITHOUT_BFLOAT16


def _cpuinfo() -> str:
    """Return what the system says of the first core; empty where there is no such file."""
    file = Path("/proc/cpuinfo")
    return file.read_text().partition("\n\n")[0] if file.exists() else ""


def _finding(environment: Mapping[str, str], cpuinfo: str, trial: Sequence[str], cache: Path) -> Trials:
    """Return the finding in the cache, which is made first if need be."""
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
    """Return the finding, and whether it may be kept."""
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
    """Return what is wrong with torch's products in `environment`; empty: nothing. Raises `_Inconclusive`."""
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
    """Write `file` at once or not at all."""
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    draft.write_bytes(msgspec.json.format(msgspec.json.encode(finding)))
    draft.replace(file)


SHAPES = ((1, 64, 96), (33, 576, 1536), (300, 200, 72))
"""Rows, inputs and outputs of the products that are tried."""
ALONE_SECONDS, TOGETHER_SECONDS = 0.05, 1.0
"""How long each product is tried alone, and all of them in threads that share a core: many time slices."""
THREADS = 3
"""How many share one core, so that the system has to save and restore the tiles of each."""
TOLERANCE = 0.03
"""Relative to the largest entry: several times what rounding to bfloat16 does."""


class Product(NamedTuple):
    """Something that is tried, in bfloat16."""

    name: str
    function: Callable[..., Tensor]
    arguments: tuple[Any, ...]
    right: Tensor
    """The right result, computed in float32 from the same numbers."""


def try_products() -> None:
    """Compute in this process what trainer and embedded engine compute, and print the name of each part before it.

    Ends the process with `WRONG_NUMBERS` if something comes out wrong. Whatever ends it earlier is a finding, too.
    """
    import torch

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # an end by a signal is no accident here
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
    """Repeat `products` on one core; called in a thread of its own."""
    import torch

    os.sched_setaffinity(0, {core})
    torch.get_num_threads()  # in a new thread torch first takes over what another set last
    torch.set_num_threads(1)
    _repeat(products, TOGETHER_SECONDS)


def _repeat(products: Sequence[Product], seconds: float) -> None:
    """Compute each in turn for `seconds`, with breaks in which others get the core."""
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
