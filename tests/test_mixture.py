"""Several tasks in one run: their turns, settings and figures."""

from __future__ import annotations

import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.config import Config, by_task, from_dict, load, overridden, to_toml
from streamrl.config.sections import as_evaluated
from streamrl.errors import ConfigError
from streamrl.mixture import Mixture
from streamrl.records.metrics import of_tasks
from streamrl.records.progress import prompts_digest
from streamrl.trainer.algorithms.registry import advantage_by_task
from streamrl.trainer.master.figures import task_metrics
from streamrl.types import SampleMeta
from tests.groups import make_group

EXAMPLE = Path(__file__).parents[1] / "examples" / "two_tasks.toml"


def tasks(*own: dict[str, Any], **sections: Any) -> Config:
    return from_dict({"tasks": list(own), **sections})


@given(weights=st.lists(st.integers(1, 30), min_size=1, max_size=5), seqs=st.integers(1, 400))
def test_turns_follow_the_weights_in_any_stretch(weights: list[int], seqs: int) -> None:
    mixture = Mixture({f"t{number}": weight for number, weight in enumerate(weights)})
    seen: Counter[str] = Counter()
    for seq in range(seqs):
        name = mixture.task(seq)
        assert mixture.position(seq) == seen[name]
        seen[name] += 1
    for number, weight in enumerate(weights):
        assert abs(seen[f"t{number}"] - seqs * weight / sum(weights)) < len(weights)


def test_a_run_without_tasks_has_one_without_a_name() -> None:
    mixture = Mixture.of(Config())
    assert [(mixture.task(seq), mixture.position(seq)) for seq in (0, 7)] == [("", 0), ("", 7)]
    assert by_task(Config()) == {"": Config()}
    assert of_tasks(task_metrics([], mixture, policy_version=0)) == {}


def test_a_task_overlays_the_sections_of_the_run() -> None:
    config = tasks(
        {"name": "math", "data": {"path": "m.jsonl", "source": "jsonl"}, "evaluation": {"data": {"path": "h.jsonl"}}},
        {"name": "tools", "agent": {"function": "a:b"}, "sampling": {"max_new_tokens": 9}},
        data={"suffix": "!"},
        rollout={"sampling": {"max_new_tokens": 5}},
        evaluation={"sampling": {"max_new_tokens": 7}, "samples": 1},
    )
    math, tools = by_task(config).values()
    assert (math.data.path, math.data.suffix, math.rollout.sampling.max_new_tokens) == ("m.jsonl", "!", 5)
    assert (as_evaluated(math).data.path, as_evaluated(math).rollout.sampling.max_new_tokens) == ("h.jsonl", 7)
    assert (tools.data.path, tools.rollout.agent.function) == (config.data.path, "a:b")
    assert (config.longest_response, config.generated_rows) == (9, None)
    assert from_dict(tomllib.loads(to_toml(config, only_changed=True))) == config
    assert overridden(config, ["tasks.tools.weight=2"]).tasks[1].weight == 2


@pytest.mark.parametrize(
    ("second", "key"),
    [
        ({"name": "a"}, r"two of them have the name a"),
        ({"name": "b", "weight": 0}, r"tasks\.b\.weight: Expected `int` >= 1"),
        ({"name": "b", "wieght": 2}, r"unknown key tasks\.b\.wieght; did you mean tasks\.b\.weight\?"),
        ({"name": "b", "data": {"pth": "x"}}, r"unknown key tasks\.b\.data\.pth; did you mean tasks\.b\.data\.path\?"),
        ({"name": "b/c"}, r"tasks\.b/c\.name"),
        ({"weight": 2}, r"tasks\.1: .*`name`"),
        ({"name": "b", "sampling": {"temperature": 0.5}}, r"tasks\.b\.sampling\.temperature"),
        ({"name": "b", "algorithm": {"advantage": "gae"}}, r"tasks\.b\.algorithm\.advantage"),
        ({"name": "b", "agent": {"function": "a:b", "command": ["x"]}}, r"tasks\.b: rollout\.agent"),
    ],
)
def test_wrong_tasks_are_refused(second: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        tasks({"name": "a"}, second)


def test_two_agents_do_not_share_a_port() -> None:
    agent = {"function": "a:b", "port": 4000}
    with pytest.raises(ConfigError, match=r"tasks\.b\.agent\.port = 4000"):
        tasks({"name": "a", "agent": agent}, {"name": "b", "agent": agent})


@pytest.mark.parametrize("override", ["tasks.c.weight=2", "tasks.weight=2", "tasks=3"])
def test_an_override_names_a_task(override: str) -> None:
    with pytest.raises(ConfigError, match=r"tasks is a list of tables"):
        overridden(tasks({"name": "a"}, {"name": "b"}), [override])


def test_processes_share_the_tasks_but_not_their_paths_and_ports() -> None:
    data = {"source": "jsonl", "path": "x"}
    one = tasks({"name": "a", "data": data, "agent": {"function": "a:b", "port": 1}}, {"name": "b"})
    other = tasks({"name": "a", "data": data | {"path": "y"}, "agent": {"function": "a:b", "port": 2}}, {"name": "b"})
    assert one.digest() == other.digest()
    for changed in (["tasks.a.weight=2"], ["tasks.b.data.path='gsm_symbolic'"], ["tasks.a.agent.function='a:c'"]):
        assert overridden(one, changed).digest() != one.digest()
    assert prompts_digest(one) == prompts_digest(other) != prompts_digest(overridden(one, ["tasks.a.weight=2"]))


def test_each_task_has_its_advantage() -> None:
    config = load(EXAMPLE)
    advantage, mixture = advantage_by_task(config), Mixture.of(config)
    assert advantage is not None
    rewards = np.array([1, 0, 0], np.float32)
    found = {mixture.task(seq): advantage(seq)(rewards, np.arange(3)) for seq in range(3)}
    assert found["copy"].tolist() == pytest.approx([1.15, -0.58, -0.58], abs=0.01)
    assert found["repeat"].tolist() == [1.0, -0.5, -0.5]
    assert advantage_by_task(tasks({"name": "a"}, {"name": "b"})) is None
    per_token = {"advantage": "tests.test_mixture:returns"}
    with pytest.raises(ConfigError, match=r"tasks\.b\.algorithm\.advantage"):
        advantage_by_task(tasks({"name": "a"}, {"name": "b", "algorithm": per_token}))


def returns(rewards: Any, episodes: Any) -> Any:
    return rewards


returns.per_token = True  # type: ignore[attr-defined]


def test_figures_are_split_by_task() -> None:
    mixture = Mixture({"a": 1, "b": 1, "c": 1})
    batch = [SampleMeta.of(make_group(seq, version=seq), head=0) for seq in (0, 1, 3)]
    found = of_tasks(task_metrics(batch, mixture, policy_version=4))
    assert {name: own["groups"] for name, own in found.items()} == {"a": 2, "b": 1, "c": 0}
    assert (found["a"]["token_age_mean"], found["b"]["token_age_mean"]) == (2.5, 3.0)
    assert "reward_mean" not in found["c"]
