"""The members of the run: one record for each process that registered, and one state machine for all of them.

`TRANSITIONS` is the whole machine; docs/manager.md draws it, and a test compares the two. `Member.handle` is the only
place that changes a state. Pure: times are passed in, in seconds on the caller's clock.

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

Invariants: a place (role and index) belongs to one process at a time; another process that registers under it is
another record. Groups are given to SERVING gservers only; DRAINING implies the current weights; GONE is final; a
gserver that was silent, or did not reply, is checked before it serves again.
"""

from __future__ import annotations

import hmac
import math
import secrets
from collections import Counter
from collections.abc import Iterator
from dataclasses import KW_ONLY, InitVar, dataclass, field
from enum import Enum
from typing import get_args

import msgspec

from streamrl.errors import PeerError
from streamrl.records.lineage import Lineage
from streamrl.records.timeline import FrequentFailure
from streamrl.transport.control import Register, RegisterReply, Role
from streamrl.transport.credentials import LONGEST_INDEX, MAY_SEND_TO, ReceiverKeys
from streamrl.transport.secret import Secret
from streamrl.transport.session import LastHeard, next_silence


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


TOKEN_BYTES = 32
TELL_LEASES = 2.0
"""Number of leases for which the address of a replaced gserver is reported, so that every live worker receives it."""


@dataclass(eq=False)
class Member:
    """A registered process. A gserver's record is a `Gserver` (`gserver.py`)."""

    role: Role
    index: int
    address: str = ""
    _: KW_ONLY
    pid: int = 0
    host: str = ""
    """The host name that the process reports."""
    machine: str = ""
    process_space: str = ""
    gpu: str = ""
    process: str = ""
    """This and the three before: as in `Register`."""
    number: int = 0
    """Ordinal of the member among all that have joined the run; 0: it has no place yet."""
    lineage: str = ""
    """The lineage of the run (`Access.lineage`) in which it last registered."""
    times_back: int = 0
    """How often it has kept groups of an earlier lineage, if it is a rollout worker."""
    stats: dict[str, float] = field(default_factory=dict)
    """Figures of its last heartbeat."""
    waiting_for: str = ""
    failure: FrequentFailure | None = None
    end_reported: bool = False
    """Whether a reply to it has reported the end of the run."""
    now: InitVar[float] = 0.0
    patience: InitVar[float] = math.inf
    """Seconds without a message after which it counts as silent."""

    def __post_init__(self, now: float, patience: float) -> None:
        self.state = MemberState.UNCHECKED if self.role == "gserver" else MemberState.SERVING
        """Changed by `handle` alone."""
        self.token = f"{self.name}.{secrets.token_hex(TOKEN_BYTES)}"
        """The token that it presents with each call."""
        self.last_heard = LastHeard(now=now, patience=patience)

    @property
    def name(self) -> str:
        """Its role and number, for example `rollout/0`."""
        return f"{self.role}/{self.index}"

    @property
    def silent(self) -> bool:
        """Whether it has sent nothing for too long, or gave up."""
        return self.state in SILENT_STATES

    @property
    def gone(self) -> bool:
        """Whether it has left, or another process has its place."""
        return self.state is MemberState.GONE

    def handle(self, event: MemberEvent) -> None:
        """Change its state, now that `event` has happened."""
        self.state = next_state(self.state, event, serves_weights=self.role == "gserver")


class Registry:
    """Members by role and index; a process that takes a place replaces its holder."""

    def __init__(self, *, lease_seconds: float) -> None:
        self._lease = lease_seconds
        self._members: dict[Role, dict[int, Member]] = {role: {} for role in get_args(Role)}
        self._live: Counter[Role] = Counter()
        self._silent: dict[Member, None] = {}  # in the order in which they fell silent
        self._replaced: dict[str, float] = {}  # address of a gserver that another process replaced → time
        self._joins = 0
        self.silence_changes = 0
        """Number of times that a member fell silent or returned from silence."""

    def registered(self, message: Register) -> Member | None:
        """Return the record of the process that sends `message`, if this same process has registered before."""
        member = self.get(message.role, message.index)
        if member is None:
            return None
        ours = (member.pid, member.host, member.address, member.process)
        return member if ours == (message.pid, message.host, message.address, message.process) else None

    def with_token(self, token: str) -> Member | None:
        """Return the member that `token` names and belongs to; the duration of the comparison reveals no part of it."""
        role, _, rest = token.partition("/")
        index, dot, _ = rest.partition(".")
        members = self._members.get(role)  # type: ignore[call-overload]
        if members is None or not dot or not index.isdecimal() or len(index) > LONGEST_INDEX:
            return None
        member: Member | None = members.get(int(index))
        if member is None or not hmac.compare_digest(member.token.encode(), token.encode(errors="replace")):
            return None
        return member

    def add(self, member: Member, *, now: float) -> Member | None:
        """Give `member` its place; return the process that held it, if there was one."""
        before = self.get(member.role, member.index)
        self.remove(member.role, member.index)
        if before is not None and before.role == "gserver":
            self._replaced[before.address] = now
        self._replaced.pop(member.address, None)
        self._joins += 1
        member.number = self._joins
        self._members[member.role][member.index] = member
        self._live[member.role] += 1
        return before

    def remove(self, role: Role, index: int) -> None:
        """Remove the member that holds this place, if any."""
        member = self._members[role].pop(index, None)
        if member is not None:
            self._live[role] -= not member.silent
            if member in self._silent or role == "model_worker":
                self._silent.pop(member, None)
                self.silence_changes += 1
            member.handle(MemberEvent.REMOVED)

    def get(self, role: Role, index: int) -> Member | None:
        """Return the process that holds this place, or None."""
        return self._members[role].get(index)

    def of(self, role: Role) -> list[Member]:
        """Return the members of `role`, by index."""
        members = self._members[role]
        return [members[index] for index in sorted(members)]

    def everyone(self) -> list[Member]:
        """Return all members, by role and index."""
        return [member for role in sorted(self._members) for member in self.of(role)]

    def count(self, role: Role) -> int:
        """Return how many have registered as `role`, silent ones included."""
        return len(self._members[role])

    def live(self, role: Role) -> int:
        """Return how many of `role` are not silent."""
        return self._live[role]

    def silent(self) -> list[Member]:
        """Return the members that are silent now; does not visit the others."""
        return list(self._silent)

    def unanswering(self, *, now: float) -> list[str]:
        """Return the addresses of gservers from which no reply can be expected: silent ones, and those that another
        process has replaced lately."""
        self._replaced = {
            address: since for address, since in self._replaced.items() if now - since < TELL_LEASES * self._lease
        }
        return [*self._replaced, *(member.address for member in self._silent if member.role == "gserver")]

    def unaware_of_end(self) -> list[Member]:
        """Return the live members to which no reply has reported the end of the run."""
        return [member for member in self._all() if not member.silent and not member.end_reported]

    def hear(self, member: Member, *, now: float) -> bool:
        """Note a sign of life of `member`; return whether it has ended a silence."""
        member.last_heard.hear(now=now)
        was_silent = member.silent
        self._handle(member, MemberEvent.RETURNED)
        return was_silent and not member.silent

    def give_up(self, member: Member) -> None:
        """Note that `member` has reported that it ends; another process will take its place."""
        self._handle(member, MemberEvent.GAVE_UP)

    def notice_silence(self, *, now: float) -> list[Member]:
        """Mark members that have sent nothing for too long as silent; return the newly silent ones."""
        gone = [member for member in self._all() if not member.silent and member.last_heard.is_silent(now=now)]
        for member in gone:
            self._handle(member, MemberEvent.FELL_SILENT)
        return gone

    def next_silence(self) -> float | None:
        """Return when the next member falls silent unless it sends a message."""
        return next_silence(member.last_heard for member in self._all() if not member.silent)

    def excuse(self, seconds: float) -> None:
        """Exclude `seconds`, in which this process could not receive messages, from every member's silence."""
        for member in self._all():
            member.last_heard.excuse(seconds)

    def _all(self) -> Iterator[Member]:
        for members in self._members.values():
            yield from members.values()

    def _handle(self, member: Member, event: MemberEvent) -> None:
        """Pass `event` to `member`, and update the sets of silent and live members."""
        was_silent = member.silent
        member.handle(event)
        if member.silent is was_silent or member.gone:
            return
        self.silence_changes += 1
        if member.silent:
            self._live[member.role] -= 1
            self._silent[member] = None
        else:
            self._live[member.role] += 1
            del self._silent[member]


OWNER = "the run's owner"
"""The caller that presents the key derived from the run's secret."""


class Access:
    """Identifies callers by the key or token that they present, and grants credentials to members that join.

    The owner of the run presents a key derived from the run's secret and may make every call; a process joins with the
    same key. From then on it presents the token that it was given, which permits the calls of its role, in its own
    name. `http.py` has the table of permissions. Invariant: the identity in a call's body is accepted only if it agrees
    with the presented key or token (`check_speaker`).
    """

    def __init__(self, secret: Secret, registry: Registry, *, gserver_key: str) -> None:
        """`gserver_key`: the key that gservers require for generation requests."""
        self._shown = secret.shown.encode()
        self._registry = registry
        self._gserver_key = gserver_key
        self.lineage = ""
        """Random identifier of this lineage of the run, also unique across earlier controllers; not secret."""
        self._lineages: list[Lineage] = []
        self.begin_lineage([])
        self.receivers = {receiver: ReceiverKeys.derive(secret, receiver) for receiver in MAY_SEND_TO}
        """The keys of receivers on ZMQ, by role."""

    def grant(self, member: Member, *, policy_version: int, heartbeat_seconds: float) -> RegisterReply:
        """Return the reply to a process that has joined: only the data that its role needs."""
        return RegisterReply(
            policy_version=policy_version,
            heartbeat_seconds=heartbeat_seconds,
            token=member.token,
            credentials={
                receiver: self.receivers[receiver].credential(member.role, member.index, number=member.number)
                for receiver, senders in MAY_SEND_TO.items()
                if member.role in senders
            },
            lineage=self.lineage,
            lineages=self._lineages if member.role == "rollout" else [],
            gserver_key=self._gserver_key if member.role == "rollout" else "",
        )

    def begin_lineage(self, lineages: list[Lineage]) -> None:
        """Begin another lineage, the last of the run's `lineages`."""
        self.lineage = secrets.token_hex(8)
        self._lineages = lineages

    def permit(self, seq: int, worker: str) -> str:
        """Return the permit that `worker` presents with the group `seq`, which it is given."""
        return self.receivers["model_worker"].permit(seq, worker)

    def caller(self, authorization: str) -> Member | str | None:
        """Return the caller that the header `authorization` identifies: a member, the `OWNER`, or None if unknown."""
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer":
            return None
        member = self._registry.with_token(token)
        if member is not None:
            return member
        return OWNER if hmac.compare_digest(token.encode(errors="replace"), self._shown) else None


def check_speaker(member: Member, message: msgspec.Struct) -> None:
    """Raise `PeerError` (403) if `message` names another sender than `member`, which sent it.

    A message names its sender in `worker`, the index of a rollout worker, or in `role` and `index`."""
    said = member.name
    if hasattr(message, "worker"):
        said = f"rollout/{message.worker}"
    elif hasattr(message, "role") and hasattr(message, "index"):
        said = f"{message.role}/{message.index}"
    if said != member.name:
        who = f"{member.name} (process {member.pid} on {member.host})"
        raise PeerError(f"{who} speaks in the name of {said}", status=403)
