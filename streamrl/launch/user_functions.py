"""The functions of the user that a configuration names, imported once before any process of a run starts.

They are imported in a child process, since a module of the user may import torch, print, hang or end the process. The
processes of the run import them again, and check more: the shape of a loss, the parameters of an agent.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from streamrl import userland
from streamrl.config import Config, by_task
from streamrl.config.trainer import SYNCHRONOUS
from streamrl.errors import ConfigError, StreamRLError, UserCodeError, UserCodeTimeout
from streamrl.hooks import is_hook, load_hook, load_object
from streamrl.rollout.agents.renderer_names import TEMPLATE, known_renderers
from streamrl.transport import secret


class NamedFunction(NamedTuple):
    """A setting that names a function or a class of the user."""

    key: str
    spec: str
    args: dict[str, Any] | None = None
    """Arguments of a hook (`hooks.bind`); None for other functions, whose parameters are not checked here."""
    settings: msgspec.Struct | None = None


def check_functions(config: Config) -> None:
    """Import every function that `config` names, and `renderers` if agents need it; raises `ConfigError` if one cannot
    be imported, or lacks arguments."""
    if not any(named(config)) and not any(_renderers(config)):
        return
    setup = userland.SetupMessage(
        loader="streamrl.launch.user_functions:serve_import", settings={"config": msgspec.to_builtins(config)}
    )
    withheld = (secret.VARIABLE, config.gserver.api_key_env, config.rollout.agent.api_key_env)
    passed = [*config.rollout.reward.environment, *config.rollout.agent.environment]
    environment = userland.clean_environment(os.environ, passed=passed, withheld=withheld)
    seconds = config.limits.start_seconds
    try:
        userland.call_once(setup, None, timeout=seconds, environment=environment)
    except UserCodeTimeout as error:
        keys = ", ".join(function.key for function in named(config))
        raise ConfigError(
            f"the functions of {keys} were not imported within limits.start_seconds = {seconds:g}"
        ) from error
    except UserCodeError as error:
        raise ConfigError(str(error)) from error


def serve_import(*, config: dict[str, Any]) -> userland.UserFunction:
    """Import the functions that `config` names, in the child process; raises `ConfigError` for the first wrong one."""
    known = msgspec.convert(config, Config)
    for renderer in _renderers(known):
        known_renderers(renderer)
    for key, spec, args, settings in named(known):
        try:
            if args is None:
                load_object(spec, key=key)
            else:
                load_hook(spec, key=key, args=args, settings=settings)
        except StreamRLError:
            raise
        except Exception as error:  # the user's module may raise any error
            raise ConfigError(f"{key} = {spec!r} cannot be imported: {type(error).__name__}: {error}") from error
    return userland.UserFunction(lambda: None, arguments=lambda payload: (), result=lambda nothing: nothing)


def _renderers(config: Config) -> set[str]:
    """Return the renderers of the agents in `config` that need the package renderers."""
    agents = [own.rollout.agent for own in by_task(config).values()]
    return {agent.renderer for agent in agents if agent.used} - {TEMPLATE}


def named(config: Config) -> Iterator[NamedFunction]:
    """Yield the functions in `config`, without those of streamrl itself and of another interpreter
    (`rollout.agent.python`)."""
    metrics, trainer = config.metrics, config.trainer
    found = [
        NamedFunction("metrics.hook", metrics.hook, metrics.hook_args),
        NamedFunction("trainer.optimizer.schedule", trainer.optimizer.schedule, trainer.optimizer.schedule_args),
        NamedFunction("rollout.filter", config.rollout.filter, config.rollout.filter_args),
        NamedFunction("trainer.graph", trainer.graph.removeprefix(f"{SYNCHRONOUS}:")),
        NamedFunction("algorithm.loss", config.algorithm.loss, config.algorithm.loss_args, config.algorithm),
    ]
    for task, own in by_task(config).items():
        where, rollout = (f"tasks.{task}.", own.rollout) if task else ("", own.rollout)
        section = "" if task else "rollout."
        agent = rollout.agent
        found += [
            NamedFunction(f"{where}data.sampler", own.data.sampler, own.data.sampler_args),
            NamedFunction(f"{where}data.path", own.data.path if own.data.source == "python" else ""),
            NamedFunction(f"{where}{section}workflow.name", rollout.workflow.name),
            NamedFunction(f"{where}{section}agent.function", "" if agent.python else agent.function),
            NamedFunction(f"{where}{section}reward.function", rollout.reward.function),
            NamedFunction(
                f"{where}algorithm.advantage", own.algorithm.advantage, own.algorithm.advantage_args, own.algorithm
            ),
        ]
    return (each for each in found if is_hook(each.spec) and not each.spec.startswith("streamrl."))
