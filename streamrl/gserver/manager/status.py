"""Presentation of the run: the parts of /status, with a description of any wait, and the figures for Prometheus at
/metrics, which are derived from the same `Status`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from streamrl.config import Config
from streamrl.gserver.manager.gserver import Gserver
from streamrl.gserver.manager.registry import Member, MemberState, Registry
from streamrl.gserver.manager.routing import Fleet
from streamrl.gserver.manager.run_state import RunState
from streamrl.ledger import Ledger
from streamrl.records.evaluation import scalars
from streamrl.transport.control import LedgerStatus, ProcessStatus, Role, Status

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


def waits_for(config: Config, state: RunState, registry: Registry, fleet: Fleet, ledger: Ledger) -> str:
    """Return what the run waits for, or why it is over."""
    if state.over:
        return state.message
    waiting = len(state.admissions) + len(state.routes)
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


def ledger_status(ledger: Ledger, *, given_up: int) -> LedgerStatus:
    """Return the ledger's part of /status; `given_up`: prompts that were given up after deaths of their workers."""
    others = {"rejected": len(ledger.rejected), "given_up": given_up}
    same = {name: getattr(ledger, name) for name in LedgerStatus.__struct_fields__ if name not in others}
    return LedgerStatus(**same, **others)


def process_status(member: Member, *, now: float) -> ProcessStatus:
    """Return a member's part of /status; `now`: on the registry's clock."""
    stats = {**member.stats, "groups_in_flight": len(member.routes)} if isinstance(member, Gserver) else member.stats
    return ProcessStatus(
        role=member.role,
        index=member.index,
        address=member.address,
        pid=member.pid,
        host=member.host,
        silent_seconds=member.last_heard.seconds(now=now),
        stats=stats,
        waiting_for=member.waiting_for,
        state=_STATUS_WORDS[member.state],
        failure=member.failure,
    )


def render(status: Status, *, admitted: int, pause_seconds_total: float) -> bytes:
    """Return `status` and the totals in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Metrics(list(_metrics(status, admitted, pause_seconds_total))))
    return generate_latest(registry)


class _Metrics(Collector):
    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def _metrics(status: Status, admitted: int, pause_seconds_total: float) -> Iterator[Metric]:
    ledger: dict[str, int] = msgspec.to_builtins(status.ledger)
    yield from (_gauge(f"ledger_{name}", f"Ledger: {name}", ledger[name]) for name in _LEDGER_GAUGES)
    yield from (_counter(f"ledger_{name}", f"Ledger: {name}", ledger[name]) for name in _LEDGER_COUNTERS)
    yield _counter("admissions", "Groups admitted, again ones included", admitted)
    updates, last = status.publication, status.publication["last"]
    yield _counter("publications", "Weight updates done", updates["completed"])
    yield _counter("publications_failed", "Weight updates rolled back", updates["failed"])
    yield _counter("publication_pause_seconds", "Sum of the longest pauses of generation", pause_seconds_total)
    if last:
        yield _gauge("publication_last_seconds", "Length of the last attempt", last["end"] - last["begin"])
        yield _gauge("publication_last_pause_seconds", "Longest pause in it", last["pause_seconds"])
    yield from _process_metrics(status)
    if (step := status.last_step) is not None:
        yield _gauge("step", "The last training step", step.step)
        yield _by_metric("step_metric", "Scalars of the last training step", step.metrics)
    if (evaluations := status.evaluation) is not None:
        yield _counter("evaluations", "Evaluations done", evaluations.done)
        yield _counter("evaluations_left_out", "Not made because a later one was due", evaluations.left_out)
        if (report := evaluations.last) is not None:
            yield _gauge("evaluation_step", "Step of the last evaluation", report.step)
            yield _by_metric("evaluation_metric", "Figures of the last evaluation", scalars(report))


def _process_metrics(status: Status) -> Iterator[Metric]:
    labels = ["role", "index"]
    live = GaugeMetricFamily("streamrl_process_live", "1: heard of, and not evicted", labels=labels)
    silent = GaugeMetricFamily("streamrl_process_silent_seconds", "Since the last heartbeat", labels=labels)
    stat = GaugeMetricFamily("streamrl_process_stat", "Figures that a process reports", labels=[*labels, "stat"])
    for process in status.processes:
        who = [process.role, str(process.index)]
        live.add_metric(who, float(process.state == "live"))
        silent.add_metric(who, process.silent_seconds)
        for name, value in process.stats.items():
            stat.add_metric([*who, name], value)
    yield from (live, silent, stat)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"streamrl_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"streamrl_{name}", text, value=value)


def _by_metric(name: str, text: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(f"streamrl_{name}", text, labels=["metric"])
    for metric, value in values.items():
        family.add_metric([metric], value)
    return family
