"""`metrics.hook`: the user's own figures of a training step.

The function runs in a thread of the controller. Invariant: if it fails or hangs, the run is not affected: the step
lacks its figures, and the log has the reason.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from streamrl.config import MetricsConfig
from streamrl.hooks import load_hook
from streamrl.records.metrics import StepReport
from streamrl.types import SampleMeta

log = logging.getLogger(__name__)

HOOK_SECONDS = 10.0
"""Longest time of one call."""
Figures = Mapping[str, float]
Result = TypeVar("Result")


class OwnFigures:
    """Calls `metrics.hook` after each step."""

    def __init__(self, metrics: MetricsConfig) -> None:
        """Load the function, if there is one; raises `ConfigError` if it cannot be loaded."""
        self._name = metrics.hook
        self._function: Callable[[StepReport, Sequence[SampleMeta]], Figures] | None = None
        if metrics.hook:
            self._function = load_hook(metrics.hook, key="metrics.hook", args=metrics.hook_args)

    async def of_step(self, report: StepReport, batch: Sequence[SampleMeta]) -> dict[str, float]:
        """Return the figures of the step with this `report` and `batch`; empty if there is no hook, or it fails.

        A function that has exceeded its time is never called again: its thread may still run.
        """
        if (function := self._function) is None:
            return {}

        def call() -> dict[str, float]:
            try:
                return _checked(function(report, batch), known=report.metrics)
            except BaseException as error:  # tolerance point: the user's function may raise anything, SystemExit too
                log.error("metrics.hook = %r failed at step %d: %r", self._name, report.step, error, exc_info=error)
                return {}

        try:
            async with asyncio.timeout(HOOK_SECONDS):
                return await _in_daemon_thread(call)
        except TimeoutError:
            self._function = None
            log.error("metrics.hook = %r took longer than %g s: it is not called again", self._name, HOOK_SECONDS)
        return {}


def _checked(found: Any, *, known: Figures) -> dict[str, float]:
    """Return the result of a hook as numbers by name; raises `TypeError` or `ValueError` if it is anything else."""
    if not isinstance(found, Mapping):
        raise TypeError(f"it returned {type(found).__name__}: return a mapping from names to numbers")
    if taken := sorted(map(str, found.keys() & known.keys())):
        raise ValueError(f"{taken[0]!r} is the name of a figure of streamrl: choose another one")
    return {str(name): float(value) for name, value in found.items()}


def _in_daemon_thread(call: Callable[[], Result]) -> asyncio.Future[Result]:
    """Return the future result of `call`, which raises nothing and does not keep the process from ending."""
    result: concurrent.futures.Future[Result] = concurrent.futures.Future()
    result.set_running_or_notify_cancel()
    threading.Thread(target=lambda: result.set_result(call()), name="metrics.hook", daemon=True).start()
    return asyncio.wrap_future(result)
