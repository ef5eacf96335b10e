"""The run as people see it: the `Status` of /status, and the words for what the run waits for."""

from __future__ import annotations

from typing import Any, Literal

from streamrl.config import Config
from streamrl.gserver.registry import Member, Registry
from streamrl.gserver.routing import Fleet, Standing
from streamrl.gserver.run_state import RunState
from streamrl.ledger import Ledger
from streamrl.metrics import StepReport
from streamrl.transport.control.evaluations import EvaluationStatus
from streamrl.transport.control.members import Role
from streamrl.transport.control.status import LedgerStatus, ProcessStatus, Status


def waits_for_members(registry: Registry, config: Config) -> str:
    """Which processes have not registered yet, in words; empty when all have."""
    wanted: dict[Role, int] = {
        "gserver": config.gserver.count,
        "rollout": config.rollout.workers,
        "evaluator": int(config.evaluation.enabled),
        "model_worker": config.trainer.workers,
        "master": 1,
    }
    missing = []
    for role, count in wanted.items():
        absent = [f"{role}/{index}" for index in range(count) if registry.get(role, index) is None]
        # gservers and rollout workers with other numbers do as well; the rest is known by its number
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
    in_line: int,
    given_up: int,
    evaluation: EvaluationStatus | None,
    now: float,
) -> Status:
    """Everything that /status tells.

    `in_line`: calls that wait for room or for a gserver; `given_up`: prompts whose workers died again and again;
    `now` on the registry's clock.
    """
    return Status(
        run=config.run.name,
        state=state.name,
        message=state.message if state.over else _waits_for(config, state, registry, fleet, ledger, in_line=in_line),
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
        processes=[_process(member, fleet, now=now) for member in registry.everyone()],
        last_step=last_step,
        publication=publication,
        data_rows=data_rows,
        evaluation=evaluation,
    )


def _waits_for(
    config: Config, state: RunState, registry: Registry, fleet: Fleet, ledger: Ledger, *, in_line: int
) -> str:
    reasons = []
    if state.name == "joining":
        reasons.append(f"waits for {waits_for_members(registry, config)} to join")
    elif not fleet.serving_count:
        reasons.append("waits for a gserver: none takes groups")
    elif in_line and ledger.room and not fleet.has_place:
        reasons.append(f"{in_line} calls wait for a place: all {fleet.serving_count} gservers run as much as they can")
    silent = [member.name for member in registry.everyone() if member.silent]
    if silent:
        reasons.append(f"silent: {', '.join(silent)}")
    return "; ".join(reasons)


def _process(member: Member, fleet: Fleet, *, now: float) -> ProcessStatus:
    return ProcessStatus(
        role=member.role,
        index=member.index,
        address=member.address,
        pid=member.pid,
        host=member.host,
        silent_seconds=now - member.heard,
        stats=_stats(member, fleet),
        waiting_for=member.waiting_for,
        state=_state(member, fleet),
    )


def _state(member: Member, fleet: Fleet) -> Literal["live", "silent", "evicted", "draining"]:
    if member.silent:
        return "silent"
    if member.draining:
        return "draining"
    gserver = fleet.get(member.index) if member.role == "gserver" else None
    return "live" if gserver is None or gserver.standing is Standing.SERVING else "evicted"


def _stats(member: Member, fleet: Fleet) -> dict[str, float]:
    gserver = fleet.get(member.index) if member.role == "gserver" else None
    return member.stats if gserver is None else {**member.stats, "groups_in_flight": len(gserver.groups)}
