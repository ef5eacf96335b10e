"""The steps of `benchmarks/gpu.py`, made on the CPU with models of no size; and what becomes of one that fails."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.processes import lives

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    known = set(sys.modules)
    yield importlib.import_module("gpu")
    for path in BENCHMARKS.glob("*.py"):
        if path.stem not in known:
            sys.modules.pop(path.stem, None)


def place(gpu, folder: Path):
    return gpu.Place("cpu", True, folder, "")


def test_models_are_made_trained_and_served(gpu, tmp_path, monkeypatch):
    here = place(gpu, tmp_path)
    made = gpu.models(here)
    assert [row["model"] for row in made] == [gpu.BILLION, gpu.SEVEN]
    assert all("note" not in row for row in made)
    for name in (gpu.BILLION, gpu.SEVEN):
        trained = gpu.training(here, name, "torch")
        assert [row["checkpointing"] for row in trained] == [False, True]
        assert all(row["tokens_per_second"] > 0 and row["tflops"] > 0 for row in trained)
        served = gpu.generation(here, name)
        assert [(row["cuda_graphs"], row.get("overlap")) for row in served] == [
            (False, None),
            (True, False),
            (True, True),
        ]
        assert all(row["tokens_per_second"] > 0 for row in served)


def test_batches_of_a_run_are_trained_on_and_profiled(gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "latest", lambda file: tmp_path / file)
    here = place(gpu, tmp_path)
    gpu.models(here)
    rows = gpu.training_of_runs(here, gpu.BILLION)
    ways = [(row["compiled"], row["batch"]) for row in rows]
    assert ways == [(compiled, batch) for compiled in (False, True) for batch in ("run", "full rows")]
    ragged, full = rows[2:]
    most = gpu.MICRO_BATCHES * gpu.ROWS * 64
    assert most - gpu.MICRO_BATCHES * gpu.ROWS < full["computed_tokens"] <= most, "equal first tokens count once"
    assert full["micro_batches"] == gpu.MICRO_BATCHES
    assert ragged["micro_batches"] == 1
    assert ragged["predicted_tokens"] < ragged["computed_tokens"] < 256
    for row in (ragged, full):
        assert 0 < row["busy_share"] <= 1
        assert "aten::mm" in (tmp_path / row["profile"]).read_text()


def test_time_in_which_kernels_overlap_counts_once(gpu):
    events = [{"ts": 10, "dur": 5}, {"ts": 0, "dur": 4}, {"ts": 2, "dur": 1}, {"ts": 12, "dur": 6}]
    assert gpu.covered(events) == 4 + 8


def test_a_step_is_a_process_of_its_own_that_answers(gpu, tmp_path):
    step = next(step for step in gpu.STEPS if step.name == "models")
    found = gpu.run_step(step, place(gpu, tmp_path), seconds=200)
    assert [row["ok"] for row in found] == [True, True]
    assert (tmp_path / gpu.SEVEN / "config.json").exists()


def test_what_is_missing_is_skipped_by_name(gpu, tmp_path):
    with pytest.raises(gpu.Skipped, match=r"there is no model of the shape Qwen2\.5-7B"):
        gpu.training(place(gpu, tmp_path), gpu.SEVEN, "torch")
    answer = tmp_path / "answer.json"
    gpu.answer_step(
        gpu.Step("x", 1, measure=gpu.of_shape(gpu.training, gpu.SEVEN, "torch")), place(gpu, tmp_path), answer
    )
    assert "Qwen2.5-7B" in json.loads(answer.read_text())["skipped"]


def test_ways_of_weights_are_skipped_one_by_one(gpu, tmp_path):
    """What the machine lacks for one of them takes none of the others along."""
    (tmp_path / gpu.BILLION).mkdir()
    (tmp_path / gpu.BILLION / "config.json").write_text("{}")
    answer = tmp_path / "answer.json"
    ways = {step.name: step for step in gpu.STEPS if step.name.startswith("publication")}
    assert len(ways) == 3
    for name in ("publication 1B, CUDA IPC", "publication 1B, NCCL"):
        gpu.answer_step(ways[name], place(gpu, tmp_path), answer)
        assert json.loads(answer.read_text())["skipped"].endswith("needs a CUDA device")


def test_a_step_that_hangs_is_killed_with_what_it_started(gpu, tmp_path, monkeypatch):
    pids = tmp_path / "pids"
    script = (
        "import os, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        "print('it hangs', flush=True)\ntime.sleep(600)\n"
    )
    monkeypatch.setattr(gpu, "ENDING_SECONDS", 0.5)
    monkeypatch.setattr(gpu, "command", lambda *_: [sys.executable, "-c", script])
    (row,) = gpu.run_step(gpu.Step("x", 1), place(gpu, tmp_path), seconds=5)
    assert row["ok"] is False
    assert row["note"] == "not through after 5 s"
    assert row["log"] == "it hangs"
    for pid in map(int, pids.read_text().split()):
        until = time.monotonic() + 30  # what is killed ends a little later
        while lives(pid):
            assert time.monotonic() < until
            time.sleep(0.02)


def test_a_step_that_fails_says_its_last_words(gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "command", lambda *_: [sys.executable, "-c", "raise SystemExit('no such kernel')"])
    (row,) = gpu.run_step(gpu.Step("x", 1), place(gpu, tmp_path), seconds=60)
    assert row["ok"] is False
    assert (row["note"], row["log"]) == ("ended with exit code 1", "no such kernel")
    assert gpu.told(row).startswith("x: FAILED")


@pytest.mark.parametrize(
    ("code", "said", "ok"),
    [
        (0, "====== 3 passed in 1.2s ======", True),
        (0, "SKIPPED [2] a.py:1: this machine has no CUDA device\n== 2 skipped in 0.1s ==", None),
        (1, "E  assert 1 == 2\n== 1 failed, 2 passed in 3s ==", False),
        (2, "ImportError while loading conftest", False),
    ],
)
def test_what_tests_said_is_told(gpu, code, said, ok):
    row = gpu.test_result(code, said)
    assert row["ok"] is ok
    assert ("no CUDA device" in row["note"]) == ("CUDA" in said)


def test_without_a_device_it_says_what_to_do():
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "gpu.py")], capture_output=True, text=True, env={**os.environ}, timeout=120
    )
    assert done.returncode == 1
    assert "--dry-run" in done.stderr
