"""Which device and number format to compute in when the configuration says `auto`."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from streamrl.config.fields import Device, DType
from streamrl.errors import ConfigError
from streamrl.processor import MKL_LIMIT, ONEDNN_LIMIT, bfloat16_is_ruled_out

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def compute_with(threads: int) -> None:
    """Let torch's operations in the calling thread, and in no other, run on `threads` threads.

    Every thread of a process that uses torch calls this: the one that computes, with as many as it was given; all
    others, with one. OpenMP keeps a team of helpers for each thread that asks for several, and as soon as two such
    teams have more members than there are cores, helpers no longer wait actively for the next operation. Waking them
    for each one costs more than they are worth (benchmarks/bench_engine.py, SmolLM2, one request on two cores: 16
    tokens a second instead of 30).
    """
    torch.get_num_threads()  # in a new thread torch first takes over what another set last; let that be done
    torch.set_num_threads(threads)


def keep_freed_memory() -> None:
    """Have the C library keep large pieces of memory that are freed, for those that are allocated next.

    Otherwise each large tensor is new memory, which the system clears page by page when it is first touched. Works only
    with GNU's C library; a process then stays as large as it once was.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)  # those of other threads are given back as soon as they are empty
        mallopt(_M_MMAP_THRESHOLD, 2**30)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
"""malloc.h: from how many free bytes on the heap shrinks, from which size on a piece is mapped on its own, and how many
heaps there are for the threads."""


def empty_cache(device: torch.device) -> None:
    """Give memory of `device` that torch keeps for later allocations back to the system; a CPU has no such cache."""
    if device.type != "cpu":
        torch.accelerator.empty_cache()


def resolve_device(device: Device, *, index: int = 0, each: int = 1) -> torch.device:
    """Return the device of process `index` of its role; `auto` is CUDA where there is any.

    Processes share the devices round robin. A process that needs several has `each` of them, from the returned one on.
    Raises `ConfigError` where there are too few.
    """
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError('run.device is "cuda" but torch finds no CUDA device; set it to "auto" or "cpu"')
    count = torch.cuda.device_count()
    if count < each:
        raise ConfigError(f"gserver.sglang.tensor_parallel = {each} needs as many CUDA devices; torch finds {count}")
    return torch.device("cuda", index % (count // each) * each)


MULTI_RANK = "NCCL_MULTI_RANK_GPU_ENABLE"
"""NCCL's own variable (2.30 and newer): several ranks of a group may share a GPU."""


def nccl_version() -> tuple[int, int, int]:
    """Return the version of the loaded NCCL; `torch.cuda.nccl.version` returns the one that torch was built with."""
    found = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(found))
    except (OSError, AttributeError):  # torch contains it
        built_with: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        major, minor, patch, *_ = built_with
        return major, minor, patch
    return found.value // 10000, found.value // 100 % 100, found.value % 100


def nccl_ranks() -> int | None:
    """Return the most ranks that one NCCL group may have on this machine; None: any number (`MULTI_RANK`)."""
    if not torch.cuda.is_available():
        return 0
    if os.environ.get(MULTI_RANK) == "1" and nccl_version() >= (2, 30):
        return None
    return torch.cuda.device_count()


def resolve_dtype(dtype: DType, device: torch.device) -> torch.dtype:
    """Return the dtype; `auto` is bfloat16 where the processor has it (CUDA, AVX512-BF16, AMX), else float32."""
    if dtype != "auto":
        return _DTYPES[dtype]
    if device.type == "cuda":
        return torch.bfloat16
    return torch.bfloat16 if processor_has_bfloat16() else torch.float32


def processor_has_bfloat16() -> bool:
    """Return whether the CPU multiplies bfloat16 itself (AVX512-BF16, AMX), as torch's matrix products then do.

    Also False where a trial has shown that it must not be used (`processor.py`).
    """
    if bfloat16_is_ruled_out():
        return False
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def inference_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype in which to compute with weights of `dtype`: float32 for bfloat16 on a CPU that emulates it.

    Emulated matrix products take about three times as long as those in float32 from 32 rows on (measured on an
    AVX512 processor without bfloat16 units, SmolLM2's shapes). Every bfloat16 number is one of float32 too, so
    nothing is lost but memory.
    """
    emulated = device.type == "cpu" and dtype == torch.bfloat16 and not processor_has_bfloat16()
    return torch.float32 if emulated else dtype


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return `array` on `device`. The host does not wait for a GPU: the copy starts from pinned memory and takes its
    turn in the current stream."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cuda" and tensor.numel():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class SideStream:
    """A CUDA stream beside the one that computes, for a thread that reads what that one has written: what one of them
    is given to do does not stand in line behind what the other is. On other devices than CUDA nothing is different."""

    def __init__(self, device: torch.device, *, cuda: Any = torch.cuda) -> None:
        """`cuda`: what stands in for `torch.cuda`, in tests."""
        self._device = device
        self._cuda = cuda
        self._stream: Any = None
        """Made when it is needed first."""

    @contextmanager
    def after_computation(self) -> Iterator[None]:
        """Have what this thread begins run in the side stream, behind what the computation has been given to do up to
        now; at the end, wait until it is done. The computation waits for none of it."""
        if self._device.type != "cuda":
            yield
            return
        self._stream = self._stream or self._cuda.Stream(self._device)
        self._stream.wait_event(self._cuda.default_stream(self._device).record_event())
        with self._cuda.stream(self._stream):
            yield
        self._stream.record_event().synchronize()


def compute_repeatably(device: torch.device) -> None:
    """Have torch choose algorithms that give the same result for the same input. Only on GPUs does it have others.

    To be called before anything is computed. An operation without such an algorithm warns when it is used.
    """
    if device.type != "cuda":
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as torch.use_deterministic_algorithms asks for
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False


def attend_without_plans(device: torch.device) -> None:
    """Have torch's attention on a GPU leave cuDNN aside, which plans anew for each shape that it meets.

    Each decode step, and nearly each micro-batch, has a shape of its own. On an H200 a plan takes 50 to 70 ms forward
    and 130 to 230 with the backward pass, where a model of a billion weights decodes a token in 9 ms; a plan that is
    there gains 5 ms at 16,384 tokens (torch 2.11; docs/scale.md).
    """
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)


def rounding(device: torch.device) -> dict[str, str]:
    """Return what decides, besides the configuration, how numbers are rounded in the calling thread, by name."""
    on_gpu = device.type == "cuda"
    limits = (ONEDNN_LIMIT, MKL_LIMIT, "MKL_CBWR", "ATEN_CPU_CAPABILITY", "CUBLAS_WORKSPACE_CONFIG")
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "processor": _processor_name(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "limits of instructions": " ".join(f"{name}={os.environ[name]}" for name in limits if os.environ.get(name)),
        "threads": str(torch.get_num_threads()),
        "cuda": str(torch.version.cuda) if on_gpu else "",
        **{name: importlib.metadata.version(name) for name in ("torch", "transformers", "numpy", "streamrl")},
    }


def _processor_name() -> str:
    """Return the processor's name as the system has it."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
