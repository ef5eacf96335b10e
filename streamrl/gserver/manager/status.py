"""Presentation of the run: the `Status` of /status with a description of any wait, and the figures for Prometheus at
/metrics, which are derived from the same `Status`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from streamrl.architecture import Architecture
from streamrl.config import Config
from streamrl.gserver.manager.gserver import Gserver
from streamrl.gserver.manager.member_states import MemberState
from streamrl.gserver.manager.registry import Member, Registry
from streamrl.gserver.manager.routing import Fleet
from streamrl.gserver.manager.run_state import RunState
from streamrl.ledger import Ledger
from streamrl.records.evaluation import scalars
from streamrl.records.metrics import StepReport
from streamrl.transport.control import EvaluationStatus, LedgerStatus, ProcessStatus, Role, Status

_STATUS_WORDS: dict[MemberState, Literal["live", "silent", "evicted", "draining"]] = {
    MemberState.UNCHECKED: "evicted",
    MemberState.SERVING: "live",
    MemberState.EVICTED: "evicted",
    MemberState.SUSPECT: "evicted",
    MemberState.SILENT: "silent",
    MemberState.GAVE_UP: "silent",
    MemberState.DRAINING: "draining",
    MemberState.HANDING_OVER: "draining",
    MemberState.LEAVING: "draining",
    MemberState.LEAVING_SILENT: "silent",
}
"""State → its word in /status; a member that is gone does not appear there."""
_LEDGER_GAUGES = ("policy_version", "max_staleness", "accepted", "running", "returned", "room")
_LEDGER_COUNTERS = ("rejected", "given_up", "dropped", "expired")


def waits_for_members(registry: Registry, config: Config) -> str:
    """Return the processes that have not registered yet, as a readable list; empty if all have registered."""
    wanted: dict[Role, int] = {
        "gserver": config.gserver.count,
        "rollout": config.rollout.workers,
        "model_worker": config.trainer.workers,
    }
    missing = []
    for role, count in wanted.items():
        absent = [f"{role}/{index}" for index in range(count) if registry.get(role, index) is None]
        # gservers and rollout workers with other indices count as well; model workers are known by their index
        lacking = count - registry.count(role) if role in ("gserver", "rollout") else len(absent)
        missing += absent[: max(0, lacking)]
    return ", ".join(missing)


def build_status(
    *,
    config: Config,
    state: RunState,
    registry: Registry,
    fleet: Fleet,
    ledger: Ledger,
    last_step: StepReport | None,
    publication: dict[str, Any],
    data_rows: int,
    waiting: int,
    given_up: int,
    evaluation: EvaluationStatus | None,
    model: Architecture | None,
    now: float,
) -> Status:
    """Return the content of /status.

    `waiting`: number of calls that wait for room or for a gserver; `given_up`: number of prompts that were given up
    after repeated deaths of their workers; `now`: on the registry's clock.
    """
    return Status(
        run=config.run.name,
        state=state.name,
        message=state.message if state.over else _waits_for(config, state, registry, fleet, ledger, waiting=waiting),
        ledger=LedgerStatus(
            policy_version=ledger.policy_version,
            max_staleness=ledger.max_staleness,
            next_seq=ledger.next_seq,
            accepted=ledger.accepted,
            trained=ledger.trained,
            running=ledger.running,
            returned=ledger.returned,
            rejected=len(ledger.rejected),
            dropped=ledger.dropped,
            expired=ledger.expired,
            room=ledger.room,
            given_up=given_up,
        ),
        processes=[_process(member, now=now) for member in registry.everyone()],
        last_step=last_step,
        publication=publication,
        data_rows=data_rows,
        evaluation=evaluation,
        model=model,
    )


def _waits_for(
    config: Config, state: RunState, registry: Registry, fleet: Fleet, ledger: Ledger, *, waiting: int
) -> str:
    reasons = []
    if state.name == "joining":
        reasons.append(f"waits for {waits_for_members(registry, config)} to join")
    elif not fleet.serving_count:
        reasons.append("waits for a gserver: none takes groups")
    elif waiting and ledger.room and not fleet.has_capacity:
        reasons.append(f"{waiting} calls wait: all {fleet.serving_count} gservers are full")
    silent = [member.name for member in registry.everyone() if member.silent]
    if silent:
        reasons.append(f"silent: {', '.join(silent)}")
    return "; ".join(reasons)


def _process(member: Member, *, now: float) -> ProcessStatus:
    return ProcessStatus(
        role=member.role,
        index=member.index,
        address=member.address,
        pid=member.pid,
        host=member.host,
        silent_seconds=member.last_heard.seconds(now=now),
        stats=_stats(member),
        waiting_for=member.waiting_for,
        state=_STATUS_WORDS[member.state],
        failure=member.failure,
    )


def _stats(member: Member) -> dict[str, float]:
    return {**member.stats, "groups_in_flight": len(member.routes)} if isinstance(member, Gserver) else member.stats


def render(status: Status, *, admitted: int, pause_seconds_total: float) -> bytes:
    """Return `status` and the totals in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_StatusCollector(status, admitted, pause_seconds_total))
    return generate_latest(registry)


class _StatusCollector(Collector):
    def __init__(self, status: Status, admitted: int, pause_seconds_total: float) -> None:
        self._status = status
        self._admitted = admitted
        self._pause_seconds_total = pause_seconds_total

    def collect(self) -> Iterator[Metric]:
        yield from self._ledger()
        yield from self._publications()
        yield from self._processes()
        yield from self._last_step()
        yield from self._evaluations()

    def _ledger(self) -> Iterator[Metric]:
        ledger: dict[str, int] = msgspec.to_builtins(self._status.ledger)
        for name in _LEDGER_GAUGES:
            yield GaugeMetricFamily(f"streamrl_ledger_{name}", f"Ledger: {name}", value=ledger[name])
        for name in _LEDGER_COUNTERS:
            yield CounterMetricFamily(f"streamrl_ledger_{name}", f"Ledger: {name}", value=ledger[name])
        yield CounterMetricFamily("streamrl_admissions", "Groups admitted, again ones included", value=self._admitted)

    def _publications(self) -> Iterator[Metric]:
        figures = self._status.publication
        yield CounterMetricFamily("streamrl_publications", "Weight updates done", value=figures["completed"])
        yield CounterMetricFamily("streamrl_publications_failed", "Weight updates rolled back", value=figures["failed"])
        yield CounterMetricFamily(
            "streamrl_publication_pause_seconds",
            "Sum of the longest pauses of generation",
            value=self._pause_seconds_total,
        )
        last = figures["last"]
        if last:
            seconds = last["end"] - last["begin"]
            yield GaugeMetricFamily("streamrl_publication_last_seconds", "Length of the last attempt", value=seconds)
            yield GaugeMetricFamily(
                "streamrl_publication_last_pause_seconds", "Longest pause in it", value=last["pause_seconds"]
            )

    def _processes(self) -> Iterator[Metric]:
        labels = ["role", "index"]
        live = GaugeMetricFamily("streamrl_process_live", "1: heard of, and not evicted", labels=labels)
        silent = GaugeMetricFamily("streamrl_process_silent_seconds", "Since the last heartbeat", labels=labels)
        stat = GaugeMetricFamily("streamrl_process_stat", "What a process says of itself", labels=[*labels, "stat"])
        for process in self._status.processes:
            who = [process.role, str(process.index)]
            live.add_metric(who, float(process.state == "live"))
            silent.add_metric(who, process.silent_seconds)
            for name, value in process.stats.items():
                stat.add_metric([*who, name], value)
        yield from (live, silent, stat)

    def _last_step(self) -> Iterator[Metric]:
        report = self._status.last_step
        if report is None:
            return
        yield GaugeMetricFamily("streamrl_step", "The last training step", value=report.step)
        family = GaugeMetricFamily("streamrl_step_metric", "Scalars of the last training step", labels=["metric"])
        for name, value in report.metrics.items():
            family.add_metric([name], value)
        yield family

    def _evaluations(self) -> Iterator[Metric]:
        status = self._status.evaluation
        if status is None:
            return
        yield CounterMetricFamily("streamrl_evaluations", "Evaluations done", value=status.done)
        yield CounterMetricFamily(
            "streamrl_evaluations_left_out", "Not made because a later one was due", value=status.left_out
        )
        report = status.last
        if report is None:
            return
        yield GaugeMetricFamily("streamrl_evaluation_step", "Step of the last evaluation", value=report.step)
        family = GaugeMetricFamily("streamrl_evaluation_metric", "Figures of the last evaluation", labels=["metric"])
        for name, value in scalars(report).items():
            family.add_metric([name], value)
        yield family
