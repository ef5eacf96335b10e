"""The master's buffer: readiness, waking, groups read once, batches, and who holds what."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.config import from_dict
from streamrl.ledger import Selection
from streamrl.trainer.graph import MFC, SEQUENCE_KEYS, STREAM_KEYS, Graph, graph_of
from streamrl.trainer.layout import Layout
from streamrl.trainer.master.batches import BatchFormer
from streamrl.trainer.master.buffer import AsyncIOSequenceBuffer
from tests.groups import admitted_ledger, make_meta


def make_buffer(batch_groups=2, **algorithm):
    graph = graph_of(from_dict({"algorithm": algorithm}))
    return AsyncIOSequenceBuffer(graph, admitted_ledger(batch=batch_groups, rejected=[50]))


def ref_inf(groups=None):
    return MFC("ref_inf", "ref", "inference", SEQUENCE_KEYS, frozenset({"ref_logprobs"}), "arrivals", groups)


def on_batch(groups=None):
    return MFC("trains", "actor", "inference", frozenset({"ref_logprobs"}), frozenset({"x"}), "batch", groups)


async def read(buffer, mfc, **kwargs):
    """Sequence numbers of the next call of `mfc`."""
    return [meta.seq for meta in await asyncio.wait_for(buffer.get_batch_for_rpc(mfc, **kwargs), 30)]


async def waits(task):
    """Whether `task` is still waiting after everything else has had its turn."""
    for _ in range(5):
        await asyncio.sleep(0)
    return not task.done()


def two_oldest(ready):
    seqs = ready.oldest(2)
    return Selection(batch=seqs if len(seqs) == 2 else [], drop=[], missing=[], short=2 - len(seqs))


async def test_a_batch_waits_until_groups_arrive_and_takes_the_oldest():
    buffer = make_buffer()
    taking = asyncio.create_task(buffer.take_batch(two_oldest))
    buffer.put_batch([make_meta(5)])
    await asyncio.sleep(0)
    assert not taking.done()
    buffer.put_batch([make_meta(3), make_meta(9)])
    batch, dropped = await asyncio.wait_for(taking, 30)
    assert [meta.seq for meta in batch] == [3, 5]
    assert dropped == []


async def test_a_group_is_no_part_of_a_batch_before_ref_inf_has_read_it():
    buffer = make_buffer(kl_coef=0.1)
    buffer.put_batch([make_meta(0), make_meta(1), make_meta(2)])
    taking = asyncio.create_task(buffer.take_batch(two_oldest))
    assert await read(buffer, ref_inf(1)) == [0]
    assert await read(buffer, ref_inf()) == [1, 2]
    buffer.amend_batch(["ref_logprobs"], [[1, 2]], Layout())
    batch, _ = await asyncio.wait_for(taking, 30)
    assert [m.seq for m in batch] == [1, 2]
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(buffer.get_batch_for_rpc(ref_inf()), 0.05)


async def test_an_mfc_on_arrivals_waits_for_as_many_groups_as_it_asks_for():
    buffer = make_buffer(batch_groups=8, kl_coef=0.1)
    reading = asyncio.create_task(read(buffer, ref_inf(3)))
    buffer.put_batch([make_meta(0), make_meta(2)])
    assert await waits(reading)
    buffer.put_batch([make_meta(1), make_meta(3)])
    assert await reading == [0, 1, 2]
    assert await read(buffer, ref_inf()) == [3]  # one that asks for no number takes what is ready


async def test_an_mfc_on_batches_waits_for_the_keys_of_its_part_alone():
    buffer = make_buffer(batch_groups=3, kl_coef=0.1)
    batch = [make_meta(seq) for seq in (4, 0, 2)]
    buffer.put_batch(batch)
    reading = asyncio.create_task(read(buffer, on_batch(2), batch=batch))
    buffer.amend_batch(["ref_logprobs"], [[4]], Layout())
    assert await waits(reading)
    buffer.amend_batch(["ref_logprobs"], [[0]], Layout())
    assert await reading == [4, 0]  # in the batch's own order
    last, whole = (asyncio.create_task(read(buffer, on_batch(n), batch=b)) for n, b in ((2, batch[2:]), (None, batch)))
    assert await waits(last)
    assert await waits(whole)
    buffer.amend_batch(["ref_logprobs"], [[2]], Layout())
    assert await last == [2]
    assert await whole == [4, 0, 2]


async def test_a_wait_for_a_batch_ends_without_one_where_none_will_come():
    buffer, over = make_buffer(), False
    taking = asyncio.create_task(buffer.take_batch(lambda ready: None if over else two_oldest(ready)))
    assert await waits(taking)
    over = True
    buffer.wake()
    assert await asyncio.wait_for(taking, 30) == ([], [])


async def test_what_an_mfc_gives_is_there_for_the_batch_and_rewards_are_part_of_the_metadata():
    buffer = make_buffer(kl_coef=0.1)
    buffer.put_batch([make_meta(0), make_meta(1)])
    buffer.amend_batch(["ref_logprobs"], [[0], [1]], Layout(data=2), rewards={1: [0.5, 0.25]})
    batch, _ = await asyncio.wait_for(buffer.take_batch(two_oldest), 30)
    assert [meta.rewards for meta in batch] == [[0.0, 1.0], [0.5, 0.25]]
    assert buffer.trained_on([0, 1]) == {0: [0, 1], 1: [1]}


def test_a_prompt_goes_back_only_after_workers_have_discarded_its_group():
    ledger = admitted_ledger()
    buffer = AsyncIOSequenceBuffer(graph_of(from_dict({})), ledger)
    buffer.put_batch([make_meta(0), make_meta(1)])
    with buffer.dropping([0, 1]) as held:
        assert held == {0: [0, 1]}
        assert (ledger.state(0), ledger.state(1), len(buffer)) == ("accepted", "accepted", 0)
        buffer.put_batch([make_meta(1)])  # by another worker
    assert (ledger.state(0), ledger.state(1), ledger.dropped) == ("returned", "accepted", 2)
    assert 1 in buffer
    buffer.trained_on([1])
    assert (ledger.state(1), ledger.accepted) == ("trained", 1)


# --- batches ---


def make_former(over_age, *, batch):
    return BatchFormer(
        from_dict({"staleness": {"max_staleness": 2, "over_age": over_age}, "trainer": {"batch_groups": batch}})
    )


def test_wait_takes_admission_order_and_skips_what_was_given_up():
    former, ledger = make_former("wait", batch=2), admitted_ledger()
    buffer = AsyncIOSequenceBuffer(Graph(()), ledger)

    def select(version):
        return former.select(buffer.ready, policy_version=version, next_in_order=ledger.next_in_order)

    buffer.put_batch([make_meta(seq) for seq in (1, 2, 3)])
    selection = select(0)
    assert (selection.batch, selection.missing) == ([], [0])
    assert former.describe(selection, policy_version=0) == "1 of 2 groups for actor_train v0, oldest seq 0"
    with buffer.dropping([2]):
        pass
    assert [ledger.reject(seq) for seq in (0, 2, 3)] == [True, True, False]  # the trainer has the last one
    assert select(0).batch == [1, 3]
    buffer.trained_on([1, 3])
    assert select(1).missing == [4, 5]


# --- holders of arrays ---

LAYOUTS = [Layout(data=4), Layout(data=2, context=2), Layout(tensor=2, pipeline=2), Layout(data=2, pipeline=2)]


def sent(plan):
    """(seq, key, destination) → how often it is sent."""
    return Counter(
        (piece.seq, piece.key, destination)
        for transfer in plan
        for piece in transfer.pieces
        for destination in transfer.destinations
    )


@given(st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS), st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_each_worker_gets_what_it_lacks_once(layout, other, homes):
    buffer = AsyncIOSequenceBuffer(Graph(()), admitted_ledger())
    heads = layout.heads
    buffer.put_batch(make_meta(seq, head=heads[home % len(heads)]) for seq, home in enumerate(homes))
    has = {(seq, key): {heads[home % len(heads)]} for seq, home in enumerate(homes) for key in STREAM_KEYS}
    for target, keys in ((layout, SEQUENCE_KEYS), (other, SEQUENCE_KEYS), (layout, STREAM_KEYS)):
        shares = buffer.deal(list(range(len(homes))), target)
        assert sorted(seq for share in shares for seq in share) == list(range(len(homes)))
        found = sent(buffer.bring(shares, keys, target))
        lacking = {
            (seq, key, worker)
            for data, share in enumerate(shares)
            for seq in share
            for key in keys
            for worker in target.members(data)
            if worker not in has[seq, key]
        }
        assert found == Counter(dict.fromkeys(lacking, 1))
        for seq, key, worker in lacking:
            has[seq, key].add(worker)


def test_what_a_call_gave_is_with_the_heads_and_goes_with_the_group():
    buffer = AsyncIOSequenceBuffer(Graph(()), admitted_ledger())
    layout = Layout(data=2, tensor=2)
    buffer.put_batch([make_meta(0, head=0), make_meta(1, head=2)])
    buffer.amend_batch(["values"], [[0], [1]], layout)
    plan = buffer.bring([[0], [1]], ["values"], layout)
    assert sent(plan) == Counter({(0, "values", 1): 1, (1, "values", 3): 1})
    with buffer.dropping([0]) as held:
        assert held == {0: [0], 1: [0]}
    assert buffer.trained_on([1]) == {2: [1], 3: [1]}
