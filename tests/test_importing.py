"""What a configuration names is found in the working directory, whoever loads it, however the process was started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from streamrl.errors import ConfigError
from streamrl.hooks import load_object

ROOT = Path(__file__).parents[1]
USERS = """
def rows(index, seed): return {"prompt": "1+1="}
def score(response, prompt): return 1.0
def graph(config): raise RuntimeError("the user's graph")
def advantages(groups, inputs): raise RuntimeError("the user's advantages")
class Talk:
    async def run(self, prompt, session): ...
"""
LOADERS = {
    "data": "from streamrl.rollout.data import python_rows\npython_rows('mine:rows', size=1, seed=0, args={})[0]",
    "reward": "from streamrl.rollout.reward.functions import DataOrigin, load_reward\n"
    "load_reward('mine:score', {}, DataOrigin('', '', {}, 1, 0))(None, None)",
    "workflow": "from streamrl.config import WorkflowConfig\n"
    "from streamrl.rollout.workflows import load_workflow\n"
    "load_workflow(WorkflowConfig(name='mine:Talk'))",
    "graph": "from streamrl.config import from_dict\nfrom streamrl.trainer.graph import graph_of\n"
    "graph_of(from_dict({'trainer': {'graph': 'mine:graph'}}))",
    "function": "from streamrl.trainer.worker.computation import call_users_function\n"
    "from streamrl.trainer.graph import MFC\n"
    "call_users_function(MFC('a', 'actor', 'function', frozenset(), frozenset(), function='mine:advantages'), [], {})",
}


@pytest.mark.parametrize("kind", LOADERS)
def test_users_code_is_found_in_the_working_directory(tmp_path: Path, kind: str) -> None:
    (tmp_path / "mine.py").write_text(USERS)
    script = f"import sys\nassert '' not in sys.path and {str(tmp_path)!r} not in sys.path\n{LOADERS[kind]}"
    done = subprocess.run(
        [sys.executable, "-P", "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 or "RuntimeError: the user's" in done.stderr, done.stderr


def test_a_package_of_an_extra_that_is_missing_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.setitem(sys.modules, "openai", None)  # it cannot be imported
    monkeypatch.delitem(sys.modules, "guess_number", raising=False)
    with pytest.raises(ConfigError, match=r"it imports openai, which is not installed: pip install \"streamrl\[agents"):
        load_object("guess_number:solve", key="rollout.agent.function")


def test_a_missing_module_of_the_users_own_is_reported_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "imports_another.py").write_text("import not_there_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="not_there_at_all"):
        load_object("imports_another:score", key="rollout.reward.function")


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("score", "write it as module:name"),
        ("absent.module:score", "there is no module absent.module; is it installed, or in "),
        ("tests.test_importing:absent", "tests.test_importing has no absent; it has .*USERS"),
    ],
)
def test_what_is_not_there_is_named_with_its_key(spec: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"rollout.reward.function = '{spec}': {said}"):
        load_object(spec, key="rollout.reward.function")
