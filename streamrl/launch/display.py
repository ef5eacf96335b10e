"""Show a run under way: a live picture on a terminal, one line for each step elsewhere.

Owns the client that requests the controller's state once a second, and no part of the run: an error here is logged and
does not affect the run.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from streamrl.config import Config, SecurityConfig
from streamrl.errors import StreamRLError
from streamrl.launch.dashboard import RunSoFar, dashboard, duration, step_line
from streamrl.launch.files import Warnings
from streamrl.records.collapse import HEALTHY
from streamrl.records.evaluation import EVALUATIONS_FILE, EvaluationReport, in_words
from streamrl.records.files import Lines
from streamrl.records.health import Finding, findings
from streamrl.records.lineage import LINEAGES_FILE, Lineage
from streamrl.records.metrics import METRICS_FILE, StepReport
from streamrl.transport.control import Status
from streamrl.transport.manager_client import ControlClient
from streamrl.transport.secret import Secret

log = logging.getLogger(__name__)

INTERVAL_SECONDS = 1.0


class Display:
    """Prints one line for each step, and one for each change of state."""

    def __init__(self, console: Console, *, config: Config) -> None:
        self._console = console
        self._config = config
        self._history = RunSoFar(started=time.monotonic())
        self._metrics: Lines[StepReport] = Lines(config.run_dir / METRICS_FILE, StepReport)
        self._evaluations: Lines[EvaluationReport] = Lines(config.run_dir / EVALUATIONS_FILE, EvaluationReport)
        self._lineages: Lines[Lineage] = Lines(config.run_dir / LINEAGES_FILE, Lineage)
        self._lineages.new()
        self._warnings = Warnings(config.run_dir / "logs")
        self._state = ""
        self._health = HEALTHY.state
        self._told: set[str] = set()
        """Topics of findings that were shown."""
        self._new_steps()  # steps and evaluations of an earlier start of the run are not shown again
        self._shown_evaluations = {_identity(report) for report in self._evaluations.new()[1]}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def note(self, text: str) -> None:
        """Print an action of the launcher."""
        elapsed = duration(time.monotonic() - self._history.started)
        self._console.print(Text.assemble((f"{elapsed:>7}  ", "dim"), text), soft_wrap=True)

    async def follow(self, manager_url: str) -> None:
        """Show the run's state until cancelled."""
        client = ControlClient.of(self._config, manager_url, timeout=10.0)
        try:
            while True:
                try:
                    self._take(await client.status())
                except StreamRLError as error:  # the supervisor finds the reason; there is just nothing new to show
                    log.debug("no state from the controller: %s", error)
                await asyncio.sleep(INTERVAL_SECONDS)
        finally:
            self._show_steps(self._new_steps())
            self._show_evaluations(self._evaluations.new()[1])
            await client.close()

    def _take(self, status: Status) -> None:
        # The file has every step; the status only the last, for a controller with files on another machine.
        for lineage in self._lineages.new()[1]:
            if lineage.cause:
                self.note(f"{lineage.cause}: the run is back at step {lineage.policy_version}")
        new = self._new_steps()
        before = len(self._history.steps)
        self._history.add_status(status, now=time.monotonic())
        if len(self._history.steps) > before:
            new.append(self._history.steps[-1])
        self._show_steps(new)
        self._show_evaluations(self._evaluations.new()[1])
        self._show_status(status)

    def _new_steps(self) -> list[StepReport]:
        anew, steps = self._metrics.new()
        if anew:
            self._history.go_back(steps)
        return self._history.add_steps(steps)

    def _show_steps(self, steps: Iterable[StepReport]) -> None:
        for step in steps:
            self.note(step_line(step, steps=self._config.run.most_steps))
            if step.health.state != self._health:
                self._health = step.health.state
                self.note(f"step {step.step}: {step.health}")
            for finding in self._findings():
                if finding.severity != "note" and finding.topic not in {*self._told, "policy"}:
                    self._told.add(finding.topic)
                    self.note(f"step {step.step}: {finding}")

    def _findings(self) -> list[Finding]:
        """Return the health findings on the latest figures."""
        try:
            disk = shutil.disk_usage(self._config.run_dir)
        except OSError as error:
            log.debug("nobody knows how full the disk is: %s", error)
            return []
        return findings(self._history.figures(self._config, disk_free=disk.free, disk_bytes=disk.total))

    def _show_evaluations(self, reports: Iterable[EvaluationReport]) -> None:
        for report in reports:
            if _identity(report) not in self._shown_evaluations:  # the records of a resumed run are read twice
                self._shown_evaluations.add(_identity(report))
                self.note(in_words(report))

    def _show_status(self, status: Status) -> None:
        state = f"{status.state}: {status.message}" if status.message else status.state
        if state != self._state:
            self._state = state
            self.note(state)


def _identity(report: EvaluationReport) -> tuple[int, float]:
    return report.policy_version, report.time


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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._spinner.stop()
        self._live.stop()

    def note(self, text: str) -> None:
        super().note(text)
        self._spinner.update(Text(f"{text} …", style="dim"))

    async def follow(self, manager_url: str) -> None:
        self._spinner.stop()
        self._live.start()
        await super().follow(manager_url)

    def _show_steps(self, steps: Iterable[StepReport]) -> None:
        """Do nothing: the picture shows the steps."""

    def _show_evaluations(self, reports: Iterable[EvaluationReport]) -> None:
        """Do nothing: the picture shows the last evaluation."""

    def _show_status(self, status: Status) -> None:
        picture = dashboard(
            self._history,
            now=time.monotonic(),
            config=self._config,
            warnings=self._warnings.recent(),
            findings=self._findings(),
            height=self._console.height - 1,
        )
        self._live.update(picture, refresh=True)


async def picture_of(manager_url: str, *, secret: Secret | None, security: SecurityConfig) -> RenderableType:
    """Return a picture of the run's present state, with rates from two statuses; `secret`: the run's, if known here."""
    client = ControlClient(manager_url, secret=secret, timeout=10.0, security=security)
    history = RunSoFar(started=time.monotonic())
    try:
        for look in range(2):
            await asyncio.sleep(look * 1.5 * INTERVAL_SECONDS)
            history.add_status(await client.status(), now=time.monotonic())
    finally:
        await client.close()
    return dashboard(history, now=time.monotonic(), height=60)


def make_display(console: Console, *, config: Config) -> Display:
    """Return the display for `console`; a terminal that cannot move its cursor (TERM=dumb) gets no picture."""
    return (LiveDisplay if console.is_interactive else Display)(console, config=config)
