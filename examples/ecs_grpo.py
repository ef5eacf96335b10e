"""The asynchronous graph with a reference, as ECS functions (docs/graphs.md). The losses are those without
`trainer.graph`, bit for bit.

    streamrl run examples/copy_scratch.toml algorithm.kl_coef=0.01 trainer.graph=examples.ecs_grpo:workflow
"""

from streamrl.ecs import Commands, DataQuery, MasterWorkerECS, ModelQuery


def ref_inf(commands: Commands, ref: ModelQuery["ref"], ids: DataQuery["packed_input_ids"]):
    result = ref.inference(commands.build_model_inputs(packed_input_ids=ids))
    commands.set_data("ref_logprobs", result["ref_logprobs"])


def actor_train(
    commands: Commands,
    actor: ModelQuery["actor"],
    ids: DataQuery["packed_input_ids"],
    ref_logprobs: DataQuery["ref_logprobs"],
    rewards: DataQuery["rewards"],
):
    actor.train_step(commands.build_model_inputs(packed_input_ids=ids, ref_logprobs=ref_logprobs, rewards=rewards))


workflow = MasterWorkerECS([ref_inf, actor_train])
