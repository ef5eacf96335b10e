"""The folder of a run: a free one for a new run, or the one that `--resume` continues.

The first run of a configuration has the folder NAME in `run.dir`, later ones NAME-2, NAME-3 and so on.

During the run logs that grow too long are cut, and a full disk is reported. A log may have several writers that do not
know of the cut: its process, a library in it, and child processes. Each has the file open in append mode, so a log is
copied aside and truncated, not renamed.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from streamrl import config as configuration
from streamrl.config import Config
from streamrl.errors import ConfigError
from streamrl.records import progress, snapshots

log = logging.getLogger(__name__)

SAME_START_SECONDS = 1.0
"""Runs that began within this time of each other count as equally new."""
LAST_BYTES = 16384
"""Bytes of a file in which its last lines are found."""
EVERY_SECONDS = 10.0
MOST_LOG_BYTES = 64 * 2**20
"""Size above which a log is moved aside; it replaces the part that was moved before."""
OLDER = ".1"
PROBE = b"\0" * 65536
"""Data that is written to test whether the disk has room."""


def run_folder(asked: Config, overrides: Sequence[str], console: Console, *, resume: bool) -> Config:
    """Return the configuration with the folder of a new run, or of the run to resume and its checkpoint; show both."""

    def show(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    if not resume:
        claimed = claim_run_dir(asked)
        if claimed.run.name != asked.run.name:
            show(f"{asked.run_dir} exists already: this run's folder is {claimed.run_dir}")
        return claimed
    chosen = chosen_run(asked, overrides)
    if others := other_runs(chosen, asked):
        show(f"{chosen.run_dir} is the run to resume; {others}")
    found = resumed(chosen, overrides)
    show(f"resuming {found.run_dir} from {found.run.resume_from}")
    return found


def claim_run_dir(config: Config) -> Config:
    """Make the run's folder, with the next free number if it exists; return the configuration with its name."""
    for number in itertools.count(1):
        claimed = _named(config, config.run.name if number == 1 else f"{config.run.name}-{number}")
        try:
            claimed.run_dir.mkdir(parents=True)
        except OSError as error:
            if os.path.lexists(claimed.run_dir):
                continue
            # Also FileExistsError: a parent may be a link to a disk that is not mounted, which fails for every number.
            raise ConfigError(
                f"run.dir: {claimed.run_dir} cannot be made ({error.strerror}: {error.filename})"
            ) from error
        return claimed
    raise AssertionError("unreachable")


def runs_of(config: Config) -> list[Path]:
    """Return the folders of the runs NAME, NAME-2 and so on in `run.dir`, the most recently started one first."""
    pattern = re.compile(re.escape(config.run.name) + r"(-([2-9]|[1-9]\d+))?")
    folders = [folder for folder in config.run_dir.parent.glob("*") if pattern.fullmatch(folder.name)]
    return sorted((folder for folder in folders if folder.is_dir()), key=_began, reverse=True)


def chosen_run(config: Config, overrides: Sequence[str] = ()) -> Config:
    """Return the configuration with the name of the run that `--resume` continues.

    That is the run of `run.resume_from` or of `run.name` if `overrides`, which are in `config` already, set one of
    them, and otherwise the most recently started run. Raises `ConfigError` if two were started at the same time, or
    if the last one has no checkpoint and an older one has.
    """
    runs = runs_of(config)
    if _sets(overrides, "run.resume_from"):
        run_dir = Path(config.run.resume_from or "").resolve().parent.parent
        return next((_named(config, run.name) for run in runs if run.resolve() == run_dir), config)
    if _sets(overrides, "run.name") or not runs:
        return config
    newest, *older = runs
    if older and _began(newest) - _began(older[0]) < SAME_START_SECONDS:
        raise ConfigError(
            f"{newest} and {older[0]} were started at the same time: choose the run to resume with "
            f"run.name={newest.name} or run.name={older[0].name}"
        )
    candidates = [f"run.name={run.name}" for run in older if progress.checkpoints(run)]
    if candidates and not progress.checkpoints(newest):
        raise ConfigError(
            f"{newest}, the newest run of this configuration, has no checkpoint: start without --resume, or "
            f"resume an older run with {', '.join(candidates)}"
        )
    return _named(config, newest.name)


def other_runs(config: Config, asked: Config) -> str:
    """Return a sentence that lists the runs of the configuration `asked` without the one of `config`, or nothing."""
    names = [f"run.name={run.name}" for run in runs_of(asked) if run.name != config.run.name]
    return f"older runs of this configuration, which can be resumed with {', '.join(names)}" if names else ""


def resumed(config: Config, overrides: Sequence[str] = ()) -> Config:
    """Return the configuration of the run in `config.run_dir` with the checkpoint to resume from: its latest, or the
    `run.resume_from` of `overrides`, which are in `config` already. A `run.resume_from` of the file is ignored: in the
    config.toml of a run's folder it is the checkpoint of an earlier start. The snapshot of a run that was killed is
    copied to the disk.

    Raises `ConfigError` if there is no checkpoint, if the run was trained on other prompts, and if nothing is left to
    do. An evaluation at the end is left to do if it was cut off, since the last checkpoint is written before it ends.
    """
    if not snapshots.in_use(config.run_dir):
        progress.copy_latest_snapshot(config.run_dir)
        snapshots.remove(config.run_dir)
    found = progress.checkpoints(config.run_dir)
    if not found:
        raise ConfigError(
            f"{config.run_dir} has no checkpoint to resume from: there is none before the first "
            "trainer.save_every, or Ctrl-C; start without --resume"
        )
    begun = found[-1]
    if _sets(overrides, "run.resume_from"):
        named = Path(config.run.resume_from or "").resolve()
        every = progress.checkpoints(config.run_dir, abandoned=True)
        own = [folder for folder in every if folder.resolve() == named]
        if not own:
            raise ConfigError(
                f"run.resume_from: {config.run.resume_from} is no whole checkpoint of {config.run_dir}, which has "
                f"{', '.join(folder.name for folder in every)}; leave it out to continue from the latest, or leave out "
                "--resume to begin another run from there"
            )
        begun = own[0]
    _refuse_finished(config, begun)
    config = progress.resuming(config, begun)
    _refuse_other_prompts(config)
    return config


def resume_words(command: Sequence[str], config_file: Path, overrides: Sequence[str], run_dir: Path) -> str:
    """Return the command line that resumes the run in `run_dir`, begun by `command CONFIG OVERRIDES`."""
    kept = [word for word in overrides if not any(_sets([word], key) for key in ("run.name", "run.resume_from"))]
    return shlex.join([*command, str(config_file), *kept, f"run.name={run_dir.name}", "--resume"])


def _refuse_finished(config: Config, begun: Path) -> None:
    made = progress.read(begun)
    version, most_steps, most_epochs = made.policy_version, config.run.most_steps, config.run.total_train_epochs
    over = not config.evaluation.at_end or progress.evaluated(config.run_dir, policy_version=version)
    if over and most_steps is not None and version >= most_steps:
        raise ConfigError(
            f"{config.run_dir} is done: it made {version} steps; for more of them raise run.total_train_steps"
        )
    if over and most_epochs is not None and made.data_rows and made.groups_consumed // made.data_rows >= most_epochs:
        raise ConfigError(
            f"{config.run_dir} is done: it made {most_epochs} epochs; for more of them raise run.total_train_epochs"
        )


def _refuse_other_prompts(config: Config) -> None:
    """Raise `ConfigError` with the settings that changed if sequence numbers would mean other prompts."""
    try:
        progress.of_run(config)
    except ConfigError as error:
        changes = _changed_prompts(config)
        raise ConfigError(f"{'; '.join(changes)}: {error}" if changes else str(error)) from error


def _changed_prompts(config: Config) -> list[str]:
    """Return a sentence for each setting of the prompts that differs from the one in the run's folder."""
    try:
        before = configuration.load(config.run_dir / configuration.CONFIG_FILE)
    except ConfigError:
        return []

    def settings(of: Config) -> dict[str, Any]:
        data: dict[str, Any] = msgspec.to_builtins(of.data)
        return {"run.seed": of.run.seed} | {f"data.{key}": value for key, value in data.items()}

    old, new = settings(before), settings(config)
    return [f"{key} is {new[key]!r}, and the run began with {old[key]!r}" for key in new if old[key] != new[key]]


def _began(folder: Path) -> float:
    """Return the Unix time of the last start of a run, which writes its config.toml."""
    settings = folder / configuration.CONFIG_FILE
    return (settings if settings.exists() else folder).stat().st_mtime


def _named(config: Config, name: str) -> Config:
    return msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, name=name))


def _sets(overrides: Sequence[str], key: str) -> bool:
    """Return whether `overrides` set `key`."""
    return any(word.partition("=")[0].strip() == key for word in overrides)


# --- logs, and upkeep during the run ---


def last_lines(file: Path, count: int, *, begin: int = 0) -> list[str]:
    """Return the last `count` lines of `file` that are not empty; an empty list if there is no file.

    `begin`: bytes to skip, unless the file has become shorter since (`cut`).
    """
    try:
        with file.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(begin if begin <= size else 0, size - LAST_BYTES))
            text = stream.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    return [line for line in text.splitlines() if line.strip()][-count:]


async def keep_in_order(run_dir: Path, *, tell: Callable[[str], None], every_seconds: float = EVERY_SECONDS) -> None:
    """Cut long logs and watch for a full disk until cancelled.

    `tell` shows a sentence to the user, once when the disk is full and once when it has room again.
    """
    told = ""
    while True:
        problem = await asyncio.to_thread(_look_after, run_dir)
        if problem and not told:
            tell(
                f"nothing can be written to {run_dir} ({problem}): the run continues; its logs are lost, its figures "
                "wait, and no checkpoint is written until there is room"
            )
        elif told and not problem:
            tell(f"{run_dir} can be written again")
        told = problem
        await asyncio.sleep(every_seconds)


def _look_after(run_dir: Path) -> str:
    """Cut the logs; return why the folder cannot be written, or an empty string if it can."""
    try:
        for file in (run_dir / "logs").glob("*.log"):
            cut(file, most=MOST_LOG_BYTES)
        with tempfile.TemporaryFile(dir=run_dir, buffering=0) as probe:
            left = memoryview(PROBE)
            while left:
                left = left[probe.write(left) or 0 :]
    except OSError as error:
        return error.strerror or str(error)
    return ""


def cut(file: Path, *, most: int) -> None:
    """Move the content of `file` aside if it has more than `most` bytes; lines written at that moment are lost."""
    if file.stat().st_size > most:
        with file.open("rb") as full, file.with_name(file.name + OLDER).open("wb") as older:
            shutil.copyfileobj(full, older)
        os.truncate(file, 0)
