"""The graph: order from keys, the graphs that come with it, the user's own, and clear refusals."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.config import Config, from_dict
from streamrl.errors import ConfigError
from streamrl.trainer.calls import Offload, ParamRealloc, SaveHook
from streamrl.trainer.graph import (
    GENERATED_KEYS,
    MFC,
    SEQUENCE_KEYS,
    STREAM_KEYS,
    build_graph,
    downstream,
    graph_of,
    required_keys,
    upstream,
)


def mfc(name, inputs=(), outputs=(), reads="batch", *, role="actor", interface="inference", **settings):
    """An MFC with all the keys that its interface requires, and `inputs`."""
    keys = required_keys(role, interface) | set(inputs)
    return MFC(name, role, interface, keys, frozenset(outputs), reads, **settings)


def train(name="train", inputs=("rewards",), **settings):
    return mfc(name, inputs, interface="train_step", **settings)


def configured(**sections):
    return from_dict(sections)


@pytest.mark.parametrize(
    ("algorithm", "names"),
    [
        ({}, ["actor_train"]),
        ({"minibatches": 2}, ["actor_inf", "actor_train"]),
        ({"proximal": "recompute"}, ["actor_inf", "actor_train"]),
        ({"proximal": "behavior", "minibatches": 4}, ["actor_train"]),
        ({"kl_coef": 0.1}, ["ref_inf", "actor_train"]),
        ({"kl_coef": 0.1, "proximal": "recompute"}, ["ref_inf", "actor_inf", "actor_train"]),
        ({"advantage": "gae"}, ["critic_inf", "critic_train", "actor_train"]),
    ],
)
def test_asynchronous_graphs_bring_only_what_they_need(algorithm, names):
    graph = graph_of(configured(algorithm=algorithm))
    assert [m.name for m in graph.mfcs] == names
    assert graph.of_rollout == []


def test_the_synchronous_graph_of_ppo_has_all_calls():
    settings = {"algorithm": {"advantage": "gae", "kl_coef": 0.1}, "staleness": {"max_staleness": 0}}
    graph = graph_of(configured(trainer={"graph": "synchronous"}, **settings))
    names = ["actor_gen", "rew_inf", "ref_inf", "critic_inf", "critic_train", "actor_train"]
    assert sorted(m.name for m in graph.mfcs) == sorted(names)
    order = {m.name: i for i, m in enumerate(graph.mfcs)}
    assert order["actor_gen"] < order["rew_inf"] < order["actor_train"]
    assert order["ref_inf"] < order["actor_train"] > order["critic_inf"]
    assert [m.name for m in graph.of_rollout] == ["actor_gen", "rew_inf"]
    assert graph.roles == {"actor", "ref", "critic"}


def test_a_reward_model_takes_the_place_of_the_verifiers():
    model = {"reward_model": {"path": "judge"}}
    graph = graph_of(configured(**model))
    first = graph.mfcs[0]
    assert (first.name, first.role, first.reads, first.groups) == ("rew_inf", "reward", "arrivals", None)
    alone = graph_of(configured(gserver={"deterministic": True}, **model)).mfcs
    assert [(m.name, m.groups) for m in alone] == [("rew_inf", 1), ("actor_train", None)]
    assert graph.stream_keys == GENERATED_KEYS
    assert graph.arrival_keys == STREAM_KEYS
    synchronous = graph_of(configured(trainer={"graph": "synchronous"}, staleness={"max_staleness": 0}, **model))
    assert [(m.name, m.role) for m in synchronous.mfcs][:2] == [("actor_gen", "rollout"), ("rew_inf", "reward")]


def test_settings_become_hooks():
    algorithm = {"kl_coef": 0.1, "ref_update_every": 5, "advantage": "gae"}
    graph = graph_of(configured(trainer={"offload": ["ref", "critic"]}, algorithm=algorithm))
    hooks = {m.name: m.post_hooks for m in graph.mfcs}
    assert hooks == {
        "ref_inf": (Offload("ref"),),
        "critic_inf": (),  # critic_train follows
        "critic_train": (Offload("critic"),),
        "actor_train": (ParamRealloc("actor", "ref", every=5),),
    }


@given(st.permutations(range(6)))
def test_order_follows_from_keys_alone(order):
    chain = [mfc(f"m{i}", [f"k{i - 1}"] if i else [], [f"k{i}"]) for i in range(6)]
    graph = build_graph([*(chain[i] for i in order), train(inputs=["rewards", "k5"])])
    assert [m.name for m in graph.mfcs] == [*(f"m{i}" for i in range(6)), "train"]
    assert [[m.name for m in level] for level in graph.levels] == [[m.name] for m in graph.mfcs]


def without(call, *keys):
    return msgspec.structs.replace(call, inputs=call.inputs - set(keys))


@pytest.mark.parametrize(
    ("mfcs", "message"),
    [
        ([mfc("a", outputs=["k"]), mfc("b", outputs=["k"])], "key k is given by both a and b"),
        ([mfc("a", outputs=["k"]), mfc("a", outputs=["l"])], "two model function calls have the name a"),
        ([mfc("a", outputs=["rewards"])], "key rewards is given by both the stream and a"),
        ([train("a", inputs=["rewards", "values"])], "a needs key values, which no"),
        ([mfc("a", ["x"], ["y"]), mfc("b", ["y"], ["x"])], "wait for each other: a, b"),
        ([mfc("a", [], ["x"]), mfc("b", ["x"], ["z"], "arrivals")], "b runs as groups arrive but needs x, which a"),
        (
            [mfc("a", [], [], "arrivals", interface="function", function="m:f")],
            "a: .* as groups arrive but gives no key",
        ),
        ([mfc("a", [], ["x"], groups=0)], "a: 0 groups in a call; allowed are 1 to 8"),
        ([mfc("a", [], ["x"], groups=9)], r"a: 9 groups .* 1 to 8 \(trainer.batch_groups\)"),
        ([mfc("a", [], ["x", "y"])], "a: an inference gives one key, not 2"),
        ([mfc("a", [], ["x"], interface="function")], "a: the interface `function` and a function"),
        ([mfc("a", [], GENERATED_KEYS, interface="generate")], "a: only the role rollout generates"),
    ],
)
def test_impossible_graphs_are_refused_by_name(mfcs, message):
    with pytest.raises(ConfigError, match=message):
        build_graph([*mfcs, train()], largest=8)


@pytest.mark.parametrize(
    ("mfcs", "message"),
    [
        ([train("a", reads="arrivals")], 'a: a train_step runs on batches, not on arrivals; remove reads="arrivals"'),
        ([train("a", groups=2)], "a: groups = 2 .* algorithm.minibatches"),
        ([train("a", outputs=["k"])], "a: a train_step gives no key; remove k from its outputs"),
        ([train("a", role="teacher")], "a: there is no role 'teacher'; there are actor, ref, critic, reward"),
        ([mfc("a", [], ["k"], role="teacher"), train()], "a: there is no role 'teacher'"),
        ([train("a", role="ref")], "a: the role ref is never trained, only actor and critic"),
        ([train("a", role="rollout")], "a: the role rollout is never trained"),
        ([mfc("a", [], ["k"], role="rollout"), train()], "a: a call to the role rollout .* gives rewards"),
        ([mfc("a", ["x"], ["rewards"], "arrivals", role="rollout"), mfc("b", [], ["x"]), train()], "a: key x is with"),
        ([], "no train_step of the actor"),
        ([mfc("a", [], ["k"])], "no train_step of the actor"),
        ([train("a", role="critic")], "no train_step of the actor"),
        ([train("a", inputs=[])], "a: key rewards is missing from its inputs"),
        ([without(train("a"), "packed_behavior_logprobs", "seqlens")], "a: keys packed_behavior_logprobs, seqlens"),
        ([without(train("a"), "packed_routed_experts")], "a: key packed_routed_experts is missing"),
        ([without(mfc("a", [], ["k"]), "packed_routed_experts"), train()], "a: key packed_routed_experts is missing"),
        ([without(mfc("a", [], ["k"], role="ref"), "seqlens"), train()], "a: key seqlens is missing"),
        (
            [without(mfc("a", [], ["k"], interface="function", function="m:f"), "seqlens"), train()],
            "a: key seqlens is missing",
        ),
        ([train("a", inputs=["advantages"], role="critic"), train()], "a: a critic learns from rewards"),
    ],
)
def test_a_call_that_would_compute_something_else_is_refused(mfcs, message):
    with pytest.raises(ConfigError, match=message):
        build_graph(mfcs)


def only_training(config: Config) -> list[MFC]:
    """A training step with the keys of the stream alone."""
    return [train()]


def training_on_everything(config: Config) -> list[MFC]:
    """A training step that gets each key that one can get."""
    given = {"ref": "ref_logprobs", "critic": "values", "actor": "proximal_logprobs"}
    return [
        *(mfc(key, [], [key], role=role) for role, key in given.items()),
        train("critic", ["rewards", "values"], role="critic"),
        train(inputs=["rewards", *given.values()]),
    ]


@pytest.mark.parametrize(
    ("graph", "algorithm", "message"),
    [
        ("only_training", {"kl_coef": 0.1}, "train: key ref_logprobs is missing .* algorithm.kl_coef"),
        ("only_training", {"minibatches": 2}, "train: key proximal_logprobs is missing .* algorithm.proximal"),
        ("only_training", {"advantage": "gae"}, "train: key values is missing .* algorithm.advantage"),
        ("training_on_everything", {}, 'critic: a critic needs algorithm.advantage = "gae"'),
        ("training_on_everything", {"advantage": "gae"}, "key ref_logprobs has no effect; set algorithm.kl_coef"),
    ],
)
def test_a_users_training_step_gets_what_the_settings_need(graph, algorithm, message):
    with pytest.raises(ConfigError, match=message):
        graph_of(configured(trainer={"graph": f"{__name__}:{graph}"}, algorithm=algorithm))


def synchronous_graph(config: Config) -> list[MFC]:
    return [*upstream(config), *downstream(config)]


def test_a_users_graph_directs_generation_where_the_setting_says_so():
    settings = {"staleness": {"max_staleness": 0}}
    name = f"{__name__}:synchronous_graph"
    found = graph_of(configured(trainer={"graph": f"synchronous:{name}"}, **settings))
    assert found == graph_of(configured(trainer={"graph": "synchronous"}, **settings))
    with pytest.raises(ConfigError, match=f'actor_gen .* trainer.graph = "synchronous:{name}"'):
        graph_of(configured(trainer={"graph": name}, **settings))
    with pytest.raises(ConfigError, match="no model function call generates"):
        graph_of(configured(trainer={"graph": f"synchronous:{__name__}:only_training"}, **settings))
    with pytest.raises(ConfigError, match=r"needs staleness\.max_staleness = 0"):
        configured(trainer={"graph": f"synchronous:{name}"})


def users_graph(config: Config) -> list[MFC]:
    """A penalty for length, computed by a function of the user's, in place of the algorithm's own advantages."""
    own = MFC(
        "length_penalty",
        "actor",
        "function",
        SEQUENCE_KEYS | {"rewards"},
        frozenset({"advantages"}),
        function="tests.trainer.worker.test_computation:penalise_length",
        post_hooks=(Offload("actor"),),
    )
    *others, last = downstream(config)
    inputs = last.inputs | {"advantages"}
    return [own, *others, MFC(last.name, last.role, last.interface, inputs, last.outputs, post_hooks=(SaveHook(2),))]


def not_a_graph(config: Config) -> str:
    return "actor_train"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("asynchron", 'neither "asynchronous" nor "synchronous" nor module:function'),
        ("tests.trainer.test_graph:missing", "graph = '.*missing': .* has no missing; it has .*users_graph"),
        ("no.such.module:graph", "there is no module no.such.module"),
        ("tests.trainer.test_graph:not_a_graph", "returned str; it has to return a list of MFC"),
    ],
)
def test_a_graph_that_is_none_is_refused(name, message):
    with pytest.raises(ConfigError, match=message):
        graph_of(configured(trainer={"graph": name}))
