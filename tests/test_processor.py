"""What is done about a processor that claims instructions which end a process. The claim and the end are made here."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from streamrl import processor
from streamrl.config import Config
from streamrl.device import inference_dtype, resolve_dtype
from streamrl.errors import ModelError
from streamrl.processor import LIMITS, MKL_LIMIT, ONEDNN_LIMIT, TRIAL, avoid_broken_instructions

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
AMX = "processor\t: 0\nmodel name\t: Some Xeon\ncpu MHz\t\t: 2100.0\nflags\t\t: fpu avx512_bf16 amx_tile amx_bf16 fsrm"
NO_AMX = AMX.replace("amx_tile ", "")


class Tried:
    """Trials that end as told, and the environment that follows from them."""

    def __init__(self, folder: Path) -> None:
        self.cache = folder / "cache"
        self._log = folder / "trials"

    def __call__(self, *ends: str, cpuinfo: str = AMX, **environment: str) -> dict[str, str]:
        """`ends`: of the trial under each of `LIMITS`, as a statement in Python."""
        by_limit = {limits.get(ONEDNN_LIMIT): end for limits, end in zip(LIMITS, ends, strict=False)}
        script = (
            "import os, signal, sys, time\n"
            f"limit = os.environ.get('{ONEDNN_LIMIT}')\n"
            f"print(limit, file=open({str(self._log)!r}, 'a'))\n"
            "print('a product', flush=True)\n"
            f"exec({by_limit!r}[limit])"
        )
        avoid_broken_instructions(
            environment=environment, cpuinfo=cpuinfo, trial=(sys.executable, "-c", script), cache=self.cache
        )
        return environment

    @property
    def trials(self) -> list[str]:
        """The limit of each."""
        return self._log.read_text().split() if self._log.exists() else []


FINE, SIGILL, WRONG = "pass", "os.kill(os.getpid(), signal.SIGILL)", f"sys.exit({processor.WRONG_NUMBERS})"


@pytest.fixture
def tried(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Tried:
    caplog.set_level(logging.INFO, logger="streamrl")
    return Tried(tmp_path)


def test_a_processor_that_claims_no_amx_is_not_tried(tried: Tried) -> None:
    assert tried(SIGILL, SIGILL, cpuinfo=NO_AMX) == tried(SIGILL, cpuinfo="") == {}
    assert tried.trials == []


def test_a_processor_that_does_what_it_claims_is_tried_once(tried: Tried, caplog: pytest.LogCaptureFixture) -> None:
    assert tried(FINE) == tried(SIGILL) == tried(SIGILL, cpuinfo=AMX.replace("2100", "3500")) == {}
    assert tried.trials == ["None"]
    assert [record.message[:6] for record in caplog.records] == ["trying"]


@pytest.mark.parametrize(("end", "named"), [(SIGILL, "ends a process by SIGILL"), (WRONG, "gives wrong numbers")])
def test_without_amx_where_that_works(tried: Tried, caplog: pytest.LogCaptureFixture, end: str, named: str) -> None:
    for _ in range(2):
        assert tried(end, FINE, HOME="/x") == {**LIMITS[1], "HOME": "/x"}
        said = caplog.records[-1]
        assert said.levelname == "WARNING"
        assert f"claims AMX, but a product {named}; so torch computes with" in said.message
        assert f"{ONEDNN_LIMIT}=AVX512_CORE_BF16 {MKL_LIMIT}=AVX512_E3" in said.message
    assert tried.trials == ["None", "AVX512_CORE_BF16"]
    assert tried(FINE, cpuinfo=AMX.replace("Some", "Another")) == {}


def test_float32_where_bfloat16_works_in_no_way(
    tried: Tried, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: True)
    monkeypatch.delenv(ONEDNN_LIMIT, raising=False)
    assert resolve_dtype("auto", CPU) == torch.bfloat16
    found = tried(SIGILL, WRONG)
    assert found == LIMITS[2]
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    assert "ends a process by SIGILL; without AMX a product gives wrong numbers" in caplog.text
    assert 'dtype = "auto" is float32' in caplog.text
    assert resolve_dtype("auto", CPU) == torch.float32
    assert inference_dtype(resolve_dtype("bfloat16", CPU), CPU) == torch.float32


@pytest.mark.parametrize(
    ("end", "named"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "exit code -9 during a product: it said nothing"),
        ("raise SystemExit('no torch here')", "exit code 1 during a product: no torch here"),
    ],
)
def test_what_says_nothing_of_the_processor_is_not_kept(
    tried: Tried, caplog: pytest.LogCaptureFixture, end: str, named: str
) -> None:
    assert tried(end, FINE) == LIMITS[1]
    assert named in caplog.text
    assert tried(FINE) == {}
    assert tried.trials == ["None", "None"]


def test_a_trial_that_hangs_ends(tried: Tried, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "TRIAL_SECONDS", 0.5)
    assert tried("time.sleep(600)") == LIMITS[1]


@pytest.mark.parametrize("name", [ONEDNN_LIMIT, MKL_LIMIT])
def test_who_has_set_a_limit_has_decided(tried: Tried, name: str) -> None:
    assert tried(SIGILL, **{name: "AVX2"}) == {name: "AVX2"}
    assert tried.trials == []


def test_a_finding_that_cannot_be_kept_or_read_is_found_again(tried: Tried, caplog: pytest.LogCaptureFixture) -> None:
    tried.cache.write_text("a file")
    assert tried(SIGILL, FINE) == LIMITS[1]
    assert "STREAMRL_CACHE" in caplog.text
    tried.cache.unlink()
    assert tried(SIGILL, FINE) == LIMITS[1]
    (kept,) = tried.cache.glob("*.json")
    kept.write_text(kept.read_text()[:20])
    assert tried(SIGILL, FINE) == LIMITS[1]
    assert tried.trials == ["None", "AVX512_CORE_BF16"] * 3


def test_several_at_once_try_once(tried: Tried) -> None:
    with ThreadPoolExecutor() as threads:
        found = list(threads.map(lambda _: tried("time.sleep(0.3); " + SIGILL, FINE), range(3)))
    assert found == [LIMITS[1]] * 3
    assert tried.trials == ["None", "AVX512_CORE_BF16"]


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_real_instruction_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "trial.c").write_text("int main(void) { __builtin_trap(); }")
    subprocess.run(["cc", "-o", "trial", "trial.c"], cwd=tmp_path, check=True)
    environment: dict[str, str] = {}
    avoid_broken_instructions(
        environment=environment, cpuinfo=AMX, trial=[str(tmp_path / "trial")], cache=tmp_path / "cache"
    )
    assert environment == LIMITS[2]
    (kept,) = (tmp_path / "cache").glob("*.json")
    assert "the import of torch ends a process by SIG" in kept.read_text()


def test_the_trial_itself() -> None:
    """Here it survives; and products that are wrong by more than rounding end it."""
    done = subprocess.run([*TRIAL], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "computing in threads that share a core"
    script = "from tests import test_processor as t; t.processor._repeat([t.wrong_product()], 9.0)"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == processor.WRONG_NUMBERS, done.stderr


def wrong_product() -> processor.Product:
    return processor.Product("one", lambda: torch.tensor([1.0]), (), torch.tensor([1.1]))


def test_the_limit_reaches_a_library_that_is_loaded_already(tmp_path: Path) -> None:
    """It is read at the first product, so that whoever imports torch first loses nothing."""
    limits = ({}, {ONEDNN_LIMIT: "AVX2"}, {ONEDNN_LIMIT: "SSE41"})  # the last is less than any processor's here
    script = (
        "import torch\nfrom tests.test_processor import AMX, Path\n"
        "from streamrl import processor\n"
        f"processor.LIMITS = {limits}\n"
        "processor.avoid_broken_instructions(\n"
        f"    cpuinfo=AMX, trial=['sh', '-c', 'kill -ILL $$'], cache=Path({str(tmp_path)!r})\n"
        ")\n"
        "torch.ops.mkldnn._linear_pointwise(torch.ones(64, 64), torch.ones(64, 64), None, 'none', [], '')"
    )
    (isa,) = [line for line in run_python(script, ONEDNN_VERBOSE="1").splitlines() if ",isa:" in line]
    assert isa.endswith("SSE4.1")


def says_its_limit(config: Config, **others: object) -> Path:
    raise ModelError(f"computes with {os.environ.get(ONEDNN_LIMIT)}")


@pytest.mark.parametrize(
    "command",
    [
        "checkpoint CONFIG COMPONENT",
        "model-worker CONFIG --manager http://127.0.0.1:1 --model-dir nowhere COMPONENT",
        "run CONFIG",
    ],
)
def test_every_process_of_a_run_goes_through_the_door(tmp_path: Path, tried: Tried, command: str) -> None:
    """Whichever way it is started; `run` does it for those that it starts, which know nothing of the claim here."""
    config = tmp_path / "config.toml"
    config.write_text(f'[run]\ndir = "{tmp_path}/runs"\n')
    tried(SIGILL, FINE)
    component = "--component tests.test_processor:says_its_limit"
    words = command.replace("CONFIG", str(config)).replace("COMPONENT", component).split()
    script = (
        "import sys\nfrom functools import partial\n"
        "from streamrl import cli, processor\nfrom streamrl.launch import local\n"
        "from tests.test_processor import AMX\n"
        "processor._cpuinfo = lambda: AMX\n"
        "components = {'checkpoint': 'tests.test_processor:says_its_limit'}\n"
        "local.run_locally = partial(local.run_locally, components=components)\n"
        f"sys.argv = {['streamrl', *words]!r}\n"
        "cli.main()"
    )
    # with a secret, a process does not wait for the manager here
    said = run_python(script, STREAMRL_CACHE=str(tried.cache), STREAMRL_SECRET="a-secret-of-this-test", failing=True)
    assert "claims AMX, but a product ends a process by SIGILL" in said
    assert "computes with AVX512_CORE_BF16" in said
    assert len(tried.trials) == 2


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
