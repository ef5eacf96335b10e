"""Held-out prompts in whole rollout workers, between a real manager and a scripted engine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from streamrl.config import Config, by_task, from_dict
from streamrl.config.sections import as_evaluated
from streamrl.errors import DataError
from streamrl.rollout.data import PromptSource
from streamrl.rollout.worker import serve
from streamrl.transport.generation import GenerateReply, GenerateRequest, SamplingParams
from tests.gserver.harness import keep_beating
from tests.processes import assert_no_more_than, below
from tests.rollout.characters import make_chat, save_tokenizer
from tests.rollout.engine import Engine, answer, failure, serving
from tests.rollout.evaluating import evaluating

CHAT = make_chat()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("model"))


def configure(folder: Path, *, data: dict[str, Any] | None = None, **evaluation: Any) -> Config:
    chosen = {"every": "1 step", "samples": 3, "sampling": {"temperature": 0.7, "top_p": 0.9, "max_new_tokens": 11}}
    return from_dict(
        {
            "run": {"dir": str(folder), "seed": 5},
            "data": {"source": "python", "path": "tests.rollout.user_code:row", "size": 20, **(data or {})},
            "rollout": {"reward": {"function": "tests.rollout.user_code:length_reward"}, "sibling_retries": 0},
            "limits": {"heartbeat_seconds": 0.05},
            "evaluation": {**chosen, "max_concurrent": 2, "pass_reward": 3.0, **evaluation},
        }
    )


def length_of(request: GenerateRequest) -> int:
    """How long the scripted answer to `request` is: 1 to 4 tokens, by its prompt and which sibling it is."""
    assert isinstance(request.rid, str)
    sibling = int(request.rid.split(".")[1])
    return 1 + (len(prompt_of(request)) + prompt_of(request)[-1] + sibling) % 4


def prompt_of(request: GenerateRequest) -> list[int]:
    assert request.input_ids is not None
    return [token for token in request.input_ids if isinstance(token, int)]


def say(request: GenerateRequest, number: int) -> GenerateReply:
    return answer([5] * length_of(request), version=str(number % 3), finish="stop" if number % 2 else "length")


async def test_each_task_has_its_own_held_out_prompts_and_figures(tmp_path: Path, model_dir: Path) -> None:
    plain = configure(tmp_path, prompts=4)
    short = {"name": "short", "data": {"args": {"word": "thing"}}, "evaluation": {"prompts": 2}}
    long = {"name": "long", "evaluation": {"sampling": {"max_new_tokens": 9}}}
    config = from_dict({**msgspec.to_builtins(plain), "tasks": [short, long]})
    async with serving(say) as engine, evaluating(config, model_dir, gservers=(engine.url,)) as on:
        report = await on.evaluate(version=7)
        await on.finish()
    assert {name: (own.prompts, own.samples) for name, own in report.tasks.items()} == {"short": (2, 3), "long": (4, 3)}
    assert report.prompts == 6
    for name, limit, number in (("short", 11, 2), ("long", 9, 4)):
        source = PromptSource.open(as_evaluated(by_task(config)[name]), CHAT)
        wanted = [source.prompt(seq).input_ids for seq in range(number)] * 3
        asked = [
            prompt_of(request)
            for request in engine.requests
            if isinstance(request.sampling_params, SamplingParams) and request.sampling_params.max_new_tokens == limit
        ]
        assert sorted(asked) == sorted(wanted)


async def test_what_it_reports_is_what_the_gserver_said(tmp_path: Path, model_dir: Path) -> None:
    config = configure(tmp_path, prompts=6)
    async with serving(say) as engine, evaluating(config, model_dir, gservers=(engine.url,)) as on:
        report = await on.evaluate(version=7)
        worker = await on.run.process("rollout")
        assert worker.stats["groups_done_total"] == worker.stats["tokens_generated_total"] == 0  # training's figures
        ledger = (await on.run.client.status()).ledger
        assert (ledger.next_seq, ledger.accepted, ledger.rejected) == (0, 0, 0)
        await on.finish()
    source = PromptSource.open(as_evaluated(config), CHAT)
    wanted = [source.prompt(number).input_ids for number in range(6)]
    asked = [prompt_of(request) for request in engine.requests]
    assert sorted(asked) == sorted(wanted * 3)
    training = PromptSource.open(config, CHAT)
    assert not any(prompt in asked for prompt in (training.prompt(seq).input_ids for seq in range(20)))
    for request in engine.requests:
        params = request.sampling_params
        assert isinstance(params, SamplingParams)
        assert (params.temperature, params.top_p, params.top_k, params.max_new_tokens) == (0.7, 0.9, -1, 11)
    lengths = [length_of(request) for request in engine.requests]
    assert (report.policy_version, report.step, report.prompts, report.samples) == (7, 7, 6, 3)
    assert (report.oldest_version, report.newest_version, report.rejected) == (0, 2, 0)
    assert report.reward_mean == pytest.approx(sum(lengths) / 18)
    assert report.response_length_mean == pytest.approx(sum(lengths) / 18)
    assert report.cut_share == pytest.approx(0.5)
    solved = [
        sum(length_of(request) >= 3 for request in engine.requests if prompt_of(request) == prompt) for prompt in wanted
    ]
    assert report.pass_at[1] == pytest.approx(sum(solved) / 18)
    assert report.pass_at[3] == pytest.approx(sum(count > 0 for count in solved) / 6)
    assert report.seconds > 0


@pytest.mark.parametrize("workers", [1, 2])
async def test_each_evaluation_asks_the_same_all_rows_by_default_and_never_too_many_at_once(
    tmp_path: Path, model_dir: Path, workers: int
) -> None:
    most = running = 0

    async def script(request: GenerateRequest, number: int) -> GenerateReply:
        nonlocal most, running
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.1)
        running -= 1
        return answer([5], version="0")

    config = configure(tmp_path)
    async with serving(script) as engine, evaluating(config, model_dir, gservers=(engine.url,), workers=workers) as on:
        assert (await on.evaluate(1)).prompts == 20
        assert (await on.evaluate(2)).prompts == 20
        await on.finish()

    def as_sent(requests: list[GenerateRequest]) -> list[Any]:
        return sorted((prompt_of(r), getattr(r.sampling_params, "sampling_seed", None)) for r in requests)

    assert as_sent(engine.requests[:60]) == as_sent(engine.requests[60:])  # seeds included: less noise between them
    assert most == 2 * 3


async def test_a_prompt_that_fails_is_rejected_alone(tmp_path: Path, model_dir: Path) -> None:
    config = configure(tmp_path, prompts=6)
    bad = PromptSource.open(as_evaluated(config), CHAT).prompt(4).input_ids

    def script(request: GenerateRequest, number: int) -> Any:
        return failure(400, "no such token") if prompt_of(request) == bad else say(request, number)

    async with serving(script) as engine, evaluating(config, model_dir, gservers=(engine.url,)) as on:
        report = await on.evaluate()
        assert (report.prompts, report.rejected) == (5, 1)
        assert report.failure is not None
        assert (report.failure.count, "no such token" in report.failure.error) == (1, True)
        assert report.failure.example.startswith("row ")
        status = await on.run.client.status()
        assert (status.state, status.ledger.rejected) == ("running", 0)
        await on.finish()


async def test_a_held_out_sample_that_fails_is_made_again(tmp_path: Path, model_dir: Path) -> None:
    config = configure(tmp_path, prompts=4)
    rollout = msgspec.structs.replace(config.rollout, sibling_retries=1, on_failed_sibling="shrink")

    def script(request: GenerateRequest, number: int) -> Any:
        return answer([5], version="0") if "+" in str(request.rid) else failure(400)  # all first attempts fail

    config = msgspec.structs.replace(config, rollout=rollout)
    async with serving(script) as engine, evaluating(config, model_dir, gservers=(engine.url,)) as on:
        report = await on.evaluate()
        await on.finish()
    assert (report.prompts, report.rejected) == (4, 0)
    assert len(engine.requests) == 2 * 4 * 3


@pytest.mark.parametrize("ending", ["stop", "cancel"])
async def test_the_end_of_the_run_leaves_nothing_behind(tmp_path: Path, model_dir: Path, ending: str) -> None:
    before = below()

    async def hang(request: GenerateRequest, number: int) -> GenerateReply:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async with serving(hang) as engine, evaluating(configure(tmp_path), model_dir, gservers=(engine.url,)) as on:
        on.ask()
        await until_asked(engine, 6)
        if ending == "stop":
            await on.finish()
        else:
            on.workers[0].cancel()
            with pytest.raises(asyncio.CancelledError):
                await on.workers[0]
        await engine.until_cancelled(6)
    await assert_no_more_than(before)
    assert {task.get_name() for task in asyncio.all_tasks()} <= {asyncio.current_task().get_name()}  # type: ignore[union-attr]


async def until_asked(engine: Engine, count: int) -> None:
    async with asyncio.timeout(30):
        while len(engine.requests) < count:
            engine.arrived.clear()
            await engine.arrived.wait()
            await asyncio.sleep(0)


async def test_held_out_data_that_cannot_be_read_stops_the_run_with_the_reason(tmp_path: Path, model_dir: Path) -> None:
    config = from_dict(
        {
            "run": {"dir": str(tmp_path)},
            "data": {"source": "python", "path": "tests.rollout.user_code:row"},
            "rollout": {"reward": {"function": "tests.rollout.user_code:length_reward"}, "sibling_retries": 0},
            "evaluation": {"at_end": True, "data": {"source": "jsonl", "path": "nowhere.jsonl"}},
        }
    )
    async with evaluating(config, model_dir) as on:
        with pytest.raises(DataError, match=r"nowhere\.jsonl"):
            async with asyncio.timeout(30):
                await on.workers[0]
        status = await on.run.client.status()
        assert status.state == "failed"
        assert "rollout/0: the data of [evaluation.data]: DataError" in status.message


async def test_the_prompts_of_a_worker_that_dies_are_made_by_another(tmp_path: Path, model_dir: Path) -> None:
    async def script(request: GenerateRequest, number: int) -> GenerateReply:
        if number < 6:  # the two prompts of the first worker
            await asyncio.Event().wait()
        return say(request, number)

    config = configure(tmp_path, prompts=5)
    config = msgspec.structs.replace(config, limits=msgspec.structs.replace(config.limits, silence_seconds=2.0))
    async with serving(script) as engine, evaluating(config, model_dir, gservers=(engine.url,)) as on:
        beating = asyncio.create_task(keep_beating(on.run, "gserver", "model_worker"))
        on.ask()
        await until_asked(engine, 6)
        on.workers[0].cancel()
        await asyncio.wait(on.workers)
        second = asyncio.create_task(serve(config, manager_url=on.run.url, index=1, model_dir=model_dir))
        on.workers[:] = [second]
        report = await on.report()
        assert (report.prompts, report.rejected) == (5, 0)
        beating.cancel()
        await on.finish()


@pytest.mark.parametrize("shared", [True, False])
async def test_reward_processes_are_those_of_training_if_a_function_scores_there(
    tmp_path: Path, model_dir: Path, shared: bool
) -> None:
    config = configure(tmp_path, prompts=4)
    if not shared:
        config = msgspec.structs.replace(
            config, reward_model=msgspec.structs.replace(config.reward_model, path="judge")
        )
    before = len(below())
    async with serving(say) as engine, evaluating(config, model_dir, gservers=(engine.url,)) as on:
        await on.run.until(lambda status: any(p.waiting_for == "room in the ledger" for p in status.processes))
        started = len(below())
        assert (started > before) == shared
        assert (await on.evaluate()).prompts == 4
        assert (len(below()) > started) == (not shared)
        await on.finish()
