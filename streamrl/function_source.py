"""The user's functions as `module:name`, for the processes of a run.

A function of a module is sent by name. A function of a script (`__main__`) or a notebook is sent by its source, with
the functions, imports and constants that it uses, as a module of its own in a folder of the run. Nothing is pickled,
and the script itself is not imported again. A function that can be sent in neither way is refused with the reason.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import importlib
import inspect
import linecache
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from streamrl.errors import ConfigError

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def spec_of(function: Any, *, key: str, folder: Path) -> str:
    """Return `module:name` for a function or class; its module is written into `folder` if it is sent by source.

    Raises `ConfigError`, which names `key`, if it can be sent neither by name nor by source.
    """
    if not isinstance(function, FunctionType | type) and not inspect.isbuiltin(function):
        raise ConfigError(
            f"{key}: a {type(function).__name__} cannot be sent to other processes: write a function (def) at the top "
            "level of a module, a script or a notebook"
        )
    if _is_importable(function):
        return f"{function.__module__}:{function.__qualname__}"
    module = _SourceModule(key)
    module.add_definition(function)
    text = module.text()
    name = f"sent_{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.py").write_text(text)
    return f"{name}:{function.__name__}"


class _SourceModule:
    """The source of a function, and of all that it uses from its own module."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._imports: list[str] = []
        self._parts: list[str] = []
        """Constants and definitions, each after those that it uses."""
        self._known: set[str] = set()

    def text(self) -> str:
        lines = ["from __future__ import annotations", *self._imports]
        return "\n".join(lines) + "\n\n" + "\n\n".join(self._parts) + "\n"

    def add_definition(self, thing: Any) -> None:
        """Add a function or a class; raises `ConfigError` if its source is not enough."""
        self._known.add(thing.__name__)
        node, source = self._parsed(thing)
        written = {part.name for part in ast.walk(node) if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)}
        for function in _functions_of(thing):
            if function.__name__ not in written:
                continue  # a decorator such as dataclass made it
            outer = [name for name in function.__code__.co_freevars if name != "__class__"]
            if outer:
                raise self._refusal(
                    f"{function.__qualname__} uses {outer[0]}, a local variable of the function around it: make "
                    f"{thing.__name__} a function of the top level, and pass the value as a keyword argument"
                )
        own = sys.modules[thing.__module__].__dict__ if isinstance(thing, type) else thing.__globals__
        for name in _names_in(node):
            if name in own and name not in self._known:
                self._add_global(name, own[name], user=thing.__name__)
        self._parts.append(source)

    def _parsed(self, thing: Any) -> tuple[Definition, str]:
        try:
            source = textwrap.dedent(_source_of(thing))
            node = ast.parse(source).body[0]
        except (OSError, TypeError, SyntaxError, IndexError) as error:
            raise self._refusal(
                f"the source of {thing.__qualname__} is not available ({error}): put it into a file"
            ) from error
        if not isinstance(node, Definition):
            raise self._refusal("a lambda has no source of its own: write a function (def)")
        return node, source.rstrip()

    def _add_global(self, name: str, value: Any, *, user: str) -> None:
        self._known.add(name)
        if isinstance(value, ModuleType):
            self._imports.append(f"import {value.__name__} as {name}" if value.__name__ != name else f"import {name}")
        elif isinstance(value, re.Pattern):
            self._parts.append(f"{name} = __import__('re').compile({value.pattern!r}, {value.flags})")
        elif _is_importable(value):
            outer, *inner = value.__qualname__.split(".")
            self._imports.append(f"from {value.__module__} import {outer} as {name}")
            if inner:
                self._parts.append(f"{name} = {'.'.join([name, *inner])}")
        elif isinstance(value, FunctionType | type):
            self.add_definition(value)
            if value.__name__ != name:
                self._parts.append(f"{name} = {value.__name__}")
        elif _is_literal(value):
            self._parts.append(f"{name} = {value!r}")
        else:
            raise self._refusal(
                f"{user} uses {name}, whose value ({type(value).__name__}) has no source: create it in the function, "
                "or move both into a module"
            )

    def _refusal(self, reason: str) -> ConfigError:
        return ConfigError(f"{self._key}: the function cannot be sent to other processes: {reason}")


def _is_importable(thing: Any) -> bool:
    """Whether other processes can import `thing` by its module and its name."""
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or module in ("__main__", "__mp_main__"):
        return False
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return False
    return found is thing


def _is_literal(value: Any) -> bool:
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError):
        return False


def _functions_of(thing: Any) -> list[FunctionType]:
    """Return the function itself, or the methods of a class."""
    if isinstance(thing, FunctionType):
        return [thing]
    unwrapped = (getattr(member, "__func__", getattr(member, "fget", member)) for member in vars(thing).values())
    return [member for member in unwrapped if isinstance(member, FunctionType)]


def _source_of(thing: Any) -> str:
    """Return the source of a function or a class; a notebook has a class's source only in the files of its methods."""
    if isinstance(thing, FunctionType):
        return inspect.getsource(thing)
    for method in _functions_of(thing):
        lines = linecache.getlines(method.__code__.co_filename)
        for node in ast.walk(ast.parse("".join(lines))):
            if isinstance(node, ast.ClassDef) and node.name == thing.__name__:
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                return "".join(lines[first - 1 : node.end_lineno])
    return inspect.getsource(thing)


def _names_in(node: ast.AST) -> Iterator[str]:
    """Yield the names that `node` reads, without annotations and built-in names."""
    if isinstance(node, ast.Name):
        if isinstance(node.ctx, ast.Load) and not hasattr(builtins, node.id):
            yield node.id
        return
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns") and not _is_field_of_class(node):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _names_in(child)


def _is_field_of_class(node: ast.AST) -> bool:
    """Whether the annotation of `node` may be read at run time, as those of the fields of a dataclass are."""
    return isinstance(node, ast.AnnAssign)
