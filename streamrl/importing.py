"""Importing: what a configuration names, and what is large without what makes that slow."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from streamrl.errors import ConfigError


@contextmanager
def without_garbage_collection(*, stays: bool = True) -> Iterator[None]:
    """Do not look for cyclic garbage meanwhile. `stays`: what was made is not looked through later either.

    The modules of torch and transformers are millions of objects that stay. To look through them again and again
    as they come into being is a third of the time that their import takes.
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
"""Modules that examples and users' code import, and the extra of streamrl that installs each."""


def load_object(spec: str, *, key: str) -> Any:
    """Import what `spec` (`module:name`) names; `key` is the configuration key for error messages.

    Modules in the working directory are found too, whichever way the process was started. Whatever names a function or
    class of the user's, or a component, is loaded here.
    Raises `ConfigError` when the module or the name does not exist, or the module imports a package of an extra that is
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
            raise  # the module exists, and something that it imports does not
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
