"""The configuration: what is refused and how it is said, overrides, round trip, fingerprint."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import Any, get_origin

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.config import CONFIG_FILE, Config, RolloutConfig, from_dict, load, to_toml
from streamrl.config.fields import Section, section_of
from streamrl.config.sections import as_evaluated
from streamrl.config.suggestions import COMMON_NAMES
from streamrl.config.trainer import RoleName, TrainerConfig, role_config
from streamrl.errors import ConfigError

A_TASK = "a_task"


def sections(section: type[Section], prefix: str = "") -> list[tuple[str, type[Section]]]:
    """Every table of the configuration, with its dotted name."""
    found = [(prefix, section)]
    for field in msgspec.structs.fields(section):
        if (nested := section_of(field.type)) is not None:
            # a table of tables, one for each role, and a list of tables
            named = {dict: "ref.", list: f"{A_TASK}."}.get(get_origin(field.type), "")
            found += sections(nested, f"{prefix}{field.name}.{named}")
    return found


def nested(dotted: str, value: Any) -> dict[str, Any]:
    tree: Any = value
    for name in reversed(dotted.split(".")):
        tree = [{"name": name, **tree}] if name == A_TASK else {name: tree}
    return dict(tree)


@pytest.mark.parametrize(("prefix", "section"), sections(Config))
def test_unknown_keys_are_refused_at_every_level(prefix: str, section: type[Section]) -> None:
    with pytest.raises(ConfigError, match=rf"^here: unknown key {prefix}no_such_thing; (known: |no key resembles it)"):
        from_dict(nested(f"{prefix}no_such_thing", 1), where="here")
    known = msgspec.structs.fields(section)[0].name
    with pytest.raises(ConfigError, match=rf"unknown key {prefix}{known}x; did you mean {prefix}{known}\?"):
        from_dict(nested(f"{prefix}{known}x", 1))


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("trainer.lr", "fast", "trainer.lr: Expected `float`"),
        ("trainer.lr", 0, "trainer.lr: Expected `float` > 0"),
        ("trainer.lr", math.inf, "trainer.lr: Expected `float` <= 1.797"),
        ("trainer.lr", math.nan, "trainer.lr: Expected `float` > 0"),
        ("run.stop_at_reward", math.nan, "run.stop_at_reward: Expected `float` >= -1.797"),
        ("evaluation.pass_reward", math.inf, "evaluation.pass_reward: Expected `float` <= 1.797"),
        ("trainer.batch_groups", 2.5, "trainer.batch_groups: Expected `int`"),
        ("trainer.optimizer.betas", [0.9], r"trainer.optimizer.betas: Expected `array` of length 2"),
        ("trainer.optimizer.betas", ["a", 0.9], r"trainer.optimizer.betas\[0\]: Expected `float`"),
        ("trainer.optimizer.betas", [0.9, 1], r"trainer.optimizer.betas\[1\]: Expected `float` < 1"),
        ("trainer.roles.critic.backend", "fsdp", "trainer.roles.critic.backend: Invalid .* choose one of 'torch'"),
        ("critic.optimizer.eps", 0, "critic.optimizer.eps: Expected `float` > 0"),
        ("evaluation.data.size", 0, "evaluation.data.size: Expected `int` >= 1"),
        ("staleness.max_staleness", -1, "staleness.max_staleness: Expected `int` >= 0"),
        ("staleness.over_age", "keep", "staleness.over_age: Invalid enum value 'keep'; choose one of 'mask'"),
        ("trainer.save_every", 100, 'trainer.save_every: Expected `str`, got `int`; write it as "100 steps", '),
        ("evaluation.every", "often", "evaluation: every = 'often': write it as "),
        ("run.port", 70000, "run.port: Expected `int` <= 65535"),
        ("rollout.agent.port", 70000, "rollout.agent.port: Expected `int` <= 65535"),
        ("rollout.sampling.top_p", 1.5, "rollout.sampling.top_p: Expected `float` <= 1"),
        ("trainer", 3, "trainer = 3: trainer is a section; set its keys, for example trainer.data_parallel=3"),
        ("model.scratch", "yes", "model.scratch = 'yes': .* set its keys, for example model.scratch.alphabet=yes"),
        ("rollout.reward", "my:fn", "rollout.reward = 'my:fn': .* for example rollout.reward.function=my:fn"),
        ("staleness", "x", "staleness = 'x': staleness is a section; its keys are max_staleness, over_age"),
        ("data.args", 3, r"data.args = 3: data.args is a section; set its keys: data.args.NAME=\.\.\."),
        ("trainer.roles", "x", r".* is a section; set its keys: trainer.roles.NAME=\.\.\."),
        ("trainer.roles.ref", 2, ".* is a section; .* for example trainer.roles.ref.data_parallel=2"),
    ],
)
def test_wrong_types_and_ranges_name_the_key(key: str, value: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=f"^run.toml: {says}"):
        from_dict(nested(key, value), where="run.toml")


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["model.path=scratch"], r'model.path = "scratch" needs a section \[model.scratch\]'),
        (["model.path=qwen", "model.scratch.layers=2"], r"\[model.scratch\] .* delete the section"),
        (["rollout.group_size=1"], "rollout.group_size must be at least 2"),
        (["rollout.on_failed_sibling=shrink", "rollout.min_siblings=9"], "= 9 must not exceed rollout.group_size = 8"),
        (["rollout.on_failed_sibling=shrink", "rollout.min_siblings=1"], "must be at least 2: grpo compares siblings"),
        (["rollout.reward.on_error=zero"], "rollout.reward.on_error is now rollout.on_failed_sibling"),
        (["rollout.agent.on_error=zero"], "rollout.agent.on_error is now rollout.on_failed_sibling"),
        (["weights.senders=2"], "weights.senders was removed"),
        (["manager.lease_seconds=9"], "manager.lease_seconds is now limits.silence_seconds"),
        (["gserver.sglang.start_timeout_seconds=9"], "is now limits.start_seconds"),
        (["trainer.save_every_steps=9"], "trainer.save_every_steps is now trainer.save_every"),
        (["weights.delta=true"], "weights.delta was removed"),
        (["rollout.reward.overlong_tokens=9999"], "must not exceed rollout.sampling.max_new_tokens"),
        (["rollout.reward.overlong_tokens=4", "reward_model.path=judge"], "but reward_model.path scores"),
        (["rollout.reward.overlong_tokens=4", "rollout.agent.function=module:play"], "set rollout.agent.scored_by"),
        (["algorithm.kl_coef=0.1", "algorithm.kl_estimator=k1"], "has no gradient on average in the loss"),
        (["algorithm.advantage=none"], "learns from the reference alone: it needs an algorithm.kl_coef above 0"),
        (["algorithm.advantage=none", "algorithm.kl_coef=1"], 'algorithm.kl_in = "reward"'),
        (["reference.path=teacher"], "reference.path is of what algorithm.kl_coef measures the distance from"),
        (["reference.path=teacher", "algorithm.kl_coef=1", "algorithm.ref_update_every=5"], "stays as it is"),
        (["algorithm.kl_target=0.1"], "needs an algorithm.kl_coef above 0"),
        (["algorithm.behavior_weight_floor=0.1"], 'needs algorithm.behavior_weight_limit = "mask"'),
        (["algorithm.behavior_weight_limit=mask", "algorithm.behavior_weight_floor=9"], "must not exceed"),
        (["algorithm.loss=cispo", "algorithm.dual_clip=3"], "cispo has none"),
        (["data.max_prompt_tokens=2048"], "data.max_prompt_tokens must be smaller than gserver.max_context"),
        (["rollout.sampling.max_new_tokens=2048"], "rollout.sampling.max_new_tokens must be smaller"),
        (["rollout.sampling.stop=['x', '']"], "rollout.sampling.stop must not contain an empty string"),
        (["rollout.sampling.temperature=0"], "rollout.sampling.temperature must be above 0"),
        (["algorithm.minibatches=9"], "algorithm.minibatches must not exceed trainer.batch_groups"),
        (["trainer.data_parallel=9"], "trainer.data_parallel must not exceed trainer.batch_groups"),
        (["stream.capacity_groups=7"], "stream.capacity_groups was removed"),
        (["stream.max_group_mb=7"], "stream.max_group_mb is now limits.group_mb"),
        (["run.device=cpu", "weights.backend=nccl"], "needs a CUDA device"),
        (["rollout.sampling.top_k=0"], "rollout.sampling.top_k must be at least 1, or -1 for no limit"),
        (
            [
                "run.record=true",
                "trainer.backend=megatron",
                "trainer.tensor_parallel=2",
                "trainer.roles.ref.backend=torch",
            ],
            r"run\.record: trainer\.roles\.ref has another backend or layout than \[trainer\]",
        ),
        (
            ["run.total_train_epochs=1", "rollout.agent.verifiers=tasks", "trainer.optimizer.schedule=cosine"],
            'trainer.optimizer.schedule = "cosine" falls until the last step: set run.total_train_steps, too',
        ),
        (
            ["run.total_train_epochs=1", "data.source=jsonl", "trainer.optimizer.schedule=cosine"],
            "set run.total_train_steps",
        ),
        (
            [
                *("run.total_train_epochs=1", "data.source=jsonl"),
                *("critic.optimizer.schedule=linear", "algorithm.advantage=gae"),
            ],
            'critic.optimizer.schedule = "linear" falls until the last step',
        ),
        (["model.lora.target_modules=[]"], "model.lora.target_modules must name"),
        (["model.lora.target_modules=['q_proj', 'lm_head']"], "target_modules: there is no lm_head, only q_"),
        (["model.lora.rank=2", "trainer.backend=megatron"], 'adapters are trained with trainer.backend = "torch"'),
        (["model.lora.rank=2", "trainer.roles.ref.backend=megatron"], "the reference is the actor's model"),
        (["model.lora.rank=2", "trainer.offload=['ref']"], "trainer.offload: with model.lora"),
        (["model.lora.rank=2", "algorithm.ref_update_every=1", "algorithm.kl_coef=0.1"], "ref_update_every: with"),
        (["gserver.sglang.args=['--tokenizer-worker-num=2']"], "SGLang asks callers for no key then"),
        (["model.lora.rank=2", "gserver.engine=sglang", "weights.mode=collective"], "SGLang loads adapters from files"),
        (["model.lora.rank=2", "gserver.engine=sglang", "weights.pause_mode=retract"], "of SGLang's keeps its adapter"),
        (["model.lora.target_modules=['q_proj', 'o_proj']", "gserver.engine=sglang"], "without one of v_proj"),
        (["model.lora.target_modules=['up_proj']", "gserver.engine=sglang"], "no adapter of up_proj without one of ga"),
        (["evaluation.at_end=true", "evaluation.samples=2"], "needs an evaluation.sampling.temperature above 0"),
        (["evaluation.at_end=true", "evaluation.sampling.max_new_tokens=2048"], "evaluation.sampling.max_new_tokens"),
        (["evaluation.at_end=true", "evaluation.data.max_prompt_tokens=2048"], "evaluation.data.max_prompt_tokens"),
        (["evaluation.every=1 step", "data.source=jsonl", "data.path=a.jsonl"], "must name held-out data"),
        (["evaluation.every=1s", "evaluation.seed=0"], "evaluation.seed must differ from run.seed"),
        (["algorithm.loss=pqo"], "algorithm.loss: there is no 'pqo'; choose one of 'cispo', 'gspo', 'ppo'"),
        (["algorithm.advantage=ppo"], r"algorithm.advantage: there is no 'ppo'; choose one of .*'reinforce\+\+'"),
        (["rollout.filter=hard"], "rollout.filter: there is no 'hard'"),
        (["trainer.optimizer.schedule=step"], "trainer.optimizer.schedule: there is no 'step'"),
        (["algorithm.objective=ppo"], "algorithm.objective is now algorithm.loss"),
        (["rollout.drop_uniform_groups=true"], "rollout.drop_uniform_groups is now rollout.filter"),
        (["metrics.tensorboard=true"], "metrics.tensorboard is now metrics.sinks"),
        (["metrics.sinks=['comet']"], "metrics.sinks.*'tensorboard', 'wandb', 'trackio'"),
        (["rollout.agent.verifiers=x", "rollout.agent.function=a:b"], "one of function, command, verifiers"),
        (["rollout.agent.command=['x']", "rollout.agent.python=p"], "are of a function, or of verifiers"),
        (["rollout.agent.verifiers=x", "data.source=jsonl"], "brings tasks of its own"),
        (["rollout.agent.verifiers=x", "evaluation.at_end=true"], "evaluation.data.args must choose other tasks"),
    ],
)
def test_values_that_do_not_fit_together_are_refused(tmp_path: Path, overrides: list[str], says: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text("")
    with pytest.raises(ConfigError, match=says):
        load(file, overrides)


def test_all_that_does_not_fit_together_is_said_at_once() -> None:
    with pytest.raises(ConfigError, match=r"group_size .*; .*minibatches") as caught:
        from_dict({"rollout": {"group_size": 1}, "algorithm": {"minibatches": 9}}, where="run.toml")
    assert str(caught.value).startswith("run.toml: ")


@pytest.mark.parametrize(("groups", "capacity"), [(8, 4096), (1000, 5000)])
def test_a_dp_head_has_room_for_all_groups_in_flight(groups: int, capacity: int) -> None:
    config = from_dict({"staleness": {"max_staleness": 4}, "trainer": {"batch_groups": groups}})
    assert config.capacity_groups == capacity


def test_overrides_win_over_the_file_and_have_toml_types(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[trainer]\nlr = 1e-4\nbatch_groups = 4\n[model]\npath = "here"\n')
    config = load(
        file,
        [
            "trainer.lr=2e-5",
            "model.path=/models/a b",
            'run.name="quoted"',
            "rollout.sampling.stop=['x', 'y']",
            "trainer.optimizer.betas=[0.8, 0.9]",
            "metrics.plots=false",
            "data.args={min_terms = 2}",
        ],
    )
    assert (config.trainer.lr, config.trainer.batch_groups) == (2e-5, 4)
    assert (config.model.path, config.run.name) == ("/models/a b", "quoted")
    assert config.rollout.sampling.stop == ["x", "y"]
    assert config.trainer.optimizer.betas == (0.8, 0.9)
    assert config.metrics.plots is False
    assert config.data.args == {"min_terms": 2}


@pytest.mark.parametrize(
    ("tree", "wanted"),
    [
        ({"trainer": {"learning_rate": 1}}, "trainer.learning_rate; did you mean trainer.lr?"),
        ({"learning_rate": 1}, "learning_rate; did you mean trainer.lr?"),
        (
            {"critic": {"weight_decay": 1}},
            "critic.weight_decay; did you mean critic.optimizer.weight_decay or trainer.",
        ),
        ({"trainer": {"group_size": 8}}, "trainer.group_size; did you mean rollout.group_size?"),
        ({"trainer": {"group_sise": 8}}, "trainer.group_sise; did you mean rollout.group_size?"),
        ({"rollout": {"max_tokens": 8}}, "rollout.max_tokens; did you mean rollout.sampling.max_new_tokens?"),
        ({"trainer": {"epochs": 3}}, "trainer.epochs; did you mean run.total_train_epochs or algorithm.epochs?"),
        ({"ppo": {"kl_coef": 1}}, "ppo.kl_coef; did you mean algorithm.kl_coef?"),
        ({"trainer": {"roles": {"ref": {"backnd": "x"}}}}, "trainer.roles.ref.backnd; did you mean trainer.roles.ref."),
        ({"model": {"lora": {"ran": 1}}}, "model.lora.ran; did you mean model.lora.rank?"),
        ({"reference": {"gpus": 1}}, "reference.gpus; known: path"),
        ({"trainer": {"xyzzy": 1}}, "trainer.xyzzy; no key resembles it (without it, streamrl check CONFIG"),
    ],
)
def test_an_unknown_key_suggests_the_nearest_known_ones_of_all_sections(tree: dict[str, Any], wanted: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        from_dict(tree)
    assert f"unknown key {wanted}" in str(refusal.value)


def test_common_names_stand_for_keys_that_there_are() -> None:
    known = {
        f"{prefix}{field.name}" for prefix, section in sections(Config) for field in msgspec.structs.fields(section)
    }
    known |= {field.name for field in msgspec.structs.fields(Config)}
    assert set(COMMON_NAMES.values()) <= known


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("trainer.lr", "write it as section.key=value"),
        ("=3", "write it as section.key=value"),
        ("trainer.lr.deep=3", "trainer.lr is no section: its value is 0.0001"),
        ("trainer.lrr=3", r"unknown key trainer\.lrr; did you mean trainer\.lr\?"),
        ("trainer=3", "trainer = 3: trainer is a section"),
    ],
)
def test_overrides_that_cannot_be_are_refused(tmp_path: Path, override: str, says: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[trainer]\nlr = 1e-4\n")
    with pytest.raises(ConfigError, match=says):
        load(file, [override])


def test_the_folder_of_a_run_stands_for_its_configuration(tmp_path: Path) -> None:
    (tmp_path / CONFIG_FILE).write_text("[trainer]\nlr = 1e-4\n")
    assert load(tmp_path, ["trainer.batch_groups=3"]).trainer.lr == 1e-4


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.toml: cannot be read"):
        load(tmp_path / "missing.toml")
    for number, content in enumerate((b"[trainer\n", b"\xff\xfe")):
        broken = tmp_path / f"broken{number}.toml"
        broken.write_bytes(content)
        with pytest.raises(ConfigError, match=rf"broken{number}\.toml: not valid TOML"):
            load(broken)


configs = st.builds(
    lambda seed, lr, staleness, over_age, stop, args, scratch, text: from_dict(
        {
            "run": {"seed": seed, "name": text, "stop_at_reward": lr if seed % 2 else None},
            "trainer": {"lr": lr},
            "staleness": {"max_staleness": staleness, "over_age": over_age},
            "rollout": {"sampling": {"stop": stop}},
            "data": {"args": args},
            "model": {"path": "scratch", "scratch": {"alphabet": text}} if scratch else {},
        }
    ),
    st.integers(0, 2**31),
    st.floats(1e-9, 1),
    st.integers(0, 100),
    st.sampled_from(["mask", "wait", "drop"]),
    st.lists(st.text(min_size=1, max_size=5), max_size=3),
    st.dictionaries(st.text(max_size=5), st.one_of(st.integers(-(2**40), 2**40), st.text(max_size=5), st.booleans())),
    st.booleans(),
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8),
)


@given(configs)
def test_what_is_written_reads_back_the_same(config: Config) -> None:
    again = from_dict(tomllib.loads(to_toml(config)))
    assert again == config
    assert again.digest() == config.digest()


def test_an_empty_file_is_the_default(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("")
    assert load(file) == Config()
    assert Config().run_dir == Path("runs/run")


def test_an_evaluation_is_off_unless_it_is_said_when() -> None:
    assert not Config().evaluation.enabled
    for setting in ({"every": "1 epoch"}, {"every": "1 step"}, {"every": "1.5s"}, {"at_start": True}, {"at_end": True}):
        assert from_dict({"evaluation": setting}).evaluation.enabled


def test_overlong_responses_of_an_agent_cost_reward_if_the_reward_function_scores() -> None:
    agent = {"function": "module:play", "scored_by": "reward"}
    config = from_dict({"rollout": {"agent": agent, "reward": {"overlong_tokens": 4}}})
    assert config.reward_function_scores


def test_what_an_evaluation_does_not_say_is_as_in_training() -> None:
    config = from_dict(
        {
            "run": {"seed": 3},
            "data": {"source": "jsonl", "path": "train.jsonl", "prompt_key": "question", "suffix": "!"},
            "rollout": {
                "group_size": 8,
                "sampling": {"max_new_tokens": 17, "stop": ["x"], "top_k": 5, "min_p": 0.1},
                "reward": {"overlong_tokens": 4},
            },
            "evaluation": {"at_end": True, "data": {"path": "test.jsonl"}},
        }
    )
    seen = as_evaluated(config)
    assert (seen.data.path, seen.data.prompt_key, seen.data.suffix) == ("test.jsonl", "question", "!")
    assert seen.rollout.group_size == 1
    sampling = seen.rollout.sampling
    assert (sampling.temperature, sampling.top_k, sampling.min_p, sampling.top_p) == (0.0, -1, 0.0, 1.0)
    assert (sampling.max_new_tokens, sampling.stop) == (17, ["x"])
    assert seen.rollout.reward.overlong_tokens == 0
    assert seen.run.seed - config.run.seed == 2**30
    assert as_evaluated(from_dict({"reward_model": {"path": "judge"}})).reward_model.path is None
    other = from_dict({"evaluation": {"seed": 9, "samples": 4, "sampling": {"temperature": 0.8, "max_new_tokens": 5}}})
    seen = as_evaluated(other)
    assert (seen.run.seed, seen.rollout.group_size, seen.data) == (9, 4, other.data)
    assert (seen.rollout.sampling.temperature, seen.rollout.sampling.max_new_tokens) == (0.8, 5)


@pytest.mark.parametrize(
    ("settings", "warning"),
    [
        ({}, 0.05),
        ({"gserver": {"engine": "sglang", "sglang": {"args": ["--quantization=fp8"]}}}, 0.2),
        ({"gserver": {"engine": "sglang", "sglang": {"args": ["--quantization-param-path=x"]}}}, 0.05),
        ({"trainer": {"logprob_diff_warning": 0.01}}, 0.01),
    ],
)
def test_a_quantised_rollout_may_differ_more_before_it_is_warned_of(settings: dict[str, Any], warning: float) -> None:
    assert from_dict(settings).logprob_diff_warning == warning


def test_sections_are_frozen() -> None:
    with pytest.raises(AttributeError):
        RolloutConfig().group_size = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("trainer", "says"),
    [
        ({"tensor_parallel": 2}, 'trainer: tensor_parallel and pipeline_parallel need backend = "megatron"'),
        (
            {"backend": "megatron", "tensor_parallel": 2, "roles": {"critic": {"data_parallel": 3}}},
            "trainer.roles.critic: data_parallel . context_parallel . tensor_parallel . pipeline_parallel is 3, but",
        ),
        ({"data_parallel": 2, "expert_parallel": 2}, 'trainer: expert_parallel needs backend = "megatron"'),
        (
            {"backend": "megatron", "data_parallel": 2, "pipeline_parallel": 2, "expert_parallel": 4},
            "trainer: expert_parallel = 4 does not divide data_parallel . context_parallel . tensor_parallel = 2",
        ),
        ({"roles": {"actor": {"backend": "megatron"}}}, "the actor is what .trainer. itself describes"),
        ({"offload": ["actor"]}, "the actor is never idle"),
        ({"graph": "synchronous"}, "needs staleness.max_staleness = 0"),
    ],
)
def test_layouts_and_roles_that_do_not_fit_are_refused(trainer: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        from_dict({"trainer": trainer})


def layout_of(trainer: TrainerConfig, role: RoleName) -> tuple[Any, ...]:
    return msgspec.structs.astuple(role_config(trainer, role))


def test_a_role_has_its_own_layout_or_that_of_the_trainer() -> None:
    trainer = from_dict(
        {
            "trainer": {
                "backend": "megatron",
                "tensor_parallel": 2,
                "pipeline_parallel": 2,
                "expert_parallel": 2,
                "roles": {"ref": {"backend": "torch"}, "critic": {"data_parallel": 2, "tensor_parallel": 2}},
            }
        }
    ).trainer
    assert trainer.workers == 4
    assert layout_of(trainer, "actor") == ("megatron", 1, 1, 2, 2, 2)
    assert layout_of(trainer, "reward") == ("megatron", 1, 1, 2, 2, 2)
    assert layout_of(trainer, "ref") == ("torch", 4, 1, 1, 1, 1)
    assert layout_of(trainer, "critic") == ("megatron", 2, 1, 2, 1, 1)


def test_a_torch_role_shares_rows_over_as_many_workers_as_the_others() -> None:
    layout = {"backend": "megatron", "context_parallel": 2, "tensor_parallel": 2}
    trainer = from_dict({"trainer": {**layout, "roles": {"ref": {"backend": "torch"}}}}).trainer
    assert trainer.workers == 4
    assert layout_of(trainer, "ref") == ("torch", 2, 2, 1, 1, 1)


def test_folders_may_be_in_the_users_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    config = from_dict({"run": {"dir": "~/runs", "resume_from": "~/a"}})
    assert config.run_dir == Path("/home/somebody/runs/run")
    assert config.run.resume_from == "/home/somebody/a"
