"""What the engine computes in C (`SOURCES`), compiled when one first starts (`native.py`).

Where it cannot be compiled, or what the compiler makes does not compute what torch computes, torch does it, and the
log says so.
"""

from __future__ import annotations

import ctypes
import logging
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from streamrl.gserver.embedded.architecture import Architecture, Rope
from streamrl.gserver.embedded.kernels import Attend, Kernels, Piece, TorchKernels, Turn, rotation_table
from streamrl.native import Unavailable, compiled

log = logging.getLogger(__name__)

SOURCES = [Path(__file__).with_name(name) for name in ("kernels.c", "products.c", "sampling.c")]
HEADER = Path(__file__).with_name("numbers.h")
HEAD_DIMS = (32, 64, 96, 128, 256)
"""For which there is code."""
FORMATS: dict[torch.dtype, Sequence[str]] = {torch.float32: (), torch.bfloat16: ("-DBFLOAT16",)}
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Relative to the largest entry."""

_P, _I, _FLOAT, _THREADS = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
_ARGUMENTS = {
    "attend_tokens": (_P, _I, _P, _I, _I, _P, _P, _P, _I, _I, _I, _I, _FLOAT, _THREADS),
    "draw": (_P, _I, _I, _P, _P, _P, _P, _THREADS),
    "gated_product": (_P, _I, _I, _P, _P, _I, _P, _THREADS),
    "pack": (_P, _P, _I, _I, _THREADS),
    "packed_numbers": (_I, _I),
    "product": (_P, _I, _I, _P, _I, _P, _P, _P, _THREADS),
    "rms_norm": (_P, _P, _P, _I, _I, _FLOAT, _THREADS),
    "rotate_and_keep": (_P, _I, _I, _I, _I, _P, _I, _P, _P, _P, _I, _THREADS),
    "silu_times": (_P, _P, _I, _I, _THREADS),
}
_ANSWERS = {"packed_numbers": _I}


class CompiledKernels:
    """`Kernels` on a CPU, with as many threads as torch has in the calling one."""

    def __init__(
        self, library: ctypes.CDLL, architecture: Architecture, *, max_length: int, dtype: torch.dtype
    ) -> None:
        self._library = library
        self._a = architecture
        self._rotation = rotation_table(architecture, max_length).to(dtype)

    def rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        x, out, width = x.contiguous(), torch.empty(x.shape, dtype=x.dtype), x.shape[-1]
        self._library.rms_norm(
            *(x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // width, width),
            *(self._a.rms_norm_eps, torch.get_num_threads()),
        )
        return out

    def silu_times(self, gate_up: Tensor) -> Tensor:
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty(rows, width, dtype=gate_up.dtype)
        self._library.silu_times(gate_up.data_ptr(), out.data_ptr(), rows, width, torch.get_num_threads())
        return out

    def turn(self, positions: Tensor, rows: Tensor) -> Turn:
        a, rotation = self._a, self._rotation
        heads, threads = a.heads + 2 * a.kv_heads, torch.get_num_threads()
        positions, rows = positions.contiguous(), rows.contiguous()

        def turn(qkv: Tensor, layer: Tensor) -> None:
            self._library.rotate_and_keep(
                *(qkv.data_ptr(), heads, a.heads + a.kv_heads, 2 * a.kv_heads, a.head_dim),
                *(rotation.data_ptr(), rotation.shape[1], positions.data_ptr()),
                *(layer.data_ptr(), rows.data_ptr(), len(qkv), threads),
            )

        return turn

    def attend(self, slots: Tensor, positions: Tensor, pieces: Sequence[Piece]) -> Attend:
        a, tokens, threads = self._a, len(slots), torch.get_num_threads()
        slots, positions = slots.contiguous(), positions.contiguous()

        def attend(qkv: Tensor, layer: Tensor) -> Tensor:
            out = torch.empty(tokens, a.heads * a.head_dim, dtype=qkv.dtype)
            self._library.attend_tokens(
                *(qkv.data_ptr(), qkv.stride(0), layer.data_ptr(), layer.stride(0), layer.stride(1)),
                *(slots.data_ptr(), positions.data_ptr(), out.data_ptr(), tokens),
                *(a.heads, a.kv_heads, a.head_dim, a.head_dim**-0.5, threads),
            )
            return out

        return attend


def kernels_for(
    architecture: Architecture,
    *,
    max_length: int,
    dtype: torch.dtype,
    device: torch.device,
    copies_cache: bool = False,
) -> Kernels:
    """Compiled ones where they can be had, else torch's; `copies_cache`: for these."""
    library = None
    if device.type == "cpu" and dtype in FORMATS and architecture.head_dim in HEAD_DIMS:
        library = library_for(dtype)
    if library is None:
        return TorchKernels(architecture, max_length=max_length, dtype=dtype, device=device, copies_cache=copies_cache)
    return CompiledKernels(library, architecture, max_length=max_length, dtype=dtype)


@cache
def library_for(dtype: torch.dtype) -> ctypes.CDLL | None:
    """The functions of the C files for `dtype`, compiled first if need be; None: they cannot be had here."""
    try:
        options = (*FORMATS[dtype], "-fopenmp", _openmp())
        library = ctypes.CDLL(str(compiled(SOURCES, headers=[HEADER], options=options)))
        for name, arguments in _ARGUMENTS.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, _ANSWERS.get(name)
        _check(library, dtype)
    except (Unavailable, OSError) as reason:
        log.warning("the engine does without what is compiled for this processor, which is slower: %s", reason)
        return None
    return library


def _openmp() -> str:
    """The OpenMP library that torch has loaded: with another one, the threads of the two would wait for each other."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        found = re.search(r"(/.*/lib(gomp|iomp5|omp)\b[^/]*\.so[^/]*)$", line)
        if found:
            return found[1]
    raise Unavailable("torch has no OpenMP library loaded")


def _check(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    """Raise `Unavailable` unless `library` computes on random numbers what torch does."""
    a = _TRIED
    generator = torch.Generator().manual_seed(0)
    torchs = TorchKernels(a, max_length=256, dtype=torch.float32, device=torch.device("cpu"))
    ours = CompiledKernels(library, a, max_length=256, dtype=dtype)
    qkv = torch.randn(3, a.heads + 2 * a.kv_heads, a.head_dim, generator=generator).to(dtype)
    layer = torch.randn(3, 200, 2 * a.kv_heads, a.head_dim, generator=generator).to(dtype)
    x, weight = torch.randn(7, 198, generator=generator).to(dtype), torch.randn(198, generator=generator).to(dtype)
    slots, positions, rows = torch.arange(3), torch.tensor([0, 69, 199]), torch.tensor([0, 269, 599])
    pieces = [Piece(slot, position, 1) for slot, position in zip(range(3), (0, 69, 199), strict=True)]
    found: list[list[Tensor]] = []
    for kernels, to in ((torchs, torch.float32), (ours, dtype)):
        turned, cache = qkv.to(to, copy=True), layer.to(to, copy=True)
        kernels.turn(positions, rows)(turned, cache)
        attended = kernels.attend(slots, positions, pieces)(turned, cache)
        found.append([turned, cache, attended, kernels.rms_norm(x.to(to), weight.to(to)), kernels.silu_times(x.to(to))])
    logits, uniforms = torch.randn(3, 700, generator=generator).to(dtype), torch.tensor([0.0, 0.4, 0.999]).double()
    tokens, shares, scales = torch.empty(3, dtype=torch.int64), torch.empty(3, dtype=torch.float64), torch.ones(3)
    library.draw(
        *(logits.data_ptr(), 3, 700, scales.data_ptr(), uniforms.data_ptr(), tokens.data_ptr(), shares.data_ptr(), 1)
    )
    softmax = logits.double().softmax(-1)
    drawn = (softmax.cumsum(-1) > uniforms[:, None]).int().argmax(-1, keepdim=True)
    found[0].append(softmax.gather(1, drawn)[:, 0])
    found[1].append(shares)
    for what, expected, got in zip(("turn", "cache", "attention", "norm", "silu", "draw"), *found, strict=True):
        worst = (expected - got).abs().max().item()
        if not worst <= _TOLERANCE[dtype] * expected.abs().max().item():
            raise Unavailable(f"what the compiler has made is wrong: {what} is off by {worst:g}")


_TRIED = Architecture(
    vocab_size=8,
    hidden_size=64,
    intermediate_size=64,
    layers=1,
    heads=4,
    kv_heads=2,
    head_dim=32,
    rms_norm_eps=1e-5,
    rope=Rope(theta=10000.0),
    max_position=256,
    tied=True,
    qkv_bias=False,
    o_bias=False,
    qk_norm=False,
    eos_token_ids=frozenset(),
)
