"""Who takes part in the run: the processes that registered, and when each was last heard of.

Pure: times are passed in, in seconds on the caller's clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from streamrl.transport.control import Register, Role


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

    @property
    def name(self) -> str:
        return f"{self.role}/{self.index}"


class Registry:
    """Members by role and index; a process that takes a place replaces whoever held it."""

    def __init__(self, *, patience: Mapping[Role, float]) -> None:
        self._patience = patience
        self._members: dict[tuple[Role, int], Member] = {}

    def register(self, message: Register, *, now: float) -> tuple[Member, bool]:
        """Enter a process; answers its record and whether it is another process than before."""
        key = (message.role, message.index)
        known = self._members.get(key)
        if known and (known.pid, known.host, known.address) == (message.pid, message.host, message.address):
            return known, False
        member = Member(message.role, message.index, message.address, message.pid, message.host, now)
        self._members[key] = member
        return member, True

    def get(self, role: Role, index: int) -> Member | None:
        return self._members.get((role, index))

    def of(self, role: Role) -> list[Member]:
        """Members of `role`, by index."""
        return sorted((m for m in self._members.values() if m.role == role), key=lambda m: m.index)

    def everyone(self) -> list[Member]:
        """All members, by role and index."""
        return [self._members[key] for key in sorted(self._members)]

    def hear(self, member: Member, *, now: float) -> bool:
        """`member` said something; answers whether it had been silent."""
        member.heard = now
        was_silent, member.silent = member.silent, False
        return was_silent

    def leaves(self, member: Member) -> None:
        """`member` says that it ends; whoever takes its place is another."""
        member.silent = True

    def silence(self, *, now: float) -> list[Member]:
        """Mark those who said nothing for too long; answers the newly silent."""
        gone = [m for m in self._members.values() if not m.silent and now >= self._falls_silent(m)]
        for member in gone:
            member.silent = True
        return gone

    def next_silence(self) -> float | None:
        """When the next member falls silent unless it is heard."""
        return min((self._falls_silent(m) for m in self._members.values() if not m.silent), default=None)

    def untold(self) -> list[Member]:
        """Members who live and do not know yet that the run is over."""
        return [m for m in self._members.values() if not m.silent and not m.told]

    def _falls_silent(self, member: Member) -> float:
        return member.heard + self._patience[member.role]
