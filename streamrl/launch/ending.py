"""The end of a run: a checkpoint at the first signal, the reason in the run's records, and the report."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from streamrl import essential
from streamrl.config import Config
from streamrl.errors import ConfigError, DeadlineExceeded, ProcessDied, RunStopped, StreamRLError
from streamrl.launch.process import Departure
from streamrl.launch.remote import DRAIN_SECONDS, drained
from streamrl.records import progress
from streamrl.records.metrics import write_ending
from streamrl.transport.manager_client import ControlClient

if TYPE_CHECKING:
    from rich.console import Console

STOPPED = "it was asked to end, by Ctrl-C or another signal"


def save_and_end(config: Config, manager_url: Callable[[], str]) -> Departure | None:
    """Return the departure that makes the controller write a checkpoint and end the run; None if the configuration
    gives it no time.

    `manager_url` returns an empty string while there is no controller. The work raises `StreamRLError` if the request
    fails, and `DeadlineExceeded` if the run has not ended within `limits.save_seconds`.
    """
    seconds = config.limits.save_seconds

    async def work() -> None:
        if not (url := manager_url()):
            raise StreamRLError("the run has not begun")
        await drained(ControlClient.of(config, url, timeout=DRAIN_SECONDS), "controller", 0)
        await asyncio.sleep(seconds)
        raise DeadlineExceeded(f"limits.save_seconds = {seconds:g} have passed")

    return Departure(work, f"writing a checkpoint, for at most {seconds:g} s") if seconds else None


@contextmanager
def ending_written(run_dir: Path, *, keep_failure: bool = False) -> Iterator[None]:
    """Write the reason of the run's end into its records if the work inside raises; see `write_ending`."""
    try:
        yield
    except asyncio.CancelledError:
        failed = essential.failure()
        write_ending(run_dir, "failed" if failed else "stopped", str(failed) if failed else STOPPED)
        raise
    except RunStopped as stopped:
        write_ending(run_dir, "stopped", str(stopped))
        raise
    except ProcessDied as died:
        write_ending(run_dir, "failed", died.reason)
        raise
    except Exception as error:
        write_ending(run_dir, "failed", f"{type(error).__name__}: {error}", keep_failure=keep_failure)
        raise


@contextmanager
def reported(run_dir: Path, console: Console, *, again: str) -> Iterator[None]:
    """Show the run's report at its end, and `again`, the command that resumes it, unless it is finished.

    A run that cannot begin has no report, and its folder is removed if it is empty: the next try keeps the name.
    """
    try:
        yield
    except ConfigError:
        with suppress(OSError):  # not empty: the folder of a resumed run
            run_dir.rmdir()
        raise
    except BaseException as error:
        error.add_note(show_report(run_dir, console, again=again))  # shown after the error
        raise
    console.print(show_report(run_dir, console, again=again), markup=False, soft_wrap=True)


def show_report(run_dir: Path, console: Console, *, again: str = "") -> str:
    """Write and show the report of a run; return the closing lines: the places of its files, and how to resume it.

    `again`: the command that resumes it; empty if there is none.
    """
    from streamrl.report.summary import evaluation_table, summary_table, write_report

    try:
        summary = write_report(run_dir)
        if summary.steps:
            from streamrl.page.bundle import write_overview

            write_overview(run_dir)
    except OSError as error:
        return f"the report of {run_dir} cannot be written: {error}"
    if summary.steps:
        console.print(summary_table(summary))
        if summary.evaluations:
            console.print(evaluation_table(summary.evaluations))
        files = [name for name in ("summary.json", "overview.html", "plots") if (run_dir / name).exists()]
        closing = f"more in {run_dir}: {', '.join(files)}"
    else:
        closing = f"run {summary.run}: no training step was finished"
    found = progress.checkpoints(run_dir)
    if found:
        closing += f"; checkpoint: {found[-1]}"
    if not again or summary.state == "finished":
        return closing
    if not found:
        return f"{closing}; there is no checkpoint in {run_dir}, so nothing to resume"
    return f"{closing}; resume with\n  {again}"


def report_end(run_dir: Path, *, console: Console) -> None:
    """Show the report of a run whose pools were started by hand."""
    again = "the command that started the run, or the commands of all its pools, with --resume"
    console.print(show_report(run_dir, console, again=again), markup=False, soft_wrap=True)


def report_again(run_dir: Path, console: Console, *, trace: bool) -> None:
    """Make and show the report of the run in `run_dir` from its records; `trace`: write its timeline, too.

    Raises `ConfigError` if there is no run in the folder, or the trace cannot be written.
    """
    if not run_dir.is_dir():
        raise ConfigError(f"{run_dir}: no such folder; give the folder of a run, for example runs/addition")
    from streamrl.records.view import is_run

    if not is_run(run_dir):
        raise ConfigError(
            f"{run_dir} is no run: it has no records; give the folder of a run, for example runs/addition"
        )
    console.print(show_report(run_dir, console), markup=False, soft_wrap=True)
    if not trace:
        return
    from streamrl.records.view import read_run
    from streamrl.report.trace import TRACE_FILE, write_trace

    file = run_dir / TRACE_FILE
    try:
        count = write_trace(read_run(run_dir), file)
    except OSError as error:
        raise ConfigError(f"--trace: {file} cannot be written ({error.strerror})") from error
    console.print(f"{count} events in {file}: open it at https://ui.perfetto.dev", markup=False, soft_wrap=True)
