"""With `deterministic`, a response's bits do not depend on what else the engine does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from streamrl.gserver.server.engine import Job, Output
from tests.gserver.embedded.test_engine_requests import grown
from tests.gserver.tiny import engine_for, generate, job, make_model, prompt, response_logprobs, save

LENGTH = 30
SHAPES = ["qwen3", "llama-biased", "qwen2-untied-linear-rope"]


def wanted() -> list[Job]:
    """Requests whose bits are looked at; two are siblings, which share their prompt."""
    prompts = [prompt(10), prompt(10), prompt(37, seed=1), prompt(3)]
    return [
        job(str(i), ids, params={"sampling_seed": i, "max_new_tokens": LENGTH, "temperature": 1.0 - 0.1 * i})
        for i, ids in enumerate(prompts)
    ]


def crowd(count: int) -> list[Job]:
    """Others; some begin with the prompt of a wanted one, so that a cache could be shared."""
    prompts = [prompt(10)[: 4 + i % 6] + prompt(i, seed=2) for i in range(count)]
    return [job(f"other {i}", ids, params={"max_new_tokens": 20 + i}, stream=True) for i, ids in enumerate(prompts)]


def bits(outputs: list[Output]) -> list[tuple[list[int], list[float]]]:
    return [(output.output_ids, output.logprobs) for output in outputs]


@pytest.mark.parametrize("shape", SHAPES)
async def test_alone_among_others_in_any_order_and_after_retraction(tmp_path: Path, shape: str) -> None:
    model = make_model(shape)
    folder = save(model, tmp_path)
    alone = []
    for request in wanted():
        async with engine_for(folder, deterministic=True) as engine:
            alone += await generate(engine, [request])
    for output, request in zip(alone, wanted(), strict=True):
        expected = response_logprobs(model, request.input_ids, output.output_ids) if request.rid == "0" else None
        assert expected is None or (torch.tensor(output.logprobs) - expected).abs().max() < 1e-4

    async with engine_for(folder, deterministic=True, max_running=24) as engine:
        others = [engine.submit(other) for other in crowd(14)]
        await grown(others[-1], 5)  # all are running: there is room for them
        assert engine.stats()["running"] == 14
        assert bits(await generate(engine, wanted())) == bits(alone)
        assert bits((await generate(engine, wanted()[::-1]))[::-1]) == bits(alone)
        retractions = 0
        while not retractions:  # it may end before it is retracted, on a machine that does much else
            first = engine.submit(job("streamed", prompt(10), stream=True, params=vars_of(wanted()[0])))
            await grown(first, 3)
            await engine.pause("retract")
            await engine.resume()
            again = await first.result()
            assert bits([again]) == bits(alone[:1])
            retractions = again.num_retractions
        for other in others:
            await other.result()

    async with engine_for(folder, deterministic=True, max_running=2) as engine:  # holes are closed all the time
        assert bits(await generate(engine, wanted())) == bits(alone)


def vars_of(request: Job) -> dict[str, object]:
    params = request.params
    return {
        "sampling_seed": params.sampling_seed,
        "max_new_tokens": params.max_new_tokens,
        "temperature": params.temperature,
    }


async def test_a_failed_pass_fails_what_is_not_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(make_model(), tmp_path)
    async with engine_for(folder, deterministic=True) as engine:
        extend = engine._scheduler._model.extend

        def broken(extensions):  # type: ignore[no-untyped-def]
            if len(extensions[0].tokens) == 3:
                raise RuntimeError("out of memory")
            return extend(extensions)

        monkeypatch.setattr(engine._scheduler._model, "extend", broken)
        done = engine.submit(job("done", prompt(5), params={"max_new_tokens": 1}))
        failing = engine.submit(job("failing", prompt(3)))
        assert len((await done.result()).output_ids) == 1
        with pytest.raises(Exception, match="out of memory"):
            await failing.result()
        monkeypatch.undo()
        [after] = await generate(engine, [job("after", prompt(3))])
    assert len(after.output_ids) == 20
