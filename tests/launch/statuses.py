"""Made-up states of a run, to draw."""

from __future__ import annotations

import math
from pathlib import Path

from streamrl.launch.dashboard import StatusHistory
from streamrl.records.metrics import StepReport
from streamrl.records.view import RunView
from streamrl.transport.control import EvaluationStatus, LedgerStatus, ProcessStatus, Status

EPOCH = 1_790_000_000.0


def step_report(step: int, *, seconds: float = 2.0, limit: int = 4) -> StepReport:
    """Step number `step` of a run whose steps take `seconds`."""
    end = EPOCH + step * seconds
    return StepReport(
        step=step,
        time=end,
        metrics={
            "reward_mean": 0.9 - 0.8 * math.exp(-step / 20) + 0.03 * math.sin(step),
            "reward_std": 0.21,
            "response_length_mean": 12.5,
            "tokens_trained": 800.0,
            "tokens_masked": 40.0,
            "groups": 8.0,
            "loss": 0.0123,
            "grad_norm": 0.61,
            "entropy": 0.83,
            "logprob_diff_mean": 2.1e-5,
            "logprob_diff_max": 3.4e-4,
            "logprob_diff_mean/gserver_0": 2.1e-5,
            "gservers_compared": 1.0,
            "gservers_not_compared": 0.0,
            "effective_sample_size": 0.97,
            "step_seconds": seconds,
            "wait_seconds": 0.2 * seconds,
            "train_seconds": 0.75 * seconds,
            "publish_seconds": 0.31,
            "pause_seconds": 0.042,
            "overhead_seconds": 0.02,
            "tokens_per_second": 800 / seconds,
        },
        token_ages={age: max(0, 300 - 90 * age) for age in range(limit + 1)},
        spans=[
            ("wait", end - seconds, end - 0.8 * seconds),
            ("actor_inf", end - 0.8 * seconds, end - 0.5 * seconds),
            ("actor_train", end - 0.5 * seconds, end - 0.05 * seconds),
            ("publish", end, end + 0.31),
        ],
    )


def status(
    second: int,
    *,
    step: int = 37,
    state: str = "running",
    gservers: int = 1,
    message: str = "",
    evaluation: EvaluationStatus | None = None,
    agents: dict[str, float] | None = None,
) -> Status:
    """The run `second` seconds after its start."""
    counters = {
        "tokens_generated_total": 450.0 * second,
        "busy_seconds_total": 0.8 * second,
        "pause_seconds_total": 0.05 * second,
        "running": 12.0,
        "queued": 3.0,
    }
    processes = [
        ProcessStatus("gserver", i, f"http://127.0.0.1:500{i}", 100 + i, "here", 0.2, counters, "", "live")
        for i in range(gservers)
    ]
    processes += [
        ProcessStatus("controller", 0, "tcp://127.0.0.1:6000", 201, "here", 0.1, {}, "3 of 8 groups", "live"),
        ProcessStatus("model_worker", 0, "tcp://127.0.0.1:6001", 202, "here", 0.3, {}, "", "live"),
        ProcessStatus("rollout", 0, "", 203, "here", 12.0, agents or {}, "", "silent"),
    ]
    return Status(
        run="addition",
        state=state,  # type: ignore[arg-type]
        message=message,
        ledger=LedgerStatus(step, 4, 330, 305, 8 * step, 12, 1, 2, 0, 1, 19),
        processes=processes,
        last_step=step_report(step) if step else None,
        publication={"version": step},
        evaluation=evaluation,
    )


def history(*, seconds: int = 12, steps: int = 37, **options: object) -> tuple[RunView, StatusHistory]:
    """A run that was looked at once a second."""
    run, seen = RunView(Path()), StatusHistory(started=0.0)
    for step in range(1, steps + 1):
        run.add_step(step_report(step))
    for second in range(seconds):
        seen.add(status(second, step=steps, **options), now=float(second))  # type: ignore[arg-type]
    return run, seen
