"""Reward functions in processes of their own: scores, failures, time limits, and what is left behind (nothing)."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.config import from_dict
from streamrl.errors import RewardError, RewardTimeout
from streamrl.rollout.data import PromptSource
from streamrl.rollout.reward.functions import Response
from streamrl.rollout.reward.pool import RewardPool
from streamrl.rollout.tasks import (
    addition,
    addition_reward,
    copy_digits,
    copy_reward,
    increment_digits,
    modular_addition,
    repeat_digit,
    sort_digits,
)
from streamrl.types import Prompt
from tests.processes import assert_no_more_than, below, lives
from tests.rollout.characters import make_chat

USER_REWARD = "tests.rollout.user_code:reward"


def prompt(answer: Any = None, *, seq: int = 0) -> Prompt:
    return Prompt(seq=seq, index=0, epoch=0, messages=[], input_ids=[], answer=answer, metadata={})


def response(text: str, finish_reason: str = "stop") -> Response:
    return Response(text=text, finish_reason=finish_reason, output_tokens=len(text))


@asynccontextmanager
async def pool(
    function: str = USER_REWARD, *, processes: int = 1, timeout: float = 20.0, **config: Any
) -> AsyncIterator[RewardPool]:
    before = below()
    reward = {"function": function, "processes": processes, "timeout_seconds": timeout, "args": config.pop("args", {})}
    reward |= {"concurrent_calls": config.pop("concurrent_calls", 64)}
    made = RewardPool(from_dict({"rollout": {"reward": reward}, **config}))
    await made.start()
    assert len(below() - before) == processes
    try:
        yield made
    finally:
        await made.close()
        await assert_no_more_than(before)


async def test_scores_with_arguments() -> None:
    async with pool(args={"scale": 2.5}) as rewards:
        assert await rewards.score(response("anything"), prompt()) == 2.5


async def test_failures_are_told_apart_and_the_pool_goes_on() -> None:
    async with pool() as rewards:
        pid = await rewards.score(response("pid"), prompt())
        for text, message in [
            ("raise", r"user_code(.*\n)*LookupError: no such thing"),
            ("nan", "returned nan; a reward is a finite number"),
            ("text", r"returned 'good' \(str\)"),
            ("huge", r"returned 10+ \(int\); a reward is a number"),
            ("two", r"returned tensor\(\[0\., 1\.\]\) \(TwoNumbers\); a reward is a number"),
        ]:
            with pytest.raises(RewardError, match=message):
                await rewards.score(response(text), prompt(seq=5))
        assert await rewards.score(response("pid"), prompt()) == pid


@pytest.mark.parametrize("function", ["judge", "judge_object"])
async def test_calls_of_a_coroutine_function_run_at_the_same_time(function: str) -> None:
    async with pool(f"tests.rollout.user_code:{function}", concurrent_calls=12) as rewards:
        first = asyncio.create_task(rewards.score(response("meet 12"), prompt()))
        await asyncio.sleep(0.1)  # the others come while it is under way
        others = (rewards.score(response("meet 12"), prompt(seq=i)) for i in range(30))
        assert await asyncio.gather(first, *others) == [1.0] * 31
        assert await rewards.score(response("most"), prompt()) == 12
        assert rewards.calls_at_once == 12


async def test_a_coroutine_that_takes_too_long_is_cancelled_and_the_others_go_on() -> None:
    texts = {3: "sleep 600", 5: "raise", 8: "nan", 10: "huge", 11: "sleep 600"}
    async with pool("tests.rollout.user_code:judge", timeout=2.0) as rewards:
        pid = await rewards.score(response("pid"), prompt())
        calls = [rewards.score(response(texts.get(i, "sleep 0.2")), prompt(seq=i)) for i in range(20)]
        found = await asyncio.gather(*calls, return_exceptions=True)
        kinds = {3: RewardTimeout, 5: RewardError, 8: RewardError, 10: RewardError, 11: RewardTimeout}
        assert [type(value) for value in found] == [kinds.get(i, float) for i in range(20)]
        assert re.search(r"seq 3: no answer within .*timeout_seconds = 2; the call was cancelled", str(found[3]))
        assert await rewards.score(response("pid"), prompt()) == pid


async def test_a_coroutine_that_blocks_its_process_has_it_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrl.rollout.reward.pool.HANG_SECONDS", 0.5)
    async with pool("tests.rollout.user_code:judge", timeout=1.0) as rewards:
        pid = await rewards.score(response("pid"), prompt())
        calls = [rewards.score(response(text), prompt()) for text in ("block", "pid", "pid")]
        hung, *others = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(hung, RewardTimeout)
        assert "its process was replaced" in str(hung)
        assert len({pid, *others}) == 2  # all that had been sent with it were made by its successor
        assert not lives(int(pid))


@pytest.mark.parametrize(("text", "status"), [("abort", "SIGABRT"), ("sysexit", "3")])
async def test_a_crash_is_reported_and_the_process_replaced(text: str, status: str) -> None:
    async with pool() as rewards:
        pid = await rewards.score(response("pid"), prompt())
        with pytest.raises(RewardError, match=f"seq 5.*died .*{status}"):
            await rewards.score(response(text), prompt(seq=5))
        assert await rewards.score(response("pid"), prompt()) != pid


async def quick_ones(rewards: RewardPool) -> None:
    """Have so many calls end at once that the pool sends as many together as it ever does."""
    assert await asyncio.gather(*(rewards.score(response("ok"), prompt()) for _ in range(600))) == [1.0] * 600


async def test_quick_calls_are_sent_together_and_slow_ones_are_not() -> None:
    async with pool(processes=2) as rewards:
        async with asyncio.timeout(200):
            await quick_ones(rewards)
            while len(set(await asyncio.gather(*(rewards.score(response("pid"), prompt()) for _ in range(30))))) > 1:
                await quick_ones(rewards)  # one was slow: its process had to wait for a core
        await asyncio.gather(*(rewards.score(response("sleep 0.1"), prompt()) for _ in range(2)))
        running = asyncio.create_task(rewards.score(response("sleep 60"), prompt()))
        others = [rewards.score(response("pid"), prompt()) for _ in range(4)]
        assert len(set(await asyncio.wait_for(asyncio.gather(*others), 50))) == 1
        running.cancel()


async def test_close_ends_calls_that_run_and_wait() -> None:
    async with pool(timeout=600) as rewards:
        calls = [asyncio.create_task(rewards.score(response("sleep 600"), prompt())) for _ in range(3)]
        await asyncio.sleep(0)
    for call in calls:
        call.cancel()
    await asyncio.wait(calls, timeout=5)
    assert all(call.cancelled() for call in calls)


@pytest.mark.parametrize(
    ("function", "args", "message"),
    [
        ("tests.rollout.nothing:reward", {}, "no module tests.rollout.nothing"),
        ("tests.rollout.user_code:rewards", {}, "has no rewards"),
        ("tests.rollout.user_code:not_a_function", {}, "is an? int, not a function"),
        (USER_REWARD, {"size": 1}, "cannot be called.*size"),
        ("math_verify", {"size": 1}, "unexpected keyword argument"),
        ("my_reward", {}, "module:name"),
    ],
)
async def test_functions_that_cannot_be_loaded(function: str, args: Any, message: str) -> None:
    before = below()
    with pytest.raises(RewardError, match=message):
        async with pool(function, processes=2, args=args):
            pass
    await assert_no_more_than(before)


async def test_the_function_does_not_get_secrets_unless_it_is_to(monkeypatch: pytest.MonkeyPatch) -> None:
    passed = {
        "RUN_DOOR": False,
        "EPISODE_DOOR": False,
        "STREAMRL_SECRET": False,
        "HF_TOKEN": False,
        "JUDGE_API_KEY": True,
        "TOKENIZERS_PARALLELISM": True,
    }
    for name in passed:
        monkeypatch.setenv(name, "x")
    reward = {"function": USER_REWARD, "environment": ["JUDGE_API_KEY", "RUN_DOOR", "STREAMRL_SECRET"]}
    agent = {"remote": True, "scored_by": "reward", "api_key_env": "EPISODE_DOOR"}
    rollout = {"reward": reward, "agent": agent}
    made = RewardPool(from_dict({"rollout": rollout, "gserver": {"api_key_env": "RUN_DOOR"}}))
    await made.start()
    try:
        for name, wanted in passed.items():
            assert await made.score(response(f"variable {name}"), prompt()) == wanted, name
    finally:
        await made.close()


async def test_reasoning_gym_scores_right_and_wrong_answers() -> None:
    data = {"source": "reasoning_gym", "path": "chain_sum", "size": 50}
    source = PromptSource.open(from_dict({"data": data}), make_chat())
    async with pool("reasoning_gym", data=data) as rewards:
        for seq in (0, 7):
            task = source.prompt(seq)
            right = str(task.answer)
            assert await rewards.score(response(f" {right}\n"), task) == 1.0
            assert await rewards.score(response(f"<answer>1</answer> no: <answer> {right} </answer>."), task) == 1.0
            assert await rewards.score(response(right + "1"), task) < 1.0


async def test_math_verify() -> None:
    async with pool("math_verify") as rewards:
        assert await rewards.score(response("so it is $\\boxed{0.5}$"), prompt("\\frac{1}{2}")) == 1.0
        assert await rewards.score(response("<answer>1/2</answer>"), prompt("$\\frac{1}{2}$")) == 1.0
        assert await rewards.score(response("3"), prompt("\\frac{1}{2}")) == 0.0
        assert await rewards.score(response("no idea"), prompt("2")) == 0.0
        with pytest.raises(RewardError, match="needs a reference answer"):
            await rewards.score(response("3"), prompt(None))


@pytest.mark.parametrize(
    ("text", "finish", "score"),
    [
        ("1234", "stop", 1.0),
        ("1234", "length", 0.8),
        ("1235", "stop", 0.8),
        ("12", "stop", 0.4),
        ("12345", "stop", 4 / 6),
        ("", "stop", 0.0),
        ("9999", "stop", 0.2),
    ],
)
def test_copy_reward(text: str, finish: str, score: float) -> None:
    assert copy_reward(response(text, finish), prompt("1234")) == pytest.approx(score)


@pytest.mark.parametrize(
    ("text", "finish", "score"),
    [
        ("12", "stop", 1.0),
        ("5 + 7 = 12.", "stop", 1.0),
        ("12", "length", 0.0),
        ("11", "stop", 0.1),
        ("12 or 13", "stop", 0.1),
        ("twelve", "stop", 0.0),
        ("19 - 7 - 12", "stop", 1.0),
        ("-12", "stop", 0.1),
    ],
)
def test_addition_reward(text: str, finish: str, score: float) -> None:
    assert addition_reward(response(text, finish), prompt("12")) == score


def test_own_tasks_have_arguments() -> None:
    row = copy_digits(5, 0, digits=6)
    assert row["prompt"] == row["answer"] + "="
    assert len(row["answer"]) == 6
    numbers = [addition(i, 0, low=2, high=3) for i in range(50)]
    assert {row["answer"] for row in numbers} == {"4", "5", "6"}
    assert numbers[0]["prompt"].startswith("What is ")


@pytest.mark.parametrize("task", [copy_digits, increment_digits, sort_digits, modular_addition, repeat_digit])
@given(index=st.integers(0, 10_000), seed=st.integers(0, 10))
def test_answers_are_scored_in_full_and_differ_by_row(task: Any, index: int, seed: int) -> None:
    row = task(index, seed)
    assert row == task(index, seed)
    assert row["prompt"].endswith("=")
    assert set(row["prompt"] + row["answer"]) <= set("0123456789= "), "the alphabet of the scratch model"
    assert copy_reward(response(row["answer"], "stop"), prompt(row["answer"])) == 1.0
    assert len({task(i, seed)["prompt"] for i in range(index, index + 100)}) > 40
    assert any(task(i, seed) != task(i, seed + 1) for i in range(index, index + 9))
