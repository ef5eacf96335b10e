"""What the engine does not compute twice, and how long prompts are cut: against transformers, token by token."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from streamrl.gserver.embedded.engine import EmbeddedEngine
from streamrl.gserver.embedded.scheduler import CHUNK_TOKENS
from tests.gserver.embedded.test_engine_requests import grown
from tests.gserver.tiny import assert_sampled, engine_for, generate, job, make_model, prompt, save

LONG = 900


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model("qwen2-untied-linear-rope")


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(model, tmp_path_factory.mktemp("model"))


check = partial(assert_sampled, atol=1e-5)


async def test_turns_share_what_finished_turns_left_though_others_came_between(folder: Path, model: Any) -> None:
    async with engine_for(folder, max_running=2) as engine:
        turn = prompt(40)
        for number in range(4):
            [output] = await generate(engine, [job(f"turn {number}", turn)])
            check(model, turn, output)
            expected = 0 if number == 0 else len(turn) - 8  # all but the last sampled token, and what follows it
            assert output.cached_tokens == expected
            others = [prompt(30 + number, seed=s) for s in (1, 2, 3)]  # they take every slot
            for ids, other in zip(others, await generate(engine, [job(str(ids), ids) for ids in others]), strict=True):
                check(model, ids, other)
            turn = [*turn, *output.output_ids, *prompt(7, seed=number)]
        assert engine.stats()["prompt_tokens_cached_total"] >= 3 * 40


async def test_an_interrupted_response_goes_on_from_what_was_computed(folder: Path, model: Any) -> None:
    async with engine_for(folder, max_context=1024) as engine:
        params = {"max_new_tokens": 900}
        ticket = engine.submit(job("cut", prompt(30), params=params, stream=True))
        await grown(ticket, 12)
        await engine.abort("cut")
        first = await ticket.result()
        resumed = [*prompt(30), *first.output_ids]
        [rest] = await generate(engine, [job("rest", resumed)])
        assert rest.cached_tokens == len(resumed) - 1
        check(model, resumed, rest)


async def test_the_least_recently_used_go_first_and_memory_is_bounded(folder: Path) -> None:
    async with engine_for(folder) as probe:
        token_bytes = probe._scheduler._cache.token_bytes
    room = 130 * token_bytes  # for two sequences of 60 + 4
    async with engine_for(folder, prefix_cache_bytes=room) as engine:

        async def cached(seed: int) -> int:
            ids = prompt(60, seed=seed)
            [output] = await generate(engine, [job(f"{seed}", ids, params={"max_new_tokens": 5, "temperature": 0.0})])
            assert engine._scheduler._prefixes.kept_bytes <= room
            return output.cached_tokens

        assert [await cached(seed) for seed in (1, 2, 1, 3)] == [0, 0, 59, 0]  # 3 takes the place of 2
        assert [await cached(seed) for seed in (1, 2)] == [59, 0]
    async with engine_for(folder, prefix_cache_bytes=0) as engine:
        assert [await cached(seed) for seed in (1, 1)] == [0, 0]


async def test_decoding_goes_on_between_the_chunks_of_a_long_prompt(folder: Path, model: Any) -> None:
    async with engine_for(folder, max_running=4, max_context=2048, prefill_tokens=CHUNK_TOKENS) as engine:
        scheduler = engine._scheduler
        steps: list[tuple[int, int]] = []
        step = scheduler.step

        def counted() -> None:
            before = scheduler.prompt_tokens, scheduler.tokens_generated
            step()
            steps.append((scheduler.prompt_tokens - before[0], scheduler.tokens_generated - before[1]))

        scheduler.step = counted  # type: ignore[method-assign]
        running = engine.submit(job("running", prompt(20), params={"max_new_tokens": 1500}, stream=True))
        await grown(running, 3)
        await engine.pause("in_place")
        del steps[:]
        late = [engine.submit(job(f"long {seed}", prompt(LONG, seed=seed))) for seed in (1, 2)]
        short = engine.submit(job("short", prompt(9, seed=3)))
        await engine.resume()
        outputs = [await ticket.result() for ticket in (*late, short)]
        await engine.abort("running")
        whole = await running.result()
        computing = [tokens for tokens, _ in steps if tokens]
        assert max(computing) <= CHUNK_TOKENS
        assert sum(computing) == 2 * LONG + 9
        assert len(computing) == -(-sum(computing) // CHUNK_TOKENS)
        assert all(made >= 1 for tokens, made in steps if tokens)  # whoever runs gets a token in every step
    check(model, prompt(20), whole)
    for ids, output in zip((prompt(LONG, seed=1), prompt(LONG, seed=2), prompt(9, seed=3)), outputs, strict=True):
        assert output.cached_tokens == 0
        check(model, ids, output)


def pause_once_cut(engine: EmbeddedEngine) -> None:
    """Pause in the middle of the next long prompt."""
    scheduler = engine._scheduler
    step = scheduler.step

    def once() -> None:
        step()
        if scheduler._cut is not None:
            scheduler.step = step  # type: ignore[method-assign]
            scheduler.pause("in_place")

    scheduler.step = once  # type: ignore[method-assign]


@pytest.mark.parametrize("event", ["abort", "weights", "retract", "finish of the one before"])
async def test_what_happens_in_the_middle_of_a_prompt(folder: Path, model: Any, event: str, tmp_path: Path) -> None:
    new = make_model("qwen2-untied-linear-rope", seed=1)
    other = save(new, tmp_path)
    async with engine_for(folder, max_running=2, max_context=2048, prefill_tokens=CHUNK_TOKENS) as engine:
        first = engine.submit(job("first", prompt(10), params={"max_new_tokens": 1500}, stream=True))
        await grown(first, 2)
        await engine.pause("in_place")
        pause_once_cut(engine)
        long = engine.submit(job("long", prompt(LONG), stream=True))
        await engine.resume()
        while not engine._scheduler.paused:
            await engine.set_version("0")  # a command waits for the step before it
        assert engine._scheduler._cut is not None
        now = model
        if event == "abort":
            await engine.abort("long")
            assert (await long.result()).output_ids == []
            long = engine.submit(job("again", prompt(LONG)))
        elif event == "weights":
            await engine.load(other, "1")
            now = new
        elif event == "retract":
            await engine.pause("retract")
        else:
            await engine.abort("first")
        await engine.resume()
        output = await long.result()
        check(now, prompt(LONG), output)
        await engine.abort("first")
        [after] = await generate(engine, [job("after", prompt(LONG))])
        assert after.cached_tokens == LONG - 1
        check(now, prompt(LONG), after)
