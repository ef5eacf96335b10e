"""A server that runs already is taken as it is, or refused with what is wrong; a small one in the place of SGLang."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from safetensors.torch import save_file

from streamrl.config import Config, from_dict
from streamrl.errors import ConfigError, ModelError, PeerLost
from streamrl.gserver.server import monitor
from streamrl.gserver.server.process import running
from tests.transport.test_control import hang_up, server

JOINING = ["/pause_generation", "/update_weights_from_disk", "/abort_request", "/continue_generation"]


class Elsewhere:
    """Answers what a joining gserver asks; `calls` are those that changed it."""

    def __init__(self, *, flags: dict[str, Any] | None = None, loads: bool = True) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.url = ""
        self.silent = False
        self._flags = {"version": "0.5.23", "disable_radix_cache": False, "context_length": None} | (flags or {})
        self._loads = loads

    async def handle(self, request: web.Request) -> web.Response:
        if self.silent:
            return hang_up(request)
        match request.path:
            case "/model_info":
                return web.json_response({})
            case "/metrics":
                return web.Response(text="# TYPE sglang:num_running_reqs gauge\nsglang:num_running_reqs 5.0\n")
            case "/server_info":
                return web.json_response(self._flags)
            case "/v1/models":
                adapters = [{"id": name, "parent": "model"} for name in ("streamrl-v3", "its owner's")]
                return web.json_response({"object": "list", "data": [{"id": "model", "parent": None}, *adapters]})
        assert request.method == "POST"
        self.calls.append((request.path, await request.json()))
        return web.json_response({"success": self._loads, "message": "" if self._loads else "size mismatch"})


@asynccontextmanager
async def elsewhere(**how: Any) -> AsyncIterator[Elsewhere]:
    made = Elsewhere(**how)
    async with server(made.handle) as made.url:
        yield made


def joining(url: str, *, pause_mode: str = "retract", stuck_seconds: float = 60.0, **sections: Any) -> Config:
    gserver = {"engine": "sglang", "sglang": {"addresses": [url + "/"]}}
    limits = {"stuck_seconds": stuck_seconds}
    return from_dict({"gserver": gserver, "limits": limits, "weights": {"pause_mode": pause_mode}} | sections)


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """What a server is asked to load, which here only looks at the path."""
    save_file({"weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    return tmp_path


async def test_it_is_given_the_runs_weights_and_left_running(model_dir: Path) -> None:
    async with elsewhere() as peer:
        async with running(joining(peer.url), index=0, model_dir=model_dir) as (served, url):
            assert (served.name, url) == ("sglang", peer.url)
            assert [path for path, _ in peer.calls] == JOINING
            assert peer.calls[1][1]["model_path"] == str(model_dir)
            assert peer.calls[1][1]["weight_version"] == "default"
        assert len(peer.calls) == len(JOINING)


LORA = {"model": {"lora": {"rank": 4, "target_modules": ["q_proj", "v_proj"]}}, "pause_mode": "in_place"}
LORA_FLAGS = {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": ["o_proj", "q_proj", "v_proj"]}


async def test_adapters_of_the_run_before_are_gone_before_others_get_their_names(model_dir: Path) -> None:
    async with (
        elsewhere(flags=LORA_FLAGS) as peer,
        running(joining(peer.url, **LORA), index=0, model_dir=model_dir),
    ):
        assert [path for path, _ in peer.calls] == [*JOINING, "/unload_lora_adapter"]
        assert peer.calls[-1][1] == {"lora_name": "streamrl-v3"}


@pytest.mark.parametrize(
    "flags",
    [{"enable_lora": None}, {"max_lora_rank": 2}, {"lora_target_modules": ["q_proj"]}, {"lora_target_modules": None}],
)
async def test_one_that_takes_no_such_adapters_is_refused(model_dir: Path, flags: dict[str, Any]) -> None:
    async with elsewhere(flags=LORA_FLAGS | flags) as peer:
        with pytest.raises(ConfigError, match="--enable-lora --max-lora-rank=4 --lora-target-modules q_proj v_proj"):
            async with running(joining(peer.url, **LORA), index=0, model_dir=model_dir):
                pass
        assert not peer.calls


async def test_its_silence_is_told(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "FIGURES_SECONDS", 0.05)
    async with (
        elsewhere() as peer,
        running(joining(peer.url, stuck_seconds=1.0), index=0, model_dir=model_dir) as (served, _),
    ):
        async with asyncio.timeout(20):
            while served.stats()["running"] != 5:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        peer.silent = True
        with pytest.raises(PeerLost, match=f"the SGLang server at {peer.url} has not replied for 1 s"):
            await served.failed()
        assert served.stats()["running"] == 5


@pytest.mark.parametrize(
    ("how", "pause_mode", "error", "said"),
    [
        ({}, "in_place", ConfigError, "start it with --disable-radix-cache, or choose retract or abort"),
        ({}, "in_place", ConfigError, "start it with --disable-overlap-schedule, or choose retract or abort"),
        ({"flags": {"context_length": 512}}, "abort", ConfigError, "--context-length=512 is less than gserver.max_con"),
        ({"flags": {"dp_size": 2}}, "abort", ConfigError, "--pp-size=1 --dp-size=2: only tensor parallel ranks"),
        (
            {"flags": {"version": "0.5.9"}},
            "abort",
            ConfigError,
            "it is SGLang 0.5.9, and streamrl needs 0.5.23 or newer",
        ),
        ({"flags": {"version": ""}}, "abort", ConfigError, "it is SGLang of an unknown version"),
        ({"loads": False}, "retract", ModelError, "size mismatch; it has to see that folder"),
    ],
    ids=[
        "keeps prompts",
        "overlaps steps",
        "context too short",
        "several replicas",
        "too old",
        "says nothing",
        "cannot load",
    ],
)
async def test_one_that_does_not_fit_is_refused(
    model_dir: Path, how: dict[str, Any], pause_mode: str, error: type[Exception], said: str
) -> None:
    async with elsewhere(**how) as peer:
        with pytest.raises(error, match=said):
            async with running(joining(peer.url, pause_mode=pause_mode), index=0, model_dir=model_dir):
                pass
        assert not peer.calls or peer.calls[-1][0] == "/continue_generation"


@pytest.mark.parametrize("version", ["0.5.23.post1", "0.5.24rc1", "0.6.0", "1.0.0", "0.0.0.dev1+gabcdef"])
async def test_newer_ones_and_builds_without_a_number_may_join(model_dir: Path, version: str) -> None:
    async with (
        elsewhere(flags={"version": version}) as peer,
        running(joining(peer.url), index=0, model_dir=model_dir) as (served, _),
    ):
        assert served.name == "sglang"


@pytest.mark.parametrize(
    ("gserver", "said"),
    [
        ({"sglang": {"addresses": ["http://a", "http://a"]}, "count": 2}, "gserver.sglang.addresses"),
        ({"sglang": {"addresses": ["http://a"], "args": ["--x=1"]}}, "sglang.args: servers that are joined"),
        ({"sglang": {"addresses": ["http://a"], "tensor_parallel": 2}}, "tensor_parallel: servers that are joined"),
        ({"engine": "embedded", "sglang": {"tensor_parallel": 2}}, 'not with gserver.engine = "embedded"'),
    ],
)
def test_addresses_are_checked(gserver: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        from_dict({"gserver": {"engine": "sglang"} | gserver})
