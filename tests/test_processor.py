"""Processors that report AMX and break on it. The report and the break are simulated here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from streamrl import processor
from streamrl.config import Config
from streamrl.device import inference_dtype, resolve_dtype
from streamrl.errors import ModelError
from streamrl.launch import processes
from streamrl.processor import MKL_LIMIT, ONEDNN_LIMIT, WITHOUT_AMX, avoid_broken_instructions
from tests.e2e.harness import calling

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
AMX = "processor\t: 0\nmodel name\t: Some Xeon\ncpu MHz\t\t: 2100.0\nflags\t\t: fpu avx512_bf16 amx_tile amx_bf16 fsrm"
NO_AMX = AMX.replace("amx_tile ", "")


class Tried:
    """Trials with a chosen end, and the environment that results."""

    def __init__(self, folder: Path) -> None:
        self.cache = folder / "cache"
        self._log = folder / "trials"

    def __call__(self, end: str, *, cpuinfo: str = AMX, **environment: str) -> dict[str, str]:
        """`end`: of the trial, as a statement in Python."""
        script = f"import os, signal, sys, time\nopen({str(self._log)!r}, 'a').write('x')\n{end}"
        avoid_broken_instructions(
            environment=environment, cpuinfo=cpuinfo, trial=(sys.executable, "-c", script), cache=self.cache
        )
        return environment

    @property
    def trials(self) -> int:
        return len(self._log.read_text()) if self._log.exists() else 0


FINE, SIGILL, WRONG = "pass", "os.kill(os.getpid(), signal.SIGILL)", f"sys.exit({processor.WRONG_NUMBERS})"


@pytest.fixture
def tried(tmp_path: Path) -> Tried:
    return Tried(tmp_path)


def test_a_processor_without_amx_is_not_tried(tried: Tried) -> None:
    assert tried(SIGILL, cpuinfo=NO_AMX) == tried(SIGILL, cpuinfo="") == {}
    assert tried.trials == 0


def test_a_processor_with_amx_that_works_is_tried_once(tried: Tried) -> None:
    assert tried(FINE) == tried(SIGILL) == tried(SIGILL, cpuinfo=AMX.replace("2100", "3500")) == {}
    assert tried.trials == 1


@pytest.mark.parametrize(("end", "named"), [(SIGILL, "by SIGILL"), (WRONG, "wrong numbers")])
def test_broken_amx_is_not_used(tried: Tried, caplog: pytest.LogCaptureFixture, end: str, named: str) -> None:
    for _ in range(2):
        assert tried(end, HOME="/x") == {**WITHOUT_AMX, "HOME": "/x"}
        assert named in caplog.records[-1].message
    assert tried.trials == 1
    assert tried(FINE, cpuinfo=AMX.replace("Some", "Another")) == {}


@pytest.mark.parametrize(
    "end", ["os.kill(os.getpid(), signal.SIGKILL)", "raise SystemExit('no torch here')", "time.sleep(600)"]
)
def test_a_trial_that_fails_for_another_reason_is_repeated(
    tried: Tried, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr(processor, "TRIAL_SECONDS", 0.5 if "sleep" in end else 60.0)
    assert tried(end) == WITHOUT_AMX
    assert tried.trials == 1
    monkeypatch.undo()
    assert tried(FINE) == {}


def test_a_result_that_cannot_be_kept_is_found_again(tried: Tried, caplog: pytest.LogCaptureFixture) -> None:
    tried.cache.write_text("a file")
    assert tried(SIGILL) == tried(SIGILL) == WITHOUT_AMX
    assert "STREAMRL_CACHE" in caplog.text
    assert tried.trials == 2


@pytest.mark.parametrize("name", [ONEDNN_LIMIT, MKL_LIMIT])
def test_a_limit_of_the_user_stays(tried: Tried, name: str) -> None:
    assert tried(SIGILL, **{name: "AVX2"}) == {name: "AVX2"}
    assert tried.trials == 0


def test_without_bfloat16_instructions_auto_is_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: True)
    monkeypatch.setenv(ONEDNN_LIMIT, WITHOUT_AMX[ONEDNN_LIMIT])
    assert resolve_dtype("auto", CPU) == torch.bfloat16
    monkeypatch.setenv(ONEDNN_LIMIT, "AVX512_CORE")
    assert resolve_dtype("auto", CPU) == torch.float32
    assert inference_dtype(resolve_dtype("bfloat16", CPU), CPU) == torch.float32


def test_the_trial_itself() -> None:
    """It survives here; products that are wrong by more than rounding end it."""
    run_python("from streamrl import processor; processor.try_products()")
    script = (
        "import torch\nfrom streamrl import processor\nright = torch.matmul\n"
        "torch.matmul = lambda a, b: right(a, b) * (1.1 if a.dtype == torch.bfloat16 else 1)\n"
        "processor.SECONDS = 9.0\nprocessor.try_products()"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == processor.WRONG_NUMBERS, done.stderr


def test_the_limit_reaches_a_library_that_is_loaded_already(tmp_path: Path) -> None:
    """It is read at the first product, so torch may be imported first."""
    script = (
        "import torch\nfrom tests.test_processor import AMX, Path\n"
        "from streamrl import processor\n"
        f"processor.WITHOUT_AMX = {{{ONEDNN_LIMIT!r}: 'SSE41'}}\n"  # less than any processor's here
        "processor.avoid_broken_instructions(\n"
        f"    cpuinfo=AMX, trial=['sh', '-c', 'kill -ILL $$'], cache=Path({str(tmp_path)!r})\n"
        ")\n"
        "torch.ops.mkldnn._linear_pointwise(torch.ones(64, 64), torch.ones(64, 64), None, 'none', [], '')"
    )
    (isa,) = [line for line in run_python(script, ONEDNN_VERBOSE="1").splitlines() if ",isa:" in line]
    assert isa.endswith("SSE4.1")


def says_its_limit(config: Config, **others: object) -> Path:
    raise ModelError(f"computes with {os.environ.get(ONEDNN_LIMIT)}")


def use_component() -> None:
    processes.COMPONENTS.update(dict.fromkeys(("checkpoint", "model_worker"), "tests.test_processor:says_its_limit"))


@pytest.mark.parametrize(
    "command", ["checkpoint CONFIG", "model-worker CONFIG --manager http://127.0.0.1:1 --index 0", "run CONFIG"]
)
def test_every_process_of_a_run_goes_through_the_door(tmp_path: Path, tried: Tried, command: str) -> None:
    """Whichever way it is started; `run` does it for the processes that it starts, which do not see the simulated
    report."""
    config = tmp_path / "config.toml"
    config.write_text(f'[run]\ndir = "{tmp_path}/runs"\n')
    tried(SIGILL)
    words = command.replace("CONFIG", str(config)).split()
    script = (
        "import sys\nfrom streamrl import cli, processor\n"
        "from tests.test_processor import AMX\n"
        "processor._cpuinfo = lambda: AMX\n"
        f"sys.argv = {['streamrl', *words]!r}\n"
        "cli.main()"
    )
    # with a secret, a process does not wait for the manager here
    variables = {"STREAMRL_CACHE": str(tried.cache), "STREAMRL_SECRET": "a-secret-of-this-test"}
    said = run_python(script, failing=True, **variables, **calling(use_component, tmp_path))
    assert "AMX, but products in bfloat16 end a process by SIGILL" in said
    assert "computes with AVX512_CORE_BF16" in said
    assert tried.trials == 1


def run_python(script: str, *, failing: bool = False, **environment: str) -> str:
    without = {name: value for name, value in os.environ.items() if name not in (ONEDNN_LIMIT, MKL_LIMIT)}
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={**without, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode != 0) == failing, done.stderr
    return done.stdout + done.stderr
