"""`streamrl replay`: train on a run's record again, with model workers alone, in a folder of its own.

Owns the replay's folder and its processes, which run `trainer/replay/process.py`. Loads no model library itself.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.text import Text

from streamrl import config as configuration
from streamrl.config import Config
from streamrl.errors import ConfigError, ProcessDied
from streamrl.launch.children import Children
from streamrl.launch.process import run_until_stopped, set_up_logging
from streamrl.launch.processes import plan, visible_gpus
from streamrl.launch.run_folders import claim_run_dir
from streamrl.processor import avoid_broken_instructions
from streamrl.records.sinks import check_installed
from streamrl.report.summary import write_report
from streamrl.trainer.replay.plan import OUTCOME, ReplayOutcome, Stretch, changes, stretch
from streamrl.trainer.replay.recording import read_recording


class ReplaySetup(NamedTuple):
    """A replay that can begin."""

    config: Config
    """Configuration of the replay; its `run_dir` is the new folder, which exists already."""
    run_dir: Path
    """Folder of the recorded run."""
    steps: Stretch
    """The recorded steps that are trained on again."""


def replay_run(run_dir: Path, console: Console, *, to: Path | None, steps: int | None, overrides: Sequence[str]) -> int:
    """Replay the record in `run_dir` in a new folder, and show the result; return the exit code.

    0: the figures are the recorded ones, or the settings were changed; 1: they differ; 130: stopped by Ctrl-C.
    """
    set_up_logging("replay")
    prepared = prepare(run_dir, to=to, steps=steps, overrides=overrides)
    folder, found = prepared.config.run_dir, prepared.steps
    console.print(Text(f"steps {found.first} to {found.last} of {run_dir} into {folder}"), soft_wrap=True)
    if found.ends_because:
        console.print(Text(f"step {found.last} is the last one: {found.ends_because}"), soft_wrap=True)
    if code := replay(prepared):
        return code
    outcome = outcome_of(folder)
    write_report(folder)
    console.print(Text(verdict(outcome), style="red" if outcome.difference else ""), soft_wrap=True)
    if outcome.changed or outcome.difference:
        console.print(Text(f"streamrl page {run_dir} {folder} compares all figures"), soft_wrap=True)
    return 1 if outcome.difference else 0


def prepare(run_dir: Path, *, to: Path | None, steps: int | None, overrides: Sequence[str]) -> ReplaySetup:
    """Read the record in `run_dir` and make the replay's folder: `to`, or by default one next to the run's.

    `steps`: their number; None: all. Raises `DataError` if the record cannot be used, and `ConfigError` for settings
    that a replay cannot change or a folder that is not empty.
    """
    if not run_dir.is_dir():
        raise ConfigError(f"{run_dir}: no such folder; give the folder of a run that had run.record=true")
    recording = read_recording(run_dir)
    found = stretch(recording)
    recorded = recording.parts[0].facts[0].settings()
    config = configuration.overridden(recorded, overrides, where="replay")
    changes(recorded, config)
    check_installed(config.metrics.sinks)
    begins_from = recorded.run.resume_from
    if begins_from is not None and not Path(begins_from).is_dir():
        moved = run_dir.absolute() / "checkpoints" / Path(begins_from).name  # it was moved with the run's folder
        if not moved.is_dir():
            raise ConfigError(
                f"the record in {run_dir} begins at version {found.first - 1}, from the checkpoint {begins_from}, "
                "which is not there any more"
            )
        config = msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, resume_from=str(moved)))
    run = msgspec.structs.replace(config.run, record=False)
    if to is None:
        run = msgspec.structs.replace(run, dir=str(run_dir.absolute().parent), name=f"{run_dir.absolute().name}-replay")
        config = claim_run_dir(msgspec.structs.replace(config, run=run))
    else:
        place = to.absolute()
        try:
            place.mkdir(parents=True, exist_ok=True)
            taken = any(place.iterdir())
        except OSError as error:
            raise ConfigError(f"--to {to}: cannot be made ({error.strerror})") from error
        if taken:
            raise ConfigError(f"--to {to}: this folder is not empty; name one that does not exist yet")
        run = msgspec.structs.replace(run, dir=str(place.parent), name=place.name)
        config = msgspec.structs.replace(config, run=run)
    if steps is not None and found.first + steps - 1 < found.last:
        found = Stretch(found.first, found.first + steps - 1, "")
    return ReplaySetup(config, run_dir.absolute(), found)


def replay(prepared: ReplaySetup) -> int:
    """Carry out the replay; return the exit code: 0, or 130 after Ctrl-C. Raises `ProcessDied` if it fails."""
    avoid_broken_instructions()  # once, here: the processes inherit the result
    children = Children(logs=None)
    return run_until_stopped(lambda: _replay(prepared, children), before_force=children.kill)


async def _replay(prepared: ReplaySetup, children: Children) -> None:
    config = prepared.config
    config_file = config.run_dir / configuration.CONFIG_FILE
    config_file.write_text(configuration.to_toml(config))
    with tempfile.TemporaryDirectory() as meeting:
        try:
            workers = [process for process in plan(config, gpus=visible_gpus()) if process.role == "model_worker"]
            for process in workers:
                words = [sys.executable, "-m", "streamrl", "replay-rank", str(config_file), str(prepared.run_dir)]
                words += ["--index", str(process.index), "--last-step", str(prepared.steps.last)]
                await children.start(process, [*words, "--meeting-place", str(Path(meeting) / "ranks")])
            for _ in workers:
                ended = await children.next_exit()
                if ended.exit_code != 0:
                    raise ProcessDied(ended.obituary())
        finally:
            await children.stop()


def outcome_of(folder: Path) -> ReplayOutcome:
    """Return the outcome of the replay in `folder`; raises `ConfigError` if it did not reach its end."""
    try:
        return msgspec.json.decode((folder / OUTCOME).read_bytes(), type=ReplayOutcome)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{folder} is no replay that came to its end: {error}") from error


def verdict(outcome: ReplayOutcome) -> str:
    """Return the outcome of a replay in words."""
    steps = f"steps {outcome.first_step} to {outcome.last_step} of {outcome.run}"
    if outcome.changed:
        changed = ", ".join(f"{key} = {now!r} instead of {was!r}" for key, (was, now) in outcome.changed.items())
        return (
            f"{steps} were trained on again with {changed}. From the second step on the data come from the recorded "
            "policy: ages are as recorded, and effective_sample_size shows the distance between the two policies"
        )
    if outcome.difference is None:
        return f"{steps}: loss, gradient norm and every other figure are the recorded ones, bit for bit"
    d = outcome.difference
    text = f"step {d.step}, rank {d.rank}: {d.figure} is {d.replayed}, and was recorded as {d.recorded}"
    if not outcome.environment:
        return f"{text}; nothing is known to differ here: it may be an operation that is not repeatable"
    others = ", ".join(f"{key} {now!r} instead of {was!r}" for key, (was, now) in outcome.environment.items())
    return f"{text}; the likely cause: {others}"
