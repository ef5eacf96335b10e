"""The comparison of gservers and trainer: on which response, what is found, when it is told, when the run stops."""

from __future__ import annotations

import asyncio
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.config import from_dict
from streamrl.errors import DeadlineExceeded, TrainingError
from streamrl.trainer.calls import ResponseReply, Sibling, TrainReply
from streamrl.trainer.master.comparison import (
    ENOUGH_TOKENS,
    Comparison,
    MismatchWatch,
    compared_figures,
    response_to_compare,
)
from streamrl.transport.control import Scores
from tests.groups import make_meta


@given(st.lists(st.lists(st.integers(1, 40), min_size=2, max_size=5), min_size=1, max_size=6))
def test_no_other_response_is_a_better_choice(lengths):
    chosen = response_to_compare([make_meta(seq, own) for seq, own in enumerate(lengths)])
    length = lengths[chosen.seq][chosen.index]
    fair = [n for own in lengths for n in own if n >= ENOUGH_TOKENS]
    assert length == (min(fair) if fair else max(n for own in lengths for n in own))


def test_figures_are_of_each_gserver_and_of_all():
    scores = [
        Scores("gserver/0", [-1.0, -9.0, -2.0], seconds=0.5, computed=12),
        Scores("gserver/1", [-1.1, -9.0, -2.3], seconds=0.25, computed=5),
        Scores("gserver/2", problem="it is gone"),
    ]
    figures = compared_figures(scores, [-1.0, -2.0], sampled=[0, 2])  # the token between them is feedback
    assert figures == pytest.approx(
        {
            "logprob_diff_mean/gserver_0": 0.0,
            "logprob_diff_max/gserver_0": 0.0,
            "logprob_diff_mean/gserver_1": 0.2,
            "logprob_diff_max/gserver_1": 0.3,
            "logprob_diff_mean": 0.1,
            "logprob_diff_max": 0.3,
            "gservers_compared": 2,
            "gservers_not_compared": 1,
            "compare_seconds": 0.5,
            "compare_tokens": 12,
        }
    )


def trained(*logprobs):
    return TrainReply(compute_seconds=0, blocked_seconds=0, sums={}, maxima={}, token_ages={}, compared=[*logprobs])


class Pool:
    """Of the rollout pool, the part that has responses scored."""

    def __init__(self, scores):
        self.asked, self._scores = [], scores

    def compare(self, version, tokens, *, start):
        self.asked.append((version, tokens, start))

    def scores(self, version):
        assert version == 4
        return self._scores


async def found(scores, *logprobs, chosen=True):
    async def tokens_of(which):
        assert which == Sibling(7, 1)
        return ResponseReply([5, 6, 7, 8], [2, 3])

    pool = Pool(scores)
    comparison = Comparison(4, Sibling(7, 1) if chosen else None, pool=pool, tokens_of=tokens_of)
    await asyncio.sleep(0.01)  # until they are asked
    assert pool.asked == ([(4, [5, 6, 7, 8], 2)] if chosen else [])
    return await comparison.figures([trained(), trained(*logprobs)])


async def test_the_scores_of_the_sampled_tokens_are_compared():
    figures = await found([Scores("gserver/0", [-1.0, -2.5])], -1.0, -2.0)
    assert figures["logprob_diff_mean/gserver_0"] == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("scores", "logprobs", "chosen", "missing", "why"),
    [
        ([], [], False, 0, "v4 was not compared: no group of its batch is young enough"),
        ([Scores("gserver/0", [-1.0])], [], True, 1, "the step did not compute Sibling(seq=7"),
        ([Scores("gserver/0", problem="gone")], [-1.0], True, 1, "gserver/0 was not compared"),
    ],
)
async def test_a_comparison_that_fails_costs_its_figures_alone(scores, logprobs, chosen, missing, why, caplog):
    with caplog.at_level(logging.INFO):
        figures = await found(scores, *logprobs, chosen=chosen)
    assert why in caplog.text
    assert (figures["gservers_compared"], figures["gservers_not_compared"]) == (0, missing)
    assert "logprob_diff_mean" not in figures


async def test_without_the_workers_reply_no_gserver_is_asked(caplog):
    async def tokens_of(which):
        raise DeadlineExceeded("model_worker/0 did not finish ResponseRequest within 30 s")

    pool = Pool([])
    with caplog.at_level(logging.INFO):
        comparison = Comparison(4, Sibling(7, 1), pool=pool, tokens_of=tokens_of)
        await asyncio.sleep(0.01)
        figures = await comparison.figures([trained(-1.0)])
    assert pool.asked == []
    assert (figures["gservers_compared"], figures["gservers_not_compared"]) == (0, 0)
    assert "did not finish ResponseRequest within 30 s" in caplog.text


def watch(**trainer):
    config = from_dict({"trainer": trainer})
    return MismatchWatch(warning=config.logprob_diff_warning, limit=config.trainer.logprob_diff_limit)


def test_a_large_one_is_told_with_its_gserver_and_version(caplog):
    figures = {"logprob_diff_mean/gserver_0": 1e-6, "logprob_diff_mean/gserver_11": 0.31}
    with caplog.at_level(logging.WARNING):
        watch(logprob_diff_warning=0.05).look(figures, policy_version=7)
    (record,) = caplog.records
    assert "gserver/11 and the trainer differ by 0.31 nats" in record.getMessage()
    assert "under version 7, more than trainer.logprob_diff_warning = 0.05" in record.getMessage()
    assert "gserver/0" not in record.getMessage()


@pytest.mark.parametrize("name", ["logprob_diff_mean/gserver_2", "sampling_diff_mean"])
def test_beyond_the_limit_the_run_stops(name):
    with pytest.raises(
        TrainingError, match=r"differ by 0\.31 nats .* more than trainer\.logprob_diff_limit = 0\.3: a gs"
    ):
        watch(logprob_diff_limit=0.3).look({name: 0.31}, policy_version=7)
