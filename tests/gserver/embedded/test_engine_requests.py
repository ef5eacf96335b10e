"""When responses end, what aborts and pauses do, and how the engine survives failures."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from streamrl.errors import Refused
from streamrl.gserver.embedded.engine import EmbeddedEngine
from streamrl.gserver.server.engine import GenerationFailed, Output, Ticket
from streamrl.transport.generation import FinishReason, SamplingParams
from tests.gserver.tiny import (
    EOS,
    assert_sampled,
    engine_for,
    generate,
    job,
    make_model,
    prompt,
    response_logprobs,
    save,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model(), tmp_path_factory.mktemp("model"))


async def grown(ticket: Ticket, tokens: int) -> Output:
    """Wait until a streamed response has so many tokens."""
    async for output in ticket.updates():
        if len(output.output_ids) >= tokens:
            return output
    raise AssertionError("the response ended")


async def test_prompts_are_answered_in_order_with_the_policy_of_each_token(folder: Path) -> None:
    prompts = [prompt(4, seed=1), prompt(9, seed=2)]
    async with EmbeddedEngine(folder=folder, max_context=64) as engine:
        first = await engine.generate(prompts, SamplingParams(max_new_tokens=8, n=2, ignore_eos=True))
        await engine.set_version("7")
        (later,) = await engine.generate(prompts[:1], [SamplingParams(max_new_tokens=3, ignore_eos=True)])
    assert [response.versions for response in (*first, later)] == [[0] * 8] * 4 + [[7] * 3]
    assert first[0].output_ids != first[1].output_ids
    for asked, response in zip([0, 0, 1, 1], first, strict=True):
        expected = response_logprobs(make_model(), prompts[asked], response.output_ids)
        torch.testing.assert_close(torch.tensor(response.logprobs), expected, atol=1e-4, rtol=0)


async def test_prompts_without_room_are_refused_and_an_abandoned_call_leaves_nothing_running(folder: Path) -> None:
    async with EmbeddedEngine(folder=folder, max_context=2000) as engine:
        with pytest.raises(Refused, match="max_new_tokens"):
            await engine.generate([prompt(4)], SamplingParams(max_new_tokens=2000))
        abandoned = engine.generate([prompt(4)], SamplingParams(max_new_tokens=1900, ignore_eos=True))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(abandoned, 0.2)
        assert await engine.abort_all() == 0


async def test_min_new_tokens_holds_stops_back(folder: Path) -> None:
    async with engine_for(folder) as engine:
        one = {"min_new_tokens": 12, "max_new_tokens": 20, "stop_token_ids": [3], "ignore_eos": False}
        several = await generate(engine, [job(f"s{i}", prompt(4), params=one) for i in range(8)])
    for output in several:
        assert len(output.output_ids) >= 13
        assert not {3, EOS} & set(output.output_ids[:12])


async def test_top_logprobs_of_the_response(folder: Path) -> None:
    async with engine_for(folder) as engine:
        jobs = [job("a", prompt(8), top_logprobs_num=4), job("b", prompt(9)), job("c", prompt(10), top_logprobs_num=1)]
        outputs = await generate(engine, jobs)
    assert [len(output.top_logprobs) for output in outputs] == [20, 0, 20]
    for output, count in ((outputs[0], 4), (outputs[2], 1)):
        for pairs, token, logprob in zip(output.top_logprobs, output.output_ids, output.logprobs, strict=True):
            values = [value for value, _ in pairs]
            assert len(pairs) == count
            assert values == sorted(values, reverse=True)
            assert logprob <= values[0] + 1e-6
            assert dict((t, v) for v, t in pairs).get(token, logprob) == pytest.approx(logprob, abs=1e-5)


async def test_more_requests_than_slots_and_growing_caches(folder: Path) -> None:
    model = make_model()
    async with engine_for(folder, max_running=20, max_context=700) as engine:
        before = engine.stats()["cache_bytes"]
        jobs = [job(str(i), prompt(3 + 11 * i), params={"max_new_tokens": 5 + 13 * (i % 7)}) for i in range(30)]
        outputs = await generate(engine, jobs)
        stats = engine.stats()
    assert stats["cache_bytes"] > before
    assert stats["running"] == stats["queued"] == 0
    assert stats["tokens_generated_total"] == sum(one.params.max_new_tokens for one in jobs)
    assert stats["requests_total"] == 30
    assert stats["slot_seconds_total"] > stats["busy_seconds_total"] > 0
    for one, output in zip(jobs, outputs, strict=True):
        assert_sampled(model, one.input_ids, output)


async def test_aborts_answer_with_what_there_is(folder: Path) -> None:
    async with engine_for(folder, max_running=2, max_context=1024) as engine:
        long = {"max_new_tokens": 1000}
        running = engine.submit(job("run", prompt(5), params=long, stream=True))
        await grown(running, 3)
        other = engine.submit(job("other", prompt(6), params=long, stream=True))
        waiting = engine.submit(job("wait", prompt(7), params=long))
        await grown(other, 1)
        assert not await engine.abort("nobody")
        assert await engine.abort("wait")
        assert await engine.abort("run")
        assert await engine.abort_all() == 1
        outputs = [await ticket.result() for ticket in (running, waiting, other)]
        assert engine.stats()["running"] == 0
        [after] = await generate(engine, [job("after", prompt(5))])
    assert [output.finish_reason and output.finish_reason.type for output in outputs] == ["abort"] * 3
    assert len(outputs[0].output_ids) >= 3
    assert outputs[1].output_ids == []
    assert len(after.output_ids) == 20


@pytest.mark.parametrize("deterministic", [False, True])
async def test_scores_of_a_prompt_wait_neither_for_a_slot_nor_for_an_update(deterministic: bool, folder: Path) -> None:
    scored = {"params": {"max_new_tokens": 0}, "logprob_start_len": 0}
    async with asyncio.timeout(60), engine_for(folder, max_running=1, deterministic=deterministic) as engine:
        running = engine.submit(job("run", prompt(5), params={"max_new_tokens": 400}, stream=True))
        waiting = engine.submit(job("wait", prompt(6)))
        await grown(running, 3)
        outputs = [await engine.submit(job("now", prompt(9), **scored)).result()]
        before_a_pause = engine.submit(job("before", prompt(9), **scored))
        await engine.pause("in_place")
        await engine.set_version("1")
        during_a_pause = engine.submit(job("during", prompt(9), **scored))
        outputs.append(await before_a_pause.result())
        assert not during_a_pause.done
        assert not running.done
        await engine.resume()
        outputs.append(await during_a_pause.result())
        assert not waiting.done
        responses = [await ticket.result() for ticket in (running, waiting)]
    assert [output.weight_version for output in outputs] == ["default", "default", "1"]
    for output in outputs:
        assert (output.output_ids, output.finish_reason) == ([], FinishReason("length", length=0))
        torch.testing.assert_close(
            torch.tensor(output.input_logprobs[1:]),
            response_logprobs(make_model(), prompt(9)[:1], prompt(9)[1:]),
            atol=1e-4,
            rtol=0,
        )
    assert [len(output.output_ids) for output in responses] == [400, 20]


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_paused_requests_go_on_where_they_were(mode: Any, folder: Path) -> None:
    params = {"max_new_tokens": 400, "sampling_seed": 2}
    async with engine_for(folder, max_running=2, max_context=1024) as engine:
        tickets = [engine.submit(job(str(i), prompt(5 + i), params=params, stream=True)) for i in range(3)]
        await grown(tickets[1], 3)
        await engine.pause(mode)
        paused = engine.stats()
        if mode == "in_place":
            assert paused["running"] == 2
        else:
            assert (paused["running"], paused["queued"]) == (0, 3)
        late = engine.submit(job("late", prompt(3)))
        await asyncio.sleep(0.05)
        assert engine.stats()["tokens_generated_total"] == paused["tokens_generated_total"]
        await engine.resume()
        outputs = [await ticket.result() for ticket in [*tickets, late]]
        [again] = await generate(engine, [job("again", prompt(5), params=params)])
    assert [len(output.output_ids) for output in outputs] == [400, 400, 400, 20]
    assert outputs[0].num_retractions == (mode == "retract")
    assert outputs[0].output_ids == again.output_ids
    assert engine.stats()["pause_seconds_total"] > 0.04


async def test_a_failed_step_fails_its_requests_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine_for(folder) as engine:
        model = engine._scheduler._model
        broken = {"decode": True, "extend": False}
        for name in broken:
            works = getattr(model, name)

            def call(*args: Any, works: Any = works, name: str = name, **settings: Any) -> Any:
                if broken[name]:
                    broken[name] = False
                    raise RuntimeError("out of memory")
                return works(*args, **settings)

            monkeypatch.setattr(model, name, call)
        failed = engine.submit(job("a", prompt(5)))
        with pytest.raises(GenerationFailed, match=r"token could not be computed.*out of memory"):
            await failed.result()
        broken["extend"] = True
        failed = engine.submit(job("b", prompt(5)))
        with pytest.raises(GenerationFailed, match=r"prompt could not be computed.*out of memory"):
            await failed.result()
        [output] = await generate(engine, [job("c", prompt(5))])
        assert engine.stats()["running"] == 0
    assert len(output.output_ids) == 20


async def test_broken_weights_are_named(folder: Path) -> None:
    async with engine_for(folder) as engine:
        live = engine._weights.served
        good = live.named["model.norm.weight"].clone()
        await engine._do(lambda: live.update({"model.norm.weight": torch.full_like(good, float("nan"))}))
        ticket = engine.submit(job("a", prompt(5)))
        with pytest.raises(GenerationFailed, match="NaN"):
            await ticket.result()
        await engine._do(lambda: live.update({"model.norm.weight": good}))
        [output] = await generate(engine, [job("b", prompt(50))])
    assert len(output.output_ids) == 20
