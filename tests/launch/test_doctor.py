"""What `streamrl doctor` finds: on this machine, and in what it is told of others."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from streamrl.launch import doctor
from streamrl.launch.doctor import DoctorLine
from streamrl.planner.shapes import Peak, peak_of
from tests.ipv6 import IPV6

GIB = 2**30
H100 = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=80 * GIB, major=9, minor=0)


def of_torch(
    monkeypatch: pytest.MonkeyPatch,
    *,
    cuda: str = "13.0",
    free: Sequence[int] = (79,),
    nccl: bool = True,
    peers: bool = True,
    gpus: str = "0",
) -> dict[str, DoctorLine]:
    """The lines on a torch of this kind, with a device for each number of `free` GiB; `gpus`: those of the machine."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    monkeypatch.setattr("torch.version.cuda", cuda)
    for name, value in {
        "cuda.device_count": len(free),
        "cuda.get_device_properties": H100,
        "cuda.can_device_access_peer": peers,
        "cuda.nccl.version": (2, 27, 5),
        "distributed.is_nccl_available": nccl,
    }.items():
        monkeypatch.setattr(f"torch.{name}", lambda *_, value=value: value)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda index: (free[index] * GIB, 80 * GIB))
    return named(doctor.torch_lines())


def named(findings: object) -> dict[str, DoctorLine]:
    return {one.name: one for one in findings}


def test_on_this_machine() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "streamrl", "doctor", "--json"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    found = {one["name"]: one for one in json.loads(done.stdout)}
    assert found["CPUs"]["found"].startswith(f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}")
    assert found["torch"]["found"].startswith(torch.__version__)
    assert found["gloo"]["ok"] == torch.distributed.is_gloo_available()
    devices = [name for name in found if name.startswith("CUDA device ")]
    assert len(devices) == torch.cuda.device_count()
    assert ("CUDA devices" in found) == (not devices)
    assert found["C compiler"]["ok"] or found["C compiler"]["do"]
    assert found["ports"]["ok"]
    assert all(one["ok"] or one["do"] for one in found.values())


def test_people_see_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    Console(width=120).print(
        doctor.shown([DoctorLine(name="a", ok=True, found="b"), DoctorLine(name="c", ok=False, found="d", do="buy e")])
    )
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split() == ["a", "ok", "b"] for line in lines)
    assert any(line.split() == ["c", "missing", "d", "buy", "e"] for line in lines)


def test_a_gpu_with_its_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    found = of_torch(monkeypatch)
    assert found["CUDA device 0"].ok
    assert "80 GiB (79 free)" in found["CUDA device 0"].found
    assert "989 TFLOPS in bfloat16" in found["CUDA device 0"].found
    assert found["NCCL"].found == "2.27.5"
    assert "peer access" not in found  # there is one device


@pytest.mark.parametrize("there", [True, False])
def test_kernels_for_gpus_are_compiled_with_the_headers_of_python(
    there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    if there:
        (tmp_path / "Python.h").touch()
    line = of_torch(monkeypatch)["headers of Python"]
    assert (line.ok, "install python3-dev" in line.do) == (there, not there)
    assert "headers of Python" not in of_torch(monkeypatch, free=())


@pytest.mark.parametrize(
    ("kind", "name", "said"),
    [
        ({"cuda": "", "free": ()}, "torch", "install a build of torch with CUDA"),
        ({"free": ()}, "CUDA devices", "GPUs that torch cannot use"),
        ({"free": (), "gpus": ""}, "CUDA devices", "runs use the CPU"),
        ({"nccl": False}, "NCCL", "a build of torch with NCCL"),
        ({"free": (79, 79), "peers": False}, "peer access", "through host memory"),
        ({"free": (10,)}, "CUDA device 0", "hold its memory"),
    ],
)
def test_what_is_missing_says_what_to_do(
    kind: dict[str, Any], name: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = of_torch(monkeypatch, **kind)
    assert not found[name].ok
    assert said in found[name].do


def test_a_torch_that_cannot_be_imported_is_told(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise OSError('libcudart.so: cannot open shared object file')")
    found = named(doctor.examine(environment={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}))
    assert not found["torch"].ok
    assert found["torch"].needed
    assert "libcudart.so: cannot open shared object file" in found["torch"].found
    assert found["ports"].ok  # the rest is found all the same


def test_limits_of_a_container(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "memory.max").write_text(f"{3 * GIB}\n")
    (tmp_path / "memory.current").write_text(f"{GIB}\n")
    (tmp_path / "memory.stat").write_text("anon 100\ninactive_file 0\n")
    (tmp_path / "cpuinfo").write_text("model name\t: Some CPU\nflags\t\t: fpu avx2 avx512f avx512_bf16\n")
    cpus = named(doctor.processors(cpuinfo=tmp_path / "cpuinfo", cgroup=tmp_path))
    assert not cpus["CPUs"].ok
    assert "limited to 1.5 by the container: Some CPU" in cpus["CPUs"].found
    assert cpus["bfloat16 on CPUs"].ok
    (memory,) = doctor.memory(cgroup=tmp_path)
    assert not memory.ok
    assert memory.found.startswith("3.0 GiB (limited by the container)")


def test_what_a_container_has_read_of_files_is_free_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = psutil.virtual_memory()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: seen._replace(total=64 * GIB, available=60 * GIB))
    (tmp_path / "memory.max").write_text(f"{16 * GIB}\n")
    (tmp_path / "memory.current").write_text(f"{15 * GIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon {3 * GIB}\nfile {12 * GIB}\ninactive_file {10 * GIB}\n")
    (memory,) = doctor.memory(cgroup=tmp_path)
    assert memory.ok
    assert memory.found == "16.0 GiB (limited by the container), 11.0 free"


def test_shared_memory_and_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not doctor.shared_memory(folder=tmp_path / "none").ok
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=2**26))
    assert "--shm-size" in doctor.shared_memory(folder=tmp_path).do
    (cache,) = doctor.folders(cache=tmp_path / "cache" / "deeper")
    assert not cache.ok
    assert "STREAMRL_CACHE" in cache.do
    assert not (tmp_path / "cache").exists()


def test_a_machine_on_which_nothing_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(socket, "create_server", refuse)
    ports = named(doctor.network())["ports"]
    assert ports.needed
    assert "Operation not permitted" in ports.found


@IPV6
def test_a_machine_without_an_ipv4_address(monkeypatch: pytest.MonkeyPatch) -> None:
    create = socket.create_server

    def only_ipv6(address: tuple[str, int], *, family: int) -> socket.socket:
        if family != socket.AF_INET6:
            raise OSError(99, "Cannot assign requested address")
        return create(address, family=family)

    monkeypatch.setattr(socket, "create_server", only_ipv6)
    ports = named(doctor.network())["ports"]
    assert not ports.needed
    assert (ports.do, ports.found.split(",")[0]) == ('set run.host = "::1"', "free ones at ::1")


def test_compilers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STREAMRL_CACHE", str(tmp_path))
    (missing,) = doctor.compilers({"CC": "no-such-compiler -O2"})
    assert not missing.ok
    assert missing.found == "no no-such-compiler"
    (off,) = doctor.compilers({"CC": "true", "STREAMRL_NATIVE": "0"})
    assert "switches it off" in off.do
    (tmp_path / "layers-1.failed").write_text("why")
    (failed,) = doctor.compilers({"CC": "true"})
    assert str(tmp_path / "layers-1.failed") in failed.do
    os.utime(tmp_path / "layers-1.failed", (0, 0))
    (tmp_path / "layers-2.so").touch()
    (settled,) = doctor.compilers({"CC": "true"})
    assert settled.ok


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H200", 989.0),
        ("NVIDIA H20", 148.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GeForce RTX 4090", 165.0),
        ("NVIDIA TITAN V", None),
    ],
)
def test_peaks(name: str, tflops: float | None) -> None:
    peak = peak_of(name)
    assert (peak.tflops if peak is not None else None) == tflops


def test_one_whose_name_has_anothers_in_it_has_its_own_peak() -> None:
    assert peak_of("NVIDIA GH200 480GB") == Peak(989.0, 4.0)
