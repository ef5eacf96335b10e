"""The benchmarks import, the small ones run, and the contenders of the trainer's compute the same loss and gradient."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from streamrl.records.metrics import StepReport
from tests.planner.test_simulation import costs_of, settings_of

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
TINY = {"path": "scratch", "scratch": {"hidden_size": 32, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 16}}


@pytest.fixture(autouse=True)
def _as_scripts_see_it(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    known = set(sys.modules)
    yield
    for path in BENCHMARKS.glob("*.py"):
        if path.stem not in known:
            sys.modules.pop(path.stem, None)


@pytest.mark.parametrize("name", sorted(path.stem for path in BENCHMARKS.glob("*.py") if path.stem != "__init__"))
def test_module_imports(name):
    importlib.import_module(name)


def test_scripts_find_their_imports_in_another_folder(tmp_path):
    """Some import from tests, which pytest has imported already."""
    scripts = {path: path.read_text() for path in BENCHMARKS.glob("*.py")}
    found = [path for path, text in scripts.items() if "\nfrom tests" in text and "__main__" in text]
    assert found
    elsewhere = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for path in found:
        command = [sys.executable, path, "--help"]
        done = subprocess.run(command, cwd=tmp_path, env=elsewhere, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize("agents", [False, True])
def test_contenders_of_the_trainer_agree(monkeypatch, tmp_path, agents):
    bench = importlib.import_module("bench_trainer")
    monkeypatch.setenv("STREAMRL_CACHE", str(tmp_path))
    monkeypatch.setattr(bench, "importable", lambda module: False)  # neither TRL nor a process group here
    rows = bench.measure(bench.Case("tiny", TINY, 1 + (not agents), agents), rounds=1)
    calls = ["streamrl, calls"] if agents else []
    assert [row["contender"] for row in rows] == ["streamrl", "streamrl, separate", *calls, "padded", "unpadded"]
    assert all(row["tokens_per_second"] > 0 for row in rows)
    trees, separate, *by_call = (row["tokens_computed"] for row in rows[: 2 + len(calls)])
    assert all(trees < separate < tokens for tokens in [*by_call, np.inf])


@pytest.mark.parametrize("arguments", [["bench_routing"], ["bench_rewards", "--quick"]], ids=" ".join)
def test_a_small_benchmark_runs(monkeypatch, tmp_path, capsys, arguments):
    name = arguments[0]
    bench = importlib.import_module(name)
    common = importlib.import_module("common")
    monkeypatch.setattr(common, "LATEST", tmp_path)
    monkeypatch.setattr(sys, "argv", arguments)
    bench.main()
    assert common.read_results(tmp_path / f"{name}.json")["rows"]
    assert f"{name}.json" in capsys.readouterr().out


STEP_SECONDS = 25.0
"""Of a training step, which is longer than generation takes: staleness builds up in the first steps."""


@pytest.mark.parametrize(("first", "last", "age"), [(1, 3, 1.5), (2, 4, 2.0), (5, 12, 2.0)])
def test_a_stretch_of_a_run_is_compared_with_the_same_steps_of_the_plan(first, last, age):
    """The steps have groups of 11 tokens, all of one version, at most two versions old."""
    bench = importlib.import_module("bench_plan")
    metrics = {"groups": 1.0, "tokens_trained": 11.0, "tokens_masked": 0.0}
    steps = [
        StepReport(step=step, time=step * STEP_SECONDS, metrics=metrics, token_ages={min(step - 1, 2): 11})
        for step in range(first, last + 1)
    ]
    stretch = bench.Stretch("", False, steps)
    predicted = stretch.predicted(settings_of(eta=2), costs_of(train=STEP_SECONDS))
    actual = stretch.figures()
    assert actual == {
        "groups_per_second": pytest.approx(1 / STEP_SECONDS),
        "tokens_per_second": pytest.approx(11 / STEP_SECONDS),
        "mean_token_age": age,
        "masked_share": 0.0,
    }
    for name, value in actual.items():
        assert predicted[name] == pytest.approx(value, abs=0.1 if name == "mean_token_age" else 1e-9), name
