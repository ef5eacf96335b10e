"""Runs from Python: `Run`, a run under way, and `run`, one from beginning to end (docs/python.md).

A run is a child process, `streamrl run`, with all its processes below it. This process reads the run's folder and makes
calls to its controller, so it needs neither an event loop of its own nor the main thread. Invariant: no process of the
run outlives the `with` block, or this process, however it ends: the child holds the other end of a lifeline.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
import tomllib
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec

from streamrl import config as configuration
from streamrl.children import LIFELINE, HeldLifeline, describe_exit
from streamrl.config import Config
from streamrl.errors import ConfigError, DataError, DeadlineExceeded, StreamRLError
from streamrl.function_source import spec_of
from streamrl.records import progress
from streamrl.records.files import Lines
from streamrl.records.metrics import METRICS_FILE, StepReport
from streamrl.records.rollouts import Rollouts
from streamrl.transport.control import Status, Steer
from streamrl.transport.manager_client import ControlClient

START_SECONDS = 60.0
"""Longest time from the start of the child to the report of its folder."""
LOOK_SECONDS = 0.1
"""Interval at which the run's files are read; they may be on a network file system, which reports no changes."""
END_SECONDS = 30.0
"""Time for the processes of a run to end, after the time for its last checkpoint."""
CALL_SECONDS = 10.0
ERROR_LINES = 400
"""Lines of the child's output that are kept for an error."""
Result = TypeVar("Result")


@dataclass(frozen=True)
class Step:
    """A training step."""

    report: StepReport

    @property
    def policy_version(self) -> int:
        """The policy version that the step made."""
        return self.report.step

    @property
    def reward(self) -> float:
        """Mean reward of the step's responses."""
        return self.report.metrics["reward_mean"]

    @property
    def metrics(self) -> Mapping[str, float]:
        """All figures of the step, by name (docs/figures.md)."""
        return self.report.metrics


class Run:
    """A run on this machine: a context manager, and an iterator of its training steps.

    It starts with the `with` block, or with the first step that is asked for. At the end of the block a run that is
    still under way is stopped, with a checkpoint (`limits.save_seconds`).
    """

    def __init__(
        self,
        config: str | Path | Mapping[str, Any] | Config | None = None,
        *,
        model: str | Path | None = None,
        data: Any = None,
        reward: Callable[..., Any] | str | None = None,
        agent: Callable[..., Any] | str | None = None,
        workflow: type | str | None = None,
        max_staleness: int | None = None,
        lr: float | None = None,
        group_size: int | None = None,
        overrides: Mapping[str, Any] | None = None,
        resume: bool = False,
        show: bool = False,
    ) -> None:
        """`config`: a TOML file, its content as a mapping, or a `Config`; None: the defaults. `data`: a list of rows, a
        JSON Lines or Parquet file, a folder of a saved data set, a `datasets.Dataset`, or a function
        `(index, seed) -> row`. `overrides`: settings by key, as `{"trainer.batch_groups": 16}`. Values may be functions
        wherever the configuration takes `module:function`. `resume`: continue the newest run of this configuration.
        `show`: print the output of `streamrl run`.

        Raises `ConfigError` for a wrong setting, and for a function that cannot be sent to other processes.
        """
        tree = _copied(_tree_of(config))
        settings: dict[str, Any] = {
            "rollout.reward.function": reward,
            "rollout.agent.function": agent,
            "rollout.workflow.name": workflow,
            "staleness.max_staleness": max_staleness,
            "trainer.lr": lr,
            "rollout.group_size": group_size,
            "model.path": model if model is None else str(model),
        }
        if model is not None and str(model) != "scratch":
            tree.get("model", {}).pop("scratch", None)
        for key, value in settings.items():
            if value is not None:
                configuration.assign(tree, key, value)
        if agent is not None and workflow is not None:
            raise ConfigError("streamrl.Run: give one of agent, workflow: each makes the responses")
        for key, value in (overrides or {}).items():
            configuration.assign(tree, key, value)
        folder = Path(tree.get("run", {}).get("dir", "runs")).expanduser() / ".python"
        if data is not None:
            _set_data(tree, data, folder=folder)
        self.config = configuration.from_dict(_named(tree, folder=folder.absolute()), where="streamrl.Run")
        """The configuration, with the name that was asked for; a second run of a name has another folder (`dir`)."""
        self._folder = folder.absolute()
        self._resume = resume
        self._show = show
        self._child: _Child | None = None
        self._steps: Lines[StepReport] | None = None
        self._stopped = False

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._child is None:
            return
        try:
            if self._child.running:
                self.stop()
                self._child.wait(self.config.limits.save_seconds + END_SECONDS)
        finally:
            self._child.end()

    def __iter__(self) -> Iterator[Step]:
        """Yield each training step when it has ended; raises `StreamRLError` if the run fails."""
        child = self._started()
        assert self._steps is not None
        latest = 0
        while True:
            running = child.running
            replaced, reports = self._steps.new()
            if replaced:  # the run went back to a checkpoint: later steps are made again
                latest = min(latest, reports[-1].step if reports else 0)
            for report in reports:
                if report.step > latest:
                    latest = report.step
                    yield Step(report)
            if not running:
                break
            child.wait(LOOK_SECONDS)
        self._check_end(child)

    @property
    def dir(self) -> Path:
        """The run's folder."""
        return self._started().folder

    @property
    def summary(self) -> dict[str, Any]:
        """The figures of `summary.json`, from the records so far."""
        from streamrl.records.view import read_run
        from streamrl.report.summary import summarize

        found = summarize(read_run(self.dir))
        plain: dict[str, Any] = msgspec.to_builtins(found)
        return plain

    @property
    def max_staleness(self) -> int:
        """Largest age of a token in the loss, in policy versions. It can be set while the run is under way."""
        return self.status().ledger.max_staleness

    @max_staleness.setter
    def max_staleness(self, value: int) -> None:
        self._steer(Steer(max_staleness=value))

    def start(self) -> None:
        """Start the processes, and wait until the run has its folder. Raises `ConfigError` if it cannot begin."""
        if self._child is not None:
            return
        file = self._folder / f"{hashlib.blake2b(os.urandom(16), digest_size=8).hexdigest()}.toml"
        self._folder.mkdir(parents=True, exist_ok=True)
        file.write_text(configuration.to_toml(self.config, only_changed=True))
        try:
            self._child = _Child(file, resume=self._resume, show=self._show, modules=self._folder)
        finally:
            file.unlink()
        steps = Lines[StepReport](self._child.folder / METRICS_FILE, StepReport)
        if self._resume:
            steps.new()  # steps of an earlier start
        self._steps = steps

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the end of the run; raises `StreamRLError` if it fails, `DeadlineExceeded` after `timeout` s."""
        child = self._started()
        if not child.wait(timeout):
            raise DeadlineExceeded(f"the run in {child.folder} has not ended within {timeout:g} s")
        self._check_end(child)

    def stop(self) -> None:
        """Ask the run to write a checkpoint and end; the iterator of steps ends with it. Call it again to end at
        once."""
        self._stopped = True
        self._started().signal(signal.SIGTERM)

    def status(self) -> Status:
        """Return the state of the run's processes, its ledger and its last step."""
        return self._call(lambda client: client.status())

    def pause(self) -> None:
        """Start no further group until `resume`; those that run are finished, and trained on."""
        self._steer(Steer(paused=True))

    def resume(self) -> None:
        """Start groups again after `pause`."""
        self._steer(Steer(paused=False))

    def rollouts(self, step: int, *, limit: int = 1000) -> list[dict[str, Any]]:
        """Return a row for each kept response of training step `step` (`metrics.rollouts_per_step`)."""
        return Rollouts(self.dir).table(filter=f"step={step}", limit=limit).rows

    def save(self, path: str | Path, *, dtype: str = "float32", timeout: float = 600.0) -> Path:
        """Save the policy as a Hugging Face model in the new folder `path`, which is returned.

        A run under way writes a checkpoint after its present step. Raises `DeadlineExceeded` if there is none after
        `timeout` seconds.
        """
        from streamrl.export import export_run

        version = self._checkpointed(timeout) if self._started().running else None
        return export_run(self.dir, step=version, to=Path(path), dtype=dtype)

    def _checkpointed(self, timeout: float) -> int:
        """Have the run write a checkpoint; return its policy version."""
        wanted = self._call(lambda client: client.steer(Steer(save=True))).policy_version
        until = time.monotonic() + timeout
        while True:
            found = progress.checkpoints(self.dir)
            version = progress.read(found[-1]).policy_version if found else -1
            if version >= wanted:
                return version
            if not self._started().running:
                self._check_end(self._started())
                return version
            if time.monotonic() > until:
                raise DeadlineExceeded(f"{self.dir} has no checkpoint of step {wanted} within {timeout:g} s")
            self._started().wait(LOOK_SECONDS)

    def _started(self) -> _Child:
        if self._child is None:
            self.start()
        assert self._child is not None
        return self._child

    def _steer(self, message: Steer) -> None:
        self._call(lambda client: client.steer(message))

    def _call(self, call: Callable[[ControlClient], Coroutine[Any, Any, Result]]) -> Result:
        """Make a call to the controller, in a thread: this one may have a running event loop."""
        child = self._started()
        url = child.url()

        async def calling() -> Result:
            async with ControlClient.of(self.config, url, timeout=CALL_SECONDS) as client:
                return await call(client)

        with ThreadPoolExecutor(1, thread_name_prefix="call to the controller") as thread:
            return thread.submit(lambda: asyncio.run(calling())).result()

    def _check_end(self, child: _Child) -> None:
        """Raise the error of a run that has failed."""
        stopped = self._stopped and child.code in (128 + signal.SIGTERM, 128 + signal.SIGINT)
        if child.code != 0 and not stopped:
            raise child.failure()


def run(config: str | Path | Mapping[str, Any] | Config | None = None, **settings: Any) -> Run:
    """Carry out a whole run, and return it; arguments as of `Run`. Raises `StreamRLError` if it fails."""
    with Run(config, **settings) as under_way:
        under_way.wait()
    return under_way


# --- the child ---


class _Child:
    """The process `streamrl run`."""

    def __init__(self, file: Path, *, resume: bool, show: bool, modules: Path) -> None:
        """Start it with the configuration `file`, and wait for the run's folder.

        `modules`: folder with the modules of sent functions.
        """
        reports, reports_in = os.pipe()
        lifeline = HeldLifeline()
        words = [sys.executable, "-m", "streamrl", "run", str(file), "--answer-fd", str(reports_in)]
        paths = os.pathsep.join([str(modules), *_own_paths(), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {LIFELINE: str(lifeline.descriptor), "PYTHONPATH": paths.rstrip(os.pathsep)}
        self._process = subprocess.Popen(
            words + ["--resume"] * resume,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment,
            pass_fds=(reports_in, lifeline.descriptor),
            start_new_session=True,  # Ctrl-C reaches this process alone
        )
        os.close(reports_in)
        self._finish = weakref.finalize(self, _end, self._process, lifeline)
        self._output: deque[str] = deque(maxlen=ERROR_LINES)
        self._reader = threading.Thread(target=_read, args=(self._process, self._output, show), daemon=True)
        self._reader.start()
        folder, self._url = Future[str](), Future[str]()
        threading.Thread(target=_receive, args=(reports, (folder, self._url)), name="reports", daemon=True).start()
        try:
            self.folder = Path(self._await(folder, START_SECONDS)).absolute()
        except BaseException:
            self.end()
            raise

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def code(self) -> int | None:
        return self._process.poll()

    def url(self) -> str:
        """Wait for the controller; return its URL."""
        if not self.running:
            raise StreamRLError(f"the run in {self.folder} has ended: see `summary`, `rollouts` and `dir`")
        return self._await(self._url, None)

    def wait(self, timeout: float | None) -> bool:
        """Wait for the end of the process; return whether it has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)
        return not self.running

    def signal(self, number: signal.Signals) -> None:
        """Send `number`, unless the process has ended."""
        self._process.send_signal(number)

    def end(self) -> None:
        """Leave no process behind."""
        self._finish()

    def failure(self) -> StreamRLError:
        """Return the error with which the process ends."""
        self.wait(END_SECONDS)
        kind = ConfigError if self.code == 2 else StreamRLError
        return kind(self._printed() or f"streamrl run {describe_exit(self.code)}")

    def _printed(self) -> str:
        """Return the error that the process printed last, or the end of its output if it printed none."""
        self._reader.join(END_SECONDS)
        lines = list(self._output)
        begins = [number for number, line in enumerate(lines) if line.startswith("error: ")]
        return "".join(lines[begins[-1] :]).removeprefix("error: ").strip() if begins else "".join(lines[-20:]).strip()

    def _await(self, report: Future[str], timeout: float | None) -> str:
        try:
            line = report.result(timeout)
        except TimeoutError as error:
            raise DeadlineExceeded(f"streamrl run has not begun within {timeout:g} s: {self._printed()}") from error
        if not line:
            raise self.failure()
        return line


def _receive(descriptor: int, reports: Sequence[Future[str]]) -> None:
    """Complete each of `reports` with a line from the pipe; with an empty one if the process ends before."""
    with os.fdopen(descriptor) as pipe:
        for report in reports:
            report.set_result(pipe.readline().rstrip("\n"))


def _read(process: subprocess.Popen[str], output: deque[str], show: bool) -> None:
    """Keep the last lines of the process's output; `show`: print all of them."""
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            output.append(line)
            if show:
                sys.stderr.write(line)


def _end(process: subprocess.Popen[str], lifeline: HeldLifeline) -> None:
    """Stop the process if it is running, by force if it does not end."""
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):  # the second one ends it without a checkpoint
        if process.poll() is not None:
            break
        process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1.0 if number == signal.SIGTERM else None)
    lifeline.close()


def _own_paths() -> list[str]:
    """Return the entries of `sys.path` that another interpreter of this environment lacks."""
    standard = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return [os.path.abspath(path) for path in sys.path if not any(path.startswith(base) for base in standard if base)]


# --- settings ---


def _tree_of(config: str | Path | Mapping[str, Any] | Config | None) -> Mapping[str, Any]:
    if config is None:
        return {}
    if isinstance(config, Config):
        return tomllib.loads(configuration.to_toml(config))
    return config if isinstance(config, Mapping) else configuration.read_tree(config)


def _copied(value: Any) -> Any:
    """Return a setting, a section, or all of them, with tables and lists of its own."""
    if isinstance(value, Mapping):
        return {key: _copied(each) for key, each in value.items()}
    return [_copied(each) for each in value] if isinstance(value, list) else value


def _named(value: Any, *, folder: Path, key: str = "") -> Any:
    """Return the settings `value` of the section `key` with `module:name` in place of functions and classes."""
    if isinstance(value, Mapping):
        return {name: _named(each, folder=folder, key=f"{key}.{name}" if key else name) for name, each in value.items()}
    if isinstance(value, list):
        return [_named(each, folder=folder, key=key) for each in value]
    if callable(value):
        return spec_of(value, key=key, folder=folder)
    return str(value) if isinstance(value, Path) else value


SOURCES = {".jsonl": "jsonl", ".json": "jsonl", ".parquet": "parquet"}


def _set_data(tree: dict[str, Any], data: Any, *, folder: Path) -> None:
    """Set `data.source` and `data.path` for the rows `data`, which are written into `folder` if they are no file."""
    section = tree.setdefault("data", {})
    for name in ("args", "size"):
        section.pop(name, None)
    if callable(data):
        section |= {"source": "python", "path": data}
    elif isinstance(data, str | Path):
        path = Path(data).expanduser()
        source = "hf_disk" if path.is_dir() else SOURCES.get(path.suffix)
        if source is None or not path.exists():
            raise ConfigError(
                f"data = {str(data)!r}: there is no such .jsonl or .parquet file, or folder of a data set"
            )
        section |= {"source": source, "path": str(path.absolute())}
    elif hasattr(data, "to_parquet"):
        file = folder / f"data-{os.getpid()}-{id(data):x}.parquet"
        folder.mkdir(parents=True, exist_ok=True)
        data.to_parquet(str(file))
        section |= {"source": "parquet", "path": str(_by_content(file))}
    elif isinstance(data, Sequence) and data:
        section |= {"source": "jsonl", "path": str(_written(data, folder))}
    else:
        raise ConfigError(
            f"data: {type(data).__name__} is neither rows (a list of mappings), nor a file, nor a Dataset"
        )


def _written(rows: Sequence[Any], folder: Path) -> Path:
    """Write rows as JSON Lines; return the file, whose name depends on its content alone."""
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise ConfigError(f"data: row {number} is a {type(row).__name__}, not a mapping")
    try:
        lines = [msgspec.json.encode(row) for row in rows]
    except (TypeError, ValueError) as error:
        raise DataError(f"data: a row has a value that is no JSON type: {error}") from error
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"data-{os.getpid()}.jsonl"
    file.write_bytes(b"\n".join(lines) + b"\n")
    return _by_content(file)


def _by_content(file: Path) -> Path:
    """Rename `file` after its content, so that a resumed run has the same data; return its new path."""
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=8)).hexdigest()
    return Path(shutil.move(file, file.with_name(f"data-{digest}{file.suffix}"))).absolute()
