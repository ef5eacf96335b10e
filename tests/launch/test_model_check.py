"""`streamrl check --model`: the table in docs/models.md is right, and a model that is computed wrong is found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.models import COLUMNS, PAGE, check_family, row_of, save_family
from streamrl.cli import app
from streamrl.launch.model_check import check_model
from streamrl.trainer.backends import attention

TESTED = (
    "deepseek_v3",
    "falcon_h1",
    "gemma2",
    "gemma3_text",
    "glm4",
    "gpt_oss",
    "granite",
    "mistral",
    "olmo2",
    "phi3",
    "qwen2_moe",
    "qwen3_next",
)


def verdicts(row: str) -> list[str]:
    return [cell.strip() for cell in row.split("|")[2 : 2 + len(COLUMNS)]]


@pytest.mark.parametrize("family", TESTED)
def test_each_family_is_as_in_the_table(family: str) -> None:
    row = row_of(family, check_family(family))
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    [documented] = [line for line in lines if family in line.split("|")[1].strip().split(", ")]
    assert verdicts(row) == verdicts(documented)
    assert "fails" not in row


def test_wrong_attention_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_family(tmp_path / "model", "granite")
    plain = attention.TreeMask.attend

    def scaled(self: Any, query: torch.Tensor, *inputs: torch.Tensor, **settings: Any) -> torch.Tensor:
        return plain(self, 1.01 * query, *inputs, **settings)

    monkeypatch.setattr(attention.TreeMask, "attend", scaled)
    found = {result.part: result for result in check_model(folder)}
    assert found["packed rows"].verdict == "falls back"
    assert found["log-probabilities"].verdict == "pass"


def test_the_command_exits_with_1_for_a_model_that_fails(tmp_path: Path) -> None:
    folder = save_family(tmp_path / "model", "llama")
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": {"quant_method": "fp8"}}))
    result = CliRunner().invoke(app, ["check", "--model", str(folder)])
    assert result.exit_code == 1
    assert "quantized" in result.output
    assert CliRunner().invoke(app, ["check"]).exit_code == 2
