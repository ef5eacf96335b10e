"""Adapters in the embedded engine: each request is computed with the one that it began with, whatever comes."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from streamrl.checksum import weights_checksum
from streamrl.config import LoraConfig
from streamrl.errors import ModelError, Refused
from streamrl.gserver.embedded.engine import EmbeddedEngine
from streamrl.gserver.server.engine import Output
from streamrl.lora import SETTINGS, TENSORS, adapter_settings, adapter_specs, pair_of
from tests.gserver.embedded.test_engine_requests import grown
from tests.gserver.tiny import engine_for, generate, job, make_model, prompt, response_logprobs, save

LORA = LoraConfig(rank=4, alpha=6.0)
NEAR = 2e-4
"""Nats; with the wrong adapter responses differ by more than a hundred times as much."""


def random_adapter(model: Any, seed: int, lora: LoraConfig = LORA) -> dict[str, Tensor]:
    specs = adapter_specs([(name, tuple(weight.shape)) for name, weight in model.named_parameters()], lora)
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) * 0.15 for name, shape in specs}


def with_adapter(model: Any, adapter: dict[str, Tensor], lora: LoraConfig = LORA) -> Any:
    """The transformers model whose weights have `adapter` added."""
    merged = copy.deepcopy(model)
    with torch.no_grad():
        for name, weight in merged.named_parameters():
            a, b = pair_of(name)
            if a in adapter:
                weight += lora.alpha / lora.rank * adapter[b] @ adapter[a]
    return merged


def written(folder: Path, adapter: dict[str, Tensor], lora: LoraConfig = LORA) -> Path:
    folder.mkdir()
    save_file(adapter, folder / f"{TENSORS}.safetensors")
    (folder / SETTINGS).write_text(json.dumps(adapter_settings(lora, "base")))
    return folder


async def update(engine: EmbeddedEngine, folder: Path, version: str) -> None:
    await engine.receiver.begin()
    await engine.load(folder, version)
    await engine.end_update()


def differs(model: Any, tokens: list[int], output: Output) -> float:
    """The largest difference of the response's log-probabilities from `model`'s."""
    return float((response_logprobs(model, tokens, output.output_ids) - torch.tensor(output.logprobs)).abs().max())


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model()


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(model, tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("shape", ["llama-biased", "qwen2", "qwen3"])
async def test_responses_are_those_of_the_model_with_the_adapter_added(
    tmp_path: Path, shape: str, deterministic: bool
) -> None:
    model = make_model(shape)
    adapter = random_adapter(model, 1)
    base, first = save(model, tmp_path / "base"), written(tmp_path / "adapter", adapter)
    async with engine_for(base, lora=LORA, adapter=first, deterministic=deterministic) as engine:
        jobs = [job(str(i), prompt(5 + 3 * i), logprob_start_len=0) for i in range(4)]
        outputs = await generate(engine, jobs)
        assert await engine.checksum() == weights_checksum(adapter)
    merged = with_adapter(model, adapter)
    for asked, output in zip(jobs, outputs, strict=True):
        assert differs(merged, asked.input_ids, output) < NEAR
        assert differs(model, asked.input_ids, output) > 100 * NEAR
        scored = response_logprobs(merged, asked.input_ids[:1], asked.input_ids[1:])
        torch.testing.assert_close(torch.tensor(output.input_logprobs[1:]), scored, rtol=0, atol=NEAR)


@pytest.mark.parametrize("deterministic", [False, True])
async def test_a_request_keeps_the_adapter_that_it_began_with(
    model: Any, folder: Path, tmp_path: Path, deterministic: bool
) -> None:
    adapters = [random_adapter(model, seed) for seed in range(3)]
    models = [with_adapter(model, adapter) for adapter in adapters]
    folders = [written(tmp_path / str(i), adapter) for i, adapter in enumerate(adapters)]
    params = {"max_new_tokens": 200}
    async with engine_for(
        folder, lora=LORA, adapter=folders[0], version="10", deterministic=deterministic, max_context=1024
    ) as engine:
        tickets = []
        for number in range(3):
            if number:
                await engine.pause("in_place")
                await update(engine, folders[number], str(10 + number))
                await engine.resume()
            tickets.append(
                [engine.submit(job(f"{number}-{i}", prompt(20), params=params, stream=True)) for i in (0, 1)]
            )
            for ticket in tickets[-1]:
                await grown(ticket, 2)
        await engine.pause("in_place")
        assert engine.stats()["adapters"] == 3
        assert all(not ticket.done for pair in tickets for ticket in pair)
        await engine.resume()
        outputs = [[await ticket.result() for ticket in pair] for pair in tickets]
        assert engine.stats()["adapters"] == 1
        [late] = await generate(engine, [job("late", prompt(20))])  # after a prompt that all three have computed
    for number, pair in enumerate(outputs):
        for output in pair:
            assert differs(models[number], prompt(20), output) < NEAR
            assert [(span.version, span.end) for span in output.spans] == [(str(10 + number), 200)]
            assert output.weight_version == str(10 + number)
    assert differs(models[2], prompt(20), late) < NEAR
    assert late.weight_version == "12"


async def test_a_new_adapter_changes_nothing_and_one_that_does_not_fit_is_refused(
    model: Any, folder: Path, tmp_path: Path
) -> None:
    wrong = written(tmp_path / "wrong", random_adapter(model, 0, LoraConfig(rank=2)))
    async with engine_for(folder, lora=LORA, version="3") as engine:
        [before] = await generate(engine, [job("a", prompt(8))])
        with pytest.raises(ModelError, match="other tensors"):
            await engine.load(wrong, "1")
        await engine.receiver.begin()
        with pytest.raises(Refused, match="shape"):
            await engine.load(wrong, "1")
        assert engine.weight_version == "3"
    assert differs(model, prompt(8), before) < NEAR
    with pytest.raises(ModelError, match="r is 8, and"):
        async with engine_for(folder, lora=LORA, adapter=written(tmp_path / "rank", {}, LoraConfig(rank=8))):
            pass
