"""What carries the weights of a run that leaves it open (`weights.mode = "auto"`), and of one that does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from streamrl import config as configuration
from streamrl.errors import ConfigError
from streamrl.trainer.publisher import Carrier, carrier_for
from streamrl.trainer.weight_files import WeightFiles, has_room
from streamrl.transport.broadcaster import Broadcaster

MODEL = {"path": "scratch", "scratch": {"hidden_size": 64, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 32}}
CPU = torch.device("cpu")


def carrier(folder: Path, *, device: torch.device = CPU, numbers: int = 1000, **sections: dict[str, Any]) -> Carrier:
    config = configuration.from_dict({"model": MODEL, "run": {"dir": str(folder)}} | sections)
    return carrier_for(config, backend="gloo", dtype=torch.float32, device=device, numbers=numbers)


def test_one_host_without_gpus_shares_its_memory(tmp_path: Path) -> None:
    files = carrier(tmp_path)
    assert isinstance(files, WeightFiles)
    assert files.folder.is_relative_to("/dev/shm")
    files.close()
    assert not files.folder.exists()


@pytest.mark.parametrize(
    "elsewhere",
    [
        pytest.param({"weights": {"host": "10.0.0.1"}}, id="several hosts"),
        pytest.param({"weights": {"backend": "gloo"}}, id="a backend was chosen"),
        pytest.param({"weights": {"mode": "collective"}}, id="a mode was chosen"),
        pytest.param({"gserver": {"engine": "sglang"}}, id="SGLang"),
        pytest.param({"device": torch.device("meta")}, id="the trainer is not on the CPU"),
        pytest.param({"numbers": 10**15}, id="no room"),
    ],
)
def test_otherwise_weights_are_broadcast(tmp_path: Path, elsewhere: dict[str, Any]) -> None:
    assert isinstance(carrier(tmp_path, **elsewhere), Broadcaster)


def test_a_host_without_shared_memory_has_no_room_there(tmp_path: Path) -> None:
    assert has_room(1, tmp_path)
    assert not has_room(1, tmp_path / "missing")


def test_a_backend_is_of_a_broadcast() -> None:
    with pytest.raises(ConfigError, match=r"weights.backend is of weights.mode"):
        configuration.from_dict({"weights": {"mode": "disk", "backend": "gloo"}})
