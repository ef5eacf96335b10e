"""The folder of a run: the next free name, and the run that `--resume` chooses."""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from streamrl import config as configuration
from streamrl.config import Config, from_dict, to_toml
from streamrl.errors import ConfigError
from streamrl.launch.run_folders import chosen_run, claim_run_dir, other_runs, resume_words, resumed
from streamrl.records import progress
from streamrl.records.evaluation import EVALUATIONS_FILE
from streamrl.records.progress import Progress
from tests.evaluations import make_report


def asked(folder: Path, **sections: Any) -> Config:
    run = {"dir": str(folder), "name": "add", "total_train_steps": 8} | sections.pop("run", {})
    return from_dict({"run": run, **sections})


def started(config: Config, *, at: float, version: int = 0) -> Config:
    """A new run of `config` that was started at this time, with a checkpoint if it has made steps."""
    claimed = claim_run_dir(config)
    settings = claimed.run_dir / "config.toml"
    settings.write_text(to_toml(claimed))
    os.utime(settings, (at, at))
    if version:
        folder = claimed.run_dir / "checkpoints" / f"step-{version:06d}"
        folder.mkdir(parents=True)
        progress.write(folder, Progress(version, [(0, version)], [], prompts=progress.prompts_digest(claimed)))
    return claimed


def chosen(config: Config, *overrides: str) -> str:
    """The folder that `--resume` with `overrides` resumes, and its checkpoint."""
    found = resumed(chosen_run(configuration.overridden(config, overrides), overrides), overrides)
    checkpoint = Path(found.run.resume_from or "")
    assert checkpoint.parent.parent == found.run_dir.absolute()
    return f"{found.run.name}/{checkpoint.name}"


def test_the_run_that_was_started_last_is_resumed_and_the_others_are_named(tmp_path: Path) -> None:
    config = asked(tmp_path)
    for number, at in enumerate((100.0, 300.0, 200.0)):
        started(config, at=at, version=3 + number)
    started(asked(tmp_path, run={"name": "add-on"}), at=900.0, version=2)
    (tmp_path / "add-7").touch()
    assert chosen(config) == "add-2/step-000004"
    assert other_runs(chosen_run(config), config) == (
        "older runs of this configuration, which can be resumed with run.name=add-3, run.name=add"
    )
    os.utime(tmp_path / "add" / "config.toml", (400.0, 400.0))  # it was resumed
    assert chosen(config) == "add/step-000003"


def test_a_run_that_is_named_is_resumed_though_there_is_a_newer_one(tmp_path: Path) -> None:
    config = asked(tmp_path)
    first = started(config, at=100.0, version=3)
    started(config, at=200.0, version=4)
    assert chosen(config, "run.name=add") == "add/step-000003"
    assert chosen(config, "run.name=add-2") == "add-2/step-000004"
    assert chosen(config, f"run.resume_from={first.run_dir}/checkpoints/step-000003") == "add/step-000003"
    words = shlex.split(resume_words(["streamrl", "run"], Path("a b.toml"), ["trainer.lr=1", "run.name=x"], tmp_path))
    assert words == ["streamrl", "run", "a b.toml", "trainer.lr=1", f"run.name={tmp_path.name}", "--resume"]


def test_an_older_run_never_takes_the_place_of_one_without_a_checkpoint(tmp_path: Path) -> None:
    config = asked(tmp_path)
    with pytest.raises(ConfigError, match=r"add has no checkpoint to resume from.*start without --resume$"):
        chosen(config)
    started(config, at=100.0, version=3)
    started(config, at=200.0)
    with pytest.raises(ConfigError, match=r"add-2, the newest run .*, has no checkpoint: .* with run\.name=add$"):
        chosen(config)


def test_runs_that_were_started_at_the_same_time_have_to_be_told_apart(tmp_path: Path) -> None:
    config = asked(tmp_path)
    started(config, at=200.0, version=3)
    started(config, at=200.5, version=4)
    with pytest.raises(ConfigError, match=r"at the same time: choose .* with run\.name=add-2 or run\.name=add$"):
        chosen(config)
    assert chosen(config, "run.name=add") == "add/step-000003"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"run": {"seed": 7}}, "^run.seed is 7, and the run began with 0: run.resume_from: the checkpoint"),
        ({"data": {"args": {"n": 3}}}, r"^data.args is {'n': 3}, and the run began with {}: run.resume_from: "),
    ],
)
def test_settings_that_change_the_prompts_are_named_first(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    started(asked(tmp_path), at=100.0, version=3)
    with pytest.raises(ConfigError, match=said):
        chosen(asked(tmp_path, **changed))
    assert chosen(asked(tmp_path, trainer={"lr": 1.0})) == "add/step-000003"


def test_a_run_that_is_done_is_resumed_only_if_its_last_evaluation_is_missing(tmp_path: Path) -> None:
    """It was cut off: the last checkpoint is written before it ends."""
    config = asked(tmp_path, evaluation={"at_end": True})
    run_dir = started(config, at=100.0, version=8).run_dir
    with pytest.raises(ConfigError, match="is done: it made 8 steps"):
        chosen(asked(tmp_path))
    assert chosen(config) == "add/step-000008"
    (run_dir / EVALUATIONS_FILE).write_bytes(msgspec.json.encode(make_report(8)) + b"\n")
    with pytest.raises(ConfigError, match="is done: it made 8 steps"):
        chosen(config)


def test_a_run_goes_back_to_the_checkpoint_that_is_named_with_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = asked(Path("runs"))
    for version in (2, 4):
        started(config, at=100.0, version=version)
    checkpoints = Path("runs/add/checkpoints")
    Path("runs/add-2/checkpoints/step-000004").rename(checkpoints / "step-000004")
    shutil.rmtree("runs/add-2")
    older = f"run.resume_from={checkpoints / 'step-000002'}"
    assert chosen(config, older) == "add/step-000002"
    of_file = configuration.overridden(config, [older])
    assert chosen(of_file) == "add/step-000004", "as config.toml has it from last time"
    with pytest.raises(ConfigError, match=r"step-000003 is no whole checkpoint of runs/add, which has step-000002"):
        chosen(config, f"run.resume_from={checkpoints / 'step-000003'}")


def test_run_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"run\.dir"):
        claim_run_dir(asked(tmp_path / "file"))
    (tmp_path / "runs").symlink_to(tmp_path / "a disk that is not mounted")
    with pytest.raises(ConfigError, match=r"run\.dir: .*runs/add cannot be made"):
        claim_run_dir(asked(tmp_path / "runs"))
