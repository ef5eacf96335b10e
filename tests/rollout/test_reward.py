"""Reward functions in processes of their own: scores, failures, time limits, and what is left behind (nothing)."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.config import from_dict
from streamrl.errors import RewardError, RewardTimeout
from streamrl.rollout.data import PromptSource
from streamrl.rollout.reward.functions import Response, extract_answer
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
from tests.processes import lives
from tests.rollout.characters import make_chat

USER_REWARD = "tests.rollout.user_code:reward"


def prompt(answer: Any = None, *, seq: int = 0, index: int = 0, metadata: dict[str, Any] | None = None) -> Prompt:
    return Prompt(seq=seq, index=index, epoch=0, messages=[], input_ids=[], answer=answer, metadata=metadata or {})


def response(text: str, finish_reason: str = "stop") -> Response:
    return Response(text=text, finish_reason=finish_reason, output_tokens=len(text))


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


@asynccontextmanager
async def pool(
    function: str = USER_REWARD, *, processes: int = 1, timeout: float = 20.0, **config: Any
) -> AsyncIterator[RewardPool]:
    before = children()
    reward = {"function": function, "processes": processes, "timeout_seconds": timeout, "args": config.pop("args", {})}
    reward |= {"concurrent_calls": config.pop("concurrent_calls", 64)}
    made = RewardPool(from_dict({"rollout": {"reward": reward}, **config}))
    await made.start()
    assert len(children() - before) == processes
    try:
        yield made
    finally:
        await made.close()
        assert children() <= before


async def test_scores_with_arguments() -> None:
    async with pool(args={"scale": 2.5}) as rewards:
        assert await rewards.score(response("anything"), prompt()) == 2.5


async def test_messages_need_not_be_text_alone() -> None:
    asked = {"role": "user", "content": [{"type": "text", "text": "1+1?"}], "name": None}
    async with pool(timeout=2.0) as rewards:
        assert await rewards.score(response("anything"), msgspec.structs.replace(prompt(), messages=[asked])) == 1.0


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


async def test_a_coroutine_scores_fails_and_hangs_like_any_function() -> None:
    async with pool("tests.rollout.user_code:async_reward", timeout=2.0) as rewards:
        assert [await rewards.score(response("good"), prompt()) for _ in range(2)] == [1.0, 1.0]
        with pytest.raises(RewardError, match=r"LookupError: no such thing"):
            await rewards.score(response("raise"), prompt())
        with pytest.raises(RewardTimeout):
            await rewards.score(response("hang"), prompt())
        assert await rewards.score(response("good"), prompt()) == 1.0


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
    async with pool("tests.rollout.user_code:judge", timeout=1.0) as rewards:
        pid = await rewards.score(response("pid"), prompt())
        calls = [rewards.score(response(texts.get(i, "sleep 0.5")), prompt(seq=i)) for i in range(20)]
        found = await asyncio.gather(*calls, return_exceptions=True)
        kinds = {3: RewardTimeout, 5: RewardError, 8: RewardError, 10: RewardError, 11: RewardTimeout}
        assert [type(value) for value in found] == [kinds.get(i, float) for i in range(20)]
        assert re.search(r"seq 3: no answer within .*timeout_seconds = 1; the call was cancelled", str(found[3]))
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


async def test_a_coroutine_that_awaits_nothing_has_all_of_its_time_whatever_was_sent_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("streamrl.rollout.reward.pool.HANG_SECONDS", 0.5)
    async with pool("tests.rollout.user_code:judge", timeout=1.0) as rewards:
        pid = await rewards.score(response("pid"), prompt())
        assert await asyncio.gather(*(rewards.score(response("work 0.4"), prompt()) for _ in range(8))) == [1.0] * 8
        assert await rewards.score(response("pid"), prompt()) == pid


async def test_a_coroutine_that_cannot_be_cancelled_ends_in_time_while_others_come_and_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("streamrl.rollout.reward.pool.HANG_SECONDS", 0.5)
    async with pool("tests.rollout.user_code:judge", timeout=1.0) as rewards:
        with pytest.raises(RewardError, match="CancelledError"):
            await rewards.score(response("cancelled"), prompt())
        stubborn = asyncio.create_task(rewards.score(response("stubborn"), prompt()))
        deadline = time.monotonic() + 20
        while not stubborn.done():
            assert time.monotonic() < deadline, "the replies to others put its end off"
            assert await rewards.score(response("sleep 0.2"), prompt()) == 1.0
        with pytest.raises(RewardTimeout, match="its process was replaced"):
            await stubborn


@pytest.mark.parametrize(("text", "status"), [("abort", "SIGABRT"), ("sysexit", "3")])
async def test_a_crash_is_reported_and_the_process_replaced(text: str, status: str) -> None:
    async with pool() as rewards:
        pid = await rewards.score(response("pid"), prompt())
        with pytest.raises(RewardError, match=f"seq 5.*died .*{status}"):
            await rewards.score(response(text), prompt(seq=5))
        assert await rewards.score(response("pid"), prompt()) != pid


async def test_a_call_that_takes_too_long_is_killed() -> None:
    async with pool(timeout=1.5) as rewards:
        pid = await rewards.score(response("pid"), prompt())
        with pytest.raises(RewardTimeout, match=r"timeout_seconds = 1\.5"):
            await rewards.score(response("sleep 600"), prompt())
        assert not lives(int(pid))
        assert await rewards.score(response("pid"), prompt()) != pid


async def test_of_several_coroutines_the_one_that_blocks_their_process_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("streamrl.rollout.reward.pool.HANG_SECONDS", 0.5)
    async with pool("tests.rollout.user_code:judge", timeout=1.0) as rewards:
        texts = ["sleep 0.5", "sleep 0.5", "block", "sleep 0.5"]
        calls = [rewards.score(response(text), prompt(seq=i)) for i, text in enumerate(texts)]
        found = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(value) for value in found] == [float, float, RewardTimeout, float]
        assert "seq 2" in str(found[2])


async def test_processes_work_at_the_same_time(tmp_path: Path) -> None:
    """Each call returns only once three are running: with fewer processes all would time out."""
    async with pool(processes=3) as rewards:
        calls = (rewards.score(response(f"meet {tmp_path} 3"), prompt(seq=i)) for i in range(3))
        assert await asyncio.gather(*calls) == [1.0] * 3
        assert len(os.listdir(tmp_path)) == 3


async def test_more_calls_than_processes_wait_their_turn() -> None:
    async with pool(processes=2) as rewards:
        calls = (rewards.score(response("ok" if i % 3 else "raise"), prompt(seq=i)) for i in range(60))
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(result) for result in results] == [float if i % 3 else RewardError for i in range(60)]


async def quick_ones(rewards: RewardPool) -> None:
    """Have so many calls end at once that the pool sends as many together as it ever does."""
    assert await asyncio.gather(*(rewards.score(response("ok"), prompt()) for _ in range(600))) == [1.0] * 600


async def test_quick_calls_are_sent_together_and_slow_ones_are_not() -> None:
    async with pool(processes=2) as rewards:
        async with asyncio.timeout(20):
            await quick_ones(rewards)
            while len(set(await asyncio.gather(*(rewards.score(response("pid"), prompt()) for _ in range(30))))) > 1:
                await quick_ones(rewards)  # one was slow: its process had to wait for a core
        await asyncio.gather(*(rewards.score(response("sleep 0.1"), prompt()) for _ in range(2)))
        running = asyncio.create_task(rewards.score(response("sleep 5"), prompt()))
        others = [rewards.score(response("pid"), prompt()) for _ in range(4)]
        assert len(set(await asyncio.wait_for(asyncio.gather(*others), 4))) == 1
        running.cancel()


async def test_of_those_that_were_sent_together_only_the_one_that_went_wrong_fails() -> None:
    wrong = {7: "sleep 600", 8: "raise", 19: "exit 7", 20: "nan", 33: "spin"}
    async with pool(timeout=1.5) as rewards:
        await quick_ones(rewards)
        calls = [rewards.score(response(wrong.get(i, "ok")), prompt(seq=i)) for i in range(50)]
        found = await asyncio.gather(*calls, return_exceptions=True)
        kinds = {7: RewardTimeout, 33: RewardTimeout} | dict.fromkeys((8, 19, 20), RewardError)
        assert [type(value) for value in found] == [kinds.get(i, float) for i in range(50)]
        assert all(f"seq {i}:" in str(found[i]) for i in wrong)
        assert await rewards.score(response("ok"), prompt()) == 1.0


async def test_calls_that_nobody_waits_for_any_more_are_not_begun(tmp_path: Path) -> None:
    async with pool() as rewards:
        await quick_ones(rewards)
        running = asyncio.create_task(rewards.score(response("sleep 0.3"), prompt()))
        await asyncio.sleep(0)
        waiting = [asyncio.create_task(rewards.score(response(f"meet {tmp_path} 1"), prompt())) for _ in range(3)]
        await asyncio.sleep(0.1)
        for call in waiting:
            call.cancel()
        assert await running == 1.0
        assert await rewards.score(response("ok"), prompt()) == 1.0
        assert os.listdir(tmp_path) == []


async def test_a_cancelled_call_harms_no_other() -> None:
    async with pool() as rewards:
        pid = await rewards.score(response("pid"), prompt())
        running = asyncio.create_task(rewards.score(response("sleep 0.3"), prompt()))
        waiting = asyncio.create_task(rewards.score(response("exit 1"), prompt()))
        await asyncio.sleep(0)
        running.cancel()
        waiting.cancel()
        assert await rewards.score(response("pid"), prompt()) == pid  # not the answer of the cancelled call


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
    before = children()
    with pytest.raises(RewardError, match=message):
        async with pool(function, processes=2, args=args):
            pass
    assert children() <= before


async def test_the_function_does_not_get_secrets_unless_it_is_to(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {
        "RUN_DOOR": "the run's own",
        "EPISODE_DOOR": "opens episodes",
        "STREAMRL_SECRET": "the run's own, too",
        "JUDGE_API_KEY": "passed",
        "HF_TOKEN": "a secret",
        "TOKENIZERS_PARALLELISM": "x",
    }
    for name, value in there.items():
        monkeypatch.setenv(name, value)
    reward = {"function": USER_REWARD, "environment": ["JUDGE_API_KEY", "RUN_DOOR", "STREAMRL_SECRET"]}
    agent = {"remote": True, "scored_by": "reward", "api_key_env": "EPISODE_DOOR"}
    rollout = {"reward": reward, "agent": agent}
    made = RewardPool(from_dict({"rollout": rollout, "gserver": {"api_key_env": "RUN_DOOR"}}))
    await made.start()
    try:
        for name, passed in (
            ("RUN_DOOR", False),
            ("EPISODE_DOOR", False),
            ("STREAMRL_SECRET", False),
            ("HF_TOKEN", False),
            ("JUDGE_API_KEY", True),
            ("TOKENIZERS_PARALLELISM", True),
            ("PATH", True),
        ):
            assert await made.score(response(f"variable {name}"), prompt()) == passed, name
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


async def test_reasoning_gym_entries_keep_their_python_types() -> None:
    """arc_agi compares tuples: an entry that went through JSON would score 0.05."""
    data = {"source": "reasoning_gym", "path": "rearc", "size": 5}
    task = PromptSource.open(from_dict({"data": data}), make_chat()).prompt(2)
    async with pool("reasoning_gym", data=data) as rewards:
        assert await rewards.score(response(str(task.answer)), task) == 1.0


async def test_reasoning_gym_scorers_that_raise_on_garbage() -> None:
    data = {"source": "reasoning_gym", "path": "prime_factorization", "size": 5}
    task = PromptSource.open(from_dict({"data": data}), make_chat()).prompt(0)
    async with pool("reasoning_gym", data=data) as rewards:
        assert await rewards.score(response("garbage [["), task) == 0.0
        assert await rewards.score(response(str(task.answer)), task) == 1.0


async def test_reasoning_gym_entries_from_a_file() -> None:
    data = {"source": "jsonl", "path": "unused.jsonl"}
    row = {"question": "1 + 1", "metadata": {"source_dataset": "chain_sum"}}
    async with pool("reasoning_gym", data=data) as rewards:
        assert await rewards.score(response("2"), prompt("2", metadata=row)) == 1.0
        with pytest.raises(RewardError, match=r"metadata\.source_dataset"):
            await rewards.score(response("2"), prompt("2"))


async def test_math_verify() -> None:
    async with pool("math_verify") as rewards:
        assert await rewards.score(response("so it is $\\boxed{0.5}$"), prompt("\\frac{1}{2}")) == 1.0
        assert await rewards.score(response("<answer>1/2</answer>"), prompt("$\\frac{1}{2}$")) == 1.0
        assert await rewards.score(response("3"), prompt("\\frac{1}{2}")) == 0.0
        assert await rewards.score(response("no idea"), prompt("2")) == 0.0
        with pytest.raises(RewardError, match="needs a reference answer"):
            await rewards.score(response("3"), prompt(None))


def test_extract_answer() -> None:
    assert extract_answer(" plain \n") == "plain"
    assert extract_answer("<answer>a</answer><answer>\nb\nc </answer> tail") == "b\nc"
    assert extract_answer("<answer>open") == "<answer>open"


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


def test_own_tasks_are_pure_and_varied() -> None:
    assert copy_digits(3, 1) == copy_digits(3, 1)
    assert len({copy_digits(i, 1)["prompt"] for i in range(200)}) > 150
    assert copy_digits(3, 1) != copy_digits(3, 2)
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


@given(index=st.integers(0, 10_000), digits=st.integers(1, 8))
def test_each_digit_is_incremented_without_carrying(index: int, digits: int) -> None:
    row = increment_digits(index, 0, digits=digits)
    assert len(row["prompt"]) == digits + 1
    assert [(int(b) - int(a)) % 10 for a, b in zip(row["prompt"][:-1], row["answer"], strict=True)] == [1] * digits


@given(index=st.integers(0, 10_000), digits=st.integers(1, 8))
def test_the_same_digits_are_in_order(index: int, digits: int) -> None:
    row = sort_digits(index, 0, digits=digits)
    assert sorted(row["prompt"][:-1]) == list(row["answer"])
    assert len(row["answer"]) == digits


@given(index=st.integers(0, 10_000), modulus=st.integers(2, 200))
def test_sums_stay_below_the_modulus_and_have_one_width(index: int, modulus: int) -> None:
    row = modular_addition(index, 0, modulus=modulus)
    x, y = row["prompt"].removesuffix("=").split(" ")
    assert (int(x) + int(y) - int(row["answer"])) % modulus == 0
    assert max(int(x), int(y), int(row["answer"])) < modulus
    assert {len(text) for text in (x, y, row["answer"])} == {len(str(modulus - 1))}


@given(index=st.integers(0, 10_000), most=st.integers(1, 120))
def test_a_digit_is_repeated_as_often_as_asked(index: int, most: int) -> None:
    row = repeat_digit(index, 0, most=most)
    digit, count = row["prompt"].removesuffix("=").split(" ")
    assert row["answer"] == digit * int(count)
    assert 1 <= int(count) <= most
    assert len(count) == len(str(most))


def test_all_lengths_are_asked_for_alike() -> None:
    lengths = Counter(len(repeat_digit(i, 0, most=4)["answer"]) for i in range(4000))
    assert sorted(lengths) == [1, 2, 3, 4]
    assert all(850 < count < 1150 for count in lengths.values())


@pytest.mark.parametrize(("task", "wrong"), [(modular_addition, {"modulus": 1}), (repeat_digit, {"most": 0})])
def test_a_task_that_cannot_be_is_refused(task: Any, wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="it has to be"):
        task(0, 0, **wrong)
