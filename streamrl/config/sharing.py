"""The settings that must agree in all processes of a run: the configuration without machine-specific settings.

Pure, on configurations as plain dictionaries.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from streamrl.config.fields import GENERATED_SOURCES

Settings = Mapping[str, Any]
"""Settings by name, for example `rollout.group_size`."""

MAY_DIFFER = (
    "run",
    "limits",
    "restarts",
    "security",
    "metrics",
    "launch",
    "model.path",
    "gserver.count",
    "gserver.threads",
    "gserver.max_running",
    "gserver.prefix_cache_mb",
    "gserver.api_key_env",
    "gserver.vllm.python",
    "gserver.vllm.args",
    "gserver.vllm.tensor_parallel",
    "gserver.vllm.addresses",
    "gserver.sglang.python",
    "gserver.sglang.args",
    "gserver.sglang.tensor_parallel",
    "gserver.sglang.addresses",
    "rollout.workers",
    "rollout.max_concurrent_groups",
    "rollout.agent.port",
    "rollout.agent.api_key_env",
    "rollout.agent.processes",
    "rollout.agent.memory_mb",
    "rollout.agent.environment",
    "rollout.reward.processes",
    "rollout.reward.environment",
    "trainer.threads",
    "weights.backend",
)
"""Names of settings, and of sections, that each machine may set for itself: locations, counts, and choices that a
sender announces with its messages."""
SAME_IN_THEM = ("run.seed", "run.total_train_epochs", "run.total_train_steps", "run.record")
"""Exceptions: settings of these sections that must be the same. The manager ends admission by the totals, the master
ends the run by them, and each model worker computes its learning rate from them. With `run.record` the model workers
exchange fingerprints of the weights, in which all must take part."""
FILES = ("reference.path", "critic.path", "reward_model.path")
"""Settings that must be set in all processes or in none, while their paths may differ."""
MODELS_BY_NAME = ("scratch", "smollm2-135m-instruct")
"""Values of `model.path` that name a model instead of a folder."""
LONGEST_VALUE = 60
MOST_NAMED = 8


def shared_settings(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that all processes of a run must have in common, from a configuration as dictionaries."""
    found = {
        name: value
        for name, value in _flat({**tree, "tasks": {}}).items()
        if name in SAME_IN_THEM or not _may_differ(name)
    }
    found |= _of_tasks(tree)
    found |= {name: "a path" for name in FILES if found.get(name) is not None}
    model = tree["model"]["path"]
    found["model.path"] = model if model in MODELS_BY_NAME else "a path"
    # Processes that read prompts from files report their number.
    if tree["data"]["source"] not in GENERATED_SOURCES:
        found["data.path"] = "a path"
    if tree["evaluation"]["data"].get("source", tree["data"]["source"]) not in GENERATED_SOURCES:
        found["evaluation.data.path"] = "a path"
    return found


def _may_differ(name: str) -> bool:
    return any(name == each or name.startswith(f"{each}.") for each in MAY_DIFFER)


def _of_tasks(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the names of the tasks, in their order, and the settings of each that all processes have in common."""
    found: dict[str, Any] = {"tasks": [task["name"] for task in tree["tasks"]]}
    for task in tree["tasks"]:
        settings = {name: value for name, value in _flat(task).items() if not _may_differ(f"rollout.{name}")}
        source = task.get("data", {}).get("source", tree["data"]["source"])
        held_out = tree["evaluation"]["data"] | task.get("evaluation", {}).get("data", {})
        for name, kind in (("data.path", source), ("evaluation.data.path", held_out.get("source", source))):
            if name in settings and kind not in GENERATED_SOURCES:
                settings[name] = "a path"
        found |= {f"tasks.{task['name']}.{name}": value for name, value in settings.items()}
    return found


def digest_of(settings: Settings) -> str:
    """Return the fingerprint of settings."""
    return hashlib.sha256(msgspec.json.encode(sorted(settings.items()))).hexdigest()[:16]


def changed(settings: Settings, defaults: Settings) -> dict[str, Any]:
    """Return the entries of `settings` that differ from `defaults`."""
    return {name: value for name, value in settings.items() if name not in defaults or defaults[name] != value}


def differences(theirs: Settings, ours: Settings, *, defaults: Settings) -> str:
    """Return a readable list of the settings that differ. `theirs` and `ours` contain only non-default settings.

    Return an empty string if none differ.
    """
    found = []
    for name in sorted({*theirs, *ours}):
        their, our = (settings.get(name, defaults.get(name)) for settings in (theirs, ours))
        if msgspec.json.encode(their) != msgspec.json.encode(our):
            found.append(f"{name[:LONGEST_VALUE]} is {_shown(their)} there and {_shown(our)} at the manager")
    more = f"; and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    return "; ".join(found[:MOST_NAMED]) + more


def _shown(value: Any) -> str:
    text = "not set" if value is None else repr(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}…"


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found
