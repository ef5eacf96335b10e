"""What a gserver scores is what the trainer computes. `e2e/test_failures` has one that keeps its old weights."""

from __future__ import annotations

import asyncio

import pytest

from streamrl.transport.control import Scores
from streamrl.transport.generation import AbortRequest
from tests.gserver.contract.fixture import MARKS, ONE_OF_EACH, TOLERANCE, TWO_RANKS, Contract, served

pytestmark = MARKS

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
