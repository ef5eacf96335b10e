"""Destinations for the figures of steps and evaluations: the run's folder, and from there TensorBoard, Weights & Biases
and trackio (`metrics.sinks`).

Each sink is a process of its own (`userland.py`) that reads `metrics.jsonl` and `evaluations.jsonl` as they grow and
passes the figures to the sink's package. Invariant: if that package hangs, crashes or waits for a network, the run is
not affected. It only writes a few bytes to a pipe that never blocks it, and loses nothing, since the figures are in the
files. The process ends with the pipe, or with its parent.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import psutil

from streamrl import userland
from streamrl.children import describe_exit
from streamrl.config import Config
from streamrl.errors import ConfigError
from streamrl.records.evaluation import EVALUATIONS_FILE, EvaluationReport, scalars
from streamrl.records.files import LineFile, Lines, read_records
from streamrl.records.metrics import METRICS_FILE, StepReport

log = logging.getLogger(__name__)

FINISH_SECONDS = 20.0
"""Longest time for the sinks to send the remaining figures at the end of a run."""
SLOW_SECONDS = 60.0
"""A sink that takes longer for one report is named in the log."""
NICE = 5
_NEWS = userland.call_frame(0, None)
"""Fewer bytes than a pipe accepts at once: all of them are written, or none."""
WANDB_ID = "wandb-run-id"
"""File in the run's folder with the id of the run at Weights & Biases, which a resumed run continues."""


class Task(msgspec.Struct, frozen=True):
    """The settings of a sink's process."""

    sink: str
    """A key of `SINKS`."""
    folder: str
    """The run's folder."""
    name: str
    """The run's name."""
    project: str
    """The project at the sink that the run belongs to."""
    resumed: bool
    """Whether the run continues from a checkpoint, so that the sink may have a run for it already."""
    config: dict[str, Any]
    """The resolved configuration."""
    begin: dict[str, int]
    """File → byte from which on its lines are new."""
    last_step: int
    """The last step before the new lines: the run makes later steps that the sink already has again."""


# --- in the run ---


class MetricsWriter:
    """Writes each report into the run's folder, as one line of the file of its kind, and notifies the sinks.

    A line is handed to the operating system before `write` returns. A disk that is full or gone is named once in the
    log and does not stop the run.
    """

    def __init__(self, run_dir: Path, *, sinks: Sequence[SinkProcess] = ()) -> None:
        self._steps = LineFile(run_dir / METRICS_FILE)
        self._evaluations = LineFile(run_dir / EVALUATIONS_FILE)
        self._sinks = sinks

    def write(self, report: StepReport) -> None:
        """Write the report of a training step."""
        self._append(self._steps, report.finite())

    def write_evaluation(self, report: EvaluationReport) -> None:
        """Write the report of an evaluation."""
        self._append(self._evaluations, report)

    def _append(self, file: LineFile, report: msgspec.Struct) -> None:
        file.append(msgspec.json.encode(report))
        for sink in self._sinks:
            sink.tell()

    @property
    def waits_for(self) -> str:
        """Names of the sinks that `close` waits for; empty: none."""
        return " and ".join(sink.name for sink in self._sinks)

    def close(self, *, timeout: float = FINISH_SECONDS) -> None:
        """Close the files, and wait at most `timeout` seconds until the sinks have received all figures."""
        for file in (self._steps, self._evaluations):
            file.close()
        until = time.monotonic() + timeout
        for sink in self._sinks:
            sink.finish()
        for sink in self._sinks:
            sink.close(timeout=max(0.0, until - time.monotonic()))
        self._sinks = ()


def check_installed(sinks: Sequence[str]) -> None:
    """Raise `ConfigError` if the package of one of `sinks` is not installed."""
    for sink in sinks:
        if importlib.util.find_spec(sink) is None:
            raise ConfigError(
                f'metrics.sinks: the package {sink} is not installed: pip install "streamrl[{sink}]", '
                f'or leave "{sink}" out'
            )


def start_sinks(config: Config) -> list[SinkProcess]:
    """Start the sinks that `config` names, for reports that are written from now on.

    Raises `ConfigError` if one is not installed. One that cannot be started is named in the log.
    """
    sinks = list(dict.fromkeys(config.metrics.sinks))
    check_installed(sinks)
    begin = {name: _size(config.run_dir / name) for name in (METRICS_FILE, EVALUATIONS_FILE)}
    last_step = max((step.step for step in read_records(config.run_dir / METRICS_FILE, StepReport)), default=0)
    started = []
    for sink in sinks:
        task = Task(
            sink=sink,
            folder=str(config.run_dir),
            name=config.run.name,
            project=config.metrics.project,
            resumed=bool(config.run.resume_from),
            config=msgspec.to_builtins(config),
            begin=begin,
            last_step=last_step,
        )
        try:
            started.append(SinkProcess(task))
        except OSError as error:
            log.warning("%s cannot be started (%s); the run continues without it", sink, error)
    return started


class SinkProcess:
    """One sink's process."""

    def __init__(self, task: Task) -> None:
        """Raises `OSError` if no process can be started."""
        setup = userland.SetupMessage("streamrl.records.sinks:serve_sink", msgspec.structs.asdict(task), drains=True)
        self.name = task.sink
        self._over = False
        self._process = subprocess.Popen(
            userland.child_command(),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        assert self._process.stdin is not None
        self._pipe = self._process.stdin.fileno()
        with contextlib.suppress(BrokenPipeError):
            os.write(self._pipe, userland.frame(setup))
        os.set_blocking(self._pipe, False)

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def tell(self) -> None:
        """Notify the process of new lines in the files. Returns at once."""
        if self._over:
            return
        try:
            os.write(self._pipe, _NEWS)
        except BlockingIOError:  # the sink is far behind; the next message that it reads makes it read all lines
            pass
        except BrokenPipeError:
            self._over = True
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)
            ended = describe_exit(self._process.returncode)
            log.warning("%s %s: it gets no more figures, and the run continues", self.name, ended)

    def finish(self) -> None:
        """Make the process send the remaining figures and end. Returns at once."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def close(self, *, timeout: float) -> None:
        """Wait until the process has ended; kill it after `timeout` seconds."""
        self.finish()
        try:
            code = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            for process in (*psutil.Process(self.pid).children(recursive=True), self._process):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self._process.wait()
            log.warning("%s has not taken all figures and is ended; they are in the run's folder", self.name)
        else:
            if code and not self._over:
                log.warning("%s %s; the figures are in the run's folder", self.name, describe_exit(code))
        self._over = True


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


# --- in the sink's process ---


class Sink(Protocol):
    """A destination for figures. Every method may raise any exception of its package."""

    def log(self, figures: Mapping[str, float], *, step: int, time: float) -> None:
        """Record `figures` of policy version `step`; `time`: in seconds since the epoch."""

    def close(self) -> None:
        """Return when all figures have reached their destination."""


class TensorBoard:
    """An event file in `tensorboard/`."""

    def __init__(self, task: Task) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder = Path(task.folder) / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(folder))
        self._event, self._summary = Event, Summary
        # TensorBoard ignores events of earlier files in the folder from that step on.
        again = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=time.time(), step=task.last_step + 1, session_log=again))

    def log(self, figures: Mapping[str, float], *, step: int, time: float) -> None:
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in figures.items()]
        self._writer.add_event(self._event(wall_time=time, step=step, summary=self._summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run at Weights & Biases. Figures, the configuration and the package's facts about the machine are sent; no
    output and no code."""

    def __init__(self, task: Task) -> None:
        import wandb

        known = Path(task.folder) / WANDB_ID
        earlier = known.read_text().strip() if task.resumed and known.exists() else None
        self._run = wandb.init(
            project=task.project,
            name=task.name,
            config=task.config,
            dir=task.folder,
            id=earlier,
            resume="allow" if earlier else None,
            settings=wandb.Settings(console="off", disable_code=True, disable_git=True),
        )
        known.write_text(f"{self._run.id}\n")
        # The package's own step must not decrease, but an evaluation comes after later training steps.
        self._run.define_metric("*", step_metric="policy_version")

    def log(self, figures: Mapping[str, float], *, step: int, time: float) -> None:
        self._run.log({**figures, "policy_version": step})

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """A run of trackio, on this machine (`TRACKIO_DIR`) or at the place that its environment variables set."""

    def __init__(self, task: Task) -> None:
        import trackio

        self._run = trackio.init(
            task.project,
            name=task.name,
            config=task.config,
            resume="allow" if task.resumed else "never",
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )

    def log(self, figures: Mapping[str, float], *, step: int, time: float) -> None:
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        self._run.finish()


SINKS: Mapping[str, Callable[[Task], Sink]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "trackio": Trackio,
}


def figures_of(report: StepReport) -> dict[str, float]:
    """Return the scalars of `report`, and the share of its tokens of each age."""
    tokens = max(1, sum(report.token_ages.values()))
    return report.metrics | {f"token_age/{age}": count / tokens for age, count in report.token_ages.items()}


@contextlib.contextmanager
def _or_exit(sink: str, what: str) -> Iterator[None]:
    """Log a warning if the code inside is slow, and end the process if it fails."""
    slow = ("%s has not taken %s for %.0f s; the run continues", sink, what, SLOW_SECONDS)
    timer = threading.Timer(SLOW_SECONDS, log.warning, slow)
    timer.daemon = True
    timer.start()
    try:
        yield
    except Exception as error:  # tolerance point: a foreign package, in a process that nothing depends on
        log.warning("%s: %s", type(error).__name__, error, exc_info=True)
        sys.exit(1)
    finally:
        timer.cancel()


def serve_sink(**settings: Any) -> userland.UserFunction:
    """Return the sink for a process of its own (`userland.SetupMessage.loader`); each call passes on the new lines."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the sink ends with the run, which has figures for it until then
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICE)
    task = Task(**settings)
    logging.basicConfig(level=logging.WARNING, format=f"%(asctime)s %(levelname)-7s {task.sink} %(message)s")
    folder = Path(task.folder)
    steps: Lines[StepReport] = Lines(folder / METRICS_FILE, StepReport, begin=task.begin[METRICS_FILE])
    begin = task.begin[EVALUATIONS_FILE]
    evaluations: Lines[EvaluationReport] = Lines(folder / EVALUATIONS_FILE, EvaluationReport, begin=begin)
    with _or_exit(task.sink, "its start"):
        sink = SINKS[task.sink](task)

    def follow() -> None:
        for step in steps.new()[1]:
            with _or_exit(task.sink, f"the figures of step {step.step}"):
                sink.log(figures_of(step), step=step.step, time=step.time)
        for report in evaluations.new()[1]:
            found = {f"evaluation/{name}": value for name, value in scalars(report).items()}
            with _or_exit(task.sink, f"the evaluation of version {report.policy_version}"):
                sink.log(found, step=report.policy_version, time=report.time)

    def close() -> None:
        follow()
        with _or_exit(task.sink, "the last figures"):
            sink.close()

    return userland.UserFunction(follow, arguments=lambda payload: (), result=lambda value: None, close=close)
