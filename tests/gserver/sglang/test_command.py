"""Flags, environment and figures: what needs no process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from streamrl.config import GserverConfig, LoraConfig, from_dict
from streamrl.errors import ConfigError
from streamrl.gserver.server.monitor import Figures
from streamrl.gserver.sglang.command import CPU_FLAGS, SGLANG, Launch, command, environment
from streamrl.transport.credentials import GserverKeys

ON_CPU = Launch(
    model_dir=Path("model"),
    port=31000,
    device="cpu",
    dtype="float32",
    seed=7,
    weight_version="default",
    prompt_cache=True,
)


def settings(**sglang: Any) -> GserverConfig:
    return from_dict({"gserver": {"engine": "sglang", "sglang": sglang, "max_running": 5}}).gserver


def test_flags_on_a_cpu() -> None:
    words = command(settings(), ON_CPU)
    assert words[0] == sys.executable
    assert set(CPU_FLAGS) < set(words)
    assert {"--model-path=model", "--port=31000", "--device=cpu", "--dtype=float32"} < set(words)
    assert {"--max-running-requests=5", "--random-seed=7", "--host=127.0.0.1"} < set(words)
    assert not any("radix" in word or "gpu" in word for word in words)


def test_flags_on_a_gpu() -> None:
    launch = msgspec.structs.replace(ON_CPU, device="cuda:3")
    words = command(settings(python="other/python", args=["--mem-fraction-static=0.6"]), launch)
    assert words[0] == "other/python"
    assert {"--device=cuda", "--base-gpu-id=3"} < set(words)
    assert words[-1] == "--mem-fraction-static=0.6"
    assert not set(CPU_FLAGS) & set(words)
    assert "SGLANG_USE_CPU_ENGINE" not in environment(
        device="cuda:3", threads=1, index=0, ranks=1, group_seconds=30, keys=GserverKeys()
    )


def test_servers_on_a_cpu_have_cores_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 5)

    def bound_to(threads: int, index: int, *, ranks: int = 1) -> str:
        variables = environment(
            device="cpu", threads=threads, index=index, ranks=ranks, group_seconds=30, keys=GserverKeys()
        )
        return variables["SGLANG_CPU_OMP_THREADS_BIND"]

    bound = [bound_to(2, index) for index in range(3)]
    assert bound == ["0-1", "2-3", "0-1"]
    assert bound_to(1, 6) == "1"
    assert bound_to(8, 1) == "0-7"
    assert [bound_to(1, index, ranks=2) for index in range(3)] == ["0|1", "2|3", "4|0"]
    assert bound_to(2, 0, ranks=2) == "0-1|2-3"


def test_ranks_of_a_server() -> None:
    assert "--tp-size=1" in command(settings(), ON_CPU)
    assert "--tp-size=4" in command(settings(tensor_parallel=4), msgspec.structs.replace(ON_CPU, device="cuda:4"))


def test_adapters_that_will_come_and_the_one_that_is_there() -> None:
    lora = LoraConfig(rank=4, target_modules=["v_proj", "q_proj"])
    words = command(settings(), msgspec.structs.replace(ON_CPU, lora=lora, adapter=Path("/a")))
    begin = words.index("--enable-lora")
    assert words[begin : begin + 5] == [
        "--enable-lora",
        "--max-lora-rank=4",
        "--lora-target-modules",
        "q_proj",
        "v_proj",
    ]
    assert "--lora-backend=torch_native" in words
    assert "--lora-paths" not in words, "version 0 is the model without an adapter"
    resumed = msgspec.structs.replace(ON_CPU, lora=lora, adapter=Path("/a"), weight_version="12", device="cuda:0")
    words = command(settings(), resumed)
    assert words[words.index("--lora-paths") + 1] == "streamrl-v12=/a"
    assert not any("lora-backend" in word for word in words)


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--port=30000", "any free port"),
        ("--weight-version", "the policy version"),
        ("--tp=2", "gserver.sglang.tensor_parallel"),
        ("--pp-size=2", "raise gserver.sglang.tensor_parallel"),
        ("--dp=2", "raise gserver.count"),
        ("--nnodes=2", "on one machine"),
        ("--trust-remote-code", "no remote code"),
        ("--quantization=w8a8_int8", "rounds nothing that an update brings"),
    ],
)
def test_flags_that_streamrl_decides_are_refused(flag: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"{flag.partition('=')[0]}.*{said}"):
        settings(args=[flag])


def test_figures_are_summed_over_labels_and_time() -> None:
    figures = Figures(SGLANG.figures)
    assert set(figures.stats().values()) == {0.0}
    text = "\n".join(
        [
            "# TYPE sglang:num_running_reqs gauge",
            'sglang:num_running_reqs{rank="0"} 2.0',
            'sglang:num_running_reqs{rank="1"} 1.0',
            "# TYPE sglang:generation_tokens counter",
            'sglang:generation_tokens_total{rank="0"} 40.0',
            "# TYPE sglang:unknown gauge",
            "sglang:unknown 5.0",
            "",
        ]
    )
    figures.update(text, now=10.0)
    figures.update(text, now=12.0)
    figures.update("", now=13.0)
    stats = figures.stats()
    assert stats["running"] == 0.0
    assert (stats["busy_seconds_total"], stats["slot_seconds_total"]) == (2.0, 6.0)
