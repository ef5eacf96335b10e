"""Processes of a run that say that they serve new weights, and go on with the old ones. No checksum can see it.

Every process of the run calls these (`harness.calling`), and the command line tells whom it concerns.
"""

from __future__ import annotations

import sys
from typing import Any


def gserver_1_keeps_its_weights() -> None:
    """It makes new weights ready, says that it serves them, and goes on with those that it has."""
    if "gserver" not in sys.orig_argv or sys.orig_argv[sys.orig_argv.index("--index") + 1] != "1":
        return
    from streamrl.gserver.embedded.adapters import Adapters
    from streamrl.gserver.embedded.weights import DoubleBufferedWeights

    def swap(self: Any) -> Any:
        self.make_ready()
        return self.served

    DoubleBufferedWeights.swap = Adapters.swap = swap  # type: ignore[method-assign]
