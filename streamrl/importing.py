"""Importing of objects that a configuration names, and of large packages without garbage collection."""

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
