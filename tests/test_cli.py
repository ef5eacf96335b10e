"""The command line from the outside: speed of --help, what `check` shows, errors and exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest
import typer
from rich.markup import render

from streamrl import cli
from streamrl.cli_options import REMOVED
from streamrl.errors import ConfigError
from streamrl.launch.processes import COMPONENTS
from tests.e2e.preloaded import run_command
from tests.planner.runs import write_calibration
from tests.runs import write_run

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.toml"))
HEAVY = ("torch", "transformers", "matplotlib", "numpy", "aiohttp", "markdown_it", "pygments")


def streamrl(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """What `streamrl WORDS` prints; as `tests.e2e.preloaded` does it, without the time that imports take."""
    return run_command(words, folder=ROOT, environment={**os.environ, "COLUMNS": "120", **environment})


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "config.toml"
    file.write_text(f'[run]\nname = "trial"\ndir = "{tmp_path}/runs"\n[gserver]\ncount = 2\nthreads = 3\n')
    return file


def several(*commands: Sequence[str], then: str = "", **environment: str) -> str:
    """What commands print that all have to succeed, in one process, and then the value of the expression `then`."""
    script = (
        "import sys\nfrom streamrl import cli\n"
        f"for words in {[list(words) for words in commands]!r}:\n"
        "    sys.argv = ['streamrl', *words]\n"
        "    try:\n        cli.main()\n    except SystemExit as end:\n        assert end.code in (None, 0), words\n"
        f"print({then})"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "120", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_help_loads_nothing_heavy() -> None:
    said = several(["--help"], then=f"[name for name in {HEAVY!r} if name in sys.modules]")
    *text, loaded = said.splitlines()
    assert loaded == "[]"
    commands = "run controller gserver rollout trainer check plan status page report replay"
    for command in commands.split():
        assert any(command in line for line in text)
    assert not any("model-worker" in line or "replay-rank" in line for line in text)


def test_help_says_what_is_written() -> None:
    """In every help text: a bracketed word that is not escaped would be taken for markup, and left out."""
    commands = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
    shown = several(*([name, "--help"] for name in commands), ["--help"], COLUMNS="400", TERMINAL_WIDTH="400")
    for command in commands.values():
        texts = [command.help, *(getattr(param, "help", None) for param in command.params if not param.hidden)]
        for text in filter(None, texts):
            written = text.replace("\\[", "[")
            assert render(text).plain == written
            assert written in shown, command.name


def test_only_what_computes_loads_torch() -> None:
    """A run is started, coordinated, watched and shown without it: torch takes seconds and 200 MB in each process."""
    roles = set(COMPONENTS) - {"checkpoint", "gserver", "model_worker", "replay_rank"}
    modules = ["streamrl.launch.local", "streamrl.launch.pool", "streamrl.report.summary"]
    modules += sorted(COMPONENTS[role].partition(":")[0] for role in roles)
    script = f"import sys, {', '.join(modules)}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False", modules


def test_check_shows_what_differs_and_what_would_be_started(config: Path) -> None:
    words = ("check", str(config), "trainer.lr=0.5", "rollout.workers=4")
    done = streamrl(*words, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    toml, _, rest = done.stdout.partition("┏")
    shown = tomllib.loads(toml)
    assert shown["trainer"] == {"lr": 0.5}
    assert shown["gserver"] == {"count": 2, "threads": 3}
    assert set(shown) == {"run", "gserver", "trainer", "rollout"}
    rows = {cells[0]: cells[1:] for line in rest.splitlines() if (cells := [c.strip() for c in line.split("│")[1:-1]])}
    assert rows["gserver"] == ["2", "3", "cpu"]
    assert rows["rollout"][:2] == ["4", "1"]
    assert set(rows) == {"controller", "gserver", "model_worker", "rollout"}
    assert "is valid" in rest
    everything = tomllib.loads(streamrl(*words, "--all").stdout.partition("┏")[0])
    assert everything["trainer"]["lr"] == 0.5
    assert everything["staleness"] == {
        "max_staleness": 4,
        "over_age": "mask",
        "most_drift": 0.1,
        "lr_by_contrast": True,
    }


def test_check_tries_what_a_run_would(config: Path) -> None:
    done = streamrl("check", str(config), "rollout.reward.function=streamrl.rollout.tasks:nope", "run.host=8.8.8.8")
    assert done.returncode == 1
    assert "is valid" not in done.stdout
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert ['run.host = "8.8.8.8"' in errors[0], "has no nope" in errors[1]] == [True, True]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["check", "nowhere.toml"], 2, "nowhere.toml: cannot be read"),
        (["check", "CONFIG", "trainer.lrr=1"], 2, "did you mean trainer.lr?"),
        (["run", "CONFIG", "trainer"], 2, "section.key=value"),
        (["report", "nowhere"], 2, "nowhere: no such folder"),
        (["page", "docs"], 2, "docs is no run, and has none in it"),
        (["replay", "docs"], 1, "docs: this run has no record"),
        (["status", "--manager", "http://127.0.0.1:1"], 1, "cannot be reached at http://127.0.0.1:1"),
        (["status", "--manager", "http://fd00::1:7000"], 2, "write it as http://HOST:PORT"),
        (["status", "--manager", "http://0.0.0.0:1", "--config", "OPEN"], 1, "cannot be reached at http://0.0.0.0:1"),
        (["gserver", "CONFIG"], 2, "--manager"),
        (["plan", "CONFIG", "--from", "nowhere"], 2, "nowhere: no such folder"),
        (["plan"], 2, "takes a CONFIG, or --model-shape"),
        (["plan", "--model-shape", "70B", "--gpus", "8"], 2, "Llama-3-70B does not fit on 8 GPUs of 80 GiB"),
    ],
)
def test_errors(config: Path, tmp_path: Path, words: list[str], code: int, said: str) -> None:
    unencrypted = tmp_path / "unencrypted.toml"
    unencrypted.write_text('[security]\nencryption = "off"\n')
    files = {"CONFIG": str(config), "OPEN": str(unencrypted)}
    done = streamrl(*[files.get(word, word) for word in words])
    assert done.returncode == code
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_run_that_cannot_begin_leaves_no_folder_and_reports_nothing(config: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("0123456789abcdef0123456789abcdef")
    (tmp_path / "secret").chmod(0o644)
    done = streamrl("run", str(config), f"security.secret_file={tmp_path}/secret")
    assert done.returncode == 2
    assert "is open to others (mode 0644)" in done.stderr
    assert "no training step was finished" not in done.stdout
    assert not (tmp_path / "runs" / "trial").exists()


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        (["manager", "CONFIG", "--port", "7000"], REMOVED["manager"]),
        (["master", "--manager", "http://h:1"], REMOVED["master"]),
        (["evaluator", "CONFIG", "--manager", "http://h:1"], "`streamrl rollout CONFIG` starts these"),
    ],
)
def test_a_command_of_before_names_the_one_that_replaces_it(words: list[str], instead: str) -> None:
    done = streamrl(*words)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: there is no `streamrl {words[0]}` any more: ")
    assert done.stderr.endswith(f"{instead}\n")


def test_the_controller_needs_the_packages_of_the_sinks(config: Path, tmp_path: Path) -> None:
    words = ["controller", str(config), 'metrics.sinks=["wandb"]']
    script = (
        "import sys\nfrom importlib import util\nfrom streamrl.cli import main\n"
        "util.find_spec = lambda name: None\n"
        f"sys.argv = {['streamrl', *words]!r}\nmain()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2, done.stderr
    assert "metrics.sinks: the package wandb is not installed" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_bad_log_level(config: Path) -> None:
    done = streamrl("run", str(config), STREAMRL_LOG="LOUD")
    assert done.returncode == 2
    assert "STREAMRL_LOG=LOUD" in done.stderr


def test_report_command(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "trial", steps=3)
    done = streamrl("report", str(folder))
    assert done.returncode == 0, done.stderr
    assert "run trial: finished" in done.stdout
    assert (folder / "plots" / "timeline.png").stat().st_size > 5000
    assert (folder / "overview.html").stat().st_size > 50_000


def test_plan_command(config: Path, tmp_path: Path) -> None:
    folder = write_calibration(tmp_path / "calibrated")
    words = ("plan", str(config), "trainer.batch_groups=4", "rollout.group_size=2", "--from", str(folder))
    shown = streamrl(*words, COLUMNS="200")
    assert shown.returncode == 0, shown.stderr
    assert "calibrated from calibrated: 10 steps in 20 s" in shown.stdout
    assert "steps/h" in shown.stdout
    found = json.loads(streamrl(*words, "--json").stdout)
    assert found["present"]["settings"] == {}
    assert found["present"]["prediction"]["steps_per_hour"] > 0
    assert found["change"] == [f"{key}={value}" for key, value in found["recommended"]["settings"].items()]


def test_plan_of_a_model_shape() -> None:
    words = ("plan", "--model-shape", "70B", "--gpus", "64", "--gpu-memory", "141", "--tensor-parallel", "8")
    shown = streamrl(*words)
    assert shown.returncode == 0, shown.stderr
    assert "Llama-3-70B: 70.6 billion weights; 64 GPUs of 141 GiB" in shown.stdout
    found = json.loads(streamrl(*words, "--json").stdout)
    assert {one["layout"]["tensor"] for one in found["divisions"]} == {8}
    more = streamrl("plan", "--model-shape", "70B", "--gpus", "16", "--lora-rank", "16", "--reference")
    assert "70.6 billion weights, adapters of rank 16, a reference; 16 GPUs" in " ".join(more.stdout.split())
    assert found["divisions"][0]["update"]["weights"] == 2 * found["shape"]["parameters"]


def test_graph_command() -> None:
    settings = ["algorithm.kl_coef=0.1", "algorithm.minibatches=2"]
    done = streamrl("graph", str(EXAMPLES[0]), *settings)
    assert done.returncode == 0, done.stderr
    order = [done.stdout.index(f"─ {name}  ") for name in ("ref_inf", "actor_inf", "actor_train")]
    assert order == sorted(order)
    assert "needs proximal_logprobs  from actor_inf" in done.stdout


def test_an_example_passes_every_check() -> None:
    assert "is valid" in several(["check", str(ROOT / "examples" / "copy_scratch.toml")])


def test_a_folder_of_runs_is_no_run_to_report_on(tmp_path: Path) -> None:
    runs = write_run(tmp_path / "runs" / "addition", steps=1).parent
    with pytest.raises(ConfigError, match="runs is no run"):
        cli.report(runs)
    assert [path.name for path in runs.iterdir()] == ["addition"]
