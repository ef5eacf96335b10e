"""The workflows that come with streamrl, by name, and the loading of the user's own."""

from __future__ import annotations

import inspect
from typing import cast

from streamrl.config import WorkflowConfig
from streamrl.errors import ConfigError
from streamrl.importing import load_object
from streamrl.rollout.workflow import Workflow
from streamrl.rollout.workflows.multi_turn import MultiTurn
from streamrl.rollout.workflows.single_turn import SingleTurn

WORKFLOWS: dict[str, type[Workflow]] = {"single_turn": SingleTurn, "multi_turn": MultiTurn}


def load_workflow(config: WorkflowConfig) -> Workflow:
    """The workflow that `config` names, made with its arguments. Raises `ConfigError`."""
    key = f"rollout.workflow.name = {config.name!r}"
    kind: object = WORKFLOWS.get(config.name)
    if kind is None:
        if ":" not in config.name:
            raise ConfigError(f"{key}: there is none; known: {', '.join(WORKFLOWS)}, or module:Class")
        kind = load_object(config.name, key="rollout.workflow.name")
    if not inspect.isclass(kind) or not inspect.iscoroutinefunction(getattr(kind, "run", None)):
        raise ConfigError(f"{key}: must be a class with a coroutine run(prompt, session)")
    try:
        inspect.signature(kind).bind(**config.args)
    except TypeError as error:
        raise ConfigError(f"{key} cannot be made with rollout.workflow.args = {config.args}: {error}") from error
    return cast(Workflow, kind(**config.args))
