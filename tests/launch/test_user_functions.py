"""Functions that cannot be imported are found before any process of a run starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from streamrl.config import from_dict
from streamrl.errors import ConfigError
from streamrl.launch import local
from streamrl.launch.user_functions import check_functions, named

ROOT = Path(__file__).parents[2]
FILTER = "examples.hooks.filter:neither_hard_nor_easy"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"rollout": {"filter": "examples.hooks.filter:missing"}}, r"rollout\.filter = .* has no missing"),
        ({"rollout": {"filter": FILTER, "filter_args": {"x": 1}}}, r"rollout\.filter_args\.x"),
        ({"metrics": {"hook": "no_such_module:f"}}, r"metrics\.hook = .*there is no module no_such_module"),
        ({"tasks": [{"name": "a"}, {"name": "b", "reward": {"function": "no_such:f"}}]}, r"tasks\.b\.reward\.function"),
        ({"rollout": {"agent": {"command": ["true"], "renderer": "no_such"}}}, r"rollout\.agent\.renderer = 'no_such'"),
        (
            {"algorithm": {"loss": "tests.launch.bad_module:f"}},
            r"algorithm\.loss = .* cannot be imported: RuntimeError",
        ),
    ],
)
def test_the_setting_is_named(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_functions(from_dict(settings))


def test_hooks_with_their_arguments_pass() -> None:
    config = from_dict(
        {
            "data": {"sampler": "examples.hooks.sampler:near_half", "sampler_args": {"explore": 0.2}},
            "algorithm": {"loss": "examples.hooks.loss:reinforce"},
            "trainer": {"graph": "synchronous:examples.ecs_grpo:workflow"},
            "staleness": {"max_staleness": 0},
        }
    )
    assert {function.key for function in named(config)} == {"data.sampler", "algorithm.loss", "trainer.graph"}
    check_functions(config)
    assert not list(named(from_dict({})))


def test_a_run_with_a_wrong_function_has_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "set_up_logging", lambda name: None)
    words = [f"run.dir={tmp_path}", "metrics.hook=no_such_module:f"]
    with pytest.raises(ConfigError, match=r"metrics\.hook = 'no_such_module:f'"):
        local.run_here(ROOT / "examples" / "copy_scratch.toml", words, Console(), resume=False, page=False)
    assert not list(tmp_path.iterdir())
