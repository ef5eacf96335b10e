"""SGLang's own figures, in the names that gservers report theirs in.

From the Prometheus text of GET /metrics. How long it was busy SGLang does not say; that is added up
from how many requests ran whenever it was asked.
"""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

NAMES: Mapping[str, str] = {
    "sglang:num_running_reqs": "running",
    "sglang:num_queue_reqs": "queued",
    "sglang:num_used_tokens": "running_tokens",
    "sglang:generation_tokens_total": "tokens_generated_total",
    "sglang:prompt_tokens_total": "prompt_tokens_total",
    "sglang:num_requests_total": "requests_total",
}


class Figures:
    """What is known of one server."""

    def __init__(self) -> None:
        self._latest = dict.fromkeys([*NAMES.values(), "busy_seconds_total", "slot_seconds_total"], 0.0)
        self._asked: float | None = None

    def stats(self) -> dict[str, float]:
        return dict(self._latest)

    def update(self, text: str, *, now: float) -> None:
        """Take what SGLang said at the time `now`, in seconds."""
        found = dict.fromkeys(NAMES.values(), 0.0)
        wanted = "\n".join(line for line in text.splitlines() if line.startswith(tuple(NAMES)))
        for family in text_string_to_metric_families(wanted):  # too slow for all that SGLang says
            for sample in family.samples:
                if name := NAMES.get(sample.name):
                    found[name] += sample.value
        if self._asked is not None:
            seconds = now - self._asked
            self._latest["busy_seconds_total"] += seconds * (found["running"] > 0)
            self._latest["slot_seconds_total"] += seconds * found["running"]
        self._asked = now
        self._latest |= found
