"""Where the run stands as a whole: it joins, runs, and ends once, for one reason."""

from __future__ import annotations

import logging
from typing import Literal

from streamrl.gserver.wakeup import Wakeup

log = logging.getLogger(__name__)

Ending = Literal["finished", "failed"]


class RunState:
    """Everyone who waits on `changed` is woken by the end."""

    def __init__(self, changed: Wakeup) -> None:
        self.name: Literal["joining", "running", "finished", "failed"] = "joining"
        self.message = ""
        """Why it ended."""
        self._changed = changed

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
        self._changed.notify()
