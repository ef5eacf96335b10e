"""The registry: who is there, and who of them is silent."""

from __future__ import annotations

import pytest

from streamrl.gserver.manager.gserver import Gserver
from streamrl.gserver.manager.registry import Member, Registry

LEASE = 2.0


def add(registry: Registry, member: Member, *, now: float = 0.0) -> Member:
    """Register `member` with the patience of its role."""
    member.last_heard.hear(now=now)
    member.last_heard.patience = 60.0 if member.role == "model_worker" else LEASE
    registry.add(member, now=now)
    return member


def test_members_fall_silent_each_at_its_time() -> None:
    registry = Registry(lease_seconds=LEASE)
    worker = add(registry, Member("rollout", 0))
    add(registry, Member("model_worker", 0))
    assert registry.next_silence() == 2.0
    assert not registry.hear(worker, now=1.0)
    assert registry.notice_silence(now=2.9) == []
    assert registry.notice_silence(now=3.0) == [worker]
    assert registry.notice_silence(now=4.0) == []
    assert registry.next_silence() == 60.0
    assert registry.hear(worker, now=5.0)
    assert registry.next_silence() == 7.0


@pytest.mark.parametrize("first", [Gserver(0, "http://a"), Member("gserver", 0, "http://a")], ids=["record", "base"])
def test_what_silent_gservers_and_those_that_were_replaced_were_asked_for_is_told_to_go_elsewhere(
    first: Member,
) -> None:
    registry = Registry(lease_seconds=LEASE)
    add(registry, first)
    add(registry, Member("rollout", 0))
    assert (registry.unanswering(now=1.0), registry.silence_changes) == ([], 0)
    registry.notice_silence(now=2.0)
    assert (registry.unanswering(now=2.0), registry.silence_changes) == (["http://a"], 2)
    registry.hear(first, now=3.0)
    assert (registry.unanswering(now=3.0), registry.silence_changes) == ([], 3)
    add(registry, Gserver(0, "http://b", pid=2), now=4.0)
    assert registry.unanswering(now=7.9) == ["http://a"], "the process before it may hang, and nobody else can tell"
    assert registry.unanswering(now=8.0) == []
    add(registry, Gserver(0, "http://b", pid=3), now=9.0)
    assert registry.unanswering(now=9.0) == [], "the new process replies at this address"


def test_nobody_is_silent_because_the_manager_stood_still() -> None:
    registry = Registry(lease_seconds=LEASE)
    add(registry, Gserver(0, "http://a"))
    registry.excuse(100.0)
    assert registry.notice_silence(now=101.0) == []
    assert registry.next_silence() == 102.0
