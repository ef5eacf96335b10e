"""Hooks: functions of the user in places that the configuration names, each as `module:function`.

A hook receives its subject as positional arguments. Keyword-only parameters receive the arguments that the
configuration has for the hook (`algorithm.loss_args`) and, by name, the settings of its section (`clip_low`).
Built-in algorithms are called in the same way.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from streamrl.errors import ConfigError
from streamrl.importing import load_object


def is_hook(name: str) -> bool:
    """Whether `name` is a `module:function` of the user, not the name of a built-in function."""
    return ":" in name


def load_hook(spec: str, *, key: str, args: Mapping[str, Any], settings: msgspec.Struct | None = None) -> Any:
    """Return the function that `spec` (`module:function`) names, with its keyword-only parameters bound as in `bind`.

    Raises `ConfigError`, which names `key`, if there is no such function, or its parameters do not fit.
    """
    function = load_object(spec, key=key)
    if not callable(function):
        raise ConfigError(f"{key} = {spec!r}: {type(function).__name__} is no function")
    return bind(function, key=key, args=args, settings=settings)


def bind(
    function: Callable[..., Any], *, key: str, args: Mapping[str, Any], settings: msgspec.Struct | None = None
) -> Callable[..., Any]:
    """Return `function` with its keyword-only parameters bound: to `args`, else to the fields of `settings` with their
    names, else to their defaults.

    Raises `ConfigError`, which names `key`, for an argument that the function does not take, or one that it lacks.
    """
    parameters = inspect.signature(function).parameters.values()
    own = {p.name: p for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    if not takes_any and (unknown := sorted(args.keys() - own.keys())):
        known = ", ".join(own) or "none"
        raise ConfigError(f"{key}_args.{unknown[0]}: the function has no keyword-only parameter of this name ({known})")
    values = dict(args)
    for name, parameter in own.items():
        if name in values:
            continue
        if settings is not None and name in settings.__struct_fields__:
            values[name] = getattr(settings, name)
        elif parameter.default is inspect.Parameter.empty:
            raise ConfigError(f"{key}: its keyword-only parameter {name} has no value; set {key}_args.{name}")
    return functools.wraps(function)(functools.partial(function, **values)) if values else function
