"""The manager has each gserver score a response under each version: whom it asks, when, and what it tells."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from streamrl.gserver.manager.checks import Question, read_scores
from streamrl.transport.control import Scores
from streamrl.transport.generation import FinishReason, GenerateReply, MetaInfo, TokenLogprob
from tests.gserver.harness import Run, joined, publish

TOKENS = [5, 6, 7, 8]
SCORES = [-1.0, -1.0]


def question(version: int) -> Question:
    return Question(version, TOKENS, start=2)


async def scores_of(run: Run, version: int, *, count: int) -> list[Scores]:
    """The answers about `version`, as soon as `count` gservers have given theirs."""
    async with asyncio.timeout(30):
        while len(scores := run.manager.scores(version)) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return scores


async def test_every_gserver_scores_every_version_once(tmp_path: Path) -> None:
    async with joined(tmp_path, 2) as (run, gservers):
        for version in range(3):
            if version:
                assert (await publish(run, version)).done
            run.manager.comparisons.ask(question(version))
            scores = await scores_of(run, version, count=2)
            assert [(s.gserver, s.logprobs, s.problem) for s in scores] == [
                ("gserver/0", SCORES, ""),
                ("gserver/1", SCORES, ""),
            ]
            assert [s.computed for s in scores] == [4, 4]
        await run.beat("gserver")
        assert [g.counts["/generate"] for g in gservers] == [3, 3]
        (body, *_) = gservers[0].bodies["/generate"]
        assert (body["input_ids"], body["logprob_start_len"], body["return_logprob"]) == (TOKENS, 1, True)
        assert body["sampling_params"]["max_new_tokens"] == 0


async def test_the_adapter_of_the_version_is_named_where_servers_have_several(tmp_path: Path) -> None:
    lora = {"model": {"lora": {"rank": 2}}, "gserver": {"engine": "sglang"}}
    async with joined(tmp_path, scripted_as={"version": "0"}, **lora) as (run, [gserver]):
        for version in range(2):
            if version:
                assert (await publish(run, version)).done
            run.manager.comparisons.ask(question(version))
            assert (await scores_of(run, version, count=1))[0].logprobs == SCORES
        assert [body["lora_path"] for body in gserver.bodies["/generate"]] == [None, "streamrl-v1"]


async def test_what_is_not_served_yet_is_asked_about_once_it_is(tmp_path: Path) -> None:
    async with joined(tmp_path) as (run, [gserver]):
        run.manager.comparisons.ask(question(1))
        assert gserver.counts["/generate"] == 0
        assert (await publish(run, 1)).done
        (score,) = await scores_of(run, 1, count=1)
        assert score.logprobs == SCORES


async def test_one_that_does_not_answer_holds_nobody_up_and_is_named(tmp_path: Path) -> None:
    async with joined(tmp_path, 2, limits={"update_seconds": 30.0}) as (run, gservers):
        gservers[1].faults["/generate"] = ["stall"]
        run.manager.comparisons.ask(question(0))
        assert [s.gserver for s in await scores_of(run, 0, count=1)] == ["gserver/0"]
        async with asyncio.timeout(30):
            assert (await publish(run, 1)).done
        _, late = await scores_of(run, 0, count=2)
        assert (late.gserver, late.logprobs) == ("gserver/1", [])
        assert late.problem == "it had not replied when the next weights came"
        run.manager.comparisons.ask(question(1))
        assert [s.problem for s in await scores_of(run, 1, count=2)] == ["", ""]


async def test_one_that_fails_is_told_and_asked_again(tmp_path: Path) -> None:
    async with joined(tmp_path) as (run, [gserver]):
        gserver.faults["/generate"] = ["error"]
        run.manager.comparisons.ask(question(0))
        (failed,) = await scores_of(run, 0, count=1)
        assert "Internal Server Error" in failed.problem
        async with asyncio.timeout(30):
            while run.manager.scores(0)[0].problem:
                await run.beat("gserver")
        assert gserver.counts["/generate"] == 2


SCORED = FinishReason(type="length", length=0)


def reply(*scores: TokenLogprob, version: str = "3", reason: FinishReason = SCORED) -> GenerateReply:
    meta = MetaInfo(id="", finish_reason=reason, weight_version=version, input_token_logprobs=list(scores))
    return GenerateReply(text="", output_ids=[], meta_info=meta)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (reply((-1.0, 7, None), (-2.0, 8, None)), ""),
        (reply((-1.0, 7, None), (-2.0, 8, None), version="4"), "its reply has weights '4'"),
        (reply((-1.0, 7, None), (-2.0, 8, None), version="mixed"), "its reply has weights 'mixed'"),
        (reply(reason=FinishReason(type="abort", message="paused")), "its answer was broken off: paused"),
        (reply((-1.0, 7, None)), "its reply has log-probabilities of 1 tokens, not of the 2"),
        (reply((-1.0, 7, None), (-2.0, 9, None)), "its reply has log-probabilities of 2 tokens, not of the 2"),
        (reply((-1.0, 7, None), (None, 8, None)), "1 of its log-probabilities are not finite"),
    ],
)
def test_only_an_answer_to_the_question_counts(answer: GenerateReply, problem: str) -> None:
    score = read_scores(answer, question(3), gserver="gserver/0", label="3")
    assert score.problem.startswith(problem)
    assert bool(score.problem) == bool(problem)
    assert score.logprobs == ([] if problem else [-1.0, -2.0])
