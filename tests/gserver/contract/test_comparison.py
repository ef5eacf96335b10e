"""What a gserver scores is what the trainer computes, and one that serves other weights than it says is named."""

from __future__ import annotations

import asyncio

import pytest

from streamrl.errors import TrainingError
from streamrl.trainer.master.comparison import MismatchWatch, compared_figures
from streamrl.transport.control import Scores
from streamrl.transport.generation import AbortRequest
from tests.gserver.contract.fixture import ONE_OF_EACH, TOLERANCE, TWO_RANKS, Contract, served
from tests.gserver.running_sglang import START_SECONDS

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(START_SECONDS + 120),
]

PROMPT = [3, 1, 4, 1, 5]
RESPONSE = [9, 2, 6, 5, 15, 3, 5, 8, 9, 7, 15]
"""With the last of the vocabulary of 16, which SGLang tells of under another name."""
SHIFTS = [1.0, 1.2]
"""Of all weights, from one version to the next."""


async def score(gserver: Contract) -> Scores:
    """What the manager has it say of `RESPONSE` under the version that it serves, while it generates."""
    version = gserver.version
    running = await gserver.begin(PROMPT, gserver.long)
    gserver.run.manager.compare(version, PROMPT + RESPONSE, start=len(PROMPT))
    async with asyncio.timeout(60):
        while not (scores := gserver.run.manager.scores(version)):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert (await gserver.client.update(gserver.url, "/abort_request", AbortRequest(abort_all=True))).success
    await running
    return scores[0]


@served(*ONE_OF_EACH, TWO_RANKS)
async def test_it_scores_what_the_trainer_computes(gserver: Contract) -> None:
    """At temperature 1, whatever tokens are sampled with."""
    for shift in SHIFTS:
        await gserver.publish(shift)
        found = await score(gserver)
        assert found.problem == ""
        assert found.logprobs == pytest.approx(gserver.logprobs(PROMPT, RESPONSE), abs=TOLERANCE)


async def test_one_that_keeps_its_old_weights_under_the_new_name_is_named(gserver: Contract) -> None:
    """The publication brings what it had."""
    old, new = SHIFTS
    await gserver.publish(old)
    before = gserver.logprobs(PROMPT, RESPONSE)
    await gserver.publish(old)
    found = await score(gserver)
    await gserver.publish(new)
    trained = gserver.logprobs(PROMPT, RESPONSE)
    assert found.logprobs == pytest.approx(before, abs=TOLERANCE)
    figures = compared_figures([found], trained, sampled=range(len(RESPONSE)))
    watch = MismatchWatch(warning=0.005, limit=0.01)
    with pytest.raises(TrainingError, match=r"gserver/0 and the trainer differ by \S+ nats for each token"):
        watch.look(figures, policy_version=gserver.version)
