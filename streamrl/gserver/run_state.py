"""Where the run stands as a whole: it joins, runs, and ends once, for one reason.

Beside it, what the manager's parts wake each other with: a signal for each thing that somebody may wait for.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Literal

from streamrl.gserver.line import Line
from streamrl.gserver.routing import Gserver
from streamrl.gserver.wakeup import Wakeup
from streamrl.transport.control.groups import Admission

log = logging.getLogger(__name__)

Ending = Literal["finished", "failed"]


@dataclass(frozen=True)
class Signals:
    """Each is notified when what it names has changed, and all when the run is over.

    Those who wait for room in the ledger or a place on a gserver stand in lines: there can be very many of them.
    """

    joined: Wakeup = field(default_factory=Wakeup)
    """A process has registered."""
    silences: Wakeup = field(default_factory=Wakeup)
    """A process has fallen silent, or is heard of again."""
    gservers: Wakeup = field(default_factory=Wakeup)
    """A gserver was heard of."""
    rejected: Wakeup = field(default_factory=Wakeup)
    """A prompt was given up."""
    data: Wakeup = field(default_factory=Wakeup)
    """The size of the data set is known."""
    evaluations: Wakeup = field(default_factory=Wakeup)
    """One is due, done, or free again."""
    told: Wakeup = field(default_factory=Wakeup)
    """One more knows that the run is over, or is gone."""
    deadlines: Wakeup = field(default_factory=Wakeup)
    """One may have moved closer."""
    admissions: Line[list[Admission]] = field(default_factory=Line)
    routes: Line[Gserver] = field(default_factory=Line)

    def place(self) -> None:
        """There may be a place: for running groups first."""
        self.routes.wake()
        self.admissions.wake()

    def over(self) -> None:
        for wakeup in (
            *(self.joined, self.silences, self.gservers, self.rejected, self.data),
            *(self.evaluations, self.told, self.deadlines),
        ):
            wakeup.notify()
        self.routes.close()
        self.admissions.close()


class RunState:
    """Where it stands; its end is signalled to everyone."""

    def __init__(self, signals: Signals) -> None:
        self.name: Literal["joining", "running", "finished", "failed"] = "joining"
        self.message = ""
        """Why it ended."""
        self._signals = signals

    @property
    def over(self) -> bool:
        return self.name in ("finished", "failed")

    def end(self, name: Ending, message: str) -> None:
        """The run is over; the first reason stands."""
        if self.over:
            return
        self.name = name
        self.message = message
        log.log(logging.ERROR if name == "failed" else logging.INFO, "the run is over (%s): %s", name, message)
        self._signals.over()
