"""The buffer: readiness, waking, and groups read once."""

from __future__ import annotations

import asyncio
import logging

import pytest

from streamrl.config import from_dict
from streamrl.ledger import Selection
from streamrl.trainer.graph import graph_of
from streamrl.trainer.master.groups import AsyncIOSequenceBuffer
from streamrl.types import SampleMeta


def make_meta(seq, *, head=0, versions=None):
    return SampleMeta(
        seq=seq,
        head=head,
        worker="rollout/0",
        size=2,
        tokens=20,
        rewards=[0.0, 1.0],
        response_lengths=[3, 5],
        version_counts=versions or {0: 8},
        generation_seconds=1.0,
    )


def make_buffer(warning=30.0, **algorithm):
    return AsyncIOSequenceBuffer(graph_of(from_dict({"algorithm": algorithm})), wait_warning_seconds=warning)


def two_oldest(held):
    seqs = sorted(held)[:2]
    return Selection(batch=seqs if len(seqs) == 2 else [], drop=[], missing=[], short=2 - len(seqs))


def describe(selection):
    return f"the test waits for {selection.short} groups"


async def test_a_batch_waits_until_groups_arrive_and_takes_the_oldest():
    buffer = make_buffer()
    taking = asyncio.create_task(buffer.take_batch(two_oldest, describe))
    await buffer.put_batch([make_meta(5)])
    await asyncio.sleep(0)
    assert not taking.done()
    await buffer.put_batch([make_meta(3), make_meta(9)])
    batch, dropped = await asyncio.wait_for(taking, 1)
    assert [meta.seq for meta in batch] == [3, 5]
    assert dropped == []


async def test_a_group_is_no_part_of_a_batch_before_ref_inf_has_read_it():
    buffer = make_buffer(kl_coef=0.1)
    await buffer.put_batch([make_meta(0), make_meta(1), make_meta(2)])
    taking = asyncio.create_task(buffer.take_batch(two_oldest, describe))
    first = await buffer.get_batch_for_rpc("ref_inf", limit=1)
    rest = await buffer.get_batch_for_rpc("ref_inf", limit=5)
    assert [m.seq for m in first + rest] == [0, 1, 2]
    await buffer.amend_batch([1, 2], ["ref_logprobs"])
    batch, _ = await asyncio.wait_for(taking, 1)
    assert [m.seq for m in batch] == [1, 2]
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(buffer.get_batch_for_rpc("ref_inf", limit=5), 0.05)


async def test_a_group_that_comes_again_after_a_drop_is_read_again():
    buffer = make_buffer(kl_coef=0.1)
    for _ in range(2):
        await buffer.put_batch([make_meta(0)])
        assert [m.seq for m in await buffer.get_batch_for_rpc("ref_inf", limit=5)] == [0]
        await buffer.discard([0])
    await buffer.amend_batch([0], ["ref_logprobs"])  # the answer for a group that is gone
    assert len(buffer) == 0


async def test_a_long_wait_is_named(caplog):
    buffer = make_buffer(warning=0.05)
    with caplog.at_level(logging.WARNING), pytest.raises(TimeoutError):
        await asyncio.wait_for(buffer.take_batch(two_oldest, describe), 0.3)
    assert "the test waits for 2 groups, for 0 s now" in caplog.text
