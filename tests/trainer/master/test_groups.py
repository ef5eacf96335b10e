"""The table of groups: readiness, waking, groups read once, and their fate."""

from __future__ import annotations

import asyncio
import logging

import pytest

from streamrl.config import from_dict
from streamrl.ledger import Fate, Selection
from streamrl.trainer.graph import graph_of
from streamrl.trainer.layout import Layout
from streamrl.trainer.master.groups import GroupTable
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


def make_table(warning=30.0, **algorithm):
    return GroupTable(graph_of(from_dict({"algorithm": algorithm})), wait_warning_seconds=warning)


def two_oldest(ready):
    seqs = ready.oldest(2)
    return Selection(batch=seqs if len(seqs) == 2 else [], drop=[], missing=[], short=2 - len(seqs))


def describe(selection):
    return f"the test waits for {selection.short} groups"


async def test_a_batch_waits_until_groups_arrive_and_takes_the_oldest():
    table = make_table()
    taking = asyncio.create_task(table.take_batch(two_oldest, describe))
    table.put_batch([make_meta(5)])
    await asyncio.sleep(0)
    assert not taking.done()
    table.put_batch([make_meta(3), make_meta(9)])
    batch, dropped = await asyncio.wait_for(taking, 30)
    assert [meta.seq for meta in batch] == [3, 5]
    assert dropped == []


async def test_a_group_is_no_part_of_a_batch_before_ref_inf_has_read_it():
    table = make_table(kl_coef=0.1)
    table.put_batch([make_meta(0), make_meta(1), make_meta(2)])
    taking = asyncio.create_task(table.take_batch(two_oldest, describe))
    first = await table.get_batch_for_rpc("ref_inf", limit=1)
    rest = await table.get_batch_for_rpc("ref_inf", limit=5)
    assert [m.seq for m in first + rest] == [0, 1, 2]
    table.amend_batch(["ref_logprobs"], [[1, 2]], Layout())
    batch, _ = await asyncio.wait_for(taking, 30)
    assert [m.seq for m in batch] == [1, 2]
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(table.get_batch_for_rpc("ref_inf", limit=5), 0.05)


async def test_a_group_that_comes_again_after_a_drop_is_read_again():
    table = make_table(kl_coef=0.1)
    for _ in range(2):
        table.put_batch([make_meta(0)])
        assert [m.seq for m in await table.get_batch_for_rpc("ref_inf", limit=5)] == [0]
        with table.dropping([0]):
            pass
    table.amend_batch(["ref_logprobs"], [[0]], Layout())  # the answer for a group that is gone
    assert len(table) == 0


async def test_a_long_wait_is_named(caplog):
    table = make_table(warning=0.05)
    with caplog.at_level(logging.WARNING), pytest.raises(TimeoutError):
        await asyncio.wait_for(table.take_batch(two_oldest, describe), 0.3)
    assert "the test waits for 2 groups, for 0 s now" in caplog.text


async def test_a_long_wait_is_named_though_something_happens_all_the_time(caplog):
    table = make_table(warning=0.2)

    async def wake():
        while True:
            await asyncio.sleep(0.01)
            table.wake()

    waking = asyncio.create_task(wake())
    with caplog.at_level(logging.WARNING), pytest.raises(TimeoutError):
        await asyncio.wait_for(table.take_batch(two_oldest, describe), 1.0)
    waking.cancel()
    assert 1 <= caplog.text.count("the test waits for 2 groups") <= 3, "after 0.2 s, and again when twice as long"


async def test_what_an_mfc_gives_is_there_for_the_batch_and_rewards_are_part_of_the_metadata():
    table = make_table(kl_coef=0.1)
    table.put_batch([make_meta(0), make_meta(1)])
    table.amend_batch(["ref_logprobs"], [[0], [1]], Layout(data=2), rewards={1: [0.5, 0.25]})
    batch, _ = await asyncio.wait_for(table.take_batch(two_oldest, describe), 30)
    assert [meta.rewards for meta in batch] == [[0.0, 1.0], [0.5, 0.25]]
    assert table.trained_on([0, 1]) == {0: [0, 1], 1: [1]}


def test_the_fate_of_a_group_is_told_until_it_was_heard_and_not_before_workers_let_go():
    table = make_table()
    table.put_batch([make_meta(0), make_meta(1)])
    first = table.news()
    assert first == table.news() == [Fate(0, 1), Fate(1, 1)]  # asked again, since it may have been lost
    with table.dropping([0]) as held:
        assert held == {0: [0]}
        table.told(first)
        assert not table.untold
    assert table.news() == [Fate(0, 2)]
    table.told(first)  # heard again
    assert table.news() == [Fate(0, 2)]
    table.put_batch([make_meta(0)])
    assert table.news() == [Fate(0, 3)]
    table.told(table.news())
    table.trained_on([0, 1])
    assert not table.untold
    assert (table.changes(0), table.changes(1), table.changes(2)) == (3, 1, 0)


def test_a_group_that_was_given_up_is_not_taken_when_it_comes():
    table = make_table()
    table.give_up([Fate(5, 0)])
    assert [meta.seq for meta in table.put_batch([make_meta(4), make_meta(5)])] == [5]
    assert (4 in table, 5 in table, table.consumed) == (True, False, 1)
    assert table.news() == [Fate(4, 1)]
