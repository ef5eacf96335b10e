"""Device and number format of computations, also if the configuration sets `auto`."""

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
    """Have torch's operations in the calling thread, and in no other, run on `threads` threads.

    Every thread of a process that uses torch calls this: the computing thread with its number of threads, all other
    threads with 1. OpenMP keeps a team of helpers for each thread that uses several. As soon as two such teams have
    more members than there are cores, helpers no longer wait actively for the next operation. Waking them for each
    operation costs more than they save (benchmarks/bench_engine.py, SmolLM2, one request on two cores: 16 tokens a
    second instead of 30).
    """
    torch.get_num_threads()  # a new thread first takes over the last setting of another thread; do that before
    torch.set_num_threads(threads)


def keep_freed_memory() -> None:
    """Have the C library keep large pieces of freed memory for later allocations.

    Otherwise each large tensor is new memory, which the system clears page by page at first use. Works only with GNU's
    C library; a process then never shrinks below its largest size.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)  # arenas of other threads are returned to the system as soon as they are empty
        mallopt(_M_MMAP_THRESHOLD, 2**30)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
"""malloc.h: free bytes at which the heap shrinks, size from which a piece is mapped on its own, and the number of heaps
for the threads."""


def empty_cache(device: torch.device) -> None:
    """Release torch's cached memory of `device` to the system; a CPU has no such cache."""
    if device.type != "cpu":
        torch.accelerator.empty_cache()


def resolve_device(device: Device, *, index: int = 0, each: int = 1) -> torch.device:
    """Return the device of process `index` of its role; `auto` is CUDA if available.

    Processes share the devices round robin. A process that needs several has `each` devices, from the returned one on.
    Raises `ConfigError` if there are too few.
    """
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError('run.device is "cuda" but torch finds no CUDA device; set it to "auto" or "cpu"')
    count = torch.cuda.device_count()
    if count < each:
        raise ConfigError(f"gserver.sglang.tensor_parallel = {each} needs as many CUDA devices; torch finds {count}")
    return torch.device("cuda", index % (count // each) * each)


def resolve_dtype(dtype: DType, device: torch.device) -> torch.dtype:
    """Return the dtype; `auto` is bfloat16 if the processor supports it (CUDA, AVX512-BF16, AMX), else float32."""
    if dtype != "auto":
        return _DTYPES[dtype]
    if device.type == "cuda":
        return torch.bfloat16
    return torch.bfloat16 if processor_has_bfloat16() else torch.float32


def processor_has_bfloat16() -> bool:
    """Whether the CPU multiplies bfloat16 itself (AVX512-BF16, AMX), as torch's matrix products then do.

    Also False if a trial has shown that these instructions do not work (`processor.py`).
    """
    if bfloat16_is_ruled_out():
        return False
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def inference_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype in which to compute with weights of `dtype`: float32 for bfloat16 on a CPU that emulates it.

    Emulated matrix products take about three times as long as float32 ones from 32 rows on (measured on an AVX512
    processor without bfloat16 units, with SmolLM2's shapes). Every bfloat16 number is also a float32 number, so the
    only cost is memory.
    """
    emulated = device.type == "cpu" and dtype == torch.bfloat16 and not processor_has_bfloat16()
    return torch.float32 if emulated else dtype


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return `array` on `device`. The host does not wait for a GPU: the copy starts from pinned memory and is queued in
    the current stream."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cuda" and tensor.numel():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class SideStream:
    """A side CUDA stream for a thread that reads results of the compute stream. Work on one stream does not queue
    behind the other. On devices other than CUDA it has no effect."""

    def __init__(self, device: torch.device, *, cuda: Any = torch.cuda) -> None:
        """`cuda`: replacement for `torch.cuda` in tests."""
        self._device = device
        self._cuda = cuda
        self._stream: Any = None
        """Created at first use."""

    @contextmanager
    def after_computation(self) -> Iterator[None]:
        """Run this thread's work in the side stream, after the work that is queued in the compute stream now; at the
        end, wait for it. The compute stream does not wait."""
        if self._device.type != "cuda":
            yield
            return
        self._stream = self._stream or self._cuda.Stream(self._device)
        self._stream.wait_event(self._cuda.default_stream(self._device).record_event())
        with self._cuda.stream(self._stream):
            yield
        self._stream.record_event().synchronize()


def compute_repeatably(device: torch.device) -> None:
    """Have torch choose algorithms that give the same result for the same input. Only GPUs have other ones.

    Call it before any computation. An operation without such an algorithm logs a warning when it is used.
    """
    if device.type != "cuda":
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required by torch.use_deterministic_algorithms
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False


def attend_without_plans(device: torch.device) -> None:
    """Keep torch's attention on a GPU from using cuDNN, which makes a new plan for each shape.

    Each decode step, and nearly each micro-batch, has a new shape. On an H200 a plan takes 50 to 70 ms for the forward
    pass and 130 to 230 ms with the backward pass, while a model of a billion weights decodes a token in 9 ms; an
    existing plan saves 5 ms at 16,384 tokens (torch 2.11).
    """
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)


def rounding(device: torch.device) -> dict[str, str]:
    """Return all factors, by name, that decide rounding in the calling thread in addition to the configuration."""
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
    """Return the processor's name as the system reports it."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
