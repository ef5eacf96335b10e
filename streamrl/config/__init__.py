"""The configuration of a run: one TOML file. Unknown keys are refused.

`load` reads a file, applies `section.key=value` overrides, and checks combinations of values that a single field cannot
check. Every message names the key.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from streamrl import example_files
from streamrl.config.checks import found_in
from streamrl.config.fields import EVERY_FORM, Section, fields_of, section_of
from streamrl.config.sections import MAX_QUEUED as MAX_QUEUED
from streamrl.config.sections import PACE_SIGMA as PACE_SIGMA
from streamrl.config.sections import AgentConfig as AgentConfig
from streamrl.config.sections import Config as Config
from streamrl.config.sections import DataConfig as DataConfig
from streamrl.config.sections import EvaluationConfig as EvaluationConfig
from streamrl.config.sections import GserverConfig as GserverConfig
from streamrl.config.sections import LimitsConfig as LimitsConfig
from streamrl.config.sections import LoraConfig as LoraConfig
from streamrl.config.sections import MetricsConfig as MetricsConfig
from streamrl.config.sections import ModelConfig as ModelConfig
from streamrl.config.sections import RestartsConfig as RestartsConfig
from streamrl.config.sections import RewardConfig as RewardConfig
from streamrl.config.sections import RolloutConfig as RolloutConfig
from streamrl.config.sections import RunConfig as RunConfig
from streamrl.config.sections import SamplingConfig as SamplingConfig
from streamrl.config.sections import ScratchConfig as ScratchConfig
from streamrl.config.sections import SecurityConfig as SecurityConfig
from streamrl.config.sections import SglangConfig as SglangConfig
from streamrl.config.sections import SimulationConfig as SimulationConfig
from streamrl.config.sections import StalenessConfig as StalenessConfig
from streamrl.config.sections import TaskConfig as TaskConfig
from streamrl.config.sections import VllmConfig as VllmConfig
from streamrl.config.sections import WeightsConfig as WeightsConfig
from streamrl.config.sections import WorkflowConfig as WorkflowConfig
from streamrl.config.sections import by_task as by_task
from streamrl.config.suggestions import suggestions
from streamrl.config.trainer import AlgorithmConfig as AlgorithmConfig
from streamrl.config.trainer import CriticConfig as CriticConfig
from streamrl.config.trainer import LayoutConfig as LayoutConfig
from streamrl.config.trainer import OptimizerConfig as OptimizerConfig
from streamrl.config.trainer import ReferenceConfig as ReferenceConfig
from streamrl.config.trainer import RewardModelConfig as RewardModelConfig
from streamrl.config.trainer import TrainerConfig as TrainerConfig
from streamrl.errors import ConfigError

FEW = 8
"""Most keys of a section that are listed if no key resembles an unknown one."""
RENAMED = {
    "evaluation.end_timeout_seconds": "limits.evaluation_seconds",
    "evaluation.max_new_tokens": "evaluation.sampling.max_new_tokens",
    "evaluation.temperature": "evaluation.sampling.temperature",
    "evaluation.top_p": "evaluation.sampling.top_p",
    "evaluation.every_epochs": 'evaluation.every = "2 epochs"',
    "evaluation.every_seconds": 'evaluation.every = "15m"',
    "evaluation.every_steps": 'evaluation.every = "100 steps"',
    "gserver.host": "run.host, and the option --advertise of `streamrl gserver`",
    "gserver.max_restarts": "restarts.number",
    "gserver.restart_delay_seconds": "restarts.delay_seconds",
    "gserver.restart_window_seconds": "restarts.window_seconds",
    "gserver.sglang.start_timeout_seconds": "limits.start_seconds",
    "gserver.stuck_seconds": "limits.stuck_seconds",
    "launch.restarts": "restarts.number",
    "manager.drain_seconds": "limits.drain_seconds",
    "manager.heartbeat_seconds": "limits.heartbeat_seconds",
    "manager.host": "run.host",
    "manager.join_timeout_seconds": "limits.start_seconds",
    "manager.lease_seconds": "limits.silence_seconds",
    "manager.port": "run.port",
    "rollout.drop_uniform_groups": 'rollout.filter; "contrast" has the effect of true',
    "algorithm.objective": "algorithm.loss, which also takes module:function",
    "metrics.tensorboard": 'metrics.sinks; ["tensorboard"], the default, is what true was, [] what false was',
    "rollout.agent.host": "run.host, and the option --advertise of `streamrl rollout`",
    "rollout.agent.on_error": 'rollout.on_failed_sibling, whose "reject" and "zero" hold for reward functions, too',
    "rollout.request_timeout_seconds": "limits.request_seconds",
    "rollout.restart_delay_seconds": "restarts.delay_seconds",
    "rollout.restart_window_seconds": "restarts.window_seconds",
    "rollout.restarts": "restarts.number",
    "rollout.reward.on_error": 'rollout.on_failed_sibling, whose "reject", "zero" and "stop" hold for agents, too',
    "security.authority": "ca.crt in security.tls_dir",
    "security.certificate": "tls.crt in security.tls_dir",
    "security.private_key": "tls.key in security.tls_dir",
    "stream.host": "run.host, and the option --advertise of `streamrl trainer`",
    "stream.max_group_mb": "limits.group_mb",
    "trainer.offload_optimizer": 'trainer.offload = ["optimizer"]',
    "trainer.restart_delay_seconds": "restarts.delay_seconds",
    "trainer.restart_window_seconds": "restarts.window_seconds",
    "trainer.restarts": "restarts.number",
    "trainer.save_every_epochs": 'trainer.save_every = "2 epochs"',
    "trainer.save_every_seconds": 'trainer.save_every = "15m"',
    "trainer.save_every_steps": 'trainer.save_every = "100 steps"',
    "trainer.save_on_stop_seconds": "limits.save_seconds",
    "trainer.step_timeout_seconds": "limits.call_seconds",
    "trainer.wait_warning_seconds": "limits.silence_seconds",
    "weights.host": "run.host, and the option --advertise of `streamrl trainer`",
    "weights.timeout_seconds": "limits.update_seconds",
}
"""Keys of earlier versions, and their replacements."""
REMOVED = {
    "gserver.max_queued": "it is always 4096",
    "gserver.prefill_tokens": "it is always 4096",
    "gserver.simulated_int8": "real servers quantise weights by flags",
    "run.stop_window": "it is always 5",
    "stream.capacity_groups": "it is 4096, or more if a batch may wait for more",
    "stream.resend_seconds": "lost messages are detected without a time limit",
    "weights.delta": "weights are always sent whole",
    "weights.dir": "weights are in the run's folder",
    "weights.senders": "the first model worker sends all weights, since each gserver's link limits a broadcast",
}
"""Keys of earlier versions without a replacement, and the reason."""


CONFIG_FILE = "config.toml"
"""The configuration of a run, in its folder."""


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Return the configuration in the TOML file `path`, or in the run's folder `path`, with overrides such as
    `trainer.lr=1e-5` applied.

    Raises `ConfigError` if the file cannot be read, or if values do not fit; the error names their keys.
    """
    tree = read_tree(path)
    for override in overrides:
        _apply(tree, override)
    return from_dict(tree, where=str(path))


def read_tree(path: str | Path) -> dict[str, Any]:
    """Return the content of the TOML file `path`, or of the one in the run's folder `path`; raises `ConfigError` if it
    cannot be read."""
    file = Path(path)
    file = file / CONFIG_FILE if file.is_dir() else file
    try:
        return tomllib.loads(file.read_text())
    except OSError as error:
        remedy = example_files.hint(file) if isinstance(error, FileNotFoundError) else ""
        raise ConfigError(f"{file}: cannot be read ({error.strerror}){remedy or '; is the path right?'}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: not valid TOML: {error}") from error


def overridden(config: Config, overrides: Sequence[str], *, where: str = "configuration") -> Config:
    """Return a copy of `config` with overrides such as `trainer.lr=1e-5`; raises `ConfigError` like `load`."""
    tree = _without_none(msgspec.to_builtins(config))
    for override in overrides:
        _apply(tree, override)
    return from_dict(tree, where=where)


def from_dict(tree: dict[str, Any], *, where: str = "configuration") -> Config:
    """Return the configuration given as plain dictionaries; raises `ConfigError` if a key or a value is wrong."""
    _refuse_table(tree, Config, path="", where=where)
    config = msgspec.convert(tree, Config)
    problems = found_in(config)
    if problems:
        raise ConfigError(f"{where}: " + "; ".join(problems))
    return _at_home(config)


def as_known(tree: Mapping[str, Any]) -> Config | None:
    """Return a configuration that another version wrote, without keys that this version does not have; None if it is
    empty, or its values do not fit."""
    try:
        return msgspec.convert(_known(tree, Config), Config) if tree else None
    except msgspec.ValidationError:
        return None


def to_toml(config: Config, *, only_changed: bool = False) -> str:
    """Return the configuration as TOML, without keys that have no value; `only_changed` leaves out defaults, too."""
    tree = msgspec.to_builtins(config)
    if only_changed:
        tree = _difference(tree, msgspec.to_builtins(Config()))
    return msgspec.toml.encode(_without_none(tree)).decode()


def _at_home(config: Config) -> Config:
    """Return `config` with `~` in its folders expanded to the user's home: no shell expands it in run.dir=~/runs."""
    replace, expanded = msgspec.structs.replace, os.path.expanduser
    run, security = config.run, config.security
    begin = None if run.resume_from is None else expanded(run.resume_from)
    return replace(
        config,
        run=replace(run, dir=expanded(run.dir), resume_from=begin),
        security=replace(security, tls_dir=expanded(security.tls_dir)),
    )


def _apply(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"override {override!r}: write it as section.key=value, for example trainer.lr=1e-5")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word is a string
    assign(tree, key.strip(), value)


def assign(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set `key`, such as `trainer.lr`, in `tree`; raises `ConfigError` if a part of it is no section.

    A table of a list, such as [[tasks]], is identified by its `name`: `tasks.math.weight`.
    """
    *sections, name = key.split(".")
    table: Any = tree
    for depth, section in enumerate(sections, 1):
        table = table.setdefault(section, {})
        path = ".".join(sections[:depth])
        if isinstance(table, list):
            table = {each.get("name"): each for each in table if isinstance(each, dict)}
            if (found := [*sections[depth:], name][0]) not in table or depth == len(sections):
                names = ", ".join(map(str, table)) or "none"
                raise ConfigError(
                    f"{key} = {value!r}: {path} is a list of tables ({names}), and {found} is none of them"
                )
        if not isinstance(table, dict):
            raise ConfigError(f"{key} = {value!r}: {path} is no section: its value is {table!r}")
    table[name] = value


def _refuse_unknown(tree: Any, section: type[Section], *, path: str, where: str) -> None:
    """Raise `ConfigError` for a scalar in place of the section `path`, and for an unknown key, with the known keys that
    may be meant."""
    if not isinstance(tree, dict):
        raise _no_section(tree, section, path=path, where=where)
    fields = fields_of(section)
    for name, value in tree.items():
        key = f"{path}.{name}" if path else name
        if name not in fields:
            _refuse_former(key, value, where=where)
            raise ConfigError(f"{where}: unknown key {_unknown(key, value, siblings=list(fields))}")
        if value is not None:
            _refuse_table(value, fields[name].type, path=key, where=where)


def _refuse_table(value: Any, kind: Any, *, path: str, where: str) -> None:
    """Raise `ConfigError` if `value` does not fit the table `path` of type `kind`; other types fit."""
    nested = section_of(kind)
    if get_origin(kind) is list and nested:
        if not isinstance(value, list):
            raise ConfigError(f"{where}: {path} is a list of tables; write [[{path}]] before each")
        for number, table in enumerate(value):
            name = table.get("name", number) if isinstance(table, dict) else number
            _refuse_table(table, nested, path=f"{path}.{name}", where=where)
    elif get_origin(kind) is dict:  # names as keys
        if not isinstance(value, dict):
            raise _no_section(value, None, path=path, where=where)
        for entry, table in value.items() if nested else ():
            _refuse_table(table, get_args(kind)[1], path=f"{path}.{entry}", where=where)
    elif nested:
        _refuse_unknown(value, nested, path=path, where=where)
        try:
            msgspec.convert(value, nested)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{where}: {_readable(error, nested, path=path)}") from error


def _refuse_former(key: str, value: Any, *, where: str) -> None:
    """Raise `ConfigError` if `key`, or a key of the table `value`, is a key of an earlier version."""
    if key in RENAMED:
        raise ConfigError(f"{where}: {key} is now {RENAMED[key]}")
    if key in REMOVED:
        raise ConfigError(f"{where}: {key} was removed ({REMOVED[key]}): delete it")
    for name, inner in value.items() if isinstance(value, dict) else ():
        _refuse_former(f"{key}.{name}", inner, where=where)


def _no_section(value: Any, section: type[Section] | None, *, path: str, where: str) -> ConfigError:
    """Return the error for `value` in place of the section `path`, with the first key that takes it, or all keys.

    `section`: None if the keys are free.
    """
    fields = [] if section is None else msgspec.structs.fields(section)
    remedy = f"its keys are {', '.join(field.name for field in fields)}" if fields else f"set its keys: {path}.NAME=..."
    for field in fields:
        with suppress(msgspec.ValidationError):
            msgspec.convert(value, field.type)
            remedy = f"set its keys, for example {path}.{field.name}={value}"
            break
    return ConfigError(f"{where}: {path} = {value!r}: {path} is a section; {remedy}")


def _unknown(key: str, value: Any, *, siblings: Sequence[str]) -> str:
    """Return `key` with suggestions; for a section that resembles no known key, with those for its first key."""
    near = suggestions(key, Config, siblings=siblings)
    if not near and isinstance(value, dict) and value:
        name, inner = next(iter(value.items()))
        return _unknown(f"{key}.{name}", inner, siblings=())
    if near:
        return f"{key}; did you mean {' or '.join(near)}?"
    if 0 < len(siblings) <= FEW:
        return f"{key}; known: {', '.join(siblings)}"
    return f"{key}; no key resembles it (without it, streamrl check CONFIG --all shows all keys)"


def _known(tree: Mapping[str, Any], section: type[msgspec.Struct]) -> dict[str, Any]:
    """Return `tree` without keys that `section` and its subsections do not have."""
    found = {}
    for field in msgspec.structs.fields(section):
        if field.name not in tree:
            continue
        value = tree[field.name]
        nested = None if get_origin(field.type) is dict else section_of(field.type)
        if nested is not None and isinstance(value, Mapping):
            value = _known(value, nested)
        found[field.name] = value
    return found


def _readable(error: msgspec.ValidationError, section: type[Section], *, path: str) -> str:
    """Return the error in the table `path`, which is a `section`, with the key and its possible values."""
    message, _, key = str(error).partition(" - at `$.")
    key = key.rstrip("`")
    hint = ""
    if key.endswith("every"):
        hint = f"; write it as {EVERY_FORM}"
    elif choices := _choices(key, section):
        hint = f"; choose one of {', '.join(map(repr, choices))}"
    return f"{'.'.join(filter(None, (path, key)))}: {message}{hint}"


def _choices(key: str, section: type[Section]) -> tuple[Any, ...]:
    """Return the possible values of `key`, or of an entry of a list such as `key[0]`, if these are a few words."""
    name, in_list, _ = key.partition("[")
    kind = get_type_hints(section).get(name)
    if in_list:
        kind = (get_args(kind) or (None,))[-1]
    return get_args(kind) if get_origin(kind) is Literal else ()


def _difference(tree: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of `tree` that differ from `defaults` or are not in it."""
    found = {}
    for key, value in tree.items():
        default = defaults.get(key)
        if value == default:
            continue
        found[key] = _difference(value, default) if isinstance(value, dict) and isinstance(default, dict) else value
    return found


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [_without_none(each) for each in value]
    return value
