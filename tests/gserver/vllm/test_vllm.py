"""The parts of the vLLM engine that need no vLLM; `tests/gserver/contract` runs a real one."""

from __future__ import annotations

import shutil
import socket
import tempfile
from pathlib import Path
from typing import Any, get_args, get_type_hints

import aiohttp
import msgspec
import pytest
import torch
from aiohttp import web
from safetensors.torch import load_file

from streamrl.checksum import checksums, tensor_sums
from streamrl.config import GserverConfig, LoraConfig, from_dict
from streamrl.config.engines import ENGINES
from streamrl.errors import ConfigError
from streamrl.gserver.server.engine import Job
from streamrl.gserver.vllm.client import ResponseBuilder, VllmClient, request
from streamrl.gserver.vllm.command import VllmLaunch, command, environment
from streamrl.gserver.vllm.engine import StagedFile
from streamrl.gserver.vllm.joined import become_server, join, joined_socket
from streamrl.lora import adapter_specs
from streamrl.transport.generation import FinishReason, SamplingParams, VersionSpan
from streamrl.transport.vllm import GENERATE, TokenReply
from tests.transport.test_control import server

SHAPES = {"a.weight": (3, 5), "b.bias": (7,), "c.weight": (2, 2)}


def job(*, logprob_start_len: int = -1, top: int = 0, stop: tuple[str, ...] = (), **sampling: Any) -> Job:
    params = SamplingParams(**sampling)
    return Job(
        "r", [3, 1, 4], params, stop=stop, logprob_start_len=logprob_start_len, top_logprobs_num=top, stream=True
    )


def reply(*choices: dict[str, Any], **more: Any) -> TokenReply:
    return msgspec.convert({"choices": list(choices), **more}, TokenReply, strict=False)


def tokens(*ids: int, **more: Any) -> dict[str, Any]:
    content = [{"token_id": i, "logprob": -i / 8, "top_logprobs": [{"token_id": i, "logprob": -i / 8}]} for i in ids]
    return {"token_ids": list(ids), "logprobs": {"content": content}, **more}


def test_a_stage_is_a_checkpoint_that_others_can_read() -> None:
    stage = StagedFile(SHAPES, torch.bfloat16)
    try:
        for seed in range(2):
            generator = torch.Generator().manual_seed(seed)
            new = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
            place = stage.place("b.bias")
            assert place is not None
            place.copy_(new["b.bias"])
            sums = {name: stage.store(name, new[name]) for name in ("a.weight", "c.weight")}
            sums["b.bias"] = stage.sums("b.bias")
            read = load_file(stage.folder / "model.safetensors")
            assert {name: tensor.tolist() for name, tensor in read.items()} == {
                name: tensor.to(torch.bfloat16).tolist() for name, tensor in new.items()
            }
            assert checksums(sums) == {name: tensor_sums(new[name].to(torch.bfloat16)) for name in SHAPES}
    finally:
        stage.close()
    assert not stage.folder.exists()


def test_a_stage_of_an_adapter_begins_with_zeros_and_takes_the_one_in_a_folder() -> None:
    lora = LoraConfig(rank=2, alpha=4.0, target_modules=["q_proj"])
    specs = dict(adapter_specs([("model.layers.0.self_attn.q_proj.weight", (6, 4))], lora))
    first, second = (StagedFile(specs, torch.float32, adapter=lora) for _ in range(2))
    try:
        first.fill(None)
        assert not any(tensor.any() for tensor in load_file(first.folder / "adapter_model.safetensors").values())
        sums = {name: first.store(name, torch.randn(shape)) for name, shape in specs.items()}
        assert second.fill(first.folder) == checksums(sums)
    finally:
        first.close()
        second.close()


def test_a_request_shares_prompts_with_those_of_its_version_alone() -> None:
    sent = request(job(max_new_tokens=8, stop=("x",), sampling_seed=2**63 + 5), request_id="7-r", version="3")
    assert (sent.cache_salt, sent.stream, sent.sampling_params.seed) == ("3", True, 5)
    assert sent.sampling_params.detokenize
    assert not request(job(max_new_tokens=8), request_id="7-r", version="3").sampling_params.detokenize


def test_a_stream_is_put_together() -> None:
    response = ResponseBuilder(job(max_new_tokens=3, top=1))
    first = response.add(reply(tokens(5)), version="1")
    assert first is not None
    assert (first.output_ids, first.logprobs, first.top_logprobs) == ([5], [-0.625], [[(-0.625, 5)]])
    spans = [{"version": "1", "start": 0, "end": 1}, {"version": "2", "start": 1, "end": 3}]
    response.add(reply(tokens(6)), version="1")
    last = response.add(reply(tokens(7, finish_reason="length", weight_versions=spans)), version="2")
    assert last is not None
    assert (last.output_ids, last.finish_reason) == ([5, 6, 7], FinishReason("length", length=3))
    assert last.spans == [VersionSpan("1", 0, 1), VersionSpan("2", 1, 3)]


def test_a_prompt_is_scored_under_the_version_that_computed_it() -> None:
    scored = job(max_new_tokens=0, logprob_start_len=0)
    assert request(scored, request_id="r", version="1").sampling_params.max_tokens == 1
    prompt = [None, {"1": {"logprob": -1.5}}, {"4": {"logprob": -2.5}}]
    spans = [{"version": "1", "start": 0, "end": 1}]
    made = tokens(5, finish_reason="length", weight_versions=spans)
    last = ResponseBuilder(scored).add(reply(made, prompt_logprobs=prompt), version="2")
    assert last is not None
    assert (last.input_logprobs, last.output_ids, last.logprobs) == ([None, -1.5, -2.5], [], [])
    assert (last.weight_version, last.spans) == ("1", [])
    assert last.finish_reason == FinishReason("length", length=0)


def test_a_users_flags_replace_streamrls_and_gpus_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm = {"python": "python-of-vllm", "tensor_parallel": 2, "args": ["--seed=7"]}
    settings = from_dict({"gserver": {"engine": "vllm", "vllm": vllm}}).gserver
    launch = VllmLaunch(
        model_dir=Path("/m"), socket=Path("/s"), device="cuda:2", dtype="bfloat16", seed=1, max_context=8
    )
    words = command(settings, launch)
    assert words[0] == "python-of-vllm"
    assert words[-1] == "--seed=7"
    assert "--max-model-len=8" in words
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert environment(settings, device="cuda:2", index=1)["CUDA_VISIBLE_DEVICES"] == "6,7"


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"weights": {"mode": "cuda_ipc"}}, "weights.mode"),
        ({"weights": {"backend": "nccl", "mode": "collective"}}, "weights.backend"),
        ({"gserver": {"engine": "vllm", "vllm": {"addresses": ["/a", "/b"]}}}, "gserver.vllm.addresses"),
        ({"gserver": {"engine": "vllm", "deterministic": True}}, "gserver.deterministic"),
        ({"gserver": {"engine": "vllm", "vllm": {"args": ["--port=1"]}}}, "--port"),
        ({"gserver": {"engine": "vllm", "vllm": {"args": ["--trust-remote-code"]}}}, "no remote code"),
    ],
)
def test_settings_that_vllm_cannot_have_are_refused(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        from_dict({"gserver": {"engine": "vllm"}} | changes)


def test_only_a_socket_of_ones_own_is_joined(tmp_path: Path) -> None:
    folder = Path(tempfile.mkdtemp(dir="/tmp"))  # a socket's path is short
    path = folder / "socket"
    try:
        with pytest.raises(ConfigError, match="streamrl vllm CONFIG SOCKET"):
            joined_socket([str(path)], 0)
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
            path.chmod(0o600)
            assert joined_socket([str(path)], 0) == path
            path.chmod(0o666)
            with pytest.raises(ConfigError, match="chmod 600"):
                joined_socket([str(path)], 0)
        with pytest.raises(ConfigError, match="none for gserver/1"):
            joined_socket([str(path)], 1)
        with pytest.raises(ConfigError, match="is not a socket"):
            joined_socket([str(tmp_path)], 0)
        with pytest.raises(ConfigError, match="exists"):
            become_server(from_dict({}), path, index=0)
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("room", "scores", "problem"),
    [(8, (-0.5, -2.5), "max_context = 16"), (64, (0.0, 0.0), "sampling temperature"), (64, (-0.5, -2.5), "")],
)
async def test_a_server_with_other_flags_is_not_joined(
    room: int, scores: tuple[float, float], problem: str, tmp_path: Path
) -> None:
    """The server is pretended: it counts what a run changes in it."""
    answers = iter(scores)
    loaded: list[str] = []

    async def handle(request: web.Request) -> web.Response:
        if request.path == GENERATE:
            score = {"token_id": 1, "logprob": next(answers)}
            return web.json_response({"choices": [{"token_ids": [1], "logprobs": {"content": [score]}}]})
        if request.path == "/collective_rpc":
            loaded.append((await request.json())["kwargs"]["weights_path"])
        return web.json_response({"data": [{"id": "m", "max_model_len": room}], "success": True})

    async with server(handle) as url, aiohttp.ClientSession() as session:
        client = VllmClient(session, url=url, timeout=5.0, request_seconds=5.0)
        if problem:
            with pytest.raises(ConfigError, match=problem):
                await join(client, tmp_path, model_dir=tmp_path, max_context=16)
        else:
            await join(client, tmp_path, model_dir=tmp_path, max_context=16)
        assert loaded == ([] if problem else [str(tmp_path)])


def test_every_engine_has_an_entry() -> None:
    assert set(get_args(get_type_hints(GserverConfig)["engine"])) == ENGINES.keys()
