"""What carries the weights of a run that leaves it open (`weights.mode = "auto"`), and of one that does not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from streamrl import config as configuration
from streamrl.machine import machine_identity
from streamrl.trainer.worker.publisher import Carrier, carriers_for
from streamrl.trainer.worker.weight_broadcast import Broadcaster
from streamrl.trainer.worker.weight_files import WeightFiles, WeightMemory
from streamrl.transport.addresses import LOOPBACK
from streamrl.transport.control import GserverPlaces

MODEL = {"path": "scratch", "scratch": {"hidden_size": 64, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 32}}
CPU = torch.device("cpu")
HERE, AWAY = machine_identity(), "another"


def carrier(
    folder: Path,
    *,
    device: torch.device = CPU,
    numbers: int = 1000,
    machines: Sequence[str] = (HERE,),
    gpu: str = "",
    gpu_memory: int = 0,
    gpus: Sequence[str] = ("",),
    **sections: dict[str, Any],
) -> Carrier:
    """What brings weights to gservers on `machines` and `gpus`."""
    config = configuration.from_dict({"model": MODEL, "run": {"dir": str(folder)}} | sections)
    carriers = carriers_for(
        config,
        reach=LOOPBACK,
        backend="gloo",
        dtype=torch.float32,
        device=device,
        numbers=numbers,
        gpu=gpu,
        gpu_memory=lambda: gpu_memory,
    )
    return carriers.choose(GserverPlaces([*machines], [*gpus]))


def test_one_host_without_gpus_shares_its_memory(tmp_path: Path) -> None:
    files = carrier(tmp_path)
    assert isinstance(files, WeightFiles)
    assert files.folder.is_relative_to("/dev/shm")
    files.close()
    assert not files.folder.exists()


@pytest.mark.parametrize(
    ("elsewhere", "why"),
    [
        ({"weights": {"backend": "gloo"}}, "weights.backend is of a broadcast"),
        ({"gserver": {"engine": "sglang"}}, 'gserver.engine is "sglang"'),
        ({"device": torch.device("meta")}, "the trainer is on meta"),
        ({"numbers": 10**15}, "/dev/shm has no room for 3 times"),
    ],
)
def test_otherwise_weights_are_broadcast(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, elsewhere: dict[str, Any], why: str
) -> None:
    caplog.set_level("INFO")
    assert isinstance(carrier(tmp_path, **elsewhere), Broadcaster)
    assert f"weights.mode: collective, because {why}" in caplog.text


@pytest.mark.parametrize("machines", [(AWAY,), (HERE, AWAY), ()])
def test_gservers_elsewhere_get_a_broadcast(tmp_path: Path, machines: Sequence[str]) -> None:
    assert isinstance(carrier(tmp_path, machines=machines), Broadcaster)


ON_GPU: dict[str, Any] = {"device": torch.device("cuda", 0), "gpu": "GPU-1", "gpu_memory": 12_000}
"""Where the trainer is; just enough is free for two sets of its 1000 numbers, and for a gserver's."""


def test_gservers_on_the_trainers_gpu_get_its_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also where a broadcast is to go over gloo, as `streamrl run` has it on a machine with one GPU."""
    caplog.set_level("INFO")
    for weights in ({}, {"backend": "gloo"}):
        memory = carrier(tmp_path, gpus=["GPU-1"], weights=weights, **ON_GPU)
        assert isinstance(memory, WeightMemory)
        assert "weights.mode: cuda_ipc (all gservers are here)" in caplog.text
        memory.close()


@pytest.mark.parametrize(
    ("different", "why"),
    [
        ({"gpus": ["GPU-1", "GPU-2"]}, "gservers are not all on the GPU of the trainer's first model worker"),
        ({"gpus": [""]}, "gservers are not all on the GPU of the trainer's first model worker"),
        ({"machines": [HERE, AWAY]}, "gservers are on other hosts"),
        ({"machines": [], "gpus": []}, "no gserver is there"),
        ({"weights": {"backend": "nccl"}}, "weights.backend is of a broadcast"),
        ({"gserver": {"engine": "sglang"}}, 'gserver.engine is "sglang"'),
        ({"gpu_memory": 11_999}, "0.0 GiB of the GPU are free, and 0.0 are needed: 2 times the weights"),
        ({"gserver": {"count": 2}}, "once more for each gserver to stage them"),
    ],
)
def test_others_get_a_broadcast_from_a_trainer_on_a_gpu(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, different: dict[str, Any], why: str
) -> None:
    caplog.set_level("INFO")
    assert isinstance(carrier(tmp_path, **{"gpus": ["GPU-1"]} | ON_GPU | different), Broadcaster)
    assert "weights.mode: collective" in caplog.text
    assert why in caplog.text


def test_room_on_the_gpu_is_looked_for_when_weights_are_ready_and_until_they_have_it(tmp_path: Path) -> None:
    """After a step what training takes is no longer free, and what it has taken already is not asked for again. As the
    models are loaded neither is known: another number of bytes for each weight is to come with each backend."""
    free = [0]
    config = configuration.from_dict({"model": MODEL, "run": {"dir": str(tmp_path)}})
    carriers = carriers_for(
        config,
        reach=LOOPBACK,
        backend="gloo",
        dtype=torch.float32,
        device=torch.device("cuda", 0),
        numbers=1000,
        gpu="GPU-1",
        gpu_memory=lambda: free[0],
    )
    found = []
    for free[0] in (11_999, 12_000, 4_000):
        found.append(type(carriers.choose(GserverPlaces([HERE], ["GPU-1"]))))
    assert found == [Broadcaster, WeightMemory, WeightMemory]
    carriers.close()
