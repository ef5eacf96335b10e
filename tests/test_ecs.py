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


def unknown_model(commands: Commands, teacher: ModelQuery["teacher"], ids: DataQuery["packed_input_ids"]):
    teacher.inference(commands.build_model_inputs(packed_input_ids=ids))


def without_tokens(commands: Commands, actor: ModelQuery["actor"], rewards: DataQuery["rewards"]):
    actor.train_step(commands.build_model_inputs(rewards=rewards))


def without_rewards(commands: Commands, actor: ModelQuery["actor"], ids: DataQuery["packed_input_ids"]):
    actor.train_step(commands.build_model_inputs(packed_input_ids=ids))


def without_prompts(commands: Commands, actor: ModelQuery["actor"]):
    actor.generate(commands.build_model_inputs())


def too_much(
    commands: Commands, ref: ModelQuery["ref"], ids: DataQuery["packed_input_ids"], rewards: DataQuery["rewards"]
):
    ref.inference(commands.build_model_inputs(packed_input_ids=ids, rewards=rewards))


def other_argument(commands: Commands, ref: ModelQuery["ref"], ids: DataQuery["seqlens"]):
    ref.inference(commands.build_model_inputs(packed_input_ids=ids))


def no_data(commands: Commands, ref: ModelQuery["ref"]):
    ref.inference(commands.build_model_inputs(packed_input_ids=[1, 2]))


def no_inputs(commands: Commands, ref: ModelQuery["ref"], ids: DataQuery["packed_input_ids"]):
    ref.inference(ids)


def unused_result(commands: Commands, ref: ModelQuery["ref"], ids: DataQuery["packed_input_ids"]):
    ref.inference(commands.build_model_inputs(packed_input_ids=ids))


def two_names(commands: Commands, ref: ModelQuery["ref"], ids: DataQuery["packed_input_ids"]):
    result = ref.inference(commands.build_model_inputs(packed_input_ids=ids))
    commands.set_data("one", result["ref_logprobs"])
    commands.set_data("another", result["ref_logprobs"])


def wrong_result(commands: Commands, ref: ModelQuery["ref"], ids: DataQuery["packed_input_ids"]):
    ref.inference(commands.build_model_inputs(packed_input_ids=ids))["values"]


def sets_a_parameter(commands: Commands, ids: DataQuery["packed_input_ids"]):
    commands.set_data("mine", ids)


def calls_nothing(commands: Commands, ref: ModelQuery["ref"]):
    pass


def no_annotation(commands: Commands, ref):
    pass


def unknown_annotation(commands: Commands, ref: NoSuchName["ref"]):
    pass


def branches(commands: Commands, ref: ModelQuery["ref"], rewards: DataQuery["rewards"]):
    if rewards:
        pass


def raw_answers(commands: Commands, actor: ModelQuery["actor"], answers: RawDataQuery["answers"]):
    pass


def critic_generates(commands: Commands, critic: ModelQuery["critic"], prompts: RawDataQuery["prompts"]):
    critic.generate(commands.build_model_inputs(prompts=prompts))


def renames(commands: Commands, actor: ModelQuery["actor"], prompts: RawDataQuery["prompts"]):
    result = actor.generate(commands.build_model_inputs(prompts=prompts))
    commands.set_data("tokens", result["packed_input_ids"])


def trains_first(
    commands: Commands, actor: ModelQuery["actor"], ids: DataQuery["packed_input_ids"], rewards: DataQuery["rewards"]
):
    actor.train_step(commands.build_model_inputs(packed_input_ids=ids, rewards=rewards))
    commands.set_data("after", actor.inference(commands.build_model_inputs(packed_input_ids=ids))["proximal_logprobs"])


def trains_reference(
    commands: Commands, ref: ModelQuery["ref"], ids: DataQuery["packed_input_ids"], rewards: DataQuery["rewards"]
):
    ref.train_step(commands.build_model_inputs(packed_input_ids=ids, rewards=rewards))


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ([after_values, after_reference, plain_train], "wait for each other: after_values, after_reference"),
        ([ecs_grpo.actor_train], "actor_train needs key ref_logprobs, which no model function call gives"),
        ([ecs_grpo.ref_inf, same_key, ecs_grpo.actor_train], "ref_logprobs is given by both ref_inf and same_key"),
        ([ecs_grpo.ref_inf, ecs_grpo.ref_inf], "two model function calls have the name ref_inf"),
        ([ecs_grpo.ref_inf], "no train_step of the actor"),
        (
            [unknown_model],
            "unknown_model: parameter teacher asks for the model 'teacher'; there are actor, ref, critic",
        ),
        ([without_tokens], "without_tokens: actor.train_step lacks the argument packed_input_ids"),
        ([without_rewards], "without_rewards: key rewards is missing from its inputs"),
        ([without_prompts], "without_prompts: actor.generate lacks the argument prompts"),
        (
            [plain_train],
            "actor_train: key ref_logprobs is missing from its inputs; add it, or change algorithm.kl_coef",
        ),
        ([too_much], "too_much: ref.inference has no argument rewards; it has episodes, "),
        ([other_argument], r"build_model_inputs\(packed_input_ids=…\) is given key seqlens"),
        ([no_data], "takes a parameter or a result of a model, not list"),
        ([no_inputs], r"no_inputs: ref.inference takes commands.build_model_inputs\(…\), not DataQuery"),
        ([unused_result], "unused_result: the result of ref.inference is not used"),
        ([two_names, plain_train], "two_names: an inference gives one key, not 2"),
        ([wrong_result], "wrong_result: ref.inference returns ref_logprobs, not values"),
        ([sets_a_parameter], r"sets_a_parameter: set_data\('mine', …\) takes a result of a model"),
        ([calls_nothing], "calls_nothing calls no model"),
        ([no_annotation], "no_annotation: parameter ref is none of Commands, "),
        ([unknown_annotation], "unknown_annotation: an annotation is not readable .*NoSuchName"),
        ([branches], "rewards has no value while a function is traced"),
        ([raw_answers], "raw_answers: parameter answers asks for raw data 'answers'; there is 'prompts'"),
        ([critic_generates], "critic_generates: critic.generate: only the actor generates"),
        ([renames], "renames: packed_input_ids cannot be renamed to tokens"),
        ([trains_first], "trains_first: actor.inference comes after a train_step"),
        ([trains_reference], "trains_reference: the role ref is never trained"),
        ([ecs_ppo.rew_inf, plain_train], "rew_inf is a call to rollout workers"),
        ([ecs_ppo.actor_gen, plain_train], 'actor_gen .* trainer.graph = "synchronous:tests.test_ecs:_workflow"'),
    ],
    ids=lambda value: "" if isinstance(value, str) else value[0].__name__,
)
def test_what_cannot_be_a_workflow_is_refused_by_name(functions, message):
    with pytest.raises(ConfigError, match=message):
        built(functions, KL)
