"""The life of a member of the run: one state machine for gservers and all other processes.

`TRANSITIONS` is the whole machine; docs/manager.md draws it, and a test compares the two. `Member.handle`
(`registry.py`) is the only place that changes a state. Pure, no I/O.

    joins       found current, updated       passed over, update failed
    ──▶ UNCHECKED ─────────────────▶ SERVING ─────────────────────────▶ EVICTED
            │                        │ ▲   ▲         updated             │   ▲
            │ unreachable            │ │   └─────────────────────────────┘   │
            │            unreachable │ │ found current                       │
            │                        ▼ │                                     │
            └────────────────────▶ SUSPECT ──────── found outdated ──────────┘
                                   ▲  ▲  ▲                               │
                          returned │  │  └── unreachable, resync failed ─┘
                                 SILENT ◀── fell silent (any of the four)

    SERVING ── drained ──▶ DRAINING ── overdue ──▶ HANDING OVER ── emptied ──▶ LEAVING ──▶ GONE

A process that serves no weights needs no check: it is SERVING where a gserver is UNCHECKED or SUSPECT, and never
EVICTED or HANDING OVER.

Invariants: groups are given to SERVING gservers only; DRAINING implies the current weights; GONE is final; a gserver
that was silent, or did not reply, is checked before it serves again.
"""

from __future__ import annotations

from enum import Enum


class MemberState(Enum):
    """The state of a member, in the manager's view."""

    UNCHECKED = "unchecked"
    """A gserver that has joined, and whose weight version is being requested."""
    SERVING = "serving"
    """It does its work. A gserver serves the current weights and takes groups."""
    EVICTED = "evicted"
    """A gserver with other weights than the current ones: it waits for an update or a resync."""
    SUSPECT = "suspect"
    """A gserver that was silent, did not reply, or failed in a resync: with its next heartbeat it is resumed, since an
    update may have left it paused, and checked."""
    SILENT = "silent"
    """No message for too long."""
    GAVE_UP = "gave up"
    """It has reported that it ends: silent for good, even if it sends further messages."""
    DRAINING = "draining"
    """It was requested to leave, and finishes its work. A gserver takes no groups, but takes new weights."""
    HANDING_OVER = "handing over"
    """A gserver that was requested to leave, and has used up its time or lacks the current weights: its requests are
    aborted, and continue elsewhere."""
    LEAVING = "leaving"
    """The reply to its next heartbeat instructs it to leave."""
    LEAVING_SILENT = "leaving, silent"
    """It fell silent after it was requested to leave."""
    GONE = "gone"
    """It has left, or another process has its place."""


class MemberEvent(Enum):
    """An event in the life of a member."""

    FOUND_CURRENT = "found current"
    """A check found that it serves the current weights."""
    FOUND_OUTDATED = "found outdated"
    """A check found that it serves other weights."""
    UNREACHABLE = "unreachable"
    """It did not reply to a call, or could not be resumed after a pause."""
    RESUMED = "resumed"
    """A weight update has resumed it."""
    UPDATED = "updated"
    """A weight update or a resync has brought it to the current weights."""
    UPDATE_FAILED = "update failed"
    """A weight update failed on it."""
    RESYNC_FAILED = "resync failed"
    """A resync failed on it, perhaps because it has died."""
    PASSED_OVER = "passed over"
    """Other gservers serve newer weights now, which were not sent to it."""
    FELL_SILENT = "fell silent"
    """No message came for too long (`limits.silence_seconds`)."""
    RETURNED = "returned"
    """It has sent a message after a silence."""
    GAVE_UP = "gave up"
    """Its heartbeat reports an error that ends it."""
    DRAINED = "drained"
    """It is requested to leave while the run continues."""
    OVERDUE = "overdue"
    """It has not finished its work within the time granted for leaving."""
    EMPTIED = "emptied"
    """Nothing prevents it from leaving."""
    REMOVED = "removed"
    """It has left, or another process has taken its place."""


_STATE, _EVENT = MemberState, MemberEvent

SILENT_STATES = frozenset({_STATE.SILENT, _STATE.GAVE_UP, _STATE.LEAVING_SILENT})
OUT = frozenset({_STATE.HANDING_OVER, _STATE.LEAVING, _STATE.LEAVING_SILENT, _STATE.GAVE_UP, _STATE.GONE})
"""In these states a gserver has no part in routing and weight updates any more."""

TRANSITIONS: dict[MemberEvent, dict[MemberState, MemberState]] = {
    _EVENT.FOUND_CURRENT: {_STATE.UNCHECKED: _STATE.SERVING, _STATE.SUSPECT: _STATE.SERVING},
    _EVENT.FOUND_OUTDATED: {_STATE.UNCHECKED: _STATE.EVICTED, _STATE.SUSPECT: _STATE.EVICTED},
    _EVENT.UNREACHABLE: {
        _STATE.UNCHECKED: _STATE.SUSPECT,
        _STATE.SERVING: _STATE.SUSPECT,
        _STATE.EVICTED: _STATE.SUSPECT,
        _STATE.DRAINING: _STATE.HANDING_OVER,
    },
    _EVENT.RESUMED: {_STATE.SUSPECT: _STATE.UNCHECKED},
    _EVENT.UPDATED: {_STATE.UNCHECKED: _STATE.SERVING, _STATE.EVICTED: _STATE.SERVING},
    _EVENT.UPDATE_FAILED: {
        _STATE.UNCHECKED: _STATE.EVICTED,
        _STATE.SERVING: _STATE.EVICTED,
        _STATE.DRAINING: _STATE.HANDING_OVER,
    },
    _EVENT.RESYNC_FAILED: {_STATE.EVICTED: _STATE.SUSPECT},
    _EVENT.PASSED_OVER: {_STATE.SERVING: _STATE.EVICTED, _STATE.DRAINING: _STATE.HANDING_OVER},
    _EVENT.FELL_SILENT: {
        _STATE.UNCHECKED: _STATE.SILENT,
        _STATE.SERVING: _STATE.SILENT,
        _STATE.EVICTED: _STATE.SILENT,
        _STATE.SUSPECT: _STATE.SILENT,
        _STATE.DRAINING: _STATE.LEAVING_SILENT,
        _STATE.HANDING_OVER: _STATE.LEAVING_SILENT,
        _STATE.LEAVING: _STATE.LEAVING_SILENT,
    },
    _EVENT.RETURNED: {_STATE.SILENT: _STATE.SUSPECT, _STATE.LEAVING_SILENT: _STATE.LEAVING},
    _EVENT.GAVE_UP: {state: _STATE.GAVE_UP for state in _STATE if state not in (_STATE.GAVE_UP, _STATE.GONE)},
    _EVENT.DRAINED: {
        _STATE.SERVING: _STATE.DRAINING,
        _STATE.UNCHECKED: _STATE.HANDING_OVER,
        _STATE.EVICTED: _STATE.HANDING_OVER,
        _STATE.SUSPECT: _STATE.HANDING_OVER,
    },
    _EVENT.OVERDUE: {_STATE.DRAINING: _STATE.HANDING_OVER},
    _EVENT.EMPTIED: {_STATE.DRAINING: _STATE.LEAVING, _STATE.HANDING_OVER: _STATE.LEAVING},
    _EVENT.REMOVED: {state: _STATE.GONE for state in _STATE if state is not _STATE.GONE},
}
"""Event → state → next state; in a state that is not listed the event changes nothing."""


def next_state(state: MemberState, event: MemberEvent, *, serves_weights: bool = True) -> MemberState:
    """Return the state of a member in `state` after `event`. Only gservers serve weights."""
    follows = TRANSITIONS[event].get(state, state)
    return _STATE.SERVING if follows is _STATE.SUSPECT and not serves_weights else follows
