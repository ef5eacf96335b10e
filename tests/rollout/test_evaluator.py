"""A whole evaluator between a real manager and a scripted engine; the figures of an evaluation."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.config import Config, from_dict
from streamrl.config.sections import as_evaluated
from streamrl.errors import ConfigError, DataError
from streamrl.records.evaluation import pass_at_k
from streamrl.rollout.data import PromptSource
from streamrl.rollout.evaluator import Tally, serve
from streamrl.transport.control import EvaluationTask
from streamrl.transport.generation import GenerateReply, GenerateRequest, SamplingParams
from tests.groups import make_group
from tests.rollout.characters import make_chat, save_tokenizer
from tests.rollout.engine import Engine, answer, failure, serving, with_named_adapters
from tests.rollout.evaluating import evaluating

CHAT = make_chat()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("model"))


def configure(folder: Path, *, data: dict[str, Any] | None = None, **evaluation: Any) -> Config:
    chosen = {"every_steps": 1, "samples": 3, "temperature": 0.7, "top_p": 0.9, "max_new_tokens": 11}
    return from_dict(
        {
            "run": {"dir": str(folder), "seed": 5},
            "data": {"source": "python", "path": "tests.rollout.user_code:row", "size": 20, **(data or {})},
            "rollout": {"reward": {"function": "tests.rollout.user_code:length_reward"}, "sibling_retries": 0},
            "manager": {"heartbeat_seconds": 0.05},
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


async def test_what_it_reports_is_what_the_gserver_said(tmp_path: Path, model_dir: Path) -> None:
    config = configure(tmp_path, prompts=6)
    async with serving(say) as engine, evaluating(config, model_dir, gservers=(engine.url,)) as on:
        report = await on.evaluate(version=7)
        process = await on.run.process("evaluator")
        assert process.state == "live"
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


async def test_an_evaluation_asks_for_the_adapter_of_its_version_whatever_heartbeats_say(
    tmp_path: Path, model_dir: Path
) -> None:
    config = with_named_adapters(configure(tmp_path))
    async with serving(say) as engine, evaluating(config, model_dir, gservers=(engine.url,)) as on:
        report = await on.evaluate(version=7)
        await on.finish()
    assert {request.lora_path for request in engine.requests} == {"streamrl-v7"}
    assert (report.oldest_version, report.newest_version) == (7, 7)


async def test_each_evaluation_asks_the_same_all_rows_by_default_and_never_too_many_at_once(
    tmp_path: Path, model_dir: Path
) -> None:
    most = running = 0

    async def script(request: GenerateRequest, number: int) -> GenerateReply:
        nonlocal most, running
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.005)
        running -= 1
        return answer([5], version="0")

    async with serving(script) as engine, evaluating(configure(tmp_path), model_dir, gservers=(engine.url,)) as on:
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
        assert (await on.run.client.status()).ledger.rejected == 0
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


async def test_an_evaluation_in_which_all_fails_is_reported_and_the_next_one_is_made(
    tmp_path: Path, model_dir: Path
) -> None:
    broken = True

    def script(request: GenerateRequest, number: int) -> Any:
        return failure(400) if broken else say(request, number)

    config = configure(tmp_path, prompts=3)
    async with serving(script) as engine, evaluating(config, model_dir, gservers=(engine.url,)) as on:
        report = await on.evaluate(1)
        assert (report.prompts, report.rejected, report.reward_mean) == (0, 3, None)
        broken = False
        assert (await on.evaluate(2)).prompts == 3
        await on.finish()


async def test_prompts_move_to_another_gserver(tmp_path: Path, model_dir: Path) -> None:
    config = configure(tmp_path, prompts=4)

    def broken(request: GenerateRequest, number: int) -> Any:
        return failure(500)

    async with (
        serving(broken) as first,
        serving(say) as second,
        evaluating(config, model_dir, gservers=(first.url, second.url)) as on,
    ):
        report = await on.evaluate()
        assert (report.prompts, report.rejected) == (4, 0)
        assert first.requests
        await on.finish()


async def test_it_waits_for_a_gserver(tmp_path: Path, model_dir: Path) -> None:
    async with serving(say) as engine, evaluating(configure(tmp_path, prompts=2), model_dir) as on:
        await on.ask()
        await on.run.until(lambda status: any(p.role == "evaluator" for p in status.processes), timeout=30)
        await on.run.register("gserver", address=engine.url)
        assert (await on.report()).prompts == 2
        await on.finish()


@pytest.mark.parametrize("ending", ["stop", "cancel"])
async def test_the_end_of_the_run_leaves_nothing_behind(tmp_path: Path, model_dir: Path, ending: str) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}

    async def hang(request: GenerateRequest, number: int) -> GenerateReply:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async with serving(hang) as engine, evaluating(configure(tmp_path), model_dir, gservers=(engine.url,)) as on:
        await on.ask()
        await until_asked(engine, 6)
        if ending == "stop":
            await on.finish()
        else:
            on.evaluator.cancel()
            with pytest.raises(asyncio.CancelledError):
                await on.evaluator
        await engine.until_cancelled(6)
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before
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
                await on.evaluator
        status = await on.run.client.status()
        assert status.state == "failed"
        assert "evaluator/0: DataError" in status.message


async def test_without_a_frequency_there_is_nothing_to_do(tmp_path: Path, model_dir: Path) -> None:
    with pytest.raises(ConfigError, match="does not say when"):
        await serve(from_dict({}), manager_url="http://127.0.0.1:1", model_dir=model_dir)


TASK = EvaluationTask(policy_version=20, step=20)
group_figures = st.lists(
    st.tuples(
        st.lists(st.sampled_from([0.0, 0.1, 0.7, 1.0]), min_size=3, max_size=3),  # rewards
        st.lists(st.integers(1, 5), min_size=3, max_size=3),  # lengths
        st.lists(st.sampled_from(["stop", "length"]), min_size=3, max_size=3),
        st.integers(18, 24),  # version
    ),
    min_size=1,
    max_size=6,
)


@given(group_figures, st.sampled_from([0.1, 0.7, 1.0]), st.integers(0, 3))
def test_the_figures_of_an_evaluation_are_those_of_plain_counting(
    given_groups: list[tuple[list[float], list[int], list[str], int]], pass_reward: float, rejected: int
) -> None:
    tally = Tally(samples=3, pass_reward=pass_reward)
    for seq, (rewards, lengths, finishes, version) in enumerate(given_groups):
        group = make_group(seq, seqlens=tuple(3 + n for n in lengths), version=version)
        group.rewards = np.array(rewards, dtype=np.float32)
        group.finish_reasons = finishes
        tally.add(group)
    for _ in range(rejected):
        tally.reject()
    report = tally.report(TASK, time=9.0, seconds=2.0)
    all_rewards = [reward for rewards, _, _, _ in given_groups for reward in rewards]
    all_lengths = [length for _, lengths, _, _ in given_groups for length in lengths]
    cut = [finish == "length" for _, _, finishes, _ in given_groups for finish in finishes]
    versions = [version for _, _, _, version in given_groups]
    assert (report.policy_version, report.step, report.time, report.seconds) == (20, 20, 9.0, 2.0)
    assert (report.prompts, report.samples, report.rejected) == (len(given_groups), 3, rejected)
    assert report.reward_mean == pytest.approx(sum(all_rewards) / len(all_rewards))
    assert report.response_length_mean == pytest.approx(sum(all_lengths) / len(all_lengths))
    assert report.cut_share == pytest.approx(sum(cut) / len(cut))
    assert (report.oldest_version, report.newest_version) == (min(versions), max(versions))
    passed = [sum(reward >= pass_reward for reward in rewards) for rewards, _, _, _ in given_groups]
    for k in (1, 2, 3):
        assert report.pass_at[k] == pytest.approx(sum(pass_at_k(3, c, k) for c in passed) / len(passed))


def test_an_evaluation_that_failed_altogether() -> None:
    tally = Tally(samples=2, pass_reward=1.0)
    tally.reject()
    report = tally.report(TASK, time=9.0, seconds=2.0)
    assert (report.prompts, report.rejected, report.reward_mean, report.pass_at) == (0, 1, None, {})
    assert report.oldest_version is report.newest_version is report.cut_share is report.response_length_mean is None


def test_of_an_agents_episode_each_trajectory_may_be_cut() -> None:
    tally = Tally(samples=2, pass_reward=1.0)
    group = make_group(seqlens=(5, 6, 7))
    group.episodes = np.array([0, 0, 1], np.int32)
    group.scores = [1.0, 0.5]
    group.finish_reasons = ["length", "length", "stop"]
    tally.add(group)
    report = tally.report(TASK, time=0.0, seconds=1.0)
    assert (report.cut_share, report.reward_mean, report.pass_at[1]) == (pytest.approx(2 / 3), 0.75, 0.5)
