"""Where pools that are started again by hand or by a cluster begin: at the run's latest checkpoint, or anew."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from streamrl import config as configuration
from streamrl.config import Config
from streamrl.records import progress
from streamrl.trainer.replay import recording


def from_latest(config_file: Path, overrides: Sequence[str]) -> list[str]:
    """Return `overrides` with the one that has the run go on from its latest checkpoint, if there is one."""
    found = progress.checkpoints(configuration.load(config_file, overrides).run_dir)
    return [*overrides, f"run.resume_from={found[-1].absolute()}"] if found else list(overrides)


def begin_anew(config: Config) -> None:
    """Take the records of a run that has no checkpoint back to nothing: all its steps are about to be made again."""
    if config.run.resume_from is None and config.run_dir.exists():
        progress.rewind(config.run_dir, policy_version=0)
        recording.cut(config.run_dir, policy_version=0)
