"""The graph: order from keys, and clear refusals."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.config import AlgorithmConfig
from streamrl.errors import ConfigError
from streamrl.trainer.graph import MFC, STREAM_KEYS, build_graph, grpo_graph


def mfc(name, inputs=(), outputs=(), reads="batch"):
    return MFC(name, frozenset(inputs), frozenset(outputs), reads)


@pytest.mark.parametrize(
    ("algorithm", "names"),
    [
        (AlgorithmConfig(), ["actor_train"]),
        (AlgorithmConfig(minibatches=2), ["actor_inf", "actor_train"]),
        (AlgorithmConfig(proximal="recompute"), ["actor_inf", "actor_train"]),
        (AlgorithmConfig(proximal="behavior", minibatches=4), ["actor_train"]),
        (AlgorithmConfig(kl_coef=0.1), ["ref_inf", "actor_train"]),
        (AlgorithmConfig(kl_coef=0.1, proximal="recompute"), ["ref_inf", "actor_inf", "actor_train"]),
    ],
)
def test_grpo_brings_only_what_it_needs(algorithm, names):
    assert [m.name for m in grpo_graph(algorithm).mfcs] == names


@given(st.permutations(range(6)))
def test_order_follows_from_keys_alone(order):
    chain = [mfc(f"m{i}", [f"k{i - 1}"] if i else [], [f"k{i}"]) for i in range(6)]
    graph = build_graph([chain[i] for i in order])
    assert [m.name for m in graph.mfcs] == [f"m{i}" for i in range(6)]


@pytest.mark.parametrize(
    ("mfcs", "message"),
    [
        ([mfc("a", outputs=["k"]), mfc("b", outputs=["k"])], "key k is given by both a and b"),
        ([mfc("a", outputs=["rewards"])], "key rewards is given by both the stream and a"),
        ([mfc("a", inputs=["values"])], "a needs key values, which no"),
        ([mfc("a", ["x"], ["y"]), mfc("b", ["y"], ["x"])], "wait for each other: a, b"),
        ([mfc("a", [], ["x"]), mfc("b", ["x"], [], "arrivals")], "b runs as groups arrive but needs x, which a gives"),
    ],
)
def test_impossible_graphs_are_refused_by_name(mfcs, message):
    with pytest.raises(ConfigError, match=message):
        build_graph(mfcs)


def test_a_group_needs_the_keys_of_arrivals_before_it_can_be_in_a_batch():
    assert grpo_graph(AlgorithmConfig(kl_coef=0.1)).arrival_keys == STREAM_KEYS | {"ref_logprobs"}
