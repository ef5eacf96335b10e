"""Who holds what: after `bring`, every worker of a share has its keys, and nothing is sent twice."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from streamrl.trainer.graph import SEQUENCE_KEYS, STREAM_KEYS, Graph
from streamrl.trainer.layout import Layout
from streamrl.trainer.master.buffer import AsyncIOSequenceBuffer
from tests.groups import admitted_ledger
from tests.trainer.master.test_buffer import make_meta

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
