"""Show a run under way: a live picture on a terminal, one line for each step elsewhere.

Owns the client that requests the controller's state once a second, and no part of the run: an error here is logged and
does not affect the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Sequence
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from streamrl.config import Config
from streamrl.errors import StreamRLError
from streamrl.launch.dashboard import StatusHistory, dashboard, duration, step_line
from streamrl.records.collapse import HEALTHY
from streamrl.records.evaluation import in_words
from streamrl.records.health import Finding, findings
from streamrl.records.logs import tail
from streamrl.records.metrics import StepFigures
from streamrl.records.view import RunView
from streamrl.transport.control import Status
from streamrl.transport.manager_client import ControlClient

log = logging.getLogger(__name__)

INTERVAL_SECONDS = 1.0
WARNINGS = 2
"""Number of warnings in the picture."""
LOG_BYTES = 16384
"""Length of the end of each log in which they are found."""


class Display:
    """Prints one line for each step, and one for each change of state."""

    def __init__(self, console: Console, *, config: Config) -> None:
        self._console = console
        self._config = config
        self._history = StatusHistory(started=time.monotonic())
        self._began = time.time()
        self._state = ""
        self._health = HEALTHY.state
        self._run = RunView(config.run_dir)
        self._run.refresh()
        # steps and evaluations of an earlier start of the run are not shown again
        self._shown_steps = {(step.step, step.time) for step in self._run.steps}
        self._shown_evaluations = {(report.policy_version, report.time) for report in self._run.evaluations}
        self._shown_lineages = len(self._run.lineages)
        self._shown_findings: set[str] = set()
        """Topics of findings that were shown."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def note(self, text: str) -> None:
        """Print an action of the launcher."""
        elapsed = duration(time.monotonic() - self._history.started)
        self._console.print(Text.assemble((f"{elapsed:>7}  ", "dim"), text), soft_wrap=True)

    async def follow(self, manager_url: str) -> None:
        """Show the run's state until cancelled."""
        try:
            async with ControlClient.of(self._config, manager_url, timeout=10.0) as client:
                while True:
                    try:
                        self._take(await client.status())
                    except StreamRLError as error:  # the supervisor finds the reason; there is just nothing new to show
                        log.debug("no state from the controller: %s", error)
                    await asyncio.sleep(INTERVAL_SECONDS)
        finally:
            self._run.refresh()
            self._show_records()

    def _take(self, status: Status) -> None:
        self._run.refresh()
        if status.last_step is not None:  # the files of a controller on another machine may not be here
            self._run.add_step(status.last_step)
        self._history.add(status, now=time.monotonic())
        self._show_records()
        self._show_status(status)

    def _show_records(self) -> None:
        lineages = self._run.lineages
        for lineage in lineages[self._shown_lineages :]:
            if lineage.cause:
                self.note(f"{lineage.cause}: the run is back at step {lineage.policy_version}")
        self._shown_lineages = len(lineages)
        steps = [step for step in self._run.steps if (step.step, step.time) not in self._shown_steps]
        self._shown_steps.update((step.step, step.time) for step in steps)
        self._show_steps(steps)
        self._show_evaluations()

    def _show_steps(self, steps: Sequence[StepFigures]) -> None:
        for step in steps:
            self.note(step_line(step, steps=self._config.run.most_steps))
            if step.health.state != self._health:
                self._health = step.health.state
                self.note(f"step {step.step}: {step.health}")
        for finding in self._findings() if steps else ():
            if finding.severity != "note" and finding.topic not in {*self._shown_findings, "policy"}:
                self._shown_findings.add(finding.topic)
                self.note(f"step {steps[-1].step}: {finding}")

    def _findings(self) -> list[Finding]:
        """Return the health findings on the latest figures; those of processes are from the last status."""
        figures = self._run.figures()
        figures.config = self._config
        if self._history.last is not None:
            processes = {f"{process.role}/{process.index}": process for process in self._history.last.processes}
            figures.stats = {name: process.stats for name, process in processes.items()}
            figures.failures = {name: p.failure for name, p in processes.items() if p.failure is not None}
        return findings(figures)

    def _show_evaluations(self) -> None:
        for report in self._run.evaluations:
            if (report.policy_version, report.time) not in self._shown_evaluations:
                self._shown_evaluations.add((report.policy_version, report.time))
                self.note(in_words(report))

    def _show_status(self, status: Status) -> None:
        state = f"{status.state}: {status.message}" if status.message else status.state
        if state != self._state:
            self._state = state
            self.note(state)


class ReportingDisplay(Display):
    """The display of a run that another program started: it also reports the run's folder, then the controller's URL,
    as lines to a pipe."""

    def __init__(self, console: Console, *, config: Config, reports: int) -> None:
        """`reports`: descriptor of the pipe."""
        super().__init__(console, config=config)
        self._reports = reports
        self._report(str(config.run_dir))

    async def follow(self, manager_url: str) -> None:
        self._report(manager_url)
        await super().follow(manager_url)

    def _report(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # the program has ended, and with it the run
            os.write(self._reports, f"{line}\n".encode())


class LiveDisplay(Display):
    """A picture of the run, redrawn every second."""

    def __init__(self, console: Console, *, config: Config) -> None:
        super().__init__(console, config=config)
        self._live = Live(console=console, auto_refresh=False, transient=False)
        self._spinner = console.status("")
        """Shows the launcher's current action until there is a run to draw."""

    def __enter__(self) -> Self:
        self._spinner.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._spinner.stop()
        self._live.stop()

    def note(self, text: str) -> None:
        super().note(text)
        self._spinner.update(Text(f"{text} …", style="dim"))

    async def follow(self, manager_url: str) -> None:
        self._spinner.stop()
        self._live.start()
        await super().follow(manager_url)

    def _show_steps(self, steps: Sequence[StepFigures]) -> None:
        """Do nothing: the picture shows the steps."""

    def _show_evaluations(self) -> None:
        """Do nothing: the picture shows the last evaluation."""

    def _recent_warnings(self) -> list[str]:
        """Return the first lines of the last warnings in the logs, without those of an earlier start of the run."""
        found = tail(self._config.run_dir / "logs", level="WARNING", most=WARNINGS, most_bytes=LOG_BYTES)
        lines = [f"{line.process.replace('-', '/')} {line.text}" for line in found if line.time >= int(self._began)]
        return [line.partition("\n")[0] for line in lines]

    def _show_status(self, status: Status) -> None:
        picture = dashboard(
            self._run,
            self._history,
            now=time.monotonic(),
            config=self._config,
            warnings=self._recent_warnings(),
            findings=self._findings(),
            height=self._console.height - 1,
        )
        self._live.update(picture, refresh=True)


def make_display(console: Console, *, config: Config, reports: int | None = None) -> Display:
    """Return the display for `console`; a terminal that cannot move its cursor (TERM=dumb) gets no picture. `reports`:
    descriptor of a pipe to the program that started this one."""
    if reports is not None:
        return ReportingDisplay(console, config=config, reports=reports)
    return (LiveDisplay if console.is_interactive else Display)(console, config=config)
