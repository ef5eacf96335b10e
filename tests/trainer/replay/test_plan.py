"""What a replay computes, and what it takes from the record."""

from __future__ import annotations

import numpy as np
import pytest

from streamrl.errors import ConfigError
from streamrl.trainer.graph import MFC, SEQUENCE_KEYS, STREAM_KEYS, build_graph
from streamrl.trainer.replay.plan import ReplayBatch, computed
from streamrl.trainer.replay.recording import RecordedStep
from tests.groups import make_group


def test_what_a_chain_of_functions_gave_in_between_is_not_asked_for() -> None:
    """Of several ranks each has what was trained on there: what served to find that out may be on another one."""

    def function(name: str, inputs: set[str], outputs: set[str]) -> MFC:
        return MFC(name, "actor", "function", SEQUENCE_KEYS | inputs, frozenset(outputs), function="package:function")

    graph = build_graph(
        [
            function("judge", set(), {"scores"}),
            function("assign", {"scores"}, {"advantages"}),
            function("watch", {"advantages"}, set()),
            MFC("actor_train", "actor", "train_step", STREAM_KEYS | {"advantages"}, frozenset()),
        ]
    )
    steps = []
    for rank in range(2):
        mine = [make_group(rank)]
        given = {"advantages": [np.zeros(mine[0].tokens, np.float32)]}
        if rank == 0:  # the other group was scored where it was not trained on
            given["scores"] = given["advantages"]
        steps.append(RecordedStep(1, rank, [], [], mine, given))
    batch = ReplayBatch(steps)
    assert batch.keys == {"advantages"}
    assert [mfc.name for mfc in computed(graph, batch.keys)] == ["actor_train"]
    with pytest.raises(ConfigError, match="assign calls package:function, and the record lacks its result"):
        computed(graph, {"scores"})
