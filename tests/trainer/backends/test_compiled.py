"""Compiled decoder layers compute what they compute otherwise; on a CPU here, with the compiler for CPUs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from streamrl.trainer.backends.compiled import compile_layers
from streamrl.trainer.backends.torch import TorchModel
from tests.trainer.backends.reference import KINDS, loss_of, make_groups, make_spec, micro_batches

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles with g++")


@needs_compiler
@pytest.mark.extra
@pytest.mark.timeout(900)
def test_compiled_layers_make_the_same_steps(tmp_path: Path) -> None:
    torch.manual_seed(0)
    KINDS["qwen3"]().save_pretrained(tmp_path)
    plain, compiled = TorchModel(make_spec(tmp_path)), TorchModel(make_spec(tmp_path, compiled=True))
    for step in range(3):  # of other lengths each
        groups = make_groups(step, count=2 + step)
        micros = micro_batches(groups)
        for expected, found in zip(plain.infer(micros), compiled.infer(micros), strict=True):
            torch.testing.assert_close(found.values, expected.values, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(found.entropy, expected.entropy, rtol=1e-4, atol=1e-4)
        norms = []
        for model in (plain, compiled):
            model.accumulate(micros, loss_of(groups, micros))
            norms.append(model.update(lambda: None).grad_norm)
        assert norms[1] == pytest.approx(norms[0], rel=1e-4)
    for (name, expected), (_, found) in zip(plain.gather_weights(), compiled.gather_weights(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4, msg=name)


def test_layers_that_cannot_be_compiled_compute_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    layer = nn.Linear(2, 2)

    def trial() -> None:
        raise RuntimeError("backend='inductor' raised:\nno headers of Python")

    assert not compile_layers([layer], trial)
    assert "no headers of Python" in caplog.text
    assert layer(torch.ones(1, 2)).shape == (1, 2)
    assert "forward" not in vars(layer)
