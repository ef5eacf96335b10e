"""The embedded engine on top of transformers: any family, with versions, updates and pauses like the fast engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.models import save_family
from streamrl.causal_models import on_meta, weight_views
from streamrl.checksum import weights_checksum
from streamrl.config import LoraConfig
from streamrl.errors import ModelError
from streamrl.gserver.embedded.engine import EmbeddedEngine
from streamrl.gserver.embedded.general import BatchedModel, GeneralScheduler
from streamrl.gserver.server.engine import Output
from streamrl.gserver.server.receiver import StagedWeights
from tests.gserver.tiny import assert_sampled, engine_for, generate, job

PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [20, 21, 22], [20, 21, 22]]


def loaded(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def named(model: Any) -> dict[str, torch.Tensor]:
    """The model's weights as in the files of a checkpoint."""
    weights = {name: weight.detach() for name, weight in (*model.named_parameters(), *model.named_buffers())}
    views = weight_views(on_meta(model.config, dtype=torch.float32))
    return {name: view.of(weights[view.parameter]) for name, view in views.items()}


def check(outputs: list[Output], model: Any) -> None:
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert_sampled(model, prompt, output)


async def update(engine: EmbeddedEngine, model: Any, version: str) -> None:
    for name, weight in named(model).items():
        engine._updated.store(name, weight)
    await engine._swap(StagedWeights(version=version))


@pytest.mark.parametrize(
    ("family", "batched"),
    [("smollm3", True), ("gemma2", True), ("gpt_oss", True), ("deepseek_v3", True), ("qwen3_next", False)],
)
async def test_families_sample_from_their_own_distribution_before_and_after_an_update(
    family: str, batched: bool, tmp_path: Path
) -> None:
    folder = save_family(tmp_path / family, family)
    model = loaded(folder)
    jobs = [job(str(i), prompt, params={"max_new_tokens": 12}) for i, prompt in enumerate(PROMPTS)]
    async with engine_for(folder) as engine:
        assert isinstance(engine._scheduler._model, BatchedModel) == batched
        assert isinstance(engine._scheduler, GeneralScheduler) != batched
        check(await generate(engine, jobs), model)
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1.1)
        await update(engine, model, "1")
        outputs = await generate(engine, jobs)
        check(outputs, model)
        assert engine.weight_version == "1"
        served = await engine.checksum()
        expected = weights_checksum({name: weight.contiguous() for name, weight in named(model).items()})
        assert served == expected


async def test_a_retracted_response_continues_with_the_new_weights(tmp_path: Path) -> None:
    folder = save_family(tmp_path / "model", "falcon_h1")
    async with engine_for(folder) as engine:
        ticket = engine.submit(job("a", PROMPTS[0], params={"max_new_tokens": 200}))
        while engine.stats()["tokens_generated_total"] < 5:
            await engine.set_version("0")
        await engine.pause("retract")
        await engine.set_version("1")
        await engine.resume()
        output = await ticket.result()
    assert len(output.output_ids) == 200
    assert_sampled(loaded(folder), PROMPTS[0], output)


async def test_settings_of_the_fast_engine_are_refused_by_name(tmp_path: Path) -> None:
    folder = save_family(tmp_path / "model", "smollm3")
    with pytest.raises(ModelError, match=r"weights\.lora"):
        async with engine_for(folder, lora=LoraConfig(rank=2)):
            pass
