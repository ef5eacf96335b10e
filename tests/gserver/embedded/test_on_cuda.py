"""The embedded engine on a GPU computes what transformers computes on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from streamrl.checksum import checksums, copy_and_sum, tensor_sums, weights_checksum
from tests.devices import DEVICE, ON_DEVICE
from tests.gserver.tiny import (
    SHAPES,
    assert_sampled,
    engine_for,
    generate,
    job,
    logprobs_of,
    make_model,
    prompt,
    response_logprobs,
    save,
    weights_of,
)

pytestmark = ON_DEVICE

LENGTHS = (1, 2, 7, 7, 33, 90, 150)
TOLERANCE = 5e-4
"""Nats in float32: sums are made in another order than on the CPU."""
BFLOAT16_MEAN = 0.05
"""Nats, on average over many tokens of a lively distribution."""


@pytest.mark.parametrize("shape", SHAPES)
async def test_sampled_logprobs_are_those_of_transformers(shape: str, tmp_path: Path) -> None:
    model = make_model(shape)
    jobs = [job(str(i), prompt(n, seed=i), params={"max_new_tokens": 5 + 6 * i}) for i, n in enumerate(LENGTHS)]
    async with engine_for(save(model, tmp_path), device=DEVICE, max_running=4) as engine:
        outputs = await generate(engine, jobs)
    for one, output in zip(jobs, outputs, strict=True):
        assert len(output.output_ids) == one.params.max_new_tokens
        assert_sampled(model, one.input_ids, output, atol=TOLERANCE)


async def test_greedy_tokens_are_among_the_likeliest(tmp_path: Path) -> None:
    model = make_model(seed=1)
    jobs = [job(str(i), prompt(n, seed=i), params={"temperature": 0.0}) for i, n in enumerate(LENGTHS)]
    async with engine_for(save(model, tmp_path), device=DEVICE) as engine:
        outputs = await generate(engine, jobs)
    for one, output in zip(jobs, outputs, strict=True):
        every = logprobs_of(model, [*one.input_ids, *output.output_ids])[len(one.input_ids) - 1 : -1]
        chosen = every.gather(1, torch.tensor(output.output_ids)[:, None])[:, 0]
        assert torch.allclose(chosen, every.amax(-1), atol=TOLERANCE)  # another one only if it is as likely


async def test_filtered_draws_stay_among_what_the_filters_leave(tmp_path: Path) -> None:
    model = make_model()
    jobs = [
        job(str(i), prompt(9 + i), params={"temperature": 0.8, "top_k": 3, "top_p": 0.9, "min_p": 0.05})
        for i in range(4)
    ]
    async with engine_for(save(model, tmp_path), device=DEVICE) as engine:
        outputs = await generate(engine, jobs)
    for one, output in zip(jobs, outputs, strict=True):
        every = logprobs_of(model, [*one.input_ids, *output.output_ids], temperature=0.8)[len(one.input_ids) - 1 : -1]
        chosen = every.gather(1, torch.tensor(output.output_ids)[:, None])[:, 0]
        assert bool((chosen >= every.topk(3).values[:, -1] - TOLERANCE).all())
        assert torch.allclose(torch.tensor(output.logprobs), chosen, atol=TOLERANCE)


async def test_what_was_computed_is_continued_and_scored(tmp_path: Path) -> None:
    """Siblings, later turns, long prompts in parts, and log-probabilities of a prompt: all ways into the cache."""
    model, shared = make_model(), prompt(60)
    async with engine_for(save(model, tmp_path), device=DEVICE, prefill_tokens=64) as engine:
        first = await generate(engine, [job(f"a{i}", shared) for i in range(6)])
        turn = [*shared, *first[0].output_ids, *prompt(5)]
        later, long, scored = await generate(
            engine, [job("b", turn), job("c", prompt(400)), job("d", turn, logprob_start_len=0)]
        )
    assert later.cached_tokens >= 60
    for output in first:
        assert_sampled(model, shared, output, atol=TOLERANCE)
    for ids, output in ((turn, later), (prompt(400), long)):
        assert_sampled(model, ids, output, atol=TOLERANCE)
    of_prompt = logprobs_of(model, turn)[:-1].gather(1, torch.tensor(turn[1:])[:, None])[:, 0]
    assert torch.allclose(torch.tensor(scored.input_logprobs[1:]), of_prompt, atol=TOLERANCE)


async def test_bfloat16_is_near(tmp_path: Path) -> None:
    model = make_model()
    one = job("a", prompt(33), params={"max_new_tokens": 200})
    async with engine_for(save(model, tmp_path), device=DEVICE, dtype=torch.bfloat16) as engine:
        [output] = await generate(engine, [one])
    expected = response_logprobs(model, one.input_ids, output.output_ids)
    assert float((torch.tensor(output.logprobs) - expected).abs().mean()) < BFLOAT16_MEAN


async def test_new_weights_are_served_and_have_the_checksum_of_those_on_the_cpu(tmp_path: Path) -> None:
    old, new = make_model(seed=0), make_model(seed=1)
    other = save(new, tmp_path / "new")
    async with engine_for(save(old, tmp_path / "old"), device=DEVICE) as engine:
        await generate(engine, [job("a", prompt(30))])
        await engine.load(other, "1")
        assert (await engine.checksum()).total == weights_checksum(weights_of(new)).total
        [output] = await generate(engine, [job("b", prompt(30))])
    assert_sampled(new, prompt(30), output, atol=TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7,), (1, 1), (33, 65), (3, 5, 7)])
def test_sums_of_a_tensor_are_those_on_the_cpu(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    there = numbers.to(DEVICE)
    assert tensor_sums(there) == tensor_sums(numbers)
    for target, source in ((torch.zeros_like(there), numbers), (torch.zeros_like(numbers), there)):
        assert checksums({"a": copy_and_sum(target, source)}) == {"a": tensor_sums(numbers)}


@pytest.mark.parametrize("shape", ["qwen3", "llama"])
async def test_recorded_steps_draw_the_tokens_of_eager_ones(shape: str, tmp_path: Path) -> None:
    """Batches shrink, prompts arrive in between, the cache grows, and other weights are served: twice, in turn."""
    folders = [save(make_model(shape, seed=seed), tmp_path / str(seed)) for seed in (0, 1)]
    lengths = (3, 40, 40, 90, 150, 5, 7, 60)
    found = []
    for ways in ({"cuda_graphs": False}, {"overlap": False}, {"overlap": True}):
        async with engine_for(folders[0], device=DEVICE, max_running=6, seed=7, **ways) as engine:
            outputs = []
            for version in range(4):
                params = {"sampling_seed": 1, "max_new_tokens": 10}
                jobs = [
                    job(f"{version}.{i}", prompt(n, seed=i), params={**params, "max_new_tokens": 10 + 20 * i})
                    for i, n in enumerate(lengths)
                ]
                outputs += await generate(engine, jobs)
                await engine.load(folders[(version + 1) % 2], str(version + 1))
        found.append(outputs)
    for eager, recorded, overlapped in zip(*found, strict=True):
        assert recorded.output_ids == overlapped.output_ids == eager.output_ids
        assert torch.allclose(torch.tensor(recorded.logprobs), torch.tensor(eager.logprobs), atol=TOLERANCE)
        assert torch.allclose(torch.tensor(overlapped.logprobs), torch.tensor(eager.logprobs), atol=TOLERANCE)
