"""Checks across the fields of a configuration: values that do not fit together."""

from __future__ import annotations

import math
from typing import Literal

from streamrl.config.engines import ENGINES
from streamrl.config.fields import GENERATED_SOURCES
from streamrl.config.sections import (
    LINEAR_LAYERS,
    Config,
    DataConfig,
    GserverConfig,
    WorkflowConfig,
    as_evaluated,
    by_task,
)
from streamrl.config.trainer import AlgorithmConfig, role_config

ALGORITHMS: dict[Literal["loss", "advantage"], tuple[str, ...]] = {
    "loss": ("cispo", "gspo", "ppo"),
    "advantage": ("gae", "grpo", "mean", "none", "reinforce++", "reinforce++-baseline", "rloo"),
}
"""Names of the built-in ones (`trainer/algorithms/registry.py`, which needs torch)."""
COMPARES_SIBLINGS = ("grpo", "mean", "rloo", "reinforce++-baseline")
"""Built-in advantages that compare siblings."""
SCHEDULES = ("constant", "linear", "cosine")
"""Built-in schedules of the learning rate."""


PER_TOKEN = ("gae", "reinforce++", "reinforce++-baseline", "none")
"""Built-in advantages with one value for each token."""


def found_in(config: Config) -> list[str]:
    """Return one sentence for each combination of values that cannot work."""
    if not config.tasks:
        return _found_in(config)
    found = {name: _found_in(own) for name, own in by_task(config).items()}
    problems = [
        problem if all(problem in own for own in found.values()) else f"tasks.{name}: {problem}"
        for name, problems in found.items()
        for problem in problems
    ]
    return _task_problems(config) + list(dict.fromkeys(problems))


def _task_problems(config: Config) -> list[str]:
    """Return the problems of tasks with each other, and with the rest of the run."""
    names = [task.name for task in config.tasks]
    problems = [f"tasks: two of them have the name {name}" for name in sorted({n for n in names if names.count(n) > 1})]
    temperature, ports = config.rollout.sampling.temperature, set[int]()
    for name, own in by_task(config).items():
        if own.rollout.sampling.temperature != temperature:
            problems.append(
                f"tasks.{name}.sampling.temperature: the trainer computes the log-probabilities of all tasks at one "
                "temperature; set rollout.sampling.temperature"
            )
        if own.algorithm != config.algorithm and not {own.algorithm.advantage, config.algorithm.advantage}.isdisjoint(
            PER_TOKEN
        ):
            problems.append(
                f"tasks.{name}.algorithm.advantage: a task has its own only if all advantages are of whole responses, "
                f"not {', '.join(PER_TOKEN)}"
            )
        port = own.rollout.agent.port if own.rollout.agent.used else 0
        if port and port in ports:
            problems.append(f"tasks.{name}.agent.port = {port}: another task has this port, too")
        ports.add(port)
    return problems


def _found_in(config: Config) -> list[str]:
    """Return the problems of a run of one task."""
    problems: list[str] = []
    if config.model.path == "scratch" and config.model.scratch is None:
        problems.append('model.path = "scratch" needs a section [model.scratch] with the model\'s alphabet and sizes')
    if config.model.path != "scratch" and config.model.scratch is not None:
        problems.append(
            f'model.path = "{config.model.path}" names a pretrained model, but the section [model.scratch] describes a '
            'model with random weights: delete the section in a copy of the file, or keep model.path = "scratch"'
        )
    if config.rollout.group_size < 2 and config.algorithm.advantage in COMPARES_SIBLINGS:
        problems.append(f"rollout.group_size must be at least 2: {config.algorithm.advantage} compares siblings")
    if config.rollout.filter not in ("", "contrast") and ":" not in config.rollout.filter:
        problems.append(f'rollout.filter: there is no {config.rollout.filter!r}; take "contrast", or module:function')
    if config.rollout.on_failed_sibling == "shrink":
        problems += _shrinking_problems(config)
    agent = config.rollout.agent
    if bool(agent.function) + bool(agent.command) + bool(agent.verifiers) + agent.remote > 1:
        problems.append("rollout.agent: an episode is one of function, command, verifiers and remote")
    if (agent.args or agent.python) and not (agent.function or agent.verifiers):
        problems.append("rollout.agent.args and rollout.agent.python are of a function, or of verifiers")
    if agent.verifiers and (config.data.source, config.data.path) != (DataConfig().source, DataConfig().path):
        problems.append("rollout.agent.verifiers brings tasks of its own; leave data.source and data.path out")
    if agent.used and config.rollout.workflow != WorkflowConfig():
        problems.append("rollout.agent takes the place of rollout.workflow; leave one of them out")
    if agent.used and config.reward_model.path is not None:
        problems.append("rollout.agent scores its episodes; there is no place for a reward_model")
    if config.data.max_prompt_tokens + 1 > config.gserver.max_context:
        problems.append("data.max_prompt_tokens must be smaller than gserver.max_context")
    if config.rollout.sampling.max_new_tokens >= config.gserver.max_context:
        problems.append("rollout.sampling.max_new_tokens must be smaller than gserver.max_context")
    if config.rollout.reward.overlong_tokens > config.rollout.sampling.max_new_tokens:
        problems.append("rollout.reward.overlong_tokens must not exceed rollout.sampling.max_new_tokens")
    if config.rollout.reward.overlong_tokens and not config.reward_function_scores:
        reason = (
            'agents score themselves: leave it out, or set rollout.agent.scored_by = "reward"'
            if config.reward_model.path is None
            else "reward_model.path scores: leave one of them out"
        )
        problems.append(f"rollout.reward.overlong_tokens lowers scores of rollout.reward.function alone, but {reason}")
    if config.rollout.sampling.temperature == 0:
        problems.append("rollout.sampling.temperature must be above 0: siblings would all be equal")
    if config.rollout.sampling.top_k < -1 or config.rollout.sampling.top_k == 0:
        problems.append("rollout.sampling.top_k must be at least 1, or -1 for no limit")
    if "" in config.rollout.sampling.stop:
        problems.append("rollout.sampling.stop must not contain an empty string: it would end every response at once")
    algorithm = config.algorithm
    problems += _unknown_algorithms(algorithm)
    if algorithm.kl_coef > 0 and algorithm.kl_estimator == "k1" and algorithm.kl_in == "loss":
        problems.append(
            'algorithm.kl_estimator = "k1" has no gradient on average in the loss; '
            'take "k2" or "k3" there, or algorithm.kl_in = "reward"'
        )
    if algorithm.advantage == "none" and (algorithm.kl_coef == 0 or algorithm.kl_in == "loss"):
        problems.append(
            'algorithm.advantage = "none" learns from the reference alone: it needs an algorithm.kl_coef above 0, and '
            'algorithm.kl_in = "reward"'
        )
    if config.reference.path is not None and algorithm.kl_coef == 0:
        problems.append("reference.path is of what algorithm.kl_coef measures the distance from; set that above 0")
    if config.reference.path is not None and algorithm.ref_update_every:
        problems.append(
            "algorithm.ref_update_every moves the reference to the policy; a model of its own stays as it is"
        )
    if algorithm.kl_target is not None and algorithm.kl_coef == 0:
        problems.append("algorithm.kl_target needs an algorithm.kl_coef above 0 to start from")
    if algorithm.behavior_weight_floor > 0 and algorithm.behavior_weight_limit != "mask":
        problems.append('algorithm.behavior_weight_floor needs algorithm.behavior_weight_limit = "mask"')
    if algorithm.behavior_weight_floor > algorithm.behavior_weight_cap:
        problems.append("algorithm.behavior_weight_floor must not exceed algorithm.behavior_weight_cap")
    if algorithm.loss == "cispo" and algorithm.dual_clip is not None:
        problems.append("algorithm.dual_clip bounds a clipped objective; cispo has none")
    if config.algorithm.minibatches > config.trainer.batch_groups:
        problems.append("algorithm.minibatches must not exceed trainer.batch_groups")
    if config.trainer.data_parallel > config.trainer.batch_groups:
        problems.append("trainer.data_parallel must not exceed trainer.batch_groups")
    if config.run.device == "cpu" and config.weights.backend == "nccl":
        problems.append('weights.backend = "nccl" needs a CUDA device; run.device is "cpu"')
    if config.weights.backend != "auto" and config.weights.mode not in ("auto", "collective"):
        problems.append('weights.backend is of weights.mode = "collective"')
    return (
        problems
        + _engine_problems(config)
        + _server_problems(config)
        + _mismatch_problems(config)
        + _layout_problems(config)
        + _lora_problems(config)
        + _length_problems(config)
        + _evaluation_problems(config)
    )


def _unknown_algorithms(algorithm: AlgorithmConfig) -> list[str]:
    """Return the problems of names that are neither built-in nor functions of the user."""
    return [
        f"algorithm.{kind}: there is no {name!r}; choose one of {', '.join(map(repr, known))}, or module:function"
        for kind, known in ALGORITHMS.items()
        if ":" not in (name := getattr(algorithm, kind)) and name not in known
    ]


def _shrinking_problems(config: Config) -> list[str]:
    """Return the problems of `rollout.on_failed_sibling = "shrink"`."""
    fewest, size, kind = config.rollout.min_siblings, config.rollout.group_size, config.algorithm.advantage
    problems = []
    if fewest > size:
        problems.append(f"rollout.min_siblings = {fewest} must not exceed rollout.group_size = {size}")
    if fewest < 2 and kind in COMPARES_SIBLINGS:
        problems.append(f"rollout.min_siblings must be at least 2: {kind} compares siblings")
    return problems


def _mismatch_problems(config: Config) -> list[str]:
    warning, limit = config.logprob_diff_warning, config.trainer.logprob_diff_limit
    if limit is not None and limit < warning:
        return [f"trainer.logprob_diff_limit = {limit:g} is below trainer.logprob_diff_warning = {warning:g}"]
    return []


def _engine_problems(config: Config) -> list[str]:
    """Return the settings that the chosen engine does not have."""
    gserver, weights, traits = config.gserver, config.weights, config.gserver.traits
    problems = []
    if gserver.server is not None and gserver.deterministic:
        problems.append(
            f"gserver.deterministic is of the embedded engine; {traits.title} may have a flag for it on some GPUs "
            f"(gserver.{gserver.engine}.args)"
        )
    if gserver.server is not None and weights.mode == "cuda_ipc":
        problems.append(f'weights.mode = "cuda_ipc" is of the embedded engine, and not of {traits.title}')
    if weights.backend == "nccl" and not traits.receives_nccl:
        problems.append(
            f'weights.backend = "nccl": gservers with {traits.title} receive weights in main memory; take "gloo"'
        )
    return problems


def _server_problems(config: Config) -> list[str]:
    """Return the problems of the sections of servers."""
    gserver, problems = config.gserver, []
    for engine, traits in ENGINES.items():
        section = getattr(gserver, engine, None)
        if section is None:
            continue
        where = f"gserver.{engine}"
        if gserver.engine != engine and section.tensor_parallel > 1:
            problems.append(f'{where}.tensor_parallel: not with gserver.engine = "{gserver.engine}"')
        for word in section.args:
            flag = word.partition("=")[0]
            if flag in traits.own_flags:
                problems.append(f"{where}.args: {flag} is set by streamrl (from {traits.own_flags[flag]})")
            elif why := traits.refused_flags.get(word) or traits.refused_flags.get(flag):
                problems.append(f"{where}.args: {word}: {why}")
        if section.addresses:
            problems += _joined_problems(gserver, engine)
    return problems


def _joined_problems(gserver: GserverConfig, engine: str) -> list[str]:
    """Return the problems of servers of `engine` that are joined."""
    where, section = f"gserver.{engine}", getattr(gserver, engine)
    count = len(set(section.addresses))
    problems = []
    if count != gserver.count:
        problems.append(f"{where}.addresses names {count} different servers for gserver.count = {gserver.count}")
    if engine != "vllm":  # `streamrl vllm` starts servers with these settings
        started = {"args": bool(section.args), "tensor_parallel": section.tensor_parallel > 1}
        problems += [
            f"{where}.{name}: servers that are joined ({where}.addresses) have their own flags"
            for name, given in started.items()
            if given
        ]
    return problems


def _layout_problems(config: Config) -> list[str]:
    """Return the problems of the roles' layouts over the model workers."""
    trainer = config.trainer
    problems = []
    for role in ("actor", "ref", "critic", "reward"):
        chosen = role_config(trainer, role)
        where = f"trainer.roles.{role}" if role in trainer.roles else "trainer"
        sizes = (chosen.data_parallel, chosen.context_parallel, chosen.tensor_parallel, chosen.pipeline_parallel)
        if math.prod(sizes) != trainer.workers:
            problems.append(
                f"{where}: data_parallel * context_parallel * tensor_parallel * pipeline_parallel is "
                f"{math.prod(sizes)}, but there are {trainer.workers} model workers, and each role spans all of them"
            )
        if chosen.backend == "torch" and chosen.tensor_parallel * chosen.pipeline_parallel > 1:
            problems.append(f'{where}: tensor_parallel and pipeline_parallel need backend = "megatron"')
        if chosen.backend == "torch" and chosen.expert_parallel > 1:
            problems.append(f'{where}: expert_parallel needs backend = "megatron"')
        elif math.prod(sizes[:3]) % chosen.expert_parallel:
            problems.append(
                f"{where}: expert_parallel = {chosen.expert_parallel} does not divide data_parallel * context_parallel "
                f"* tensor_parallel = {math.prod(sizes[:3])}"
            )
        if config.run.record and chosen != role_config(trainer, "actor"):
            problems.append(f"run.record: {where} has another backend or layout than [trainer], which is not recorded")
        if role == "actor" and role in trainer.roles:
            problems.append("trainer.roles.actor: the actor is what [trainer] itself describes")
    algorithm = config.algorithm
    if config.reward_model.path is not None and config.rollout.filter:
        problems.append("rollout.filter looks at rewards before a reward model has given them")
    if algorithm.ref_update_every and algorithm.kl_coef == 0:
        problems.append("algorithm.ref_update_every needs a reference: an algorithm.kl_coef above 0")
    if trainer.synchronous and config.staleness.max_staleness > 0:
        problems.append(f'trainer.graph = "{trainer.graph}" needs staleness.max_staleness = 0')
    if "actor" in trainer.offload:
        problems.append("trainer.offload: the actor is never idle (its weights are published during the next step)")
    return problems


def _lora_problems(config: Config) -> list[str]:
    """Return the settings that conflict with [model.lora], if it is set."""
    lora, trainer = config.model.lora, config.trainer
    if lora is None:
        return []
    problems = []
    if not lora.target_modules or len(set(lora.target_modules)) != len(lora.target_modules):
        problems.append("model.lora.target_modules must name at least one linear layer, and each once")
    if unknown := sorted(set(lora.target_modules) - set(LINEAR_LAYERS)):
        problems.append(f"model.lora.target_modules: there is no {unknown[0]}, only {', '.join(LINEAR_LAYERS)}")
    if trainer.backend != "torch":
        problems.append(f'model.lora: adapters are trained with trainer.backend = "torch", not "{trainer.backend}"')
    own_reference = config.reference.path is not None
    if role_config(trainer, "ref") != role_config(trainer, "actor") and not own_reference:
        problems.append("trainer.roles.ref: with model.lora the reference is the actor's model without its adapter")
    if "ref" in trainer.offload and not own_reference:
        problems.append("trainer.offload: with model.lora the reference is the actor's model, and takes no memory")
    if config.algorithm.ref_update_every and not own_reference:
        problems.append("algorithm.ref_update_every: with model.lora the reference is the model without its adapter")
    return problems + (_named_adapter_problems(config, set(lora.target_modules)) if config.named_adapters else [])


def _named_adapter_problems(config: Config, modules: set[str]) -> list[str]:
    """Return the reasons why SGLang cannot serve an adapter of the layers `modules`."""
    otherwise = 'or weights.lora = "merged"'
    problems = []
    if config.weights.mode in ("collective", "cuda_ipc"):
        problems.append(
            f'weights.mode = "{config.weights.mode}": SGLang loads adapters from files; take "shared_memory", "disk" '
            f"where hosts share one, {otherwise}"
        )
    if config.weights.pause_mode == "retract":
        problems.append(
            'weights.pause_mode = "retract": a request of SGLang\'s keeps its adapter; take "in_place" (it keeps it to '
            f'its end) or "abort" (it continues with the new one), {otherwise}'
        )
    fused = {"q_proj": ("k_proj", "v_proj"), "v_proj": ("q_proj", "k_proj"), "gate_proj": ("up_proj",)}
    problems += [
        f"model.lora.target_modules: SGLang takes no adapter of {' or '.join(others)} without one of {needed}; "
        f"add it, {otherwise}"
        for needed, others in fused.items()
        if needed not in modules and not modules.isdisjoint(others)
    ]
    return problems


def _length_problems(config: Config) -> list[str]:
    """Return the problems of the schedules, and of the settings that end the run."""
    sections = {"trainer": config.trainer.optimizer}
    if config.algorithm.advantage == "gae":
        sections["critic"] = config.critic_optimizer
    unknown = [
        f"{section}.optimizer.schedule: there is no {optimizer.schedule!r}; choose one of "
        f"{', '.join(map(repr, SCHEDULES))}, or module:function"
        for section, optimizer in sections.items()
        if optimizer.schedule not in SCHEDULES and ":" not in optimizer.schedule
    ]
    if config.run.most_steps is not None or config.generated_rows is not None:
        return unknown
    return unknown + [
        f'{section}.optimizer.schedule = "{optimizer.schedule}" falls until the last step: '
        "set run.total_train_steps, too"
        for section, optimizer in sections.items()
        if optimizer.schedule in SCHEDULES[1:]
    ]


def _evaluation_problems(config: Config) -> list[str]:
    """Return the problems of [evaluation], if it is on."""
    chosen = config.evaluation
    if not chosen.enabled:
        return []
    seen = as_evaluated(config)
    problems = []
    if chosen.data.get("sampler"):
        problems.append("evaluation.data.sampler: all held-out prompts are evaluated; leave it out")
    if chosen.samples > 1 and seen.rollout.sampling.temperature == 0:
        problems.append(
            "evaluation.samples above 1 needs an evaluation.sampling.temperature above 0: greedy ones are all equal"
        )
    if seen.rollout.sampling.max_new_tokens >= config.gserver.max_context:
        problems.append("evaluation.sampling.max_new_tokens must be smaller than gserver.max_context")
    if seen.data.max_prompt_tokens + 1 > config.gserver.max_context:
        problems.append("evaluation.data.max_prompt_tokens must be smaller than gserver.max_context")
    same_rows = (seen.data.source, seen.data.path) == (config.data.source, config.data.path)
    if config.rollout.agent.verifiers:
        if seen.data.args == config.data.args:
            problems.append("evaluation.data.args must choose other tasks of the taskset than data.args")
        return problems
    if same_rows and config.data.source not in GENERATED_SOURCES:
        problems.append("evaluation.data.path must name held-out data: it is the file that the run trains on")
    if same_rows and seen.run.seed == config.run.seed:
        problems.append("evaluation.seed must differ from run.seed: it would be the prompts that the run trains on")
    return problems
