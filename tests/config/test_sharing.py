"""What all processes of a run must agree on, and what a process is told that does not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.config import Config, from_dict
from streamrl.config.sharing import MAY_DIFFER, MOST_NAMED, SAME_IN_THEM, differences
from streamrl.errors import ConfigError

DEFAULTS = Config().shared()


def differing(theirs: dict[str, Any], ours: dict[str, Any]) -> str:
    there, here = from_dict(theirs), from_dict(ours)
    found = differences(there.shared_changes(), here.shared_changes(), defaults=DEFAULTS)
    assert bool(found) == (there.digest() != here.digest())
    return found


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"run": {"host": "0.0.0.0"}, "gserver": {"count": 4, "threads": 8}}, {"run": {"host": "10.0.0.1"}}),
        ({"limits": {"call_seconds": 5}, "restarts": {"number": 0}, "weights": {"backend": "gloo"}}, {}),
        ({"model": {"path": "/data/m"}}, {"model": {"path": "/scratch/models/m"}}),
        ({"data": {"source": "jsonl", "path": "/a.jsonl"}}, {"data": {"source": "jsonl", "path": "/b.jsonl"}}),
        ({"critic": {"path": "/a"}}, {"critic": {"path": "/b"}}),
        ({"rollout": {"workers": 9, "reward": {"processes": 3}}}, {"rollout": {"max_concurrent_groups": 5}}),
        ({"run": {"name": "a", "device": "cpu", "host": "0.0.0.0", "port": 8000}}, {}),
        ({"run": {"dir": "elsewhere", "stop_at_reward": 0.5}, "metrics": {"plots": False}}, {}),
    ],
)
def test_what_belongs_to_a_machine_may_differ(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    assert differing(theirs, ours) == ""


@pytest.mark.parametrize(
    ("theirs", "ours", "told"),
    [
        ({"rollout": {"group_size": 8}}, {"rollout": {"group_size": 16}}, "rollout.group_size is 8 there and 16 at"),
        ({"rollout": {"sampling": {"top_k": 9}}}, {}, "rollout.sampling.top_k is 9 there and -1 at the manager"),
        ({"staleness": {"max_staleness": 5}}, {}, "staleness.max_staleness is 5 there and 4 at the manager"),
        ({"run": {"seed": 1}}, {}, "run.seed is 1 there and 0 at the manager"),
        ({"run": {"total_train_epochs": 5}}, {}, "run.total_train_epochs is 5 there and not set at the manager"),
        ({"run": {"total_train_steps": 9}}, {"run": {"total_train_steps": 8}}, "total_train_steps is 9 there and 8 at"),
        ({}, {"run": {"record": True}}, "run.record is False there and True at the manager"),
        ({"model": {"path": "/data/m"}}, {}, "model.path is 'a path' there and 'smollm2-135m-instruct' at the manager"),
        ({"data": {"path": "leg_counting"}}, {}, "data.path is 'leg_counting' there and 'chain_sum' at the manager"),
        ({"critic": {"path": "/a"}}, {}, "critic.path is 'a path' there and not set at the manager"),
        ({"data": {"args": {"min_terms": 2}}}, {}, "data.args.min_terms is 2 there and not set at the manager"),
        ({"trainer": {"data_parallel": 2}}, {}, "trainer.data_parallel is 2 there and 1 at the manager"),
    ],
)
def test_what_differs_is_named_with_both_values(theirs: dict[str, Any], ours: dict[str, Any], told: str) -> None:
    assert told in differing(theirs, ours)


def test_a_refusal_lists_the_settings_of_the_other_sections_that_must_agree() -> None:
    other = from_dict({"run": {"seed": 1}})
    with pytest.raises(ConfigError, match=r"run\.seed is 1 there and 0 at the manager.* and the sections") as refusal:
        Config().check_shared(other.shared_changes(), other.digest(), who="rollout/0")
    sections = {name for name in MAY_DIFFER if "." not in name}
    text = str(refusal.value).rpartition("the sections ")[2]
    assert all(f"[{name}]" in text for name in sections)
    assert all(name in text for name in SAME_IN_THEM)


def test_every_setting_that_may_differ_is_one() -> None:
    names = set(flat(msgspec.to_builtins(Config())))
    for name in (*MAY_DIFFER, *SAME_IN_THEM):
        assert name in names or any(each.startswith(f"{name}.") for each in names), name


def flat(tree: dict[str, Any], prefix: str = "") -> list[str]:
    found: list[str] = []
    for key, value in tree.items():
        found += [f"{prefix}{key}", *(flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [])]
    return found


@given(st.dictionaries(st.text(max_size=5), st.one_of(st.none(), st.integers(), st.text(max_size=200)), max_size=30))
def test_whatever_a_process_says_of_itself_the_answer_stays_short(theirs: dict[str, Any]) -> None:
    told = differences(theirs, {}, defaults=DEFAULTS)
    assert len(told) < (MOST_NAMED + 1) * 250
