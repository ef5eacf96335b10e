"""docs/one-gpu.md: its program writes the data; `streamrl check` accepts its configuration with a stand-in model."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.rollout.characters import make_tokenizer

ROOT = Path(__file__).parents[1]
BLOCKS = dict(re.findall(r"^```(python|toml)\n(.*?)^```$", (ROOT / "docs" / "one-gpu.md").read_text(), re.M | re.S))
ROWS = [{"question": f"How much is {n} times 1000?", "answer": f"{n} * 1000.\n#### {n},000"} for n in range(1, 33)]


def save_model(folder: Path) -> None:
    tokenizer = make_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def test_the_recipe_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", lambda name, part, *, split: datasets.Dataset.from_list(ROWS))
    Path("gsm8k.py").write_text(BLOCKS["python"])
    runpy.run_path("gsm8k.py")
    assert json.loads(Path("train.jsonl").read_text().splitlines()[0])["answer"] == "1000"

    Path("gsm8k.toml").write_text(BLOCKS["toml"])
    save_model(Path("models/Qwen3-0.6B"))
    sglang = Path(".venv-sglang/bin/python")
    sglang.parent.mkdir(parents=True)
    sglang.write_text("#!/bin/sh\necho 0.5.23\n")
    sglang.chmod(0o755)
    done = subprocess.run(
        (sys.executable, "-m", "streamrl", "check", "gsm8k.toml"),
        env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SGLang 0.5.23" in done.stdout
    assert "gsm8k.toml is valid" in done.stdout
