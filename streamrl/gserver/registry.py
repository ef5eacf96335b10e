"""Who takes part in the run: the processes that registered, when each was last heard of, and who is silent.

Pure: times are passed in, in seconds on the caller's clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import get_args

from streamrl.transport.control.members import Register, Role

TELL_LEASES = 2.0
"""Leases for which the address of a gserver that was replaced is told: every worker that lives has heard it by then."""


@dataclass(eq=False, slots=True)
class Member:
    """A registered process."""

    role: Role
    index: int
    address: str
    pid: int
    host: str
    heard: float
    """When it last said something."""
    stats: dict[str, float] = field(default_factory=dict)
    waiting_for: str = ""
    silent: bool = False
    gave_up: bool = False
    """It said that it ends; it stays silent, whatever it says until then."""
    told: bool = False
    """Whether it has been told that the run is over."""
    draining: bool = False
    """It is asked to leave while the run goes on."""
    leaves: bool = False
    """It is to be told so at its next heartbeat."""

    @property
    def name(self) -> str:
        return f"{self.role}/{self.index}"


class Registry:
    """Members by role and index; a process that takes a place replaces whoever held it."""

    def __init__(self, *, patience: Mapping[Role, float]) -> None:
        self._patience = patience
        self._lease = patience["rollout"]
        self._members: dict[Role, dict[int, Member]] = {role: {} for role in get_args(Role)}
        self._live: Counter[Role] = Counter()
        self._silent: dict[Member, None] = {}  # in the order in which they fell silent
        self._left_behind: dict[str, float] = {}
        self.changes_of_silence = 0
        """How often a member fell silent, or was heard of again."""

    def register(self, message: Register, *, now: float) -> tuple[Member, bool]:
        """Enter a process; answers its record and whether it is another process than before."""
        known = self.get(message.role, message.index)
        if known and (known.pid, known.host, known.address) == (message.pid, message.host, message.address):
            return known, False
        self.remove(message.role, message.index)
        if known is not None and known.role == "gserver":
            self._left_behind[known.address] = now
        self._left_behind.pop(message.address, None)
        member = Member(message.role, message.index, message.address, message.pid, message.host, now)
        self._members[message.role][message.index] = member
        self._live[message.role] += 1
        return member, True

    def remove(self, role: Role, index: int) -> None:
        """Nobody has this place any more."""
        member = self._members[role].pop(index, None)
        if member is not None:
            self._live[role] -= not member.silent
            if member in self._silent:
                del self._silent[member]
                self.changes_of_silence += 1

    def get(self, role: Role, index: int) -> Member | None:
        return self._members[role].get(index)

    def of(self, role: Role) -> list[Member]:
        """Members of `role`, by index."""
        members = self._members[role]
        return [members[index] for index in sorted(members)]

    def count(self, role: Role) -> int:
        """How many have registered as `role`, silent ones included."""
        return len(self._members[role])

    def live(self, role: Role) -> int:
        """How many of `role` are not silent."""
        return self._live[role]

    def everyone(self) -> list[Member]:
        """All members, by role and index."""
        return [member for role in sorted(self._members) for member in self.of(role)]

    def silent(self) -> list[Member]:
        """Who is silent now; does not look at the others."""
        return list(self._silent)

    def unanswering(self, *, now: float) -> list[str]:
        """Addresses of gservers from which no answer is to be expected: of those that are silent, and of those whose
        place another process took lately."""
        self._left_behind = {
            address: since for address, since in self._left_behind.items() if now - since < TELL_LEASES * self._lease
        }
        return [*self._left_behind, *(member.address for member in self._silent if member.role == "gserver")]

    def hear(self, member: Member, *, now: float) -> bool:
        """`member` said something; answers whether it had been silent. One that gave up stays so."""
        member.heard = now
        if not member.silent or member.gave_up:
            return False
        member.silent = False
        if self.get(member.role, member.index) is member:
            self._live[member.role] += 1
            self._silent.pop(member, None)
            self.changes_of_silence += 1
        return True

    def gave_up(self, member: Member) -> None:
        """`member` says that it ends; whoever takes its place is another."""
        member.gave_up = True
        self._fall_silent(member)

    def silence(self, *, now: float) -> list[Member]:
        """Mark those who said nothing for too long; answers the newly silent."""
        gone = [m for m in self._all() if not m.silent and now >= self._falls_silent(m)]
        for member in gone:
            self._fall_silent(member)
        return gone

    def excuse(self, seconds: float) -> None:
        """For so long nobody could be heard: it counts as nobody's silence."""
        for member in self._all():
            member.heard += seconds

    def next_silence(self) -> float | None:
        """When the next member falls silent unless it is heard."""
        return min((self._falls_silent(m) for m in self._all() if not m.silent), default=None)

    def untold(self) -> list[Member]:
        """Members who live and do not know yet that the run is over."""
        return [m for m in self._all() if not m.silent and not m.told]

    def _all(self) -> Iterator[Member]:
        for members in self._members.values():
            yield from members.values()

    def _fall_silent(self, member: Member) -> None:
        if not member.silent:
            member.silent = True
            self._live[member.role] -= 1
            self._silent[member] = None
            self.changes_of_silence += 1

    def _falls_silent(self, member: Member) -> float:
        return member.heard + self._patience[member.role]
