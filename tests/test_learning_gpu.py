"""`benchmarks/learning_gpu.py`, tried with a model of no size; its example and its reward."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from streamrl.rollout.reward.functions import Response
from streamrl.rollout.tasks import last_number
from streamrl.types import Prompt

ROOT = Path(__file__).parents[1]


def test_a_run_on_files_of_gsm8k_gives_a_row_for_each_evaluation(tmp_path: Path) -> None:
    for name in ("train", "test"):
        rows = [{"question": f"What is {i} + 1?", "answer": f"It is one more.\n#### {i + 1}"} for i in range(4)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [ROOT / "benchmarks" / "learning_gpu.py", "--dry-run", "--etas", "1", "--gsm8k", tmp_path]
    done = subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((ROOT / "benchmarks" / "results" / "latest" / "learning_gpu-dry-run.json").read_text())
    assert [(row["max_staleness"], row["step"], row["prompts"]) for row in found["rows"]] == [
        (1, 0, 2), (1, 1, 2), (1, 2, 2)
    ]  # fmt: skip
    assert all(0 <= row["accuracy"] <= 1 for row in found["rows"])


@pytest.mark.parametrize(
    ("text", "answer", "reward"),
    [
        ("5 + 3 = 8, so it is 1,288.", "first 2,\n#### 1288", 1.0),
        ("The answer is -4.0", "-4", 1.0),
        ("8 or 9", "8", 0.0),
        ("none", "8", 0.0),
        ("8", "unknown", 0.0),
    ],
)
def test_the_last_numbers_are_compared(text: str, answer: str, reward: float) -> None:
    prompt = Prompt(seq=0, index=0, epoch=0, messages=[], input_ids=[], answer=answer, metadata={})
    assert last_number(Response(text=text, finish_reason="length", output_tokens=9), prompt) == reward
