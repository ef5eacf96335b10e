"""Workflows of ECS functions: the same graphs as the built-in ones, and clear refusals."""

from __future__ import annotations

from typing import Annotated

import pytest

from examples import ecs_grpo, ecs_ppo
from streamrl.config import from_dict
from streamrl.ecs import Commands, DataQuery, MasterWorkerECS, ModelQuery, RawDataQuery
from streamrl.errors import ConfigError
from streamrl.trainer.graph import MFC, SEQUENCE_KEYS, STREAM_KEYS, graph_of
from tests.trainer.replay.test_replay import configured, record

_workflow: MasterWorkerECS
"""The one under test: `trainer.graph` names it."""
SYNCHRONOUS = {"staleness": {"max_staleness": 0}}
KL = {"algorithm": {"kl_coef": 0.1}}
GAE = {"algorithm": {"advantage": "gae"}}
JUDGE = {"reward_model": {"path": "judge"}}


def merged(*trees):
    """Sections of several trees, one over the other."""
    found: dict[str, dict] = {}
    for tree in trees:
        for name, section in tree.items():
            found[name] = found.get(name, {}) | section
    return found


def built(workflow, *trees, synchronous=False):
    """The graph of a workflow."""
    globals()["_workflow"] = workflow if isinstance(workflow, MasterWorkerECS) else MasterWorkerECS(workflow)
    name = f"{__name__}:_workflow"
    return graph_of(from_dict(merged({"trainer": {"graph": f"synchronous:{name}" if synchronous else name}}, *trees)))


def actor_inf(commands: Commands, actor: ModelQuery["actor"], ids: DataQuery["packed_input_ids"]):
    result = actor.inference(commands.build_model_inputs(packed_input_ids=ids))
    commands.set_data("proximal_logprobs", result["proximal_logprobs"])


def plain_train(
    commands: Commands, actor: ModelQuery["actor"], ids: DataQuery["packed_input_ids"], rewards: DataQuery["rewards"]
):
    actor.train_step(commands.build_model_inputs(packed_input_ids=ids, rewards=rewards))


def clipped_train(
    commands: Commands,
    actor: ModelQuery["actor"],
    ids: DataQuery["packed_input_ids"],
    rewards: DataQuery["rewards"],
    proximal_logprobs: DataQuery["proximal_logprobs"],
):
    inputs = commands.build_model_inputs(packed_input_ids=ids, rewards=rewards, proximal_logprobs=proximal_logprobs)
    actor.train_step(inputs)


plain_train.__name__ = clipped_train.__name__ = "actor_train"


@pytest.mark.parametrize(
    ("workflow", "settings", "synchronous"),
    [
        ([plain_train], {}, False),
        ([clipped_train, actor_inf], {"algorithm": {"minibatches": 2}}, False),
        (ecs_grpo.workflow, KL, False),
        (ecs_grpo.workflow, merged(KL, {"trainer": {"offload": ["ref"]}, "gserver": {"deterministic": True}}), False),
        (ecs_grpo.workflow, merged(KL, {"algorithm": {"ref_update_every": 3, "ref_update_share": 0.5}}), False),
        ([ecs_ppo.rew_inf, plain_train], JUDGE, False),
        (ecs_ppo.workflow, GAE, True),
        (ecs_ppo.workflow, merged(GAE, {"trainer": {"offload": ["critic"]}}), True),
        (ecs_ppo.workflow, merged(GAE, JUDGE), True),
    ],
)
def test_a_workflow_is_the_built_in_graph(workflow, settings, synchronous):
    own = SYNCHRONOUS if synchronous else {}
    usual = merged(settings, own, {"trainer": {"graph": "synchronous" if synchronous else "asynchronous"}})
    found, expected = built(workflow, settings, own, synchronous=synchronous), graph_of(from_dict(usual))

    def by_name(graph):
        return sorted(graph.mfcs, key=lambda mfc: mfc.name)

    assert by_name(found) == by_name(expected)
    assert found.stream_keys == expected.stream_keys


@pytest.mark.parametrize(
    ("functions", "algorithm"),
    [
        ([ecs_grpo.ref_inf, ecs_grpo.actor_train], {"kl_coef": 0.1, "ref_update_every": 2}),
        ([ecs_ppo.actor_train, ecs_ppo.critic_train, ecs_ppo.critic_inf], {"advantage": "gae"}),
    ],
    ids=["reference", "critic"],
)
def test_a_workflow_computes_what_the_built_in_graph_does(tmp_path, functions, algorithm):
    """Four training steps on groups of up to three versions before; the oldest leaves the loss."""
    found = []
    built_in, own = tmp_path / "built_in", tmp_path / "own"
    for folder, graph in ((built_in, "asynchronous"), (own, f"{__name__}:_workflow")):
        folder.mkdir()
        globals()["_workflow"] = MasterWorkerECS(functions)
        config = configured(folder, trainer={"graph": graph}, algorithm=algorithm)
        found.append([(step.sums, step.maxima, step.token_ages) for step in record(config, range(1, 5))])
    assert found[0] == found[1]
    assert len({sums["loss"] for sums, _, _ in found[0]}) == 4


def everything(
    commands: Commands,
    critic: ModelQuery["critic"],
    actor: Annotated[ModelQuery, "actor"],
    ids: Annotated[DataQuery, "packed_input_ids"],
    rewards: DataQuery["rewards"],
    score: DataQuery["score"],
):
    """Three calls in one function, and a parameter that is only waited for."""
    values = critic.inference(commands.build_model_inputs(packed_input_ids=ids))["values"]
    for model in (critic, actor):
        model.train_step(commands.build_model_inputs(packed_input_ids=ids, rewards=rewards, values=values))


def second_opinion(commands: Commands, actor: ModelQuery["actor"], ids: DataQuery["packed_input_ids"]):
    inputs = commands.build_model_inputs(packed_input_ids=ids)
    commands.set_data("score", actor.inference(inputs)["proximal_logprobs"])
    commands.set_data("other_score", actor.inference(inputs)["proximal_logprobs"])


def test_each_call_of_a_function_is_an_mfc():
    watch = MFC("watch", "actor", "function", SEQUENCE_KEYS | {"other_score"}, frozenset(), function="module:watch")
    found = built([everything, second_opinion, watch], GAE)
    calls = {mfc.name: mfc for mfc in found.mfcs}
    assert [sorted(mfc.name for mfc in level) for level in found.levels] == [
        ["second_opinion.actor_inf", "second_opinion.actor_inf_2"],
        ["everything.critic_inf", "watch"],
        ["everything.actor_train", "everything.critic_train"],
    ]
    assert calls["watch"] == watch
    assert calls["everything.critic_inf"].inputs == SEQUENCE_KEYS | {"score"}
    assert calls["everything.critic_inf"].outputs == {"values"}
    assert calls["everything.actor_train"].inputs == STREAM_KEYS | {"score", "values"}
    assert calls["second_opinion.actor_inf_2"].outputs == {"other_score"}


# --- refusals ---


def after_values(
    commands: Commands, ref: ModelQuery["ref"], ids: DataQuery["packed_input_ids"], values: DataQuery["values"]
):
    result = ref.inference(commands.build_model_inputs(packed_input_ids=ids))
    commands.set_data("ref_logprobs", result["ref_logprobs"])


def after_reference(
    commands: Commands, critic: ModelQuery["critic"], ids: DataQuery["packed_input_ids"], r: DataQuery["ref_logprobs"]
):
    result = critic.inference(commands.build_model_inputs(packed_input_ids=ids))
    commands.set_data("values", result["values"])


def same_key(commands: Commands, actor: ModelQuery["actor"], ids: DataQuery["packed_input_ids"]):
    result = actor.inference(commands.build_model_inputs(packed_input_ids=ids))
    commands.set_data("ref_logprobs", result["proximal_logprobs"])


def two_names(commands: Commands, ref: ModelQuery["ref"], ids: DataQuery["packed_input_ids"]):
    result = ref.inference(commands.build_model_inputs(packed_input_ids=ids))
    commands.set_data("one", result["ref_logprobs"])
    commands.set_data("another", result["ref_logprobs"])


def trains_first(
    commands: Commands, actor: ModelQuery["actor"], ids: DataQuery["packed_input_ids"], rewards: DataQuery["rewards"]
):
    actor.train_step(commands.build_model_inputs(packed_input_ids=ids, rewards=rewards))
    commands.set_data("after", actor.inference(commands.build_model_inputs(packed_input_ids=ids))["proximal_logprobs"])


def branches(commands: Commands, ref: ModelQuery["ref"], rewards: DataQuery["rewards"]):
    if rewards:
        pass


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ([after_values, after_reference, plain_train], "wait for each other: after_values, after_reference"),
        ([ecs_grpo.actor_train], "actor_train needs key ref_logprobs, which no model function call gives"),
        ([ecs_grpo.ref_inf, same_key, ecs_grpo.actor_train], "ref_logprobs is given by both ref_inf and same_key"),
        ([ecs_grpo.ref_inf, ecs_grpo.ref_inf], "two model function calls have the name ref_inf"),
        ([ecs_grpo.ref_inf], "no train_step of the actor"),
        ([plain_train], "actor_train: key ref_logprobs is missing .* add it, or change algorithm.kl_coef"),
        ([two_names, plain_train], "two_names: an inference gives one key, not 2"),
        ([branches], "rewards has no value while a function is traced"),
        ([trains_first], "trains_first: actor.inference comes after a train_step"),
        ([ecs_ppo.rew_inf, plain_train], "rew_inf is a call to rollout workers"),
        ([ecs_ppo.actor_gen, plain_train], 'actor_gen .* trainer.graph = "synchronous:tests.test_ecs:_workflow"'),
    ],
)
def test_what_cannot_be_a_workflow_is_refused_by_name(functions, message):
    with pytest.raises(ConfigError, match=message):
        built(functions, KL)


KINDS = {
    "Actor": ModelQuery["actor"],
    "Critic": ModelQuery["critic"],
    "Ref": ModelQuery["ref"],
    "Ids": DataQuery["packed_input_ids"],
    "Rewards": DataQuery["rewards"],
    "Prompts": RawDataQuery["prompts"],
}
"""Annotations of the parameters below."""


@pytest.mark.parametrize(
    ("parameters", "body", "message"),
    [
        ("teacher: ModelQuery['teacher']", "pass", "parameter teacher asks for the model 'teacher'; there are actor, "),
        ("actor: Actor, r: Rewards", "actor.train_step(inputs(rewards=r))", "train_step lacks .* packed_input_ids"),
        ("actor: Actor, ids: Ids", "actor.train_step(inputs(packed_input_ids=ids))", "key rewards is missing from"),
        ("actor: Actor", "actor.generate(inputs())", "actor.generate lacks the argument prompts"),
        (
            "ref: Ref, ids: Ids, r: Rewards",
            "ref.inference(inputs(packed_input_ids=ids, rewards=r))",
            "ref.inference has no argument rewards; it has episodes, ",
        ),
        (
            "ref: Ref, ids: Ids, r: Rewards",
            "ref.train_step(inputs(packed_input_ids=ids, rewards=r))",
            "the role ref is never trained",
        ),
        ("ref: Ref, s: DataQuery['seqlens']", "ref.inference(inputs(packed_input_ids=s))", "is given key seqlens"),
        ("ref: Ref", "ref.inference(inputs(packed_input_ids=[1, 2]))", "a parameter or a result of a model, not list"),
        ("ref: Ref, ids: Ids", "ref.inference(ids)", r"commands.build_model_inputs\(…\), not DataQuery"),
        (
            "ref: Ref, ids: Ids",
            "ref.inference(inputs(packed_input_ids=ids))",
            "result of ref.inference is not used",
        ),
        (
            "ref: Ref, ids: Ids",
            "ref.inference(inputs(packed_input_ids=ids))['values']",
            "ref.inference returns ref_logprobs, not values",
        ),
        ("ids: Ids", "commands.set_data('mine', ids)", r"set_data\('mine', …\) takes a result of a model"),
        ("ref: Ref", "pass", "calls no model"),
        ("ref", "pass", "parameter ref is none of Commands, "),
        ("ref: NoSuchName", "pass", "an annotation is not readable .*NoSuchName"),
        ("actor: Actor, a: RawDataQuery['answers']", "pass", "asks for raw data 'answers'; there is 'prompts'"),
        (
            "critic: Critic, p: Prompts",
            "critic.generate(inputs(prompts=p))",
            "generate: only the actor generates",
        ),
        (
            "actor: Actor, p: Prompts",
            "commands.set_data('tokens', actor.generate(inputs(prompts=p))['packed_input_ids'])",
            "packed_input_ids cannot be renamed to tokens",
        ),
    ],
)
def test_a_function_that_does_what_it_cannot_is_refused_by_name(parameters, body, message):
    scope = globals() | KINDS
    exec(f"def wrong(commands: Commands, {parameters}):\n inputs = commands.build_model_inputs\n {body}", scope)
    with pytest.raises(ConfigError, match=f"wrong.*{message}"):
        built([scope["wrong"]], KL)
