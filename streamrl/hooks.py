"""Hooks: objects of the user in places that the configuration names, each as `module:name`.

A function receives its subject as positional arguments. Keyword-only parameters receive the arguments that the
configuration has for it (`algorithm.loss_args`) and, by name, the settings of its section (`clip_low`). Built-in
algorithms are called in the same way.
"""

from __future__ import annotations

import functools
import gc
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

from streamrl.errors import ConfigError


@contextmanager
def without_garbage_collection(*, stays: bool = True) -> Iterator[None]:
    """Disable the collection of cyclic garbage in the block. `stays`: exclude existing objects from later collections.

    The modules of torch and transformers are millions of objects that are never freed. Examining them again and again
    during their import takes a third of the import time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if stays:
            gc.freeze()
        if was_on:
            gc.enable()


EXTRAS = {"openai": "agents", "reasoning_gym": "rewards", "math_verify": "rewards", "datasets": "datasets"}
"""Modules that examples and user code import, and the extra of streamrl that installs each."""


def load_object(spec: str, *, key: str) -> Any:
    """Import and return the object that `spec` (`module:name`) names; `key` is the configuration key for errors.

    Modules in the working directory are always found, however the process was started. All functions and classes of the
    user, and components, that a configuration names are loaded here.
    Raises `ConfigError` if the module or the name does not exist, or the module imports a package of an extra that is
    not installed; any other error of the module itself passes through.
    """
    module_name, colon, name = spec.partition(":")
    if not (module_name and colon and name):
        raise ConfigError(f"{key} = {spec!r}: write it as module:name, for example my_rewards:score")
    working_directory = os.getcwd()
    if working_directory not in sys.path and "" not in sys.path:
        sys.path.insert(0, working_directory)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name in EXTRAS:
            extra = f'pip install "streamrl[{EXTRAS[error.name]}]"'
            raise ConfigError(f"{key} = {spec!r}: it imports {error.name}, which is not installed: {extra}") from error
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module exists, but one of its imports does not
        raise ConfigError(
            f"{key} = {spec!r}: there is no module {module_name}; is it installed, or in {working_directory}?"
        ) from error
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            public = ", ".join(sorted(n for n in vars(module) if not n.startswith("_")))
            raise ConfigError(f"{key} = {spec!r}: {module_name} has no {name}; it has {public or 'nothing public'}")
        found = getattr(found, part)
    return found


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
