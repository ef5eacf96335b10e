"""What a configuration starts, and how."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from streamrl.config import Config, from_dict
from streamrl.errors import ConfigError, StreamRLError
from streamrl.launch import processes, role
from streamrl.launch.display import Display
from streamrl.launch.local import Launcher, lock_run_dir
from streamrl.launch.processes import (
    STOP_ORDER,
    ProcessCommands,
    TrainerShare,
    fitted,
    plan,
    plan_pool,
    plan_trainer,
    share_of,
    visible_gpus,
)
from streamrl.launch.run_folders import claim_run_dir
from streamrl.transport import secret


def config(gservers: int = 1, model_workers: int = 1, workers: int = 1, **run: object) -> Config:
    return from_dict(
        {
            "run": run,
            "gserver": {"count": gservers, "threads": 3},
            "trainer": {"data_parallel": model_workers, "batch_groups": 16, "threads": 2},
            "rollout": {"workers": workers},
        }
    )


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5), st.integers(0, 4))
def test_every_process_once_and_gpus_in_turn(gservers: int, model_workers: int, workers: int, gpus: int) -> None:
    names = [str(i) for i in range(gpus)]
    processes = plan(config(gservers, model_workers, workers), gpus=names)
    assert [p.role for p in processes] == (
        ["controller"] + ["gserver"] * gservers + ["model_worker"] * model_workers + ["rollout"] * workers
    )
    assert len({p.name for p in processes}) == len(processes)
    assert {p.role for p in processes} == frozenset().union(*STOP_ORDER)
    used = [gpu for p in processes for gpu in p.gpus]
    if gpus > 1:
        assert len(used) == gservers + model_workers
        counts = [used.count(name) for name in names]
        assert max(counts) - min(counts) <= 1
    else:
        assert used == []


def test_threads_reach_the_environment() -> None:
    threads = {p.role: p.environment["OMP_NUM_THREADS"] for p in plan(config())}
    assert threads == {"controller": "1", "gserver": "3", "model_worker": "2", "rollout": "1"}


def test_cpu_runs_get_no_gpu() -> None:
    assert not any(p.gpus for p in plan(config(device="cpu"), gpus=["0", "1"]))


def sglang(count: int = 1, **settings: object) -> Config:
    return from_dict({"run": {"device": "cuda"}, "gserver": {"engine": "sglang", "count": count, "sglang": settings}})


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 8))
def test_a_server_of_several_ranks_gets_a_gpu_for_each(count: int, ranks: int, gpus: int) -> None:
    names = [str(i) for i in range(gpus)]
    chosen = sglang(count, tensor_parallel=ranks)
    if gpus < ranks:
        with pytest.raises(ConfigError, match=f"tensor_parallel = {ranks} needs as many GPUs; this machine has {gpus}"):
            fitted(chosen, gpus=names)
        trainer = next(p for p in plan(chosen, gpus=names) if p.role == "model_worker")  # its servers may be elsewhere
        assert len(trainer.gpus) == (gpus > 1)
        return
    used = [p.gpus for p in plan(chosen, gpus=names) if p.role in ("gserver", "model_worker")]
    if gpus == 1:
        assert not any(used)
        return
    assert [len(set(own)) for own in used] == [ranks] * count + [1]
    in_turn = [gpu for own in used for gpu in own]
    assert in_turn == [names[i % gpus] for i in range(len(in_turn))]


TWO_WORKERS = {"data_parallel": 2, "batch_groups": 16}
SGLANG = {"engine": "sglang"}


@pytest.mark.parametrize(
    ("sections", "gpus", "backend"),
    [
        ({"gserver": SGLANG}, 1, "gloo"),
        ({"gserver": SGLANG}, 2, "auto"),
        ({"gserver": SGLANG | {"count": 2, "sglang": {"tensor_parallel": 2}}}, 4, "gloo"),
        ({"gserver": SGLANG | {"count": 2, "sglang": {"tensor_parallel": 2}}}, 5, "auto"),
        # the publisher needs a GPU without a gserver
        ({"trainer": TWO_WORKERS, "gserver": {"count": 1}}, 2, "auto"),
        ({"trainer": TWO_WORKERS, "gserver": {"count": 2}}, 2, "gloo"),
        ({"trainer": TWO_WORKERS, "gserver": {"count": 2}}, 3, "auto"),
        # and NCCL is left for nothing else
        ({"run": {"device": "auto"}}, 1, "gloo"),
        ({"run": {"device": "cpu"}}, 1, "auto"),
        ({"weights": {"backend": "nccl"}}, 1, "nccl"),
        ({"weights": {"mode": "disk"}}, 1, "auto"),
        ({"gserver": SGLANG | {"sglang": {"addresses": ["http://a"]}}}, 1, "auto"),
        ({"gserver": {"engine": "simulated"}}, 1, "gloo"),
    ],
)
def test_nccl_is_left_where_gpus_are_shared(sections: dict[str, Any], gpus: int, backend: str) -> None:
    chosen = from_dict({"run": {"device": "cuda"}} | sections)
    fit = fitted(chosen, gpus=[str(i) for i in range(gpus)])
    assert fit.weights.backend == backend
    assert fit.digest() == chosen.digest(), "others may join with the user's file"


@pytest.mark.parametrize(
    ("gservers", "gpus", "part"), [(1, 1, ["0.40"]), (2, 1, ["0.27"]), (3, 2, ["0.40"]), (1, 2, []), (2, 3, [])]
)
def test_sglang_leaves_memory_to_whom_it_shares_a_gpu_with(gservers: int, gpus: int, part: list[str]) -> None:
    names = [str(i) for i in range(gpus)]
    chosen = sglang(gservers, args=["--x=1"])
    args = fitted(chosen, gpus=names).gserver.sglang.args
    assert args == ["--x=1", *(f"--mem-fraction-static={each}" for each in part)]
    own = ["--mem-fraction-static=0.6"]
    assert fitted(sglang(gservers, args=own), gpus=names).gserver.sglang.args == own


def test_model_workers_that_would_share_a_gpu_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^2 model workers .* need as many GPUs; this machine has 1: have fewer"):
        fitted(config(model_workers=2), gpus=["0"])
    assert fitted(config(model_workers=2), gpus=["0", "1"])
    assert fitted(config(model_workers=2), gpus=[])
    assert fitted(config(model_workers=2, device="cpu"), gpus=["0"])


def test_servers_elsewhere_take_no_gpu_here() -> None:
    processes = plan(sglang(2, addresses=["http://a:1", "http://b:1"]), gpus=["0", "1"])
    used = {p.role: (p.device, list(p.gpus)) for p in processes if p.role in ("gserver", "model_worker")}
    assert used == {"gserver": ("-", []), "model_worker": ("cuda (GPU 0)", ["0"])}


def test_command_is_the_one_to_type() -> None:
    (worker,) = [p for p in plan(config()) if p.role == "model_worker"]
    words = ProcessCommands(Path("c.toml"), (), "http://m:1").of(worker)
    assert words[0] == sys.executable
    assert words[1:] == ["-m", "streamrl", "model-worker", "c.toml", "--manager", "http://m:1", "--index", "0"]


def test_a_replacement_begins_from_the_latest_checkpoint() -> None:
    commands = ProcessCommands(Path("c.toml"), (), "http://m:1")
    words = {process.role: commands.of(process, died="it died")[5:] for process in plan(config())}
    assert words == {
        "controller": ["--resume", "--port", "1", "--died", "it died"],
        "gserver": ["--manager", "http://m:1", "--index", "0"],
        "model_worker": ["--manager", "http://m:1", "--index", "0", "--resume"],
        "rollout": ["--manager", "http://m:1", "--index", "0"],
    }


def test_a_process_that_starts_before_the_controller_gets_its_url_from_its_input(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def read(content: bytes) -> str:
        reading, writing = os.pipe()
        os.write(writing, content)
        os.close(writing)
        monkeypatch.setattr(role, "STDIN", reading)
        return role._url_from_input()

    assert read(b"http://m:1\n") == "http://m:1"
    with pytest.raises(StreamRLError, match="the launcher has ended"):
        read(b"")


def test_visible_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, GPU-abc")
    assert visible_gpus() == ["2", "GPU-abc"]
    for hidden in ("", "-1", "-1,0", "NoDevFiles"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert visible_gpus() == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,-1,1")
    assert visible_gpus() == ["0"], "as CUDA reads it"


def test_gpus_are_found_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(processes, "DEVICES", tmp_path)
    monkeypatch.setattr(processes, "GPUS_OF_WINDOWS", tmp_path / "dxg")
    assert visible_gpus() == []
    (tmp_path / "dxg").touch()
    monkeypatch.setattr("ctypes.CDLL", no_library)
    assert visible_gpus() == []
    monkeypatch.setattr("ctypes.CDLL", lambda _: NvidiaDriver)
    assert visible_gpus() == ["0", "1"]
    for name in ("nvidia0", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert visible_gpus() == ["0"]


def no_library(name: str) -> None:
    raise OSError(f"{name}: cannot open shared object file")


class NvidiaDriver:
    """In place of its library: has two GPUs."""

    @staticmethod
    def nvmlInit_v2() -> int:
        return 0

    @staticmethod
    def nvmlDeviceGetCount_v2(count: Any) -> int:
        count._obj.value = 2
        return 0


def test_a_run_folder_is_of_one_launcher_where_it_can_be_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with lock_run_dir(tmp_path), pytest.raises(ConfigError, match="is being run by another process"):
        lock_run_dir(tmp_path)
    lock_run_dir(tmp_path).close()

    def flock(file: object, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", flock)
    lock_run_dir(tmp_path).close()
    assert f"{tmp_path} cannot be locked (Function not implemented)" in caplog.text


def test_the_environment_is_set_before_torch_is_loaded() -> None:
    """torch reads the number of threads once, when it loads: what runs before a component must not load it."""
    loaded = "import sys, streamrl.launch.role; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", loaded], timeout=60, check=False).returncode == 0


@given(st.integers(1, 40), st.integers(1, 40))
def test_nodes_share_all_ranks_evenly(workers: int, nodes: int) -> None:
    shares = [list(TrainerShare(node, nodes).ranks(workers)) for node in range(nodes)]
    assert [rank for share in shares for rank in share] == list(range(workers))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(st.integers(1, 8), st.integers(0, 8))
def test_processes_of_one_machine_share_its_gpus(local: int, gpus: int) -> None:
    names = [str(i) for i in range(gpus)]
    used = [list(TrainerShare(i, local, i, local).of(names)) for i in range(local)]
    if gpus >= local:
        assert [gpu for own in used for gpu in own] == names
    else:
        assert all(len(own) == (gpus > 0) for own in used)


@given(st.integers(1, 8), st.integers(0, 8), st.integers(1, 4))
def test_no_two_model_workers_of_a_machine_have_the_same_gpu(local: int, more: int, machines: int) -> None:
    """Also where a process's share of the GPUs is a single one."""
    names = [str(i) for i in range(local + more)]
    chosen = from_dict({"trainer": {"data_parallel": local * machines, "batch_groups": 64}})
    for machine in range(machines):
        shares = [TrainerShare(machine * local + i, local * machines, i, local) for i in range(local)]
        processes = [process for share in shares for process in plan_trainer(chosen, share=share, gpus=names)]
        seen = [list(process.gpus) or names for process in processes]  # without GPUs of its own it sees all
        used = [gpus[process.index % len(gpus)] for process, gpus in zip(processes, seen, strict=True)]
        if local * machines > 1:
            assert len(set(used)) == local


def test_each_node_starts_its_ranks() -> None:
    chosen = config(model_workers=4)
    gpus = ["0", "1"]
    first = plan_trainer(chosen, share=TrainerShare(0, 2), gpus=gpus)
    second = plan_trainer(chosen, share=TrainerShare(1, 2), gpus=gpus)
    assert [p.name for p in first] == ["model_worker/0", "model_worker/1"]
    assert [(p.name, list(p.gpus)) for p in second] == [("model_worker/2", ["0"]), ("model_worker/3", ["1"])]
    alone = plan_trainer(chosen, share=TrainerShare(0, 1))
    assert [p.name for p in alone] == [f"model_worker/{i}" for i in range(4)]


def test_torchrun_says_which_part_of_the_trainer_it_is() -> None:
    chosen = config(model_workers=4)
    said = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node0"}
    assert share_of(chosen, node=None, nodes=None, environment=said) == TrainerShare(3, 4, 1, 2)
    (only,) = plan_trainer(chosen, share=TrainerShare(3, 4, 1, 2), gpus=["0", "1"])
    assert only.name == "model_worker/3"
    assert share_of(chosen, node=1, nodes=2, environment=said) == TrainerShare(1, 2), "options come first"
    assert share_of(chosen, node=None, nodes=None, environment={}) == TrainerShare(0, 1)


@pytest.mark.parametrize(
    ("node", "nodes", "environment", "told"),
    [
        (2, 2, {}, "--node 2 --nodes 2: nodes are numbered from 0 to 1"),
        (1, None, {}, "--node 1 needs the number of parts"),
        (0, 5, {}, "there are only 4 model workers"),
        (None, None, {"RANK": "x", "WORLD_SIZE": "2"}, "RANK=x, WORLD_SIZE=2: torchrun.s variables are numbers"),
        (None, None, {"RANK": "4", "WORLD_SIZE": "4"}, "RANK=4 of WORLD_SIZE=4: nodes are numbered from 0 to 3"),
    ],
)
def test_parts_that_cannot_be(node: int | None, nodes: int | None, environment: dict[str, str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        share_of(config(model_workers=4), node=node, nodes=nodes, environment=environment)


def test_a_pool_has_the_numbers_that_the_manager_gave() -> None:
    pool = plan_pool(sglang(), "gserver", indices=[3, 5], gpus=["0", "1"])
    assert [(p.name, list(p.gpus)) for p in pool] == [("gserver/3", ["0"]), ("gserver/5", ["1"])]
    workers = plan_pool(config(), "rollout", indices=[4])
    commands = ProcessCommands(Path("c.toml"), manager_url="http://m:1", advertise="10.0.0.9", resume=True)
    assert commands.of(workers[0])[-5:] == ["--index", "4", "--resume", "--advertise", "10.0.0.9"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_run_that_finds_the_disk_full_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secret, "_held", [])
    claimed = claim_run_dir(config(dir=str(tmp_path)))
    (claimed.run_dir / "config.toml").symlink_to("/dev/full")
    launcher = Launcher(claimed, processes=plan(claimed), display=Display(Console(file=io.StringIO()), config=claimed))
    with pytest.raises(ConfigError, match=r"run\.dir: .*run cannot be written \(No space left on device\)"):
        asyncio.run(launcher.run())
