"""The manager's figures for Prometheus, made from the same `Status` that people see."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from streamrl.evaluation import scalars
from streamrl.transport.control.status import Status

_LEDGER_GAUGES = ("policy_version", "max_staleness", "accepted", "running", "returned", "room")
_LEDGER_COUNTERS = ("rejected", "given_up", "dropped", "expired")


def render(status: Status, *, admitted: int, pause_seconds_total: float) -> bytes:
    """`status` and the totals in Prometheus' text format."""
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
