"""Synchronous PPO with a critic, as ECS functions (docs/graphs.md). The losses equal the losses of
`trainer.graph=synchronous` bit for bit.

    streamrl run examples/ppo_scratch.toml trainer.graph=synchronous:examples.ecs_ppo:workflow
"""

from streamrl.ecs import Commands, DataQuery, MasterWorkerECS, ModelQuery, RawDataQuery


def actor_gen(commands: Commands, actor: ModelQuery["actor"], prompts: RawDataQuery["prompts"]):
    result = actor.generate(commands.build_model_inputs(prompts=prompts))
    commands.set_data("packed_input_ids", result["packed_input_ids"])


def rew_inf(commands: Commands, reward: ModelQuery["reward"], ids: DataQuery["packed_input_ids"]):
    result = reward.inference(commands.build_model_inputs(packed_input_ids=ids))
    commands.set_data("rewards", result["rewards"])


def critic_inf(commands: Commands, critic: ModelQuery["critic"], ids: DataQuery["packed_input_ids"]):
    result = critic.inference(commands.build_model_inputs(packed_input_ids=ids))
    commands.set_data("values", result["values"])


def critic_train(
    commands: Commands,
    critic: ModelQuery["critic"],
    ids: DataQuery["packed_input_ids"],
    rewards: DataQuery["rewards"],
    values: DataQuery["values"],
):
    critic.train_step(commands.build_model_inputs(packed_input_ids=ids, rewards=rewards, values=values))


def actor_train(
    commands: Commands,
    actor: ModelQuery["actor"],
    ids: DataQuery["packed_input_ids"],
    rewards: DataQuery["rewards"],
    values: DataQuery["values"],
):
    actor.train_step(commands.build_model_inputs(packed_input_ids=ids, rewards=rewards, values=values))


workflow = MasterWorkerECS([actor_gen, rew_inf, critic_inf, critic_train, actor_train])
