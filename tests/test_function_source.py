"""Functions of scripts and notebooks as modules, and functions that cannot be sent."""

from __future__ import annotations

import functools
import importlib
import linecache
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from streamrl.errors import ConfigError
from streamrl.function_source import spec_of
from tests import test_ledger

SCRIPT = '''
import json as j
import math
import re
from dataclasses import dataclass
from streamrl.types import NO_VERSION, Prompt

WORDS = {"one": 1, "two": 2}
NUMBER = re.compile(r"\\d+", re.IGNORECASE)
handle = open("/dev/null")
UNUSED = object()


@dataclass
class Weight:
    """A class with a decorator."""

    value: float = 1.5

    @property
    def doubled(self) -> float:
        return helper(self.value)


def helper(value):
    return 2 * value


def reward(response: "Response", prompt: Prompt) -> float:
    found = NUMBER.search(response)
    return Weight().doubled + WORDS["two"] + math.floor(float(found[0])) + len(j.dumps([NO_VERSION])) + used_later()


def used_later():
    return 100


def uses_a_file(response, prompt):
    return handle.read()


def outer():
    limit = 3

    def inner(response, prompt):
        return limit

    return inner


def outer_without_locals():
    def inner(response, prompt):
        return helper(4)

    return inner


class Workflow:
    async def run(self, prompt, session):
        return helper(prompt)


shortest = lambda response, prompt: 0.0
'''


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module `__main__` of a notebook: its source is in no file, as that of a cell."""
    name = "<cell 1>"
    linecache.cache[name] = (len(SCRIPT), None, SCRIPT.splitlines(keepends=True), name)
    module = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    exec(compile(SCRIPT, name, "exec"), module.__dict__)
    yield module
    module.handle.close()
    del linecache.cache[name]


def loaded(spec: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The object that a process of the run gets."""
    monkeypatch.syspath_prepend(str(folder))
    module, _, name = spec.partition(":")
    return getattr(importlib.import_module(module), name)


def test_a_function_of_a_module_is_sent_by_name(tmp_path: Path) -> None:
    found = spec_of(test_ledger.Ledger, key="k", folder=tmp_path)
    assert found == "streamrl.ledger:Ledger"
    assert list(tmp_path.iterdir()) == []


def test_a_function_of_a_script_brings_all_that_it_uses(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of(script.reward, key="rollout.reward.function", folder=tmp_path)
    sent = loaded(spec, tmp_path, monkeypatch)
    assert sent is not script.reward
    assert sent("a7", None) == script.reward("a7", None) == 3.0 + 2 + 7 + 4 + 100
    (file,) = tmp_path.glob("*.py")
    assert "UNUSED" not in file.read_text()
    assert spec_of(script.reward, key="another", folder=tmp_path) == spec  # a resumed run has the same name


def test_classes_and_functions_within_functions(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workflow = loaded(spec_of(script.Workflow, key="k", folder=tmp_path), tmp_path, monkeypatch)
    assert hasattr(workflow(), "run")
    inner = loaded(spec_of(script.outer_without_locals(), key="k", folder=tmp_path), tmp_path, monkeypatch)
    assert inner(None, None) == 8


@pytest.mark.parametrize(
    ("choose", "said"),
    [
        (lambda script: script.uses_a_file, "uses_a_file uses handle, whose value (TextIOWrapper) has no source"),
        (lambda script: script.outer(), "uses limit, a local variable of the function around it"),
        (lambda script: script.shortest, "a lambda has no source of its own"),
        (lambda script: functools.partial(script.reward, 1), "a partial cannot be sent"),
        (lambda script: script.Workflow().run, "a method cannot be sent"),
        (lambda script: eval("lambda response, prompt: 1.0", script.__dict__), "is not available"),
    ],
)
def test_what_cannot_be_sent_is_refused_with_the_reason(
    choose: Any, said: str, script: ModuleType, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=rf"^rollout\.reward\.function: .*{re.escape(said)}"):
        spec_of(choose(script), key="rollout.reward.function", folder=tmp_path)
    assert list(tmp_path.iterdir()) == []
