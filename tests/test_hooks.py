"""Functions of the user in the places that the configuration names: the examples, and what is refused."""

from __future__ import annotations

import importlib
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from streamrl.config import AlgorithmConfig, MetricsConfig, OptimizerConfig, RolloutConfig
from streamrl.errors import ConfigError, TrainingError
from streamrl.hooks import bind
from streamrl.records.metrics import StepReport
from streamrl.rollout.groups import load_filter
from streamrl.trainer.algorithms.registry import advantage_of, check, is_per_token, policy_loss, random_tokens
from streamrl.trainer.backends.optimizer import learning_rate
from streamrl.trainer.master import own_figures
from streamrl.trainer.master.own_figures import OwnFigures
from streamrl.types import SampleMeta
from tests.groups import make_meta
from tests.trainer.models import random_group

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples" / "hooks").glob("*.py"))
HERE = "tests.test_hooks"


def some_tokens() -> Any:
    return random_tokens(np.array([1.0, -1.0, 0.5, 0.0], np.float32), np.random.default_rng(1))


def metas(*rewards: list[float]) -> list[SampleMeta]:
    return [make_meta(seq, [3] * len(own), rewards=own) for seq, own in enumerate(rewards)]


def report(**metrics: float) -> StepReport:
    return StepReport(step=7, time=0.0, metrics=metrics, token_ages={})


# --- arguments ---


def test_keyword_parameters_come_from_arguments_then_settings_then_defaults() -> None:
    def function(subject: int, *, clip_low: float, mine: str, other: int = 3) -> tuple[Any, ...]:
        return subject, clip_low, mine, other

    settings = AlgorithmConfig(clip_low=0.1)
    assert bind(function, key="k", args={"mine": "x"}, settings=settings)(5) == (5, 0.1, "x", 3)
    assert bind(function, key="k", args={"mine": "x", "clip_low": 2}, settings=settings)(5) == (5, 2, "x", 3)
    with pytest.raises(ConfigError, match=r"k: its keyword-only parameter mine has no value; set k_args\.mine"):
        bind(function, key="k", args={}, settings=settings)
    with pytest.raises(ConfigError, match=r"k_args\.typo: the function has no .* \(clip_low, mine, other\)"):
        bind(function, key="k", args={"typo": 1}, settings=settings)


# --- losses and advantages ---


@pytest.mark.parametrize("name", ["cispo", "gspo", "ppo"])
def test_built_in_losses_pass_the_check(name: str) -> None:
    check(AlgorithmConfig(loss=name))


@pytest.mark.parametrize("name", ["grpo", "mean", "rloo", "reinforce++", "reinforce++-baseline", "gae", "none"])
def test_built_in_advantages_pass_the_check(name: str) -> None:
    algorithm = AlgorithmConfig(advantage=name)
    check(algorithm)
    assert is_per_token(algorithm) == (name in ("reinforce++", "reinforce++-baseline", "gae", "none"))


def summed(tokens: Any) -> Any:
    return tokens.logprobs.sum()


def detached(tokens: Any) -> Any:
    return tokens.logprobs.detach()


def infinite(tokens: Any) -> Any:
    return tokens.logprobs / 0


def steep(tokens: Any) -> Any:
    return (tokens.logprobs - tokens.logprobs.detach()).abs().sqrt()


def elsewhere(tokens: Any) -> Any:
    return torch.ones_like(tokens.logprobs).requires_grad_()


def broken(tokens: Any) -> Any:
    return tokens.no_such_field


def too_few(rewards: Any, episodes: Any) -> Any:
    return rewards[:1]


def undefined(rewards: Any, episodes: Any) -> Any:
    return rewards * np.nan


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"loss": f"{HERE}:summed"}, r"returned \[\] for \d+ tokens: return one loss for each token"),
        ({"loss": f"{HERE}:detached"}, r"does not depend on tokens\.logprobs"),
        ({"loss": f"{HERE}:infinite"}, "is not finite"),
        ({"loss": f"{HERE}:steep"}, "no finite gradient"),
        ({"loss": f"{HERE}:elsewhere"}, "has no gradient"),
        ({"loss": f"{HERE}:broken"}, "failed with random responses: AttributeError"),
        ({"advantage": f"{HERE}:too_few"}, "return one finite number for each reward"),
        ({"advantage": f"{HERE}:undefined"}, "return one finite number for each reward"),
        ({"advantage": f"{HERE}:nowhere"}, "has no nowhere"),
    ],
)
def test_functions_that_do_not_fit_are_refused_at_the_start(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check(AlgorithmConfig(**settings))


def test_an_advantage_that_fails_later_stops_the_step_with_its_name() -> None:
    compare = advantage_of(AlgorithmConfig(advantage=f"{HERE}:too_few"))
    with pytest.raises(TrainingError, match=rf"algorithm\.advantage = '{HERE}:too_few' returned \[1\.0\]"):
        compare(np.array([1, 0], np.float32), np.arange(2))


def test_a_loss_of_the_user_without_a_clip() -> None:
    algorithm = AlgorithmConfig(loss="examples.hooks.loss:reinforce", loss_args={"cap": 1.1})
    check(algorithm)
    tokens = some_tokens()
    found = policy_loss(algorithm)(tokens)
    weight = (tokens.logprobs - tokens.behavior_logprobs).exp().clamp(max=1.1).detach()
    torch.testing.assert_close(found.loss, -weight * tokens.advantages * tokens.logprobs)
    assert float(weight.max()) == pytest.approx(1.1)
    assert not found.clipped.any()


def test_an_advantage_of_the_user() -> None:
    algorithm = AlgorithmConfig(advantage="examples.hooks.advantage:relative", advantage_args={"least_mean": 0.1})
    check(algorithm)
    assert not is_per_token(algorithm)
    found = advantage_of(algorithm)(np.array([1, 0, 0, 0], np.float32), np.arange(4))
    assert found.tolist() == [3.0, -1.0, -1.0, -1.0]


# --- groups, figures, schedules ---


def test_a_filter_of_the_user() -> None:
    rollout = RolloutConfig(
        filter="examples.hooks.filter:neither_hard_nor_easy", filter_args={"lowest": 0.2, "highest": 0.8}
    )
    wanted = load_filter(rollout)
    group = random_group(0, np.random.default_rng(0))
    for mean, kept in ((0.1, False), (0.5, True), (0.9, False)):
        group.rewards = np.full_like(group.rewards, mean)
        assert wanted(group) == kept
    assert not load_filter(RolloutConfig(filter="contrast"))(group)
    assert load_filter(RolloutConfig())(group)


async def test_figures_of_the_user() -> None:
    own = OwnFigures(MetricsConfig(hook="examples.hooks.metrics:best_of_group"))
    found = await own.of_step(report(reward_mean=0.5), metas([0.0, 1.0], [0.0, 0.0]))
    assert found == {"own/best_reward": 0.5, "own/unsolved_share": 0.5}
    assert await OwnFigures(MetricsConfig()).of_step(report(), metas([0.0])) == {}


def fails(report: Any, batch: Any) -> Any:
    raise RuntimeError("no figures today")


def takes_too_long_elsewhere(report: Any, batch: Any) -> Any:
    raise TimeoutError("the database does not reply")


def finds_nothing(report: Any, batch: Any) -> Any:
    return next(iter(()))


def gives_up(report: Any, batch: Any) -> Any:
    raise SystemExit("no figures")


def takes_a_name(report: Any, batch: Any) -> Any:
    return {"reward_mean": 1.0}


def hangs(report: Any, batch: Any) -> Any:
    time.sleep(0.5)
    return {"late": 1.0}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fails", "failed at step 7: RuntimeError"),
        ("takes_too_long_elsewhere", "failed at step 7: TimeoutError"),
        ("finds_nothing", "failed at step 7: StopIteration"),
        ("gives_up", "failed at step 7: SystemExit"),
        ("takes_a_name", "'reward_mean' is the name"),
        ("hangs", "0.05 s"),
    ],
)
async def test_a_hook_for_figures_that_fails_is_named_and_harms_nothing(
    name: str, said: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_figures, "HOOK_SECONDS", 0.05 if name == "hangs" else 5.0)
    own = OwnFigures(MetricsConfig(hook=f"{HERE}:{name}"))
    for _ in range(2):
        assert await own.of_step(report(reward_mean=0.0), metas([0.0])) == {}
    assert sum(said in record.getMessage() for record in caplog.records) == (1 if name == "hangs" else 2)


def test_a_schedule_of_the_user() -> None:
    config = OptimizerConfig(
        schedule="examples.hooks.schedule:stable_then_decay", schedule_args={"decay_share": 0.5}, warmup_steps=2
    )
    rates = [learning_rate(step, peak=1.0, config=config, total_steps=12) for step in (0, 2, 7, 12)]
    assert rates == pytest.approx([1 / 3, 1.0, 1.0, 0.0])


def negative(update: int, total_updates: int) -> float:
    return 1.0 - update


@pytest.mark.parametrize(
    ("name", "said"), [("negative", r"returned -4\.0 at \(5, 10\)"), ("hangs", r"failed at \(0, 10\)|returned")]
)
def test_a_schedule_that_does_not_fit_is_refused(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        learning_rate(0, peak=1.0, config=OptimizerConfig(schedule=f"{HERE}:{name}"), total_steps=10)


# --- the examples ---


def test_the_page_shows_each_example_as_it_is() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "hooks.md").read_text(), re.DOTALL)
    for file in EXAMPLES:
        assert file.read_text() in blocks, file.name
        assert len(file.read_text().splitlines()) <= 30, file.name
        command = re.search(r"=(examples\.hooks\.\w+):(\w+)", file.read_text())
        assert command is not None, file.name
        assert callable(getattr(importlib.import_module(command[1]), command[2]))
