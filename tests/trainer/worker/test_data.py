"""What a model worker holds: groups of its own and groups that others sent, as if there were no difference."""

from __future__ import annotations

import numpy as np
import pytest

from streamrl.errors import TransferError
from streamrl.stream_dataset import StreamDataset
from streamrl.trainer.graph import STREAM_KEYS
from streamrl.trainer.worker.data import WorkerData
from tests.trainer.models import random_group


@pytest.fixture
def head():
    dataset = StreamDataset(rank=0, capacity_groups=4)
    group = random_group(5, np.random.default_rng(0), gaps=True)
    group.worker, group.gserver, group.generation_seconds = "rollout/3", "gserver/1", 1.5
    group.scores, group.reward_parts = [0.5, 1.0, 0.0, 0.25], [{"form": 0.5}, {}, {}, {"form": 0.25}]
    group.packed_routed_experts = np.arange(3 * group.tokens).astype(np.uint8)
    dataset.offer(group)
    return WorkerData(dataset, rank=0)


def sent_to_another(head, keys):
    """A worker that got `keys` of group 5."""
    other = WorkerData(StreamDataset(rank=1, capacity_groups=4), rank=1)
    for key in keys:
        other.put(5, key, head.get(5, key))
    return other


def test_a_group_that_was_sent_equals_the_one_that_arrived(head):
    own, sent = head.group(5), sent_to_another(head, STREAM_KEYS).group(5)
    assert sent.facts == own.facts
    assert own.facts.scores == [0.5, 1.0, 0.0, 0.25]
    for key in sorted(STREAM_KEYS):
        assert np.array_equal(getattr(sent, key), getattr(own, key)), key
    assert sent.routes == 3


def test_rewards_that_a_model_gave_replace_those_that_came(head):
    head.put(5, "rewards", np.arange(4, dtype=np.float32))
    assert head.group(5).rewards.tolist() == [0, 1, 2, 3]
    assert head.get(5, "rewards").tolist() == [0, 1, 2, 3]


def test_discarded_groups_are_gone_with_all_that_was_found_out(head):
    head.put(5, "values", np.zeros(3, np.float32))
    head.discard([5], come_again=False)
    assert head.optional(5, "values") is None
    with pytest.raises(TransferError, match=r"seq 5 \w+ is not held here"):
        head.group(5)
    sent = sent_to_another(WorkerData(StreamDataset(rank=0, capacity_groups=1), rank=0), [])
    sent.discard([5], come_again=False)  # nothing was held
