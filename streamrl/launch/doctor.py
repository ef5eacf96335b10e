"""`streamrl doctor`: a check of this machine for all that streamrl can use, with remedies.

Reads and changes nothing: no server is started, and no file is written but a trial one that is removed. Checks that
need torch run in a child process, which may be slow, hang or crash without affecting the others. Invariant: every line
states whether its item is present, and has a remedy if it is not.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import msgspec
import psutil
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from streamrl.disk import cache_home
from streamrl.launch.processes import visible_gpus
from streamrl.machine import SHARED_MEMORY
from streamrl.planner.shapes import peak_of
from streamrl.transport.addresses import LOOPBACK, LOOPBACK_IPV6, is_loopback

TORCH_SECONDS = 60.0
"""Longest time of the child process that imports torch; the import takes some seconds, more on a busy machine."""
PROGRAM_SECONDS = 20.0
CACHE_GIB, SHARED_GIB, MEMORY_GIB = 5.0, 1.0, 4.0
"""Free space in GiB below which a line is not ok: for models and compiled libraries, for the weights of small models,
and for a small run."""
OPEN_FILES = 4096
CGROUP = Path("/sys/fs/cgroup")
GIB = 2**30

ASK_TORCH = "from streamrl.launch import doctor; print(doctor.as_json(list(doctor.torch_lines())))"


class DoctorLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the report."""

    name: str
    ok: bool
    found: str
    """The item's state on this machine, in words."""
    do: str = ""
    """The remedy if it is not ok, or the use of an optional item."""
    needed: bool = False
    """Whether streamrl cannot work without it."""


def _line(name: str, found: str, do: str = "", *, needed: bool = False) -> DoctorLine:
    """Return a line, which is ok if there is nothing to `do`."""
    return DoctorLine(name=name, ok=not do, found=found, do=do, needed=needed)


def examine(*, environment: Mapping[str, str] = os.environ) -> list[DoctorLine]:
    """Check this machine; takes as long as importing torch."""
    with subprocess.Popen(
        [sys.executable, "-c", ASK_TORCH],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**environment},
    ) as asking:
        try:
            here = [
                _python(),
                *processors(),
                *memory(),
                shared_memory(),
                *compilers(environment),
                *packages(),
                *network(),
                open_files(),
                *folders(),
            ]
            of_torch = _torch_lines(asking)
        finally:
            asking.kill()
    return [*here[:1], *of_torch, *here[1:]]


def shown(findings: Sequence[DoctorLine]) -> Table:
    """Return the findings for people."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("what", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("found", overflow="fold")
    table.add_column("what to do", overflow="fold")
    for one in findings:
        state, style = ("ok", "green") if one.ok else ("missing", "red" if one.needed else "yellow")
        table.add_row(one.name, Text(state, style=style), Text(one.found), Text(one.do))
    return table


def as_json(findings: Sequence[DoctorLine]) -> str:
    return msgspec.json.format(msgspec.json.encode(findings), indent=2).decode()


# --- torch and GPUs ------------------------------------------------------------------------------


def _torch_lines(asking: subprocess.Popen[str]) -> list[DoctorLine]:
    """Return the lines that the child process prints, or one with the reason for their lack."""
    problem = f"it did not answer within {TORCH_SECONDS:.0f} s"
    try:
        out, err = asking.communicate(timeout=TORCH_SECONDS)
        return msgspec.json.decode(out, type=list[DoctorLine])
    except subprocess.TimeoutExpired:
        pass
    except msgspec.MsgspecError:
        problem = (err.strip().splitlines() or [f"it ended with exit code {asking.returncode}"])[-1]
    do = "pip install -c constraints.txt torch; or repair its libraries"
    return [_line("torch", f"cannot be imported: {problem}", do, needed=True)]


def torch_lines() -> Iterator[DoctorLine]:
    """Yield lines on torch, its devices and its communication."""
    import torch

    gpus, cuda, hip = visible_gpus(), torch.version.cuda, torch.version.hip
    count, gloo = torch.cuda.device_count(), torch.distributed.is_gloo_available()
    built = f"for CUDA {cuda}" if cuda else f"for ROCm {hip}" if hip else "for CPUs only"
    build_is_wrong = bool(gpus) and not cuda and not hip
    do = "this machine has GPUs: install a build of torch with CUDA (pytorch.org)" if build_is_wrong else ""
    yield _line("torch", f"{torch.__version__}, {built}", do)
    if not count:
        do = "runs use the CPU"
        if gpus and cuda:
            do = "the machine has GPUs that torch cannot use: look at nvidia-smi, CUDA_VISIBLE_DEVICES and the driver"
        yield _line("CUDA devices", "none", do)
    for index in range(count):
        device, (free, _) = torch.cuda.get_device_properties(index), torch.cuda.mem_get_info(index)
        peak = peak_of(device.name)
        speed = f", {peak.tflops:,.0f} TFLOPS in bfloat16, {peak.memory_tb_s:g} TB/s" if peak else ", peak unknown"
        size = f"{device.total_memory / GIB:.0f} GiB ({free / GIB:.0f} free)"
        found = f"{device.name}, {size}, compute capability {device.major}.{device.minor}{speed}"
        do = "other processes hold its memory (nvidia-smi)" if free < 0.9 * device.total_memory else ""
        yield _line(f"CUDA device {index}", found, do)
    if count:
        yield _python_headers()
        there = torch.distributed.is_nccl_available()
        nccl = ".".join(map(str, torch.cuda.nccl.version())) if there else ""  # type: ignore[no-untyped-call]
        do = "" if nccl else "install a build of torch with NCCL; else weights go over gloo"
        yield _line("NCCL", nccl or "not in this build of torch", do)
    if count > 1:
        direct = all(torch.cuda.can_device_access_peer(a, b) for a in range(count) for b in range(count) if a != b)
        do = "" if direct else "NCCL goes through host memory there: slower tensor parallelism"
        yield _line("peer access", "between all devices" if direct else "not between all devices", do)
    do = "" if gloo else "several model workers on CPUs, and broadcasts between CPUs, need it"
    yield _line("gloo", "in torch" if gloo else "not in this build of torch", do)


def _python_headers() -> DoctorLine:
    """Check for the headers with which Triton compiles kernel launchers, for shared-prefix attention on GPUs."""
    header = Path(sysconfig.get_path("include"), "Python.h")
    if header.is_file():
        return _line("headers of Python", str(header))
    do = "training on GPUs compiles kernels with them: install python3-dev (or python3-devel)"
    return _line("headers of Python", f"no {header}", do)


# --- the machine ---------------------------------------------------------------------------------


def _python() -> DoctorLine:
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    do = "" if sys.version_info >= (3, 11) else "streamrl needs 3.11 or newer"
    return _line("Python", found, do, needed=True)


def processors(*, cpuinfo: Path = Path("/proc/cpuinfo"), cgroup: Path = CGROUP) -> Iterator[DoctorLine]:
    """Check the number of CPUs that this process may use, their model, and whether they multiply bfloat16."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    named = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    words = flags[1].split() if flags else []
    limit = _cgroup_cpus(cgroup)
    usable = min(allowed, limit) if limit else allowed
    share = f", limited to {limit:g} by the container" if limit and limit < allowed else ""
    model = named[1] if named else platform.processor() or "unknown"
    do = "two or more let generation and training run at the same time" if usable < 2 else ""
    yield _line("CPUs", f"{allowed} of {os.cpu_count()}{share}: {model}", do)
    units = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in words]
    fast = "avx512_bf16" in units or "amx_bf16" in units
    do = "" if fast else "computed in float32 on this CPU, which `auto` does by itself"
    yield _line("bfloat16 on CPUs", ", ".join(units) or "no known vector units", do)


def _cgroup_cpus(cgroup: Path) -> float | None:
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def memory(*, cgroup: Path = CGROUP) -> Iterator[DoctorLine]:
    """Check the memory that is free for this process."""
    seen = psutil.virtual_memory()
    total, free, by = seen.total, seen.available, ""
    try:
        limit = int((cgroup / "memory.max").read_text())
        # Cached file contents count as used, but are freed on demand.
        files = re.search(r"^inactive_file (\d+)$", (cgroup / "memory.stat").read_text(), re.MULTILINE)
        used = int((cgroup / "memory.current").read_text()) - (int(files[1]) if files else 0)
        if limit < total:
            total, free, by = limit, min(free, limit - used), " (limited by the container)"
    except (OSError, ValueError):  # no limit, or another system
        pass
    do = "" if free >= MEMORY_GIB * GIB else f"a small run takes up to {MEMORY_GIB:g} GiB: end other programs"
    yield _line("memory", f"{total / GIB:.1f} GiB{by}, {free / GIB:.1f} free", do)


def shared_memory(*, folder: Path = SHARED_MEMORY) -> DoctorLine:
    """Check for room in shared memory: for weights sent to gservers of this machine, and for NCCL and SGLang."""
    try:
        seen = shutil.disk_usage(folder)
    except OSError:
        return _line("shared memory", f"no {folder}", "weights are broadcast instead")
    do = "larger models are broadcast instead; in a container: docker run --shm-size=16g, or --ipc=host"
    found = f"{folder}: {seen.total / GIB:.1f} GiB, {seen.free / GIB:.1f} free"
    return _line("shared memory", found, "" if seen.free >= SHARED_GIB * GIB else do)


def compilers(environment: Mapping[str, str]) -> Iterator[DoctorLine]:
    """Check for a C compiler, used for streamrl's own kernels on CPUs."""
    wanted = environment.get("CC", "").split() or ["cc"]
    program = shutil.which(wanted[0])
    off = environment.get("STREAMRL_NATIVE") == "0"
    version = _first_line([program, "--version"]) if program else ""
    failed = _failed_libraries(cache_home())
    do = ""
    if program is None:
        do = "generation on CPUs is slower without one: install gcc, or name one in CC"
    elif off:
        do = "STREAMRL_NATIVE=0 switches it off"
    elif failed:
        do = f"it failed once, which is remembered: remove {failed[-1]} to try again"
    yield _line("C compiler", version or program or f"no {wanted[0]}", do)


def _failed_libraries(cache: Path) -> list[Path]:
    """Return the records of failed compilations, except those followed by a successful one of the same source."""

    def compiled_since(note: Path) -> bool:
        source = note.stem.partition("-")[0]
        return any(made.stat().st_mtime > note.stat().st_mtime for made in cache.glob(f"{source}-*.so"))

    return [note for note in sorted(cache.glob("*.failed")) if not compiled_since(note)]


def _first_line(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return (done.stdout.strip().splitlines() or [""])[0]


def packages() -> Iterator[DoctorLine]:
    """Check for packages, most of them optional."""
    for package, module, what in (
        ("transformers", "transformers", "pip install -e . installs it; nothing is trained without it"),
        ("sglang", "sglang", 'pip install "streamrl[sglang]", or an environment of its own: gserver.sglang.python'),
        ("vllm", "vllm", "an environment of its own: gserver.vllm.python"),
        ("megatron-core", "megatron", 'pip install "streamrl[megatron]"; tensor and pipeline parallelism need it'),
        ("transformer-engine", "transformer_engine", "Megatron is faster with it on GPUs"),
        ("triton", "triton", "comes with torch for CUDA; compiled kernels on GPUs need it"),
        ("ray", "ray", 'pip install "streamrl[ray]"; only for streamrl launch ray'),
        ("renderers", "renderers", 'pip install "streamrl[agents]"; only for agents'),
        ("reasoning-gym", "reasoning_gym", 'pip install "streamrl[rewards]"; only for its tasks'),
    ):
        if find_spec(module) is None:
            yield _line(package, "not installed", what, needed=package == "transformers")
            continue
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            version = "of unknown version"
        yield _line(package, version)


def network() -> Iterator[DoctorLine]:
    """Check whether servers can listen, and list the addresses by which other machines could reach them."""
    yield _ports()
    states = psutil.net_if_stats()
    found = []
    for name, entries in sorted(psutil.net_if_addrs().items()):
        state = states.get(name)
        own = (e.address for e in entries if e.family in (socket.AF_INET, socket.AF_INET6) and "%" not in e.address)
        addresses = [address for address in own if not is_loopback(address)]
        if state is not None and state.isup and addresses:
            speed = f", {state.speed / 1000:g} Gbit/s" if state.speed else ""
            found.append(f"{name} {' '.join(addresses)}{speed}")
    do = "" if found else "runs over several machines need one (docs/clusters.md); one machine does not"
    yield _line("interfaces", "; ".join(found) or "only loopback", do)
    cards = sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))
    if cards:
        yield _line("InfiniBand", ", ".join(cards))


def _ports() -> DoctorLine:
    try:
        return _line("ports", _free_port(LOOPBACK.local))
    except OSError as error:
        with suppress(OSError):
            found = f"{_free_port(LOOPBACK_IPV6.local)}; nothing can listen at {LOOPBACK.local}"
            return _line("ports", found, 'set run.host = "::1"')
        found = f"nothing can listen at {LOOPBACK.local}: {error.strerror or error}"
        return _line("ports", found, "every run needs it: look at the sandbox's or container's rules", needed=True)


def _free_port(at: str) -> str:
    """Return a line on a free port there; raises `OSError`."""
    with socket.create_server((at, 0), family=socket.AF_INET6 if ":" in at else socket.AF_INET) as listening:
        return f"free ones at {at}, for example {listening.getsockname()[1]}"


def open_files() -> DoctorLine:
    """Check the hard limit on open files and sockets, to which each process of a run raises its soft limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = hard == resource.RLIM_INFINITY or hard >= OPEN_FILES
    found = "no limit" if hard == resource.RLIM_INFINITY else f"{hard:,} for a process"
    do = f"runs with many workers need more: raise the hard limit to {OPEN_FILES} (limits.conf, LimitNOFILE)"
    return _line("open files", found, "" if enough else do)


def folders(*, cache: Path | None = None) -> Iterator[DoctorLine]:
    """Check the folder in which models and compiled libraries are kept between runs."""
    folder = cache or cache_home()
    try:
        free = room_in(folder)
    except OSError as error:
        found = f"{folder} cannot be written: {error.strerror or error}"
        yield _line("cache", found, "set STREAMRL_CACHE to a folder that can be written", needed=True)
        return
    do = f"models need more than {CACHE_GIB:g} GiB: set STREAMRL_CACHE to a larger disk"
    yield _line("cache", f"{folder}, {free / GIB:.1f} GiB free", "" if free >= CACHE_GIB * GIB else do)


def room_in(folder: Path) -> int:
    """Return the free bytes where `folder` is or would be made; raises `OSError` if nothing can be written there."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    with tempfile.TemporaryFile(dir=there):
        return shutil.disk_usage(there).free
