"""Who takes part in the run: the processes that registered, and when each was last heard of.

Pure: times are passed in, in seconds on the caller's clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import get_args

from streamrl.transport.control.members import Register, Role


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
        self._members: dict[Role, dict[int, Member]] = {role: {} for role in get_args(Role)}
        self._live: Counter[Role] = Counter()

    def register(self, message: Register, *, now: float) -> tuple[Member, bool]:
        """Enter a process; answers its record and whether it is another process than before."""
        known = self.get(message.role, message.index)
        if known and (known.pid, known.host, known.address) == (message.pid, message.host, message.address):
            return known, False
        self.remove(message.role, message.index)
        member = Member(message.role, message.index, message.address, message.pid, message.host, now)
        self._members[message.role][message.index] = member
        self._live[message.role] += 1
        return member, True

    def remove(self, role: Role, index: int) -> None:
        """Nobody has this place any more."""
        member = self._members[role].pop(index, None)
        if member is not None:
            self._live[role] -= not member.silent

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

    def hear(self, member: Member, *, now: float) -> bool:
        """`member` said something; answers whether it had been silent."""
        member.heard = now
        if not member.silent:
            return False
        member.silent = False
        self._live[member.role] += self.get(member.role, member.index) is member
        return True

    def gave_up(self, member: Member) -> None:
        """`member` says that it ends; whoever takes its place is another."""
        self._live[member.role] -= not member.silent
        member.silent = True

    def silence(self, *, now: float) -> list[Member]:
        """Mark those who said nothing for too long; answers the newly silent."""
        gone = [m for m in self._all() if not m.silent and now >= self._falls_silent(m)]
        for member in gone:
            member.silent = True
            self._live[member.role] -= 1
        return gone

    def next_silence(self) -> float | None:
        """When the next member falls silent unless it is heard."""
        return min((self._falls_silent(m) for m in self._all() if not m.silent), default=None)

    def untold(self) -> list[Member]:
        """Members who live and do not know yet that the run is over."""
        return [m for m in self._all() if not m.silent and not m.told]

    def _all(self) -> Iterator[Member]:
        for members in self._members.values():
            yield from members.values()

    def _falls_silent(self, member: Member) -> float:
        return member.heard + self._patience[member.role]
