"""Training batches: whose turn it is, and how a batch is shared out."""

from __future__ import annotations

from streamrl.config import from_dict
from streamrl.trainer.graph import Graph
from streamrl.trainer.master.batches import BatchFormer
from streamrl.trainer.master.buffer import AsyncIOSequenceBuffer
from tests.groups import admitted_ledger
from tests.trainer.master.test_buffer import make_meta


def make_former(over_age="mask", *, minibatches=1, batch=4):
    return BatchFormer(
        from_dict(
            {
                "staleness": {"max_staleness": 2, "over_age": over_age},
                "trainer": {"batch_groups": batch},
                "algorithm": {"minibatches": minibatches},
            }
        )
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
